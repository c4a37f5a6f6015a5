"""One kept connection to one host."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import anyio
import asyncssh
from asyncssh import SSHClientConnection

from rollmuxd.spi import HostId
from rollmuxd_backend_local.kept_connection import KeptConnection
from rollmuxd_backend_ssh.options import SshOptions

#: of a host's commands at a time, those that are kept for looks
_LOOKS: Final = 3
#: where host keys are looked for that nothing else is said of
_KNOWN_HOSTS: Final = (Path("~/.ssh/known_hosts"), Path("/etc/ssh/ssh_known_hosts"))
#: signs of life that may be missed
_MISSED: Final = 3


class HostConnection(KeptConnection[SSHClientConnection]):
    """The connection to one host, as one user."""

    _by = " by ssh"

    def __init__(
        self, host: HostId, options: SshOptions, user: str = "", *, now: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(options.connect_s, now)
        self._what = host
        self._options = options
        self._user = user or options.user
        self.looks = anyio.Semaphore(min(_LOOKS, options.commands - 1))
        self.commands = anyio.Semaphore(max(options.commands - _LOOKS, 1))

    async def connection(self) -> SSHClientConnection:
        """The connection, made if there is none.

        Raises:
            ContactLost: it cannot be made; says why, and what to do.
        """
        if self._opened is not None and self._opened.is_closed():
            self._opened = None
        return await super().connection()

    def drop(self) -> None:
        """Give the connection up at once: the next call makes another."""
        if self._opened is not None:
            self._opened.abort()
            self._opened = None

    async def close(self) -> None:
        """Close it; processes on the host continue."""
        await super().close()
        connection, self._opened = self._opened, None
        if connection is not None:
            connection.close()
            with anyio.move_on_after(2):
                await connection.wait_closed()

    async def _open(self) -> SSHClientConnection:
        try:
            return await asyncssh.connect(self._options.address or self._what, **await self._how())
        except asyncssh.Error as error:
            raise OSError(self._said(error)) from error

    async def _how(self) -> dict[str, Any]:
        options = self._options
        given: dict[str, Any] = {
            "port": options.port,
            "username": self._user,
            "client_keys": list(options.keys),
            "known_hosts": options.known_hosts,
            "tunnel": options.jump,
            "config": options.config,
        }
        said = {key: value for key, value in given.items() if value}
        # What the ssh configuration makes of it: asyncssh would not look at host keys where that says so.
        read = await asyncssh.SSHClientConnectionOptions.construct(host=options.address or self._what, **said)
        if read.known_hosts is None:
            raise ValueError("its ssh configuration says UserKnownHostsFile none: the host's key could not be checked")
        usual = [str(path.expanduser()) for path in _KNOWN_HOSTS if path.expanduser().is_file()]
        return {
            **said,
            "known_hosts": read.known_hosts or usual or b"",
            # No user is there to be asked for a password.
            "password_auth": False,
            "kbdint_auth": False,
            "keepalive_interval": options.alive_s,
            "keepalive_count_max": _MISSED,
            # Its own limits are ours: a call has one over all of it.
            "connect_timeout": options.connect_s,
            "login_timeout": options.connect_s,
        }

    def _said(self, error: Exception) -> str:
        """An error in words, with what to do about it."""
        by_hand = f"ssh {f'{self._user}@' if self._user else ''}{self._options.address or self._what} true"
        if isinstance(error, asyncssh.HostKeyNotVerifiable):
            return f"its host key is not the one in known_hosts, or not in it ({error}); look at it with: {by_hand}"
        if isinstance(error, asyncssh.PermissionDenied):
            return f"it accepts none of the keys that there are ({error}); this must work without asking: {by_hand}"
        return str(error) or type(error).__name__
