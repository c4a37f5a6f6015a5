"""Letting go: ending slots, jobs and placements, and believing that GPUs are clear only when they were seen so."""

from rollmuxd.core import effects as e
from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.context import Context
from rollmuxd.core.ids import HostId, JobId, NodeId
from rollmuxd.core.model import (
    Gpu,
    Job,
    JobState,
    JobStatus,
    Node,
    NodeStatus,
    Order,
    OrderKind,
    OrderStatus,
    Session,
    SessionStatus,
    Slot,
    SlotStatus,
    StateStatus,
)
from rollmuxd.core.order import find_phase
from rollmuxd.core.shares import use_of
from rollmuxd.core.state import state_key
from rollmuxd.core.steps.admit import admit
from rollmuxd.core.steps.dispatch import dispatch, issue, unheld_by
from rollmuxd.core.steps.locality import is_older


def drop_requests(c: Context, job: Job, reason: str) -> None:
    if job.queued is not None:
        slot = job.queued
        c.fact(f.SlotWithdrawn(c.now, slot, reason))
        c.timers.forget_slot(slot)
        c.timers.waits(job.owner, -1)


def take_away(c: Context, slot: Slot, fact: f.SlotLost | f.SlotRevoked | f.SlotFaulted) -> None:
    """The slot ends without its holder's word: its GPUs stay held until they were seen clear."""
    c.fact(fact)
    c.fact(f.SlotReclaiming(c.now, slot.id))
    c.timers.forget_slot(slot.id)
    if not slot.gpus:  # of a job that is only watched
        c.fact(f.SlotOver(c.now, slot.id))
    observe_job(c, c.state.jobs[slot.job])


def park_own(c: Context, job: Job, slot: Slot) -> None:
    """Have the states that a slot had loaded parked, so that its GPUs come clear."""
    phase = find_phase(c.state, job.id, slot.phase)
    for key in job.states:
        kept = c.state.states[key]
        if kept.status is StateStatus.LOADED and phase is not None and kept.pool in phase.pools:
            issue(c, OrderKind.PARK, kept, slot.id)


def revoke_held(c: Context, slot: Slot, *, by: str, reason: str) -> None:
    """End a slot that holds GPUs, although its holder did not give it back."""
    take_away(c, slot, f.SlotRevoked(c.now, slot.id, by, reason))
    park_own(c, c.state.jobs[slot.job], slot)


def finish_release(c: Context, slot: Slot, *, seen_follows: bool = False) -> None:
    """The slot is over once nothing that belongs to its release is still moving.

    ``seen_follows``: what a backend saw on its GPUs is told next.
    """
    if slot.status is not SlotStatus.RELEASED or any(
        order.slot == slot.id and order.kind is OrderKind.PARK and order.status is OrderStatus.ISSUED
        for order in open_orders(c, slot.job)
    ):
        return
    c.fact(f.SlotOver(c.now, slot.id))
    if seen_follows:
        return
    job = c.state.jobs[slot.job]
    for node in nodes_of(c, job):
        # no order tells of a node where it keeps no state, and others have waited for this one, too
        if len(node.pinned) > 1 and all(c.state.states[key].job != job.id for key in node.states):
            expect_clean(c, node, job, f"after {job.spec.name} released them")


def open_orders(c: Context, job: JobId) -> list[Order]:
    states = c.state.states
    orders = [c.state.orders.get(states[key].order or "") for key in c.state.jobs[job].states]
    return [order for order in orders if order is not None]


def abandon(c: Context, job: Job, reason: str) -> None:
    """Give up a move that has not ended, if there is one: the job stays where it sits. Its group is for the caller."""
    if job.move is None:
        return
    use = use_of(c.state.owners.get(job.owner), c.now, c.config.use_half_life_ms)
    there, process_is_gone = job.move.group, job.launch is not None and job.launch.over
    c.fact(f.MoveAbandoned(c.now, job.id, reason, use))
    dispatch(c, there)
    if process_is_gone:  # its place is clear only when it was seen so; then another process can be started
        c.fact(f.JobUnplaced(c.now, job.id, f"its move was abandoned: {reason}"))
        end_placement_if_empty(c, job)


def waits_with_its_state(job: Job) -> bool:
    """Whether the job waits for another place, and keeps what it has parked where it was before."""
    status = job.resume_to if job.status is JobStatus.PAUSED else job.status
    return status is JobStatus.WAITING and job.fell_back


def end_now(c: Context, job: Job, *, reason: str, by: str) -> None:
    group = job.group
    drop_requests(c, job, f"job ended: {reason}")  # first: with its move given up they could be granted
    abandon(c, job, reason)
    if job.slot is not None:
        take_away(c, c.state.slots[job.slot], f.SlotRevoked(c.now, job.slot, by, reason))
    c.fact(f.JobEnded(c.now, job.id, reason, by))
    if job.launch is not None and not job.launch.over:  # it may leave by itself first
        c.timers.at(c.now + c.config.lease_ms, "reap", job.id)
    session = c.state.sessions.get(job.session or "")
    if session is not None and session.status is SessionStatus.ALIVE:
        c.fact(f.SessionClosed(c.now, session.id))
        c.timers.forget_session(session.id)
    end_placement_if_empty(c, job)
    dispatch(c, group)


def after_departure(c: Context, job: Job) -> None:
    """Somebody else may fit now."""
    if not job.pins:
        admit(c)


def quarantine(c: Context, job: Job, reason: str) -> None:
    """Its state could not be moved: it leaves its group, everybody else goes on."""
    if not job.live or job.status is JobStatus.QUARANTINED:
        return
    drop_requests(c, job, f"job quarantined: {reason}")
    abandon(c, job, reason)
    c.fact(f.JobQuarantined(c.now, job.id, reason))


def end_placement_if_empty(c: Context, job: Job) -> None:
    """Clear away what a job that has left its placement still has there; end the placement when nothing is left."""
    if job.has_place:
        return
    if not job.pins:
        if job.status is JobStatus.LOST and job.relaunch_at is None and not job.left:
            c.fact(f.JobEnded(c.now, job.id, job.reason))
        return
    if not nothing_left(c, job):
        return
    reason = f"{job.status}: {job.reason}" if job.reason else str(job.status)
    freed = [name for nodes in job.pins.values() for name in nodes]
    group = job.group
    use = use_of(c.state.owners.get(job.owner), c.now, c.config.use_half_life_ms)
    c.timers.forget_discards(job.states)
    c.fact(f.PlacementEnded(c.now, job.id, reason, use))
    if job.status is JobStatus.LOST and job.relaunch_at is None:
        c.fact(f.JobEnded(c.now, job.id, job.reason))
    for name in dict.fromkeys(freed):
        drained_if_empty(c, c.state.nodes[name])
    dispatch(c, group)


def nothing_left(c: Context, job: Job) -> bool:
    """Whether no slot, state or byte of the job is on its nodes; what can be discarded is told to be."""
    left = job.slot is not None or bool(job.closing)
    keeps = waits_with_its_state(job)
    for key in job.states:
        kept = c.state.states[key]
        if kept.node in job.left or (keeps and kept.status is StateStatus.PARKED):
            continue
        if kept.status in (StateStatus.LOADED, StateStatus.PARKED) and job.slot is None:
            issue(c, OrderKind.PARK if keeps and kept.warm else OrderKind.DISCARD, kept, None)
        left = left or kept.status is not StateStatus.GONE
    left = left or any(is_dirty_by(node, job.id) for node in nodes_of(c, job))
    if left:
        observe_job(c, job)
    return not left


def nodes_of(c: Context, job: Job) -> list[Node]:
    return [c.state.nodes[name] for name in dict.fromkeys(n for nodes in job.pins.values() for n in nodes)]


def drained_if_empty(c: Context, node: Node) -> None:
    if node.status is not NodeStatus.DRAINING:
        return
    for key in list(node.states):
        kept = c.state.states.get(key)
        if kept is not None and kept.status is StateStatus.LOADED and unheld_by(c, node, kept.job):
            issue(c, OrderKind.PARK, kept, None)
    if all(gpu.holder is None and gpu.dirty_by is None for gpu in node.gpus.values()):
        c.fact(f.NodeDrained(c.now, node.id))


def gpus_observed(c: Context, seen: tuple[i.GpuObservation, ...]) -> None:
    """GPUs that were seen clear, are held by nobody and have no state loaded may be given on."""
    by_node: dict[NodeId, list[str]] = {}
    for sight in seen:
        node = node_with(c, sight.gpu)
        if node is None:
            continue
        if sight.used_mb > c.config.clear_tolerance_mb and sight.used_mb > clean_limit_mb(c, node):
            c.timers.used_mb[sight.gpu] = sight.used_mb
            continue
        gpu = node.gpus[sight.gpu]
        if gpu.dirty_by is None or may_still_fill(c, node, gpu.dirty_by):
            continue
        if sight.used_mb and is_discarding(c, node, gpu.dirty_by):
            continue  # what is there may be its state, which the tolerance would hide
        if given_back(c, gpu):
            by_node.setdefault(node.id, []).append(sight.gpu)
    for name, gpus in by_node.items():
        c.fact(f.GpusVerifiedClean(c.now, name, tuple(gpus)))
        end_reclaims(c, c.state.nodes[name])


def given_back(c: Context, gpu: Gpu) -> bool:
    """Whether nobody uses the GPU by right any more: only what is left on it keeps it."""
    return gpu.holder is None or c.state.slots[gpu.holder].status in (SlotStatus.RECLAIMING, SlotStatus.RELEASED)


def may_still_fill(c: Context, node: Node, job: JobId) -> bool:
    """Whether a state of the job is, or is about to be, loaded there: then an empty GPU is no proof of anything."""
    for key in node.states:
        kept = c.state.states[key]
        if kept.job != job or shrunk(c, kept):
            continue
        if kept.status in (StateStatus.LOADED, StateStatus.LOADING, StateStatus.PARKING):
            return True
        order = c.state.orders.get(kept.order or "")
        if order is not None and order.kind is OrderKind.LOAD and run_lives(c, order):
            return True  # no word of it, and the process lives: it may yet load
    return False


def is_discarding(c: Context, node: Node, job: JobId) -> bool:
    """Whether the discard of a state of the job has not ended there."""
    here = (c.state.states[key] for key in node.states)
    return any(kept.job == job and kept.status is StateStatus.DISCARDING for kept in here)


def run_lives(c: Context, order: Order) -> bool:
    """Whether the process of the run that an order was for is taken to be there."""
    job = c.state.jobs[order.job]
    session = c.state.sessions.get(job.session or "")
    return order.run == job.run and session is not None and session.status is SessionStatus.ALIVE


def shrunk(c: Context, kept: JobState) -> bool:
    """Whether the state's slot runs on as a tail, so that the GPUs it gave back are to come clear one by one."""
    slot = c.state.jobs[kept.job].slot
    return slot is not None and c.state.slots[slot].status is SlotStatus.TAIL


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
    return c.state.residual_mb_on(node) + c.config.clear_tolerance_mb


def end_reclaims(c: Context, node: Node) -> None:
    """A slot that was taken away is over when none of its GPUs may have bytes of it any more."""
    for name in dict.fromkeys(gpu.holder for gpu in node.gpus.values() if gpu.holder is not None):
        slot = c.state.slots[name]
        if slot.status is SlotStatus.RECLAIMING and all(
            gpu.dirty_by is None
            for there in nodes_of(c, c.state.jobs[slot.job])
            for gpu in there.gpus.values()
            if gpu.holder == name
        ):
            c.fact(f.SlotOver(c.now, name))


def expect_clean(c: Context, node: Node, job: Job, reason: str) -> None:
    """The job's bytes should be off the node's GPUs now: look again, for a limited time, where they are not."""
    unclear = tuple(name for name, gpu in node.gpus.items() if gpu.dirty_by == job.id and given_back(c, gpu))
    if unclear:
        if any(name not in node.unclear for name in unclear):
            c.fact(f.GpusNotClean(c.now, node.id, f"{', '.join(unclear)} not seen clear {reason}", unclear))
        observe_until_clean(c, node)
    resolve_unknown(c, node)


def resolve_unknown(c: Context, node: Node) -> None:
    """A state of which nobody knew is not on GPUs that were seen clear of its job: it has to be loaded anew.

    Unless its process is there, and may have parked it: what that leaves on the GPUs counts until it is discarded.
    """
    for key in list(node.states):
        kept = c.state.states[key]
        if kept.status is StateStatus.UNKNOWN and not is_dirty_by(node, kept.job) and not may_be_parked(c, kept):
            c.fact(f.StateSeen(c.now, kept.job, kept.pool, kept.node, StateStatus.GONE))
            for closing in list(c.state.jobs[kept.job].closing):  # a release that waited for word of its park
                finish_release(c, c.state.slots[closing])


def is_dirty_by(node: Node, job: JobId) -> bool:
    """Whether bytes of the job may be on the node's GPUs, beyond what it has agreed to leave there."""
    return any(gpu.dirty_by == job for gpu in node.gpus.values())


def may_be_parked(c: Context, kept: JobState) -> bool:
    """Whether the process that had the state loaded last is there, and its job has to have it discarded."""
    job = c.state.jobs[kept.job]
    return (not job.has_place or kept.node in job.left) and c.state.has_had(kept)


def process_of(c: Context, kept: JobState) -> Session | None:
    """The session of the run whose state it is; None if its process is not there to be told anything."""
    job = c.state.jobs[kept.job]
    session = c.state.sessions.get(job.session or "")
    there = session is not None and session.status is SessionStatus.ALIVE and kept.run == job.run
    return session if there else None


def discard_again(c: Context, host: HostId) -> None:
    """Have states of which nobody knows discarded once more, by the look that waits for their bytes to go."""
    for name in c.state.hosts[host].nodes:
        node = c.state.nodes[name]
        for key in list(node.states):
            kept = c.state.states[key]
            if kept.status is not StateStatus.UNKNOWN or not has_to_go(c, node, kept):
                continue
            if c.timers.may_discard_again(key, c.now, c.config):
                status = StateStatus.LOADED if is_dirty_by(node, kept.job) else StateStatus.PARKED
                c.fact(f.StateSeen(c.now, kept.job, kept.pool, kept.node, status))
                issue(c, OrderKind.DISCARD, kept, None)


def has_to_go(c: Context, node: Node, kept: JobState) -> bool:
    """Whether a state of which nobody knows is to be discarded: its job leaves, or its process has come back to it."""
    job = c.state.jobs[kept.job]
    order = c.state.orders.get(kept.order or "")
    if not is_dirty_by(node, kept.job):
        needed = kept.node in job.left and is_of_use(c, job, kept)  # it may be all that there is
        return not needed and may_be_parked(c, kept) and (order is None or not c.traits(order.driver).probes)
    if order is not None:
        return False  # no word of it: it may yet be done
    if job.has_place:
        theirs = [gpu for gpu in node.gpus.values() if gpu.dirty_by == job.id]
        return process_of(c, kept) is not None and all(given_back(c, gpu) for gpu in theirs)
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


def observe_job(c: Context, job: Job) -> None:
    """Look at the hosts of a job's nodes now, and again until they are clear."""
    nodes = (*nodes_of(c, job), *(c.state.nodes[name] for name in job.left))
    for host in dict.fromkeys(node.host for node in nodes):
        observe_host(c, host)


def observe_host(c: Context, host: HostId) -> None:
    if c.timers.observe_now(host, c.now, c.config):
        c.do(e.Observe(host))


def must_be_cleaned(c: Context, node: Node) -> bool:
    """Whether something of a job is on the node, or may be, that should come clear."""
    return any(
        gpu.dirty_by is not None and given_back(c, gpu) and not may_still_fill(c, node, gpu.dirty_by)
        for gpu in node.gpus.values()
    ) or any(c.state.states[key].status is StateStatus.UNKNOWN for key in node.states)


def observe_until_clean(c: Context, node: Node) -> None:
    """While something on the node should come clear, see to it that it is looked at again."""
    if must_be_cleaned(c, node) or node.status in (NodeStatus.OCCUPIED, NodeStatus.QUARANTINED):
        c.timers.observe_later(node.host, c.now, c.config)
        if node.unclear_since is not None and node.status is not NodeStatus.QUARANTINED:
            c.timers.at(node.unclear_since + c.config.clear_limit_ms, "clear", node.id)
