"""What the scheduler remembers: hosts, nodes, groups, jobs, sessions, slots, states and orders.

Only :func:`rollmuxd.core.apply.apply` writes these records. Times are integer milliseconds, sizes integer megabytes
(1 GB = 1000 MB). Collections whose order matters are dicts and tuples, never sets. A set of strings has another order
in each process, and two runs of one seed must give the same bytes.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from itertools import chain

from msgspec import Struct, field

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
from rollmuxd.core.spec import JobSpec, StateSpec

# ---- statuses ----------------------------------------------------------------------------------------------------


class Dispatch(StrEnum):
    """The rule for which job is next on a node of a group."""

    #: the schedule's order, whose period is certified: a turn is awaited
    SCHEDULE = "schedule"
    #: the job that asked first: no node idles while a job could use it, and only the queue's length bounds a wait
    READY = "ready"
    #: of the jobs that ask, the one least ahead of its bound: its credit says so, and the guard acts on it
    CREDIT = "credit"


class JobStatus(StrEnum):
    """Where a run of a job is in its life."""

    WAITING = "waiting"
    PROBING = "probing"
    ADMITTED = "admitted"
    MOVING = "moving"
    PAUSED = "paused"
    QUARANTINED = "quarantined"
    LOST = "lost"
    ENDED = "ended"


class SessionStatus(StrEnum):
    """Whether a client process is taken to be there."""

    ALIVE = "alive"
    FENCED = "fenced"
    LOST = "lost"
    CLOSED = "closed"


class SlotStatus(StrEnum):
    """Where a slot is in its life."""

    QUEUED = "queued"
    WITHDRAWN = "withdrawn"
    LOADING = "loading"
    RUNNING = "running"
    TAIL = "tail"
    RELEASED = "released"
    FAULTED = "faulted"
    LOST = "lost"
    REVOKED = "revoked"
    OVER = "over"


class StateStatus(StrEnum):
    """Where a job's state is, on one node."""

    GONE = "gone"
    LOADING = "loading"
    LOADED = "loaded"
    PARKING = "parking"
    PARKED = "parked"
    DISCARDING = "discarding"
    UNKNOWN = "unknown"


class NodeStatus(StrEnum):
    """What is known of a node."""

    UNKNOWN = "unknown"
    UP = "up"
    OCCUPIED = "occupied"
    DRAINING = "draining"
    DRAINED = "drained"
    QUARANTINED = "quarantined"
    LOST = "lost"


class OrderStatus(StrEnum):
    """What is known of an effect that was sent to a backend."""

    ISSUED = "issued"
    DONE = "done"
    FAILED = "failed"
    LOST_CONTACT = "lost_contact"


class OrderKind(StrEnum):
    """What a residency driver is to do with a state."""

    LOAD = "load"
    PARK = "park"
    DISCARD = "discard"


def nodes_in(pins: Mapping[PoolName, Iterable[NodeId]]) -> list[NodeId]:
    """The nodes of a placement, each once."""
    return list(dict.fromkeys(chain.from_iterable(pins.values())))


def nodes_left(pins: Mapping[PoolName, Iterable[NodeId]], to: Mapping[PoolName, Iterable[NodeId]]) -> list[NodeId]:
    """The nodes of a placement that another one does not have."""
    there = nodes_in(to)
    return [name for name in nodes_in(pins) if name not in there]


class NodeSpec(Struct, frozen=True):
    """A node as the configuration and the backend's inventory give it."""

    id: NodeId
    host: HostId
    gpus: tuple[GpuId, ...]
    pools: tuple[str, ...]
    gpu_type: str = ""
    gpu_mb: int = 0
    price_per_gpu_hour: float = 0.0


class HostSpec(Struct, frozen=True, omit_defaults=True):
    """A host as the configuration gives it, and its backend."""

    id: HostId
    backend: str
    ram_mb: int
    #: when it goes away by itself, as an allocation does; None: at no known time
    ends_at: Millis | None = None


# ---- what the scheduler remembers --------------------------------------------------------------------------------


class Host(Struct):
    """A machine that a backend reaches."""

    id: HostId
    backend: str
    #: budget for parked states
    ram_mb: int
    #: changes when the machine was restarted: proof that nothing of before is left on its GPUs
    boot_id: str = ""
    nodes: list[NodeId] = field(default_factory=list)
    #: of ``ram_mb``, for the states of the jobs that are placed here
    reserved_mb: int = 0
    #: when it goes away by itself; None: at no known time
    ends_at: Millis | None = None


class Gpu(Struct):
    """One GPU. It can be claimed when no job holds it and no other job's bytes may be on it."""

    #: the slot that holds it
    holder: SlotId | None = None
    #: the job whose bytes may still be on it, until a backend has verified it clean
    dirty_by: JobId | None = None
    #: when what is on it was last to change: a look that began before then says nothing of it
    touched_at: Millis = 0

    @property
    def free(self) -> bool:
        """Whether no slot holds it, and no job's bytes may be on it."""
        return self.holder is None and self.dirty_by is None


class Node(Struct):
    """A set of GPUs of one host that is always shared as a unit."""

    id: NodeId
    host: HostId
    gpus: dict[GpuId, Gpu]
    pools: tuple[PoolName, ...]
    gpu_type: str = ""
    gpu_mb: int = 0
    price_per_gpu_hour: float = 0.0
    status: NodeStatus = NodeStatus.UNKNOWN
    reason: Cause | None = None
    #: when it was lost last; None: never
    lost_at: Millis | None = None
    #: an operator wants it empty; survives the node being lost meanwhile
    drain: bool = False
    #: it is drained because the configuration does not have it
    unconfigured: bool = False
    group: GroupId | None = None
    #: jobs whose placement it is part of
    pinned: list[JobId] = field(default_factory=list)
    #: keys of the states that may be on it
    states: list[str] = field(default_factory=list)
    #: GPUs that should be clean and are not, and since when; None: none
    not_clean: list[GpuId] = field(default_factory=list)
    not_clean_reason: Cause | None = None
    not_clean_since: Millis | None = None
    #: fillers that have their state here, and wait for a loan of the node
    fillers: list[JobId] = field(default_factory=list)
    #: the slot that the node is lent to, until the node is clean of it
    loan: SlotId | None = None
    #: when the last loan ended; None: there was none
    loan_ended_at: Millis | None = None

    @property
    def holders(self) -> tuple[SlotId, ...]:
        """The slots that hold GPUs of it, each once."""
        return tuple(dict.fromkeys(gpu.holder for gpu in self.gpus.values() if gpu.holder is not None))

    @property
    def empty(self) -> bool:
        """Whether all of its GPUs are free."""
        return all(gpu.free for gpu in self.gpus.values())


class Owner(Struct):
    """What an owner's placements hold, and what they have used (see :mod:`rollmuxd.core.shares`)."""

    #: nodes on which it has placements, and how many
    nodes: dict[NodeId, int] = field(default_factory=dict)
    #: GPUs of these nodes
    gpus: int = 0
    #: GPU-milliseconds, decayed, as of ``at``
    use: int = 0
    at: Millis = 0


class PlannedTurn(Struct, frozen=True, array_like=True):
    """A place in a schedule, as it was planned."""

    job: JobId
    phase: str
    once: bool = False


class ScheduledTurn(Struct):
    """A place for one (job, phase) in a schedule. ``rotation`` counts how often it was passed, served or skipped."""

    job: JobId
    phase: str
    rotation: int = 0
    #: a side phase's turn: leaves the schedule when it was passed
    once: bool = False


class Group(Struct):
    """A co-execution group: jobs, the nodes they share, and the schedule that orders them."""

    id: GroupId
    jobs: list[JobId] = field(default_factory=list)
    nodes: list[NodeId] = field(default_factory=list)
    schedule: list[ScheduledTurn] = field(default_factory=list)
    dispatch: Dispatch = Dispatch.SCHEDULE
    #: jobs that are to move here: their turns are in the schedule, and are passed until they are there
    coming: list[JobId] = field(default_factory=list)
    #: grows whenever jobs, nodes or schedule change; what is derived from them is cached under it
    version: int = 0


class Session(Struct):
    """One client process of a run."""

    id: SessionId
    job: JobId
    run: int
    opened_at: Millis
    pid: int = 0
    host: str = ""
    #: the process's own start time, which tells it from a later process with its pid
    started: str = ""
    status: SessionStatus = SessionStatus.ALIVE


class Slot(Struct):
    """One stay of one job's phase on its pinned GPUs."""

    id: SlotId
    job: JobId
    run: int
    session: SessionId
    phase: str
    request_id: str
    queued_at: Millis
    status: SlotStatus = SlotStatus.QUEUED
    #: the GPUs it holds now
    gpus: tuple[GpuId, ...] = ()
    #: of a tail: those that it claimed, of which it may have back what it gave
    claimed: tuple[GpuId, ...] = ()
    fence: Fence | None = None
    side: bool = False
    claimed_at: Millis | None = None
    granted_at: Millis | None = None
    ended_at: Millis | None = None
    #: how it ended: withdrawn, released, faulted, lost or revoked; None: it has not
    ended: SlotStatus | None = None
    #: since when it is known to run for too long
    overrun_at: Millis | None = None
    #: of a loan: by when it is to be given back, since it was asked for; None: it was not
    yield_by: Millis | None = None
    reason: Cause | None = None
    #: slot or refusal of the ``next`` that its release carried: a repeat gets the same answer
    next_slot: SlotId | None = None
    next_refused: Cause | None = None


class JobState(Struct):
    """A job's state for one pool on one node."""

    job: JobId
    pool: PoolName
    node: NodeId
    #: as it was when the job was placed: a later run may declare another
    spec: StateSpec
    #: and whose run's it is
    run: int = 1
    status: StateStatus = StateStatus.GONE
    #: the order that moves it now
    order: OrderId | None = None
    #: it has been on this node before: the next load is a warm start
    warm: bool = False
    #: since when it is loaded
    loaded_at: Millis | None = None
    #: what the last load and the last park took; None: none was seen
    load_ms: Millis | None = None
    park_ms: Millis | None = None
    #: what it was seen to leave on each GPU when parked; None: it was not seen to leave anything
    residual_mb: int | None = None

    @property
    def loads_ms(self) -> Millis:
        """What it takes to load it: as it was last, else as planned."""
        return self.spec.load_ms if self.load_ms is None else self.load_ms

    @property
    def parks_ms(self) -> Millis:
        """What it takes to park it: as it was last, else as planned."""
        return self.spec.park_ms if self.park_ms is None else self.park_ms


class Order(Struct):
    """An effect that was sent to a residency driver, tracked until its result."""

    id: OrderId
    kind: OrderKind
    job: JobId
    run: int
    pool: PoolName
    node: NodeId
    driver: str
    issued_at: Millis
    slot: SlotId | None = None
    #: of a load: the node from whose host the parked state is to be fetched
    source: NodeId | None = None
    #: of a load for a slot that grows: the GPUs that it is for; (): all that the slot holds there
    gpus: tuple[GpuId, ...] = ()
    #: the incarnation that issued it: with its number it only grows
    incarnation: int = 1
    status: OrderStatus = OrderStatus.ISSUED
    #: how often the daemon was killed, or crashed, while the order was open
    crashes: int = 0

    @property
    def stamp(self) -> Fence:
        """Of two orders the later one has the greater."""
        return Fence(self.incarnation, int(self.id[1:]))


class PhaseTimes(Struct):
    """The last observed times of one phase in its slot (which are its solo times: a phase is exclusive)."""

    recent_ms: list[Millis] = field(default_factory=list)
    count: int = 0
    total_ms: Millis = 0
    #: what plans reckon with, as it was measured; None: what was stated, or nothing yet
    planned_ms: Millis | None = None
    #: how many observations that was made of
    planned_from: int = 0
    #: the mean of the same observations, where plans reckon with more: promises are about this
    mean_ms: Millis | None = None
    #: observations since then, and since the job came to its nodes
    fresh: int = 0
    #: of each of ``recent_ms``: how much work the job had reported before it; 0: none
    works: list[float] = field(default_factory=list)


class Progress(Struct):
    """The job's iterations so far, in the run at hand: the two sides of its slowdown."""

    finished: int = 0
    #: sums over the finished iterations
    solo_ms: Millis = 0
    elapsed_ms: Millis = 0
    #: of the iteration at hand
    iteration_from: Millis | None = None
    iteration_solo_ms: Millis = 0
    #: time since ``iteration_from`` that is not held against the scheduler (pauses)
    iteration_excused_ms: Millis = 0
    #: of an asynchronous job: since when its rollouts are held up by nothing, if it waited for the batch then
    batch_from: Millis | None = None
    #: of an asynchronous job: iterations in a row in which it waited neither for a batch nor for a turn
    unwaited: int = 0
    #: end of the job's last slot: what follows until its next request is its own gap
    idle_from: Millis | None = None
    #: warm, cold starts and parks
    loads_warm: int = 0
    loads_cold: int = 0
    parks: int = 0
    #: of a filler, what its last cold start took
    start_ms: Millis | None = None
    #: how long loans of its nodes to fillers have held the job up, at most
    lent_ms: Millis = 0


class JobMove(Struct):
    """A job's move to other nodes, from its planning to its end. Until that, it sits where it sat."""

    group: GroupId
    pins: dict[PoolName, tuple[NodeId, ...]]
    #: since when it is planned, or, once it has begun, since when its job's status is MOVING
    since: Millis
    why: Cause
    admission: str = ""
    promised: bool = False
    #: the group's schedule once it has moved, where it stays in its group; else its turns are in the other's schedule
    schedule: tuple[PlannedTurn, ...] | None = None
    #: the nodes that it leaves because they are drained
    off: tuple[NodeId, ...] = ()


class Launch(Struct):
    """A process that a backend is to start, or started, for a job."""

    id: LaunchId
    host: HostId
    at: Millis
    #: 0: it has not said yet that it was started
    pid: int = 0
    #: it is not there any more, or is to be ended
    over: bool = False


class Job(Struct):
    """One RL post-training experiment; each registration of it is a run."""

    id: JobId
    owner: str
    user: str
    spec: JobSpec
    registered_at: Millis
    run: int = 1
    idempotency_key: str = ""
    status: JobStatus = JobStatus.WAITING
    #: where a paused job returns to
    resume_to: JobStatus = JobStatus.WAITING
    paused_at: Millis | None = None
    reason: Cause | None = None
    session: SessionId | None = None
    group: GroupId | None = None
    #: pinned nodes per pool; empty while the job has no placement
    pins: dict[PoolName, tuple[NodeId, ...]] = field(default_factory=dict)
    #: where it sat before: tried first when it is placed again
    last_pins: dict[PoolName, tuple[NodeId, ...]] = field(default_factory=dict)
    #: for each of its pins, in their order, the node that has its newest state. After a move that is another node,
    #: until the state is loaded on the new one. A process may have a state in one place only, so a load moves it.
    newest: dict[PoolName, tuple[NodeId, ...]] = field(default_factory=dict)
    #: where it is to go
    move: JobMove | None = None
    #: when its last move ended, or was abandoned
    moved_at: Millis | None = None
    #: nodes that it moved away from, on which something of it may be left
    left: list[NodeId] = field(default_factory=list)
    #: keys of its states
    states: list[str] = field(default_factory=list)
    #: its slot between LOADING and TAIL, and its QUEUED one: at most one of each
    slot: SlotId | None = None
    queued: SlotId | None = None
    #: slots that have ended but still hold GPUs
    closing: list[SlotId] = field(default_factory=list)
    #: whether it was admitted with a promise (its SLO is certified)
    promised: bool = False
    #: it is short of credit, and goes before all others or has nodes of its own until it has earned some
    guarded: bool = False
    #: finished iterations and credit when a guard began, or ended without help
    guard_from: int = 0
    guard_credit_ms: Millis = 0
    #: when plans began to reckon with other times of its phases
    drifted_at: Millis | None = None
    admission: str = ""
    placed_at: Millis | None = None
    #: the process that was started for it last
    launch: Launch | None = None
    #: lost, it is started again then
    relaunch_at: Millis | None = None
    #: when it was lost recently
    losses: list[Millis] = field(default_factory=list)
    progress: Progress = field(default_factory=Progress)
    #: what its last cycle phase reported as ``work`` (tokens, samples), which the next one has before it; 0: nothing
    work: float = 0.0
    times: dict[str, PhaseTimes] = field(default_factory=dict)
    #: by pool, what loading and parking its states takes in plans; a pool that is not here: as stated
    moves_ms: dict[PoolName, Millis] = field(default_factory=dict)
    #: of a filler: for how long nodes were lent to it
    harvested_ms: Millis = 0

    @property
    def has_place(self) -> bool:
        """Whether the job is placed, and may stay where it is."""
        status = self.resume_to if self.status is JobStatus.PAUSED else self.status
        return status in (JobStatus.PROBING, JobStatus.ADMITTED, JobStatus.MOVING)

    @property
    def live(self) -> bool:
        """Whether the run can still come to something."""
        return self.status is not JobStatus.LOST and self.status is not JobStatus.ENDED
