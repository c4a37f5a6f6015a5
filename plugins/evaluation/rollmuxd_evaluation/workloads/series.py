"""Jobs whose iterations are not all alike: series of phase times, scaled to a type's means."""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from rollmuxd.core.config import PlanWith
from rollmuxd.core.ids import Millis
from rollmuxd.sim.workload import Durations, Options, Workload
from rollmuxd_evaluation.workloads.production import Production
from rollmuxd_evaluation.workloads.shapes import Shape, ms

#: rollout and train of one iteration, in whatever unit
Step: TypeAlias = tuple[float, float]
#: what a job registers as its phases' times: see :func:`planned`
PLANS: Final = ("mean", "first10", "max", "p90", "worst")


def scaled(steps: Sequence[Step], means: Durations) -> tuple[Durations, ...]:
    """The steps as integer milliseconds, each phase scaled by one factor so that its mean is as given."""
    rollout = means[0] * len(steps) / sum(step[0] for step in steps) / 1000
    train = means[1] * len(steps) / sum(step[1] for step in steps) / 1000
    return tuple((ms(rollout * gen), ms(train * update)) for gen, update in steps)


def planned(series: Sequence[Durations], shape: Shape, plan: str) -> Durations:
    """What a job registers.

    ``mean``: of the whole series, as if the future were known. ``first10``: of the first ten iterations, which is what
    a short profile sees. ``max``: the longest of each phase, the paper's worst case. ``p90`` and ``worst``: the mean;
    it is the policy that plans with a quantile of what it sees, if it follows that.
    """
    if plan == "first10":
        return tuple(round(sum(phase) / len(phase)) for phase in zip(*series[:10], strict=True))
    return tuple(max(phase) for phase in zip(*series, strict=True)) if plan == "max" else shape.planned


class Series(NamedTuple):
    """What a job's iterations take, and after what share of each rollout its tail begins, if that is known."""

    took: tuple[Durations, ...]
    tail_from: tuple[float, ...] = ()


#: draws the series of the next job: of its type, and for so many iterations
Drawn: TypeAlias = Callable[[Shape, int], Series]


class Iterated(Production):
    """Arrivals, durations and types of the production trace, each job with iterations of its own.

    A seed draws those, the SLOs, and which jobs stay if fewer are wanted.
    """

    def __init__(self, name: str, options: Options) -> None:
        super().__init__(name, options, ("plan",))
        self._plan = self._terms.choice("plan", PLANS)
        self._sees = PlanWith(self._plan) if self._plan in ("p90", "worst") else PlanWith.MEAN

    def draw(self, seed: int) -> Workload:
        """The workload of one seed."""
        drawn = self._drawn(seed)

        def iterations(shape: Shape, lasts_ms: Millis) -> dict[str, Any]:
            count = max(1, round(lasts_ms / sum(shape.planned)))
            took, tails = drawn(shape, count)
            plan = planned(took, shape, self._plan)
            return {"planned": plan, "series": took, "tail_from": tails, "iterations": count}

        return Workload(self.name, tuple(self._jobs(seed, iterations)), self._terms.pools(), self._sees)

    def _drawn(self, seed: int) -> Drawn:
        raise NotImplementedError
