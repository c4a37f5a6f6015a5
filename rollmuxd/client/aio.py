"""Sends calls and runs flows on asyncio: the twin of :mod:`rollmuxd.client.sync`."""

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from rollmuxd.client import fakes
from rollmuxd.client.calls import Call
from rollmuxd.client.discovery import Address
from rollmuxd.client.errors import RollmuxError
from rollmuxd.client.retry import Flow, Pause

if TYPE_CHECKING:
    from httpx import AsyncClient

T = TypeVar("T")


class AsyncDaemon:
    """A daemon, over TCP or its Unix socket. Opens its connection at the first call."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._client: AsyncClient | None = None
        self._leads_to: Address | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def call(self, call: Call[T]) -> T:
        """Send once, without retries; see :meth:`rollmuxd.client.sync.Daemon.call`."""
        from rollmuxd.client import transport

        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop or self._leads_to is not self.address:
            # Connections belong to a loop; those of a loop that has ended can only be dropped.
            self._client, self._loop, self._leads_to = transport.async_client(self.address), loop, self.address
        try:
            response = await self._client.request(**transport.request(call))
        except Exception as error:
            if transport.is_untrusted(error):
                with suppress(RollmuxError):
                    self._client = transport.async_client(self.address)
            raise transport.translated(error, self.address) from error
        return transport.understood(call, response)

    async def run(self, flow: Flow[T]) -> T:
        """Run a flow to its end. A cancellation is thrown into it, so that it can clean up (in bounded time)."""
        answer: Any = None
        error: BaseException | None = None
        while True:
            try:
                step = flow.send(answer) if error is None else flow.throw(error)
            except StopIteration as end:
                result: T = end.value
                return result
            answer = error = None
            try:
                if isinstance(step, Pause):
                    await asyncio.sleep(fakes.scaled(step.seconds))
                else:
                    answer = await self.call(step)
            except BaseException as interrupted:
                error = interrupted

    async def aclose(self) -> None:
        """Close the connections. The next call would open them again."""
        client, loop, self._client = self._client, self._loop, None
        if client is not None and loop is asyncio.get_running_loop():
            await client.aclose()
