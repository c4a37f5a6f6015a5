"""Who is at the other end of the Unix socket.

uvicorn does not hand the socket's credentials on, so its protocol class is given one more thought: it asks the kernel
once per connection, and puts the answer into the scope of each request. Use it as
``uvicorn.Config(..., http=PeerHttpToolsProtocol)``.
"""

import asyncio
import socket
import struct
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rollmuxd.daemon.access import PEER_EXTENSION, Peer

#: ``struct ucred``: pid, uid, gid
_UCRED = struct.Struct("iII")
_UNKNOWN = 0xFFFFFFFF


def peer_of(sock: Any) -> Peer | None:
    """The credentials of a Unix socket's other end, from when it connected; None for any other socket."""
    if sock is None or sock.family != socket.AF_UNIX:
        return None
    pid, uid, gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return None if uid == _UNKNOWN else Peer(pid, uid, gid)


class OneWrite:
    """A transport that sends at once what is written in one turn of the loop.

    uvicorn writes an answer's head and then its body: two system calls, two segments, and the client is woken for a
    head with nothing behind it.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> None:
        """Send it at the end of this turn, or when :meth:`flush` is called."""
        if not self._parts:
            asyncio.get_running_loop().call_soon(self.flush)
        self._parts.append(data)

    def flush(self) -> None:
        """Send what was written."""
        if self._parts:
            parts, self._parts = self._parts, []
            self._transport.write(b"".join(parts))

    def close(self) -> None:
        """Close, when everything is sent."""
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class PeerHttpToolsProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, which also says who is at the other end of a Unix socket."""

    _extensions: dict[str, Any]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._whole = OneWrite(transport)
        super().connection_made(cast("asyncio.Transport", self._whole))
        peer = peer_of(transport.get_extra_info("socket"))
        self._extensions = {} if peer is None else {PEER_EXTENSION: peer}

    def on_response_complete(self) -> None:
        self._whole.flush()
        super().on_response_complete()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = self._extensions
