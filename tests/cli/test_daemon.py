"""``rollmuxd daemon`` finds the daemon it is to talk about, and no other process that happens to have its pid."""

import asyncio
import errno
import fcntl
import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from patience import PATIENCE_S

from rollmuxd.cli import daemon
from rollmuxd.cli.processes import started
from rollmuxd.core.facts import HostAdded
from rollmuxd.core.inputs import HostSpec
from rollmuxd.daemon.journal.store import Journal


@pytest.fixture
def state_dir(tmp_path):
    return tmp_path / "state"


@pytest.fixture
def config(tmp_path, state_dir):
    file = tmp_path / "rollmux.toml"
    file.write_text(f"[daemon]\nstate_dir = {json.dumps(str(state_dir))}\nlisten = ''\n")
    return file


@pytest.fixture
def daemon_of(request):
    """The table of answers; ``daemon`` is the module here."""
    return request.getfixturevalue("daemon")


@pytest.fixture
def process():
    """Starts processes that do nothing."""
    children = []

    def start(stderr=subprocess.PIPE):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], stderr=stderr)
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.wait()
        if child.stderr is not None:
            child.stderr.close()


def said(state_dir, pid, **more):
    """What the process with this pid would write as a daemon."""
    state_dir.mkdir(exist_ok=True)
    text = {"pid": pid, "started": started(pid), "url": "", "socket": "/tmp/x.sock", **more}
    (state_dir / "daemon.json").write_text(json.dumps(text))


def test_without_its_file_there_is_no_daemon(state_dir):
    assert daemon.find(state_dir) is None


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"pid": null}', "nonsense"])
def test_a_file_that_says_nothing_is_no_daemon(state_dir, text):
    state_dir.mkdir()
    (state_dir / "daemon.json").write_text(text)

    assert daemon.find(state_dir) is None


def test_a_pid_that_another_process_has_by_now_is_no_daemon(state_dir, process):
    """Also where the later process has rollmuxd in its command line, as everything has in a folder of that name."""
    said(state_dir, process().pid, started="1")

    assert daemon.find(state_dir) is None


def test_a_pid_of_nobody_is_no_daemon(state_dir, process):
    child = process()
    said(state_dir, child.pid)
    child.kill()
    child.wait()

    assert daemon.find(state_dir) is None


def test_a_daemon_is_found_by_what_it_wrote(state_dir, process):
    child = process()
    said(state_dir, child.pid, url="http://127.0.0.1:7878")

    found = daemon.find(state_dir)

    assert found == daemon.Ready(child.pid, started(child.pid), "http://127.0.0.1:7878", "/tmp/x.sock")


@pytest.mark.parametrize("command", ["status", "stop"])
def test_where_none_runs_the_exit_status_is_3(rollmuxd, config, state_dir, command):
    ran = rollmuxd(f"daemon {command} --config {config}")

    assert ran.code == 3
    assert str(state_dir) in ran.err


def test_where_commands_use_another_daemon_status_does_not_ask_for_a_second_on_its_gpus(rollmuxd, config, monkeypatch):
    monkeypatch.setenv("ROLLMUX_URL", "unix:///run/other.sock")

    ran = rollmuxd(f"daemon status --config {config}")

    assert ran.code == 3
    assert "commands and jobs here use another, at unix:///run/other.sock" in ran.err
    assert "daemon start" not in ran.err


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # httpcore leaves the socket to be collected
def test_the_log_that_is_named_is_the_one_that_the_daemon_writes(rollmuxd, config, state_dir, process, tmp_path):
    with (tmp_path / "its.log").open("w") as log:
        said(state_dir, process(log).pid, socket=str(state_dir / "nobody.sock"))
    assert str(tmp_path / "its.log") in rollmuxd(f"daemon status --config {config}").err
    said(state_dir, process().pid, socket=str(state_dir / "nobody.sock"))
    assert "journalctl -u rollmuxd" in rollmuxd(f"daemon status --config {config}").err


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # httpcore leaves the socket to be collected
def test_a_daemon_that_does_not_answer_is_not_ready(rollmuxd, config, state_dir, process):
    said(state_dir, process().pid, socket=str(state_dir / "nobody.sock"))

    ran = rollmuxd(f"daemon status --config {config}")

    assert ran.code == 1
    assert "not ready" in ran.out
    assert "see its log" in ran.err


@pytest.mark.parametrize("amiss", ["", "it could not be looked after"])
def test_what_a_ready_daemon_says_of_its_journal_is_shown(rollmuxd, config, state_dir, process, amiss, monkeypatch):
    monkeypatch.setenv("ROLLMUX_API_KEY_FILE", "/nowhere")  # no key is needed for it
    path = state_dir / "it.sock"
    said(state_dir, process().pid, socket=str(path))
    body = json.dumps({"status": "ready", "reason": amiss}).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as there:
        there.bind(str(path))
        there.listen()

        def answer():
            for _ in range(2):
                asked, _ = there.accept()
                with asked:
                    asked.recv(1000)
                    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body)
                    for part in (head[:20], head[20:], body[:5], body[5:]):
                        asked.sendall(part)

        threading.Thread(target=answer, daemon=True).start()
        ran = rollmuxd(f"daemon status --config {config}")
        told = json.loads(rollmuxd(f"daemon status --config {config} --json").out)

    assert ran.code == 0
    assert amiss in ran.out
    assert ("\njournal" in ran.out) == bool(amiss)
    assert told.get("journal", "") == amiss


def test_a_second_daemon_on_the_same_state_is_refused(rollmuxd, config, state_dir, process):
    child = process()
    said(state_dir, child.pid)

    ran = rollmuxd(f"daemon start --config {config}")

    assert ran.code == 1
    assert f"runs already, pid {child.pid}" in ran.err


def test_a_typo_in_the_configuration_is_one_line_and_1(rollmuxd, tmp_path):
    file = tmp_path / "rollmux.toml"
    file.write_text("[daemon]\nstatedir = '/tmp/x'\n")

    ran = rollmuxd(f"daemon status --config {file}")

    assert ran.code == 1
    assert "did you mean state_dir?" in ran.err
    assert ran.err.count("\n") == 1


def test_a_configuration_that_is_not_there_is_named(rollmuxd, tmp_path):
    ran = rollmuxd(f"daemon start --config {tmp_path}/no.toml")

    assert ran.code == 1
    assert "no.toml" in ran.err


@pytest.fixture
def instead(tmp_path, state_dir, monkeypatch):
    """Runs a program where ``start`` would run a daemon."""

    def run(program):
        script = tmp_path / "rollmuxd"
        begins = "import json, os, pathlib, signal, socket, time"
        script.write_text(f"#!{sys.executable}\n{begins}\nstate = pathlib.Path({str(state_dir)!r})\n{program}\n")
        script.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(script))

    return run


BECOMES_READY = """
os.chdir(state)
with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as there:
    there.bind("it.sock")
    there.listen()
    said = {"pid": os.getpid(), "url": None, "socket": str(state / "it.sock")}
    said["started"] = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    (state / "daemon.json").write_text(json.dumps(said))
    asked, _ = there.accept()
    asked.recv(1000)
    asked.sendall(b"HTTP/1.1 200 OK\\r\\n\\r\\n{}")
"""


def test_a_start_that_takes_long_is_waited_for_and_says_so(rollmuxd, config, state_dir, instead, monkeypatch):
    """The program is ready once the command has found that it is not, after 50 s."""
    instead('while not (state / "late").exists():\n    time.sleep(0.01)' + BECOMES_READY)
    late, monotonic, waitpid = state_dir / "late", time.monotonic, daemon.os.waitpid
    monkeypatch.setattr(daemon.os, "waitpid", lambda *of: (late.touch(), waitpid(*of))[1])
    monkeypatch.setattr(daemon.time, "monotonic", lambda: monotonic() + 50 * late.exists())

    ran = rollmuxd(f"daemon start --config {config} --json")

    assert ran.code == 0, ran.err
    assert ran.json["status"] == "ready"
    assert ran.err.startswith(f"the daemon, pid {ran.json['pid']}, still starts; Ctrl-C stops waiting")


@pytest.mark.parametrize(
    ("url", "hints"),
    [
        (None, True),
        ("unix://{}", False),
        ("unix:///elsewhere/rollmux.sock", True),
        ("http://box:7878", False),
        ("http://box:9", True),
    ],
)
def test_a_start_says_what_to_export_unless_it_is_exported_already(
    rollmuxd, config, state_dir, instead, monkeypatch, url, hints
):
    instead(BECOMES_READY.replace('"url": None', '"url": "http://0.0.0.0:7878"'))
    monkeypatch.delenv("ROLLMUX_URL", raising=False)
    if url is not None:
        monkeypatch.setenv("ROLLMUX_URL", url.format(state_dir / "it.sock"))

    ran = rollmuxd(f"daemon start --config {config}")

    assert ran.code == 0, ran.err
    assert (f"so: export ROLLMUX_URL=unix://{state_dir}/it.sock" in ran.err) is hints


ENDS = 'os.write(2, b"rollmuxd: the port is taken\\n")\nraise SystemExit(75)'


@pytest.mark.parametrize("before", ["", "rollmuxd: of yesterday\n" * 9])
def test_the_last_line_of_a_daemon_that_ended_is_printed(rollmuxd, config, state_dir, instead, before):
    state_dir.mkdir()
    (state_dir / "daemon.log").write_text(before)
    instead(ENDS)

    ran = rollmuxd(f"daemon start --config {config}")

    assert ran.code == 1
    assert f"the daemon ended with status 75: the port is taken (log: {state_dir}/daemon.log)" in ran.err


def test_what_the_daemon_before_has_said_is_not_taken_for_the_word_of_one_that_said_nothing(
    rollmuxd, config, state_dir, instead
):
    state_dir.mkdir()
    (state_dir / "daemon.log").write_text("rollmuxd: of yesterday\n")
    instead("raise SystemExit(75)")

    assert "the daemon ended with status 75: it said nothing" in rollmuxd(f"daemon start --config {config}").err


def test_a_daemon_that_could_say_nothing_on_a_full_disk_is_not_said_to_be_silent(
    rollmuxd, config, state_dir, instead, monkeypatch
):
    instead("raise SystemExit(75)")
    opened = Path.open

    def full(path, mode="r", *more, **named):
        if mode == "ab":
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(path, mode, *more, **named)

    monkeypatch.setattr(Path, "open", full)

    said = f"status 75: its log cannot be written (No space left on device); make room there (log: {state_dir}"
    assert said in rollmuxd(f"daemon start --config {config}").err


@pytest.mark.e2e
def test_a_daemon_ends_with_its_status_though_nothing_can_be_written_to_its_log(config, state_dir):
    """With 1 no systemd would try again."""
    state_dir.mkdir()
    with (state_dir / "lock").open("w") as held, open("/dev/full", "w") as full:
        fcntl.flock(held, fcntl.LOCK_EX)
        words = [sys.executable, "-m", "rollmuxd", "daemon", "run", "--config", str(config)]
        assert subprocess.run(words, stderr=full, timeout=PATIENCE_S, check=False).returncode == 75


@pytest.mark.e2e
def test_a_start_with_a_clock_that_is_far_behind_is_refused_until_it_is_accepted(
    rollmuxd, config, state_dir, monkeypatch
):
    monkeypatch.setattr(daemon, "STOP_S", PATIENCE_S)

    async def write():
        journal = Journal.open(state_dir)
        await journal.append([(1, HostAdded(round(time.time() * 1000) + 60 * 86_400_000, HostSpec("h", "fake", 0)))])
        await journal.close()

    asyncio.run(write())
    refused = rollmuxd(f"daemon start --config {config}")
    assert (refused.code, "give --accept-clock" in refused.err) == (1, True)
    try:
        assert "ready" in rollmuxd(f"daemon start --config {config} --accept-clock").out
    finally:
        assert rollmuxd(f"daemon stop --config {config}").code == 0


def test_a_state_directory_that_cannot_be_made_is_answered_in_one_line(rollmuxd, config, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ROLLMUX_DAEMON__STATE_DIR", str(tmp_path / "file" / "state"))
    ran = rollmuxd(f"daemon start --config {config}")
    assert ran.code == 1
    assert f"{tmp_path}/file/state cannot be made: Not a directory; set daemon.state_dir to a" in ran.err


@pytest.mark.e2e
def test_a_daemon_starts_answers_and_stops(rollmuxd, config, state_dir, monkeypatch):
    pytest.importorskip("rollmuxd.daemon.app")
    monkeypatch.setattr(daemon, "STOP_S", PATIENCE_S)
    started = rollmuxd(f"daemon start --config {config} --json")
    try:
        status = rollmuxd(f"daemon status --config {config} --json")
        jobs = rollmuxd(f"job list --url unix://{started.json['socket']}")
        again = rollmuxd(f"daemon start --config {config}")
    finally:
        stopped = rollmuxd(f"daemon stop --config {config}")
    after = rollmuxd(f"daemon status --config {config}")

    assert (started.code, started.json["status"]) == (0, "ready")
    assert status.json == started.json
    assert (jobs.code, jobs.out) == (0, "no jobs\n")
    assert again.code == 1
    assert stopped.code == 0
    assert "jobs keep the slots that they hold" in stopped.err
    assert "rollmuxd daemon stop --for-good lets them run alone" in stopped.err
    assert after.code == 3
    assert Path(started.json["socket"]).exists()
    assert rollmuxd(f"daemon stop --for-good --config {config}").code == 0
    assert not Path(started.json["socket"]).exists()


@pytest.mark.parametrize("role", ["admin", "viewer"])
def test_a_link_to_the_dashboard_logs_an_admin_in_and_tells_others_how(rollmuxd, daemon_of, config, monkeypatch, role):
    running = daemon.Ready(1, "7", "http://127.0.0.1:7878", "/nowhere")
    monkeypatch.setattr("rollmuxd.cli.dashboard.find", lambda state_dir: running)
    me = {"owner": "vision", "user": "ada", "role": role}
    daemon_of["GET /v1/me"] = me
    daemon_of["POST /v1/keys"] = {"secret": "rmx_1_s", "expires_at": "2025-06-02T00:00:00Z"}

    ran = rollmuxd(f"dashboard --config {config}")

    made = [(path, sent) for method, path, sent in daemon_of.asked if method == "POST"]
    if role == "admin":
        assert ran.out == "http://127.0.0.1:7878/#key=rmx_1_s\n"
        assert made == [("/v1/keys", {**me, "expires_s": 12 * 3600})]
    else:
        assert (ran.out, made) == ("http://127.0.0.1:7878/\n", [])
        assert "log in with the key of vision/ada" in ran.err


@pytest.mark.e2e
def test_a_daemon_that_cannot_start_says_why(rollmuxd, config, state_dir, monkeypatch):
    pytest.importorskip("rollmuxd.daemon.app")
    config.write_text(
        config.read_text() + '[[hosts]]\nid = "a"\nbackend = "nope"\nnodes = [{gpus = 0, pools = ["x"]}]\n'
    )

    ran = rollmuxd(f"daemon start --config {config}")

    assert ran.code == 1
    assert "nope" in ran.err
