"""A kept connection to the process that reaches a node: many calls at a time, made again when it is gone."""

import asyncio
import contextlib
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Final, TypeAlias

import anyio

from rollmuxd.spi import ContactLost
from rollmuxd_backend_local.agent import frames
from rollmuxd_backend_local.agent.frames import Answer, Ask, Data, Failed, Forget, Ran

#: seconds between tries to connect, as long as they fail; a tenth more or less
_AGAIN_S: Final = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
#: a call waits so long for the next try; else it gets the error of the last one
_PATIENCE_S: Final = 2.5
#: what is asked keeps to a call's limit itself; so long after it, it has not answered
_WAY_S: Final = 1.5
#: so many commands in a row without an answer, and the connection is given up, though it is alive
_UNANSWERED: Final = 3

Opened: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class AgentConnection(ABC):
    """The connection, and the process behind it, which all calls share.

    It is made when it is needed, made again when it is gone, and never waited for for long. Errors name what is reached
    as ``_what`` ("the Ray cluster at auto"), and the way as ``_by``. What answers is ``_agent`` in them ("the member in
    the cluster").
    """

    _what: str
    _by: str = ""
    _agent: str
    #: what a stream raises that breaks
    _breaks: ClassVar[tuple[type[Exception], ...]] = (OSError,)

    def __init__(self, connect_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._connect_s, self._now = connect_s, now
        self._opened: Opened | None = None
        self._joining: asyncio.Task[Opened] | None = None
        #: tries that failed in a row, when the next may be made, and what the last one said
        self._failed = 0
        self._next_at = 0.0
        self._why = ""
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[Ran | Data | Failed]] = {}
        self._number = 0
        self._unanswered = 0

    @abstractmethod
    async def _open(self) -> Opened:
        """Start what answers, and reach it.

        Raises OSError, ValueError or EOFError with the reason. ``connect_s`` bounds it by cancelling it; then, as after
        each failure, ``_end`` is called.
        """

    @abstractmethod
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

    async def ask(
        self, node: frames.Node, reach_s: float, wish: frames.Wish, limit_s: float | None
    ) -> Ran | Data | Failed:
        """Have something done on a node, within ``limit_s``. Raises ContactLost: it may have been done."""
        joined = False
        try:
            with anyio.fail_after(None if limit_s is None else limit_s + _WAY_S):
                _, writer = await self.connection()
                joined = True
                self._number += 1
                answer = await self._ask(writer, Ask(self._number, node, reach_s, limit_s or 0, wish))
        except TimeoutError as error:
            if not joined:
                raise ContactLost(self._why or f"{self._what} is not reached yet") from error
            if isinstance(wish, frames.Run | frames.Question):
                self._went_unanswered()
            raise ContactLost(f"{self._agent} did not answer within {limit_s:g} s") from error
        if isinstance(wish, frames.Run | frames.Question):  # exchanges may work where looks hang in a driver
            self._unanswered = 0
        return answer

    async def close(self) -> None:
        """End the connection; what was started on the nodes stays."""
        if self._joining is not None:
            self._joining.cancel()
            await asyncio.wait([self._joining])
        self._drop("it was closed")
        await self._end()
        if self._reading is not None:  # from what has gone silent it would read for ever
            self._reading.cancel()
            await asyncio.wait([self._reading])

    # ---- how ---------------------------------------------------------------------------------------------------------

    async def _ask(self, writer: asyncio.StreamWriter, ask: Ask) -> Ran | Data | Failed:
        answered: asyncio.Future[Ran | Data | Failed] = asyncio.get_running_loop().create_future()
        self._waiting[ask.number] = answered
        try:
            try:
                frames.write(writer, ask)
            except ValueError as error:
                return Failed("not_done", f"this cannot be sent: {error}")
            await writer.drain()
            return await answered
        except self._breaks as error:
            raise ContactLost(f"{self._agent} is gone: {error}") from error
        finally:
            del self._waiting[ask.number]
            if answered.done():  # also if the line broke before all of the ask was on its way
                looked_at(answered)
            # Cancelled with the call that waited for it, it is done as well.
            if (answered.cancelled() or not answered.done()) and not writer.is_closing():
                with contextlib.suppress(*self._breaks):
                    frames.write(writer, Forget(ask.number))

    async def _join(self) -> Opened:
        wait_s = self._next_at - self._now()
        if wait_s > _PATIENCE_S:
            raise ContactLost(self._why)  # in the same words: each new reason of a lost node is a fact
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
        self._failed, self._why, self._unanswered = 0, "", 0
        self._reading = asyncio.create_task(self._read(*opened))
        return opened

    async def _lost(self, why: str) -> ContactLost:
        await self._end()
        again_s = _AGAIN_S[min(self._failed, len(_AGAIN_S) - 1)]
        self._failed += 1
        self._next_at = self._now() + again_s * random.uniform(0.9, 1.1)
        self._why = f"{self._what} cannot be reached{self._by}: {why}"
        return ContactLost(self._why)

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hand out the answers, until there are none any more."""
        why = f"{self._agent} has ended"
        try:
            while True:
                said = await frames.read(reader, self._breaks)
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
            self._abort(opened[1])
        for answered in self._waiting.values():
            if not answered.done():
                answered.set_exception(ContactLost(why))

    def _abort(self, writer: asyncio.StreamWriter) -> None:
        """Close it, whatever is on its way."""
        writer.transport.abort()

    def _went_unanswered(self) -> None:
        """Where this one hangs, another may not."""
        self._unanswered += 1
        if self._unanswered >= _UNANSWERED:
            self._unanswered = 0
            self._drop(f"{self._agent} does not answer, and is ended")


def looked_at(task: "asyncio.Future[Any]") -> None:
    """Take its error: no call may be left to wait for it."""
    if not task.cancelled():
        task.exception()


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
