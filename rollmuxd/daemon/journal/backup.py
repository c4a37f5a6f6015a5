"""What is done with a journal as a whole: check it, back it up, put a backup in its place.

No loop in here, and no daemon: ``rollmuxd journal`` calls these, on the host where the journal lies.

- :func:`check` changes nothing, and may look at a journal that is in use.
- :func:`backup` may copy a journal that is in use: what comes out is the journal as it was at one instant.
- :func:`restore` needs the daemon stopped. What was there before is kept. Broken off, it leaves the journal that was
  there, or the backup, or none: then no daemon starts before it is done again.
"""

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final, TypeAlias
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
from rollmuxd.daemon.journal.file import JournalDamaged, JournalFailed, JournalRefused, base_of, connect
from rollmuxd.explain.causes import sentence

#: what SQLite says of its own pages, at most so many lines of it
SAID_AT_MOST: Final = 20
#: facts between two reports of progress
TOLD_EVERY: Final = 1_000

REMEDY: Final = "keep a copy of the state directory, and restore the last backup (rollmuxd journal restore FILE)"

#: gets how many facts are done, of how many
Tell: TypeAlias = Callable[[int, int], None]


class Checked(Struct, frozen=True):
    """What a check has found. ``good`` means: a daemon starts on it and has what was written."""

    path: str
    good: bool
    #: what is wrong, each in a sentence
    wrong: list[str]
    #: what is worth knowing and not wrong
    notes: list[str]
    #: what to do about what is wrong
    remedy: str = ""
    format: int = 0
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
    bytes: int = 0

    def line(self) -> str:
        """All of it for people, on one line."""
        if not self.good:
            return f"{self.path}: DAMAGED: {'; '.join(filter(None, [*self.wrong, *self.notes, self.remedy]))}"
        facts = f"facts {self.first} to {self.last}, the last of {iso(self.last_at)}" if self.last else "no facts"
        said = (
            f"{self.path}: good: format {self.format}, incarnation {self.incarnation}, {facts}, "
            f"{self.snapshots} snapshots; {self.jobs} jobs, {self.nodes} nodes, {self.held} GPUs held"
        )
        return "; ".join([said, *self.notes])


def journal_in(path: Path) -> Path:
    """The journal that is meant by a file, or by the state directory that it is in."""
    return path / "journal.sqlite3" if path.is_dir() else path


# ---- check -----------------------------------------------------------------------------------------------------------


def check(path: Path, tell: Tell = lambda done, total: None) -> Checked:
    """Read everything: SQLite's pages, each fact; and replay it.

    The usage of days is proven by the checksum that zlib gives it.

    ``tell`` is called now and then with how many facts are done, of how many.

    Raises:
        JournalRefused: there is no such file.
        JournalFailed: it cannot be read just now, which says nothing of what is in it.
    """
    if not path.is_file():
        raise JournalRefused(f"{path}: there is no such file; name a journal, a backup, or a state directory")
    found: dict[str, Any] = {"bytes": path.stat().st_size}
    wrong: list[str] = []
    notes: list[str] = []
    try:
        # Read first: a daemon that runs writes it after the journal. Backups have none.
        marked, mark = path.name == "journal.sqlite3", journal_file.read_mark(path)
        with closing(connect(path, readonly=True)) as connection:
            connection.execute("BEGIN")  # one instant, whatever a daemon writes meanwhile
            wrong += _pages(connection)
            try:
                _look(connection, path, found, wrong, notes, tell)
            except JournalDamaged as error:
                wrong.append(error.what)
            found["remedy"] = REMEDY if wrong else ""
            if marked and (why := journal_file.why_lost(journal_file.mark_now(connection), mark)):
                (notes if mark is None else wrong).append(
                    f"{sentence(why)}; a daemon that starts on it declares every run lost"
                )
    except JournalRefused as error:
        wrong.append(str(error).removeprefix(f"{path}: "))
    except OSError as error:
        raise JournalFailed(f"{path}: its mark cannot be read now ({error}): look at open files (ulimit -n)") from error
    except sqlite3.Error as error:
        if journal_file.passes(error):
            raise journal_file.unreadable(path, "it", error) from error
        wrong.append(f"SQLite cannot read it: {error}")
    except ValueError as error:
        wrong.append(f"it is no journal, or damaged: {error}")
    return Checked(str(path), not wrong, wrong, notes, **found)


def _pages(connection: sqlite3.Connection) -> list[str]:
    said = [str(line) for (line,) in connection.execute(f"PRAGMA quick_check({SAID_AT_MOST})").fetchall()]
    return [] if said == ["ok"] else [f"SQLite: {line}" for line in said]


def _look(
    connection: sqlite3.Connection, path: Path, found: dict[str, Any], wrong: list[str], notes: list[str], tell: Tell
) -> None:
    found["format"] = connection.execute("PRAGMA user_version").fetchone()[0]
    if found["format"] == 0:
        raise JournalRefused(f"{path}: it is empty, or no journal")
    journal_file.refuse_other_format(connection, path)
    found["incarnation"] = journal_file.incarnation_of(connection)
    begin, base = base_of(connection, path)
    found["first"] = begin + 1
    snapshots = _snapshots(connection, notes)
    found["snapshots"] = len(snapshots)
    end = journal_file.last_of(connection)
    if snapshots and snapshots[-1] > end:
        raise JournalDamaged(path, f"there is a snapshot of fact {snapshots[-1]}, and the last fact is {end}")
    state = State() if base is None else msgspec.json.decode(base, type=State)
    wrong += _usage(connection) + _audited(connection, begin)
    last = begin
    for seq, body in journal_file.rows_after(connection, begin, path):
        fact = journal_file.decode(path, seq, body)
        try:
            apply(state, fact)
        except (BrokenInvariant, KeyError, ValueError, AttributeError) as error:
            raise JournalDamaged(path, f"fact {seq} cannot follow from those before it ({error!r})") from error
        last = seq
        if seq % TOLD_EVERY == 0 or seq == end:
            tell(seq - begin, end - begin)
    found["last"], found["last_at"] = last, state.at
    if last == begin:
        found["first"] = found["last"] = begin
    found["jobs"], found["nodes"] = len(state.jobs), len(state.nodes)
    found["held"] = sum(gpu.holder is not None for node in state.nodes.values() for gpu in node.gpus.values())
    if begin:
        notes.append(f"facts up to {begin} were compacted away")


def _snapshots(connection: sqlite3.Connection, notes: list[str]) -> list[int]:
    """The facts after which there are snapshots that this version would use, in order."""
    found = []
    for body, total, seq, _, shape in connection.execute(f"{journal_file.STATES} ORDER BY seq"):
        if journal_file.whole(body, total) is None:
            notes.append(f"a snapshot of fact {seq} is damaged, and is not used")
        elif shape != journal_file.shape():
            notes.append(f"a snapshot of fact {seq} is another version's, and is not used")
        else:
            found.append(seq)
    return found


def _usage(connection: sqlite3.Connection) -> list[str]:
    """What is wrong with the usage of days."""
    damaged = []
    for day, body in connection.execute("SELECT day, CAST(body AS BLOB) FROM usage"):
        try:
            decompress(body)
        except zlib_error:
            damaged.append(iso(day * 86_400_000)[:10])
    return [f"the usage of {', '.join(damaged[:5])} is damaged ({len(damaged)} days)"] if damaged else []


def _audited(connection: sqlite3.Connection, cut: int) -> list[str]:
    """What is wrong with the audit trail, where the facts beside it were deleted."""
    rows = connection.execute(f"{journal_file.ROWS} facts WHERE seq <= ? AND kind = 'audited' ORDER BY seq", (cut,))
    bad = [seq for seq, body, total in rows if journal_file.sum_of(seq, body) != total]
    return [f"{len(bad)} facts of the audit trail are damaged, from {bad[0]} on"] if bad else []


# ---- backup ----------------------------------------------------------------------------------------------------------


def backup(path: Path, to: Path, tell: Tell = lambda done, total: None) -> Checked:
    """Copy a journal, in use or not, as it is at one instant; what the copy holds, checked (``tell``: how far it is).

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
        part.unlink(missing_ok=True)
        # Before there is anything in it: keys' hashes are.
        os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        with closing(connect(path, readonly=True)) as connection:
            journal_file.refuse_other_format(connection, path)
            connection.execute("VACUUM INTO ?", (str(part),))
        with closing(connect(part, readonly=True)) as connection:
            if mark is not None and (why := journal_file.why_lost(journal_file.mark_now(connection), mark)):
                raise JournalRefused(f"{path}: {sentence(why)}; no backup was made: start the daemon on it first")
        checked = check(part, tell)
        if not checked.good:
            raise JournalRefused(
                f"{path}: the copy is not good, so the journal is not: {'; '.join(checked.wrong)}; no backup was "
                f"made{checked.remedy and f'; {checked.remedy}'}"
            )
        files.sync(part)
        part.replace(to)
        files.sync(to.parent)
    except (OSError, sqlite3.Error) as error:
        raise JournalRefused(f"{to}: no backup was made: {error}") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
    return msgspec.structs.replace(checked, path=str(to))


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
    #: the ids of API keys that were revoked since the backup, and stay so
    keys_revoked: list[str]
    #: the journal that was there before has said which were
    revoked_known: bool


def restore(file: Path, state_dir: Path) -> Restored:
    """Put a backup in the place of the journal. All runs are lost.

    An API key that was revoked stays so, where the journal that was there before can still be read.

    Raises:
        JournalInUse: a daemon runs on the directory.
        JournalRefused: the backup is not good, or the directory cannot be written.
    """
    checked = check(file)
    if not checked.good:
        raise JournalRefused(f"{file}: it is not good: {'; '.join(checked.wrong)}; restore another backup")
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        held = journal_file.lock(state_dir)
        try:
            return _restore(file, state_dir, checked)
        finally:
            with suppress(OSError):
                journal_file.clear(_new(state_dir))
            os.close(held)
    except (OSError, sqlite3.Error) as error:
        said = journal_file.denied(error, state_dir) or error
        raise JournalRefused(f"state directory {state_dir}: the backup was not restored: {said}") from error


def _new(state_dir: Path) -> Path:
    return state_dir / "journal.restoring"


def _restore(file: Path, state_dir: Path, checked: Checked) -> Restored:
    path = state_dir / "journal.sqlite3"
    new = _new(state_dir)
    journal_file.clear(new)
    os.close(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    with closing(connect(file, readonly=True)) as connection:
        connection.execute("VACUUM INTO ?", (str(new),))
    before, mark = _incarnation_of(path), journal_file.read_mark(path)
    with closing(connect(new)) as connection:
        revoked = _revoke_again(path, connection)
        known = journal_file.incarnation_of(connection)
        incarnation = journal_file.next_incarnation(known, before, 0 if mark is None else mark.incarnation)
        journal_file.note_lost(connection, incarnation, Cause("restored"))
        now = journal_file.mark_now(connection)
        connection.execute("PRAGMA journal_mode = DELETE").fetchall()  # one file, that can be moved
    files.sync(new)
    files.belong(new)
    # However far we come, what is opened then is the journal that it was, or the backup, whose runs are lost. Where
    # there is neither, the mark keeps a daemon from beginning a new one.
    if not journal_file.mark_of(path).exists():
        journal_file.write_mark(path, now)
    kept = str(journal_file.put_aside(path) or "")
    new.replace(path)
    files.sync(state_dir)
    journal_file.write_mark(path, now)
    return Restored(
        str(path),
        incarnation,
        checked.last,
        checked.last_at,
        kept,
        revoked or [],
        revoked_known=revoked is not None,
    )


def _revoke_again(path: Path, connection: sqlite3.Connection) -> list[str] | None:
    """Revoke the API keys that the journal which is there says are revoked; those that it is news of. None: unknown.

    A key that the backup knows nothing of is written down as revoked, too: a later backup may be restored yet.
    """
    if not path.exists():
        return None
    try:
        with closing(connect(path, readonly=True)) as old:
            rows = old.execute(
                "SELECT id, owner, user, role, hashed, created_at, revoked_at FROM keys WHERE revoked_at IS NOT NULL"
                " ORDER BY id"
            ).fetchall()
    except sqlite3.Error:
        return None
    open_ = {id_ for (id_,) in connection.execute("SELECT id FROM keys WHERE revoked_at IS NULL").fetchall()}
    connection.executemany(
        "INSERT INTO keys (id, owner, user, role, hashed, created_at, revoked_at) VALUES (?, ?, ?, ?, ?, ?, ?)"
        " ON CONFLICT (id) DO UPDATE SET revoked_at = coalesce(revoked_at, excluded.revoked_at)",
        rows,
    )
    return [row[0] for row in rows if row[0] in open_]


def _incarnation_of(path: Path) -> int:
    """Of the journal that is there, if it can still be read."""
    try:
        with closing(connect(path, readonly=True)) as connection:
            return journal_file.incarnation_of(connection)
    except (sqlite3.Error, ValueError):
        return 1
