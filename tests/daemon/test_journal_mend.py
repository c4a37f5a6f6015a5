"""A journal that is damaged where nobody starts from: it is said, and it can be written anew without what is damaged.

- The check, the backup that it refuses and the page say the same: not to restore an older backup over a whole state.
- What comes out is a good journal with the state that a daemon had, the same keys, and the same incarnation.
- Where the state is not whole nothing is mended.
"""

import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from rollmuxd.core.facts import Audited, HostAdded, LoopStalled
from rollmuxd.core.fold import apply
from rollmuxd.core.inputs import HostSpec
from rollmuxd.core.state import State
from rollmuxd.daemon import journal_mend
from rollmuxd.daemon.journal import Journal, JournalDamaged, JournalInUse, JournalRefused
from rollmuxd.daemon.journal_care import DAY, Keep, Keeper, compact
from rollmuxd.daemon.journal_mend import mend
from rollmuxd.daemon.journal_tools import backup, check, restore
from rollmuxd.daemon.keys import ApiKey, Role

pytestmark = pytest.mark.asyncio
BEGIN = 20_000 * DAY
#: a day's facts; four days are written, and the fifth has begun
EACH = 10
LAST = 4 * EACH + 3
SNAPSHOT = 4 * EACH + 1
KEEP = Keep(days=2, bytes=10**12, audit_days=1_000)
KEY = ApiKey("k1", "team", "ann", Role.ADMIN, "hashed", 5, None, None, None)


def fact(seq):
    at = BEGIN + (seq - 1) // EACH * DAY + seq
    if seq % EACH == 5:
        return Audited(at, "ann", "", "nodes.drain", f"n{seq}")
    return HostAdded(at, HostSpec(f"h{seq}", "fake", 0))


def state_after(seq):
    state = State()
    for number in range(1, seq + 1):
        apply(state, fact(number))
    return state


async def write(folder, *, cut=True):
    """A journal of four days and a bit, booked; of which the first two are compacted away, or not."""
    journal = Journal.open(folder)
    await journal.add_key(KEY)
    await journal.append([(seq, fact(seq)) for seq in range(1, LAST + 1)])
    await journal.snapshot(SNAPSHOT, msgspec.json.encode(state_after(SNAPSHOT)))

    async def settled():
        return fact(LAST).at, LAST

    await Keeper(journal, KEEP if cut else Keep(1_000, 10**12, 1_000), settled).tend()
    assert journal.first == (2 * EACH + 1 if cut else 1)
    await journal.close()
    return journal.lost.incarnation


def change(folder, *statements):
    with closing(sqlite3.connect(folder / "journal.sqlite3", isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


def look(file):
    return check(file / "journal.sqlite3" if file.is_dir() else file)


async def reads(folder, *, snapshot=True, did=True):
    """The state that a daemon has that starts on it; its incarnation, its keys, and who is known to have done what."""
    journal = Journal.open(folder)
    try:
        past = journal.load(snapshot=snapshot)
        state = State() if past.snapshot is None else msgspec.json.decode(past.snapshot, type=State)
        for _, one in past.facts:
            apply(state, one)
        known = []
        if did:
            known += [one for _, one in await journal.lasting(0, "audited", 100)]
            known += [one for _, one in await journal.read(0, 100) if isinstance(one, Audited)]
        return msgspec.json.encode(state), journal.lost.incarnation, await journal.list_keys(), known
    finally:
        await journal.close()


OLD = 2 * EACH + 7
CHANGED = """UPDATE facts SET body = replace(body, '"at":', '"at": ') WHERE seq = {}"""


@pytest.mark.parametrize(
    ("damage", "named", "first"),
    [
        (CHANGED.format(OLD), f"fact {OLD} of {LAST} is damaged", SNAPSHOT + 1),
        (f"DELETE FROM facts WHERE seq BETWEEN {OLD} AND {OLD + 1}", "are missing", SNAPSHOT + 1),
        ("UPDATE days SET state = x'00' WHERE state IS NOT NULL", "the state after them is damaged", SNAPSHOT + 1),
        ("UPDATE days SET books = x'00' WHERE day = 20000", "the books of 2024-10-04 are damaged", 2 * EACH + 1),
        ("UPDATE kept SET body = '?' WHERE seq = 5", "1 facts of those that were kept of who did what", 2 * EACH + 1),
    ],
    ids=["a fact", "facts that are gone", "the state at the cut", "books whose facts are gone", "who did what"],
)
async def test_what_is_damaged_where_nobody_starts_from_is_said_and_let_go_of(tmp_path, damage, named, first):
    live = tmp_path / "live"
    await write(live)
    change(live, damage)
    before = await reads(live, did=False)  # a daemon starts on it, and has all of it
    assert before[0] == msgspec.json.encode(state_after(LAST))

    found = look(live)
    assert not found.good
    assert named in found.line()
    for said in (found.line(), str(refused(live, tmp_path))):
        assert f"all that was written, up to fact {LAST}" in said
        assert "`rollmuxd journal mend`" in said
        assert "restore" not in said

    done = mend(live)
    assert (done.first, done.last) == (first, LAST)
    assert done.left_out == first - (2 * EACH + 1)
    assert look(live).good, look(live).line()
    assert not look(Path(done.kept)).good
    after = await reads(live)
    assert after[:3] == before[:3]
    assert await reads(live, snapshot=False) == after
    lost = {5} if "kept" in damage else set()
    assert after[3] == [fact(seq) for seq in range(5, LAST, EACH) if seq not in lost]
    # And it lives on as any: it is booked, compacted, backed up and restored.
    journal = Journal.open(live)
    await journal.append([(LAST + 1, LoopStalled(BEGIN + 5 * DAY, 3))])
    await journal.close()
    compact(live, KEEP)
    assert backup(live / "journal.sqlite3", tmp_path / "kept").good
    restore(tmp_path / "kept", live)
    assert look(live).good


def refused(live, tmp_path):
    with pytest.raises(JournalRefused, match="no backup was made") as refusal:
        backup(live / "journal.sqlite3", tmp_path / "none")
    assert not (tmp_path / "none").exists()
    return refusal.value


async def test_books_that_can_be_read_outlive_a_mending_and_what_follows_is_booked_again(tmp_path):
    await write(tmp_path)
    change(tmp_path, CHANGED.format(OLD))
    mend(tmp_path)
    journal = Journal.open(tmp_path)
    days = [(day.day - 20_000, day.has_state, day.booked) for day in await journal.days()]
    assert days == [(0, False, True), (1, False, True), (2, False, True), (3, False, True), (4, True, False)]
    await journal.close()


async def test_a_state_at_the_beginning_of_a_day_that_is_not_what_the_facts_come_to_is_found_and_mended(tmp_path):
    await write(tmp_path)
    other = msgspec.json.encode(state_after(EACH))
    with closing(sqlite3.connect(tmp_path / "journal.sqlite3", isolation_level=None)) as connection:
        row = (journal_mend.compress(other), journal_mend.crc32(other))
        connection.execute("UPDATE days SET state = ?, sum = ? WHERE day = 20003", row)
    assert "the state at the beginning of 2024-10-07 is not what the facts come to" in look(tmp_path).line()
    assert mend(tmp_path).left_out == 0
    assert look(tmp_path).good


@pytest.mark.parametrize("what", ["state", "books", "seq"])
async def test_days_that_a_daemon_books_anew_are_a_note_of_the_check_and_keep_nobody_from_a_backup(tmp_path, what):
    await write(tmp_path / "live")
    broken = "seq + 1000" if what == "seq" else "x'00'"
    change(tmp_path / "live", f"UPDATE days SET {what} = {broken} WHERE day = 20003")
    found = look(tmp_path / "live")
    assert found.good
    assert "what was booked from 2024-10-07 on is damaged, and not used: a daemon books them anew" in found.line()
    assert backup(tmp_path / "live" / "journal.sqlite3", tmp_path / "kept").good
    compact(tmp_path / "live", KEEP)
    assert look(tmp_path / "live").notes == [f"facts up to {2 * EACH} were compacted away"]


@pytest.mark.parametrize(
    "damage",
    [
        CHANGED.format(SNAPSHOT + 1),
        f"DELETE FROM facts WHERE seq = {SNAPSHOT}",
        f"DELETE FROM facts WHERE seq >= {OLD}",
    ],
    ids=["a fact after the snapshot", "the snapshot's fact", "the end"],
)
async def test_where_the_state_is_not_whole_nothing_is_mended_and_the_backup_is_named(tmp_path, damage):
    await write(tmp_path)
    change(tmp_path, damage)
    assert "restore the last backup" in look(tmp_path).line()
    assert "mend" not in look(tmp_path).line()
    before = (tmp_path / "journal.sqlite3").read_bytes()
    with pytest.raises(JournalDamaged, match="rollmuxd journal restore"):
        mend(tmp_path)
    assert (tmp_path / "journal.sqlite3").read_bytes() == before
    assert not list(tmp_path.glob("before-*"))


async def test_a_snapshot_that_is_not_what_the_facts_come_to_is_what_goes_on_as_it_would_without(tmp_path):
    await write(tmp_path, cut=False)
    other = msgspec.json.encode(state_after(EACH))
    with closing(sqlite3.connect(tmp_path / "journal.sqlite3", isolation_level=None)) as connection:
        connection.execute("UPDATE snapshots SET body = ?, sum = ?", (other, journal_mend.crc32(other)))
    before = await reads(tmp_path)
    mend(tmp_path)
    assert (await reads(tmp_path))[0] == before[0]
    assert look(tmp_path).good


async def test_a_journal_that_somebody_reads_is_not_mended_lest_its_log_is_left_behind(tmp_path):
    await write(tmp_path)
    with closing(sqlite3.connect(tmp_path / "journal.sqlite3", isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM facts").fetchone()
        change(tmp_path, CHANGED.format(OLD))
        with pytest.raises(JournalRefused, match="somebody reads it"):
            mend(tmp_path)
        assert not list(tmp_path.glob("before-*"))
    assert (mend(tmp_path)).last == LAST


async def test_a_good_journal_is_written_anew_as_it_is_and_one_in_use_is_not(tmp_path):
    await write(tmp_path, cut=False)
    before = await reads(tmp_path)
    journal = Journal.open(tmp_path)
    with pytest.raises(JournalInUse):
        mend(tmp_path)
    await journal.close()
    done = mend(tmp_path)
    assert (done.first, done.last, done.left_out) == (1, LAST, 0)
    assert await reads(tmp_path) == before
    assert (tmp_path / "journal.sqlite3").stat().st_mode & 0o777 == 0o600


async def test_of_a_mended_journal_a_restore_leaves_out_all_from_a_time_on_or_is_refused(tmp_path):
    # It begins in the middle of a day: with a state that has what was written up to there, and no fact of it.
    await write(tmp_path)
    change(tmp_path, CHANGED.format(OLD))
    mend(tmp_path)
    backup(tmp_path / "journal.sqlite3", tmp_path / "mended")
    begins = f"begins with the state after fact {SNAPSHOT}, of 2024-10-08T00:00:00Z"
    for seq in (SNAPSHOT, SNAPSHOT - 1):
        with pytest.raises(JournalRefused, match=begins):
            restore(tmp_path / "mended", tmp_path / "other", before=fact(seq).at)
        assert not (tmp_path / "other" / "journal.sqlite3").exists()
    done = restore(tmp_path / "mended", tmp_path, before=fact(SNAPSHOT + 1).at)
    assert (done.left_out, done.last, done.last_at) == (LAST - SNAPSHOT, SNAPSHOT, fact(SNAPSHOT).at)
    assert look(tmp_path).good
    assert (await reads(tmp_path))[0] == msgspec.json.encode(state_after(SNAPSHOT))


@pytest.mark.parametrize(
    "put_in_place",
    [
        lambda folder: shutil.copyfile(folder / "backup", folder / "journal.sqlite3"),
        lambda folder: shutil.copyfile(folder / "copy", folder / "journal.sqlite3"),
        lambda folder: (folder / "mark").write_text("a mark\n"),
        lambda folder: (folder / "mark").unlink(),
    ],
    ids=["a backup", "a copy", "an unreadable mark", "a journal from another directory"],
)
async def test_mending_hides_no_loss(tmp_path, put_in_place):
    # Else it begins with fences that the journal before has given since to others.
    first = await write(tmp_path)
    backup(tmp_path / "journal.sqlite3", tmp_path / "backup")
    shutil.copyfile(tmp_path / "journal.sqlite3", tmp_path / "copy")
    await reads(tmp_path)
    put_in_place(tmp_path)
    mend(tmp_path)
    state, incarnation, keys, _ = await reads(tmp_path)
    assert incarnation > first
    assert (state, keys) == (msgspec.json.encode(state_after(LAST)), [KEY])
    assert (await reads(tmp_path))[1] == incarnation


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file somebody else's")
async def test_what_root_mends_belongs_to_whom_the_directory_belongs(tmp_path):
    await write(tmp_path / "live")
    for path in (tmp_path / "live", *(tmp_path / "live").iterdir()):
        os.chown(path, 65_534, 12_345)
    mend(tmp_path / "live")
    owners = {(path.stat().st_uid, path.stat().st_gid) for path in (tmp_path / "live").rglob("*")}
    assert owners == {(65_534, 12_345)}


async def test_a_mending_that_breaks_off_leaves_a_journal_with_all_that_was_written(tmp_path, monkeypatch):
    first = await write(tmp_path / "whole")
    change(tmp_path / "whole", CHANGED.format(OLD))
    broken = []
    for number in range(10):
        folder = tmp_path / f"m{number}"
        shutil.copytree(tmp_path / "whole", folder)
        left = iter(range(number))

        def step(left=left):
            if next(left, None) is None:
                raise OSError("the machine went off")

        with monkeypatch.context() as patched:
            for module, name in ((os, "link"), (Path, "replace"), (Path, "mkdir"), (os, "fsync")):
                real = getattr(module, name)
                patched.setattr(
                    module, name, lambda *args, real=real, step=step, **more: (step(), real(*args, **more))[1]
                )
            try:
                mend(folder)
            except JournalRefused:
                broken.append(number)
        state, incarnation, keys, _ = await reads(folder)
        assert state == msgspec.json.encode(state_after(LAST))
        assert incarnation == first
        assert keys == [KEY]
    assert len(broken) > 4
