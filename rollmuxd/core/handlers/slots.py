"""What jobs ask of their slots: request, withdraw, release, shrink; and an operator's revoke."""

from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.context import HOLDS, NOTHING, Context
from rollmuxd.core.decision import Answer
from rollmuxd.core.errors import Conflict, Impossible, Rejected, StaleFence, TakesNoRequests, TooMany
from rollmuxd.core.estimates import solo_ms, unstated_ms
from rollmuxd.core.handlers.jobs import live_session
from rollmuxd.core.ids import Fence, NodeId, SessionId, SlotId
from rollmuxd.core.model import Job, JobStatus, Slot, SlotStatus, StateStatus
from rollmuxd.core.order import find_phase
from rollmuxd.core.spec import IfUnmet, Park
from rollmuxd.core.steps.admit import admit, limits_of
from rollmuxd.core.steps.dispatch import dispatch, grant_if_loaded, take_place
from rollmuxd.core.steps.guard import keeps_others_out
from rollmuxd.core.steps.guard import watch as watch_credit
from rollmuxd.core.steps.reclaim import (
    after_departure,
    drained_if_empty,
    drop_requests,
    end_now,
    end_placement_if_empty,
    expect_clean,
    finish_release,
    gpus_observed,
    may_still_fill,
    nodes_of,
    observe_job,
    observe_until_clean,
    park_own,
    revoke_held,
)
from rollmuxd.core.steps.replan import watch as watch_times

#: slots that are not granted yet
COMING = (SlotStatus.QUEUED, SlotStatus.LOADING)


def request(c: Context, ask: i.RequestSlot) -> Answer:
    """A job asks for its turn. The same request id gets the same slot, and being asked again attaches it."""
    state = c.state
    job = state.job(ask.job)
    for name in reversed(state.slots_of[job.id]):
        slot = state.slots[name]
        if slot.request_id == ask.request_id and slot.run == job.run:
            return reattach(c, job, slot, ask)
    may_request(c, job, ask)
    return Answer(job=job.id, slot=queue(c, job, ask.session, ask.phase, ask.request_id))


def reattach(c: Context, job: Job, slot: Slot, ask: i.RequestSlot) -> Answer:
    if slot.session != ask.session:
        live_session(c, ask.session)
        raise Conflict(f"request {ask.request_id!r} belongs to session {slot.session}")
    if slot.status in COMING and c.timers.attach(slot.id):
        grant_if_loaded(c, job, slot)
        dispatch(c, job.group)
    return Answer(job=job.id, slot=slot.id, repeated=True)


def may_request(c: Context, job: Job, ask: i.RequestSlot) -> None:
    """All refusing of a request."""
    session = live_session(c, ask.session)
    if session.job != job.id:
        raise Conflict(f"session {session.id} is of another job")
    if not job.live or job.status is JobStatus.QUARANTINED:
        raise TakesNoRequests(job.spec.name, job.status, job.reason)
    if find_phase(c.state, job.id, ask.phase) is None:
        known = ", ".join(phase.name for phase in (*job.spec.side, *job.spec.phases))
        raise Impossible(f"job {job.spec.name} has no phase {ask.phase!r}; it registered {known}")
    if job.queued is not None:
        queued = c.state.slots[job.queued]
        raise Conflict(f"slot {queued.id} already waits for phase {queued.phase}; a job has one request at a time")
    if c.timers.waiting >= c.config.max_requests_waiting:
        raise TooMany(f"{c.timers.waiting} requests are waiting, which is the limit; try again later")
    most, waiting = limits_of(c, job.owner).max_waiting, c.timers.waiting_of.get(job.owner, 0)
    if most and waiting >= most:
        raise TooMany(
            f"{waiting} requests of owner {job.owner} are waiting, and its limit is {most} "
            f"(owners.{job.owner}.max_waiting); try again later, or have the limit raised"
        )


def queue(c: Context, job: Job, session: SessionId, phase: str, request_id: str) -> SlotId:
    slot = c.state.next_id("s")
    side = all(known.name != phase for known in job.spec.phases)
    begins = not side and phase == job.spec.phases[0].name
    closed = begins and bool(c.state.waiting) and keeps_others_out(c, job)
    c.fact(f.SlotQueued(c.now, slot, job.id, job.run, session, phase, request_id, side, begins))
    c.timers.waits(job.owner, 1)
    take_place(c, job, phase, side=side)  # before it is judged: that may let others in, and have this one granted
    if begins and job.status is JobStatus.PROBING and job.progress.finished >= c.config.probe_iterations:
        judge(c, job)
    if begins:
        watch_times(c, job)
        watch_credit(c, job, closed=closed)
    dispatch(c, job.group)
    return slot


def judge(c: Context, job: Job) -> None:
    """A probed job has been measured: it gets its promise, or what it chose for the case."""
    if solo_ms(job) is None:
        return
    verdict = c.policy.judge(c.state, job)
    if verdict.period_ms is None and job.spec.slo is not None:
        return  # another member's times are not known yet: the next iteration tells more
    if job.spec.slo is None or verdict.promised or job.spec.if_unmet is IfUnmet.BEST_EFFORT:
        c.fact(f.JobPromised(c.now, job.id, verdict.promised, verdict.period_ms, unstated_ms(job)))
        admit(c)
    elif job.spec.if_unmet is IfUnmet.END:
        end_now(c, job, reason=f"its slo of {job.spec.slo:g} cannot be kept here", by="if_unmet")
        after_departure(c, job)
    else:
        group = job.group
        c.fact(f.JobUnplaced(c.now, job.id, f"its slo of {job.spec.slo:g} cannot be kept where it was"))
        end_placement_if_empty(c, job)
        admit(c)
        dispatch(c, group)


def detach(c: Context, ask: i.DetachSlot) -> Answer:
    """Nobody waits on the line: the request keeps its place for the re-attach time, and is not granted meanwhile."""
    slot = c.state.slots.get(ask.slot)
    if slot is not None and slot.status in COMING:
        phase = find_phase(c.state, slot.job, slot.phase)
        gap = 0 if phase is None else phase.gap_ms
        c.timers.detach(slot.id, until=c.now + c.config.reattach_ms, awaited_until=c.now + gap + c.config.grace_ms)
        dispatch(c, c.state.jobs[slot.job].group)
    return NOTHING


def withdraw(c: Context, ask: i.WithdrawSlot) -> Answer:
    """The request is taken back."""
    slot = c.state.slot(ask.slot)
    if ask.session is not None and ask.session != slot.session:
        raise Conflict(f"slot {slot.id} is of session {slot.session}, and not of {ask.session}: it is not withdrawn")
    if slot.status is SlotStatus.WITHDRAWN:
        return Answer(slot=slot.id, repeated=True)
    if slot.status is not SlotStatus.QUEUED:
        raise Conflict(f"slot {slot.id} is {slot.status}, and only a queued request can be withdrawn; release it")
    drop_requests(c, c.state.jobs[slot.job], "withdrawn")
    dispatch(c, c.state.jobs[slot.job].group)
    return Answer(slot=slot.id)


def release(c: Context, ask: i.ReleaseSlot) -> Answer:
    """The phase is over. What is loaded stays until somebody else's visit is next, unless it parks at release.

    GPUs on which the job keeps no state that a driver moves are given on when they were seen clear: the backend
    was asked just before, and ``seen`` is its answer.
    """
    slot = c.state.slot(ask.slot)
    if slot.released and slot.fence == ask.fence:
        return Answer(slot=slot.id, next_slot=slot.next_slot, next_refused=slot.next_refused, repeated=True)
    check_holder(c, slot, ask.fence)
    job = c.state.jobs[slot.job]
    partly = len(slot.gpus) < sum(len(c.state.nodes[name].gpus) for name in phase_nodes(c, job, slot))
    c.fact(f.SlotReleased(c.now, slot.id, ask.measured))
    c.timers.forget_slot(slot.id)
    if slot.replaced:  # the process whose bytes are there may be gone, and they with it
        contents_unknown(c, job, slot)
    elif job.spec.park is Park.AT_RELEASE or partly:  # what is loaded on a part must not pass for loaded on all
        park_own(c, job, slot)
    finish_release(c, slot, seen_follows=True)
    gpus_observed(c, ask.seen)
    for node in nodes_of(c, job):
        if slot.status is SlotStatus.OVER and not may_still_fill(c, node, job.id) and len(node.pinned) > 1:
            expect_clean(c, node, job, f"after {job.spec.name} released them")
            for name in [name for name in node.pinned if name != job.id]:  # it may be the last that it waited for
                end_placement_if_empty(c, c.state.jobs[name])
        drained_if_empty(c, node)
    next_slot, refused = next_request(c, job, slot, ask)
    group = job.group
    end_placement_if_empty(c, job)
    dispatch(c, group)
    after_departure(c, job)
    return Answer(slot=slot.id, next_slot=next_slot, next_refused=refused)


def contents_unknown(c: Context, job: Job, slot: Slot) -> None:
    """The process whose bytes are on the slot's GPUs may be gone, and they with it: to be seen, not to be parked."""
    for key in job.states:
        kept = c.state.states[key]
        if kept.status is StateStatus.LOADED and any(gpu in slot.gpus for gpu in c.state.nodes[kept.node].gpus):
            c.fact(f.StateUnknown(c.now, job.id, kept.pool, kept.node))
    observe_job(c, job)


def phase_nodes(c: Context, job: Job, slot: Slot) -> tuple[NodeId, ...]:
    phase = find_phase(c.state, job.id, slot.phase)
    return () if phase is None else c.state.phase_nodes(job, phase)


def check_holder(c: Context, slot: Slot, fence: Fence) -> None:
    if slot.status not in (SlotStatus.RUNNING, SlotStatus.TAIL):
        raise StaleFence(slot.id, slot.status, slot.reason)
    if slot.fence != fence:
        raise StaleFence(slot.id, "held under another fence", "")


def next_request(c: Context, job: Job, slot: Slot, ask: i.ReleaseSlot) -> tuple[SlotId | None, str]:
    """The request that the release carries. A valid release succeeds whatever becomes of it."""
    if ask.next is None:
        return None, ""
    request = i.RequestSlot(job.id, slot.session, ask.next.phase, ask.next.request_id)
    next_slot, refused = None, ""
    try:
        may_request(c, job, request)
    except Rejected as no:
        refused = str(no)
    else:
        next_slot = queue(c, job, slot.session, ask.next.phase, ask.next.request_id)
    c.fact(f.NextAnswered(c.now, slot.id, next_slot, refused))
    return next_slot, refused


def shrink(c: Context, ask: i.ShrinkSlot) -> Answer:
    """The job gave GPUs back; each is given on when it was seen clear."""
    slot = c.state.slot(ask.slot)
    check_holder(c, slot, ask.fence)
    kept = tuple(gpu for gpu in slot.gpus if gpu in ask.keep)
    if len(kept) != len(set(ask.keep)) or not kept:
        raise Impossible(f"slot {slot.id} holds {', '.join(slot.gpus)}, and is to keep {', '.join(ask.keep)}")
    if len(kept) == len(slot.gpus):
        return Answer(slot=slot.id, repeated=True)
    c.fact(f.SlotShrunk(c.now, slot.id, kept))
    gpus_observed(c, ask.seen)
    for node in nodes_of(c, c.state.jobs[slot.job]):
        drained_if_empty(c, node)
        observe_until_clean(c, node)
    dispatch(c, c.state.jobs[slot.job].group)
    return Answer(slot=slot.id)


def revoke(c: Context, ask: i.RevokeSlot) -> Answer:
    """An operator ends a slot. Its GPUs come back when they were seen clear, not before."""
    slot = c.state.slot(ask.slot)
    job = c.state.jobs[slot.job]
    if slot.status is SlotStatus.QUEUED:
        drop_requests(c, job, f"revoked by {ask.by}: {ask.reason}")
    elif slot.status in HOLDS:
        revoke_held(c, slot, by=ask.by, reason=ask.reason or "revoked")
    elif slot.status in (SlotStatus.REVOKED, SlotStatus.RECLAIMING):
        return Answer(slot=slot.id, repeated=True)
    else:
        raise Conflict(f"slot {slot.id} is {slot.status}: there is nothing to revoke")
    end_placement_if_empty(c, job)
    dispatch(c, job.group)
    return Answer(slot=slot.id)


def give_up(c: Context, slot: SlotId) -> None:
    """A request that stayed detached beyond the re-attach time is never granted, though its state may be loaded."""
    known = c.state.slots.get(slot)
    if known is None or known.status not in COMING:
        return
    job = c.state.jobs[known.job]
    reason = f"nobody asked for it for {c.config.reattach_ms // 1000} s"
    if known.status is SlotStatus.QUEUED:
        drop_requests(c, job, reason)
    else:
        revoke_held(c, known, by="re-attach time", reason=reason)
    end_placement_if_empty(c, job)
    dispatch(c, job.group)
