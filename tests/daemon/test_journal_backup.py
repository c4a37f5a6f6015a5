"""Backup, restore and check: what they promise to whoever has lost a disk.

- A backup of a journal in use is the journal as it was at one instant, and only its owner can read it.
- After a restore no fence that was given since the backup is valid, or will ever be given again; no two restores of one
  backup give the same fences.
- At no instant is there no journal, and what was there is kept.
- A check finds what is wrong, and changes nothing.
"""

import asyncio
import os
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from rollmuxd.core import facts as f
from rollmuxd.core.apply import apply
from rollmuxd.core.facts import HostAdded
from rollmuxd.core.inputs import HostSpec
from rollmuxd.core.state import State
from rollmuxd.daemon.journal.backup import backup, check, restore
from rollmuxd.daemon.journal.file import JournalFailed, JournalRefused
from rollmuxd.daemon.journal.store import Journal

pytestmark = pytest.mark.asyncio
CORPUS = Path(__file__).parents[1] / "corpus"


def host(number):
    return HostAdded(at=number, host=HostSpec(f"h{number}", "fake", 0))


async def write(folder, count=10, *, snapshots=()):
    journal = Journal.open(folder)
    state = State()
    for number in range(1, count + 1):
        await journal.append([(number, host(number))])
        apply(state, host(number))
        if number in snapshots:
            await journal.snapshot(number, msgspec.json.encode(state))
    await journal.close()
    return journal.notes.lost.incarnation


def change(file, *statements):
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != "lock"}


async def numbers(folder):
    journal = Journal.open(folder)
    try:
        return [seq for seq, _ in await journal.read(0, 1000)], journal.notes.lost.incarnation
    finally:
        await journal.close()


# ---- check ---------------------------------------------------------------------------------------------------------


async def test_a_good_journal_is_good_in_one_line_and_nothing_is_changed(tmp_path):
    await write(tmp_path, snapshots=(4, 8))
    before = content(tmp_path)
    found = check(tmp_path / "journal.sqlite3")

    assert found.good
    assert (found.first, found.last, found.last_at, found.snapshots) == (1, 10, 10, 2)
    assert "good" in found.line()
    assert "facts 1 to 10" in found.line()
    assert "\n" not in found.line()
    assert {name: body for name, body in content(tmp_path).items() if "-" not in name} == before


async def test_a_journal_in_use_can_be_checked(tmp_path):
    journal = Journal.open(tmp_path)
    await journal.append([(1, host(1))])
    assert check(tmp_path / "journal.sqlite3").last == 1
    await journal.close()


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        ("UPDATE facts SET body = replace(body, 'fake', 'sham') WHERE seq = 5", "fact 5 is damaged"),
        ("DELETE FROM facts WHERE seq IN (2, 3)", "fact 2 is missing"),
        ("UPDATE facts SET sum = 1 WHERE seq = 10", "fact 10 is damaged"),
        ("DELETE FROM facts WHERE seq > 7", "there is a snapshot of fact 8, and the last fact is 7"),
        ("INSERT INTO usage VALUES (20001, x'00')", "the usage of 2024-10-05 is damaged"),
        ("INSERT INTO facts VALUES (0, 1, 'audited', '{}', 1)", "the audit trail is damaged at fact 0"),
        ("DROP TABLE facts", "no such table"),
        ("DELETE FROM meta", "Object missing required field `id`"),
        ("INSERT INTO meta VALUES ('left_alone', '{]')", "it cannot be read (JSON is malformed"),
        (
            "INSERT INTO meta VALUES ('lost', '[7]')",
            "it cannot be read (its table meta is damaged: Expected `array` of length 2, got 1 - at `$.lost`)",
        ),
    ],
)
async def test_what_is_wrong_is_found_and_said(tmp_path, damage, named):
    await write(tmp_path, snapshots=(4, 8))
    change(tmp_path / "journal.sqlite3", damage)
    found = check(tmp_path / "journal.sqlite3")
    assert not found.good
    assert named in found.line()


async def test_a_fact_that_cannot_be_is_found(tmp_path):
    journal = Journal.open(tmp_path)
    await journal.append([(1, host(1)), (2, f.SlotOver(at=2, slot="s9"))])
    await journal.close()
    assert "fact 2 cannot follow" in check(tmp_path / "journal.sqlite3").line()


async def test_what_is_no_journal_is_no_crash(tmp_path):
    (tmp_path / "text").write_bytes(b"this is no database, whatever its name says" * 100)
    (tmp_path / "empty").touch()
    assert not check(tmp_path / "text").good
    assert not check(tmp_path / "empty").good
    with pytest.raises(JournalRefused, match="no such file"):
        check(tmp_path / "nothing")


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*/*.journal")), ids=lambda path: f"{path.parent.name}/{path.stem}")
async def test_the_corpus_is_good(path):
    found = check(path)
    assert found.good, found.line()


# ---- backup --------------------------------------------------------------------------------------------------------


async def test_a_backup_of_a_journal_in_use_is_what_it_was_at_one_instant(tmp_path):
    journal = Journal.open(tmp_path / "live")
    going = True

    async def write_on():
        seq = 0
        while going:
            seq += 1
            await journal.append([(seq, host(seq))])
        return seq

    writing = asyncio.create_task(write_on())
    await asyncio.sleep(0.1)
    made = [
        await asyncio.to_thread(backup, tmp_path / "live" / "journal.sqlite3", tmp_path / f"b{n}") for n in range(3)
    ]
    going = False
    written = await writing
    await journal.close()

    assert [one.good for one in made] == [True] * 3
    assert 0 < made[0].last <= made[1].last <= made[2].last <= written
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b0", "b1", "b2", "live"]
    for path in tmp_path.glob("b*"):
        assert path.stat().st_mode & 0o777 == 0o600


async def test_a_backup_writes_over_nothing_and_of_nothing(tmp_path):
    await write(tmp_path / "live", 3)
    (tmp_path / "there").write_text("mine")
    with pytest.raises(JournalRefused, match="is there already; name another"):
        backup(tmp_path / "live" / "journal.sqlite3", tmp_path / "there")
    assert (tmp_path / "there").read_text() == "mine"
    with pytest.raises(JournalRefused, match="there is no journal"):
        backup(tmp_path / "dead" / "journal.sqlite3", tmp_path / "new")
    with pytest.raises(JournalRefused, match="no backup was made"):
        backup(tmp_path / "live" / "journal.sqlite3", tmp_path / "no such folder" / "new")


async def test_a_backup_of_another_format_names_the_journal(tmp_path):
    await write(tmp_path, 1)
    change(tmp_path / "journal.sqlite3", "PRAGMA user_version = 99")
    with pytest.raises(JournalRefused, match=rf"^{tmp_path}/journal\.sqlite3 has format 99"):
        backup(tmp_path / "journal.sqlite3", tmp_path / "new")


async def test_no_backup_is_made_of_a_damaged_journal(tmp_path):
    await write(tmp_path / "live", 9)
    change(tmp_path / "live" / "journal.sqlite3", "DELETE FROM facts WHERE seq = 4")
    with pytest.raises(JournalRefused, match=r"fact 4 is missing.*no backup was made"):
        backup(tmp_path / "live" / "journal.sqlite3", tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["live"]


# ---- restore -------------------------------------------------------------------------------------------------------


async def test_a_restore_begins_a_new_incarnation_and_keeps_what_was_there(tmp_path):
    first = await write(tmp_path / "live", 4)
    backup(tmp_path / "live" / "journal.sqlite3", tmp_path / "kept")
    await write_more(tmp_path / "live", 5, 9)
    began = int(time.time())
    done = restore(tmp_path / "kept", tmp_path / "live")

    assert done.last == 4
    assert done.incarnation >= began > first
    assert await numbers(tmp_path / "live") == ([1, 2, 3, 4], done.incarnation)
    assert check(Path(done.kept) / "journal.sqlite3").last == 9
    assert (tmp_path / "live" / "journal.sqlite3").stat().st_mode & 0o777 == 0o600
    # The second restore of the same backup is another incarnation still.
    again = restore(tmp_path / "kept", tmp_path / "live")
    assert again.incarnation > done.incarnation


async def write_more(folder, first, last):
    journal = Journal.open(folder)
    for number in range(first, last + 1):
        await journal.append([(number, host(number))])
    await journal.close()


async def test_two_restores_of_one_backup_on_two_machines_give_different_fences(tmp_path, monkeypatch):
    await write(tmp_path / "live", 4)
    backup(tmp_path / "live" / "journal.sqlite3", tmp_path / "kept")
    one = restore(tmp_path / "kept", tmp_path / "a")
    monkeypatch.setattr(time, "time", lambda: one.incarnation + 60.0)
    assert restore(tmp_path / "kept", tmp_path / "b").incarnation > one.incarnation


async def test_a_restore_goes_beyond_the_incarnation_of_the_journal_that_was_there(tmp_path):
    await write(tmp_path / "live", 4)
    backup(tmp_path / "live" / "journal.sqlite3", tmp_path / "kept")
    far = int(time.time()) + 1_000_000
    change(tmp_path / "live" / "journal.sqlite3", f"UPDATE meta SET value = '{far - 1}' WHERE name = 'incarnation'")
    await write_more(tmp_path / "live", 5, 5)
    assert restore(tmp_path / "kept", tmp_path / "live").incarnation == far + 1


async def test_where_only_the_end_is_lost_the_remedy_is_a_start(tmp_path):
    await write(tmp_path / "live", 9)
    change(tmp_path / "live" / "journal.sqlite3", "DELETE FROM facts WHERE seq > 5")
    told = check(tmp_path / "live" / "journal.sqlite3").line()
    assert "it ends at fact 5" in told
    assert told.endswith("start the daemon on it: all else that was written is there")
    with pytest.raises(JournalRefused, match=r"no backup was made; start the daemon on it") as raised:
        backup(tmp_path / "live" / "journal.sqlite3", tmp_path / "kept")
    assert "journal restore" not in str(raised.value)


async def test_a_restore_under_a_running_daemon_is_refused(tmp_path):
    await write(tmp_path / "live", 4)
    backup(tmp_path / "live" / "journal.sqlite3", tmp_path / "kept")
    journal = Journal.open(tmp_path / "live")
    with pytest.raises(JournalFailed, match=f"pid {os.getpid()}"):
        restore(tmp_path / "kept", tmp_path / "live")
    await journal.append([(5, host(5))])
    await journal.close()


async def test_a_damaged_backup_is_not_restored_and_the_journal_stays(tmp_path):
    await write(tmp_path / "live", 9)
    backup(tmp_path / "live" / "journal.sqlite3", tmp_path / "kept")
    change(tmp_path / "kept", "DELETE FROM facts WHERE seq = 4")
    before = content(tmp_path / "live")
    with pytest.raises(JournalRefused, match=r"not good.*fact 4.*another backup"):
        restore(tmp_path / "kept", tmp_path / "live")
    assert content(tmp_path / "live") == before


async def test_a_damaged_journal_is_replaced_and_kept_with_its_log(tmp_path):
    await write(tmp_path / "live", 4)
    backup(tmp_path / "live" / "journal.sqlite3", tmp_path / "kept")
    (tmp_path / "live" / "journal.sqlite3").write_bytes(b"this is no database, whatever its name says" * 100)
    (tmp_path / "live" / "journal.sqlite3-wal").write_bytes(b"a log of what was lost")
    done = restore(tmp_path / "kept", tmp_path / "live")
    assert (Path(done.kept) / "journal.sqlite3-wal").read_bytes() == b"a log of what was lost"
    assert (await numbers(tmp_path / "live"))[0] == [1, 2, 3, 4]


def breaks_before(patched, number):
    """From here on whatever changes the disk breaks off before such a step."""
    left = iter(range(number))

    def step():
        if next(left, None) is None:
            raise OSError("the machine went off")

    changes = ((Path, "rename"), (Path, "replace"), (Path, "mkdir"), (os, "fsync"))
    for module, name in changes:
        real = getattr(module, name)
        patched.setattr(module, name, lambda *args, real=real, **more: (step(), real(*args, **more))[1])


async def test_a_restore_into_a_new_directory_that_breaks_off_begins_no_journal_there(tmp_path, monkeypatch):
    await write(tmp_path / "live", 4)
    backup(tmp_path / "live" / "journal.sqlite3", tmp_path / "kept")
    with monkeypatch.context() as patched, pytest.raises(JournalRefused):
        replace = Path.replace
        patched.setattr(
            Path, "replace", lambda one, to: os.stat("/no/such") if "restoring" in one.name else replace(one, to)
        )
        restore(tmp_path / "kept", tmp_path / "new")
    with pytest.raises(JournalRefused, match="is gone"):
        Journal.open(tmp_path / "new")


async def test_a_restore_that_breaks_off_anywhere_starts_no_journal_without_its_log_and_no_fence_is_valid_twice(
    tmp_path, monkeypatch
):
    first = await write(tmp_path / "live", 4)
    backup(tmp_path / "live" / "journal.sqlite3", tmp_path / "kept")
    journal = Journal.open(tmp_path / "live")
    for number in range(5, 10):
        await journal.append([(number, host(number))])
    shutil.copytree(tmp_path / "live", tmp_path / "killed")
    await journal.close()
    outcomes = []
    for number in range(22):
        folder = tmp_path / f"r{number}"
        shutil.copytree(tmp_path / "killed", folder)
        with monkeypatch.context() as patched:
            breaks_before(patched, number)
            try:
                done = restore(tmp_path / "kept", folder)
            except JournalRefused:
                done = None
        if (folder / "journal.sqlite3").exists():
            outcomes.append("done" if done else "broken")
        else:
            outcomes.append("again")
            with pytest.raises(JournalRefused, match="is gone"):
                Journal.open(folder)
            assert restore(tmp_path / "kept", folder).last == 4
        facts, incarnation = await numbers(folder)
        # Where nothing was restored, it is the journal that it was, and no run is lost.
        assert (facts, incarnation > first) in [([1, 2, 3, 4], True), (list(range(1, 10)), False)]
        if facts[-1] == 4:
            gathered = tmp_path / f"before{number}"
            gathered.mkdir()
            for path in folder.glob("before-*/journal.sqlite3*"):
                if path.stat().st_size and not path.name.endswith("-shm"):
                    shutil.copyfile(path, gathered / path.name)
            assert len(list(gathered.iterdir())) == 2
            assert check(gathered / "journal.sqlite3").last == 9
    assert set(outcomes) == {"done", "broken", "again"}


@pytest.mark.parametrize("cut", ["x y", f"{10**20} 1"], ids=["in words", "beyond what SQLite counts to"])
async def test_a_killed_journal_that_does_not_say_where_it_begins_is_put_aside_with_its_log(tmp_path, cut):
    await write(tmp_path / "live", 4)
    backup(tmp_path / "live" / "journal.sqlite3", tmp_path / "kept")
    journal = Journal.open(tmp_path / "live")
    await journal.append([(5, host(5))])
    with closing(sqlite3.connect(tmp_path / "live" / "journal.sqlite3", isolation_level=None)) as connection:
        connection.execute("INSERT OR REPLACE INTO meta (name, value) VALUES ('cut', ?)", (cut,))
        shutil.copytree(tmp_path / "live", tmp_path / "dead")
    await journal.close()
    log = (tmp_path / "dead" / "journal.sqlite3-wal").read_bytes()
    shutil.copytree(tmp_path / "dead", tmp_path / "started")
    with pytest.raises(JournalRefused, match="rollmuxd journal restore"):
        Journal.open(tmp_path / "started")
    done = restore(tmp_path / "kept", tmp_path / "dead")
    assert (Path(done.kept) / "journal.sqlite3-wal").read_bytes() == log
    assert await numbers(tmp_path / "dead") == ([1, 2, 3, 4], done.incarnation)


async def test_a_log_that_is_left_without_its_journal_is_put_aside_and_not_taken_for_the_backups(tmp_path):
    await write(tmp_path / "live", 4)
    backup(tmp_path / "live" / "journal.sqlite3", tmp_path / "kept")
    journal = Journal.open(tmp_path / "live")
    await journal.append([(5, host(5))])
    shutil.copytree(tmp_path / "live", tmp_path / "dead")
    await journal.close()
    (tmp_path / "dead" / "journal.sqlite3").unlink()
    log = (tmp_path / "dead" / "journal.sqlite3-wal").read_bytes()
    done = restore(tmp_path / "kept", tmp_path / "dead")
    assert (Path(done.kept) / "journal.sqlite3-wal").read_bytes() == log
    assert await numbers(tmp_path / "dead") == ([1, 2, 3, 4], done.incarnation)


async def test_a_journal_that_is_gone_is_not_begun_anew_in_silence(tmp_path):
    await write(tmp_path, 4)
    (tmp_path / "journal.sqlite3").unlink()
    for _ in range(2):
        with pytest.raises(JournalRefused, match=r"journal\.sqlite3 is gone.*rollmuxd journal restore"):
            Journal.open(tmp_path)


@pytest.mark.parametrize(
    "loss",
    [
        lambda file: os.truncate(file, 0),
        lambda file: (file.unlink(), change(file, "CREATE TABLE t (x)")),
        lambda file: change(file, "PRAGMA user_version = 0", "DROP TABLE meta"),
    ],
    ids=["emptied", "another database", "no layout"],
)
async def test_what_is_no_journal_of_this_directory_is_not_taken_for_a_new_one(tmp_path, loss):
    # A new one would know of no job that holds GPUs.
    await write(tmp_path / "live", 4)
    backup(tmp_path / "live" / "journal.sqlite3", tmp_path / "kept")
    loss(tmp_path / "live" / "journal.sqlite3")
    before = content(tmp_path / "live")["journal.sqlite3"]
    for _ in range(2):
        with pytest.raises(JournalRefused, match=r"journal\.sqlite3 is gone, empty, or no.*rollmuxd journal restore"):
            Journal.open(tmp_path / "live")
    assert content(tmp_path / "live")["journal.sqlite3"] == before
    done = restore(tmp_path / "kept", tmp_path / "live")
    assert await numbers(tmp_path / "live") == ([1, 2, 3, 4], done.incarnation)
    assert done.incarnation > 1_000_000


async def test_the_log_beside_an_emptied_journal_is_kept_by_all_that_only_looks(tmp_path):
    journal = Journal.open(tmp_path / "live")
    await journal.append([(1, host(1))])
    shutil.copytree(tmp_path / "live", tmp_path / "dead")
    await journal.close()
    os.truncate(tmp_path / "dead" / "journal.sqlite3", 0)
    log = (tmp_path / "dead" / "journal.sqlite3-wal").read_bytes()
    assert log
    with pytest.raises(JournalRefused, match="is gone, empty"):
        Journal.open(tmp_path / "dead")
    assert "the file is empty" in check(tmp_path / "dead" / "journal.sqlite3").line()
    with pytest.raises(JournalRefused, match="the file is empty"):
        backup(tmp_path / "dead" / "journal.sqlite3", tmp_path / "kept")
    assert (tmp_path / "dead" / "journal.sqlite3-wal").read_bytes() == log
    backup(tmp_path / "live" / "journal.sqlite3", tmp_path / "kept")
    done = restore(tmp_path / "kept", tmp_path / "dead")
    assert (Path(done.kept) / "journal.sqlite3-wal").read_bytes() == log


async def test_a_first_start_that_was_killed_early_is_begun_again(tmp_path):
    (tmp_path / "journal.sqlite3").touch()
    await write(tmp_path, 2)
    assert await numbers(tmp_path) == ([1, 2], 0)
