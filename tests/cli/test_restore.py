"""``rollmuxd journal restore``: which API keys open something afterwards, and what a wrong clock wrote is left out."""

import asyncio
import time
from datetime import UTC, datetime

import msgspec
import pytest

from rollmuxd.core.facts import Audited, HostAdded
from rollmuxd.core.fold import apply
from rollmuxd.core.inputs import HostSpec
from rollmuxd.core.state import State
from rollmuxd.daemon.journal import Journal
from rollmuxd.daemon.journal_care import Keep, compact
from rollmuxd.daemon.keys import Role, new_key, why_shut

NOW = int(time.time() * 1000)
DAY = 86_400_000


def on_journal(folder, do):
    async def run():
        journal = Journal.open(folder)
        try:
            return await do(journal)
        finally:
            await journal.close()

    return asyncio.run(run())


@pytest.fixture
def state_dir(tmp_path):
    async def begin(journal):
        await journal.append([(1, HostAdded(NOW - 9 * DAY, HostSpec("h1", "fake", 0)))])

    on_journal(tmp_path / "state", begin)
    return tmp_path / "state"


def add(state_dir, user, role=Role.USER, **more):
    key, _ = new_key("team", user, role, NOW, **more)
    on_journal(state_dir, lambda journal: journal.add_key(key))
    return key.id


def shut(state_dir):
    """Why each key opens nothing; "": it does."""
    keys = on_journal(state_dir, lambda journal: journal.list_keys())
    return {key.id: why_shut(key, NOW) for key in keys}


def revoke(state_dir, *ids):
    async def do(journal):
        for key_id in ids:
            assert await journal.revoke_key(key_id, NOW + 5)

    on_journal(state_dir, do)


def test_a_key_that_was_revoked_since_the_backup_stays_so_and_it_is_said_which_are_good(rollmuxd, state_dir, tmp_path):
    kept, leaked = add(state_dir, "ann", Role.ADMIN), add(state_dir, "bob")
    old, late = add(state_dir, "cid"), add(state_dir, "dan", expires_at=NOW - 1)
    revoke(state_dir, old)
    assert rollmuxd(f"journal backup {tmp_path}/kept --state-dir {state_dir}").code == 0
    revoke(state_dir, leaked)
    ran = rollmuxd(f"journal restore {tmp_path}/kept --state-dir {state_dir}")
    assert f"API keys that were revoked since, and stay so: {leaked} (user, bob of team)" in ran.lines
    assert f"API keys that open it: {kept} (admin, ann of team)" in ran.lines
    assert "not known" not in ran.out
    assert shut(state_dir) == {kept: "", leaked: "was revoked", old: "was revoked", late: "has expired"}
    again = rollmuxd(f"journal restore {tmp_path}/kept --state-dir {state_dir} --json")
    assert again.json["keys"] == [f"{kept} (admin, ann of team)"]
    assert again.json["keys_revoked"] == [f"{leaked} (user, bob of team)"]


def test_a_key_stays_revoked_over_restores_of_backups_that_know_it_and_that_do_not(rollmuxd, state_dir, tmp_path):
    assert rollmuxd(f"journal backup {tmp_path}/before --state-dir {state_dir}").code == 0
    leaked = add(state_dir, "bob")
    assert rollmuxd(f"journal backup {tmp_path}/with --state-dir {state_dir}").code == 0
    revoke(state_dir, leaked)
    assert rollmuxd(f"journal restore {tmp_path}/before --state-dir {state_dir}").code == 0
    assert rollmuxd(f"journal restore {tmp_path}/with --state-dir {state_dir}").code == 0
    assert shut(state_dir) == {leaked: "was revoked"}


@pytest.mark.parametrize("why", ["elsewhere", "damaged"])
def test_where_it_is_not_known_which_keys_were_revoked_that_is_said(rollmuxd, state_dir, tmp_path, why):
    leaked = add(state_dir, "bob")
    assert rollmuxd(f"journal backup {tmp_path}/kept --state-dir {state_dir}").code == 0
    revoke(state_dir, leaked)
    if why == "elsewhere":
        state_dir = tmp_path / "elsewhere"
    else:
        (state_dir / "journal.sqlite3").write_bytes(b"this is no database, whatever its name says" * 100)
    ran = rollmuxd(f"journal restore {tmp_path}/kept --state-dir {state_dir}")
    assert ran.code == 0
    assert f"API keys that open it: {leaked} (user, bob of team)" in ran.lines
    assert "which of them were revoked since is not known: revoke them again (rollmuxd key revoke ID)" in ran.lines


# ---- a clock that was wrong ------------------------------------------------------------------------------------------


def when(at):
    return datetime.fromtimestamp(at / 1000, UTC).strftime("%Y-%m-%dT%H:%MZ")


@pytest.fixture
def jumped(state_dir):
    """Facts of the last days, and of four years later; with the snapshot and the days that come of them."""

    async def write(journal):
        past = journal.load()
        days = [-2, -1, 0, 1461, 1461]
        facts = [Audited(NOW + day * DAY, "drain_node", "ann") for day in days]
        state = State()
        for fact in [*(fact for _, fact in past.facts), *facts]:
            apply(state, fact)
        await journal.append(list(enumerate(facts, 2)))
        await journal.snapshot(6, msgspec.json.encode(state))

    on_journal(state_dir, write)
    compact(state_dir, Keep(90, 10**10, 1_095))
    return state_dir


async def numbers(journal):
    return [seq for seq, _ in journal.load(snapshot=False).facts]


def test_what_a_clock_wrote_that_was_ahead_is_left_out_of_a_backup_and_of_the_journal_itself(
    rollmuxd, jumped, tmp_path
):
    before = on_journal(jumped, numbers)
    assert before == [1, 2, 3, 4, 5, 6]
    assert rollmuxd(f"journal backup {tmp_path}/kept --state-dir {jumped}").code == 0
    for file in (jumped / "journal.sqlite3", tmp_path / "kept"):
        ran = rollmuxd(f"journal restore {file} --before {when(NOW + DAY)} --state-dir {jumped}")
        assert ran.code == 0, ran.err
        assert "ends at fact 4" in ran.out
        assert "left out: 2 facts from" in ran.out
        assert on_journal(jumped, numbers) == [1, 2, 3, 4]
        assert "facts 1 to 4" in rollmuxd(f"journal check {jumped}").out
        # What was booked of days that have not come yet is gone; today is booked again, once it is over.
        days = on_journal(jumped, lambda journal: journal.days())
        assert NOW // DAY <= max(day.day for day in days) <= NOW // DAY + 1
        assert [day.booked for day in sorted(days)][-1] is False
        assert rollmuxd(f"journal compact --state-dir {jumped}").code == 0


def test_a_time_from_which_on_all_was_compacted_away_is_refused_and_nothing_is_changed(rollmuxd, tmp_path):
    async def write(journal):
        for number, day in enumerate((9, 8, 7, 6, 5, 0), 1):
            await journal.append([(number, Audited(NOW - day * DAY, "drain_node", "ann"))])

    on_journal(tmp_path / "state", write)
    assert rollmuxd(f"journal compact --keep-days 2 --state-dir {tmp_path}/state --json").json["cut"] > 0
    ran = rollmuxd(
        f"journal restore {tmp_path}/state/journal.sqlite3 --before {when(NOW - 7 * DAY)} --state-dir {tmp_path}/state"
    )
    assert ran.code == 1
    assert "the facts before that time were compacted away" in ran.err
    assert "to 6" in rollmuxd(f"journal check {tmp_path}/state").out


def test_what_is_no_time_is_said(rollmuxd, state_dir):
    ran = rollmuxd(f"journal restore {state_dir}/journal.sqlite3 --before tomorrow --state-dir {state_dir}")
    assert ran.code == 1
    assert "'tomorrow' is no time; give one like" in ran.err
