"""What damage to a journal does: it is found, and nothing that is left to read is ever wrong.

- Damage to what a start reads is refused, by the fact's number, with what to do.
- Whatever bytes of the file change, what is read is what was written, up to some fact, or it is refused.
"""

import random
import shutil
import sqlite3
from contextlib import closing

import pytest
import structlog

from rollmuxd.core.facts import HostAdded
from rollmuxd.core.inputs import HostSpec
from rollmuxd.daemon.journal.file import JournalDamaged, JournalError
from rollmuxd.daemon.journal.store import Journal

pytestmark = pytest.mark.asyncio


def host(number):
    return HostAdded(at=number, host=HostSpec(f"h{number}", "fake", 0))


@pytest.fixture
def said():
    with structlog.testing.capture_logs() as lines:
        yield lines


async def write(folder, count=10, *, snapshots=()):
    """A journal of so many facts; its incarnation."""
    journal = Journal.open(folder)
    for number in range(1, count + 1):
        await journal.append([(number, host(number))])
        if number in snapshots:
            await journal.snapshot(number, b'{"at":%d}' % number)
    await journal.close()
    return journal.notes.lost.incarnation


def change(folder, *statements):
    with closing(sqlite3.connect(folder / "journal.sqlite3", isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


async def read(folder):
    """What a daemon that starts on it reads; and its incarnation."""
    journal = Journal.open(folder)
    try:
        past = journal.load()
        return past.seq, [seq for seq, fact in past.facts if fact == host(seq)], journal.notes.lost.incarnation
    finally:
        await journal.close()


BAD = """body = replace(body, 'fake', 'sham')"""


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (f"UPDATE facts SET {BAD} WHERE seq = 8", "fact 8 is damaged"),
        ("UPDATE facts SET sum = sum + 1 WHERE seq = 8", "fact 8 is damaged"),
        (f"UPDATE facts SET {BAD} WHERE seq = 10", "fact 10 is damaged"),
        ("UPDATE facts SET seq = 17 WHERE seq = 10", "fact 10 is missing: facts 10 to 16 were"),
        ("DELETE FROM facts WHERE seq IN (7, 8)", "fact 7 is missing: facts 7 to 8 were"),
        ("DELETE FROM facts WHERE seq > 5", "there is a snapshot of fact 6, and the last fact is 5"),
    ],
    ids=["a body", "a sum", "the last body", "a number", "a hole", "an end before the snapshot"],
)
async def test_damage_to_what_a_start_reads_is_refused_by_number_with_what_to_do(tmp_path, damage, named):
    await write(tmp_path, snapshots=(3, 6))
    change(tmp_path, damage)
    for _ in range(2):
        with pytest.raises(JournalDamaged, match=f"{named}.*rollmuxd journal check.*rollmuxd journal restore"):
            await read(tmp_path)


@pytest.mark.parametrize("damage", [f"UPDATE facts SET {BAD} WHERE seq = 5", "DELETE FROM facts WHERE seq = 6"])
async def test_damage_before_the_newest_snapshot_keeps_no_daemon_from_starting(tmp_path, damage):
    await write(tmp_path, snapshots=(3, 6))
    change(tmp_path, damage)
    assert (await read(tmp_path))[:2] == (6, [7, 8, 9, 10])


async def test_facts_that_changed_places_show(tmp_path):
    await write(tmp_path)
    change(
        tmp_path,
        "UPDATE facts SET seq = 99 WHERE seq = 4",
        "UPDATE facts SET seq = 4 WHERE seq = 5",
        "UPDATE facts SET seq = 5 WHERE seq = 99",
    )
    with pytest.raises(JournalDamaged, match="fact 4 is damaged"):
        await read(tmp_path)


async def test_a_damaged_snapshot_is_passed_over_for_the_one_before(tmp_path, said):
    await write(tmp_path, snapshots=(3, 6))
    change(tmp_path, "UPDATE snapshots SET body = replace(body, '6', '7') WHERE seq = 6")
    assert (await read(tmp_path))[:2] == (3, list(range(4, 11)))
    assert any(line["event"] == "snapshot_not_used" and line["seq"] == 6 for line in said)
    change(tmp_path, "UPDATE snapshots SET body = ''")
    assert (await read(tmp_path))[:2] == (0, list(range(1, 11)))


async def test_a_journal_that_was_put_here_has_lost_facts_and_one_that_was_not_has_not(tmp_path):
    first = await write(tmp_path / "a", 3)
    shutil.copyfile(tmp_path / "a" / "journal.sqlite3", tmp_path / "kept")
    assert (await read(tmp_path / "a"))[2] == first
    journal = Journal.open(tmp_path / "a")
    await journal.append([(4, host(4))])
    await journal.close()
    # The old file in the place of the newer one.
    shutil.copyfile(tmp_path / "kept", tmp_path / "a" / "journal.sqlite3")
    second = (await read(tmp_path / "a"))[2]
    assert second > first
    # A whole directory that moves is the same journal.
    (tmp_path / "a").rename(tmp_path / "b")
    assert (await read(tmp_path / "b"))[2] == second


async def test_whatever_bytes_change_what_is_read_was_written_or_it_is_refused(tmp_path):
    await write(tmp_path / "whole", 60, snapshots=(20, 40))
    rng, refused = random.Random(7), 0
    for number in range(60):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", folder)
        content = bytearray((folder / "journal.sqlite3").read_bytes())
        at = rng.randrange(len(content))
        if number % 3 == 0:  # a page that was never written
            at -= at % 4096
            content[at : at + 4096] = bytes(4096)
        elif number % 3 == 1:
            content[at] ^= 1 << rng.randrange(8)
        else:  # cut short
            del content[max(100, at) :]
        (folder / "journal.sqlite3").write_bytes(content)
        try:
            journal = Journal.open(folder)
        except JournalError:
            refused += 1
            continue
        try:
            past = journal.load()
            facts = list(past.facts)
        except JournalError:
            refused += 1
        else:
            assert facts == [(seq, host(seq)) for seq in range(past.seq + 1, past.seq + 1 + len(facts))]
            assert past.seq in (0, 20, 40)
            if past.seq + len(facts) < 60:
                assert journal.notes.lost.why, "facts went without a trace"
        finally:
            await journal.close()
        shutil.rmtree(folder)
    assert refused > 10


async def test_a_log_that_is_cut_anywhere_leaves_the_facts_up_to_some_commit(tmp_path):
    # What SQLite itself does about an unsynced end: no checksum shows it.
    journal = Journal.open(tmp_path / "live")
    for number in range(1, 31):
        await journal.append([(number, host(number))])
    shutil.copytree(tmp_path / "live", tmp_path / "copy")
    await journal.close()
    size = (tmp_path / "copy" / "journal.sqlite3-wal").stat().st_size
    lengths = set()
    for share in range(20):
        folder = tmp_path / f"cut{share}"
        shutil.copytree(tmp_path / "copy", folder)
        (folder / "journal.sqlite3-shm").unlink()
        with (folder / "journal.sqlite3-wal").open("r+b") as wal:
            wal.truncate(size * share // 19)
        seq, facts, _ = await read(folder)
        assert (seq, facts) == (0, list(range(1, len(facts) + 1)))
        lengths.add(len(facts))
    assert max(lengths) == 30
    assert len(lengths) > 10
