"""Is sharing worth it? Logged steps of one's own jobs, played by the scheduler itself, against two ways without it.

The jobs begin together, each somewhere else in its log, and share a rollout pool and a train pool of one node each.
Their wall time is set against the same jobs one after the other on these pools, and one after the other with both
phases on all the GPUs (*co-located*). How much faster a phase gets on more GPUs is not in a log, so each figure is a
range: from phases that lose nothing by being spread to phases that speed up with the GPUs' number to the power of 0.7.
"""

from collections.abc import Sequence
from random import Random
from statistics import fmean, median
from typing import Final

from msgspec import Struct

from rollmuxd.core.spec import JobSpec, PhaseSpec, StateSpec, Want
from rollmuxd.sim import fluid, world
from rollmuxd.sim.policies import MAX_GROUP, RollMuxPaper
from rollmuxd.sim.training_logs import Step
from rollmuxd.sim.workload import Pool, SimJob, Workload

#: below this gain sharing is not worth its trouble
WORTH: Final = 1.15
#: exponents of a phase's speed in the number of its GPUs
SCALING: Final = (1.0, 0.7)
#: where in their logs the jobs begin is drawn so often
DRAWS: Final = 5
ITERATIONS: Final = (30, 150)


class Gpus(Struct, frozen=True):
    """What the jobs would share, and what their logs were made on."""

    rollout: int
    train: int
    #: both phases ran on the same GPUs, so many; 0: on pools as these
    ran_on: int = 0

    @property
    def all(self) -> int:
        """Both pools."""
        return self.rollout + self.train


class Costs(Struct, frozen=True):
    """What moving a job's state takes."""

    #: to load a pool's state, and the same to park it
    switch_s: float = 5.0
    #: parked, of each host's RAM
    ram_gb: float = 0.0
    host_ram_gb: float = 2_000.0


class Range(Struct, frozen=True):
    """A figure as it comes out at both ends of what is not known, and between."""

    low: float
    middle: float
    high: float


class Against(Struct, frozen=True):
    """The same jobs without sharing."""

    baseline: str
    wall_s: Range
    gain: Range
    worth: bool


class Estimate(Struct, frozen=True):
    """What sharing would do for these jobs."""

    jobs: int
    iterations: int
    shared_s: Range
    #: mean of the jobs' mean iteration over their own alone, on these pools
    slowdown: Range
    against: tuple[Against, ...]
    #: what stands in the way whatever the gain; empty: nothing
    hindrance: str = ""


def estimate(logs: Sequence[Sequence[Step]], gpus: Gpus, costs: Costs, *, seed: int = 0) -> Estimate:
    """What sharing would do for jobs like these, one of each log.

    Raises ValueError for numbers that cannot be.
    """
    _check(logs, gpus, costs)
    count = max(ITERATIONS[0], min(ITERATIONS[1], max(len(log) for log in logs)))
    shared, slowdowns, in_turn, together = [], [], [], []
    for scaling in SCALING:
        for number in range(DRAWS):
            series = [_drawn(log, count, seed, number, who) for who, log in enumerate(logs)]
            split = [[_on(step, gpus, gpus.rollout, gpus.train, scaling) for step in mine] for mine in series]
            whole = [[_on(step, gpus, gpus.all, gpus.all, scaling) for step in mine] for mine in series]
            played = world.run(_workload(split, gpus, costs), RollMuxPaper(), seed=number, accounting=fluid.WORK)
            shared.append(played.span_ms / 1000)
            slowdowns.append(fmean(job.slowdown or 1.0 for job in played.jobs))
            in_turn.append(sum(step.total_s for mine in split for step in mine))
            # its engine makes way for its trainer, and comes back, in each iteration
            together.append(sum(step.total_s + 2 * costs.switch_s for mine in whole for step in mine))
    return Estimate(
        jobs=len(logs),
        iterations=count,
        shared_s=_range(shared),
        slowdown=_range(slowdowns),
        against=(
            _against("one after the other on the same pools", in_turn, shared),
            _against(f"one after the other, each on all {gpus.all} GPUs", together, shared),
        ),
        hindrance=_hindrance(len(logs), costs),
    )


def _check(logs: Sequence[Sequence[Step]], gpus: Gpus, costs: Costs) -> None:
    if not 2 <= len(logs) <= MAX_GROUP:
        raise ValueError(f"{len(logs)} jobs: from two on they can share, and a group has five at most")
    if not all(logs):
        raise ValueError("a log without steps says nothing")
    for name, value in (("rollout", gpus.rollout), ("train", gpus.train)):
        if value < 1:
            raise ValueError(f"{value} {name} GPUs: at least one is needed")
    if gpus.ran_on < 0 or costs.switch_s < 0 or costs.ram_gb < 0 or costs.host_ram_gb < 0:
        raise ValueError("numbers of GPUs, seconds and GB are not negative")


def _hindrance(jobs: int, costs: Costs) -> str:
    needed = jobs * costs.ram_gb
    if needed <= costs.host_ram_gb:
        return ""
    return f"parked, {jobs} jobs need {needed:g} GB of each host's RAM, and it has {costs.host_ram_gb:g} GB"


def _drawn(log: Sequence[Step], count: int, seed: int, number: int, who: int) -> list[Step]:
    """So many steps of a log, from a drawn one on; after the last comes the first."""
    begin = Random(f"estimate {seed} {number} {who}").randrange(len(log))
    return [log[(begin + step) % len(log)] for step in range(count)]


def _on(step: Step, gpus: Gpus, rollout: int, train: int, scaling: float) -> Step:
    """The step on so many GPUs."""
    ran = (gpus.ran_on, gpus.ran_on) if gpus.ran_on else (gpus.rollout, gpus.train)
    return Step(
        step.rollout_s * (ran[0] / rollout) ** scaling,
        step.train_s * (ran[1] / train) ** scaling,
        step.sync_s,
        step.gap_s,
    )


def _workload(jobs: Sequence[Sequence[Step]], gpus: Gpus, costs: Costs) -> Workload:
    pools = (
        Pool("rollout", "GPU", 0.0, gpus_per_node=gpus.rollout, nodes=1, ram_mb=10**9),
        Pool("train", "GPU", 0.0, gpus_per_node=gpus.train, nodes=1, ram_mb=10**9),
    )
    return Workload("estimate", tuple(_job(f"job{number}", mine, costs) for number, mine in enumerate(jobs)), pools)


def _job(name: str, steps: Sequence[Step], costs: Costs) -> SimJob:
    sync = any(step.sync_s for step in steps)
    both = ("rollout", "train")
    series = tuple((_ms(step.rollout_s), _ms(step.train_s), *([_ms(step.sync_s)] if sync else [])) for step in steps)
    means = [round(fmean(column)) for column in zip(*series, strict=True)]
    phases = [
        PhaseSpec("rollout", ("rollout",), planned_ms=means[0]),
        PhaseSpec("train", ("train",), planned_ms=means[1], gap_ms=round(fmean(1000 * step.gap_s for step in steps))),
    ]
    if sync:
        phases.append(PhaseSpec("sync", both, planned_ms=means[2]))
    moves = round(1000 * costs.switch_s)
    states = tuple(StateSpec(pool, gpu_mb=1, ram_mb=1, driver="sim", load_ms=moves, park_ms=moves) for pool in both)
    spec = JobSpec(name, tuple(phases), tuple(Want(pool) for pool in both), states=states)
    solo = sum(means) + phases[1].gap_ms
    nodes = {"rollout": 1, "train": 1}
    return SimJob(name, "logged", 0, solo * len(steps), spec, series, nodes, iterations=len(steps))


def _ms(seconds: float) -> int:
    return max(1, round(1000 * seconds))


def _range(values: Sequence[float]) -> Range:
    return Range(min(values), median(values), max(values))


def _against(baseline: str, walls: Sequence[float], shared: Sequence[float]) -> Against:
    gain = _range([wall / mine for wall, mine in zip(walls, shared, strict=True)])
    return Against(baseline, _range(walls), gain, gain.middle >= WORTH)
