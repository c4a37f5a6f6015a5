"""A server of a few lines, for tests."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress


@asynccontextmanager
async def serving(
    handler: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[tuple[str, int]]:
    """Its address. At the end it has served all connections, and closed them: the next test would fail by one."""
    served = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(asyncio.current_task())
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            try:
                await handler(reader, writer)
            finally:
                writer.close()
                await writer.wait_closed()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()
        await asyncio.gather(*served)
