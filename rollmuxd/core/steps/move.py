"""Moving a placed job to other nodes: planned by the policy, done at the job's next iteration boundary.

From ``MovePlanned`` on, the target nodes are the job's own, with RAM for its states there and its turns in the
target's schedule. It still runs where it sits, and counts in both places. ``MoveBegan`` comes when it holds nothing and
is between two iterations; it is granted nothing then, and what it has loaded is parked. ``MoveEnded`` comes when all
that is parked: from then on it sits in the target group. What is parked on the old nodes stays there until it was
loaded on the new ones (a load's ``source``). ``NodeLeft`` comes when nothing of it is left on an old node.

Anything may come in between. Until it has ended, a move is then abandoned, and the job stays where it was.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Final

from msgspec.structs import asdict

from rollmuxd.core import facts as f
from rollmuxd.core.causes import Cause
from rollmuxd.core.config import Moves
from rollmuxd.core.context import Context
from rollmuxd.core.feasible import short_of_ram
from rollmuxd.core.ids import Millis, NodeId, PoolName
from rollmuxd.core.model import (
    Dispatch,
    Job,
    JobMove,
    JobState,
    JobStatus,
    Node,
    NodeStatus,
    StateStatus,
    nodes_in,
    nodes_left,
)
from rollmuxd.core.policy import Move, Placed
from rollmuxd.core.spec import Movable
from rollmuxd.core.steps.admit import over_its_nodes
from rollmuxd.core.steps.dispatch import OUT, go_to_turn, park_if_unheld
from rollmuxd.core.steps.launch import end_process, launch, run_key
from rollmuxd.core.steps.lines import next_phase
from rollmuxd.core.steps.locality import locality_violation, place_elsewhere
from rollmuxd.core.steps.observe import expect_clean, record_unknown
from rollmuxd.core.steps.reclaim import abandon, discard_from, drop_request, end_session

#: the time between two steps of the search for moves, in which others are heard
STEP_MS: Final = 1


# ---- after every input -----------------------------------------------------------------------------------------------


def proceed(c: Context) -> None:
    """Let each move go as far as it can, and tidy what moved jobs have left behind."""
    for name in tuple(c.state.moving):
        advance(c, c.state.jobs[name])
    for name in tuple(c.state.leaving):
        tidy(c, c.state.jobs[name])


def look_for_moves(c: Context, wait_ms: Millis) -> None:
    """Search after so long, if any job may be moved at all."""
    if are_on(c) and any(job.spec.movable is not Movable.NO and job.pins for job in c.state.jobs.values()):
        c.timers.at(c.now + wait_ms, "regroup", "")


def are_on(c: Context) -> bool:
    """Whether jobs are moved at all. On one host there is little to gain, so it takes to be told."""
    if c.config.moves is Moves.AUTO:
        return sum(bool(host.nodes) for host in c.state.hosts.values()) > 1
    return c.config.moves is Moves.ON


def advance(c: Context, job: Job) -> None:
    """Abandon a move that has become void; begin it at the iteration boundary; end it when the job is ready to go."""
    why = void(c, job, told(job))
    if why is not None:
        abandon(c, job, why)
        return
    if may_begin(c, job, told(job)):
        begin(c, job)
    if job.status is JobStatus.MOVING:
        for kept in states_on(c, job, nodes_left(job.pins, told(job).pins)):
            park_if_unheld(c, kept)
        if is_ready(c, job, told(job)):
            end(c, job)


def may_begin(c: Context, job: Job, move: JobMove) -> bool:
    """Whether the job holds nothing and is between two iterations: the next is for elsewhere.

    Or it asks for what it does not get before it has moved, as the nodes that it leaves are drained. A job that is
    started again elsewhere loses the iteration then, but would never have ended it.
    """
    if job.status is not JobStatus.ADMITTED or job.slot is not None or job.closing:
        return False
    if not c.state.are_up(nodes_in(move.pins)):
        return False
    asked = c.state.request_of(job)
    if asked is None:
        return next_phase(c, job) in (None, job.spec.phases[0])
    claims = set(nodes_left(job.pins, move.pins)).intersection(c.state.phase_nodes(job, asked.phase))
    return asked.phase == job.spec.phases[0].name or any(c.state.nodes[name].drain for name in claims)


def may_be_moved(job: Job) -> bool:
    """Whether a job may be moved, and no move of it is at hand."""
    return job.status is JobStatus.ADMITTED and job.move is None and job.spec.movable is not Movable.NO


def again_at(c: Context, job: Job) -> Millis:
    """From when on it may be moved."""
    return 0 if job.moved_at is None else job.moved_at + c.config.move_interval_ms


def told(job: Job) -> JobMove:
    assert job.move is not None, "only of jobs with a move at hand"
    return job.move


# ---- from its planning to its end ------------------------------------------------------------------------------------


def cannot_leave(c: Context, job: Job, pins: dict[PoolName, tuple[NodeId, ...]]) -> Node | None:
    """A node that the job would leave for those, and on which nothing can be parked."""
    nodes = (c.state.nodes[name] for name in nodes_left(job.pins, pins))
    return next((node for node in nodes if node.status in (NodeStatus.LOST, NodeStatus.QUARANTINED)), None)


def void(c: Context, job: Job, move: JobMove) -> Cause | None:
    """Why a move cannot be ended any more, or not in time; None: it can."""
    for name in nodes_in(move.pins):
        node = c.state.nodes[name]
        if node.status in OUT:
            return Cause("target_out", {"node": name, "status": str(node.status)})
    stays = cannot_leave(c, job, move.pins)
    if stays is not None:
        return Cause("source_out", {"node": stays.id, "status": str(stays.status)})
    if move.off and job.status is not JobStatus.MOVING and not any(c.state.nodes[name].drain for name in move.off):
        return Cause("drain_ended", {"nodes": move.off})
    if move.schedule is not None:
        planned = {turn.job for turn in move.schedule}
        group = c.state.groups[move.group]
        joined = [turn.job for turn in group.schedule if turn.job not in planned]
        if joined:
            return Cause("joined", {"job": joined[0]})
    late, limit = "begins_late", c.config.move_start_timeout_ms
    if job.status is JobStatus.MOVING:
        late, limit = "ends_late", c.config.move_finish_timeout_ms
    if c.is_past(max(move.since, c.timers.renewed_at) + limit, "move", job.id):
        return Cause(late, {"limit_s": limit // 1000})
    return None


def begin(c: Context, job: Job) -> None:
    """From here on it is granted nothing; its process parks what it has loaded, or is ended."""
    c.fact(f.MoveBegan(c.now, job.id))
    if job.spec.movable is Movable.RELAUNCH:
        drop_request(c, job, Cause("process_is_ended"))
        end_session(c, c.state.session_of(job))
        end_process(c, job, Cause("starts_elsewhere"))
        for kept in c.state.states_of(job):  # what the process had anywhere has to be seen gone
            record_unknown(c, kept)
    void(c, job, told(job))  # its time limit starts again


def states_on(c: Context, job: Job, nodes: list[NodeId]) -> list[JobState]:
    return [kept for kept in c.state.states_of(job) if kept.node in nodes]


def is_ready(c: Context, job: Job, move: JobMove) -> bool:
    """Whether nothing of it is in use where it sits, and the nodes to which it goes are up."""
    if not c.state.are_up(nodes_in(move.pins)):
        return False
    if job.spec.movable is Movable.RELAUNCH:  # of a process that was ended nothing may be left anywhere
        return discard_from(c, job, nodes_in(job.pins))
    parked = (StateStatus.PARKED, StateStatus.GONE)
    return all(kept.status in parked for kept in states_on(c, job, nodes_left(job.pins, move.pins)))


def end(c: Context, job: Job) -> None:
    """The job has its new nodes and resumes there; another job may fit where it was."""
    left = nodes_left(job.pins, told(job).pins)
    if job.spec.movable is Movable.RELAUNCH:  # a process that comes back late finds that the run is no longer its own
        c.fact(f.MoveEnded(c.now, job.id, job.run + 1, run_key(c, job.id, job.run + 1)))
        launch(c, job)
    else:
        c.fact(f.MoveEnded(c.now, job.id))
    for name in left:
        expect_clean(c, c.state.nodes[name], job, Cause("after_move", {"job": job.id}))
    go_to_turn(c, job)


# ---- what it leaves behind -------------------------------------------------------------------------------------------


def tidy(c: Context, job: Job) -> None:
    """Have what is parked on old nodes discarded once it is of no use; and say so when nothing is left on one."""
    for name in tuple(job.left):
        if discard_from(c, job, [name]):
            c.fact(f.NodeLeft(c.now, job.id, name))


# ---- looking for moves -----------------------------------------------------------------------------------------------


def regroup(c: Context) -> None:
    """One step of the policy's search; a move that it finds is planned, if the limits allow it."""
    if not are_on(c) or len(c.state.moving) >= c.config.max_concurrent_moves:
        c.regrouping = None
        return
    if c.regrouping is None:
        c.regrouping = chain(to_where_promises_hold(c), c.policy.regroup(c.state, c.now))
    for found in c.regrouping:
        if found is not None and stays(c, found):
            placed = found.placed
            group = c.state.its_group(c.state.jobs[found.job])
            c.fact(f.GroupReplanned(c.now, group.id, found.job, placed.period_ms, placed.schedule, (), found.why))
        elif found is not None and not refused(c, found):
            plan(c, found)  # what comes after it is asked of the state with it
        else:
            c.timers.at(c.now + STEP_MS, "regroup", "")
        return
    c.regrouping = None
    look_for_moves(c, c.policy.look_again_ms(c.state, c.now))


def to_where_promises_hold(c: Context) -> Iterator[Move | None]:
    """For each job that goes without the promise that it asked for, a move to where it holds; None: no such place.

    A job without times was placed before they were known, and where promises hold changes as jobs come and go.
    """
    wants = [it.id for it in c.state.jobs.values() if it.spec.slo is not None and not it.promised]
    for job in map(c.state.jobs.__getitem__, wants):
        if not may_be_moved(job):
            continue
        group = c.state.its_group(job)
        if group.dispatch is not Dispatch.CREDIT or len(group.jobs) + len(group.coming) < 2:
            continue  # a certified order was decided on at its arrival; and alone it is not slowed
        placed = place_elsewhere(c, job)
        yield None if placed is None or not placed.promised else Move(job.id, placed, Cause("promise_holds"))


def plan(c: Context, move: Move) -> None:
    """Write the intention down: from now on what it needs there is the job's."""
    job, placed = c.state.jobs[move.job], asdict(move.placed)
    del placed["status"]  # it is admitted, and stays so
    placed["group"] = move.placed.group or c.state.next_id("g")
    c.fact(f.MovePlanned(c.now, job.id, **placed, why=move.why, off=move.off))


def stays(c: Context, move: Move) -> bool:
    """Whether the job stays where it sits, and only the schedule there is another."""
    job, placed = c.state.jobs.get(move.job), move.placed
    group = None if job is None else c.state.group_of(job)
    if job is None or group is None or group.coming or (placed.group, placed.pins) != (group.id, job.pins):
        return False
    has, planned = ([(it.job, it.phase) for it in some if not it.once] for some in (group.schedule, placed.schedule))
    return has != planned and not _other_schedule(c, job, placed)


def refused(c: Context, move: Move, *, guarded: bool = False) -> str:
    """Why a proposed move is not planned now; empty: it is. What the guard does is not limited in how often."""
    job = c.state.jobs.get(move.job)
    if job is None or not may_be_moved(job):
        return "its job is not there to be moved"
    if c.config.moves is Moves.OFF:
        return "no job is moved here"
    placed = move.placed
    if placed.group == job.group and placed.pins == job.pins:
        return "the job sits there"
    if c.now < again_at(c, job) and not guarded:
        c.timers.at(again_at(c, job), "regroup", job.id)
        return f"the job was moved {(c.now - (job.moved_at or 0)) // 1000} s ago"
    why = (
        _busy(c, job, placed)
        or _no_place(c, job, placed)
        or ("" if (out := cannot_leave(c, job, placed.pins)) is None else f"node {out.id} is {out.status}")
        or _other_schedule(c, job, placed)
        or locality_violation(c, job, placed.pins)
        or over_its_nodes(c, job, placed)
    )
    short = None if why else short_of_ram(c.state, job, placed.pins)
    return why if short is None else short.text


def _busy(c: Context, job: Job, placed: Placed) -> str:
    """One move at a time in each group."""
    for name in c.state.moving:
        other = c.state.jobs[name]
        if {other.group, told(other).group} & {job.group, placed.group}:
            return f"job {other.spec.name} is moving"
    return ""


def _no_place(c: Context, job: Job, placed: Placed) -> str:
    """The nodes are up, of the pools that it wants, and in the target group or in none."""
    if placed.group not in (None, *c.state.groups) or set(placed.pins) != {want.pool for want in job.spec.wants}:
        return "its group is gone, or its pools are others"
    for pool, name in ((pool, name) for pool, names in placed.pins.items() for name in names):
        node = c.state.nodes.get(name)
        if node is None or pool not in node.pools:
            return f"there is no node {name} in pool {pool}"
        if node.status is not NodeStatus.UP or node.drain:
            return f"node {name} is {node.status}"
        if node.group not in (None, placed.group):
            return f"node {name} is group {node.group}'s"
    left = [name for name in nodes_in(placed.pins) if name in job.left]
    return f"the job has not left node {left[0]} altogether" if left else ""


def _other_schedule(c: Context, job: Job, placed: Placed) -> str:
    """The schedule has the phases that the group has, each as often as its plan has it, and the job's."""
    group = c.state.groups.get(placed.group or "")
    there = {(turn.job, turn.phase) for turn in group.schedule if turn.job != job.id} if group else set()
    planned = {(turn.job, turn.phase) for turn in placed.schedule if turn.job != job.id}
    mine = {turn.phase for turn in placed.schedule if turn.job == job.id}
    if there != planned or mine != {phase.name for phase in job.spec.phases}:
        return "the schedule is not the group's and the job's"
    return ""
