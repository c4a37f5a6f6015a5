"""``rollmuxd sim`` as a user, and as a machine, calls it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from patience import PATIENCE_S, until

from rollmuxd.cli.main import cli

SMALL = ("--workload", "weave-production", "--take", "12")


def sim(*words: str) -> Result:
    return CliRunner().invoke(cli, ["sim", *words])


def answer(*words: str) -> dict[str, Any]:
    result = sim(*words, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_comparison_is_one_object_with_both_accountings_of_each_policy() -> None:
    found = answer(
        "compare", *SMALL, "--policies", "solo,rollmux,colocated", "--fidelity", "cost", "--seeds", "3",
        "--slo", "1.1:2", "--prices", "artifact",
    )  # fmt: skip

    assert [row["policy"] for row in found["policies"]] == ["solo", "rollmux", "colocated"]
    for row in found["policies"]:
        paper, work = row["paper"], row["work"]
        for spread in (paper["cost_per_hour"], paper["slo_attainment"], work["slo_attainment"]):
            assert set(spread) == {"mean", "sd", "min", "max"}
            assert spread["min"] <= spread["mean"] <= spread["max"]
        assert set(paper["peak_gpus"]) == {"H20", "H800"}
        assert work["total_cost"] > 0
        assert work["mean_completion_s"] > 0
        assert paper["slo_attainment"]["mean"] == 1.0
    solo, rollmux, _ = found["policies"]
    assert rollmux["paper"]["cost_per_hour"]["mean"] < solo["paper"]["cost_per_hour"]["mean"]
    assert {(row["policy"], row["accounting"]) for row in found["paired"]} == {
        (policy, accounting) for policy in ("rollmux", "colocated") for accounting in ("paper", "work")
    }


def test_processes_change_nothing_but_the_time() -> None:
    words = ("compare", *SMALL, "--policies", "rollmux,random", "--seeds", "2")
    one, two = answer(*words), answer(*words, "--jobs", "2")
    for found in (one, two):
        for row in found["policies"]:
            for accounting in ("paper", "work"):
                row[accounting].pop("decision_ms")
        for row in found["runs"]:
            row.pop("wall_s")
    assert one == two


def test_a_table_says_what_it_shows() -> None:
    result = sim("compare", *SMALL, "--policies", "solo,rollmux", "--seeds", "2")
    assert result.exit_code == 0
    for words in ("PAPER:", "WORK:", "SLO kept", "rollmux", "DIFFERENCE FROM solo", "Utilisation"):
        assert words in result.output


def test_one_run_leaves_its_facts_and_a_trace(tmp_path: Path) -> None:
    facts, trace = tmp_path / "facts.jsonl", tmp_path / "trace.json"
    words = ("run", *SMALL[:2], "--take", "3", "--policy", "rollmux", "--fidelity", "phase", "--accounting", "paper")
    found = answer(*words, "--facts", str(facts), "--trace", str(trace))

    lines = facts.read_text().splitlines()
    assert len(lines) == found["facts"]
    assert json.loads(lines[0])["fact"] == "daemon_started"
    assert sum(event["ph"] == "X" for event in json.loads(trace.read_text())["traceEvents"]) > 100
    assert answer(*words)["facts_digest"] == found["facts_digest"]


def test_what_a_move_takes_can_be_said() -> None:
    words = ("compare", *SMALL, "--policies", "solo,default")
    dear, cheap = (answer(*words, "--move-s", seconds)["policies"] for seconds in ("600", "30"))
    assert answer(*words)["policies"][1]["paper"]["cost_per_hour"] == cheap[1]["paper"]["cost_per_hour"]
    assert dear[1]["paper"]["cost_per_hour"] != cheap[1]["paper"]["cost_per_hour"]
    assert dear[0]["paper"]["cost_per_hour"] == cheap[0]["paper"]["cost_per_hour"]


def test_what_can_be_asked_for_is_listed() -> None:
    assert {"weave-production", "mixed", "journal"} <= set(answer("workloads"))
    known = answer("policies")
    ours = ("default", "rollmux", "solo")
    papers = ("rollmux-artifact", "colocated", "gavel", "random", "most-idle", "optimal")
    assert tuple(known) == (*ours, *papers)
    assert "exact for few" in known["optimal"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("compare", "--workload", "weave-prodution"), "weave-production"),
        (("compare", *SMALL, "--policies", "rolmux"), "rollmux"),
        (("compare", *SMALL, "--policies", ","), "--policies names none"),
        (("compare", *SMALL, "--slo", "2:1"), "slo"),
        (("compare", *SMALL, "--slo", "much"), "LO:HI"),
        (("compare", *SMALL, "--prices", "H20=cheap"), "price of H20"),
        (("compare", *SMALL, "--prices", "gold"), "gold"),
        (("compare", *SMALL, "--nodes", "rollout=x"), "--nodes rollout"),
        (("compare", *SMALL, "--nodes", "rollout=inf"), "--nodes rollout"),
        (("compare", *SMALL, "--nodes", "rollout=1.7"), "whole number"),
        (("compare", *SMALL, "--nodes", "rollout=1e9"), "100000"),
        (("compare", *SMALL, "--switch", "inf"), "--switch"),
        (("compare", *SMALL, "--switch", "nan"), "--switch"),
        (
            ("compare", *SMALL, "--switch", "tables"),
            "--switch is 'tables': none, table, or a finite number of seconds is needed",
        ),
        (("compare", *SMALL, "--prices", "H20"), "the price of H20 is missing; write H20=1.85"),
        (("compare", *SMALL, "--ram", "1"), "give it more with --ram"),
        (("compare", *SMALL, "--policies", "colocated", "--ram", "500"), "give it more with --ram"),
        (("run", *SMALL, "--facts", "/nowhere/facts"), "there is no folder /nowhere"),
        (("run", *SMALL, "--trace", "/nowhere/trace"), "there is no folder /nowhere"),
        (("run", *SMALL, "--policy", "optimal", "--facts", "facts"), "has no facts"),
        (("compare", *SMALL, "--policies", "optimal", "--fidelity", "phase"), "use cost"),
        (("compare", "--workload", "mixed", "--policies", "colocated"), "co-located"),
        (
            ("compare", "--workload", "weave-production", "--nodes", "rollout=1", "--nodes", "train=4"),
            "wants 2 rollout",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_runs(words: tuple[str, ...], said: str) -> None:
    result = sim(*words)
    assert result.exit_code in (1, 2)
    assert said in result.output
    assert isinstance(result.exception, SystemExit)  # not what somebody would see as a traceback


def test_a_disk_that_is_full_is_said_to_be() -> None:
    result = sim("run", *SMALL, "--take", "2", "--facts", "/dev/full")
    assert isinstance(result.exception, SystemExit)
    assert "No space left" in result.output


@pytest.mark.slow
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whoever_ends_a_comparison_ends_the_runs_of_other_processes_too(by: signal.Signals) -> None:
    """A run takes half a minute, and as many are begun as there are processes."""
    words = [sys.executable, "-c", "from rollmuxd.cli.main import main; main()", "sim", "compare", "--policies", "solo"]
    more = ("--workload", "weave-production", "--fidelity", "phase", "--jobs", "2", "--seeds", "3")
    with subprocess.Popen([*words, *more], start_new_session=True, stderr=subprocess.PIPE, text=True) as asked:
        # it, its resource tracker, and two at work
        until("four processes run", lambda: len(_group(asked.pid)) >= 4 or asked.poll() is not None)
        os.kill(asked.pid, by)
        _, said = asked.communicate(timeout=PATIENCE_S)
    if by == signal.SIGINT:
        assert asked.returncode == 1
        assert "Aborted" in said
        assert "Traceback" not in said
    else:
        assert asked.returncode == -by
    until("all of them have ended", lambda: not _group(asked.pid))  # the resource tracker goes a moment later


@pytest.mark.slow
def test_ctrl_c_while_other_processes_are_being_started_ends_them_as_well() -> None:
    """All runs would take ten minutes."""
    script = (
        "import itertools, os, signal\n"
        "from concurrent.futures import ProcessPoolExecutor as Pool\n"
        "submit, count = Pool.submit, itertools.count()\n"
        "def interrupted(*words):\n"
        "    if next(count) == 20: os.kill(os.getpid(), signal.SIGINT)\n"
        "    return submit(*words)\n"
        "Pool.submit = interrupted\n"
        "from rollmuxd.cli.main import main; main()"
    )
    words = ["sim", "compare", "--policies", "solo", "--workload", "weave-production", "--fidelity", "phase"]
    asked = subprocess.run(
        [sys.executable, "-c", script, *words, "--jobs", "2", "--seeds", "40"],
        capture_output=True, text=True, timeout=PATIENCE_S, start_new_session=True, check=False,
    )  # fmt: skip
    assert asked.returncode == 1
    assert "Aborted" in asked.stderr
    assert "Traceback" not in asked.stderr


def _group(leader: int) -> list[int]:
    """The processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(group) == leader and state != "Z":
                found.append(int(stat.parent.name))
    return found


def test_the_command_line_does_not_import_the_simulator_to_say_help() -> None:
    code = "import sys; import rollmuxd.cli.main; print([m for m in sys.modules if m.startswith('rollmuxd.sim')])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert ended.stdout.strip() == "[]"


@pytest.mark.parametrize("fidelity", ["phase", "engine"])
def test_a_comparison_names_the_digest_of_each_run_which_a_second_one_gives_again(fidelity: str) -> None:
    words = ("compare", "--workload", "micro-temporal", "--fidelity", fidelity, "--set", "hours=1")
    first, second = (answer(*words)["runs"] for _ in range(2))
    assert len(first) == 4
    assert len({row["facts_digest"] for row in first}) == 4
    assert [row["facts_digest"] for row in first] == [row["facts_digest"] for row in second]
    assert all(row["wall_s"] > 0 for row in first)


@pytest.mark.parametrize("option", [("--topology", "rfabric"), ("--t-ocs", "20"), ("--fillers", "2")])
def test_a_network_or_fillers_are_refused_where_none_are_simulated(option: tuple[str, str]) -> None:
    refused = sim("compare", *SMALL, "--fidelity", "cost", *option)
    assert refused.exit_code != 0
    assert f"{option[0]} says nothing at --fidelity cost" in " ".join(refused.output.split())
