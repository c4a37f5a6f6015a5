"""Whose turn it is on each node: the order within a group, derived from its schedule.

A turn's place in time is ``(rotation, index)``: how often it was passed, and where it stands in the schedule. A node's
order is the schedule's projection on it, so its **head** is the turn on it with the least place. A turn is served when
it is the head of all its nodes. The group's least turn of all is the head of every node that it claims. It is asked for
(its nodes drain toward it), or its job is busy with an earlier phase (which ends), or it may be skipped. Three rules of
``dispatch`` make that last one true. A job that asks for a later turn has passed its own earlier ones. A request that
no call attends, or whose node is out, is awaited no longer than a grace. A job that could not start itself skips no
other.
"""

from typing import Final

from msgspec import Struct

from rollmuxd.core.ids import GroupId, JobId, NodeId
from rollmuxd.core.model import Group, SlotStatus
from rollmuxd.core.state import State

#: by credit, a job without a promise counts as if it were promised this: it yields, and does not starve
PROMISED_NOTHING: Final = 10.0


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

    def goes_at_once(self, state: State, group: Group, job: JobId, phase: str) -> bool:
        """Whether a phase spans several pools, and no slot uses a GPU there."""
        projection = self.projection(state, group)
        if (job, phase) not in projection.spans:
            return False
        holders = (holder for name in projection.nodes[job, phase] for holder in state.nodes[name].holders)
        return all(state.slots[holder].status is SlotStatus.RELEASED for holder in holders)


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
