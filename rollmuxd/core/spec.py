"""What a job asks for: its phases, nodes, states and promises. A spec is frozen; a new run brings a new one.

Times are integer milliseconds, sizes integer megabytes (1 GB = 1000 MB).
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Final, TypeAlias

from msgspec import Struct

from rollmuxd.core.ids import GpuId, Millis, NodeId, PoolName


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
    #: its process keeps running, and loads its states on the other nodes
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
    #: of a side phase: it comes at most once in so many iterations; 0: not stated
    every: int = 0
    #: how its nodes talk: ``ring``, ``mesh`` or ``pairs``, for circuits of an optical switch; empty: in no such way
    traffic: str = ""


class Want(Struct, frozen=True, omit_defaults=True, cache_hash=True):
    """How much of a pool a job wants: whole nodes, or at least so many GPUs, or nodes by name."""

    pool: PoolName
    nodes: int = 1
    gpus: int = 0
    named: tuple[NodeId, ...] = ()


#: the residency driver that needs the job's process to move a state
CHANNEL: Final = "channel"
#: the one phase of a filler
FILLER: Final = "filler"

OptionValue: TypeAlias = str | bool | int | float | tuple[str, ...]


class StateSpec(Struct, frozen=True, omit_defaults=True, cache_hash=True):
    """What a job keeps on the GPUs of a pool, and what parking it costs."""

    pool: PoolName
    #: on each GPU of the node, while loaded
    gpu_mb: int = 0
    #: on each GPU of the node, while parked (what an engine cannot give back)
    residual_mb: int = 0
    #: of each node's host, reserved for as long as the job is placed there
    ram_mb: int = 0
    #: the residency driver that moves it
    driver: str = CHANNEL
    #: planned times of a warm start and of parking, charged in the plan when the group is shared
    load_ms: Millis = 0
    park_ms: Millis = 0
    #: it is several engines, each on so many GPUs of a node, in their order; 0: one thing on all of them
    engine_gpus: int = 0
    #: what the driver has to know besides, in its own words. It is in the journal: no place for secrets
    options: tuple[tuple[str, OptionValue], ...] = ()


def engines_on(gpus: Sequence[GpuId], engine_gpus: int) -> tuple[tuple[GpuId, ...], ...]:
    """The GPUs of each engine on a node with these GPUs; without ``engine_gpus`` all of them are one's."""
    each = engine_gpus or max(1, len(gpus))
    return tuple(tuple(gpus[at : at + each]) for at in range(0, len(gpus) - each + 1, each))


class LaunchSpec(Struct, frozen=True, omit_defaults=True):
    """The process that a backend starts for a job. It is in the journal: no place for secrets."""

    argv: tuple[str, ...]
    cwd: str = ""
    env: dict[str, str] = {}


#: the name under which the time of a batch is kept beside those of phases
PACE: Final = "pace"


class Asynchronous(Struct, frozen=True, omit_defaults=True):
    """A job's rollouts run on GPUs of its own, also while it trains and while it waits for its turn."""

    #: in what time its rollouts make one batch when nothing holds them up; None: not known yet, measure it
    pace_ms: Millis | None = None
    #: batches that may be begun beyond the one that is trained; 0: the next is begun when the slot is granted
    ahead: int = 1

    @property
    def rollouts(self) -> PhaseSpec:
        """The making of one batch, as plans reckon with phases. It uses no pool."""
        return PhaseSpec(PACE, (), self.pace_ms)


class Filler(Struct, frozen=True, omit_defaults=True):
    """A job that works on one node while no other job is due there, and gives way."""

    #: from ``yield`` until it has given its slot back; parking what it has loaded comes after that
    yield_ms: Millis = 2_000
    #: a loan that would give it less than this is not begun
    min_run_ms: Millis = 10_000


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
    #: its cycle is one phase; None: its phases follow each other
    asynchronous: Asynchronous | None = None
    #: it has the one phase ``filler``, no promise and no place in a group; None: it is no filler
    filler: Filler | None = None

    def phase(self, name: str) -> PhaseSpec:
        """The cycle or side phase of that name; one that uses no pool where a new run has no such phase."""
        for phase in self.phases:  # often asked: no tuple is made
            if phase.name == name:
                return phase
        return next((phase for phase in self.side if phase.name == name), PhaseSpec(name, ()))

    def ram_mb_of(self, pool: PoolName) -> int:
        """What its states for a pool take of a host's RAM, for each node."""
        return sum(state.ram_mb for state in self.states if state.pool == pool)

    @property
    def timed(self) -> tuple[PhaseSpec, ...]:
        """All whose times plans reckon with: the cycle phases, and an asynchronous job's making of a batch."""
        return self.phases if self.asynchronous is None else (*self.phases, self.asynchronous.rollouts)
