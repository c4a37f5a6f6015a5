"""GRPO learns to sort six digits.  Its two phases take about equally long (*balanced*).

The reward is the share of positions that hold the digit which sorting puts there.
"""

from collections.abc import Sequence

from grpo import Array, Generator, Task, Work
from loop import main

LENGTH = 6


def draw_prompts(rng: Generator, count: int) -> Array:
    return rng.integers(0, 10, (count, LENGTH))


def reward(prompt: Sequence[int], answer: Sequence[int]) -> float:
    return sum(map(int.__eq__, answer, sorted(prompt))) / LENGTH


TASK = Task(10, LENGTH, LENGTH, draw_prompts, reward)
WORK = Work(sampled_groups=2460, trained_groups=552, epochs=2, minibatches=4, learning_rate=2e-3)


if __name__ == "__main__":
    main("sort-digits", __doc__, TASK, WORK)
