"""The paper's simulation study: nine classes of jobs, 300 jobs over 580 hours.

RollMux (arXiv 2512.11306), table 6: balanced (BL), rollout-heavy (RH) and train-heavy (TH) jobs, each small, medium and
large. Phase times are drawn uniformly for each job, and stay. A kind (``BL``) draws one of its three sizes for each
job, ``mixed`` one of the nine.

Where the paper is silent, or what it used was not found:

- The paper's arrivals and durations are of a segment of Philly that is not identified (300 jobs, 580 h, mean 14.4 h,
  longest 142.9 h). Durations here are log-normal (from the fit to Philly jobs of an hour and longer). Each draw is
  stretched and scaled so that mean and longest are the paper's.
- Arrivals are uniform over the span.
- Models are not named: all are taken as 7B, the most frequent of production (``model=14`` for another, in billions of
  parameters). It decides RAM and starts only.
- Every job is one node wide on each pool. No co-located times are published for these: there are none.
"""

import math
import random
from typing import Final, TypeAlias

from rollmuxd.sim.workload import Options, Workload
from rollmuxd_evaluation.workloads.shapes import Shape, Terms, ms

Range: TypeAlias = tuple[int, int]

#: seconds of rollout and of train (table 6)
CLASSES: Final[dict[str, tuple[Range, Range]]] = {
    "BL-small": ((50, 100), (50, 100)),
    "BL-medium": ((100, 200), (100, 200)),
    "BL-large": ((200, 300), (200, 300)),
    "RH-small": ((100, 200), (25, 50)),
    "RH-medium": ((200, 400), (50, 100)),
    "RH-large": ((400, 600), (100, 200)),
    "TH-small": ((25, 50), (100, 200)),
    "TH-medium": ((50, 100), (200, 400)),
    "TH-large": ((100, 200), (400, 600)),
}
KINDS: Final = ("BL", "RH", "TH")
JOBS: Final = 300
SPAN_H: Final = 580.0
MEAN_H: Final = 14.4
LONGEST_H: Final = 142.9
#: of ln seconds, fitted to Philly jobs of one hour and longer; shorter ones are drawn again
LN_MEAN, LN_SD, SHORTEST_S = 9.40, 1.19, 3600.0


def classes_of(name: str) -> list[str]:
    """The classes that a workload of this name draws from."""
    if name in CLASSES:
        return [name]
    return [it for it in CLASSES if name == "mixed" or it.startswith(f"{name}-")]


def durations_h(count: int, draw: random.Random) -> list[float]:
    """Hours: log-normal, of the paper's mean and longest. (A stretch of ln keeps the order and the form.)"""
    drawn: list[float] = []
    while len(drawn) < count:
        seconds = draw.lognormvariate(LN_MEAN, LN_SD)
        if seconds >= SHORTEST_S:
            drawn.append(seconds)
    longest = max(drawn)

    def mean_of(stretch: float) -> float:
        return LONGEST_H * math.fsum(math.pow(it / longest, stretch) for it in drawn) / count

    low, high = 0.05, 20.0
    for _ in range(60):  # the mean falls as the stretch grows
        stretch = (low + high) / 2
        low, high = (stretch, high) if mean_of(stretch) >= MEAN_H else (low, stretch)
    stretch = (low + high) / 2
    return [LONGEST_H * math.pow(it / longest, stretch) for it in drawn]


class Classes:
    """300 jobs of one class, of one kind or of all; a seed draws everything."""

    def __init__(self, name: str, options: Options) -> None:
        self.name = name
        self._terms = Terms(options, ("model",))
        self._model_b = self._terms.amount("model", 7.0, 0.1)
        self._classes = classes_of(name)

    def draw(self, seed: int) -> Workload:
        """The workload of one seed."""
        arrivals = random.Random(f"arrivals {seed}")
        come = sorted(arrivals.uniform(0, SPAN_H) for _ in range(JOBS))
        last = durations_h(JOBS, random.Random(f"durations {seed}"))
        draw = random.Random(f"classes {seed}")
        drawn = []
        for number, (hour, hours) in enumerate(zip(come, last, strict=True)):
            kind = draw.choice(self._classes)
            rollout, train = (ms(draw.uniform(*bounds)) for bounds in CLASSES[kind])
            drawn.append((f"job{number}", Shape(kind, self._model_b, (rollout, train)), hour, hours))
        chosen = self._terms.thinned(drawn, seed)
        jobs = tuple(
            self._terms.job(name, shape, arrives_ms=round(hour * 3.6e6), lasts_ms=ms(hours * 3600), slo=slo)
            for (name, shape, hour, hours), slo in zip(chosen, self._terms.slos(len(chosen), seed), strict=True)
        )
        return Workload(self.name, jobs, self._terms.pools())
