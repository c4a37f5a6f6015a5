"""How fast two cores count, each alone and both at once."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context


def rates(pair: Sequence[int], rounds: int, seconds: float) -> list[tuple[float, ...]]:
    """In each round the first alone, the second alone, and both: what else the machine does meets all three alike."""
    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:

        def counted(*on: int) -> list[float]:
            begin = time.monotonic() + 0.02
            return [one.result() for one in [pool.submit(rate, core, begin, seconds) for core in on]]

        return [(*counted(pair[0]), *counted(pair[1]), *counted(*pair)) for _ in range(rounds)]


def rate(core: int, begin: float, seconds: float) -> float:
    """The rate on a core in a window of (monotonic) time; 0 where this comes when the window is over."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    time.sleep(max(0.0, begin - time.monotonic()))
    began, counts = time.monotonic(), 0
    while time.monotonic() < begin + seconds:
        sum(range(1000))
        counts += 1
    return counts / (time.monotonic() - began)
