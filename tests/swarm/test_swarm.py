"""Random histories with faults: a fixed budget of them here, as many as there is time for in ``make swarm``."""

import json
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import pytest
from patience import PATIENCE_S
from simkit import swarm

from rollmuxd.core.errors import BrokenInvariant
from rollmuxd.core.model import Gpu
from rollmuxd.core.spec import Movable, OnLoss

HERE = Path(__file__).parent
FOUND = sorted(HERE.glob("found/*.json"))
#: on all of them it would have more histories under way than it is to have done
ON_ONE_CORE = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.mark.parametrize("first", range(0, 125, 25))
def test_no_promise_is_broken_in_a_random_history(first: int) -> None:
    for seed in range(first, first + 25):
        swarm.run(swarm.draw(seed))


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_what_was_found_once_does_not_come_back(path: Path) -> None:
    swarm.run(swarm.decode(path.read_bytes()))


def test_a_history_is_what_its_seed_says_and_can_be_kept() -> None:
    history = swarm.draw(7)
    assert swarm.draw(7) == history
    assert swarm.draw(8) != history
    kept = swarm.decode(swarm.encode(history))
    assert kept == history
    assert swarm.run(kept).outcome.facts_digest == swarm.run(history).outcome.facts_digest


def test_backends_start_processes_in_some_histories_also_elsewhere_and_beside_side_phases() -> None:
    specs = [job.spec for seed in range(100) for job in swarm.draw(seed).workload.jobs]
    launched = [spec for spec in specs if spec.launch is not None]
    assert any(spec.movable is Movable.RELAUNCH and spec.on_loss is OnLoss.RELAUNCH and spec.side for spec in launched)
    assert any(spec.movable is Movable.NO for spec in launched)
    assert all(spec.movable is Movable.NO for spec in specs if spec.launch is None)


def test_in_some_histories_nodes_are_taken_out_of_service_for_good_and_everybody_ends_without_them() -> None:
    retired = [history for history in map(swarm.draw, range(150)) if any(act.what == "retire" for act in history.acts)]
    retired.sort(
        key=lambda history: len(history.workload.jobs)
    )  # the shortest first, as it ends when it has seen enough
    drained = (sum(node.drain for node in swarm.run(history).core.state.nodes.values()) for history in retired)
    assert any(so_far >= 5 for so_far in accumulate(drained))


def test_a_history_that_breaks_a_promise_is_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every GPU forgets whose bytes are on it: it is given on too early."""
    from rollmuxd.core.steps import dispatch

    monkeypatch.setattr(dispatch, "make_room", lambda *_: True)
    monkeypatch.setattr(Gpu, "dirty_by", property(lambda _: None, lambda _, __: None))
    failing = next(history for history in map(swarm.draw, range(100)) if swarm.broken(history))
    smaller = swarm.shrink(failing, attempts=60)
    assert swarm.broken(smaller) == swarm.broken(failing)
    assert len(smaller.workload.jobs) <= len(failing.workload.jobs)
    with pytest.raises(BrokenInvariant):
        swarm.run(smaller)


def test_the_command_prints_one_object_and_how_many() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ON_ONE_CORE, str(HERE / "run.py"), "--budget", "0.5"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    found = json.loads(ended.stdout)
    assert found["histories"] >= 5
    assert {"violations", "lost", "histories_per_minute", "failing_seeds"} <= set(found)
    assert ended.returncode == (1 if found["violations"] else 0)


def test_the_command_ends_when_as_many_histories_are_done_as_were_asked_for() -> None:
    ended = subprocess.run(
        [sys.executable, str(HERE / "run.py"), "--budget", str(PATIENCE_S), "--histories", "10", "--from", "300"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    found = json.loads(ended.stdout)
    assert (found["histories"], found["first_seed"], found["violations"]) == (10, 300, 0)
    assert ended.returncode == 0
