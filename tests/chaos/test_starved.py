"""A machine that runs out of something, or whose clock is set: the daemon says so, keeps what is held, and recovers."""

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from patience import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FAULTY = Path(__file__).parents[1] / "shared" / "faulty_mock.py"
NEWCOMER = {"name": "late", "phases": [{"name": "rollout", "pools": ["rollout"]}], "wants": {"rollout": {}}}


# ---- descriptors -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def callers(path, number):
    """So many connections that say nothing."""
    with contextlib.ExitStack() as stack:
        for _ in range(number):
            one = stack.enter_context(socket.socket(socket.AF_UNIX))
            one.settimeout(5)
            one.connect(str(path))
        yield


def test_without_descriptors_it_says_so_holders_keep_what_they_hold_and_it_recovers(live):
    daemon = live.daemon()
    a = live.holder("a")
    b, asked = live.waiter("b")
    before = daemon.last_seq()
    limits = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    open_now = len(os.listdir(f"/proc/{daemon.pid}/fd"))

    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (open_now + 2, limits[1]))
    with callers(daemon.socket, 30):
        live.until("it says so", lambda: "Too many open files" in daemon.log.read_text())
        assert daemon.process.poll() is None
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, limits)

    a.do("leave")
    assert "error" not in b.answer(asked)
    b.do("leave")
    assert [
        fact for fact in daemon.facts(after=before) if fact["fact"] in {"slot_taken_away", "session_lost", "job_lost"}
    ] == []
    live.until("all nodes are up", lambda: all(node["status"] == "up" for node in daemon.get("/v1/nodes")["items"]))
    live.until("the callers are forgotten", lambda: len(os.listdir(f"/proc/{daemon.pid}/fd")) <= open_now + 6)


FEW = """
[daemon]
listen = "127.0.0.1:0"
state_dir = "{folder}/state"
[tls]
mode = "{tls}"
"""


@pytest.mark.parametrize("tls", ["on", "off"])
def test_who_floods_the_port_keeps_nobody_from_the_unix_socket_and_fills_no_log(tmp_path, tls):
    (tmp_path / "rollmux.toml").write_text(FEW.format(tls=tls, folder=tmp_path))
    log, told = tmp_path / "log", tmp_path / "state" / "daemon.json"
    with log.open("wb") as to:
        daemon = subprocess.Popen(
            ["sh", "-c", 'ulimit -n 256 && exec "$0" -m rollmuxd daemon run --config rollmux.toml', sys.executable],
            cwd=tmp_path,
            stdout=to,
            stderr=to,
        )
    try:
        give_up = time.monotonic() + PATIENCE_S
        while not told.exists():
            assert daemon.poll() is None, log.read_text()
            assert time.monotonic() < give_up
            time.sleep(0.05)
        ready = json.loads(told.read_text())
        host, _, port = ready["url"].rpartition("/")[2].rpartition(":")
        said = log.stat().st_size
        with contextlib.ExitStack() as stack:
            for _ in range(1000):
                one = stack.enter_context(socket.socket())
                one.setblocking(False)
                one.connect_ex((host, int(port)))
            for _ in range(5):
                with httpx.Client(transport=httpx.HTTPTransport(uds=ready["socket"]), timeout=PATIENCE_S) as operator:
                    assert operator.get("http://localhost/v1/jobs").status_code == 200
                assert len(os.listdir(f"/proc/{daemon.pid}/fd")) < 200
                time.sleep(0.2)
        assert log.stat().st_size - said < 1_000
    finally:
        daemon.kill()
        daemon.wait()


# ---- the clock -------------------------------------------------------------------------------------------------------

#: Python runs this before the daemon: wall time is what a file says, beside the machine's.
SET_CLOCK = """
import os
import time
from pathlib import Path

_real, _file = time.time, Path({file!r})


def _wall():
    try:
        return _real() + float(_file.read_text() or 0)
    except (OSError, ValueError):
        return _real()


time.time = _wall
time.time_ns = lambda: int(_wall() * 1e9)
_file.with_name(f"pid-{{os.getpid()}}").touch()
"""


@pytest.fixture
def wall(tmp_path, monkeypatch):
    """Sets the wall clock of daemons that are started from now on, also while they run: seconds beside the real one."""
    folder = tmp_path / "clock"
    folder.mkdir()
    file = folder / "offset"
    (folder / "sitecustomize.py").write_text(SET_CLOCK.format(file=str(file)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")])))

    def set_to(offset, daemon=None):
        assert daemon is None or (folder / f"pid-{daemon.pid}").exists(), "nobody's clock would be set"
        file.with_suffix(".new").write_text(str(offset))
        file.with_suffix(".new").replace(file)

    set_to(0)
    return set_to


@pytest.mark.parametrize("offset", [-7200, 7200, 10 * 365 * 86400], ids=["back", "ahead", "ten years ahead"])
def test_a_clock_that_is_set_while_it_runs_moves_no_lease(live, wall, offset):
    daemon = live.daemon()
    a = live.holder("a")
    b, asked = live.waiter("b")

    wall(offset, daemon)
    time.sleep(live.lease_s + 0.5)  # a lease goes by

    assert daemon.facts("session_lost", "slot_taken_away", "job_lost") == []
    # (Its loop may have been late by a second or two: this machine is busy.)
    assert [fact for fact in daemon.facts("loop_stalled") if fact["late_ms"] > 60_000] == []
    a.do("leave")
    b.answer(asked)
    # Death is noticed as soon as ever.
    b.kill()
    killed = time.monotonic()
    daemon.renew("b")
    live.until("it is lost", lambda: daemon.facts("job_lost"))
    took = time.monotonic() - killed
    late, late_s = daemon.loop_late_s(0, float("inf"))
    assert live.lease_s - 0.02 <= took <= live.lease_s * (3 + late) + late_s + live.slack_s
    assert in_order(daemon)


@pytest.mark.parametrize("offset", [-7200, 7200], ids=["back", "ahead"])
def test_a_clock_that_is_set_while_the_daemon_is_away_costs_nobody_a_slot(live, wall, offset):
    daemon = live.daemon()
    a = live.holder("a")
    b, asked = live.waiter("b")

    daemon.kill9()
    wall(offset, daemon)
    daemon.restart()
    time.sleep(live.lease_s + 0.5)  # a lease goes by

    assert daemon.facts("session_lost", "slot_taken_away", "job_lost") == []
    a.do("leave")
    b.answer(asked)
    b.kill()
    live.until("its death is noticed", lambda: daemon.facts("job_lost"))
    assert in_order(daemon)


def in_order(daemon):
    at = [fact["at"] for fact in daemon.facts()]
    return at == sorted(at)


# ---- the disk --------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 40 MB, for the state directory; and what fills it to its last byte."""
    state = tmp_path / "state"
    state.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=40m,mode=700", "small", str(state)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted here ({mounted.stderr.strip()})")
    try:
        yield state
    finally:
        subprocess.run(["umount", "-l", str(state)], check=True)


def fill(folder):
    """Take all the room that there is."""
    with (folder / "ballast").open("wb", buffering=0) as ballast:
        for size in (1_000_000, 4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    ballast.write(b"x" * size)


def test_on_a_full_disk_newcomers_are_refused_and_what_is_held_can_still_be_released(live, small_disk):
    daemon = live.daemon()
    a = live.holder("a")
    b, asked = live.waiter("b")
    before = daemon.last_seq()

    fill(small_disk)
    # Somebody else's release spends what is reserved, at the latest.
    a.do("leave")
    b.answer(asked)
    fill(small_disk)  # the reserve that was given up is not all for us
    refused = live.until(
        "it refuses newcomers",
        lambda: (answer := daemon.call("POST", "/v1/jobs", NEWCOMER)).status_code == 503 and answer,
    )
    assert refused.headers["content-type"] == "application/problem+json"
    assert "full" in refused.json()["detail"]
    assert b.process.poll() is None

    (small_disk / "ballast").unlink()
    b.do("leave")
    live.until("newcomers are let in", lambda: daemon.call("POST", "/v1/jobs", NEWCOMER).status_code == 201)
    assert daemon.facts("slot_taken_away", "session_lost", after=before) == []
    assert (small_disk / "reserve").stat().st_size > 0


def test_killed_on_a_full_disk_it_starts_again_with_all_that_was_acknowledged(live, small_disk):
    daemon = live.daemon()
    a = live.holder("a")
    fill(small_disk)
    a.do("leave")
    acknowledged = daemon.last_seq()

    daemon.kill9()
    (small_disk / "ballast").unlink()
    daemon.restart()

    assert daemon.last_seq() > acknowledged
    assert daemon.facts("slot_released", slot=a.happened("granted")[0]["slot"])
    a.do("enter", phase="train")
    a.do("leave")


def test_a_state_directory_that_cannot_be_written_is_said_at_the_start(live, small_disk):
    daemon = live.daemon()
    daemon.stop()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)

    ended = subprocess.run(
        [sys.executable, FAULTY, "daemon", "run", "--config", str(daemon.folder / "rollmux.toml")],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=daemon.folder,
    )

    assert ended.returncode == 75  # systemd tries again
    assert f"{small_disk}/journal.sqlite3 cannot be used now" in ended.stderr
    assert "Read-only" in ended.stderr
    assert "Traceback" not in ended.stderr
    # And with the disk as it was, all is as it was.
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    daemon.restart()
    assert daemon.facts("daemon_started")


def test_files_that_may_not_grow_are_answered_with_503_and_holders_keep_what_they_hold(live):
    daemon = live.daemon()
    a = live.holder("a")
    before = daemon.last_seq()
    unlimited = resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE)

    resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (0, unlimited[1]))
    live.until("it refuses", lambda: daemon.call("POST", "/v1/jobs", NEWCOMER).status_code == 503)
    time.sleep(live.lease_s + 1.0)  # longer than a lease, in which nobody can be written down as lost
    assert daemon.process.poll() is None
    resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, unlimited)

    a.do("leave")
    assert daemon.facts("slot_taken_away", "session_lost", "job_lost", after=before) == []
    live.until("it takes newcomers", lambda: daemon.call("POST", "/v1/jobs", NEWCOMER).status_code == 201)
