"""GRPO learns to add modulo 5.  It trains longer than it samples (*train-heavy*).

The prompt is five numbers and the answer their running sums, each token building on the one before.  The
reward is the share of sums that are right.
"""

from collections.abc import Sequence
from itertools import accumulate

from grpo import Array, Generator, Task, Work
from loop import main

MODULUS, LENGTH = 5, 5


def draw_prompts(rng: Generator, count: int) -> Array:
    return rng.integers(0, MODULUS, (count, LENGTH))


def reward(prompt: Sequence[int], answer: Sequence[int]) -> float:
    return sum(token == total % MODULUS for token, total in zip(answer, accumulate(prompt), strict=True)) / LENGTH


TASK = Task(MODULUS, LENGTH, LENGTH, draw_prompts, reward)
WORK = Work(sampled_groups=3100, trained_groups=736, epochs=3, minibatches=4, learning_rate=2e-3)


if __name__ == "__main__":
    main("modular-sum", __doc__, TASK, WORK)
