"""Runs of verl's own trainer loop under a real daemon: `plugins/hook-verl/tests/verl_tiny.py`, as verl is started."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]
if any(importlib.util.find_spec(needed) is None for needed in ("torch", "ray", "tensordict", "verl")):
    pytest.skip("verl is not installed: .ci/run says what these tests need of it", allow_module_level=True)

PROGRAM = Path(__file__).parents[2] / "plugins" / "hook-verl" / "tests" / "verl_tiny.py"
STEPS, SAVE_EVERY = 16, 4
#: the trainer's own means to be parked, which a run on GPUs needs
PARKING = (
    "+rollmux.parking=True",
    "actor_rollout_ref.actor.fsdp_config.param_offload=True",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",
)


class Runs:
    """Processes of the program, and what each has said."""

    def __init__(self, folder, url):
        self.folder, self.url = folder, url
        self.started = []

    def start(self, name, seed, when, *more):
        log = self.folder / f"{name}-{len(self.started)}.log"
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("ROLLMUX_", "XDG_"))}
        hooked = {"VERL_USE_EXTERNAL_MODULES": "rollmuxd_hook_verl", "ROLLMUX_URL": self.url, "ROLLMUX_REQUIRED": "1"}
        options = ["--name", name, "--seed", str(seed), "--steps", str(STEPS), "--out", str(self.folder / name)]
        options += ["--when", str(self.folder / when)]
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, PROGRAM, *options, *PARKING, *more],
                cwd=self.folder,
                env={**kept, "HOME": str(self.folder), **hooked},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        self.started.append((process, log))
        return process

    def weights(self):
        """By job; of all that were started, which must have ended well."""
        for process, log in self.started:
            assert process.wait(240) in (0, -signal.SIGKILL), log.read_text()
        return re.findall(r"(\S+): weights (\w+)", "".join(log.read_text() for _, log in self.started))

    def close(self):
        for process, log in self.started:
            process.kill()
            process.wait()
            print(f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-40:]))


@pytest.fixture
def runs(live, tmp_path):
    made = Runs(tmp_path, live.daemon((("0", "train"),)).url)
    yield made
    made.close()


def test_two_runs_on_one_gpu_one_killed_and_resumed_end_with_the_weights_that_each_has_alone(live, runs):
    daemon = live.daemons[0]
    saving = f"trainer.save_freq={SAVE_EVERY}"
    first = runs.start("one", 1, "now", saving)
    runs.start("two", 2, "now", "--alone", "trainer.test_freq=8", "+rollmux.side.eval.seconds=10")
    runs.start("one", 1, "later", "--alone", saving, "+rollmux.replace=True")
    for ready in ("now-one", "now-two", "later-one"):
        live.until("all have imported what they need", (runs.folder / ready).exists, within=200)

    (runs.folder / "now").touch()
    saved = runs.folder / "one" / "latest_checkpointed_iteration.txt"
    live.until("a checkpoint is there", saved.exists, within=100, every=0.01)
    for pid in (*live.children_of(first.pid), first.pid):
        os.kill(pid, signal.SIGKILL)
    first.wait()
    assert int(saved.read_text()) < STEPS
    (runs.folder / "later").touch()

    weights = runs.weights()
    assert sorted(weights) == sorted([*dict(weights).items()] * 2), weights
    assert {name for name, _ in weights} == {"one", "two"}

    # They did share: each was parked for the other, and no GPU was held by both.
    parked = {fact["job"] for fact in daemon.facts("order_issued") if fact.get("kind") == "park"}
    assert len(parked) >= 2
    assert {name: job["status"] for name, job in daemon.jobs().items()} == {"one": "ended", "two": "ended"}
    step = ["rollout", "train", "sync"]
    of_two = [fact["phase"] for fact in daemon.facts("slot_queued", job=daemon.job("two")["job"])]
    assert of_two == ["init", *step * 8, "eval", *step * 8, "eval"]
