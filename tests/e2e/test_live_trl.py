"""Real GRPO runs of TRL under a real daemon: `examples/trl_grpo.py`, as a user starts it."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
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
