"""Equal asynchronous runs on one train node, to see what sharing their trainer gains.

``jobs`` runs (2) make a batch in ``pace`` seconds (100), and train for the share ``share`` of that (0.4). ``ahead`` is
how many batches they begin beyond the one that they train on (1). ``noise`` is the deviation of the logarithm of both
times (0.2), which keep their means. A hand-over from one run to the next moves states for ``switch`` seconds (0). The
runs last ``hours`` (12). No run has an SLO: ``slo`` is ignored.
"""

import math
import random
from typing import Final

from rollmuxd.core.ids import Millis
from rollmuxd.core.spec import Asynchronous, JobSpec, PhaseSpec, StateSpec, Want
from rollmuxd.sim.workload import Options, SimJob, Workload
from rollmuxd_evaluation.workloads.shapes import TRAIN, Terms, ms

#: different steps of a run; after the last the first comes again
STEPS: Final = 256


class AsynchronousRuns:
    """A few runs, all there from the start; each seed draws other times."""

    def __init__(self, name: str, options: Options) -> None:
        self.name = name
        self._terms = Terms(options, ("jobs", "pace", "share", "ahead", "noise", "switch", "hours"))
        amount = self._terms.amount
        self._jobs, self._ahead = round(amount("jobs", 2, 1)), round(amount("ahead", 1))
        self._pace_ms = ms(amount("pace", 100.0, 0.01))
        self._train_ms = round(amount("share", 0.4, 0.001) * self._pace_ms)
        self._noise, self._switch_ms = amount("noise", 0.2), round(1000 * amount("switch", 0.0))
        self._lasts_ms = ms(3600 * amount("hours", 12.0, 0.01))

    def draw(self, seed: int) -> Workload:
        """The workload of one seed."""
        jobs = tuple(self._job(number, random.Random(f"asynchronous {seed} {number}")) for number in range(self._jobs))
        return Workload(self.name, jobs, self._terms.pools({TRAIN: 1}))

    def _job(self, number: int, draw: random.Random) -> SimJob:
        load = self._switch_ms // 2
        spec = JobSpec(
            name=f"run-{number + 1}",
            phases=(PhaseSpec(TRAIN, (TRAIN,), self._train_ms),),
            wants=(Want(TRAIN),),
            states=(StateSpec(TRAIN, load_ms=load, park_ms=self._switch_ms - load),) if self._switch_ms else (),
            asynchronous=Asynchronous(self._pace_ms, self._ahead),
        )
        batches = tuple(self._drawn(self._pace_ms, draw) for _ in range(STEPS))
        series = tuple((self._drawn(self._train_ms, draw),) for _ in range(STEPS))
        return SimJob(spec.name, "asynchronous", 0, self._lasts_ms, spec, series, {TRAIN: 1}, batches=batches)

    def _drawn(self, mean: Millis, draw: random.Random) -> Millis:
        return max(1, round(mean * math.exp(draw.gauss(-(self._noise**2) / 2, self._noise))))
