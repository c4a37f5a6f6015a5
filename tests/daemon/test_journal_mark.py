"""The mark beside the journal: a journal that is behind it has lost facts, and one that is not has lost none.

Each start has a new incarnation. That facts are lost costs every run, so no start that broke off may say so.
"""

import errno
import os
import shutil
import sqlite3
import time
from contextlib import closing
from itertools import product
from pathlib import Path

import pytest

from rollmuxd.core.facts import HostAdded
from rollmuxd.core.inputs import HostSpec
from rollmuxd.daemon import files
from rollmuxd.daemon.journal import file as journal_file
from rollmuxd.daemon.journal.backup import backup, check
from rollmuxd.daemon.journal.file import JournalError, JournalRefused
from rollmuxd.daemon.journal.store import Journal
from rollmuxd.explain.causes import sentence

pytestmark = pytest.mark.asyncio
#: a start has so many steps; it breaks off before one of them, or not
STEPS = 8
#: two starts in a row
STARTS = [(number, STEPS) for number in range(STEPS + 1)] + list(product((2, 4, 6), repeat=2))


async def start(folder, facts=1):
    """What a daemon that starts here knows to be lost, if it has not been told before; it writes facts."""
    journal = Journal.open(folder)
    try:
        await write(journal, facts)
        return sentence(journal.notes.lost.why) if journal.notes.lost.incarnation == journal.incarnation else ""
    finally:
        await journal.close()


async def write(journal, facts=1):
    for _ in range(facts):
        seq = journal.last_seq + 1
        await journal.append([(seq, HostAdded(seq, HostSpec(f"h{seq}", "fake", 0)))])


def killed(folder, to):
    """The state directory as it is on the disk."""
    to.mkdir()
    for file in folder.iterdir():
        if file.name not in ("lock", "reserve"):
            shutil.copyfile(file, to / file.name)
    return to


async def killed_with_facts(folder, facts=50):
    """A directory whose daemon was killed after so many facts, all of them in the write-ahead log."""
    await start(folder / "running", 0)
    journal = Journal.open(folder / "running")
    await write(journal, facts)
    left = killed(folder / "running", folder / "killed")
    await journal.close()
    return left


async def test_each_start_has_a_greater_incarnation_and_loses_nothing(tmp_path):
    seen = []
    for _ in range(3):
        journal = Journal.open(tmp_path)
        seen.append(journal.incarnation)
        await write(journal)
        assert journal.notes.lost.why is None
        await journal.close()
    assert seen == sorted(set(seen))


async def test_the_id_stays_and_another_journal_has_another(tmp_path):
    ids = []
    for name in ("a", "a", "b"):
        journal = Journal.open(tmp_path / name)
        ids.append(journal.id)
        await journal.close()
    assert ids[0] == ids[1] != ids[2]
    assert len(ids[0]) == 32


async def test_a_journal_whose_daemon_was_killed_has_lost_nothing(tmp_path):
    left = await killed_with_facts(tmp_path)
    assert check(left / "journal.sqlite3").good
    assert await start(left) == ""


@pytest.mark.parametrize("how", ["a bit turned", "a byte cut out", "cut off", "gone"])
async def test_a_damaged_log_is_an_end_that_is_lost_and_said(tmp_path, how):
    left = await killed_with_facts(tmp_path)
    log = left / "journal.sqlite3-wal"
    content = bytearray(log.read_bytes())
    middle = len(content) // 2
    if how == "a bit turned":
        content[middle] ^= 1
    elif how == "a byte cut out":
        del content[middle]
    elif how == "cut off":
        del content[middle:]
    log.write_bytes(content)
    if how == "gone":
        log.unlink()
    shutil.copytree(left, tmp_path / "checked")

    found = check(tmp_path / "checked" / "journal.sqlite3")
    assert not found.good
    assert f"it ends at fact {found.last}, and fact 50 had been written" in found.line()
    assert "declares every run lost" in found.line()
    assert f"it ends at fact {found.last}, and fact 50 had been written" in await start(left)
    assert await start(left) == "", "it was said, and is true once"


async def test_what_was_found_lost_is_known_until_the_core_has_heard_of_it(tmp_path):
    left = await killed_with_facts(tmp_path)
    (left / "journal.sqlite3-wal").unlink()
    lost = []
    for _ in range(2):
        journal = Journal.open(left)
        lost.append(journal.notes.lost)
        await journal.close()
    assert lost[0] == lost[1]
    assert "lost its end" in sentence(lost[0].why)


@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"no mark\n", None], ids=["empty", "no text", "words", "gone"])
async def test_where_the_mark_cannot_be_read_the_end_may_be_lost(tmp_path, content):
    await start(tmp_path)
    if content is None:
        (tmp_path / "mark").unlink()
    else:
        (tmp_path / "mark").write_bytes(content)
    assert "no readable mark" in check(tmp_path / "journal.sqlite3").line()
    assert "no readable mark" in await start(tmp_path)


async def test_a_mark_of_which_a_bit_is_turned_is_none(tmp_path):
    await start(tmp_path)
    mark = (tmp_path / "mark").read_bytes()
    for place in range(len(mark)):
        turned = bytearray(mark)
        turned[place] ^= 1
        (tmp_path / "mark").write_bytes(turned)
        assert journal_file.read_mark(tmp_path / "journal.sqlite3") is None


async def test_a_mark_that_is_older_than_the_journal_says_nothing(tmp_path):
    """Power was lost, and the mark's last pages with it: the journal was synced before the mark was written."""
    await start(tmp_path, 0)
    mark = (tmp_path / "mark").read_bytes()
    journal = Journal.open(tmp_path)
    await write(journal, 5)
    await journal.close()
    (tmp_path / "mark").write_bytes(mark)
    assert check(tmp_path / "journal.sqlite3").good
    assert await start(tmp_path) == ""


async def test_an_older_copy_and_another_journal_in_its_place_know_less(tmp_path):
    await start(tmp_path / "state")
    shutil.copyfile(tmp_path / "state" / "journal.sqlite3", tmp_path / "older")
    await start(tmp_path / "state")
    await start(tmp_path / "another", 99)
    for put, why in ((tmp_path / "older", "lost its end"), (tmp_path / "another/journal.sqlite3", "another journal")):
        shutil.copyfile(put, tmp_path / "state" / "journal.sqlite3")
        assert why in await start(tmp_path / "state")


@pytest.fixture
def breaks_off(monkeypatch):
    """Starts that break off before such a step; whether it did."""

    async def starts(folder, number):
        left = iter(range(number))

        def step():
            if next(left, None) is None:
                raise OSError("the machine went off")

        with monkeypatch.context() as patched:
            for module, name in ((os, "fsync"), (Path, "replace"), (journal_file, "begin_incarnation")):
                real = getattr(module, name)
                patched.setattr(module, name, lambda *args, real=real: (step(), real(*args))[1])
            try:
                await Journal.open(folder).close()
            except JournalError:
                return True
            return False

    return starts


async def test_starts_that_break_off_anywhere_lose_nothing_and_forget_no_loss(tmp_path, breaks_off):
    await start(tmp_path / "whole")
    whole = tmp_path / "whole"
    left = await killed_with_facts(tmp_path)
    (left / "journal.sqlite3-wal").unlink()
    broken = set()
    for numbers in STARTS:
        for folder, lost in ((whole, False), (left, True)):
            here = tmp_path / "here"
            shutil.copytree(folder, here)
            for number in numbers:
                broken.add(await breaks_off(here, number))
            journal = Journal.open(here)
            assert bool(journal.notes.lost.why) == lost
            await journal.close()
            shutil.rmtree(here)
    assert broken == {True, False}


async def test_its_time_says_when_a_daemon_last_used_the_journal_and_a_mere_start_changes_nothing(tmp_path):
    journal = Journal.open(tmp_path)
    assert journal.away_ms == 0
    await write(journal)
    await journal.close()
    os.utime(tmp_path / "mark", (1000, 1000))
    for _ in range(2):
        journal = Journal.open(tmp_path)
        assert journal.away_ms >= round(time.time() * 1000) - 1_100_000
        await journal.close()

    journal = Journal.open(tmp_path)
    journal.touch()
    await journal.close()

    journal = Journal.open(tmp_path)
    assert journal.away_ms < time.time() * 1000 - 1_100_000
    await journal.close()


async def test_a_first_start_whose_disk_is_full_when_it_writes_the_mark_is_begun_again(tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(JournalError, match="its disk is full"):
        patched.setattr(files, "write", full)
        Journal.open(tmp_path)
    assert await start(tmp_path) == ""


async def test_the_mark_is_written_before_the_answer_leaves(tmp_path):
    await start(tmp_path, 0)
    journal = Journal.open(tmp_path)
    for _ in range(20):
        await write(journal)
        assert journal_file.read_mark(journal.path).seq == journal.last_seq
    await journal.close()


async def test_a_mark_that_cannot_be_written_is_a_commit_that_failed(tmp_path, monkeypatch):
    journal = Journal.open(tmp_path)

    def fails(*_):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", fails)
        with pytest.raises(journal_file.JournalFailed):
            await write(journal)
        with pytest.raises(journal_file.JournalFailed):
            await journal.recover()
    await journal.recover()
    assert journal_file.read_mark(journal.path).seq == journal.last_seq == 1
    await journal.close()


async def test_a_daemon_whose_directory_was_moved_leaves_the_mark_of_the_one_in_its_place_alone(tmp_path):
    here = tmp_path / "state"
    await start(here)
    moved = Journal.open(here)
    here.rename(tmp_path / "moved")
    await start(here)
    mark = (here / "mark").read_bytes()
    await write(moved)
    await moved.close()
    assert (here / "mark").read_bytes() == mark
    assert await start(here) == ""


async def test_a_daemon_whose_directory_was_emptied_leaves_nothing_there_as_it_stops(tmp_path):
    journal = Journal.open(tmp_path / "state")
    for left in (tmp_path / "state").iterdir():
        left.unlink()
    await journal.close()
    assert not list((tmp_path / "state").iterdir())
    await start(tmp_path / "state")


async def test_no_backup_is_made_of_a_journal_that_has_lost_its_end(tmp_path):
    left = await killed_with_facts(tmp_path)
    (left / "journal.sqlite3-wal").unlink()
    with pytest.raises(JournalRefused, match="lost its end"):
        backup(left / "journal.sqlite3", tmp_path / "backup")
    assert not (tmp_path / "backup").exists()


async def test_a_backup_that_is_copied_here_by_hand_has_lost_its_end(tmp_path):
    await start(tmp_path / "state")
    backup(tmp_path / "state/journal.sqlite3", tmp_path / "backup")
    await start(tmp_path / "state")
    (tmp_path / "elsewhere").mkdir()
    for folder in ("state", "elsewhere"):
        shutil.copyfile(tmp_path / "backup", tmp_path / folder / "journal.sqlite3")
        assert await start(tmp_path / folder)


async def test_the_id_is_in_the_journal_itself(tmp_path):
    journal = Journal.open(tmp_path)
    with closing(sqlite3.connect(tmp_path / "journal.sqlite3")) as connection:
        assert connection.execute("SELECT value FROM meta WHERE name = 'id'").fetchone() == (journal.id,)
    await journal.close()
