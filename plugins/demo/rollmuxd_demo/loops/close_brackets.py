"""GRPO learns to close brackets.  It samples longer than it trains (*rollout-heavy*).

The prompt opens eight brackets of three kinds, and the answer is to close them, innermost first.  The
reward is the share of closing brackets that meet their partner on a stack.
"""

from collections.abc import Sequence

from grpo import Array, Generator, Task, Work
from loop import main

KINDS, DEPTH = 3, 8  #: tokens 0 to 2 open a bracket, 3 to 5 close one


def draw_prompts(rng: Generator, count: int) -> Array:
    return rng.integers(0, KINDS, (count, DEPTH))


def reward(prompt: Sequence[int], answer: Sequence[int]) -> float:
    stack = list(prompt)
    return sum(token == stack.pop() + KINDS for token in answer) / DEPTH


TASK = Task(2 * KINDS, DEPTH, DEPTH, draw_prompts, reward)
WORK = Work(sampled_groups=2400, trained_groups=384, epochs=2, minibatches=4, learning_rate=2e-3)


if __name__ == "__main__":
    main("close-brackets", __doc__, TASK, WORK)
