"""What has happened: the one thing that changes the state, and the one thing the journal keeps.

A fact is past tense and holds every number that was decided, so that replaying it needs no policy and no clock.
The journal of last year must still decode: give new fields a default, never rename a class, never reuse a name.
"""

from typing import Any, Final, Union

import msgspec
from msgspec import Struct

from rollmuxd.core.causes import Cause
from rollmuxd.core.ids import (
    Fence,
    GpuId,
    GroupId,
    HostId,
    JobId,
    LaunchId,
    Millis,
    NodeId,
    OrderId,
    PoolName,
    SessionId,
    SlotId,
)
from rollmuxd.core.model import Dispatch, HostSpec, JobStatus, NodeSpec, OrderKind, PlannedTurn, SlotStatus, StateStatus
from rollmuxd.core.spec import JobSpec


class Fact(Struct, frozen=True, omit_defaults=True, tag_field="fact"):
    """Something that happened at a time."""

    at: Millis


class NodeFact(Fact, frozen=True):
    """Something happened to a node."""

    node: NodeId


class JobFact(Fact, frozen=True):
    """Something happened to a job."""

    job: JobId


class StateFact(JobFact, frozen=True):
    """Something happened to a job's state on a node."""

    pool: PoolName
    node: NodeId


class SlotFact(Fact, frozen=True):
    """Something happened to a slot."""

    slot: SlotId


# ---- the daemon and what it reaches ---------------------------------------------------------------------------------


class DaemonStarted(Fact, frozen=True, tag="daemon_started"):
    """Every lease is renewed in full, every node is unknown until it was seen."""

    #: every start has a greater one
    incarnation: int
    #: of every kind, so many ids are left out: they may have been given to things that this journal does not know
    ids_skipped: int = 0
    #: the daemon before this one was killed, or crashed: it did not stop in order
    crashed: bool = False
    #: why the journal does not say what jobs did last, so that all runs are lost; None: it does
    lost: Cause | None = None
    #: how long there was no daemon, so that no queued job could get its turn
    away_ms: Millis = 0


class LoopStalled(Fact, frozen=True, tag="loop_stalled"):
    """The loop was late by more than a quarter lease; every lease is renewed in full."""

    late_ms: int


class HostAdded(Fact, frozen=True, tag="host_added"):
    """A host came into the configuration, or changed there; or when it goes away by itself has changed."""

    host: HostSpec


class HostRemoved(Fact, frozen=True, tag="host_removed"):
    """A host left the configuration."""

    host: HostId


class HostBooted(Fact, frozen=True, tag="host_booted"):
    """The host's boot id is another than before: nothing of before is left on its GPUs."""

    host: HostId
    boot_id: str


class NodeAdded(Fact, frozen=True, tag="node_added"):
    """A node came into the configuration, or changed there while no job used it."""

    node: NodeSpec


class NodeRemoved(NodeFact, frozen=True, tag="node_removed"):
    """A node left the configuration while no job used it."""


class NodeUp(NodeFact, frozen=True, tag="node_up"):
    """Seen, and free of strangers."""


class NodeOccupied(NodeFact, frozen=True, tag="node_occupied"):
    """A process of no job uses its GPUs. Not an error: it comes back by itself when clean."""

    reason: Cause


class NodeUnknown(NodeFact, frozen=True, tag="node_unknown"):
    """What is on the node has to be observed again."""


class NodeLost(NodeFact, frozen=True, tag="node_lost"):
    """Its host cannot be reached."""

    reason: Cause


class NodeQuarantined(NodeFact, frozen=True, tag="node_quarantined"):
    """It does not become clean. The way out: it is verified clean after all, or an operator declares it."""

    reason: Cause


class NodeDraining(NodeFact, frozen=True, tag="node_draining"):
    """Nothing new is started on it."""

    by: str
    #: the configuration does not have the node: it is undrained at the start that has it again
    unconfigured: bool = False


class NodeDrained(NodeFact, frozen=True, tag="node_drained"):
    """Its slots have ended and its GPUs are clean."""


class NodeUndrained(NodeFact, frozen=True, tag="node_undrained"):
    """It may be used again."""

    by: str


class GpusVerifiedClean(NodeFact, frozen=True, tag="gpus_verified_clean"):
    """A backend has verified these GPUs clean (or an operator declared it): they may be given on."""

    gpus: tuple[GpuId, ...]
    by: str = ""
    reason: Cause | None = None


class GpusNotClean(NodeFact, frozen=True, tag="gpus_not_clean"):
    """GPUs that should be clean are not; from now on the time is taken until the node is quarantined."""

    reason: Cause
    gpus: tuple[GpuId, ...] = ()


# ---- jobs and sessions ---------------------------------------------------------------------------------------------


class JobRegistered(JobFact, frozen=True, tag="job_registered"):
    """A job, or a new run of it, waits for a placement."""

    owner: str
    user: str
    run: int
    spec: JobSpec
    idempotency_key: str = ""
    #: it is a lost run's successor, started again for the so-manieth time
    relaunch: int = 0


class JobPlaced(JobFact, frozen=True, tag="job_placed"):
    """The job has its nodes and its turns. ``schedule`` is the whole group's, in order."""

    group: GroupId
    pins: dict[PoolName, tuple[NodeId, ...]]
    schedule: tuple[PlannedTurn, ...]
    status: JobStatus
    admission: str
    promised: bool = False
    period_ms: Millis | None = None
    cost_per_hour: float = 0.0
    dispatch: Dispatch = Dispatch.SCHEDULE


class JobPromised(JobFact, frozen=True, tag="job_promised"):
    """A probed job has been measured; from now on its SLO is kept, or it is best effort."""

    promised: bool
    period_ms: Millis | None = None


class TimesDrifted(JobFact, frozen=True, tag="times_drifted"):
    """A job's phases, or its loads and parks, take another time than plans reckoned with: now they reckon with this."""

    times: dict[str, Millis]
    #: what they reckoned with till now (none: the job states no time), and of how many observations the new times are
    was: dict[str, Millis] = {}
    samples: dict[str, int] = {}
    #: the means of the same observations, where plans reckon with more than that
    means: dict[str, Millis] = {}
    #: by pool, what loading and parking the job's states there was seen to take
    moves: dict[PoolName, Millis] = {}


class GroupReplanned(Fact, frozen=True, tag="group_replanned"):
    """A group is planned again with the times that are known now; each job stays on its nodes."""

    group: GroupId
    #: the member whose phases take another time, or whose promise is at risk, or was
    job: JobId
    period_ms: Millis | None = None
    #: the whole schedule, in order; none: it stays as it is
    schedule: tuple[PlannedTurn, ...] = ()
    #: members for whose promises the plan has no room
    at_risk: tuple[JobId, ...] = ()
    why: Cause | None = None


class PlacementEnded(JobFact, frozen=True, tag="placement_ended"):
    """Nothing of the job is left on its nodes; those that no job uses leave the group."""

    reason: Cause


class JobUnplaced(JobFact, frozen=True, tag="job_unplaced"):
    """The job must wait for another placement."""

    reason: Cause


class MovePlanned(JobFact, frozen=True, tag="move_planned"):
    """A placed job is to move. Its nodes, RAM and turns there are its own from now on; it still runs where it is.

    ``schedule`` is the whole target group's, in order.
    """

    group: GroupId
    pins: dict[PoolName, tuple[NodeId, ...]]
    schedule: tuple[PlannedTurn, ...]
    why: Cause
    admission: str
    promised: bool = False
    period_ms: Millis | None = None
    cost_per_hour: float = 0.0
    dispatch: Dispatch = Dispatch.SCHEDULE
    #: the nodes that it leaves because they are drained; none: it is moved for another reason
    off: tuple[NodeId, ...] = ()


class MoveBegan(JobFact, frozen=True, tag="move_began"):
    """The job is between two iterations: from now on it is granted nothing, and its states are parked."""


class MoveEnded(JobFact, frozen=True, tag="move_ended"):
    """The job sits on its new nodes. What is parked on the old ones stays until it was loaded on the new ones."""

    #: a job that is started again there is another run, with a key of its own
    run: int = 0
    idempotency_key: str = ""


class MoveAbandoned(JobFact, frozen=True, tag="move_abandoned"):
    """The job stays where it is."""

    reason: Cause


class NodeLeft(JobFact, frozen=True, tag="node_left"):
    """Nothing of the job is left on a node that it moved away from: its RAM there is given back."""

    node: NodeId


class GuardChanged(JobFact, frozen=True, tag="guard_changed"):
    """Whether the job is short of credit. If so it goes first, or to nodes of its own, until it has earned some."""

    guarded: bool
    #: by how much it is ahead of its bound
    credit_ms: Millis
    #: why a guard ended, if the job has earned none
    reason: Cause | None = None


class JobPaused(JobFact, frozen=True, tag="job_paused"):
    """It gets no new slot until it is resumed."""

    by: str


class JobResumed(JobFact, frozen=True, tag="job_resumed"):
    """A paused job stays where it was; a quarantined one waits for a placement again."""

    by: str


class JobQuarantined(JobFact, frozen=True, tag="job_quarantined"):
    """Its state could not be moved. The way out: an operator or its owner reinstates it."""

    reason: Cause


class JobLost(JobFact, frozen=True, tag="job_lost"):
    """Its session is lost. Its states are unknown until they were seen."""

    reason: Cause
    #: when it is started again, and for the how-manieth time; null: it is not
    relaunch_at: Millis | None = None
    attempt: int = 0


class ProcessLaunched(JobFact, frozen=True, tag="process_launched"):
    """A backend is to start a job's process."""

    run: int
    launch: LaunchId
    host: HostId


class ProcessStarted(JobFact, frozen=True, tag="process_started"):
    """It has."""

    launch: LaunchId
    pid: int
    started: str = ""


class ProcessOver(JobFact, frozen=True, tag="process_over"):
    """A process that was started for a job has lost its rights; its backend is to end it."""

    launch: LaunchId
    reason: Cause


class JobEnded(JobFact, frozen=True, tag="job_ended"):
    """Over, by its own word, an operator's, or because nothing of a lost job is left."""

    reason: Cause
    by: str = ""


class SessionOpened(Fact, frozen=True, tag="session_opened"):
    """A client process of a run is there. An older one of the same run is fenced: its calls are refused."""

    session: SessionId
    job: JobId
    run: int
    pid: int = 0
    host: str = ""
    started: str = ""


class SessionLost(Fact, frozen=True, tag="session_lost"):
    """No heartbeat came for one lease time, or the last one said that the process is gone."""

    session: SessionId


class SessionClosed(Fact, frozen=True, tag="session_closed"):
    """The process left in good order."""

    session: SessionId


# ---- slots -----------------------------------------------------------------------------------------------------------


class SlotQueued(SlotFact, frozen=True, tag="slot_queued"):
    """A job asked for its turn."""

    job: JobId
    run: int
    session: SessionId
    phase: str
    request_id: str
    side: bool = False
    #: it begins the job's next iteration
    iteration: bool = False
    #: of an asynchronous job: its pace, by which the iteration that ends here is judged
    pace_ms: Millis = 0


class SlotWithdrawn(SlotFact, frozen=True, tag="slot_withdrawn"):
    """The request will never be granted."""

    reason: Cause


class TurnAdded(Fact, frozen=True, tag="turn_added"):
    """A side phase takes a place in the schedule, once: just before its job's next turn."""

    group: GroupId
    job: JobId
    phase: str


class TurnSkipped(Fact, frozen=True, tag="turn_skipped"):
    """The schedule passed a turn whose job is away, or has gone past it."""

    group: GroupId
    turn: int
    job: JobId
    phase: str


class SlotClaimed(SlotFact, frozen=True, tag="slot_claimed"):
    """The slot holds its GPUs, and its turn is passed; what is parked of it is being loaded."""

    gpus: tuple[GpuId, ...]
    #: its place in the schedule; null: no job is due on the node, and it is lent to a filler
    turn: int | None = None
    #: how long loans of these nodes have held it up, at most
    lent_ms: Millis = 0
    #: of a loan: when the next job is expected there; null: none is
    until: Millis | None = None


class FillerPlaced(StateFact, frozen=True, tag="filler_placed"):
    """A filler has its state on this node from now on, and works there while the node is lent to it."""


class YieldAsked(SlotFact, frozen=True, tag="yield_asked"):
    """The filler is to give its slot back by then; after that the slot is revoked."""

    #: ``expected``: a job will ask soon; ``wanted``: a job, a drain or a pause has the node
    reason: Cause
    due: Millis


class LoanEnded(SlotFact, frozen=True, tag="loan_ended"):
    """The node is clean of the filler that it was lent to."""

    job: JobId
    node: NodeId
    #: how many GPUs the loan had, and from its grant to its end
    gpus: int
    used_ms: Millis
    #: why it was asked back (``expected``, ``wanted``), or how it was ended (``revoked``, ``lost``, ``faulted``);
    #: empty: the filler had no work left
    how: str = ""


class SlotGranted(SlotFact, frozen=True, tag="slot_granted"):
    """The GPUs are the job's, its state is loaded. The lease begins."""

    fence: Fence


class SlotResized(SlotFact, frozen=True, tag="slot_resized"):
    """The slot holds these GPUs now: a tail has back what it claimed, or a slot that began on a part has more."""

    gpus: tuple[GpuId, ...]
    #: its tail runs on fewer GPUs; other jobs may get the rest once it was verified clean
    tail: bool = False


class SlotReleased(SlotFact, frozen=True, tag="slot_released"):
    """The phase is over."""

    measured: dict[str, float] = {}
    #: what becomes of the ``next`` that the release carried: a repeat gets the same answer
    next_slot: SlotId | None = None
    next_refused: Cause | None = None


class SlotTakenAway(SlotFact, frozen=True, tag="slot_taken_away"):
    """The slot was ended, and not by its holder. Its GPUs stay held until they are verified clean."""

    #: ``faulted``: its state could not be loaded; ``lost``: its holder is; else ``revoked``
    how: SlotStatus
    reason: Cause
    #: of one that is revoked
    by: str = ""


class SlotOverran(SlotFact, frozen=True, tag="slot_overran"):
    """The slot runs far longer than expected; said once. Nothing is taken from it by that."""

    ran_ms: Millis
    bound_ms: Millis


class SlotOver(SlotFact, frozen=True, tag="slot_over"):
    """It holds nothing any more."""


# ---- states and orders -----------------------------------------------------------------------------------------------


class OrderIssued(Fact, frozen=True, tag="order_issued"):
    """A residency driver is to load, park or discard a state."""

    order: OrderId
    kind: OrderKind
    job: JobId
    run: int
    pool: PoolName
    node: NodeId
    driver: str
    slot: SlotId | None = None
    #: of a load: the node from whose host the parked state is to be fetched
    source: NodeId | None = None
    #: of a load for a slot that grows: onto these GPUs, beside those that have it already
    gpus: tuple[GpuId, ...] = ()


class OrderEnded(Fact, frozen=True, tag="order_ended"):
    """The driver did it."""

    order: OrderId


class OrderFaulted(Fact, frozen=True, tag="order_faulted"):
    """The driver did not do it; where the state is has to be seen."""

    order: OrderId
    error: Cause


class OrderContactLost(Fact, frozen=True, tag="order_contact_lost"):
    """It is unknown whether it was done."""

    order: OrderId
    error: Cause


class StateUnknown(StateFact, frozen=True, tag="state_unknown"):
    """Where the state is has to be seen."""


class StateObserved(StateFact, frozen=True, tag="state_observed"):
    """Where the state is, as far as a backend could see."""

    status: StateStatus


class ResidualMemoryObserved(StateFact, frozen=True, tag="residual_memory_observed"):
    """What a parked state has left on each of its GPUs: from now on it may. More than was agreed is for people to see.

    Written down the first time, and when it is more than it was allowed till then and everybody else still fits.
    """

    mb: int
    #: what it was allowed till then
    agreed_mb: int


# ---- operators and logins --------------------------------------------------------------------------------------------


class Audited(Fact, frozen=True, tag="audited"):
    """An operator did something, or a login failed. Changes nothing; kept as a record.

    ``at`` is wall time. It stands in one commit with what was done, so that neither is ever there without the other.
    """

    #: what was done: "drain_node", "revoke_slot", "add_key", "login_failed", ...
    action: str
    #: the caller, and its role; of a failed login, the id of the key that was tried
    who: str
    role: str = ""
    #: "127.0.0.1:51812", or "uid 1000, pid 4711" on the Unix socket
    where: str = ""
    #: the call's id, as its answer and the log have it
    request_id: str = ""
    #: the node, host, job, slot or key that it was done to
    about: str = ""
    #: how that was, and how it is
    before: str = ""
    after: str = ""
    reason: str = ""
    #: how many of these there were since the last that was written; failed logins are counted when there are many
    count: int = 1


#: every kind of fact
KINDS: Final[tuple[type[Fact], ...]] = tuple(
    it for it in tuple(globals().values()) if isinstance(it, type) and issubclass(it, Fact) and not it.__subclasses__()
)
#: one of them, for decoders
AnyFact: Any = Union[KINDS]  # noqa: UP007 made of what is above

_DECODER: msgspec.json.Decoder[Fact] = msgspec.json.Decoder(AnyFact)
_ENCODER = msgspec.json.Encoder()


def encode(fact: Fact) -> bytes:
    """One fact as the JSON that the journal keeps and ``/v1/facts`` shows."""
    return _ENCODER.encode(fact)


def decode(body: bytes | str) -> Fact:
    """The fact of a journal row. Raises msgspec's DecodeError (no JSON) or ValidationError (no fact known here)."""
    return _DECODER.decode(body)


def name(fact: Fact) -> str:
    """The fact's name in the journal: ``slot_granted``."""
    tag: Any = type(fact).__struct_config__.tag
    return str(tag)
