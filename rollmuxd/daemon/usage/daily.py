"""What was booked in a span of time: days that are over from their usage, today from usage counted as it goes.

The fold is the same everywhere (:class:`~rollmuxd.daemon.usage.ledger.UsageLedger`). :class:`LiveUsage` continues
that of today each minute, some facts at a time. So a report of whole days and of today costs what its rows and a
minute's facts cost. Only where a span begins or ends within a day are all of that day's facts read.
"""

import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeAlias
from zlib import decompress
from zlib import error as zlib_error

import anyio
import msgspec
import structlog

from rollmuxd.core.errors import BrokenInvariant
from rollmuxd.core.facts import Fact
from rollmuxd.core.ids import Millis
from rollmuxd.core.state import State
from rollmuxd.daemon.journal.file import JournalError
from rollmuxd.daemon.journal.retention import BATCH, DAY
from rollmuxd.daemon.journal.store import Journal, Unreadable
from rollmuxd.daemon.usage.ledger import DailyUsage, UsageLedger
from rollmuxd.daemon.writer import Unavailable

log = structlog.get_logger("rollmuxd.journal")

#: how often facts are booked, unless a report asks before
EVERY_S: Final = 60.0
#: slept between two batches where no call waits for them
PAUSE_S: Final = 0.005
#: days that are over whose usage is remembered, until those in the journal are made
REMEMBERED: Final = 3

#: the time, and the last fact before it, once that is durable
Settled: TypeAlias = Callable[[], Awaitable[tuple[Millis, int]]]


class FactsGone(Exception):
    """What is asked for hangs on facts that were deleted."""

    def __init__(self, first: int) -> None:
        super().__init__(
            f"the facts before {first} were compacted away, and of those days (UTC) the usage is known as a whole: "
            "begin and end the span at the beginning of a day"
        )
        self.first = first


class LiveUsage:
    """The usage of today until now. Used from one event loop.

    Each question counts the facts that became durable since the last one. :meth:`run` asks now and then, so that no
    caller waits for many of them. Durable facts do not change, whatever becomes of the writer.
    """

    def __init__(self, journal: Journal, settled: Settled) -> None:
        self._journal = journal
        self._settled = settled
        self._busy = anyio.Lock()
        self._state = State()
        self._ledger: UsageLedger | None = None
        self._day = 0
        #: the last fact that was booked
        self._seq = 0
        #: the day of the journal's first fact, if that was today when it was read
        self.first_day: int | None = None
        #: days that are over
        self.over: dict[int, DailyUsage] = {}

    async def run(self) -> None:
        """Book what there is, for ever."""
        while True:
            await anyio.sleep(EVERY_S)
            try:
                await self.usage(*await self._settled(), pause_s=PAUSE_S)
            except (Unavailable, JournalError, FactsGone, BrokenInvariant, sqlite3.Error) as error:
                log.warning("today_not_booked", reason=str(error), remedy="reports read the facts meanwhile")

    async def usage(self, now: Millis, durable: int, pause_s: float = 0) -> DailyUsage:
        """What was booked today until ``now``, of all facts up to ``durable``; a copy.

        Raises:
            FactsGone, JournalError: what is there of today cannot be read.
        """
        async with self._busy:
            try:
                ledger = await self._booked(now, durable, pause_s)
            except BaseException:  # half of a fact may be booked
                self._ledger = self.first_day = None
                self.over.clear()
                raise
            return ledger.close(now)[0].copy()

    async def _booked(self, now: Millis, durable: int, pause_s: float) -> UsageLedger:
        ledger = self._ledger or await self._begun(now // DAY)
        while True:
            self._seq = await _fold(self._journal, ledger, self._seq, durable, pause_s)
            end = (self._day + 1) * DAY
            if now < end:
                return ledger
            # The day is over.
            self.over[self._day] = ledger.close()[0]
            if len(self.over) > REMEMBERED:
                del self.over[min(self.over)]
            self._day += 1
            self._ledger = following = UsageLedger(since=end, until=end + DAY, state=self._state)
            for seq in self.over[self._day - 1].unreadable:  # its state still lacks what they said
                following.miss(seq)
            ledger = following

    async def _begun(self, day: int) -> UsageLedger:
        """The day from its beginning."""
        days, first = await self._journal.days(), await self._journal.read(0, 1)
        began = [fact.at // DAY for _, fact in first if not isinstance(fact, Unreadable)]
        self.first_day = day if self._journal.first == 1 and not days and began == [day] else None
        self._seq, self._state = await _begin(self._journal, day)
        self._day = day
        self._ledger = UsageLedger(since=day * DAY, until=(day + 1) * DAY, state=self._state)
        return self._ledger


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

    Raises:
        FactsGone: the span begins or ends within a day whose facts are gone.
    """
    end = now if until is None else min(until, now)
    this = now // DAY
    # What is over comes from there too, until the journal has it.
    fresh = await today.usage(now, durable) if today is not None and end > (this - 1) * DAY else None
    over = today.over if today is not None else {}
    days = await journal.days()
    first = min(days, default=(today.first_day if today is not None else None) or 0) * DAY
    at = first if since is None else max(since, first)
    total = DailyUsage()
    while at < end:
        number = at // DAY
        ends = (number + 1) * DAY
        whole = at == number * DAY
        booked = await _stored_usage(journal, number) if whole and ends <= end and number in days else None
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
            last = number not in days
            stop = end if last else min(end, ends)
            begun, state = await _begin(journal, number)
            ledger = UsageLedger(since=at, until=None if last and until is None else stop, state=state)
            await _fold(journal, ledger, begun, durable)
            total.add(ledger.close(now)[0])
            at = stop
    return total, max(end, 0)


async def _stored_usage(journal: Journal, day: int) -> DailyUsage | None:
    """What was booked of a day; None: it is damaged."""
    try:
        return msgspec.json.decode(decompress(await journal.usage_of(day)), type=DailyUsage)
    except (zlib_error, msgspec.MsgspecError):
        return None


async def _begin(journal: Journal, day: int) -> tuple[int, State]:
    """The nearest state that is there of this day's beginning or before, and the last fact in it. Raises FactsGone."""
    if (found := await journal.state_before(day)) is not None:
        return found[0], msgspec.json.decode(found[1], type=State)
    if journal.first > 1:
        raise FactsGone(journal.first)
    return 0, State()


async def _fold(journal: Journal, ledger: UsageLedger, after: int, durable: int, pause_s: float = 0) -> int:
    """Show a ledger the facts that follow, until it has enough; the last one that it took."""
    while after < durable:
        batch = await journal.read(after, BATCH)
        if journal.first > after + 1:
            raise FactsGone(journal.first)
        if not batch:
            break
        if (taken := _see(ledger, batch, durable)) < batch[-1][0]:
            return max(taken, after)
        after = taken
        await anyio.sleep(pause_s)
    return after


def _see(ledger: UsageLedger, batch: Sequence[tuple[int, Fact | Unreadable]], durable: int) -> int:
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
