"""From a job's type to what it registers: widths, times, states, starts; and the pools it runs on.

Two pools of nodes with eight GPUs each: ``rollout`` (H20) and ``train`` (H800), as in the RollMux paper (arXiv
2512.11306), whose tables are below. Times are seconds where a table has them so, and integer milliseconds everywhere
else; 1 GB is 1000 MB.
"""

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Final, NamedTuple, TypeVar, cast

from msgspec import Struct
from msgspec.structs import replace

from rollmuxd.core.ids import Millis, PoolName
from rollmuxd.core.spec import Asynchronous, JobSpec, PhaseSpec, StateSpec, Want
from rollmuxd.fabric.sync import Links, Way, seconds
from rollmuxd.sim.inside import Inside, drawn
from rollmuxd.sim.workload import Alone, Durations, Options, Pool, SimJob
from rollmuxd.sim.workloads.options import PRICES, check, nearest, thinned

T = TypeVar("T")

ROLLOUT: Final = "rollout"
TRAIN: Final = "train"
SYNC: Final = "sync"
GPUS: Final = 8
GPU_TYPES: Final[Mapping[PoolName, str]] = {ROLLOUT: "H20", TRAIN: "H800"}


class Model(NamedTuple):
    """What a model of one size needs per 8-GPU node: host RAM (table 2), and starts (figure 4)."""

    rollout_gb: float
    train_gb: float
    rollout_cold_s: float
    rollout_warm_s: float
    train_cold_s: float
    train_warm_s: float


#: by billions of parameters
MODELS: Final[Mapping[float, Model]] = {
    3: Model(113.4, 156.2, 25.3, 0.8, 26.7, 1.9),
    7: Model(275.7, 240.0, 38.8, 0.9, 32.7, 4.1),
    14: Model(445.4, 456.1, 60.4, 1.8, 59.0, 4.7),
    32: Model(490.3, 520.4, 81.7, 1.7, 81.2, 5.9),
}


#: seconds to send weights from pool to pool as the paper does, by billions of parameters: on one node of each pool, and
#: on more
TABLE: Final[Mapping[float, tuple[float, float]]] = {7: (0.9, 3.1), 14: (1.7, 5.8), 32: (3.9, 12.3)}
#: billions of parameters that the models really have, of Qwen2.5 by what they are called; two bytes each
PARAMETERS: Final[Mapping[float, float]] = {3: 3.09, 7: 7.62, 14: 14.77, 32: 32.76}
#: the paper's links, a card per GPU: 20 Gbit/s between the clusters, and 400 within. What a flat all-gather reaches of
#: them, and the broadcast on one node (NVLink) and across nodes, are fitted to its table: all within 6 %
ONE_NODE: Final = Links(
    slow=(2.5e9,) * 8, hosts=1, fabric=4e11, broadcast=1.9e11, inside=1.9e11, flat_share=0.82, start_s=0.05
)
MORE_NODES: Final = Links(
    slow=(2.5e9,) * 16, hosts=2, fabric=4e11, broadcast=5.9e9, inside=1.9e11, flat_share=0.75, start_s=0.05
)
#: what a host receives before it hands it on
CHUNK: Final = 4 << 20
#: co-located there is nowhere to hand them to
AT_ONCE: Final = 1


def sync_ms(how: str, size_b: float, nodes: int) -> Millis:
    """What handing on the weights takes. ``table``: as the paper measured; else computed for the paper's links."""
    if how == "table":
        column = int(nodes > 1)
        return ms(_between({size: row[column] for size, row in TABLE.items()}, size_b))
    links = MORE_NODES if nodes > 1 else ONE_NODE
    # (A flat all-gather was measured from start to end; there is nothing to add.)
    links = replace(links, start_s=0.0) if how == "flat" else links
    return ms(seconds(cast("Way", how), 2e9 * _between(PARAMETERS, size_b), links, CHUNK))


def _between(rows: Mapping[float, float], size_b: float) -> float:
    """Between two rows linear in the parameters, outside of them in proportion."""
    sizes = list(rows)
    for low, high in itertools.pairwise(sizes):
        if low <= size_b <= high:
            return rows[low] + (size_b - low) / (high - low) * (rows[high] - rows[low])
    nearest_b = sizes[0] if size_b < sizes[0] else sizes[-1]
    return rows[nearest_b] * size_b / nearest_b


def model(size_b: float) -> Model:
    """The row of a model size, in billions of parameters.

    Sizes between two rows (4B and 8B) are interpolated linearly in the number of parameters. Smaller than the smallest
    is as the smallest. Larger than the largest is as the largest, since it is spread over more nodes (the OSDI text
    says so of 70B).
    """
    held = min(max(size_b, min(MODELS)), max(MODELS))
    columns = (dict(zip(MODELS, column, strict=True)) for column in zip(*MODELS.values(), strict=True))
    return Model(*(_between(column, held) for column in columns))


class Shape(Struct, frozen=True):
    """A type of jobs: what the trace calls it, how wide it is, what its phases take."""

    kind: str
    #: billions of parameters: decides RAM and starts
    model_b: float
    #: mean of rollout and train
    planned: Durations
    #: nodes it wants of ``rollout`` and ``train``
    nodes: tuple[int, int] = (1, 1)
    #: nodes it has if it has them to itself
    footprint: tuple[int, int] = (1, 1)
    #: what rollout and train take co-located on the training nodes of its footprint; None: not known
    colocated: Durations | None = None
    #: the fewest GPUs that a rollout starts on, and that its tail keeps; 0: all
    min_gpus: int = 0
    #: for fidelity ``engine``: the inside of its rollouts; None: not known
    inside: Inside | None = None


#: for fidelity ``engine``: the single-turn models (research 1.6). What 4B and 8B wait for is mostly an environment
SINGLE_TURN: Final[Mapping[float, str]] = {7: "qwen2.5-7b", 14: "qwen2.5-14b", 32: "qwen2.5-32b"}
#: what a rollout takes beside its requests, by the profiles (``sim validate``, V6)
FIXED_MS: Final[Millis] = 12_500


@cache
def inside(model_b: float, limit: int, responses: int = 1024, tp: int = 2, step_ms: float = 2.0) -> Inside | None:
    """The inside of a type's rollouts; None: not known.

    The paper publishes neither responses per step nor the degree nor the engine's own time. With these the profiles of
    7B, 14B and 32B are met within 10 % in the mean.
    """
    name = SINGLE_TURN.get(model_b)
    if name is None:
        return None
    made = drawn(name, GPU_TYPES[ROLLOUT].lower(), tp, limit, responses)
    return replace(made, step_ms=step_ms, fixed_ms=FIXED_MS)


def ms(seconds: float) -> Millis:
    """Seconds as integer milliseconds, at least one."""
    return max(1, round(seconds * 1000))


class Terms:
    """What the options come to: prices, pools, states, and the rest of a registration.

    Raises:
        ValueError: an option makes no sense; says which, and what would.
    """

    def __init__(self, options: Options, more: Sequence[str] = ()) -> None:
        check(options, more, tuple(GPU_TYPES))
        self.options = options
        types = (*GPU_TYPES.values(), *options.gpus.values())
        for gpu_type in options.prices:
            if gpu_type not in types:
                raise ValueError(f"a price is given for {gpu_type!r}; the GPUs are {', '.join(types)}")
        self._prices = {**PRICES, **options.prices}

    # ---- what a workload has of its own ------------------------------------------------------------------------------

    def choice(self, key: str, known: Sequence[str]) -> str:
        """A word of the workload's own settings; the first one is the default."""
        word = self.options.more.get(key, known[0])
        if word not in known:
            raise ValueError(f"{key} is {word!r}{nearest(word, known)} ({', '.join(known)})")
        return word

    def amount(self, key: str, default: float, least: float = 0.0, most: float = math.inf) -> float:
        """A number of the workload's own settings."""
        given = self.options.more.get(key, "")
        if not given:
            return default
        try:
            value = float(given)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and least <= value <= most):
            upper = f" and at most {most:g}" if most < math.inf else ""
            raise ValueError(f"{key} is {given!r}: expected a number of at least {least:g}{upper}")
        return value

    # ---- for each seed -----------------------------------------------------------------------------------------------

    def slos(self, count: int, seed: int) -> list[float | None]:
        """One SLO per job, in order of arrival."""
        bounds = self.options.slo
        if bounds is None:
            return [None] * count
        draw = random.Random(f"slo {seed}")
        return [draw.uniform(*bounds) for _ in range(count)]

    def thinned(self, items: Sequence[T], seed: int) -> Sequence[T]:
        """As many as were asked for, chosen at random, in their order."""
        return thinned(items, self.options.jobs, seed)

    # ---- of the parts ------------------------------------------------------------------------------------------------

    def pools(self, nodes: Mapping[PoolName, int] | None = None) -> tuple[Pool, ...]:
        """Both pools; ``nodes``: the workload's own inventory, unless the options give another."""
        there = {**(nodes or {}), **self.options.nodes}
        return tuple(
            Pool(
                name=name,
                gpu_type=gpu_type,
                price_per_gpu_hour=self._prices[gpu_type],
                gpus_per_node=GPUS,
                ram_mb=round(self.options.ram_gb * 1000),
                nodes=there.get(name),
            )
            for name, gpu_type in GPU_TYPES.items()
        )

    def cold_ms(self, size_b: float) -> dict[PoolName, Millis]:
        """What building the engine on each pool's nodes takes, where that counts."""
        row = model(size_b)
        by_size = {ROLLOUT: ms(row.rollout_cold_s), TRAIN: ms(row.train_cold_s)}
        return by_size if self.options.switch == "table" else {}

    def states(self, size_b: float) -> tuple[StateSpec, ...]:
        """What a job keeps, per pool.

        Parking takes as long as a warm start where starts are by table. The paper publishes no time for the way from
        GPU to host RAM, which is as wide. A number of milliseconds is the load of every switch, and parking is free.
        """
        row, switch, free = model(size_b), self.options.switch, dict.fromkeys(GPU_TYPES, 0)
        warm = {ROLLOUT: ms(row.rollout_warm_s), TRAIN: ms(row.train_warm_s)}
        load = warm if switch == "table" else dict.fromkeys(GPU_TYPES, switch) if isinstance(switch, int) else free
        park = warm if switch == "table" else free
        ram = {ROLLOUT: row.rollout_gb, TRAIN: row.train_gb}
        return tuple(
            StateSpec(pool=pool, ram_mb=round(ram[pool] * 1000), driver="sim", load_ms=load[pool], park_ms=park[pool])
            for pool in GPU_TYPES
        )

    def job(
        self,
        name: str,
        shape: Shape,
        *,
        arrives_ms: Millis,
        lasts_ms: Millis,
        slo: float | None,
        planned: Durations | None = None,
        series: tuple[Durations, ...] = (),
        tail_from: tuple[float, ...] = (),
        iterations: int = 0,
    ) -> SimJob:
        """A job of a type. ``planned``: what it registers, if not its type's means; ``series``: what really comes."""
        cold_ms = self.cold_ms(shape.model_b)
        cold = max(cold_ms.values(), default=0)
        took = series or (shape.planned,)
        times, alone = planned or shape.planned, shape.colocated
        phases = [
            PhaseSpec(ROLLOUT, (ROLLOUT,), planned_ms=times[0], min_gpus=shape.min_gpus),
            PhaseSpec(TRAIN, (TRAIN,), planned_ms=times[1]),
        ]
        if self.options.sync != "none":
            within, takes = (sync_ms(how, shape.model_b, max(shape.nodes)) for how in ("table", self.options.sync))
            place = self.options.sync_place
            took = tuple(_handed_on(each, within, takes, place) for each in took)
            times = _handed_on(times, within, takes, place)
            phases[1] = replace(phases[1], planned_ms=times[1])
            if place == "between":  # no GPU is held: it is the job's own time before it asks for the rollout
                phases[0] = replace(phases[0], gap_ms=takes)
            elif place == "phase":
                phases.append(PhaseSpec(SYNC, (ROLLOUT, TRAIN), planned_ms=takes))
                alone = None if alone is None else (*alone, AT_ONCE)
        return SimJob(
            name=name,
            kind=shape.kind,
            arrives_ms=arrives_ms,
            lasts_ms=lasts_ms,
            spec=JobSpec(
                name=name,
                phases=tuple(phases),
                wants=(Want(ROLLOUT, nodes=shape.nodes[0]), Want(TRAIN, nodes=shape.nodes[1])),
                # building the engines is exclusive on everything that the job will use
                side=(PhaseSpec("init", (ROLLOUT, TRAIN), planned_ms=cold),) if cold else (),
                states=self.states(shape.model_b),
                slo=slo,
            ),
            series=took,
            footprint=dict(zip(GPU_TYPES, shape.footprint, strict=True)),
            colocated=None if alone is None else Alone(TRAIN, shape.footprint[1], alone),
            cold_ms=cold_ms,
            tail_from=tail_from,
            iterations=iterations,
            inside=shape.inside,
        )


def apart(job: SimJob) -> SimJob:
    """The same job, but asynchronous: each rollout runs on nodes of its own, while the one before it is trained on.

    Its slot is for all the rest of an iteration, weights included.
    """
    own_ms = sum(phase.gap_ms for phase in job.spec.phases)
    return replace(
        job,
        spec=replace(
            job.spec,
            phases=(PhaseSpec(TRAIN, (TRAIN,), planned_ms=own_ms + sum(job.planned[1:])),),
            wants=tuple(want for want in job.spec.wants if want.pool == TRAIN),
            side=tuple(replace(phase, pools=(TRAIN,)) for phase in job.spec.side),
            states=tuple(state for state in job.spec.states if state.pool == TRAIN),
            asynchronous=Asynchronous(job.planned[0]),
        ),
        series=tuple((own_ms + sum(took[1:]),) for took in job.series),
        batches=tuple(took[0] for took in job.series),
        footprint={TRAIN: job.footprint[TRAIN]},
        colocated=None,
        cold_ms={pool: cold for pool, cold in job.cold_ms.items() if pool == TRAIN},
        tail_from=(),
        inside=None,
    )


def _handed_on(took: Durations, within: Millis, takes: Millis, place: str) -> Durations:
    """Rollout, and training without what the weights took in it; and what they take now, where that is a slot's."""
    rollout, trains = took[0], max(1, took[1] - within)
    if place == "phase":
        return (rollout, trains, takes)
    return (rollout, trains + takes if place == "within" else trains)
