"""What all benchmarks have in common: quantiles, targets, progress, and a fixed choice of what is shown."""

import gc
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]


def say(text: str) -> None:
    """Progress, for who watches."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which this share of them lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median(values: Sequence[float]) -> float:
    return quantile(values, 0.5)


def short(value: float) -> float:
    """Four digits are more than any of this is good for."""
    return float(f"{value:.4g}")


def spread_ms(seconds: Sequence[float]) -> Json:
    """The usual quantiles of times."""
    return {
        "p50_ms": short(1000 * quantile(seconds, 0.5)),
        "p99_ms": short(1000 * quantile(seconds, 0.99)),
        "samples": len(seconds),
    }


def at_least(value: float, target: float) -> Json:
    """A figure that is to be at least so much."""
    return {"value": short(value), "at_least": target, "ok": value >= target}


def between(value: float, low: float, high: float) -> Json:
    """A figure that is to be within a range."""
    return {"value": short(value), "at_least": low, "at_most": high, "ok": low <= value <= high}


def at_most(value: float, target: float) -> Json:
    """A figure that is to be at most so much."""
    return {"value": short(value), "at_most": target, "ok": value <= target}


class Rounds:
    """Rounds until a time is over; never fewer than ``least``, never more than ``most``."""

    def __init__(self, seconds: float, *, least: int, most: int) -> None:
        self._until = time.monotonic() + seconds
        self._least, self._most = least, most

    def __iter__(self) -> Iterator[int]:
        for number in range(self._most):
            if number >= self._least and time.monotonic() > self._until:
                return
            yield number


@contextmanager
def no_collector() -> Iterator[None]:
    """Python's collector of garbage runs between measurements, not in them. (In a daemon it runs as it likes.)"""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def collector_of_a_daemon() -> Iterator[None]:
    """Python's collector of garbage runs as seldom as a daemon has it run (``daemon/app.py: main``)."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 50, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def many_files() -> None:
    """Take as many open files as this process may have; what it starts inherits that."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
