"""What is counted of a job: iterations, solo and elapsed time, the times of its phases."""

from rollmuxd.core import facts as f
from rollmuxd.core.ids import Millis
from rollmuxd.core.model import Job, JobStatus, PhaseTimes, Slot
from rollmuxd.core.spec import JobSpec

#: observations of a phase's time that are kept
TIMES_KEPT = 64


def count_request(job: Job, fact: f.SlotQueued) -> None:
    """Book the job's own gap, and the iteration that this request may end.

    Slowdown (DESIGN section 6): solo is the running times plus own gaps; elapsed leaves out pauses, side phases, and
    what of the own gaps goes beyond the plan. A gap beyond the plan is left out of both sides.
    """
    progress = job.progress
    if progress.idle_from is not None and not fact.side:
        gap = fact.at - progress.idle_from
        planned = next((phase.gap_ms for phase in job.spec.phases if phase.name == fact.phase), 0)
        progress.iteration_solo_ms += min(gap, planned)
        progress.iteration_excused_ms += max(0, gap - planned)
    progress.idle_from = None
    if not fact.iteration or (progress.iteration_from is not None and not progress.iteration_solo_ms):
        return  # asked anew, and nothing has run meanwhile: still the same iteration
    if progress.iteration_from is not None:
        progress.finished += 1
        progress.solo_ms += progress.iteration_solo_ms
        progress.elapsed_ms += fact.at - progress.iteration_from - progress.iteration_excused_ms
    progress.iteration_from = fact.at
    progress.iteration_solo_ms = progress.iteration_excused_ms = 0


def count_release(job: Job, slot: Slot, at: Millis, work: float) -> None:
    """Book the time that a phase ran in its slot: its solo time, shared or not."""
    ran = at - (slot.granted_at if slot.granted_at is not None else at)
    progress = job.progress
    progress.idle_from = at
    if job.status is JobStatus.PAUSED:
        job.paused_at = at
    if slot.side:
        progress.iteration_excused_ms += at - slot.queued_at
        return
    progress.iteration_solo_ms += ran
    times = job.times.get(slot.phase)
    if times is None:
        times = job.times[slot.phase] = PhaseTimes()
    times.count += 1
    times.fresh += 1
    times.total_ms += ran
    times.recent_ms.append(ran)
    times.works.append(job.work)
    if len(times.recent_ms) > TIMES_KEPT:
        del times.recent_ms[0], times.works[0]
    job.work = max(0.0, float(work))


def plan_with(job: Job, phase: str, took: Millis, seen: int) -> None:
    """Plans reckon with this from now on."""
    times = job.times[phase]
    times.planned_ms, times.planned_from, times.fresh = took, seen, 0


def start_fresh_times(job: Job) -> None:
    """On other nodes than before a phase may take another time: what is seen from now on counts."""
    for times in job.times.values():
        times.fresh = 0


def forget_restated(job: Job, spec: JobSpec) -> None:
    """Of a phase for which a new run states another time, nobody reckons with what was measured."""
    stated = {phase.name: phase.planned_ms for phase in job.spec.phases}
    for phase in spec.phases:
        times = job.times.get(phase.name)
        if times is not None and phase.planned_ms != stated.get(phase.name):
            times.planned_ms, times.planned_from = None, 0
