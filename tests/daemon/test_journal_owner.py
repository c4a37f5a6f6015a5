"""Whose files are: root may look after the journal of a daemon that runs as somebody else, and that still starts."""

import os
import pwd
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree

import pytest

from rollmuxd.core.facts import HostAdded
from rollmuxd.core.inputs import HostSpec
from rollmuxd.daemon.journal.backup import backup, restore
from rollmuxd.daemon.journal.file import JournalRefused
from rollmuxd.daemon.journal.store import Journal

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file somebody else's"),
]
#: a user that there is everywhere, and whose group has another number
USER, GROUP = pwd.getpwnam("nobody").pw_uid, 12_345
NOW = int(time.time() * 1000)


@contextmanager
def run_by(uid):
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def place():
    """A folder that every user may enter, which those of pytest are not."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    (folder / "state").mkdir(mode=0o700)
    os.chown(folder / "state", USER, GROUP)
    yield folder
    rmtree(folder)


async def written(place, last):
    with run_by(USER):
        journal = Journal.open(place / "state")
        for number in range(journal.first + len(await journal.read(0, 100)), last + 1):
            await journal.append([(number, HostAdded(at=NOW + number, host=HostSpec(f"h{number}", "fake", 0)))])
        await journal.close()


def owners(place):
    return {(path.stat().st_uid, path.stat().st_gid) for path in (place / "state").rglob("*")}


async def test_what_root_has_restored_is_the_daemons(place):
    await written(place, 4)
    backup(place / "state" / "journal.sqlite3", place / "kept")
    (place / "state" / "lock").unlink()
    done = restore(place / "kept", place / "state")
    assert {path.stat().st_gid for path in (place / "state").iterdir() if path.name != "reserve"} == {GROUP}
    assert {uid for uid, _ in owners(place)} == {USER}
    await written(place, 6)
    with run_by(USER):
        assert (Path(done.kept) / "journal.sqlite3").read_bytes()


@pytest.mark.parametrize("file", ["journal.sqlite3", "journal.sqlite3-wal", "journal.sqlite3-shm", "lock", "mark"])
async def test_a_file_that_is_roots_is_named_with_what_to_do(place, file):
    await written(place, 4)
    (place / "state" / file).touch()  # a log is there only after a kill
    os.chown(place / "state" / file, 0, 0)
    (place / "state" / file).chmod(0o600)
    with run_by(USER), pytest.raises(JournalRefused) as raised:
        Journal.open(place / "state")
    said = str(raised.value)
    assert f"{place}/state/{file} is closed to this user (uid {USER})" in said
    assert f"as root: chown -R --reference={place}/state {place}/state" in said


async def test_a_directory_of_somebody_else_says_whose_it_is(place):
    os.chown(place / "state", 0, 0)
    with (
        run_by(USER),
        pytest.raises(JournalRefused, match=f"is closed to this user .uid {USER}.: run this as the user whose"),
    ):
        Journal.open(place / "state")
