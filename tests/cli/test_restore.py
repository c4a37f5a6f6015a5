"""``rollmuxd journal restore``: which API keys open nothing afterwards."""

import asyncio
import time

import pytest

from rollmuxd.core.facts import HostAdded
from rollmuxd.core.inputs import HostSpec
from rollmuxd.daemon.access.keys import Role, new_key, why_shut
from rollmuxd.daemon.journal.store import Journal

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


def test_a_key_that_was_revoked_since_the_backup_stays_so(rollmuxd, state_dir, tmp_path):
    kept, leaked = add(state_dir, "ann", Role.ADMIN), add(state_dir, "bob")
    old, late = add(state_dir, "cid"), add(state_dir, "dan", expires_at=NOW - 1)
    revoke(state_dir, old)
    assert rollmuxd(f"journal backup {tmp_path}/kept --state-dir {state_dir}").code == 0
    revoke(state_dir, leaked)
    ran = rollmuxd(f"journal restore {tmp_path}/kept --state-dir {state_dir}")
    assert "not known" not in ran.out
    assert shut(state_dir) == {kept: "", leaked: "was revoked", old: "was revoked", late: "has expired"}


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
    said = "which API keys were revoked since is not known: see `rollmuxd key list`, and revoke them again"
    assert said in ran.lines
