"""The iterations of a daemon's jobs, from its facts: what ``rollmuxd estimate --observed`` works with."""

from collections.abc import Iterable
from statistics import fmean
from typing import Final

from rollmuxd.core.facts import Fact
from rollmuxd.sim.training_logs import Step
from rollmuxd.sim.workloads.journal import Reading, Run

#: finished iterations from which on they say something
LEAST: Final = 3
_TRAIN: Final = "train"


def observed(facts: Iterable[Fact]) -> dict[str, list[Step]]:
    """Each job's iterations, by its name, in the order in which the jobs came; of its last run that finished enough.

    A phase over one pool is rollout, or, where the pool is called ``train``, training; one over several hands on
    weights. Own gaps are the means of what was seen.
    """
    reading = Reading()
    for fact in facts:
        reading.hear(fact)
    reading.finish()
    found: dict[str, list[Step]] = {}
    for run in reading.runs:
        if len(run.series) >= LEAST and (steps := _steps(run)):
            found.pop(run.name, None)
            found[run.name] = steps
    return found


def _steps(run: Run) -> list[Step]:
    gap_s = sum(fmean(gaps) for gaps in run.gaps.values() if gaps) / 1000
    made = []
    for durations in run.series:
        seconds = {"rollout": 0.0, "train": 0.0, "sync": 0.0}
        for phase, took in zip(run.spec.phases, durations, strict=True):
            kind = "sync" if len(phase.pools) > 1 else "train" if phase.pools[0] == _TRAIN else "rollout"
            seconds[kind] += took / 1000
        made.append(Step(seconds["rollout"], seconds["train"], seconds["sync"], gap_s))
    return [step for step in made if step.rollout_s > 0 and step.train_s > 0]
