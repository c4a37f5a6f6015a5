"""The life of a job in this process: found, started, its phases entered and left, ended. As flows, but for the
background: the heartbeat, the channel, and what is to happen at exit and after a fork.

A job in a forked child (a data-loader worker) cannot start or enter anything. What unwinds there ends nothing, since
the GPUs are the parent's.
"""

import atexit
import difflib
import functools
import inspect
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from msgspec import Struct, structs

from rollmuxd.client import calls, discovery, fakes, retry
from rollmuxd.client.channel import Channel, Hook, Hooks
from rollmuxd.client.discovery import Address
from rollmuxd.client.errors import JobEnded, NoDaemon, RollmuxError, beside, ends_well, is_interruption, why_it_ends
from rollmuxd.client.heartbeat import HeartbeatProcess
from rollmuxd.client.rank_group import FAILING_S, IF_IT_GOES_ON, RankGroup
from rollmuxd.client.retry import LOGS, Flow, say
from rollmuxd.client.session import CLEAN_UP_S, LAST_CALL_S, Held, Session, new_id
from rollmuxd.client.sync import Daemon
from rollmuxd.wire.answers import ChannelOrder, Directive
from rollmuxd.wire.requests import RegisterBody

if TYPE_CHECKING:
    import asyncio

    from rollmuxd.client.aio import AsyncDaemon
    from rollmuxd.client.job import Slot

T = TypeVar("T")

#: directives about the job, whatever slot it holds
_OF_THE_JOB = ("unpromised", "ends")
_NOWHERE = Address("http://nowhere")
_said_alone = False
_said_misspelt = False

#: how long a process that ends stays on the line to discard its state
DISCARDS_S = 5.0


S = TypeVar("S", bound="Slot")


class Options(Struct, frozen=True):
    """Options of a job beside its registration; see :func:`rollmuxd.job`."""

    idempotency_key: str | None = None
    url: str | None = None
    api_key: str | None = None
    ranks: int = 1
    rank: int = 0
    store: Any = None
    keep: bool = False
    #: the daemon has started this process, for this very run
    launched: bool = False


class Runtime(Generic[S]):
    """The flows, and what runs them. Of one thread (or task) at a time.

    ``describe`` makes the registration from the pools with hooks and the idempotency key; ``make_slot`` what is given
    to the user.
    """

    def __init__(
        self,
        describe: Callable[[Iterable[str], str], RegisterBody],
        make_slot: Callable[["Runtime[S]", str, str, str | None, Sequence[str]], S],
        options: Options,
    ) -> None:
        for key, value in (("ranks", options.ranks), ("rank", options.rank)):
            if not isinstance(value, int):
                raise TypeError(
                    f"{key}={value!r}: a whole number is needed; from the environment: int(os.environ[...])"
                )
        if not 0 <= options.rank < options.ranks:
            raise ValueError(f"rank={options.rank} of ranks={options.ranks}: ranks count from 0")
        if options.rank > 0 and options.store is None:
            raise ValueError(
                f"rank={options.rank}: only rank 0 talks to the daemon, and the others follow it through store=, which "
                "every rank must be given (torch.distributed's TCPStore, or any object with set, get and check)"
            )
        #: made here already, so that every mistake is found with the caller's line
        self.body = describe((), "")
        self.name = self.body.name
        self.slot: S | None = None
        #: there is no daemon: phases wait for nothing
        self.alone = False
        self._describe = describe
        self._make_slot = make_slot
        self._options = options
        self._rank = options.rank
        self._hooks = Hooks(self.name)
        self._pid = os.getpid()
        self._started = False
        self._address: Address | None = None
        self._sync: Daemon | None = None
        self._async: AsyncDaemon | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: Session | None = None
        self._rank_group: RankGroup | None = None
        self._heartbeat: HeartbeatProcess | None = None
        self._channel: Channel | None = None
        #: of a follower: the journal that knows the job
        self._journal = ""
        #: of a follower: the job, and rank 0's session
        self._follows = ("", "")
        self._depth = 0
        #: of a follower that has ended its job within a phase: says so, once that is left
        self._gone: Callable[[], None] | None = None

    def __str__(self) -> str:
        return f"{self.name} {'alone' if self.alone else self.id or 'not started'}"

    @property
    def id(self) -> str:
        """The job's id with the daemon; empty before the start, and without a daemon."""
        return self._session.job if self._session is not None else self._follows[0]

    @property
    def ends_at(self) -> float | None:
        """When the first of the job's nodes goes away, in seconds since 1970; None: not at a known time."""
        return self._session.ends_at if self._session is not None else None

    # ---- hooks ----

    def hook(self, kind: str, pool: str | None, hook: Hook) -> Hook:
        """Call ``hook`` for orders of that kind; returns it."""
        if pool is not None and pool not in self.body.wants:
            raise ValueError(f"on_{kind}(pool={pool!r}): the job has {', '.join(self.body.wants)}")
        self._hooks.add(kind, pool, self._on_loop(hook) if inspect.iscoroutinefunction(hook) else hook)
        if self._started and not self.alone:
            if not any(state.driver == "channel" for state in self.body.states.values()):
                say(
                    f"{self.name}: on_{kind} was registered after the start, and the job declared no state that moves "
                    "through the channel (gpu_gb=, ram_gb=): it will not be called"
                )
            self._dial()
        return hook

    def _on_loop(self, hook: Hook) -> Hook:
        def call(order: ChannelOrder) -> None:
            import asyncio

            if self._loop is None:
                raise RollmuxError("an async hook needs a job that runs on asyncio")
            asyncio.run_coroutine_threadsafe(hook(order), self._loop).result()

        return call

    # ---- flows ----

    def opening(self) -> Flow[None]:
        """Start the job, unless that has been done."""
        mine = os.getpid() == self._pid
        if self._started and (mine or self.alone):
            return
        if not mine:
            raise RollmuxError(
                f"job {self.name} belongs to process {self._pid}; make one in this process, or use ranks="
            )
        if self._options.store is not None and self._options.ranks > 1:
            self._rank_group = RankGroup(
                self._options.store,
                self.name,
                rank=self._rank,
                ranks=self._options.ranks,
                clock=time.monotonic,
                tell=say,
            )
            yield from self._rank_group.meet()
        if self._rank > 0:
            try:
                yield from self._following()
            except BaseException:
                self._close_down("it could not start")
                raise
        else:
            yield from self._registering()
        self._started = True
        atexit.register(self._at_exit)

    def _registering(self) -> Flow[None]:
        group = self._rank_group
        try:
            patience_s = retry.patience_from(os.environ)
            address = self._find()
            if address is None:
                self.alone = True
                if group is not None:
                    group.publish_start(alone=True)
                return
            self._reach(address)
            # A key per start: the same job started twice by one process is two runs.
            self.body = self._describe(self._hooks.pools(), self._options.idempotency_key or new_id())
            session = Session(self.body, patience_s=patience_s, make_slot=functools.partial(self._make_slot, self))
            listener = HeartbeatListener(session, address)
            # A process with the same key may join this run until its lease has run out.
            joined = self._options.idempotency_key is not None and not self._options.launched
            self._heartbeat = (
                fakes.current.heartbeat(listener)
                if fakes.current
                else HeartbeatProcess(address, listener, last_beat=not joined)
            )
            session.on_session = self._heartbeat.session
            self._session = session
            self._hooks.warn_of_idle(pool for pool, state in self.body.states.items() if state.driver == "channel")
            yield from session.start()
            if group is not None:
                group.publish_start(
                    job=session.job, session=session.session, journal=session.journal, address=address.base_url
                )
        except BaseException as error:
            if group is not None:
                with beside(error, "the other ranks were told"):
                    group.publish_no_start(error)
            # Registered, and no process of it: nothing would ever end it. (A run that was there before us stays.)
            try:
                if (
                    self._session is not None
                    and self._options.idempotency_key is None
                    and not isinstance(error, GeneratorExit)
                ):
                    yield from self._session.end("it could not start", keep=False)
            finally:  # also should that be interrupted: nothing is to keep the session alive
                self._close_down("it could not start")
            raise
        self._dial()

    def _following(self) -> Flow[None]:
        assert self._rank_group is not None
        told = yield from self._rank_group.started()
        if told.get("error"):
            raise RollmuxError(f"rank 0 could not start job {self.name}: {told['error']}. {IF_IT_GOES_ON}")
        self.alone = bool(told.get("alone"))
        if not self.alone:
            self._follows, self._journal = (told["job"], told["session"]), told["journal"]
            found = discovery.find(self._options.url, self._options.api_key)
            # On another host there may be no socket: then rank 0's way, if it is one that leads there.
            address = found.address or (
                None
                if told["address"] == "http://rollmuxd"
                else discovery.find(told["address"], self._options.api_key).address
            )
            if address is not None:
                self._reach(address)
            self._dial()

    def _find(self) -> Address | None:
        global _said_alone, _said_misspelt  # noqa: PLW0603  (once per process)
        if not _said_misspelt:
            _said_misspelt = True
            for name, meant in discovery.misspelt(os.environ):
                say(f"the environment has {name}, which nothing reads; was {meant} meant?")
            if (log := os.environ.get("ROLLMUX_LOG", "").strip().lower()) and log not in LOGS:
                say(f"ROLLMUX_LOG={log} is none of {', '.join(LOGS)}; lines go to stderr")
        found = discovery.find(self._options.url, self._options.api_key)
        if found.address is None:
            if os.environ.get("ROLLMUX_REQUIRED", "") not in {"", "0"}:
                raise NoDaemon(f"{discovery.nowhere(found.looked)} (ROLLMUX_REQUIRED asks for one)")
            if not _said_alone:
                _said_alone = True
                looked = "" if found.off else f" (looked at {', '.join(found.looked)})"
                say(f"no daemon{looked}: {self.name} runs alone, its phases wait for nothing")
        return found.address

    def _dial(self) -> None:
        # What a job's file declares is known to the daemon alone.
        may_be_asked = (
            self._hooks
            or self._options.launched
            or any(state.driver == "channel" for state in self.body.states.values())
        )
        if not may_be_asked or self._channel is not None or self._address is None:
            return
        own = self._session

        def session() -> str:
            return own.session if own is not None else self._follows[1]

        journal = own.journal if own is not None else self._journal
        self._channel = Channel(
            self._address, self._hooks, job=self.id, journal=journal, rank=self._rank, session=session
        )

    def check_phase(self, phase: str) -> None:
        """Raise ValueError for a phase that the job has not."""
        known = [known.name for known in [*self.body.phases, *self.body.side]]
        if phase not in known:
            near = difflib.get_close_matches(phase, known, n=1)
            hint = f"Did you mean {near[0]}?" if near else "Name it in phases= or side="
            raise ValueError(f"job {self.name} has no phase {phase!r}; it has {', '.join(known)}. {hint}")

    def entering(self, phase: str) -> Flow[S]:
        """Wait for the job's turn; inside the same phase, the same stay."""
        if self.slot is not None:
            if self.slot.phase != phase:
                raise RollmuxError(
                    f"phase {phase} is entered inside phase {self.slot.phase}: a job holds one slot at a time. "
                    "Leave the first before, or name a phase over both pools in phases="
                )
            self._depth += 1
            return self.slot
        yield from self.opening()
        if self.alone:
            slot = self._make_slot(self, "", phase, None, ())
        elif self._rank > 0:
            assert self._rank_group is not None
            told = yield from self._rank_group.granted(phase)
            slot = self._make_slot(self, told["slot"], phase, told["fence"], told["gpus"])
        else:
            slot = cast("S", (yield from self._granting(phase)))
        self.slot, self._depth = slot, 1
        return slot

    def _granting(self, phase: str) -> Flow[Held]:
        assert self._session is not None
        assert self._heartbeat is not None
        if self._session.held is not None:  # interrupted between its grant and its phase: nothing else would release it
            self._not_begun(self._session.held, KeyboardInterrupt())
        if self._rank_group is not None:
            if self._rank_group.entered:  # the request gives its slot back, and they compute there
                yield from self._rank_group.all_left(self._rank_group.entered, failing=False)
        try:
            held = yield from self._session.enter(phase)
        except BaseException as error:
            if self._rank_group is not None:
                with beside(error, "the other ranks were told"):
                    self._rank_group.publish_no_grant(phase, error)
            raise
        self._heartbeat.slot(held.id)
        if self._rank_group is not None:
            try:
                self._rank_group.publish_grant(phase, slot=held.id, fence=held.fence, gpus=held.gpus)
            except BaseException as error:
                self._not_begun(held, error)
                raise
        return held

    def _not_begun(self, held: Held, error: BaseException) -> None:
        """Our phase was not entered, though other ranks may be in it: the next request gives its slot back."""
        assert self._session is not None
        assert self._heartbeat is not None
        self._session.leave_later(held)
        self._heartbeat.slot(None)
        if self._rank_group is not None and self._rank_group.entered:
            with beside(error, "the other ranks were told"):
                self._rank_group.publish_over(error, lost=False)

    def leaving(self, then: str | None, error: BaseException | None) -> Flow[None]:
        """Release. ``error`` is what the phase's body raised. Raises :class:`SlotLost`.

        A program that fails or is interrupted waits some seconds for other ranks to leave the phase. If they do not,
        nothing is released: the slot stays until they have, for the next request, or for the end of the job. That is
        raised.
        """
        self._depth -= 1
        slot = self.slot
        if self._depth > 0 or os.getpid() != self._pid:
            return
        if slot is None:
            gone, self._gone = self._gone, None
            if gone is not None:
                gone()
            return
        self.slot = None
        if self.alone:
            return
        failing = error is not None
        if self._rank > 0:
            assert self._rank_group is not None
            yield from self._rank_group.left(slot.phase, failing=failing)
            return
        assert self._session is not None
        assert self._heartbeat is not None
        until = self._session.clean_up_ends() if is_interruption(error) else None
        trouble: BaseException | None = None
        try:
            if self._rank_group is not None:
                limit_s = FAILING_S if until is None else CLEAN_UP_S - LAST_CALL_S  # a second of it is the release's
                inside = yield from self._rank_group.all_left(slot.phase, failing=failing, limit_s=limit_s)
                if inside:
                    raise RollmuxError(_left_to(inside, slot.phase, slot.id))
            yield from self._session.leave(slot, measured=slot.measured, then=then, failing=failing, until=until)
        except BaseException as raised:
            trouble = raised
            self._session.leave_later(slot)  # unless the daemon was asked already
            raise
        finally:
            self._heartbeat.slot(None)
            if self._rank_group is not None:
                with beside(trouble, "the other ranks were told"):
                    self._rank_group.publish_over(trouble, lost=trouble is not None and slot.lost)

    def progress(self, done: int, total: int) -> None:
        """Have the next heartbeat say how far the slot's work is."""
        if self._heartbeat is not None:
            self._heartbeat.progress(done, total)

    def resizing(self, slot: "Slot", keep: Sequence[str] | None) -> Flow[None]:
        """Give all GPUs of the slot back but these; None: take those back that were offered."""
        if self._session is None:
            return
        if os.getpid() != self._pid:
            raise RollmuxError(f"the slot of job {self.name} belongs to process {self._pid}; shrink and grow it there")
        yield from self._session.resize(slot, keep)

    def left(self, error: BaseException | None, reason: str = "") -> Flow[None]:
        """End the job, whose loop this error has left, if any. One that the daemon may start again is left to it."""
        keep = self._options.keep or (self._options.launched and not ends_well(error))
        return self.ending(reason or why_it_ends(error), keep=keep, finished=ends_well(error))

    def ending(self, reason: str, *, keep: bool, finished: bool = False) -> Flow[None]:
        """End the job, or (``keep``) this process's part in it."""
        if not self._started or os.getpid() != self._pid:
            return
        self._started = False
        atexit.unregister(self._at_exit)
        channel, job, run = self._channel, self.id, self._session.run if self._session is not None else 0
        if channel is not None and keep:
            channel.stop()
        try:
            told = self._rank > 0 and not keep
            if self._session is not None:
                told = yield from self._session.end(reason, keep=keep, finished=finished)
            if channel is not None and told and not keep:
                yield from self._discarding(channel, job, run)
        finally:
            if channel is not None:
                channel.stop()
            self._close_down(reason)

    def _discarding(self, channel: Channel, job: str, run: int) -> Flow[None]:
        """The job is over, and its state still there: stay on the line until it was discarded, for seconds at most."""
        until = time.monotonic() + DISCARDS_S
        pause = 0.02
        while channel.keeps_state and (left := until - time.monotonic()) > 0:
            yield retry.Pause(min(pause, left))
            pause = min(0.5, pause * 2)
            if pause < 0.1:
                continue
            try:
                ask = structs.replace(calls.job(job), journal=channel.journal)
                view = yield from retry.persist(ask, until=until)
            except RollmuxError:
                return
            # A follower does not know the run, and may be here before rank 0 has ended the job.
            if (run and view.run != run) or (view.status == "ended" and not view.pins):
                return

    def _close_down(self, why: str) -> None:
        heartbeat, group = self._heartbeat, self._rank_group
        computes = self._rank > 0 and self.slot is not None
        self._heartbeat = self._channel = self._session = self._rank_group = self.slot = None
        try:
            if heartbeat is not None:
                heartbeat.stop()
        finally:
            if group is not None and computes:  # on GPUs that rank 0 would give back
                self._gone = functools.partial(group.publish_gone, why)
            elif group is not None:
                group.publish_gone(why)

    def _at_exit(self) -> None:
        self.slot = None  # a phase that was not left ends with the process
        error = getattr(sys, "last_value", None)  # what was not caught
        self.run(self.left(error, "its process ended" if error is None else ""))
        self.close()

    # ---- running them ----

    def _reach(self, address: Address) -> None:
        self._address = address
        for daemon in (self._sync, self._async):
            if daemon is not None:
                daemon.address = address

    def run(self, flow: Flow[T]) -> T:
        """Run a flow, blocking. The traceback of what it raises for the user ends here: the message says it all."""
        if self._sync is None:
            self._sync = Daemon(address=self._address or _NOWHERE)
        around = sys.exception()
        try:
            return self._sync.run(flow)
        except (RollmuxError, KeyboardInterrupt) as error:
            raise error.with_traceback(None) from around

    async def arun(self, flow: Flow[T]) -> T:
        """Run a flow on asyncio."""
        import asyncio

        from rollmuxd.client.aio import AsyncDaemon

        self._loop = asyncio.get_running_loop()
        if self._async is None:
            self._async = AsyncDaemon(self._address or _NOWHERE)
        around = sys.exception()
        try:
            return await self._async.run(flow)
        except RollmuxError as error:
            raise error.with_traceback(None) from around

    @staticmethod
    def drop(flow: Flow[None]) -> None:
        """Begin a flow where nothing can be awaited, and interrupt it at once: it remembers what is left to be done."""
        next(flow, None)
        flow.close()

    def close(self) -> None:
        """Close the blocking connection, if there is one."""
        if self._sync is not None and os.getpid() == self._pid:
            self._sync.close()

    async def aclose(self) -> None:
        """Close both connections."""
        self.close()
        if self._async is not None and os.getpid() == self._pid:
            await self._async.aclose()


def _left_to(ranks: list[int], phase: str, slot: str) -> str:
    who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    have = "have" if len(ranks) > 1 else "has"
    return f"rank 0 left {phase}, and {who} did not: slot {slot} is kept until {who} {have} left it, or the job ends"


class HeartbeatListener:
    """What the heartbeat hears, taken to the job. Runs in the heartbeat's thread, with a connection of its own."""

    def __init__(self, session: Session, address: Address) -> None:
        self._session = session
        self._address = address
        #: what was said last of a promise that is not kept
        self._unmet = ""
        #: it was said that heartbeats are refused
        self._refused = False

    def directed(self, directives: list[Directive]) -> None:
        """What the daemon asks now: all of it, so that a directive that is not there is over."""
        unmet = next((directive.reason for directive in directives if directive.kind == "unpromised"), "")
        if unmet and not self._unmet:  # its numbers change all the time
            say(f"{self._session.name}: {unmet}")
        self._unmet = self._unmet or unmet
        ends = next((directive.ends_at for directive in directives if directive.kind == "ends"), None)
        self._session.ends_at = datetime.fromisoformat(ends).timestamp() if ends else None
        held = self._session.held
        if held is not None:
            ours = [it for it in directives if it.slot in {None, held.id} and it.kind not in _OF_THE_JOB]
            held.directive = ours[-1] if ours else None
            # Said of a lost slot. To be raised when the phase is left, by the answer to its release.
            held.lost = held.lost or any(directive.kind == "stop" for directive in ours)
            if held.yield_by is None and (asked := next((it for it in ours if it.kind == "yield"), None)) is not None:
                held.yield_by = time.monotonic() + (asked.within_s or 0.0)

    def session_refused(self, status: int, detail: str) -> None:
        """A heartbeat was refused (404, 409, 410); others follow."""
        if self._session.ended:
            return
        daemon = Daemon(address=self._address)
        try:
            daemon.run(self._session.beat_refused(status, detail))
        except JobEnded as ended:
            say(f"{ended}; what runs now continues to the end of its phase")
        except RollmuxError as error:
            if not self._refused:
                say(f"the heartbeat of {self._session.name} is refused: {error}")
            self._refused = True
        finally:
            daemon.close()

    def troubled(self, text: str) -> None:
        """The daemon is away, or back."""
        # While no slot is held, the loop itself is calling the daemon, and says the same.
        if self._session.held is not None:
            say(text)
