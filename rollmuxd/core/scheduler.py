"""Turns inputs into facts and effects: the order of things, and nothing else.

The arithmetic is elsewhere: between groups in :mod:`placement <rollmuxd.core.placement>`, within a group in
:mod:`rotation <rollmuxd.core.rotation>`, the life cycles in :mod:`lifecycle <rollmuxd.core.lifecycle>`. Each handler
reads: may it be (all refusing comes first), what happened (``self._fact``), what must be done (``self._do``). A fact
is applied as it is made, so what follows in the same decision sees it.
"""

from collections.abc import Callable
from typing import Any

from rollmuxd.core import effects as e
from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.config import Config, DriverTraits
from rollmuxd.core.decision import Answer, Decision, Directive, Reason
from rollmuxd.core.effects import Effect
from rollmuxd.core.errors import BrokenInvariant, Conflict, Impossible, Rejected, RunAlive, StaleFence, TooMany, UnknownThing
from rollmuxd.core.explain import Explainer
from rollmuxd.core.model import (
    Fence,
    Group,
    GroupId,
    HostId,
    IfUnmet,
    Job,
    JobId,
    JobSpec,
    JobState,
    JobStatus,
    Millis,
    Node,
    NodeId,
    NodeStatus,
    OnLoss,
    Order,
    OrderKind,
    OrderStatus,
    Park,
    Session,
    SessionId,
    SessionStatus,
    Slot,
    SlotId,
    SlotStatus,
    StateStatus,
    Visit,
)
from rollmuxd.core.policy import Policy
from rollmuxd.core.rotation import Rotation, find_phase
from rollmuxd.core.soft import Soft
from rollmuxd.core.state import State, state_key

_NOTHING = Answer()
_NO_CHANGE = Decision((), (), _NOTHING)
_HOLDS = (SlotStatus.LOADING, SlotStatus.RUNNING, SlotStatus.TAIL)
_PLACED = (JobStatus.PROBING, JobStatus.ADMITTED, JobStatus.MOVING)


class Scheduler:
    """Turns one input into facts and effects. No clock, no IO, no logging, no randomness.

    After calling :meth:`handle`:

    - make ``facts`` durable, then answer the caller;
    - only then perform ``effects``, in order;
    - call :meth:`handle` with a ``Tick`` no later than :meth:`deadline`.
    """

    def __init__(self, config: Config, policy: Policy, state: State | None = None) -> None:
        self.config, self.policy = config, policy
        self.state = state if state is not None else State()
        self.rotation = Rotation()
        self.soft = Soft()
        self.explainer = Explainer(self)
        self._facts: list[f.Fact] = []
        self._effects: list[Effect] = []
        self._now: Millis = self.state.at
        self._handlers: dict[type, Callable[[Any], Answer]] = {
            i.RegisterJob: self._register,
            i.EndJob: self._end,
            i.PauseJob: self._pause,
            i.ResumeJob: self._resume,
            i.ReinstateJob: self._reinstate,
            i.OpenSession: self._open_session,
            i.CloseSession: self._close_session,
            i.Heartbeat: self._heartbeat,
            i.RequestSlot: self._request,
            i.DetachSlot: self._detach,
            i.WithdrawSlot: self._withdraw,
            i.ReleaseSlot: self._release,
            i.ShrinkSlot: self._shrink,
            i.RevokeSlot: self._revoke,
            i.DrainNode: self._drain,
            i.UndrainNode: self._undrain,
            i.DeclareClear: self._declare_clear,
            i.Start: self._start,
            i.HostSeen: self._host_seen,
            i.HostUnreachable: self._host_unreachable,
            i.OrderDone: self._order_done,
            i.OrderFailed: self._order_failed,
            i.OrderLostContact: self._order_lost_contact,
            i.Tick: self._tick,
            i.Stalled: self._stalled,
        }

    # ---- the interface -----------------------------------------------------------------------------------------------

    def handle(self, given: i.Input, now: Millis) -> Decision:
        """Decide upon one input at a time ``now`` (integer milliseconds, never going back).

        Raises:
            Rejected: the input is refused, and nothing has changed.
            BrokenInvariant: a bug of ours; the state is not to be used any more.
        """
        if now < self.state.at:
            raise BrokenInvariant(f"time went back from {self.state.at} to {now}")
        self._now = now
        self._facts, self._effects = [], []
        try:
            answer = self._handlers[type(given)](given)
        except Rejected:
            if self._facts:
                raise BrokenInvariant(f"{type(given).__name__} was refused after {f.name(self._facts[-1])}") from None
            raise
        if not self._facts and not self._effects and answer is _NOTHING:
            return _NO_CHANGE
        return Decision(tuple(self._facts), tuple(self._effects), answer)

    def deadline(self) -> Millis | None:
        """When the next ``Tick`` is due at the latest; None: nothing is waited for."""
        return self.soft.next_due()

    # ---- questions; they change nothing (see Explainer) -----------------------------------------------------------------

    def why_job_waits(self, job: JobId, now: Millis) -> tuple[Reason, ...]:
        """Why a job has no placement."""
        return self.explainer.why_job_waits(job, now).reasons

    def would_start_with(self, job: JobId, now: Millis) -> tuple[str, ...]:
        """What would let a waiting job in now: ``("slo=2", ...)``."""
        return self.explainer.why_job_waits(job, now).would_start_with

    def job_position(self, job: JobId, now: Millis) -> int:
        """Its place among the waiting jobs; 1: the next to be tried."""
        order = self._waiting_order(now)
        return order.index(job) + 1 if job in order else 0

    def why_slot_waits(self, slot: SlotId, now: Millis) -> tuple[Reason, ...]:
        """Why a slot is not running."""
        return self.explainer.why_slot_waits(slot, now)

    def slot_position(self, slot: SlotId) -> int:
        """How many visits come before it; 0: it is next."""
        return self.explainer.slot_position(slot)

    def expected_wait_ms(self, slot: SlotId, now: Millis) -> Millis | None:
        """A guess from observed times; None where they are not known."""
        return self.explainer.expected_wait_ms(slot, now)

    def explain(self, job: JobId, now: Millis) -> tuple[tuple[Reason, ...], tuple[str, ...]]:
        """Why it waits, or where it sits and why: reasons as data, and sentences."""
        return self.explainer.explain(job, now)

    def lease_left_ms(self, session: SessionId, now: Millis) -> Millis:
        """How long a session's lease lasts without another heartbeat."""
        seen = self.soft.seen.get(session)
        return 0 if seen is None else max(0, seen + self.config.lease_ms - now)

    def group_period_ms(self, group: GroupId) -> Millis | None:
        """The group's planned period."""
        return self.policy.period_ms(self.state, group) if group in self.state.groups else None

    def slowdown(self, job: JobId) -> float | None:
        """Mean iteration over solo iteration, of all finished iterations; None before the first."""
        progress = self.state.jobs[job].progress
        return progress.elapsed_ms / progress.solo_ms if progress.solo_ms else None

    def credit_ms(self, job: JobId) -> Millis | None:
        """By how much the job is ahead of its bound; None without an SLO."""
        known = self.state.jobs[job]
        if known.spec.slo is None:
            return None
        return int(known.spec.slo * known.progress.solo_ms) - known.progress.elapsed_ms

    # ---- helpers -------------------------------------------------------------------------------------------------------

    def _fact(self, fact: f.Fact) -> None:
        self.state.apply(fact)
        self._facts.append(fact)

    def _do(self, effect: Effect) -> None:
        self._effects.append(effect)

    def _traits(self, driver: str) -> DriverTraits:
        return self.config.drivers.get(driver, DriverTraits())

    # ---- jobs ------------------------------------------------------------------------------------------------------------

    def _register(self, ask: i.RegisterJob) -> Answer:
        """A job, or a new run of it, waits for a placement; it starts when nothing of its run before is left."""
        known = self.state.job_named(ask.owner, ask.spec.name)
        if known is not None and known.live:
            if ask.idempotency_key and ask.idempotency_key == known.idempotency_key:
                return Answer(job=known.id, session=known.session, repeated=True)
            self._refuse_if_alive(known, ask)
        _check_spec(ask.spec, self.state, self.config)
        if known is None and len(self.state.jobs) - len(self.state.ended) >= self.config.max_jobs:
            raise TooMany(f"{self.config.max_jobs} jobs are registered, which is the limit; end one, or raise max_jobs")
        if known is not None and known.live:
            self._end_now(known, reason="replaced by a new run", by=ask.user)
        job = self.state.next_id("j") if known is None else known.id
        run = 1 if known is None else known.run + 1
        self._fact(f.JobRegistered(self._now, job, ask.owner, ask.user, run, ask.spec, ask.idempotency_key))
        self._settle(self.state.jobs[job])
        self._admit()
        return Answer(job=job)

    def _refuse_if_alive(self, known: Job, ask: i.RegisterJob) -> None:
        session = self.state.sessions.get(known.session or "")
        alive = session is not None and session.status is SessionStatus.ALIVE
        if alive and not ask.replace:
            assert session is not None  # for the type checker: `alive` says so
            raise RunAlive(known.spec.name, known.run, session.pid, session.host)

    def _end(self, ask: i.EndJob) -> Answer:
        """End a job: its requests go, its slot is taken away, its states are discarded."""
        job = self.state.job(ask.job)
        if job.status is JobStatus.ENDED:
            return Answer(job=job.id, repeated=True)
        self._end_now(job, reason=ask.reason or "ended", by=ask.by)
        self._after_departure(job)
        return Answer(job=job.id)

    def _end_now(self, job: Job, *, reason: str, by: str) -> None:
        group = job.group
        self._drop_requests(job, f"job ended: {reason}")
        if job.slot is not None:
            self._take_away(self.state.slots[job.slot], f.SlotRevoked(self._now, job.slot, by, reason))
        self._fact(f.JobEnded(self._now, job.id, reason, by))
        session = self.state.sessions.get(job.session or "")
        if session is not None and session.status is SessionStatus.ALIVE:
            self._fact(f.SessionClosed(self._now, session.id))
            self.soft.forget_session(session.id)
        self._settle(job)
        self._dispatch(group)

    def _after_departure(self, job: Job) -> None:
        """Somebody else may fit now."""
        if not job.pins:
            self._admit()

    def _pause(self, ask: i.PauseJob) -> Answer:
        """No new slot from the next phase boundary on; its visits are skipped meanwhile."""
        job = self.state.job(ask.job)
        if job.status is JobStatus.PAUSED:
            return Answer(job=job.id, repeated=True)
        if job.status not in (JobStatus.WAITING, *_PLACED):
            raise Conflict(f"job {job.spec.name} is {job.status}, and only a waiting or placed job can be paused")
        self._fact(f.JobPaused(self._now, job.id, ask.by))
        self._dispatch(job.group)
        return Answer(job=job.id)

    def _resume(self, ask: i.ResumeJob) -> Answer:
        """A paused job goes on where it was."""
        job = self.state.job(ask.job)
        if job.status in (JobStatus.WAITING, *_PLACED):
            return Answer(job=job.id, repeated=True)
        if job.status is not JobStatus.PAUSED:
            raise Conflict(f"job {job.spec.name} is {job.status}, and only a paused job can be resumed")
        self._fact(f.JobResumed(self._now, job.id, ask.by))
        self._admit()
        self._dispatch(job.group)
        return Answer(job=job.id)

    def _reinstate(self, ask: i.ReinstateJob) -> Answer:
        """The way out of quarantine: it waits for a placement again."""
        job = self.state.job(ask.job)
        if job.status is not JobStatus.QUARANTINED:
            raise Conflict(f"job {job.spec.name} is {job.status}, and only a quarantined job can be reinstated")
        self._fact(f.JobReinstated(self._now, job.id, ask.by))
        self._settle(job)
        self._admit()
        return Answer(job=job.id)

    def _quarantine(self, job: Job, reason: str) -> None:
        """Its state could not be moved: it leaves its group, everybody else goes on."""
        if not job.live or job.status is JobStatus.QUARANTINED:
            return
        self._drop_requests(job, f"job quarantined: {reason}")
        self._fact(f.JobQuarantined(self._now, job.id, reason))

    def _drop_requests(self, job: Job, reason: str) -> None:
        if job.queued is not None:
            slot = job.queued
            self._fact(f.SlotWithdrawn(self._now, slot, reason))
            self.soft.forget_slot(slot)
            self.soft.waiting -= 1

    # ---- sessions ----------------------------------------------------------------------------------------------------------

    def _open_session(self, ask: i.OpenSession) -> Answer:
        """A client process is there. Of two sessions of one run the newer holds: it fences the older."""
        job = self.state.job(ask.job)
        if not job.live:
            raise Conflict(f"job {job.spec.name} is {job.status} ({job.reason}); register it again for a new run")
        if ask.idempotency_key != job.idempotency_key:
            raise Conflict(f"run {job.run} of job {job.spec.name} was registered by another process")
        old = self.state.sessions.get(job.session or "")
        new = self.state.next_id("e")
        if old is not None and old.status is SessionStatus.ALIVE:
            if (old.pid, old.host, old.started) == (ask.pid, ask.host, ask.started) and ask.started:
                self.soft.see(old.id, self._now, self.config.lease_ms)
                return Answer(job=job.id, session=old.id, repeated=True)
            self._fact(f.SessionFenced(self._now, old.id, new))
            self.soft.forget_session(old.id)
        self._fact(f.SessionOpened(self._now, new, job.id, job.run, ask.pid, ask.host, ask.started))
        self.soft.see(new, self._now, self.config.lease_ms)
        for name in (job.slot, job.queued):
            if name is not None:
                slot = self.state.slots[name]
                fence = None if slot.fence is None else self._next_fence()
                self._fact(f.SlotTakenOver(self._now, slot.id, new, fence))
        return Answer(job=job.id, session=new)

    def _close_session(self, ask: i.CloseSession) -> Answer:
        """The process leaves in good order and its job stays. A slot that it holds is taken away."""
        session = self._session(ask.session)
        if session.status is not SessionStatus.ALIVE:
            return Answer(session=session.id, repeated=True)
        job = self.state.jobs[session.job]
        self._fact(f.SessionClosed(self._now, session.id))
        self.soft.forget_session(session.id)
        self._drop_requests(job, "its session was closed")
        if job.slot is not None:
            by = f"session {session.id}"
            self._take_away(self.state.slots[job.slot], f.SlotRevoked(self._now, job.slot, by, "session closed"))
        self._dispatch(job.group)
        return Answer(session=session.id)

    def _session(self, session: SessionId) -> Session:
        found = self.state.sessions.get(session)
        if found is None:
            raise UnknownThing("session", session)
        return found

    def _live_session(self, session: SessionId) -> Session:
        found = self._session(session)
        if found.status is not SessionStatus.ALIVE:
            job = self.state.jobs[found.job]
            raise Conflict(f"session {session} is {found.status}; job {job.spec.name} is {job.status}")
        return found

    def _heartbeat(self, ask: i.Heartbeat) -> Answer:
        """The lease is renewed; no fact comes of it. A tail may be asked to shrink, where somebody can use the part."""
        session = self.state.sessions.get(ask.session)
        if session is None or session.status is not SessionStatus.ALIVE:
            session = self._live_session(ask.session)
        self.soft.seen[ask.session] = self._now
        if ask.slot is None:
            return _NOTHING
        slot = self.state.slots.get(ask.slot)
        if slot is None or slot.session != session.id:
            return Answer(directives=(Directive("stop", ask.slot, reason="the slot is not yours any more"),))
        if slot.status not in _HOLDS:
            return Answer(directives=(Directive("stop", slot.id, reason=slot.reason or f"the slot is {slot.status}"),))
        self.soft.progress[slot.id] = (ask.done, ask.total)
        keep = self._shrink_wish(slot, ask)
        return Answer(directives=(Directive("shrink", slot.id, keep),)) if keep else _NOTHING

    def _shrink_wish(self, slot: Slot, ask: i.Heartbeat) -> tuple[str, ...]:
        """The GPUs that a tail should keep; () while it should keep all.

        Never asked when nobody can use the part: the next visit on its nodes must have been asked for, by a phase
        that starts on as many GPUs as would come free.
        """
        if slot.status is not SlotStatus.RUNNING or not ask.total or ask.done < self.config.tail_from * ask.total:
            return ()
        job = self.state.jobs[slot.job]
        phase = find_phase(self.state, job.id, slot.phase)
        group = self.state.groups.get(job.group or "")
        if phase is None or group is None or not phase.min_gpus or len(slot.gpus) <= phase.min_gpus:
            return ()
        free = len(slot.gpus) - phase.min_gpus
        for node in self.rotation.nodes_of(self.state, group, job.id, slot.phase):
            head = self.rotation.head(self.state, group, node)
            if head is None:
                continue
            visit = group.wheel[head]
            other = self.state.jobs[visit.job]
            wants = find_phase(self.state, other.id, visit.phase)
            asked = other.queued is not None and self.state.slots[other.queued].phase == visit.phase
            if asked and wants is not None and other.id != job.id and 0 < wants.min_gpus <= free:
                return slot.gpus[: phase.min_gpus]
        return ()

    def _lose(self, session: Session) -> None:
        """No heartbeat for one lease time: the job is lost at once, between slots too."""
        self._fact(f.SessionLost(self._now, session.id))
        self.soft.forget_session(session.id)
        job = self.state.jobs[session.job]
        if not job.live or job.session != session.id:
            return
        reason = f"no heartbeat from pid {session.pid} on {session.host or 'an unnamed host'} for one lease time"
        group = job.group
        self._drop_requests(job, reason)
        if job.slot is not None:
            self._take_away(self.state.slots[job.slot], f.SlotLost(self._now, job.slot, reason))
        self._fact(f.JobLost(self._now, job.id, reason))
        for key in job.states:
            kept = self.state.states[key]
            if kept.status not in (StateStatus.GONE, StateStatus.PARKED, StateStatus.UNKNOWN):
                self._fact(f.StateUnknown(self._now, job.id, kept.pool, kept.node))
        if job.spec.on_loss is OnLoss.KILL:
            self._do(e.Kill(job.id, job.run, session.id))
        self._look(job)
        self._settle(job)
        self._dispatch(group)
        self._after_departure(job)

    # ---- slots ---------------------------------------------------------------------------------------------------------------

    def _request(self, ask: i.RequestSlot) -> Answer:
        """A job asks for its turn. The same request id gets the same slot, and being asked again attaches it."""
        state = self.state
        job = state.job(ask.job)
        for name in reversed(state.slots_of[job.id]):
            slot = state.slots[name]
            if slot.request_id == ask.request_id and slot.run == job.run:
                return self._reattach(job, slot, ask)
        self._may_request(job, ask)
        return Answer(job=job.id, slot=self._queue(job, ask.session, ask.phase, ask.request_id))

    def _reattach(self, job: Job, slot: Slot, ask: i.RequestSlot) -> Answer:
        if slot.session != ask.session:
            self._live_session(ask.session)
            raise Conflict(f"request {ask.request_id!r} belongs to session {slot.session}")
        if slot.status is SlotStatus.QUEUED and self.soft.attach(slot.id):
            self._dispatch(job.group)
        return Answer(job=job.id, slot=slot.id, repeated=True)

    def _may_request(self, job: Job, ask: i.RequestSlot) -> None:
        """All refusing of a request."""
        session = self._live_session(ask.session)
        if session.job != job.id:
            raise Conflict(f"session {session.id} is of another job")
        if not job.live or job.status is JobStatus.QUARANTINED:
            raise Conflict(f"job {job.spec.name} is {job.status}: {job.reason}")
        if find_phase(self.state, job.id, ask.phase) is None:
            known = ", ".join(phase.name for phase in (*job.spec.side, *job.spec.phases))
            raise Impossible(f"job {job.spec.name} has no phase {ask.phase!r}; it registered {known}")
        if job.queued is not None:
            queued = self.state.slots[job.queued]
            raise Conflict(f"slot {queued.id} already waits for phase {queued.phase}; a job has one request at a time")
        if self.soft.waiting >= self.config.max_requests_waiting:
            raise TooMany(f"{self.soft.waiting} requests are waiting, which is the limit; try again later")

    def _queue(self, job: Job, session: SessionId, phase: str, request_id: str) -> SlotId:
        slot = self.state.next_id("s")
        side = all(known.name != phase for known in job.spec.phases)
        begins = not side and phase == job.spec.phases[0].name
        self._fact(f.SlotQueued(self._now, slot, job.id, job.run, session, phase, request_id, side, begins))
        self.soft.waiting += 1
        if begins and job.status is JobStatus.PROBING and job.progress.finished >= self.config.probe_iterations:
            self._judge(job)
        self._take_place(job, phase, side=side)
        self._dispatch(job.group)
        return slot

    def _take_place(self, job: Job, phase: str, *, side: bool) -> None:
        """Give a side phase its visit, and pass the job's earlier visits: who asks for a later one has left them."""
        group = self.state.groups.get(job.group or "")
        if group is None or job.status is JobStatus.WAITING:
            return
        if side:
            if self.rotation.visit_of(self.state, group, job.id, phase) is None:
                self._fact(f.VisitAdded(self._now, group.id, job.id, phase))
            return
        mine = self.rotation.visit_of(self.state, group, job.id, phase)
        if mine is None:
            return
        place = (group.wheel[mine].turn, mine)
        for index, visit in enumerate(group.wheel):
            if visit.job == job.id and not visit.once and (visit.turn, index) < place:
                self._fact(f.VisitSkipped(self._now, group.id, index, job.id, visit.phase))

    def _judge(self, job: Job) -> None:
        """A probed job has been measured: it gets its promise, or what it chose for the case."""
        verdict = self.policy.judge(self.state, job)
        if job.spec.slo is None or verdict.promised or job.spec.if_unmet is IfUnmet.BEST_EFFORT:
            self._fact(f.JobPromised(self._now, job.id, verdict.promised, verdict.period_ms))
            self._admit()
        elif job.spec.if_unmet is IfUnmet.END:
            self._end_now(job, reason=f"its slo of {job.spec.slo:g} cannot be kept here", by="if_unmet")
            self._after_departure(job)
        else:
            group = job.group
            self._fact(f.JobUnplaced(self._now, job.id, f"its slo of {job.spec.slo:g} cannot be kept where it was"))
            self._settle(job)
            self._admit()
            self._dispatch(group)

    def _detach(self, ask: i.DetachSlot) -> Answer:
        """Nobody waits on the line: the request keeps its place for the re-attach time, and is not granted meanwhile."""
        slot = self.state.slots.get(ask.slot)
        if slot is not None and slot.status is SlotStatus.QUEUED:
            self.soft.detach(slot.id, self._now + self.config.reattach_ms)
        return _NOTHING

    def _withdraw(self, ask: i.WithdrawSlot) -> Answer:
        """The request is taken back."""
        slot = self.state.slot(ask.slot)
        if slot.status is SlotStatus.WITHDRAWN:
            return Answer(slot=slot.id, repeated=True)
        if slot.status is not SlotStatus.QUEUED:
            raise Conflict(f"slot {slot.id} is {slot.status}, and only a queued request can be withdrawn; release it")
        self._drop_requests(self.state.jobs[slot.job], "withdrawn")
        self._dispatch(self.state.jobs[slot.job].group)
        return Answer(slot=slot.id)

    def _release(self, ask: i.ReleaseSlot) -> Answer:
        """The phase is over. What is loaded stays until somebody else's visit is next, unless it parks at release.

        GPUs on which the job keeps no state that a driver moves are given on when they were seen clear: the backend
        was asked just before, and ``seen`` is its answer.
        """
        slot = self.state.slot(ask.slot)
        if slot.released and slot.fence == ask.fence:
            return Answer(slot=slot.id, next_slot=slot.next_slot, next_refused=slot.next_refused, repeated=True)
        self._check_holder(slot, ask.fence)
        job = self.state.jobs[slot.job]
        was_tail = slot.status is SlotStatus.TAIL
        self._fact(f.SlotReleased(self._now, slot.id, ask.measured))
        self.soft.forget_slot(slot.id)
        if job.spec.park is Park.AT_RELEASE or was_tail:  # after a shrink only a part of it is still loaded
            self._park_own(job, slot)
        self._finish_release(slot)
        self._see_gpus(ask.seen)
        next_slot, refused = self._next(job, slot, ask)
        self._dispatch(job.group)
        return Answer(slot=slot.id, next_slot=next_slot, next_refused=refused)

    def _check_holder(self, slot: Slot, fence: Fence) -> None:
        if slot.status not in (SlotStatus.RUNNING, SlotStatus.TAIL):
            raise StaleFence(slot.id, slot.status, slot.reason)
        if slot.fence != fence:
            raise StaleFence(slot.id, "held under another fence", "")

    def _next(self, job: Job, slot: Slot, ask: i.ReleaseSlot) -> tuple[SlotId | None, str]:
        """The request that the release carries. A valid release succeeds whatever becomes of it."""
        if ask.next is None:
            return None, ""
        request = i.RequestSlot(job.id, slot.session, ask.next.phase, ask.next.request_id)
        next_slot, refused = None, ""
        try:
            self._may_request(job, request)
        except Rejected as no:
            refused = str(no)
        else:
            next_slot = self._queue(job, slot.session, ask.next.phase, ask.next.request_id)
        self._fact(f.NextAnswered(self._now, slot.id, next_slot, refused))
        return next_slot, refused

    def _park_own(self, job: Job, slot: Slot) -> None:
        """Have the states that a slot had loaded parked, so that its GPUs come clear."""
        phase = find_phase(self.state, job.id, slot.phase)
        for key in job.states:
            kept = self.state.states[key]
            if kept.status is StateStatus.LOADED and phase is not None and kept.pool in phase.pools:
                self._order(OrderKind.PARK, kept, slot.id)

    def _finish_release(self, slot: Slot) -> None:
        """The slot is over once nothing that belongs to its release is still moving."""
        if slot.status is SlotStatus.RELEASED and not any(
            order.slot == slot.id and order.kind is OrderKind.PARK for order in self._open_orders(slot.job)
        ):
            self._fact(f.SlotOver(self._now, slot.id))

    def _open_orders(self, job: JobId) -> list[Order]:
        states = self.state.states
        orders = [self.state.orders.get(states[key].order or "") for key in self.state.jobs[job].states]
        return [order for order in orders if order is not None]

    def _shrink(self, ask: i.ShrinkSlot) -> Answer:
        """The job gave GPUs back; each is given on when it was seen clear."""
        slot = self.state.slot(ask.slot)
        self._check_holder(slot, ask.fence)
        kept = tuple(gpu for gpu in slot.gpus if gpu in ask.keep)
        if len(kept) != len(set(ask.keep)) or not kept:
            raise Impossible(f"slot {slot.id} holds {', '.join(slot.gpus)}, and is to keep {', '.join(ask.keep)}")
        if len(kept) == len(slot.gpus):
            return Answer(slot=slot.id, repeated=True)
        self._fact(f.SlotShrunk(self._now, slot.id, kept))
        self._see_gpus(ask.seen)
        self._dispatch(self.state.jobs[slot.job].group)
        return Answer(slot=slot.id)

    def _revoke(self, ask: i.RevokeSlot) -> Answer:
        """An operator ends a slot. Its GPUs come back when they were seen clear, not before."""
        slot = self.state.slot(ask.slot)
        job = self.state.jobs[slot.job]
        if slot.status is SlotStatus.QUEUED:
            self._drop_requests(job, f"revoked by {ask.by}: {ask.reason}")
        elif slot.status in _HOLDS:
            reason = ask.reason or "revoked"
            self._take_away(slot, f.SlotRevoked(self._now, slot.id, ask.by, reason))
            self._park_own(job, slot)
        elif slot.status in (SlotStatus.REVOKED, SlotStatus.RECLAIMING):
            return Answer(slot=slot.id, repeated=True)
        else:
            raise Conflict(f"slot {slot.id} is {slot.status}: there is nothing to revoke")
        self._dispatch(job.group)
        return Answer(slot=slot.id)

    def _take_away(self, slot: Slot, fact: f.SlotLost | f.SlotRevoked | f.SlotFaulted) -> None:
        """The slot ends without its holder's word: its GPUs stay held until they were seen clear."""
        self._fact(fact)
        self._fact(f.SlotReclaiming(self._now, slot.id))
        self.soft.forget_slot(slot.id)
        self._look(self.state.jobs[slot.job])

    # ---- whose turn it is --------------------------------------------------------------------------------------------------

    def _dispatch(self, group: GroupId | None) -> None:
        """Grant whatever of a group can be granted, in the order of its wheel."""
        known = self.state.groups.get(group or "")
        if known is None:
            return
        moved = True
        while moved:
            moved = False
            for name in tuple(known.jobs):
                job = self.state.jobs[name]
                if job.queued is not None and job.slot is None and job.status in _PLACED:
                    moved = self._advance(known, job, self.state.slots[job.queued]) or moved

    def _advance(self, group: Group, job: Job, slot: Slot) -> bool:
        """Bring one queued request nearer to its grant. True: the wheel moved, so others may go now."""
        visit = self.rotation.visit_of(self.state, group, job.id, slot.phase)
        if visit is None:
            return False
        nodes = self.rotation.nodes_of(self.state, group, job.id, slot.phase)
        first_everywhere = True
        for node in nodes:
            head = self.rotation.head(self.state, group, node)
            if head != visit and head is not None:
                first_everywhere = False
                if self._may_skip(group, group.wheel[head]):
                    absent = group.wheel[head]
                    self._fact(f.VisitSkipped(self._now, group.id, head, absent.job, absent.phase))
                    return True
        if slot.id in self.soft.detached:
            return False
        if not self._make_room(group, visit, job, nodes) or not first_everywhere:
            return False
        gpus = self._claimable(job, slot, nodes)
        if gpus is None:
            return False
        self._claim(job, slot, visit, gpus)
        return True

    def _may_skip(self, group: Group, visit: Visit) -> bool:
        """Whether the wheel may pass a visit that is not asked for.

        It is awaited while its job is in, or queued for, an earlier phase of its cycle, and for a grace after the
        job's planned gap; a job that is away longer, paused, lost or not yet begun is skipped, and comes back at its
        own visit.
        """
        job = self.state.jobs[visit.job]
        if job.status not in _PLACED:
            return True
        if job.queued is not None or job.slot is not None:
            return False
        idle_from = job.progress.idle_from
        if idle_from is None:
            return True
        gap = next((phase.gap_ms for phase in job.spec.phases if phase.name == visit.phase), 0)
        due = idle_from + gap + self.config.grace_ms
        if self._now < due:
            self.soft.at(due, "dispatch", group.id)
        return self._now >= due

    def _make_room(self, group: Group, visit: int, job: Job, nodes: tuple[NodeId, ...]) -> bool:
        """Have other states parked on the nodes where this visit is next; True when none is in the way."""
        phase = find_phase(self.state, job.id, group.wheel[visit].phase)
        clear = True
        for name in nodes:
            if self.rotation.head(self.state, group, name) != visit:
                clear = False
                continue
            node = self.state.nodes[name]
            for key in node.states:
                kept = self.state.states[key]
                if kept.status is StateStatus.PARKED or kept.status is StateStatus.GONE:
                    continue
                if kept.job == job.id and phase is not None and kept.pool in phase.pools:
                    clear = clear and kept.status is StateStatus.LOADED
                    continue
                if kept.status is StateStatus.LOADED and self._unheld_by(node, kept.job):
                    self._order(OrderKind.PARK, kept, None)
                # of the others (a tail's, one being discarded, one nobody knows of) each GPU's stain tells
                clear = clear and kept.status is not StateStatus.PARKING
        return clear

    def _unheld_by(self, node: Node, job: JobId) -> bool:
        """Whether none of the node's GPUs is held by a slot of the job."""
        return all(gpu.holder is None or self.state.slots[gpu.holder].job != job for gpu in node.gpus.values())

    def _claimable(self, job: Job, slot: Slot, nodes: tuple[NodeId, ...]) -> tuple[str, ...] | None:
        """The GPUs that the slot would hold: all of its nodes', or a part where its phase starts on a part."""
        phase = find_phase(self.state, job.id, slot.phase)
        whole = True
        gpus: list[str] = []
        for name in nodes:
            node = self.state.nodes[name]
            if node.status is not NodeStatus.UP:
                return None
            for gpu, it in node.gpus.items():
                if it.holder is None and (it.stain is None or it.stain == job.id):
                    gpus.append(gpu)
                else:
                    whole = False
        if whole:
            return tuple(gpus)
        part = phase.min_gpus if phase is not None else 0
        return tuple(gpus) if part and len(gpus) >= part else None

    def _claim(self, job: Job, slot: Slot, visit: int, gpus: tuple[str, ...]) -> None:
        self._fact(f.SlotClaimed(self._now, slot.id, gpus, visit))
        self.soft.waiting -= 1
        phase = find_phase(self.state, job.id, slot.phase)
        for key in job.states:
            kept = self.state.states[key]
            if phase is not None and kept.pool in phase.pools and kept.status is not StateStatus.LOADED:
                self._order(OrderKind.LOAD, kept, slot.id)
        self._grant_if_loaded(job, slot)

    def _grant_if_loaded(self, job: Job, slot: Slot) -> None:
        phase = find_phase(self.state, job.id, slot.phase)
        if slot.status is not SlotStatus.LOADING or phase is None:
            return
        for key in job.states:
            kept = self.state.states[key]
            if kept.pool in phase.pools and kept.status is not StateStatus.LOADED:
                return
        self._fact(f.SlotGranted(self._now, slot.id, self._next_fence()))

    def _next_fence(self) -> Fence:
        return Fence(self.state.incarnation, self.state.fence_number + 1)

    # ---- states and orders ---------------------------------------------------------------------------------------------------

    def _order(self, kind: OrderKind, kept: JobState, slot: SlotId | None) -> None:
        job = self.state.jobs[kept.job]
        driver = kept.spec.driver
        order = self.state.next_id("o")
        self._fact(f.OrderIssued(self._now, order, kind, job.id, job.run, kept.pool, kept.node, driver, slot))
        self._do(e.Perform(order))

    def _open_order(self, name: str) -> Order | None:
        """The order, or None when it had its final result before (a late or doubled report changes nothing)."""
        return self.state.orders.get(name)

    def _order_done(self, told: i.OrderDone) -> Answer:
        """The driver did it, and this is what the backend saw afterwards."""
        order = self._open_order(told.order)
        if order is None:
            return _NOTHING
        kept = self.state.states.get(state_key(order.job, order.pool, order.node))
        late = kept is not None and kept.order == order.id and kept.status is StateStatus.UNKNOWN
        job = self.state.jobs[order.job]
        self._fact(f.OrderEnded(self._now, order.id))
        if late:
            done = {OrderKind.LOAD: StateStatus.LOADED, OrderKind.PARK: StateStatus.PARKED}
            status = done.get(order.kind, StateStatus.GONE)
            self._fact(f.StateSeen(self._now, job.id, order.pool, order.node, status))
        if order.kind is not OrderKind.LOAD:
            self._see_gpus(told.seen)
            self._expect_clear(self.state.nodes[order.node], job, f"after {job.spec.name} was to {order.kind}")
        self._after_order(job, order)
        return _NOTHING

    def _after_order(self, job: Job, order: Order) -> None:
        slot = self.state.slots.get(order.slot or "")
        if slot is not None:
            if slot.status is SlotStatus.LOADING:
                self._grant_if_loaded(job, slot)
            self._finish_release(slot)
            if slot.status is SlotStatus.RECLAIMING and order.kind is OrderKind.LOAD:
                self._park_own(job, slot)  # it was taken away while it was being loaded
        group = job.group
        self._settle(job)
        self._dispatch(group)
        self._after_departure(job)

    def _expect_clear(self, node: Node, job: Job, reason: str) -> None:
        """The job's bytes should be off the node's GPUs now: look again, for a limited time, where they are not."""
        unclear = [
            name
            for name, gpu in node.gpus.items()
            if gpu.stain == job.id and (gpu.holder is None or self.state.slots[gpu.holder].status is SlotStatus.RECLAIMING)
        ]
        if unclear:
            if node.unclear_since is None:
                self._fact(f.GpusUnclear(self._now, node.id, f"{', '.join(unclear)} not seen clear {reason}"))
            self._watch(node)
        self._resolve_unknown(node)

    def _resolve_unknown(self, node: Node) -> None:
        """A state of which nobody knew is not on GPUs that were seen clear of its job: it has to be loaded anew."""
        for key in list(node.states):
            kept = self.state.states[key]
            if kept.status is StateStatus.UNKNOWN and not any(gpu.stain == kept.job for gpu in node.gpus.values()):
                self._fact(f.StateSeen(self._now, kept.job, kept.pool, kept.node, StateStatus.GONE))

    def _order_failed(self, told: i.OrderFailed) -> Answer:
        """The driver did not do it: the job is quarantined, and what is loaded of its state is to be discarded."""
        order = self._open_order(told.order)
        if order is None:
            return _NOTHING
        self._fact(f.OrderFaulted(self._now, order.id, told.error))
        if order.kind is not OrderKind.DISCARD and self._state_of(order).status is StateStatus.UNKNOWN:
            self._fact(f.StateSeen(self._now, order.job, order.pool, order.node, StateStatus.LOADED))
        self._fault(order, f"could not {order.kind} its {order.pool} state on {order.node}: {told.error}")
        return _NOTHING

    def _order_lost_contact(self, told: i.OrderLostContact) -> Answer:
        """Nobody knows: treated as neither done nor failed. Where the driver can be asked, it is."""
        order = self._open_order(told.order)
        if order is None:
            return _NOTHING
        if order.status is OrderStatus.LOST_CONTACT:  # a probe that learnt nothing; the next look asks again
            self._watch(self.state.nodes[order.node])
            return _NOTHING
        self._fact(f.OrderContactLost(self._now, order.id, told.error))
        if self._traits(order.driver).probes:
            self._do(e.Probe(order.id))
        self._fault(order, f"no word of the {order.kind} of its {order.pool} state on {order.node}: {told.error}")
        return _NOTHING

    def _state_of(self, order: Order) -> JobState:
        return self.state.states[state_key(order.job, order.pool, order.node)]

    def _fault(self, order: Order, reason: str) -> None:
        """One job's trouble: it is quarantined, its GPUs stay as they are until seen clear, everybody else goes on."""
        job = self.state.jobs[order.job]
        group = job.group
        slot = self.state.slots.get(order.slot or "")
        if slot is not None and slot.status is SlotStatus.LOADING:
            self._take_away(slot, f.SlotFaulted(self._now, slot.id, reason))
        self._quarantine(job, reason)
        if slot is not None:
            self._finish_release(slot)
        self._expect_clear(self.state.nodes[order.node], job, f"since it {reason}")
        self._settle(job)
        self._dispatch(group)
        self._after_departure(job)

    # ---- letting go ------------------------------------------------------------------------------------------------------------

    def _settle(self, job: Job) -> None:
        """Clear away what a job that has left its placement still has there; end the placement when nothing is left."""
        if job.status in _PLACED or (job.status is JobStatus.PAUSED and job.resume_to in _PLACED):
            return
        if not job.pins:
            if job.status is JobStatus.LOST:
                self._fact(f.JobEnded(self._now, job.id, job.reason))
            return
        if not self._nothing_left(job):
            return
        reason = f"{job.status}: {job.reason}" if job.reason else str(job.status)
        freed = [name for nodes in job.pins.values() for name in nodes]
        group = job.group
        self._fact(f.PlacementEnded(self._now, job.id, reason))
        if job.status is JobStatus.LOST:
            self._fact(f.JobEnded(self._now, job.id, job.reason))
        for name in dict.fromkeys(freed):
            self._drained_if_empty(self.state.nodes[name])
        self._dispatch(group)

    def _nothing_left(self, job: Job) -> bool:
        """Whether no slot, state or byte of the job is on its nodes; what can be discarded is told to be."""
        left = job.slot is not None or bool(job.closing)
        for key in job.states:
            kept = self.state.states[key]
            if kept.status in (StateStatus.LOADED, StateStatus.PARKED) and job.slot is None:
                self._order(OrderKind.DISCARD, kept, None)
            left = left or kept.status is not StateStatus.GONE
        for node in self._nodes_of(job):
            if any(gpu.stain == job.id for gpu in node.gpus.values()):
                left = True
        if left:
            self._look(job)
        return not left

    def _nodes_of(self, job: Job) -> list[Node]:
        return [self.state.nodes[name] for name in dict.fromkeys(n for nodes in job.pins.values() for n in nodes)]

    # ---- admission ---------------------------------------------------------------------------------------------------------------

    def _waiting_order(self, now: Millis) -> list[JobId]:
        """Waiting jobs, the next first: by priority raised with age, then by age."""
        jobs, aging = self.state.jobs, self.config.aging_ms

        def rank(name: JobId) -> tuple[int, Millis]:
            job = jobs[name]
            return -(job.spec.priority + (now - job.registered_at) // aging), job.registered_at

        return sorted(self.state.waiting, key=rank)

    def _admit(self) -> None:
        """Place every waiting job that fits. One that has waited too long is not overtaken on the pools it wants."""
        if not self.state.waiting:
            return
        reserved: set[str] = set()
        refused: set[object] = set()
        for name in self._waiting_order(self._now):
            job = self.state.jobs[name]
            if job.pins:  # something of its run before is still there
                continue
            pools = {want.pool for want in job.spec.wants}
            shape = _shape_of(job)
            if shape in refused or pools & reserved:
                continue
            placed = self.policy.place(self.state, job)
            if placed is None:
                refused.add(shape)
                if self._now - job.registered_at >= self.config.bounded_wait_ms:
                    reserved |= pools
                continue
            group = placed.group or self.state.next_id("g")
            self._fact(
                f.JobPlaced(
                    self._now,
                    job.id,
                    group,
                    placed.pins,
                    placed.wheel,
                    placed.status,
                    placed.admission,
                    placed.promised,
                    placed.period_ms,
                    placed.cost_per_hour,
                )
            )
            if job.queued is not None:
                slot = self.state.slots[job.queued]
                self._take_place(job, slot.phase, side=slot.side)
                self._dispatch(group)

    # ---- nodes ---------------------------------------------------------------------------------------------------------------------

    def _drain(self, ask: i.DrainNode) -> Answer:
        """Nothing new on the node; what is loaded parks; drained when its GPUs are clear."""
        node = self.state.node(ask.node)
        if node.status not in (NodeStatus.DRAINING, NodeStatus.DRAINED):
            if node.status in (NodeStatus.QUARANTINED, NodeStatus.LOST):
                raise Conflict(f"node {node.id} is {node.status} ({node.reason}): nothing is started on it anyway")
            self._fact(f.NodeDraining(self._now, node.id, ask.by))
        if ask.evict:
            for name in list(node.pinned):
                job = self.state.jobs[name]
                if job.live:
                    self._end_now(job, reason=f"evicted from {node.id}", by=ask.by)
        for key in list(node.states):
            kept = self.state.states.get(key)
            if kept is not None and kept.status is StateStatus.LOADED and self._unheld_by(node, kept.job):
                self._order(OrderKind.PARK, kept, None)
        self._drained_if_empty(node)
        self._watch(node)
        self._admit()
        return _NOTHING

    def _drained_if_empty(self, node: Node) -> None:
        if node.status is not NodeStatus.DRAINING:
            return
        for key in list(node.states):
            kept = self.state.states.get(key)
            if kept is not None and kept.status is StateStatus.LOADED and self._unheld_by(node, kept.job):
                self._order(OrderKind.PARK, kept, None)
        if all(gpu.holder is None and gpu.stain is None for gpu in node.gpus.values()):
            self._fact(f.NodeDrained(self._now, node.id))

    def _undrain(self, ask: i.UndrainNode) -> Answer:
        """The node may be used again, once it was looked at."""
        node = self.state.node(ask.node)
        if node.status in (NodeStatus.DRAINING, NodeStatus.DRAINED):
            self._fact(f.NodeUndrained(self._now, node.id, ask.by))
            self._admit()
            self._dispatch(node.group)
        elif node.drain:
            raise Conflict(f"node {node.id} is {node.status} ({node.reason}); it can be undrained when it is back")
        return _NOTHING

    def _declare_clear(self, ask: i.DeclareClear) -> Answer:
        """An operator takes it upon himself that nothing of any job is left on the node's GPUs."""
        node = self.state.node(ask.node)
        running = [gpu.holder for gpu in node.gpus.values() if gpu.holder is not None]
        for name in running:
            slot = self.state.slots[name]
            if slot.status is not SlotStatus.RECLAIMING:
                raise Conflict(f"slot {name} of job {slot.job} is {slot.status} on {node.id}; revoke it first")
        self._fact(f.GpusCleared(self._now, node.id, tuple(node.gpus), ask.by, ask.reason or "declared clear"))
        for key in list(node.states):
            kept = self.state.states[key]
            if kept.status not in (StateStatus.GONE, StateStatus.PARKED):  # on the word of who declares it
                if kept.status is not StateStatus.UNKNOWN:
                    self._fact(f.StateUnknown(self._now, kept.job, kept.pool, kept.node))
                self._fact(f.StateSeen(self._now, kept.job, kept.pool, kept.node, StateStatus.GONE))
        if node.status is NodeStatus.QUARANTINED:
            self._fact(f.NodeUnseen(self._now, node.id))
            self._do(e.Observe(node.host))
        self._end_reclaims(node)
        self._go_on(node)
        return _NOTHING

    # ---- what backends see -------------------------------------------------------------------------------------------------------------

    def _start(self, given: i.Start) -> Answer:
        """The daemon is there (again): every lease is renewed in full, every node has to be seen.

        An open order is told again only if that does it once; else its driver is asked; else nobody knows.
        """
        self._fact(f.DaemonStarted(self._now, given.incarnation))
        self._configure(given)
        self.soft.restart(self.state, self._now, self.config)
        for order in list(self.state.orders.values()):
            traits = self._traits(order.driver)
            if order.status is OrderStatus.ISSUED and traits.idempotent:
                self._do(e.Perform(order.id, again=True))
            elif traits.probes:
                self._do(e.Probe(order.id))
            elif order.status is OrderStatus.ISSUED:
                self._order_lost_contact(i.OrderLostContact(order.id, "the daemon was restarted meanwhile"))
        for host in self.state.hosts.values():
            self._do(e.Observe(host.id))
        for node in self.state.nodes.values():
            if node.unclear_since is not None or any(gpu.stain for gpu in node.gpus.values()):
                self._watch(node)
        for job in list(self.state.jobs.values()):
            self._settle(job)
        return _NOTHING

    def _configure(self, given: i.Start) -> None:
        """Bring the inventory in line with the configuration; what is in use stays as it is, and drains."""
        for host in given.hosts:
            known = self.state.hosts.get(host.id)
            if known is None or (known.backend, known.ram_mb) != (host.backend, host.ram_mb):
                self._fact(f.HostAdded(self._now, host))
        wanted = {node.id: node for node in given.nodes}
        for name, node in list(self.state.nodes.items()):
            used = bool(node.pinned) or any(gpu.holder or gpu.stain for gpu in node.gpus.values())
            spec = wanted.get(name)
            if spec is None and not used:
                self._fact(f.NodeRemoved(self._now, name))
            elif spec is None and node.status is NodeStatus.UNKNOWN:
                self._fact(f.NodeDraining(self._now, name, "the configuration, which has it no more"))
            elif spec is not None and not used and not _same_node(node, spec):
                self._fact(f.NodeAdded(self._now, spec))
        for name, spec in wanted.items():
            if name not in self.state.nodes:
                self._fact(f.NodeAdded(self._now, spec))
        configured = {host.id for host in given.hosts}
        for name in [host.id for host in self.state.hosts.values() if not host.nodes and host.id not in configured]:
            self._fact(f.HostRemoved(self._now, name))

    def _host_seen(self, told: i.HostSeen) -> Answer:
        """What is on a host's GPUs. What should be clear and is, is given on."""
        host = self.state.hosts.get(told.host)
        if host is None:
            return _NOTHING
        if told.boot_id and told.boot_id != host.boot_id:
            rebooted = bool(host.boot_id)
            self._fact(f.HostBooted(self._now, host.id, told.boot_id))
            if rebooted:
                self._forget_contents(host.nodes)
        sights = {sight.gpu: sight for sight in told.gpus}
        for name in list(host.nodes):
            node = self.state.nodes[name]
            if all(gpu in sights for gpu in node.gpus):  # a GPU that was not reported was not seen
                self._see_node(node, sights)
        self.soft.observed(host.id)
        for name in list(host.nodes):
            if name in self.state.nodes:
                self._watch(self.state.nodes[name])
        return _NOTHING

    def _forget_contents(self, nodes: list[NodeId]) -> None:
        """Another boot id: whatever was in the host's memories is gone."""
        for name in nodes:
            for key in self.state.nodes[name].states:
                kept = self.state.states[key]
                if kept.status is not StateStatus.GONE:
                    if kept.status is not StateStatus.UNKNOWN:
                        self._fact(f.StateUnknown(self._now, kept.job, kept.pool, kept.node))
                    self._fact(f.StateSeen(self._now, kept.job, kept.pool, kept.node, StateStatus.GONE))

    def _see_node(self, node: Node, sights: dict[str, i.GpuSight]) -> None:
        if node.status is NodeStatus.LOST:
            self._fact(f.NodeUnseen(self._now, node.id))
        before = len(self._facts)
        self._see_gpus(tuple(sights[gpu] for gpu in node.gpus))
        self._resolve_unknown(node)
        limit = self._clear_limit_mb(node)
        strangers = [
            sights[name]
            for name, gpu in node.gpus.items()
            if gpu.holder is None and gpu.stain is None and sights[name].used_mb > limit
        ]
        if strangers and node.status in (NodeStatus.UNKNOWN, NodeStatus.UP):
            who = strangers[0].processes[0] if strangers[0].processes else "an unknown process"
            reason = f"{strangers[0].gpu} is used by {who} ({strangers[0].used_mb} MB)"
            self._fact(f.NodeOccupied(self._now, node.id, reason))
        elif not strangers and node.status in (NodeStatus.UNKNOWN, NodeStatus.OCCUPIED):
            if node.drain:
                self._fact(f.NodeDraining(self._now, node.id, "an operator, before it was seen again"))
            else:
                self._fact(f.NodeUp(self._now, node.id))
        elif node.status is NodeStatus.QUARANTINED and self._all_clear(node, sights):
            self._fact(f.NodeUnseen(self._now, node.id))
            self._fact(f.NodeUp(self._now, node.id))
        if len(self._facts) > before:
            self._go_on(node)

    def _all_clear(self, node: Node, sights: dict[str, i.GpuSight]) -> bool:
        limit = self._clear_limit_mb(node)
        return all(sights[name].used_mb <= limit for name in node.gpus)

    def _go_on(self, node: Node) -> None:
        """After anything was learnt of a node: let go, drain, admit and grant what it allows."""
        for name in list(node.pinned):
            self._settle(self.state.jobs[name])
        self._drained_if_empty(node)
        self._admit()
        self._dispatch(node.group)

    def _clear_limit_mb(self, node: Node) -> int:
        return self.state.left_over_mb(node) + self.config.clear_tolerance_mb

    def _see_gpus(self, seen: tuple[i.GpuSight, ...]) -> None:
        """GPUs that were seen clear, are held by nobody and have no state loaded may be given on."""
        by_node: dict[NodeId, list[str]] = {}
        for sight in seen:
            node = self._node_with(sight.gpu)
            if node is None or sight.used_mb > self._clear_limit_mb(node):
                continue
            gpu = node.gpus[sight.gpu]
            if gpu.stain is None or self._may_still_fill(node, gpu.stain):
                continue
            if gpu.holder is None or self.state.slots[gpu.holder].status is SlotStatus.RECLAIMING:
                by_node.setdefault(node.id, []).append(sight.gpu)
        for name, gpus in by_node.items():
            self._fact(f.GpusCleared(self._now, name, tuple(gpus)))
            self._end_reclaims(self.state.nodes[name])

    def _may_still_fill(self, node: Node, job: JobId) -> bool:
        """Whether a state of the job is, or is about to be, loaded there: then an empty GPU is no proof of anything."""
        for key in node.states:
            kept = self.state.states[key]
            if kept.job != job or self._shrunk(kept):
                continue
            if kept.status in (StateStatus.LOADED, StateStatus.LOADING, StateStatus.PARKING):
                return True
            order = self.state.orders.get(kept.order or "")
            session = self.state.sessions.get(self.state.jobs[job].session or "")
            alive = session is not None and session.status is SessionStatus.ALIVE
            if order is not None and order.kind is OrderKind.LOAD and alive:
                return True  # no word of it, and the process lives: it may yet load
        return False

    def _shrunk(self, kept: JobState) -> bool:
        """Whether the state's slot runs on as a tail, so that the GPUs it gave back are to come clear one by one."""
        slot = self.state.jobs[kept.job].slot
        return slot is not None and self.state.slots[slot].status is SlotStatus.TAIL

    def _node_with(self, gpu: str) -> Node | None:
        host, _, _ = gpu.rpartition("/")
        known = self.state.hosts.get(host)
        if known is not None:
            for name in known.nodes:
                node = self.state.nodes[name]
                if gpu in node.gpus:
                    return node
        return None

    def _end_reclaims(self, node: Node) -> None:
        """A slot that was taken away is over when none of its GPUs may have bytes of it any more."""
        for name in dict.fromkeys(gpu.holder for gpu in node.gpus.values() if gpu.holder is not None):
            slot = self.state.slots[name]
            if slot.status is SlotStatus.RECLAIMING and all(
                gpu.stain is None
                for there in self._nodes_of(self.state.jobs[slot.job])
                for gpu in there.gpus.values()
                if gpu.holder == name
            ):
                self._fact(f.SlotOver(self._now, name))

    def _host_unreachable(self, told: i.HostUnreachable) -> Answer:
        """Nothing is known of its nodes any more; what was held there stays held."""
        host = self.state.hosts.get(told.host)
        if host is None:
            return _NOTHING
        for name in host.nodes:
            if self.state.nodes[name].status is not NodeStatus.LOST:
                self._fact(f.NodeLost(self._now, name, told.reason))
        self.soft.observed(host.id)
        for name in host.nodes:
            self._watch(self.state.nodes[name])
        return _NOTHING

    # ---- looking again ---------------------------------------------------------------------------------------------------------------

    def _look(self, job: Job) -> None:
        """Look at the hosts of a job's nodes now, and again until they are clear."""
        for host in dict.fromkeys(node.host for node in self._nodes_of(job)):
            self._look_at(host)

    def _look_at(self, host: HostId) -> None:
        if self.soft.look_now(host, self._now, self.config):
            self._do(e.Observe(host))

    def _watch(self, node: Node) -> None:
        """While something on the node should come clear, see to it that it is looked at again."""
        waits_for_clear = any(
            (gpu.stain is not None and gpu.holder is None and not self._may_still_fill(node, gpu.stain))
            or (gpu.holder is not None and self.state.slots[gpu.holder].status is SlotStatus.RECLAIMING)
            for gpu in node.gpus.values()
        ) or any(self.state.states[key].status is StateStatus.UNKNOWN for key in node.states)
        if waits_for_clear:
            self.soft.look_later(node.host, self._now, self.config)
            if node.unclear_since is not None and node.status is not NodeStatus.QUARANTINED:
                self.soft.at(node.unclear_since + self.config.clear_limit_ms, "clear", node.id)

    # ---- the clock -------------------------------------------------------------------------------------------------------------------

    def _tick(self, _: i.Tick) -> Answer:
        """Whatever is due by now."""
        for kind, key in self.soft.due(self._now, self.config):
            if kind == "lease":
                session = self.state.sessions.get(key)
                if session is not None and session.status is SessionStatus.ALIVE:
                    self._lose(session)
            elif kind == "detach":
                self._give_up(key)
            elif kind == "dispatch":
                self._dispatch(key)
            elif kind == "look":
                self._look_again(key)
            elif kind == "clear":
                self._not_clear(key)
        return _NOTHING

    def _look_again(self, host: HostId) -> None:
        self._do(e.Observe(host))
        for order in self.state.orders.values():
            lost = order.status is OrderStatus.LOST_CONTACT and self._traits(order.driver).probes
            if lost and self.state.nodes[order.node].host == host:
                self._do(e.Probe(order.id))

    def _give_up(self, slot: SlotId) -> None:
        """A request that stayed detached beyond the re-attach time is never granted."""
        known = self.state.slots.get(slot)
        if known is not None and known.status is SlotStatus.QUEUED:
            job = self.state.jobs[known.job]
            self._drop_requests(job, f"nobody asked for it for {self.config.reattach_ms // 1000} s")
            self._dispatch(job.group)

    def _not_clear(self, name: NodeId) -> None:
        """GPUs did not come clear in time: their node is quarantined, everybody else goes on."""
        node = self.state.nodes.get(name)
        if node is None or node.unclear_since is None or node.status in (NodeStatus.QUARANTINED, NodeStatus.LOST):
            return
        due = node.unclear_since + self.config.clear_limit_ms
        if self._now < due:
            self.soft.at(due, "clear", name)
        else:
            seconds = self.config.clear_limit_ms // 1000
            self._fact(f.NodeQuarantined(self._now, name, f"{node.reason}; not clear within {seconds} s"))
            self.soft.look_later(node.host, self._now, self.config)

    def _stalled(self, given: i.Stalled) -> Answer:
        """The loop was late: nobody could renew, so nobody is late."""
        self._fact(f.LoopStalled(self._now, given.late_ms))
        self.soft.renew_all(self._now)
        return _NOTHING


def _shape_of(job: Job) -> object:
    """What placement looks at of a job, for not trying the like again in one round."""
    spec = job.spec
    times = tuple((name, kept.count and kept.total_ms // kept.count) for name, kept in job.times.items())
    return (spec.phases, spec.wants, spec.states, spec.slo, spec.colocate, times, tuple(job.last_pins.items()))


def _same_node(node: Node, spec: i.NodeSpec) -> bool:
    return (tuple(node.gpus), node.pools, node.gpu_type, node.gpu_mb, node.price_per_gpu_hour, node.host) == (
        spec.gpus,
        spec.pools,
        spec.gpu_type,
        spec.gpu_mb,
        spec.price_per_gpu_hour,
        spec.host,
    )


def _check_spec(spec: JobSpec, state: State, config: Config) -> None:
    """What could never be met is refused at once, and says what is short."""
    wanted = [want.pool for want in spec.wants]
    names = [phase.name for phase in (*spec.phases, *spec.side)]
    if not spec.phases or len(set(names)) != len(names) or len(set(wanted)) != len(wanted):
        raise Impossible("a job has at least one cycle phase, and names each phase and each pool once")
    for phase in (*spec.phases, *spec.side):
        for pool in phase.pools:
            if pool not in wanted:
                raise Impossible(f"phase {phase.name} uses pool {pool}, of which nothing is wanted ({', '.join(wanted)})")
    for phase in spec.side:
        if phase.name != "init":
            raise Impossible(f"side phase {phase.name} is not to be had yet; only init is")
    for kept in spec.states:
        if kept.pool not in wanted:
            raise Impossible(f"a state is declared for pool {kept.pool}, of which nothing is wanted")
        if config.drivers and kept.driver not in config.drivers:
            known = ", ".join(sorted(config.drivers))
            raise Impossible(f"residency driver {kept.driver!r} is not installed (installed: {known})")
    if spec.slo is not None and spec.slo < 1:
        raise Impossible(f"slo is {spec.slo:g}: nobody is faster shared than alone, so it is at least 1")
    _check_wants(spec, state)


def _check_wants(spec: JobSpec, state: State) -> None:
    for want in spec.wants:
        there = [node for node in state.nodes.values() if want.pool in node.pools]
        if not there:
            pools = sorted({pool for node in state.nodes.values() for pool in node.pools})
            raise Impossible(f"there is no pool {want.pool!r}; the pools are {', '.join(pools) or 'none'}")
        gpus = sum(len(node.gpus) for node in there)
        if want.gpus > gpus or want.nodes > len(there):
            needed = f"{want.gpus} GPUs" if want.gpus else f"{want.nodes} nodes"
            raise Impossible(f"pool {want.pool} has {len(there)} nodes with {gpus} GPUs, and {needed} are wanted")
        for name in want.named:
            if name not in state.nodes or want.pool not in state.nodes[name].pools:
                raise Impossible(f"there is no node {name!r} in pool {want.pool}")
        ram = sum(kept.ram_mb for kept in spec.states if kept.pool == want.pool)
        most = max((state.hosts[node.host].ram_mb for node in there), default=0)
        if ram > most:
            raise Impossible(
                f"its {want.pool} state parks {ram / 1000:g} GB on a host, and the largest budget is {most / 1000:g} GB"
            )
        for kept in spec.states:
            if kept.pool == want.pool and all(node.gpu_mb and kept.gpu_mb > node.gpu_mb for node in there):
                largest = max(node.gpu_mb for node in there)
                raise Impossible(f"its {want.pool} state needs {kept.gpu_mb} MB of a GPU that has {largest} MB")
