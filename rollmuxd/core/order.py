"""Whose turn it is on each node: the order within a group, derived from its schedule or from its line of requests.

A turn's place in time is ``(rotation, index)``: how often it was passed, and where it stands in the schedule. A node's
order is the schedule's projection on it, so its **head** is the turn on it with the least place. A turn is served when
it is the head of all its nodes. The group's least turn of all is the head of
every node that it claims. It is asked for (its nodes drain toward it), or its job is busy with an earlier phase (which
ends), or it may be skipped. Three rules of ``dispatch`` make that last one true. A job that asks for a later turn has
passed its own earlier ones. A request that no call attends, or whose node is out, is awaited no longer than a grace. A
job that could not start itself skips no other.

In a group that is dispatched as *ready* there is a line instead: the requests that wait, by when they came. By *credit*
they stand by how much their jobs are ahead of their bounds. A node's next is the first in the line that claims it, so
the first of all is next on all its nodes. By credit a request over several pools comes before all requests over one of
them, while all its nodes are free. It is short, and if it waited for one pool, the other would idle.
"""

from collections.abc import Container
from typing import Final

from msgspec import Struct

from rollmuxd.core.estimates import ahead_ms, solo_ms
from rollmuxd.core.ids import GroupId, JobId, Millis, NodeId, SlotId
from rollmuxd.core.model import Dispatch, Group, Job, JobStatus, Slot, SlotStatus
from rollmuxd.core.state import State

#: by credit, a job without a promise counts as if it were promised this: it yields, and does not starve
PROMISED_NOTHING: Final = 10.0
#: a job that has waited for so many of its iterations goes first
PATIENCE: Final = 3


class Projection(Struct):
    """A group's schedule, by node. Derived, and valid for one version of the group."""

    version: int
    #: per node, the schedule indices of the turns that claim it
    on: dict[NodeId, tuple[int, ...]]
    #: nodes of each (job, phase)
    nodes: dict[tuple[JobId, str], tuple[NodeId, ...]]
    #: each (job, phase) that claims all nodes of a phase of the job's cycle, and more
    spans: frozenset[tuple[JobId, str]]
    #: schedule indices of each (job, phase)
    turns: dict[tuple[JobId, str], tuple[int, ...]]


class Rotation:
    """Answers about the order within groups. It keeps projections, nothing else."""

    def __init__(self) -> None:
        self._known: dict[GroupId, Projection] = {}

    def projection(self, state: State, group: Group) -> Projection:
        known = self._known.get(group.id)
        if known is not None and known.version == group.version:
            return known
        made = _project(state, group)
        self._known[group.id] = made
        if len(self._known) > 2 * len(state.groups) + 16:  # groups that are gone
            self._known = {name: kept for name, kept in self._known.items() if name in state.groups}
        return made

    def turn_of(self, state: State, group: Group, job: JobId, phase: str) -> int | None:
        """The schedule index of the job's next turn for this phase."""
        indices = self.projection(state, group).turns.get((job, phase))
        if not indices:
            return None
        schedule = group.schedule
        return indices[0] if len(indices) == 1 else min(indices, key=lambda index: (schedule[index].rotation, index))

    def nodes_of(self, state: State, group: Group, job: JobId, phase: str) -> tuple[NodeId, ...]:
        """The nodes that a phase claims, all at once."""
        return self.projection(state, group).nodes.get((job, phase), ())

    def head(self, state: State, group: Group, node: NodeId) -> int | None:
        """The schedule index of the turn that is next on a node."""
        schedule = group.schedule
        head = None
        least = -1
        for index in self.projection(state, group).on.get(node, ()):
            rotation = schedule[index].rotation
            if head is None or rotation < least:  # indices ascend, so of equal rotations the first stays
                head, least = index, rotation
        return head

    def line(self, state: State, group: Group, absent: Container[SlotId], now: Millis) -> list[Slot]:
        """The requests that wait, the first comer first; by credit, the job that has least of it.

        Without those of ``absent``, of paused jobs, and for nodes that are out: no job waits for them.
        """
        nodes = self.projection(state, group).nodes
        waiting = []
        for name in group.jobs:
            job = state.jobs[name]
            if job.queued is None or job.slot is not None or job.queued in absent or job.status is JobStatus.PAUSED:
                continue
            slot = state.slots[job.queued]
            if state.are_up(nodes.get((name, slot.phase), ())):
                waiting.append(slot)
        waiting.sort(key=lambda slot: (slot.queued_at, len(slot.id), slot.id))
        if group.dispatch is Dispatch.CREDIT and len(waiting) > 1:

            def place(slot: Slot) -> tuple[tuple[bool, bool], bool, Millis]:
                rank = _standing(state.jobs[slot.job], slot, now)
                return rank[:2], not self.goes_at_once(state, group, slot.job, slot.phase), rank[2]

            waiting.sort(key=place)
        return waiting

    def goes_at_once(self, state: State, group: Group, job: JobId, phase: str) -> bool:
        """Whether a phase spans several pools, and no slot uses a GPU there."""
        projection = self.projection(state, group)
        if (job, phase) not in projection.spans:
            return False
        holders = (holder for name in projection.nodes[job, phase] for holder in state.nodes[name].holders)
        return all(state.slots[holder].status is SlotStatus.RELEASED for holder in holders)


def _standing(job: Job, slot: Slot, now: Millis) -> tuple[bool, bool, Millis]:
    """Where a job stands among those that wait: first those that waited very long, then guarded ones, then by credit.

    Two guarded jobs would starve a third otherwise. The iteration at hand counts, and before the first one the wait. So
    while two wait both lose alike, and their order stays.
    """
    slo = job.spec.slo if job.spec.slo is not None and job.promised else PROMISED_NOTHING
    before = now - slot.queued_at if job.progress.iteration_from is None else 0
    return now < patient_until(job, slot), not job.guarded, ahead_ms(job, slo, now) - before


def patient_until(job: Job, slot: Slot) -> Millis:
    """When a request has waited for so long that it goes before jobs with less credit."""
    return slot.queued_at + PATIENCE * (solo_ms(job) or 0)


def _project(state: State, group: Group) -> Projection:
    on: dict[NodeId, list[int]] = {}
    nodes: dict[tuple[JobId, str], tuple[NodeId, ...]] = {}
    turns: dict[tuple[JobId, str], list[int]] = {}
    for index, turn in enumerate(group.schedule):
        key = (turn.job, turn.phase)
        if key not in nodes:
            nodes[key] = state.phase_nodes(state.jobs[turn.job], turn.phase, group.id)
        turns.setdefault(key, []).append(index)
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
        turns={key: tuple(indices) for key, indices in turns.items()},
    )
