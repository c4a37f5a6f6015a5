"""A connection through the SSH channel, as a stream of anyio's."""

from typing import Any

import anyio
import anyio.abc
import asyncssh

_BROKEN = (asyncssh.Error, OSError)


class ChannelStream(anyio.abc.ByteStream):
    """What is sent comes out on the host. A line that breaks breaks it."""

    def __init__(self, reader: Any, writer: Any) -> None:
        self._reader = reader
        self._writer = writer
        self._closed = False

    async def receive(self, max_bytes: int = 65_536) -> bytes:
        """As it comes."""
        if self._closed:
            raise anyio.ClosedResourceError
        try:
            data: bytes = await self._reader.read(max_bytes)
        except _BROKEN as error:
            raise anyio.BrokenResourceError(str(error)) from error
        if not data:
            if self._reader.channel.get_connection().is_closed():
                raise anyio.BrokenResourceError("the ssh connection is gone")
            raise anyio.EndOfStream
        return data

    async def send(self, item: bytes) -> None:
        """Returns when it is on its way, and not too much is."""
        if self._closed:
            raise anyio.ClosedResourceError
        try:
            self._writer.write(item)
            await self._writer.drain()
        except _BROKEN as error:
            raise anyio.BrokenResourceError(str(error)) from error

    async def send_eof(self) -> None:
        """Nothing more is sent."""
        try:
            self._writer.write_eof()
        except _BROKEN as error:
            raise anyio.BrokenResourceError(str(error)) from error

    async def aclose(self) -> None:
        """Close the channel; without waiting for the other end."""
        self._closed = True
        self._writer.close()
        await anyio.lowlevel.checkpoint()
