"""What damage to a journal does: it shows, and nothing that is left to read is ever wrong.

- A torn tail is put aside, and the daemon goes on and knows that it has lost facts.
- Damage inside refuses, names the fact, and says what to do.
- Whatever bytes of the file change, what is read is what was written, up to some fact, or it is refused.
"""

import json
import random
import shutil
import sqlite3
import time
from contextlib import closing

import pytest
import structlog

from rollmuxd.core.facts import HostAdded
from rollmuxd.core.inputs import HostSpec
from rollmuxd.daemon.journal import Journal, JournalDamaged, JournalError, JournalRefused

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
    return journal.lost.incarnation


def change(folder, *statements):
    with closing(sqlite3.connect(folder / "journal.sqlite3", isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


async def read(folder):
    """What a daemon that starts on it reads; and its incarnation."""
    journal = Journal.open(folder)
    try:
        past = journal.load()
        return past.seq, [seq for seq, fact in past.facts if fact == host(seq)], journal.lost.incarnation
    finally:
        await journal.close()


BAD = """body = replace(body, 'fake', 'sham')"""


@pytest.mark.parametrize(
    ("damage", "good", "aside"),
    [
        (f"UPDATE facts SET {BAD} WHERE seq = 10", 9, [10]),
        (f"UPDATE facts SET {BAD} WHERE seq >= 8", 7, [8, 9, 10]),
        ("UPDATE facts SET sum = 0 WHERE seq >= 9", 8, [9, 10]),
        ("DELETE FROM facts WHERE seq IN (8, 9)", 7, [10]),
        ("UPDATE facts SET seq = 17 WHERE seq = 10", 9, [17]),
    ],
    ids=["the last body", "the last bodies", "sums", "a hole before the last", "a number"],
)
async def test_a_torn_tail_is_put_aside_and_is_known_to_be_lost(tmp_path, said, damage, good, aside):
    before = await write(tmp_path, snapshots=(3, 6))
    change(tmp_path, damage)
    began = int(time.time())
    seq, facts, incarnation = await read(tmp_path)

    assert (seq, facts) == (6, list(range(7, good + 1)))
    assert incarnation >= began > before
    (kept,) = tmp_path.glob("torn-*.jsonl")
    assert [json.loads(line)["seq"] for line in kept.read_text().splitlines()] == aside
    assert kept.stat().st_mode & 0o777 == 0o600
    line = next(line for line in said if line["event"] == "journal_tail_torn")
    assert (line["log_level"], line["good"], line["kept_in"]) == ("warning", good, str(kept))
    # And from now on it is as good as any.
    journal = Journal.open(tmp_path)
    await journal.append([(good + 1, host(good + 1))])
    await journal.close()
    assert await read(tmp_path) == (6, list(range(7, good + 2)), incarnation)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (f"UPDATE facts SET {BAD} WHERE seq = 8", "fact 8 of 10 is damaged"),
        ("UPDATE facts SET sum = sum + 1 WHERE seq = 8", "fact 8 of 10 is damaged"),
        ("DELETE FROM facts WHERE seq IN (7, 8)", "facts 7 to 8 of 10 are missing"),
        ("DELETE FROM facts WHERE seq = 6", "there is a snapshot of fact 6, and not the fact"),
        (
            "DELETE FROM facts WHERE seq > 5",
            "the facts after 5 are damaged or missing, and there is a snapshot of fact 6",
        ),
        (f"UPDATE facts SET {BAD} WHERE seq >= 6", "the facts after 5 are damaged or missing"),
    ],
    ids=["a body", "a sum", "a hole", "what the snapshot rests on", "an end before the snapshot", "a tail before it"],
)
async def test_damage_inside_is_refused_by_number_with_what_to_do(tmp_path, damage, named):
    await write(tmp_path, snapshots=(3, 6))
    change(tmp_path, damage)
    for _ in range(2):
        with pytest.raises(JournalDamaged, match=f"{named}.*rollmuxd journal check.*rollmuxd journal restore"):
            await read(tmp_path)
    assert list(tmp_path.glob("torn-*")) == []


async def test_facts_that_changed_places_show(tmp_path):
    await write(tmp_path)
    change(
        tmp_path,
        "UPDATE facts SET seq = 99 WHERE seq = 4",
        "UPDATE facts SET seq = 4 WHERE seq = 5",
        "UPDATE facts SET seq = 5 WHERE seq = 99",
    )
    with pytest.raises(JournalDamaged, match="fact 4 of 10"):
        await read(tmp_path)


async def test_a_damaged_snapshot_is_passed_over_for_the_one_before(tmp_path, said):
    await write(tmp_path, snapshots=(3, 6))
    change(tmp_path, "UPDATE snapshots SET body = replace(body, '6', '7') WHERE seq = 6")
    assert (await read(tmp_path))[:2] == (3, list(range(4, 11)))
    assert any(line["event"] == "snapshot_damaged" and line["seq"] == 6 for line in said)
    change(tmp_path, "UPDATE snapshots SET body = ''")
    assert (await read(tmp_path))[:2] == (0, list(range(1, 11)))


async def test_a_journal_that_was_put_here_has_lost_facts_and_one_that_was_not_has_not(tmp_path):
    first = await write(tmp_path / "a", 3)
    shutil.copyfile(tmp_path / "a" / "journal.sqlite3", tmp_path / "kept")
    assert (await read(tmp_path / "a"))[2] == first
    # The old file in the place of the newer one.
    shutil.copyfile(tmp_path / "kept", tmp_path / "a" / "journal.sqlite3")
    second = (await read(tmp_path / "a"))[2]
    assert second > first
    # A whole directory that moves is the same journal.
    (tmp_path / "a").rename(tmp_path / "b")
    assert (await read(tmp_path / "b"))[2] == second


async def test_whatever_bytes_change_what_is_read_was_written_or_it_is_refused(tmp_path):
    await write(tmp_path / "whole", 60, snapshots=(20, 40))
    rng, refused, torn = random.Random(7), 0, 0
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
                torn += 1
                assert list(folder.glob("torn-*")), "facts went without a trace"
                assert journal.incarnation > 1_000_000
        finally:
            await journal.close()
        shutil.rmtree(folder)
    assert refused > 10


async def test_a_log_that_is_cut_anywhere_leaves_the_facts_up_to_some_commit(tmp_path):
    # What SQLite itself does about an unsynced end: there is nothing for the chain to find.
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
        assert list(folder.glob("torn-*")) == []
        lengths.add(len(facts))
    assert max(lengths) == 30
    assert len(lengths) > 10


# ---- other versions --------------------------------------------------------------------------------------------------


def written_by_a_newer_one(
    folder,
    *,
    least_reader,
    body='{"fact":"host_added","at":4,"host":{"id":"h4","backend":"fake","ram_mb":0,"colour":"red"},"why":"new"}',
):
    """What a version that is one minor newer may leave: more columns, more tables, more words."""
    from rollmuxd.daemon.journal_file import Tip, link

    with closing(sqlite3.connect(folder / "journal.sqlite3", isolation_level=None)) as connection:
        tip = link(Tip(*connection.execute("SELECT seq, sum FROM facts ORDER BY seq DESC").fetchone()), body.encode())
        connection.execute("ALTER TABLE facts ADD COLUMN colour TEXT DEFAULT 'red'")
        connection.execute("ALTER TABLE keys ADD COLUMN colour TEXT")
        connection.execute("CREATE TABLE colours (name TEXT)")
        connection.execute(
            "INSERT INTO facts (seq, at, kind, body, sum) VALUES (?, 4, 'x', ?, ?)", (tip.seq, body, tip.sum)
        )
        connection.execute("UPDATE meta SET value = ? WHERE name = 'least_reader'", (least_reader,))
        connection.execute("UPDATE meta SET value = '0.9.0' WHERE name = 'written_by'")
        connection.execute("UPDATE meta SET value = value || ' hummed' WHERE name = 'passable'")
        connection.execute("PRAGMA user_version = 3")


async def test_the_journal_of_the_next_minor_version_is_read_and_written_and_keeps_its_format(tmp_path):
    await write(tmp_path, 3)
    written_by_a_newer_one(tmp_path, least_reader=2)
    journal = Journal.open(tmp_path)
    assert list(journal.load().facts) == [(seq, host(seq)) for seq in (1, 2, 3, 4)]
    await journal.append([(5, host(5))])
    await journal.snapshot(5, b"{}")
    await journal.close()
    with closing(sqlite3.connect(tmp_path / "journal.sqlite3")) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (3,)
        assert connection.execute("SELECT value FROM meta WHERE name = 'written_by'").fetchone() == ("0.9.0",)
        assert connection.execute("SELECT colour FROM facts WHERE seq = 5").fetchone() == ("red",)


async def test_a_format_that_says_that_it_is_not_for_us_is_refused_with_the_version_to_use(tmp_path):
    await write(tmp_path, 3)
    written_by_a_newer_one(tmp_path, least_reader=3)
    with pytest.raises(JournalRefused, match=r"has format 3.*reads up to 2.*newer rollmuxd.*0\.9\.0.*backup"):
        Journal.open(tmp_path)


async def test_a_fact_that_changes_nothing_is_passed_over_by_the_version_that_does_not_know_it(tmp_path, said):
    await write(tmp_path, 3)
    written_by_a_newer_one(tmp_path, least_reader=2, body='{"fact":"hummed","at":4,"tune":"a"}')
    journal = Journal.open(tmp_path)
    assert [seq for seq, _ in journal.load().facts] == [1, 2, 3]
    assert any(line["event"] == "facts_passed_over" and line["facts"] == 1 for line in said)
    await journal.append([(5, host(5))])
    assert [seq for seq, _ in await journal.read(3, 1)] == [5]
    await journal.close()
    assert (await read(tmp_path))[1] == [1, 2, 3, 5]


async def test_a_fact_that_may_change_something_stops_the_version_that_does_not_know_it(tmp_path):
    await write(tmp_path, 3)
    written_by_a_newer_one(tmp_path, least_reader=2, body='{"fact":"beamed_up","at":4}')
    with pytest.raises(JournalRefused, match=r"fact 4 is 'beamed_up'.*does not know.*rollmuxd 0\.9\.0.*use that one"):
        await read(tmp_path)


async def test_what_may_be_passed_over_is_what_changes_nothing(tmp_path):
    await write(tmp_path, 1)
    with closing(sqlite3.connect(tmp_path / "journal.sqlite3")) as connection:
        (said,) = connection.execute("SELECT value FROM meta WHERE name = 'passable'").fetchone()
    assert {"loop_stalled", "audited"} <= set(said.split())
    assert "slot_granted" not in said
