"""GRPO learns to close brackets.  It samples longer than it trains (*rollout-heavy*).

The prompt opens eight brackets of three kinds, and the answer is to close them, innermost first.  The
reward is the share of closing brackets that meet their partner on a stack.
"""

from collections.abc import Sequence

from cores import pinned
from grpo import Array, Generator, Learner, Task, Work
from record import Record, settings

import rollmuxd

KINDS, DEPTH = 3, 8  #: tokens 0 to 2 open a bracket, 3 to 5 close one

#: What the job keeps on each pool's GPUs.  Small, so that moving it costs little beside these short phases.
STATE = dict(nodes=1, gpu_gb=0.05, ram_gb=0.1, driver="mock")


def draw_prompts(rng: Generator, count: int) -> Array:
    return rng.integers(0, KINDS, (count, DEPTH))


def reward(prompt: Sequence[int], answer: Sequence[int]) -> float:
    stack = list(prompt)
    return sum(token == stack.pop() + KINDS for token in answer) / DEPTH


TASK = Task(2 * KINDS, DEPTH, DEPTH, draw_prompts, reward)
WORK = Work(sampled_groups=2400, trained_groups=384, epochs=2, minibatches=4, learning_rate=2e-3)


def main() -> None:
    run = settings("close-brackets", __doc__)
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
