"""A job of several ranks over gloo, whose collectives may take so long: ``ranks.py NAME RANKS SECONDS STOP``.

It trains until the file STOP is there, then once more as many steps without a daemon, and tells both weights. The ranks
are forks of one process, which has imported torch for them; if one fails, all are ended (as torchrun would).
"""

import contextlib
import datetime as dt
import gc
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import httpcore  # noqa: F401  (as torch._dynamo: each rank would import it, in its first steps)
import torch
import torch._dynamo
import torch.distributed as dist

import rollmuxd
import rollmuxd.client.transport
from rollmuxd_channel.torch_state import TorchState

sys.path.insert(0, str(Path(__file__).parents[2] / "shared"))

from networks import free_port

WIDTH = 64


def tell(**what: Any) -> None:
    os.write(1, (json.dumps({"at": time.monotonic(), **what}) + "\n").encode())


class Training:
    """Batches and gradients are sums over all ranks: no bit is right if one rank is out of step."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Linear(WIDTH, WIDTH)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)

    def rollout(self, step: int) -> torch.Tensor:
        torch.manual_seed(1000 * step + dist.get_rank())
        with torch.no_grad():
            made: torch.Tensor = self.model(torch.randn(8, WIDTH))
        dist.all_reduce(made)
        return made

    def train(self, made: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        (self.model(made) - made.roll(1, 1)).square().mean().backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
        self.optimizer.step()

    def digest(self) -> str:
        told = hashlib.sha256()
        for tensor in self.model.state_dict().values():
            told.update(tensor.clone().numpy().tobytes())  # (numpy keeps a hand on what it is given)
        return told.hexdigest()


def shared(name: str, store: Any, stop: Path) -> tuple[int, str]:
    """The training with a daemon: its steps, and weights."""
    training, steps, over = Training(), 0, torch.zeros(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    state = dict(nodes=1, gpu_gb=2, ram_gb=2)
    phases = dict(rollout="train", train="train")
    job = rollmuxd.job(name, train=state, phases=phases, init=False, ranks=ranks, rank=rank, store=store)
    kept = TorchState(model=training.model, optimizer=training.optimizer).attach(job, pool="train")

    @contextlib.contextmanager
    def phase(which: str) -> Any:
        with job.phase(which) as slot:
            assert kept.place == "loaded"
            if rank == 0:
                tell(event="granted", slot=slot.id, gpus=slot.gpus, phase=which)
            yield
            if rank == 0:
                tell(event="leaving", slot=slot.id)

    with job:
        while not over.item():
            with phase("rollout"):
                made = training.rollout(steps)
            with phase("train"):
                training.train(made)
                over.fill_(stop.exists() if rank == 0 else 0)
                dist.broadcast(over, 0)
                weights = training.digest()  # now: it will be parked
            steps += 1
    return steps, weights


def alone(steps: int) -> str:
    training = Training()
    for step in range(steps):
        training.train(training.rollout(step))
    return training.digest()


def be(rank: int, name: str, ranks: int, timeout_s: float, stop: Path, port: int) -> None:
    torch.set_num_threads(1)
    of_group = dist.TCPStore("127.0.0.1", port, ranks, is_master=rank == 0)
    own = dist.TCPStore("127.0.0.1", port, is_master=False)
    timeout = dt.timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=of_group, rank=rank, world_size=ranks, timeout=timeout)
    steps, weights = shared(name, own, stop)
    tell(event="trained", rank=rank, steps=steps, shared=weights, alone=alone(steps))
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    name, ranks, timeout_s, stop = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4])
    port = free_port()
    there = {}
    gc.freeze()  # a fork that looks for garbage would write to each page of what was imported
    for rank in range(ranks):
        pid = os.fork()
        if not pid:
            try:
                be(rank, name, ranks, timeout_s, stop, port)
            except BaseException as error:
                tell(event="failed", rank=rank, error=f"{type(error).__name__}: {error}")
                os._exit(1)
            sys.exit()
        there[pid] = rank
    while there:
        pid, status = os.wait()
        del there[pid]
        if status:
            for other in there:
                os.kill(other, signal.SIGKILL)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
