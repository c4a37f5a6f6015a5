"""Runs of verl's own trainer loop under a real daemon: `plugins/hook-verl/tests/verl_tiny.py`, as verl is started."""

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from patience import PATIENCE_S
from ray_cluster import IMPORTED_BY_VERL

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
if any(importlib.util.find_spec(needed) is None for needed in ("torch", "ray", "tensordict", "verl")):
    pytest.skip("verl is not installed: .ci/run says what these tests need of it", allow_module_level=True)

PROGRAM = Path(__file__).parents[2] / "plugins" / "hook-verl" / "tests" / "verl_tiny.py"
STEPS, SAVE_EVERY = 8, 2
#: the trainer's own means to be parked, which a run on GPUs needs
PARKING = (
    "+rollmux.parking=True",
    "actor_rollout_ref.actor.fsdp_config.param_offload=True",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",
)


#: to import verl takes seconds, so it is done once, and each run is a fork of that; one that is to stay comes no
#: further than into its second checkpoint
MANY = """
import gc, json, os, sys, time
import verl_tiny
gc.freeze()  # a fork that looks for garbage would write to each page of what was imported

def stay():
    saved, done = verl_tiny.Workers.save_checkpoint, []
    def save(*given, **more):
        done.append(given)
        while len(done) > 1:
            time.sleep(3600)
        saved(*given, **more)
    verl_tiny.Workers.save_checkpoint = save

pids = []
for line in sys.stdin:
    pids.append(os.fork())
    if pids[-1] == 0:
        asked = json.loads(line)
        log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1), os.dup2(log, 2)
        sys.argv[1:] = asked["options"]
        if asked["stays"]:
            stay()
        verl_tiny.main()
        sys.exit()
    print(pids[-1], flush=True)
print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]))
"""


class Runs:
    """Processes of the program, and what each has said."""

    def __init__(self, folder, url):
        self.folder = folder
        self.logs, self.pids = [], []
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("ROLLMUX_", "XDG_"))}
        hooked = {"VERL_USE_EXTERNAL_MODULES": "rollmuxd_hook_verl", "ROLLMUX_URL": url, "ROLLMUX_REQUIRED": "1"}
        self._all = forked.Popen(
            [sys.executable, "-c", MANY],
            cwd=folder,
            env={**kept, "HOME": str(folder), "PYTHONPATH": str(PROGRAM.parent), **hooked},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            imported=IMPORTED_BY_VERL,
        )

    def start(self, name, seed, *more, stays=False):
        """The pid of a run."""
        self.logs.append(self.folder / f"{name}-{len(self.logs)}.log")
        options = ["--name", name, "--seed", str(seed), "--steps", str(STEPS), "--out", str(self.folder / name)]
        asked = {"log": str(self.logs[-1]), "options": [*options, *PARKING, *more], "stays": stays}
        self._all.stdin.write(json.dumps(asked) + "\n")
        self._all.stdin.flush()
        self.pids.append(int(self._all.stdout.readline()))
        return self.pids[-1]

    def weights(self):
        """By job; of all that were started, which must have ended well, or been killed."""
        ended, _ = self._all.communicate(timeout=PATIENCE_S)
        assert set(json.loads(ended)) <= {0, -signal.SIGKILL}, ended
        self.pids = []
        return re.findall(r"(\S+): weights (\w+)", "".join(log.read_text() for log in self.logs))

    def close(self):
        for pid in (self._all.pid, *self.pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._all.communicate()
        for log in self.logs:
            print(f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-40:]))


@pytest.fixture
def runs(live, tmp_path):
    made = Runs(tmp_path, live.daemon((("0", "train"),)).url)
    yield made
    made.close()


def test_two_runs_on_one_gpu_one_killed_and_resumed_end_with_the_weights_that_each_has_alone(live, runs):
    daemon = live.daemons[0]
    saving = f"trainer.save_freq={SAVE_EVERY}"
    holder = live.holder("holder", phase="train", rollout=None)
    first = runs.start("one", 1, saving, stays=True)
    runs.start("two", 2, "--alone", "trainer.test_freq=4", "+rollmux.side.eval.seconds=10")
    both = ("one", "two")
    live.until("both wait", lambda: all(name in daemon.jobs() and daemon.waits(name) for name in both))
    holder.do("leave")
    holder.do("end")
    saved = runs.folder / "one" / "latest_checkpointed_iteration.txt"
    live.until("a checkpoint is there", lambda: saved.exists() and saved.read_text())
    for pid in (*live.children_of(first), first):
        os.kill(pid, signal.SIGKILL)
    assert int(saved.read_text()) == SAVE_EVERY
    runs.start("one", 1, "--alone", saving, "+rollmux.replace=True")

    weights = runs.weights()
    assert sorted(weights) == sorted([*dict(weights).items()] * 2), weights
    assert {name for name, _ in weights} == {"one", "two"}

    # They did share: each was parked for the other, and no GPU was held by both.
    parked = {fact["job"] for fact in daemon.facts("order_issued", kind="park")}
    assert {daemon.job(name)["job"] for name in both} <= parked
    assert {name: job["status"] for name, job in daemon.jobs().items()} == dict.fromkeys(("holder", *both), "ended")
    step = ["rollout", "train", "sync"]
    of_two = [fact["phase"] for fact in daemon.facts("slot_queued", job=daemon.job("two")["job"])]
    assert of_two == ["init", *step * 4, "eval", *step * 4, "eval"]
