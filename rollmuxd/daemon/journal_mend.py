"""Writes a damaged journal anew from what is good in it, where the state is whole.

A daemon starts from the newest snapshot and the facts after it. What is damaged before those is in nobody's way until
somebody wants it: a report of that time, a backup, which is made of good journals only, and compaction, which books no
day of damaged facts. Nothing that is damaged can be made good; but it can be let go of, as facts are that are old.

What goes on: the state, as a daemon that starts would have it; the facts from which on it can be made again (all that
are there, if those are whole); API keys; the books of days that can be read; who did what, as far as that can be read.
What was there before is kept beside it, whole.
"""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple
from zlib import compress, crc32

import msgspec
import structlog
from msgspec import Struct

from rollmuxd.core.errors import BrokenInvariant
from rollmuxd.core.fold import apply
from rollmuxd.core.state import State
from rollmuxd.daemon import journal_file
from rollmuxd.daemon.journal_care import DAY, LASTING, as_written, sum_of
from rollmuxd.daemon.journal_file import (
    JournalDamaged,
    JournalRefused,
    Reader,
    Tip,
    base_of,
    connect,
    rows_after,
    set_meta,
)

log = structlog.get_logger("rollmuxd.journal")

#: words of ``meta`` that are the file's, and not what is in it
_OF_THE_FILE: Final = ("cut", "least_reader", "passable", "test_write", "written_by")


class Beginning(NamedTuple):
    """What a replay can begin with, and what it comes to."""

    #: the last fact before those that are replayed, and the state after it; None: there was none
    tip: Tip
    base: bytes | None
    #: after the last fact, and its number
    state: State
    last: int


def beginning(connection: sqlite3.Connection, path: Path) -> Beginning:
    """All facts that are there, if they come to what the newest snapshot says; else that snapshot, and those after it.

    Either way it is the state that a daemon has that starts on it.

    Raises:
        JournalDamaged: the state is not whole.
    """
    seq, snapshot = journal_file.newest_snapshot(connection)
    try:
        tip, base = base_of(connection, path)
        return _replayed(connection, path, tip, base, {seq: snapshot})
    except JournalDamaged:
        if snapshot is None:
            raise
    return _replayed(connection, path, journal_file.tip_at(connection, path, seq), snapshot, {})


def _replayed(
    connection: sqlite3.Connection, path: Path, tip: Tip, base: bytes | None, snapshots: dict[int, bytes | None]
) -> Beginning:
    try:
        state = State() if base is None else msgspec.json.decode(base, type=State)
    except msgspec.MsgspecError as error:
        raise JournalDamaged(path, f"the state after fact {tip.seq} cannot be read ({error})") from error
    reader, last = Reader(connection, path), tip.seq
    for seq, body, _ in rows_after(connection, tip, path):
        if (fact := reader.decode(seq, body)) is not None:
            try:
                apply(state, fact)
            except (BrokenInvariant, KeyError, ValueError, AttributeError) as error:
                raise JournalDamaged(path, f"fact {seq} cannot follow from those before it ({error!r})") from error
        last = seq
        snapshot = snapshots.get(seq)
        if snapshot is not None and msgspec.json.encode(state) != snapshot:
            raise JournalDamaged(path, f"the snapshot of fact {seq} is not what the facts come to")
    if last < max(snapshots, default=0):
        raise JournalDamaged(path, f"the facts after {last} are missing, and there is a snapshot of {max(snapshots)}")
    return Beginning(tip, base, state, last)


class Mended(Struct, frozen=True):
    """What was done."""

    path: str
    #: numbers of the first and the last fact that went on; ``first`` after ``last``: none did
    first: int
    last: int
    #: facts that are not there any more
    left_out: int
    #: where the journal is now that was there before
    kept: str


def mend(state_dir: Path) -> Mended:
    """Write the journal anew from what is good in it. It has the same last fact, so its mark stays as it is.

    Raises:
        JournalInUse: a daemon runs on the directory.
        JournalDamaged: the state is not whole.
        JournalRefused: it cannot be used, or written anew.
        JournalFailed: it cannot be read just now.
    """
    path = state_dir / "journal.sqlite3"
    if not path.is_file():
        raise JournalRefused(f"{path}: there is no journal; name its state directory with --state-dir or --config")
    try:
        held = journal_file.lock(state_dir)
        try:
            journal_file.refuse_lost(path)
            journal_file.prepare(path)
            with closing(connect(path)) as connection:
                journal_file.mend(connection, path)
                if connection.execute("PRAGMA user_version").fetchone()[0] > journal_file.FORMAT:
                    raise JournalRefused(f"{path}: a newer rollmuxd wrote it; use that one")
                done = _write_anew(connection, path)
                # All of the log must be in the file, before the one is put aside without the other.
                if connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
                    raise JournalRefused(f"{path}: somebody reads it (a check, a backup); try again after that")
            return msgspec.structs.replace(done, kept=_put(path))
        finally:
            with suppress(OSError):
                journal_file.clear(_new(path))  # as large as the journal; on a full disk nobody else would get far
            journal_file.unlock(held)
    except sqlite3.Error as error:
        raise journal_file.unreadable(path, "it", error) from error
    except OSError as error:
        said = journal_file.denied(error, state_dir) or error
        raise JournalRefused(f"state directory {state_dir}: nothing was mended: {said}") from error


def _new(path: Path) -> Path:
    return path.with_name("journal.mending")


def _write_anew(old: sqlite3.Connection, path: Path) -> Mended:
    begin = beginning(old, path)
    new = _new(path)
    journal_file.clear(new)
    os.close(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    journal_file.belong(new)
    journal_file.prepare(new)
    with closing(connect(new)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        for name, value in old.execute("SELECT name, value FROM meta"):
            if name not in _OF_THE_FILE:
                set_meta(connection, name, value)
        columns = "id, owner, user, role, hashed, created_at, revoked_at, expires_at, used_at"
        _copy(connection, "keys", columns, old.execute(f"SELECT {columns} FROM keys"))  # noqa: S608  # names only
        columns = "seq, at, kind, body, sum"
        found = old.execute(f"SELECT {columns} FROM facts WHERE seq > ? ORDER BY seq", (begin.tip.seq,))  # noqa: S608
        _copy(connection, "facts", columns, found)
        _copy(connection, "kept", "seq, at, kind, body", _who_did_what(old, begin.tip))
        _copy(connection, "days", "day, seq, state, books, sum", _days(old, begin))
        if begin.tip.seq:
            set_meta(connection, "cut", f"{begin.tip.seq} {begin.tip.sum}")
        if begin.last:
            body = msgspec.json.encode(begin.state)
            row = (begin.last, body, crc32(body), journal_file.shape())
            _copy(connection, "snapshots", "seq, body, sum, shape", iter([row]))
        connection.execute("COMMIT")
        connection.execute("PRAGMA journal_mode = DELETE").fetchall()  # one file, that can be moved
    gone = begin.tip.seq - journal_file.cut_of(old).seq
    return Mended(str(path), begin.tip.seq + 1, begin.last, gone, "")


def _copy(connection: sqlite3.Connection, table: str, columns: str, rows: Iterator[tuple[object, ...]]) -> None:
    places = ",".join("?" * (columns.count(",") + 1))
    connection.executemany(f"INSERT INTO {table} ({columns}) VALUES ({places})", rows)  # noqa: S608  # names only


def _who_did_what(old: sqlite3.Connection, tip: Tip) -> Iterator[tuple[object, ...]]:
    """The facts that outlive the others, as far as they can be read: of ``kept``, and of the facts that go now."""
    places = ",".join("?" * len(LASTING))
    of_facts = f"SELECT seq, at, kind, body FROM facts WHERE seq <= ? AND kind IN ({places}) ORDER BY seq"  # noqa: S608
    seen = 0
    for query, values in (("SELECT seq, at, kind, body FROM kept ORDER BY seq", ()), (of_facts, (tip.seq, *LASTING))):
        for row in _as_far_as_it_can_be_read(old, query, values):
            if seen < row[0] <= tip.seq and as_written(*row):
                seen = row[0]
                yield row


def _as_far_as_it_can_be_read(old: sqlite3.Connection, query: str, values: tuple[object, ...]) -> Iterator[Any]:
    try:
        yield from old.execute(query, values)
    except sqlite3.DatabaseError as error:
        if journal_file.passes(error):
            raise
        log.warning("rows_left_out", rows=query, reason=str(error))


def _days(old: sqlite3.Connection, begin: Beginning) -> Iterator[tuple[object, ...]]:
    """The books of days that are over and can be read, and the state that everything begins with.

    The day of that state is booked from there on. Those after it, too: a daemon does that by itself.
    """
    if begin.base is None:
        return
    if begin.tip == journal_file.cut_of(old):
        at_cut = "SELECT max(day) FROM days WHERE seq = ? AND state IS NOT NULL"
        day = old.execute(at_cut, (begin.tip.seq,)).fetchone()[0]
    else:
        day = msgspec.json.decode(begin.base, type=State).at // DAY
    before = "SELECT day, seq, books FROM days WHERE day < ? ORDER BY day"
    for number, seq, books in _as_far_as_it_can_be_read(old, before, (day,)):
        if books is not None and sum_of(books) is not None:
            yield number, seq, None, books, 0
    yield day, begin.tip.seq, compress(begin.base), None, crc32(begin.base)


def _put(path: Path) -> str:
    """Have the new file be the journal, at no instant without one; where the one is kept that was there before."""
    folder = journal_file.put_aside(path, "mend")
    _new(path).replace(path)
    journal_file.sync_folder(path.parent)
    return str(folder)
