"""The journal's file: its layout and format, checksums, the mark, and what a start does about damage.

There is no thread and no loop in here. The daemon uses it when it opens its journal; ``rollmuxd journal`` uses it when
no daemon runs. What is guarded against, and how: ``docs/decisions/0013-damage-to-the-journal.md``.

Errors::

    JournalError
      JournalRefused     this state directory cannot be used, and why; says the remedy
        JournalDamaged   something in it is damaged or missing; says what
      JournalFailed      a commit failed: no answer may depend on it; or the journal cannot be
                         used just now (another daemon, a full disk, no free file)
"""

import errno
import fcntl
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Annotated, Final, NamedTuple, final
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


class JournalDamaged(JournalRefused):
    """Something in the journal is damaged or missing."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"{path}: {what}; {REMEDY}")
        self.what = what


class JournalFailed(JournalError):
    """A commit failed. What it held may or may not be in the file: only reading the file tells.

    Or the journal cannot be used just now. Either may be over soon, and is tried again.
    """


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


@contextmanager
def refusals(path: Path) -> Iterator[None]:
    """Raise what the system or SQLite says within of a journal, or its directory, as a JournalError."""
    try:
        yield
    except (OSError, sqlite3.Error, ValueError) as error:
        raise error_of(error, path) from error


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


def error_of(error: Exception, path: Path) -> JournalError:
    """What is to be said, and done, where the system or SQLite cannot use a journal, or its directory."""
    if is_full(error):
        return JournalFailed(f"{path} cannot be written now: its disk is full; make room there")
    if isinstance(error, PermissionError):
        folder = path.parent
        return JournalRefused(
            f"{error.filename or folder} is closed to this user (uid {os.geteuid()}): run this as the user whose "
            f"{folder} is, or give that user what is in it, as root: chown -R --reference={folder} {folder}"
        )
    if isinstance(error, FileExistsError | NotADirectoryError):
        return JournalRefused(f"{path}: {error}; set daemon.state_dir to a directory")
    # Damage is a plain DatabaseError; of those that are of operation, this one is of the statement.
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    if isinstance(error, OSError) or (isinstance(error, sqlite3.OperationalError) and code != sqlite3.SQLITE_ERROR):
        return JournalFailed(
            f"{path} cannot be used now ({error}), which says nothing of what is in it: look whether open files "
            "(ulimit -n) or memory ran out, whose the files are, and what the kernel says of the disk"
        )
    return JournalDamaged(path, f"it cannot be read ({error})")


def prepare(path: Path) -> Millis:
    """Make the journal ready for a daemon, laid out where it is new; for how long no daemon used it.

    The caller holds the state directory's lock.

    Raises:
        JournalRefused: it is of another format; or one was used here, and what is there now is not one.
    """
    for suffix in ("", "-wal", "-shm"):
        with suppress(FileNotFoundError):  # unlike SQLite, the system names a file that is closed to this user
            os.close(os.open(f"{path}{suffix}", os.O_RDWR))
    found = path.stat().st_size if path.exists() else 0
    if found:  # looked at before anything opens it to write, so that what is left of a journal stays as it is
        with closing(connect(path, readonly=True)) as connection:
            found = connection.execute("PRAGMA user_version").fetchone()[0]
    if not found and mark_of(path).exists():  # a new one in its place would know of no job that holds GPUs
        raise JournalRefused(
            f"state directory {path.parent}: its journal.sqlite3 is gone, empty, or no journal, and which GPUs are "
            "held was in the one before; restore a backup (rollmuxd journal restore FILE), or remove the directory to "
            "begin with nothing, once no job holds a GPU"
        )
    # API keys' hashes are in it. SQLite gives its other files the mode of this one.
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    with closing(connect(path)) as connection:
        if not found:
            connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {FORMAT}; COMMIT;")
        refuse_other_format(connection, path)
        return _begin(connection, path)


def refuse_other_format(connection: sqlite3.Connection, path: Path) -> None:
    """Raise JournalRefused if the file is not of this version's format."""
    found: int = connection.execute("PRAGMA user_version").fetchone()[0]
    if found != FORMAT:
        raise JournalRefused(
            f"{path} has format {found}, and this rollmuxd reads format {FORMAT} only: use the rollmuxd that wrote it"
        )


def lock(state_dir: Path) -> int:
    """Hold the directory for this process; the kernel releases it however the process ends.

    Raises:
        JournalFailed: another process holds it; says its pid.
    """
    held = os.open(state_dir / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    files.belong(state_dir / "lock")
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(held, 20, 0).decode(errors="replace").strip()
        os.close(held)
        raise JournalFailed(
            f"state directory {state_dir} is in use by another rollmuxd, pid {pid or 'unknown'}; "
            "stop it (rollmuxd daemon stop), or set daemon.state_dir to a directory of this one's own"
        ) from None
    with suppress(OSError):  # the pid is for people; on a full disk there may be no room even for that
        os.ftruncate(held, 0)
        os.pwrite(held, f"{os.getpid()}\n".encode(), 0)
    return held


# ---- words, incarnations, and the mark -------------------------------------------------------------------------------


class Lost(NamedTuple):
    """Why the journal does not say what jobs did last, and of which incarnation on that is known; None: it does.

    It stays in the journal. The core has heard of it once the state's incarnation is not smaller.
    """

    incarnation: int
    why: Cause | None


class Notes(msgspec.Struct, frozen=True):
    """What the journal keeps beside the facts."""

    id: str
    incarnation: int
    #: the number of the last fact that was left out by compaction, as far as SQLite counts; 0: all are there
    cut: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 0
    lost: Lost = Lost(0, None)
    #: optical switches that an operator leaves alone, and why
    left_alone: dict[str, str] = {}


def notes(connection: sqlite3.Connection) -> Notes:
    """Read them. Raises ValueError."""
    kept = dict(connection.execute("SELECT name, value FROM meta"))
    for name in kept.keys() & {"lost", "left_alone"}:
        kept[name] = msgspec.json.decode(str(kept[name]))
    try:
        return msgspec.convert(kept, Notes, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"its table meta is damaged: {error}") from error


def note(connection: sqlite3.Connection, **values: str) -> None:
    """Keep notes, in one commit."""
    places = ",".join(["(?,?)"] * len(values))
    connection.execute(f"INSERT OR REPLACE INTO meta VALUES {places}", [*chain(*values.items())])  # noqa: S608  # question marks


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
    with suppress(FileNotFoundError, ValueError):
        content = mark_of(path).read_bytes()
        journal, seq, incarnation, _ = content.decode("ascii").split()
        mark = Mark(journal, int(seq), int(incarnation))
        return mark if mark.line() == content else None
    return None


def mark_now(connection: sqlite3.Connection) -> Mark:
    """The mark that a journal should have. Raises ValueError if it ends before a snapshot, or does not say its id."""
    noted = notes(connection)
    last: int = connection.execute("SELECT coalesce(max(seq), 0) FROM facts").fetchone()[0]
    newest: int = connection.execute("SELECT coalesce(max(seq), 0) FROM snapshots").fetchone()[0]
    last = max(last, noted.cut)
    if newest > last:
        raise ValueError(f"there is a snapshot of fact {newest}, and the last fact is {last}")
    return Mark(noted.id, last, noted.incarnation)


def why_lost(now: Mark, mark: Mark | None) -> Cause | None:
    """Why the journal may lack facts that were answered for, as its mark says; None: it has them all."""
    if mark is None:
        return Cause("no_mark") if now.seq else None
    if mark.journal != now.journal:
        return Cause("another_journal")
    if now.seq < mark.seq:
        return Cause("facts_missing", {"last": now.seq, "written": mark.seq})
    return None


def begin_incarnation(connection: sqlite3.Connection, mark: Mark | None, why: Cause | None) -> Mark:
    """Begin a new incarnation, before which facts were lost if there is a reason; the mark that is to be written then.

    It is later than that of the mark which is there. The number is the time in seconds: a counter would give the same
    one to two restores of one backup.
    """
    now = mark_now(connection)
    number = max(int(time.time()), now.incarnation + 1, mark.incarnation + 1 if mark else 0)
    lost = {} if why is None else {"lost": msgspec.json.encode(Lost(number, why)).decode()}
    note(connection, incarnation=str(number), **lost)
    return now._replace(incarnation=number)


def _begin(connection: sqlite3.Connection, path: Path) -> Millis:
    """Begin a new incarnation, and find out whether the journal has lost its end.

    Should that break off, it can be done again: a mark that tells of a loss is written last. One that does not is left
    to the first commit, since a start may come to nothing. The answer is for how long no daemon used the journal, by
    the age of the mark; 0 where every run is lost.
    """
    mark = read_mark(path)
    if (why := why_lost(mark_now(connection), mark)) is not None:
        log.error("journal_lost_its_end", path=str(path), reason=sentence(why), result="all runs are lost")
    begun = begin_incarnation(connection, mark, why)
    if mark is None or why is not None:
        files.write(mark_of(path), begun.line())
        return 0
    return max(0, time.time_ns() - mark_of(path).stat().st_mtime_ns) // 1_000_000


# ---- snapshots and facts ---------------------------------------------------------------------------------------------


@cache
def shape() -> str:
    """What a snapshot of this version looks like. A snapshot of another shape is not used: the facts are replayed."""
    return f"{crc32(msgspec.json.encode(msgspec.json.schema(State))):08x}"


def packed(body: bytes) -> bytes:
    """A state as it is kept; a large one is a twentieth, in a tenth of a second."""
    return compress(body, level=Z_BEST_SPEED) if len(body) >= PACKED_FROM else body


def keep_state(connection: sqlite3.Connection, seq: int, body: bytes, day: int | None = None) -> None:
    """Keep a packed state, after fact ``seq``; ``day``: it is that at the beginning of this day."""
    insert = "INSERT OR REPLACE INTO snapshots (seq, day, body, sum, shape) VALUES (?, ?, ?, ?, ?)"
    connection.execute(insert, (seq, day, body, crc32(body), shape()))


def states(
    connection: sqlite3.Connection, where: str = "", *values: int
) -> Iterator[tuple[int, int, str, bytes | None]]:
    """The states that are kept, the newest first: the last fact in each, the day (if any) that it begins, its shape.

    And its body; None: its checksum does not fit.
    """
    # A damaged page may have anything in the place of a body.
    rows = "SELECT CAST(coalesce(body, '') AS BLOB), sum, seq, day, shape FROM snapshots"
    for body, total, seq, day, of_shape in connection.execute(f"{rows} {where} ORDER BY seq DESC, day DESC", values):
        whole = body if crc32(body) == total else None
        yield seq, day, of_shape, decompress(whole) if whole and whole.startswith(_PACKED) else whole


def state_of(connection: sqlite3.Connection, path: Path, until: int) -> tuple[int, bytes | None]:
    """The newest state up to fact ``until`` that can be used, and its last fact; None: the empty one, before all facts.

    Raises:
        JournalDamaged: there is no such state, and not all facts are there.
    """
    cut = notes(connection).cut
    for seq, _, of_shape, body in states(connection, "WHERE seq <= ?", until):
        if body is not None and (of_shape == shape() or seq == cut):
            return seq, body
        reason = "its checksum does not fit" if body is None else "another version wrote it"
        log.warning("snapshot_not_used", seq=seq, reason=f"{reason}; an older one or the facts say it all")
    if cut:
        raise JournalDamaged(path, f"facts up to {cut} were compacted away, and the state after them is damaged")
    return 0, None


@final
class Unreadable(msgspec.Struct, frozen=True):
    """What stands in the place of a fact that is damaged or missing, or that this version does not know."""

    reason: str


DAMAGED: Final = Unreadable("it is damaged: its checksum does not fit")
UNKNOWN: Final = Unreadable("it is of another version of rollmuxd: use that one")

#: rows of facts as they are wanted; a damaged page may have anything where a body or a sum was, NULL too
ROWS: Final = "SELECT seq, CAST(coalesce(body, '') AS BLOB), CAST(coalesce(sum, -1) AS INTEGER) FROM facts"


def decoded(rows: Iterable[tuple[int, bytes, int]], last: int | None) -> Iterator[tuple[int, Fact | Unreadable]]:
    """The facts of these rows, in order; in the place of each that cannot be read, why not.

    ``last``: the fact before them, after which none may be missing; None: they have holes.
    """
    for seq, body, total in rows:
        if last is not None:
            if seq != last + 1:  # a range of each takes a tenth of the whole
                for number in range(last + 1, seq):
                    yield number, Unreadable(f"it is missing: facts {last + 1} to {seq - 1} were deleted")
            last = seq
        fact: Fact | Unreadable = DAMAGED
        if crc32(body, seq & 0xFFFFFFFF) == total:
            try:
                fact = core_facts.decode(body)
            except msgspec.MsgspecError:
                fact = UNKNOWN
        yield seq, fact


def facts_after(connection: sqlite3.Connection, last: int, path: Path) -> Iterator[tuple[int, Fact]]:
    """The facts after one, in order.

    Raises:
        JournalRefused: (while running through them) one is damaged or missing, or this version does not know it.
    """
    rows = connection.execute(f"{ROWS} WHERE seq > ? ORDER BY seq", (last,))
    for seq, fact in decoded(rows, last):
        if type(fact) is Unreadable:  # isinstance would take long here: a struct's is Python's
            what = f"fact {seq} {fact.reason.removeprefix('it ')}"
            raise JournalRefused(f"{path}: {what}") if fact is UNKNOWN else JournalDamaged(path, what)
        yield seq, fact
