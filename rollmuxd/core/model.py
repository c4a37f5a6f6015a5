"""What the scheduler remembers: hosts, nodes, groups, jobs, sessions, slots, states and orders.

Only :func:`rollmuxd.core.apply.apply` writes these records. Times are integer milliseconds, sizes integer megabytes
(1 GB = 1000 MB). Collections whose order matters are dicts and tuples, never sets: a set of strings has another order
in each process, and two runs of one seed must give the same bytes.
"""

from enum import StrEnum

from msgspec import Struct, field

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
    """Who comes next on a node of a group."""

    #: the wheel's order, whose period is certified: a visit is awaited
    SCHEDULE = "wheel"
    #: whoever asked first: no node idles while somebody could use it, and nothing bounds a wait but the line itself
    READY = "ready"
    #: whoever asks and is least ahead of its bound: its credit says so, and the guard acts on it
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
    RECLAIMING = "reclaiming"
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
    """What is known of an effect that a backend was told."""

    ISSUED = "issued"
    DONE = "done"
    FAILED = "failed"
    LOST_CONTACT = "lost_contact"


class OrderKind(StrEnum):
    """What a residency driver is told to do with a state."""

    LOAD = "load"
    PARK = "park"
    DISCARD = "discard"


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


class Gpu(Struct):
    """One GPU. It can be claimed when nobody holds it and no stranger's bytes may be on it."""

    #: the slot that holds it
    holder: SlotId | None = None
    #: the job whose bytes may still be on it, until a backend has seen it clear
    dirty_by: JobId | None = field(default=None, name="stain")
    #: when what is on it was last to change: a look that began before then says nothing of it
    touched_at: Millis = 0


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
    reason: str = ""
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
    #: GPUs that should be clear and are not, and since when; None: none
    unclear: list[GpuId] = field(default_factory=list)
    unclear_reason: str = ""
    unclear_since: Millis | None = None


class Owner(Struct):
    """What an owner's placements hold, and what they have used (see :mod:`rollmuxd.core.shares`)."""

    #: nodes on which it has placements, and how many
    nodes: dict[NodeId, int] = field(default_factory=dict)
    #: GPUs of these nodes
    gpus: int = 0
    #: GPU-milliseconds, decayed, as of ``at``
    use: int = 0
    at: Millis = 0


class ScheduledTurn(Struct):
    """A place for one (job, phase) in a wheel. ``turn`` counts how often it was passed, served or skipped."""

    job: JobId
    phase: str
    turn: int = 0
    #: a side phase's visit: leaves the wheel when it was passed
    once: bool = False


class Group(Struct):
    """A co-execution group: jobs, the nodes they share, and the wheel that orders them."""

    id: GroupId
    jobs: list[JobId] = field(default_factory=list)
    nodes: list[NodeId] = field(default_factory=list)
    schedule: list[ScheduledTurn] = field(default_factory=list, name="wheel")
    dispatch: Dispatch = Dispatch.SCHEDULE
    #: jobs that are to move here: their visits are in the wheel, and are passed until they are there
    coming: list[JobId] = field(default_factory=list)
    #: grows whenever jobs, nodes or wheel change; what is derived from them is cached under it
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
    overstays_at: Millis | None = None
    reason: str = ""
    #: another process holds it than the one that it was granted to
    replaced: bool = False
    #: its holder gave it back (and nobody took it away)
    released: bool = False
    #: slot or refusal of the ``next`` that its release carried: a repeat gets the same answer
    next_slot: SlotId | None = None
    next_refused: str = ""


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
    residual_mb: int | None = field(default=None, name="left_mb")

    @property
    def switch_ms(self) -> Millis:
        """What it takes to load and to park it: as it was last, else as planned."""
        load = self.spec.load_ms if self.load_ms is None else self.load_ms
        park = self.spec.park_ms if self.park_ms is None else self.park_ms
        return load + park


class Order(Struct):
    """An effect that a residency driver was told, tracked until its result."""

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
    #: the incarnation that issued it: with its number it only grows
    incarnation: int = 1
    status: OrderStatus = OrderStatus.ISSUED
    error: str = ""
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
    #: end of the job's last slot: what follows until its next request is its own gap
    idle_from: Millis | None = None
    #: warm, cold starts and parks
    loads_warm: int = 0
    loads_cold: int = 0
    parks: int = 0


class JobMove(Struct):
    """A job's move to other nodes, from its planning to its end. Until that, it sits where it sat."""

    group: GroupId
    pins: dict[PoolName, tuple[NodeId, ...]]
    planned_at: Millis
    why: str
    admission: str = ""
    promised: bool = False
    period_ms: Millis | None = None
    #: the group's wheel once it has moved, where it stays in its group; else its visits are in the other's wheel
    schedule: list[ScheduledTurn] | None = field(default=None, name="wheel")
    #: since when its status is MOVING
    began_at: Millis | None = None
    #: the nodes that it leaves because they are drained
    off: tuple[NodeId, ...] = ()


class Launch(Struct):
    """A process that a backend was told to start for a job."""

    id: LaunchId
    host: HostId
    at: Millis
    #: 0: it has not said yet that it was started
    pid: int = 0
    started: str = ""
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
    reason: str = ""
    session: SessionId | None = None
    group: GroupId | None = None
    #: pinned nodes per pool; empty while the job has no placement
    pins: dict[PoolName, tuple[NodeId, ...]] = field(default_factory=dict)
    #: where it sat before: tried first when it is placed again
    last_pins: dict[PoolName, tuple[NodeId, ...]] = field(default_factory=dict)
    #: for each of its pins, in their order, the node that has its state as it was last: another one, after a move,
    #: until it is loaded there. A process may have it in one place only, so that loading it is moving it
    newest: dict[PoolName, tuple[NodeId, ...]] = field(default_factory=dict)
    #: where it is to go
    move: JobMove | None = None
    #: when its last move ended, or was abandoned
    moved_at: Millis | None = None
    #: nodes that it moved away from, on which something of it may be left
    left: list[NodeId] = field(default_factory=list)
    #: it could not load where it had moved to, waits for another place, and keeps what it has parked
    fell_back: bool = False
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
    #: when plans began to reckon with other times of its phases
    drifted_at: Millis | None = None
    #: with the times that are known now its group's plan has no room for its promise
    at_risk: bool = False
    #: the planned period of its group when it was placed, or the group planned anew
    planned_period_ms: Millis | None = None
    admission: str = ""
    placed_at: Millis | None = None
    ended_at: Millis | None = None
    #: the process that was started for it last
    launch: Launch | None = None
    #: lost, it is started again then
    relaunch_at: Millis | None = None
    #: when it was lost, of late
    losses: list[Millis] = field(default_factory=list)
    progress: Progress = field(default_factory=Progress)
    #: what its last cycle phase reported as ``work`` (tokens, samples), which the next one has before it; 0: nothing
    work: float = 0.0
    times: dict[str, PhaseTimes] = field(default_factory=dict)

    @property
    def has_place(self) -> bool:
        """Whether the job is placed, and may stay where it is."""
        status = self.resume_to if self.status is JobStatus.PAUSED else self.status
        return status in (JobStatus.PROBING, JobStatus.ADMITTED, JobStatus.MOVING)

    @property
    def live(self) -> bool:
        """Whether the run can still come to something."""
        return self.status is not JobStatus.LOST and self.status is not JobStatus.ENDED
