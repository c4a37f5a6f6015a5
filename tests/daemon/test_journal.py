"""What may be relied on of a journal, whichever it is; and what the one on a disk owes beyond that.

- What was answered for is there after kill -9, in order and once.
- After one failure everything fails, until the file was opened anew and could be written.
- Two daemons never write to one directory; a network file system is refused.
"""

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextvars import ContextVar

import msgspec
import pytest
import structlog
from memory_journal import MemoryJournal
from patience import PATIENCE_S

from rollmuxd.core.facts import HostAdded, SlotQueued
from rollmuxd.core.inputs import HostSpec
from rollmuxd.daemon.access.keys import ApiKey, Role
from rollmuxd.daemon.journal import file
from rollmuxd.daemon.journal.file import JournalFailed, JournalRefused
from rollmuxd.daemon.journal.store import RESERVE_BYTES, Journal, refuse_remote

pytestmark = pytest.mark.asyncio


def host(number: int) -> HostAdded:
    return HostAdded(at=number, host=HostSpec(f"h{number}", "fake", 0))


class FaultyJournal(Journal):
    """One whose commits fail while ``fault`` is set."""

    fault: sqlite3.Error | None = None

    def _transaction(self, writes):
        if self.fault is not None:
            raise self.fault
        return super()._transaction(writes)


class FaultyMemoryJournal(MemoryJournal):
    @property
    def fault(self):
        return self.failing

    @fault.setter
    def fault(self, error):
        self.failing = None if error is None else JournalFailed(str(error))


@pytest.fixture(params=["memory", "sqlite"])
def opened(request, tmp_path):
    """Opens the journal; called twice, the second one finds what the first has written."""
    memory = FaultyMemoryJournal()
    return (lambda: memory) if request.param == "memory" else (lambda: FaultyJournal.open(tmp_path / "state"))


# ---- the contract --------------------------------------------------------------------------------------------------


async def test_a_state_directory_that_others_may_enter_is_told(tmp_path):
    tmp_path.chmod(0o755)
    with structlog.testing.capture_logs() as said:
        await Journal.open(tmp_path).close()
    assert [(line["event"], line["mode"]) for line in said] == [("state_directory_open_to_others", "0755")]


async def test_what_was_appended_is_read_in_order_and_survives_closing(opened):
    journal = opened()
    await journal.append([(1, host(1)), (2, host(2))])
    await journal.append([(3, host(3))])

    assert await journal.read(0, 10) == [(1, host(1)), (2, host(2)), (3, host(3))]
    assert await journal.read(1, 1) == [(2, host(2))]
    assert await journal.read(3, 10) == []
    await journal.close()
    await journal.close()
    again = opened()
    seq, snapshot, facts = again.load()
    assert (seq, snapshot) == (0, None)
    assert list(facts) == [(1, host(1)), (2, host(2)), (3, host(3))]
    await again.close()


async def test_appends_that_nobody_awaits_become_durable_in_the_order_of_the_calls(opened):
    journal = opened()
    waits = [journal.append([(number, host(number))]) for number in range(1, 201)]
    await waits[-1]

    assert all(wait.done() for wait in waits)
    assert [seq for seq, _ in await journal.read(0, 1000)] == list(range(1, 201))
    await journal.close()


async def test_why_a_switch_is_left_alone_survives_closing_until_it_is_restored(opened):
    journal = opened()
    await journal.note_left_alone("ocs", "mirrors are cleaned")
    await journal.note_left_alone("other", "by ann")
    await journal.note_left_alone("other", "")
    await journal.close()
    again = opened()
    assert again.notes.left_alone == {"ocs": "mirrors are cleaned"}
    await again.close()


LARGE = b'{"jobs": "' + b"7" * 2_000_000 + b'"}'


async def test_a_large_snapshot_is_kept_compressed_and_read_as_it_was(tmp_path):
    journal = Journal.open(tmp_path)
    await journal.append([(1, host(1))])
    await journal.snapshot(1, LARGE)
    assert journal.load()[:2] == (1, LARGE)
    assert sum(path.stat().st_size for path in tmp_path.glob("journal.sqlite3*")) < len(LARGE) // 2
    await journal.close()


async def test_a_large_snapshot_is_not_kept_when_a_commit_failed_while_it_was_compressed(tmp_path, monkeypatch):
    """The facts that it is of may not have been written, and others of their numbers be written since."""
    recovered, pack = threading.Event(), file.packed
    monkeypatch.setattr(file, "packed", lambda body: recovered.wait(PATIENCE_S) and pack(body))
    journal = FaultyJournal.open(tmp_path)
    journal.fault = sqlite3.OperationalError("disk I/O error")
    lost, kept = journal.append([(1, host(1))]), journal.snapshot(1, LARGE)
    with pytest.raises(JournalFailed):
        await lost
    journal.fault = None
    await journal.recover()
    recovered.set()
    await kept
    assert journal.load()[:2] == (0, None)
    await journal.close()


async def test_a_load_begins_with_the_newest_snapshot(opened):
    journal = opened()
    await journal.append([(number, host(number)) for number in range(1, 6)])
    for seq in (2, 3, 4):
        await journal.snapshot(seq, b"state %d" % seq)
    seq, snapshot, facts = journal.load()

    assert (seq, snapshot, list(facts)) == (4, b"state 4", [(5, host(5))])
    await journal.close()


async def test_after_one_failure_all_fail_until_it_recovers(opened):
    journal = opened()
    await journal.append([(1, host(1))])
    journal.fault = sqlite3.OperationalError("disk I/O error")
    for number in (2, 3):
        with pytest.raises(JournalFailed, match="disk I/O error"):
            await journal.append([(number, host(number))])
    with pytest.raises(JournalFailed):
        await journal.recover()
    journal.fault = None
    with pytest.raises(JournalFailed):
        await journal.append([(4, host(4))])
    await journal.recover()
    await journal.append([(2, host(22))])

    assert list(journal.load().facts) == [(1, host(1)), (2, host(22))]
    await journal.close()


async def test_a_recovery_that_is_taken_together_with_what_was_queued_before_it_is_answered(tmp_path):
    journal = FaultyJournal.open(tmp_path)
    journal.fault = sqlite3.OperationalError("disk I/O error")
    with pytest.raises(JournalFailed):
        await journal.append([(1, host(1))])
    journal.fault = None
    going, commit = threading.Event(), journal._commit
    journal._commit = lambda writes: going.wait(PATIENCE_S) and commit(writes)
    before = [journal.append([(number, host(number))]) for number in (2, 3)]
    recovery = asyncio.ensure_future(journal.recover())
    await asyncio.sleep(0)  # it is in the queue
    going.set()
    await asyncio.wait_for(recovery, PATIENCE_S)
    assert [type(one) for one in await asyncio.gather(*before, return_exceptions=True)] == [JournalFailed] * 2
    assert list(journal.load().facts) == []
    await journal.close()


async def test_waits_given_up_harm_nobody(opened):
    journal = opened()
    given_up = journal.append([(1, host(1))])
    given_up.cancel()
    await journal.append([(2, host(2))])

    assert [seq for seq, _ in await journal.read(0, 10)] == [1, 2]
    await journal.close()


async def test_keys_are_kept_listed_and_revoked_once(opened):
    journal = opened()
    key = ApiKey("k1", "team", "ann", Role.LEAD, "0ab1", 5)
    await journal.add_key(key)
    with pytest.raises(ValueError, match="k1"):
        await journal.add_key(key)
    assert await journal.list_keys() == [key]
    assert await journal.revoke_key("k1", 7)
    assert await journal.revoke_key("k1", 9)
    assert not await journal.revoke_key("k2", 7)
    await journal.close()
    again = opened()
    (kept,) = await again.list_keys()

    assert kept.revoked_at == 7
    assert kept.role is Role.LEAD
    await again.close()


async def test_of_a_key_it_is_kept_when_it_expires(opened):
    journal = opened()
    await journal.add_key(ApiKey("k1", "team", "ann", Role.LEAD, "0ab1", 5, expires_at=99))
    await journal.close()
    again = opened()
    (kept,) = await again.list_keys()

    assert kept.expires_at == 99
    await again.close()


# ---- on a disk -----------------------------------------------------------------------------------------------------


async def test_a_hundred_thousand_facts_are_loaded_in_little_more_than_it_takes_to_read_and_decode_them(tmp_path):
    journal = Journal.open(tmp_path)
    fact = SlotQueued(at=1, slot="s123", job="j12", run=1, session="n1", phase="rollout", request_id="0123456789abcdef")
    await journal.append([(number, fact) for number in range(1, 100_001)])
    began = time.process_time()
    count = sum(1 for _ in journal.load().facts)
    loaded = time.process_time() - began
    began = time.process_time()
    line = msgspec.json.encode(fact)
    for _ in range(100_000):
        msgspec.json.decode(line, type=SlotQueued)
    decoded = time.process_time() - began

    assert count == 100_000
    assert loaded < 20 * decoded  # six times where it was written
    await journal.close()


async def test_every_commit_is_on_the_disk_before_it_is_answered(tmp_path):
    journal = Journal.open(tmp_path)
    await journal.append([(1, host(1))])
    journal._failed = JournalFailed("to see it opened anew")
    for _ in range(2):
        assert journal._writer.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
        assert journal._writer.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        await journal.recover()
    await journal.close()


async def test_two_daemons_do_not_share_a_state_directory(tmp_path):
    journal = Journal.open(tmp_path)
    with pytest.raises(JournalFailed, match=f"pid {os.getpid()}"):
        Journal.open(tmp_path)
    await journal.close()
    await Journal.open(tmp_path).close()


async def test_another_format_is_refused_with_the_remedy(tmp_path):
    await Journal.open(tmp_path).close()
    with sqlite3.connect(tmp_path / "journal.sqlite3") as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(JournalRefused, match=r"format 99.*reads format 1 only: use the rollmuxd that wrote it"):
        Journal.open(tmp_path)


async def test_a_file_that_is_no_database_is_refused_and_the_lock_let_go(tmp_path):
    (tmp_path / "journal.sqlite3").write_bytes(b"this is no database, whatever its name says" * 100)
    for _ in range(2):
        with pytest.raises(JournalRefused, match="not a database"):
            Journal.open(tmp_path)


@pytest.mark.parametrize(("kind", "refused"), [("nfs4", True), ("ext4", False), ("fuse.sshfs", True)])
async def test_a_network_file_system_is_refused(tmp_path, kind, refused):
    device = tmp_path.stat().st_dev
    mounts = f"""\
22 1 254:255 / / rw,relatime shared:1 - {"ext4" if refused else "nfs4"} /dev/vda rw
30 22 {os.major(device)}:{os.minor(device)} / /home rw - {kind} server:/home rw
"""
    (tmp_path / "link").symlink_to(tmp_path)
    if refused:
        with pytest.raises(JournalRefused, match=rf"{kind} at /home.*daemon\.state_dir"):
            refuse_remote(tmp_path / "link", mounts)
    else:
        refuse_remote(tmp_path / "link", mounts)


class FullDiskJournal(Journal):
    """A disk that is full as long as the reserve is on it."""

    def _transaction(self, writes):
        if self._reserve.exists():
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        return super()._transaction(writes)


async def test_a_full_disk_costs_the_reserve_and_nothing_else(tmp_path):
    journal = FullDiskJournal.open(tmp_path)
    assert (tmp_path / "reserve").stat().st_size == RESERVE_BYTES
    assert not journal.tight
    with structlog.testing.capture_logs() as logged:
        await journal.append([(1, host(1))])

    assert journal.tight
    assert [line["event"] for line in logged] == ["disk_full"]
    assert list(journal.load().facts) == [(1, host(1))]
    await journal.make_reserve()
    assert not journal.tight
    assert (tmp_path / "reserve").stat().st_size == RESERVE_BYTES
    await journal.close()


async def test_many_writers_share_commits(tmp_path):
    journal = Journal.open(tmp_path)
    commits = 0
    transaction = journal._transaction

    def counted(writes):
        nonlocal commits
        commits += 1
        return transaction(writes)

    journal._transaction = counted
    await asyncio.gather(*(journal.append([(number, host(number))]) for number in range(1, 1001)))

    assert commits < 500
    await journal.close()


WRITER = """
import asyncio, sys
from pathlib import Path
from rollmuxd.core.facts import HostAdded
from rollmuxd.core.inputs import HostSpec
from rollmuxd.daemon.journal.store import Journal

async def main():
    journal = Journal.open(Path(sys.argv[1]))
    seq = sum(1 for _ in journal.load().facts)

    async def write():
        nonlocal seq
        while True:
            seq += 1
            mine = seq
            await journal.append([(mine, HostAdded(at=mine, host=HostSpec(f"h{mine}", "fake", 0)))])
            print(mine, flush=True)

    await asyncio.gather(*(write() for _ in range(8)))

asyncio.run(main())
"""


async def test_what_was_answered_for_survives_kill_9(tmp_path):
    answered = 0
    for delay_s in (0.05, 0.0, 0.11):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            first = writer.stdout.readline()  # it writes
            await asyncio.sleep(delay_s)
            writer.send_signal(signal.SIGKILL)
            rest = writer.stdout.read()
        # A last line may be cut short: a number that was not printed whole was not answered for.
        lines = (first + rest).decode().split("\n")[:-1]
        answered = max([answered, *(int(line) for line in lines)])
        journal = Journal.open(tmp_path)
        facts = list(journal.load().facts)
        await journal.close()

        assert len(facts) >= answered > 0
        assert facts == [(number, host(number)) for number in range(1, len(facts) + 1)]


@pytest.mark.parametrize("kind", ["disk", "memory"])
async def test_what_follows_a_commit_runs_in_the_context_of_what_brought_the_facts(kind, tmp_path):
    """Where sniffio is installed, anyio asks it for its library. It knows that of tasks, and this runs in none."""
    library = ContextVar("library", default=None)
    journal = Journal.open(tmp_path) if kind == "disk" else MemoryJournal()
    seen, followed = [], asyncio.Event()

    def follow(done):
        seen.append((library.get(), asyncio.current_task()))
        followed.set()

    library.set("asyncio")  # as anyio.run does for all that it runs
    journal.append([(1, host(1))]).add_done_callback(follow)
    await followed.wait()
    assert seen == [("asyncio", None)]
    await journal.close()
