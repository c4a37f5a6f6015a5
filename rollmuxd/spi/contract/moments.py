"""Calls that are cancelled, at one moment after the other."""

import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import ClassVar

import anyio
import anyio.lowlevel

from rollmuxd.spi.errors import PluginError


class Cancelling:
    """When calls are cancelled: fewer moments will do where each call is a program that is started."""

    #: a call is cancelled after so many turns of the loop, one test of it each ...
    cancelled_after_turns: ClassVar[Sequence[int]] = range(12)
    #: ... and after so many seconds, for calls that wait for something outside
    cancelled_after_s: ClassVar[Sequence[float]] = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05)

    def _moments(self) -> Iterator[float]:
        """When a call is cancelled: after 0, 1, 2, ... turns of the loop (negative numbers), then after seconds."""
        yield from (float(-turns) for turns in self.cancelled_after_turns)
        yield from self.cancelled_after_s


async def cancelled(call: Callable[[], Awaitable[object]], moment: float) -> bool:
    """Start a call and cancel it at a moment. Whether it had come to an end before that."""
    ended = anyio.Event()

    async def run() -> None:
        with contextlib.suppress(PluginError):  # an end like any other
            await call()
        ended.set()

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        if moment <= 0:
            for _ in range(round(-moment)):
                await anyio.lowlevel.checkpoint()
        else:
            with anyio.move_on_after(moment):
                await ended.wait()
        if not ended.is_set():
            group.cancel_scope.cancel()
    return ended.is_set()
