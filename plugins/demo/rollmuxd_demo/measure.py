"""What the demo's figures are: pure arithmetic over measured phases and the daemon's facts. No clock, no IO.

Two sources, told apart by their words:

- A **phase** is measured by the job itself, inside its slot: computing, without any waiting. Sums over phases,
  utilisation and the lower bound come from phases.
- A **span** is taken from the daemon's facts: from a job's first request to its last release, waiting included. Wall
  times and slowdowns come from spans, so that neither starting Python nor loading numpy counts on either side.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import Any

#: The two pools, and the phases of the same names that use them.
POOLS = ("rollout", "train")


@dataclass(frozen=True)
class Phase:
    """One phase of one job, as the job measured it."""

    job: str
    step: int
    pool: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Span:
    """A job's time with the daemon: first request to last release."""

    first: float
    last: float

    @property
    def seconds(self) -> float:
        return self.last - self.first


@dataclass(frozen=True)
class JobRecord:
    """What a job wrote down about its run."""

    name: str
    iterations: int
    rewards: tuple[float, ...]
    sha256: str
    phases: tuple[Phase, ...]

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> JobRecord:
        """From the JSON that the examples write."""
        name = record["job"]
        return cls(
            name=name,
            iterations=record["iterations"],
            rewards=tuple(record["rewards"]),
            sha256=record["sha256"],
            phases=tuple(Phase(name, p["step"], p["phase"], p["start"], p["end"]) for p in record["phases"]),
        )

    def seconds_on(self, pool: str) -> float:
        """The time it computed on a pool."""
        return sum(phase.seconds for phase in self.phases if phase.pool == pool)

    @property
    def seconds(self) -> float:
        """The time it computed: how long it would take if it never waited."""
        return sum(phase.seconds for phase in self.phases)


@dataclass(frozen=True)
class Bound:
    """The least time any schedule needs for these phases, and which of the three reasons it is."""

    seconds: float
    #: ``rollout``, ``train``, or ``longest`` for the job that is longest by itself
    by: str


def lower_bound(jobs: Sequence[JobRecord]) -> Bound:
    """No schedule is faster than its busiest pool, nor than its longest job, whose phases follow one another."""
    candidates = [Bound(sum(job.seconds_on(pool) for job in jobs), pool) for pool in POOLS]
    candidates.append(Bound(max((job.seconds for job in jobs), default=0.0), "longest"))
    return max(candidates, key=lambda bound: bound.seconds)


def first_fill(jobs: Sequence[JobRecord]) -> float:
    """The time in which the bottleneck pool cannot work, in any order of jobs like the one that was run.

    Every job begins with a rollout and ends with a training. If training is the bottleneck, its pool waits for the
    rollout that comes before the first training. If rollout is, its pool is done while the last training still runs;
    the shortest last training would be the best to end with. If the longest job is the bound nothing is to be filled.
    """
    bound = lower_bound(jobs)
    if bound.by == "train":
        first_train = min(
            (phase for job in jobs for phase in job.phases if phase.pool == "train"), key=lambda phase: phase.start
        )
        before = (
            phase
            for job in jobs
            if job.name == first_train.job
            for phase in job.phases
            if phase.pool == "rollout" and phase.end <= first_train.start
        )
        return sum(phase.seconds for phase in before)
    if bound.by == "rollout":
        last = [max((p for p in job.phases if p.pool == "train"), key=lambda p: p.end) for job in jobs]
        return min(phase.seconds for phase in last)
    return 0.0


def utilisation(jobs: Sequence[JobRecord], wall_s: float) -> dict[str, float]:
    """The share of the wall time in which each pool computed."""
    return {pool: sum(job.seconds_on(pool) for job in jobs) / wall_s if wall_s > 0 else 0.0 for pool in POOLS}


# ---- from the daemon's facts ---------------------------------------------------------------------------------------


def spans(facts: Iterable[Mapping[str, Any]]) -> dict[str, Span]:
    """First request to last release of each job, by the name it registered under, in seconds."""
    names: dict[str, str] = {}
    job_of: dict[str, str] = {}
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for fact in facts:
        match fact["fact"]:
            case "job_registered":
                names[fact["job"]] = fact["spec"]["name"]
            case "slot_queued":
                job_of[fact["slot"]] = fact["job"]
                first.setdefault(fact["job"], fact["at"])
            case "slot_released":
                last[job_of[fact["slot"]]] = fact["at"]
    return {names[job]: Span(first[job] / 1000, last[job] / 1000) for job in first if job in last}


def wall(of: Mapping[str, Span]) -> float:
    """First request of any job to last release of any job."""
    return max(span.last for span in of.values()) - min(span.first for span in of.values()) if of else 0.0


def wall_in_turn(of: Mapping[str, Span]) -> float:
    """The jobs' spans one after the other, leaving out the time between them, when the next process starts up."""
    return sum(span.seconds for span in of.values())


def switches(facts: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """How often a job's state was moved: loads and parks that were carried out."""
    kinds: dict[str, str] = {}
    count = {"loads": 0, "parks": 0}
    for fact in facts:
        if fact["fact"] == "order_issued":
            kinds[fact["order"]] = f"{fact['kind']}s"
        elif fact["fact"] == "order_ended" and kinds.get(fact["order"]) in count:
            count[kinds[fact["order"]]] += 1
    return count


# ---- how much work -------------------------------------------------------------------------------------------------

#: The mock's switches, a few tens of milliseconds each, shall be small beside its phases.
SHORTEST_PHASE_S = 0.52
#: What all jobs one after the other may take, so that both runs and what is around them stay under two minutes.
LONGEST_SEQUENTIAL_S = 60.0


def choose_scale(phases_at_one: Sequence[Mapping[str, float]], *, iterations: int, longer: float = 1.0) -> float:
    """The scale at which the shortest phase takes SHORTEST_PHASE_S, unless all in turn would take LONGEST_SEQUENTIAL_S.

    ``phases_at_one`` has the seconds per phase at scale 1 for each job that will run, several of one shape included.
    Both times are ``longer`` by this factor, where switches are.
    """
    shortest_s, longest_s = longer * SHORTEST_PHASE_S, longer * LONGEST_SEQUENTIAL_S
    wanted = shortest_s / min(seconds for job in phases_at_one for seconds in job.values())
    allowed = longest_s / (iterations * sum(seconds for job in phases_at_one for seconds in job.values()))
    # Rounded up to two digits, so that the shortest phase does not come out just below; three where time is short.
    return ceil(wanted * 100) / 100 if wanted <= allowed else round(allowed, 3)


def core_gain(rounds: Iterable[Sequence[float]]) -> float | None:
    """By how much two cores at once do more than one alone: the median over the rounds that were measured.

    A round has four rates: of each core alone, and of each at once with the other. One in which a core missed its
    window (rate 0), as the machine was doing something else, says nothing; None if all did.
    """
    measured = [2 * (one + other) / (alone + second) for alone, second, one, other in filter(all, rounds)]
    return median(measured) if measured else None


# ---- the result ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunRecord:
    """One run of all jobs: what they wrote down, and the facts of the daemon they ran under."""

    jobs: tuple[JobRecord, ...]
    facts: tuple[Mapping[str, Any], ...]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def result(
    shared: RunRecord, in_turn: RunRecord | None, *, scale: float, gain: float | None, cores: int
) -> dict[str, Any]:
    """Everything the demo found out: the object that ``--json`` prints."""
    shared_spans = spans(shared.facts)
    wall_s = wall(shared_spans)
    bound = lower_bound(shared.jobs)
    alone_spans = spans(in_turn.facts) if in_turn else {}
    alone_records = {job.name: job for job in in_turn.jobs} if in_turn else {}
    sequential_wall_s = wall_in_turn(alone_spans) if in_turn else None

    jobs = []
    for job in shared.jobs:
        alone = alone_records.get(job.name)
        slowdown = None
        if alone is not None:
            per_iteration = shared_spans[job.name].seconds / job.iterations
            slowdown = per_iteration / (alone_spans[job.name].seconds / alone.iterations)
        jobs.append(
            {
                "name": job.name,
                "iterations": job.iterations,
                "reward_first": _rounded(job.rewards[0]),
                "reward_last": _rounded(job.rewards[-1]),
                "rollout_s": _rounded(job.seconds_on("rollout")),
                "train_s": _rounded(job.seconds_on("train")),
                "slowdown": _rounded(slowdown),
                "sha256": job.sha256,
                "sha256_alone": alone.sha256 if alone else None,
            }
        )
    return {
        "wall_s": _rounded(wall_s),
        "sequential_wall_s": _rounded(sequential_wall_s),
        "lower_bound_s": _rounded(bound.seconds),
        "bound_by": bound.by,
        "first_fill_s": _rounded(first_fill(shared.jobs)),
        "ratio_to_bound": _rounded(wall_s / bound.seconds) if bound.seconds else None,
        "speedup": _rounded(sequential_wall_s / wall_s) if sequential_wall_s and wall_s else None,
        "core_gain": _rounded(gain),
        "cores": cores,
        "weights_identical": all(job["sha256"] == job["sha256_alone"] for job in jobs) if in_turn else None,
        "utilisation": {pool: _rounded(share) for pool, share in utilisation(shared.jobs, wall_s).items()},
        "sequential_utilisation": (
            {pool: _rounded(share) for pool, share in utilisation(in_turn.jobs, sequential_wall_s or 0.0).items()}
            if in_turn
            else None
        ),
        "switches": switches(shared.facts),
        "sequential_switches": switches(in_turn.facts) if in_turn else None,
        "scale": scale,
        "jobs": jobs,
    }


# ---- the picture of what computed when -------------------------------------------------------------------------------


def gantt(jobs: Sequence[JobRecord], start: float, end: float, width: int) -> dict[str, list[str | None]]:
    """For each pool ``width`` cells from start to end: the job that computed in the middle of it, or None."""
    phases = [phase for job in jobs for phase in job.phases]

    def computed(pool: str, at: float) -> str | None:
        return next((one.job for one in phases if one.pool == pool and one.start <= at < one.end), None)

    middles = [start + (end - start) * (cell + 0.5) / width for cell in range(width)]
    return {pool: [computed(pool, at) for at in middles] for pool in POOLS}


def window(jobs: Sequence[JobRecord], iterations: int) -> tuple[float, float]:
    """The first ``iterations`` iterations of every job: when they began and ended."""
    phases = [phase for job in jobs for phase in job.phases if phase.step < iterations]
    return min(phase.start for phase in phases), max(phase.end for phase in phases)
