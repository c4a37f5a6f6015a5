"""Listening sockets: connections are taken here, and counted before anything is done for them that costs something.

A server of asyncio's takes all that come in one turn of the loop, and its protocols hear of them only after the TLS
handshake. Silent connections could take all of the process's files, and asyncio logs a page for each that it then
cannot take. Here a connection has its place from when it is accepted, and one that finds no place is closed at once. So
operators, the journal and the backends always have the files that are reserved for them.
"""

import asyncio
import os
import socket
import ssl
from asyncio import selector_events, sslproto
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import structlog

from rollmuxd.daemon.http.peer import PeerHttpToolsProtocol, peer_of, refusal
from rollmuxd.daemon.http.problems import FULL
from rollmuxd.daemon.logs import Seldom

log = structlog.get_logger(__name__)

#: the wait after a connection could not be taken: the system is out of files or of memory
REST_S: Final = 1.0
#: seconds that a TLS handshake may take
HANDSHAKE_S: Final = 10.0

# asyncio keeps a buffer of this size for each TLS connection. With its own 256 kB, it is most of what one costs.
sslproto.SSLProtocol.max_size = 32 * 1024
# What is read at once of a connection is kept until its call is heard; asyncio itself reads 256 kB.
selector_events._SelectorSocketTransport.max_size = 32 * 1024  # type: ignore[attr-defined]  # noqa: SLF001


class Places:
    """How many connections are open, in all and from each address, or user of this machine.

    One may have half of them: all clients of a cluster may come through one address.
    """

    def __init__(self, most: int) -> None:
        self._most, self._from_one = most, max(1, most // 2)
        self._taken = 0
        self._by_whom: dict[str, int] = {}

    def take(self, whom: str) -> str:
        """Take a place. Empty: it is taken; else why there is none."""
        number = self._by_whom.get(whom, 0)
        if self._taken >= self._most:
            return f"{self._taken} connections are open, which is the limit"
        if number >= self._from_one:
            return f"{number} connections from {whom} are open, which is the limit for one"
        self._taken += 1
        self._by_whom[whom] = number + 1
        return ""

    def give_back(self, whom: str) -> None:
        """Give a place back."""
        self._taken -= 1
        left = self._by_whom.pop(whom) - 1
        if left:
            self._by_whom[whom] = left


class Listener:
    """One listening socket. It is closed like a server of asyncio's, for which uvicorn takes it."""

    def __init__(
        self,
        bound: socket.socket,
        make: Callable[[], PeerHttpToolsProtocol],
        places: Places,
        tls: ssl.SSLContext | None = None,
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        self._bound = bound
        self._make = make
        self._places = places
        self._tls: dict[str, Any] = {} if tls is None else {"ssl": tls, "ssl_handshake_timeout": handshake_s}
        self._loop = asyncio.get_running_loop()
        self._rests: asyncio.TimerHandle | None = None
        self._greetings: dict[asyncio.Task[None], tuple[socket.socket, PeerHttpToolsProtocol]] = {}
        self._is_closed = False
        self._seldom = defaultdict[str, Seldom](lambda: Seldom(at_most=1))

    def open(self, backlog: int) -> None:
        """Take connections from now on."""
        self._bound.setblocking(False)
        self._bound.listen(backlog)
        self._watch()

    def close(self) -> None:
        """Take no further connections; give up on those that are not there yet. Closed again, it stays closed."""
        if self._rests is not None:
            self._rests.cancel()
        if self._bound.fileno() != -1:  # uvicorn closes it after this, and again if that is interrupted
            self._loop.remove_reader(self._bound)
        self._is_closed = True
        for connection, protocol in self._greetings.values():
            heard_of: Any = protocol.transport  # None until then
            if self._tls and heard_of is None:
                # This ends the handshake. Were the task cancelled while its protocol hears of the beginning, uvloop
                # would be silent about the end. Then uvicorn would wait for that connection.
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    async def wait_closed(self) -> None:
        """Wait until they are given up."""
        await asyncio.gather(*self._greetings, return_exceptions=True)

    def _watch(self) -> None:
        self._loop.add_reader(self._bound, self._take)

    def _take(self) -> None:
        # One in each turn of the loop: what a new connection costs, the calls of that turn wait for.
        try:
            connection, address = self._bound.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            # It would be told again and again, and at once.
            self._loop.remove_reader(self._bound)
            self._rests = self._loop.call_later(REST_S, self._watch)
            self._say("connections_not_taken", error)
            return
        self._let_in(connection, _user(connection) if self._bound.family == socket.AF_UNIX else address[0])

    def _let_in(self, connection: socket.socket, whom: str) -> None:
        if whom and (why := self._places.take(whom)):
            self._say("connections_refused", why)
            with connection, suppress(OSError):
                connection.setblocking(False)
                if not self._tls:  # saying it there would take the handshake that is too much
                    connection.send(refusal(FULL, why))
            return
        leave = partial(self._places.give_back, whom) if whom else None
        protocol = self._make()
        protocol.on_gone = leave
        task = self._loop.create_task(self._greet(connection, protocol))
        self._greetings[task] = connection, protocol
        task.add_done_callback(self._greetings.pop)

    async def _greet(self, connection: socket.socket, protocol: PeerHttpToolsProtocol) -> None:
        try:
            with suppress(OSError):  # no handshake, or none in time
                await self._loop.connect_accepted_socket(lambda: protocol, connection, **self._tls)
        finally:
            # A protocol that has heard of the connection hears of its end.
            heard_of: Any = protocol.transport
            if heard_of is None:
                if protocol.on_gone is not None:
                    protocol.on_gone()
            elif self._is_closed:
                protocol.shutdown()  # uvicorn has not, if it began since

    def _say(self, what: str, reason: object) -> None:
        if (left_out := self._seldom[what].take()) is not None:
            log.warning(what, reason=str(reason), **({"left_out": left_out} if left_out else {}))


def _user(connection: socket.socket) -> str:
    """The owner of a Unix socket's connection; empty: an operator's, which is accepted whatever others have taken."""
    peer = peer_of(connection)
    if peer is None:
        return "somebody"
    return "" if peer.uid in {0, os.getuid()} else f"uid {peer.uid}"
