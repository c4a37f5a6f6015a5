"""Processes that the daemon starts: killed, hung or failing they are started again, on GPUs verified clean before."""

import os
import signal
import sys
import time
from pathlib import Path

import forked
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

AGAIN = Path(__file__).with_name("workloads") / "again.py"
STATE = {"gpu_gb": 2, "ram_gb": 2, "driver": "mock"}
TABLES = """
[relaunch]
after_s = 0.5
limit = 3

[backends.mock]
starts_processes = true
"""


@pytest.fixture
def daemon(live):
    made = live.daemon(tables=TABLES)
    yield made
    if made.jobs().get("again", {}).get("status") not in (None, "ended"):
        made.call("DELETE", "/v1/jobs/again", {"reason": "the test is over"})
    for fact in made.facts("process_started"):
        live.until("what was started has gone", lambda pid=fact["pid"]: not live.lives(pid))


def register(daemon, *arguments, argv=None, **more):
    body = {
        "name": "again",
        "phases": [{"name": "rollout", "pools": ["rollout"]}, {"name": "train", "pools": ["train"]}],
        "wants": {"rollout": {}, "train": {}},
        "states": {"rollout": STATE, "train": STATE},
        "on_loss": "relaunch",
        "launch": {"argv": argv or [sys.executable, str(AGAIN), *arguments], "cwd": str(daemon.folder)},
        **more,
    }
    answer = daemon.call("POST", "/v1/jobs", body)
    assert answer.status_code == 201, answer.text


def runs(live, daemon, run):
    """Wait until a run's process has had a slot; its pid."""

    def look():
        sessions = [fact["session"] for fact in daemon.facts("session_opened") if fact["run"] == run]
        queued = {fact["slot"] for fact in daemon.facts("slot_queued") if fact["session"] in sessions}
        return any(fact["slot"] in queued for fact in daemon.facts("slot_granted"))

    live.until(f"run {run} has its turn", look)
    return daemon.facts("process_started")[-1]["pid"]


def children_of(pid):
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for thread in threads for child in (thread / "children").read_text().split()]


def test_killed_or_hung_its_process_is_ended_and_started_again_on_its_old_nodes(live, daemon):
    register(daemon)
    first = runs(live, daemon, 1)

    os.killpg(first, signal.SIGKILL)
    second = runs(live, daemon, 2)
    assert second != first

    # Hung, with its heartbeat: nobody hears of it, and it does not go by itself.
    for pid in (second, *children_of(second)):
        os.kill(pid, signal.SIGSTOP)
    third = runs(live, daemon, 3)
    assert not live.lives(second), "the hung process was left"
    assert live.lives(third)

    placed = [fact["pins"] for fact in daemon.facts("job_placed")]
    assert placed == [placed[0]] * 3, "each run on the old nodes"
    assert [fact.get("relaunch", 0) for fact in daemon.facts("job_registered")] == [0, 1, 2]


def test_it_outlives_the_daemon_which_knows_it_again_and_ends_it_with_its_job(live, daemon):
    register(daemon)
    pid = runs(live, daemon, 1)
    daemon.kill9()
    time.sleep(0.3)
    daemon.restart()
    granted = len(daemon.facts("slot_granted"))
    live.until("it goes on", lambda: len(daemon.facts("slot_granted")) > granted + 2)
    assert live.lives(pid)
    assert len(daemon.facts("process_started")) == 1

    assert daemon.call("DELETE", "/v1/jobs/again", {"reason": "enough"}).status_code == 200
    live.until("it has gone", lambda: not live.lives(pid))
    assert not any("relaunch_at" in fact for fact in daemon.facts("job_lost"))


def test_one_that_fails_is_started_again_and_one_that_cannot_be_started_is_quarantined(live, daemon):
    register(daemon, "crash")
    first = runs(live, daemon, 1)
    runs(live, daemon, 2)
    assert not live.lives(first)
    assert "did not end the job" in daemon.facts("job_lost")[0]["reason"]["text"]
    assert "out of luck" in (daemon.state / "backends" / "mock" / "logs" / "l1.log").read_text()
    daemon.call("DELETE", "/v1/jobs/again", {"reason": "enough"})

    register(daemon, name="never", launch={"argv": ["/no/such/trainer"]})
    live.until("it is quarantined", lambda: daemon.job("never")["status"] == "quarantined")
    reason = daemon.job("never")["reason"]
    assert "started again 3 times" in reason
    assert "/no/such/trainer" in reason
    assert "reinstate" in reason


def test_one_that_exits_with_0_inside_its_job_has_ended_it_and_is_not_started_again(live, daemon):
    register(daemon, "exit")
    wait = [sys.executable, "-m", "rollmuxd", "job", "wait", "again", "--url", daemon.url, "--timeout", "60"]
    waited = forked.run(wait, capture_output=True, text=True)
    assert (waited.returncode, waited.stderr) == (0, "")
    assert daemon.job("again")["reason"] == "finished"
    assert daemon.facts("job_lost") == []
    assert len(daemon.facts("process_started")) == 1


def test_who_cannot_be_started_by_the_daemon_is_refused_by_name(live, daemon):
    body = {
        "name": "b",
        "phases": [{"name": "train", "pools": ["train"]}],
        "wants": {"train": {}},
        "on_loss": "relaunch",
    }
    answer = daemon.call("POST", "/v1/jobs", body)
    assert answer.status_code == 422
    assert "does not say what to start" in answer.json()["detail"]


def test_it_sees_its_gpus_and_what_it_prints_can_be_read_while_it_runs_and_afterwards(live, daemon):
    program = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['ROLLMUX_GPUS'], 'h\u00e9', flush=True)"
    # It stays: once it has ended it is started again, with a log that is empty at first.
    register(daemon, argv=[sys.executable, "-c", f"{program}; import time; time.sleep(600)"])
    path = "/v1/jobs/again/logs"

    live.until("it has printed", lambda: daemon.get(path)["text"])

    assert daemon.get(path)["text"] == "0,1 mock/gpu0,mock/gpu1 h\u00e9\n"
    pieces, at = "", 0
    while (piece := daemon.get(path, after=at, limit=3))["text"]:
        pieces, at = pieces + piece["text"], piece["next"]
    assert pieces == daemon.get(path)["text"], "a character was cut in two"

    live.until("it is known to have been started", lambda: daemon.facts("process_started"))
    pid = daemon.facts("process_started")[-1]["pid"]
    assert daemon.call("DELETE", "/v1/jobs/again", {"reason": "enough"}).status_code == 200
    live.until("it has gone", lambda: not live.lives(pid))
    assert daemon.get(path)["text"] == pieces
