"""The journal: facts, durable and in order, in one SQLite file that people can open and read.

What may be relied on:

- What ``append`` has answered for survives ``kill -9`` and loss of power (WAL, ``synchronous=FULL``).
- Appends become durable in the order in which they were made; after one has failed, all fail until ``recover``.
- ``read`` and ``load`` see durable facts only.

One thread owns the connection that writes. It takes everything that waits, writes it in one transaction, and wakes all
callers: one fsync for all (group commit). So the event loop never waits for a disk, and a slow disk costs latency, not
throughput.

**When the disk is full.** A file of 16 MB, ``reserve``, lies beside the database. It is deleted when a commit finds the
disk full, and the commit is tried again. That is room for some fifty thousand facts, so slots in use can still be
released and backends can still report. Meanwhile :attr:`~Journal.tight` is true, and the writer refuses what would make
more work. The reserve is made again when there is room.

What the file looks like, what damage to it is and what is done about it, and the errors: :mod:`.file`.
"""

import asyncio
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar, cast
from zlib import crc32

import structlog
from msgspec import json, structs

from rollmuxd.core import facts as core_facts
from rollmuxd.core.facts import Fact
from rollmuxd.core.ids import Millis
from rollmuxd.daemon.access.keys import ApiKey, Role
from rollmuxd.daemon.journal import file
from rollmuxd.daemon.journal.file import JournalFailed, JournalRefused, Mark, Unreadable

T = TypeVar("T")
R = TypeVar("R", bound=tuple[Any, ...])
#: what :attr:`Journal.tight` means for callers
DISK_FULL: Final = "the disk of the state directory is full: only what frees GPUs is done"
log = structlog.get_logger("rollmuxd.journal")

RESERVE_BYTES: Final = 16_000_000
#: snapshots kept: the newest, and one more in case that is damaged
SNAPSHOTS_KEPT: Final = 2
#: facts that are deleted in one commit, for which others wait
SWEPT: Final = 500
#: bytes of facts that are read at a time
READ_BYTES: Final = 1_000_000
#: SQLite's own limit is 32,766 parameters a statement, at five a row
_ROWS_A_STATEMENT: Final = 4_000
_INSERT: Final = "INSERT INTO facts (seq, at, kind, body, sum) VALUES"
#: file systems on which SQLite's WAL does not work (its index is memory shared between processes of one machine)
REMOTE_FILESYSTEMS: Final = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "9p", "fuse.sshfs", "fuse.rclone")

#: number, time, name, body and checksum
_Row: TypeAlias = tuple[int, int, str, str, int]


class Past(NamedTuple):
    """What a journal holds: a snapshot, if there is one, and the facts after it."""

    #: the number of the last fact that the snapshot holds; 0: none
    seq: int
    snapshot: bytes | None
    #: lazily read and decoded; to be run through once
    facts: Generator[tuple[int, Fact]]


class _Write(NamedTuple):
    """One thing for the writer thread: rows of facts, or an operation of another kind; and the future of its caller."""

    rows: Sequence[_Row]
    operation: Callable[[sqlite3.Connection], Any] | None
    future: "asyncio.Future[Any]"


class Journal:
    """Facts in ``<state_dir>/journal.sqlite3``. Open it with :meth:`open`; use it from one event loop."""

    def __init__(self, path: Path, lock: int, away_ms: Millis) -> None:
        self.path = path
        self._lock = lock
        self._reserve = path.with_name("reserve")
        self._queue: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._failed: JournalFailed | None = None
        self._writer = file.connect(path)
        #: stays open: where a disk can be written no longer, the log cannot be opened any more, and can still be read
        self._reader = file.connect(path, readonly=True)
        #: ``last_seq``: the number of the last durable fact; the writer thread's
        self.id, self.last_seq, self.incarnation = file.mark_now(self._writer)
        #: as they were when the journal was opened
        self.notes = file.notes(self._writer)
        #: the time of the last fact when the journal was opened; 0: there is none
        last = "SELECT at FROM facts ORDER BY seq DESC LIMIT 1"
        self.last_at: Millis = next(self._writer.execute(last), (0,))[0]
        self._thread = threading.Thread(target=self._write, name="journal-writer", daemon=True)
        self._reader_thread = ThreadPoolExecutor(1, thread_name_prefix="journal-reader")
        #: for how long no daemon used the journal before this one, to :data:`~rollmuxd.daemon.writer.LOOK_AFTER_S`
        self.away_ms = away_ms
        self._mark = os.open(file.mark_of(path), os.O_WRONLY)
        #: the first fact that is there; those before it were compacted away
        self.first = self.notes.cut + 1
        #: the reserve is spent: what makes more work has to be refused
        self.tight = False
        self._make_reserve()
        self._thread.start()

    @classmethod
    def open(cls, state_dir: Path) -> "Journal":
        """Open the journal in this directory, making both where there are none.

        Raises:
            JournalRefused: it is on a network file system, closed to this user, damaged, of another format, or one was
                used here and is gone.
            JournalFailed: another daemon uses the directory, or it cannot be used just now.
        """
        path = state_dir / "journal.sqlite3"
        with file.refusals(path), ExitStack() as unless_open:
            state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            if (mode := state_dir.stat().st_mode & 0o777) & 0o077:
                cure = f"chmod 700 {state_dir}"
                log.warning("state_directory_open_to_others", path=str(state_dir), mode=f"{mode:04o}", cure=cure)
            refuse_remote(state_dir, Path("/proc/self/mountinfo").read_text())
            lock = file.lock(state_dir)
            unless_open.callback(os.close, lock)
            # A daemon that comes back to a full disk has slots to release, too. It is made again below.
            path.with_name("reserve").unlink(missing_ok=True)
            journal = cls(path, lock, file.prepare(path))
            unless_open.pop_all()
            return journal

    # ---- writing ---------------------------------------------------------------------------------------------------

    def append(self, facts: Sequence[tuple[int, Fact]]) -> "asyncio.Future[None]":
        """Make numbered facts durable. Awaiting the answer returns when they are.

        No coroutine but a future, so that the facts are on their way when this returns, and in the order of the calls.

        Raises:
            JournalFailed: (when awaited) they are not durable, or that is unknown.
        """
        rows = []
        for seq, fact in facts:
            body = core_facts.encode(fact)
            rows.append((seq, fact.at, core_facts.name(fact), body.decode(), crc32(body, seq & 0xFFFFFFFF)))
        return self._put(rows, None)

    async def snapshot(self, seq: int, body: bytes) -> None:
        """Keep the state as it is after fact ``seq``, so that a restart needs to replay only what comes after."""
        writer = self._writer
        # Beside the writer's thread: a large one (10,000 jobs: tens of megabytes) would hold each commit up for most of
        # a second.
        packed = await asyncio.get_running_loop().run_in_executor(None, file.packed, body)

        def write(connection: sqlite3.Connection) -> None:
            if connection is not writer:
                return  # a commit failed meanwhile, and the state's facts may not have been written
            file.keep_state(connection, seq, packed)
            connection.execute(
                "DELETE FROM snapshots WHERE day IS NULL AND seq NOT IN"
                " (SELECT DISTINCT seq FROM snapshots WHERE day IS NULL ORDER BY seq DESC LIMIT ?)",
                (SNAPSHOTS_KEPT,),
            )

        await self.operate(write)

    async def add_key(self, key: ApiKey) -> None:
        """Keep an API key. Raises ValueError when there is one of that id."""
        insert, values = "INSERT OR IGNORE INTO keys VALUES (?, ?, ?, ?, ?, ?, ?, ?)", structs.astuple(key)
        if not await self.operate(lambda writer: writer.execute(insert, values).rowcount):
            raise ValueError(f"there is an API key {key.id!r} already")

    async def list_keys(self) -> list[ApiKey]:
        """All API keys, revoked ones too, by id."""
        rows = await self._ask(lambda reader: reader.execute("SELECT * FROM keys ORDER BY id").fetchall())
        return [ApiKey(id_, owner, user, Role(role), *rest) for id_, owner, user, role, *rest in rows]

    async def revoke_key(self, key_id: str, now: Millis) -> bool:
        """From now on this API key opens nothing. Tells whether there is such a key."""
        # The first time counts: when it stopped to open things is what one wants to know afterwards.
        query = "UPDATE keys SET revoked_at = coalesce(revoked_at, ?) WHERE id = ?"
        return await self.operate(lambda writer: writer.execute(query, (now, key_id)).rowcount == 1)

    async def note_left_alone(self, switch: str, reason: str) -> None:
        """Keep why an operator leaves an optical switch alone; an empty reason: it is left alone no longer."""

        def write(connection: sqlite3.Connection) -> None:
            noted = file.notes(connection).left_alone | {switch: reason}
            noted = {name: why for name, why in noted.items() if why}
            file.note(connection, left_alone=json.encode(noted).decode())

        await self.operate(write)

    async def operate(self, operation: Callable[[sqlite3.Connection], T]) -> T:
        """Run something in a transaction of the writer's: upkeep, in small pieces, since commits wait for it."""
        return cast("T", await self._put((), operation))

    def touch(self) -> None:
        """Note that the journal is used (:attr:`away_ms` of the next one). Should that fail, nothing else does."""
        self._reader_thread.submit(os.utime, self._mark)

    async def close_day(self, day: int, usage: bytes, seq: int, state: bytes) -> None:
        """Keep the usage of a day that is over, and the state after its last fact ``seq``."""
        packed = await asyncio.get_running_loop().run_in_executor(None, file.packed, state)

        def write(connection: sqlite3.Connection) -> None:
            connection.execute("INSERT OR REPLACE INTO usage (day, body) VALUES (?, ?)", (day, usage))
            file.keep_state(connection, seq, packed, day + 1)

        await self.operate(write)

    async def cut(self, seq: int, day: int) -> None:
        """Leave out the facts up to this one, after which the state at this day's beginning comes."""

        def write(connection: sqlite3.Connection) -> None:
            file.note(connection, cut=str(seq))
            connection.execute("DELETE FROM snapshots WHERE seq < ? OR day < ?", (seq, day))

        await self.operate(write)
        self.first = seq + 1  # not before it is durable: what comes before it is swept

    async def sweep(self, audit_from: Millis) -> int:
        """Delete some of the facts that were left out; how many. The audit trail stays, from this time on."""
        # The last ones first: those of the audit trail, of years, lie before them.
        some = "SELECT seq FROM facts WHERE seq < ? AND (kind <> 'audited' OR at < ?) ORDER BY seq DESC LIMIT ?"
        rows = await self._ask(lambda reader: reader.execute(some, (self.first, audit_from, SWEPT)).fetchall())
        await self.operate(lambda writer: writer.executemany("DELETE FROM facts WHERE seq = ?", rows))
        return len(rows)

    async def recover(self) -> None:
        """After a failure: open the file again, and see whether it can be written.

        What the failed commit held may be in it, so the caller must :meth:`load` again.

        Raises:
            JournalFailed: not yet.
        """
        await self.operate(self._reopen)

    async def make_reserve(self) -> None:
        """Reserve space again, if it was spent and there is room."""
        await self._in_reader(self._make_reserve)

    async def close(self) -> None:
        """Fold the log into the database, and release the state directory. May be called twice."""

        def stop() -> None:
            self._reader.close()
            self._queue.put(None)
            self._thread.join()

        if self._thread.is_alive():
            # The writer goes last: then it is alone with the file, and removes the log and its index.
            await self._in_reader(stop)
            self._reader_thread.shutdown()
            os.close(self._mark)
            os.close(self._lock)

    # ---- reading ---------------------------------------------------------------------------------------------------

    async def read(self, after: int, limit: int) -> list[tuple[int, Fact | Unreadable]]:
        """Up to ``limit`` facts with numbers above ``after``, fewer where they are large; on its own connection."""

        def read(reader: sqlite3.Connection) -> list[tuple[int, Fact | Unreadable]]:
            # What was left out and not swept yet is gone, too.
            query, last = f"{file.ROWS} WHERE seq > ? ORDER BY seq LIMIT ?", max(after, self.first - 1)
            rows = until_large(reader.execute(query, (last, limit)))
            # ``first`` as it is now: it moves before what is left out is swept.
            return list(islice(file.decoded(rows, max(after, self.first - 1)), limit))

        return await self._ask(read)

    async def audited(self, after: int, limit: int) -> list[tuple[int, Fact | Unreadable]]:
        """What the audit trail keeps of the facts that were left out."""
        query = f"{file.ROWS} WHERE seq > ? AND seq < ? AND kind = 'audited' ORDER BY seq LIMIT ?"
        return await self._ask(
            lambda reader: list(file.decoded(reader.execute(query, (after, self.first, limit)), None))
        )

    async def days(self) -> list[int]:
        """The days (since 1970, of UTC) whose usage is kept, in order."""
        query = "SELECT day FROM usage ORDER BY day"
        return await self._ask(lambda reader: [day for (day,) in reader.execute(query)])

    async def usage_of(self, day: int) -> bytes:
        """The usage of one of them, packed."""
        query = "SELECT CAST(body AS BLOB) FROM usage WHERE day = ?"
        return cast("bytes", await self._ask(lambda reader: reader.execute(query, (day,)).fetchone()[0]))

    async def state_before(self, day: int) -> tuple[int, int, bytes] | None:
        """The last state that can be read of a day's beginning, this one's or one's before.

        The last fact in it, the day, and the state.
        """

        def newest(reader: sqlite3.Connection) -> tuple[int, int, bytes] | None:
            found = file.states(reader, "WHERE day <= ?", day)
            return next(((seq, of, state) for seq, of, _, state in found if state is not None), None)

        return await self._ask(newest)

    def load(self) -> Past:
        """Everything there is. Blocks; for the start and after a failure, when there is nothing else to do.

        Raises:
            JournalRefused: (while running through the facts) a fact is damaged or unknown; says which.
            JournalFailed: nothing can be read just now.
        """
        with file.refusals(self.path), closing(file.connect(self.path, readonly=True)) as connection:
            seq, body = file.state_of(connection, self.path, self.last_seq)
        return Past(seq, body, self._facts_after(seq))

    def _facts_after(self, last: int) -> Generator[tuple[int, Fact]]:
        with file.refusals(self.path), closing(file.connect(self.path, readonly=True)) as connection:
            yield from file.facts_after(connection, last, self.path)

    async def _in_reader(self, do: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._reader_thread, do)

    async def _ask(self, query: Callable[[sqlite3.Connection], T]) -> T:
        """Run something that reads, beside the writer."""

        def ask() -> T:
            with file.refusals(self.path):
                return query(self._reader)

        return await self._in_reader(ask)

    # ---- the writer thread -------------------------------------------------------------------------------------------

    def _put(
        self, rows: Sequence[_Row], operation: Callable[[sqlite3.Connection], Any] | None
    ) -> "asyncio.Future[Any]":
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._queue.put(_Write(rows, operation, future))
        return future

    def _write(self) -> None:
        """The writer thread: take everything that waits, commit it, wake the callers."""
        stopping = False
        while not stopping:
            batch = [self._queue.get()]
            with suppress(queue.Empty):
                while True:
                    batch.append(self._queue.get_nowait())
            stopping = None in batch
            writes = [write for write in batch if write is not None]
            # A recovery is by itself: what came before it hangs on what has failed.
            for _, part in groupby(writes, lambda write: write.operation == self._reopen):
                together = list(part)
                self._wake(together, self._commit(together))
        self._writer.close()

    def _commit(self, writes: Sequence[_Write]) -> list[Any] | JournalFailed:
        """Write a batch in one transaction. All of it is durable, or all of it has failed."""
        if self._failed is not None and writes[0].operation != self._reopen:
            return self._failed
        try:
            return self._transaction(writes)
        except Exception as error:
            if file.is_full(error) and self.spend_reserve():
                return self._commit(writes)
            self._failed = JournalFailed(f"{self.path}: {error}")
            return self._failed

    def _transaction(self, writes: Sequence[_Write]) -> list[Any]:
        if writes[0].operation == self._reopen:
            return [self._reopen(self._writer)]
        connection = self._writer
        rows = [row for write in writes for row in write.rows]
        if rows and len(rows) <= _ROWS_A_STATEMENT and all(write.operation is None for write in writes):
            # A statement outside of a transaction is one by itself. So this thread takes the interpreter's lock, which
            # the loop wants too, once, and not for each of begin, insert and commit.
            places = ",".join(["(?,?,?,?,?)"] * len(rows))
            connection.execute(f"{_INSERT} {places}", [value for row in rows for value in row])
            results: list[Any] = [None] * len(writes)
        else:
            with connection:  # commits in the end, or rolls back
                connection.execute("BEGIN IMMEDIATE")
                connection.executemany(f"{_INSERT} (?,?,?,?,?)", rows)
                results = [None if write.operation is None else write.operation(connection) for write in writes]
        self._move_on(rows[-1][0] if rows else self.last_seq)
        return results

    def _move_on(self, last: int) -> None:
        """This is the last durable fact from now on: first the mark says so, and then the daemon may answer."""
        self.last_seq = last
        os.pwrite(self._mark, Mark(self.id, last, self.incarnation).line(), 0)

    def _wake(self, writes: Sequence[_Write], outcome: list[Any] | JournalFailed) -> None:
        def wake() -> None:
            for number, write in enumerate(writes):
                if write.future.done():
                    continue  # its caller gave up
                if isinstance(outcome, JournalFailed):
                    write.future.set_exception(outcome)
                else:
                    write.future.set_result(outcome[number])

        with suppress(RuntimeError):  # the loop is closed: no caller is left
            writes[0].future.get_loop().call_soon_threadsafe(wake)

    def _reopen(self, _: sqlite3.Connection) -> None:
        """Start over with the file as it is, and commit something to see whether it can be written."""
        with suppress(sqlite3.Error):
            self._writer.close()
        self._writer = file.connect(self.path)
        file.note(self._writer, test_write=str(time.time()))
        self._move_on(file.mark_now(self._writer).seq)
        self._failed = None

    # ---- the reserve -------------------------------------------------------------------------------------------------

    def _make_reserve(self) -> None:
        """Reserve space, if there is room; :attr:`tight` says whether there was none."""
        try:
            with os.fdopen(os.open(self._reserve, os.O_CREAT | os.O_WRONLY, 0o600), "wb") as reserve:
                os.posix_fallocate(reserve.fileno(), 0, RESERVE_BYTES)
            self.tight = False
        except OSError:
            self.spend_reserve()

    def spend_reserve(self) -> bool:
        """Free the reserve's space for a commit that needs it; False: there is none. It is made again as always."""
        if not self.tight:
            log.error("disk_full", path=str(self.path.parent), result=DISK_FULL)
        self.tight = True
        try:
            self._reserve.unlink()
        except OSError:
            return False
        return True


def until_large(rows: Iterable[R]) -> list[R]:
    """The first of these rows, until they have ``READ_BYTES`` bytes together."""
    found, size = [], 0
    for row in rows:
        found.append(row)
        size += len(row[1])
        if size >= READ_BYTES:
            break
    return found


# ---- where a journal may lie ----------------------------------------------------------------------------------------


def refuse_remote(directory: Path, mountinfo: str) -> None:
    """Raise JournalRefused if the directory is on a network file system (``mountinfo``: see ``man 5 proc``)."""
    device = directory.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in mountinfo.splitlines():
        mount, _, rest = line.partition(" - ")
        of, point, kind = mount.split()[2], mount.split()[4], rest.split()[0]
        if of == number and kind in REMOTE_FILESYSTEMS:
            raise JournalRefused(
                f"state directory {directory} is on a network file system ({kind} at {point}), where the journal "
                "cannot be kept safe; set daemon.state_dir to a directory on a local disk"
            )
