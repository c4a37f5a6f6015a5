"""Processes that backends start for jobs: begun when the job has its place, ended with it, begun again when lost.

A launch has an id of its own, so that telling it twice starts one process. Whatever becomes of a process that was lost,
the next one belongs to a run of its own, with a key of its own. A process that comes back late is refused: the run is
no longer its own.
"""

from rollmuxd.core import effects as e
from rollmuxd.core import facts as f
from rollmuxd.core.causes import Cause
from rollmuxd.core.context import Context
from rollmuxd.core.ids import JobId, Millis
from rollmuxd.core.model import Job, JobStatus, nodes_in
from rollmuxd.core.spec import OnLoss


def launch(c: Context, job: Job) -> None:
    """Have the process of a job that has its place started, where one is to be started and none is there."""
    if job.spec.launch is None or (job.launch is not None and not job.launch.over):
        return
    name = c.state.next_id("l")
    host = c.state.nodes[nodes_in(job.pins)[0]].host
    c.fact(f.ProcessLaunched(c.now, job.id, job.run, name, host))
    c.timers.at(c.now + c.config.launch_ms, "opened", job.id)
    c.do(e.Launch(job.id, name))


def end_process(c: Context, job: Job, reason: Cause) -> bool:
    """Have a process that was started for a job ended. Tells whether there was one."""
    known = job.launch
    if known is None or known.over:
        return False
    c.fact(f.ProcessOver(c.now, job.id, known.id, reason))
    c.do(kill(job))
    return True


def kill(job: Job) -> e.Kill:
    """The order to end what is left of the job's processes."""
    launched = () if job.launch is None else (job.launch.id, job.launch.host)
    return e.Kill(job.id, job.run, job.session, *launched)


def losses_of_late(c: Context, job: Job) -> list[Millis]:
    """When the job was lost, as far back as it counts."""
    return [at for at in job.losses if at > c.now - c.config.relaunch_window_ms]


def is_ended_for_it(job: Job) -> bool:
    """Whether what a job leaves running is ended for it, once it has lost its rights."""
    return job.spec.on_loss is OnLoss.KILL or job.launch is not None


def lost_too_often(c: Context, job: Job, reason: Cause) -> Cause | None:
    """Why a job that is started again when it is lost is not any more; None: it is, or never was."""
    lost = len(losses_of_late(c, job))
    if job.spec.on_loss is not OnLoss.RELAUNCH or lost < c.config.relaunch_limit:
        return None
    within = c.config.relaunch_window_ms // 60_000
    return Cause("lost_too_often", {"times": lost, "within_min": within}, reason)


def plan_relaunch(c: Context, job: Job) -> tuple[Millis | None, int]:
    """When a lost job is started again, after a minute, two, four, ..., and for the how-manieth time; None: never."""
    if job.spec.on_loss is not OnLoss.RELAUNCH:
        return None, 0
    attempt = len(losses_of_late(c, job)) + 1
    due = c.now + c.config.relaunch_after_ms * 2 ** (attempt - 1)
    c.timers.at(due, "relaunch", job.id)
    return due, attempt


def relaunch(c: Context, name: JobId) -> None:
    """A lost job's deadline: a new run of it waits for its place, on its old nodes first."""
    job = c.state.jobs.get(name)
    if job is None or job.status is not JobStatus.LOST or job.relaunch_at is None:
        return
    if not c.is_past(job.relaunch_at, "relaunch", job.id):
        return
    end_process(c, job, Cause("next_process"))
    run = job.run + 1
    attempt = len(losses_of_late(c, job))
    c.fact(f.JobRegistered(c.now, job.id, job.owner, job.user, run, job.spec, run_key(c, job.id, run), max(1, attempt)))


def run_key(c: Context, job: JobId, run: int) -> str:
    """The key by which the process of a run, and of no other, is known: numbers are given again after a restore."""
    return f"{run}.{c.state.incarnation}~{job}"
