"""GRPO learns to add modulo 5.  It trains longer than it samples (*train-heavy*).

The prompt is five numbers and the answer their running sums, each token building on the one before.  The
reward is the share of sums that are right.
"""

from collections.abc import Sequence
from itertools import accumulate

from cores import pinned
from grpo import Array, Generator, Learner, Task, Work
from record import Record, settings

import rollmuxd

MODULUS, LENGTH = 5, 5

#: What the job keeps on each pool's GPUs.  Small, so that moving it costs little beside these short phases.
STATE = dict(nodes=1, gpu_gb=0.05, ram_gb=0.1, driver="mock")


def draw_prompts(rng: Generator, count: int) -> Array:
    return rng.integers(0, MODULUS, (count, LENGTH))


def reward(prompt: Sequence[int], answer: Sequence[int]) -> float:
    return sum(token == total % MODULUS for token, total in zip(answer, accumulate(prompt), strict=True)) / LENGTH


TASK = Task(MODULUS, LENGTH, LENGTH, draw_prompts, reward)
WORK = Work(sampled_groups=3100, trained_groups=736, epochs=3, minibatches=4, learning_rate=2e-3)


def main() -> None:
    run = settings("modular-sum", __doc__)
    learner, record = Learner(TASK, WORK, run.seed, run.scale), Record(run)
    with rollmuxd.job(run.name, phases=("rollout", "train"), rollout=STATE, train=STATE) as job:
        for _ in range(run.iterations):
            with job.phase("rollout") as slot, pinned(slot.gpus), record.phase("rollout"):
                mean_reward = learner.rollout(slot.progress)
            with job.phase("train") as slot, pinned(slot.gpus), record.phase("train"):
                learner.train()
            record.iteration(mean_reward)
    record.save(learner)


if __name__ == "__main__":
    main()
