"""A checked run is one in which every checker has its say: at each input, at each decision, and at the end."""

import pytest

from rollmuxd.core.errors import BrokenInvariant
from rollmuxd.sim.compare import Task
from rollmuxd.sim.policies import ROLLMUX
from rollmuxd.sim.workload import Options
from rollmuxd.sim.world import World
from simkit import checked, small, swarm
from simkit.checkers import Checker
from simkit.checkers.rest import Rest
from simkit.faults import PRESETS

TASK = Task("micro-train", Options(slo=(1.0, 2.0), more={"hours": "1"}), "rollmux", "phase", "work", 0)
RUNS = {
    "run": lambda: checked.run(small.small(0), ROLLMUX, seed=0, accounting="work"),
    "run with faults": lambda: checked.run(small.small(0), ROLLMUX, seed=0, accounting="work", faults=PRESETS["all"]),
    "perform": lambda: checked.perform(TASK),
    "perform with faults": lambda: checked.perform(TASK, faults=PRESETS["all"]),
    "swarm": lambda: swarm.run(swarm.draw(0)),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=list(RUNS))
@pytest.mark.parametrize(("checker", "method"), [(Rest, "before"), (Rest, "hear"), (Checker, "hear"), (Checker, "end")])
def test_what_a_checker_finds_ends_the_run_and_names_workload_and_seed(checker, method, run, monkeypatch):
    def finds(*_):
        raise BrokenInvariant("the_promise: is broken")

    monkeypatch.setattr(checker, method, finds)
    with pytest.raises(BrokenInvariant, match=r"the_promise: is broken \(workload .*, seed 0, at \d+ ms"):
        run()


def test_the_simulator_itself_runs_without_them(monkeypatch):
    for method in ("hear", "end"):
        monkeypatch.setattr(Checker, method, None)
    outcome = World(small.small(0), ROLLMUX, seed=0, accounting="work").run()
    assert all(job.ended_ms is not None for job in outcome.jobs)


def test_checkers_do_not_change_what_happens():
    plain = World(small.small(0), ROLLMUX, seed=0, accounting="work").run()
    watched = checked.run(small.small(0), ROLLMUX, seed=0, accounting="work")
    assert watched.facts_digest == plain.facts_digest
