"""The journal: facts, durable and in order, in one SQLite file that people can open and read.

What may be relied on, of :class:`Journal` and of :class:`MemoryJournal` alike (one contract suite tests both):

- What ``append`` has answered for survives ``kill -9`` and loss of power (WAL, ``synchronous=FULL``).
- Appends become durable in the order in which they were made; after one has failed, all fail until ``recover``.
- ``read`` and ``load`` see durable facts only.

One thread owns the connection that writes. It takes everything that waits, writes it in one transaction, and wakes
all who waited: one fsync for all of them (group commit). So the event loop never waits for a disk, and a slow disk
costs latency, not throughput.

**When the disk is full.** A file of 16 MB, ``reserve``, lies beside the database. It is deleted when a commit finds the
disk full, and the commit is tried once more: room for some fifty thousand facts, so that slots in use can still be
released and backends can still report. Meanwhile :attr:`~Journal.tight` is true, and the driver refuses what would make
more work. The reserve is made anew when there is room.

Errors::

    JournalError
      JournalRefused   this state directory cannot be used, and why; says the remedy
        JournalInUse   another daemon uses it; says its pid
      JournalFailed    a commit failed: nobody may be told anything that depends on it
"""

import asyncio
import fcntl
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar, cast

import msgspec

from rollmuxd.core import facts as core_facts
from rollmuxd.core.facts import AnyFact, Fact
from rollmuxd.core.model import Millis
from rollmuxd.daemon.keys import ApiKey, Role

T = TypeVar("T")

#: the number of the database's layout, in ``PRAGMA user_version``; one more when a released layout changes
FORMAT: Final = 1
RESERVE_BYTES: Final = 16_000_000
#: snapshots kept: the newest, and one more in case this version cannot read it
SNAPSHOTS_KEPT: Final = 2
#: SQLite's own limit is 32,766 parameters a statement, at four a row
_ROWS_A_STATEMENT: Final = 4_000
#: file systems on which SQLite's WAL does not work (its index is memory shared between processes of one machine)
REMOTE_FILESYSTEMS: Final = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "9p", "fuse.sshfs", "fuse.rclone")

_SCHEMA: Final = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE facts (seq INTEGER PRIMARY KEY, at INTEGER NOT NULL, kind TEXT NOT NULL, body TEXT NOT NULL);
CREATE TABLE snapshots (seq INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE keys (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, user TEXT NOT NULL, role TEXT NOT NULL, hashed TEXT NOT NULL,
    created_at INTEGER NOT NULL, revoked_at INTEGER
) WITHOUT ROWID;
INSERT INTO meta VALUES ('incarnation', '1');
"""


#: columns that tables have got since their format was released: what is missing is added when a file is opened
_ADDED: Final = {"keys": ("expires_at INTEGER", "used_at INTEGER")}


class JournalError(Exception):
    """Something about the journal."""


class JournalRefused(JournalError):
    """This state directory cannot be used as it is."""


class JournalInUse(JournalRefused):
    """Another daemon uses the state directory."""

    def __init__(self, state_dir: Path, pid: str) -> None:
        super().__init__(
            f"state directory {state_dir} is in use by another rollmuxd, pid {pid or 'unknown'}; "
            "stop it (rollmuxd daemon stop), or set daemon.state_dir to a directory of this one's own"
        )
        self.state_dir, self.pid = state_dir, pid


class JournalFailed(JournalError):
    """A commit failed. What it held may or may not be in the file: only reading the file tells."""


class Past(NamedTuple):
    """What a journal holds: a snapshot, if there is one, and the facts after it."""

    #: the number of the last fact that the snapshot holds; 0: none
    seq: int
    snapshot: bytes | None
    #: lazily read and decoded; to be run through once
    facts: Iterator[tuple[int, AnyFact]]


class _Write:
    """One thing for the writer thread: rows of facts, or an operation of another kind; and who waits for it."""

    __slots__ = ("future", "loop", "operation", "rows")

    def __init__(
        self, rows: Sequence[tuple[int, int, str, str]], operation: Callable[[sqlite3.Connection], Any] | None
    ) -> None:
        self.rows = rows
        self.operation = operation
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()


class Journal:
    """Facts in ``<state_dir>/journal.sqlite3``. Open it with :meth:`open`; use it from one event loop."""

    def __init__(self, state_dir: Path, lock: int) -> None:
        self.state_dir = state_dir
        self.path = state_dir / "journal.sqlite3"
        self._lock = lock
        self._reserve = state_dir / "reserve"
        self._queue: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._failed: JournalFailed | None = None
        self._writer = self._connect()
        self._thread = threading.Thread(target=self._write, name="journal-writer", daemon=True)
        self._reader_thread = ThreadPoolExecutor(1, thread_name_prefix="journal-reader")
        self._reader: sqlite3.Connection | None = None
        self.incarnation = int(self._writer.execute("SELECT value FROM meta WHERE name = 'incarnation'").fetchone()[0])
        #: the reserve is spent: what makes more work has to be refused
        self.tight = not self._make_reserve()
        self._thread.start()

    @classmethod
    def open(cls, state_dir: Path) -> "Journal":
        """Open the journal in this directory, making both where there are none.

        Raises:
            JournalInUse: another daemon uses the directory.
            JournalRefused: it is on a network file system, cannot be written, or is of a newer format.
        """
        try:
            state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            refuse_remote(state_dir, Path("/proc/self/mountinfo").read_text())
            lock = _lock(state_dir)
            # API keys' hashes are in it. SQLite gives its other files the mode of this one.
            os.close(os.open(state_dir / "journal.sqlite3", os.O_CREAT | os.O_RDWR, 0o600))
        except OSError as error:
            raise JournalRefused(f"state directory {state_dir}: {error.strerror or error}") from error
        try:
            return cls(state_dir, lock)
        except BaseException as error:
            os.close(lock)
            if isinstance(error, sqlite3.Error):
                raise JournalRefused(f"{state_dir / 'journal.sqlite3'}: {error}") from error
            raise

    # ---- writing ---------------------------------------------------------------------------------------------------

    def append(self, facts: Sequence[tuple[int, Fact]]) -> "asyncio.Future[None]":
        """Make numbered facts durable. Awaiting the answer returns when they are.

        No coroutine but a future, so that the facts are on their way when this returns, and in the order of the calls.

        Raises:
            JournalFailed: (when awaited) they are not durable, or nobody knows.
        """
        rows = [(seq, fact.at, core_facts.name(fact), core_facts.encode(fact).decode()) for seq, fact in facts]
        return self._put(_Write(rows, None))

    def snapshot(self, seq: int, body: bytes) -> "asyncio.Future[None]":
        """Keep the state as it is after fact ``seq``, so that a restart needs to replay only what comes after."""

        def write(connection: sqlite3.Connection) -> None:
            connection.execute("INSERT OR REPLACE INTO snapshots VALUES (?, ?)", (seq, body))
            connection.execute(
                "DELETE FROM snapshots WHERE seq NOT IN (SELECT seq FROM snapshots ORDER BY seq DESC LIMIT ?)",
                (SNAPSHOTS_KEPT,),
            )

        return self._put(_Write((), write))

    async def add_key(self, key: ApiKey) -> None:
        """Keep an API key. Raises ValueError when there is one of that id."""

        def write(connection: sqlite3.Connection) -> bool:
            row = (key.id, key.owner, key.user, key.role, key.hashed, key.created_at, key.revoked_at, key.expires_at)
            insert = (
                "INSERT OR IGNORE INTO keys (id, owner, user, role, hashed, created_at, revoked_at, expires_at)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
            )
            return connection.execute(insert, row).rowcount == 1

        if not await self._put(_Write((), write)):
            raise ValueError(f"there is an API key {key.id!r} already")

    async def list_keys(self) -> list[ApiKey]:
        """All API keys, revoked ones too, by id."""

        def read(connection: sqlite3.Connection) -> list[ApiKey]:
            query = (
                "SELECT id, owner, user, role, hashed, created_at, revoked_at, expires_at, used_at"
                " FROM keys ORDER BY id"
            )
            return [
                ApiKey(id_, owner, user, Role(role), *rest)
                for id_, owner, user, role, *rest in connection.execute(query).fetchall()
            ]

        return cast("list[ApiKey]", await self._put(_Write((), read)))

    async def revoke_key(self, key_id: str, now: Millis) -> bool:
        """From now on this API key opens nothing. Tells whether there is such a key."""

        def write(connection: sqlite3.Connection) -> bool:
            # The first time counts: when it stopped to open things is what one wants to know afterwards.
            query = "UPDATE keys SET revoked_at = coalesce(revoked_at, ?) WHERE id = ?"
            return connection.execute(query, (now, key_id)).rowcount == 1

        return bool(await self._put(_Write((), write)))

    async def note_use(self, used: Mapping[str, Millis]) -> None:
        """Keep when API keys were last used, by their ids."""
        rows = [(at, key_id) for key_id, at in used.items()]

        def write(connection: sqlite3.Connection) -> None:
            connection.executemany("UPDATE keys SET used_at = max(coalesce(used_at, 0), ?) WHERE id = ?", rows)

        await self._put(_Write((), write))

    async def recover(self) -> None:
        """After a failure: open the file anew, and see whether it can be written.

        What the failed commit held may be in it, so the caller must :meth:`load` again.

        Raises:
            JournalFailed: not yet.
        """
        await self._put(_Write((), self._reopen))

    async def make_reserve(self) -> None:
        """Reserve space again, if it was spent and there is room."""
        if self.tight:
            loop = asyncio.get_running_loop()
            self.tight = not await loop.run_in_executor(self._reader_thread, self._make_reserve)

    async def close(self) -> None:
        """Fold the log into the database, and let go of the state directory. May be called twice."""
        if self._thread.is_alive():
            loop = asyncio.get_running_loop()
            # The writer goes last: then it is alone with the file, and removes the log and its index.
            await loop.run_in_executor(self._reader_thread, self._close_reader)
            self._queue.put(None)
            await loop.run_in_executor(self._reader_thread, self._thread.join)
            self._reader_thread.shutdown()
            os.close(self._lock)

    # ---- reading ---------------------------------------------------------------------------------------------------

    async def read(self, after: int, limit: int) -> list[tuple[int, AnyFact]]:
        """Up to ``limit`` facts with numbers above ``after``, on a connection of its own."""
        return await asyncio.get_running_loop().run_in_executor(self._reader_thread, self._read, after, limit)

    def load(self, *, snapshot: bool = True) -> Past:
        """Everything there is. Blocks; for the start and after a failure, when there is nothing else to do.

        ``snapshot=False`` leaves snapshots out, for when this version cannot read them.

        Raises:
            JournalRefused: (while running through the facts) a fact is damaged or unknown; says which.
        """
        with closing(self._connect(readonly=True)) as connection:
            found = connection.execute("SELECT seq, body FROM snapshots ORDER BY seq DESC LIMIT 1").fetchone()
        seq, body = found if found is not None and snapshot else (0, None)
        return Past(seq, body, self._facts_after(seq))

    def _facts_after(self, seq: int) -> Iterator[tuple[int, AnyFact]]:
        decode = core_facts.decode
        with closing(self._connect(readonly=True)) as connection:
            connection.text_factory = bytes  # the decoder wants bytes: no detour by str
            rows = connection.execute("SELECT seq, body FROM facts WHERE seq > ? ORDER BY seq", (seq,))
            while chunk := rows.fetchmany(10_000):
                for number, body in chunk:
                    try:
                        yield number, decode(body)
                    except msgspec.MsgspecError as error:
                        raise JournalRefused(
                            f"{self.path}: fact {number} cannot be read ({error}); it is damaged, or was written by "
                            "a newer rollmuxd: use that one, or restore a backup"
                        ) from error

    def _read(self, after: int, limit: int) -> list[tuple[int, AnyFact]]:
        if self._reader is None:
            self._reader = self._connect(readonly=True)
            self._reader.text_factory = bytes
        rows = self._reader.execute("SELECT seq, body FROM facts WHERE seq > ? ORDER BY seq LIMIT ?", (after, limit))
        return [(number, core_facts.decode(body)) for number, body in rows.fetchall()]

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    # ---- the writer thread -------------------------------------------------------------------------------------------

    def _put(self, write: _Write) -> "asyncio.Future[Any]":
        self._queue.put(write)
        return write.future

    def _write(self) -> None:
        """The writer thread: take everything that waits, commit it, wake who waited."""
        stopping = False
        while not stopping:
            batch = [self._queue.get()]
            with suppress(queue.Empty):
                while True:
                    batch.append(self._queue.get_nowait())
            stopping = None in batch
            writes = [write for write in batch if write is not None]
            if writes:
                self._wake(writes, self._commit(writes))
        with suppress(sqlite3.Error):
            self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._writer.close()

    def _commit(self, writes: Sequence[_Write]) -> list[Any] | JournalFailed:
        """Write a batch in one transaction. All of it is durable, or all of it has failed."""
        if self._failed is not None:
            if writes[-1].operation != self._reopen:
                return self._failed
            # Whatever came before the recovery hangs on what has failed.
            *dead, writes_again = writes
            if dead:
                self._wake(dead, self._failed)
                writes = [writes_again]
        try:
            try:
                return self._transaction(writes)
            except sqlite3.OperationalError as error:
                if not _is_full(error) or not self._spend_reserve():
                    raise
                self._roll_back()
                return self._transaction(writes)
        except Exception as error:
            with suppress(sqlite3.Error):
                self._roll_back()
            self._failed = JournalFailed(f"{self.path}: {error}")
            return self._failed

    def _transaction(self, writes: Sequence[_Write]) -> list[Any]:
        if len(writes) == 1 and writes[0].operation == self._reopen:
            self._reopen(self._writer)
            return [None]
        connection = self._writer
        rows = [row for write in writes for row in write.rows]
        if len(rows) <= _ROWS_A_STATEMENT and all(write.operation is None for write in writes):
            # A statement outside of a transaction is one by itself. So the interpreter's lock, which the loop wants
            # too, is let go and fought for once, and not once for each of begin, insert and commit.
            _insert(connection, rows)
            return [None] * len(writes)
        connection.execute("BEGIN IMMEDIATE")
        for start in range(0, len(rows), _ROWS_A_STATEMENT):
            _insert(connection, rows[start : start + _ROWS_A_STATEMENT])
        results = [None if write.operation is None else write.operation(connection) for write in writes]
        connection.execute("COMMIT")
        return results

    def _roll_back(self) -> None:
        if self._writer.in_transaction:
            self._writer.execute("ROLLBACK")

    def _wake(self, writes: Sequence[_Write], outcome: list[Any] | JournalFailed) -> None:
        def wake() -> None:
            for number, write in enumerate(writes):
                if write.future.done():
                    continue  # nobody waits any more
                if isinstance(outcome, JournalFailed):
                    write.future.set_exception(outcome)
                else:
                    write.future.set_result(outcome[number])

        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            writes[0].loop.call_soon_threadsafe(wake)

    def _reopen(self, _: sqlite3.Connection) -> None:
        """Start over with the file as it is, and commit something to see whether it can be written."""
        with suppress(sqlite3.Error):
            self._writer.close()
        self._writer = self._connect()
        self._writer.execute("BEGIN IMMEDIATE")
        self._writer.execute("INSERT OR REPLACE INTO meta VALUES ('test_write', strftime('%s', 'now'))")
        self._writer.execute("COMMIT")
        self._failed = None

    def _connect(self, *, readonly: bool = False) -> sqlite3.Connection:
        where = f"{self.path.absolute().as_uri()}?mode={'ro' if readonly else 'rwc'}"
        # Each connection is used by one thread at a time, though not always by the one that opened it.
        connection = sqlite3.connect(where, uri=True, isolation_level=None, check_same_thread=False, timeout=5)
        if readonly:
            return connection
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            found = connection.execute("PRAGMA user_version").fetchone()[0]
            if found > FORMAT:
                raise JournalRefused(
                    f"{self.path} has format {found}, and this rollmuxd reads up to {FORMAT}: use the newer rollmuxd "
                    "that wrote it, or restore the backup made before the upgrade"
                )
            if found == 0:
                connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {FORMAT}; COMMIT;")
            for table, columns in _ADDED.items():
                there = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
                for column in columns:
                    if column.split()[0] not in there:
                        connection.execute(f"ALTER TABLE {table} ADD COLUMN {column}")
        except BaseException:
            connection.close()
            raise
        return connection

    # ---- the reserve -------------------------------------------------------------------------------------------------

    def _make_reserve(self) -> bool:
        with suppress(OSError):
            if self._reserve.stat().st_size >= RESERVE_BYTES:
                return True
        try:
            reserve = os.open(self._reserve, os.O_CREAT | os.O_WRONLY, 0o600)
            try:
                os.posix_fallocate(reserve, 0, RESERVE_BYTES)
            finally:
                os.close(reserve)
        except OSError:
            self._reserve.unlink(missing_ok=True)
            return False
        return True

    def _spend_reserve(self) -> bool:
        self.tight = True
        try:
            self._reserve.unlink()
        except OSError:
            return False
        return True


class MemoryJournal:
    """The same contract without a disk: for tests, and for whoever wants to look at a daemon without leaving a trace.

    ``failing``, while set, is what every commit fails with.
    """

    def __init__(self, *, incarnation: int = 1) -> None:
        self.incarnation = incarnation
        self.tight = False
        self.failing: JournalFailed | None = None
        self._failed: JournalFailed | None = None
        self._bodies: list[tuple[int, bytes]] = []
        self._snapshots: dict[int, bytes] = {}
        self._keys: dict[str, ApiKey] = {}

    def append(self, facts: Sequence[tuple[int, Fact]]) -> "asyncio.Future[None]":
        # Encoded although nobody asked: what cannot be journalled must fail here too.
        rows = [(seq, core_facts.encode(fact)) for seq, fact in facts]
        return self._commit(lambda: self._bodies.extend(rows))

    def snapshot(self, seq: int, body: bytes) -> "asyncio.Future[None]":
        def write() -> None:
            self._snapshots[seq] = body
            for old in sorted(self._snapshots)[:-SNAPSHOTS_KEPT]:
                del self._snapshots[old]

        return self._commit(write)

    async def add_key(self, key: ApiKey) -> None:
        if key.id in self._keys:
            raise ValueError(f"there is an API key {key.id!r} already")
        await self._commit(lambda: self._keys.update({key.id: key}))

    async def list_keys(self) -> list[ApiKey]:
        return [self._keys[key] for key in sorted(self._keys)]

    async def revoke_key(self, key_id: str, now: Millis) -> bool:
        key = self._keys.get(key_id)
        if key is None:
            return False
        if key.revoked_at is None:
            revoked = msgspec.structs.replace(key, revoked_at=now)
            await self._commit(lambda: self._keys.update({key_id: revoked}))
        return True

    async def note_use(self, used: Mapping[str, Millis]) -> None:
        for key_id, at in used.items():
            if (key := self._keys.get(key_id)) is not None:
                last = max(at, key.used_at or 0)
                self._keys[key_id] = msgspec.structs.replace(key, used_at=last)

    async def recover(self) -> None:
        await asyncio.sleep(0)  # as with the thread: whoever waits for an earlier commit hears of it first
        if self.failing is not None:
            raise self.failing
        self._failed = None

    async def make_reserve(self) -> None:
        self.tight = False

    async def close(self) -> None:
        pass

    async def read(self, after: int, limit: int) -> list[tuple[int, AnyFact]]:
        start = self._index(after)
        return list(self._decoded(self._bodies[start : start + limit]))

    def load(self, *, snapshot: bool = True) -> Past:
        seq = max(self._snapshots, default=0) if snapshot else 0
        return Past(seq, self._snapshots.get(seq), self._decoded(self._bodies[self._index(seq) :]))

    def _index(self, after: int) -> int:
        # Numbers have no holes, so that the place follows from the first one.
        return max(0, after - self._bodies[0][0] + 1) if self._bodies else 0

    @staticmethod
    def _decoded(rows: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, AnyFact]]:
        return ((seq, core_facts.decode(body)) for seq, body in rows)

    def _commit(self, write: Callable[[], object]) -> "asyncio.Future[None]":
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._failed = self._failed or self.failing
        if self._failed is not None:
            future.set_exception(self._failed)
        else:
            write()
            future.set_result(None)
        return future


AnyJournal: TypeAlias = Journal | MemoryJournal


# ---- where a journal may lie ----------------------------------------------------------------------------------------


def refuse_remote(directory: Path, mountinfo: str) -> None:
    """Raise JournalRefused if the directory is on a network file system (``mountinfo``: see ``man 5 proc``)."""
    path = directory.resolve()
    mounted, kind = Path("/"), ""
    for line in mountinfo.splitlines():
        mount, _, rest = line.partition(" - ")
        point = Path(mount.split()[4].encode().decode("unicode_escape"))
        # Later lines lie over earlier ones, so of two equal ones the later counts.
        if path.is_relative_to(point) and len(point.parts) >= len(mounted.parts):
            mounted, kind = point, rest.split()[0]
    if kind in REMOTE_FILESYSTEMS:
        raise JournalRefused(
            f"state directory {directory} is on a network file system ({kind} at {mounted}), where the journal cannot "
            "be kept safe; set daemon.state_dir to a directory on a local disk"
        )


def _lock(state_dir: Path) -> int:
    """Hold the directory for this process; the kernel lets go of it however the process ends."""
    lock = os.open(state_dir / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(lock, 20, 0).decode(errors="replace").strip()
        os.close(lock)
        raise JournalInUse(state_dir, pid) from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _insert(connection: sqlite3.Connection, rows: Sequence[tuple[int, int, str, str]]) -> None:
    places = ",".join(["(?,?,?,?)"] * len(rows))
    insert = f"INSERT INTO facts VALUES {places}"  # noqa: S608  # question marks only
    connection.execute(insert, [value for row in rows for value in row])


def _is_full(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
