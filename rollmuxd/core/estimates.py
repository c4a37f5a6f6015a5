"""What a phase takes: what plans reckon with, and what was observed.

A phase is exclusive, so its time in a slot *is* its solo time, shared or not: measuring asks nobody to leave.

Plans use the times that a job states, until the measured ones differ (:mod:`~rollmuxd.core.steps.replan`). Where the
job states none, they use the mean of the first few observations, and then likewise. That changes by facts only, so
a plan and whoever asks about it afterwards see the same times. What is observed is kept as the last 64 times, sorted
when somebody asks: any quantile of them is exact.
"""

from rollmuxd.core.ids import Millis
from rollmuxd.core.model import Group, Job, PhaseTimes
from rollmuxd.core.spec import PhaseSpec

#: observations after which a mean is used for planning
ENOUGH = 3
#: phases with work before them that have to be known before their times are told by it
KNOWN = 8
#: a mean has left what was planned when it is off by more than so many of its standard errors
SURE = 2


def mean_ms(times: PhaseTimes) -> Millis | None:
    """Mean of the recent observations, or None without any."""
    if not times.recent_ms:
        return None
    return sum(times.recent_ms) // len(times.recent_ms)


def quantile_ms(times: PhaseTimes, share: float) -> Millis | None:
    """The observation below which this share of the recent ones lies, or None without any."""
    if not times.recent_ms:
        return None
    ordered = sorted(times.recent_ms)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def phase_ms(job: Job, phase: PhaseSpec) -> Millis | None:
    """The phase's time for planning; None while it is neither stated nor measured."""
    times = job.times.get(phase.name)
    if times is not None and times.planned_ms is not None:
        return times.planned_ms
    if phase.planned_ms is not None:
        return phase.planned_ms
    mean = mean_ms(times) if times is not None and times.count >= ENOUGH else None
    return None if mean is None else max(1, mean)


def reckoned_from(job: Job, phase: PhaseSpec) -> int:
    """How many observations the phase's time for planning is the mean of; 0: it is as stated, or not known."""
    times = job.times.get(phase.name)
    if times is None or phase_ms(job, phase) is None:
        return 0
    if times.planned_ms is not None:
        return times.planned_from
    return len(times.recent_ms) if phase.planned_ms is None else 0


def unstated_ms(job: Job) -> dict[str, Millis]:
    """What was measured of the cycle phases that nobody has stated."""
    found = {}
    for phase in job.spec.phases:
        took = phase_ms(job, phase)
        if phase.planned_ms is None and took is not None:
            found[phase.name] = took
    return found


def recent_ms(times: PhaseTimes, window: int) -> list[Millis]:
    """The last observations, so many at most, of those made since plans were made with the phase's times."""
    return times.recent_ms[len(times.recent_ms) - min(window, times.fresh, len(times.recent_ms)) :]


def has_left(seen: list[Millis], planned: Millis, share: float) -> bool:
    """Whether the mean of some observations has left what was planned: by more than a share of it, and than chance.

    Chance is twice the mean's standard error: of twenty steps of a multi-turn run (policy research, section 3) a mean
    is off by 8 % one time in three with nothing having changed.
    """
    count = len(seen)
    mean = sum(seen) // count
    off = abs(mean - planned)
    if off <= share * planned:
        return False
    return off * off * count * (count - 1) > SURE * SURE * sum((took - mean) ** 2 for took in seen)


def by_work_ms(job: Job, phase: PhaseSpec) -> Millis | None:
    """What the phase is to take for the work that the job has reported before it; None where that tells little.

    Training time is nearly a function of tokens, and how many there are is known when the rollout has ended. So: the
    median time for a unit of work, if with it the recent times are off by no more than half of what they are off from
    their own median.
    """
    times = job.times.get(phase.name)
    if times is None or not job.work:
        return None
    pairs = [(took, work) for took, work in zip(times.recent_ms, times.works, strict=True) if work > 0]
    if len(pairs) < KNOWN:
        return None
    each = sorted(took / work for took, work in pairs)[len(pairs) // 2]
    middle = sorted(took for took, _ in pairs)[len(pairs) // 2]
    if 2 * sum(abs(took - each * work) for took, work in pairs) > sum(abs(took - middle) for took, _ in pairs):
        return None
    return round(each * job.work)


def likely_ms(job: Job, phase: PhaseSpec) -> Millis | None:
    """The best guess of the phase's time, for people: by the work before it, else as observed, else as planned."""
    known = by_work_ms(job, phase)
    if known is not None:
        return known
    times = job.times.get(phase.name)
    return (mean_ms(times) if times is not None else None) or phase.planned_ms


def solo_ms(job: Job) -> Millis | None:
    """One iteration alone: all phases and own gaps; None while a phase's time is not known."""
    total = 0
    for phase in job.spec.phases:
        took = phase_ms(job, phase)
        if took is None:
            return None
        total += took + phase.gap_ms
    return total


def iteration_ms(turn_ms: Millis, group: Group, job: Job) -> Millis:
    """What a turn of the group's wheel gives one iteration of the job: it may go round several times in it."""
    first = job.spec.phases[0].name
    return turn_ms // max(1, sum(visit.job == job.id and visit.phase == first for visit in group.schedule))


def slowdown(job: Job) -> float | None:
    """Mean iteration over solo iteration, of all finished iterations of the run; None before the first."""
    progress = job.progress
    return progress.elapsed_ms / progress.solo_ms if progress.solo_ms else None


def credit_ms(job: Job) -> Millis | None:
    """By how much the job is ahead of its bound: slo x realised solo time less elapsed time; None without an SLO."""
    return None if job.spec.slo is None else ahead_ms(job, job.spec.slo)


def ahead_ms(job: Job, slo: float, now: Millis | None = None) -> Millis:
    """By how much the job is ahead of a bound, in its finished iterations; with ``now``, in the one at hand too."""
    progress = job.progress
    solo, elapsed = progress.solo_ms, progress.elapsed_ms
    if now is not None and progress.iteration_from is not None:
        solo += progress.iteration_solo_ms
        elapsed += now - progress.iteration_from - progress.iteration_excused_ms
    return int(slo * solo) - elapsed
