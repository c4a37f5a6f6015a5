"""Jobs whose iterations are not all alike: series of phase times, scaled to a type's means."""

from collections.abc import Sequence
from typing import Final, TypeAlias

from rollmuxd.sim.workload import Durations
from rollmuxd.sim.workloads.shapes import Shape, ms

#: rollout and train of one iteration, in whatever unit
Step: TypeAlias = tuple[float, float]
#: what a job registers as its phases' times: see :func:`planned`
PLANS: Final = ("mean", "first10", "max")


def scaled(steps: Sequence[Step], means: Durations) -> tuple[Durations, ...]:
    """The steps as integer milliseconds, each phase scaled by one factor so that its mean is as given."""
    rollout = means[0] * len(steps) / sum(step[0] for step in steps) / 1000
    train = means[1] * len(steps) / sum(step[1] for step in steps) / 1000
    return tuple((ms(rollout * gen), ms(train * update)) for gen, update in steps)


def planned(series: Sequence[Durations], shape: Shape, plan: str) -> Durations:
    """What a job registers.

    ``mean``: of the whole series, as if the future were known. ``first10``: of the first ten iterations, which is what
    a short profile sees. ``max``: the longest of each phase, the paper's worst case.
    """
    if plan == "mean":
        return shape.planned
    seen = series[:10] if plan == "first10" else series
    if plan == "first10":
        return tuple(round(sum(phase) / len(seen)) for phase in zip(*seen, strict=True))
    return tuple(max(phase) for phase in zip(*seen, strict=True))
