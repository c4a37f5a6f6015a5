"""Where the daemon is, and with which key.

``ROLLMUX_URL`` (``http://host:port``, ``https://...``, ``unix:///path/to.sock``) decides; ``ROLLMUX_URL=off`` says that
there is none. Else it is the first of the default sockets that exists. A socket file that exists but does not answer is
a daemon that is down, never "no daemon". To run without asking it could put two jobs on one GPU. So a daemon that is
stopped leaves its file.
"""

import difflib
import os
import re
import urllib.parse
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from rollmuxd.client import fakes
from rollmuxd.client.errors import NoDaemon, RollmuxError
from rollmuxd.wire import VARIABLES

#: of a daemon that the system starts
SYSTEM_SOCKET = "/run/rollmux/rollmux.sock"


class Address(Struct, frozen=True):
    """How to reach a daemon: a base URL, and the socket to use instead of TCP, if any."""

    base_url: str
    socket: str | None = None
    api_key: str | None = None
    #: certificates to trust in place of the system's (``ROLLMUX_CA_FILE``)
    ca_file: str | None = None

    def __str__(self) -> str:  # never the key
        return f"unix://{self.socket}" if self.socket else self.base_url


class Found(Struct, frozen=True):
    """The outcome of looking: an address or none, and where we looked, for people to read."""

    address: Address | None
    looked: list[str]
    off: bool = False


def find(url: str | None = None, api_key: str | None = None, environ: Mapping[str, str] = os.environ) -> Found:
    """Look for a daemon; opens no connection.

    Raises :class:`RollmuxError` for a URL that is none, or a key file that cannot be read.
    """
    if fakes.current is not None:
        return Found(Address("http://fake"), ["rollmuxd.testing"])
    named = url or environ.get("ROLLMUX_URL", "")
    if named.strip().lower() in {"off", "none"}:
        return Found(None, [f"ROLLMUX_URL={named}"], off=True)
    if named:
        return Found(_address(named, api_key, environ), [shown(named)])
    looked = ["ROLLMUX_URL (not set)"]
    for path in default_sockets(environ):
        looked.append(path)
        if _is_there(path, environ):
            return Found(_address("unix://" + path, api_key, environ), looked)
    return Found(None, looked)


def need(url: str | None = None, api_key: str | None = None, environ: Mapping[str, str] = os.environ) -> Address:
    """Like :func:`find`, and raises :class:`NoDaemon` where there is none."""
    found = find(url, api_key, environ)
    if found.address is None:
        raise NoDaemon(nowhere(found.looked))
    return found.address


def misspelt(environ: Mapping[str, str] = os.environ) -> list[tuple[str, str]]:
    """Return variables that look as if they were meant for us and are not read, each with the nearest that is."""
    found = []
    for name in sorted(environ):
        known = name in VARIABLES or "__" in name
        # The whole name, so that ROLMUX_URL is found too; a variable of another program is not like any of ours.
        if not known and name.upper().startswith("ROL"):
            near = difflib.get_close_matches(name.upper(), VARIABLES, n=1, cutoff=0.85)
            if near:
                found.append((name, near[0]))
    return found


def nowhere(looked: list[str]) -> str:
    """Say that there is no daemon, where we looked, and what to do."""
    places = ", ".join(looked)
    return f"no rollmuxd daemon found; looked at {places}. Start one (`rollmuxd daemon start`) or set ROLLMUX_URL"


def default_sockets(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the sockets that are tried without ``ROLLMUX_URL``, in order."""
    paths = [environ["ROLLMUX_SOCKET"]] if environ.get("ROLLMUX_SOCKET") else []
    if environ.get("XDG_RUNTIME_DIR"):
        paths.append(f"{environ['XDG_RUNTIME_DIR']}/rollmux/rollmux.sock")
    if environ.get("XDG_STATE_HOME"):
        paths.append(f"{environ['XDG_STATE_HOME']}/rollmux/rollmux.sock")
    home = environ.get("HOME") or os.path.expanduser("~")  # noqa: PTH111  (Path.home raises where there is none)
    return [*paths, f"{home}/.local/state/rollmux/rollmux.sock", SYSTEM_SOCKET]


def _is_there(path: str, environ: Mapping[str, str]) -> bool:
    try:
        Path(path).stat()
    except PermissionError:
        # In a directory that this user may not enter: it belongs to a daemon that does not let the user in. A home is
        # an exception: it is another user's (su and containers keep HOME).
        return path in {SYSTEM_SOCKET, environ.get("ROLLMUX_SOCKET")}
    except OSError:
        return False
    return True


def shown(url: str) -> str:
    """The URL as it may be printed: without what may be a key or a password in it."""
    return re.sub(r"//[^/]*@|\brmx_\S+", lambda found: "//...@" if found[0].startswith("//") else "rmx_...", url)


def _address(url: str, api_key: str | None, environ: Mapping[str, str]) -> Address:
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError:  # brackets without an address in them
        raise RollmuxError(_no_address(url)) from None
    if "@" in parts.netloc:
        raise RollmuxError(
            f"the address {shown(url)} has a user or a password in it, which ends up in logs; an API key goes into "
            "ROLLMUX_API_KEY, or into a file that ROLLMUX_API_KEY_FILE names"
        )
    ca_file = environ.get("ROLLMUX_CA_FILE") or None
    if parts.scheme == "unix":
        # The peer's uid names us; a key is sent only where it was asked for.
        path = urllib.parse.unquote(parts.netloc + parts.path)
        if not path:
            raise RollmuxError(f"{url!r} names no socket; write unix:///path/to/rollmux.sock")
        return Address("http://rollmuxd", socket=path, api_key=_key(api_key, environ, default_file=False))
    try:
        good = parts.scheme in {"http", "https"} and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:  # a port that is no number
        good = False
    if not good:
        raise RollmuxError(_no_address(url))
    key = _key(api_key, environ, default_file=True)
    return Address(url.rstrip("/"), api_key=key, ca_file=ca_file)


def _no_address(url: str) -> str:
    return (
        f"{shown(url)!r} is no address of a daemon; write http://host:port, https://host:port or "
        "unix:///path/to/rollmux.sock"
    )


def _key(api_key: str | None, environ: Mapping[str, str], *, default_file: bool) -> str | None:
    key = _given_key(api_key, environ, default_file=default_file)
    if key and not re.fullmatch("[!-~]+", key):  # in a header it would end in an error that shows it
        raise RollmuxError(
            "the API key has a space, a line break or another character that no key has; write the key alone into "
            "ROLLMUX_API_KEY, or into the file that it comes from (ROLLMUX_API_KEY_FILE or ~/.config/rollmux/key)"
        )
    return key


def _given_key(api_key: str | None, environ: Mapping[str, str], *, default_file: bool) -> str | None:
    if api_key or environ.get("ROLLMUX_API_KEY"):
        return (api_key or environ["ROLLMUX_API_KEY"]).strip()
    named = environ.get("ROLLMUX_API_KEY_FILE")
    if named:
        try:
            return Path(named).read_text(errors="replace").strip()
        except OSError as error:
            raise RollmuxError(f"ROLLMUX_API_KEY_FILE={named}: {error.strerror}") from error
    home = environ.get("HOME") or os.path.expanduser("~")  # noqa: PTH111
    default = Path(environ.get("XDG_CONFIG_HOME") or f"{home}/.config") / "rollmux/key"
    try:
        return default.read_text(errors="replace").strip() if default_file else None
    except OSError:
        return None
