"""Connections: who is at the other end of the Unix socket, and what anybody may cost before it is known who calls.

uvicorn does not hand the socket's credentials on, so its protocol class is given one more thought: it asks the kernel
once per connection, and puts the answer into the scope of each request. Use it as
``uvicorn.Config(..., http=PeerHttpToolsProtocol)``.
"""

import asyncio
import socket
import struct
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any, ClassVar, NamedTuple, cast

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rollmuxd.daemon.access import PEER_EXTENSION, Peer
from rollmuxd.daemon.http.problems import FULL, HEAD_TOO_LARGE, MEDIA_TYPE, SLOW, Kind
from rollmuxd.wire.answers import Problem

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


class ConnectionLimits(NamedTuple):
    """What a connection may cost before it is known who is at its other end."""

    #: bytes of a call's address and headers
    max_head: int = 32_000
    #: open TCP connections; the Unix socket is never full, so that an operator can always come in
    max_connections: int = 20_000
    #: of them, those from one address
    max_from_one: int = 10_000
    #: seconds in which a call must have arrived, and in which an answer must have been taken
    read_s: float = 30.0


class PeerHttpToolsProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, which also says who is at the other end of a Unix socket, and bounds what a call costs.

    The parser takes heads of any size, and uvicorn waits for the rest of a call for ever. Times are not watched by a
    timer for each call, which would cost more than the rest of this: :func:`hang_up_slow` looks at all of them.
    """

    limits: ClassVar[ConnectionLimits] = ConnectionLimits()
    #: open TCP connections by address
    from_each: ClassVar[dict[str, int]] = {}
    _extensions: dict[str, Any]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._whole = OneWrite(transport)
        #: since when a call is on its way; None: none is
        self._since: float | None = self.loop.time()
        #: since when an answer is not taken
        self._stuck: float | None = None
        #: bytes of a head that is not complete
        self._head: int | None = 0
        #: bytes that came last
        self._chunk = 0
        self._closing = False
        super().connection_made(cast("asyncio.Transport", self._whole))
        sock = transport.get_extra_info("socket")
        peer = peer_of(sock)
        self._extensions = {} if peer is None else {PEER_EXTENSION: peer}
        self._from: str | None = None
        if self.client is not None and (sock is None or sock.family != socket.AF_UNIX):
            self._from = self.client[0]
            number = self.from_each[self._from] = self.from_each.get(self._from, 0) + 1
            if len(self.connections) > self.limits.max_connections:
                self._refuse(FULL, f"{self.limits.max_connections} connections are open, which is the limit")
            elif number > self.limits.max_from_one:
                self._refuse(FULL, f"{number - 1} connections from {self._from} are open, which is the limit for one")

    def connection_lost(self, exc: Exception | None) -> None:
        if self._from is not None:
            left = self.from_each.pop(self._from) - 1
            if left:
                self.from_each[self._from] = left
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._since is None:
            self._since = self.loop.time()
        self._chunk = len(data)
        if self._head is not None:
            self._head += self._chunk
        super().data_received(data)
        # A head that is complete was measured by itself.
        if self._head is not None and self._head > self.limits.max_head:
            self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = self._extensions
        if self._since is None:
            self._since = self.loop.time()

    def on_headers_complete(self) -> None:
        most = self.limits.max_head
        # Measured only where so much has come at all: what came, and the piece that it came in, are more than the head.
        if max(self._head or 0, self._chunk) > most and self._head_size() > most:
            self._refuse_head()
            raise _Refused  # the parser stops
        self._head = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._since = None
        self._head = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._whole.flush()
        super().on_response_complete()

    def pause_writing(self) -> None:
        self._stuck = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stuck = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():
            super().send_400_response(msg)

    def hang_up_if_slow(self, now: float) -> None:
        """Hang up if what is to arrive, or to be taken, has not for too long. Looked at again and again."""
        longest = self.limits.read_s
        if self.transport.is_closing():
            # It waits for its last bytes to be taken. Seen like that twice, they will not be.
            if self._closing:
                self.transport.abort()
            self._closing = True
        elif self._stuck is not None and now - self._stuck > longest:
            self.transport.abort()
        elif self._since is not None and now - self._since > longest:
            cycle: Any = self.cycle  # None before the first call, whatever its type says
            if cycle is None or cycle.response_complete:
                self._refuse(SLOW, f"a call has to arrive within {longest:g} s")
            else:
                self.transport.close()

    def _head_size(self) -> int:
        return len(self.url) + sum(len(name) + len(value) for name, value in self.headers)

    def _refuse_head(self) -> None:
        self._refuse(HEAD_TOO_LARGE, f"the address and headers of a call may have {self.limits.max_head} bytes")

    def _refuse(self, kind: Kind, detail: str) -> None:
        """Answer before there is a call that could be answered, and hang up."""
        if self.transport.is_closing():
            return
        body = msgspec.json.encode(
            Problem(title=kind.title, status=kind.status, detail=detail, type=f"urn:rollmux:problem:{kind.code}")
        )
        again = "" if kind.retry_after is None else f"retry-after: {kind.retry_after}\r\n"
        head = (
            f"HTTP/1.1 {kind.status} {HTTPStatus(kind.status).phrase}\r\ncontent-type: {MEDIA_TYPE}\r\n"
            f"content-length: {len(body)}\r\n{again}connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


class _Refused(Exception):
    """Nothing more is to be parsed of this connection."""


def limited(limits: ConnectionLimits) -> type[PeerHttpToolsProtocol]:
    """The protocol with these limits."""
    return type("LimitedProtocol", (PeerHttpToolsProtocol,), {"limits": limits, "from_each": {}})


def hang_up_slow(connections: Iterable[Any], now: float) -> None:
    """Look at all connections; to be called several times within ``read_s``. A microsecond for each."""
    for connection in list(connections):
        connection.hang_up_if_slow(now)
