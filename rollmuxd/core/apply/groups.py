"""Groups and their schedules."""

from collections.abc import Iterable

from rollmuxd.core import facts as f
from rollmuxd.core.ids import GroupId, JobId
from rollmuxd.core.model import Group, Job, PlannedTurn, ScheduledTurn
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


def leave_schedule(state: State, job: Job) -> None:
    state.at_risk.pop(job.id, None)
    group = state.group_of(job)
    if group is not None and any(turn.job == job.id for turn in group.schedule):
        group.schedule = [turn for turn in group.schedule if turn.job != job.id]
        group.version += 1


def group_replanned(state: State, fact: f.GroupReplanned) -> None:
    group = state.groups[fact.group]
    if fact.schedule:
        group.schedule = rewound(group, fact.schedule)
    group.version += 1
    for name in group.jobs:
        if name in fact.at_risk:
            state.at_risk[name] = None
        else:
            state.at_risk.pop(name, None)


def turn_added(state: State, fact: f.TurnAdded) -> None:
    group = state.groups[fact.group]
    add_once(group.schedule, fact.job, fact.phase)
    group.version += 1


def add_once(schedule: list[ScheduledTurn], job: JobId, phase: str) -> None:
    """A side phase takes a place just before its job's next turn."""
    rotation, index = min((turn.rotation, at) for at, turn in enumerate(schedule) if turn.job == job)
    schedule.insert(index, ScheduledTurn(job, phase, rotation, once=True))


def drop_once(state: State, job: Job, phase: str) -> None:
    group = state.group_of(job)
    if group is None:
        return
    group.schedule = [v for v in group.schedule if not (v.once and v.job == job.id and v.phase == phase)]
    group.version += 1


def turn_skipped(state: State, fact: f.TurnSkipped) -> None:
    state.groups[fact.group].schedule[fact.turn].rotation += 1


def merged(old: list[ScheduledTurn], planned: Iterable[PlannedTurn]) -> list[ScheduledTurn]:
    """The planned schedule: turns that were there before keep their rotation, and new ones join this one."""
    rotations: dict[tuple[JobId, str], list[int]] = {}
    for turn in old:
        rotations.setdefault((turn.job, turn.phase), []).append(turn.rotation)
    joins = min((turn.rotation for turn in old), default=0)
    schedule = []
    for plan in planned:
        known = rotations.get((plan.job, plan.phase))
        schedule.append(ScheduledTurn(plan.job, plan.phase, known.pop(0) if known else joins, plan.once))
    return schedule


def rewound(group: Group, planned: Iterable[PlannedTurn]) -> list[ScheduledTurn]:
    """A group's schedule as it was planned a while ago: less the jobs that left, and with side phases that wait."""
    schedule = merged(group.schedule, (it for it in planned if it.job in group.jobs and not it.once))
    for once in [it for it in group.schedule if it.once]:
        add_once(schedule, once.job, once.phase)
    return schedule
