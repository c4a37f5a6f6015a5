"""The benchmarks run, and print what they say they print. How fast it was is not asked here."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE_S

RUN = Path(__file__).with_name("run.py")


def bench(*options: str, within: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(RUN), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=within, check=False)


def measured(name: str, within: float = PATIENCE_S) -> dict[str, Any]:
    ended = bench("--only", name, "--budget", "1", "--small", within=within)
    assert ended.returncode == 0, ended.stderr
    result: dict[str, Any] = json.loads(ended.stdout)
    assert set(result) == {"machine", name}
    found: dict[str, Any] = result[name]
    assert found["targets"]
    assert found["ok"] is all(target["ok"] for target in found["targets"].values())
    for path, target in found["targets"].items():
        assert set(target) in ({"value", "ok", "at_least"}, {"value", "ok", "at_most"})
        value = found
        for part in path.split("."):
            value = value[part]
        assert value == target["value"]
    return found


def test_core_says_how_many_inputs_a_second_and_how_long_a_placement_takes() -> None:
    found = measured("core")

    assert found["inputs_per_s"] > found["slot_cycle_per_s"] > 0
    assert found["inputs_floor_per_s"] > found["inputs_per_s"]
    assert [found["placement"][size]["p50_ms"] > 0 for size in ("100", "500")] == [True, True]


@pytest.mark.slow
def test_the_simulator_says_how_fast_it_is_beside_a_bare_heap() -> None:
    found = measured("sim")

    assert found["floor_events_per_s"] > found["events_per_s"] > 0
    assert found["facts"] > found["events"]


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("name", ["abuse", "handover", "restart", "waiting", "soak"])
def test_a_live_benchmark_runs_to_its_end(name: str) -> None:
    measured(name)


@pytest.mark.slow
@pytest.mark.e2e
def test_two_jobs_with_a_sync_share_two_nodes() -> None:
    assert len(measured("twopool")["slowdowns"]) == 2


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_jobs_without_times_are_spread_over_all_nodes() -> None:
    assert measured("spread", within=290)["jobs_per_node_pair"] == [3, 2]


@pytest.mark.slow
@pytest.mark.e2e
def test_the_dashboard_is_measured_in_a_browser() -> None:
    pytest.importorskip("playwright", reason="playwright is not there: pip install playwright")
    if not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
        pytest.skip("no Chromium is there: apt-get install chromium")
    found = measured("web")

    assert found["slots"] > 400
    assert found["redraw_bars"] > 100
    assert found["facts_per_s"] > 0


@pytest.mark.slow
@pytest.mark.e2e
def test_the_hook_for_trl_is_measured_on_real_runs() -> None:
    for name in ("torch", "trl"):
        if importlib.util.find_spec(name) is None:
            pytest.skip("TRL is not installed: pip install 'trl>=1.0,<1.17'")
    found = measured("trl")

    assert 0 < found["hook_us"] < 1000 * found["hook_step_ms"]
    assert 0 < found["daemon_ms"] < found["daemon_step_ms"] * 10
    assert found["daemon_calls"] == 1  # two for a rollout and its two steps
    assert 0 < found["daemon_cpu_ms"] < found["daemon_ms"]
    assert found["wall_s"] >= found["bound_s"] > 2 * found["train_s"]


def test_a_benchmark_that_is_not_there_is_named() -> None:
    ended = bench("--only", "speed")

    assert ended.returncode == 2
    assert "'speed' is no benchmark" in ended.stderr
