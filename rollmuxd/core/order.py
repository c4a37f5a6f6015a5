"""Whose turn it is on each node: the order within a group, derived from its wheel or from its line of requests.

A visit's place in time is ``(turn, index)``: how often it was passed, and where it stands in the wheel. A node's
order is the wheel's projection on it, so its **head** is the visit on it with the least place. A visit is served when
it is the head of all its nodes. The group's least visit of all is the head of
every node that it claims. It is asked for (its nodes drain toward it), or its job is busy with an earlier phase
(which ends), or it may be skipped. Three rules of ``dispatch`` make that last one true: who asks for a later visit has
passed its own earlier ones; a request that nobody attends, or whose node is out, is awaited no longer than a grace;
and who cannot go himself skips nobody.

In a group that is dispatched as *ready* there is a line instead: the requests that wait, by when they came, or by
*credit*: by how much their jobs are ahead of their bounds. A node's
next is the first in the line that claims it, so the first of all is next on all its nodes. By credit a request over
several pools comes before every request over one of them, while all its nodes are free: it is short, and what waits for
one pool would make the other pool idle.
"""

from collections.abc import Container, Iterator
from itertools import product
from typing import Final

from msgspec import Struct

from rollmuxd.core.estimates import ahead_ms, solo_ms
from rollmuxd.core.ids import GroupId, JobId, Millis, NodeId, SlotId
from rollmuxd.core.model import Dispatch, Group, Job, JobStatus, NodeStatus, ScheduledTurn, Slot, SlotStatus
from rollmuxd.core.spec import PhaseSpec
from rollmuxd.core.state import State

#: where jobs go by credit, who is promised nothing counts as if it were promised this: it yields, and starves not
PROMISED_NOTHING: Final = 10.0
#: and who has waited for as long as so many of its iterations take goes before who has less credit
PATIENCE: Final = 3
#: slots that have ended, and whose GPUs only have to be parked or seen clear
ENDED: Final = (SlotStatus.RELEASED,)


class Projection(Struct):
    """A group's wheel, by node. Derived, and valid for one version of the group."""

    version: int
    #: per node, the wheel indices of the visits that claim it
    on: dict[NodeId, tuple[int, ...]]
    #: nodes of each (job, phase)
    nodes: dict[tuple[JobId, str], tuple[NodeId, ...]]
    #: each (job, phase) that claims all nodes of a phase of the job's cycle, and more
    spans: frozenset[tuple[JobId, str]]
    #: wheel indices of each (job, phase)
    visits: dict[tuple[JobId, str], tuple[int, ...]]


class Rotation:
    """Answers about the order within groups. It keeps projections, nothing else."""

    def __init__(self) -> None:
        self._known: dict[GroupId, Projection] = {}

    def projection(self, state: State, group: Group) -> Projection:
        """The group's wheel, by node."""
        known = self._known.get(group.id)
        if known is not None and known.version == group.version:
            return known
        made = _project(state, group)
        self._known[group.id] = made
        if len(self._known) > 2 * len(state.groups) + 16:  # groups that are gone
            self._known = {name: kept for name, kept in self._known.items() if name in state.groups}
        return made

    def turn_of(self, state: State, group: Group, job: JobId, phase: str) -> int | None:
        """The wheel index of the job's next visit for this phase."""
        indices = self.projection(state, group).visits.get((job, phase))
        if not indices:
            return None
        wheel = group.schedule
        return indices[0] if len(indices) == 1 else min(indices, key=lambda index: (wheel[index].turn, index))

    def nodes_of(self, state: State, group: Group, job: JobId, phase: str) -> tuple[NodeId, ...]:
        """The nodes that a phase claims, all at once."""
        return self.projection(state, group).nodes.get((job, phase), ())

    def head(self, state: State, group: Group, node: NodeId) -> int | None:
        """The wheel index of the visit that is next on a node."""
        wheel = group.schedule
        head = None
        least = -1
        for index in self.projection(state, group).on.get(node, ()):
            turn = wheel[index].turn
            if head is None or turn < least:  # indices ascend, so of equal turns the first stays
                head, least = index, turn
        return head

    def line(self, state: State, group: Group, node: NodeId, absent: Container[SlotId], now: Millis) -> list[Slot]:
        """The requests that wait for a node, the first comer first; by credit, the job that has least of it.

        Without those of ``absent``, of paused jobs, and for nodes that are out: nobody waits for them.
        """
        projection = self.projection(state, group)
        nodes = projection.nodes
        waiting = []
        for name in group.jobs:
            job = state.jobs[name]
            if job.queued is None or job.slot is not None or job.queued in absent or job.status is JobStatus.PAUSED:
                continue
            slot = state.slots[job.queued]
            claims = nodes.get((name, slot.phase), ())
            if node in claims and all(state.nodes[other].status is NodeStatus.UP for other in claims):
                waiting.append(slot)
        waiting.sort(key=lambda slot: (slot.queued_at, len(slot.id), slot.id))
        if group.dispatch is Dispatch.CREDIT:
            stands = {slot.id: _standing(state.jobs[slot.job], slot, now) for slot in waiting}
            at_once = {slot.id: self.goes_at_once(state, group, slot.job, slot.phase) for slot in waiting}
            waiting.sort(key=lambda slot: (stands[slot.id][:2], not at_once[slot.id], stands[slot.id]))
        return waiting

    def goes_at_once(self, state: State, group: Group, job: JobId, phase: str) -> bool:
        """Whether a phase spans several pools, and no slot uses a GPU there."""
        projection = self.projection(state, group)
        if (job, phase) not in projection.spans:
            return False
        holders = (gpu.holder for name in projection.nodes[job, phase] for gpu in state.nodes[name].gpus.values())
        return all(holder is None or state.slots[holder].status in ENDED for holder in holders)

    def before(self, state: State, group: Group, index: int) -> Iterator[ScheduledTurn]:
        """Visits that come before this one on any of its nodes, once each per turn that is due."""
        visit = group.schedule[index]
        mine = (visit.turn, index)
        projection = self.projection(state, group)
        seen: set[int] = set()
        for node in projection.nodes.get((visit.job, visit.phase), ()):
            for other in projection.on[node]:
                if state.jobs[group.schedule[other].job].group != group.id:
                    continue  # it is still to move here
                if other not in seen and (group.schedule[other].turn, other) < mine:
                    seen.add(other)
                    yield group.schedule[other]


def _standing(job: Job, slot: Slot, now: Millis) -> tuple[bool, bool, Millis]:
    """Where a job stands among those that wait: guarded first, then who has waited for very long, then by credit.

    The iteration at hand counts. While two wait both lose alike, so their order stays; and who has earned much does
    not wait until the others have as much.
    """
    slo = job.spec.slo if job.spec.slo is not None and job.promised else PROMISED_NOTHING
    return not job.guarded, now < patient_until(job, slot), ahead_ms(job, slo, now)


def patient_until(job: Job, slot: Slot) -> Millis:
    """When a request has waited for so long that it goes before jobs with less credit."""
    return slot.queued_at + PATIENCE * (solo_ms(job) or 0)


def overtakes_at(state: State, slots: list[Slot], now: Millis) -> Millis | None:
    """When one of these requests may go before another by credit, though nothing else happens; None: never.

    Its job has waited for very long then; or the other has not begun its first iteration, and loses no credit.
    """
    jobs = [state.jobs[slot.job] for slot in slots]
    times = [until for job, slot in zip(jobs, slots, strict=True) if now < (until := patient_until(job, slot))]
    begun = [job.progress.iteration_from is not None for job in jobs]
    if not all(begun) and any(begun):
        ranks = [_standing(job, slot, now) for job, slot in zip(jobs, slots, strict=True)]
        lose = [rank for rank, has in zip(ranks, begun, strict=True) if has]
        keep = [rank for rank, has in zip(ranks, begun, strict=True) if not has]
        for mine, theirs in product(lose, keep):
            if mine[:2] == theirs[:2] and mine[2] >= theirs[2]:
                times.append(now + max(1, mine[2] - theirs[2]))
    return min(times, default=None)


def find_phase(state: State, job: JobId, name: str) -> PhaseSpec | None:
    """The job's cycle or side phase of that name."""
    spec = state.jobs[job].spec
    for phase in spec.phases:
        if phase.name == name:
            return phase
    for phase in spec.side:
        if phase.name == name:
            return phase
    return None


def _project(state: State, group: Group) -> Projection:
    on: dict[NodeId, list[int]] = {}
    nodes: dict[tuple[JobId, str], tuple[NodeId, ...]] = {}
    visits: dict[tuple[JobId, str], list[int]] = {}
    for index, visit in enumerate(group.schedule):
        key = (visit.job, visit.phase)
        if key not in nodes:
            phase = find_phase(state, visit.job, visit.phase)
            nodes[key] = () if phase is None else state.phase_nodes(state.jobs[visit.job], phase, group.id)
        visits.setdefault(key, []).append(index)
        for node in nodes[key]:
            on.setdefault(node, []).append(index)
    spans = (
        (job, name)
        for (job, name), claims in nodes.items()
        if any(set(nodes.get((job, phase.name), claims)) < set(claims) for phase in state.jobs[job].spec.phases)
    )
    return Projection(
        version=group.version,
        on={node: tuple(indices) for node, indices in on.items()},
        nodes=nodes,
        spans=frozenset(spans),
        visits={key: tuple(indices) for key, indices in visits.items()},
    )
