"""The journal's file: its layout and format, checksums, the mark, and what a start does about damage.

There is no thread and no loop in here. The daemon uses it when it opens its journal; ``rollmuxd journal`` uses it when
no daemon runs.

What is guarded against, how, and what was turned down: ``docs/decisions/0013-damage-to-the-journal.md``. In short:

- The row of each fact has ``sum``, the CRC-32 of its number and body, and numbers have no holes. So a row that was
  changed, moved or lost is found when it is read. A start reads the newest snapshot and the facts after it.
- :class:`Mark`, the file ``mark`` beside the journal, says how far the journal had come. A journal that is behind it
  has lost its end. The daemon starts, and all runs are lost (``lost`` in ``meta``, until the core has heard of it).
- Each opening begins a new **incarnation**, so no fence is ever given again. Each journal has a random **id**, which
  clients send with their calls.

Errors::

    JournalError
      JournalRefused     this state directory cannot be used, and why; says the remedy
        JournalInUse     another daemon uses it; says its pid
        JournalDamaged   something in it is damaged or missing; says what
      JournalFailed      a commit failed: no answer may depend on it; or nothing can be read
                         now (no free file, a silent disk)
"""

import errno
import fcntl
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple
from zlib import Z_BEST_SPEED, compress, crc32, decompress

import msgspec
import structlog

from rollmuxd.core import facts as core_facts
from rollmuxd.core.causes import Cause
from rollmuxd.core.facts import Fact
from rollmuxd.core.ids import Millis
from rollmuxd.core.state import State
from rollmuxd.daemon import files
from rollmuxd.explain.causes import sentence

log = structlog.get_logger("rollmuxd.journal")

#: the number of the layout, and of what facts mean
FORMAT: Final = 1

_SCHEMA: Final = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE facts (
    seq INTEGER PRIMARY KEY, at INTEGER NOT NULL, kind TEXT NOT NULL, body TEXT NOT NULL, sum INTEGER NOT NULL
);
CREATE TABLE snapshots (
    seq INTEGER NOT NULL, day INTEGER UNIQUE, body BLOB NOT NULL, sum INTEGER NOT NULL, shape TEXT NOT NULL
);
CREATE INDEX snapshots_by_seq ON snapshots (seq);
CREATE TABLE usage (day INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE keys (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, user TEXT NOT NULL, role TEXT NOT NULL, hashed TEXT NOT NULL,
    created_at INTEGER NOT NULL, revoked_at INTEGER, expires_at INTEGER
) WITHOUT ROWID;
INSERT INTO meta VALUES ('incarnation', '1'), ('id', lower(hex(randomblob(16))));
"""

REMEDY: Final = (
    "see what is there with `rollmuxd journal check`, keep a copy of the state directory, and restore the last backup "
    "with `rollmuxd journal restore FILE` (docs/how-to/journal.md)"
)
#: bytes from which on a state is compressed; smaller ones can be read by people
PACKED_FROM: Final = 100_000
#: how a compressed one begins (RFC 1950)
_PACKED: Final = b"\x78\x01"


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


class JournalDamaged(JournalRefused):
    """Something in the journal is damaged or missing."""

    def __init__(self, path: Path, what: str, remedy: str = REMEDY) -> None:
        super().__init__(f"{path}: {what}; {remedy}")
        self.path, self.what = path, what


class JournalFailed(JournalError):
    """A commit failed. What it held may or may not be in the file: only reading the file tells.

    Or the file cannot be read just now. Either may be over soon, and is tried again.
    """


def sum_of(seq: int, body: bytes) -> int:
    """The checksum of a fact."""
    return crc32(body, seq & 0xFFFFFFFF)


#: rows as they are wanted; a damaged page may have anything where a body or a sum was, NULL too
ROWS: Final = "SELECT seq, CAST(coalesce(body, '') AS BLOB), CAST(coalesce(sum, -1) AS INTEGER) FROM"


# ---- opening ---------------------------------------------------------------------------------------------------------


def connect(path: Path, *, readonly: bool = False) -> sqlite3.Connection:
    """A connection to a journal that is there. Used by one thread at a time, not always by the one that made it.

    An empty file is refused where it is only to be read. SQLite would take it for a new database and delete the log
    beside it, which may still hold a journal that was cut off.
    """
    if readonly and path.exists() and not path.stat().st_size:
        raise sqlite3.DatabaseError("the file is empty")
    where = f"{path.absolute().as_uri()}?mode={'ro' if readonly else 'rw'}"
    connection = sqlite3.connect(where, uri=True, isolation_level=None, check_same_thread=False, timeout=5)
    if not readonly:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
        except BaseException:
            connection.close()
            raise
    return connection


#: what SQLite fails with where the user may not
_DENIED: Final = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY)


def passes(error: BaseException) -> bool:
    """Whether SQLite failed for a reason that may pass, and not for what is in the file."""
    # Damage is a plain DatabaseError; of those that are of operation, this one is of the statement.
    code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    return isinstance(error, sqlite3.OperationalError) and code & 0xFF != sqlite3.SQLITE_ERROR


def unreadable(path: Path, what: str, error: sqlite3.Error) -> JournalError:
    """What is to be said of a journal that SQLite cannot use: that it is damaged, or that it must be tried again."""
    if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL:
        return JournalFailed(f"{path} cannot be written now: its disk is full; make room there, and try again")
    if passes(error):
        return JournalFailed(
            f"{path} cannot be read now ({error}), which says nothing of what is in it: "
            "look whether open files (ulimit -n) or memory ran out, and what the kernel says of the disk"
        )
    return JournalDamaged(path, f"{what} cannot be read ({error})")


def prepare(path: Path) -> None:
    """Lay the file out if it is empty. The caller holds the state directory's lock.

    Raises:
        JournalRefused: it is of another format.
    """
    with closing(connect(path)) as connection:
        if connection.execute("PRAGMA user_version").fetchone()[0]:
            refuse_other_format(connection, path)
            return
        connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {FORMAT}; COMMIT;")


def refuse_lost(path: Path) -> None:
    """Raise JournalRefused if a journal was used in this directory, and what is there now is not one.

    A new one in its place would know of no job that holds GPUs. It is looked at before anything opens it to write, so
    that what is left of it stays as it is.
    """
    if not mark_of(path).exists():
        return
    if not path.exists():
        what = "is gone"
    elif not path.stat().st_size:
        what = "is empty"
    else:
        with closing(connect(path, readonly=True)) as connection:
            if connection.execute("PRAGMA user_version").fetchone()[0]:
                refuse_other_format(connection, path)
            if connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'meta'").fetchone()[0]:
                return
        what = "is no journal"
    raise JournalRefused(
        f"state directory {path.parent}: its journal.sqlite3 {what}, and which GPUs are held was in the one before; "
        "restore a backup (rollmuxd journal restore FILE), or remove the directory to begin with nothing, once no job "
        "holds a GPU"
    )


def refuse_other_format(connection: sqlite3.Connection, path: Path) -> None:
    """Raise JournalRefused if the file is not of this version's format."""
    found: int = connection.execute("PRAGMA user_version").fetchone()[0]
    if found != FORMAT:
        raise JournalRefused(
            f"{path} has format {found}, and this rollmuxd reads format {FORMAT} only: use the rollmuxd that wrote it"
        )


def get_meta(connection: sqlite3.Connection, name: str) -> str | None:
    """A word that the journal keeps beside the facts."""
    found = connection.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
    return None if found is None else str(found[0])


def set_meta(connection: sqlite3.Connection, name: str, value: str) -> None:
    """Keep it. What is the same already is not written."""
    if get_meta(connection, name) != value:
        connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))


@cache
def shape() -> str:
    """What a snapshot of this version looks like. A snapshot of another shape is not used: the facts are replayed."""
    return f"{crc32(msgspec.json.encode(msgspec.json.schema(State))):08x}"


def packed(body: bytes) -> bytes:
    """A state as it is kept; a large one is a twentieth, in a tenth of a second."""
    return compress(body, level=Z_BEST_SPEED) if len(body) >= PACKED_FROM else body


#: the states that are kept; a damaged page may have anything in the place of a body
STATES: Final = "SELECT CAST(body AS BLOB), sum, seq, day, shape FROM snapshots"


def whole(body: bytes, total: int) -> bytes | None:
    """A state, however it was kept; None: its checksum does not fit."""
    if crc32(body) != total:
        return None
    return decompress(body) if body.startswith(_PACKED) else body


def keep_state(connection: sqlite3.Connection, seq: int, body: bytes, day: int | None = None) -> None:
    """Keep a packed state, after fact ``seq``; ``day``: it is that at the beginning of this day."""
    insert = "INSERT OR REPLACE INTO snapshots (seq, day, body, sum, shape) VALUES (?, ?, ?, ?, ?)"
    connection.execute(insert, (seq, day, body, crc32(body), shape()))


def lock(state_dir: Path) -> int:
    """Hold the directory for this process; the kernel releases it however the process ends.

    Raises:
        JournalInUse: another process holds it.
    """
    held = os.open(state_dir / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    files.belong(state_dir / "lock")
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(held, 20, 0).decode(errors="replace").strip()
        os.close(held)
        raise JournalInUse(state_dir, pid) from None
    with suppress(OSError):  # the pid is for people; on a full disk there may be no room even for that
        os.ftruncate(held, 0)
        os.pwrite(held, f"{os.getpid()}\n".encode(), 0)
    return held


# ---- incarnations, and the mark --------------------------------------------------------------------------------------


def next_incarnation(*known: int) -> int:
    """A number that was never an incarnation of this journal, nor of a copy of it that was restored elsewhere.

    The time in seconds, since a counter would give the same number to two restores of one backup.
    """
    return max(int(time.time()), *(number + 1 for number in known))


def incarnation_of(connection: sqlite3.Connection) -> int:
    """The incarnation. Raises ValueError if the journal does not say."""
    said = get_meta(connection, "incarnation")
    if said is None:
        raise ValueError("it does not say which incarnation it is")
    return int(said)


def id_of(connection: sqlite3.Connection) -> str:
    """The journal's id. Raises ValueError if it has none."""
    said = get_meta(connection, "id")
    if said is None:
        raise ValueError("it does not say which journal it is")
    return said


#: how the names of rows of ``meta`` begin that say why an operator leaves an optical switch alone
LEFT_ALONE: Final = "left_alone "


def left_alone_of(connection: sqlite3.Connection) -> dict[str, str]:
    """Why an operator leaves optical switches alone, by their names."""
    rows = connection.execute("SELECT name, value FROM meta WHERE name GLOB ?", (f"{LEFT_ALONE}*",))
    return {name.removeprefix(LEFT_ALONE): value for name, value in rows}


class Lost(NamedTuple):
    """Why the journal does not say what jobs did last, and of which incarnation on that is known; None: it does.

    It stays in the journal. The core has heard of it once the state's incarnation is not smaller.
    """

    incarnation: int
    why: Cause | None


def lost_of(connection: sqlite3.Connection) -> Lost:
    """What the journal has lost last."""
    number, _, why = (get_meta(connection, "lost") or "0 null").partition(" ")
    return Lost(int(number), msgspec.json.decode(why, type=Cause | None))


def note_lost(connection: sqlite3.Connection, incarnation: int, why: Cause) -> None:
    """Begin this incarnation, before which facts were lost. Within a transaction."""
    set_meta(connection, "incarnation", str(incarnation))
    set_meta(connection, "lost", f"{incarnation} {msgspec.json.encode(why).decode()}")


class Mark(NamedTuple):
    """How far a journal had come: its id, the number of its last fact, and its incarnation.

    A fence of this incarnation may have been given; none of a later one.
    """

    journal: str
    seq: int
    incarnation: int

    def line(self) -> bytes:
        """The file's content: always of one length, since it is written over the one before."""
        text = f"{self.journal} {self.seq:020} {self.incarnation:020}"
        return f"{text} {crc32(text.encode()):08x}\n".encode()


def mark_of(path: Path) -> Path:
    """The file for a journal's mark."""
    return path.with_name("mark")


def read_mark(path: Path) -> Mark | None:
    """The mark beside a journal; None: it is not there, or damaged."""
    try:
        content = mark_of(path).read_bytes()
    except FileNotFoundError:
        return None
    with suppress(ValueError):
        journal, seq, incarnation, _ = content.decode("ascii").split()
        mark = Mark(journal, int(seq), int(incarnation))
        return mark if mark.line() == content else None
    return None


def mark_now(connection: sqlite3.Connection) -> Mark:
    """The mark that a journal should have."""
    return Mark(id_of(connection), last_of(connection), incarnation_of(connection))


def write_mark(path: Path, mark: Mark) -> None:
    """Have the mark beside a journal say this, and on the disk."""
    files.write(mark_of(path), mark.line())


def why_lost(now: Mark, mark: Mark | None) -> Cause | None:
    """Why the journal may lack facts that were answered for, as its mark says; None: it has them all."""
    if mark is None:
        return Cause("no_mark") if now.seq else None
    if mark.journal != now.journal:
        return Cause("another_journal")
    if now.seq < mark.seq:
        return Cause("facts_missing", {"last": now.seq, "written": mark.seq})
    if now.incarnation < mark.incarnation:
        return Cause("starts_missing", {"incarnation": now.incarnation, "begun": mark.incarnation})
    return None


def begin(connection: sqlite3.Connection, path: Path) -> Millis:
    """Begin a new incarnation, and find out whether the journal has lost its end. Writes the mark.

    Should that break off, it can be done again: the mark is written last, and until then says what it said. The answer
    is for how long no daemon used the journal: the age of the mark, by the kernel's clock alone. A start does not
    change the mark's time, since it may come to nothing.
    """
    now, mark = mark_now(connection), read_mark(path)
    incarnation = next_incarnation(now.incarnation, mark.incarnation if mark is not None else 0)
    why = why_lost(now, mark)
    connection.execute("BEGIN IMMEDIATE")
    if why is not None:
        note_lost(connection, incarnation, why)
        log.error("journal_lost_its_end", path=str(path), reason=sentence(why), result="all runs are lost")
    set_meta(connection, "incarnation", str(incarnation))
    connection.execute("COMMIT")
    used = mark_of(path).stat() if mark is not None else None
    write_mark(path, now._replace(incarnation=incarnation))
    if used is None:
        return 0
    os.utime(mark_of(path), ns=(used.st_atime_ns, used.st_mtime_ns))
    return max(0, time.time_ns() - used.st_mtime_ns) // 1_000_000


def clear(part: Path) -> None:
    """Remove what was begun under this name, and what SQLite has left beside it."""
    for left in part.parent.glob(f"{part.name}*"):
        left.unlink()


def denied(error: BaseException, state_dir: Path) -> str | None:
    """What to say where this user may not use a file of the state directory; None: it is something else."""
    if not isinstance(error, PermissionError) and getattr(error, "sqlite_errorcode", 0) & 0xFF not in _DENIED:
        return None
    closed = state_dir
    with suppress(OSError):
        effective = os.access in os.supports_effective_ids
        files_ = (
            one for one in sorted(state_dir.iterdir()) if not os.access(one, os.R_OK | os.W_OK, effective_ids=effective)
        )
        closed = next(files_, state_dir)
        if closed is state_dir and not isinstance(error, PermissionError):
            return None
    return (
        f"{closed} is closed to this user (uid {os.geteuid()}): run this as the user whose {state_dir} is, or give "
        f"that user what is in it, as root: chown -R --reference={state_dir} {state_dir}"
    )


def is_full(error: Exception) -> bool:
    """Whether there is no room on the disk."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    # A quota, and a log's index that cannot grow, look like other errors: trying costs little.
    return getattr(error, "sqlite_errorcode", None) in (
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR_WRITE,
        sqlite3.SQLITE_IOERR_SHMSIZE,
    )


def refused(error: Exception, state_dir: Path) -> JournalRefused:
    """That a state directory cannot be used, and what to do about it."""
    if is_full(error):
        why = "its disk is full; make room there"
    elif isinstance(error, OSError) or passes(error):
        why = denied(error, state_dir) or str(error)
    else:
        why = f"journal.sqlite3: {error}; {REMEDY}"
    return JournalRefused(f"state directory {state_dir}: {why}")


def put_aside(path: Path) -> Path | None:
    """Move a journal away, and its log, which must not stay beside a new one. The folder; None: there is neither.

    Where that breaks off there is no journal, and so no daemon starts (:func:`refuse_lost`) before another restore.
    """
    found = [one for suffix in ("", "-wal", "-shm") if (one := path.with_name(path.name + suffix)).exists()]
    if not found:
        return None
    folder = path.with_name(f"before-restore-{datetime.now(UTC).strftime('%Y%m%dT%H%M%S%f')}")
    folder.mkdir(mode=0o700)
    files.belong(folder)
    for one in found:
        one.rename(folder / one.name)
    files.sync(folder)
    return folder


# ---- facts and snapshots ---------------------------------------------------------------------------------------------


def cut_of(connection: sqlite3.Connection) -> int:
    """The number of the last fact that was left out by compaction; 0: all are there."""
    cut = int(get_meta(connection, "cut") or 0)
    if cut >= 1 << 63:  # SQLite counts no further, and would raise what no caller expects of it
        raise ValueError(f"no journal has {cut} facts")
    return cut


def last_of(connection: sqlite3.Connection) -> int:
    """The number of the last fact."""
    last: int = connection.execute("SELECT coalesce(max(seq), 0) FROM facts").fetchone()[0]
    return max(last, cut_of(connection))


def base_of(connection: sqlite3.Connection, path: Path) -> tuple[int, bytes | None]:
    """What the facts that are there come after: the last fact that is not there, and the state after it.

    Raises:
        JournalDamaged: there is no such state.
    """
    cut = cut_of(connection)
    if not cut:
        return 0, None
    for body, total, *_ in connection.execute(f"{STATES} WHERE seq = ?", (cut,)):
        if (state := whole(body, total)) is not None:
            return cut, state
    raise JournalDamaged(path, f"facts up to {cut} were compacted away, and the state after them is damaged")


def newest_snapshot(connection: sqlite3.Connection, path: Path) -> tuple[int, bytes | None]:
    """The newest snapshot that is whole and of this version's shape, and the number of the last fact in it.

    Raises:
        JournalDamaged: the journal ends before a snapshot.
    """
    last = last_of(connection)
    for body, total, seq, _, of_shape in connection.execute(f"{STATES} ORDER BY seq DESC"):
        if seq > last:
            raise JournalDamaged(path, f"there is a snapshot of fact {seq}, and the last fact is {last}")
        if (state := whole(body, total)) is None:
            log.warning("snapshot_damaged", seq=seq, reason="its checksum does not fit; an older one or the facts do")
        elif of_shape != shape():
            log.info("snapshot_of_another_version", seq=seq, reason="the facts say it all, it only takes longer")
        else:
            return seq, state
    return 0, None


def rows_after(
    connection: sqlite3.Connection, last: int, path: Path, *, until: int = 2**62
) -> Iterator[tuple[int, bytes]]:
    """Numbers and bodies of the facts after one, in order, each with a checksum that fits.

    Raises:
        JournalDamaged: (while running through them) one is damaged or missing.
        JournalFailed: nothing can be read just now.
    """
    try:
        found = connection.execute(f"{ROWS} facts WHERE seq > ? AND seq <= ? ORDER BY seq", (last, until))
        while chunk := found.fetchmany(10_000):
            for seq, body, total in chunk:
                if seq != last + 1:
                    of = last_of(connection)
                    raise JournalDamaged(path, f"facts {last + 1} to {seq - 1} of {of} are missing")
                if crc32(body, seq & 0xFFFFFFFF) != total:
                    of = last_of(connection)
                    raise JournalDamaged(path, f"fact {seq} of {of} is damaged: its checksum does not fit")
                last = seq
                yield seq, body
    except sqlite3.DatabaseError as error:
        raise unreadable(path, f"what comes after fact {last}", error) from error


def decode(path: Path, seq: int, body: bytes) -> Fact:
    """A fact. Raises JournalRefused if this version does not know it."""
    try:
        return core_facts.decode(body)
    except msgspec.MsgspecError as error:
        raise JournalRefused(
            f"{path}: fact {seq} cannot be read ({error}): another version of rollmuxd wrote it; use that one"
        ) from error


class Unreadable(msgspec.Struct, frozen=True):
    """What stands in the place of a fact that is damaged or missing, or that this version does not know."""

    reason: str


def known_facts(path: Path, rows: Iterable[tuple[int, bytes, int]]) -> list[tuple[int, Fact | Unreadable]]:
    """The facts of these rows; in the place of each that cannot be read, why not."""
    found: list[tuple[int, Fact | Unreadable]] = []
    for seq, body, total in rows:
        if sum_of(seq, body) != total:
            found.append((seq, Unreadable("its checksum does not fit: it was changed after it was written")))
            continue
        try:
            found.append((seq, decode(path, seq, body)))
        except JournalRefused:
            found.append((seq, Unreadable("another version of rollmuxd wrote it")))
    return found


def with_missing(found: Iterable[tuple[int, Fact | Unreadable]], after: int) -> Iterator[tuple[int, Fact | Unreadable]]:
    """Facts, in order, and what stands in the place of those that should lie between ``after`` and the last."""
    for seq, fact in found:
        for number in range(after + 1, seq):
            yield number, Unreadable("it is missing: it was deleted after it was written")
        yield seq, fact
        after = seq
