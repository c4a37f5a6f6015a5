"""The demo, whole and short: real processes, a real daemon, and one that is killed in the middle."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import forked
import pytest
from patience import PATIENCE_S
from ray_cluster import IMPORTED_BY_RAY

pytest.importorskip("numpy")
pytest.importorskip("rollmuxd.daemon.app")

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SHORT = ["--json", "--iterations", "3", "--scale", "0.05"]


#: the demo as a copy, which starts copies in turn. What two cores gain takes a second, and is measured by the others
COPIES = """
import sys
from rollmuxd.cli.main import main
from rollmuxd_demo import run
sys.executable = sys.argv.pop(1)
run.measure_core_gain = lambda: None
{more}
main()
"""
#: after the third of six iterations at once its daemon is killed (kill -9), and started again
KILLS = """
from rollmuxd_demo import live
started, iterated = [], []
start, saw = run.DaemonProcess.start, live.Lines.saw

def remembered(daemon):
    started.append(daemon)
    start(daemon)

def killing(lines, event):
    saw(lines, event)
    if isinstance(event, run.Iterated):
        iterated.append(event)
        if len(iterated) == 3:
            started[-1]._process.kill()
            started[-1]._process.wait()
            lines.note("the daemon was killed")
            started[-1].start()

run.DaemonProcess.start, live.Lines.saw = remembered, killing
"""


def demo(*options):
    command = [sys.executable, "-m", "rollmuxd", "demo", *SHORT, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)


def copied_demo(folder, *options, imported=(), more=""):
    """The same, shorter, with processes that are copies."""
    python = folder / "python"
    program = COPIES.format(more=more)
    command = [sys.executable, "-c", program, str(python), "demo", *SHORT, "--iterations", "2", *options]
    environment = os.environ | {"RAY_JEMALLOC_LIB_PATH": ""}  # what Ray preloads, no copy has
    how = {"capture_output": True, "text": True, "timeout": PATIENCE_S}
    return forked.run(command, env=environment, imported=imported, stand_in=python, **how)


def processes_of(folder):
    """Processes that name the folder on their command line or in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        if entry.name.isdigit() and int(entry.name) != os.getpid() and str(folder).encode() in words:
            found.append(entry.name)
    return found


def test_sharing_changes_no_weights_and_breaks_no_rule(tmp_path):
    ran = demo("--keep", str(tmp_path / "kept"))

    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["weights_identical"] is True
    assert found["violations"] == []
    assert [job["iterations"] for job in found["jobs"]] == [3, 3, 3]
    assert found["wall_s"] >= found["lower_bound_s"] > 0
    assert found["switches"]["loads"] > found["sequential_switches"]["loads"]
    assert processes_of(tmp_path) == []


def test_over_ssh_it_is_the_same(tmp_path):
    testing = pytest.importorskip("ssh_servers")
    if testing.SSHD is None:
        pytest.skip("there is no sshd here; install openssh-server")
    ran = copied_demo(tmp_path, "--backend", "ssh")

    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert (found["backend"], found["violations"]) == ("ssh", [])
    assert found["weights_identical"] is True
    assert [job["iterations"] for job in found["jobs"]] == [2, 2, 2]
    assert found["switches"]["loads"] > 0
    assert "the host is reached by ssh, at" in ran.stderr


def test_over_ray_it_is_the_same(tmp_path):
    pytest.importorskip("rollmuxd_backend_ray")
    if find_spec("ray") is None:
        pytest.skip("there is no Ray here; pip install ray")
    ran = copied_demo(tmp_path, "--backend", "ray", "--no-sequential", imported=IMPORTED_BY_RAY)

    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert (found["backend"], found["violations"]) == ("ray", [])
    assert [job["iterations"] for job in found["jobs"]] == [2, 2, 2]
    assert found["switches"]["loads"] > 0
    assert "the host is a node of a Ray cluster" in ran.stderr


def test_over_slurm_it_is_the_same(tmp_path):
    testing = pytest.importorskip("slurm_cluster")
    if absent := testing.missing():
        pytest.skip(f"there is no {absent[0]} here; apt-get install {testing.PACKAGES}")
    ran = copied_demo(tmp_path, "--backend", "slurm")

    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert (found["backend"], found["violations"]) == ("slurm", [])
    assert found["weights_identical"] is True
    assert [job["iterations"] for job in found["jobs"]] == [2, 2, 2]
    assert found["switches"]["loads"] > 0
    assert "the host is a node of allocation 1 of a Slurm cluster" in ran.stderr


def test_a_daemon_that_is_killed_in_the_middle_costs_a_pause_and_nothing_else(tmp_path):
    ran = copied_demo(tmp_path, more=KILLS)

    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["weights_identical"] is True
    assert found["violations"] == []
    assert "was killed" in ran.stderr


def test_a_ctrl_c_leaves_no_process_behind(tmp_path):
    kept = tmp_path / "kept"
    child = subprocess.Popen(
        [sys.executable, "-m", "rollmuxd", "demo", "--json", "--scale", "0.3", "--keep", str(kept)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    give_up = time.monotonic() + PATIENCE_S
    while not list(kept.glob("at-once/*.stderr")) and time.monotonic() < give_up:
        time.sleep(0.1)
    time.sleep(1.0)

    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=PATIENCE_S)

    assert child.returncode == 1
    assert (out, "Traceback" in err) == ("", False)
    assert processes_of(kept) == []
