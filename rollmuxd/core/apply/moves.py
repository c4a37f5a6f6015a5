"""Moves of jobs from group to group."""

from rollmuxd.core import facts as f
from rollmuxd.core.apply.groups import forget_empty, group_named, merged, rewound
from rollmuxd.core.apply.jobs import set_job
from rollmuxd.core.apply.measures import start_fresh_times
from rollmuxd.core.apply.pins import follow, owner_of, pin, unpin
from rollmuxd.core.lifecycle import meet
from rollmuxd.core.model import JobMove, JobStatus, nodes_left
from rollmuxd.core.state import State


def move_planned(state: State, fact: f.MovePlanned) -> None:
    job = state.jobs[fact.job]
    meet(job, fact)
    group = group_named(state, fact.group)
    job.move = JobMove(group.id, fact.pins, fact.at, fact.why, fact.admission, fact.promised, off=fact.off)
    if group.id == job.group:
        job.move.schedule = fact.schedule
    else:
        group.coming.append(job.id)
        group.schedule = merged(group.schedule, fact.schedule)
        group.dispatch = fact.dispatch
    group.version += 1
    state.moving[job.id] = None
    pin(state, job, group, fact.pins, owner_of(state, job))


def move_began(state: State, fact: f.MoveBegan) -> None:
    job = state.jobs[fact.job]
    set_job(state, job, fact)
    assert job.move is not None  # its status was checked
    job.move.since = fact.at


def move_ended(state: State, fact: f.MoveEnded) -> None:
    job = state.jobs[fact.job]
    set_job(state, job, fact)
    move, old = job.move, state.its_group(job)
    assert move is not None  # its status is MOVING
    group = state.groups[move.group]
    if move.schedule is None:
        old.schedule = [turn for turn in old.schedule if turn.job != job.id]
        old.jobs.remove(job.id)
        group.coming.remove(job.id)
        group.jobs.append(job.id)
    else:
        group.schedule = rewound(group, move.schedule)
    old.version += 1
    group.version += 1
    gone = nodes_left(job.pins, move.pins)
    job.newest = {pool: follow(was, job.newest[pool], move.pins[pool]) for pool, was in job.pins.items()}
    job.last_pins, job.pins, job.group, job.placed_at = job.pins, move.pins, group.id, fact.at
    job.admission, job.promised = move.admission, move.promised
    job.move, job.moved_at = None, fact.at
    start_fresh_times(job)
    state.at_risk.pop(job.id, None)
    if fact.run:
        job.run, job.idempotency_key = fact.run, fact.idempotency_key
        for key in job.states:
            state.states[key].run = fact.run
    del state.moving[job.id]
    unpin(state, job, gone, owner_of(state, job))
    forget_empty(state, old)


def move_abandoned(state: State, fact: f.MoveAbandoned) -> None:
    job = state.jobs[fact.job]
    has_begun = job.status is JobStatus.MOVING
    set_job(state, job, fact)
    move = job.move
    assert move is not None
    group = state.groups[move.group]
    if move.schedule is None:
        group.coming.remove(job.id)
        group.schedule = [turn for turn in group.schedule if turn.job != job.id]
    group.version += 1
    if not move.off or has_begun:  # a move off a drained node that has not begun ends
        job.moved_at = fact.at
    job.move = None
    del state.moving[job.id]
    unpin(state, job, nodes_left(move.pins, job.pins), owner_of(state, job))
    forget_empty(state, group)
