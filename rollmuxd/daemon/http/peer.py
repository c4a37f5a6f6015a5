"""Connections: which user is at the other end of a Unix socket, and what a caller may cost before it is known.

uvicorn does not pass the socket's credentials on. This protocol class asks the kernel once per connection, and puts the
answer into the scope of each request. Use it as ``uvicorn.Config(..., http=PeerHttpToolsProtocol)``.
"""

import asyncio
import socket
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from http import HTTPStatus
from typing import Any, ClassVar, Final, NamedTuple, cast

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rollmuxd.daemon.access.gate import PEER_EXTENSION, Peer
from rollmuxd.daemon.http.problems import BAD_REQUEST, HEAD_TOO_LARGE, MEDIA_TYPE, SLOW, Kind
from rollmuxd.wire.answers import Problem

#: ``struct ucred``: pid, uid, gid
_UCRED = struct.Struct("iII")
_UNKNOWN = 0xFFFFFFFF

#: calls of one connection that may wait for the answers to those before them
AHEAD: Final = 16
#: how long a connection that is over is kept open while its client still sends. Closed on bytes that were not read, the
#: kernel resets it, and the client loses the answer that says why
LINGER_S: Final = 2.0


def peer_of(sock: Any) -> Peer | None:
    """The credentials of a Unix socket's other end, from when it connected; None for any other socket."""
    if sock is None or sock.family != socket.AF_UNIX:
        return None
    pid, uid, gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return None if uid == _UNKNOWN else Peer(pid, uid, gid)


class OneWrite:
    """A transport that sends at once what is written in one turn of the loop.

    uvicorn writes an answer's head and then its body: two system calls, two segments, and the client is woken for a
    head with nothing behind it. When it is closed while the other side sends (``is_sent_to``), it lingers.
    """

    def __init__(self, transport: asyncio.Transport, is_sent_to: Callable[[], bool] = lambda: False) -> None:
        self._transport = transport
        self._is_sent_to = is_sent_to
        self._lingers = False
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> None:
        """Send it at the end of this turn, or when :meth:`flush` is called."""
        if self._lingers:
            return
        if not self._parts:
            asyncio.get_running_loop().call_soon(self.flush)
        self._parts.append(data)

    def flush(self) -> None:
        """Send what was written."""
        if self._parts:
            parts, self._parts = self._parts, []
            self._transport.write(b"".join(parts))

    def close(self) -> None:
        """Close, when everything is sent; where the other side sends, after it had time to see that."""
        if self._lingers:
            return
        self.flush()
        if self._transport.is_closing() or not self._is_sent_to():
            self._transport.close()
            return
        self._lingers = True
        self._transport.resume_reading()
        if self._transport.can_write_eof():
            with suppress(OSError):  # it has hung up by now
                self._transport.write_eof()
        asyncio.get_running_loop().call_later(LINGER_S, self._transport.close)

    def is_closing(self) -> bool:
        """Whether nothing is read or written any more."""
        return self._lingers or self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class ConnectionLimits(NamedTuple):
    """What a connection may cost before it is known who is at its other end."""

    #: bytes of a call that are not its body: its address and headers; then trailers, and what is around chunks
    max_head: int = 32_000
    #: open TCP connections, from when they were accepted
    max_connections: int = 20_000
    #: open connections of the Unix socket, but for root's and the daemon's own user's
    max_local: int = 20_000
    #: seconds in which a call must have arrived, and in which an answer must have been taken
    read_s: float = 30.0


class PeerHttpToolsProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, which also knows the peer of a Unix socket, and bounds what a call costs.

    uvicorn sets no limit to heads, trailers, calls sent ahead, or the time that a call takes to arrive. A timer for
    each call would cost more than all of this, so :func:`hang_up_slow` looks at all connections.
    """

    limits: ClassVar[ConnectionLimits] = ConnectionLimits()
    #: called when the connection is gone
    on_gone: Callable[[], object] | None = None
    _extensions: dict[str, Any]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        #: since when a call is on its way; None: none is
        self._since: float | None = self.loop.time()
        #: since when an answer is not taken
        self._stuck: float | None = None
        #: whether the head of a call has come, and not yet all of the call
        self._midway = False
        #: bytes that have come of the head; midway: those that are not body (the marks of chunks, trailers)
        self._beside = 0
        self._closing = False
        self._whole = OneWrite(transport, lambda: self._midway or self._beside > 0)
        super().connection_made(cast("asyncio.Transport", self._whole))
        peer = peer_of(transport.get_extra_info("socket"))
        self._extensions = {} if peer is None else {PEER_EXTENSION: peer}

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.on_gone is not None:
            self.on_gone()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._since is None:
            self._since = self.loop.time()
        self._beside += len(data)
        super().data_received(data)
        # Below zero: of this data, only its body counts for the call that it has begun.
        self._beside = max(self._beside, 0)
        if self._beside > self.limits.max_head:
            self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = self._extensions
        if self._since is None:
            self._since = self.loop.time()

    def on_headers_complete(self) -> None:
        most = self.limits.max_head
        # Measured only where so much has come at all: what came may hold the end of another call, and a body.
        if self._beside > most and len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > most:
            self._refuse_head()
            raise _Refused  # the parser stops
        if len(self.pipeline) >= AHEAD:
            self.transport.close()
            raise _Refused
        self._beside = 0
        if not self.url.startswith(b"/") and not _path_of(self.url):
            address = self.url.decode("latin-1")
            self._refuse(BAD_REQUEST, f"the address {address!r} has no path that can be read; one is /v1/jobs")
            raise _Refused
        super().on_headers_complete()
        self._midway = True

    def on_body(self, body: bytes) -> None:
        self._beside -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._since = None
        self._beside = 0
        self._midway = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._whole.flush()
        self.cycle.body = bytearray()  # what has come of a body that was refused
        super().on_response_complete()

    def pause_writing(self) -> None:
        self._stuck = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stuck = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        self._refuse(BAD_REQUEST, f"{msg} This speaks HTTP/1.1.")

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
            self._refuse(SLOW, f"a call has to arrive within {longest:g} s")

    def _refuse_head(self) -> None:
        self._refuse(
            HEAD_TOO_LARGE,
            f"the head of a call, and all else that is not its body, may have {self.limits.max_head} bytes",
        )

    def _refuse(self, kind: Kind, detail: str) -> None:
        """Hear no more of what is being sent, say why if that can be said, and hang up."""
        if self.transport.is_closing():
            return
        cycle: Any = self.cycle  # None before the first call, whatever its type says
        # A client would take it for the answer to a call before it, or for a second one.
        if self._midway:
            unanswered = not self.pipeline and not cycle.response_started
        else:
            unanswered = cycle is None or cycle.response_complete
        if unanswered:
            self.transport.write(refusal(kind, detail))
        self.transport.close()


def _path_of(address: bytes) -> bytes:
    """The path of a call's address; empty: it has none, or the address cannot be read."""
    try:
        return httptools.parse_url(address).path or b""
    except httptools.HttpParserInvalidURLError:
        return b""


class _Refused(Exception):
    """Nothing more is to be parsed of this connection."""


def refusal(kind: Kind, detail: str) -> bytes:
    """An answer where there is no call yet that could be answered; the last one on its connection."""
    body = msgspec.json.encode(
        Problem(title=kind.title, status=kind.status, detail=detail, type=f"urn:rollmux:problem:{kind.code}")
    )
    again = "" if kind.retry_after is None else f"retry-after: {kind.retry_after}\r\n"
    head = (
        f"HTTP/1.1 {kind.status} {HTTPStatus(kind.status).phrase}\r\ncontent-type: {MEDIA_TYPE}\r\n"
        f"content-length: {len(body)}\r\n{again}connection: close\r\n\r\n"
    )
    return head.encode() + body


def limited(limits: ConnectionLimits) -> type[PeerHttpToolsProtocol]:
    """The protocol with these limits."""
    return type("LimitedProtocol", (PeerHttpToolsProtocol,), {"limits": limits})


def hang_up_slow(connections: Iterable[Any], now: float) -> None:
    """Look at all connections; to be called several times within ``read_s``. A microsecond for each."""
    for connection in list(connections):
        connection.hang_up_if_slow(now)
