"""Jobs, from registration to the end, their launches and their sessions."""

from rollmuxd.core import facts as f
from rollmuxd.core.apply.groups import forget_empty, group_named, leave_schedule, merged
from rollmuxd.core.apply.measures import count_end, forget_restated, start_fresh_times
from rollmuxd.core.apply.pins import leave_node, owner_of, pin, unpin
from rollmuxd.core.causes import Cause
from rollmuxd.core.lifecycle import meet
from rollmuxd.core.model import Job, JobStatus, Launch, Progress, Session, SessionStatus, nodes_in
from rollmuxd.core.state import State

#: ended jobs that are remembered; older ones are in the journal only
JOBS_REMEMBERED = 1_000


def job_registered(state: State, fact: f.JobRegistered) -> None:
    job = state.jobs.get(fact.job)
    if job is None:
        state.mint("j")
        job = Job(id=fact.job, owner=fact.owner, user=fact.user, spec=fact.spec, registered_at=fact.at, run=fact.run)
        state.jobs[fact.job] = job
        state.slots_of[fact.job] = []
        state.names[f"{fact.owner}/{fact.spec.name}"] = fact.job
    else:
        meet(job, fact)
        forget_restated(job, fact.spec)
        job.user, job.spec, job.run, job.registered_at = fact.user, fact.spec, fact.run, fact.at
        job.progress, job.session, job.work = Progress(), None, 0.0
        job.reason = Cause("new_run", {"run": fact.run})
        job.promised, job.admission = False, ""
        job.relaunch_at, job.moved_at, job.paused_at, job.guarded = None, None, None, False
        job.guard_from, job.guard_credit_ms = 0, 0
        if not fact.relaunch:
            job.losses = []
        if job.id in state.ended:
            state.ended.remove(job.id)
    job.idempotency_key = fact.idempotency_key
    if fact.spec.filler is None:
        state.waiting[job.id] = None
        state.fillers.pop(job.id, None)
    else:
        state.fillers[job.id] = None


def set_job(state: State, job: Job, fact: f.Fact, to: JobStatus | None = None) -> None:
    meet(job, fact, to)
    if job.status is JobStatus.WAITING and job.spec.filler is None:
        state.waiting[job.id] = None
    else:
        state.waiting.pop(job.id, None)


def job_placed(state: State, fact: f.JobPlaced) -> None:
    job = state.jobs[fact.job]
    job.reason = None
    set_job(state, job, fact, fact.status)
    group = group_named(state, fact.group)
    group.jobs.append(job.id)
    group.schedule = merged(group.schedule, fact.schedule)
    group.dispatch = fact.dispatch
    group.version += 1
    job.group, job.pins, job.placed_at, job.admission = group.id, fact.pins, fact.at, fact.admission
    job.newest, job.promised = dict(fact.pins), fact.promised
    owner = owner_of(state, job)
    if job.queued is not None:  # the wait for admission is no slowdown
        job.progress.iteration_excused_ms += fact.at - state.slots[job.queued].queued_at
    pin(state, job, group, fact.pins, owner)
    start_fresh_times(job)


def placement_ended(state: State, fact: f.PlacementEnded) -> None:
    job = state.jobs[fact.job]
    if job.group is None:
        leave_node(state, job)
    else:
        leave_schedule(state, job)
        unpin(state, job, nodes_in(job.pins), owner_of(state, job))
        group = state.its_group(job)
        group.jobs.remove(job.id)
        group.version += 1
        forget_empty(state, group)
    job.last_pins, job.pins, job.group, job.placed_at = job.pins, {}, None, None


def job_unplaced(state: State, fact: f.JobUnplaced) -> None:
    job = state.jobs[fact.job]
    set_job(state, job, fact)
    job.reason, job.promised = fact.reason, False
    leave_schedule(state, job)


def job_promised(state: State, fact: f.JobPromised) -> None:
    job = state.jobs[fact.job]
    set_job(state, job, fact)
    job.promised = fact.promised
    state.its_group(job).version += 1  # what was derived without this job's times is out of date


def times_drifted(state: State, fact: f.TimesDrifted) -> None:
    job = state.jobs[fact.job]
    for phase, took in fact.times.items():
        times = job.times[phase]
        times.planned_ms, times.planned_from = took, fact.samples.get(phase, 0)
        times.mean_ms, times.fresh = fact.means.get(phase), 0
    job.moves_ms.update(fact.moves)
    if fact.was:
        job.drifted_at = fact.at
    state.its_group(job).version += 1


def guard_changed(state: State, fact: f.GuardChanged) -> None:
    job = state.jobs[fact.job]
    job.guarded = fact.guarded
    earned = not fact.guarded and not fact.reason
    job.guard_from, job.guard_credit_ms = (0, 0) if earned else (job.progress.finished, fact.credit_ms)
    for group in (job.group, None if job.move is None else job.move.group):
        if group is not None:  # no job joins a guarded one, so what was derived from the group is out of date
            state.groups[group].version += 1


def job_paused(state: State, fact: f.JobPaused) -> None:
    job = state.jobs[fact.job]
    before = job.status
    set_job(state, job, fact)
    job.resume_to = before
    job.reason = Cause("paused", {"by": fact.by})
    job.paused_at = fact.at if job.slot is None else None


def job_resumed(state: State, fact: f.JobResumed) -> None:
    job = state.jobs[fact.job]
    if job.status is JobStatus.QUARANTINED:
        job.losses = []
    set_job(state, job, fact, job.resume_to)
    job.reason = None
    if job.paused_at is not None:
        job.progress.iteration_excused_ms += fact.at - job.paused_at
        if job.progress.idle_from is not None:
            job.progress.idle_from = fact.at
    job.paused_at = None


def job_quarantined(state: State, fact: f.JobQuarantined) -> None:
    job = state.jobs[fact.job]
    set_job(state, job, fact)
    job.reason, job.resume_to = fact.reason, JobStatus.WAITING
    leave_schedule(state, job)


def job_lost(state: State, fact: f.JobLost) -> None:
    job = state.jobs[fact.job]
    set_job(state, job, fact)
    job.reason, job.relaunch_at = fact.reason, fact.relaunch_at
    if fact.attempt:
        job.losses = [*job.losses, fact.at][-fact.attempt :]
    leave_schedule(state, job)


def process_launched(state: State, fact: f.ProcessLaunched) -> None:
    state.mint("l")
    state.jobs[fact.job].launch = Launch(id=fact.launch, host=fact.host, at=fact.at)


def process_started(state: State, fact: f.ProcessStarted) -> None:
    launch = state.jobs[fact.job].launch
    if launch is not None and launch.id == fact.launch:
        launch.pid = fact.pid


def process_over(state: State, fact: f.ProcessOver) -> None:
    launch = state.jobs[fact.job].launch
    if launch is not None and launch.id == fact.launch:
        launch.over = True


def job_ended(state: State, fact: f.JobEnded) -> None:
    job = state.jobs[fact.job]
    set_job(state, job, fact)
    job.reason, job.relaunch_at = fact.reason, None
    if fact.reason.code == "finished":
        mine = (state.slots[slot] for slot in reversed(state.slots_of[job.id]))
        count_end(job, next((slot for slot in mine if not slot.side), None))
    leave_schedule(state, job)
    state.fillers.pop(job.id, None)
    state.ended.append(job.id)
    _forget_old_jobs(state)


def _forget_old_jobs(state: State) -> None:
    """Ended jobs beyond the limit go, unless something of them is still on a node."""
    for name in state.ended[: max(0, len(state.ended) - JOBS_REMEMBERED)]:
        job = state.jobs[name]
        if job.pins or job.closing or job.left:
            continue
        state.ended.remove(name)
        for slot in state.slots_of.pop(name):
            del state.slots[slot]
        for session in [s.id for s in state.sessions.values() if s.job == name]:
            del state.sessions[session]
        del state.names[f"{job.owner}/{job.spec.name}"]
        del state.jobs[name]


def session_opened(state: State, fact: f.SessionOpened) -> None:
    state.mint("e")
    state.sessions[fact.session] = Session(fact.session, fact.job, fact.run, fact.at, fact.pid, fact.host, fact.started)
    job = state.jobs[fact.job]
    before = job.session
    older = state.session_of(job)
    if older is not None:
        older.status = SessionStatus.FENCED
    job.session = fact.session
    # an older session is remembered for as long as it is the one before: its calls get a good refusal
    for old in [s.id for s in state.sessions.values() if s.job == job.id and s.id not in (before, fact.session)]:
        del state.sessions[old]


def session_over(state: State, fact: f.SessionLost | f.SessionClosed) -> None:
    state.sessions[fact.session].status = SessionStatus(f.name(fact).removeprefix("session_"))
