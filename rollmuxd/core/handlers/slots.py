"""What jobs ask of their slots: request, withdraw, release, give back, shrink; and an operator's revoke."""

from collections.abc import Mapping
from typing import Final

from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.causes import Cause, said
from rollmuxd.core.context import HOLDS, NOTHING, Context
from rollmuxd.core.decision import Answer
from rollmuxd.core.errors import Conflict, Impossible, Rejected, StaleFence, TakesNoRequests, TooMany
from rollmuxd.core.estimates import judged_by_ms, solo_ms
from rollmuxd.core.handlers.jobs import live_session, lose
from rollmuxd.core.ids import Fence, SessionId, SlotId
from rollmuxd.core.model import Job, JobStatus, SessionStatus, Slot, SlotStatus
from rollmuxd.core.spec import IfUnmet, Park
from rollmuxd.core.steps.admit import limits_of, moves_without_its_process
from rollmuxd.core.steps.dispatch import go_to_turn
from rollmuxd.core.steps.guard import watch as watch_credit
from rollmuxd.core.steps.observe import gpus_observed
from rollmuxd.core.steps.reclaim import drop_request, end_now, orders_for, park_own, take_away
from rollmuxd.core.steps.replan import measure
from rollmuxd.core.steps.replan import watch as watch_times

#: the errors of refused requests, by their causes; else it is a conflict
REFUSALS: Final[Mapping[str, type[Rejected]]] = {
    "no_phase": Impossible,
    "many_requests": TooMany,
    "many_of_owner": TooMany,
}
#: slots that are not granted yet
COMING = (SlotStatus.QUEUED, SlotStatus.LOADING)


def request(c: Context, ask: i.RequestSlot) -> Answer:
    state = c.state
    job = state.job(ask.job)
    for name in reversed(state.slots_of[job.id]):
        slot = state.slots[name]
        if slot.request_id == ask.request_id and slot.run == job.run:
            return reattach(c, job, slot, ask)
    if live_session(c, ask.session).job != job.id:
        raise Conflict(f"session {ask.session} is of another job")
    why = refusal(c, job, ask.phase)
    if why is not None and why.code == "takes_no_requests":
        raise TakesNoRequests(job.spec.name, job.status, job.reason)
    if why is not None:
        raise REFUSALS.get(why.code, Conflict)(f"job {job.spec.name} cannot ask for phase {ask.phase}", why)
    return Answer(job=job.id, slot=queue(c, job, ask.session, ask.phase, ask.request_id))


def reattach(c: Context, job: Job, slot: Slot, ask: i.RequestSlot) -> Answer:
    if slot.session != ask.session:
        live_session(c, ask.session)
        raise Conflict(f"request {ask.request_id!r} belongs to session {slot.session}")
    if slot.phase != ask.phase:
        raise Conflict(
            f"request {ask.request_id!r} is for phase {slot.phase}, not {ask.phase}: ask with a request id of its own"
        )
    if slot.status in COMING and c.timers.attach(slot.id):
        c.dirty.job(job)
    return Answer(job=job.id, slot=slot.id, repeated=True)


def refusal(c: Context, job: Job, phase: str) -> Cause | None:
    """Why a job cannot ask for a phase now; None: it can."""
    if not job.live or job.status is JobStatus.QUARANTINED:
        return Cause("takes_no_requests", {"status": str(job.status)}, job.reason)
    known = [known.name for known in (*job.spec.side, *job.spec.phases)]
    if phase not in known:
        return Cause("no_phase", {"phase": phase, "phases": known})
    if job.queued is not None:
        return Cause("waits_already", {"slot": job.queued, "phase": c.state.slots[job.queued].phase})
    waiting = sum(c.state.queued_of.values())
    if waiting >= c.config.max_requests_waiting:
        return Cause("many_requests", {"waiting": waiting})
    most, waiting = limits_of(c, job.owner).max_waiting, c.state.queued_of.get(job.owner, 0)
    if most and waiting >= most:
        return Cause("many_of_owner", {"waiting": waiting, "owner": job.owner, "most": most})
    return None


def queue(c: Context, job: Job, session: SessionId, phase: str, request_id: str) -> SlotId:
    slot = c.state.next_id("s")
    side = all(known.name != phase for known in job.spec.phases)
    begins = phase == job.spec.phases[0].name and job.spec.filler is None
    c.fact(
        f.SlotQueued(c.now, slot, job.id, job.run, session, phase, request_id, side, begins, judged_by_ms(job, c.now))
    )
    go_to_turn(c, job)  # before it is judged: the judgement reads where it is in the schedule
    if begins:
        measure(c, job)
        if job.status is JobStatus.PROBING and job.progress.finished >= c.config.probe_iterations:
            judge(c, job)
        watch_times(c, job)
        watch_credit(c, job)
    return slot


def judge(c: Context, job: Job) -> None:
    """A probed job has been measured: it gets its promise, or what it chose for the case."""
    if solo_ms(job) is None:
        return
    found = c.policy.judge(c.state, job)
    promised = job.spec.slo is not None and job.id not in found.at_risk
    if found.period_ms is None and job.spec.slo is not None:
        return  # another member's times are not known yet: the next iteration tells more
    if job.spec.slo is None or promised or job.spec.if_unmet is IfUnmet.BEST_EFFORT:
        c.fact(f.JobPromised(c.now, job.id, promised, found.period_ms))
    elif job.spec.if_unmet is IfUnmet.END:
        end_now(c, job, reason=Cause("slo_not_kept", {"slo": job.spec.slo}), by="if_unmet")
    else:
        c.fact(f.JobUnplaced(c.now, job.id, Cause("slo_not_kept_there", {"slo": job.spec.slo})))


def detach(c: Context, ask: i.DetachSlot) -> Answer:
    slot = c.state.slots.get(ask.slot)
    if slot is not None and slot.status in COMING:
        awaited = c.state.jobs[slot.job].spec.phase(slot.phase).gap_ms + c.config.grace_ms
        c.timers.detach(slot.id, until=c.now + c.config.reattach_ms, awaited_until=c.now + awaited)
        c.dirty.group(c.state.jobs[slot.job].group)
    return NOTHING


def withdraw(c: Context, ask: i.WithdrawSlot) -> Answer:
    slot = c.state.slot(ask.slot)
    if slot.status is SlotStatus.WITHDRAWN:
        return Answer(slot=slot.id, repeated=True)
    if slot.status is not SlotStatus.QUEUED:
        raise Conflict(f"slot {slot.id} is {slot.status}, and only a queued request can be withdrawn; release it")
    drop_request(c, c.state.jobs[slot.job], Cause("withdrawn"))
    return Answer(slot=slot.id)


def release(c: Context, ask: i.ReleaseSlot) -> Answer:
    """The phase is over. What is loaded stays until another job's turn is next, unless it parks at release.

    GPUs on which no driver moves a state of the job are free as soon as they are verified clean. The backend was asked
    just before, and ``seen`` is its answer.
    """
    slot = c.state.slot(ask.slot)
    if slot.ended is SlotStatus.RELEASED and slot.fence == ask.fence:
        return Answer(slot=slot.id, next_slot=slot.next_slot, next_refused=slot.next_refused, repeated=True)
    check_holder(c, slot, ask.fence)
    job = c.state.jobs[slot.job]
    nodes = c.state.phase_nodes(job, slot.phase)
    partly = len(slot.gpus) < sum(len(c.state.nodes[name].gpus) for name in nodes)
    # a valid release succeeds whatever becomes of the request that it carries
    refused = None if ask.next is None else refusal(c, job, ask.next.phase)
    following = None if refused is not None else ask.next
    next_slot = None if following is None else c.state.next_id("s")
    c.fact(f.SlotReleased(c.now, slot.id, ask.measured, next_slot, refused))
    c.timers.forget_slot(slot.id)
    at_once = job.spec.park is Park.AT_RELEASE or job.spec.filler is not None
    if at_once or partly:  # what is loaded on a part must not pass for loaded on all
        park_own(c, job, slot)
    gpus_observed(c, nodes, ask.seen)
    if following is not None:
        queue(c, job, slot.session, following.phase, following.request_id)
    return Answer(slot=slot.id, next_slot=next_slot, next_refused=refused)


def give_back(c: Context, ask: i.GiveBack) -> Answer:
    """End what a session holds or waits for. Its process lives: what it has loaded stays known, as after a release."""
    session = live_session(c, ask.session)
    job = c.state.jobs[session.job]
    reason = Cause("interrupted")
    drop_request(c, job, reason)
    slot = c.state.slot_of(job)
    if slot is not None and slot.fence is not None:
        return release(c, i.ReleaseSlot(slot.id, slot.fence))
    take_away(c, slot, reason, f"session {session.id}")
    return Answer(session=session.id)


def check_holder(c: Context, slot: Slot, fence: Fence) -> None:
    if slot.status not in (SlotStatus.RUNNING, SlotStatus.TAIL):
        raise StaleFence(slot.id, slot.status, slot.reason)
    if slot.fence != fence:
        raise StaleFence(slot.id, "held under another fence")


def shrink(c: Context, ask: i.ShrinkSlot) -> Answer:
    slot = c.state.slot(ask.slot)
    check_holder(c, slot, ask.fence)
    kept = tuple(gpu for gpu in slot.gpus if gpu in ask.keep)
    if len(kept) != len(set(ask.keep)) or not kept:
        raise Impossible(f"slot {slot.id} holds {', '.join(slot.gpus)}, and is to keep {', '.join(ask.keep)}")
    if len(kept) == len(slot.gpus):
        return Answer(slot=slot.id, repeated=True)
    if orders_for(c, slot):
        raise Conflict(f"slot {slot.id} grows, and what is loaded for it is not there yet: shrink it after that")
    c.fact(f.SlotResized(c.now, slot.id, kept, tail=True))
    gpus_observed(c, c.state.phase_nodes(c.state.jobs[slot.job], slot.phase), ask.seen)
    return Answer(slot=slot.id)


def revoke(c: Context, ask: i.RevokeSlot) -> Answer:
    slot = c.state.slot(ask.slot)
    job = c.state.jobs[slot.job]
    if slot.status is SlotStatus.QUEUED:
        drop_request(c, job, Cause("revoked_by", {"by": ask.by, "text": ask.reason}))
    elif slot.status in HOLDS:
        take_away(c, slot, said(ask.reason) if ask.reason else Cause("revoked"), ask.by)
    elif slot.status in (SlotStatus.REVOKED, SlotStatus.LOST, SlotStatus.FAULTED):
        return Answer(slot=slot.id, repeated=True)
    else:
        raise Conflict(f"slot {slot.id} is {slot.status}: there is nothing to revoke")
    return Answer(slot=slot.id)


def yield_due(c: Context, slot: SlotId) -> None:
    """A filler had its time to give way: its slot is taken from it, without its help.

    A driver parks its state. Where only its process could do that, the process is ended.
    """
    known = c.state.slots.get(slot)
    if known is None or known.status not in HOLDS or known.yield_by is None:
        return
    if not c.is_past(known.yield_by, "yield", slot):
        return
    job, session = c.state.jobs[known.job], c.state.sessions[known.session]
    limit_s = 0 if job.spec.filler is None else job.spec.filler.yield_ms / 1000
    reason = Cause("not_given_back", {"limit_s": limit_s})
    take_away(c, known, reason, "yield")
    if not moves_without_its_process(job.spec) and session.status is SessionStatus.ALIVE:
        lose(c, session, reason)


def give_up(c: Context, slot: SlotId) -> None:
    """A request that stayed detached beyond the re-attach time is never granted, though its state may be loaded."""
    if slot not in c.timers.detached or not c.is_past(c.timers.detached[slot][0], "detach", slot):
        return
    known = c.state.slots[slot]
    reason = Cause("not_asked_for", {"limit_s": c.config.reattach_ms // 1000})
    if known.status is SlotStatus.QUEUED:
        drop_request(c, c.state.jobs[known.job], reason)
    else:
        take_away(c, known, reason, "re-attach time")
