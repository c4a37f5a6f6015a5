"""Jobs on a node that is drained are moved away, if they may be moved and there is room.

An operator's wish is no policy's economy: it holds under every policy, also where no jobs are moved to save money
(``moves = auto`` on one host). Every other limit on moves holds, and so does every promise.

The job stays in its group if other nodes can replace the drained ones, one for one. They are free, or the group's own,
and the group's plan must keep every promise there. Else it goes where it would be placed if it came now. It goes at its
next iteration boundary. A job that waits for a drained node within an iteration goes at once, for it gets no further
where it is. For a job that stays, :func:`way_out` says why, and it is tried again once a minute.
"""

from collections.abc import Iterator
from typing import Final

from msgspec.structs import replace

from rollmuxd.core.causes import Cause
from rollmuxd.core.config import Moves
from rollmuxd.core.context import Context
from rollmuxd.core.feasible import short_of_memory
from rollmuxd.core.ids import JobId, NodeId, PoolName
from rollmuxd.core.model import Group, Job, JobStatus, Node, NodeStatus, PlannedTurn, nodes_in
from rollmuxd.core.policy import Move, Placed, trial_versions
from rollmuxd.core.spec import Movable
from rollmuxd.core.steps.locality import limited_to_locality, place_elsewhere
from rollmuxd.core.steps.move import again_at, plan, refused

#: wait so long for further drains before any job is moved: a host's nodes are drained one after the other
SETTLE_MS: Final = 1_000
#: ways to put other nodes in the place of those that are drained: so many are tried
TRIED: Final = 32
#: a job that stays is tried again after so long: earned credit, for example, may let it go, and is no fact
AGAIN_MS: Final = 60_000


def look_again(c: Context, _: str) -> None:
    """At a deadline: move every job away from drained nodes that can be moved now."""
    for name in to_leave(c):
        job = c.state.jobs[name]
        if job.move is not None or len(c.state.moving) >= c.config.max_concurrent_moves:
            continue
        found = way_out(c, job)
        if isinstance(found, Move):
            plan(c, found)
        elif job.spec.movable is not Movable.NO and c.config.moves is not Moves.OFF:
            c.timers.at(again_at(c, job) if c.now < again_at(c, job) else c.now + AGAIN_MS, "leave", "")


def drained(c: Context, job: Job) -> tuple[NodeId, ...]:
    """The job's nodes that are to be empty."""
    names = nodes_in(job.pins)
    return tuple(name for name in names if c.state.nodes[name].drain)


def way_out(c: Context, job: Job) -> Move | str:
    """Where a job on drained nodes could go now; or why it cannot."""
    if job.spec.movable is Movable.NO:
        return "it is not to be moved (movable = no)"
    if c.config.moves is Moves.OFF:
        return "no job is moved here (moves = off)"
    if job.status is not JobStatus.ADMITTED:
        return f"it is {job.status}"
    if c.now < again_at(c, job):
        return f"it was moved {(c.now - (job.moved_at or 0)) // 1000} s ago, and is not moved again so soon"
    off = drained(c, job)
    said = "no other nodes would have it with every promise kept"
    why = Cause("nodes_drained" if len(off) > 1 else "node_drained", {"nodes": off})
    for placed in _places(c, job, off):
        move = Move(job.id, placed, why, off=off)
        no = refused(c, move)
        if not no:
            return move
        said = no
    return said


def to_leave(c: Context) -> list[JobId]:
    """The jobs on nodes that are drained."""
    return list(dict.fromkeys(job for node in c.state.nodes.values() if node.drain for job in node.pinned))


def _places(c: Context, job: Job, off: tuple[NodeId, ...]) -> Iterator[Placed]:
    """With its group on other nodes; then wherever it would be placed now."""
    group = c.state.its_group(job)
    choices = {name: _in_place_of(c, job, c.state.nodes[name]) for name in off}
    choices = dict(sorted(choices.items(), key=lambda item: len(item[1])))  # or others would take its only one
    for first in range(min(TRIED, max(map(len, choices.values())))):
        instead: dict[NodeId, NodeId] = {}
        for name, like in choices.items():
            left = [it for it in (*like[first:], *like[:first]) if it not in instead.values()]
            if left:
                instead[name] = left[0]
        placed = _with_its_group(c, job, group, instead) if len(instead) == len(choices) else None
        if placed is not None:
            yield placed
    elsewhere = place_elsewhere(c, job)
    if elsewhere is not None and elsewhere.status is JobStatus.ADMITTED and elsewhere.promised >= job.promised:
        yield elsewhere


def _in_place_of(c: Context, job: Job, node: Node) -> list[NodeId]:
    """Nodes like this one that could take its place: free ones, the cheapest first, then the group's own."""
    pools = {pool for pool, names in job.pins.items() if node.id in names}
    if any(node.id in want.named for want in job.spec.wants):
        return []
    taken = set(nodes_in(job.pins))
    like = [
        other
        for other in limited_to_locality(c, job, c.state).nodes.values()
        if other.id not in taken
        and other.status is NodeStatus.UP
        and not other.drain
        and other.group in (None, job.group)
        and pools <= set(other.pools)
        and (len(other.gpus), other.gpu_type) == (len(node.gpus), node.gpu_type)
        and not any(c.state.jobs[name].guarded for name in other.pinned)  # a guarded job has its nodes to itself
    ]
    like.sort(key=lambda other: (other.group is not None, other.price_per_gpu_hour))
    return [other.id for other in like]


def _with_its_group(c: Context, job: Job, group: Group, instead: dict[NodeId, NodeId]) -> Placed | None:
    """The job on those nodes, in the schedule as it is; None: a promise, or the memory, has no room for that.

    A promise that is at risk where the job sits is no reason for it to stay there.
    """
    pins = {pool: tuple(instead.get(name, name) for name in names) for pool, names in job.pins.items()}
    new: dict[PoolName, tuple[NodeId, ...]] = {
        pool: tuple(name for name in names if name in instead.values()) for pool, names in pins.items()
    }
    if short_of_memory(c.state, job, new) is not None:
        return None
    there = replace(
        c.state,
        jobs={**c.state.jobs, job.id: replace(job, pins=pins)},
        groups={**c.state.groups, group.id: replace(group, version=next(trial_versions))},
    )
    found = c.policy.replan(there, group.id)
    if found.schedule or set(found.at_risk) - c.state.at_risk.keys():
        return None
    kept = (it for it in group.schedule if it.job != job.id or not it.once)
    schedule = tuple(PlannedTurn(it.job, it.phase, it.once) for it in kept)
    free = (c.state.nodes[name] for name in instead.values() if c.state.nodes[name].group is None)
    price = sum(len(node.gpus) * node.price_per_gpu_hour for node in free)
    admitted = JobStatus.ADMITTED
    return Placed(
        group.id, pins, schedule, job.admission, admitted, job.promised, found.period_ms, price, group.dispatch
    )
