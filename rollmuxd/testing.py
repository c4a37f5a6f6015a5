"""For the tests of users: training loops that use ``rollmuxd``, without a daemon and without waiting.

    def test_the_loop_survives_a_lost_slot():
        with rollmuxd.testing.fake_daemon() as daemon:
            daemon.lose("rollout", after=2)
            train(steps=5)
        assert daemon.phases == ["rollout", "train", ...]

While the context is open, every ``rollmuxd.job`` of the process talks to the fake. Slots are granted at once, no
heartbeat process is started, and pauses between tries are a hundred times shorter. The fake knows one job at a time per
name and no scheduling. It answers like a daemon that serves no other job, unless you make it do otherwise.
"""

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec

from rollmuxd.client import fakes
from rollmuxd.client.errors import Unreachable
from rollmuxd.client.heartbeat import HeartbeatProcess
from rollmuxd.client.runtime import HeartbeatListener
from rollmuxd.wire.answers import (
    ChannelOrder,
    ChannelView,
    Directive,
    HeartbeatView,
    JobView,
    Problem,
    RegisteredView,
    ReleaseView,
    SessionView,
    SlotView,
)
from rollmuxd.wire.requests import (
    EndBody,
    GrowBody,
    HeartbeatBody,
    RegisterBody,
    ReleaseBody,
    ResultBody,
    SessionBody,
    ShrinkBody,
    SlotBody,
)

__all__ = ["Asked", "FakeDaemon", "fake_daemon"]


class Asked(NamedTuple):
    """A call that came in."""

    method: str
    path: str
    #: the decoded JSON
    body: Any


class _No(Exception):
    def __init__(self, status: int, detail: str, /, **data: Any) -> None:
        super().__init__(detail)
        self.code = status
        self.detail = detail
        self.data = data


class _Slot(msgspec.Struct):
    id: str
    job: str
    phase: str
    request_id: str
    status: str
    fence: str
    gpus: list[str]
    reason: str = ""
    #: answer of its release, for a repeat
    released: ReleaseView | None = None


class FakeDaemon:
    """Plays the daemon. What came in is in ``calls``; the methods below script what goes out.

    ``gpus`` is how many GPUs each node has that a phase is given. May be used from several threads.
    """

    haste = 0.01

    def __init__(self, gpus: int = 2) -> None:
        self.gpus = gpus
        #: every call, in order
        self.calls: list[Asked] = []
        #: the phases that ran, in order of their grants
        self.phases: list[str] = []
        #: phase and figures of each release that carried any
        self.measured: list[tuple[str, dict[str, float]]] = []
        #: phase, done and total as reported
        self.progress: list[tuple[str, int, int]] = []
        #: reasons that jobs were ended with, by name
        self.ended: dict[str, str] = {}
        self.registered: list[RegisterBody] = []
        #: the id of its journal
        self.journal = "fake"
        self.sessions: dict[str, str] = {}
        self.results: list[ResultBody] = []
        #: ranks that dialled, by job
        self.dialled: dict[str, list[int]] = {}
        self._lock = threading.RLock()
        self._jobs: dict[str, JobView] = {}
        self._keys: dict[str, str] = {}
        self._slots: dict[str, _Slot] = {}
        self._count = 0
        self._waits: dict[str, tuple[float, str]] = {}
        self._to_lose: dict[str, tuple[int, str]] = {}
        self._faults: dict[str, str] = {}
        self._troubles: list[tuple[int, str, float | None]] = []
        self._directives: list[Directive] = []
        self._orders: list[tuple[int, ChannelOrder]] = []
        self._listeners: list[HeartbeatListener] = []
        self._routes: list[tuple[str, str, type[Any] | None, Callable[..., Any]]] = [
            ("POST", r"/v1/jobs", RegisterBody, self._register),
            ("GET", r"/v1/jobs/([^/]+)", None, self._job),
            ("DELETE", r"/v1/jobs/([^/]+)", EndBody, self._end),
            ("POST", r"/v1/jobs/([^/]+)/sessions", SessionBody, self._open),
            ("POST", r"/v1/sessions/([^/]+)/heartbeat", HeartbeatBody, self._beat),
            ("POST", r"/v1/sessions/([^/]+)/give-back", None, self._give_back),
            ("DELETE", r"/v1/sessions/([^/]+)", None, self._close),
            ("POST", r"/v1/jobs/([^/]+)/slots", SlotBody, self._ask),
            ("POST", r"/v1/slots/([^/]+)/release", ReleaseBody, self._release),
            ("POST", r"/v1/slots/([^/]+)/shrink", ShrinkBody, self._shrink),
            ("POST", r"/v1/slots/([^/]+)/grow", GrowBody, self._grow),
            ("GET", r"/v1/channel/([^/]+)/orders", None, self._next_order),
            ("POST", r"/v1/channel/([^/]+)/results", ResultBody, self._result),
        ]

    # ---- the script ----

    def wait(self, phase: str, times: float = 1, reason: str = "another job has its turn") -> None:
        """Answer the next ``times`` asks for a phase with *queued* (``math.inf``: until :meth:`go`)."""
        with self._lock:
            self._waits[phase] = (times, reason)

    def go(self, phase: str) -> None:
        """Let the phase be granted."""
        with self._lock:
            self._waits.pop(phase, None)

    def lose(self, phase: str, *, after: int = 0, reason: str = "no heartbeat came") -> None:
        """Lose the phase's slot while it runs: the one that runs now, or (``after``) the one after so many more."""
        with self._lock:
            running = self._running(phase)
            if running is not None and after == 0:
                running.status, running.reason = "lost", reason
            else:
                self._to_lose[phase] = (after, reason)

    def fault(self, phase: str, reason: str = "out of memory") -> None:
        """Fail to load the state for the next slot of the phase."""
        with self._lock:
            self._faults[phase] = reason

    def shrink(self, keep: list[str], reason: str = "the tail of the rollout") -> None:
        """Ask the slot that runs to keep only these GPUs."""
        self._direct("shrink", keep=keep, reason=reason)

    def grow(self) -> None:
        """Offer the slot that runs all its GPUs again."""
        self._direct("grow", gpus=self._gpu_names())

    def stop(self, reason: str = "an operator revoked it") -> None:
        """Revoke the slot that runs, and let its holder know by heartbeat."""
        with self._lock:
            running = self._running(None)
            if running is not None:
                running.status, running.reason = "revoked", reason
        self.tell([Directive("stop", running.id if running else None, reason=reason)])

    def yield_(self, within_s: float = 2.0, reason: str = "wanted") -> None:
        """Ask the filler that runs to give its slot back."""
        self._direct("yield", reason=reason, within_s=within_s)

    def _direct(self, kind: str, **more: Any) -> None:
        """Tell the slot that runs to do something."""
        with self._lock:
            running = self._running(None)
        self.tell([Directive(kind, running.id if running else None, **more)])

    def tell(self, directives: list[Directive]) -> None:
        """Give these directives with every heartbeat, in place of those before."""
        with self._lock:
            self._directives = list(directives)
            listeners = list(self._listeners)
        for listener in listeners:
            listener.directed(list(directives))

    def end_job(self, name: str, reason: str = "an operator ended it") -> None:
        """End a job, as an operator would."""
        with self._lock:
            view = self._named(name)
            self._jobs[view.job] = msgspec.structs.replace(view, status="ended", reason=reason)

    def quarantine(self, name: str, reason: str = "its state could not be parked") -> None:
        """Put a job into quarantine: its phases wait, until :meth:`reinstate`."""
        with self._lock:
            view = self._named(name)
            self._jobs[view.job] = msgspec.structs.replace(view, status="quarantined", reason=reason)
            for slot in self._slots.values():
                if slot.job == view.job and slot.status == "queued":
                    slot.status, slot.reason = "withdrawn", f"job quarantined: {reason}"

    def reinstate(self, name: str) -> None:
        """Let a quarantined job continue."""
        with self._lock:
            view = self._named(name)
            self._jobs[view.job] = msgspec.structs.replace(view, status="admitted", reason="")

    def trouble(self, status: int = 503, *, times: int = 1, retry_after_s: float | None = None) -> None:
        """Answer the next calls with an error of that status; 0: do not answer at all."""
        with self._lock:
            self._troubles += [(status, "as the test wants it", retry_after_s)] * times

    def order(
        self,
        kind: str,
        pool: str,
        *,
        rank: int = 0,
        id: str | None = None,
        warm: bool = False,
        node: str = "fake/gpu0-1",
        source: str = "",
    ) -> str:
        """Tell a rank to ``load``, ``park`` or ``discard``; returns the order's id. See :meth:`result_of`.

        ``source``: after a move, the node where it had parked what it is to load.
        """
        with self._lock:
            order = ChannelOrder(id or self._new("o"), kind, pool, node, self._gpu_names(), warm, source)
            self._orders.append((rank, order))
            return order.order

    def result_of(self, order: str, timeout_s: float = 20.0) -> ResultBody:
        """Wait for the result of an order."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            with self._lock:
                for result in self.results:
                    if result.order == order:
                        return result
            time.sleep(0.005)
        raise TimeoutError(f"no rank has told the result of {order}; dialled are {self.dialled}")

    def asked(self, method: str, path: str) -> list[Asked]:
        """Return the calls whose path ends so."""
        with self._lock:
            return [call for call in self.calls if call.method == method and call.path.endswith(path)]

    # ---- the seam ----

    @property
    def transport(self) -> Any:
        """An ``httpx.MockTransport``, for ``httpx.Client`` and ``httpx.AsyncClient``."""
        from rollmuxd.client.transport import mock

        return mock(self.handle)

    def heartbeat(self, listener: HeartbeatListener) -> "_Heartbeat":
        """Take the place of the heartbeat process."""
        with self._lock:
            self._listeners.append(listener)
        return _Heartbeat(self, listener)

    def handle(self, method: str, path: str, params: Mapping[str, str], content: bytes) -> Any:
        """Answer a request; raises :class:`Unreachable` where no answer is to come."""
        from rollmuxd.client.transport import Reply

        with self._lock:
            body = msgspec.json.decode(content) if content else None
            self.calls.append(Asked(method, path, body))
            if self._troubles:
                status, detail, retry_after_s = self._troubles.pop(0)
                if status == 0:
                    raise Unreachable("connection refused, as the test wants it")
                headers = {} if retry_after_s is None else {"retry-after": str(retry_after_s)}
                return Reply(status, headers=headers, content=_problem(_No(status, detail)))
            try:
                answer = self._answer(method, path, params, content)
            except _No as no:
                return Reply(no.code, headers={"content-type": "application/problem+json"}, content=_problem(no))
            return Reply(200, headers={"content-type": "application/json"}, content=msgspec.json.encode(answer))

    def _answer(self, method: str, path: str, params: Mapping[str, str], content: bytes) -> Any:
        for wanted, pattern, kind, route in self._routes:
            match = re.fullmatch(pattern, path)
            if match and wanted == method:
                return route(*match.groups(), params if kind is None else _body(content, kind))
        raise _No(404, f"the fake daemon does not know {method} {path}")

    # ---- the routes ----

    def _register(self, body: RegisterBody) -> JobView:
        known = self._keys.get(body.idempotency_key)
        if known is not None:
            return self._jobs[known]
        alive = [view for view in self._jobs.values() if view.name == body.name and view.status == "admitted"]
        if alive and not body.replace:
            raise _No(409, f"run {alive[0].run} of job {body.name!r} is alive: pid 1 on fake", pid=1, host="fake")
        self.registered.append(body)
        pins = {pool: ["fake/gpu0-1"] for pool in body.wants}
        run = 1 + sum(view.name == body.name for view in self._jobs.values())
        cycle = {phase.name: list(phase.pools) for phase in body.phases}
        view = RegisteredView(
            self._new("j"), "me", "me", body.name, run, "admitted", "", pins=pins, cycle=cycle, journal=self.journal
        )
        self._jobs[view.job] = self._jobs[self._keys.setdefault(body.idempotency_key, view.job)] = view
        return view

    def _job(self, job: str, _: object = None) -> JobView:
        if job not in self._jobs:
            raise _No(404, f"there is no job {job!r}")
        view = self._jobs[job]
        session = next((session for session, of in reversed(self.sessions.items()) if of == job), None)
        slot = next(
            (slot for slot in self._slots.values() if slot.job == job and slot.status in {"running", "queued"}), None
        )
        return msgspec.structs.replace(view, session=session, slot=slot.id if slot else None)

    def _end(self, job: str, body: EndBody) -> JobView:
        view = self._job(job)
        self.ended[view.name] = body.reason
        self._jobs[job] = msgspec.structs.replace(
            view, status="ended", reason=body.reason, finished=body.finished, pins={}
        )
        for slot in self._slots.values():
            if slot.job == job and slot.status in {"running", "queued"}:
                slot.status = "over"
        return self._jobs[job]

    def _open(self, job: str, body: SessionBody) -> SessionView:
        view = self._live(job)
        session = self._new("s")
        self.sessions[session] = job
        return SessionView(session, job, view.run, lease_s=60.0, heartbeat_s=15.0, journal=self.journal)

    def _beat(self, session: str, body: HeartbeatBody) -> HeartbeatView:
        self._job_of(session)
        if body.slot is not None:
            self.progressed(body.slot, body.done, body.total)
        return HeartbeatView(60.0, list(self._directives))

    def _close(self, session: str, _: object) -> dict[str, Any]:
        self._job_of(session)
        del self.sessions[session]
        return {}

    def _give_back(self, session: str, _: object) -> SessionView:
        job = self._job_of(session)
        for slot in self._slots.values():
            if slot.job == job and slot.status in {"running", "tail", "queued"}:
                slot.status = "withdrawn" if slot.status == "queued" else "released"
        self._directives = []
        return SessionView(session, job, self._jobs[job].run, lease_s=60.0, heartbeat_s=15.0, journal=self.journal)

    def _ask(self, job: str, body: SlotBody) -> SlotView:
        self._live(job)
        self._job_of(body.session)
        return self._asked_for(job, body.phase, body.request_id)

    def _asked_for(self, job: str, phase: str, request_id: str) -> SlotView:
        slot = next((slot for slot in self._slots.values() if slot.request_id == request_id), None)
        if slot is None:
            view = self._jobs[job]
            if view.status == "quarantined":
                told = dict(name=view.name, status=view.status, reason=view.reason)
                raise _No(409, f"job {view.name} is quarantined ({view.reason})", **told)
            if any(slot.job == job and slot.status in {"running", "queued"} for slot in self._slots.values()):
                raise _No(409, f"job {job} has a slot already")
            slot = _Slot(self._new("t"), job, phase, request_id, "queued", "", self._gpu_names())
            self._slots[slot.id] = slot
        if slot.status == "queued":
            self._try_grant(slot)
        if slot.status not in {"queued", "running", "tail"}:
            raise _No(409, f"slot {slot.id} is {slot.status}", slot=slot.id, status=slot.status, reason=slot.reason)
        return self._view(slot)

    def _try_grant(self, slot: _Slot) -> None:
        left, slot.reason = self._waits.get(slot.phase, (0, ""))
        if left > 0:
            self._waits[slot.phase] = (left - 1, slot.reason)
            return
        if slot.phase in self._faults:
            slot.status, slot.reason = "faulted", self._faults.pop(slot.phase)
            return
        slot.status, slot.reason, slot.fence = "running", "", f"1.{self._number()}"
        self.phases.append(slot.phase)
        if slot.phase in self._to_lose:
            more, reason = self._to_lose.pop(slot.phase)
            if more > 0:
                self._to_lose[slot.phase] = (more - 1, reason)
            else:
                # Granted, and lost behind the holder's back: it finds out when it releases.
                self._slots[slot.id] = msgspec.structs.replace(slot, status="lost", reason=reason)

    def _release(self, slot: str, body: ReleaseBody) -> ReleaseView:
        if (answer := self._slot(slot).released) is not None:
            return answer
        found = self._held(slot, body.fence)
        found.status = "released"
        self._directives = []
        if body.measured:
            self.measured.append((found.phase, dict(body.measured)))
        following = self._asked_for(found.job, body.next.phase, body.next.request_id) if body.next else None
        found.released = ReleaseView(slot, "released", following)
        return found.released

    def _shrink(self, slot: str, body: ShrinkBody) -> SlotView:
        found = self._held(slot, body.fence)
        if not set(body.keep) <= set(found.gpus):
            raise _No(422, f"slot {slot} holds {found.gpus}, and was to keep {body.keep}")
        found.status, found.gpus = "tail", list(body.keep)
        self._directives = []
        return self._view(found)

    def _grow(self, slot: str, body: GrowBody) -> SlotView:
        found = self._held(slot, body.fence)
        found.status, found.gpus = "running", self._gpu_names()
        self._directives = []
        return self._view(found)

    def _next_order(self, job: str, params: Mapping[str, str]) -> ChannelView:
        self._job_of(params["session"])
        if (asking := int(params["rank"])) not in self.dialled.setdefault(job, []):
            self.dialled[job].append(asking)
        told = {result.order for result in self.results}
        for rank, order in self._orders:
            if rank == asking and order.order not in told:
                return ChannelView(order)
        return ChannelView()

    def _result(self, job: str, body: ResultBody) -> dict[str, Any]:
        self._job_of(body.session)
        self.results.append(body)
        return {}

    # ---- what they are made of ----

    def progressed(self, slot: str, done: int, total: int) -> None:
        """For the stand-in of the heartbeat."""
        with self._lock:
            found = self._slots.get(slot)
            if found is not None:
                self.progress.append((found.phase, done, total))

    def hang_up(self, listener: HeartbeatListener) -> None:
        """For the stand-in of the heartbeat."""
        with self._lock:
            self._listeners.remove(listener)

    def _running(self, phase: str | None) -> _Slot | None:
        slots = [slot for slot in self._slots.values() if slot.status in {"running", "tail"}]
        return next((slot for slot in slots if phase in {None, slot.phase}), None)

    def _named(self, name: str) -> JobView:
        for view in reversed(list(self._jobs.values())):
            if view.name == name:
                return view
        raise LookupError(f"job {name!r} has not started; call this from its loop, or from a thread, once it has")

    def _live(self, job: str) -> JobView:
        view = self._job(job)
        if view.status == "ended":
            raise _No(409, f"job {job} is ended ({view.reason})", status="ended")
        return view

    def _job_of(self, session: str) -> str:
        if session not in self.sessions:
            raise _No(404, f"there is no session {session!r}")
        return self.sessions[session]

    def _held(self, slot: str, fence: str) -> _Slot:
        found = self._slot(slot)
        if found.status not in {"running", "tail"} or found.fence != fence:
            raise _No(409, f"slot {slot} is {found.status} ({found.reason})", slot=slot, status=found.status)
        return found

    def _slot(self, slot: str) -> _Slot:
        if slot not in self._slots:
            raise _No(404, f"there is no slot {slot!r}")
        return self._slots[slot]

    def _view(self, slot: _Slot) -> SlotView:
        granted = slot.status in {"running", "tail"}
        return SlotView(
            slot.id,
            slot.job,
            slot.phase,
            slot.status,
            slot.request_id,
            fence=slot.fence if granted else None,
            gpus=slot.gpus if granted else [],
            lease_s=60.0 if granted else None,
            position=1 if slot.status == "queued" else None,
            expected_wait_s=30.0 if slot.status == "queued" else None,
            reason=slot.reason,
            granted_at="now" if slot.fence else None,
        )

    def _gpu_names(self) -> list[str]:
        return [f"fake/gpu{index}" for index in range(self.gpus)]

    def _new(self, kind: str) -> str:
        return f"{kind}{self._number()}"

    def _number(self) -> int:
        self._count += 1
        return self._count


class _Heartbeat(HeartbeatProcess):
    """In place of the heartbeat process: what it gets is known at once."""

    def __init__(self, daemon: FakeDaemon, listener: HeartbeatListener) -> None:
        self._daemon = daemon
        self._listener = listener
        self._slot: str | None = None

    def session(self, view: SessionView) -> None:
        pass

    def slot(self, slot: str | None) -> None:
        self._slot = slot

    def progress(self, done: int, total: int) -> None:
        if self._slot is not None:
            self._daemon.progressed(self._slot, done, total)

    def stop(self) -> None:
        self._daemon.hang_up(self._listener)


@contextmanager
def fake_daemon(gpus: int = 2) -> Iterator[FakeDaemon]:
    """Have every job of this process use a :class:`FakeDaemon` while the context is open."""
    before, daemon = fakes.current, FakeDaemon(gpus)
    fakes.current = daemon
    try:
        yield daemon
    finally:
        fakes.current = before


def _body(content: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(content or b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise _No(422, str(error)) from error


def _problem(no: _No) -> bytes:
    return msgspec.json.encode(Problem("refused", no.code, no.detail, request_id="fake", data=no.data))
