"""Jobs and the client processes behind them: registering, ending, pausing; sessions, heartbeats, loss."""

from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.causes import Cause, said
from rollmuxd.core.context import NOTHING, PLACED, Context
from rollmuxd.core.decision import Answer
from rollmuxd.core.errors import Conflict, RunAlive, TooMany
from rollmuxd.core.ids import JobId, Millis, SessionId
from rollmuxd.core.model import Job, JobStatus, Session, SessionStatus, SlotStatus, StateStatus
from rollmuxd.core.spec import OnLoss
from rollmuxd.core.steps.admit import check_owner, check_spec
from rollmuxd.core.steps.launch import end_process, kill, lost_too_often, plan_relaunch, run_key
from rollmuxd.core.steps.observe import record_unknown
from rollmuxd.core.steps.reclaim import abandon, drop_request, end_now, end_session, take_away


def register(c: Context, ask: i.RegisterJob) -> Answer:
    """A job, or a new run of it, waits for a placement; it starts when nothing of its run before is left."""
    known = c.state.job_named(ask.owner, ask.spec.name)
    if known is not None and known.live:
        if ask.idempotency_key and ask.idempotency_key == known.idempotency_key:
            return Answer(job=known.id, session=known.session, repeated=True)
        if not ask.replace:
            refuse_if_alive(c, known)
    check_spec(ask.spec, c.state, c.config)
    check_owner(c, ask.owner, ask.spec, known)
    one_more = known is None or known.status is JobStatus.ENDED
    if one_more and len(c.state.jobs) - len(c.state.ended) >= c.config.max_jobs:
        raise TooMany(f"{c.config.max_jobs} jobs are registered, which is the limit; end one, or raise max_jobs")
    if known is not None and known.live:
        end_now(c, known, reason=Cause("replaced"), by=ask.user)
    if known is not None:
        end_process(c, known, Cause("replaced"))
    job = c.state.next_id("j") if known is None else known.id
    run = 1 if known is None else known.run + 1
    key = ask.idempotency_key or (run_key(c, job, run) if ask.spec.launch is not None else "")
    c.fact(f.JobRegistered(c.now, job, ask.owner, ask.user, run, ask.spec, key))
    if ask.spec.launch is None:  # else its process is started only when it has its place
        c.timers.at(opens_by(c, c.state.jobs[job]), "opened", job)
    return Answer(job=job)


def refuse_if_alive(c: Context, known: Job) -> None:
    """A run is alive while its session is, and without any session for as long as its process is awaited."""
    session = c.state.session_of(known)
    if session is not None:
        seen = c.timers.seen.get(session.id)
        lease = None if seen is None else (c.now - seen, max(0, seen + c.config.lease_ms - c.now))
        raise RunAlive(known.spec.name, known.run, session.pid, session.host, lease, session.started)
    if known.spec.launch is not None:
        if known.status is not JobStatus.QUARANTINED:  # of one that is, no process is awaited
            here = known.launch
            raise RunAlive(known.spec.name, known.run, here.pid if here else 0, here.host if here else "")
    elif known.session is None and c.now < opens_by(c, known):
        raise RunAlive(known.spec.name, known.run, 0, "")


def opens_by(c: Context, job: Job) -> Millis:
    """Until when the process of a run is awaited: the one that registered it, or that was started for it.

    It may have been told of that just before the daemon stopped, and tries again less often than a short lease is long.
    """
    return max(begun_at(job) or 0, c.timers.renewed_at) + opening_ms(c, job)


def opening_ms(c: Context, job: Job) -> Millis:
    return max(c.config.lease_ms, c.config.reattach_ms) if job.spec.launch is None else c.config.launch_ms


def begun_at(job: Job) -> Millis | None:
    """Since when the process is awaited; None: it is still to be started."""
    if job.spec.launch is None:
        return job.registered_at
    return None if job.launch is None or job.launch.over else job.launch.at


def never_opened(c: Context, name: JobId) -> None:
    """A run's deadline: one whose process opened no session in time is lost, so that it keeps no place."""
    job = c.state.jobs.get(name)
    since = begun_at(job) if job is not None and job.live else None
    if job is None or since is None:
        return
    session = c.state.sessions.get(job.session or "")
    opened = session is not None and session.opened_at >= since
    if not opened and c.is_past(opens_by(c, job), "opened", name):
        job_lost(c, job, Cause("never_opened", {"limit_s": opening_ms(c, job) // 1000}))


def launched(c: Context, told: i.Launched) -> Answer:
    """A job's process was started. Where it could not be: as if it had died at once."""
    job = next((it for it in c.state.jobs.values() if it.launch is not None and it.launch.id == told.launch), None)
    if job is None or job.launch is None or job.launch.pid:
        return NOTHING
    if told.error is None:
        c.fact(f.ProcessStarted(c.now, job.id, told.launch, told.pid, told.started))
    elif job.live and not job.launch.over:
        job_lost(c, job, Cause("launch_failed", {"host": job.launch.host}, told.error))
    return NOTHING


def reap(c: Context, name: JobId) -> None:
    """A job has ended, or its process said that it leaves; that was a lease time ago."""
    job = c.state.jobs.get(name)
    if job is not None and job.status in (JobStatus.LOST, JobStatus.QUARANTINED, JobStatus.ENDED):
        if c.state.session_of(job) is None:
            end_process(c, job, Cause("job_is", {"status": str(job.status)}))


def end(c: Context, ask: i.EndJob) -> Answer:
    job = c.state.job(ask.job)
    if ask.session is not None and ask.session != job.session:
        raise Conflict(f"session {ask.session} is not the one of run {job.run} of job {job.spec.name}: it ends nothing")
    if job.status is JobStatus.ENDED:
        return Answer(job=job.id, repeated=True)
    why = said(ask.reason) if ask.reason else Cause("ended")
    if ask.finished:
        why = Cause("finished", {"text": ask.reason or "finished"})
    end_now(c, job, reason=why, by=ask.by)
    return Answer(job=job.id)


def pause(c: Context, ask: i.PauseJob) -> Answer:
    """No new slot from the next phase boundary on; its turns are skipped meanwhile."""
    job = c.state.job(ask.job)
    if job.status is JobStatus.PAUSED:
        return Answer(job=job.id, repeated=True)
    if job.status not in (JobStatus.WAITING, *PLACED):
        raise Conflict(f"job {job.spec.name} is {job.status}, and only a waiting or placed job can be paused")
    abandon(c, job, Cause("pause_asked", {"by": ask.by}))
    c.fact(f.JobPaused(c.now, job.id, ask.by))
    return Answer(job=job.id)


def resume(c: Context, ask: i.ResumeJob) -> Answer:
    job = c.state.job(ask.job)
    if job.status in (JobStatus.WAITING, *PLACED) and not ask.quarantined:
        return Answer(job=job.id, repeated=True)
    if job.status is not (JobStatus.QUARANTINED if ask.quarantined else JobStatus.PAUSED):
        can = "quarantined job can be reinstated" if ask.quarantined else "paused job can be resumed"
        raise Conflict(f"job {job.spec.name} is {job.status}, and only a {can}")
    c.fact(f.JobResumed(c.now, job.id, ask.by))
    if ask.quarantined and c.state.session_of(job) is None:
        end_process(c, job, Cause("next_process"))
    return Answer(job=job.id)


def open_session(c: Context, ask: i.OpenSession) -> Answer:
    """A client process is there. A newer session of a run fences the older, which loses what it held or waited for."""
    job = c.state.job(ask.job)
    if not job.live:
        raise Conflict(f"job {job.spec.name} is {job.status}; register it again for a new run", job.reason)
    if ask.idempotency_key != job.idempotency_key:
        raise Conflict(f"run {job.run} of job {job.spec.name} was registered by another process")
    if job.spec.launch is not None and (job.launch is None or job.launch.over):
        raise Conflict(
            f"job {job.spec.name} is {job.status}, and its next process is still to be started: end this one"
        )
    old = c.state.sessions.get(job.session or "")
    new = c.state.next_id("e")
    if old is not None and old.status is SessionStatus.ALIVE:
        if (old.pid, old.host, old.started) == (ask.pid, ask.host, ask.started) and ask.started:
            c.timers.see(old.id, c.now, c.config.lease_ms)
            return Answer(job=job.id, session=old.id, repeated=True)
        c.timers.seen.pop(old.id, None)
    c.fact(f.SessionOpened(c.now, new, job.id, job.run, ask.pid, ask.host, ask.started))
    c.timers.see(new, c.now, c.config.lease_ms)
    reason = Cause("another_session")
    drop_request(c, job, reason)
    take_away(c, c.state.slot_of(job), reason, f"session {new}")
    if old is not None and (old.pid, old.host) != (ask.pid, ask.host):
        process_replaced(c, job, new)
    return Answer(job=job.id, session=new)


def process_replaced(c: Context, job: Job, session: SessionId) -> None:
    """Another process has joined the run: what the one before had on GPUs and in RAM may have gone with it.

    That has to be seen. And what the job was quarantined for was the former process's: as with a new run, the new one
    begins well.
    """
    for kept in c.state.states_of(job):
        if kept.status in (StateStatus.LOADED, StateStatus.PARKED):
            record_unknown(c, kept)
    if job.status is JobStatus.QUARANTINED:
        c.fact(f.JobResumed(c.now, job.id, f"session {session}"))


def close_session(c: Context, ask: i.CloseSession) -> Answer:
    """The process leaves in good order and its job stays. A slot that it holds is taken away."""
    session = c.state.session(ask.session)
    if session.status is not SessionStatus.ALIVE:
        return Answer(session=session.id, repeated=True)
    job = c.state.jobs[session.job]
    end_session(c, session)
    if job.live and job.launch is not None and not job.launch.over and job.session == session.id:
        c.timers.at(c.now + c.config.lease_ms, "reap", job.id)  # it may still have something to write
        job_lost(c, job, Cause("process_left", {"pid": session.pid}), leaves=True)
    else:
        drop_request(c, job, Cause("session_closed"))
        take_away(c, c.state.slot_of(job), Cause("session_closed"), f"session {session.id}")
        nobody_knows(c, job)
    return Answer(session=session.id)


def live_session(c: Context, session: SessionId) -> Session:
    found = c.state.session(session)
    if found.status is not SessionStatus.ALIVE:
        job = c.state.jobs[found.job]
        raise Conflict(f"session {session} is {found.status}; job {job.spec.name} is {job.status}")
    return found


def lose(c: Context, session: Session, reason: Cause) -> None:
    """The job of a session is lost at once, between slots too."""
    end_session(c, session, lost=True)
    job = c.state.jobs[session.job]
    if job.live and job.session == session.id:
        job_lost(c, job, reason)


def job_lost(c: Context, job: Job, reason: Cause, *, leaves: bool = False) -> None:
    """Its requests go, its slot is taken away; where its states are has to be seen.

    What is left of its process is ended, where that is wanted; at once, unless it ``leaves`` by itself.
    """
    drop_request(c, job, reason)
    abandon(c, job, reason)
    take_away(c, c.state.slot_of(job), reason, how=SlotStatus.LOST)
    hopeless = lost_too_often(c, job, reason)
    if hopeless is not None and job.status is not JobStatus.QUARANTINED:
        c.fact(f.JobQuarantined(c.now, job.id, hopeless))
    else:
        c.fact(f.JobLost(c.now, job.id, reason, *plan_relaunch(c, job)))
    nobody_knows(c, job)
    if not leaves and job.spec.on_loss is not OnLoss.HOLD and not end_process(c, job, reason):
        c.do(kill(job))


def nobody_knows(c: Context, job: Job) -> None:
    """The process is not there to be asked: what it had on GPUs has to be seen."""
    for kept in c.state.states_of(job):
        if kept.status is not StateStatus.PARKED:
            record_unknown(c, kept)


def process_gone(c: Context, told: i.ProcessGone) -> Answer:
    """The lease is not waited for. The GPUs are looked at now, and again until they are clean."""
    session = live_session(c, told.session)
    if (session.pid, session.started) != (told.pid, told.started):
        raise Conflict(f"session {session.id} is that of pid {session.pid}, and not of the process that is gone")
    lose(c, session, Cause("process_gone", {"pid": session.pid, "host": session.host}))
    return NOTHING


def lease_ran_out(c: Context, session: SessionId) -> None:
    """A session's deadline: if no heartbeat came, it is lost. One that has ended meanwhile has none."""
    seen = c.timers.seen.get(session)
    if seen is not None and c.is_past(seen + c.config.lease_ms, "lease", session):
        known = c.state.sessions[session]
        lose(c, known, Cause("no_heartbeat", {"pid": known.pid, "host": known.host}))
