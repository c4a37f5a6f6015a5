"""An HTTP client whose connections a backend opens: how a residency driver talks to an engine on a host's loopback.

    async with http.client(order.backend, order.host, "http://127.0.0.1:8000") as engine:
        await engine.post("/sleep", params={"level": 1})

Needs httpx (with httpcore, its own dependency) and anyio; not imported by :mod:`rollmuxd.spi`, which stays light.

What goes wrong comes as httpx's own exceptions, with one exception: a host that cannot be reached is
:class:`~rollmuxd.spi.ContactLost`, as everywhere. So ``httpx.ConnectError`` is sure to mean that the host is there,
that nothing listens at the address, and that nothing was sent.
"""

import ssl
from collections.abc import Iterable
from typing import Any, Final

import anyio
import anyio.abc
import httpcore
import httpx
from httpcore._backends.anyio import AnyIOStream

from rollmuxd.core.ids import HostId
from rollmuxd.spi.backend import Backend, OpensConnections, opens_connections
from rollmuxd.spi.errors import NotDone

#: An answer with a longer run of blanks and line ends is not read. The parser of heads (h11) takes time that grows with
#: the square of such a run. 100 kB of blanks in one header would hold the daemon's loop for most of a minute.
_LONGEST_BLANK: Final = 256
_ALL_BLANK: Final = b" " * (_LONGEST_BLANK + 1)
_AS_BLANKS: Final = bytes.maketrans(b"\t\r\n", b"   ")


def client(backend: Backend, host: HostId, base_url: str, **options: Any) -> httpx.AsyncClient:
    """An httpx.AsyncClient for a base URL as the host understands it; ``options`` are httpx's own (timeout, headers).

    Raises NotDone where the backend opens no connections.
    """
    transport = BackendTransport(opens_connections(backend), host)
    return httpx.AsyncClient(base_url=base_url, transport=transport, **options)


class BackendTransport(httpx.AsyncHTTPTransport):
    """httpx's own transport, over connections that a backend opens on one host.

    Each request has a connection of its own. The engine may have closed a kept one meanwhile, and then it would be
    unknown whether the request arrived.
    """

    def __init__(self, backend: OpensConnections, host: HostId) -> None:
        # All that httpx's has, and it would read the system's certificates for one that is not used.
        self._pool = httpcore.AsyncConnectionPool(max_keepalive_connections=0, network_backend=_Network(backend, host))


class _Network(httpcore.AsyncNetworkBackend):
    """How httpcore's pool opens connections: by the backend."""

    def __init__(self, backend: OpensConnections, host: HostId) -> None:
        self._backend = backend
        self._host = host

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        try:
            with anyio.fail_after(timeout):
                return _Stream(await self._backend.connect(self._host, host, port))
        except TimeoutError as error:
            raise httpcore.ConnectTimeout(f"no connection to {host} port {port} within {timeout} s") from error
        except NotDone as error:
            raise httpcore.ConnectError(str(error)) from error


class _Stream(AnyIOStream):
    """httpcore's own over a stream of anyio; what comes is looked at before it is parsed."""

    def __init__(self, stream: anyio.abc.ByteStream) -> None:
        super().__init__(stream)
        #: the end of what was read last: a run of blanks may begin there
        self._before = b""

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        read = await super().read(max_bytes, timeout)
        looked_at = self._before + read.translate(_AS_BLANKS)
        if _ALL_BLANK in looked_at:
            raise httpcore.RemoteProtocolError(f"more than {_LONGEST_BLANK} blanks in a row")
        self._before = looked_at[-_LONGEST_BLANK:]
        return read

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        try:
            tls = await super().start_tls(ssl_context, server_hostname, timeout)
        except httpcore.ConnectError as error:
            raise httpcore.NetworkError(str(error)) from error  # something listens there
        assert isinstance(tls, AnyIOStream)
        return _Stream(tls._stream)  # noqa: SLF001  (nothing public gives it)
