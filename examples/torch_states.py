"""A learner in torch whose weights make room for another job's: parked in host memory bit for bit, and back.

The trainer keeps weights and Adam's moments on the GPU, and has them parked while another job trains. The engine that
rolls out has a copy of the weights, which is old by its next rollout anyway: it is dropped, and filled anew when that
begins. Both are said once, as parts of a `TorchState`; the loop does not know of it.

    python examples/torch_states.py --colocate --name a --seed 1 &
    python examples/torch_states.py --colocate --name b --seed 2

Without a daemon nothing is moved. The weights at the end are the same in either case: that is what is printed. On
CPUs torch does the same in ordinary memory.
"""

import argparse
import hashlib
import os

import rollmuxd

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs to give the same bits each time

import torch
from torch import nn

from rollmuxd_channel.torch_state import Dropped, TorchState

STATES, ACTIONS = 16, 8


def network(width: int, device: str) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(STATES, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, ACTIONS)
    ).to(device)


class Learner:
    """REINFORCE on a task with a hidden rule: which action is right for which state."""

    def __init__(self, seed: int, width: int, device: str) -> None:
        torch.manual_seed(seed)
        torch.use_deterministic_algorithms(True)
        self.device = device
        self.rule = torch.randn(STATES, ACTIONS)
        self.policy, self.engine = network(width, device), network(width, device)
        self.adam = torch.optim.Adam(self.policy.parameters(), lr=3e-3)
        self.handed_over = self._copy()

    def rollout(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            states = torch.randn(512, STATES)
            actions = torch.distributions.Categorical(logits=self.engine(states.to(self.device)).cpu()).sample()
            rewards = (actions == (states @ self.rule).argmax(1)).float()
        return states, actions, rewards

    def train(self, states: torch.Tensor, actions: torch.Tensor, rewards: torch.Tensor) -> None:
        logits = self.policy(states.to(self.device))
        chosen = torch.log_softmax(logits, 1).gather(1, actions.to(self.device)[:, None])[:, 0]
        self.adam.zero_grad()
        (-(rewards - rewards.mean()).to(self.device) * chosen).mean().backward()
        self.adam.step()
        self.handed_over = self._copy()

    def fill_engine(self) -> None:
        self.engine.load_state_dict(self.handed_over)

    def _copy(self) -> dict[str, torch.Tensor]:
        return {name: tensor.cpu().clone() for name, tensor in self.policy.state_dict().items()}

    def digest(self) -> str:
        told = hashlib.sha256()
        for tensor in self.handed_over.values():
            told.update(tensor.numpy().tobytes())
        return told.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="torch-states")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--gpu-gb", type=float, default=1.0, help="what one of its two states has on the GPU")
    parser.add_argument("--colocate", action="store_true", help="both phases on the same node: one box")
    asked = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # What a process with a CUDA context keeps in any case.
    keeps = dict(nodes=1, gpu_gb=asked.gpu_gb, residual_gb=min(1.5, asked.gpu_gb), ram_gb=asked.gpu_gb)
    if asked.width < 1:
        parser.error(f"--width is {asked.width}, and it is at least 1")
    try:
        job, learner = rollmuxd.job(asked.name, rollout=keeps, train=keeps, colocate=asked.colocate), None
    except ValueError as error:
        parser.error(str(error))

    def part(name: str):  # asked at each park: before `init` there is nothing to be parked
        return lambda: getattr(learner, name, None)

    # Each rollout begins with weights from the trainer: nothing has to fill them before that.
    engine = TorchState(engine=Dropped(part("engine"), refill=lambda: None))
    trainer = TorchState(policy=part("policy"), adam=part("adam"))
    engine.attach(job, pool="rollout")
    trainer.attach(job, pool="train")
    reward = 0.0
    with job:
        with job.phase("init"):
            learner = Learner(asked.seed, asked.width, device)
        for step in range(asked.iterations):
            with job.phase("rollout"):
                learner.fill_engine()
                seen = learner.rollout()
                reward = seen[2].mean().item()
            with job.phase("train"):
                learner.train(*seen)
            if step % 5 == 4:
                print(f"{asked.name} step {step}: reward {reward:.3f}", flush=True)
        print(f"{asked.name}: reward {reward:.3f}, weights {learner.digest()}", flush=True)


if __name__ == "__main__":
    main()
