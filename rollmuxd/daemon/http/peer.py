"""Connections: the process at the other end of the Unix socket, and what a call may cost before its caller is known.

uvicorn does not pass on the socket's credentials. So this protocol class asks the kernel once per connection, and puts
the answer into the scope of each request.
"""

import asyncio
import socket
import struct
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, NamedTuple, cast

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rollmuxd.daemon.access.gate import PEER_EXTENSION, Peer
from rollmuxd.daemon.http.problems import BAD_REQUEST, HEAD_TOO_LARGE, MEDIA_TYPE, SLOW, Kind, Refusal, problem_of

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

    uvicorn writes an answer's head and then its body. That is two system calls and two segments, and wakes the client
    for a head alone.
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
            try:
                self._transport.write(b"".join(parts))
            except RuntimeError:  # uvloop's, of a connection whose handle is closed already
                self._transport.abort()

    def close(self) -> None:
        """Close, when everything is sent."""
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class ConnectionLimits(NamedTuple):
    """What a connection may cost before its caller is known."""

    #: bytes of a call that are not its body: its address and headers; then trailers, and what is around chunks
    max_head: int = 32_000
    #: open TCP connections, from when they were accepted; one address may have half of them
    max_connections: int = 20_000
    #: open connections of the Unix socket, but for root's and the daemon's own user's; one user may have half of them
    max_local: int = 20_000
    #: seconds in which a call must have arrived, and in which an answer must have been taken
    read_s: float = 30.0


class PeerHttpToolsProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, which also identifies the peer of a Unix socket, and bounds what a call costs.

    uvicorn sets no limits to heads, trailers, chunks' marks, calls sent ahead of answers, or the time of a call. Here a
    call that comes before the answer to the one before is not heard, and the connection ends with that answer. A timer
    for each call would cost more than the rest of this, so the server looks at all of them.
    """

    #: called when the connection is gone
    on_gone: Callable[[], object] | None = None
    _extensions: dict[str, Any]

    def __init__(self, *more: Any, limits: ConnectionLimits | None = None, **named: Any) -> None:
        super().__init__(*more, **named)
        self.limits = limits or ConnectionLimits()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        #: since when a call is on its way; None: none is
        self._since: float | None = self.loop.time()
        #: since when an answer is not taken
        self._stuck: float | None = None
        #: whether the head of a call has come, and not yet all of the call
        self._midway = False
        #: whether the caller sends no other call on this connection
        self._is_last = False
        #: bytes that have come of the head; midway: those that are not body (the marks of chunks, trailers)
        self._beside = 0
        #: whether nothing more is heard: the call that has come is answered, and that is all
        self._is_deaf = False
        self._closing = False
        self._whole = OneWrite(transport)
        super().connection_made(cast("asyncio.Transport", self._whole))
        peer = peer_of(transport.get_extra_info("socket"))
        self._extensions = {} if peer is None else {PEER_EXTENSION: peer}

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.on_gone is not None:
            self.on_gone()

    def data_received(self, data: bytes) -> None:
        if self._is_deaf or self.transport.is_closing():
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

    def on_headers_complete(self) -> None:
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > self.limits.max_head:
            self._refuse_head()
            raise _Refused  # the parser stops
        cycle: Any = self.cycle  # None before the first call, whatever its type says
        if cycle is not None and not cycle.response_complete:
            self._refuse(BAD_REQUEST, "")  # it ends with the answer that is due
            raise _Refused
        self._beside = 0
        if not self.url.startswith(b"/") and not _path_of(self.url):
            address = self.url.decode("latin-1")
            self._refuse(BAD_REQUEST, f"the address {address!r} has no path that can be read; one is /v1/jobs")
            raise _Refused
        super().on_headers_complete()
        self._midway = True
        # uvicorn would close with the answer. With bytes of a refused body unread, that resets the connection, and the
        # answer may be lost.
        self._is_last, self.cycle.keep_alive = not self.cycle.keep_alive, True

    def on_body(self, body: bytes) -> None:
        self._beside -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._since = None
        self._beside = 0
        self._midway = False
        super().on_message_complete()
        self._close_after_the_last()

    def on_response_complete(self) -> None:
        self._whole.flush()
        self.cycle.body = bytearray()  # what has come of a body that was refused
        self._close_after_the_last()
        super().on_response_complete()

    def _close_after_the_last(self) -> None:
        if self._is_last and not self._midway and self.cycle.response_complete:
            self.transport.close()

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
        elif self.flow.read_paused:
            self._since = now  # the rest of a body is not read yet
        elif self._since is not None and now - self._since > longest:
            self._refuse(SLOW, f"a call has to arrive within {longest:g} s")

    def _refuse_head(self) -> None:
        self._refuse(
            HEAD_TOO_LARGE,
            f"the address and headers of a call, and whatever else is not its body, may have {self.limits.max_head} "
            "bytes",
        )

    def _refuse(self, kind: Kind, detail: str) -> None:
        """Stop reading what is being sent, say why if that is possible, and close."""
        if self.transport.is_closing():
            return
        cycle: Any = self.cycle  # None before the first call, whatever its type says
        if not self._midway and cycle is not None and not cycle.response_complete:
            # It would be taken for the answer to the call before it, which ends this.
            self._is_deaf, cycle.keep_alive = True, False
            return
        if not self._midway or not cycle.response_started:
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
    problem, headers = problem_of(Refusal(kind, detail), "")
    body, more = msgspec.json.encode(problem), "".join(f"{name}: {text}\r\n" for name, text in headers)
    head = (
        f"HTTP/1.1 {kind.status} {HTTPStatus(kind.status).phrase}\r\ncontent-type: {MEDIA_TYPE}\r\n"
        f"content-length: {len(body)}\r\n{more}connection: close\r\n\r\n"
    )
    return head.encode() + body
