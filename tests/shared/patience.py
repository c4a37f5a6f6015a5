"""How long a test waits for what must happen. Only what hangs gets there.

A test waits for events: the machine that runs it may be ten times slower than yours, or give it a tenth of its time. So
these limits are minutes, they are the same everywhere, and no test asserts that something happened within them.
"""

import time
from collections.abc import Callable
from typing import TypeVar

import anyio
import pytest

T = TypeVar("T")

#: for one event, one process, one answer; pytest's own limit for a whole test (pyproject.toml) is longer
PATIENCE_S = 600.0


def until(what: str, look: Callable[[], T], every: float = 0.03) -> T:
    """Return what ``look`` finds, as soon as it finds something."""
    give_up = time.monotonic() + PATIENCE_S
    while not (found := look()):
        if time.monotonic() > give_up:
            pytest.fail(f"after {PATIENCE_S:g} s still not: {what}")
        time.sleep(every)
    return found


async def eventually(what: str, look: Callable[[], T], every: float = 0.01) -> T:
    """The same, while the event loop runs."""
    give_up = time.monotonic() + PATIENCE_S
    while not (found := look()):
        if time.monotonic() > give_up:
            pytest.fail(f"after {PATIENCE_S:g} s still not: {what}")
        await anyio.sleep(every)
    return found
