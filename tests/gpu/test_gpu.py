"""``make gpu``: on a machine with a GPU its checks must hold; on all others the program itself is tried, in small."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import forked
import pytest
from patience import PATIENCE_S

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
RUN = Path(__file__).with_name("run.py")


#: the program, and what it starts in turn, begin with torch imported
COPIED = """
import os, runpy, sys
sys.executable = sys.argv[1]
del sys.argv[:2]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def sees_a_gpu():
    asked = "import sys, torch; sys.exit(7 * torch.cuda.is_available())"
    status = forked.run([sys.executable, "-c", asked], imported=("torch",)).returncode
    assert status in (0, 7), "the answer, and no error of Python"
    return status == 7


def run(*arguments, code=0):
    return told(
        subprocess.run([sys.executable, RUN, *arguments], capture_output=True, text=True, timeout=PATIENCE_S), code
    )


def copied(folder, *arguments):
    python = folder / "python"
    command = [sys.executable, "-c", COPIED, python, RUN, *arguments]
    how = {"capture_output": True, "text": True, "timeout": PATIENCE_S}
    return told(forked.run(command, imported=("torch",), stand_in=python, **how), 0)


def told(done, code):
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.slow
def test_what_needs_torch_only_runs_on_a_cpu_too(tmp_path):
    report, said = copied(
        tmp_path, "--cpu", "--gb", "0.01", "--rounds", "1", "--only", "memory,bandwidth,weights,cuda_checkpoint"
    )
    checks = report["checks"]
    assert (checks["memory"]["bit_exact"], checks["memory"]["still_shared"]) == (True, True)
    assert checks["memory"]["bytes"] > 10_000_000
    assert checks["bandwidth"]["ok"] is None, "a CPU's figures are no verdict"
    assert checks["weights"]["ok"], "every bit of a version that was published is in the model again"
    assert checks["weights"]["bytes"] > 10_000_000
    assert 0 < checks["weights"]["copy_s"] <= checks["weights"]["publish_s"], "what a slot is held for"
    assert checks["cuda_checkpoint"] == {"ok": None, "why": "needs a GPU", "took_s": 0.0}
    assert "gpu: memory: ok" in said


@pytest.mark.slow
@pytest.mark.e2e
def test_two_torch_jobs_that_share_a_device_under_a_real_daemon_end_with_the_weights_of_each_alone(tmp_path):
    report, said = copied(tmp_path, "--cpu", "--only", "two_jobs")
    found = report["checks"]["two_jobs"]
    assert found["same_weights"], said
    assert found["orders"]["park"] > 2, "they had to make room for each other"
    assert found["quarantined"] == []
    assert len(set(found["weights"].values())) == 2, "two seeds, two results"


def test_without_a_gpu_it_says_so_and_measures_nothing(sees_a_gpu):
    if sees_a_gpu:
        pytest.skip("here there is a GPU")
    report, said = run("--only", "memory", code=2)
    assert report == {"ok": None, "why": "no torch that sees a GPU"}
    assert "needs a GPU" in said


@pytest.mark.gpu
@pytest.mark.slow
def test_on_a_gpu_all_that_can_be_had_holds(sees_a_gpu):
    if not sees_a_gpu:
        pytest.skip("there is no GPU here: make gpu says what it would measure")
    report, said = run("--rounds", "3")
    assert report["ok"], said
