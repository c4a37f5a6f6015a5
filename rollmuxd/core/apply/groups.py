"""Groups and their wheels."""

from rollmuxd.core import facts as f
from rollmuxd.core.facts import PlannedTurn
from rollmuxd.core.ids import GroupId, JobId
from rollmuxd.core.model import Group, Job, ScheduledTurn
from rollmuxd.core.state import State


def group_named(state: State, name: GroupId) -> Group:
    """The group; a new one where there is none."""
    group = state.groups.get(name)
    if group is None:
        state.mint("g")
        group = state.groups[name] = Group(id=name)
    return group


def forget_empty(state: State, group: Group) -> None:
    if not group.jobs and not group.coming:
        del state.groups[group.id]


def leave_wheel(state: State, job: Job) -> None:
    set_risk(state, job, risky=False)
    group = state.groups.get(job.group) if job.group else None
    if group is not None and any(visit.job == job.id for visit in group.schedule):
        group.schedule = [visit for visit in group.schedule if visit.job != job.id]
        group.version += 1


def set_risk(state: State, job: Job, *, risky: bool) -> None:
    job.at_risk = risky
    if risky:
        state.at_risk[job.id] = None
    else:
        state.at_risk.pop(job.id, None)


def group_replanned(state: State, fact: f.GroupReplanned) -> None:
    group = state.groups[fact.group]
    if fact.schedule:
        group.schedule = rewound(
            group, [ScheduledTurn(job=it.job, phase=it.phase, once=it.once) for it in fact.schedule]
        )
    group.version += 1
    for name in group.jobs:
        job = state.jobs[name]
        job.planned_period_ms = fact.period_ms
        set_risk(state, job, risky=name in fact.at_risk)


def visit_added(state: State, fact: f.TurnAdded) -> None:
    group = state.groups[fact.group]
    turn, index = min((visit.turn, at) for at, visit in enumerate(group.schedule) if visit.job == fact.job)
    group.schedule.insert(index, ScheduledTurn(job=fact.job, phase=fact.phase, turn=turn, once=True))
    group.version += 1


def drop_once(state: State, job: Job, phase: str) -> None:
    group = state.groups.get(job.group) if job.group else None
    if group is None:
        return
    group.schedule = [v for v in group.schedule if not (v.once and v.job == job.id and v.phase == phase)]
    group.version += 1


def visit_skipped(state: State, fact: f.TurnSkipped) -> None:
    state.groups[fact.group].schedule[fact.visit].turn += 1


def merged(old: list[ScheduledTurn], planned: tuple[f.PlannedTurn, ...]) -> list[ScheduledTurn]:
    """The planned wheel, in which visits that were there before keep their turn and new ones join this turn."""
    turns: dict[tuple[JobId, str], list[int]] = {}
    for visit in old:
        turns.setdefault((visit.job, visit.phase), []).append(visit.turn)
    joins = min((visit.turn for visit in old), default=0)
    wheel = []
    for plan in planned:
        known = turns.get((plan.job, plan.phase))
        wheel.append(
            ScheduledTurn(job=plan.job, phase=plan.phase, turn=known.pop(0) if known else joins, once=plan.once)
        )
    return wheel


def rewound(group: Group, planned: list[ScheduledTurn]) -> list[ScheduledTurn]:
    """A group's wheel as it was planned a while ago, without who has left, and with the side phases that wait."""
    visits = tuple(PlannedTurn(it.job, it.phase) for it in planned if it.job in group.jobs and not it.once)
    wheel = merged(group.schedule, visits)
    for once in [it for it in group.schedule if it.once]:
        turn, index = min((it.turn, at) for at, it in enumerate(wheel) if it.job == once.job)
        wheel.insert(index, ScheduledTurn(job=once.job, phase=once.phase, turn=turn, once=True))
    return wheel
