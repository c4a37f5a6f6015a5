"""What is done with a journal as a whole: check it, back it up, put a backup in its place.

No loop in here, and no daemon: ``rollmuxd journal`` calls these, on the host where the journal lies.

- :func:`check` changes nothing, and may look at a journal that is in use.
- :func:`backup` may copy a journal that is in use: what comes out is the journal as it was at one instant.
- :func:`restore` needs the daemon stopped. What was there before is kept. Broken off, it leaves the journal that was
  there, or the backup, or none: then no daemon starts before it is done again.
"""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from zlib import decompress
from zlib import error as zlib_error

import msgspec
from msgspec import Struct

from rollmuxd.core.apply import apply
from rollmuxd.core.causes import Cause
from rollmuxd.core.errors import BrokenInvariant
from rollmuxd.core.ids import Millis
from rollmuxd.core.state import State
from rollmuxd.daemon import files
from rollmuxd.daemon.clock import iso
from rollmuxd.daemon.journal import file as journal_file
from rollmuxd.daemon.journal.file import DAMAGED, REMEDY, JournalDamaged, JournalRefused, Mark, connect
from rollmuxd.explain.causes import sentence

#: damaged pages, days or records of the audit trail that a check names
MOST_DAMAGED: Final = 20


class Checked(Struct):
    """What a check has found. ``good`` means: a daemon starts on it and has what was written."""

    path: str
    good: bool = False
    #: what is wrong, each in a sentence
    wrong: list[str] = []
    #: what is worth knowing and not wrong
    notes: list[str] = []
    #: what to do where something is wrong
    remedy: str = ""
    incarnation: int = 0
    #: numbers of the first and the last fact that are there; 0: none
    first: int = 0
    last: int = 0
    #: milliseconds since 1970
    last_at: Millis = 0
    snapshots: int = 0
    jobs: int = 0
    nodes: int = 0
    held: int = 0

    def line(self) -> str:
        """All of it for people, on one line."""
        if not self.good:
            return f"{self.path}: DAMAGED: {'; '.join([*self.wrong, *self.notes, self.remedy])}"
        facts = f"facts {self.first} to {self.last}, the last of {iso(self.last_at)}" if self.last else "no facts"
        said = (
            f"{self.path}: good: incarnation {self.incarnation}, {facts}, {self.snapshots} snapshots; "
            f"{self.jobs} jobs, {self.nodes} nodes, {self.held} GPUs held"
        )
        return "; ".join([said, *self.notes])


# ---- check -----------------------------------------------------------------------------------------------------------


def check(path: Path, mark: Mark | None = None) -> Checked:
    """Read everything: SQLite's pages, each fact; and replay it. ``mark``: how far it has come, of a copy.

    Raises:
        JournalRefused: there is no such file, or another version wrote it.
        JournalFailed: it cannot be read just now, which says nothing of what is in it.
    """
    if not path.is_file():
        raise JournalRefused(f"{path}: there is no such file; name a journal, a backup, or a state directory")
    found, end = Checked(str(path)), []
    try:
        with journal_file.refusals(path), closing(connect(path, readonly=True)) as connection:
            if in_place := path.name == "journal.sqlite3":
                # Read first: a daemon that runs writes it after the journal. Backups have none.
                mark = journal_file.read_mark(path)
            connection.execute("BEGIN")  # one instant, whatever a daemon writes meanwhile
            journal_file.refuse_other_format(connection, path)
            pages = connection.execute(f"PRAGMA quick_check({MOST_DAMAGED})").fetchall()
            found.wrong += [f"SQLite: {line}" for (line,) in pages if line != "ok"]
            now = journal_file.mark_now(connection)
            if (in_place or mark) and (why := journal_file.why_lost(now, mark)):
                end = [f"{sentence(why)}; a daemon that starts on it declares every run lost"]
                (found.notes if mark is None else found.wrong).extend(end)
            found.incarnation = now.incarnation
            _look(connection, path, found)
    except JournalDamaged as error:
        found.wrong.append(error.what)
    if found.wrong:
        found.remedy = "start the daemon on it: all else that was written is there" if found.wrong == end else REMEDY
    found.good = not found.wrong
    return found


def _look(connection: sqlite3.Connection, path: Path, found: Checked) -> None:
    cut = journal_file.notes(connection).cut
    for seq, _, shape, body in journal_file.states(connection):
        if body is not None and shape == journal_file.shape():
            found.snapshots += 1
        else:
            found.notes.append(f"a snapshot of fact {seq} is damaged, or another version's, and is not used")
    found.wrong += _damaged_beside(connection, cut)
    begin, base = journal_file.state_of(connection, path, cut)
    state = State() if base is None else msgspec.json.decode(base, type=State)
    found.last = begin
    for seq, fact in journal_file.facts_after(connection, begin, path):
        try:
            apply(state, fact)
        except (BrokenInvariant, KeyError, ValueError, AttributeError) as error:
            raise JournalDamaged(path, f"fact {seq} cannot follow from those before it ({error!r})") from error
        found.last = seq
    found.first, found.last_at = min(begin + 1, found.last), state.at
    found.jobs, found.nodes = len(state.jobs), len(state.nodes)
    found.held = sum(gpu.holder is not None for node in state.nodes.values() for gpu in node.gpus.values())
    if begin:
        found.notes.append(f"facts up to {begin} were compacted away")


def _damaged_beside(connection: sqlite3.Connection, cut: int) -> Iterator[str]:
    """What is damaged of the usage of days, and of the audit trail where the facts beside it were deleted."""
    days = []
    for day, body in connection.execute("SELECT day, CAST(body AS BLOB) FROM usage"):
        try:
            decompress(body)
        except zlib_error:
            days.append(iso(day * 86_400_000)[:10])
    if days:
        yield f"the usage of {', '.join(days[:MOST_DAMAGED])} is damaged"
    rows = connection.execute(f"{journal_file.ROWS} WHERE seq <= ? AND kind = 'audited' ORDER BY seq", (cut,))
    facts = [str(seq) for seq, fact in journal_file.decoded(rows, None) if fact is DAMAGED]
    if facts:
        yield f"the audit trail is damaged at fact {', '.join(facts[:MOST_DAMAGED])}"


# ---- backup ----------------------------------------------------------------------------------------------------------


def _copy(path: Path, to: Path) -> None:
    """Copy a journal as it is at one instant. Only its owner can read the copy: keys' hashes are in it."""
    _clear(to)
    os.close(os.open(to, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    with closing(connect(path, readonly=True)) as connection:
        journal_file.refuse_other_format(connection, path)
        connection.execute("VACUUM INTO ?", (str(to),))


def _clear(part: Path) -> None:
    """Remove what was begun under this name, and what SQLite has left beside it."""
    for suffix in ("", "-journal"):
        part.with_name(part.name + suffix).unlink(missing_ok=True)


def backup(path: Path, to: Path) -> Checked:
    """Copy a journal, in use or not, as it is at one instant; what the copy holds, checked.

    Raises:
        JournalRefused: it cannot be read, or the copy cannot be written, or is not good.
    """
    if not path.is_file():
        raise JournalRefused(f"{path}: there is no journal; name its state directory with --state-dir or --config")
    if to.exists():
        raise JournalRefused(f"{to} is there already; name another file, or move it away")
    part = to.with_name(f"{to.name}.part")
    try:
        mark = journal_file.read_mark(path)
        _copy(path, part)
        checked = check(part, mark)
        if not checked.good:
            raise JournalRefused(
                f"{path}: the copy is not good, so the journal is not: {'; '.join(checked.wrong)}; no backup was made; "
                f"{checked.remedy}"
            )
        files.sync(part)
        part.replace(to)
        files.sync(to.parent)
    except (OSError, sqlite3.Error) as error:
        raise JournalRefused(f"{to}: no backup was made: {error}") from error
    finally:
        with suppress(OSError):
            _clear(part)
    checked.path = str(to)
    return checked


# ---- restore ---------------------------------------------------------------------------------------------------------


class Restored(Struct, frozen=True):
    """A backup that is the journal now."""

    path: str
    incarnation: int
    #: the last fact in it
    last: int
    last_at: Millis
    #: where the journal is now that was there before; "": there was none
    kept: str
    #: the journal that was there before has said which API keys were revoked
    revoked_known: bool


def restore(file: Path, state_dir: Path) -> Restored:
    """Put a backup in the place of the journal. All runs are lost.

    An API key that was revoked stays so, where the journal that was there before can still be read.

    Raises:
        JournalFailed: a daemon runs on the directory.
        JournalRefused: the backup is not good, or the directory cannot be written.
    """
    checked = check(file)
    if not checked.good:
        raise JournalRefused(f"{file}: it is not good: {'; '.join(checked.wrong)}; restore another backup")
    path, new = state_dir / "journal.sqlite3", state_dir / "journal.restoring"
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        held = journal_file.lock(state_dir)
        try:
            _copy(file, new)
            with closing(sqlite3.connect(new, isolation_level=None)) as connection:
                known = _carry_over(path, connection)
                mark = journal_file.read_mark(path)
                now = journal_file.begin_incarnation(connection, mark, Cause("restored"))
            files.sync(new)
            files.belong(new)
            # However far we come, what is opened then is the journal that it was, or the backup, whose runs are lost.
            # Where there is neither, the mark keeps a daemon from beginning a new one.
            kept = _put_aside(path)
            files.write(journal_file.mark_of(path), now.line())
            new.replace(path)
            files.sync(state_dir)
        finally:
            with suppress(OSError):
                _clear(new)
            os.close(held)
    except (OSError, sqlite3.Error) as error:
        raise JournalRefused(f"the backup was not restored: {journal_file.error_of(error, path)}") from error
    return Restored(str(path), now.incarnation, checked.last, checked.last_at, kept, revoked_known=known)


def _carry_over(path: Path, connection: sqlite3.Connection) -> bool:
    """Revoke the API keys that the journal which is there says are revoked; False: it cannot be read.

    A key that the backup knows nothing of is written down as revoked, too: a later backup may be restored yet.
    """
    try:
        with closing(connect(path, readonly=True)) as there:
            rows = there.execute("SELECT * FROM keys WHERE revoked_at IS NOT NULL").fetchall()
    except sqlite3.Error:
        return False
    connection.executemany(
        "INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
        " ON CONFLICT (id) DO UPDATE SET revoked_at = coalesce(revoked_at, excluded.revoked_at)",
        rows,
    )
    return True


def _put_aside(path: Path) -> str:
    """Move a journal away, and its log, which must not stay beside a new one. The folder; "": there is neither.

    Where that breaks off there is no journal, and so no daemon starts before another restore.
    """
    found = [one for suffix in ("", "-wal", "-shm") if (one := path.with_name(path.name + suffix)).exists()]
    if not found:
        return ""
    folder = path.with_name(f"before-restore-{datetime.now(UTC).strftime('%Y%m%dT%H%M%S%f')}")
    folder.mkdir(mode=0o700)
    files.belong(folder)
    for one in found:
        one.rename(folder / one.name)
    files.sync(folder)
    return str(folder)
