"""States that are only thought of: what would be if a job had ended. The given state stays as it is.

A policy may keep what it derives of a group under the group's version. A group that is changed here gets a version that
no real group has. So nothing that was derived of it is used for a real one.
"""

from collections.abc import Mapping
from itertools import count
from typing import Final, TypeVar

from msgspec.structs import replace

from rollmuxd.core.ids import GroupId, HostId
from rollmuxd.core.model import Group, Host, Job, JobStatus, nodes_in
from rollmuxd.core.state import State

K = TypeVar("K")
V = TypeVar("V")

#: versions of groups that are only thought of, each used once
trial_versions: Final = count(-1, -1)


def without(state: State, job: Job) -> State:
    """The state as it would be had the job ended, and were its GPUs clean; the given one stays as it is."""
    group = state.its_group(job)
    gone = set(nodes_in(job.pins))
    alone = {name for name in gone if state.nodes[name].pinned == [job.id]}
    gone.update(job.left)
    nodes = {
        name: replace(
            node,
            group=None if name in alone else node.group,
            pinned=[other for other in node.pinned if other != job.id],
            states=[key for key in node.states if key not in job.states],
        )
        if name in gone
        else node
        for name, node in state.nodes.items()
    }
    hosts: dict[HostId, Host] = dict(state.hosts)
    for kept in state.states_of(job):
        host = hosts[state.nodes[kept.node].host]
        hosts[host.id] = replace(host, reserved_mb=host.reserved_mb - kept.spec.ram_mb)
    left = [name for name in group.jobs if name != job.id]
    groups: dict[GroupId, Group] = _less(state.groups, group.id)
    if left:
        groups[group.id] = replace(
            group,
            jobs=left,
            nodes=[name for name in group.nodes if name not in alone],
            schedule=[turn for turn in group.schedule if turn.job != job.id],
            version=next(trial_versions),
        )
    ended = replace(job, status=JobStatus.ENDED, group=None, pins={}, states=[])
    return replace(
        state,
        nodes=nodes,
        hosts=hosts,
        groups=groups,
        jobs={**state.jobs, job.id: ended},
        states={key: kept for key, kept in state.states.items() if key not in job.states},
    )


def _less(of: Mapping[K, V], key: K) -> dict[K, V]:
    return {name: value for name, value in of.items() if name != key}
