"""Credit, and who acts on it: what keeps promises where no certificate can, because nobody knows how long phases take.

A job's credit is its bound on the solo time that it has truly needed, less the time that it took: by how much it is
ahead. In a group that is dispatched by *credit* whoever has least of it goes first, and a job that runs short is
guarded: it gets nodes of its own, where it may be moved and there are free ones, else it is served before all others.
There it earns; with a reserve for the way back and some iterations more it comes back among the others. (research/
policy.md section 5 has the rule and section 3 what it was seen to keep.)
"""

from typing import Final

from msgspec.structs import replace

from rollmuxd.core import facts as f
from rollmuxd.core.context import Context
from rollmuxd.core.estimates import credit_ms
from rollmuxd.core.ids import Millis
from rollmuxd.core.model import Dispatch, Job, JobStatus
from rollmuxd.core.policy import AsksForCredit, Move
from rollmuxd.core.spec import Movable
from rollmuxd.core.steps.admit import admit
from rollmuxd.core.steps.locality import place
from rollmuxd.core.steps.move import plan, refused

#: iterations before a job is judged by its credit
JUDGED_AFTER: Final = 8
#: what a job keeps beyond what a move debits, in iterations alone; and has to have to come back, beyond two moves
RESERVE: Final = 1
RETURN: Final = 6


def keeps_others_out(c: Context, job: Job) -> bool:
    """Whether nobody may join the job's group, because of the credit that somebody there has not earned yet."""
    return (
        job.group is not None
        and isinstance(c.policy, AsksForCredit)
        and not c.policy.can_afford_newcomer(c.state, job.group)
    )


def watch(c: Context, job: Job, *, closed: bool = False) -> None:
    """An iteration has ended: see whether the job is short of credit, or has enough again.

    ``closed``: somebody waits, and before it nobody could join the group for want of credit.
    """
    group = c.state.groups.get(job.group or "")
    if group is None or group.dispatch is not Dispatch.CREDIT or job.status is not JobStatus.ADMITTED:
        return
    credit, least, enough = credit_ms(job), least_ms(c, job), enough_ms(c, job)
    if credit is None or not job.promised:
        return
    if closed and not keeps_others_out(c, job):
        admit(c)
    if job.progress.finished < JUDGED_AFTER:
        return
    if not job.guarded and credit < least:
        c.fact(f.JobGuarded(c.now, job.id, credit, least))
    if job.guarded and credit >= enough and comes_back(c, job):
        c.fact(f.GuardEnded(c.now, job.id, credit))
        admit(c)
    elif job.guarded and credit < enough:
        isolate(c, job)


def mean_solo_ms(job: Job) -> Millis:
    """What an iteration took alone, as it was measured."""
    return job.progress.solo_ms // max(1, job.progress.finished)


def debit_ms(c: Context, job: Job) -> Millis:
    """What a move takes from the job's credit: the whole of it, since nothing runs meanwhile. 0: it is never moved."""
    if job.spec.movable is Movable.NO:
        return 0
    takes = c.config.relaunch_takes_ms if job.spec.movable is Movable.RELAUNCH else c.config.move_takes_ms
    return int((job.spec.slo or 1.0) * takes)


def least_ms(c: Context, job: Job) -> Millis:
    """With less credit than this a job is guarded: the way out, and one iteration."""
    return debit_ms(c, job) + RESERVE * mean_solo_ms(job)


def enough_ms(c: Context, job: Job) -> Millis:
    """With this it may come back: the way back and out again, and some iterations."""
    return 2 * debit_ms(c, job) + RETURN * mean_solo_ms(job)


def isolate(c: Context, job: Job) -> None:
    """Have it moved to nodes of its own, if there are any; until then it is served first where it is."""
    group = c.state.groups[job.group or ""]
    if job.spec.movable is Movable.NO or job.move is not None or len(group.jobs) + len(group.coming) < 2:
        return
    placed = place(c, job, replace(c.state, groups={}))
    if placed is None:
        return
    credit = (credit_ms(job) or 0) / 1000
    move = Move(job.id, placed, f"it is short of credit ({credit:.0f} s), and has nodes of its own until it has earned")
    if not refused(c, move, guarded=True):
        plan(c, move)


def comes_back(c: Context, job: Job) -> bool:
    """Have it moved back among others. Tells whether it is among others, or is to be."""
    group = c.state.groups[job.group or ""]
    if len(group.jobs) + len(group.coming) > 1:
        return True
    if job.spec.movable is Movable.NO or job.move is not None:
        return job.move is not None
    others = {name: known for name, known in c.state.groups.items() if name != job.group}
    placed = place(c, job, replace(c.state, groups=others))
    if placed is None or placed.group is None:
        return False
    move = Move(job.id, placed, "it has earned its credit, and shares nodes again")
    if refused(c, move, guarded=True):
        return False
    plan(c, move)
    return True
