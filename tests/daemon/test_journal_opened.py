"""The word in the journal and beside it: a copy is told from the journal that was last used, and only a copy.

A new incarnation costs every run. So none begins because a start broke off, or a disk was full; and no copy passes for
the journal, whenever it was put in place, but one that was made since the last start of a daemon that was killed.
"""

import errno
import os
import shutil
import sqlite3
from contextlib import closing
from itertools import product
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from rollmuxd.core.facts import HostAdded
from rollmuxd.core.inputs import HostSpec
from rollmuxd.daemon import journal_file
from rollmuxd.daemon.journal import Journal, JournalRefused

pytestmark = pytest.mark.asyncio
#: a start has so many steps; it breaks off before one of them, or not
STEPS = 10
#: two starts in a row: at each step, and at each two of those between which the words change
STARTS = [(number, STEPS) for number in range(STEPS + 1)] + list(product((4, 6, 7, 9), repeat=2))


async def start(folder):
    """The incarnation that a daemon has that starts here; it grants something."""
    journal = Journal.open(folder)
    try:
        seq = sum(1 for _ in journal.load().facts) + 1
        await journal.append([(seq, HostAdded(seq, HostSpec(f"h{seq}", "fake", 0)))])
        return journal.incarnation
    finally:
        await journal.close()


@pytest.fixture
def breaks_off(monkeypatch):
    """Starts that break off before such a step; whether it did."""

    async def starts(folder, number):
        left = iter(range(number))

        def step():
            if next(left, None) is None:
                raise OSError("the machine went off")

        with monkeypatch.context() as patched:
            steps = ((os, "fsync"), (Path, "replace"), (journal_file, "set_meta"), (journal_file, "begin_incarnation"))
            for module, name in steps:
                real = getattr(module, name)
                patched.setattr(module, name, lambda *args, real=real: (step(), real(*args))[1])
            try:
                await Journal.open(folder).close()
            except JournalRefused:
                return True
            return False

    return starts


def keep(folder, name):
    """A copy of the journal as it is; by SQLite, since its log may still be there."""
    with closing(sqlite3.connect(folder / "journal.sqlite3")) as connection:
        connection.execute("VACUUM INTO ?", (str(folder / name),))


def put(folder, name):
    for suffix in ("-wal", "-shm"):
        (folder / f"journal.sqlite3{suffix}").unlink(missing_ok=True)
    shutil.copyfile(folder / name, folder / "journal.sqlite3")


async def test_starts_that_break_off_anywhere_cost_no_incarnation_and_let_no_copy_pass(tmp_path, breaks_off):
    await start(tmp_path / "whole")
    keep(tmp_path / "whole", "copy0")
    first = await start(tmp_path / "whole")
    ways = set()
    for numbers in STARTS:
        folder = tmp_path / "-".join(map(str, numbers))
        shutil.copytree(tmp_path / "whole", folder)
        broken = []
        for copy, number in enumerate(numbers, 1):
            broken.append(await breaks_off(folder, number))
            keep(folder, f"copy{copy}")
        ways.add(tuple(broken))
        assert await start(folder) == first
        for copy in ("copy0", "copy1", "copy2"):
            put(folder, copy)
            assert await start(folder) > first
        shutil.rmtree(folder)
    assert ways == {(True, True), (True, False), (False, False)}


async def test_a_copy_that_was_made_while_the_last_daemon_ran_is_one_when_that_has_stopped(tmp_path):
    first = await start(tmp_path)
    journal = Journal.open(tmp_path)
    keep(tmp_path, "copy")
    await journal.close()
    shutil.copytree(tmp_path, tmp_path / "stopped")
    put(tmp_path, "copy")
    assert await start(tmp_path) > first
    assert await start(tmp_path / "stopped") == first


async def test_a_stop_that_breaks_off_anywhere_costs_no_incarnation_and_lets_no_older_copy_pass(tmp_path, monkeypatch):
    await start(tmp_path / "whole")
    keep(tmp_path / "whole", "copy")
    first = await start(tmp_path / "whole")
    journal = Journal.open(tmp_path / "whole")
    broken = []
    with monkeypatch.context() as patched:
        for module, name in ((os, "fsync"), (Path, "replace"), (journal_file, "set_meta")):
            real = getattr(module, name)

            def step(*args, real=real):
                broken.append(tmp_path / str(len(broken)))
                shutil.copytree(tmp_path / "whole", broken[-1])
                return real(*args)

            patched.setattr(module, name, step)
        await journal.close()
    assert len(broken) == 7
    for folder in broken:
        shutil.copytree(folder, tmp_path / "other")
        assert await start(tmp_path / "other") == first
        put(folder, "copy")
        assert await start(folder) > first
        shutil.rmtree(tmp_path / "other")


async def test_a_daemon_whose_directory_was_moved_leaves_the_one_in_its_place_alone_as_it_stops(tmp_path):
    here = tmp_path / "state"
    await start(here)
    moved = Journal.open(here)
    here.rename(tmp_path / "moved")
    first = await start(here)
    with capture_logs() as said:
        await moved.close()
    assert await start(here) == first
    assert [(line["event"], line["reason"]) for line in said] == [
        ("word_not_changed", "its directory was moved or emptied")
    ]


async def test_a_daemon_whose_directory_was_emptied_leaves_nothing_there_as_it_stops(tmp_path):
    journal = Journal.open(tmp_path / "state")
    for left in (tmp_path / "state").iterdir():
        left.unlink()
    await journal.close()
    assert not list((tmp_path / "state").iterdir())
    await start(tmp_path / "state")


async def test_a_stop_that_finds_the_disk_full_says_that_a_copy_would_pass(tmp_path, monkeypatch):
    first = await start(tmp_path)
    journal = Journal.open(tmp_path)

    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched, capture_logs() as said:
        patched.setattr(journal_file, "write_synced", full)
        await journal.close()
    (line,) = (line for line in said if line["event"] == "word_not_changed")
    assert "No space left" in line["reason"]
    assert "would pass for it" in line["remedy"]
    assert await start(tmp_path) == first


async def test_a_copy_stays_one_wherever_its_starts_break_off_and_the_journal_before_stays_what_it_was(
    tmp_path, breaks_off
):
    await start(tmp_path / "whole")
    keep(tmp_path / "whole", "copy")
    first = await start(tmp_path / "whole")
    keep(tmp_path / "whole", "journal")
    put(tmp_path / "whole", "copy")
    unchanged = 0
    for numbers in STARTS:
        folder = tmp_path / "-".join(map(str, numbers))
        shutil.copytree(tmp_path / "whole", folder)
        for number in numbers:
            await breaks_off(folder, number)
        shutil.copytree(folder, tmp_path / "other")
        assert await start(folder) > first
        if (tmp_path / "other" / "opened").read_bytes() == (tmp_path / "whole" / "opened").read_bytes():
            unchanged += 1
            put(tmp_path / "other", "journal")
            assert await start(tmp_path / "other") == first
        shutil.rmtree(tmp_path / "other")
        shutil.rmtree(folder)
    assert unchanged > 3


@pytest.mark.parametrize("reserve", [True, False], ids=["with a reserve", "without one"])
@pytest.mark.parametrize("full_at", [0, 1], ids=["before the commit", "after it"])
async def test_a_full_disk_costs_no_incarnation(tmp_path, monkeypatch, full_at, reserve):
    first = await start(tmp_path)
    if not reserve:
        (tmp_path / "reserve").unlink()
    written, write = [], journal_file.write_synced

    def write_if_there_is_room(path, content):
        written.append(path.name)
        if len(written) == full_at + 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, content)

    with monkeypatch.context() as patched:
        patched.setattr(journal_file, "write_synced", write_if_there_is_room)
        if reserve:
            assert await start(tmp_path) == first
        else:
            with pytest.raises(JournalRefused, match="its disk is full"):
                await start(tmp_path)
    assert set(written) == {"opened"}
    assert await start(tmp_path) == first


async def test_what_is_no_word_beside_a_journal_is_not_its_word(tmp_path):
    first = await start(tmp_path)
    for content in (b"", b"\xff\xfe\x00", b"restoring\n", b"a backup\n"):
        with closing(sqlite3.connect(tmp_path / "journal.sqlite3", isolation_level=None)) as connection:
            connection.execute("UPDATE meta SET value = 'a backup' WHERE name = 'opened'")
        (tmp_path / "opened").write_bytes(content)
        first, before = await start(tmp_path), first
        assert first > before
