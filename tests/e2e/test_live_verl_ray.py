"""Two runs of verl as its users start them, each on a Ray of its own by ``rollmuxd run``, that share one GPU.

Of verl all is real but what a worker does on its GPU (`plugins/hook-verl/tests/verl_tiny_ray.py`): its task runner, its
newer trainer, TransferQueue, placement groups that reserve ``GPU``, and workers that are actors in them. Ray's GPU is a
number that it is told, the daemon's is the mock's.
"""

import importlib.util
import itertools
import json
from pathlib import Path

import pytest
from patience import PATIENCE_S
from ray_cluster import IMPORTED_BY_VERL

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
NEEDED = ("torch", "ray", "tensordict", "verl", "transfer_queue", "zmq")
if any(importlib.util.find_spec(needed) is None for needed in NEEDED):
    pytest.skip("verl is not installed: .ci/run says what these tests need of it", allow_module_level=True)

PROGRAM = Path(__file__).parents[2] / "plugins" / "hook-verl" / "tests" / "verl_tiny_ray.py"
STEPS = 4
JOB = """
name = "{name}"
train = {{gpus = 1}}
phases = {{sync = "train", rollout = "train", train = "train"}}
"""
#: the trainer's own means to be parked, which a run on GPUs needs
PARKING = (
    "+rollmux.parking=True",
    "actor_rollout_ref.actor.fsdp_config.param_offload=True",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",
)


class Runs:
    """Each in a folder of its own, where its workers write what they did."""

    def __init__(self, live, folder):
        self.live, self.folder = live, folder
        self.started = {}

    def start(self, name, seed):
        verl = {"VERL_USE_EXTERNAL_MODULES": "rollmuxd_hook_verl", "PYTHONPATH": str(PROGRAM.parent)}
        more = ("--seed", str(seed), "--steps", str(STEPS), "--out", self.folder / name, *PARKING)
        self.started[name] = self.live.run_on_ray(
            name, JOB.format(name=name), PROGRAM, *more, imported=IMPORTED_BY_VERL, ROLLMUX_REQUIRED="1", **verl
        )

    def wait(self, name):
        """Whether a run waits for a GPU, in its first phase."""
        assert self.started[name].poll() is None, f"{name} has ended"
        daemon = self.live.daemons[0]
        return name in daemon.jobs() and daemon.waits(name)

    def said(self, name):
        """What a run has said, to its good end."""
        status = self.started[name].wait(PATIENCE_S)
        assert status == 0, f"{name} ended with {status}"
        return json.loads((self.folder / name / "told.json").read_text())

    def touches(self):
        """When whose worker was on the GPU, in order."""
        told = "".join((self.folder / name / "record.jsonl").read_text() for name in self.started)
        return sorted(map(json.loads, told.splitlines()), key=lambda line: line["begun"])

    def end(self):
        for name, run in self.started.items():
            if run.poll() is None:
                self.live.end(run)
            print(f"--- {name}\n" + "\n".join((self.folder / f"{name}.err").read_text().splitlines()[-60:]))


@pytest.fixture
def runs(live, tmp_path):
    live.daemon((("0", "train"),), lease_s=20.0, heartbeat_s=2.0)
    made = Runs(live, tmp_path)
    yield made
    made.end()


def test_two_runs_each_on_a_ray_of_its_own_share_a_gpu_and_learn_what_each_learns_alone(live, runs):
    daemon = live.daemons[0]
    holder = live.holder("holder", phase="train", rollout=None)
    for seed, name in enumerate(("a", "b"), start=1):
        runs.start(name, seed)
    # To start a Ray takes its time: else one might be through before the other begins.
    live.until("both wait", lambda: all(map(runs.wait, "ab")), every=0.3)
    rays = live.names_below(run.pid for run in runs.started.values())
    holder.do("leave")
    holder.do("end")
    said = {name: runs.said(name) for name in ("a", "b")}

    assert {name: one["weights"] for name, one in said.items()} == {name: one["alone"] for name, one in said.items()}
    assert said["a"]["weights"] != said["b"]["weights"]
    assert [one["trainers"] for one in said.values()] == [False, False], "a worker has imported a trainer"

    # Each turned about, by what the journal says and by what the workers did: nobody came before the other had left.
    holds = held(daemon)
    assert [name for name, kind in holds if kind == "over"] == [name for name, kind in holds if kind == "claimed"]
    assert all(first[0] == then[0] for first, then in zip(holds[::2], holds[1::2], strict=True)), holds
    touches = runs.touches()
    for one, other in itertools.pairwise(touches):
        assert one["left"] <= other["begun"], f"{other} while {one}"
    assert turns(name for name, _ in holds) >= 2 * STEPS
    assert turns(touch["job"] for touch in touches) >= 2 * STEPS
    for name in ("a", "b"):
        mine = [fact["phase"] for fact in daemon.facts("slot_queued", job=daemon.job(name)["job"])]
        assert mine == ["init", *["rollout", "train", "sync"] * STEPS]
        assert {touch["gpu"] for touch in touches if touch["job"] == name} == {"0"}, "Ray has given it none"
        assert daemon.job(name)["status"] == "ended"
    assert not any(live.lives(pid) for pid in {touch["pid"] for touch in touches}), "a worker is still there"
    assert sum(name == "gcs_server" for name in rays.values()) == 2
    assert not [name for pid, name in rays.items() if live.lives(pid)]


def held(daemon):
    """Who claimed the GPU, and who was through with it, in order."""
    names = {job["job"]: name for name, job in daemon.jobs().items() if name != "holder"}
    facts = daemon.facts("slot_queued", "slot_claimed", "slot_over")
    owner = {fact["slot"]: names.get(fact["job"]) for fact in facts if fact["fact"] == "slot_queued"}
    held = [(owner[fact["slot"]], fact["fact"].removeprefix("slot_")) for fact in facts if fact["slot"] in owner]
    return [(name, kind) for name, kind in held if name and kind != "queued"]


def turns(names):
    """How often it was another's."""
    return sum(one != other for one, other in itertools.pairwise(names))
