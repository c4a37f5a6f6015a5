"""Is sharing worth it? Logged steps of one's own jobs, played by the scheduler itself, against two ways without it.

The jobs begin together, each somewhere else in its log, and share a rollout pool and a train pool of one node each.
Their wall time is compared with the same jobs one after the other, on these pools and with both phases on all the GPUs
(*co-located*). How much faster a phase gets on more GPUs is not in a log, so each figure is a range. It goes from
phases that lose nothing by being spread to a speed-up by the GPUs' number to the power of 0.7.

A log *drifts* if its fifths differ by more than its noise. Then each fifth is also played by itself, and so is a run
that continues the drift of the log's second half. The ranges cover all of these.
"""

from collections.abc import Iterator, Sequence
from random import Random
from statistics import fmean, median, variance
from typing import Final

from msgspec import Struct

from rollmuxd.core.spec import JobSpec, PhaseSpec, StateSpec, Want
from rollmuxd.sim.outcome import WORK
from rollmuxd.sim.policies import MAX_GROUP, ROLLMUX
from rollmuxd.sim.training_logs import Step
from rollmuxd.sim.workload import Pool, SimJob, Workload
from rollmuxd.sim.world import World

#: below this gain sharing is not worth its trouble
WORTH: Final = 1.15
#: exponents of a phase's speed in the number of its GPUs
SCALING: Final = (1.0, 0.7)
#: to load a pool's state, and the same to park it, unless it is said
SWITCH_S: Final = 5.0
#: where in their logs the jobs begin is drawn so often
DRAWS: Final = 5
ITERATIONS: Final = (30, 150)
#: parts of a log that are compared, and the fewest steps of each
PARTS: Final = 5
PART: Final = 5
#: a log drifts if the mean of one part is so many times that of another,
SPREAD: Final = 1.1
#: and the variance of the means is so many times what the noise of single steps explains
SIGNAL: Final = 4.0
#: a phase that gets shorter is not taken to fall below this share of what it took last
FLOOR: Final = 0.5


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


class Drift(Struct, frozen=True):
    """A phase that took longer in one part of a log than in another, by more than its noise: means of the parts."""

    #: which log, from 0
    log: int
    phase: str
    shortest_s: float
    longest_s: float
    #: of the part in the middle, and of the last
    middle_s: float
    last_s: float

    @property
    def ahead(self) -> float:
        """What it will take over what it took last, if it drifts as far again as since the middle."""
        return max(FLOOR, 2 - self.middle_s / self.last_s)


class Estimate(Struct, frozen=True):
    """What sharing would do for these jobs."""

    jobs: int
    iterations: int
    shared_s: Range
    #: mean of the jobs' mean iteration over their own alone, on these pools
    slowdown: Range
    against: tuple[Against, ...]
    gpus: Gpus
    #: what loading or parking a state was taken to last
    switch_s: float
    #: the ranges cover each part of these logs, and as much drift again as in their second half
    drifts: tuple[Drift, ...] = ()


def estimate(logs: Sequence[Sequence[Step]], gpus: Gpus, switch_s: float = SWITCH_S, *, seed: int = 0) -> Estimate:
    """What sharing would do for jobs like these, one of each log. To load or to park a state takes ``switch_s``.

    Raises ValueError for numbers that cannot be.
    """
    _check(logs, gpus, switch_s)
    count = max(ITERATIONS[0], min(ITERATIONS[1], max(len(log) for log in logs)))
    drifts = tuple(drift for who, log in enumerate(logs) for drift in _drifts(who, log))
    like = [logs] * DRAWS
    if drifts:
        like += [[_parts(log)[part] for log in logs] for part in range(PARTS)]
        like.append([_ahead(log, [drift for drift in drifts if drift.log == who]) for who, log in enumerate(logs)])
    shared, slowdowns, in_turn, together = [], [], [], []
    for number, mine_of in enumerate(like):
        series = [_drawn(log, count, seed, number, who) for who, log in enumerate(mine_of)]
        played, of = None, series
        for scaling in SCALING:
            split = [[_on(step, gpus, gpus.rollout, gpus.train, scaling) for step in mine] for mine in series]
            whole = [[_on(step, gpus, gpus.all, gpus.all, scaling) for step in mine] for mine in series]
            if played is None or split != of:  # on as many GPUs as it ran on, a log is the same whatever the scaling
                world = World(_workload(split, gpus, switch_s), ROLLMUX, seed=number, accounting=WORK)
                played, of = world.run(), split
            shared.append(played.span_ms / 1000)
            slowdowns.append(fmean(job.slowdown or 1.0 for job in played.jobs))
            in_turn.append(sum(step.total_s for mine in split for step in mine))
            # its engine makes way for its trainer, and comes back, in each iteration
            together.append(sum(step.total_s + 2 * switch_s for mine in whole for step in mine))
    return Estimate(
        jobs=len(logs),
        iterations=count,
        shared_s=_range(shared),
        slowdown=_range(slowdowns),
        against=(
            _against("one after the other on the same pools", in_turn, shared),
            _against(f"one after the other, each on all {gpus.all} GPUs", together, shared),
        ),
        gpus=gpus,
        switch_s=switch_s,
        drifts=drifts,
    )


def _parts(log: Sequence[Step]) -> list[Sequence[Step]]:
    """A log in parts that are equally long, but for what is left over at its end; a short log is each of them."""
    size = len(log) // PARTS
    if size < PART:
        return [log] * PARTS
    return [log[part * size : (part + 1) * size] for part in range(PARTS)]


def _drifts(who: int, log: Sequence[Step]) -> Iterator[Drift]:
    for phase in ("rollout", "train"):
        took = [[step.rollout_s if phase == "rollout" else step.train_s for step in part] for part in _parts(log)]
        means = [fmean(part) for part in took]
        if min(map(len, took)) < PART or max(means) < SPREAD * min(means):
            continue
        noise = fmean(variance(part) for part in took) / len(took[0])
        if variance(means) > SIGNAL * noise:
            yield Drift(who, phase, min(means), max(means), means[PARTS // 2], means[-1])


def _ahead(log: Sequence[Step], drifts: Sequence[Drift]) -> Sequence[Step]:
    """The last part of a log, as it would be if the log drifted on as in its second half."""
    times = {drift.phase: drift.ahead for drift in drifts}
    rollout, train = times.get("rollout", 1.0), times.get("train", 1.0)
    return [Step(it.rollout_s * rollout, it.train_s * train, it.sync_s, it.gap_s) for it in _parts(log)[-1]]


def _check(logs: Sequence[Sequence[Step]], gpus: Gpus, switch_s: float) -> None:
    if not 2 <= len(logs) <= MAX_GROUP:
        raise ValueError(f"{len(logs)} jobs: from two on they can share, and a group has five at most")
    if not all(logs):
        raise ValueError("a log without steps says nothing")
    for name, value in (("rollout", gpus.rollout), ("train", gpus.train)):
        if value < 1:
            raise ValueError(f"{value} {name} GPUs: at least one is needed")
    if gpus.ran_on < 0 or switch_s < 0:
        raise ValueError("numbers of GPUs and seconds are not negative")


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


def _workload(jobs: Sequence[Sequence[Step]], gpus: Gpus, switch_s: float) -> Workload:
    pools = (
        Pool("rollout", "GPU", 0.0, gpus_per_node=gpus.rollout, nodes=1, ram_mb=10**9),
        Pool("train", "GPU", 0.0, gpus_per_node=gpus.train, nodes=1, ram_mb=10**9),
    )
    return Workload(
        "estimate", tuple(played_job(f"job{number}", mine, switch_s) for number, mine in enumerate(jobs)), pools
    )


def played_job(name: str, steps: Sequence[Step], switch_s: float) -> SimJob:
    """A job of these iterations over one node each of pools ``rollout`` and ``train``."""
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
    moves = round(1000 * switch_s)
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
