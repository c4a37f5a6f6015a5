"""Real GRPO runs of TRL under a real daemon: `examples/trl_grpo.py`, in processes of their own."""

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked
import pytest
from networks import free_port
from patience import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
if importlib.util.find_spec("trl") is None or importlib.util.find_spec("torch") is None:
    pytest.skip("TRL is not installed: pip install 'trl>=1.0,<1.17'", allow_module_level=True)

EXAMPLES = Path(__file__).parents[2] / "examples"
SHARED = Path(__file__).parents[1] / "shared"
STARTER = Path(__file__).with_name("workloads") / "trl_runs.py"
FSDP = STARTER.with_name("trl_fsdp.py")
STEPS, SAVE_EVERY = 8, 4
#: what takes long of what the starter imports
IMPORTED = ("torch._dynamo", "transformers", "datasets", "trl.trainer.grpo_trainer", "accelerate.commands.launch")
#: by job: what it trains
THREE = {"trl-high": dict(task="high"), "trl-same": dict(task="same"), "trl-other": dict(task="high", seed=2)}
#: longer than this no collective may take: who waited for a turn in one would end the process group
GROUP_TIMEOUT_S = 20
RANKS = 4

#: a user's script with the import changed, and what it has to say on CPUs only (PARKING: model and optimizer move)
TRAIN = """
import gc, pathlib, sys, time, torch, trl_grpo
gc.freeze()
torch.set_num_threads(1)
task, parking = sys.argv[1:]
on_cpus = dict(rollmux=dict(parking=True)) if parking == "parking" else {}
run = trl_grpo.trainer(task, task, max_steps=6, num_iterations=2, **on_cpus)
pathlib.Path(f"{task}.built").touch()
while len(list(pathlib.Path().glob("*.built"))) < 2:  # or one might be through before the other begins
    time.sleep(0.02)
run.train()
time.sleep(3)  # as long as it takes to save it
print(f"{task}: weights {trl_grpo.digest(run.model)}", flush=True)
"""
#: what `rollmuxd run` is told of it; the job's name is not the run's
JOB = """
name = "math-{task}"
train = {{nodes = 1{state}}}
phases = {{rollout = "train", train = "train"}}
"""


class Starter:
    """The process that all runs of this file are forks of."""

    def __init__(self, home):
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("ROLLMUX_", "XDG_"))}
        self._process = forked.Popen(
            [sys.executable, str(STARTER)],
            env={**kept, "HOME": str(home), "PYTHONPATH": f"{EXAMPLES}:{SHARED}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            imported=IMPORTED,
        )

    def __call__(self, **what):
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self):
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)  # (to take torch down takes its time on a busy machine)
        self._process.stdout.close()


@pytest.fixture(scope="module")
def starter(tmp_path_factory):
    made = Starter(tmp_path_factory.mktemp("home"))
    yield made
    made.close()


class Runs:
    """What was started in one test, and what each has said."""

    def __init__(self, folder, starter, live):
        self.folder = folder
        self._starter = starter
        self._live = live
        self._started = {}

    def start(self, run, log, environment, **arguments):
        """Its pid."""
        log = self.folder / log
        asked = {"run": run, "with": arguments, "cwd": str(self.folder), "log": str(log), "environment": environment}
        pid = self._starter(**asked)["pid"]
        self._started[pid] = log
        return pid

    def lives(self):
        """Nothing has ended."""
        return all(self._status(pid) is None for pid in self._started)

    def kill(self, pid):
        for each in (*self._live.children_of(pid), pid):
            os.kill(each, signal.SIGKILL)
        assert self._ended(pid) == -signal.SIGKILL

    def weights(self):
        """By job; of all that were started and not killed, which must have ended well."""
        for pid, log in list(self._started.items()):
            assert self._ended(pid) == 0, log.read_text()
        said = "".join(log.read_text() for log in sorted(self.folder.glob("*.log")))
        return re.findall(r"([\w-]+): weights (\w+)", said)

    def _ended(self, pid):
        def status():
            found = self._status(pid)
            return None if found is None else (found,)

        (found,) = self._live.until(f"process {pid} has ended", status)
        del self._started[pid]
        return found

    def _status(self, pid):
        """Its exit status; None: it runs."""
        return self._starter(ask=pid)["status"]

    def close(self):
        for pid in self._started:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                for each in (*self._live.children_of(pid), pid):
                    os.kill(each, signal.SIGKILL)
        for log in self.folder.glob("*.log"):
            print(f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-40:]))


@pytest.fixture
def runs(tmp_path, starter, live):
    folder = tmp_path / "runs"
    folder.mkdir()
    made = Runs(folder, starter, live)
    yield made
    made.close()


def where(daemon):
    """The environment of a run that is to be shared."""
    return {"ROLLMUX_URL": daemon.url, "ROLLMUX_REQUIRED": "1"}


def test_three_runs_on_one_gpu_one_killed_and_resumed_end_with_the_weights_that_each_has_alone(live, runs):
    runs.start("alone", "alone.log", {"ROLLMUX_URL": "off"}, runs=THREE, max_steps=STEPS)
    daemon = live.daemon((("0", "train"),))
    first = live.holder("first", phase="train", rollout=None)

    def shared(name, *more, **how):
        of = [part for key, value in THREE[name].items() for part in (f"--{key}", str(value))]
        steps = ["--steps", str(STEPS), "--save-every", str(SAVE_EVERY)]
        arguments = ["--name", name, *of, *steps, "--parking", "--out", name, *more]
        return runs.start("example", f"{name}.log", where(daemon), arguments=arguments, **how)

    # It comes no further than into its second checkpoint, however late we are.
    pids = {name: shared(name, saves=1 if name == "trl-high" else None) for name in THREE}
    live.until("all three wait", lambda: all(name in daemon.jobs() and daemon.waits(name) for name in THREE))
    first.do("leave")
    first.do("end")
    checkpoint = runs.folder / "trl-high" / f"checkpoint-{SAVE_EVERY}" / "trainer_state.json"
    live.until("a checkpoint is whole", lambda: checkpoint.exists() and checkpoint.read_text().endswith("}\n"))
    runs.kill(pids["trl-high"])
    assert not (runs.folder / "trl-high" / f"checkpoint-{STEPS}").exists()
    shared("trl-high", "--resume")

    weights = runs.weights()
    assert sorted(weights) == sorted([*dict(weights).items()] * 2), weights
    assert {name for name, _ in weights} == set(THREE)

    # They did share: each was parked for another, and no GPU was held by two.
    parked = {fact["job"] for fact in daemon.facts("order_issued", kind="park")}
    assert {name: job["status"] for name, job in daemon.jobs().items()} == dict.fromkeys(["first", *THREE], "ended")
    assert {daemon.job(name)["job"] for name in THREE} <= parked


def test_runs_that_are_only_watched_never_wait_and_the_report_says_what_sharing_would_have_saved(live, runs):
    daemon = live.daemon((("0-3", "train"),), mode="observe")
    for task in ("high", "same"):
        arguments = ["--task", task, "--steps", "6", "--parking", "--out", task]
        runs.start("example", f"{task}.log", where(daemon), arguments=arguments)
    assert {name for name, _ in runs.weights()} == {"trl-high", "trl-same"}
    assert daemon.facts("order_issued") == []

    def report(*more):
        command = [sys.executable, "-m", "rollmuxd", "report", "--url", daemon.url, *more]
        return forked.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout

    told = json.loads(report("--json"))["sharing"]
    # Both phases ran on the same four GPUs: against pools of two and two.
    assert sorted(told["jobs"]) == ["trl-high", "trl-same"]
    assert (told["rollout_gpus"], told["train_gpus"], told["ran_on"]) == (2, 2, 4)
    against = {one["baseline"]: one["gain"] for one in told["estimate"]["against"]}
    assert set(against) == {"one after the other on the same pools", "one after the other, each on all 4 GPUs"}
    assert all(0 < gain["low"] <= gain["middle"] <= gain["high"] for gain in against.values())
    said = report()
    for line in ("what sharing would have saved", "one after the other on the same pools", "each on all 4 GPUs"):
        assert line in said


def test_four_ranks_outlive_a_pause_and_a_restart_that_take_longer_than_their_collectives_may(live, runs):
    daemon = live.daemon((("0", "train"),))
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(RANKS), **where(daemon)}
    # (So many steps that it is not through before we have seen that it has begun.)
    more = dict(max_steps=8, ddp_backend="gloo", ddp_timeout=GROUP_TIMEOUT_S)
    for rank in map(str, range(RANKS)):
        of_rank = {**group, "RANK": rank, "LOCAL_RANK": rank}
        runs.start("ranks", f"rank{rank}.log", of_rank, name="ranks", more=more)

    live.until("it is in the midst of it", lambda: len(daemon.facts("slot_released")) >= 3)
    daemon.post("/v1/jobs/ranks/pause")
    live.until("it is paused", lambda: daemon.job("ranks")["status"] == "paused")
    began = time.monotonic()
    assert daemon.stop() == 0
    daemon.restart()
    live.until("no collective would wait still", lambda: time.monotonic() > began + GROUP_TIMEOUT_S + 3)
    assert daemon.job("ranks")["status"] == "paused"
    daemon.post("/v1/jobs/ranks/resume")

    weights = runs.weights()
    assert sorted(name for name, _ in weights) == ["alone"] * RANKS + ["shared"] * RANKS
    assert len({sha for _, sha in weights}) == 1, weights
    live.until("it has ended", lambda: daemon.job("ranks")["status"] == "ended")


def test_ranks_that_accelerate_has_launched_under_fsdp_are_parked_shard_by_shard_and_change_no_bit(live, runs):
    # (Ranks that import TRL take all of a machine: a heartbeat may be late, which is not what is looked at here.)
    daemon = live.daemon((("0", "train"),), lease_s=60)
    sharded = ["--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"]
    layers = ["--fsdp_transformer_layer_cls_to_wrap", "LlamaDecoderLayer"]
    ranks = ["--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    launch = [*ranks, "--main_process_port", str(free_port()), *sharded, *layers]
    # torchrun, by which accelerate starts them, has them import TRL if it is not told to fork.
    forks = {"PET_START_METHOD": "fork", "PET_RUN_PATH": "1"}
    rival = live.trainer("rival", rollout=None)
    rival.do("start")  # now: what it imports takes longer than what is left of the run then
    runs.start("launched", "fsdp.log", {**where(daemon), **forks}, words=[*launch, str(FSDP), "fsdp"])

    def begun():
        assert runs.lives()
        return len(daemon.facts("slot_released")) >= 3

    live.until("it is in the midst of it", begun)
    rival.do("enter", phase="train")
    parked = {fact["job"] for fact in daemon.facts("order_issued", kind="park")}
    assert parked == {daemon.job("fsdp")["job"]}
    rival.do("leave")
    rival.do("end")

    weights = runs.weights()
    assert sorted(name for name, _ in weights) == ["alone"] * 2 + ["shared"] * 2
    assert len({sha for _, sha in weights}) == 1, weights
    live.until("it has ended", lambda: daemon.job("fsdp")["status"] == "ended")


def test_two_runs_with_servers_roll_out_and_train_at_once_and_hand_weights_on_with_both_pools(live, runs):
    daemon = live.daemon(live.one_and_one)
    tasks = ("high", "same")
    for task in tasks:
        runs.start("served", f"{task}.log", where(daemon), task=task)
    weights = runs.weights()
    assert sorted(weights) == sorted([*dict(weights).items()] * 2), weights
    assert {name for name, _ in weights} == set(tasks)
    # An evaluation (after steps 2 and 4) is a sync, after which the server has the weights of that step.
    step = ["sync", "rollout", "train"]
    phases = ["init", "init", *step, *step, "sync", "rollout", "train", *step, "sync", "train"]
    for task in tasks:
        assert [fact["phase"] for fact in daemon.facts("slot_queued", job=daemon.job(task)["job"])] == phases


def test_scripts_that_rollmuxd_run_has_started_share_by_what_their_job_files_say_alone(live, runs):
    tasks = {"high": dict(task="high"), "same": dict(task="same")}
    runs.start("alone", "alone.log", {"ROLLMUX_URL": "off"}, runs=tasks, max_steps=6, num_iterations=2)
    daemon = live.daemon((("0", "train"),))
    (runs.folder / "train.py").write_text(TRAIN)
    (runs.folder / "high.toml").write_text(JOB.format(task="high", state=""))
    (runs.folder / "same.toml").write_text(JOB.format(task="same", state=', driver = "channel"'))
    for task, parking in (("high", "nothing"), ("same", "parking")):
        python = str(runs.folder / f"python-{task}")
        words = ["run", "--job", f"{task}.toml", "--grace", "0.5", "--", python, "train.py", task, parking]
        runs.start("rollmuxd", f"{task}.log", where(daemon), words=words, python=python)

    weights = runs.weights()
    assert sorted(weights) == sorted([*dict(weights).items()] * 2), weights
    assert {name for name, _ in weights} == set(tasks)

    # Nobody has made a job of its own, and each was there once.
    jobs = daemon.jobs()
    assert {name: (job["run"], job["status"]) for name, job in jobs.items()} == {
        "math-high": (1, "ended"),
        "math-same": (1, "ended"),
    }
    for job in jobs.values():
        queued = [fact["phase"] for fact in daemon.facts("slot_queued", job=job["job"])]
        assert queued == ["init", "init", *["rollout", "train"] * 3]
    assert {fact["job"] for fact in daemon.facts("order_issued", kind="park")} == {jobs["math-same"]["job"]}
