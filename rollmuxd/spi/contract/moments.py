"""What sentences of all contracts have in common: what each is given, and calls that are cancelled at any moment."""

import contextlib
import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, ClassVar

import anyio
import anyio.lowlevel
import pytest

from rollmuxd.spi.errors import PluginError


def sentence(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """A test that is given what ``make`` makes, and closes it at its end. All of it is in one task."""

    @functools.wraps(test)
    async def run(self: Any) -> None:
        made = await self.make()
        await test(self, made)
        await self._end(made)

    run.__signature__ = inspect.signature(run, follow_wrapped=False)  # type: ignore[attr-defined]  # for pytest
    marked: Callable[..., Awaitable[None]] = pytest.mark.asyncio(run)
    return marked


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
