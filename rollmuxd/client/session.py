"""One run's conversation with the daemon, as flows: register, ask for slots, release them, leave.

What may be relied on:

- Nothing is asked for twice: each registration, request and release carries what makes its repetition harmless.
- No request and no slot is left behind. If a wait or a release is interrupted (Ctrl-C, a cancelled task), the daemon
  takes back what the session holds or waits for. That is done at once. If it takes longer than seconds, or is
  interrupted too, it is done before the next request.
- A daemon that is away stops nothing: what is held stays held, and calls are repeated until it is back.
- A slot that was lost is reported when its phase is left, from the daemon's answer to the release: it alone knows.
"""

import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
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
#: seconds between two summaries of waits, and the share of that time from which there is something to say
SUMMARY_S = 300.0
SUMMARY_SHARE = 0.05
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
#: the report that the job is over, if the daemon did not answer the whole clean-up before, or the user interrupted it
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


class Held:
    """A slot of ours."""

    def __init__(self, id: str, phase: str, fence: str | None, gpus: Sequence[str]) -> None:
        #: the slot's id; empty without a daemon
        self.id = id
        self.phase = phase
        #: the fencing number, to be checked by whatever the phase writes to; None without a daemon
        self.fence = fence
        #: the GPUs, as ``host1/gpu0``
        self.gpus = tuple(gpus)
        #: what the daemon asks now, if anything: ``shrink`` (to ``keep``), or ``stop`` (the slot is lost). Or it
        #: offers: ``grow`` (to ``gpus``). Or it tells: ``move`` (the next iteration is on ``gpus``)
        self.directive: Directive | None = None
        #: of a filler: when it is to have left, on the monotonic clock; None: it was not asked to
        self.yield_by: float | None = None
        #: known to be lost; the phase may as well end. (False does not prove that it is still ours.)
        self.lost = False


def new_id() -> str:
    """Return a new random id."""
    return os.urandom(16).hex()


def own_start() -> str:
    """When this process was started, in the system's words: it tells it from a later process with its pid."""
    try:
        # The name (field 2) is in brackets and may hold anything; field 22 is the 20th after it.
        return Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):  # no /proc on this system
        return ""


def this_process(idempotency_key: str) -> SessionBody:
    """Say which process this is."""
    return SessionBody(
        idempotency_key=idempotency_key, pid=os.getpid(), host=socket.gethostname()[:255], started=own_start()
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
        make_slot: Callable[[str, str, str | None, Sequence[str]], Held] = Held,
    ) -> None:
        self.body = body
        self.name = body.name
        self.job = ""
        self.run = 0
        self.session = ""
        #: the daemon's journal, in which these ids were given
        self.journal = ""
        self.held: Held | None = None
        #: when the first of the job's nodes goes away, in seconds since 1970; None: not at a known time
        self.ends_at: float | None = None
        #: why the daemon gives this job no further slots
        self.ended = ""
        #: called with each new session
        self.on_session: Callable[[SessionView], None] = lambda view: None
        self._patience_s = patience_s
        self._clock = clock
        self._tell = tell
        self._make_slot = make_slot
        #: what the last release asked for
        self._next: Request | None = None
        #: a call was interrupted: the session may hold or wait for something that no phase is in
        self._unsettled = False
        self._ending = False
        #: seconds and number of the waits for each phase, since a moment
        self._waited: dict[str, list[float]] = {}
        self._summed_from = clock()

    # ---- begin and end ----

    def start(self) -> Flow[JobView]:
        """Register, and open the session.

        Raises :class:`JobAlive` when another process runs the job, and :class:`Unprocessable` for what can never be
        met. Raises :class:`GaveUp` when no answer comes for two minutes (or ROLLMUX_GIVE_UP_S).
        """
        patience_s = START_PATIENCE_S if self._patience_s is None else self._patience_s
        view = yield from self._persist(calls.register(self.body), patience_s)
        self.job, self.run, self.journal = view.job, view.run, view.journal
        if view.status in _OVER:
            raise JobEnded(f"run {view.run} of job {self.name} is {view.status}{_because(view.reason)}")
        body = this_process(self.body.idempotency_key)
        session = yield from self._persist(calls.open_session(self.job, body), patience_s)
        self.session = session.session
        self.on_session(session)
        if view.waiting is not None:
            reasons = "; ".join(reason.text for reason in view.waiting.reasons) or "no reason given"
            cures = " or ".join(view.waiting.would_start_with)
            hint = f"; would start now with {cures}" if cures else ""
            self._tell(
                f"{self.name} (run {view.run}) waits for a place, number {view.waiting.position}: {reasons}{hint}"
            )
        return view

    def end(self, reason: str, *, keep: bool, finished: bool = False) -> Flow[bool]:
        """End the job, or (``keep``) only this process's part in it. Never raises a RollmuxError: the work is done.

        Returns whether the daemon has taken it.
        """
        if not self.job or (keep and not self.session):
            return False
        taken, self._ending = False, True
        until = self._clock() + (LAST_CALL_S if self._unsettled else CLEAN_UP_S)
        try:
            call: Call[Any] = calls.close_session(self.session)
            if not keep:  # a newer run may have taken its place; before there is a session, its number alone tells
                call = calls.end_job(self.job, reason, self.session, self.run, finished=finished)
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
        """Wait for the job's turn, without limit; also while the job is quarantined, until it is reinstated.

        A slot that was lost or revoked before we heard of it is requested again: nothing has run in it. Raises
        :class:`JobEnded`, :class:`SlotFaulted` (its state could not be loaded), :class:`SlotLost` (it has ended in
        another way before it began), :class:`GaveUp`.
        """
        if self.ended:
            raise JobEnded(self.ended)
        request, self._next = self._next, None
        self._unsettled = self._unsettled or (request is not None and request.phase != phase)
        if self._unsettled:
            yield from self._give_back(self._patience_s)
            request = None
        self._unsettled = True  # until we know what it comes to
        try:
            view = yield from self._granted(request or Request(phase, new_id()))
        except GeneratorExit:  # it is remembered
            raise
        except BaseException as error:
            if isinstance(error, JobEnded | SlotFaulted | SlotLost):
                self._unsettled = False
            else:
                yield from self._give_back_soon()
            raise
        assert view.fence is not None
        self.held, self._unsettled = self._make_slot(view.slot, phase, view.fence, view.gpus), False
        return self.held

    def _granted(self, request: Request) -> Flow[SlotView]:
        began = self._clock()
        said: float | None = None
        refusals = early = anew = quarantined = 0
        quarantine_said: float | None = None
        wait_s = QUIET_S
        while True:
            view = request.view
            if view is not None and view.status in _RUNNING and view.fence is not None:
                now = self._clock()
                if said is not None:
                    self._tell(f"{self.name} has {request.phase}, after {duration(now - began)}")
                self._sum_up(request.phase, now - began, now)
                return view
            if view is not None and view.status in {"withdrawn", "lost", "revoked"}:
                # Dropped while we were away for longer than the re-attach time, or taken away before we heard that it
                # was ours. Nothing of ours has run there, so: ask again. (What is left of it, the daemon looks after.)
                if view.status != "withdrawn":
                    how = f"{view.status} before {request.phase} began{_because(view.reason)}"
                    self._tell(f"{self.name}: slot {view.slot} was {how}; asking again")
                request.id, request.view = new_id(), None
                yield Pause(min(1.0, 0.05 * 2.0 ** min(anew, 8)))
                anew += 1
            elif view is not None and view.status not in _COMING:
                raise self._never_ran(request.phase, view)
            if view is not None and view.status in _COMING:
                now = self._clock()
                if now - began >= QUIET_S if said is None else now - said >= SAY_EVERY_S:
                    said = now
                    self._tell(self._waits(request.phase, view, now - began))
            asked = self._clock()
            body = SlotBody(phase=request.phase, request_id=request.id, session=self.session, wait_s=wait_s)
            try:
                request.view = yield from self._persist(calls.request_slot(self.job, body), self._patience_s)
            except (NotFound, Conflict) as error:
                request.view = _ended(error, request)
                if request.view is not None:
                    continue
                refusals += 1
                if refusals > 3:
                    raise
                job = yield from self._live(error)
                if job.status == "quarantined":
                    refusals, now = 0, self._clock()
                    if quarantine_said is None or now - quarantine_said >= SAY_EVERY_S:
                        said = quarantine_said = now
                        self._tell(self._waits_for_reinstatement(request.phase, job.reason, now - began))
                    yield Pause(min(REINSTATED_S, 0.5 * 1.5 ** min(quarantined, 16)))
                    quarantined += 1
                elif job.slot is not None:  # a call that was interrupted has come after all
                    yield from self._give_back(self._patience_s)
                elif error.data.get("status") != "quarantined":  # else it has been reinstated since
                    raise
                continue
            if request.view.status not in _RUNNING and self._clock() - asked < wait_s / 2:
                # It did not block for as long as we allowed (shutting down, paused, a proxy): do not spin.
                yield Pause(min(1.0, 0.05 * 2.0 ** min(early, 8)))
                early += 1
            # Back in time for the next line.
            line_at = began + QUIET_S if said is None else said + SAY_EVERY_S
            wait_s = min(WAIT_S, max(SHORTEST_WAIT_S, line_at - self._clock()))

    def _sum_up(self, phase: str, waited_s: float, now: float) -> None:
        """Count a wait, and say every few minutes what all of them took: short ones are said in no other way."""
        waits = self._waited.setdefault(phase, [0.0, 0.0])
        waits[0] += waited_s
        waits[1] += 1
        span = now - self._summed_from
        if span < SUMMARY_S:
            return
        total = sum(seconds for seconds, _ in self._waited.values())
        if total >= SUMMARY_SHARE * span:
            each = (f"{duration(seconds)} for {count:.0f} {name}" for name, (seconds, count) in self._waited.items())
            self._tell(f"{self.name} waited {duration(total)} of the last {duration(span)}: {', '.join(each)}")
        self._waited, self._summed_from = {}, now

    def _waits_for_reinstatement(self, phase: str, reason: str, waited_s: float) -> str:
        so_far = f" (for {duration(waited_s)} now)" if waited_s >= SAY_EVERY_S / 2 else ""
        cure = f"`rollmuxd job reinstate {self.name}` lets it continue"
        return f"{self.name} waits for {phase}{so_far}: quarantined: {reason or 'no reason given'}; {cure}"

    def _waits(self, phase: str, view: SlotView, waited_s: float) -> str:
        parts = []
        if view.status == "loading":
            parts.append("its state is being loaded")
        elif view.position is not None:
            parts.append("it is next" if view.position == 0 else f"{view.position} before it")
        if view.expected_wait_s is not None and view.expected_wait_s >= 1:  # less: what holds its GPUs is late
            parts.append(f"about {duration(view.expected_wait_s)}")
        reason = view.reason or "; ".join(reason.text for reason in view.reasons[:3])
        if reason:
            parts.append(reason)
        so_far = f"for {duration(waited_s)} now"
        return f"{self.name} waits for {phase} ({so_far}): {', '.join(parts) or 'no reason given'}"

    def _never_ran(self, phase: str, view: SlotView) -> RollmuxError:
        if view.status == "faulted" or (view.status == "over" and view.granted_at is None):
            text = f"{self.name}: the state for {phase} could not be loaded{_because(view.reason)}"
            return SlotFaulted(text, slot=view.slot, phase=phase, reason=view.reason)
        text = f"{self.name}: slot {view.slot} ({phase}) was {view.status} before it began{_because(view.reason)}"
        if view.status == "released":  # by this session: another request of it
            text += "; a job holds one slot at a time: enter its phases one after the other, from one thread or task"
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

        Raises :class:`SlotLost` when the slot was lost, and :class:`GaveUp`. A failing program waits for a minute only;
        an interrupted one ``until`` its clean-up is over, which includes this (see :meth:`clean_up_ends`).
        """
        following = NextBody(then, new_id()) if then is not None and not failing else None
        limit = self._clock() + FAILING_PATIENCE_S if failing and until is None else until
        self._unsettled = True
        try:
            view = yield from self._release(held, measured, following, limit)
        except (Refused, SlotLost):
            self._unsettled = False
            raise
        except (GeneratorExit, RollmuxError):
            raise
        except BaseException:
            if until is None:
                yield from self._give_back_soon()
            raise
        finally:
            self.held = None
        self._unsettled = False
        if following is not None and view.next is not None:
            # A release that is repeated after a restart may speak of a slot that has ended: the request says how.
            coming = view.next if view.next.status in _RUNNING | _COMING else None
            self._next = Request(following.phase, following.request_id, coming)
        return view

    def clean_up_ends(self) -> float:
        """When a clean-up is over that begins now, by our clock."""
        return self._clock() + CLEAN_UP_S

    def leave_later(self, held: Held) -> None:
        """Give the slot back before the next request: its phase was left, and :meth:`leave` was not called."""
        if self.held is held:
            self.held, self._unsettled = None, True

    def _give_back(self, patience_s: float | None, until: float | None = None) -> Flow[None]:
        """Make sure that the session holds nothing and waits for nothing, whatever was heard of what we asked."""
        with suppress(NotFound, Conflict):  # it is over, and all that it had; the next request will hear why
            yield from self._persist(calls.give_back(self.session), patience_s, until)
        self._unsettled = False

    def _give_back_soon(self) -> Flow[None]:
        """A wait or a release was interrupted: the same within seconds, or before the next request."""
        self._unsettled = True
        with suppress(RollmuxError):  # it is remembered
            yield from self._give_back(None, self.clean_up_ends())

    def _release(
        self, held: Held, measured: dict[str, float], following: NextBody | None, until: float | None
    ) -> Flow[ReleaseView]:
        while True:
            body = ReleaseBody(fence=held.fence or "", next=following, measured=measured)
            try:
                view: ReleaseView = yield from self._persist(calls.release(held.id, body), self._patience_s, until)
            except Unprocessable:
                if not measured and following is None:
                    raise
                # Never keep GPUs because of a figure or a wish that is refused.
                measured, following = {}, None
            except (Conflict, NotFound) as error:
                held.lost = True
                if error.status == 409 and until is None:
                    with suppress(RollmuxError):  # perhaps the job is over, too
                        yield from self._live(error)
                why = self.ended or error.detail
                if error.status == 404:
                    why = (
                        "the daemon does not know it: its journal was damaged or restored, or the slot was lost long "
                        "ago; other jobs may have used its GPUs: start the job again from its last checkpoint"
                    )
                text = f"{self.name}: slot {held.id} was lost while {held.phase} ran: {why}"
                raise SlotLost(text, slot=held.id, phase=held.phase, reason=error.detail) from error
            else:
                return view

    def resize(self, held: Held, keep: Sequence[str] | None) -> Flow[None]:
        """Say that all GPUs but ``keep`` were given back; None: take back those that were offered.

        Raises :class:`Refused` when that is not possible: another job may have them by now.
        """
        call = calls.grow(held.id, GrowBody(fence=held.fence or ""))
        if keep is not None:
            call = calls.shrink(held.id, ShrinkBody(fence=held.fence or "", keep=list(keep)))
        view = yield from self._persist(call, self._patience_s)
        held.gpus, held.directive = tuple(view.gpus), None

    # ---- sessions ----

    def beat_refused(self, status: int, detail: str) -> Flow[None]:
        """The heartbeat of our session is refused: find out why.

        May run beside the other flows, in another thread. Raises :class:`JobEnded` when the job is over, and what was
        refused where that says nothing.
        """
        if not self.job:  # its end was answered before this was heard
            return
        error = refused(status, detail or f"there is no session {self.session}")
        try:
            yield from self._live(error)
        except GaveUp:
            if self._ending:
                return
            raise
        if not self._ending:
            raise error

    def _live(self, error: Refused) -> Flow[JobView]:
        """Return the job of which something was refused. Raises :class:`JobEnded` where it is not ours any more."""
        try:
            view = yield from self._persist(calls.job(self.job), self._patience_s)
        except NotFound as gone:
            why = "its journal was restored to what it was before that job, or it ended long ago; start it again"
            why = gone.detail if gone.status == 410 else why  # it has another journal
            raise self._over(f"the daemon no longer knows job {self.name}: {why}") from gone
        if self._ending:
            return view
        if view.status in _OVER:
            why = _because("" if view.reason == view.status else view.reason)
            how = f"{view.status}{why}; to continue, start it again from its last checkpoint"
            raise self._over(f"job {self.name} (run {view.run}) is {how}")
        if view.session is not None and view.session != self.session:
            raise self._over(
                f"another process has taken over run {view.run} of job {self.name}: session {view.session}"
            ) from error
        return view

    def _over(self, why: str) -> JobEnded:
        self.ended = why
        if self.held is not None:
            self.held.lost = True
        return JobEnded(why)

    def _persist(self, call: Call[T], patience_s: float | None, until: float | None = None) -> Flow[T]:
        def unwanted() -> bool:
            return self._ending and until is None  # it is not the end itself that asks

        call = structs.replace(call, journal=self.journal)
        if until is not None:
            call_s = max(CLEAN_UP_CALL_S, (until - self._clock()) / 2)
            call = structs.replace(call, timeout_s=min(call.timeout_s, call_s))
        return persist(call, patience_s=patience_s, until=until, unless=unwanted, clock=self._clock, tell=self._tell)


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
