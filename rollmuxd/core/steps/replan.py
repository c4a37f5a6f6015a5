"""Times that drift: plans are made anew before somebody's credit has to tell.

A profile of a run's first steps is wrong by up to four times later on. So at the end of each iteration a job's recent
means are held against what plans reckon with. Where one has left that (:func:`~rollmuxd.core.estimates.has_left`),
plans reckon with what was measured, and the job's group is planned anew (:meth:`Policy.replan
<rollmuxd.core.policy.Policy.replan>`): the same wheel with the new times; else another one for the same members on the
same nodes; else a member, who can be moved and whose credit affords that, is moved to where all promises hold. Where
nothing helps the promises that have no room are *at risk*: a fact, which explain and the metrics show.

Noise does not plan: a mean has to be off by more than chance would have it, of observations that were made since the
last time, and one job has plans made anew no more often than ``replan_every_ms``. A group whose promises are at risk is
looked at again when somebody has left or joined it, and each time as long has passed.
"""

from typing import Final

from msgspec.structs import replace

from rollmuxd.core import facts as f
from rollmuxd.core.context import Context
from rollmuxd.core.estimates import credit_ms, has_left, phase_ms, recent_ms
from rollmuxd.core.ids import GroupId, Millis
from rollmuxd.core.model import Dispatch, Group, Job, JobStatus
from rollmuxd.core.policy import Move, Replan
from rollmuxd.core.spec import Movable, PhaseSpec
from rollmuxd.core.steps.admit import admit
from rollmuxd.core.steps.dispatch import dispatch
from rollmuxd.core.steps.guard import debit_ms
from rollmuxd.core.steps.move import CHANGES, are_on, plan, refused
from rollmuxd.core.trial import trial_versions

#: a group whose promises are at risk is looked at again after so long at the earliest
AGAIN_MS: Final = 60_000


def watch(c: Context, job: Job) -> None:
    """An iteration has ended: see whether the job's phases take another time than plans reckon with."""
    if not c.config.drift or job.status is not JobStatus.ADMITTED or job.group is None:
        return
    if job.drifted_at is not None and c.now < job.drifted_at + c.config.replan_every_ms:
        return
    seen: dict[str, list[Millis]] = {}
    left = False
    for phase in job.spec.phases:
        times = job.times.get(phase.name)
        if times is None or times.fresh < c.config.drift_enough:
            continue
        recent = recent_ms(times, c.config.drift_window)
        # what takes less than a millisecond takes one: a bound on no time at all is none
        seen[phase.name] = [max(1, on_its_own_width_ms(job, phase, took)) for took in recent]
        planned = phase_ms(job, phase)
        left = left or planned is None or has_left(seen[phase.name], planned, c.config.drift)
    if not left:
        return
    phases = [phase for phase in job.spec.phases if phase.name in seen]
    c.fact(
        f.TimesDrifted(
            c.now,
            job.id,
            {name: sum(some) // len(some) for name, some in seen.items()},
            {phase.name: phase_ms(job, phase) or 0 for phase in phases},
            {name: len(some) for name, some in seen.items()},
        )
    )
    group = c.state.groups[job.group]
    replan_group(c, group, job, f"phases of {job.spec.name} take another time than was planned", changed=True)
    admit(c)


def follow(c: Context) -> bool:
    """After every input: who joins or leaves a group may end what is at risk there. Tells whether anything happened."""
    if not c.state.at_risk:
        c.settled.clear()
        return False
    if not any(type(fact) in CHANGES for fact in c.facts):
        return False
    before = len(c.facts)
    for name in tuple(c.state.at_risk):
        job = c.state.jobs[name]
        group = c.state.groups[job.group or ""]
        if c.settled.get(group.id) != group.version:
            replan_group(c, group, job, "its members have changed")
    return len(c.facts) > before


def look_again(c: Context, group: GroupId) -> None:
    """A deadline: promises of a group were at risk a while ago; what could not be done then may be done now."""
    known = c.state.groups.get(group)
    risky = None if known is None else next((name for name in known.jobs if name in c.state.at_risk), None)
    if known is not None and risky is not None:
        replan_group(c, known, c.state.jobs[risky], "its promise was at risk")


def replan_group(c: Context, group: Group, job: Job, why: str, *, changed: bool = False) -> None:
    """Plan the group anew, on account of a member. Where neither times have changed nor plans do, nothing is said."""
    found = c.policy.replan(c.state, group.id)
    were = tuple(name for name in group.jobs if name in c.state.at_risk)
    are = tuple(name for name in group.jobs if name in found.at_risk)
    if changed or found.schedule or are != were:
        c.fact(f.GroupReplanned(c.now, group.id, job.id, found.period_ms, found.schedule, are, why))
    c.settled[group.id] = group.version
    if found.schedule:
        dispatch(c, group.id)
    if are:
        c.timers.at(c.now + max(AGAIN_MS, c.config.replan_every_ms), "relieve", group.id)
        relieve(c, group)


# ---- somebody has to go ----------------------------------------------------------------------------------------------


def relieve(c: Context, group: Group) -> None:
    """Have a member moved without whom the others' promises hold: of those who can be moved, where it costs least.

    Not where jobs go by credit: there a plan is no promise, and whoever runs short is moved by the guard. Moving by
    the plan as well kept no promise more on logged steps, and cost 1 to 3 %.
    """
    if group.dispatch is Dispatch.CREDIT:
        return
    members = [c.state.jobs[name] for name in group.jobs]
    if not are_on(c) or len(members) < 2 or group.coming or any(job.move is not None for job in members):
        return
    moves = [move for move in (way_out(c, group, job) for job in members) if move is not None]
    if moves and len(c.state.moving) < c.config.moves_at_a_time:
        plan(c, min(moves, key=lambda move: move.placed.cost_per_hour))


def way_out(c: Context, group: Group, job: Job) -> Move | None:
    """Where the job could go so that all promises hold, here and there; None: nowhere, or it is not to be moved."""
    if job.spec.movable is Movable.NO or job.status is not JobStatus.ADMITTED:
        return None
    if job.promised and (credit_ms(job) or 0) < debit_ms(c, job):
        return None
    if without(c, group, job).at_risk:
        return None
    others = {name: known for name, known in c.state.groups.items() if name != group.id}
    placed = c.policy.place(replace(c.state, groups=others), job)
    if placed is None or (job.promised and not placed.promised):
        return None
    move = Move(job.id, placed, "without it the promises of its group hold, whose phases take longer than was planned")
    return None if refused(c, move) else move


def without(c: Context, group: Group, job: Job) -> Replan:
    """The group's plan if the job were not there."""
    rest = replace(
        group,
        jobs=[name for name in group.jobs if name != job.id],
        schedule=[visit for visit in group.schedule if visit.job != job.id],
        version=next(trial_versions),
    )
    return c.policy.replan(replace(c.state, groups={**c.state.groups, group.id: rest}), group.id)


def on_its_own_width_ms(job: Job, phase: PhaseSpec, took: Millis) -> Millis:
    """What would have been measured on as many nodes as the job wants, which is what stated times are about.

    On a pool that is wider (used whole by everybody) a phase is shorter by as much.
    """
    want = next((want for want in job.spec.wants if phase.pools == (want.pool,)), None)
    if phase.planned_ms is None or want is None or want.gpus:
        return took
    return took * max(want.nodes, len(job.pins.get(want.pool, ()))) // want.nodes
