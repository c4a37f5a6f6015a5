"""A workload on other GPU types than it was measured on: what its phases take there, by :mod:`rollmuxd.rollout`.

A rollout is the first phase of a cycle. Where a job's inside is known that is played on both types, and else one of a
7B model. A later phase over one pool is training. Phases over several pools, side phases and starts stay as they are.
"""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from msgspec.structs import replace

from rollmuxd.core.ids import Millis, PoolName
from rollmuxd.core.spec import PhaseSpec
from rollmuxd.rollout.elsewhere import generation, training
from rollmuxd.rollout.hardware import Gpu, gpu
from rollmuxd.rollout.models import model
from rollmuxd.sim.executions.engines import course
from rollmuxd.sim.inside import Inside
from rollmuxd.sim.workload import Alone, Durations, SimJob, Workload

#: what generates where a job does not say
MODEL: Final = "qwen2.5-7b"

#: of each pool that changes: its own type, and the other
_Types = Mapping[PoolName, tuple[Gpu, Gpu]]


def on(workload: Workload, types: Mapping[PoolName, str], prices: Mapping[str, float]) -> Workload:
    """The workload where these pools have GPUs of other types. A type without a price costs what the pool's own does.

    Raises:
        ValueError: there is no such pool, no figures of a type, or a job's model does not fit on it.
    """
    pools = {pool.name: pool for pool in workload.pools}
    for name in types:
        if name not in pools:
            raise ValueError(f"--gpu {name}={types[name]}: there is no pool {name} (there are {', '.join(pools)})")
    change = {name: (gpu(pools[name].gpu_type), gpu(to)) for name, to in types.items()}
    there = []
    for pool in workload.pools:
        to = types.get(pool.name, pool.gpu_type)
        price = prices.get(to, pool.price_per_gpu_hour) if pool.name in types else pool.price_per_gpu_hour
        if not 0 <= price < math.inf:
            raise ValueError(f"the price of {to} is {price:g}: dollars per GPU-hour are at least 0, and finite")
        there.append(replace(pool, gpu_type=to, price_per_gpu_hour=price))
    return replace(workload, pools=tuple(there), jobs=tuple(_moved(job, change) for job in workload.jobs))


def _moved(job: SimJob, change: _Types) -> SimJob:
    phases = job.spec.phases
    factors = tuple(_factor(job.inside, phase, first=at == 0, change=change) for at, phase in enumerate(phases))
    inside = job.inside
    if inside is not None and phases[0].pools[0] in change:
        inside = _elsewhere(inside, change[phases[0].pools[0]][1].name)
    alone = job.colocated
    if alone is not None and alone.pool in change:
        own = [replace(phase, pools=(alone.pool,)) if len(phase.pools) == 1 else phase for phase in phases]
        both = tuple(_factor(job.inside, phase, first=at == 0, change=change) for at, phase in enumerate(own))
        alone = Alone(alone.pool, alone.nodes, _times(alone.planned, both))
    planned = [
        phase if phase.planned_ms is None else replace(phase, planned_ms=_times((phase.planned_ms,), (factor,))[0])
        for phase, factor in zip(phases, factors, strict=True)
    ]
    return replace(
        job,
        spec=replace(job.spec, phases=tuple(planned)),
        series=tuple(_times(each, factors) for each in job.series),
        colocated=alone,
        inside=inside,
    )


def _factor(inside: Inside | None, phase: PhaseSpec, *, first: bool, change: _Types) -> float:
    if phase.pools[0] not in change or len(phase.pools) > 1:
        return 1.0
    old, new = change[phase.pools[0]]
    if not first:
        return training(old, new)
    return generation(old, new, model(MODEL)) if inside is None else _played(inside, old.name, new.name)


@lru_cache(maxsize=256)
def _elsewhere(inside: Inside, name: str) -> Inside:
    return replace(inside, gpu=name)


@lru_cache(maxsize=256)
def _played(inside: Inside, old: str, new: str) -> float:
    took: list[Millis] = []
    for name in (new, old):
        at = _elsewhere(inside, name)
        took.append(course(at, 0, ((0, tuple(range(8))),)).ends - inside.fixed_ms)
    return took[0] / took[1]


def _times(each: Durations, factors: tuple[float, ...]) -> Durations:
    return tuple(max(1, round(took * factor)) for took, factor in zip(each, factors, strict=True))
