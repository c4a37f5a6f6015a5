"""One run's conversation with the daemon, as flows: register, ask for slots, release them, leave.

What may be relied on:

- Nothing is asked for twice: each registration, request and release carries what makes its repetition harmless.
- No request and no slot is left behind. Whatever interrupts a wait, a phase or a release (Ctrl-C, a cancelled task),
  the request is taken back and the slot given back, or, where that cannot be done within seconds, or is interrupted in
  its turn, remembered and settled before the next request.
- A daemon that is away stops nothing: what is held stays held, and calls are repeated until it is back.
- A slot that was lost is reported when its phase is left, from the daemon's answer to the release: it alone knows.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct, structs

from rollmuxd.client import calls
from rollmuxd.client.calls import Call
from rollmuxd.client.errors import (
    Conflict,
    GaveUp,
    JobEnded,
    NotFound,
    Refused,
    RollmuxError,
    SlotFaulted,
    SlotLost,
    Unprocessable,
    refused,
)
from rollmuxd.client.retry import SAY_EVERY_S, Flow, Pause, duration, persist, say
from rollmuxd.wire.answers import Directive, JobView, ReleaseView, SessionView, SlotView
from rollmuxd.wire.requests import GrowBody, NextBody, RegisterBody, ReleaseBody, SessionBody, ShrinkBody, SlotBody

T = TypeVar("T")

#: a shorter wait writes no line: it may be part of every turn
QUIET_S = 10.0
#: how long an ask blocks at least, also where the next line is due sooner
SHORTEST_WAIT_S = 1.0
#: how long each further ask blocks; below the usual idle limits (60 s) of whatever is in between
WAIT_S = 25.0
#: a job that starts may wait for a daemon that is being restarted, and not for ever for one that is not there
START_PATIENCE_S = 120.0
#: at most between two questions whether a quarantined job was reinstated
REINSTATED_S = 5.0
#: all clean-ups after an interruption together, also one in mid-phase: the user is waiting for the prompt
CLEAN_UP_S = 10.0
#: one call of a clean-up, or half of what is left, if that is more: a connection that hangs is worth a second one
CLEAN_UP_CALL_S = 5.0
#: the word that the job is over, to a daemon that did not answer the whole clean-up before, or from a user who did not
#: wait for it
LAST_CALL_S = 1.0
#: a release while the program is failing: worth a daemon's restart, not worth hanging
FAILING_PATIENCE_S = 60.0

_RUNNING = {"running", "tail"}
_COMING = {"queued", "loading"}
_OVER = {"ended", "lost"}


class Request(Struct):
    """A slot that was asked for, and the last answer to it."""

    phase: str
    id: str
    view: SlotView | None = None
    #: we have begun to take it back: should it be released, it was we
    back: bool = False


class Held(Struct):
    """A slot of ours."""

    slot: str
    phase: str
    request_id: str
    fence: str
    gpus: tuple[str, ...]
    #: the session that the fence was given to
    session: str
    directive: Directive | None = None
    lost: bool = False
    #: the release was answered: it was ours until then
    released: bool = False


class Left(Struct):
    """A slot of which the release was not answered yet."""

    held: Held
    measured: dict[str, float]
    #: the request that it carried
    carried: Request | None


def new_id() -> str:
    """Return an id that nobody else has made."""
    return os.urandom(16).hex()


def this_process(idempotency_key: str) -> SessionBody:
    """Say which process this is; its start time tells it from a later process with its pid."""
    try:
        # The name (field 2) is in brackets and may hold anything; field 22 is the 20th after it.
        started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):  # no /proc on this system
        started = ""
    return SessionBody(
        idempotency_key=idempotency_key, pid=os.getpid(), host=socket.gethostname()[:255], started=started
    )


class Session:
    """The conversation. Its methods are flows; a sender runs them, one at a time (:meth:`beat_refused` excepted)."""

    def __init__(
        self,
        body: RegisterBody,
        *,
        patience_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        tell: Callable[[str], None] = say,
    ) -> None:
        self.body = body
        self.name = body.name
        self.job = ""
        self.run = 0
        self.session = ""
        #: the daemon's journal, in which these ids were given
        self.journal = ""
        self.held: Held | None = None
        #: why the daemon gives this job no more slots
        self.ended = ""
        #: called with each new session
        self.on_session: Callable[[SessionView], None] = lambda view: None
        self._patience_s = patience_s
        self._clock = clock
        self._tell = tell
        #: a request that may stand there: the one that is waited for, one that a release carried, or one that could
        #: not be taken back
        self._pending: Request | None = None
        #: a slot that may still be ours: its release was interrupted
        self._left: Left | None = None
        #: the end of the clean-up that nobody answered, if that was the last thing we heard
        self._clean_until: float | None = None
        # The heartbeat's reader and the training loop may both find that the session is gone.
        self._reattaching = threading.Lock()
        self._ending = False
        #: its registration was interrupted, and may have been heard
        self._may_be_registered = False

    # ---- begin and end ----

    def start(self) -> Flow[JobView]:
        """Register, and open the session.

        Raises :class:`JobAlive` when another process runs the job, :class:`Unprocessable` for what can never be met,
        :class:`GaveUp` when nobody answers for two minutes (or ROLLMUX_GIVE_UP_S).
        """
        patience_s = START_PATIENCE_S if self._patience_s is None else self._patience_s
        tries: list[RollmuxError | None] = []
        try:
            view = yield from self._persist(calls.register(self.body), patience_s, outcomes=tries)
        except RollmuxError:
            raise
        except BaseException:
            self._may_be_registered = any(getattr(error, "heard", True) for error in tries)
            if tries != [None]:  # a daemon in trouble, of which no answer is waited for again
                self.hurry()
            raise
        self.job, self.run, self.journal = view.job, view.run, view.journal
        if view.status in _OVER:
            raise JobEnded(f"run {view.run} of job {self.name} is {view.status}{_because(view.reason)}")
        body = this_process(self.body.idempotency_key)
        session = yield from self._persist(calls.open_session(self.job, body), patience_s)
        self.session = session.session
        self.on_session(session)
        if view.slot is not None:
            yield from self._end_former(view.slot, patience_s)
        if view.waiting is not None:
            reasons = "; ".join(reason.text for reason in view.waiting.reasons) or "no reason given"
            cures = " or ".join(view.waiting.would_start_with)
            hint = f"; would start now with {cures}" if cures else ""
            self._tell(
                f"{self.name} (run {view.run}) waits for a place, number {view.waiting.position}: {reasons}{hint}"
            )
        return view

    def _end_former(self, slot: str, patience_s: float | None) -> Flow[None]:
        # This run held or awaited a slot before its process was started anew. Whatever the former process had on the
        # GPUs is gone with it, so its phase is over; the daemon looks for itself whether they are clear.
        try:
            view = yield from self._persist(calls.slot(slot), patience_s)
            while view.status == "loading":  # not to be left alone: once it is loaded, nobody else would release it
                yield Pause(0.2)
                view = yield from self._persist(calls.slot(slot), patience_s)
            if view.status in _RUNNING and view.fence is not None:
                yield from self._persist(calls.release(slot, ReleaseBody(fence=view.fence)), patience_s)
                self._tell(f"{self.name} released slot {slot} ({view.phase}), which the process before this one held")
            elif view.status == "queued":
                yield from self._persist(calls.withdraw(slot, self.session), patience_s)
        except Refused as error:
            self._tell(f"{self.name}: slot {slot} of the process before this one stays: {error}")

    def end(self, reason: str, *, keep: bool) -> Flow[bool]:
        """End the job, or (``keep``) only this process's part in it. Never raises a RollmuxError: the work is done.

        Returns whether the daemon has taken it.
        """
        if (keep and not self.session) or not (self.job or self._may_be_registered):
            return False
        taken, self._ending = False, True
        now = self._clock()
        until = now + CLEAN_UP_S
        if self._clean_until is not None and now - self._clean_until < CLEAN_UP_S:  # else it says nothing any more
            until = max(self._clean_until, now + LAST_CALL_S)
        try:
            if not self.job:  # asked again under the same key it is that run, in nobody's place
                body = structs.replace(self.body, replace=False)
                view = yield from self._persist(calls.register(body), None, until)
                self.job, self.run, self.journal = view.job, view.run, view.journal
            call: Call[Any] = calls.close_session(self.session)
            if not keep:  # a newer run may have taken its place; before there is a session, its number alone tells
                call = calls.end_job(self.job, reason, self.session, self.run)
            yield from self._persist(call, None, until)
            taken = True
        except (NotFound, Conflict):
            pass  # over already, which is what we want
        except RollmuxError as error:
            self._tell(f"{self.name}: could not tell the daemon that the job is over: {error}")
        self.job = self.session = ""
        return taken

    # ---- slots ----

    def enter(self, phase: str) -> Flow[Held]:
        """Wait for the job's turn, without limit; also while the job is quarantined, for somebody to reinstate it.

        A slot that was lost or revoked before we heard of it is asked for anew: nothing has run in it. Raises
        :class:`JobEnded`, :class:`SlotFaulted` (its state could not be loaded), :class:`SlotLost` (it has ended in
        another way before it began), :class:`GaveUp`.
        """
        request = yield from self._request_for(phase)
        try:
            view = yield from self._granted(request)
        except GeneratorExit:  # it is remembered
            raise
        except BaseException as error:
            if isinstance(error, JobEnded | SlotFaulted | SlotLost):
                self._pending = None
            else:
                yield from self._clean_up()
            raise
        assert view.fence is not None
        held = Held(view.slot, phase, request.id, view.fence, tuple(view.gpus), self.session)
        self.held, self._pending = held, None
        return held

    def _request_for(self, phase: str) -> Flow[Request]:
        if self.ended:
            raise JobEnded(self.ended)
        self._clean_until = None
        yield from self._let_go(self._patience_s)
        # Nothing else is asked for before that is settled: a slot that it may have got would be in our own way.
        if self._pending is not None and self._pending.phase != phase:
            yield from self._take_back(self._patience_s)
        if self._pending is None:
            self._pending = Request(phase, new_id())
        return self._pending

    def _granted(self, request: Request) -> Flow[SlotView]:
        began = self._clock()
        said: float | None = None
        refusals = early = anew = quarantined = 0
        quarantine_said: float | None = None
        wait_s = QUIET_S
        while True:
            view = request.view
            if view is not None and view.status in _RUNNING and view.fence is not None:
                if said is not None:
                    self._tell(f"{self.name} has {request.phase}, after {duration(self._clock() - began)}")
                return view
            ours = view is not None and view.status == "released" and request.back
            if view is not None and (ours or view.status in {"withdrawn", "lost", "revoked"}):
                # Dropped while we were away for longer than the re-attach time, or taken away before we heard that it
                # was ours, or given back by us. Nothing of ours has run there, so: ask anew. (What is left of it, the
                # daemon looks after.)
                if view.status not in {"withdrawn", "released"}:
                    how = f"{view.status} before {request.phase} began{_because(view.reason)}"
                    self._tell(f"{self.name}: slot {view.slot} was {how}; asking again")
                request.id, request.view, request.back = new_id(), None, False
                yield Pause(min(1.0, 0.05 * 2.0 ** min(anew, 8)))
                anew += 1
            elif view is not None and view.status not in _COMING:
                raise self._never_ran(request.phase, view)
            if view is not None and view.status in _COMING:
                now = self._clock()
                if now - began >= QUIET_S if said is None else now - said >= SAY_EVERY_S:
                    said = now
                    self._tell(self._waits(request.phase, view, now - began))
            asked, session = self._clock(), self.session
            body = SlotBody(phase=request.phase, request_id=request.id, session=session, wait_s=wait_s)
            try:
                request.view = yield from self._persist(calls.request_slot(self.job, body), self._patience_s)
            except (NotFound, Conflict) as error:
                request.view = _ended(error, request)
                if request.view is not None:
                    continue
                refusals += 1
                if refusals > 3:  # re-opened, and refused all the same: not the session's fault
                    raise
                job = yield from self._recover(error, session)
                if job is not None:
                    refusals, now = 0, self._clock()
                    if quarantine_said is None or now - quarantine_said >= SAY_EVERY_S:
                        said = quarantine_said = now
                        self._tell(self._waits_for_reinstatement(request.phase, job.reason, now - began))
                    yield Pause(min(REINSTATED_S, 0.5 * 1.5 ** min(quarantined, 16)))
                    quarantined += 1
                continue
            if request.view.status not in _RUNNING and self._clock() - asked < wait_s / 2:
                # It did not block for as long as we allowed (shutting down, paused, a proxy): do not spin.
                yield Pause(min(1.0, 0.05 * 2.0 ** min(early, 8)))
                early += 1
            # Back in time for the next line.
            line_at = began + QUIET_S if said is None else said + SAY_EVERY_S
            wait_s = min(WAIT_S, max(SHORTEST_WAIT_S, line_at - self._clock()))

    def _waits_for_reinstatement(self, phase: str, reason: str, waited_s: float) -> str:
        so_far = f" (for {duration(waited_s)} now)" if waited_s >= SAY_EVERY_S / 2 else ""
        cure = f"`rollmuxd job reinstate {self.name}` lets it go on"
        return f"{self.name} waits for {phase}{so_far}: quarantined: {reason or 'no reason given'}; {cure}"

    def _waits(self, phase: str, view: SlotView, waited_s: float) -> str:
        parts = []
        if view.status == "loading":
            parts.append("its state is being loaded")
        elif view.position is not None:
            parts.append("it is next" if view.position == 0 else f"{view.position} before it")
        if view.expected_wait_s is not None:
            parts.append(f"about {duration(view.expected_wait_s)}")
        reason = view.reason or "; ".join(reason.text for reason in view.reasons[:3])
        if reason:
            parts.append(reason)
        so_far = f"for {duration(waited_s)} now"
        return f"{self.name} waits for {phase} ({so_far}): {', '.join(parts) or 'no reason given'}"

    def _never_ran(self, phase: str, view: SlotView) -> RollmuxError:
        if view.status == "faulted" or (view.status in {"reclaiming", "over"} and view.granted_at is None):
            text = f"{self.name}: the state for {phase} could not be loaded{_because(view.reason)}"
            return SlotFaulted(text, slot=view.slot, phase=phase, reason=view.reason)
        text = f"{self.name}: slot {view.slot} ({phase}) was {view.status} before it began{_because(view.reason)}"
        return SlotLost(text, slot=view.slot, phase=phase, reason=view.reason)

    def leave(
        self,
        held: Held,
        *,
        measured: dict[str, float],
        then: str | None,
        failing: bool,
        until: float | None = None,
    ) -> Flow[ReleaseView]:
        """Release the slot, and ask for ``then`` in the same call.

        Raises :class:`SlotLost` when it was ours no more, :class:`GaveUp` (a failing program waits for a minute only;
        one that was interrupted ``until`` its clean-up is over, of which this is a part; see :meth:`clean_up_ends`).
        """
        carried = Request(then, new_id()) if then is not None and not failing else None
        limit = self._clock() + FAILING_PATIENCE_S if failing and until is None else until
        self._left = Left(held, measured, carried)
        self._clean_until = until
        try:
            view = yield from self._release(held, measured, carried, self._patience_s, limit)
        except GeneratorExit:
            raise
        except RollmuxError as error:
            if isinstance(error, Refused | SlotLost):
                self._left = self._clean_until = None
            raise
        except BaseException:
            if until is None:
                yield from self._clean_up()
            raise
        finally:
            self.held = None
        self._clean_until = None
        self._released(view)
        return view

    def clean_up_ends(self) -> float:
        """When a clean-up is over that begins now, by our clock."""
        return self._clock() + CLEAN_UP_S

    def leave_later(self, held: Held, measured: dict[str, float]) -> None:
        """Release the slot before the next request: its phase was left, and nobody came to :meth:`leave`."""
        if self.held is held:
            self.held, self._left = None, Left(held, measured, None)

    def hurry(self) -> None:
        """The clean-up was interrupted in its turn: nothing is left of its seconds."""
        self._clean_until = self._clock()

    def _released(self, view: ReleaseView) -> None:
        left, self._left = self._left, None
        if left is not None and left.carried is not None and view.next is not None:
            left.carried.view = view.next
            self._pending = left.carried

    def _clean_up(self) -> Flow[None]:
        """A wait or a release was interrupted: give back and take back, within seconds, what there may be of ours."""
        until = self._clean_until = self.clean_up_ends()
        try:
            yield from self._let_go(None, until)
            yield from self._take_back(None, until)
            self._clean_until = None
        except RollmuxError:
            pass  # it is remembered
        except BaseException:
            self.hurry()
            raise

    def _let_go(self, patience_s: float | None, until: float | None = None) -> Flow[None]:
        """Give back a slot of which the release was interrupted. If that was heard, the answer is what it was then."""
        left = self._left
        if left is None:
            return
        try:
            view = yield from self._release(left.held, left.measured, None, patience_s, until)
        except SlotLost:
            self._left = None
        else:
            self._released(view)

    def _release(
        self,
        held: Held,
        measured: dict[str, float],
        carried: Request | None,
        patience_s: float | None,
        until: float | None = None,
    ) -> Flow[ReleaseView]:
        following = NextBody(carried.phase, carried.id) if carried is not None else None
        while True:
            body = ReleaseBody(fence=held.fence, next=following, measured=measured)
            try:
                view: ReleaseView = yield from self._persist(calls.release(held.slot, body), patience_s, until)
            except Unprocessable:
                if not measured and following is None:
                    raise
                # Never keep GPUs because of a figure or a wish that is refused.
                measured, following = {}, None
            except (Conflict, NotFound) as error:
                if not (yield from self._newer_fence(held, patience_s, until)):
                    held.lost = True
                    text = f"{self.name}: slot {held.slot} was lost while {held.phase} ran: {error.detail}"
                    raise SlotLost(text, slot=held.slot, phase=held.phase, reason=error.detail) from error
            else:
                held.released = True
                return view

    def _newer_fence(self, held: Held, patience_s: float | None, until: float | None) -> Flow[bool]:
        # If our session was opened anew since the grant, the slot went over to it, under a newer fence.
        session = self.session
        if held.session == session:
            return False
        body = SlotBody(phase=held.phase, request_id=held.request_id, session=session)
        try:
            view = yield from self._persist(calls.request_slot(self.job, body), patience_s, until)
        except Refused:
            return False
        held.session = session
        if view.slot != held.slot:  # the daemon has forgotten ours, and took that for a new request
            self._pending = Request(held.phase, held.request_id)
            return False
        if view.fence is None or view.status not in _RUNNING:
            return False
        held.fence = view.fence
        return True

    def shrink(self, held: Held, keep: Sequence[str]) -> Flow[None]:
        """Say that all GPUs but ``keep`` were given back. Raises :class:`Refused` when that is not possible."""
        body = ShrinkBody(fence=held.fence, keep=list(keep))
        view = yield from self._persist(calls.shrink(held.slot, body), self._patience_s)
        held.gpus = tuple(view.gpus)
        held.directive = None

    def grow(self, held: Held) -> Flow[None]:
        """Take back the GPUs that were offered. Raises :class:`Refused` when somebody else has them by now."""
        view = yield from self._persist(calls.grow(held.slot, GrowBody(fence=held.fence)), self._patience_s)
        held.gpus = tuple(view.gpus)
        held.directive = None

    def _take_back(self, patience_s: float | None, until: float | None = None) -> Flow[None]:
        """Make sure that the pending request holds nothing, whatever became of it. Until then it stays pending."""
        request = self._pending
        if request is not None:
            request.view, request.back = None, True
            yield from self._taken_back(request, patience_s, until)
            self._pending = None

    def _taken_back(self, request: Request, patience_s: float | None, until: float | None) -> Flow[None]:
        said, refusals = False, 0
        while refusals <= 3:  # refused all the same: nothing that we could do would change it
            session = self.session
            body = SlotBody(phase=request.phase, request_id=request.id, session=session, wait_s=0)
            try:
                # Asking again tells the slot, and its fence if it was granted meanwhile.
                view = yield from self._persist(calls.request_slot(self.job, body), patience_s, until)
            except Unprocessable:
                return  # it was never taken
            except (NotFound, Conflict) as error:
                if _ended(error, request) is not None:
                    return
                if until is not None:
                    raise  # seconds are not enough to find out why
                refusals += 1
                try:
                    quarantined = yield from self._recover(error, session)
                except Conflict:
                    return  # it was never taken, and is not to be
                if quarantined is not None:
                    return
                continue
            try:
                if view.status in _RUNNING and view.fence is not None:
                    yield from self._persist(calls.release(view.slot, ReleaseBody(fence=view.fence)), patience_s, until)
                elif view.status == "queued":
                    yield from self._persist(calls.withdraw(view.slot, session), patience_s, until)
            except (NotFound, Conflict):
                refusals += 1  # its turn came in between, or its end
                continue
            if view.status != "loading":
                return
            if not said and until is None:
                said = True
                self._tell(f"{self.name} gives {request.phase} back first, of which the state is being loaded")
            yield Pause(0.2 if until is not None else 1.0)

    # ---- sessions ----

    def beat_refused(self, session: str, status: int, detail: str) -> Flow[None]:
        """The daemon does not know our session any more: find out why, and open a new one if that can help.

        May run beside the other flows, in another thread. Raises :class:`JobEnded` when the job is over.
        """
        error = refused(status, detail or f"there is no session {session}")
        try:
            quarantined = yield from self._recover(error, session)
        except GaveUp:
            if self._ending:
                return
            raise
        if quarantined is not None:
            raise error

    def _recover(self, error: Refused, session: str) -> Flow[JobView | None]:
        """Find out why we were refused, and do something about it. A job that is quarantined is returned."""
        if self.session != session:
            return None  # somebody else has recovered: try again
        try:
            view = yield from self._persist(calls.job(self.job), self._patience_s)
        except NotFound as gone:
            why = "its journal was restored to what it was before that job, or it ended long ago; start it again"
            why = gone.detail if gone.status == 410 else why  # it has another journal
            raise self._over(f"the daemon knows job {self.name} no more: {why}") from gone
        if self.session != session or self._ending:
            return None  # somebody else has recovered meanwhile, or it is we who end it
        if view.status in _OVER:
            raise self._over(f"job {self.name} (run {view.run}) is {view.status}{_because(view.reason)}")
        if isinstance(error, NotFound):
            yield from self._reattach(session)
        elif view.session is not None and view.session != session:
            raise self._over(
                f"another process has taken over run {view.run} of job {self.name}: session {view.session}"
            )
        elif view.status == "quarantined":
            return view
        elif isinstance(error, Conflict) and error.data.get("status") == "quarantined":
            return None  # it was, and has been reinstated since
        else:
            raise error
        return None

    def _reattach(self, session: str) -> Flow[None]:
        while not self._reattaching.acquire(blocking=False):
            yield Pause(0.1)
        try:
            if self.session != session:
                return
            body = this_process(self.body.idempotency_key)
            try:
                view = yield from self._persist(calls.open_session(self.job, body), self._patience_s)
            except (NotFound, Conflict) as error:
                raise self._over(f"job {self.name} can not be joined again: {error.detail}") from error
            self.session = view.session
            self.on_session(view)
        finally:
            self._reattaching.release()

    def _over(self, why: str) -> JobEnded:
        self.ended = why
        if self.held is not None:
            self.held.lost = True
        return JobEnded(why)

    def _persist(
        self,
        call: Call[T],
        patience_s: float | None,
        until: float | None = None,
        outcomes: list[RollmuxError | None] | None = None,
    ) -> Flow[T]:
        def unwanted() -> bool:
            return self._ending and until is None  # it is not the end itself that asks

        call = structs.replace(call, journal=self.journal)
        if until is not None:
            call_s = max(CLEAN_UP_CALL_S, (until - self._clock()) / 2)
            call = structs.replace(call, timeout_s=min(call.timeout_s, call_s))
        return persist(
            call,
            patience_s=patience_s,
            until=until,
            unless=unwanted,
            outcomes=outcomes,
            clock=self._clock,
            tell=self._tell,
        )


def _ended(error: Refused, request: Request) -> SlotView | None:
    """Return the slot that a refusal speaks of: so is a request answered whose slot has ended (``slot_ended``)."""
    slot, status, granted_at = (error.data.get(key) for key in ("slot", "status", "granted_at"))
    if not isinstance(slot, str) or not isinstance(status, str):
        return None
    return SlotView(
        slot,
        "",
        request.phase,
        # ``status`` says how it ended only until it is reclaimed
        str(error.data.get("ended") or status),
        request.id,
        reason=str(error.data.get("reason", "")),
        granted_at=granted_at if isinstance(granted_at, str) else None,
    )


def _because(reason: str) -> str:
    return f" ({reason})" if reason else ""
