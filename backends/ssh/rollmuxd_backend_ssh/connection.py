"""One kept connection to one host, and on it the process that does there what is asked."""

import contextlib
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, cast

import anyio
import asyncssh
from asyncssh import SSHClientConnection, SSHClientProcess

from rollmuxd.spi import HostId
from rollmuxd_backend_local.agent import SentAgent
from rollmuxd_backend_local.agent.connection import Opened
from rollmuxd_backend_ssh.options import SshOptions

#: where host keys are looked for that nothing else is said of
_KNOWN_HOSTS: Final = (Path("~/.ssh/known_hosts"), Path("/etc/ssh/ssh_known_hosts"))
#: signs of life that may be missed
_MISSED: Final = 3
#: a process there that hears nothing for so long ends itself, when the commands that run in it have ended
_SILENT_S: Final = 60.0
#: what a close may take
_END_S: Final = 2.0
#: of what is said there while nothing answers
_SAID_KEPT: Final = 4_000
#: what the shell says of a program that is not there
_NO_PROGRAM: Final = 127
#: between single quotes these mean themselves in every shell (sh, bash, zsh, fish, csh)
_PLAIN: Final = re.compile(r"[A-Za-z0-9 _@%+=:,./\"$*&()\[\]{}<>|;?~^#`-]*")


class HostConnection(SentAgent):
    """The connection to one host, as one user."""

    _by = " by ssh"
    _breaks = (OSError, asyncssh.Error)

    def __init__(
        self, host: HostId, options: SshOptions, user: str = "", *, now: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(options.connect_s, _SILENT_S, now)
        self._host, self._what, self._agent = host, "the host", f"the process on {host}"
        self._options = options
        self._user = user or options.user
        self._connection: SSHClientConnection | None = None

    async def _open(self) -> Opened:
        try:
            self._connection = await asyncssh.connect(self._options.address or self._host, **await self._how())
            process = await self._connection.create_process(
                plain(self._python(self._options.python)), encoding=None, request_pty=False
            )
            opened = cast("Opened", (process.stdout, process.stdin))  # they can do what is asked of asyncio's
            try:
                await self._greet(opened)
            except EOFError as error:
                raise EOFError(await self._no_answer(process, str(error))) from None
        except asyncssh.Error as error:
            raise OSError(self._said(error)) from error
        return opened

    async def _end(self) -> None:
        await super()._end()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
            with anyio.move_on_after(_END_S, shield=True):
                await connection.wait_closed()

    def _abort(self, writer: Any) -> None:
        writer.channel.close()

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

    def _said(self, error: Exception) -> str:
        """An error in words, with what to do about it."""
        by_hand = f"ssh {f'{self._user}@' if self._user else ''}{self._options.address or self._host} true"
        if isinstance(error, asyncssh.HostKeyNotVerifiable):
            return f"its host key is not the one in known_hosts, or not in it ({error}); look at it with: {by_hand}"
        if isinstance(error, asyncssh.PermissionDenied):
            return f"it accepts none of the keys that there are ({error}); this must work without asking: {by_hand}"
        if isinstance(error, asyncssh.ChannelOpenError):
            return f"no command can be started there ({error}); see MaxSessions of its sshd"
        return str(error) or type(error).__name__

    async def _no_answer(self, process: "SSHClientProcess[bytes]", spoken: str) -> str:
        """Why no process serves there; ``spoken``: what was said on its standard output."""
        python = self._options.python
        said = b""
        with contextlib.suppress(asyncssh.Error):
            said = await process.stderr.read(_SAID_KEPT)
            await process.wait_closed()
        last = (said.decode(errors="replace").strip().splitlines() or [spoken or "nothing"])[-1]
        if process.exit_status == _NO_PROGRAM:
            return f"there is no {python} there; install Python 3.8 or newer, or name one in options.python ({last})"
        return f"{python} ended with exit code {process.exit_status} and said: {last}"


def plain(argv: Sequence[str]) -> str:
    """A line for the login shell; only for words that every shell reads alike. Raises ValueError for others."""
    if strange := [word for word in argv if not _PLAIN.fullmatch(word)]:
        raise ValueError(f"{strange[0]!r} would not get through every shell")
    return "exec " + " ".join(f"'{word}'" for word in argv)
