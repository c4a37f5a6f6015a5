"""Credit, and what is done when it is spent.

A job's credit is its bound on the solo time that it has truly needed, less the time that it took. In a group that is
dispatched by *credit* the job with the least of it is first. A job that runs short is **guarded**: it is served before
others, or goes to free nodes of its own. There it earns; with a reserve for two moves and some iterations it may share
again.

A promise that has no room left where its job sits is **exhausted**. The guard finds it, or measured times do
(:mod:`~rollmuxd.core.steps.replan`), or the time comes at which lent credit is spent.
"""

from typing import Final

from msgspec.structs import replace

from rollmuxd.core import facts as f
from rollmuxd.core.causes import Cause
from rollmuxd.core.context import Context
from rollmuxd.core.estimates import credit_ms, solo_ms
from rollmuxd.core.ids import Millis
from rollmuxd.core.model import Dispatch, Group, Job, JobStatus
from rollmuxd.core.policy import Move, trial_versions
from rollmuxd.core.spec import Movable
from rollmuxd.core.steps.locality import place, place_elsewhere
from rollmuxd.core.steps.move import plan, refused

#: iterations before a job is judged by its credit, and a guard by what it brought
JUDGED_AFTER: Final = 8
#: what a job keeps beyond what a move debits, in iterations alone; and has to have to come back, beyond two moves
RESERVE: Final = 1
RETURN: Final = 6


def watch(c: Context, job: Job) -> None:
    """An iteration has ended: see whether the job is short of credit, or has enough again."""
    group = c.state.group_of(job)
    if group is None or group.dispatch is not Dispatch.CREDIT or job.status is not JobStatus.ADMITTED:
        return
    credit, debit = credit_ms(job), debit_ms(c, job)
    # less guards the job: the way out. More lets it share again: the way there and out again
    least, enough = reserve_ms(job, debit), reserve_ms(job, 2 * debit, RETURN)
    if credit is None or not job.promised:
        return
    judged = job.progress.finished - job.guard_from >= JUDGED_AFTER
    if not job.guarded and judged and credit < least:
        c.fact(f.GuardChanged(c.now, job.id, True, credit))
    elif job.guarded and credit >= enough:
        c.fact(f.GuardChanged(c.now, job.id, False, credit))
    elif job.guarded and judged and len(group.jobs) > 1 and credit <= job.guard_credit_ms:
        c.fact(f.GuardChanged(c.now, job.id, False, credit, Cause("guard_in_vain", {"iterations": JUDGED_AFTER})))
    if job.guarded or (job.guard_from and credit < least):
        exhausted(c, group, job, Cause("short_of_credit", {"credit_s": credit / 1000}))


def debit_ms(c: Context, job: Job) -> Millis:
    """What a move takes from the job's credit: the whole of it, since nothing runs meanwhile. 0: it is never moved."""
    if job.spec.movable is Movable.NO:
        return 0
    takes = c.config.relaunch_cost_ms if job.spec.movable is Movable.RELAUNCH else c.config.move_cost_ms
    return int((job.spec.slo or 1.0) * takes)


def reserve_ms(job: Job, moves_ms: Millis, iterations: int = RESERVE) -> Millis:
    """What a job keeps beyond what its moves take: so many iterations alone, as they were measured or are planned."""
    progress = job.progress
    solo = progress.solo_ms // progress.finished if progress.finished else solo_ms(job) or 0
    return moves_ms + iterations * solo


def exhausted(c: Context, group: Group, job: Job, why: Cause) -> None:
    """The job's promise has no room where it sits, and no other schedule there helps: a job has to leave the group.

    It is the one whose move costs least, of those without which all promises hold. Where there is none, the job itself
    goes to nodes of its own. By credit a plan is no promise, so there it is the job itself. On logged steps, moving
    others as well kept no further promise, and cost 1 to 3 %.
    """
    if len(group.jobs) + len(group.coming) < 2:
        return
    members = () if group.dispatch is Dispatch.CREDIT else c.state.members(group)
    moves = [move for it in members if (move := _way_out(c, group, it, why)) is not None]
    move = min(moves, key=lambda it: it.placed.cost_per_hour, default=None) or _alone(c, job, why)
    if move is not None:
        plan(c, move)


def _way_out(c: Context, group: Group, job: Job, why: Cause) -> Move | None:
    """The job's move to where all promises hold, here and there; None: there is no such place, or it is not moved."""
    if job.spec.movable is Movable.NO or (job.promised and (credit_ms(job) or 0) < debit_ms(c, job)):
        return None
    left = [name for name in group.jobs if name != job.id]
    turns = [turn for turn in group.schedule if turn.job != job.id]
    rest = replace(group, jobs=left, schedule=turns, version=next(trial_versions))
    if c.policy.replan(replace(c.state, groups={**c.state.groups, group.id: rest}), group.id).at_risk:
        return None
    placed = place_elsewhere(c, job)
    if placed is None or (job.promised and not placed.promised):
        return None
    move = Move(job.id, placed, Cause("hold_without", cause=why))
    return None if refused(c, move) else move


def _alone(c: Context, job: Job, why: Cause) -> Move | None:
    """The job's move to nodes of its own, if there are any."""
    placed = None if job.spec.movable is Movable.NO else place(c, job, replace(c.state, groups={}))
    move = None if placed is None else Move(job.id, placed, Cause("earns_alone", cause=why))
    return None if move is None or refused(c, move, guarded=True) else move
