"""What came of one run: of each job, of each pool, of the money."""

from collections import Counter

from msgspec import Struct, field

from rollmuxd.core.ids import Millis, PoolName

#: the accountings: a job ends when its trace says, or when its work is done
PAPER, WORK = "paper", "work"
#: finished iterations from which on a job's mean is judged: before, its first wait for a turn decides
JUDGED_FROM = 8


class JobOutcome(Struct):
    """How one job fared."""

    name: str
    slo: float | None
    arrived_ms: Millis
    #: placed; None: it never was
    placed_ms: Millis | None = None
    ended_ms: Millis | None = None
    #: how it got in: packing, scaling, isolated
    admission: str = ""
    #: finished iterations; a fraction where time is fluid
    iterations: float = 0.0
    #: of the finished iterations together: what they took, and what they would have taken alone
    elapsed_ms: float = 0.0
    solo_ms: float = 0.0
    warm: int = 0
    cold: int = 0
    parks: int = 0
    #: to other nodes
    moves: int = 0

    @property
    def slowdown(self) -> float | None:
        """Mean iteration over solo iteration; None before the first."""
        return self.elapsed_ms / self.solo_ms if self.solo_ms else None

    @property
    def kept(self) -> bool | None:
        """Whether its SLO was kept over its life; None: it had none, or too short a life to be judged."""
        slowdown = self.slowdown
        if self.slo is None or slowdown is None or self.iterations < JUDGED_FROM:
            return None
        return slowdown <= self.slo * (1 + 1e-6)


class PoolOutcome(Struct):
    """How one pool was used."""

    name: PoolName
    gpu_type: str
    gpus_per_node: int
    price_per_gpu_hour: float
    #: most GPUs in groups at once
    peak_gpus: int = 0
    #: nodes in groups, times time
    bought_node_ms: float = 0.0
    #: nodes on which a phase was running, times time (loading and parking is not running)
    busy_node_ms: float = 0.0
    #: cost fidelity: nodes that moves are charged for beside those in groups, times time
    moving_node_ms: float = 0.0

    @property
    def utilisation(self) -> float:
        """Share of the bought time in which a phase was running; what is left is the bubble."""
        return self.busy_node_ms / self.bought_node_ms if self.bought_node_ms else 0.0

    @property
    def cost(self) -> float:
        """Dollars."""
        return (self.bought_node_ms + self.moving_node_ms) / 3_600_000 * self.gpus_per_node * self.price_per_gpu_hour


class Harvest(Struct):
    """What fillers had of idle nodes, and what that took from jobs."""

    loans: int = 0
    #: by reason
    yields: dict[str, int] = field(default_factory=dict)
    #: by pool, node-milliseconds that fillers worked in the idle time of groups, and on nodes of no group
    in_groups_ms: dict[PoolName, int] = field(default_factory=dict)
    free_ms: dict[PoolName, int] = field(default_factory=dict)
    #: each wait of a job for a filler, at most
    held_up_ms: list[int] = field(default_factory=list)


class Outcome(Struct):
    """What came of one run of one policy."""

    policy_under_test: str
    workload: str
    seed: int
    fidelity: str
    accounting: str
    #: from the first arrival to the last end
    span_ms: Millis = 0
    jobs: list[JobOutcome] = field(default_factory=list)
    pools: list[PoolOutcome] = field(default_factory=list)
    #: cost fidelity: what the published simulator would add for broken promises, dollars
    fines: float = 0.0
    #: inputs that the scheduler handled
    events: int = 0
    #: SHA-256 of the encoded facts, in order
    facts_digest: str = ""
    facts: int = 0
    #: fidelity ``network``: ``phases`` that sent between hosts, and ``between_racks``; for how many circuits were
    #: changed (``circuits_changed``), and were not though others were wanted (``circuits_kept``)
    network: dict[str, int] | None = None
    #: None: there were no fillers
    harvest: Harvest | None = None
    #: optimal only: every instance was solved exactly; otherwise it is the best found within the budget
    exact: bool | None = None
    # what follows depends on the machine, and is no part of determinism
    wall_s: float = 0.0
    #: microseconds of each arrival's decision
    decision_us: list[float] = field(default_factory=list)

    @property
    def cost(self) -> float:
        """Dollars, in all."""
        return sum(pool.cost for pool in self.pools)

    @property
    def cost_per_hour(self) -> float:
        """Dollars per hour, time-weighted mean over the span."""
        return self.cost / (self.span_ms / 3_600_000) if self.span_ms else 0.0

    @property
    def attainment(self) -> float | None:
        """Share of the jobs with an SLO whose mean iteration kept it; None: there were none."""
        judged = [job.kept for job in self.jobs if job.kept is not None]
        return sum(judged) / len(judged) if judged else None

    @property
    def mean_completion_s(self) -> float:
        """Mean time from arrival to end, seconds."""
        took = [job.ended_ms - job.arrived_ms for job in self.jobs if job.ended_ms is not None]
        return sum(took) / len(took) / 1000 if took else 0.0

    @property
    def mean_wait_s(self) -> float:
        """Mean time from arrival to placement, seconds; to its end, of a job that ended without one."""
        until = [(job, job.ended_ms if job.placed_ms is None else job.placed_ms) for job in self.jobs]
        took = [at - job.arrived_ms for job, at in until if at is not None]
        return sum(took) / len(took) / 1000 if took else 0.0

    @property
    def admissions(self) -> dict[str, int]:
        """Jobs by how they got in."""
        return dict(sorted(Counter(job.admission for job in self.jobs if job.admission).items()))
