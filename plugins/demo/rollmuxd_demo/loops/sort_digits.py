"""GRPO learns to sort six digits.  Its two phases take about equally long (*balanced*).

The reward is the share of positions that hold the digit which sorting puts there.
"""

from collections.abc import Sequence

from cores import pinned
from grpo import Array, Generator, Learner, Task, Work
from record import Record, settings

import rollmuxd

LENGTH = 6

#: What the job keeps on each pool's GPUs.  Small, so that moving it costs little beside these short phases.
STATE = dict(nodes=1, gpu_gb=0.05, ram_gb=0.1, driver="mock")


def draw_prompts(rng: Generator, count: int) -> Array:
    return rng.integers(0, 10, (count, LENGTH))


def reward(prompt: Sequence[int], answer: Sequence[int]) -> float:
    return sum(map(int.__eq__, answer, sorted(prompt))) / LENGTH


TASK = Task(10, LENGTH, LENGTH, draw_prompts, reward)
WORK = Work(sampled_groups=2460, trained_groups=552, epochs=2, minibatches=4, learning_rate=2e-3)


def main() -> None:
    run = settings("sort-digits", __doc__)
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
