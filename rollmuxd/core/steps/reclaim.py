"""Reclaim: end slots, jobs and placements. A GPU is clean only when it was observed clean (:mod:`.observe`)."""

from rollmuxd.core import facts as f
from rollmuxd.core.causes import Cause
from rollmuxd.core.clean import is_dirty_by, may_still_fill
from rollmuxd.core.context import Context
from rollmuxd.core.ids import NodeId
from rollmuxd.core.model import (
    Job,
    JobStatus,
    Node,
    NodeStatus,
    Order,
    OrderKind,
    OrderStatus,
    Session,
    Slot,
    SlotStatus,
    StateStatus,
    nodes_in,
)
from rollmuxd.core.steps.dispatch import grant_if_loaded, issue, park_if_unheld
from rollmuxd.core.steps.observe import expect_clean, is_of_use


def reclaim(c: Context) -> None:
    """End slots of which nothing is left, then placements. Then say which nodes are drained.

    A marked node marks jobs on it: those that leave it, and those with a slot that has ended. They may have waited for
    what was observed. Drains come last: what a job that leaves has there is discarded, and not only parked.
    """
    dirty = c.dirty
    while dirty.jobs or dirty.nodes:
        jobs, dirty.jobs = dirty.jobs, {}
        names, dirty.nodes = dirty.nodes, {}
        nodes = list(filter(None, map(c.state.nodes.get, names)))
        for node in nodes:
            for name in (*node.pinned, *node.fillers):
                if c.state.jobs[name].closing or not c.state.jobs[name].has_place:
                    jobs[name] = None
        for job in filter(None, map(c.state.jobs.get, jobs)):
            reclaim_from(c, job)
        for node in nodes:
            drained_if_empty(c, node)


def reclaim_from(c: Context, job: Job) -> None:
    """Grant the job's slot if all is loaded; end its slots that are over, and its placement if it leaves."""
    slot = c.state.slot_of(job)
    if slot is not None:
        grant_if_loaded(c, job, slot)
    for name in tuple(job.closing):
        end_if_done(c, job, c.state.slots[name])
    if not job.has_place:
        end_placement_if_empty(c, job)


def drop_request(c: Context, job: Job, reason: Cause) -> None:
    """The job's request, if it has one, is never granted."""
    if job.queued is not None:
        slot = job.queued
        c.fact(f.SlotWithdrawn(c.now, slot, reason))
        c.timers.forget_slot(slot)


def take_away(c: Context, slot: Slot | None, reason: Cause, by: str = "", how: SlotStatus = SlotStatus.REVOKED) -> None:
    """End a slot that holds GPUs, if there is one, without its holder. What it had loaded goes when it is reclaimed."""
    if slot is not None:
        c.fact(f.SlotTakenAway(c.now, slot.id, how, reason, by))
        c.timers.forget_slot(slot.id)


def park_own(c: Context, job: Job, slot: Slot) -> None:
    """Park the states that a slot had loaded, so that its GPUs come clean. Not those that a later slot uses."""
    pools, later = job.spec.phase(slot.phase).pools, c.state.slot_of(job)
    for kept in c.state.states_of(job):
        if kept.status is StateStatus.LOADED and kept.pool in pools:
            if later is None or later.id not in c.state.nodes[kept.node].holders:
                issue(c, OrderKind.PARK, kept, slot.id)


def end_if_done(c: Context, job: Job, slot: Slot) -> None:
    """End a slot that holds GPUs although it has ended, when it needs them no longer.

    After a release: once nothing that belongs to it is still moving. One that was taken away: once none of its GPUs may
    have bytes of it. What such a slot has loaded is parked; that of a job that leaves its nodes is discarded.
    """
    released = slot.status is SlotStatus.RELEASED
    if released:
        ended = all(order.status is not OrderStatus.ISSUED for order in orders_for(c, slot))
    else:
        if job.has_place:
            park_own(c, job, slot)
        gpus = (gpu for node in nodes_of(c, job) for gpu in node.gpus.values())
        ended = all(gpu.dirty_by is None for gpu in gpus if gpu.holder == slot.id)
    if not ended:
        return
    c.fact(f.SlotOver(c.now, slot.id))
    for node in nodes_of(c, job) if released else ():
        shared = len(node.pinned) + len(node.fillers) > 1
        if shared and not may_still_fill(c.state, node, job.id):  # others have waited for this one
            expect_clean(c, node, job, Cause("after_release", {"job": job.id}))


def orders_for(c: Context, slot: Slot) -> list[Order]:
    """What is moved for a slot, or may yet be: an order of which there is no word counts."""
    orders = (c.state.order_of(kept) for kept in c.state.states_of(c.state.jobs[slot.job]))
    return [order for order in orders if order is not None and order.slot == slot.id]


def abandon(c: Context, job: Job, reason: Cause) -> None:
    """Give up a move that has not ended, if there is one: the job stays where it sits."""
    if job.move is None:
        return
    c.fact(f.MoveAbandoned(c.now, job.id, reason))
    if job.launch is not None and job.launch.over:  # another is started when its place was seen clean
        c.fact(f.JobUnplaced(c.now, job.id, Cause("move_abandoned", cause=reason)))


def end_now(c: Context, job: Job, *, reason: Cause, by: str) -> None:
    drop_request(c, job, Cause("job_ended", cause=reason))
    abandon(c, job, reason)
    take_away(c, c.state.slot_of(job), reason, by)
    c.fact(f.JobEnded(c.now, job.id, reason, by))
    if job.launch is not None and not job.launch.over:  # it may leave by itself first
        c.timers.at(c.now + c.config.lease_ms, "reap", job.id)
    end_session(c, c.state.session_of(job))


def end_session(c: Context, session: Session | None, *, lost: bool = False) -> None:
    """The process makes no further calls, if one is there."""
    if session is not None:
        c.fact(f.SessionLost(c.now, session.id) if lost else f.SessionClosed(c.now, session.id))
        c.timers.seen.pop(session.id, None)


def quarantine(c: Context, job: Job, reason: Cause) -> None:
    """Its state could not be moved: it leaves its group, and no other job is affected."""
    if not job.live or job.status is JobStatus.QUARANTINED:
        return
    drop_request(c, job, Cause("job_quarantined", cause=reason))
    abandon(c, job, reason)
    c.fact(f.JobQuarantined(c.now, job.id, reason))


def end_placement_if_empty(c: Context, job: Job) -> None:
    """Clear away what a job that has left its placement still has there; end the placement when nothing is left."""
    if not job.pins:
        if job.status is JobStatus.LOST and job.relaunch_at is None and not job.left:
            assert job.reason is not None  # for which it was lost
            c.fact(f.JobEnded(c.now, job.id, job.reason))
        return
    if job.slot is not None or not discard_from(c, job, nodes_in(job.pins)) or job.closing:
        return
    reason = Cause("status_because" if job.reason else "status", {"status": str(job.status)}, job.reason)
    c.timers.forget_discards(job.states)
    c.fact(f.PlacementEnded(c.now, job.id, reason))


def discard_from(c: Context, job: Job, nodes: list[NodeId]) -> bool:
    """Discard what the job has on these nodes and is of no use there. True: no state or byte of it is left."""
    there = [kept for kept in c.state.states_of(job) if kept.node in nodes]
    for kept in there:
        if kept.status in (StateStatus.LOADED, StateStatus.PARKED) and not is_of_use(job, kept):
            issue(c, OrderKind.DISCARD, kept, None)
    gone = all(kept.status is StateStatus.GONE for kept in there)
    return gone and not any(is_dirty_by(c.state.nodes[name], job.id) for name in nodes)


def nodes_of(c: Context, job: Job) -> list[Node]:
    return [c.state.nodes[name] for name in nodes_in(job.pins)]


def drained_if_empty(c: Context, node: Node) -> None:
    if node.status is not NodeStatus.DRAINING:
        return
    for kept in c.state.states_on(node):
        if c.state.jobs[kept.job].has_place:  # that of one that leaves is discarded
            park_if_unheld(c, kept)
    if node.empty:
        c.fact(f.NodeDrained(c.now, node.id))
