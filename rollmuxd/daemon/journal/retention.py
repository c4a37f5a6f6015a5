"""Keeps the journal small: closes the usage of each day, and deletes facts that are old.

A day here is a day of UTC. ``snapshots`` has the state at its beginning, until facts after that are cut. ``usage`` has
what was booked in it (:class:`~rollmuxd.daemon.usage.ledger.DailyUsage`), once it is over.

*Booking* folds a day that is over into its usage. *Cutting* leaves out all facts before some day. *Sweeping* deletes
their rows and gives the pages back (``docs/decisions/0014-compaction.md``). Each is a small commit between other
commits: a daemon that is killed continues where it was.

Today is never cut, so what was seen a moment ago is always there.
"""

import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar
from zlib import compress

import anyio
import anyio.from_thread
import anyio.to_thread
import msgspec
import structlog
from msgspec import Struct

from rollmuxd.core.facts import KINDS
from rollmuxd.core.ids import Millis
from rollmuxd.core.state import State
from rollmuxd.daemon.journal import file
from rollmuxd.daemon.journal.file import JournalDamaged, JournalFailed, JournalRefused, connect, rows_after
from rollmuxd.daemon.journal.store import Journal
from rollmuxd.daemon.usage.ledger import UsageLedger

T = TypeVar("T")
log = structlog.get_logger("rollmuxd.journal")

DAY: Final = 86_400_000
#: facts that are folded between two breaths: one or two milliseconds, which is what the loop may have to wait
BATCH: Final = 200
#: rows that are deleted, and pages that are given back, in one commit
DELETED: Final = 500
PAGES: Final = 32
#: free pages that stay in the file: new facts take them
SPARE_PAGES: Final = 256
#: how long a daemon's other work has the disk between two of these
PAUSE_S: Final = 0.005
#: how often a daemon looks whether there is something to do, and how soon after its start
EVERY_S: Final = 3_600.0
FIRST_S: Final = 60.0
#: what to do about damage that is found here: whether a daemon would start on it says the check
REMEDY: Final = "`rollmuxd journal check` says what is damaged, and what to do"
#: facts that record an operator's or caller's action: they are kept longer than the others
LASTING: Final = tuple(
    sorted(
        str(kind.__struct_config__.tag)
        for kind in KINDS
        if "who" in kind.__struct_fields__
        or ("by" in kind.__struct_fields__ and kind.__struct_config__.tag != "session_fenced")
    )
)


class Keep(NamedTuple):
    """How long facts are kept, and how much of them."""

    days: int
    bytes: int
    audit_days: int


class RetentionRun(Struct, frozen=True):
    """What was done."""

    #: days whose usage was closed
    booked: int
    #: facts that were deleted
    cut: int
    #: the first fact that is there
    first: int
    bytes_before: int
    bytes_after: int


Write = Callable[[Callable[[sqlite3.Connection], Any]], Any]


class Retention:
    """Books, cuts and sweeps one journal. Blocks: it belongs into a thread, or into a command.

    ``write`` runs something in a transaction of the journal's writer. ``pause`` is called between two batches; what it
    raises ends the work there, and the next run continues.
    """

    def __init__(
        self,
        path: Path,
        keep: Keep,
        write: Write,
        *,
        pause: Callable[[], None] = lambda: None,
        on_cut: Callable[[int], None] | None = None,
    ) -> None:
        self._path = path
        self._keep = keep
        self._write_now = write
        self._pause = pause
        self._on_cut = on_cut

    def run_once(self, now: Millis, durable: int) -> RetentionRun:
        """Do what there is to do. All facts up to ``durable`` are from before ``now``, and all others from after it.

        Raises:
            JournalError: a fact is damaged or cannot be read, or nothing can be written.
        """
        try:
            return self._run_once(now, durable)
        except JournalDamaged as error:
            raise JournalDamaged(error.path, error.what, REMEDY) from error

    def _run_once(self, now: Millis, durable: int) -> RetentionRun:
        with closing(connect(self._path, readonly=True)) as connection:
            before = _size(connection)
            booked = self._book(connection, now, durable)
            day = self._day_to_cut(connection, now)
            if day is not None:
                self._cut(connection, day)
            cut = self._vacuum(connection, now)
            first = file.cut_of(connection) + 1
            return RetentionRun(booked, cut, first, before, _size(connection))

    def _write(self, operation: Callable[[sqlite3.Connection], T]) -> T:
        result: T = self._write_now(operation)
        self._pause()
        return result

    # ---- booking ---------------------------------------------------------------------------------------------------

    def _book(self, connection: sqlite3.Connection, now: Millis, durable: int) -> int:
        """Close the usage of every day that is over."""
        begun = self._begin(connection)
        if begun is None:
            return 0
        first, last, state = begun
        day = first
        while (day + 1) * DAY <= now:
            ledger = UsageLedger(since=day * DAY, until=(day + 1) * DAY, state=state)
            last = self._fold(connection, ledger, last, durable)
            usage, _ = ledger.close(now)
            closed = compress(msgspec.json.encode(usage.without_zeros()))
            self._write(partial(_close_day, day, closed, last, file.packed(msgspec.json.encode(state))))
            day += 1
        return day - first

    def _begin(self, connection: sqlite3.Connection) -> tuple[int, int, State] | None:
        """The day whose usage is open, the last fact before it, and the state then."""
        row = connection.execute(f"{file.STATES} WHERE day IS NOT NULL ORDER BY day DESC LIMIT 1").fetchone()
        if row is not None:
            return row[3], row[2], self._state_of(row)
        first = connection.execute("SELECT at FROM facts ORDER BY seq LIMIT 1").fetchone()
        if first is None:
            return None
        day = first[0] // DAY
        body = file.packed(msgspec.json.encode(State()))
        self._write(lambda writer: file.keep_state(writer, 0, body, day))
        return day, 0, State()

    def _state_of(self, row: tuple[Any, ...]) -> State:
        """The state at a day's beginning. Raises JournalDamaged."""
        if (state := file.whole(row[0], row[1])) is None:
            raise JournalDamaged(self._path, f"the state at the beginning of {date_of(row[3])} is damaged")
        return msgspec.json.decode(state, type=State)

    def _fold(self, connection: sqlite3.Connection, ledger: UsageLedger, last: int, durable: int) -> int:
        """Book facts until the ledger has enough; the last one that it took."""
        # Batches, and no cursor that stays open: it would keep the log from being folded into the file.
        while last < durable:
            rows = list(rows_after(connection, last, self._path, until=min(last + BATCH, durable)))
            if not rows:
                raise JournalDamaged(self._path, f"facts from {last + 1} on are missing")
            for seq, body in rows:
                if not ledger.see(file.decode(self._path, seq, body)):
                    return last
                last = seq
            self._pause()
        return last

    # ---- cutting ---------------------------------------------------------------------------------------------------

    def _day_to_cut(self, connection: sqlite3.Connection, now: Millis) -> int | None:
        """The day before whose beginning all facts may go; None: nothing may."""
        cut = file.cut_of(connection)
        days = connection.execute(
            "SELECT day, seq FROM snapshots WHERE seq > ? AND day <= ? ORDER BY day",
            (cut, now // DAY),
        ).fetchall()
        old = now // DAY - self._keep.days
        wanted = [day for day, _ in days if day <= old]
        size, last = _size(connection), file.last_of(connection)
        if size > self._keep.bytes and last > cut:
            # As if all facts were of one size; what the next look finds is done then.
            over = (last - cut) * (size - self._keep.bytes) // size
            wanted += [day for day, seq in days if seq >= cut + over][:1] or [day for day, _ in days][-1:]
        return max(wanted, default=None)

    def _cut(self, connection: sqlite3.Connection, day: int) -> None:
        # Here and not in the writer, which would take what fails in it for a failure of its own.
        row = connection.execute(f"{file.STATES} WHERE day = ?", (day,)).fetchone()
        self._state_of(row)  # nothing goes that could not be begun without
        seq = row[2]

        def cut(writer: sqlite3.Connection) -> None:
            file.set_meta(writer, "cut", str(seq))
            writer.execute("DELETE FROM snapshots WHERE seq < ? OR day < ?", (seq, day))
            if self._on_cut is not None:
                self._on_cut(seq + 1)

        self._write(cut)
        log.info("facts_cut", up_to=seq, day=date_of(day))

    # ---- sweeping --------------------------------------------------------------------------------------------------

    def _vacuum(self, connection: sqlite3.Connection, now: Millis) -> int:
        """Delete what is cut off, and give pages back."""
        cut, last, deleted = file.cut_of(connection), 0, 0
        goes = f"seq > ? AND seq <= ? AND (at < ? OR kind NOT IN ({','.join('?' * len(LASTING))}))"
        old = (now - self._keep.audit_days * DAY, *LASTING)
        some = f"SELECT seq FROM facts WHERE {goes} ORDER BY seq LIMIT {DELETED}"  # noqa: S608  # question marks only
        delete = f"DELETE FROM facts WHERE {goes}"  # noqa: S608  # the same
        while rows := connection.execute(some, (last, cut, *old)).fetchall():
            span, last = (last, rows[-1][0]), rows[-1][0]
            self._write(partial(_delete, delete, (*span, *old)))
            deleted += len(rows)
        if connection.execute("PRAGMA auto_vacuum").fetchone()[0] == 2:
            while (free := _free(connection)) > SPARE_PAGES:
                self._write(_give_back)
                if _free(connection) >= free:
                    break
        return deleted


def _size(connection: sqlite3.Connection) -> int:
    """Bytes of pages that are in use."""
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    return int((pages - _free(connection)) * connection.execute("PRAGMA page_size").fetchone()[0])


def _free(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA freelist_count").fetchone()[0])


def _close_day(day: int, usage: bytes, seq: int, state: bytes, connection: sqlite3.Connection) -> None:
    connection.execute("INSERT OR REPLACE INTO usage (day, body) VALUES (?, ?)", (day, usage))
    file.keep_state(connection, seq, state, day + 1)


def _delete(statement: str, values: Sequence[object], connection: sqlite3.Connection) -> None:
    connection.execute(statement, values)


def _give_back(connection: sqlite3.Connection) -> None:
    # A page is given back with each row that is fetched.
    connection.execute(f"PRAGMA incremental_vacuum({PAGES})").fetchall()


def date_of(day: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(day * 86_400))


# ---- in the daemon ---------------------------------------------------------------------------------------------------


class RetentionTask:
    """Tends the journal of a running daemon, now and then. ``settled`` tells the time, and the last fact before it."""

    def __init__(self, journal: Journal, keep: Keep, settled: Callable[[], Any]) -> None:
        self._journal = journal
        self._keep = keep
        self._settled = settled
        self._busy = anyio.Lock()
        #: why the last time failed; "": it has not
        self.trouble = ""

    async def run(self) -> None:
        """For ever."""
        await anyio.sleep(FIRST_S)
        while True:
            try:
                await self.run_once()
            except (JournalRefused, JournalFailed, sqlite3.Error) as error:
                # Reports and space suffer; what is promised does not.
                log.warning("journal_retention_failed", reason=str(error))
            except Exception:
                log.exception("journal_retention_failed")
            await anyio.sleep(EVERY_S)

    async def run_once(self) -> RetentionRun:
        """Now. Raises JournalError, or Unavailable."""
        try:
            async with self._busy:
                done = await self._run_once()
        except Exception as error:
            self.trouble = str(error) or type(error).__name__
            raise
        self.trouble = ""
        return done

    async def _run_once(self) -> RetentionRun:
        journal = self._journal
        if journal.tight:
            raise JournalFailed(f"{journal.path}: the disk is full: first there must be room again")
        now, durable = await self._settled()

        def pause() -> None:
            # A thread cannot be cancelled: it has to look. To book many facts takes minutes, and a stopping daemon must
            # not wait for it.
            anyio.from_thread.check_cancelled()
            time.sleep(PAUSE_S)

        async def operate(operation: Callable[[sqlite3.Connection], T]) -> T:
            # What is on its way to the disk gets there: it must not arrive during the work of the task that follows.
            with anyio.CancelScope(shield=True):
                result = await journal.operate(operation)
            return result  # noqa: RET504  # within, mypy takes the scope for one that may swallow an error

        def write(operation: Callable[[sqlite3.Connection], T]) -> T:
            return anyio.from_thread.run(operate, operation)

        retention = Retention(journal.path, self._keep, write, pause=pause, on_cut=journal.begins_with)
        done = await anyio.to_thread.run_sync(partial(retention.run_once, now, durable))
        if done.booked or done.cut:
            log.info("journal_retention_done", **msgspec.structs.asdict(done))
        return done
