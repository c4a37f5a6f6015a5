"""What happens inside a job's rollout, for fidelity ``engine``: which model, on what, and how long responses are."""

import random
from typing import Final

from msgspec import Struct

from rollmuxd.core.ids import Millis
from rollmuxd.fabric.parallelism import Parallelism

#: responses of one rollout, and rollouts with lengths of their own before they come again
RESPONSES: Final = 1024
BATCHES: Final = 8


class Inside(Struct, frozen=True, eq=False):
    """A rollout's inside. Compared by identity: jobs of one type share one, and with it what was computed of it."""

    model: str
    gpu: str
    #: GPUs of a replica; the rollout's GPUs are dealt to replicas in their order
    tp: int
    #: tokens of each response, in turn: the first batch again after the last
    batches: tuple[tuple[int, ...], ...]
    prompt_tokens: int = 200
    #: what a step of the engine costs beside the GPU (2 with captured graphs, 8 where the host prepares each step)
    step_ms: float = 2.0
    #: fidelity ``network``: how a model instance lies over hosts, and so what its decoding sends between them
    parallelism: Parallelism = "tp8"
    #: what a rollout takes beside: engines woken, data handed over
    fixed_ms: Millis = 0


def hard_math(limit: int, responses: int, seed: str) -> tuple[int, ...]:
    """Lengths of answers to hard mathematics: Weibull of shape 2.23, scale half the limit, cut at the limit."""
    chance = random.Random(f"inside {limit} {seed}")
    return tuple(min(limit, max(1, round(chance.weibullvariate(0.5 * limit, 2.23)))) for _ in range(responses))


def drawn(model: str, gpu: str, tp: int, limit: int, responses: int = RESPONSES) -> Inside:
    """An inside with lengths of hard mathematics."""
    return Inside(model, gpu, tp, tuple(hard_math(limit, responses, str(number)) for number in range(BATCHES)))
