"""What a fact may have made possible: the one place that says what has to be looked at after it.

``Context.fact`` marks it, and :mod:`~rollmuxd.core.reconcile` looks at what is marked until the state is at rest. So
no handler and no step has to remember what follows. A mark too many costs a look. A mark too few leaves a job waiting,
which the rest check of the simulator finds.

- a **group**: the turn of one of its jobs may have come;
- a **job**: its release, its grant or its departure may go further;
- a **node**: it may be empty, and jobs that leave it may go further;
- **room**: a job that waits may fit;
- **places**: jobs sit, or could sit, on other nodes than before. The search for better places begins again.

Every fact is looked up before it is applied: it may remove what it is about. Each is in :data:`MARKS` or in
:data:`NOTHING_FOLLOWS`.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from rollmuxd.core import facts as f
from rollmuxd.core.ids import GroupId, HostId, JobId, NodeId
from rollmuxd.core.model import Job, JobStatus, nodes_in
from rollmuxd.core.state import State


class Dirty:
    """What has to be looked at. Dicts, not sets: the order of marks decides the order of facts."""

    __slots__ = (
        *("again", "groups", "homeless", "homes", "hosts", "jobs", "lend", "newcomers"),
        *("nodes", "places", "room", "spread", "watched"),
    )

    def __init__(self) -> None:
        self.groups: dict[GroupId, None] = {}
        self.jobs: dict[JobId, None] = {}
        self.nodes: dict[NodeId, None] = {}
        #: jobs that have begun to wait; the others were tried, and do not fit in the room that there was
        self.newcomers: dict[JobId, None] = {}
        self.room = False
        #: waiting jobs are tried although nothing that is marked has made room
        self.again = False
        self.places = False
        #: hosts that are looked at now, if something on them is to come clean
        self.hosts: dict[HostId, None] = {}
        #: nodes that are observed again while something on them is to come clean
        self.watched: dict[NodeId, None] = {}
        #: nodes with fillers that may be lent, or are wanted back
        self.lend: dict[NodeId, None] = {}
        #: fillers without a node that one is searched for
        self.homeless: dict[JobId, None] = {}
        #: any filler without a node may find one; one that shares a node may have another
        self.homes = self.spread = False

    def __bool__(self) -> bool:
        """Whether a step has something to look at."""
        served = self.groups or self.jobs or self.nodes or self.room or self.again or self.newcomers
        return bool(served or self.lend or self.homes or self.homeless or self.spread)

    def everything(self, state: State) -> None:
        """As after a start: what was forgotten before is found."""
        self.groups.update(dict.fromkeys(state.groups))
        self.jobs.update(dict.fromkeys(state.jobs))
        self.nodes.update(dict.fromkeys(state.nodes))
        self.lend.update(dict.fromkeys(state.nodes))
        self.homes = self.spread = True
        self.room = bool(state.waiting)

    def group(self, name: GroupId | None) -> None:
        """The turn of one of its jobs may have come."""
        if name is not None:
            self.groups[name] = None

    def job(self, job: Job) -> None:
        """It may go further, and so may its groups: where it sits, and where it is to move."""
        self.jobs[job.id] = None
        if job.group is not None:
            self.groups[job.group] = None
        if job.move is not None:
            self.groups[job.move.group] = None
        if job.spec.filler is not None:
            self.lend.update(dict.fromkeys(nodes_in(job.pins)))

    def try_again(self) -> None:
        """Try the waiting jobs: those that the pass under way has left, else all of them."""
        self.again = True

    def hosts_of(self, state: State, job: Job) -> None:
        """Something on the nodes that a job has, or had, is to come clean."""
        for name in (*nodes_in(job.pins), *job.left):
            self.hosts[state.nodes[name].host] = None

    def spread_again(self) -> None:
        """Fillers that share a node may have another."""
        self.spread = True

    def watch(self, node: NodeId) -> None:
        """Something on it is to come clean."""
        self.watched[node] = None

    def nodes_of(self, job: Job) -> None:
        """The nodes that a job has may be empty."""
        self.nodes.update(dict.fromkeys(nodes_in(job.pins)))


def mark_loans(dirty: Dirty, state: State, fact: f.Fact) -> None:
    """With fillers there, each fact changes when a node may be wanted: that of its node, and those of its job's group.

    One rule for all facts, in place of a row for each: a loan is begun, kept or ended by what is expected.
    """
    about: list[NodeId] = []
    groups: list[GroupId | None] = [getattr(fact, "group", None)]
    order = state.orders.get(getattr(fact, "order", ""))
    slot = state.slots.get(getattr(fact, "slot", None) or "")
    job = state.jobs.get(getattr(fact, "job", "") or (slot.job if slot is not None else order.job if order else ""))
    if job is not None:
        groups.append(job.group)
        about += nodes_in(job.pins)
    node = state.nodes.get(node_of) if isinstance(node_of := getattr(fact, "node", None), str) else None
    if node is not None:
        about.append(node.id)
        groups.append(node.group)
    for pinned in nodes_in(getattr(fact, "pins", {})):
        about += state.hosts[state.nodes[pinned].host].nodes  # it takes RAM there
    for group in groups:
        if group in state.groups:
            about += state.groups[group].nodes
    if job is not None and job.spec.filler is not None:  # what others wait for
        for name in about:
            dirty.group(state.nodes[name].group)
    there = (name for name in about if state.nodes[name].fillers or state.nodes[name].loan is not None)
    dirty.lend.update(dict.fromkeys(there))
    its_own = isinstance(fact, f.SlotOver) and job is not None and job.spec.filler is not None
    dirty.homes = dirty.homes or its_own or isinstance(fact, _MAKES_A_HOME)
    dirty.spread = dirty.spread or isinstance(fact, _EMPTIER)


#: after these a filler without a node may find one
_MAKES_A_HOME: Final = (
    *(f.JobUnplaced, f.JobResumed, f.JobReinstated, f.PlacementEnded),
    *(f.NodeUp, f.NodeUndrained, f.NodeAdded, f.NodeLeft),
)

#: after these a node may have fewer fillers than another
_EMPTIER: Final = (f.NodeUp, f.NodeUndrained, f.PlacementEnded)


Mark: TypeAlias = Callable[[Dirty, State, Any], None]

# ---- slots -----------------------------------------------------------------------------------------------------------


def _slot_queued(dirty: Dirty, state: State, fact: f.SlotQueued) -> None:
    dirty.group(state.jobs[fact.job].group)


def _its_group(dirty: Dirty, state: State, fact: Any) -> None:
    dirty.group(state.jobs[state.slots[fact.slot].job].group)


def _its_job(dirty: Dirty, state: State, fact: Any) -> None:
    dirty.job(state.jobs[state.slots[fact.slot].job])


def _slot_shrunk(dirty: Dirty, state: State, fact: f.SlotShrunk) -> None:
    _its_group(dirty, state, fact)
    for node in nodes_in(state.jobs[state.slots[fact.slot].job].pins):
        dirty.watch(node)


def _slot_reclaiming(dirty: Dirty, state: State, fact: f.SlotReclaiming) -> None:
    dirty.hosts_of(state, state.jobs[state.slots[fact.slot].job])


def _slot_over(dirty: Dirty, state: State, fact: f.SlotOver) -> None:
    job = state.jobs[state.slots[fact.slot].job]
    dirty.job(job)
    dirty.nodes_of(job)


# ---- orders and states -----------------------------------------------------------------------------------------------


def _order(dirty: Dirty, state: State, fact: Any) -> None:
    order = state.orders[fact.order]
    job = state.jobs[order.job]
    dirty.job(job)
    dirty.nodes[order.node] = None
    if not job.has_place:
        dirty.hosts_of(state, job)


def _order_lost(dirty: Dirty, state: State, fact: f.OrderContactLost) -> None:
    _order(dirty, state, fact)
    dirty.watch(state.orders[fact.order].node)


def _order_faulted(dirty: Dirty, state: State, fact: f.OrderFaulted) -> None:
    _order(dirty, state, fact)
    dirty.hosts[state.nodes[state.orders[fact.order].node].host] = None


def _state(dirty: Dirty, state: State, fact: Any) -> None:
    dirty.job(state.jobs[fact.job])
    dirty.nodes[fact.node] = None


def _state_unknown(dirty: Dirty, state: State, fact: f.StateUnknown) -> None:
    _state(dirty, state, fact)
    dirty.hosts[state.nodes[fact.node].host] = None


def _state_observed(dirty: Dirty, state: State, fact: f.StateObserved) -> None:
    _state(dirty, state, fact)
    dirty.room = True


# ---- nodes -----------------------------------------------------------------------------------------------------------


def _node(dirty: Dirty, state: State, fact: Any) -> None:
    dirty.nodes[fact.node] = None
    dirty.group(state.nodes[fact.node].group)


def _not_clean(dirty: Dirty, state: State, fact: f.GpusNotClean) -> None:
    dirty.hosts[state.nodes[fact.node].host] = None


def _node_in_or_out(dirty: Dirty, state: State, fact: Any) -> None:
    _node(dirty, state, fact)
    dirty.room = dirty.places = True


def _node_draining(dirty: Dirty, state: State, fact: f.NodeDraining) -> None:
    _node_in_or_out(dirty, state, fact)
    dirty.watch(fact.node)


def _node_undrained(dirty: Dirty, state: State, fact: f.NodeUndrained) -> None:
    _node(dirty, state, fact)
    dirty.room = True


def _node_out(dirty: Dirty, state: State, fact: Any) -> None:
    """Turns for it are passed. Nothing comes clean there by that, so jobs that leave it are not looked at."""
    dirty.group(state.nodes[fact.node].group)
    dirty.room = dirty.places = True


def _room(dirty: Dirty, state: State, fact: f.Fact) -> None:
    dirty.room = dirty.places = True


def _room_only(dirty: Dirty, state: State, fact: f.Fact) -> None:
    dirty.room = True


# ---- jobs ------------------------------------------------------------------------------------------------------------


def _registered(dirty: Dirty, state: State, fact: f.JobRegistered) -> None:
    known = state.jobs.get(fact.job)
    dirty.jobs[fact.job] = None
    if fact.spec.filler is not None:
        dirty.homeless[fact.job] = None
    elif known is None:
        dirty.newcomers[fact.job] = None
    else:
        dirty.job(known)
        dirty.room = True


def _resumed(dirty: Dirty, state: State, fact: f.JobResumed) -> None:
    job = state.jobs[fact.job]
    dirty.job(job)
    dirty.places = True
    if job.resume_to is JobStatus.WAITING:
        dirty.newcomers[job.id] = None


def _placed(dirty: Dirty, state: State, fact: f.JobPlaced) -> None:
    dirty.jobs[fact.job] = None
    dirty.groups[fact.group] = None
    dirty.places = True
    dirty.hosts.update(dict.fromkeys(state.nodes[name].host for name in nodes_in(fact.pins)))


def _job_and_room(dirty: Dirty, state: State, fact: Any) -> None:
    dirty.job(state.jobs[fact.job])
    dirty.room = dirty.places = True


def _reinstated(dirty: Dirty, state: State, fact: f.JobReinstated) -> None:
    dirty.job(state.jobs[fact.job])
    dirty.room = True


def _job_leaves(dirty: Dirty, state: State, fact: Any) -> None:
    _job_and_room(dirty, state, fact)
    dirty.hosts_of(state, state.jobs[fact.job])


def _leaves_its_nodes(dirty: Dirty, state: State, fact: Any) -> None:
    _job_and_room(dirty, state, fact)
    job = state.jobs[fact.job]
    dirty.nodes_of(job)
    if job.move is not None:
        dirty.hosts.update(dict.fromkeys(state.nodes[name].host for name in nodes_in(job.move.pins)))


def _moves(dirty: Dirty, state: State, fact: Any) -> None:
    dirty.job(state.jobs[fact.job])
    dirty.places = True


def _move_planned(dirty: Dirty, state: State, fact: f.MovePlanned) -> None:
    _moves(dirty, state, fact)
    dirty.groups[fact.group] = None


def _node_left(dirty: Dirty, state: State, fact: f.NodeLeft) -> None:
    _node_in_or_out(dirty, state, fact)
    dirty.jobs[fact.job] = None


def _replanned(dirty: Dirty, state: State, fact: f.GroupReplanned) -> None:
    dirty.groups[fact.group] = None
    dirty.room = dirty.places = True


def _session(dirty: Dirty, state: State, fact: Any) -> None:
    job = state.jobs[state.sessions[fact.session].job]
    dirty.job(job)
    dirty.hosts_of(state, job)


def _table(*rows: tuple[Mark, tuple[type[f.Fact], ...]]) -> Mapping[type[f.Fact], Mark]:
    return {kind: mark for mark, kinds in rows for kind in kinds}


#: what is to be looked at after a fact; said before it is applied
MARKS: Final = _table(
    (_slot_queued, (f.SlotQueued,)),
    (_its_group, (f.SlotWithdrawn,)),
    (_slot_shrunk, (f.SlotShrunk,)),
    (_its_job, (f.SlotReleased, f.SlotRevoked)),
    (_slot_reclaiming, (f.SlotReclaiming,)),
    (_slot_over, (f.SlotOver,)),
    (_order, (f.OrderEnded,)),
    (_order_lost, (f.OrderContactLost,)),
    (_order_faulted, (f.OrderFaulted,)),
    (_state_unknown, (f.StateUnknown,)),
    (_state_observed, (f.StateObserved,)),
    (_room_only, (f.ResidualMemoryObserved,)),
    (_node, (f.GpusVerifiedClean, f.LoanEnded)),
    (_not_clean, (f.GpusNotClean,)),
    (_node_in_or_out, (f.NodeUp,)),
    (_node_draining, (f.NodeDraining,)),
    (_node_undrained, (f.NodeUndrained,)),
    (_node_out, (f.NodeOccupied, f.NodeLost, f.NodeQuarantined)),
    (_room, (f.NodeDrained, f.NodeAdded, f.NodeRemoved, f.HostAdded, f.HostEndObserved, f.TimesDrifted)),
    (_node_left, (f.NodeLeft,)),
    (_replanned, (f.GroupReplanned,)),
    (_registered, (f.JobRegistered,)),
    (_placed, (f.JobPlaced,)),
    (_resumed, (f.JobResumed,)),
    (_reinstated, (f.JobReinstated,)),
    (_job_and_room, (f.JobPromised, f.JobPaused)),
    (_job_leaves, (f.JobUnplaced, f.JobQuarantined, f.JobLost, f.JobEnded)),
    (_job_and_room, (f.JobGuarded, f.GuardEnded, f.MoveAbandoned)),
    (_leaves_its_nodes, (f.PlacementEnded, f.MoveEnded)),
    (_move_planned, (f.MovePlanned,)),
    (_moves, (f.MoveBegan,)),
    (_session, (f.SessionLost, f.SessionClosed)),
)

#: facts that make nothing possible, or say only that something is to be seen, or come with facts that are marked
NOTHING_FOLLOWS: Final = frozenset(
    (
        *(f.DaemonStarted, f.LoopStalled, f.HostRemoved, f.HostBooted, f.NodeUnknown, f.Audited),
        *(f.RelaunchPlanned, f.ProcessLaunched, f.ProcessStarted, f.ProcessOver, f.SessionOpened, f.SessionFenced),
        *(f.SlotClaimed, f.SlotGranted, f.SlotGrown, f.SlotOverran, f.TurnAdded, f.TurnSkipped),
        *(f.NextAnswered, f.OrderIssued, f.SlotRequeued, f.SlotFaulted, f.SlotLost),
        *(f.FillerPlaced, f.NodeLent, f.YieldAsked),
    )
)
