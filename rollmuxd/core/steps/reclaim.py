"""Reclaim: end slots, jobs and placements. A GPU is clean only when it was observed clean."""

from rollmuxd.core import effects as e
from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.causes import Cause
from rollmuxd.core.clean import Verdict, is_dirty_by, is_discarding, is_given_back, may_still_fill, verdict
from rollmuxd.core.context import Context
from rollmuxd.core.ids import HostId, JobId, NodeId
from rollmuxd.core.model import (
    Job,
    JobState,
    JobStatus,
    Node,
    NodeStatus,
    Order,
    OrderKind,
    OrderStatus,
    Slot,
    SlotStatus,
    StateStatus,
    nodes_in,
)
from rollmuxd.core.state import state_key
from rollmuxd.core.steps.dispatch import grant_if_loaded, holds_on, issue, park_if_unheld
from rollmuxd.core.steps.locality import is_older


def reclaim(c: Context) -> None:
    """End slots of which nothing is left, then placements. Then say which nodes are drained.

    A marked node marks jobs on it: those that leave it, and those with a slot that has ended. They may have waited for
    what was observed. Drains come last: what a job that leaves has there is discarded, and not only parked.
    """
    dirty = c.dirty
    while dirty.jobs or dirty.nodes:
        jobs, dirty.jobs = dirty.jobs, {}
        names, dirty.nodes = dirty.nodes, {}
        nodes = [c.state.nodes[name] for name in names if name in c.state.nodes]
        for node in nodes:
            for name in (*node.pinned, *node.fillers):
                if c.state.jobs[name].closing or not c.state.jobs[name].has_place:
                    jobs[name] = None
        for name in jobs:
            if name in c.state.jobs:
                reclaim_from(c, c.state.jobs[name])
        for node in nodes:
            drained_if_empty(c, node)


def reclaim_from(c: Context, job: Job) -> None:
    """Grant the job's slot if all is loaded; end its slots that are over, and its placement if it leaves."""
    slot = c.state.slot_of(job)
    if slot is not None:
        grant_if_loaded(c, job, slot)
    for name in tuple(job.closing):
        end_if_clean(c, job, c.state.slots[name])
    end_placement_if_empty(c, job)


def drop_requests(c: Context, job: Job, reason: Cause) -> None:
    if job.queued is not None:
        slot = job.queued
        c.fact(f.SlotWithdrawn(c.now, slot, reason))
        c.timers.forget_slot(slot)
        c.timers.waits(job.owner, -1)


def take_away(c: Context, slot: Slot, fact: f.SlotLost | f.SlotRevoked | f.SlotFaulted) -> None:
    """The slot ends without its holder's word: its GPUs stay held until they are verified clean."""
    c.fact(fact)
    c.fact(f.SlotReclaiming(c.now, slot.id))
    c.timers.forget_slot(slot.id)


def park_own(c: Context, job: Job, slot: Slot) -> None:
    """Park the states that a slot had loaded, so that its GPUs come clean. Not those that a later slot uses."""
    pools, later = job.spec.pools_of(slot.phase), c.state.slot_of(job)
    for kept in c.state.states_of(job):
        if kept.status is StateStatus.LOADED and kept.pool in pools:
            if later is None or not holds_on(c, later, kept.node):
                issue(c, OrderKind.PARK, kept, slot.id)


def revoke_held(c: Context, slot: Slot, *, by: str, reason: Cause) -> None:
    """End a slot that holds GPUs, although its holder did not give it back."""
    take_away(c, slot, f.SlotRevoked(c.now, slot.id, by, reason))
    park_own(c, c.state.jobs[slot.job], slot)


def end_if_clean(c: Context, job: Job, slot: Slot) -> None:
    """End a slot that holds GPUs although it has ended, when it needs them no longer.

    After a release: once nothing that belongs to it is still moving. One that was taken away: once none of its GPUs may
    have bytes of it. What such a slot has loaded is parked; that of a job that leaves its nodes is discarded.
    """
    if slot.status is SlotStatus.RELEASED:
        orders = [order for order in open_orders(c, job.id) if order.slot == slot.id]
        ended = all(it.kind is OrderKind.DISCARD or it.status is not OrderStatus.ISSUED for it in orders)
    else:
        if job.has_place:
            park_own(c, job, slot)
        gpus = (gpu for node in nodes_of(c, job) for gpu in node.gpus.values())
        ended = all(gpu.dirty_by is None for gpu in gpus if gpu.holder == slot.id)
    if not ended:
        return
    released = slot.status is SlotStatus.RELEASED
    c.fact(f.SlotOver(c.now, slot.id))
    for node in nodes_of(c, job) if released else ():
        shared = len(node.pinned) + len(node.fillers) > 1
        if shared and not may_still_fill(c.state, node, job.id):  # others have waited for this one
            expect_clean(c, node, job, Cause("after_release", {"job": job.id}))


def is_loading(c: Context, slot: Slot) -> bool:
    """Whether something is loaded for the slot, or may yet be: an order of which there is no word counts."""
    return any(order.slot == slot.id and order.kind is OrderKind.LOAD for order in open_orders(c, slot.job))


def open_orders(c: Context, job: JobId) -> list[Order]:
    orders = [c.state.order_of(kept) for kept in c.state.states_of(c.state.jobs[job])]
    return [order for order in orders if order is not None]


def abandon(c: Context, job: Job, reason: Cause) -> None:
    """Give up a move that has not ended, if there is one: the job stays where it sits."""
    if job.move is None:
        return
    use = c.use_of(job)
    process_is_gone = job.launch is not None and job.launch.over
    c.fact(f.MoveAbandoned(c.now, job.id, reason, use))
    if process_is_gone:  # its place is clean only when it was seen so; then another process can be started
        c.fact(f.JobUnplaced(c.now, job.id, Cause("move_abandoned", cause=reason)))


def waits_with_its_state(job: Job) -> bool:
    """Whether the job waits for another place, and keeps what it has parked where it was before."""
    status = job.resume_to if job.status is JobStatus.PAUSED else job.status
    return status is JobStatus.WAITING and job.fell_back


def end_now(c: Context, job: Job, *, reason: Cause, by: str) -> None:
    drop_requests(c, job, Cause("job_ended", cause=reason))
    abandon(c, job, reason)
    if job.slot is not None:
        take_away(c, c.state.slots[job.slot], f.SlotRevoked(c.now, job.slot, by, reason))
    c.fact(f.JobEnded(c.now, job.id, reason, by))
    if job.launch is not None and not job.launch.over:  # it may leave by itself first
        c.timers.at(c.now + c.config.lease_ms, "reap", job.id)
    close_session(c, job)


def close_session(c: Context, job: Job) -> None:
    """The job's process makes no further calls, if it is there."""
    session = c.state.session_of(job)
    if session is not None:
        c.fact(f.SessionClosed(c.now, session.id))
        c.timers.forget_session(session.id)


def quarantine(c: Context, job: Job, reason: Cause) -> None:
    """Its state could not be moved: it leaves its group, and no other job is affected."""
    if not job.live or job.status is JobStatus.QUARANTINED:
        return
    drop_requests(c, job, Cause("job_quarantined", cause=reason))
    abandon(c, job, reason)
    c.fact(f.JobQuarantined(c.now, job.id, reason))


def end_placement_if_empty(c: Context, job: Job) -> None:
    """Clear away what a job that has left its placement still has there; end the placement when nothing is left."""
    if job.has_place:
        return
    if not job.pins:
        if job.status is JobStatus.LOST and job.relaunch_at is None and not job.left:
            c.fact(f.JobEnded(c.now, job.id, job.reason or Cause("ended")))
        return
    if not nothing_left(c, job):
        return
    reason = Cause("status_because" if job.reason else "status", {"status": str(job.status)}, job.reason)
    use = c.use_of(job)
    c.timers.forget_discards(job.states)
    c.fact(f.PlacementEnded(c.now, job.id, reason, use))


def nothing_left(c: Context, job: Job) -> bool:
    """Whether no slot, state or byte of the job is on its nodes; orders the discard of what can be discarded."""
    left = job.slot is not None or bool(job.closing)
    keeps = waits_with_its_state(job)
    for kept in c.state.states_of(job):
        if kept.node in job.left or (keeps and kept.status is StateStatus.PARKED):
            continue
        if kept.status in (StateStatus.LOADED, StateStatus.PARKED) and job.slot is None:
            issue(c, OrderKind.PARK if keeps and kept.warm else OrderKind.DISCARD, kept, None)
        left = left or kept.status is not StateStatus.GONE
    return not left and not any(is_dirty_by(node, job.id) for node in nodes_of(c, job))


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


def gpus_observed(c: Context, seen: tuple[i.GpuObservation, ...]) -> None:
    """GPUs that are due and were observed clean may be claimed again."""
    by_node: dict[NodeId, list[str]] = {}
    for observation in seen:
        node = node_with(c, observation.gpu)
        if node is None:
            continue
        if observation.used_mb > c.config.clean_tolerance_mb and observation.used_mb > clean_limit_mb(c, node):
            c.timers.used_mb[observation.gpu] = observation.used_mb
            continue
        gpu = node.gpus[observation.gpu]
        if verdict(c.state, node, gpu) is not Verdict.DUE:
            continue
        if observation.used_mb and is_discarding(c.state, node, gpu.dirty_by):
            continue  # what is there may be its state, which the tolerance would hide
        by_node.setdefault(node.id, []).append(observation.gpu)
    for name, gpus in by_node.items():
        c.fact(f.GpusVerifiedClean(c.now, name, tuple(gpus)))


def node_with(c: Context, gpu: str) -> Node | None:
    host, _, _ = gpu.rpartition("/")
    known = c.state.hosts.get(host)
    if known is not None:
        for name in known.nodes:
            node = c.state.nodes[name]
            if gpu in node.gpus:
                return node
    return None


def clean_limit_mb(c: Context, node: Node) -> int:
    return c.state.residual_mb_on(node) + c.config.clean_tolerance_mb


def expect_clean(c: Context, node: Node, job: Job, reason: Cause) -> None:
    """The job's bytes should be off the node's GPUs now, and something was observed or reported there."""
    record_dirty(c, node, job, reason)
    resolve_unknown(c, node)


def record_dirty(c: Context, node: Node, job: Job, reason: Cause) -> None:
    """The job's bytes should be off the node's GPUs now: look again, for a limited time, where they are not."""
    not_clean = tuple(name for name, gpu in node.gpus.items() if gpu.dirty_by == job.id and is_given_back(c.state, gpu))
    if not_clean:
        if any(name not in node.not_clean for name in not_clean):
            c.fact(f.GpusNotClean(c.now, node.id, Cause("not_clean", {"gpus": not_clean}, reason), not_clean))
        c.dirty.watched[node.id] = None


def record_due(c: Context, node: Node) -> None:
    """Say what was observed dirty although it is due (:mod:`~rollmuxd.core.clean`) and another job has the node.

    So a limit begins for each GPU that keeps a job waiting. A discard under way has a limit of its own.
    """
    gpus = node.gpus.values()
    for name in dict.fromkeys(gpu.dirty_by for gpu in gpus if verdict(c.state, node, gpu) is Verdict.DUE):
        job = c.state.jobs[name or ""]
        if any(other != job.id for other in node.pinned) and not is_discarding(c.state, node, job.id):
            record_dirty(c, node, job, Cause("shared"))


def record_unknown(c: Context, kept: JobState) -> None:
    """Where a state is has to be seen, unless it is gone."""
    if kept.status not in (StateStatus.GONE, StateStatus.UNKNOWN):
        c.fact(f.StateUnknown(c.now, kept.job, kept.pool, kept.node))


def resolve_unknown(c: Context, node: Node) -> None:
    """A state whose place was unknown is not on GPUs that were verified clean of its job: it has to be loaded again.

    Unless its process is there, and may have parked it: what that leaves on the GPUs counts until it is discarded.
    """
    for kept in c.state.states_on(node):
        if kept.status is StateStatus.UNKNOWN and not is_dirty_by(node, kept.job) and not may_be_parked(c, kept):
            c.fact(f.StateObserved(c.now, kept.job, kept.pool, kept.node, StateStatus.GONE))


def may_be_parked(c: Context, kept: JobState) -> bool:
    """Whether the process that had the state loaded last is there, and its job has to have it discarded."""
    job = c.state.jobs[kept.job]
    return (not job.has_place or kept.node in job.left) and c.state.has_had(kept)


def discard_again(c: Context, host: HostId) -> None:
    """Discard unknown states once more; the look that waits for their bytes to go does it."""
    for name in c.state.hosts[host].nodes:
        node = c.state.nodes[name]
        for kept in c.state.states_on(node):
            if kept.status is not StateStatus.UNKNOWN or not has_to_go(c, node, kept):
                continue
            if c.timers.may_discard_again(state_key(kept.job, kept.pool, kept.node), c.now, c.config):
                status = StateStatus.LOADED if is_dirty_by(node, kept.job) else StateStatus.PARKED
                c.fact(f.StateObserved(c.now, kept.job, kept.pool, kept.node, status))
                issue(c, OrderKind.DISCARD, kept, None)


def has_to_go(c: Context, node: Node, kept: JobState) -> bool:
    """Whether an unknown state is to be discarded: its job leaves, or its process has come back to it."""
    job = c.state.jobs[kept.job]
    order = c.state.order_of(kept)
    if not is_dirty_by(node, kept.job):
        needed = kept.node in job.left and is_of_use(c, job, kept)  # it may be all that there is
        return not needed and may_be_parked(c, kept) and (order is None or not c.traits(order.driver).probes)
    if order is not None:
        return False  # no word of it: it may yet be done
    if job.has_place:
        theirs = [gpu for gpu in node.gpus.values() if gpu.dirty_by == job.id]
        return c.state.process_of(kept) is not None and all(is_given_back(c.state, gpu) for gpu in theirs)
    return job.status is not JobStatus.LOST


def is_of_use(c: Context, job: Job, old: JobState) -> bool:
    """Whether what is parked of a state on an old node is still to be loaded elsewhere."""
    if old.run != job.run:
        return False
    if waits_with_its_state(job):
        newest = (c.state.states.get(state_key(job.id, old.pool, name)) for name in job.newest.get(old.pool, ()))
        return not is_older(job, old) or any(
            it is not None and it.status not in (StateStatus.PARKED, StateStatus.GONE) for it in newest
        )
    return job.has_place and old.node in job.newest.get(old.pool, ())


def observe(c: Context) -> None:
    """Look at hosts on which something is to come clean: now, and later at what may still be there.

    What is looked at later comes last. Planned first, it would take the place of the look at once.
    """
    hosts, c.dirty.hosts = c.dirty.hosts, {}
    for host in hosts:
        known = c.state.hosts.get(host)
        if known is not None and any(must_be_cleaned(c, c.state.nodes[name]) for name in known.nodes):
            observe_host(c, host)
    watched, c.dirty.watched = c.dirty.watched, {}
    for name in watched:
        if name in c.state.nodes:
            observe_until_clean(c, c.state.nodes[name])


def observe_host(c: Context, host: HostId) -> None:
    if c.timers.observe_now(host, c.now, c.config):
        c.do(e.Observe(host))


def must_be_cleaned(c: Context, node: Node) -> bool:
    """Whether something of a job is on the node, or may be, that should become clean."""
    if any(kept.status is StateStatus.UNKNOWN for kept in c.state.states_on(node)):
        return True
    return any(verdict(c.state, node, gpu) is Verdict.DUE for gpu in node.gpus.values())


def observe_until_clean(c: Context, node: Node) -> None:
    """While something on the node should become clean, see to it that it is looked at again."""
    if must_be_cleaned(c, node) or node.status in (NodeStatus.OCCUPIED, NodeStatus.QUARANTINED):
        c.timers.observe_later(node.host, c.now, c.config)
        if node.not_clean_since is not None and node.status is not NodeStatus.QUARANTINED:
            c.timers.at(node.not_clean_since + c.config.clean_timeout_ms, "clean", node.id)
