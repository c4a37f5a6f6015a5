"""One kept connection to one host: made when it is needed, made again when it is gone, never waited for for long."""

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import anyio
import asyncssh
from asyncssh import SSHClientConnection

from rollmuxd.spi import ContactLost, HostId
from rollmuxd_backend_ssh.options import SshOptions

#: seconds between tries to connect, as long as they fail; a tenth more or less
_AGAIN_S: Final = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
#: a call waits so long for the next try; else it hears when that will be
_PATIENCE_S: Final = 2.5
#: of a host's commands at a time, those that are kept for looks
_LOOKS: Final = 3
#: where host keys are looked for that nothing else is said of
_KNOWN_HOSTS: Final = (Path("~/.ssh/known_hosts"), Path("/etc/ssh/ssh_known_hosts"))
#: signs of life that may be missed
_MISSED: Final = 3


class HostConnection:
    """The connection to one host, as one user."""

    def __init__(
        self, host: HostId, options: SshOptions, user: str = "", *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._host = host
        self._options = options
        self._user = user or options.user
        self._now = now
        self._connection: SSHClientConnection | None = None
        self._dialling: asyncio.Task[SSHClientConnection] | None = None
        #: tries that failed in a row, when the next may be made, and what the last one said
        self._failed = 0
        self._next_at = 0.0
        self._why = ""
        self.looks = anyio.Semaphore(min(_LOOKS, options.commands - 1))
        self.commands = anyio.Semaphore(max(options.commands - _LOOKS, 1))

    async def connection(self) -> SSHClientConnection:
        """The connection, made if there is none.

        Raises:
            ContactLost: it cannot be made; says why, and what to do.
        """
        if self._connection is not None and not self._connection.is_closed():
            return self._connection
        if self._dialling is None or self._dialling.done():
            # A task of its own, which all that wait for it share: none of them takes it along when it is cancelled.
            self._dialling = asyncio.create_task(self._dial())
            self._dialling.add_done_callback(_looked_at)
        return await asyncio.shield(self._dialling)

    def drop(self) -> None:
        """Give the connection up at once: the next call makes another."""
        if self._connection is not None:
            self._connection.abort()
            self._connection = None

    async def close(self) -> None:
        """Close it; processes on the host continue."""
        if self._dialling is not None:
            self._dialling.cancel()
            await asyncio.wait([self._dialling])
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
            with anyio.move_on_after(2):
                await connection.wait_closed()

    async def _dial(self) -> SSHClientConnection:
        wait_s = self._next_at - self._now()
        if wait_s > _PATIENCE_S:
            raise ContactLost(f"{self._why} (next try in {wait_s:.0f} s)")
        await anyio.sleep(max(wait_s, 0))
        try:
            with anyio.fail_after(self._options.connect_s):
                connection = await asyncssh.connect(self._options.address or self._host, **await self._how())
        except TimeoutError:
            raise self._lost(f"no connection within {self._options.connect_s:g} s") from None
        except (OSError, ValueError, asyncssh.Error, asyncssh.KeyImportError) as error:
            raise self._lost(self._said(error)) from error
        self._connection = connection
        self._failed, self._why = 0, ""
        return connection

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
        read = await asyncssh.SSHClientConnectionOptions.construct(host=options.address or self._host, **said)
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

    def _lost(self, why: str) -> ContactLost:
        again_s = _AGAIN_S[min(self._failed, len(_AGAIN_S) - 1)]
        self._failed += 1
        self._next_at = self._now() + again_s * random.uniform(0.9, 1.1)
        self._why = f"{self._host} cannot be reached by ssh: {why}"
        return ContactLost(self._why)

    def _said(self, error: Exception) -> str:
        """An error in words, with what to do about it."""
        by_hand = f"ssh {f'{self._user}@' if self._user else ''}{self._options.address or self._host} true"
        if isinstance(error, asyncssh.HostKeyNotVerifiable):
            return f"its host key is not the one in known_hosts, or not in it ({error}); look at it with: {by_hand}"
        if isinstance(error, asyncssh.PermissionDenied):
            return f"it accepts none of the keys that there are ({error}); this must work without asking: {by_hand}"
        return str(error) or type(error).__name__


def _looked_at(task: "asyncio.Task[Any]") -> None:
    """Perhaps no task waits for it any more: its error is no surprise then."""
    if not task.cancelled():
        task.exception()
