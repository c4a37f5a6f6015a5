"""A connection that all calls share: made when it is needed, made again when it is gone, never waited for for long."""

import asyncio
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

import anyio

from rollmuxd.spi import ContactLost

Opened = TypeVar("Opened")

#: seconds between tries to connect, as long as they fail; a tenth more or less
_AGAIN_S: Final = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
#: a call waits so long for the next try; else its error says when that will be
_PATIENCE_S: Final = 2.5


class KeptConnection(ABC, Generic[Opened]):
    """The connection. Errors name what is reached as ``_what`` ("the Ray cluster at auto"), and the way as ``_by``."""

    _what: str
    _by: str = ""

    def __init__(self, connect_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._connect_s, self._now = connect_s, now
        self._opened: Opened | None = None
        self._joining: asyncio.Task[Opened] | None = None
        #: tries that failed in a row, when the next may be made, and what the last one said
        self._failed = 0
        self._next_at = 0.0
        self._why = ""

    @abstractmethod
    async def _open(self) -> Opened:
        """Start what answers, and reach it.

        Raises OSError, ValueError or EOFError with the reason. ``connect_s`` bounds it by cancelling it; then, as after
        each failure, ``_end`` is called.
        """

    async def _end(self) -> None:
        """End what answers, if it was started here and is there. Never raises, and takes seconds at most."""

    async def connection(self) -> Opened:
        """The connection, made if there is none. Raises ContactLost: it cannot be made, and why."""
        if self._opened is not None:
            return self._opened
        if self._joining is None or self._joining.done():
            # A task of its own, which all that wait for it share: none of them takes it along when it is cancelled.
            self._joining = asyncio.create_task(self._join())
            self._joining.add_done_callback(looked_at)
        return await asyncio.shield(self._joining)

    async def close(self) -> None:
        """Stop trying to make it."""
        if self._joining is not None:
            self._joining.cancel()
            await asyncio.wait([self._joining])

    async def _join(self) -> Opened:
        wait_s = self._next_at - self._now()
        if wait_s > _PATIENCE_S:
            raise ContactLost(f"{self._why} (next try in {wait_s:.0f} s)")
        await anyio.sleep(max(wait_s, 0))
        await self._end()
        try:
            with anyio.fail_after(self._connect_s):
                opened = await self._open()
        except TimeoutError:
            raise await self._lost(f"no connection within {self._connect_s:g} s") from None
        except (OSError, ValueError, EOFError) as error:
            raise await self._lost(str(error) or type(error).__name__) from error
        self._opened = opened
        self._failed, self._why = 0, ""
        return opened

    async def _lost(self, why: str) -> ContactLost:
        await self._end()
        again_s = _AGAIN_S[min(self._failed, len(_AGAIN_S) - 1)]
        self._failed += 1
        self._next_at = self._now() + again_s * random.uniform(0.9, 1.1)
        self._why = f"{self._what} cannot be reached{self._by}: {why}"
        return ContactLost(self._why)


def looked_at(task: "asyncio.Task[Any]") -> None:
    """Take its error: no call may be left to wait for it."""
    if not task.cancelled():
        task.exception()
