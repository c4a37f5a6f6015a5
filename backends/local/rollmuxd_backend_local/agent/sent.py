"""A process on a node that is nothing but a Python there: its program goes first, over the stream that it then serves.

How that Python is started is the backend's business: ``ssh`` runs a command, ``slurm`` a step.
"""

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import Callable
from typing import Any, Final

import anyio

from rollmuxd_backend_local import payload
from rollmuxd_backend_local.agent import frames
from rollmuxd_backend_local.agent.connection import AgentConnection, Opened

#: the daemon is heard of so often within the time after which the process ends itself
_BEATS: Final = 6
#: of what a login shell, or a site's prolog, prints before the program does
_NOISE: Final = 200


class SentAgent(AgentConnection):
    """The connection to it. ``silent_s``: so long without a word from the daemon, and it ends itself."""

    def __init__(self, connect_s: float, silent_s: float, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(connect_s, now)
        self._silent_s = silent_s
        self._mark = f"rollmuxd-{secrets.token_hex(8)}"
        self._program = payload.agent(self._mark, silent_s)
        self._beating: asyncio.Task[None] | None = None

    def _python(self, python: str) -> tuple[str, ...]:
        """What is to be started there."""
        return (python, "-I", "-S", "-u", "-c", payload.OPEN, str(len(self._program)))

    async def _greet(self, opened: Opened) -> dict[str, Any]:
        """Send the program; what it says of where it runs.

        Raises EOFError: it has ended before it said anything, with the last line that something else has said.
        """
        reader, writer = opened
        with contextlib.suppress(*self._breaks):  # it has ended: why, the caller finds in what it said
            writer.write(self._program)
            await writer.drain()
        noise = ""
        while line := await reader.readline():
            before, found, said = line.decode(errors="replace").partition(self._mark)
            if found:
                self._beating = asyncio.create_task(self._beat(writer))
                told: dict[str, Any] = json.loads(said)
                return told
            noise = before.strip()[:_NOISE] or noise
        raise EOFError(noise)

    async def _beat(self, writer: asyncio.StreamWriter) -> None:
        """So that a process which hears nothing may end itself: after a daemon's death nothing else would end it."""
        with contextlib.suppress(*self._breaks):
            while not writer.is_closing():
                frames.write(writer, frames.Beat())
                await writer.drain()
                await anyio.sleep(self._silent_s / _BEATS)

    async def _end(self) -> None:
        beating, self._beating = self._beating, None
        if beating is not None:
            beating.cancel()
            await asyncio.wait([beating])
