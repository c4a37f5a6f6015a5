"""``-n``: each test runs once, and a worker that dies is a failure with a name."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import workers

PASSED_OR_NOT = """
import os, pathlib, pytest

@pytest.mark.parametrize("number", range(20))
def test_passes(number, tmp_path):
    with open("ran", "a") as ran:
        ran.write(f"{number} {os.getpid()}\\n")

def test_fails():
    print("these are its words")
    assert [1] == [2]

def test_dies():
    os._exit(7)
"""
FIRST_FAILS = """
import pytest

@pytest.mark.parametrize("number", range(20))
def test_it(number):
    assert number
"""
ENDS_BADLY = """
import atexit, os

def test_passes():
    atexit.register(os._exit, 9)
"""


def run(folder: Path, tests: str, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text('pytest_plugins = ("workers",)')
    (folder / "test_it.py").write_text(tests)
    # Other plugins take a second to import.
    env = {**os.environ, "PYTHONPATH": str(Path(workers.__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "--rootdir", str(folder), *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def test_each_test_runs_once_and_one_that_fails_or_kills_its_process_is_named(tmp_path: Path) -> None:
    ran = run(tmp_path, PASSED_OR_NOT, "-n", "3", "--junitxml", "results.xml")
    lines = (tmp_path / "ran").read_text().split()
    assert sorted(map(int, lines[::2])) == list(range(20))
    assert 2 <= len(set(lines[1::2])) <= 4
    assert "2 failed, 20 passed" in ran.stdout, ran.stdout + ran.stderr
    assert "FAILED test_it.py::test_dies - the process that ran this test ended w" in ran.stdout
    assert "ended with status 7" in ran.stdout
    assert "these are its words" in ran.stdout
    assert ran.returncode == 1
    assert 'tests="22"' in (tmp_path / "results.xml").read_text()


def test_after_the_first_failure_it_stops_if_you_say_so(tmp_path: Path) -> None:
    ran = run(tmp_path, FIRST_FAILS, "-n", "1", "-x")
    assert "1 failed, 2 passed" in ran.stdout, "a worker knows two more tests"


def test_a_worker_that_ends_badly_after_its_last_test_fails_the_run(tmp_path: Path) -> None:
    ran = run(tmp_path, ENDS_BADLY, "-n", "1")
    assert "a worker had status 9 after its last test" in ran.stdout + ran.stderr
    assert ran.returncode == pytest.ExitCode.INTERNAL_ERROR


@pytest.mark.parametrize(("number", "ordinary", "slow"), [(1, 5, 2), (3, 20, 4), (4, 3, 0), (3, 1, 9)])
def test_shares_are_equal_and_begin_with_their_slow_tests(number: int, ordinary: int, slow: int) -> None:
    items = [item(f"test_{index % 3}.py::test_{index}", index >= ordinary) for index in range(ordinary + slow)]
    shares = workers.shares(items, number)  # type: ignore[arg-type]
    assert Counter(test for share in shares for test in share) == Counter(range(ordinary + slow))
    assert ordinary < slow or max(map(len, shares)) - min(map(len, shares)) <= 1
    for share in shares:
        assert [test >= ordinary for test in share] == sorted((test >= ordinary for test in share), reverse=True)


def item(nodeid: str, slow: bool) -> SimpleNamespace:
    return SimpleNamespace(nodeid=nodeid, get_closest_marker=lambda name: "slow" if slow else None)
