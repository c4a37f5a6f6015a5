"""Keeps the journal small: closes the books of each day, and lets go of facts that are old.

A day here is a day of UTC. The table ``days`` has a row for each: ``state`` is the state at the day's beginning, after
fact ``seq``; ``books`` is what was booked in it (:class:`~rollmuxd.daemon.report.Books`), once it is over. Of days
in a row that begin after the same fact the first has the state, and the one that is open: a clock that jumps makes
thousands of them.

- *Booking* folds the facts of a day that is over into its books. So a report adds up days, and folds facts only where
  its span begins or ends within one.
- *Cutting* lets go of all facts before some day. What they came to is there: the state at that day's beginning, from
  which a replay can begin; the books of the days before; and the facts that people may ask for years later (who did
  what), in ``kept``. The day's state is proven to be readable first, and every step is a commit: a daemon that is
  killed goes on where it was.
- *Sweeping* deletes the rows and gives the pages back, a little at a time, between commits of others.
- *Proving*, once a day, looks at what nobody reads as long as all goes well: at the chain of all facts, and at each
  day's state and books. A day whose row is bad is booked anew. A bad fact before the newest snapshot harms nobody who
  starts; that it is there must be known, since no backup is made of a journal that is not good.

Today is never cut, so what was seen a moment ago is always there. How old a fact is is counted in days that have passed
as far as the facts show it (:func:`ago`): a clock that jumps makes nothing old.
"""

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar, get_args
from zlib import compress, crc32, decompress
from zlib import error as zlib_error

import anyio
import anyio.from_thread
import anyio.to_thread
import msgspec
import structlog
from msgspec import Struct

from rollmuxd.core import facts as core_facts
from rollmuxd.core.facts import AnyFact
from rollmuxd.core.model import Millis
from rollmuxd.core.state import State
from rollmuxd.daemon import journal_file
from rollmuxd.daemon.journal import Journal
from rollmuxd.daemon.journal_file import (
    KNOWN,
    JournalDamaged,
    JournalFailed,
    JournalRefused,
    Reader,
    Tip,
    connect,
    rows_after,
)
from rollmuxd.daemon.report import Ledger

T = TypeVar("T")
log = structlog.get_logger("rollmuxd.journal")

DAY: Final = 86_400_000
#: facts that are folded between two breaths: one or two milliseconds, which is what the loop may have to wait
BATCH: Final = 200
#: rows that are deleted, and pages that are given back, in one commit
SWEPT: Final = 500
PAGES: Final = 32
#: days without a fact whose books are written in one commit
EMPTY_DAYS: Final = 100
#: free pages that stay in the file: new facts take them
SPARE_PAGES: Final = 256
#: how long a daemon's other work has the disk between two of these
PAUSE_S: Final = 0.005
#: how often a daemon looks whether there is something to do, and how soon after its start
EVERY_S: Final = 3_600.0
FIRST_S: Final = 60.0
#: how often all of it is proven; and after each time that something failed
PROVEN_EVERY_S: Final = 86_400.0
#: what to do about damage that is found here: whether a daemon would start on it says the check
REMEDY: Final = "`rollmuxd journal check` says what is damaged, and what to do"
#: days in a row without a fact that are still days that have passed; more of them say nothing (see :func:`ago`)
STRETCH: Final = 7
#: facts that say who did something: they outlive the others
LASTING: Final = tuple(
    sorted(
        str(kind.__struct_config__.tag)
        for kind in get_args(AnyFact)
        if "who" in kind.__struct_fields__
        or ("by" in kind.__struct_fields__ and kind.__struct_config__.tag != "session_fenced")
    )
)


class Keep(NamedTuple):
    """How long facts are kept, and how much of them."""

    days: int
    bytes: int
    audit_days: int


class Tended(Struct, frozen=True):
    """What was done."""

    #: days whose books were closed
    booked: int
    #: facts that were let go of
    cut: int
    #: the first fact that is there
    first: int
    bytes_before: int
    bytes_after: int
    #: the longest that a commit of others can have waited for one of these
    longest_ms: float


Write = Callable[[Callable[[sqlite3.Connection], Any]], Any]


class Care:
    """Books, cuts and sweeps one journal. Blocks: it belongs into a thread, or into a command.

    ``write`` runs something in a transaction of the journal's writer. ``pause`` is called between two batches; what it
    raises ends the work there, and the next time goes on.
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
        self._longest_s = 0.0

    def tend(self, now: Millis, durable: int, *, prove: bool = False) -> Tended:
        """Do what there is to do. All facts up to ``durable`` are from before ``now``, and all others from after it.

        ``prove``: look at all that is there. What is found does not keep the rest from being done.

        Raises:
            JournalError: a fact is damaged or cannot be read, or nothing can be written.
        """
        try:
            return self._tend(now, durable, prove)
        except JournalDamaged as error:
            raise JournalDamaged(error.path, error.what, REMEDY) from error

    def _tend(self, now: Millis, durable: int, prove: bool) -> Tended:
        self._longest_s = 0.0
        with closing(connect(self._path, readonly=True)) as connection:
            before = _size(connection)
            if prove:
                self._prove_days(connection)
            booked = self._book(connection, now, durable)
            day = self._day_to_cut(connection, now)
            if day is not None:
                self._cut(connection, day)
            cut = self._sweep(connection, now)
            if prove:
                self._prove(connection, durable)
            return Tended(
                booked, cut, journal_file.cut_of(connection).seq + 1, before, _size(connection), self._longest_s * 1000
            )

    def _write(self, operation: Callable[[sqlite3.Connection], T]) -> T:
        def timed(connection: sqlite3.Connection) -> T:
            began = time.perf_counter()
            try:
                return operation(connection)
            finally:
                self._longest_s = max(self._longest_s, time.perf_counter() - began)

        result: T = self._write_now(timed)
        self._pause()
        return result

    # ---- booking ---------------------------------------------------------------------------------------------------

    def _book(self, connection: sqlite3.Connection, now: Millis, durable: int) -> int:
        """Close the books of every day that is over."""
        begun = self._begin(connection)
        if begun is None:
            return 0
        day, after, state = begun
        tip = journal_file.tip_at(connection, self._path, after)
        reader, booked = Reader(connection, self._path), 0
        closed: list[bytes] = []
        while (day + 1) * DAY <= now:
            ledger = Ledger(since=day * DAY, until=(day + 1) * DAY, state=state)
            tip = self._fold(connection, reader, ledger, tip, durable)
            books, _ = ledger.close(now)
            closed.append(msgspec.json.encode(books.without_zeros()))
            day += 1
            if tip.seq > after or len(closed) == EMPTY_DAYS or (day + 1) * DAY > now:
                self._write(partial(_close_days, closed, day - len(closed), after, tip.seq, _encoded(state)))
                after, booked, closed = tip.seq, booked + len(closed), []
        return booked

    def _begin(self, connection: sqlite3.Connection) -> tuple[int, int, State] | None:
        """The first day whose books are open, the last fact before it, and the state then."""
        # It has no state itself where what came after it was left out: then some without facts are booked again.
        row = connection.execute(
            "SELECT day, seq, state, sum FROM days WHERE state IS NOT NULL"
            " AND day <= (SELECT min(day) FROM days WHERE books IS NULL) ORDER BY day DESC LIMIT 1"
        ).fetchone()
        if row is not None:
            day, seq, packed, total = row
            return day, seq, state_of(packed, total, self._path, day)
        first = connection.execute("SELECT at FROM facts ORDER BY seq LIMIT 1").fetchone()
        if first is None:
            return None
        day = first[0] // DAY
        self._write(partial(_open_day, day, 0, _encoded(State())))
        return day, 0, State()

    def _fold(self, connection: sqlite3.Connection, reader: Reader, ledger: Ledger, tip: Tip, durable: int) -> Tip:
        """Book facts until the ledger has enough; the last one that it took."""
        for rows in self._proven(connection, tip, durable):
            for seq, body, sum_ in rows:
                fact = reader.decode(seq, body)
                if fact is not None and not ledger.see(fact):
                    return tip
                tip = Tip(seq, sum_)
        return tip

    # ---- proving ---------------------------------------------------------------------------------------------------

    def _proven(self, connection: sqlite3.Connection, tip: Tip, durable: int) -> Iterator[list[tuple[int, bytes, int]]]:
        """The facts after one, some at a time, each proven to follow from the one before. Raises JournalDamaged."""
        # Batches, and no cursor that stays open: it would keep the log from being folded into the file.
        while tip.seq < durable:
            rows = list(rows_after(connection, tip, self._path, until=min(tip.seq + BATCH, durable)))
            if not rows:
                raise JournalDamaged(self._path, f"facts from {tip.seq + 1} on are missing")
            yield rows
            tip = Tip(rows[-1][0], rows[-1][2])
            self._pause()

    def _prove(self, connection: sqlite3.Connection, durable: int) -> None:
        """Raise JournalDamaged if something is damaged that cannot be made again."""
        cut, _ = journal_file.base_of(connection, self._path)
        for day in days_lost(connection):
            raise JournalDamaged(self._path, f"the books of {date_of(day)} are damaged, and its facts are gone")
        for _ in self._proven(connection, cut, durable):
            pass

    def _prove_days(self, connection: sqlite3.Connection) -> None:
        """Have the first day whose state or books cannot be read booked anew, with all that follow it.

        Those before the cut cannot be: their facts are gone. The state at the cut cannot be made again either.
        """
        last = journal_file.tip_of(connection).seq
        query = "SELECT day FROM days WHERE day >= (SELECT min(day) FROM days WHERE state IS NOT NULL) ORDER BY day"
        good, good_seq = None, None
        for (day,) in connection.execute(query).fetchall():
            seq, state, total, books = connection.execute(
                "SELECT seq, state, sum, books FROM days WHERE day = ?", (day,)
            ).fetchone()
            whole = seq == good_seq if state is None else seq <= last and sum_of(state) == total
            if not whole and good is None and journal_file.cut_of(connection).seq:
                return
            if not whole or (books is not None and sum_of(books) is None):
                self._write(partial(_book_anew, day if whole else good))
                log.warning("days_booked_anew", first=date_of(day), reason="what was booked cannot be read")
                return
            if state is not None:
                good, good_seq = day, seq
            self._pause()

    # ---- cutting ---------------------------------------------------------------------------------------------------

    def _day_to_cut(self, connection: sqlite3.Connection, now: Millis) -> int | None:
        """The day before whose beginning all facts may go; None: nothing may."""
        cut = journal_file.cut_of(connection)
        days = connection.execute(
            "SELECT day, seq FROM days WHERE state IS NOT NULL AND seq > ? AND day <= ? ORDER BY day",
            (cut.seq, now // DAY),
        ).fetchall()
        old = ago(connection, now, self._keep.days) // DAY
        wanted = [day for day, _ in days if day <= old]
        size, tip = _size(connection) - _size_of_empty_days(connection), journal_file.tip_of(connection)
        if size > self._keep.bytes and tip.seq > cut.seq:
            # As if all facts were of one size; what the next look finds is done then.
            over = (tip.seq - cut.seq) * (size - self._keep.bytes) // size
            wanted += [day for day, seq in days if seq >= cut.seq + over][:1] or [day for day, _ in days][-1:]
        return max(wanted, default=None)

    def _cut(self, connection: sqlite3.Connection, day: int) -> None:
        # Here and not in the writer, which would take what fails in it for a failure of its own.
        seq, packed, total = connection.execute("SELECT seq, state, sum FROM days WHERE day = ?", (day,)).fetchone()
        state_of(packed, total, self._path, day)  # nothing goes that could not be begun without
        sum_ = journal_file.tip_at(connection, self._path, seq).sum

        def cut(writer: sqlite3.Connection) -> None:
            journal_file.set_meta(writer, "cut", f"{seq} {sum_}")
            writer.execute("UPDATE days SET state = NULL WHERE day < ?", (day,))
            writer.execute("DELETE FROM snapshots WHERE seq < ?", (seq,))
            if self._on_cut is not None:
                self._on_cut(seq + 1)

        self._write(cut)
        log.info("facts_cut", up_to=seq, day=date_of(day))

    # ---- sweeping --------------------------------------------------------------------------------------------------

    def _sweep(self, connection: sqlite3.Connection, now: Millis) -> int:
        """Delete what is cut off, and give pages back."""
        cut, swept = journal_file.cut_of(connection).seq, 0
        while count := self._write(partial(_sweep_some, cut)) if self._left(connection, cut) else 0:
            swept += count
        old = ago(connection, now, self._keep.audit_days)
        if connection.execute("SELECT 1 FROM kept WHERE at < ? LIMIT 1", (old,)).fetchone():
            self._write(lambda writer: writer.execute("DELETE FROM kept WHERE at < ?", (old,)).rowcount)
        if connection.execute("PRAGMA auto_vacuum").fetchone()[0] == 2:
            while (free := _free(connection)) > SPARE_PAGES:
                self._write(_give_back)
                if _free(connection) >= free:
                    break
        return swept

    @staticmethod
    def _left(connection: sqlite3.Connection, cut: int) -> bool:
        return connection.execute("SELECT 1 FROM facts WHERE seq <= ? LIMIT 1", (cut,)).fetchone() is not None


def ago(connection: sqlite3.Connection, now: Millis, days: int) -> Millis:
    """The instant so many days before now, of days that have passed as far as the facts show it.

    A stretch of more than a week without any fact is left out. The machine was off, and nothing came that what is there
    could be too old for; or its clock was set wrong, and what was written yesterday is not years old. So no jump of a
    clock makes facts go, however far it is, and whether it is found or not.
    """
    instant, later = now - days * DAY, now // DAY
    query = (
        "SELECT day FROM (SELECT day, seq, lead(seq) OVER (ORDER BY day) AS after FROM days)"
        " WHERE after > seq AND day < ? ORDER BY day DESC"
    )
    for (day,) in connection.execute(query, (later,)).fetchall():
        if instant >= later * DAY:
            break
        if later - day > STRETCH:
            instant -= (later - day) * DAY
        later = day
    return instant


def _size(connection: sqlite3.Connection) -> int:
    """Bytes of pages that are in use."""
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    return int((pages - _free(connection)) * connection.execute("PRAGMA page_size").fetchone()[0])


def _size_of_empty_days(connection: sqlite3.Connection) -> int:
    """Bytes that days without facts take: a clock that jumps makes thousands, and no fact is to go for them."""
    query = (
        "SELECT coalesce(sum(coalesce(length(state), 0) + coalesce(length(books), 0)), 0) FROM ("
        "SELECT seq, state, books, lead(seq) OVER (ORDER BY day) AS after FROM days) WHERE after = seq"
    )
    return int(connection.execute(query).fetchone()[0])


def _free(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA freelist_count").fetchone()[0])


def _encoded(state: State) -> bytes:
    return msgspec.json.encode(state)


def _open_day(day: int, seq: int, state: bytes, connection: sqlite3.Connection) -> None:
    insert = "INSERT OR REPLACE INTO days (day, seq, state, books, sum) VALUES (?, ?, ?, NULL, ?)"
    connection.execute(insert, (day, seq, compress(state), crc32(state)))


def _close_days(closed: list[bytes], day: int, begun: int, seq: int, state: bytes, writer: sqlite3.Connection) -> None:
    """Write down the books of days that all begin after one fact, the first of which is open; and open the next."""
    writer.execute(
        "UPDATE days SET state = NULL WHERE day = ?"
        " AND EXISTS (SELECT 1 FROM days WHERE seq = ? AND day < ? AND state IS NOT NULL)",
        (day, begun, day),
    )
    writer.execute("UPDATE days SET books = ? WHERE day = ?", (compress(closed[0]), day))
    writer.executemany(
        "INSERT OR REPLACE INTO days (day, seq, state, books, sum) VALUES (?, ?, NULL, ?, 0)",
        [(day + number, begun, compress(books)) for number, books in enumerate(closed[1:], 1)],
    )
    _open_day(day + len(closed), seq, state, writer)


def _book_anew(day: int | None, connection: sqlite3.Connection) -> None:
    """Forget the books of this day, and all of those after it; None: of all days."""
    connection.execute("DELETE FROM days WHERE day > ?", (-1 if day is None else day,))
    connection.execute("UPDATE days SET books = NULL WHERE day = ?", (day,))


def sum_of(packed: bytes) -> int | None:
    """The checksum of what was packed; None: it cannot be unpacked, which has a checksum of its own."""
    try:
        return crc32(decompress(packed))
    except (zlib_error, TypeError):
        return None


def as_written(seq: int, at: Millis, kind: str, body: bytes | str) -> bool:
    """Whether a row of ``kept`` is a fact. It has no checksum: what is changed and still is a fact does not show."""
    try:
        fact = core_facts.decode(body)
    except (msgspec.MsgspecError, TypeError):
        return seq > 0 and kind not in KNOWN  # another version's
    return seq > 0 and (core_facts.name(fact), fact.at) == (kind, at)


def days_lost(connection: sqlite3.Connection) -> list[int]:
    """The days whose books cannot be read, and not be made again: their facts are gone."""
    days = connection.execute(
        "SELECT day FROM days WHERE books IS NOT NULL"
        " AND day < coalesce((SELECT min(day) FROM days WHERE state IS NOT NULL), 9e9) ORDER BY day"
    ).fetchall()
    books = "SELECT books FROM days WHERE day = ?"
    return [day for (day,) in days if sum_of(connection.execute(books, (day,)).fetchone()[0]) is None]


def _sweep_some(cut: int, connection: sqlite3.Connection) -> int:
    """Some of the rows up to the cut: the lasting ones to ``kept``, then all of them go."""
    rows = connection.execute("SELECT seq FROM facts WHERE seq <= ? ORDER BY seq LIMIT ?", (cut, SWEPT)).fetchall()
    if not rows:
        return 0
    span = (rows[0][0], rows[-1][0])
    places = ",".join("?" * len(LASTING))
    which = f"WHERE seq BETWEEN ? AND ? AND kind IN ({places})"
    copy = f"INSERT OR IGNORE INTO kept (seq, at, kind, body) SELECT seq, at, kind, body FROM facts {which}"  # noqa: S608  # question marks only
    connection.execute(copy, (*span, *LASTING))
    connection.execute("DELETE FROM facts WHERE seq BETWEEN ? AND ?", span)
    return len(rows)


def _give_back(connection: sqlite3.Connection) -> None:
    # A page is given back with each row that is fetched.
    connection.execute(f"PRAGMA incremental_vacuum({PAGES})").fetchall()


def state_of(packed: bytes | None, total: int, path: Path, day: int) -> State:
    """The state of a row of ``days``. Raises JournalDamaged."""
    try:
        body = decompress(packed or b"")
        if crc32(body) != total:
            raise ValueError("its checksum does not fit")
        return msgspec.json.decode(body, type=State)
    except (ValueError, TypeError, zlib_error) as error:
        raise JournalDamaged(path, f"the state at the beginning of {date_of(day)} cannot be read ({error})") from error


def date_of(day: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(day * 86_400))


# ---- in the daemon ---------------------------------------------------------------------------------------------------


class Keeper:
    """Tends the journal of a running daemon, now and then. ``settled`` tells the time, and the last fact before it."""

    def __init__(self, journal: Journal, keep: Keep, settled: Callable[[], Any]) -> None:
        self._journal = journal
        self._keep = keep
        self._settled = settled
        self._busy = anyio.Lock()
        #: why the last time failed; "": it has not
        self.trouble = ""
        self._proven_at = -PROVEN_EVERY_S

    async def run(self) -> None:
        """For ever."""
        await anyio.sleep(FIRST_S)
        while True:
            try:
                await self.tend(prove=anyio.current_time() >= self._proven_at + PROVEN_EVERY_S)
            except (JournalRefused, JournalFailed, sqlite3.Error) as error:
                # Reports and space suffer; what is promised does not.
                log.warning("journal_not_tended", reason=str(error))
            except Exception:
                log.exception("journal_not_tended")
            await anyio.sleep(EVERY_S)

    async def tend(self, *, prove: bool = False) -> Tended:
        """Now. Raises JournalError, or Unavailable."""
        try:
            async with self._busy:
                done = await self._tend(prove or bool(self.trouble))
        except Exception as error:
            self.trouble = str(error) or type(error).__name__
            raise
        self.trouble = ""
        return done

    async def _tend(self, prove: bool) -> Tended:
        journal = self._journal
        if journal.tight:
            raise JournalFailed(f"{journal.path}: the disk is full: first there must be room again")
        now, durable = await self._settled()

        # A thread cannot be cancelled: it has to look. To prove all of a large journal takes the better part of an
        # hour, and a daemon that is told to stop must not wait for it.
        given_up = threading.Event()

        def pause() -> None:
            anyio.from_thread.check_cancelled()
            if given_up.wait(PAUSE_S):
                raise asyncio.CancelledError

        async def operate(operation: Callable[[sqlite3.Connection], T]) -> T:
            # What is on its way to the disk gets there: who comes next must not find it come in the midst of its work.
            with anyio.CancelScope(shield=True):
                result = await journal.operate(operation)
            return result  # noqa: RET504  # within, mypy takes the scope for one that may swallow an error

        def write(operation: Callable[[sqlite3.Connection], T]) -> T:
            return anyio.from_thread.run(operate, operation)

        care = Care(journal.path, self._keep, write, pause=pause, on_cut=journal.begins_with)
        try:
            done = await anyio.to_thread.run_sync(partial(care.tend, now, durable, prove=prove))
        finally:
            given_up.set()  # of who is cancelled as a task, and not by a scope, the thread would not hear
        if prove:
            self._proven_at = anyio.current_time()
        if done.booked or done.cut:
            log.info("journal_tended", **msgspec.structs.asdict(done))
        return done


def compact(state_dir: Path, keep: Keep) -> Tended:
    """The same for a journal that no daemon uses.

    Raises:
        JournalInUse: one does.
        JournalRefused: it cannot be used.
        JournalFailed: it cannot be read or written just now.
    """
    path = state_dir / "journal.sqlite3"
    if not path.is_file():
        raise JournalRefused(f"{path}: there is no journal; name its state directory with --state-dir or --config")
    held = journal_file.lock(state_dir)
    try:
        journal_file.refuse_lost(path)
        journal_file.prepare(path)
        with closing(connect(path)) as writer:
            journal_file.mend(writer, path)
            last = journal_file.tip_of(writer)
            at = writer.execute("SELECT at FROM facts WHERE seq = ?", (last.seq,)).fetchone()

            def write(operation: Callable[[sqlite3.Connection], T]) -> T:
                writer.execute("BEGIN IMMEDIATE")
                try:
                    result = operation(writer)
                except BaseException:
                    writer.execute("ROLLBACK")
                    raise
                writer.execute("COMMIT")
                return result

            # A daemon that starts goes on no earlier than its last fact, whatever the clock says.
            now = max(int(time.time() * 1000), at[0] if at else 0)
            return Care(path, keep, write).tend(now, last.seq, prove=True)
    except sqlite3.Error as error:
        raise journal_file.unreadable(path, "it", error) from error
    finally:
        journal_file.unlock(held)
