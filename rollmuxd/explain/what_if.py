"""What would let a waiting job in: each change is tried on a copy of what matters of the state, by the policy itself.

So a what-if is no guess, and it holds for any policy: with it, :meth:`~rollmuxd.core.policy.Policy.place` finds a place
now. Nothing is written. A policy may keep what it derives of a group under the group's version. A group that is changed
here gets a version that no real group has, so no trial is taken for the truth later.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import Final, TypeVar

from msgspec.structs import replace

from rollmuxd.core.decision import Reason
from rollmuxd.core.ids import GroupId, HostId, NodeId, PoolName
from rollmuxd.core.model import Gpu, Group, Host, Job, JobStatus, Node, NodeStatus, nodes_in
from rollmuxd.core.policy import Placed, Policy, trial_versions
from rollmuxd.core.state import State

K = TypeVar("K")
V = TypeVar("V")

#: placements that are tried for one job, at most: each takes a millisecond or so, and a user waits for the answer
TRIES: Final = 120
#: the loosest SLO that is thought of, in hundredths
_LOOSEST: Final = 3200
#: more nodes of one pool that are thought of, at most
_MORE_NODES: Final = 8
#: placed jobs whose end is thought of, and that are named, at most
_LEAVERS, _NAMED = 32, 5


class WhatIf:
    """What would let one waiting job in."""

    def __init__(self, policy: Policy, state: State, job: Job) -> None:
        self._policy, self._state, self._job = policy, state, job
        self._left = TRIES

    def all(self) -> tuple[Reason, ...]:
        """What would let it in, by itself: a looser SLO, more nodes, less RAM, the end of another job. Perhaps none."""
        found = (self._looser(), *self._more_nodes(), self._less_ram(), self._departures())
        return tuple(what_if for what_if in found if what_if is not None)

    def _fits(self, state: State | None = None, job: Job | None = None) -> bool:
        if self._left <= 0:
            return False
        self._left -= 1
        placed: Placed | None = self._policy.place(state or self._state, job or self._job)
        return placed is not None

    # ---- a looser bound ----------------------------------------------------------------------------------------------

    def _with_slo(self, slo: float | None) -> Job:
        return replace(self._job, spec=replace(self._job.spec, slo=slo))

    def _looser(self) -> Reason | None:
        """The tightest SLO, to a hundredth, with which it would start; or that it would without any."""
        slo = self._job.spec.slo
        if slo is None:
            return None
        low = round(slo * 100)
        high = low
        while high < _LOOSEST:
            high = min(_LOOSEST, max(high + 10, high * 5 // 4))
            if self._fits(job=self._with_slo(high / 100)):
                break
            low = high
        else:
            if self._fits(job=self._with_slo(None)):
                return Reason("slo", "no SLO (best effort)", {"slo": None, "was": slo})
            return None
        loose = bisect_left(range(high), True, low + 1, key=lambda it: self._fits(job=self._with_slo(it / 100))) / 100
        return Reason("slo", f"slo={loose:g} ({loose - slo:.2f} looser)", {"slo": loose, "was": slo})

    # ---- more nodes --------------------------------------------------------------------------------------------------

    def _more_nodes(self) -> Iterator[Reason | None]:
        """The fewest more free nodes of one pool that would do; if no one pool's do, of all that it wants."""
        wants = self._job.spec.wants
        if any(want.named for want in wants):
            return
        found = False
        for want in wants:
            for more in range(1, _MORE_NODES + 1):
                grown = self._grown({want.pool: more})
                if grown is not None and self._fits(grown):
                    found = True
                    yield _more_nodes({want.pool: more})
                    break
        if found or len(wants) == 1:
            return
        most = {want.pool: self._nodes_for(want.pool, max(want.nodes, 1), want.gpus) for want in wants}
        grown = self._grown(most)
        if grown is not None and self._fits(grown):
            yield _more_nodes(most)

    def _nodes_for(self, pool: PoolName, nodes: int, gpus: int) -> int:
        like = self._like(pool)
        return nodes if like is None or not gpus else -(-gpus // max(1, len(like.gpus)))

    def _like(self, pool: PoolName) -> Node | None:
        return next((node for node in self._state.nodes.values() if pool in node.pools), None)

    def _grown(self, more: Mapping[PoolName, int]) -> State | None:
        """The state with so many more free nodes like the pools' first ones, each on a host of its own."""
        state = self._state
        hosts: dict[HostId, Host] = dict(state.hosts)
        nodes: dict[NodeId, Node] = dict(state.nodes)
        for pool, number in more.items():
            like = self._like(pool)
            if like is None:
                return None
            host = state.hosts[like.host]
            for index in range(number):
                name = f"more-{pool}-{index}"
                node = f"{name}/gpu0-{len(like.gpus) - 1}"
                gpus = {f"{name}/gpu{gpu}": Gpu() for gpu in range(len(like.gpus))}
                hosts[name] = Host(id=name, backend=host.backend, ram_mb=host.ram_mb, nodes=[node])
                nodes[node] = Node(
                    id=node,
                    host=name,
                    gpus=gpus,
                    pools=like.pools,
                    gpu_type=like.gpu_type,
                    gpu_mb=like.gpu_mb,
                    price_per_gpu_hour=like.price_per_gpu_hour,
                    status=NodeStatus.UP,
                )
        return replace(state, hosts=hosts, nodes=nodes)

    # ---- less RAM ----------------------------------------------------------------------------------------------------

    def _with_ram(self, permille: int) -> Job:
        states = tuple(replace(kept, ram_mb=kept.ram_mb * permille // 1000) for kept in self._job.spec.states)
        return replace(self._job, spec=replace(self._job.spec, states=states))

    def _less_ram(self) -> Reason | None:
        """The largest part of its RAM with which it would start."""
        states = [kept for kept in self._job.spec.states if kept.ram_mb]
        if not states or not self._fits(job=self._with_ram(0)):
            return None
        part = 1000 - bisect_left(range(1000), True, 1, key=lambda less: self._fits(job=self._with_ram(1000 - less)))
        fewer = {kept.pool: kept.ram_mb * part // 1000 for kept in states}
        said = ", ".join(
            f"{fewer[kept.pool] / 1000:.1f} GB of RAM a node for its {kept.pool} state, instead of "
            f"{kept.ram_mb / 1000:.1f}"
            for kept in states
        )
        return Reason("ram", f"at most {said}", {"ram_gb": {pool: mb / 1000 for pool, mb in fewer.items()}})

    # ---- others' departure -------------------------------------------------------------------------------------------

    def _departures(self) -> Reason | None:
        """The placed jobs of which any one's end would do."""
        placed = [job for job in self._state.jobs.values() if job.group is not None and job.pins and job.move is None]
        # The job placed last is the likeliest to be in the way, and leaving the fewest others as they are.
        leavers = []
        for job in sorted(placed, key=lambda job: -(job.placed_at or 0))[:_LEAVERS]:
            if self._fits(without(self._state, job)):
                leavers.append(job)
            if len(leavers) == _NAMED:
                break
        if not leavers:
            return None
        names = [job.spec.name for job in leavers]
        return Reason("departure", " or ".join(names), {"jobs": [job.id for job in leavers]})


def _more_nodes(more: Mapping[PoolName, int]) -> Reason:
    said = " and ".join(f"{number} more free {pool} node{'' if number == 1 else 's'}" for pool, number in more.items())
    return Reason("nodes", said, {"nodes": dict(more)})


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
    groups: dict[GroupId, Group] = {name: it for name, it in state.groups.items() if name != group.id}
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
