"""Real GRPO runs of TRL under a real daemon: `examples/trl_grpo.py`, as a user starts it."""

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]
if importlib.util.find_spec("trl") is None or importlib.util.find_spec("torch") is None:
    pytest.skip("TRL is not installed: pip install 'rollmuxd-hook-trl[trl]'", allow_module_level=True)

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS, SAVE_EVERY = 12, 6
TASKS = ("high", "same")

ALONE = """
import sys, torch, trl_grpo
torch.set_num_threads(1)
for task in sys.argv[2:]:
    run = trl_grpo.trainer(task, sys.argv[1], max_steps={steps})
    run.train()
    print(f"trl-{{task}}: weights {{trl_grpo.digest(run.model)}}")
"""

#: longer than this no collective may take: who waited for a turn in one would end the process group
GROUP_TIMEOUT_S = 8

RANKS = """
import sys, torch, trl, trl_grpo
torch.set_num_threads(1)
more = dict(max_steps=6, ddp_backend="gloo", ddp_timeout={timeout_s})
alone = trl_grpo.trainer("high", "alone", kind=trl.GRPOTrainer, **more)
alone.train()
shared = trl_grpo.trainer("high", "shared", rollmux=dict(name="ranks", parking=True), **more)
shared.train()
for name, run in (("alone", alone), ("shared", shared)):
    print(f"{{name}}: weights {{trl_grpo.digest(run.model)}}")
torch.distributed.destroy_process_group()
"""

SERVED = """
import sys, torch, trl, trl_grpo
from trl.trainer import grpo_trainer
from rollmuxd_hook_trl.fake import FakeGeneration
torch.set_num_threads(1)
grpo_trainer.VLLMGeneration = FakeGeneration
task, more = sys.argv[1], dict(
    max_steps=4, use_vllm=True, vllm_mode="server", vllm_importance_sampling_correction=False,
    eval_strategy="steps", eval_steps=2, eval_dataset=trl_grpo.Dataset.from_dict({"prompt": ["1="] * 8}),
)
alone = trl_grpo.trainer(task, "alone", kind=trl.GRPOTrainer, **more)
alone.train()
pools = dict(rollout=dict(nodes=1), train=dict(nodes=1))
shared = trl_grpo.trainer(task, "shared", rollmux=dict(name=task, **pools), **more)
shared.train()
for run in (alone, shared):
    print(f"{task}: weights {trl_grpo.digest(run.model)}")
"""


class Runs:
    """Processes of the example, and what each has said."""

    def __init__(self, folder):
        self.folder = folder
        self.started = []

    def start(self, command, log, **environment):
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("ROLLMUX_", "XDG_"))}
        env = {**kept, "HOME": str(self.folder), "PYTHONPATH": str(EXAMPLES), **environment}
        with (self.folder / log).open("ab") as out:
            process = subprocess.Popen(
                [sys.executable, *command], cwd=self.folder, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        self.started.append((process, self.folder / log))
        return process

    def weights(self):
        """By job; of all that were started, which must have ended well."""
        for process, log in self.started:
            assert process.wait(240) in (0, -signal.SIGKILL), log.read_text()
        said = "".join(log.read_text() for log in sorted({log for _, log in self.started}))
        return re.findall(r"(\S+): weights (\w+)", said)

    def close(self):
        for process, log in self.started:
            process.kill()
            process.wait()
            print(f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-40:]))


@pytest.fixture
def runs(tmp_path):
    made = Runs(tmp_path)
    yield made
    made.close()


def test_two_runs_on_one_gpu_one_killed_and_resumed_end_with_the_weights_that_each_has_alone(live, runs):
    runs.start(["-c", ALONE.format(steps=STEPS), "alone", *TASKS], "alone.log", ROLLMUX_URL="off")
    daemon = live.daemon((("0", "train"),))

    def shared(task, *more):
        command = [EXAMPLES / "trl_grpo.py", "--task", task, "--steps", str(STEPS), "--parking", "--out", task, *more]
        return runs.start(command, f"{task}.log", ROLLMUX_URL=daemon.url, ROLLMUX_REQUIRED="1")

    saving = ("--save-every", str(SAVE_EVERY))
    first = shared("high", *saving)
    shared("same")
    checkpoint = runs.folder / "high" / f"checkpoint-{SAVE_EVERY}" / "trainer_state.json"
    live.until("a checkpoint is there", checkpoint.exists, within=200)
    for pid in (*live.children_of(first.pid), first.pid):
        os.kill(pid, signal.SIGKILL)
    first.wait()
    assert not (runs.folder / "high" / f"checkpoint-{STEPS}").exists()
    shared("high", *saving, "--resume")

    weights = runs.weights()
    assert sorted(weights) == sorted([*dict(weights).items()] * 2), weights
    assert {name for name, _ in weights} == {"trl-high", "trl-same"}

    # They did share: each was parked for the other, and no GPU was held by both.
    parked = {fact["job"] for fact in daemon.facts("order_issued") if fact.get("kind") == "park"}
    assert len(parked) >= 2
    assert {name: job["status"] for name, job in daemon.jobs().items()} == {"trl-high": "ended", "trl-same": "ended"}


def test_two_ranks_outlive_a_pause_and_a_restart_that_take_longer_than_their_collectives_may(live, runs):
    daemon = live.daemon((("0", "train"),))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    for rank in ("0", "1"):
        command = ["-c", RANKS.format(timeout_s=GROUP_TIMEOUT_S)]
        of_rank = {"RANK": rank, "LOCAL_RANK": rank, "ROLLMUX_URL": daemon.url, "ROLLMUX_REQUIRED": "1"}
        runs.start(command, f"rank{rank}.log", **where, **of_rank)

    live.until("it is in the midst of it", lambda: len(daemon.facts("slot_released")) >= 4, within=200)
    daemon.post("/v1/jobs/ranks/pause")
    live.until("it is paused", lambda: daemon.job("ranks")["status"] == "paused", within=100)
    began = time.monotonic()
    assert daemon.stop() == 0
    daemon.restart()
    live.until("no collective would wait still", lambda: time.monotonic() > began + GROUP_TIMEOUT_S + 3, within=60)
    assert daemon.job("ranks")["status"] == "paused"
    daemon.post("/v1/jobs/ranks/resume")

    weights = runs.weights()
    assert sorted(name for name, _ in weights) == ["alone", "alone", "shared", "shared"]
    assert len({sha for _, sha in weights}) == 1, weights
    live.until("it has ended", lambda: daemon.job("ranks")["status"] == "ended")


def test_two_runs_with_servers_roll_out_and_train_at_once_and_hand_weights_on_with_both_pools(live, runs):
    daemon = live.daemon(live.one_and_one)
    for task in TASKS:
        runs.start(["-c", SERVED, task], f"{task}.log", ROLLMUX_URL=daemon.url, ROLLMUX_REQUIRED="1")
    weights = runs.weights()
    assert sorted(weights) == sorted([*dict(weights).items()] * 2), weights
    assert {name for name, _ in weights} == set(TASKS)
    # An evaluation (after steps 2 and 4) is a sync, after which the server has the weights of that step.
    step = ["sync", "rollout", "train"]
    phases = ["init", "init", *step, *step, "sync", "rollout", "train", *step, "sync", "train"]
    for task in TASKS:
        assert [fact["phase"] for fact in daemon.facts("slot_queued", job=daemon.job(task)["job"])] == phases
