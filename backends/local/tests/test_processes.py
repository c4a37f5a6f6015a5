"""Jobs' processes: all of a job's are ended, and nobody else's, whatever they do to hide."""

import contextlib
import fcntl
import json
import os
import pwd
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from patience import PATIENCE_S

from rollmuxd.spi.environment import INHERITED
from rollmuxd_backend_local.asking import read_owner
from rollmuxd_backend_local.onhost import ask, machine, processes

SELF = pwd.getpwuid(os.getuid()).pw_name


@pytest.fixture
def owner(tmp_path):
    name = f"test-{os.getpid()}-{tmp_path.name}"
    yield name
    for launch in {one.launch for one in processes.launched(name)}:
        processes.stop(name, launch)


def order(*argv, launch="l1", number=1, log="", env=None):
    return {
        "launch": launch,
        "job": "j1",
        "number": number,
        "argv": argv,
        "cwd": "",
        "env": env or {},
        "log": log,
        "user": "",
        "inherits": INHERITED,
    }


def start(owner, told):
    """As it is done: from a process of its own."""
    script = (
        "import json, sys; from rollmuxd_backend_local.onhost import processes;"
        "print(json.dumps(processes.start(sys.argv[1], json.loads(sys.argv[2]))))"
    )
    ran = subprocess.run([sys.executable, "-c", script, owner, json.dumps(told)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def started_at(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def until(true, limit_s=PATIENCE_S):
    give_up = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def test_what_it_writes_is_in_its_log_and_its_environment_is_what_it_was_given(owner, tmp_path):
    log = tmp_path / "logs" / "l1.log"
    start(owner, order("sh", "-c", 'echo "$WHO"; echo oops >&2', log=str(log), env={"WHO": "ann"}))
    until(lambda: not processes.alive(owner, "l1"))
    assert log.read_text() == "ann\noops\n"
    assert log.parent.stat().st_mode & 0o777 == 0o700


def test_a_link_in_the_place_of_a_log_is_neither_written_nor_read(owner, tmp_path):
    (tmp_path / "secret").write_text("s3cret")
    (log := tmp_path / "l1.log").symlink_to(tmp_path / "secret")
    with pytest.raises(machine.Refused, match=r"l1\.log"):
        processes.start(owner, order("echo", "mine", log=str(log)))
    assert (tmp_path / "secret").read_text() == "s3cret"
    assert ask.answer({"ask": "output", "log": str(log), "after": 0, "limit": 100}) == {"said": {"data": "", "next": 0}}


SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "s3cret",
    "GOOGLE_APPLICATION_CREDENTIALS": "/s3cret",
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization=s3cret",
    "ROLLMUX_API_KEY": "s3cret",
    "HF_TOKEN": "s3cret",
    "https_proxy": "http://ann:s3cret@proxy:3128",
}


def test_a_job_inherits_what_it_needs_and_no_secret(owner, tmp_path, monkeypatch):
    kept = {"LC_TIME": "C", "NCCL_IB_HCA": "mlx5", "LD_LIBRARY_PATH": "/opt/lib", "http_proxy": "http://proxy:3128"}
    for name, value in {**SECRETS, **kept}.items():
        monkeypatch.setenv(name, value)
    log = tmp_path / "l1.log"
    start(owner, order("env", log=str(log), env={"HF_TOKEN": "given"}))
    until(lambda: not processes.alive(owner, "l1"))
    told = dict(line.split("=", 1) for line in log.read_text().splitlines())
    assert "s3cret" not in log.read_text()
    assert told["HF_TOKEN"] == "given"
    assert told.items() >= {**kept, "PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}.items()


def test_a_job_has_no_place_of_its_own_when_memory_is_short(owner, tmp_path):
    log = tmp_path / "l1.log"
    score = Path("/proc/self/oom_score_adj")
    before = score.read_text()
    score.write_text(str(max(int(before), 300)))
    try:
        start(owner, order("cat", "/proc/self/oom_score_adj", log=str(log)))
    finally:
        score.write_text(before)
    until(lambda: not processes.alive(owner, "l1"))
    assert log.read_text() == "0\n"


def test_an_owners_process_is_its_users(owner, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can start processes as somebody else")
    log = tmp_path / "l1.log"
    start(owner, {**order("sh", "-c", "id -un; id -G; echo $HOME $USER", log=str(log)), "user": "nobody", "cwd": "/"})
    until(lambda: not processes.alive(owner, "l1"))
    nobody = pwd.getpwnam("nobody")
    assert log.read_text().split() == ["nobody", str(nobody.pw_gid), nobody.pw_dir, "nobody"]
    with pytest.raises(machine.Refused, match="there is no user no-such-user"):
        processes.start(owner, {**order("true", launch="l2"), "user": "no-such-user"})


def test_who_is_not_root_becomes_nobody_else(owner, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1)
    monkeypatch.setattr(processes, "_one_at_a_time", contextlib.nullcontext)  # what it makes is not that user's
    with pytest.raises(machine.Refused, match="may not become another user"):
        processes.start(owner, {**order("true"), "user": "root"})


def test_a_child_that_throws_its_environment_away_is_ended_with_the_others(owner, tmp_path):
    told = order("sh", "-c", f"env -i sleep 600 & echo $! >{tmp_path}/pid; sleep 600")
    start(owner, told)
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    child = int((tmp_path / "pid").read_text())
    until(lambda: b"sleep" in Path(f"/proc/{child}/cmdline").read_bytes())
    assert processes.stop(owner, "l1")
    assert not lives(child)


def test_another_daemons_processes_are_not_ours(owner):
    told = start(owner, order("sleep", "600"))
    assert processes.launched(f"{owner}-other") == []
    assert not processes.stop(f"{owner}-other", "l1")
    assert not processes.kill(f"{owner}-other", told["pid"], told["started"], job="j1", login="")
    assert lives(told["pid"])
    assert processes.kill(owner, told["pid"], told["started"], job="j1", login="")
    until(lambda: not lives(told["pid"]))


def test_a_mark_that_was_made_up_after_ones_own_is_not_believed(owner):
    told = start(owner, order("sleep", "600"))
    env = dict(part.split("=", 1) for part in Path(f"/proc/{told['pid']}/environ").read_text().split("\0") if part)
    seal, *_ = env[processes.MARK].split("|")
    made_up = subprocess.Popen(["sleep", "600"], env={processes.MARK: f"{seal}|j2|7|l2"}, start_new_session=True)
    try:
        until(lambda: b"j2|7|l2" in Path(f"/proc/{made_up.pid}/environ").read_bytes())
        assert {one.launch for one in processes.launched(owner)} == {"l1"}
        assert not processes.alive(owner, "l2")
        assert not processes.kill(owner, made_up.pid, started_at(made_up.pid), job="j2", login="")
    finally:
        made_up.kill()
        made_up.wait()


def test_killing_a_session_ends_its_descendants_too():
    script = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    began = started_at(parent.pid)
    assert not processes.kill("nobody", parent.pid, began, job="j1", login="")
    assert not processes.kill("nobody", parent.pid, f"{began}0", job="j1", login=SELF)
    assert lives(parent.pid)
    assert processes.kill("nobody", parent.pid, began, job="j1", login=SELF)
    until(lambda: not lives(child))
    assert parent.wait() == -signal.SIGKILL
    parent.stdout.close()


def test_it_never_ends_itself_nor_what_it_descends_from():
    for pid in (os.getpid(), os.getppid(), 1):
        assert not processes.kill("nobody", pid, started_at(pid), job="j1", login=SELF)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (order("/no/such/program"), "no program /no/such/program"),
        (order("/etc/passwd"), "no program /etc/passwd, or it may not be run"),
        ({**order("true"), "cwd": "/no/such/folder"}, "no folder /no/such/folder"),
    ],
)
def test_what_cannot_be_started_is_refused_with_the_reason(owner, told, words):
    with pytest.raises(machine.Refused, match=words):
        processes.start(owner, told)
    assert processes.launched(owner) == []


def test_without_pidfds_the_start_time_is_still_compared(monkeypatch):
    """As on Python 3.8."""
    monkeypatch.delattr(os, "pidfd_open")
    child = subprocess.Popen(["sleep", "600"])
    assert not processes._signal(child.pid, f"{started_at(child.pid)}0", signal.SIGKILL)
    assert processes._signal(child.pid, started_at(child.pid), signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL


# ---- one start at a time ---------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder that all may write, as /tmp is."""
    folder = tmp_path / "place"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr(processes, "_PLACE", str(folder))
    monkeypatch.setattr(processes, "_TURN_S", 0.3)
    return folder


@contextlib.contextmanager
def locked(path):
    lock = os.open(path, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(lock)


def squats(place, how, elsewhere):
    """What somebody else may have put there, under a name that would be taken for ours."""
    name = place / f".rollmuxd-{os.geteuid()}{'.lock' if how == 'a file of the old name' else '-squat'}"
    if how in {"a link to a file of ours", "a file of the old name"}:
        name.touch(mode=0o600)
    elif how == "a link to a folder of ours":
        elsewhere.mkdir(mode=0o700)
        name.symlink_to(elsewhere)
    elif how == "a folder of theirs":
        if os.geteuid():
            pytest.skip("takes root to give a folder away")
        name.mkdir(mode=0o700)
        os.chown(name, 65534, 65534)
    else:
        name.mkdir()
        name.chmod(0o755)
    return name


@pytest.mark.parametrize(
    "how",
    [
        "a file of the old name",
        "a link to a file of ours",
        "a link to a folder of ours",
        "a folder of theirs",
        "a folder open to all",
    ],
)
def test_what_anybody_else_locks_holds_up_no_start(owner, place, tmp_path, how):
    theirs = squats(place, how, tmp_path / "elsewhere")
    with locked(theirs):
        assert lives(processes.start(owner, order("sleep", "600"))["pid"])
    (made,) = set(place.iterdir()) - {theirs}
    assert stat.S_IMODE(made.lstat().st_mode) == 0o700
    processes.start(owner, order("sleep", "600"))
    assert set(place.iterdir()) == {theirs, made}, "the next start takes the same one"


def test_a_start_waits_for_one_that_is_under_way_and_says_so_when_that_does_not_end(owner, place):
    said = r"another start as \w+ .* for 0.3 s; see what it is at \(lslocks"
    with processes._one_at_a_time(), pytest.raises(machine.Unknown, match=said):
        processes.start(owner, order("sleep", "600"))
    assert processes.launched(owner) == []
    assert lives(processes.start(owner, order("sleep", "600"))["pid"])


def test_the_first_starts_of_all_make_their_lock_and_are_one_at_a_time(place, monkeypatch):
    monkeypatch.setattr(processes, "_TURN_S", 50.0)
    looked, entered, second = threading.Event(), threading.Event(), threading.Event()

    def slowly():
        """Whoever makes the one that sorts first found nothing before, and makes it when the other is at work."""
        if threading.current_thread() is late:
            looked.set()
            entered.wait()
        made = f"{processes._PLACE}/{processes._prefix()}{'a' if threading.current_thread() is late else 'b'}"
        os.mkdir(made, 0o700)
        return made

    def start_late():
        with processes._one_at_a_time():
            second.set()

    monkeypatch.setattr(processes, "_make_folder", slowly)
    late = threading.Thread(target=start_late)
    late.start()
    assert looked.wait(PATIENCE_S)
    with processes._one_at_a_time():
        entered.set()
        assert not second.wait(0.5)
    assert second.wait(PATIENCE_S)
    late.join()


def test_a_lock_that_is_cleaned_away_while_it_is_waited_for_is_no_lock(place, monkeypatch):
    """systemd-tmpfiles and its like remove old folders."""
    monkeypatch.setattr(processes, "_TURN_S", 50.0)
    entered, go_on, third = threading.Event(), threading.Event(), threading.Event()

    def second():
        with processes._one_at_a_time():
            entered.set()
            go_on.wait()

    with processes._one_at_a_time():
        waits = threading.Thread(target=second)
        waits.start()
        time.sleep(0.2)  # it has the folder open by now
        (folder,) = place.iterdir()
        folder.rmdir()
    assert entered.wait(PATIENCE_S)

    def last():
        with processes._one_at_a_time():
            third.set()

    later = threading.Thread(target=last)
    later.start()
    assert not third.wait(0.3)
    go_on.set()
    assert third.wait(PATIENCE_S)
    waits.join()
    later.join()


def test_where_what_is_made_is_not_ones_own_nothing_is_started_unseen(owner, place, monkeypatch):
    """As on a file system that knows no owners."""
    real = os.lstat
    monkeypatch.setattr(os, "lstat", lambda path: os.stat_result((*real(path)[:4], 4711, *real(path)[5:])))
    with pytest.raises(machine.Refused, match="is not its own"):
        processes.start(owner, order("true"))
    assert list(place.iterdir()) == []


def test_a_start_that_was_killed_before_it_wrote_the_daemons_name_leaves_no_empty_one(tmp_path):
    """Any login could seal marks with it."""
    (tmp_path / "owner").touch()
    made = read_owner(str(tmp_path))
    assert len(made) == 32
    assert read_owner(str(tmp_path)) == made
