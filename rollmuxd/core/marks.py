"""What a fact may have made possible: the one place that says what has to be looked at after it.

``Context.fact`` marks it, and :mod:`~rollmuxd.core.reconcile` looks at what is marked until the state is at rest. So
no handler and no step has to remember what follows. A mark too many costs a look. A mark too few leaves a job waiting,
which the rest check of the simulator finds.

- a **group**: the turn of one of its jobs may have come;
- a **job**: its release, its grant or its departure may go further;
- a **node**: it may be empty, and jobs that leave it may go further;
- **room**: a job that waits may fit;
- **places**: jobs sit, or could sit, on other nodes than before. The search for better places begins again.

Every fact is looked up in :data:`MARKS` before it is applied: it may remove what it is about.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from rollmuxd.core import facts as f
from rollmuxd.core.ids import GroupId, HostId, JobId, NodeId
from rollmuxd.core.model import Job, JobStatus, Node, nodes_in
from rollmuxd.core.state import State


@dataclass(slots=True, eq=False)
class Dirty:
    """What has to be looked at. Dicts, not sets: the order of marks decides the order of facts."""

    groups: dict[GroupId, None] = field(default_factory=dict)
    jobs: dict[JobId, None] = field(default_factory=dict)
    nodes: dict[NodeId, None] = field(default_factory=dict)
    #: jobs that have begun to wait; the others were tried, and do not fit in the room that there was
    newcomers: dict[JobId, None] = field(default_factory=dict)
    room: bool = False
    #: waiting jobs are tried although nothing that is marked has made room
    again: bool = False
    places: bool = False
    #: hosts that are looked at now, if something on them is to come clean
    hosts: dict[HostId, None] = field(default_factory=dict)
    #: nodes that are observed again while something on them is to come clean
    watched: dict[NodeId, None] = field(default_factory=dict)
    #: nodes with fillers that may be lent, or are wanted back
    lend: dict[NodeId, None] = field(default_factory=dict)
    #: fillers that may find a node, or an emptier one
    fillers: dict[JobId, None] = field(default_factory=dict)
    #: any filler may
    homes: bool = False

    def __bool__(self) -> bool:
        """Whether a step has something to look at."""
        served = self.groups or self.jobs or self.nodes or self.room or self.again or self.newcomers
        return bool(served or self.lend or self.homes or self.fillers)

    def everything(self, state: State) -> None:
        """As after a start: what was forgotten before is found."""
        self.groups.update(dict.fromkeys(state.groups))
        self.jobs.update(dict.fromkeys(state.jobs))
        self.nodes.update(dict.fromkeys(state.nodes))
        self.lend.update(dict.fromkeys(state.nodes))
        self.homes = True
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


def mark_loans(dirty: Dirty, state: State, fact: f.Fact) -> None:
    """With fillers there, each fact changes when a node may be wanted: that of its node, and those of its job's group.

    One rule for all facts, in place of a row for each: a loan is begun, kept or ended by what is expected.
    """
    slot = state.slots.get(getattr(fact, "slot", None) or "")
    order = state.orders.get(getattr(fact, "order", ""))
    job = state.jobs.get(getattr(slot or order or fact, "job", ""))
    node = state.nodes.get(getattr(fact, "node", ""))
    about = [] if job is None else nodes_in(job.pins)
    about += [] if node is None else [node.id]
    for pinned in nodes_in(getattr(fact, "pins", {})):
        about += state.hosts[state.nodes[pinned].host].nodes  # it takes RAM there
    for group in (getattr(it, "group", None) for it in (fact, job, node)):
        if group in state.groups:
            about += state.groups[group].nodes
    if job is not None and job.spec.filler is not None:
        if isinstance(fact, _SEEKS):
            dirty.fillers[job.id] = None
        for name in about:  # what others wait for
            dirty.group(state.nodes[name].group)
    there = (name for name in about if state.nodes[name].fillers or state.nodes[name].loan is not None)
    dirty.lend.update(dict.fromkeys(there))
    dirty.homes = dirty.homes or isinstance(fact, _MAKES_ROOM)


#: after these a filler may find a node, or an emptier one
_SEEKS: Final = (f.JobResumed, f.PlacementEnded)
#: and after these all of them may
_MAKES_ROOM: Final = (f.NodeUp, f.NodeLeft, f.PlacementEnded)


Mark: TypeAlias = Callable[[Dirty, State, Any], None]


def _job_of(state: State, fact: Any) -> Job:
    """The job that a fact names, or whose slot, order or session it names."""
    name = getattr(fact, "job", None)
    if name is None and isinstance(fact, f.SlotFact):
        name = state.slots[fact.slot].job
    elif name is None:
        name = (state.orders[fact.order] if hasattr(fact, "order") else state.sessions[fact.session]).job
    return state.jobs[name]


def _node_of(state: State, fact: Any) -> Node:
    """The node that a fact names, or whose order it names."""
    return state.nodes[fact.node if hasattr(fact, "node") else state.orders[fact.order].node]


# ---- what may be marked ----------------------------------------------------------------------------------------------


def _job(dirty: Dirty, state: State, fact: Any) -> None:
    """The job, and its groups."""
    dirty.job(_job_of(state, fact))


def _its_nodes(dirty: Dirty, state: State, fact: Any) -> None:
    """The nodes that the job has."""
    dirty.nodes.update(dict.fromkeys(nodes_in(_job_of(state, fact).pins)))


def _its_hosts(dirty: Dirty, state: State, fact: Any) -> None:
    """Something on the nodes that the job has, had or is to have is to come clean now."""
    job, named = _job_of(state, fact), nodes_in(getattr(fact, "pins", {}))
    there = () if job.move is None else nodes_in(job.move.pins)
    for name in (*nodes_in(job.pins), *job.left, *there, *named):
        dirty.hosts[state.nodes[name].host] = None


def _its_hosts_if_it_leaves(dirty: Dirty, state: State, fact: Any) -> None:
    if not _job_of(state, fact).has_place:
        _its_hosts(dirty, state, fact)


def _node(dirty: Dirty, state: State, fact: Any) -> None:
    """The node, and its group."""
    node = _node_of(state, fact)
    dirty.nodes[node.id] = None
    dirty.group(node.group)


def _host(dirty: Dirty, state: State, fact: Any) -> None:
    """Something on the node is to come clean now."""
    dirty.hosts[_node_of(state, fact).host] = None


def _group(dirty: Dirty, state: State, fact: Any) -> None:
    dirty.groups[fact.group] = None


def _room(dirty: Dirty, state: State, fact: f.Fact) -> None:
    dirty.room = True


def _places(dirty: Dirty, state: State, fact: f.Fact) -> None:
    dirty.places = True


def _registered(dirty: Dirty, state: State, fact: f.JobRegistered) -> None:
    dirty.jobs[fact.job] = None
    if fact.spec.filler is not None:
        dirty.fillers[fact.job] = None
    elif fact.job not in state.jobs:
        dirty.newcomers[fact.job] = None
    else:
        dirty.job(state.jobs[fact.job])
        dirty.room = True


def _waits_again(dirty: Dirty, state: State, fact: f.JobResumed) -> None:
    if state.jobs[fact.job].resume_to is JobStatus.WAITING:
        dirty.newcomers[fact.job] = None


_JOB_AND_ROOM: Final = (_job, _room, _places)
_NODE_AND_ROOM: Final = (_node, _room, _places)

#: what is to be looked at after a fact; said before it is applied
MARKS: Final[Mapping[type[f.Fact], tuple[Mark, ...]]] = {
    **dict.fromkeys((f.SlotQueued, f.SlotWithdrawn, f.SlotReleased), (_job,)),
    **dict.fromkeys((f.SlotResized, f.SlotTakenAway), (_job, _its_hosts)),
    f.SlotOver: (_job, _its_nodes),
    f.OrderEnded: (_job, _node, _its_hosts_if_it_leaves),
    **dict.fromkeys((f.OrderContactLost, f.OrderFaulted), (_job, _node, _its_hosts_if_it_leaves, _host)),
    f.StateUnknown: (_job, _node, _host),
    f.StateObserved: (_job, _node, _room),
    f.ResidualMemoryObserved: (_room,),
    **dict.fromkeys((f.GpusVerifiedClean, f.LoanEnded), (_node,)),
    f.GpusNotClean: (_host,),
    f.NodeDraining: (*_NODE_AND_ROOM, _host),
    **dict.fromkeys((f.NodeUp, f.NodeOccupied, f.NodeLost, f.NodeQuarantined), _NODE_AND_ROOM),
    **dict.fromkeys((f.NodeDrained, f.NodeAdded, f.NodeRemoved, f.HostAdded), (_room, _places)),
    f.NodeLeft: (*_NODE_AND_ROOM, _job),
    f.GroupReplanned: (_group, _room, _places),
    f.TimesDrifted: (_room, _places),
    f.JobRegistered: (_registered,),
    f.JobPlaced: (_job, _group, _places, _its_hosts),
    **dict.fromkeys((f.JobPromised, f.GuardChanged, f.JobPaused, f.MoveAbandoned), _JOB_AND_ROOM),
    f.JobResumed: (_job, _places, _waits_again),
    **dict.fromkeys((f.JobUnplaced, f.JobQuarantined, f.JobLost, f.JobEnded), (*_JOB_AND_ROOM, _its_hosts)),
    **dict.fromkeys((f.PlacementEnded, f.MoveEnded), (*_JOB_AND_ROOM, _its_nodes, _its_hosts)),
    f.MovePlanned: (_job, _group, _places),
    f.MoveBegan: (_job, _places),
    **dict.fromkeys((f.SessionLost, f.SessionClosed), (_job, _its_hosts)),
    # they make nothing possible, or say only that something is to be seen, or come with facts that are marked
    **dict.fromkeys((f.DaemonStarted, f.LoopStalled, f.HostRemoved, f.HostBooted, f.NodeUnknown, f.NodeUndrained), ()),
    **dict.fromkeys((f.ProcessLaunched, f.ProcessStarted, f.ProcessOver, f.SessionOpened, f.Audited), ()),
    **dict.fromkeys((f.SlotClaimed, f.SlotGranted, f.SlotOverran, f.TurnAdded, f.TurnSkipped), ()),
    **dict.fromkeys((f.OrderIssued, f.FillerPlaced, f.YieldAsked), ()),
}
