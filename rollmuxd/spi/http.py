"""An HTTP client whose requests a backend carries: how a residency driver talks to an engine on a host's loopback.

    async with http.client(order.backend, order.host, "http://127.0.0.1:8000") as engine:
        await engine.post("/sleep", params={"level": 1})

Needs httpx (with h11 and certifi, its own dependencies) and anyio; not imported by :mod:`rollmuxd.spi`, which stays
light.

What goes wrong comes as httpx's own exceptions, with one exception: a host that cannot be reached is
:class:`~rollmuxd.spi.ContactLost`, as everywhere. So ``httpx.ConnectError`` is sure to mean that the host is there,
that nothing listens at the address, and that nothing was sent.
"""

import ssl
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread
import certifi
import h11
import httpx

from rollmuxd.core.ids import HostId
from rollmuxd.spi.backend import Backend, ExchangesBytes, exchanges_bytes
from rollmuxd.spi.errors import ContactLost, NotDone

#: how much of any answer is taken in
_ANSWER_MB: Final = 1
#: An answer with a longer run of blanks and line ends is not read. The parser of heads (h11) takes time that grows with
#: the square of such a run. 100 kB of blanks in one header would hold the daemon's loop for most of a minute.
_LONGEST_BLANK: Final = 256
_ALL_BLANK: Final = b" " * (_LONGEST_BLANK + 1)
_AS_BLANKS: Final = bytes.maketrans(b"\t\r\n", b"   ")


def client(backend: Backend, host: HostId, base_url: str, **options: Any) -> httpx.AsyncClient:
    """An httpx.AsyncClient for a base URL as the host understands it; ``options`` are httpx's own (timeout, headers).

    Raises NotDone where the backend exchanges no bytes.
    """
    transport = BackendTransport(exchanges_bytes(backend), host)
    return httpx.AsyncClient(base_url=base_url, transport=transport, **options)


class BackendTransport(httpx.AsyncBaseTransport):
    """Each request has a connection of its own, and its answer is taken in whole.

    The engine may have closed a kept one meanwhile, and then it would be unknown whether the request arrived.
    """

    def __init__(self, backend: ExchangesBytes, host: HostId) -> None:
        self._backend = backend
        self._host = host

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        # Not packed: a few kilobytes can be made to unpack to more than there is memory.
        request.headers.update({"connection": "close", "accept-encoding": "identity"})
        url, wire = request.url, h11.Connection(h11.CLIENT)
        limit_s = request.extensions["timeout"]["read"]
        try:
            head = h11.Request(method=request.method, target=url.raw_path, headers=request.headers.raw)
            parts = [wire.send(event) for event in (head, h11.Data(await request.aread()), h11.EndOfMessage())]
        except h11.LocalProtocolError as error:
            raise httpx.LocalProtocolError(str(error)) from error
        try:
            with anyio.fail_after(limit_s):
                came = await self._backend.exchange(
                    self._host,
                    url.host,
                    url.port or (443 if url.scheme == "https" else 80),
                    b"".join(part or b"" for part in parts),
                    most=_ANSWER_MB * 10**6 + 1,
                    trust=_trusted() if url.scheme == "https" else "",
                )
        except TimeoutError as error:
            raise httpx.ReadTimeout(f"no answer within {limit_s} s") from error
        except NotDone as error:
            raise httpx.ConnectError(str(error)) from error
        if len(came) > _ANSWER_MB * 10**6:
            raise ContactLost(
                f"{request.method} {url} on {self._host} is answered with more than {_ANSWER_MB} MB: that is no engine"
            )
        try:  # in a thread: an answer of a million bytes in chunks of one takes seconds
            return await anyio.to_thread.run_sync(_parsed, wire, came)
        except h11.RemoteProtocolError as error:
            raise httpx.RemoteProtocolError(str(error)) from error


def _parsed(wire: h11.Connection, came: bytes) -> httpx.Response:
    if not came:
        raise h11.RemoteProtocolError("the connection was closed before an answer came")
    if _ALL_BLANK in came.translate(_AS_BLANKS):
        raise h11.RemoteProtocolError(f"more than {_LONGEST_BLANK} blanks in a row")
    wire.receive_data(came)
    wire.receive_data(b"")  # its end
    body, answer = bytearray(), None
    while not isinstance(event := wire.next_event(), h11.EndOfMessage):
        if isinstance(event, h11.Response):
            answer = event
        elif isinstance(event, h11.Data):
            body += event.data
    assert answer is not None
    headers = [(name, value) for name, value in answer.headers if name != b"content-encoding"]
    return httpx.Response(answer.status_code, headers=headers, content=bytes(body))


def _trusted() -> str:
    """Certificates of authorities that this process trusts (``SSL_CERT_FILE``)."""
    files = (ssl.get_default_verify_paths().cafile, certifi.where())
    return "\n".join(Path(file).read_text(encoding="utf-8") for file in files if file)
