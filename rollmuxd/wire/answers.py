"""Bodies that the daemon answers with."""

from typing import Any, Generic, TypeVar

from msgspec import Struct

Item = TypeVar("Item")


class Answer(Struct, frozen=True):
    """Base of all answers; a reader ignores fields it does not know."""


class Page(Answer, Generic[Item], frozen=True):
    """Base of what the lists answer; ``next`` is the ``after`` of the page that follows."""

    items: list[Item]
    next: str | None = None


class MeView(Answer, frozen=True):
    """The caller, and the daemon."""

    owner: str
    user: str
    role: str
    #: the id of the API key that was sent; "": none was needed
    key: str
    version: str
    mode: str
    #: the daemon's clock
    now: str
    #: numbers of the first fact that is there, and of the last
    first: int
    last: int


class Problem(Answer, frozen=True):
    """``application/problem+json`` (RFC 9457)."""

    title: str
    status: int
    detail: str
    type: str = "about:blank"
    request_id: str = ""
    #: parts of the refusal for programs: ``{"slot": "s12", "status": "revoked"}``
    data: dict[str, Any] = {}


class Reason(Answer, frozen=True):
    """Why something waits: a code for programs, its numbers, a sentence for people."""

    code: str
    text: str
    data: dict[str, Any] = {}


class Waiting(Answer, frozen=True):
    """A job without a placement."""

    reasons: list[Reason]
    #: 1: the next to be tried
    position: int
    #: what would let it in: ``["slo=2.0"]``
    would_start_with: list[str] = []


class Estimate(Answer, frozen=True):
    """What is known of a phase's time in its slot."""

    planned_s: float | None
    count: int
    mean_s: float | None = None
    p50_s: float | None = None
    p95_s: float | None = None
    #: what plans reckon with: what was stated (``planned_s``), or the mean of so many observations; 0: as stated
    estimate_s: float | None = None
    estimate_samples: int = 0


class JobView(Answer, frozen=True):
    """One job."""

    job: str
    owner: str
    user: str
    name: str
    run: int
    status: str
    registered_at: str
    reason: str = ""
    #: it has ended because it had come to its own end
    finished: bool = False
    group: str | None = None
    #: nodes by pool
    pins: dict[str, list[str]] = {}
    #: pools by phase, in the order of its cycle
    cycle: dict[str, list[str]] = {}
    admission: str = ""
    slo: float | None = None
    promised: bool = False
    #: as long as phases take what they do now, the group's plan has no room for its promise
    at_risk: bool = False
    #: why it goes without the promise that it asked for, and what would help
    unmet: str = ""
    priority: int = 0
    iterations: int = 0
    #: mean iteration / solo iteration; judged from the eighth iteration on
    slowdown: float | None = None
    credit_s: float | None = None
    planned_slowdown: float | None = None
    estimates: dict[str, Estimate] = {}
    session: str | None = None
    #: for how long no heartbeat has come, where that is longer than expected and the lease has not run out
    silent_s: float | None = None
    slot: str | None = None
    phase: str | None = None
    #: since when it has that slot, or waits for it
    phase_since: str | None = None
    waiting: Waiting | None = None
    loads_warm: int = 0
    loads_cold: int = 0
    parks: int = 0
    #: it works in the idle time of others; then the node that is lent to it now, and for how long nodes were
    filler: bool = False
    lent: str | None = None
    harvested_s: float = 0.0
    #: how long loans of its nodes to fillers have held it up, at most
    held_up_s: float = 0.0


class RegisteredView(JobView, frozen=True):
    """A job that was registered."""

    #: the daemon's journal. Send it as the header ``rollmux-journal`` with every later call of the job. A daemon with
    #: another journal then refuses the call (410): there, the job's ids may be other jobs'
    journal: str = ""


class LogsView(Answer, frozen=True):
    """A piece of what a job's process has printed."""

    job: str
    #: the start that it belongs to
    launch: str
    text: str
    #: the byte to ask after next
    next: int
    #: the process has ended, or is to
    over: bool


class SessionView(Answer, frozen=True):
    """A session, and how often it must be renewed."""

    session: str
    job: str
    run: int
    lease_s: float
    heartbeat_s: float
    #: as in the answer to the registration
    journal: str = ""
    #: the part of a phase's work after which its tail begins: a job that reaches it says so at once
    tail_from: float = 0.8


class Directive(Answer, frozen=True):
    """What the daemon asks of a running slot: ``shrink`` (to ``keep``) or ``stop``. ``grow`` (to ``gpus``) is an offer.
    ``move`` says that the job is on ``gpus`` from the next iteration on. ``unpromised`` is about the job, whatever it
    holds: its SLO is not kept where it is, and ``reason`` says what would help. ``ends`` tells that the job's nodes go
    away at ``ends_at``. ``yield`` asks a filler to give its slot back within ``within_s``; then the slot is revoked.
    """

    kind: str
    slot: str | None = None
    keep: list[str] = []
    reason: str = ""
    gpus: list[str] = []
    ends_at: str | None = None
    within_s: float | None = None


class HeartbeatView(Answer, frozen=True):
    """The lease is renewed."""

    lease_s: float
    directives: list[Directive] = []
    #: names these directives; the next heartbeat that waits says it
    tag: str = ""


class SlotView(Answer, frozen=True):
    """One slot. ``status`` is ``queued``, ``loading``, ``running``, ``tail``, ``released``, ..."""

    slot: str
    job: str
    phase: str
    status: str
    request_id: str
    job_name: str = ""
    #: told to its holder only
    fence: str | None = None
    gpus: list[str] = []
    lease_s: float | None = None
    #: how many come before it: turns on its nodes; without a placement, waiting jobs. 0: it is next
    position: int | None = None
    expected_wait_s: float | None = None
    reason: str = ""
    reasons: list[Reason] = []
    queued_at: str = ""
    #: since when it holds its GPUs
    claimed_at: str | None = None
    granted_at: str | None = None
    ended_at: str | None = None


class ReleaseView(Answer, frozen=True):
    """The release is done; ``next`` is what became of the request it carried."""

    slot: str
    status: str
    next: SlotView | None = None
    next_refused: str | None = None


class GpuView(Answer, frozen=True):
    """One GPU: ``holder`` holds it, ``dirty_by`` is whose bytes may still be on it; and what was seen there last."""

    gpu: str
    holder: str | None
    dirty_by: str | None
    used_gb: float | None = None
    #: processes that have memory there, as the backend names them; none where jobs sit of which the caller may not know
    processes: list[str] = []
    #: when memory and processes were seen; null: not since the daemon was started
    observed_at: str | None = None


class PinnedJob(Answer, frozen=True):
    """A job that is placed on a node; named to callers that may see it."""

    job: str
    name: str = ""


class NodeView(Answer, frozen=True):
    """One node."""

    node: str
    host: str
    status: str
    pools: list[str]
    gpu_type: str
    price_per_hour: float
    gpus: list[GpuView]
    reason: str = ""
    group: str | None = None
    states: dict[str, str] = {}
    #: memory of each GPU; and what parked states, or states loaded beside others, may occupy of it
    gpu_gb: float = 0.0
    residual_gb: float = 0.0
    #: jobs that are placed on it; while it is drained they get no slot there until they are moved, or it is used again
    jobs: list[PinnedJob] = []


class HostView(Answer, frozen=True):
    """One host, and what of its RAM is reserved for parked states."""

    host: str
    backend: str
    ram_gb: float
    ram_reserved_gb: float
    nodes: list[str]
    reachable: bool
    #: when it goes away; null: not at a known time
    ends_at: str | None = None
    #: jobs that are placed on its nodes
    jobs: list[PinnedJob] = []


class TurnView(Answer, frozen=True):
    """A place in a schedule."""

    job: str
    name: str
    phase: str
    rotation: int


class GroupView(Answer, frozen=True):
    """One co-execution group."""

    group: str
    jobs: list[str]
    nodes: list[str]
    schedule: list[TurnView]
    period_s: float | None
    cost_per_hour: float
    reason: str = ""


class PoolView(Answer, frozen=True):
    """One pool."""

    pool: str
    nodes: list[str]
    nodes_free: int
    gpus: int
    gpus_held: int


class Explanation(Answer, frozen=True):
    """Why a job waits, or where it sits and why: data and sentences."""

    job: str
    status: str
    reasons: list[Reason]
    sentences: list[str]
    #: the texts of ``wishes``, without the end of other jobs
    would_start_with: list[str] = []
    #: what would let a waiting job in, each by itself, with its numbers: ``slo``, ``nodes``, ``ram``, ``departure``
    wishes: list[Reason] = []


class UnreadableFact(Answer, frozen=True):
    """A fact of which nothing is known but its number."""

    seq: int
    reason: str


class FactsPage(Answer, frozen=True):
    """Facts after a sequence number. Each carries ``seq``, ``fact`` and its own fields."""

    facts: list[dict[str, Any]]
    last: int
    #: the first fact that is there; those before it were compacted away
    first: int = 1
    #: facts that are damaged, and so are not among ``facts``
    unreadable: list[UnreadableFact] = []


class KeyView(Answer, frozen=True):
    """An API key; ``secret`` is shown once, when it is made."""

    key: str
    owner: str
    user: str
    role: str
    created_at: str
    revoked: bool = False
    secret: str | None = None
    #: when it ceases to open anything; null: it does not expire
    expires_at: str | None = None
    expired: bool = False


class CircuitView(Answer, frozen=True):
    """Light from one port to another, one way; the nodes whose cables end there, where they are known."""

    from_port: int
    to_port: int
    from_node: str = ""
    to_node: str = ""


class FabricView(Answer, frozen=True):
    """An optical switch: ``status`` is idle, setting, active, failed or degraded."""

    name: str
    driver: str
    status: str
    #: left alone: everything travels over the electrical network
    degraded: bool
    #: why it failed, or is left alone
    reason: str = ""
    #: the circuits that there were when it was asked last; null: it has not answered yet
    circuits: list[CircuitView] | None = None
    #: those that the held slots want
    wanted: list[CircuitView] = []
    #: number of the last order
    stamp: int = 0


class ChannelOrder(Answer, frozen=True):
    """What a rank has to do with its state of a pool: ``load``, ``park`` or ``discard``."""

    order: str
    kind: str
    pool: str
    node: str
    gpus: list[str]
    warm: bool = False
    #: of a load after the job was moved: the node where it had parked the state
    source: str = ""


class ChannelView(Answer, frozen=True):
    """The next order for a rank, if one came in time."""

    order: ChannelOrder | None = None


class OverviewLists(Answer, frozen=True):
    """The first page of each list; of slots, if they were asked for."""

    pools: Page[PoolView]
    nodes: Page[NodeView]
    hosts: Page[HostView]
    groups: Page[GroupView]
    jobs: Page[JobView]
    slots: Page[SlotView] | None = None


class Overview(Answer, frozen=True):
    """The caller, and the state of everything; ``lists`` null: unchanged since the caller got this ``tag``."""

    me: MeView
    tag: str
    lists: OverviewLists | None = None


# ---- report ----------------------------------------------------------------------------------------------------------


class WorkRow(Answer, frozen=True):
    """What one job, or all jobs of one owner, used in a span of time. Hours of GPUs, and money where nodes have prices.

    ``held`` is from the claim to the end of a slot, ``used`` from its grant to its release. ``alone`` is the
    baseline: the same finished iterations at their solo times, on the same nodes without sharing them. ``charged`` is
    its bill: the time that it held, and its part of the time in which its groups' nodes were not held.
    """

    name: str
    owner: str
    job: str | None = None
    gpu_hours_held: float = 0.0
    gpu_hours_used: float = 0.0
    gpu_hours_alone: float = 0.0
    cost_alone: float = 0.0
    iterations: int = 0
    #: elapsed / solo over the finished iterations
    slowdown: float | None = None
    loads_warm: int = 0
    loads_cold: int = 0
    parks: int = 0
    #: waiting for a placement, and for the turn
    wait_placement_hours: float = 0.0
    wait_turn_hours: float = 0.0
    gpu_hours_charged: float = 0.0
    cost_charged: float = 0.0
    #: of the nodes on which its states were being moved: a part of what is charged
    gpu_hours_switching: float = 0.0
    cost_switching: float = 0.0
    #: of a filler: what it ran on nodes that were lent to it, for which it is charged nothing
    gpu_hours_harvested: float = 0.0
    #: how long loans of its nodes have held the job up, at most
    held_up_hours: float = 0.0
    #: of a job: its bound; of how many jobs a promise could be judged (from the eighth iteration on), and was kept
    slo: float | None = None
    slo_judged: int = 0
    slo_kept: int = 0


class PoolRow(Answer, frozen=True):
    """What became of the GPU-hours of a pool: ``used + switching + idle + unallocated = capacity``.

    A node that is in several pools has a row of its own (``rollout+train``), so that the rows add up to the inventory.
    """

    pool: str
    gpus: int
    gpu_hours_capacity: float
    #: held by slots: running, and loading or being reclaimed
    gpu_hours_held: float
    gpu_hours_used: float
    gpu_hours_switching: float
    #: on nodes that jobs are placed on, between slots
    gpu_hours_idle: float
    #: on nodes that no job is placed on
    gpu_hours_unallocated: float
    #: used / capacity
    utilisation: float | None
    cost_capacity: float = 0.0
    #: of what is idle or unallocated: what fillers ran
    gpu_hours_harvested: float = 0.0


class Saving(Answer, frozen=True):
    """What sharing saved, and against what: a saving without its baseline means nothing."""

    baseline: str
    gpu_hours_alone: float
    #: ``alone - charged``; negative: sharing cost more than it saved
    gpu_hours_saved: float
    cost_saved: float
    gpu_hours_charged: float = 0.0


class Bill(Answer, frozen=True):
    """All hours of the inventory, and their price: ``charged + others + unallocated = capacity``."""

    #: to the jobs of ``work``
    gpu_hours_charged: float
    #: to jobs that the caller does not see
    gpu_hours_others: float
    #: on nodes where no job was placed
    gpu_hours_unallocated: float
    gpu_hours_capacity: float
    cost_charged: float
    cost_others: float
    cost_unallocated: float
    cost_capacity: float


class ReportView(Answer, frozen=True):
    """``GET /v1/report``. ``work`` has a row per job or per owner, as asked by ``by``; ``pools`` one per pool."""

    since: str
    until: str
    by: str
    work: list[WorkRow]
    pools: list[PoolRow]
    saving: Saving
    bill: Bill
    #: the daemon's; ``observe``: no GPU was held, and there is nothing to be charged
    mode: str = "share"
    #: facts that are damaged: they, and what follows from them, are not in the figures
    unreadable: list[int] = []


class Health(Answer, frozen=True):
    """``/healthz`` and ``/readyz``."""

    status: str
    version: str = ""
    reason: str = ""
