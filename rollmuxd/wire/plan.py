"""``POST /v1/plan``: what would become of jobs, if they came."""

from typing import Annotated, Literal

from msgspec import Meta, field

from rollmuxd.wire.answers import Answer, Reason
from rollmuxd.wire.requests import Gigabytes, Name, RegisterBody, Request


class PlanPool(Request, frozen=True):
    """Nodes that there are not: so many alike, each on a host of its own."""

    nodes: Annotated[int, Meta(ge=1, le=5_000)]
    #: of each node
    gpus: Annotated[int, Meta(ge=1, le=1_000)] = 8
    gpu_type: Annotated[str, Meta(max_length=100)] = ""
    #: of each GPU; 0: memory is not looked at
    gpu_gb: Gigabytes = 0
    price_per_gpu_hour: Annotated[float, Meta(ge=0, le=1_000_000)] = 0
    #: of each host, for parked states
    ram_gb: Gigabytes = 1_000_000


class PlanBody(Request, frozen=True):
    """``POST /v1/plan``: jobs, in the order in which they come."""

    jobs: Annotated[list[RegisterBody], Meta(min_length=1, max_length=500)]
    #: ``live``: beside what runs now; ``empty``: all nodes that there are, up, and no job on them
    on: Literal["live", "empty"] = "live"
    #: by name; instead of the nodes that there are
    pools: Annotated[dict[Name, PlanPool], Meta(max_length=16)] = field(default_factory=dict)
    #: search the fewest nodes for these jobs for up to eight seconds of processor time, and not for one
    least: bool = False


class PlannedJob(Answer, frozen=True):
    """What would become of one job."""

    name: str
    #: ``admitted``, ``probing``, ``waiting``; ``refused``: it would not even be registered
    status: str
    #: why it would wait, or be refused
    reasons: list[Reason] = field(default_factory=list)
    #: what would let it in
    wishes: list[Reason] = field(default_factory=list)
    #: jobs it would sit with, by name; null: of another owner
    beside: list[str | None] = field(default_factory=list)
    #: nodes by pool
    pins: dict[str, list[str]] = field(default_factory=dict)
    admission: str = ""
    slo: float | None = None
    promised: bool = False
    #: one iteration alone, and in its group once all planned jobs are in; null: a time is not known yet
    solo_s: float | None = None
    iteration_s: float | None = None
    #: ``iteration_s / solo_s``
    slowdown: float | None = None
    #: of the nodes that no job used before
    cost_per_hour: float = 0.0
    #: of all its nodes, had it these for itself
    cost_alone_per_hour: float = 0.0


class Slowed(Answer, frozen=True):
    """A job that is there already, in whose group others would come."""

    job: str
    #: "": it is another owner's
    name: str
    slo: float | None
    before: float | None
    after: float | None


class PlannedPool(Answer, frozen=True):
    """The nodes of a pool: how many there are, are in groups now, and would be then."""

    pool: str
    nodes: int
    used_before: int
    used_after: int


class LeastNodes(Answer, frozen=True):
    """Nodes of one kind."""

    pools: list[str]
    gpu_type: str
    #: of each node
    gpus: int
    #: so many do
    nodes: int
    #: so many there are
    there: int
    price_per_gpu_hour: float


class LeastView(Answer, frozen=True):
    """The smallest inventory on which these jobs, and no others, are all placed and every promise is kept.

    It is the cheapest if every node has a price, else that of the fewest GPUs.
    """

    #: why there is none; empty: there is
    reason: str = ""
    nodes: list[LeastNodes] = field(default_factory=list)
    gpus: int = 0
    #: of all these nodes
    cost_per_hour: float = 0.0
    #: what the jobs would cost on nodes of their own
    cost_alone_per_hour: float = 0.0
    #: of each job there, by its name; null: a time is not known yet
    slowdowns: dict[str, float | None] = field(default_factory=dict)
    #: whether the search came to its end; false: its processor time was over, and there may be a smaller one
    complete: bool = True


class PlanView(Answer, frozen=True):
    """What would be. Nothing has changed."""

    on: str
    policy: str
    jobs: list[PlannedJob]
    slowed: list[Slowed]
    pools: list[PlannedPool]
    #: of all nodes in groups
    cost_per_hour_before: float
    cost_per_hour_after: float
    #: what the planned jobs that were placed would cost on nodes of their own
    cost_alone_per_hour: float
    least: LeastView
