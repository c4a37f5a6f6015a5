"""What was booked in a span of time: days that are over from their usage, today from usage counted as it goes.

A day is one of UTC. The fold is the same everywhere (:class:`~rollmuxd.daemon.usage.ledger.UsageLedger`).
:class:`LiveUsage` continues it each minute, some facts at a time. When a day is over, its usage is written down, with
the state that the next one begins in. So a report of whole days and of today costs what its rows and a minute's facts
cost. Only where a span begins or ends within a day are all of that day's facts read.

Facts that are older than ``journal.keep_days`` go, those of the audit trail after three years, and today's never
(``docs/decisions/0014-compaction.md``).
"""

import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, TypeAlias
from zlib import compress, decompress
from zlib import error as zlib_error

import anyio
import msgspec
import structlog
from anyio import to_thread

from rollmuxd.core.errors import BrokenInvariant
from rollmuxd.core.ids import Millis
from rollmuxd.core.state import State
from rollmuxd.daemon.journal.file import JournalDamaged, JournalError, JournalFailed, Unreadable
from rollmuxd.daemon.journal.store import DISK_FULL, Journal
from rollmuxd.daemon.usage.ledger import DailyUsage, UsageLedger
from rollmuxd.daemon.writer import Unavailable

log = structlog.get_logger("rollmuxd.journal")

DAY: Final = 86_400_000
#: how often facts are booked, unless a report asks before
EVERY_S: Final = 60.0
#: facts that are folded between two breaths: one or two milliseconds, which is what the loop may have to wait
BATCH: Final = 200
#: how long it is kept what people did; twenty failed logins a minute for all that time are some gigabytes
AUDIT_DAYS: Final = 1_095
#: slept between two batches of a day that is read once more, or that no call waits for
PAUSE_S: Final = 0.005

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
    """The usage of today until now; writes down that of each day that is over. Used from one event loop.

    Each question counts the facts that became durable since the last one. :meth:`run` asks now and then, so that no
    caller waits for many of them. Durable facts do not change, whatever becomes of the writer. A daemon that starts
    continues with the first day that is not written down.
    """

    def __init__(self, journal: Journal, settled: Settled, keep_days: int = 36_500) -> None:
        self._journal = journal
        self._settled = settled
        self._keep_days = keep_days
        self._busy = anyio.Lock()
        self._state = State()
        self._ledger: UsageLedger | None = None
        self._day = 0
        #: the last fact that was booked
        self._seq = 0
        #: the day with which it began
        self.first_day = 0
        #: the last day on which it was looked what is too old
        self._cut_on = 0
        #: why the last :meth:`run_once` failed; "": it has not
        self.trouble = ""

    async def run(self) -> None:
        """Book what there is, and delete what is too old, for ever."""
        while True:
            await anyio.sleep(EVERY_S)
            try:
                await self.run_once()
            except (Unavailable, JournalError, FactsGone, BrokenInvariant, sqlite3.Error) as error:
                # Reports and space suffer; what is promised does not.
                log.warning("journal_retention_failed", reason=str(error))

    async def run_once(self) -> None:
        """Now. Raises what :meth:`usage` does, and JournalDamaged where facts could not be booked."""
        try:
            now, durable = await self._settled()
            usage = await self.usage(now, durable, PAUSE_S)
            if self._cut_on != now // DAY and not self._journal.tight:
                await self._cut(now // DAY)
                self._cut_on = now // DAY
            if usage.unreadable:
                raise JournalDamaged(self._journal.path, f"fact {usage.unreadable[0]} is damaged or missing")
        except Exception as error:
            self.trouble = str(error) or type(error).__name__
            raise
        self.trouble = ""

    async def _cut(self, today: int) -> None:
        """Delete the facts of days that are too old."""
        found, deleted = await self._journal.state_before(today - self._keep_days), 0
        if found is not None and found[0] >= self._journal.first:
            await self._journal.cut(found[0], found[1])
        while count := await self._journal.sweep((today - AUDIT_DAYS) * DAY):
            deleted += count
            await anyio.sleep(PAUSE_S)
        if deleted:
            log.info("facts_cut", facts=deleted, first=self._journal.first)

    async def usage(self, now: Millis, durable: int, pause_s: float = 0) -> DailyUsage:
        """What was booked today until ``now``, of all facts up to ``durable``; a copy.

        Raises:
            FactsGone, JournalError: what is there of today cannot be read, or a day that is over not be written down.
        """
        async with self._busy:
            try:
                ledger = await self._booked(now, durable, pause_s)
            except BaseException:  # half of a fact may be booked
                self._ledger = None
                raise
            usage = DailyUsage()  # one that stays as it is
            usage.add(ledger.close(now)[0])
            return usage

    async def between(
        self, since: Millis | None, until: Millis | None, now: Millis, durable: int
    ) -> tuple[DailyUsage, Millis]:
        """What was booked from ``since`` (or the beginning) until ``until`` (or now), and the end of that span.

        Raises:
            FactsGone: the span begins or ends within a day whose facts are gone.
        """
        end = now if until is None else min(until, now)
        fresh = None
        with suppress(JournalError):  # what is over cannot be written down now: the facts say it
            fresh = await self.usage(now, durable)
        days = await self._journal.days()
        first = min(days, default=self.first_day) * DAY
        at = first if since is None else max(since, first)
        total = DailyUsage()
        while at < end:
            day, ends, booked = at // DAY, (at // DAY + 1) * DAY, None
            if at == day * DAY and ends <= end and day in days:
                booked = await _stored_usage(self._journal, day)
            elif at == day * DAY and end == now < ends:
                booked, ends = fresh, end
            if booked is None:
                ends = end if day not in days else min(end, ends)
                begun, _, state = await _begin(self._journal, day)
                ledger = UsageLedger(since=at, until=None if until is None and day not in days else ends, state=state)
                await _fold(self._journal, ledger, begun, durable, PAUSE_S)
                booked = ledger.close(now)[0]
            total.add(booked)
            at = ends
        return total, max(end, 0)

    async def _booked(self, now: Millis, durable: int, pause_s: float) -> UsageLedger:
        ledger = self._ledger or await self._begun(now // DAY)
        while True:
            self._seq = await _fold(self._journal, ledger, self._seq, durable, pause_s)
            end = (self._day + 1) * DAY
            if now < end:
                return ledger
            if self._journal.tight:  # what room there is belongs to what frees GPUs
                raise JournalFailed(f"{self._journal.path}: {DISK_FULL}")
            usage = ledger.close()[0]
            if not usage.unreadable:
                closed = await to_thread.run_sync(compress, msgspec.json.encode(usage))
                await self._journal.close_day(self._day, closed, self._seq, msgspec.json.encode(self._state))
            self._day += 1
            self._ledger = ledger = UsageLedger(since=end, until=end + DAY, state=self._state)
            for seq in usage.unreadable:  # the state still lacks what they said
                ledger.miss(seq)

    async def _begun(self, today: int) -> UsageLedger:
        """The first day that is not written down, from its beginning."""
        self._seq, day, self._state = await _begin(self._journal, today)
        if day is None:
            first = await self._journal.read(0, BATCH)
            day = next((fact.at // DAY for _, fact in first if not isinstance(fact, Unreadable)), today)
        self.first_day = self._day = day
        self._ledger = UsageLedger(since=self._day * DAY, until=(self._day + 1) * DAY, state=self._state)
        return self._ledger


async def _stored_usage(journal: Journal, day: int) -> DailyUsage | None:
    """What was booked of a day; None: it is damaged."""
    try:
        return msgspec.json.decode(decompress(await journal.usage_of(day)), type=DailyUsage)
    except (zlib_error, msgspec.MsgspecError):
        return None


async def _begin(journal: Journal, day: int) -> tuple[int, int | None, State]:
    """The nearest state that is there of this day's beginning or before: its last fact, its day, and the state itself.

    Without a day: the empty one, before the first fact. Raises FactsGone.
    """
    if (found := await journal.state_before(day)) is not None:
        return found[0], found[1], msgspec.json.decode(found[2], type=State)
    if journal.first > 1:
        raise FactsGone(journal.first)
    return 0, None, State()


async def _fold(journal: Journal, ledger: UsageLedger, after: int, durable: int, pause_s: float = 0) -> int:
    """Show a ledger the facts that follow, until it has enough; the last one that it took."""
    while after < durable:
        batch = await journal.read(after, BATCH)
        if journal.first > after + 1:
            raise FactsGone(journal.first)
        if not batch:
            break
        for seq, fact in batch:
            if seq > durable:
                return after
            if isinstance(fact, Unreadable):
                ledger.miss(seq)
            elif not ledger.see(fact):
                return after
            after = seq
        await anyio.sleep(pause_s)
    return after
