"""The one module that imports httpx; others hand its clients on, and see our answers and errors.

Importing httpx takes 75 to 150 ms, so this module is itself imported at the first call, not with ``rollmuxd``.
Building a client loads the CA bundle (20 ms), so a sender keeps its client. Over HTTP or a socket there is none to
load. ``trust_env=False``: a proxy meant for the internet would otherwise be asked for 127.0.0.1 as well. No limit on
connections: the 101st long poll would fail with a pool timeout. Only HTTP/1.1: HTTP/2 stalls under parked requests.
"""

import errno
import ssl
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

import msgspec

from rollmuxd.client import fakes
from rollmuxd.client.calls import Call
from rollmuxd.client.discovery import SYSTEM_SOCKET, Address
from rollmuxd.client.errors import BadAnswer, Refused, RollmuxError, Unreachable, refused
from rollmuxd.wire.answers import Problem

# Where rich and click are installed, httpx would import its own command line: 55 of 130 ms.
_modules: dict[str, Any] = sys.modules
_modules.setdefault("httpx._main", None)
import httpx  # noqa: E402

if _modules.get("httpx._main", 0) is None:  # another thread may have imported it meanwhile
    _modules.pop("httpx._main", None)

T = TypeVar("T")

#: seconds: a daemon within reach takes a connection at once; its queue is full or its host is gone otherwise
CONNECT_S = 5.0
#: an answer as it came
Reply: TypeAlias = httpx.Response


def client(address: Address) -> httpx.Client:
    """Return what keeps connections to a daemon."""
    return httpx.Client(transport=_fake() or httpx.HTTPTransport(**_options(address)), **_common(address))


def async_client(address: Address) -> httpx.AsyncClient:
    """Return the same for asyncio; it belongs to the loop that it is first used in."""
    return httpx.AsyncClient(transport=_fake() or httpx.AsyncHTTPTransport(**_options(address)), **_common(address))


def mock(handle: Callable[[str, str, Mapping[str, str], bytes], Reply]) -> httpx.MockTransport:
    """Return an httpx transport (sync and async) that answers by calling ``handle(method, path, params, body)``.

    ``handle`` raises :class:`Unreachable` to play a daemon that is down.
    """

    def respond(request: httpx.Request) -> Reply:
        params = dict(request.url.params)
        try:
            return handle(request.method, request.url.raw_path.decode().partition("?")[0], params, request.content)
        except Unreachable as error:
            raise httpx.ConnectError(str(error), request=request) from error

    return httpx.MockTransport(respond)


def _fake() -> Any:
    return fakes.current.transport if fakes.current is not None else None


def _options(address: Address) -> dict[str, Any]:
    verify: bool | ssl.SSLContext = False
    if address.base_url.startswith("https:"):
        verify = _trust(address)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=4)
    return {"uds": address.socket, "verify": verify, "limits": limits, "trust_env": False}


def _trust(address: Address) -> ssl.SSLContext:
    """Which certificates to trust: those of a file, or those that the system trusts."""
    try:
        return ssl.create_default_context(cafile=address.ca_file)
    except OSError as error:
        raise RollmuxError(
            f"ROLLMUX_CA_FILE={address.ca_file}: {error.strerror or error}; it has to be a PEM file of certificates"
        ) from error


def _common(address: Address) -> dict[str, Any]:
    headers = {"user-agent": "rollmuxd", "accept": "application/json, application/problem+json"}
    if address.api_key:
        headers["authorization"] = f"Bearer {address.api_key}"
    # A transport is always given: httpx would build a default one too, with the CA bundle, were it not for `verify`.
    return {"base_url": address.base_url, "headers": headers, "trust_env": False, "verify": False}


def request(call: Call[Any]) -> dict[str, Any]:
    """Return what a client's ``request`` is to be given for a call."""
    given: dict[str, Any] = {"method": call.method, "url": call.path}
    given["timeout"] = httpx.Timeout(call.timeout_s, connect=min(CONNECT_S, call.timeout_s))
    if call.params:
        given["params"] = {name: value for name, value in call.params.items() if value is not None}
    headers = {"rollmux-journal": call.journal} if call.journal else {}
    if call.body is not None:
        given["content"] = msgspec.json.encode(call.body)
        headers["content-type"] = "application/json"
    given["headers"] = headers
    return given


def translated(error: Exception, address: Address) -> RollmuxError:
    """Return our error for one of httpx; every one of theirs has one of ours."""
    if isinstance(error, httpx.TransportError):
        return _unreachable(error, address)
    return BadAnswer(f"talking to {address} failed: {type(error).__name__}: {error}")


def _unreachable(error: Exception, address: Address) -> Unreachable:
    what = (str(error) or type(error).__name__).rstrip(".")
    remedy = _remedy(error, what, address)
    return Unreachable(f"the daemon at {address} does not answer: {what}", remedy=remedy)


def is_untrusted(error: BaseException) -> bool:
    """Whether the daemon's certificate is not trusted: the file of certificates is read again for the next call."""
    return "CERTIFICATE_VERIFY_FAILED" in str(error)


def _remedy(error: BaseException, what: str, address: Address) -> str:
    """What to do about it, where that can be told."""
    scheme, _, rest = address.base_url.partition("://")
    if is_untrusted(error) and "mismatch" in what:
        return "write a name of its certificate into ROLLMUX_URL, or have one made that has this name, too"
    if is_untrusted(error):
        return "to trust it, set ROLLMUX_CA_FILE to its certificate"
    if scheme == "https" and "WRONG_VERSION_NUMBER" in what:
        return f"this port speaks http, not https: write http://{rest}"
    if address.socket is None:
        # A port with TLS hangs up on a call without. So does a daemon that is ended just then.
        hung_up = scheme == "http" and isinstance(error, httpx.RemoteProtocolError)
        if hung_up:
            return f"if this port speaks https, not http, write https://{rest}"
        refused = _errno(error) == errno.ECONNREFUSED
        return "see whether the daemon runs there, and whether this is its address (ROLLMUX_URL)" if refused else ""
    match _errno(error):
        case errno.ECONNREFUSED | errno.ENOENT:
            start = "start it (rollmuxd daemon start)"
            if address.socket == SYSTEM_SOCKET:  # a second one does not know which job holds what
                start = "its operator starts it (systemctl start rollmuxd, or rollmuxd daemon start as its user)"
            return (
                f"no daemon runs there: {start}. Its jobs may still hold their GPUs; where none does, ROLLMUX_URL=off "
                "runs a job without it"
            )
        case errno.EACCES | errno.EPERM:
            return (
                "this user may not connect: the daemon's operator lets others in by daemon.socket_mode, with "
                "daemon.socket in a directory that everybody may enter"
            )
    return ""


def _errno(error: BaseException | None) -> int | None:
    """What the system said: httpx wraps it."""
    while error is not None and getattr(error, "errno", None) is None:
        error = error.__cause__ or error.__context__
    return getattr(error, "errno", None)


def understood(call: Call[T], reply: Reply) -> T:
    """Return the answer to a call. Raises :class:`Refused` and :class:`BadAnswer`."""
    if not reply.is_success:
        raise problem(reply)
    if call.answer is None:
        return None  # type: ignore[return-value]  # the caller said that the answer does not matter
    if call.answer is str:
        return reply.content.decode(errors="replace")  # type: ignore[return-value]
    try:
        decoded: T = msgspec.json.decode(reply.content, type=call.answer)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadAnswer(f"{call}: the answer is not what a rollmuxd of ours would send: {error}") from error
    return decoded


def problem(reply: Reply) -> Refused:
    """Return the error for an answer that is no success; problem+json if it is, else whatever came."""
    try:
        found = msgspec.json.decode(reply.content, type=Problem)
        detail, data, request_id = found.detail or found.title, found.data, found.request_id
    except (msgspec.DecodeError, UnicodeDecodeError):
        detail, data, request_id = (
            f"answered {reply.status_code}: {reply.content[:200].decode(errors='replace')}",
            {},
            "",
        )
    try:
        retry_after_s = float(reply.headers.get("retry-after", ""))
    except ValueError:  # absent, or a date: then the back-off alone decides
        retry_after_s = None
    return refused(reply.status_code, detail, data=data, request_id=request_id, retry_after_s=retry_after_s)
