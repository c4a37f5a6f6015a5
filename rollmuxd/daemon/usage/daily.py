"""What was booked in a span of time: days that are over from their books, today from books kept as it goes.

The fold is the same everywhere (:class:`~rollmuxd.daemon.usage.ledger.UsageLedger`). :class:`LiveUsage` does it early:
facts are put aside when they are durable, and booked a moment later, some at a time. So a report of whole days and of
today costs what its rows cost, however many facts there are; only where a span begins or ends within a day are facts
read.
"""

import sqlite3
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeAlias
from zlib import decompress
from zlib import error as zlib_error

import anyio
import msgspec
import structlog

from rollmuxd.core.errors import BrokenInvariant
from rollmuxd.core.facts import AnyFact, Fact
from rollmuxd.core.ids import Millis
from rollmuxd.core.state import State
from rollmuxd.daemon.journal.file import JournalDamaged, JournalError
from rollmuxd.daemon.journal.retention import BATCH, DAY, date_of, state_of
from rollmuxd.daemon.journal.store import Day, Journal, Unreadable
from rollmuxd.daemon.usage.ledger import DailyUsage, UsageLedger
from rollmuxd.daemon.writer import Unavailable

log = structlog.get_logger("rollmuxd.journal")

#: what is there of today is read so soon after a start, unless somebody asks for it before; and a failure is forgotten
FIRST_S: Final = 60.0
#: facts are booked so long after the first of them
EVERY_S: Final = 1.0
#: slept between two batches where nobody waits for them
PAUSE_S: Final = 0.005
#: days that are over whose books are remembered, until those in the journal are made
REMEMBERED: Final = 3

#: the time, and the last fact before it, once that is durable
Settled: TypeAlias = Callable[[], Awaitable[tuple[Millis, int]]]


class FactsGone(Exception):
    """What is asked for hangs on facts that were let go of."""

    def __init__(self, first: int, day: int | None) -> None:
        begins = "" if day is None else f"; days before {date_of(day)} are known as wholes (UTC) only"
        super().__init__(
            f"the facts before {first} were compacted away{begins}: begin and end the span at the beginning of a day"
        )
        self.first = first


class LiveUsage:
    """The books of the day that is on. A sink of the driver's; used from one event loop.

    ``settled`` is asked when the day's facts have to be read from the journal: at the start, and after the writer has
    begun anew.
    """

    def __init__(self, journal: Journal, settled: Settled) -> None:
        self._journal = journal
        self._settled = settled
        self._busy = anyio.Lock()
        self._news = anyio.Event()
        #: how often the writer has begun: what was read before is then worth nothing
        self._life = 0
        self._state = State()
        self._ledger: UsageLedger | None = None
        self._day = 0
        #: the last fact that was booked
        self._seq = 0
        #: facts after it, where there is a ledger or one is being made
        self._hears = False
        self._heard: deque[tuple[int, Fact]] = deque()
        #: the day of the journal's first fact, if that was today when it was read
        self.first_day: int | None = None
        #: days that are over
        self.over: dict[int, DailyUsage] = {}

    def begin(self, _: State) -> None:
        """The writer has begun (again): what is in the journal counts."""
        self._life += 1
        self._forget()

    def on_facts(self, facts: Sequence[tuple[int, Fact]]) -> None:
        """Facts are durable (the driver's to call)."""
        if self._hears:
            self._heard.extend(facts)
        self._news.set()

    async def run(self) -> None:
        """Book what is heard, for ever."""
        await anyio.sleep(FIRST_S)
        while True:
            try:
                async with self._busy:
                    await self._book(PAUSE_S)
            except (Unavailable, JournalError, FactsGone, BrokenInvariant, sqlite3.Error) as error:
                log.warning("today_not_booked", reason=str(error), remedy="reports read the facts meanwhile")
                await anyio.sleep(FIRST_S)
            await self._news.wait()
            await anyio.sleep(EVERY_S)

    async def books(self, now: Millis) -> DailyUsage:
        """What was booked today until ``now``, of all facts that were told; a copy.

        Raises:
            FactsGone, JournalError, Unavailable: what is there of today cannot be read.
        """
        async with self._busy:
            await self._book(0)
            while now >= self._end:
                self._turn()
            assert self._ledger is not None
            return self._ledger.close(now)[0].copy()

    @property
    def _end(self) -> Millis:
        return (self._day + 1) * DAY

    async def _book(self, pause_s: float) -> None:
        self._news = anyio.Event()
        if self._ledger is None:
            await self._read(pause_s)
        while self._heard:
            try:
                self._take(min(BATCH, len(self._heard)))
            except BaseException:  # half of a fact may be booked
                self._forget()
                raise
            await anyio.sleep(pause_s)
            if self._ledger is None:  # the writer has begun anew
                await self._read(pause_s)

    def _take(self, count: int) -> None:
        assert self._ledger is not None
        for _ in range(count):
            seq, fact = self._heard.popleft()
            if seq <= self._seq:
                continue  # it was read
            while not self._ledger.see(fact):
                self._turn()
            self._seq = seq

    def _turn(self) -> None:
        """The day is over."""
        assert self._ledger is not None
        self.over[self._day] = self._ledger.close()[0]
        if len(self.over) > REMEMBERED:
            del self.over[min(self.over)]
        self._day += 1
        self._ledger = UsageLedger(since=self._day * DAY, until=self._end, state=self._state)
        for seq in self.over[self._day - 1].unreadable:  # its state still lacks what they said
            self._ledger.miss(seq)

    async def _read(self, pause_s: float) -> None:
        """Book what is there of the day."""
        while True:
            life = self._life
            # First of all: what is told from now on is kept, and what was told before is in the journal.
            self._hears = True
            try:
                now, durable = await self._settled()
                days = {day.day: day for day in await self._journal.days()}
                first = await self._journal.read(0, 1)
                day = now // DAY
                begun = await _begin(self._journal, days, day)
                ledger = UsageLedger(since=day * DAY, until=(day + 1) * DAY, state=begun.state)
                seq = await _fold(self._journal, ledger, begun.seq, durable, pause_s)
            except BaseException:
                if life == self._life:
                    self._forget()
                raise
            if life == self._life:
                break
        began = [fact.at // DAY for _, fact in first if not isinstance(fact, Unreadable)]
        whole = self._journal.first == 1 and not days and began == [day]
        self._state, self._ledger, self._day, self._seq = begun.state, ledger, day, seq
        self.first_day = day if whole else None

    def _forget(self) -> None:
        self._ledger = self.first_day = None
        self._hears = False
        self._heard.clear()
        self.over.clear()


async def compute_usage(
    journal: Journal,
    *,
    since: Millis | None,
    until: Millis | None,
    now: Millis,
    durable: int,
    today: LiveUsage | None = None,
) -> tuple[DailyUsage, Millis]:
    """What was booked from ``since`` (or the beginning) until ``until`` (or now), and the end of that span.

    ``today``, where it is kept, has been told of all facts up to ``durable``.

    Raises:
        FactsGone: the span begins or ends within a day whose facts are gone.
    """
    end = now if until is None else min(until, now)
    this = now // DAY
    # What is over comes from there too, until the journal has it.
    fresh = await today.books(now) if today is not None and end > (this - 1) * DAY else None
    over = today.over if today is not None else {}
    days = {day.day: day for day in await journal.days()}
    first = min(days, default=(today.first_day if today is not None else None) or 0) * DAY
    at = first if since is None else max(since, first)
    total = DailyUsage()
    while at < end:
        number = at // DAY
        day, ends = days.get(number), (number + 1) * DAY
        whole = at == number * DAY
        booked = (
            await _stored_usage(journal, number) if whole and ends <= end and day is not None and day.booked else None
        )
        if booked is not None:
            total.add(booked)
            at = ends
        elif whole and ends <= end and number in over:
            total.add(over[number])
            at = ends
        elif whole and end == now and number == this and fresh is not None:
            total.add(fresh)
            at = end
        else:
            last = number + 1 not in days
            stop = end if last else min(end, ends)
            begun = await _begin(journal, days, number)
            ledger = UsageLedger(since=at, until=None if last and until is None else stop, state=begun.state)
            await _fold(journal, ledger, begun.seq, durable)
            total.add(ledger.close(now)[0])
            at = stop
    return total, max(end, 0)


async def _stored_usage(journal: Journal, day: int) -> DailyUsage | None:
    """What was booked of a day; None: it is damaged."""
    packed = (await journal.day(day)).books
    try:
        return msgspec.json.decode(decompress(packed or b""), type=DailyUsage)
    except (zlib_error, msgspec.MsgspecError):
        return None


class _Begun(msgspec.Struct):
    """A state to fold on from, and the last fact in it."""

    state: State
    seq: int


async def _begin(journal: Journal, days: dict[int, Day], number: int) -> _Begun:
    """The nearest state that is there before this day. Raises FactsGone."""
    for near in sorted((day for day, row in days.items() if row.has_state and day <= number), reverse=True):
        row = await journal.day(near)
        with suppress(JournalDamaged):  # the one before will do: it only takes longer
            return _Begun(state_of(row.state, row.sum, Path("journal"), near), row.seq)
    if journal.first > 1:
        known = min((day for day, row in days.items() if row.has_state), default=None)
        raise FactsGone(journal.first, known)
    return _Begun(State(), 0)


async def _fold(journal: Journal, ledger: UsageLedger, after: int, durable: int, pause_s: float = 0) -> int:
    """Show a ledger the facts that follow, until it has enough; the last one that it took."""
    while after < durable:
        batch = await journal.read(after, BATCH)
        if journal.first > after + 1:
            raise FactsGone(journal.first, None)
        if not batch:
            break
        if (taken := _see(ledger, batch, durable)) < batch[-1][0]:
            return max(taken, after)
        after = taken
        await anyio.sleep(pause_s)
    return after


def _see(ledger: UsageLedger, batch: Sequence[tuple[int, AnyFact | Unreadable]], durable: int) -> int:
    """Show facts to a ledger; the last one that it took, 0: none."""
    taken = 0
    for seq, fact in batch:
        if seq > durable:
            break
        if isinstance(fact, Unreadable):
            ledger.miss(seq)
        elif not ledger.see(fact):
            break
        taken = seq
    return taken
