"""``rollmuxd journal``: what people and scripts are told. (What it does: tests/daemon/test_journal_backup.py.)"""

import asyncio
import json
import os
import pty
import sqlite3
import subprocess
import sys
from contextlib import closing, suppress

import forked
import pytest

from rollmuxd.core.facts import HostAdded
from rollmuxd.core.inputs import HostSpec
from rollmuxd.daemon.journal.store import Journal


@pytest.fixture
def state_dir(tmp_path):
    async def write():
        journal = Journal.open(tmp_path / "state")
        for number in (1, 2, 3):
            await journal.append([(number, HostAdded(at=number, host=HostSpec(f"h{number}", "fake", 0)))])
        await journal.close()

    asyncio.run(write())
    return tmp_path / "state"


def damage(path):
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("UPDATE facts SET body = replace(body, 'fake', 'sham') WHERE seq = 2")


def test_a_check_says_in_one_line_how_it_is_and_in_its_exit_status(rollmuxd, state_dir):
    good = rollmuxd(f"journal check --state-dir {state_dir}")
    assert (good.code, len(good.lines)) == (0, 1)
    assert "good" in good.out
    assert "facts 1 to 3" in good.out
    damage(state_dir / "journal.sqlite3")
    bad = rollmuxd(f"journal check {state_dir}")
    assert (bad.code, len(bad.lines)) == (1, 1)
    assert "DAMAGED: fact 2 is damaged" in bad.out


def test_on_a_terminal_a_check_and_a_backup_say_what_takes_long(state_dir, tmp_path):
    for command in (f"check {state_dir}", f"backup {tmp_path}/copy --state-dir {state_dir}"):
        ours, theirs = pty.openpty()
        with os.fdopen(theirs, "wb") as terminal:
            ran = forked.run(
                [sys.executable, "-m", "rollmuxd", "journal", *command.split()],
                stdout=subprocess.PIPE, stderr=terminal, env={**os.environ, "TERM": "xterm", "HOME": str(tmp_path)},
            )  # fmt: skip
        told = b""
        with suppress(OSError), os.fdopen(ours, "rb", buffering=0) as terminal:  # its end is an error
            while some := terminal.read(65536):
                told += some
        assert ran.returncode == 0
        assert b"checking" not in ran.stdout  # scripts read that
        assert b"checking" in told


def test_a_check_answers_scripts_in_json_with_the_same_status(rollmuxd, state_dir):
    good = rollmuxd(f"journal check {state_dir}/journal.sqlite3 --json")
    assert (good.code, good.json["good"], good.json["last"], good.json["wrong"]) == (0, True, 3, [])
    damage(state_dir / "journal.sqlite3")
    bad = rollmuxd(f"journal check {state_dir}/journal.sqlite3 --json")
    assert (bad.code, bad.json["good"]) == (1, False)


def test_a_backup_is_made_checked_and_restored_by_three_commands(rollmuxd, state_dir, tmp_path):
    assert rollmuxd(f"journal backup {tmp_path}/kept --state-dir {state_dir}").code == 0
    assert rollmuxd(f"journal check {tmp_path}/kept").code == 0
    ran = rollmuxd(f"journal restore {tmp_path}/kept --state-dir {state_dir}")
    assert ran.code == 0
    assert "ends at fact 3" in ran.out
    assert "rollmuxd daemon start" in ran.out
    again = rollmuxd(f"journal restore {tmp_path}/kept --state-dir {state_dir} --json")
    assert json.loads(again.out)["last"] == 3


def test_what_cannot_be_done_is_one_line_with_what_to_do(rollmuxd, state_dir, tmp_path):
    for command, said in (
        (f"journal check {tmp_path}/nothing", "there is no such file; name a journal"),
        (f"journal backup {tmp_path}/kept --state-dir {tmp_path}/nowhere", "there is no journal"),
        (f"journal restore {tmp_path}/nothing --state-dir {state_dir}", "there is no such file"),
    ):
        ran = rollmuxd(command)
        assert (ran.code, ran.out, len(ran.err.splitlines())) == (1, "", 1), command
        assert said in ran.err


def test_a_restore_beside_a_running_daemon_says_how_to_stop_it(rollmuxd, state_dir, tmp_path):
    assert rollmuxd(f"journal backup {tmp_path}/kept --state-dir {state_dir}").code == 0

    async def held():
        journal = Journal.open(state_dir)
        try:
            return rollmuxd(f"journal restore {tmp_path}/kept --state-dir {state_dir}")
        finally:
            await journal.close()

    ran = asyncio.run(held())
    assert ran.code == 1
    assert f"pid {os.getpid()}; stop it (rollmuxd daemon stop)" in ran.err


def test_the_state_directory_comes_from_the_settings(rollmuxd, state_dir, tmp_path):
    (tmp_path / "rollmux.toml").write_text(f'[daemon]\nstate_dir = "{state_dir}"\n')
    assert "facts 1 to 3" in rollmuxd(f"journal check --config {tmp_path}/rollmux.toml").out
    ran = rollmuxd(f"journal check --config {tmp_path}/missing.toml")
    assert ran.code == 1
    assert "there is no such file" in ran.err
