"""The benchmarks run, and print what they say they print. How fast it was is not asked here."""

import asyncio
import importlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import forked
import pytest
from patience import PATIENCE_S
from serving import serving

RUN = Path(__file__).with_name("run.py")


#: a benchmark as a copy, which starts copies in turn
COPY = """
import runpy, sys
from pathlib import Path
_, sys.executable, *sys.argv = sys.argv
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def bench(*options: str, within: float = PATIENCE_S, copied: bool = True) -> subprocess.CompletedProcess[str]:
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": within, "check": False}
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder, "python") if copied else None
        command = [sys.executable, "-c", COPY, str(python or sys.executable), str(RUN), *options]
        ended: subprocess.CompletedProcess[str] = forked.run(command, stand_in=python, **how)
        return ended


def measured(name: str, within: float = PATIENCE_S) -> dict[str, Any]:
    copied = name != "restart"  # which measures the start
    ended = bench("--only", name, "--budget", "1", "--small", within=within, copied=copied)
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


class CallsThere:
    """A connection whose answers the test gives."""

    def __init__(self) -> None:
        self.calls: list[asyncio.Future[Any]] = []

    def send(self, _: bytes) -> "asyncio.Future[Any]":
        self.calls.append(asyncio.get_running_loop().create_future())
        return self.calls[-1]

    async def reopen(self) -> None:
        """It is never lost."""


def reply(status: str, slot: str) -> Any:
    body = {"status": status, "slot": slot, "fence": "1.1"}
    return importlib.import_module("live").Reply(200, json.dumps(body).encode(), time.perf_counter())


def test_core_says_how_many_inputs_a_second_and_how_long_a_placement_takes() -> None:
    found = measured("core")

    assert found["inputs_per_s"] > found["slot_cycle_per_s"] > 0
    assert found["inputs_floor_per_s"] > found["inputs_per_s"]
    assert [found["placement"][size]["p50_ms"] > 0 for size in ("20", "60")] == [True, True]


@pytest.mark.slow
def test_the_simulator_says_how_fast_it_is_beside_a_bare_heap() -> None:
    found = measured("sim")

    assert found["floor_events_per_s"] > found["events_per_s"] > 0
    assert found["facts"] > found["events"]


def test_rollouts_say_how_fast_they_are_simulated_beside_a_bare_heap() -> None:
    found = measured("rlsim")

    assert found["simulated_s_per_s"] > 0
    assert found["times_the_floor"] > 1
    assert found["plan_ms"] > 0


@pytest.mark.asyncio
async def test_a_call_that_waited_for_as_long_as_a_call_may_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RUN.parent))
    handover, live = importlib.import_module("handover"), importlib.import_module("live")
    members = [live.Member(CallsThere(), "key", f"j{number}", "session") for number in range(3)]
    members[0].granted(reply("running", "s0"))
    calls = [member.ask() for member in members[1:]]
    calls[0].set_result(reply("queued", "s1"))  # before it is released
    taking = asyncio.create_task(handover.Group(members).hand_over())
    while members[1].asked is calls[0] or not members[0].line.calls:
        await asyncio.sleep(0)
    calls[1].set_result(reply("queued", "s2"))  # and after
    while members[2].asked is calls[1]:
        await asyncio.sleep(0)
    members[2].asked.set_result(reply("running", "s2"))
    members[0].line.calls[0].set_result(reply("released", "s0"))
    await taking
    assert members[2].asked is None
    assert members[1].asked is not calls[0]


@pytest.mark.asyncio
async def test_a_call_on_a_connection_that_the_server_closed_fails_at_once_and_a_hand_over_connects_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bench that had been idle for 75 s waited for ever."""
    monkeypatch.syspath_prepend(str(RUN.parent))
    handover, live = importlib.import_module("handover"), importlib.import_module("live")

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer once."""
        await reader.readuntil(b"\r\n\r\n")
        body = json.dumps({"status": "running", "slot": "s", "fence": "1.1"}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)

    async with serving(hang_up) as (_, port):
        line = await live.Line.tcp(port)
        members = [live.Member(each, "key", name, "session") for each, name in ((line, "a"), (CallsThere(), "b"))]
        members[0].granted(await members[0].ask())
        while not line.closed:
            await asyncio.sleep(0)
        failed = line.send(b"")
        assert failed.done()
        with pytest.raises(ConnectionError):
            await failed
        members[1].ask().set_result(reply("running", "s1"))
        await handover.Group(members).hand_over()


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("name", ["abuse", "handover", "directives", "restart", "waiting", "soak", "async"])
def test_a_live_benchmark_runs_to_its_end(name: str) -> None:
    measured(name)


def test_tail_batching_gains_what_it_promises_or_says_that_the_lengths_are_not_there() -> None:
    ended = bench("--only", "rounds", "--small")
    found = json.loads(ended.stdout)["rounds"]
    if "skipped" in found:
        pytest.skip(found["skipped"])

    assert ended.returncode == 0, ended.stderr
    assert set(found["gain"]) == {"servegen", "skythought", "aime"}
    assert set(found["committed"].values()) == {1.0}
    assert all(ratio == pytest.approx(4, rel=0.1) for ratio in found["short_to_long"].values())


def test_tail_batching_without_the_lengths_is_no_success(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RESPONSE_LENGTHS", str(tmp_path))
    ended = bench("--only", "rounds", "--small")

    assert ended.returncode == 1
    assert json.loads(ended.stdout)["rounds"]["ok"] is False


@pytest.mark.slow
def test_a_step_that_waits_for_no_reward_is_shorter() -> None:
    assert measured("rewards")["some_never_end"]["never_ended"] > 0


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
    if not any(map(shutil.which, ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"))):
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


@pytest.mark.parametrize(
    ("name", "missed", "status"),
    [
        ("rebalance", "equal", 1),
        ("rounds", "gain.aime", 1),
        ("gateway", "lost_streams", 1),
        ("gateway", "us_cpu_per_token", 0),
        ("core", "inputs_per_s", 0),
    ],
)
def test_a_miss_is_a_failure_where_the_figure_is_no_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, missed: str, status: int
) -> None:
    monkeypatch.syspath_prepend(str(RUN.parent))
    run = importlib.import_module("run")
    targets = {"lost_streams": {"value": 0, "at_most": 0, "ok": True}} | {
        missed: {"value": 9, "at_most": 1, "ok": False}
    }
    measured = types.SimpleNamespace(run=lambda budget_s, *, small: {"targets": targets})
    monkeypatch.setitem(sys.modules, name, measured)
    monkeypatch.setattr(sys, "argv", ["run.py", "--only", name])

    assert run.main() == status
    assert json.loads(capsys.readouterr().out)[name]["ok"] is False


def test_a_benchmark_that_is_not_there_is_named() -> None:
    command = [sys.executable, str(RUN), "--only", "speed"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)

    assert ended.returncode == 2
    assert "'speed' is no benchmark" in ended.stderr


def test_one_wrong_transfer_makes_all_tries_of_the_weights_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RUN.parent))
    quickest = importlib.import_module("weights").quickest
    made = [{"seconds": 7.0, "identical": True}, {"seconds": 8.0, "identical": False}]
    assert quickest(made) == ({"seconds": 7.0, "identical": False}, [7.0, 8.0])
