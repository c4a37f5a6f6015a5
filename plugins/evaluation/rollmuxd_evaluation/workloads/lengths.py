"""How long the responses of one rollout are, for what depends on the longest: its time, and its tail.

Responses of hard mathematics: Weibull of shape 2.23, scale half the token limit. Many are near the limit, and 80 % of a
batch are done after two thirds of its time. (Shift is what x is in :mod:`~rollmuxd_evaluation.workloads.generated`.)

A batch is 256 responses (RollMux, table 3), taken as 32 prompts of 8 samples. Of the variance of ln length 62 % lies
between prompts (standard deviation 0.44) and 38 % between samples of one prompt (0.34). Lengths are cut at the limit.
Every response gets tokens at the same rate, so that time is proportional to length.
"""

import math
import random
from functools import cache
from typing import Final

PROMPTS, SAMPLES = 32, 8
#: standard deviations of ln length between prompts, and between samples of one
PROMPT_SD, SAMPLE_SD = 0.44, 0.34
#: share of a batch that is done when its tail begins (RollMux: about 80 %)
DONE: Final = 0.8
#: batches that are drawn once for each (limit, shift), to choose from
BANK: Final = 64
#: shifts are rounded to this
GRAIN: Final = 0.25


@cache
def _bank(limit: int, grains: int) -> tuple[float, ...]:
    draw = random.Random(f"lengths hard-math {limit} {grains}")
    stretch = math.exp(grains * GRAIN)
    return tuple(_tail_from(limit, stretch, draw) for _ in range(BANK))


def tail_from(limit: int, shift: float, draw: random.Random) -> float:
    """After what share of a rollout 80 % of its batch are done, drawn; all lengths are shifted by ``shift`` in ln."""
    grains = max(-16, min(16, round(shift / GRAIN)))
    return draw.choice(_bank(limit, grains))


def _tail_from(limit: int, stretch: float, draw: random.Random) -> float:
    whole = math.hypot(PROMPT_SD, SAMPLE_SD)
    drawn = []
    for _ in range(PROMPTS):
        prompt = draw.gauss(0, PROMPT_SD)
        for _ in range(SAMPLES):
            z = (prompt + draw.gauss(0, SAMPLE_SD)) / whole
            drawn.append(min(float(limit), max(1.0, stretch * _body(limit, z))))
    drawn.sort()
    return drawn[math.ceil(DONE * len(drawn)) - 1] / drawn[-1]


def _body(limit: int, z: float) -> float:
    """The length at a quantile, which is given as that of a standard normal."""
    return 0.5 * limit * math.pow(-math.log(0.5 * math.erfc(z / math.sqrt(2))), 1 / 2.23)
