"""Requests of HTTP that a backend carries: how a residency driver talks to an engine on a host's loopback.

    answer = await http.request(order.backend, order.host, "POST", "http://127.0.0.1:8000/sleep", params={"level": 1})

Needs httpx (with h11 and certifi, its own dependencies) and anyio; not imported by :mod:`rollmuxd.spi`, which stays
light.
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
from rollmuxd.spi.backend import Backend, exchanges_bytes
from rollmuxd.spi.errors import ContactLost, NotDone

#: how much of any answer is taken in
_ANSWER_MB: Final = 1
#: An answer with a longer run of blanks and line ends is not read. The parser of heads (h11) takes time that grows with
#: the square of such a run. 100 kB of blanks in one header would hold the daemon's loop for most of a minute.
_LONGEST_BLANK: Final = 256
_ALL_BLANK: Final = b" " * (_LONGEST_BLANK + 1)
_AS_BLANKS: Final = bytes.maketrans(b"\t\r\n", b"   ")


class NotThere(NotDone):
    """The host is there, and nothing listens at the address: nothing was sent."""


class BrokeOff(ContactLost):
    """What came is no answer of HTTP, or none that is whole. The text may quote it."""


async def request(
    backend: Backend, host: HostId, method: str, url: str, *, limit_s: float | None = None, **more: Any
) -> httpx.Response:
    """Send a request to a URL as the host understands it; ``more`` is httpx's own: params, json, headers.

    It has a connection of its own, and its answer is taken in whole. (The engine may have closed a kept one meanwhile,
    and then it would be unknown whether the request arrived.)

    Raises:
        NotThere: nothing listens at the address.
        NotDone: the request is none of HTTP, or the backend exchanges no bytes.
        ContactLost: the outcome is not known: the host cannot be reached, or what came is no answer (BrokeOff).
        TimeoutError: there was no answer within ``limit_s``.
    """
    carrier, asked, wire = exchanges_bytes(backend), httpx.Request(method, url, **more), h11.Connection(h11.CLIENT)
    # Not packed: a few kilobytes can be made to unpack to more than there is memory.
    asked.headers.update({"connection": "close", "accept-encoding": "identity"})
    try:
        head = h11.Request(method=method, target=asked.url.raw_path, headers=asked.headers.raw)
        parts = [wire.send(event) for event in (head, h11.Data(asked.read()), h11.EndOfMessage())]
    except h11.LocalProtocolError as error:  # which quotes a header
        raise NotDone(f"{method} {url}: this call, with the headers that are configured, is none of HTTP") from error
    try:
        with anyio.fail_after(limit_s):
            came = await carrier.exchange(
                host,
                asked.url.host,
                asked.url.port or (443 if asked.url.scheme == "https" else 80),
                b"".join(part or b"" for part in parts),
                most=_ANSWER_MB * 10**6 + 1,
                trust=_trusted() if asked.url.scheme == "https" else "",
            )
    except NotDone as error:
        raise NotThere(str(error)) from error
    if len(came) > _ANSWER_MB * 10**6:
        raise ContactLost(f"{method} {url} is answered with more than {_ANSWER_MB} MB: that is no engine")
    try:  # in a thread: an answer of a million bytes in chunks of one takes seconds
        return await anyio.to_thread.run_sync(_parsed, wire, came)
    except h11.RemoteProtocolError as error:
        raise BrokeOff(str(error)) from error


def _parsed(wire: h11.Connection, came: bytes) -> httpx.Response:
    if not came:
        raise h11.RemoteProtocolError("the connection was closed before an answer came")
    if _ALL_BLANK in came.translate(_AS_BLANKS):
        raise h11.RemoteProtocolError(f"more than {_LONGEST_BLANK} blanks in a row")
    wire.receive_data(came)
    wire.receive_data(b"")  # its end
    body, status = bytearray(), 0
    while not isinstance(event := wire.next_event(), h11.EndOfMessage):
        if isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            body += event.data
    return httpx.Response(status, content=bytes(body))


def _trusted() -> str:
    """Certificates of authorities that this process trusts (``SSL_CERT_FILE``)."""
    files = (ssl.get_default_verify_paths().cafile, certifi.where())
    # TLS takes certificates as ASCII only; what is not is in the comments between them.
    return "\n".join(Path(file).read_text(encoding="ascii", errors="ignore") for file in files if file)
