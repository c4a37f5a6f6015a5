"""Jobs whose iterations are not all alike: series of phase times, scaled to a type's means."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

from rollmuxd.core.config import PlanWith
from rollmuxd.sim.workload import Durations, Options, SimJob, Workload
from rollmuxd_evaluation.workloads import production
from rollmuxd_evaluation.workloads.shapes import Shape, Terms, ms

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
    if plan in ("mean", "p90", "worst"):
        return shape.planned
    seen = series[:10] if plan == "first10" else series
    if plan == "first10":
        return tuple(round(sum(phase) / len(seen)) for phase in zip(*seen, strict=True))
    return tuple(max(phase) for phase in zip(*seen, strict=True))


class Series(NamedTuple):
    """What a job's iterations take, and after what share of each rollout its tail begins, if that is known."""

    took: tuple[Durations, ...]
    tail_from: tuple[float, ...] = ()


#: draws the series of the next job: of its type, and for so many iterations
Drawn: TypeAlias = Callable[[Shape, int], Series]


class Iterated:
    """Arrivals, durations and types of the production trace, each job with iterations of its own.

    A seed draws those, the SLOs, and which jobs stay if fewer are wanted.
    """

    def __init__(self, name: str, summary: str, options: Options) -> None:
        self.name, self.summary = name, summary
        self._terms = Terms(options, ("plan",))
        self._plan = self._terms.choice("plan", PLANS)
        self._sees = PlanWith(self._plan) if self._plan in ("p90", "worst") else PlanWith.MEAN
        self._profiles = production.profiles()
        self._arrivals = production.arrivals()

    def draw(self, seed: int) -> Workload:
        """The workload of one seed."""
        return Workload(self.name, tuple(self._jobs(seed)), self._terms.pools(), self._source(), self._sees)

    def _source(self) -> str:
        raise NotImplementedError

    def _drawn(self, seed: int) -> Drawn:
        raise NotImplementedError

    def _jobs(self, seed: int) -> Iterator[SimJob]:
        chosen = self._terms.thinned(self._arrivals, seed)
        drawn = self._drawn(seed)
        for it, slo in zip(chosen, self._terms.slos(len(chosen), seed), strict=True):
            shape = self._profiles[it.kind]
            lasts = ms(it.duration_s)
            count = max(1, round(lasts / sum(shape.planned)))
            series = drawn(shape, count)
            yield self._terms.job(
                it.job,
                shape,
                arrives_ms=round(it.submit_s * 1000),
                lasts_ms=lasts,
                slo=slo,
                planned=planned(series.took, shape, self._plan),
                series=series.took,
                tail_from=series.tail_from,
                iterations=count,
            )
