"""Jobs that run on Ray, in the shape of verl's: each reserves whole GPUs, and two of them take turns on the same ones.

Ray is real; its GPUs are numbers that it is told (``--num-gpus``), and the daemon's are the mock's.
"""

import importlib.util
import itertools
import json
from pathlib import Path

import pytest
from patience import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

WORKLOAD = Path(__file__).with_name("workloads") / "placement_groups.py"
JOB = """
name = "{name}"
rollout = {{nodes = 1}}
train = {{nodes = 1}}
"""
ROUNDS = 3


@pytest.fixture(autouse=True)
def ray_is_there():
    if importlib.util.find_spec("ray") is None:
        pytest.skip("there is no Ray here; pip install ray")


class OnRay:
    """Jobs, each started by ``rollmuxd run`` with a Ray of its own."""

    def __init__(self, live, folder):
        self.live, self.folder, self.record = live, folder, folder / "record.jsonl"
        self.record.touch()
        self.started, self.rays = {}, {}

    def start(self, name):
        self.started[name] = self.live.run_on_ray(name, JOB.format(name=name), WORKLOAD, name, self.record, str(ROUNDS))

    def begin(self, holder):
        """Once all wait for what the holder has: to start a Ray takes its time, and one might be through alone."""
        daemon = self.live.daemons[-1]

        def all_wait():
            for name, process in self.started.items():
                assert process.poll() is None, f"{name} has ended: {self.err(name)}"
            return all(name in daemon.jobs() and daemon.waits(name) for name in self.started)

        self.live.until("all wait", all_wait, every=0.3)
        self.rays = self.live.names_below(process.pid for process in self.started.values())
        holder.do("leave")
        holder.do("end")

    def said(self, name):
        """What a job has said, to its good end."""
        status = self.started[name].wait(PATIENCE_S)
        assert status == 0, self.err(name)
        out = (self.folder / f"{name}.out").read_text()
        return {key: value for line in out.splitlines() for key, value in json.loads(line).items()}

    def err(self, name):
        return (self.folder / f"{name}.err").read_text()

    def stays(self):
        """Who computed on which GPU from when to when, in order."""
        lines = [json.loads(line) for line in self.record.read_text().splitlines()]
        begun, found = {}, []
        for line in lines:
            key = (line["job"], line["gpu"])
            if line["what"] == "begin":
                begun[key] = line["at"]
            else:
                found.append((line["gpu"], begun.pop(key), line["at"], line["job"]))
        return sorted(found)

    def end(self):
        for process in self.started.values():
            process.terminate()
        for process in self.started.values():
            process.wait(PATIENCE_S)


@pytest.fixture
def on_ray(live, tmp_path):
    made = OnRay(live, tmp_path)
    yield made
    made.end()


def took_turns(stays):
    """Nobody came while another was there, and neither had it all before the other."""
    for gpu in ("mock/gpu0", "mock/gpu1"):
        mine = [stay for stay in stays if stay[0] == gpu]
        assert sorted(job for *_, job in mine) == ["a"] * ROUNDS + ["b"] * ROUNDS
        for (_, _, left, job), (_, came, _, other) in itertools.pairwise(mine):
            assert left <= came, f"{other} came to {gpu} while {job} was on it"
        order = "".join(job for *_, job in mine)
        assert order not in ("aaabbb", "bbbaaa"), "one of them has waited until the other was through"


def test_two_jobs_that_reserve_all_gpus_each_on_a_ray_of_its_own_take_turns_on_them(live, on_ray):
    live.daemon((("0", "rollout"), ("1", "train")), lease_s=20.0, heartbeat_s=2.0)
    holder = live.holder("holder")
    for name in ("a", "b"):
        on_ray.start(name)
    on_ray.begin(holder)
    a, b = on_ray.said("a"), on_ray.said("b")

    for name, said in (("a", a), ("b", b)):
        assert (said["resources"]["GPU"], said["done"]) == (2, ROUNDS)
        # Without us: on one Ray the second group of this shape waits until the first is gone.
        assert (said["beside"], said["state"]) == (False, "PENDING")
        assert sorted(said["gpus"]) == [[["0"], "0", name], [["1"], "1", name]]
    assert a["address"] != b["address"]
    took_turns(on_ray.stays())
    # Both Rays are gone with all their processes.
    pids = {json.loads(line)["pid"] for line in on_ray.record.read_text().splitlines()}
    assert len(pids) == 4
    assert not any(live.lives(pid) for pid in pids)
    assert sum(name == "gcs_server" for name in on_ray.rays.values()) == 2
    assert not [name for pid, name in on_ray.rays.items() if live.lives(pid)]
