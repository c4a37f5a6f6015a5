"""The iterations of a daemon's jobs, from its facts: what ``rollmuxd estimate --observed`` and ``report`` work with."""

from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any, Final

import msgspec
from msgspec import Struct

from rollmuxd.core.facts import AnyFact, Fact, JobRegistered
from rollmuxd.core.ids import JobId
from rollmuxd.core.spec import JobSpec, PhaseSpec
from rollmuxd.sim.training_logs import Step
from rollmuxd.sim.workloads.journal import Reading, Run

#: finished iterations from which on they say something
LEAST: Final = 3
#: of a job, so many of its last iterations count: what it does now
ITERATIONS: Final = 150
_ROLLOUT, _TRAIN, _SYNC = "rollout", "train", "sync"


class Seen(Struct, frozen=True):
    """What was seen of a job."""

    steps: list[Step]
    #: the one pool on which both phases ran, one after the other; empty: each had its own
    pool: str = ""


def fact_of(shown: Mapping[str, Any]) -> Fact:
    """A fact as ``/v1/facts`` has it. Raises :class:`ValueError` for what is none (of this version)."""
    try:
        found: Fact = msgspec.convert(shown, AnyFact)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    return found


def observed(facts: Iterable[Fact]) -> dict[str, Seen]:
    """What was seen of each job, by its name, in the order in which the jobs came; of its last run that did enough.

    A phase is rollout or training by its name, else by its pool; one over several pools hands on weights. Own gaps are
    the means of what was seen.
    """
    reading = Reading()
    for fact in facts:
        reading.hear(fact)
    reading.finish()
    found: dict[str, Seen] = {}
    for run in reading.runs:
        if len(run.series) >= LEAST and (steps := _steps(run)):
            pools = {pool for phase in run.spec.phases for pool in phase.pools}
            found.pop(run.spec.name, None)
            found[run.spec.name] = Seen(steps[-ITERATIONS:], pools.pop() if len(pools) == 1 else "")
    return found


def as_registered(
    facts: Iterable[Fact], jobs: Iterable[tuple[JobId, str, int, Mapping[str, Iterable[str]]]]
) -> list[Fact]:
    """The facts, and before them registrations of jobs (id, name, run, pools by phase) that they only continue."""
    told = list(facts)
    begun = {fact.job for fact in told if isinstance(fact, JobRegistered)}
    at = told[0].at if told else 0
    before: list[Fact] = [
        JobRegistered(
            at, job, "", "", run, JobSpec(name, tuple(PhaseSpec(it, tuple(on)) for it, on in cycle.items()), ())
        )
        for job, name, run, cycle in jobs
        if job not in begun
    ]
    return before + told


def _kind(phase: PhaseSpec) -> str:
    if len(phase.pools) > 1 or phase.name == _SYNC:
        return _SYNC
    if phase.name in {_ROLLOUT, _TRAIN}:
        return phase.name
    return _TRAIN if phase.pools[0] == _TRAIN else _ROLLOUT


def _steps(run: Run) -> list[Step]:
    gap_s = sum(fmean(gaps) for gaps in run.gaps.values() if gaps) / 1000
    made = []
    for durations in run.series:
        seconds = {_ROLLOUT: 0.0, _TRAIN: 0.0, _SYNC: 0.0}
        for phase, took in zip(run.spec.phases, durations, strict=True):
            seconds[_kind(phase)] += took / 1000
        made.append(Step(seconds[_ROLLOUT], seconds[_TRAIN], seconds[_SYNC], gap_s))
    return [step for step in made if step.rollout_s > 0 and step.train_s > 0]
