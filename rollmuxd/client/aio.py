"""Sends calls and runs flows on asyncio: the twin of :mod:`rollmuxd.client.sync`."""

import asyncio
from typing import TYPE_CHECKING, Any, Self, TypeVar

from rollmuxd.client import discovery, fakes
from rollmuxd.client.calls import Call
from rollmuxd.client.discovery import Address
from rollmuxd.client.retry import Flow, Pause

if TYPE_CHECKING:
    from rollmuxd.client.transport import AsyncTransport

T = TypeVar("T")


class AsyncDaemon:
    """A daemon, over TCP or its Unix socket. Opens its connection at the first call."""

    def __init__(self, url: str | None = None, api_key: str | None = None, *, address: Address | None = None) -> None:
        self.address = address or discovery.need(url, api_key)
        self._transport: AsyncTransport | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def call(self, call: Call[T]) -> T:
        """Send once, without retries."""
        loop = asyncio.get_running_loop()
        if self._transport is None or self._loop is not loop or self._transport.address is not self.address:
            # Connections belong to a loop; those of a loop that has ended can only be dropped.
            from rollmuxd.client.transport import AsyncTransport

            self._transport, self._loop = AsyncTransport(self.address), loop
        return await self._transport.send(call)

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

    async def close(self) -> None:
        """Close the connections. The next call would open them again."""
        transport, loop, self._transport = self._transport, self._loop, None
        if transport is not None and loop is asyncio.get_running_loop():
            await transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
