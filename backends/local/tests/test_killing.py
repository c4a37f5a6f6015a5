"""Which process is a lost job's, only its client has said: what vouches for it on the host."""

import os
import pwd
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from patience import PATIENCE_S

from rollmuxd.spi import HostConfig
from rollmuxd.spi.environment import INHERITED
from rollmuxd_backend_local import LocalBackend
from rollmuxd_backend_local.onhost import processes

SELF = pwd.getpwuid(os.getuid()).pw_name
OTHERS = "nobody"


@pytest.fixture
def begun():
    """A function that starts a process of a user."""
    processes = []

    def begin(*argv, login=SELF):
        if login != SELF and os.geteuid() != 0:
            pytest.skip("only root can start processes as somebody else")
        user = None if login == SELF else login
        process = subprocess.Popen(argv or ("sleep", "600"), user=user, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        return process

    yield begin
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def stat_of(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return "Z"


def lives(pid):
    return stat_of(pid)[0] not in "ZX"


def until(true, limit_s=PATIENCE_S):
    give_up = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < give_up
        time.sleep(0.01)


@pytest.fixture
def daemon(tmp_path):
    """The name by which a daemon knows what it has started."""
    name = f"test-{os.getpid()}-{tmp_path.name}"
    yield name
    for launch in {one.launch for one in processes.launched(name)}:
        processes.stop(name, launch)


async def kill(process, owner, *, job="j1", **options):
    backend = await LocalBackend.open([HostConfig(id="box", options=options)], {})
    return await backend.kill("box", process.pid, stat_of(process.pid)[19], job, owner)


@pytest.mark.asyncio
@pytest.mark.parametrize("owner_of_it", [SELF, "team", OTHERS])
async def test_without_owns_sessions_no_process_is_ended_that_was_not_started_here(begun, owner_of_it):
    process = begun()
    assert not await kill(process, owner_of_it)
    assert not await kill(process, owner_of_it, users={owner_of_it: SELF})
    assert lives(process.pid)


@pytest.mark.asyncio
async def test_an_owner_stands_for_the_login_of_its_name_and_for_no_other(begun):
    mine, theirs = begun(), begun(login=OTHERS)
    for owner_of_it in ("team", OTHERS, "", "root|" + SELF, str(os.getuid())):
        assert not await kill(mine, owner_of_it, owns_sessions=True)
    assert not await kill(theirs, SELF, owns_sessions=True), "not even where the daemon's user could"
    assert lives(mine.pid)
    assert lives(theirs.pid)
    assert await kill(mine, SELF, owns_sessions=True)
    assert await kill(theirs, OTHERS, owns_sessions=True)
    assert (mine.wait(), theirs.wait()) == (-signal.SIGKILL, -signal.SIGKILL)


@pytest.mark.asyncio
async def test_where_users_says_which_login_an_owner_stands_for_its_name_counts_no_more(begun):
    process = begun()
    assert not await kill(process, SELF, owns_sessions=True, users={"team": SELF})
    assert not await kill(process, "team", owns_sessions=True, users={"team": "no-such-user"})
    assert not await kill(process, "crew", owns_sessions=True, users={"team": SELF})
    assert lives(process.pid)
    assert await kill(process, "team", owns_sessions=True, users={"team": SELF})
    assert process.wait() == -signal.SIGKILL


def test_what_was_started_for_a_job_is_ended_for_that_job_only(daemon):
    order = {
        "launch": "l1",
        "job": "j1",
        "number": 1,
        "argv": ["sleep", "600"],
        "cwd": "",
        "env": {},
        "log": "",
        "user": "",
        "inherits": INHERITED,
    }
    told = processes.start(daemon, order)
    for login in ("", SELF):
        assert not processes.kill(daemon, told["pid"], told["started"], job="j2", login=login)
    assert lives(told["pid"])
    assert processes.kill(daemon, told["pid"], told["started"], job="j1", login="")
    until(lambda: not lives(told["pid"]))


@pytest.mark.asyncio
async def test_of_what_descends_from_it_others_processes_are_spared(begun):
    script = (
        "import subprocess, time;"
        "ours = subprocess.Popen(['sleep', '600']);"
        f"theirs = subprocess.Popen(['sleep', '600'], user={OTHERS!r});"
        "print(ours.pid, theirs.pid, flush=True); time.sleep(600)"
    )
    if os.geteuid() != 0:
        pytest.skip("only root can start processes as somebody else")
    parent = begun(sys.executable, "-c", script)
    ours, theirs = map(int, parent.stdout.readline().split())
    assert await kill(parent, SELF, owns_sessions=True)
    until(lambda: not lives(ours))
    assert lives(theirs)
    os.kill(theirs, signal.SIGKILL)


def test_nor_are_processes_of_another_jobs_launch_that_descend_from_it(daemon, begun):
    mark = "|".join(processes.mark_of(daemon, "j2", "1", "l1"))
    script = (
        "import os, subprocess, time;"
        f"theirs = subprocess.Popen(['sleep', '600'], env={{**os.environ, {processes.MARK!r}: {mark!r}}});"
        "print(theirs.pid, flush=True); time.sleep(600)"
    )
    parent = begun(sys.executable, "-c", script)
    theirs = int(parent.stdout.readline())
    until(lambda: theirs in {one.pid for one in processes.launched(daemon)})
    assert processes.kill(daemon, parent.pid, stat_of(parent.pid)[19], job="j1", login=SELF)
    parent.wait()
    assert lives(theirs)
