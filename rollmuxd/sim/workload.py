"""What a simulated world is given: jobs, the pools they run on, and what their phases take."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

from msgspec import Struct

from rollmuxd.core.config import PlanWith
from rollmuxd.core.ids import Millis, PoolName
from rollmuxd.core.spec import JobSpec
from rollmuxd.sim.inside import Inside

#: what each cycle phase of one iteration takes, in the order of the job's cycle
Durations: TypeAlias = tuple[Millis, ...]


class Impossible(ValueError):
    """The workload cannot be run, whatever the policy: says what is short."""


class Malformed(ValueError):
    """A trace that cannot be read: says file, line, column, and what was expected there."""

    def __init__(self, file: str, line: int, column: str, problem: str) -> None:
        super().__init__(file, line, column, problem)  # all of them, so that it survives the way between processes
        self.file, self.line, self.column, self.problem = file, line, column, problem

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}, column {self.column!r}: {self.problem}"


def find(relative: str, data: str, origin: str) -> Path:
    """A file or folder of the data sets that do not come with rollmuxd.

    Looked for under ``data`` if given, else under ``$ROLLMUX_DATA``. ``origin`` says how to get it.

    Raises:
        FileNotFoundError: it is not there; says where was looked.
    """
    folder = data or os.environ.get("ROLLMUX_DATA", "")
    wanted = Path(folder).expanduser() / relative
    if folder and wanted.exists():
        return wanted
    looked = f"looked for {wanted}" if folder else "neither --data nor $ROLLMUX_DATA names a data folder"
    raise FileNotFoundError(f"{relative} is not there: {looked}; it does not come with rollmuxd: {origin}")


class Pool(Struct, frozen=True):
    """Nodes of one kind that jobs want."""

    name: PoolName
    gpu_type: str
    price_per_gpu_hour: float
    gpus_per_node: int = 8
    #: host RAM for parked states, per node
    ram_mb: int = 2_000_000
    #: memory of one GPU; 0: not modelled
    gpu_mb: int = 0
    #: how many there are; None: bought on demand (as many as the jobs could ever use, paid for while in a group)
    nodes: int | None = None
    #: nodes on each host
    per_host: int = 1
    #: further pools that these nodes are of
    also: tuple[PoolName, ...] = ()


class Alone(Struct, frozen=True):
    """How a job runs by itself on nodes of one pool, both phases on the same nodes (co-located)."""

    pool: PoolName
    nodes: int
    #: as :attr:`SimJob.planned`
    planned: Durations


class SimJob(Struct, frozen=True):
    """One job of a workload."""

    name: str
    #: its type, for people and for tables: ``7B_8k``
    kind: str
    arrives_ms: Millis
    #: how long the trace has it run, from its arrival (as if alone)
    lasts_ms: Millis
    #: what it registers: cycle, wants, states, SLO. ``planned_ms`` of each phase is its mean
    spec: JobSpec
    #: what its iterations really take, the first again after the last. One element: always the same
    series: tuple[Durations, ...]
    #: nodes per pool if it has them to itself: what *solo* buys. (The artifact counts a 32B job with one training node
    #: when it shares, and with two when it does not.)
    footprint: dict[PoolName, int]
    #: how it runs co-located; None: not known
    colocated: Alone | None = None
    #: per pool, what building its engine from nothing takes, where that is more than a load
    cold_ms: dict[PoolName, Millis] = {}
    #: for each element of ``series``, the share of the *first* phase (0 to 1) after which 80 % of its responses are
    #: done. Empty: not known, no tail is released
    tail_from: tuple[float, ...] = ()
    #: whether its tails begin on a part of the GPUs, too (in tests: and take GPUs back that no other job can use)
    grows: bool = False
    #: iterations it has to do; 0: as many as fit in ``lasts_ms`` if alone
    iterations: int = 0
    #: per pool, what share of a phase that holds its nodes they work; a pool that is not named works throughout
    busy_share: dict[PoolName, float] = {}
    #: of an asynchronous job: what its rollouts really take for each batch, the first again after the last
    batches: tuple[Millis, ...] = ()
    #: fidelity ``engine``: what happens inside its first phase; None: its durations say how long that takes
    inside: Inside | None = None

    @property
    def planned(self) -> Durations:
        """The mean of each cycle phase."""
        return tuple(phase.planned_ms or 0 for phase in self.spec.phases)

    @property
    def solo_ms(self) -> Millis:
        """One iteration alone, by the means; own gaps included. An asynchronous job's takes its pace at least."""
        asynchronous = self.spec.asynchronous
        pace = 0 if asynchronous is None else asynchronous.pace_ms or 0
        return max(pace, sum(self.planned) + sum(phase.gap_ms for phase in self.spec.phases))

    @property
    def work(self) -> int:
        """Iterations it has to do."""
        return self.iterations or max(1, round(self.lasts_ms / self.solo_ms))


class Workload(Struct, frozen=True):
    """Jobs by arrival, and the pools they run on."""

    name: str
    jobs: tuple[SimJob, ...]
    pools: tuple[Pool, ...]
    #: what of the times that are seen plans reckon with, where a policy follows them (phase fidelity)
    plan: PlanWith = PlanWith.MEAN
    #: jobs beside these that work on idle nodes, and give way
    fillers: int = 0

    @property
    def on_demand(self) -> bool:
        """Whether nodes are bought as they are needed."""
        return all(pool.nodes is None for pool in self.pools)

    def check(self) -> None:
        """Raise :class:`Impossible` for a job too wide or too large for the inventory, whatever else is there."""
        pools = {pool.name: pool for pool in self.pools}
        for job in self.jobs:
            called = f"job {job.name} ({job.kind})"
            for want in job.spec.wants:
                pool = pools.get(want.pool)
                if pool is None:
                    raise Impossible(f"{called} wants nodes of pool {want.pool}; there are {', '.join(pools)}")
                if pool.nodes is not None and want.nodes > pool.nodes:
                    raise Impossible(
                        f"{called} wants {want.nodes} {want.pool} nodes at once, and pool "
                        f"{pool.name} has {pool.nodes}; give it more with --nodes {pool.name}={want.nodes}"
                    )
            for kept in job.spec.states:
                pool = pools.get(kept.pool)
                if pool is None:
                    continue
                if kept.ram_mb > pool.ram_mb:
                    raise Impossible(
                        f"{called} parks {kept.ram_mb / 1000:g} GB on each {kept.pool} node, whose host has "
                        f"{pool.ram_mb / 1000:g} GB of RAM; give it more with --ram"
                    )
                if pool.gpu_mb and kept.gpu_mb > pool.gpu_mb:
                    raise Impossible(
                        f"{called} keeps {kept.gpu_mb} MB on each {kept.pool} GPU, which has {pool.gpu_mb} MB"
                    )


def by_arrival(jobs: Sequence[SimJob]) -> tuple[SimJob, ...]:
    """Jobs in the order in which they come; those of the same time stay in theirs."""
    return tuple(sorted(jobs, key=lambda job: job.arrives_ms))


class Options(Struct, frozen=True):
    """What a user may say about a workload, whichever it is."""

    #: SLOs are drawn uniformly between these, one per job and seed; None: no job has one (best effort)
    slo: tuple[float, float] | None = (1.0, 2.0)
    #: $ per GPU-hour by type; of others an H800 costs 5.28 $, and an H20 a third of that
    prices: dict[str, float] = {}
    #: ``none``: nothing to load, park or build, as the paper plans. ``table``: warm and cold starts by model size. A
    #: number: so many milliseconds of load on every switch, and no cold start
    switch: str | Millis = "none"
    #: ``none``: handing new weights to the rollout is a part of training, as the artifact measured it. ``table``: as
    #: long as the paper's table says; ``flat``, ``two``, ``rails``: as long as `rollmuxd.fabric.sync` computes
    sync: str = "none"
    #: what is held meanwhile, where ``sync`` says how long: ``phase``: both pools, in a phase of its own; ``within``:
    #: the training slot; ``between``: no GPU
    sync_place: str = "phase"
    #: other GPU types by pool: what phases take there is computed (``sim.other_gpus``)
    gpus: dict[PoolName, str] = {}
    #: fidelity ``network``: the fabric between hosts, and milliseconds in which its circuits change
    topology: str = "fat-tree"
    t_ocs_ms: float = 20.0
    #: host RAM per node, GB
    ram_gb: float = 2000.0
    #: nodes per pool; empty: bought on demand
    nodes: dict[PoolName, int] = {}
    #: fillers that work on idle nodes (phase fidelity)
    fillers: int = 0
    #: as many jobs at most; 0: as many as the workload has
    jobs: int = 0
    #: where the data files lie that are too large to come with us; "": ``ROLLMUX_DATA``
    data: str = ""
    #: of each workload's own settings: ``{"class": "RH-medium"}``
    more: dict[str, str] = {}


class Recipe(Protocol):
    """A workload that is read, and drawn again for each seed."""

    name: str

    def draw(self, seed: int) -> Workload:
        """The workload of one seed. Equal seeds, equal workloads; the policies that are compared share it."""
        ...
