"""Other times than were planned, and credit that is spent: plans are made again before promises break.

A profile of a run's first steps is wrong by up to four times later on. So at the end of each iteration a job's recent
means are held against what plans reckon with. Where one has left that (:func:`~rollmuxd.core.estimates.has_left`),
plans reckon with what was measured, and the job's group is planned again (:meth:`Policy.replan
<rollmuxd.core.policy.Policy.replan>`). The same schedule is tried with the new times, then another one for the same
members on the same nodes. If neither holds, a job leaves (:func:`~rollmuxd.core.steps.guard.exhausted`). The same is
done when a job has spent the credit that a plan lent. Where nothing helps the promises that have no room are *at risk*:
a fact, which explain and the metrics show.

Noise must not cause plans. A mean has to differ by more than chance explains, over observations since the last plan.
One job causes at most one plan in ``replan_every_ms``. A group whose promises are at risk is planned again when a job
left or joined it, and each time as long has passed.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from rollmuxd.core import facts as f
from rollmuxd.core.causes import Cause
from rollmuxd.core.config import PlanWith
from rollmuxd.core.context import SERVED, Context
from rollmuxd.core.estimates import (
    ENOUGH,
    has_left,
    moves_ms,
    observed_moves_ms,
    phase_ms,
    planned_with,
    promised_ms,
    solo_ms,
)
from rollmuxd.core.ids import GroupId, Millis, PoolName
from rollmuxd.core.model import Group, Job, JobStatus, PhaseTimes
from rollmuxd.core.policy import SpendsCredit
from rollmuxd.core.spec import PhaseSpec
from rollmuxd.core.steps.guard import exhausted
from rollmuxd.core.steps.move import regroup

#: a group whose promises are at risk is looked at again after so long at the earliest
AGAIN_MS: Final = 60_000
#: loads and parks that take less than this share of an iteration are in no plan
MOVES_MATTER: Final = 0.01


def watch(c: Context, job: Job) -> None:
    """An iteration has ended: see whether the job's phases take another time than plans reckon with."""
    if not c.config.drift or job.status is not JobStatus.ADMITTED or job.group is None:
        return
    if job.drifted_at is not None and c.now < job.drifted_at + c.config.replan_every_ms:
        return
    seen: dict[str, list[Millis]] = {}
    moves = observed_moves_ms(job, c.state.states)
    left = False
    for phase in job.spec.timed:
        times = job.times.get(phase.name)
        if times is None or times.fresh < c.config.min_samples:
            continue
        recent = times.recent_ms[-min(c.config.drift_window, times.fresh) :]  # of those since the last plan
        # what takes less than a millisecond takes one: a bound on no time at all is none
        seen[phase.name] = [max(1, on_its_own_width_ms(job, phase, took)) for took in recent]
        planned, promised = phase_ms(job, phase), promised_ms(job, phase)
        left = left or planned is None or has_left(seen[phase.name], planned, c.config.drift, c.config.plan)
        left = left or promised is None or has_left(seen[phase.name], promised, c.config.drift)
    if not left and not (seen and moves_have_left(job, moves, c.config.drift)):
        return
    plans_follow(c, job, seen, moves, "times_left_plan")


def measure(c: Context, job: Job) -> None:
    """What plans take from the first few observations on: phases, loads and parks of which the job states nothing."""
    if job.status not in SERVED or job.group is None:
        return
    stated = {spec.pool for spec in job.spec.states if spec.load_ms or spec.park_ms}
    seen = observed_moves_ms(job, c.state.states) if c.config.drift else {}
    moves = {pool: took for pool, took in seen.items() if pool not in stated and pool not in job.moves_ms}
    if not moves_have_left(job, moves, MOVES_MATTER):
        moves = {}
    unstated = (it.name for it in job.spec.timed if it.planned_ms is None and job.status is JobStatus.PROBING)
    times = {name: it for name in unstated if (it := job.times.get(name, PhaseTimes())).planned_ms is None}
    if any(it.count < ENOUGH for it in times.values()):
        times = {}
    if moves or times:
        first = {name: [max(1, took) for took in it.recent_ms] for name, it in times.items()}
        plans_follow(c, job, first, moves, "moves_planned")


def plans_follow(
    c: Context, job: Job, seen: Mapping[str, Sequence[Millis]], moves: dict[PoolName, Millis], why: str
) -> None:
    """From now on plans reckon with these observations of phases, by name, and of loads and parks."""
    timed = () if job.status is JobStatus.PROBING else job.spec.timed  # first times take the place of none
    mean = c.config.plan is PlanWith.MEAN  # then promises reckon with the same
    c.fact(
        f.TimesDrifted(
            c.now,
            job.id,
            {name: planned_with(some, c.config.plan) for name, some in seen.items()},
            was={phase.name: phase_ms(job, phase) or 0 for phase in timed if phase.name in seen},
            samples={name: len(some) for name, some in seen.items()},
            means={} if mean else {name: sum(some) // len(some) for name, some in seen.items()},
            moves=moves,
        )
    )
    if job.status is JobStatus.ADMITTED:
        replan_group(c, c.state.its_group(job), job, Cause(why, {"job": job.id}), changed=True)


def moves_have_left(job: Job, moves: Mapping[PoolName, Millis], share: float) -> bool:
    """Whether loads and parks are off by more than this share of an iteration from what plans reckon with."""
    solo = solo_ms(job)
    return solo is not None and abs(sum(moves.values()) - moves_ms(job, moves)) > share * solo


def relieve(c: Context) -> None:
    """A job that joins or leaves a group may end what is at risk there."""
    if not c.state.at_risk:
        c.settled.clear()
    elif c.dirty.places:
        for name in tuple(c.state.at_risk):
            job = c.state.jobs[name]
            group = c.state.its_group(job)
            if c.settled.get(group.id) != group.version:
                replan_group(c, group, job, Cause("members_changed"))


def look_again(c: Context, group: GroupId) -> None:
    """A deadline: promises of a group were at risk a while ago; what could not be done then may be done now."""
    known = c.state.groups.get(group)
    risky = None if known is None else next((name for name in known.jobs if name in c.state.at_risk), None)
    if known is not None and risky is not None:
        replan_group(c, known, c.state.jobs[risky], Cause("at_risk"))


def replan_group(c: Context, group: Group, job: Job, why: Cause, *, changed: bool = False) -> None:
    """Plan the group again, on account of a member. If neither times nor the plan change, there is no fact."""
    found = c.policy.replan(c.state, group.id)
    were = tuple(name for name in group.jobs if name in c.state.at_risk)
    are = tuple(name for name in group.jobs if name in found.at_risk)
    if changed or found.schedule or are != were:
        c.fact(f.GroupReplanned(c.now, group.id, job.id, found.period_ms, found.schedule, are, why))
    c.settled[group.id] = group.version
    if are:
        c.timers.at(c.now + max(AGAIN_MS, c.config.replan_every_ms), "relieve", group.id)
        exhausted(c, group, c.state.jobs[are[0]], why)


def look_for_moves(c: Context, _: str) -> None:
    """A step of the search for moves. Before it begins: whether credit that plans lent has been spent."""
    if c.regrouping is None and isinstance(c.policy, SpendsCredit):
        for name in tuple(c.policy.exhausted(c.state, c.now)):
            job = c.state.jobs[name]
            replan_group(c, c.state.its_group(job), job, Cause("credit_spent", {"job": job.id}))
    regroup(c)


def on_its_own_width_ms(job: Job, phase: PhaseSpec, took: Millis) -> Millis:
    """What would have been measured on as many nodes as the job wants, which is what stated times are about.

    On a pool that is wider (used whole by everybody) a phase is shorter by as much.
    """
    want = next((want for want in job.spec.wants if phase.pools == (want.pool,)), None)
    if phase.planned_ms is None or want is None or want.gpus:
        return took
    return took * max(want.nodes, len(job.pins.get(want.pool, ()))) // want.nodes
