"""A job on Ray in the shape of verl's: a placement group that reserves whole GPUs, and a worker in each of its bundles.

    python placement_groups.py NAME RECORD ROUNDS

Each worker writes into RECORD when it begins to compute on its GPU, and when it has ended. It says as JSON lines what
Ray gave it, and how a second group of the same shape fares beside it.
"""

import json
import os
import sys
import time
from pathlib import Path

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import rollmuxd

name, record, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
GPUS = len(os.environ["ROLLMUX_GPUS"].split(","))
PATIENCE_S = 90


@ray.remote(max_concurrency=1)
class Worker:
    """One rank, in one bundle."""

    def gpus(self):
        """What Ray gave it, what it sees, and whose it is: loops of verl are in such a worker."""
        return (
            [str(gpu) for gpu in ray.get_gpu_ids()],
            os.environ.get("CUDA_VISIBLE_DEVICES"),
            os.environ["ROLLMUX_JOB"],
        )

    def compute(self, phase, gpu, seconds):
        """Be on that GPU for so long."""
        self._write("begin", phase, gpu)
        time.sleep(seconds)
        self._write("end", phase, gpu)

    def _write(self, what, phase, gpu):
        line = {"at": time.monotonic_ns(), "what": what, "job": name, "phase": phase, "gpu": gpu, "pid": os.getpid()}
        with open(record, "a", encoding="ascii") as file:
            file.write(json.dumps(line) + "\n")


def reserve():
    """A group of as many bundles as there are GPUs, all of them on one node, as verl makes one for each node."""
    return placement_group([{"GPU": 1, "CPU": 1}] * GPUS, strategy="STRICT_PACK")


def say(**what):
    print(json.dumps(what), flush=True)


def until_all_are_here():
    """Each has reserved its GPUs before any of them begins."""
    (Path(record).parent / f"{name}.here").touch()
    give_up = time.monotonic() + PATIENCE_S
    while len(list(Path(record).parent.glob("*.here"))) < 2 and time.monotonic() < give_up:
        time.sleep(0.02)


ray.init(logging_level="ERROR", log_to_driver=False)
say(address=os.environ["RAY_ADDRESS"], resources=ray.cluster_resources())

# Two on one Ray: the second one waits for as long as the first has what it reserved.
first = reserve()
ray.get(first.ready(), timeout=PATIENCE_S)
second = reserve()
beside = second.wait(1)
state = placement_group_table(second)["state"]
remove_placement_group(first)
ray.get(second.ready(), timeout=PATIENCE_S)
say(beside=beside, state=state)

workers = [
    Worker.options(num_cpus=1, num_gpus=1, scheduling_strategy=PlacementGroupSchedulingStrategy(second, index)).remote()
    for index in range(GPUS)
]
given = ray.get([worker.gpus.remote() for worker in workers], timeout=PATIENCE_S)
say(gpus=given)
# The worker that Ray gave a GPU is the one that computes on it.
workers = [workers[[gpus[0] for gpus, *_ in given].index(str(number))] for number in range(GPUS)]

until_all_are_here()
with rollmuxd.job(name) as job:
    for _ in range(rounds):
        for rank, phase in enumerate(("rollout", "train")):
            with job.phase(phase) as slot:
                ray.get(workers[rank].compute.remote(phase, slot.gpus[0], 0.1), timeout=PATIENCE_S)
say(done=rounds)
