"""A kept connection to the process that reaches a node: many calls at a time, made again when it is gone."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Final, TypeAlias

import anyio

from rollmuxd.spi import ContactLost
from rollmuxd_backend_local.agent import frames
from rollmuxd_backend_local.agent.frames import Answer, Ask, Data, Failed, Forget, Ran, Seen
from rollmuxd_backend_local.kept_connection import KeptConnection

#: what is asked keeps to a call's limit itself; so long after it, it has not answered
_WAY_S: Final = 1.5
#: so many commands in a row without an answer, and the connection is given up, though it is alive
_UNANSWERED: Final = 3

Opened: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class AgentConnection(KeptConnection[Opened]):
    """The connection, and the process behind it: what answers, which errors name as ``_agent`` ("the member in the
    cluster").
    """

    _agent: str

    def __init__(self, connect_s: float, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(connect_s, now)
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[Ran | Data | Seen | Failed]] = {}
        self._number = 0
        self._unanswered = 0

    async def ask(
        self, node: frames.Node, reach_s: float, wish: frames.Wish, limit_s: float | None
    ) -> Ran | Data | Seen | Failed:
        """Have something done on a node, within ``limit_s``. Raises ContactLost: it may have been done."""
        joined = False
        try:
            with anyio.fail_after(None if limit_s is None else limit_s + _WAY_S):
                _, writer = await self.connection()
                joined = True
                answer = await self._ask(writer, Ask(self._next(), node, reach_s, limit_s or 0, wish))
        except TimeoutError as error:
            if not joined:
                raise ContactLost(self._why or f"{self._what} is not reached yet") from error
            if isinstance(wish, frames.Run):
                self._went_unanswered()
            raise ContactLost(f"{self._agent} did not answer within {limit_s:g} s") from error
        if isinstance(wish, frames.Run):  # streams may work where looks hang in a driver
            self._unanswered = 0
        return answer

    async def close(self) -> None:
        """End the connection; what was started on the nodes stays."""
        await super().close()
        self._drop("it was closed")
        await self._end()
        if self._reading is not None:  # from what has gone silent it would read for ever
            self._reading.cancel()
            await asyncio.wait([self._reading])

    # ---- how ---------------------------------------------------------------------------------------------------------

    def _next(self) -> int:
        self._number += 1
        return self._number

    async def _ask(self, writer: asyncio.StreamWriter, ask: Ask) -> Ran | Data | Seen | Failed:
        answered: asyncio.Future[Ran | Data | Seen | Failed] = asyncio.get_running_loop().create_future()
        self._waiting[ask.number] = answered
        try:
            try:
                self._put(writer, ask)
            except ValueError as error:
                return Failed("not_done", f"this cannot be sent: {error}")
            await writer.drain()
            return await answered
        except OSError as error:
            raise ContactLost(f"{self._agent} is gone: {error}") from error
        finally:
            del self._waiting[ask.number]
            # Cancelled with the call that waited for it, it is done as well.
            if (answered.cancelled() or not answered.done()) and not writer.is_closing():
                frames.write(writer, Forget(ask.number))

    def _put(self, writer: asyncio.StreamWriter, ask: Ask) -> None:
        """Raises ValueError: it cannot be sent."""
        frames.write(writer, ask)

    async def _join(self) -> Opened:
        opened = await super()._join()
        self._unanswered = 0
        self._reading = asyncio.create_task(self._read(*opened))
        return opened

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hand out the answers, until there are none any more."""
        why = f"{self._agent} has ended"
        try:
            while True:
                said = await frames.read(reader)
                if isinstance(said, Answer) and said.number in self._waiting and not self._waiting[said.number].done():
                    self._waiting[said.number].set_result(said.said)
        except EOFError as error:
            if str(error):
                why = f"the connection to {self._agent} broke: {error}"
        except ValueError as error:
            why = f"{self._agent} says what cannot be understood: {error}"
        finally:
            if self._opened is not None and self._opened[1] is writer:
                self._drop(why)

    def _drop(self, why: str) -> None:
        """The connection is gone, and with it all answers."""
        opened, self._opened = self._opened, None
        if opened is not None and not opened[1].is_closing():  # a pipe's that is closed cannot be aborted
            opened[1].transport.abort()
        for answered in self._waiting.values():
            if not answered.done():
                answered.set_exception(ContactLost(why))

    def _went_unanswered(self) -> None:
        """Where this one hangs, another may not."""
        self._unanswered += 1
        if self._unanswered >= _UNANSWERED:
            self._unanswered = 0
            self._drop(f"{self._agent} does not answer, and is ended")


async def end_process(process: asyncio.subprocess.Process, limit_s: float) -> None:
    """End a process that ends by itself when its input is closed; kill it after ``limit_s``."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        with anyio.fail_after(limit_s):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
