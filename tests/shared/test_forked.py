"""A copy is a process like any other: what it sees and how it ends is as if Python had been started."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from patience import PATIENCE_S, until

TELL = """
import json, os, sys, __main__
print("to stderr", file=sys.stderr)
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "cwd": os.getcwd(), "env": dict(os.environ), "parent": os.getppid(),
    "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "group": os.getpgid(0) == os.getpgid(os.getppid()),
    "stdin": sys.stdin.read(), "fds": sorted(os.listdir("/proc/self/fd")), "file": getattr(__main__, "__file__", ""),
    "name": __name__, "main": hasattr(__main__, "json"),
}))
"""


def told(popen, words, folder, **more):
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": f"{folder}/beside", "OF_THE_TEST": "ü"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with popen([sys.executable, *words], cwd=folder, env=env, text=True, **pipes, **more) as process:
        out, err = process.communicate("from the test", PATIENCE_S)
    assert (process.returncode, err) == (0, "to stderr\n"), err
    return json.loads(out)


@pytest.mark.parametrize("session", [False, True])
@pytest.mark.parametrize("words", [["tell.py", "a", "-b"], ["-m", "tell", "a", "-b"], ["-c", TELL, "a", "-b"]])
def test_it_sees_what_a_process_sees_that_was_started(words, session, tmp_path):
    (tmp_path / "tell.py").write_text(TELL)
    copied, started = (
        told(kind, words, tmp_path, start_new_session=session) for kind in (forked.Popen, subprocess.Popen)
    )
    assert copied == started
    assert copied["parent"] == os.getpid()


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("", 0),
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit('said')", 1),
        ("1 / 0", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("import atexit, os; atexit.register(os._exit, 5)", 5),
        ("import threading, time, os; threading.Thread(target=lambda: (time.sleep(0.1), os._exit(6))).start()", 6),
    ],
)
def test_it_ends_as_a_process_ends_that_was_started(program, status):
    copied, started = (
        run([sys.executable, "-c", program], capture_output=True, text=True) for run in (forked.run, subprocess.run)
    )
    assert (copied.returncode, started.returncode) == (status, status)
    assert copied.stderr[-40:] == started.stderr[-40:]


def test_it_began_when_it_was_asked_for_and_can_be_killed():
    def began(pid):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])

    with forked.Popen(
        [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"], stdout=subprocess.PIPE
    ) as one:
        one.stdout.readline()
        with forked.Popen(
            [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"], stdout=subprocess.PIPE
        ) as two:
            two.stdout.readline()
            assert began(os.getpid()) < began(one.pid) <= began(two.pid)
            two.kill()
            assert two.wait(PATIENCE_S) == -signal.SIGKILL
        assert one.poll() is None
        one.kill()


@pytest.mark.parametrize(
    ("words", "env"), [(["-I", "-c"], {}), (["-c"], {"PYTHONWARNINGS": "error"}), (["-W", "error", "-c"], {})]
)
def test_what_a_copy_cannot_be_is_started(words, env):
    program = "import sys; print('asyncio' in sys.modules)"
    ran = forked.run([sys.executable, *words, program], env={**os.environ, **env}, capture_output=True, text=True)
    assert ran.stdout == "False\n"


def test_what_python_runs_before_a_program_runs(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('before')\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert forked.run([sys.executable, "-c", "print('it')"], env=env, capture_output=True).stdout == b"before\nit\n"


def in_turn(program, folder, **more):
    """Run a program in a copy, which has ``both``: Python, and its stand-in."""
    stand_in = folder / "python"
    begins = f"import sys, subprocess, json, os, signal, time; both = {[sys.executable, str(stand_in)]!r}\n"
    return forked.run([sys.executable, "-c", begins + program], text=True, cwd=folder, stand_in=stand_in, **more)


@pytest.mark.parametrize("words", [["tell.py", "a", "-b"], ["-u", "-m", "tell", "a", "-b"], ["-c", TELL, "a", "-b"]])
def test_what_a_copy_starts_by_its_stand_in_sees_what_a_process_sees_that_was_started(words, tmp_path):
    (tmp_path / "tell.py").write_text(TELL)
    ran = in_turn(
        f"""
for python in both:
    print(subprocess.run([python, *{words!r}], env={{**os.environ, "OF_THE_TEST": "ü"}}, input="from the test",
        capture_output=True, text=True, check=True, start_new_session=True).stdout)
""",
        tmp_path,
        capture_output=True,
        check=True,
    )
    started, copied = map(json.loads, ran.stdout.split("\n\n")[:2])
    assert copied.pop("parent") != started.pop("parent")
    assert copied == started


@pytest.mark.parametrize("program", ["", "import sys; sys.exit(3)", "1 / 0", "import os; os.kill(os.getpid(), 9)"])
def test_a_stand_in_ends_as_its_copy_does(program, tmp_path):
    told = f"for python in both: print(subprocess.run([python, '-c', {program!r}]).returncode)"
    started, copied = in_turn(told, tmp_path, capture_output=True).stdout.split()
    assert started == copied


@pytest.mark.parametrize(("number", "said"), [("SIGTERM", "3"), ("SIGKILL", "-9")])
def test_a_copy_ends_with_its_stand_in_and_gets_its_signals(number, said, tmp_path):
    waits = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
print(os.getpid(), "asyncio" in sys.modules, flush=True)
time.sleep(600)
"""
    ran = in_turn(
        f"""
with subprocess.Popen([both[1], "-c", {waits!r}], stdout=subprocess.PIPE, text=True) as one:
    pid, copied = one.stdout.readline().split()
    assert int(pid) != one.pid and copied == "True"
    one.send_signal(signal.{number})
    print(one.wait())
while os.path.exists("/proc/" + pid):
    time.sleep(0.01)
""",
        tmp_path,
        capture_output=True,
        check=True,
    )
    assert ran.stdout == said + "\n"


def test_copies_end_with_the_first_of_them_and_what_their_stand_in_starts_then_is_no_copy(tmp_path):
    first = """
one = subprocess.Popen([both[1], "-c", "print(1, flush=True); import time; time.sleep(600)"], stdout=subprocess.PIPE)
one.stdout.readline()
print(one.pid, flush=True)
os._exit(0)
"""
    stand_in = Path("/proc", in_turn(first, tmp_path, stdout=subprocess.PIPE).stdout.strip(), "stat")
    until("it has ended, too", lambda: not stand_in.exists() or ") Z" in stand_in.read_text())
    asked = [tmp_path / "python", "-c", "import sys; print('asyncio' in sys.modules)"]
    assert subprocess.run(asked, capture_output=True, text=True, check=True).stdout == "False\n"
