"""Checks which site a call is from, where no key is needed: no page may call in the name of the browser's user."""

import re
import socket
from typing import Final

from rollmuxd.daemon.http import problems
from rollmuxd.daemon.http.problems import Refusal
from rollmuxd.daemon.settings import Settings, is_address, split_address

#: this machine's own name for itself, what our clients say at the Unix socket, and what the documentation says there
ALWAYS: Final = ("localhost", "rollmuxd", "rollmux")
_HOST: Final = re.compile(r"(?:\[([^\[\]]*)\]|([^\[\]:]*))(?::\d*)?")


class OriginCheck:
    """The names under which this daemon is heard without a key.

    A browser knows a page's site by its name. The owner of a name can point it here once the page is loaded (DNS
    rebinding). The browser then takes this daemon for the page's own site, and without TLS the call does not say which
    page asks. So the name that was asked for has to be ours. An address is no name that could lead elsewhere before.
    """

    def __init__(self, settings: Settings) -> None:
        listen = settings.daemon.listen
        given = (*settings.tls.names, socket.gethostname(), *([split_address(listen)[0]] if listen else ()))
        self._names = frozenset(name.lower() for name in (*ALWAYS, *given))

    def check(self, host: str | None, site: str | None, origin: str | None) -> None:
        """Refuse what another site's page asks for; these are the headers ``host``, ``sec-fetch-site`` and ``origin``.

        Raises:
            Refusal: 403, with what to do about it.
        """
        if host not in self._names:  # as our clients say it
            self._check_name(host or "")
        if site:
            is_ours = site in ("same-origin", "none")
        else:  # in the clear, other than of localhost, a browser says at most which page it is: one from here is ours
            is_ours = not origin or origin.lower().partition("://")[2] == (host or "").lower()
        if not is_ours:
            raise Refusal(problems.FORBIDDEN, "a page of another site asks for this; send an API key, or use localhost")

    def _check_name(self, host: str) -> None:
        found = _HOST.fullmatch(host)
        name = "" if found is None else (found[1] or found[2] or "").lower().removesuffix(".")
        if name in self._names or is_address(name) or (name and f"*.{name.partition('.')[2]}" in self._names):
            return
        raise Refusal(
            problems.FORBIDDEN,
            f"this came without an API key for {name or host!r}, which is no name of this daemon: another site's page "
            "may have asked for it. Send an API key, use http://localhost or an address, or add the name to tls.names",
        )
