"""A disk that is full, or read-only, or both in turn: real ones, of 24 MB.

What was answered for is there; what was not may be asked again; what frees GPUs still fits; and it goes on by itself.
Each scenario runs in a process of its own, in a mount namespace, where a tmpfs can be mounted by anybody whom the
kernel lets. Where it does not, SQLite's own limit on pages stands in.
"""

import errno
import json
import os
import resource
import sqlite3
import subprocess
import sys
import textwrap
from functools import partial

import anyio
import pytest
from patience import PATIENCE_S

from rollmuxd.core.config import Config
from rollmuxd.core.facts import Audited, HostAdded
from rollmuxd.core.inputs import Audit, HostSpec, Start
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.daemon.clock import SystemClock
from rollmuxd.daemon.journal import file
from rollmuxd.daemon.journal.backup import check
from rollmuxd.daemon.journal.file import JournalFailed
from rollmuxd.daemon.journal.store import Journal
from rollmuxd.daemon.writer import Unavailable, Writer
from rollmuxd.policies.rollmux import RollMux

ALONE = ["unshare", "--user", "--map-root-user", "--mount"]

HEAD = """
import asyncio, json, os, resource, signal, subprocess, sys
from pathlib import Path
from rollmuxd.core.facts import HostAdded
from rollmuxd.core.inputs import HostSpec
from rollmuxd.daemon.journal.file import JournalFailed, JournalRefused
from rollmuxd.daemon.journal.store import Journal
from rollmuxd.daemon.journal.backup import check

disk = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", disk], check=True)
said = {}

def fact(number):
    return number, HostAdded(at=number, host=HostSpec("h%d" % number, "fake", 0))

def fill():
    with open(disk / "filler", "ab", buffering=0) as filler:
        for size in (65536, 4096, 512, 1):
            try:
                while filler.write(bytes(size)):
                    pass
            except OSError:
                pass

def read(journal):
    past = journal.load()
    return [seq for seq, _ in past.facts]

def remount(how):
    subprocess.run(["mount", "-o", "remount," + how, disk], check=True)
"""


def scenario(tmp_path, body):
    """What a scenario has said."""
    code = HEAD + textwrap.dedent(body) + "\nasyncio.run(main())\nprint(json.dumps(said))\n"
    try:
        ran = subprocess.run(
            [*ALONE, sys.executable, "-c", code, str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    except FileNotFoundError:
        pytest.skip("unshare is not installed")
    if "unshare" in ran.stderr or "mount:" in ran.stderr:
        pytest.skip(f"nothing can be mounted here: {ran.stderr.strip()[-100:]}")
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


def test_on_a_full_disk_the_reserve_holds_tens_of_thousands_of_facts_and_then_it_recovers(tmp_path):
    said = scenario(
        tmp_path,
        """
        async def main():
            journal = Journal.open(disk / "state")
            await journal.append([fact(1)])
            fill()
            number = 1
            try:
                while True:
                    facts = [fact(number + more) for more in range(1, 21)]
                    await journal.append(facts)
                    number += 20
                    said.setdefault("tight_after", number) if journal.tight else None
            except JournalFailed as error:
                said["failed"] = str(error)
            said["answered"] = number
            said["still_read"] = len(await journal.read(0, 5))
            os.unlink(disk / "filler")
            await journal.recover()
            facts = read(journal)
            said["in_order"] = facts == list(range(1, len(facts) + 1))
            said["there"] = len(facts)
            await journal.append([fact(len(facts) + 1)])
            await journal.close()
            said["good"] = check(disk / "state" / "journal.sqlite3").good
        """,
    )
    assert "full" in said["failed"]
    assert said["tight_after"] < 5_000
    # What the reserve has to hold: 20 facts for each of a thousand slots in use.
    assert said["answered"] > 20_000 + said["tight_after"]
    assert said["there"] >= said["answered"]
    assert (said["in_order"], said["good"], said["still_read"]) == (True, True, 5)


def test_the_reserve_is_made_anew_once_there_is_room(tmp_path):
    said = scenario(
        tmp_path,
        """
        async def main():
            journal = Journal.open(disk / "state")
            fill()
            number = 0
            while not journal.tight:
                number += 1
                await journal.append([fact(number)])
            fill()
            await journal.make_reserve()
            said["full"] = journal.tight
            os.unlink(disk / "filler")
            await journal.make_reserve()
            said["room"] = journal.tight
            said["reserve"] = (disk / "state" / "reserve").stat().st_size
            await journal.close()
        """,
    )
    assert said == {"full": True, "room": False, "reserve": 16_000_000}


def test_a_daemon_that_comes_back_to_a_full_disk_has_its_reserve(tmp_path):
    said = scenario(
        tmp_path,
        """
        async def main():
            journal = Journal.open(disk / "state")
            await journal.append([fact(1)])
            await journal.close()
            fill()
            journal = Journal.open(disk / "state")
            await journal.append([fact(2)])
            said["tight"], said["facts"] = journal.tight, read(journal)
            await journal.close()
            fill()
            (disk / "state" / "reserve").unlink(missing_ok=True)
            fill()
            try:
                Journal.open(disk / "state")
            except JournalFailed as error:
                said["refused"] = str(error)
            os.unlink(disk / "filler")
            journal = Journal.open(disk / "state")
            said["then"] = read(journal)
            await journal.close()
        """,
    )
    assert (said["tight"], said["facts"], said["then"]) == (True, [1, 2], [1, 2])
    assert said["refused"].endswith("its disk is full; make room there")


@pytest.mark.parametrize("reserve", [True, False], ids=["with the reserve", "without it"])
def test_a_start_on_a_disk_that_is_nearly_full_loses_no_run_wherever_it_gets_stuck(tmp_path, reserve):
    said = scenario(
        tmp_path,
        f"""
        async def start():
            journal = Journal.open(disk / "state")
            await journal.close()
            return journal.notes.lost.incarnation

        async def main():
            journal = Journal.open(disk / "state")
            await journal.append([fact(number) for number in range(1, 400)])
            await journal.close()
            said["refused"], said["lost"] = 0, []
            for pages in range(28):
                if not {reserve}:
                    (disk / "state" / "reserve").unlink()
                fill()
                os.truncate(disk / "filler", (disk / "filler").stat().st_size - pages * 4096)
                try:
                    said["lost"].append(await start())
                except JournalFailed:
                    said["refused"] += 1
                os.unlink(disk / "filler")
                said["lost"].append(await start())
        """,
    )
    assert set(said["lost"]) == {0}
    assert (said["refused"] > 0) != reserve


def test_what_is_written_anew_on_a_disk_that_gets_full_says_so_and_leaves_nothing_in_the_way(tmp_path):
    said = scenario(
        tmp_path,
        """
        from rollmuxd.daemon.journal.backup import backup, restore

        async def main():
            state = disk / "state"
            journal = Journal.open(state)
            for first in range(1, 10_000, 1000):
                await journal.append([fact(number) for number in range(first, first + 1000)])
            await journal.close()
            (state / "reserve").unlink()

            def files():  # whoever only reads leaves an empty log
                return sorted(path.name for path in state.iterdir() if not path.name.startswith("journal.sqlite3-"))

            before = files()
            fill()
            spare = (disk / "filler").stat().st_size - 1_000_000
            ways = {
                "restore": lambda: restore(state / "journal.sqlite3", state),
                "backup": lambda: backup(state / "journal.sqlite3", state / "copy"),
            }
            for way, do in ways.items():
                os.truncate(disk / "filler", spare)
                try:
                    do()
                except Exception as error:
                    said[way] = [type(error).__name__, str(error)]
                said[way].append(files() == before)
            os.unlink(disk / "filler")
        """,
    )
    for way in ("restore", "backup"):
        name, words, cleared = said[way]
        assert (name, cleared) == ("JournalRefused", True)
        assert "full" in words


def test_a_read_only_disk_is_refused_and_used_again_when_it_can_be_written(tmp_path):
    said = scenario(
        tmp_path,
        """
        async def main():
            journal = Journal.open(disk / "state")
            await journal.append([fact(1)])
            await journal.close()
            remount("ro")
            try:
                Journal.open(disk / "state")
            except JournalFailed as error:
                said["refused"] = str(error)
            remount("rw")
            said["now"] = read(Journal.open(disk / "state"))
        """,
    )
    assert "Read-only file system" in said["refused"]
    assert said["now"] == [1]


def test_a_disk_that_takes_no_more_writes_fails_commits_and_loses_nothing(tmp_path):
    # As a file system that the kernel has turned read-only under a running daemon: every write fails, reads do not.
    said = scenario(
        tmp_path,
        """
        async def main():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            journal = Journal.open(disk / "state")
            await journal.append([fact(1)])
            await journal.read(0, 5)
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
            said["failed"] = []
            for attempt in (journal.append, journal.append, lambda facts: journal.recover()):
                try:
                    await attempt([fact(2)])
                except JournalFailed as error:
                    said["failed"].append(str(error))
            said["read"] = len(await journal.read(0, 5))
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            await journal.recover()
            said["there"] = read(journal)
            await journal.append([fact(len(said["there"]) + 1)])
            await journal.close()
            said["good"] = check(disk / "state" / "journal.sqlite3").good
        """,
    )
    assert len(said["failed"]) == 3
    assert (said["read"], said["there"], said["good"]) == (1, [1], True)


@pytest.mark.asyncio
async def test_what_cannot_be_read_for_want_of_open_files_is_no_damage_and_is_read_later(tmp_path):
    journal = Journal.open(tmp_path)
    await journal.append([(1, HostAdded(at=1, host=HostSpec("h1", "fake", 0)))])
    begun = journal.load().facts  # opens the file when it is run through
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(first_free := os.open(os.devnull, os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, hard))
    said = []
    try:
        for read in (journal.load, lambda: list(begun), lambda: check(tmp_path / "journal.sqlite3")):
            with pytest.raises(JournalFailed) as failed:
                read()
            said.append(str(failed.value))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for words in said:
        assert "cannot be used now" in words
        assert "open files" in words
        assert "restore" not in words
    await journal.recover()
    assert [seq for seq, _ in journal.load().facts] == [1]
    await journal.close()


@pytest.mark.asyncio
async def test_a_writer_that_cannot_read_its_journal_goes_on_trying(tmp_path, monkeypatch):
    # As where all files are open when it begins anew after a failure: the daemon must not end over that.
    journal = Journal.open(tmp_path)
    writer = Writer(
        lambda state: Scheduler(Config(), RollMux(), state), journal, SystemClock(), lambda _: None, Start((), ())
    )
    async with anyio.create_task_group() as tasks:
        await tasks.start(writer.run)
        connect, tried = file.connect, []

        def no_file_is_left(path, *, readonly=False):
            if readonly and len(tried) < 3:
                tried.append(path)
                return sqlite3.connect(f"file:{tmp_path}/no/such?mode=ro", uri=True)
            return connect(path, readonly=readonly)

        monkeypatch.setattr(file, "connect", no_file_is_left)
        writer._end(Unavailable("a commit failed"))
        with anyio.fail_after(PATIENCE_S):
            while not writer._up:
                await anyio.sleep(0.05)
        assert len(tried) == 3
        tasks.cancel_scope.cancel()
    await journal.close()


@pytest.mark.asyncio
async def test_what_an_idle_daemon_cannot_note_on_a_full_disk_costs_no_hand_over(tmp_path, monkeypatch):
    # On a disk that never writes over what it has (btrfs, ZFS) even the mark needs room.
    monkeypatch.setattr("rollmuxd.daemon.writer.LOOK_AFTER_S", 0.01)
    journal = Journal.open(tmp_path)
    writer = Writer(
        lambda state: Scheduler(Config(), RollMux(), state), journal, SystemClock(), lambda _: None, Start((), ())
    )
    async with anyio.create_task_group() as tasks:
        await tasks.start(writer.run)
        refused = []

        def full(does, *given, **named):
            if not refused:
                refused.append(does)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return does(*given, **named)

        monkeypatch.setattr(os, "pwrite", partial(full, os.pwrite))
        monkeypatch.setattr(os, "utime", partial(full, os.utime))
        with anyio.fail_after(PATIENCE_S):
            while not refused:
                await anyio.sleep(0.01)
        await writer.submit(Audit(Audited(0, action="a hand-over", who="root", where="here", request_id="r1")))
        tasks.cancel_scope.cancel()
    await journal.close()


@pytest.mark.asyncio
async def test_with_no_page_left_commits_fail_until_there_are_some_and_lose_nothing(tmp_path):
    journal = Journal.open(tmp_path)
    journal._writer.execute("PRAGMA max_page_count = 40")
    number = 0
    with pytest.raises(JournalFailed, match="full"):
        while number < 10_000:
            fact = HostAdded(at=number, host=HostSpec(f"h{number}", "fake" * 50, 0))
            await journal.append([(number + 1, fact)])
            number += 1
    assert 50 < number < 10_000
    assert journal.tight
    with pytest.raises(JournalFailed):
        await journal.append([(number + 1, fact)])
    await journal.recover()
    assert [seq for seq, _ in journal.load().facts] == list(range(1, number + 1))
    await journal.append([(number + 1, fact)])
    await journal.close()
