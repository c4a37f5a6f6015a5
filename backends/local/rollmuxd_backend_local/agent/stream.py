"""A connection that was opened on a node, as a stream of anyio's."""

import contextlib

import anyio
import anyio.abc

from rollmuxd.spi import ContactLost
from rollmuxd_backend_local.agent import frames
from rollmuxd_backend_local.agent.connection import AgentConnection
from rollmuxd_backend_local.agent.frames import Data, Failed, Node

#: what goes at once: more would take the way through the object store where Ray carries it
_PIECE = 65_536


class NodeStream(anyio.abc.ByteStream):
    """What is sent comes out on the node. A node that dies breaks it."""

    def __init__(self, line: AgentConnection, node: Node, name: str, reach_s: float) -> None:
        self._line, self._node, self._name, self._reach_s = line, node, name, reach_s
        self._closed = False

    async def receive(self, max_bytes: int = _PIECE) -> bytes:
        """As it comes."""
        data = await self._ask(frames.Receive(self._name, min(max_bytes, _PIECE)))
        if not data:
            raise anyio.EndOfStream
        return data

    async def send(self, item: bytes) -> None:
        """Returns when it is on its way, and not too much is."""
        for start in range(0, len(item), _PIECE):
            await self._ask(frames.Send(self._name, item[start : start + _PIECE]))

    async def send_eof(self) -> None:
        """Nothing more is sent."""
        await self._ask(frames.Send(self._name, b""))

    async def aclose(self) -> None:
        """Close it, without waiting for the other end or for a node that is away."""
        if not self._closed:
            self._closed = True
            # Lost with its node, it was closed by that.
            with anyio.CancelScope(shield=True), contextlib.suppress(ContactLost):
                await self._line.ask(self._node, self._reach_s, frames.Close(self._name), self._reach_s)
        await anyio.lowlevel.checkpoint()

    async def _ask(self, wish: frames.Receive | frames.Send) -> bytes:
        if self._closed:
            raise anyio.ClosedResourceError
        try:
            said = await self._line.ask(self._node, self._reach_s, wish, None)
        except ContactLost as error:
            raise anyio.BrokenResourceError(str(error)) from error
        if self._closed:
            raise anyio.ClosedResourceError
        if isinstance(said, Failed):
            raise anyio.BrokenResourceError(said.why)
        return said.data if isinstance(said, Data) else b""
