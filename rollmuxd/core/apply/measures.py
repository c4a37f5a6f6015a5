"""What is counted of a job: iterations, solo and elapsed time, the times of its phases."""

from rollmuxd.core import facts as f
from rollmuxd.core.ids import Millis
from rollmuxd.core.model import Job, JobStatus, PhaseTimes, Progress, Slot, SlotStatus
from rollmuxd.core.spec import PACE, JobSpec

#: observations of a phase's time that are kept
TIMES_KEPT = 64
#: of an asynchronous job: a gap of less than this share of its iteration is its own work, and no wait for a batch
OWN_WORK = 0.05


def count_request(job: Job, fact: f.SlotQueued) -> None:
    """Book the job's own gap, and the iteration that this request may end.

    Of a slowdown, solo is the running times plus own gaps. Elapsed leaves out pauses and side phases.
    What a gap takes beyond the plan is left out of both. An asynchronous job's gap is the time of its rollouts: its
    iteration takes its pace alone, or its phase if that is longer.
    """
    progress = job.progress
    if fact.pace_ms and not fact.side:
        _observe_pace(job, fact.at)
    elif progress.idle_from is not None and not fact.side:
        gap = fact.at - progress.idle_from
        planned = job.spec.phase(fact.phase).gap_ms
        progress.iteration_solo_ms += min(gap, planned)
        progress.iteration_excused_ms += max(0, gap - planned)
    progress.idle_from = None
    if not fact.iteration or (progress.iteration_from is not None and not progress.iteration_solo_ms):
        return  # it asks again, and nothing ran in between: still the same iteration
    _count_iteration(job.progress, fact.at, fact.pace_ms)
    progress.iteration_from = fact.at
    progress.iteration_solo_ms = progress.iteration_excused_ms = 0


def _count_iteration(progress: Progress, at: Millis, pace_ms: Millis) -> None:
    if progress.iteration_from is not None:
        progress.finished += 1
        progress.solo_ms += max(progress.iteration_solo_ms, pace_ms)
        progress.elapsed_ms += at - progress.iteration_from - progress.iteration_excused_ms


def count_end(job: Job, last: Slot | None) -> None:
    """Book the iteration that was complete when its loop came to its end: no request follows it. ``last``: its slot.

    Not of an asynchronous job, whose pace is judged with a request.
    """
    complete = last is not None and last.phase == job.spec.phases[-1].name and last.ended is SlotStatus.RELEASED
    if complete and job.progress.idle_from is not None and job.spec.asynchronous is None:
        _count_iteration(job.progress, job.progress.idle_from, 0)


def _observe_pace(job: Job, at: Millis) -> None:
    """Learn an asynchronous job's pace from a request, if the job had waited for the batch.

    Its rollouts continue while it waits for a turn, so a gap says nothing by itself. But where the job had waited for
    both of two batches in a row, its rollouts were held up by nothing in between. Where the next batch is begun at
    the grant (``ahead`` 0), they were not from the grant on. A new job may wait neither for turns nor, once those
    made ahead are used, for batches. Its pace is then the time between its requests at most.
    """
    progress, asynchronous = job.progress, job.spec.asynchronous
    since, gap = progress.batch_from, 0 if progress.idle_from is None else at - progress.idle_from
    whole = since is not None and not progress.iteration_excused_ms and (job.placed_at or 0) <= since
    progress.batch_from = None
    if asynchronous is None or progress.iteration_from is None:
        return
    took = at - progress.iteration_from
    if gap < OWN_WORK * took:
        waited = took - gap - progress.iteration_solo_ms
        alone = not progress.iteration_excused_ms and waited < OWN_WORK * took
        progress.unwaited = progress.unwaited + 1 if alone else 0
        if job.status is JobStatus.PROBING and progress.unwaited > asynchronous.ahead + 1:
            _observe(job, PACE, took)
        return
    progress.unwaited = 0
    if asynchronous.ahead:
        progress.batch_from = at
    if whole and since is not None:
        _observe(job, PACE, at - since)


def _observe(job: Job, name: str, took: Millis) -> None:
    times = job.times.setdefault(name, PhaseTimes())
    times.count += 1
    times.fresh += 1
    times.total_ms += took
    times.recent_ms.append(took)
    times.works.append(job.work)
    if len(times.recent_ms) > TIMES_KEPT:
        del times.recent_ms[0], times.works[0]


def count_release(job: Job, slot: Slot, at: Millis, work: float, *, away: bool = False) -> None:
    """Book the time that a phase ran in its slot: its solo time, shared or not.

    ``away``: the daemon was restarted while it ran. The release may have waited for that, so the time measured is not
    the phase's. The recent mean is booked in its place, at most what passed; the rest is left out of both sides.
    """
    ran = at - (slot.granted_at if slot.granted_at is not None else at)
    progress = job.progress
    progress.idle_from = at
    if job.status is JobStatus.PAUSED:
        job.paused_at = at
    if slot.side:
        progress.iteration_excused_ms += at - slot.queued_at
        return
    times = job.times.get(slot.phase)
    if away and times is not None and times.recent_ms:
        usual = min(ran, sum(times.recent_ms) // len(times.recent_ms))
        progress.iteration_solo_ms += usual
        progress.iteration_excused_ms += ran - usual
    else:
        progress.iteration_solo_ms += ran
        _observe(job, slot.phase, ran)
        if job.spec.asynchronous is not None and not job.spec.asynchronous.ahead:
            progress.batch_from = slot.granted_at
    job.work = max(0.0, float(work))


def excuse_away(job: Job, slot: Slot, fact: f.DaemonStarted) -> None:
    """Leave the daemon's absence out of a waiting job's elapsed time, unless the whole wait will be left out.

    The request then counts as asked for so much later: what is left of its wait may be left out, too.
    """
    if job.has_place and job.paused_at is None and not slot.side:
        away = min(fact.away_ms, fact.at - slot.queued_at)
        job.progress.iteration_excused_ms += away
        slot.queued_at += away


def start_fresh_times(job: Job) -> None:
    """On other nodes than before a phase may take another time: what is seen from now on counts."""
    for times in job.times.values():
        times.fresh = 0


def forget_restated(job: Job, spec: JobSpec) -> None:
    """Forget what was measured of a phase for which a new run states another time."""
    stated = {phase.name: phase.planned_ms for phase in job.spec.timed}
    for phase in spec.timed:
        times = job.times.get(phase.name)
        if times is not None and phase.planned_ms != stated.get(phase.name):
            times.planned_ms, times.planned_from, times.mean_ms = None, 0, None
