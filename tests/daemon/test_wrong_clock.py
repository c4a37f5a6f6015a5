"""A clock that is wrong for one start: what is not lost by it, that it is told, and how to be rid of what it wrote.

- Nothing is let go of because of a jump of the clock, neither facts nor who did what.
- The daemon says so: in its log, in ``daemon.json``, and by ``rollmuxd daemon status``.
- What was written by the wrong clock can be left out, and what was written before it stays.
"""

import time

import pytest

from rollmuxd.core import facts as f
from rollmuxd.core.inputs import HostSpec
from rollmuxd.daemon.journal import Journal
from rollmuxd.daemon.journal_care import DAY, Keep, compact
from rollmuxd.daemon.journal_tools import check

pytestmark = pytest.mark.asyncio
NOW = 20_800 * DAY + 9 * 3_600_000
#: as it is configured where nobody says otherwise, but that who did what is not kept for years
KEEP = Keep(days=90, bytes=10**10, audit_days=200)


async def write(folder, days):
    """Two facts on each of these days, counted from today: a host that came, and somebody who did something."""
    journal = Journal.open(folder)
    seq = journal.first - 1 + len(await journal.read(0, 100_000))
    for day in days:
        at = NOW + day * DAY
        facts = [f.HostAdded(at, HostSpec(f"h{day}", "fake", 0)), f.Audited(at, "drain_node", f"ann {day}")]
        await journal.append(list(enumerate(facts, seq + 1)))
        seq += 2
    await journal.close()


async def left(folder):
    """How many days there are facts of, and of how many it is known who did something."""
    journal = Journal.open(folder)
    facts = [fact for _, fact in await journal.read(0, 100_000)]
    audits = [fact for _, fact in await journal.lasting(0, "audited", 100_000)]
    await journal.close()
    hosts = sum(f.name(fact) == "host_added" for fact in facts)
    return hosts, len(audits) + sum(f.name(fact) == "audited" for fact in facts)


def tended(monkeypatch, folder, at):
    monkeypatch.setattr(time, "time", lambda: at / 1000)
    return compact(folder, KEEP)


@pytest.mark.parametrize("jump", [400 * DAY, 100 * DAY, 8 * DAY])
async def test_a_clock_that_was_ahead_for_one_start_costs_no_fact_and_no_trail(tmp_path, monkeypatch, jump):
    await write(tmp_path, range(-80, 1))
    await write(tmp_path, [jump // DAY])
    assert tended(monkeypatch, tmp_path, NOW + jump).cut == 0
    # The clock is right again, and the daemon's time is not.
    assert tended(monkeypatch, tmp_path, NOW).cut == 0
    assert await left(tmp_path) == (82, 82)
    # And so it goes on for as long as facts are kept; then those go that are as old as that by days that were lived.
    await write(tmp_path, range(jump // DAY + 1, jump // DAY + 10))
    assert tended(monkeypatch, tmp_path, NOW + jump + 9 * DAY).cut == 0
    await write(tmp_path, range(jump // DAY + 10, jump // DAY + 16))
    assert tended(monkeypatch, tmp_path, NOW + jump + 15 * DAY).cut > 0
    hosts, audits = await left(tmp_path)
    assert hosts == 91 + 1  # as many days back as facts are kept, today, and that of the jump, which took no time
    assert audits == 97


async def test_a_machine_that_was_off_for_a_month_finds_what_it_had(tmp_path, monkeypatch):
    await write(tmp_path, range(-89, 1))
    await write(tmp_path, [31])
    assert tended(monkeypatch, tmp_path, NOW + 31 * DAY).cut == 0
    assert await left(tmp_path) == (91, 91)


async def test_a_quiet_week_is_time_that_has_passed(tmp_path, monkeypatch):
    await write(tmp_path, range(0, 92, 7))
    assert tended(monkeypatch, tmp_path, NOW + 91 * DAY).cut == 2
    assert check(tmp_path / "journal.sqlite3").good


async def test_a_stretch_that_was_long_ago_keeps_nothing(tmp_path, monkeypatch):
    await write(tmp_path, [*range(-300, -280), *range(-95, 1)])
    assert tended(monkeypatch, tmp_path, NOW).cut > 0
    assert (await left(tmp_path))[0] == 91


async def test_the_days_that_never_were_take_room_from_no_fact(tmp_path, monkeypatch):
    await write(tmp_path, range(-40, 1))
    before = tended(monkeypatch, tmp_path, NOW).bytes_after
    await write(tmp_path, [5_000])
    monkeypatch.setattr(time, "time", lambda: NOW / 1000 + 5_000 * 86_400)
    done = compact(tmp_path, Keep(90, before + 150_000, 200))
    assert done.bytes_after > before + 200_000  # books for each of these days
    assert done.cut == 0
    assert compact(tmp_path, Keep(90, before // 2, 200)).cut > 0  # else facts go by size as ever
