"""A server of a few lines, for tests."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress


@asynccontextmanager
async def serving(
    handler: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[tuple[str, int]]:
    """Its address. At the end all connections are closed, also those that a caller left open, and served to their end.

    The next test would fail by one.
    """
    served, writers = [], []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(asyncio.current_task())
        writers.append(writer)
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            try:
                await handler(reader, writer)
            finally:
                writer.close()
                await writer.wait_closed()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()
        for writer in writers:
            writer.close()
        await asyncio.gather(*served)
