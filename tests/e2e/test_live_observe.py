"""A daemon that only watches (mode observe): trainers are never made to wait, and what it saw can be worked out."""

import json
import os
import signal
import sys

import forked
import pytest
from patience import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_jobs_on_the_same_gpus_run_at_the_same_time_and_nothing_is_moved_or_ended(live):
    daemon = live.daemon(mode="observe")

    a, b = live.trainer("a"), live.trainer("b")
    for job in (a, b):
        job.do("start")

    # Sharing, the second would wait for the first: there is one rollout node.
    first, second = a.do("enter", phase="rollout"), b.do("enter", phase="rollout")
    assert (first["gpus"], second["gpus"]) == ([], [])
    for job in (a, b):
        job.do("leave")
        job.do("enter", phase="train")
        job.do("leave")

    assert daemon.facts("order_issued") == []
    assert [line for line in daemon.witness() if line["event"] in ("load", "park", "discard")] == []
    jobs = daemon.jobs()
    assert {job["status"] for job in jobs.values()} == {"admitted"}
    assert {job["admission"] for job in jobs.values()} == {"observed"}
    assert [node["status"] for node in daemon.get("/v1/nodes")["items"]] == ["up", "up"]
    for job in (a, b):
        job.do("end")


def test_a_lost_job_is_noted_and_not_killed(live):
    daemon = live.daemon(mode="observe", tables="[backends.mock]\nowns_sessions = true\n")
    a = live.holder("a", on_loss="kill")
    heartbeat = a.heartbeat
    a.freeze()
    os.kill(heartbeat, signal.SIGSTOP)
    live.until("it is lost", lambda: daemon.facts("job_lost"))
    live.until("it has ended for the daemon", lambda: daemon.job("a")["status"] == "ended")
    assert live.lives(a.pid)
    os.kill(heartbeat, signal.SIGCONT)
    os.kill(a.pid, signal.SIGCONT)


def test_what_sharing_would_have_gained_is_worked_out_from_what_was_seen(live):
    daemon = live.daemon(mode="observe")
    jobs = [live.trainer(name) for name in ("a", "b")]
    for job in jobs:
        job.do("start")
        for _ in range(4):
            for phase in ("rollout", "train"):
                job.do("enter", phase=phase)
                job.do("leave")

    def asked(*command):
        told = forked.run(
            [sys.executable, "-m", "rollmuxd", *command, "--url", daemon.url, "--json"],
            capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        return json.loads(told.stdout) if told.returncode == 0 else told.stderr

    found = asked("estimate", "--observed", "--switch-s", "0")
    assert found["jobs"] == 2
    assert found["shared_s"]["middle"] > 0
    assert [one["baseline"].startswith("one after the other") for one in found["against"]] == [True, True]
    assert asked("estimate", "--observed", "--since", "1h", "--switch-s", "0") == found
    assert "no job has finished 3 iterations yet" in asked("estimate", "--observed", "--since", "2999-01-01")
    report = asked("report")["sharing"]
    assert (report["jobs"], report["rollout_gpus"], report["train_gpus"], report["ran_on"]) == (["a", "b"], 1, 1, 0)
    assert report["estimate"]["jobs"] == 2


def test_what_rollmuxd_run_starts_keeps_the_gpus_that_it_sees(live, tmp_path):
    daemon = live.daemon(mode="observe")
    (tmp_path / "job.toml").write_text('name = "math"\nrollout = {nodes = 1}\ntrain = {nodes = 1}\n')
    show = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'), os.environ['ROLLMUX_JOB'])"
    command = ["run", "--job", "job.toml", "--url", daemon.url, "--", sys.executable, "-c", show]
    told = forked.run(
        [sys.executable, "-m", "rollmuxd", *command],
        cwd=tmp_path, env={**os.environ, "CUDA_VISIBLE_DEVICES": "3,4"}, capture_output=True, text=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert (told.returncode, told.stdout) == (0, "3,4 math\n"), told.stderr
    assert daemon.job("math")["status"] == "ended"


def test_everything_that_can_be_asked_of_a_daemon_that_watches_is_answered(live):
    daemon = live.daemon(mode="observe")
    live.holder("a", slo=2.0, rollout={"seconds": 10}, train={"seconds": 10})
    for path in (
        *("/v1/jobs/a", "/v1/jobs/a/explain", "/v1/groups", "/v1/groups/g1", "/v1/slots", "/v1/nodes", "/v1/pools"),
        *("/v1/report", "/v1/report?by=pool", "/metrics", "/v1/hosts", "/"),
    ):
        assert daemon.call("GET", path).status_code == 200, path
    wanted = {"name": "b", "phases": [{"name": "rollout", "pools": ["rollout"]}], "wants": {"rollout": {}}}
    assert daemon.call("POST", "/v1/plan", {"jobs": [wanted]}).status_code == 200
