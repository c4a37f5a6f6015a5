"""The numbers the core needs; files and environment are the daemon's."""

from enum import StrEnum

from msgspec import Struct, field

from rollmuxd.core.ids import Millis


class DriverTraits(Struct, frozen=True):
    """What a residency driver says of itself."""

    #: telling an order twice does it once
    idempotent: bool = False
    #: it can say what became of an order
    probes: bool = False
    #: it can load a state that is parked on another host
    copies: bool = False


class Moves(StrEnum):
    """Whether placed jobs that allow it are moved to where they are better placed."""

    #: where there is more than one host
    AUTO = "auto"
    ON = "on"
    OFF = "off"


class PlanWith(StrEnum):
    """What of the times that a phase was seen to take is in plans. Promises are about the mean in any case."""

    MEAN = "mean"
    P90 = "p90"
    WORST = "worst"


class OwnerLimits(Struct, frozen=True):
    """What one owner may have; 0: as much as it likes."""

    #: its part, against other owners' parts, where several wait for the same
    share: int = 1
    #: live jobs
    max_jobs: int = 0
    #: nodes on which it has placements
    max_nodes: int = 0
    #: slot requests that wait
    max_waiting: int = 0
    #: the highest priority that its jobs may have; None: any
    max_priority: int | None = None


class Config(Struct, frozen=True):
    """The numbers the core needs, with their defaults."""

    #: a session without a heartbeat for this long is lost
    lease_ms: Millis = 60_000
    #: for this long (or for the lease, if that is longer) a request that no call attends keeps its place. The same
    #: holds for a run without a session
    reattach_ms: Millis = 120_000
    #: a turn whose job is idle beyond its planned gap is awaited this much longer
    grace_ms: Millis = 5_000
    #: how long GPUs may take to become clean before their node is quarantined
    clean_timeout_ms: Millis = 120_000
    #: GPUs that should become clean are looked at after this, then after twice as long each time
    observe_after_ms: Millis = 500
    #: and never less often than this
    observe_at_least_ms: Millis = 30_000
    #: memory that a parked state leaves beyond what was agreed has this long to be given back, before it is judged
    residual_grace_ms: Millis = 15_000
    #: used memory above the agreed residual memory that still counts as clean
    clean_tolerance_mb: int = 300
    #: iterations after which a probed job is judged
    probe_iterations: int = 3
    #: the group is planned again when a phase's recent mean is off its planned time by more than this share; 0: never
    drift: float = 0.1
    #: what of the times that were seen plans reckon with (the paper's conservative planning: the worst)
    plan: PlanWith = PlanWith.MEAN
    #: iterations that this mean is of, at most; and at least, counted from when plans were made with its times last
    drift_window: int = 20
    min_samples: int = 8
    #: the least time between two plans that one job causes
    replan_every_ms: Millis = 900_000
    #: a waiting job gains one level of priority each time this passes
    aging_ms: Millis = 3_600_000
    #: a job that has waited this long goes first, and is not overtaken any more on the pools it wants
    bounded_wait_ms: Millis = 6 * 3_600_000
    #: a slot that runs longer than this, and than three times the p95 of its phase, is warned about
    min_overrun_ms: Millis = 600_000
    #: and, where this is set, is revoked if another job waits for its GPUs ...
    overrun_revoke: bool = False
    #: ... so long after the warning
    overrun_grace_ms: Millis = 300_000
    #: share of a rollout's work after which its tail may be asked to shrink (RollMux: 0.8)
    tail_from: float = 0.8
    #: limits against one client filling the daemon
    max_jobs: int = 10_000
    max_requests_waiting: int = 20_000
    #: hosts on which processes of jobs are started
    launch_hosts: tuple[str, ...] = ()
    #: how long a process that was started may take to open its session
    launch_ms: Millis = 600_000
    #: a lost job that is relaunched waits for this long the first time, and each time for twice as long
    relaunch_after_ms: Millis = 60_000
    #: and is quarantined when it was lost more often than this ...
    relaunch_limit: int = 5
    #: ... within this time
    relaunch_window_ms: Millis = 3_600_000
    moves: Moves = Moves.AUTO
    #: moves at hand at the same time; in each group there is one
    max_concurrent_moves: int = 4
    #: a job is moved again after this time at the earliest
    move_interval_ms: Millis = 3_600_000
    #: what a move takes from its job, as this cluster measures it: warm, and by starting it again
    move_cost_ms: Millis = 30_000
    relaunch_cost_ms: Millis = 300_000
    #: a planned move is abandoned when its job has not ended an iteration by then ...
    move_start_timeout_ms: Millis = 2 * 3_600_000
    #: ... and one that has begun, when what the job had loaded is not parked by then
    move_finish_timeout_ms: Millis = 600_000
    owners: dict[str, OwnerLimits] = field(default_factory=dict)
    #: what holds for owners that are not among these
    others: OwnerLimits = OwnerLimits()
    drivers: dict[str, DriverTraits] = field(default_factory=dict)
    #: idle nodes are lent to fillers
    fillers: bool = True
    #: loans may hold up a job by this share of its time alone
    fillers_max_share: float = 0.01
    #: a node is back this much before a job is expected there
    fillers_margin_ms: Millis = 500
