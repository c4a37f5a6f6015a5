"""What a job asks for: its phases, nodes, states and promises. A spec is frozen; a new run brings a new one.

Times are integer milliseconds, sizes integer megabytes (1 GB = 1000 MB).
"""

from enum import StrEnum
from typing import TypeAlias

from msgspec import Struct

from rollmuxd.core.ids import Millis, NodeId, PoolName


class OnLoss(StrEnum):
    """What follows when a job's session is lost."""

    KILL = "kill"
    HOLD = "hold"
    RELAUNCH = "relaunch"


class Park(StrEnum):
    """When a job's state leaves the GPUs after a release."""

    LAZY = "lazy"
    AT_RELEASE = "at_release"


class IfUnmet(StrEnum):
    """What becomes of a probed job whose SLO turns out not to be certifiable."""

    BEST_EFFORT = "best_effort"
    WAIT = "wait"
    END = "end"


class Movable(StrEnum):
    """Whether a job may be moved to other nodes, and how."""

    NO = "no"
    #: its process goes on, and loads its states on the other nodes
    WARM = "warm"
    #: its process is ended, and started again there
    RELAUNCH = "relaunch"


class PhaseSpec(Struct, frozen=True, omit_defaults=True, cache_hash=True):
    """One phase of the job's cycle, or a side phase."""

    name: str
    pools: tuple[PoolName, ...]
    #: how long the phase is planned to run in its slot; None: not known yet, measure it
    planned_ms: Millis | None = None
    #: the job's own time between the end of the phase before and its request for this one
    gap_ms: Millis = 0
    #: the fewest GPUs it can start, or end its tail, on; 0: it needs them all
    min_gpus: int = 0
    #: of a side phase: it comes once in so many iterations, at the most often; 0: nobody said
    every: int = 0


class Want(Struct, frozen=True, omit_defaults=True, cache_hash=True):
    """How much of a pool a job wants: whole nodes, or at least so many GPUs, or nodes by name."""

    pool: PoolName
    nodes: int = 1
    gpus: int = 0
    named: tuple[NodeId, ...] = ()


OptionValue: TypeAlias = str | bool | int | float | tuple[str, ...]


class StateSpec(Struct, frozen=True, omit_defaults=True, cache_hash=True):
    """What a job keeps on the GPUs of a pool, and what parking it costs."""

    pool: PoolName
    #: on each GPU of the node, while loaded
    gpu_mb: int = 0
    #: on each GPU of the node, while parked (what an engine cannot give back)
    leftover_mb: int = 0
    #: of each node's host, reserved for as long as the job is placed there
    ram_mb: int = 0
    #: the residency driver that moves it
    driver: str = "channel"
    #: planned times of a warm start and of parking, charged in the plan when the group is shared
    load_ms: Millis = 0
    park_ms: Millis = 0
    #: what the driver has to know besides, in its own words. It is in the journal: no place for secrets
    options: tuple[tuple[str, OptionValue], ...] = ()


class LaunchSpec(Struct, frozen=True, omit_defaults=True):
    """The process that a backend starts for a job. It is in the journal: no place for secrets."""

    argv: tuple[str, ...]
    cwd: str = ""
    env: dict[str, str] = {}


class JobSpec(Struct, frozen=True, omit_defaults=True):
    """Everything a registration says about a job."""

    name: str
    #: the cycle, in order
    phases: tuple[PhaseSpec, ...]
    wants: tuple[Want, ...]
    #: side phases; ``init`` is exclusive on its GPUs and comes once, before the first cycle phase
    side: tuple[PhaseSpec, ...] = ()
    states: tuple[StateSpec, ...] = ()
    #: bound on mean iteration / solo iteration; None: best effort
    slo: float | None = None
    priority: int = 0
    on_loss: OnLoss = OnLoss.HOLD
    movable: Movable = Movable.NO
    park: Park = Park.LAZY
    if_unmet: IfUnmet = IfUnmet.BEST_EFFORT
    #: one node may serve several of the job's pools
    colocate: bool = False
    #: processes of the workload that dial the channel
    ranks: int = 1
    #: what a backend starts when the job has its place; None: its process comes by itself
    launch: LaunchSpec | None = None
