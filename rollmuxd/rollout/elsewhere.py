"""What the phases of a job take on another GPU type, as a share of what they take on their own.

Training goes by arithmetic: the ratio of the BF16 peaks, at the same MFU. Generation is bound neither by memory nor by
arithmetic alone. On an H20 many sequences at a time are bound by arithmetic, and a tail by memory. So it is played on
both types, by :class:`~.engine.Replica` with the default constants.
"""

import math
from functools import lru_cache
from typing import Final

from rollmuxd.rollout.engine import DEGREES, Engine, Replica, Request, Tuning, kv_capacity
from rollmuxd.rollout.hardware import Gpu
from rollmuxd.rollout.models import Model

#: of hard mathematics: the shape of a Weibull distribution with half of the limit as its scale
SHAPE: Final = 2.23
#: responses per GPU: those of 256 on a node of eight
PER_GPU: Final = 32
PROMPT: Final = 200


def training(old: Gpu, new: Gpu) -> float:
    """Time on the new type over time on the old one."""
    return old.tflops / new.tflops


@lru_cache(maxsize=256)
def generation(old: Gpu, new: Gpu, model: Model, limit: int = 8192) -> float:
    """Time on the new type over time on the old one: a rollout with responses of up to ``limit`` tokens.

    On each type a replica has the fewest GPUs that hold four of the longest responses.

    Raises:
        ValueError: a node of one of the types does not hold the model.
    """
    return _rollout_s(new, model, limit) / _rollout_s(old, model, limit)


def _rollout_s(gpu: Gpu, model: Model, limit: int) -> float:
    tp = next((it for it in DEGREES if kv_capacity(gpu, model, it) > 4 * limit), None)
    if tp is None:
        raise ValueError(f"{model.name} with responses of {limit} tokens does not fit on a node of {gpu.name}")
    replica = Replica(Engine(gpu, model, tp, Tuning()))
    count = PER_GPU * tp
    replica.submit(Request(i, PROMPT, _length((i + 0.5) / count, limit)) for i in range(count))
    return max(when for when, _ in replica.advance())


def _length(share: float, limit: int) -> int:
    """The length that such a share of the responses stays below."""
    return max(1, min(limit, round(0.5 * limit * math.pow(-math.log(1 - share), 1 / SHAPE))))
