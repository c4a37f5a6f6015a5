"""What the daemon's tests share: a core of a few lines, a slow journal, a writer that runs for a block."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest
from memory_journal import MemoryJournal

from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.apply import apply
from rollmuxd.core.decision import Answer, Decision
from rollmuxd.core.effects import Effect, Observe
from rollmuxd.core.errors import BrokenInvariant, UnknownThing
from rollmuxd.core.ids import Millis
from rollmuxd.core.state import State
from rollmuxd.daemon.clock import SystemClock
from rollmuxd.daemon.entries import Entry
from rollmuxd.daemon.journal.store import Journal
from rollmuxd.daemon.writer import Writer


class TinyCore:
    """A scheduler that knows hosts only.

    ``HostObserved`` adds a host (a fact, and an order to look at it), ``Heartbeat`` changes nothing, withdrawing is
    refused, closing the session "broken" or "crash" is a bug after half of the work. ``due`` is its deadline.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.given: list[tuple[Millis, i.Input]] = []
        self.due: Millis | None = None
        self.crash_on_tick: Exception | None = None

    def handle(self, given: i.Input, now: Millis) -> Decision:
        self.given.append((now, given))
        facts: list[f.Fact] = []
        effects: list[Effect] = []
        match given:
            case i.Start(incarnation=incarnation):
                facts.append(f.DaemonStarted(at=now, incarnation=incarnation))
            case i.HostObserved(host=host):
                facts.append(f.HostAdded(at=now, host=i.HostSpec(host, "fake", 0)))
                effects.append(Observe(host))
            case i.Stalled(late_ms=late_ms):
                facts.append(f.LoopStalled(at=now, late_ms=late_ms))
            case i.WithdrawSlot(slot=slot):
                raise UnknownThing("slot", slot)
            case i.CloseSession(session=session):
                apply(self.state, f.HostAdded(at=now, host=i.HostSpec("half", "fake", 0)))
                raise BrokenInvariant("two hold it") if session == "broken" else KeyError(session)
            case i.Tick():
                if self.due is not None and now >= self.due:
                    self.due = None
                if self.crash_on_tick is not None:
                    raise self.crash_on_tick
        for fact in facts:
            apply(self.state, fact)
        return Decision(tuple(facts), tuple(effects), Answer(slot=getattr(given, "host", None)))

    def deadline(self) -> Millis | None:
        return self.due


class SlowJournal(MemoryJournal):
    """Commits take ``takes_s`` seconds of the loop's time."""

    def __init__(self, takes_s: float = 1.0) -> None:
        super().__init__()
        self.takes_s = takes_s

    def _commit(self, write: Callable[[], object]) -> "asyncio.Future[None]":
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def commit() -> None:
            done = super(SlowJournal, self)._commit(write)
            if error := done.exception():
                future.set_exception(error)
            else:
                future.set_result(None)

        loop.call_later(self.takes_s, commit)
        return future


@dataclass
class Rig:
    """A running writer and what came out of it."""

    writer: Writer
    performed: list[Effect]
    #: what prompt sinks were told, and the others
    sunk: list[tuple[int, f.Fact]]
    cores: list[TinyCore]
    failed: list[BaseException] = field(default_factory=list)
    #: seconds by which the clock is ahead of the loop's: the loop was not let run for so long
    jumped: list[float] = field(default_factory=lambda: [0.0])
    later: list[Entry] = field(default_factory=list)

    @property
    def core(self) -> TinyCore:
        return self.cores[-1]

    def hosts(self) -> list[str]:
        return list(self.writer.scheduler.state.hosts)


@pytest.fixture
def tiny_core() -> type[TinyCore]:
    return TinyCore


@pytest.fixture
def slow_journal() -> type[SlowJournal]:
    return SlowJournal


@pytest.fixture
def running() -> Callable[..., Any]:
    """``async with running(journal) as rig``: a writer with the tiny core, on the loop's clock."""

    @asynccontextmanager
    async def run(journal: Journal | MemoryJournal, *, wall: float = 1000.0, **options: Any) -> AsyncIterator[Rig]:
        loop = asyncio.get_running_loop()
        jumped = [0.0]
        clock = SystemClock(monotonic=lambda: loop.time() + jumped[0], wall=lambda: wall)
        performed: list[Effect] = []
        sunk: list[tuple[int, f.Fact]] = []
        later: list[Entry] = []
        cores: list[TinyCore] = []

        def make(state: State) -> Any:
            cores.append(TinyCore(state))
            return cores[-1]

        def perform(effects: Sequence[Effect]) -> None:
            performed.extend(effects)

        sinks = {
            "prompt": [lambda facts: sunk.extend((entry.seq, entry.fact) for entry in facts)],
            "sinks": [later.extend],
        }
        writer = Writer(make, journal, clock, perform, i.Start((), ()), **sinks, **options)
        rig = Rig(writer, performed, sunk, cores, jumped=jumped, later=later)

        async def guarded(*, task_status: Any) -> None:
            try:
                await writer.run(task_status=task_status)
            except BrokenInvariant as error:
                rig.failed.append(error)

        async with anyio.create_task_group() as tasks:
            await tasks.start(guarded)
            yield rig
            tasks.cancel_scope.cancel()

    return run
