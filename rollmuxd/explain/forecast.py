"""When a queued request is likely to have its turn: the group's schedule played on from now, at the likely times.

A guess for people, from what phases took so far: no certificate, and nothing is decided by it.
"""

from heapq import heapify, heappop, heappush

from rollmuxd.core.context import SERVED, Context
from rollmuxd.core.estimates import by_work_ms, phase_ms
from rollmuxd.core.ids import JobId, Millis, NodeId
from rollmuxd.core.model import Group, Job, PhaseTimes, Slot, StateStatus
from rollmuxd.core.order import Rotation
from rollmuxd.core.spec import PhaseSpec
from rollmuxd.core.state import State
from rollmuxd.core.steps.admit import rank_at

#: turns that are played, at most
_TURNS = 2_000


def wait_ms(state: State, rotation: Rotation, group: Group, slot: Slot, now: Millis) -> Millis | None:
    """From now until the queued slot is likely granted in the schedule's order; None where a time is not known."""
    mine = rotation.turn_of(state, group, slot.job, slot.phase)
    if mine is None:
        return None
    jobs: dict[JobId, Millis] = {}
    nodes: dict[NodeId, Millis] = {}
    for name in group.jobs:
        has = state.jobs[name].slot
        left = 0 if has is None else left_ms(state, state.slots[has], now)
        if left is None:
            return None
        jobs[name] = left
    for node in group.nodes:
        holders = (state.slots[holder].job for holder in state.nodes[node].holders)
        held = [jobs[job] for job in holders if job in jobs]
        nodes[node] = max(held, default=0)
    line = [(turn.rotation, index) for index, turn in enumerate(group.schedule)]
    heapify(line)
    for _ in range(_TURNS):
        passed, index = heappop(line)
        turn = group.schedule[index]
        job = state.jobs[turn.job]
        claims = rotation.nodes_of(state, group, turn.job, turn.phase)
        if index == mine:
            start = max([jobs.get(slot.job, 0), *(nodes.get(node, 0) for node in claims)])
            return start + _moves_ms(state, job, turn.phase)
        heappush(line, (passed + 1, index))
        if job.status not in SERVED or job.group != group.id:
            continue  # it is passed at once
        phase = job.spec.phase(turn.phase)
        took = likely_ms(job, phase)
        if took is None:
            return None
        start = max([jobs.get(turn.job, 0) + phase.gap_ms, *(nodes.get(node, 0) for node in claims)])
        jobs[turn.job] = start + took + _moves_ms(state, job, turn.phase)
        nodes.update(dict.fromkeys(claims, jobs[turn.job]))
    return None


def left_ms(state: State, slot: Slot, now: Millis) -> Millis | None:
    """What a running slot is likely to need yet; 0: it is over its usual time; None: not known, or over twice that."""
    job = state.jobs[slot.job]
    took, ran = likely_ms(job, job.spec.phase(slot.phase)), now - (now if slot.granted_at is None else slot.granted_at)
    return None if took is None or ran > 2 * took else max(0, took - ran)


def likely_ms(job: Job, phase: PhaseSpec) -> Millis | None:
    """The best guess of the phase's time, for people: by the work before it, else as observed, else as planned."""
    known = by_work_ms(job, phase)
    if known is not None:
        return known
    seen = job.times.get(phase.name, PhaseTimes()).recent_ms
    return (sum(seen) // len(seen) if seen else None) or phase.planned_ms


def _moves_ms(state: State, job: Job, phase: str) -> Millis:
    """What loading the phase's states is likely to take, where they are not loaded."""
    pools = job.spec.phase(phase).pools
    kept = [it for it in state.states_of(job) if it.pool in pools and it.status is not StateStatus.LOADED]
    return max((it.loads_ms + it.parks_ms for it in kept), default=0)


def estimate_samples(job: Job, phase: PhaseSpec) -> int:
    """How many observations the phase's time for planning is the mean of; 0: it is as stated, or not known."""
    times = job.times.get(phase.name)
    if times is None or phase_ms(job, phase) is None:
        return 0
    if times.planned_ms is not None:
        return times.planned_from
    return len(times.recent_ms) if phase.planned_ms is None else 0


def slowdown(job: Job) -> float | None:
    """Mean iteration over solo iteration, of all finished iterations of the run; None before the first."""
    progress = job.progress
    return progress.elapsed_ms / progress.solo_ms if progress.solo_ms else None


def iteration_ms(period_ms: Millis, group: Group, job: Job) -> Millis:
    """What a rotation of the group gives one iteration of the job: it may go round several times in it."""
    first = job.spec.phases[0].name
    return period_ms // max(1, sum(turn.job == job.id and turn.phase == first for turn in group.schedule))


def position(c: Context, job: JobId, now: Millis) -> int:
    """The job's place in the waiting order, from 1; 0: it does not wait."""
    if job not in c.state.waiting:
        return 0
    rank, place = rank_at(c, now), 1
    mine, behind = rank(job), False  # of equals, those come before it that wait for longer
    for name in c.state.waiting:
        theirs = rank(name)
        behind = behind or name == job
        place += theirs < mine or (theirs == mine and not behind)
    return place
