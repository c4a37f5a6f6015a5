"""``SshBackend``: hosts that are reached over SSH, many at a time, each over one kept connection."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import anyio
import anyio.abc
import asyncssh

from rollmuxd.spi import (
    ContactLost,
    Finding,
    HostConfig,
    HostId,
    JobId,
    LaunchId,
    NotDone,
    Output,
    Process,
    ProcessOrder,
    Ran,
)
from rollmuxd_backend_local import Asking, payload
from rollmuxd_backend_ssh import commands, quoting
from rollmuxd_backend_ssh.connection import HostConnection
from rollmuxd_backend_ssh.options import SshOptions
from rollmuxd_backend_ssh.stream import ChannelStream

#: so many questions in a row without an answer, and the connection is given up, though it is alive
_UNANSWERED: Final = 3


class SshBackend(Asking[SshOptions]):
    """Hosts by SSH. Nothing is installed on them: a question is a program that their Python reads from its input."""

    name, kind = "ssh", SshOptions

    def __init__(self, hosts: Mapping[HostId, HostConfig], options: Mapping[HostId, SshOptions], owner: str) -> None:
        super().__init__(hosts, options, owner)
        self._lines: dict[tuple[HostId, str], HostConnection] = {}
        self._unanswered: dict[HostId, int] = {}

    async def ask(self, host: HostId, question: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """A question and the program that answers it, over the kept connection."""
        return await self._ask(host, "", question, limit_s)

    async def run(
        self,
        host: HostId,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float = 60.0,
    ) -> Ran:
        """On the host, as the user that is logged in there, in that user's home."""
        line = self._line(host)
        async with line.commands:
            connection = await line.connection()
            try:
                return await commands.run(connection, argv, env or {}, stdin, timeout_s)
            except NotDone as error:
                raise NotDone(f"{host}: {error}") from error
            except ContactLost as error:
                raise ContactLost(f"{host}: {error}") from error

    async def connect(self, host: HostId, address: str, port: int) -> anyio.abc.ByteStream:
        """Through the SSH channel: the host's sshd opens the connection."""
        where = f"{host}: {address} port {port}"
        connection = await self._line(host).connection()
        try:
            with anyio.fail_after(self._of(host).connect_s):
                opened = connection.open_connection(address, port, encoding=None)
                reader, writer = await commands.whole(opened, _hang_up)
        except TimeoutError as error:
            raise ContactLost(f"{where}: no answer within {self._of(host).connect_s:g} s") from error
        except asyncssh.ChannelOpenError as error:
            if connection.is_closed():
                raise ContactLost(f"{where}: {error}") from error
            off = error.code == asyncssh.OPEN_ADMINISTRATIVELY_PROHIBITED
            hint = "; AllowTcpForwarding of its sshd is off" if off else ""
            raise NotDone(f"nothing can be reached at {where} ({error}{hint})") from error
        except (asyncssh.Error, OSError) as error:
            raise ContactLost(f"{where}: {error}") from error
        return ChannelStream(reader, writer)

    # ---- jobs' processes, each as its owner's user -----------------------------------------------------------------

    async def start(self, host: HostId, order: ProcessOrder) -> Process:
        """As the user that ``users`` has for the job's owner; as the login's where it is empty."""
        return await _As(self, self._user_of(host, order)).start(host, order)

    async def stop(self, host: HostId, launch: LaunchId) -> bool:
        """Whosever it is."""
        return any([await Asking.stop(_As(self, user), host, launch) for user in self._users(host)])

    async def alive(self, host: HostId, launch: LaunchId) -> bool:
        """Whosever it is."""
        return any([await Asking.alive(_As(self, user), host, launch) for user in self._users(host)])

    async def kill(self, host: HostId, pid: int, started: str, job: JobId, owner: str) -> bool:
        """As the user that ``users`` has for the owner; as the login's where it is empty."""
        asked = _As(self, self._of(host).users.get(owner, ""))
        return await Asking.kill(asked, host, pid, started, job, owner)

    async def output(self, host: HostId, launch: LaunchId, after: int, limit: int) -> Output:
        """Whosever it is."""
        for user in self._users(host):
            found = await Asking.output(_As(self, user), host, launch, after, limit)
            if found.data:
                return found
        return Output(data=b"", next=max(0, after))

    async def check(self, host: HostId) -> tuple[Finding, ...]:
        """The connection, and what the host says of itself."""
        began = anyio.current_time()
        try:
            await self._line(host).connection()
        except ContactLost as error:
            return (Finding(what="connection", level="bad", said=str(error)),)
        took_ms = (anyio.current_time() - began) * 1000
        found = Finding(what="connection", level="good", said=f"by ssh, made in {took_ms:.0f} ms")
        return (found, *await super().check(host))

    async def close(self) -> None:
        """Close all connections. Processes on the hosts continue."""
        lines, self._lines = self._lines, {}
        async with anyio.create_task_group() as tasks:
            for line in lines.values():
                tasks.start_soon(line.close)

    # ---- how ---------------------------------------------------------------------------------------------------------

    def _users(self, host: HostId) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self._of(host).users.values())) or ("",)

    def _line(self, host: HostId, user: str = "") -> HostConnection:
        options = self._of(host)
        if (host, user) not in self._lines:
            self._lines[host, user] = HostConnection(host, options, user)
        return self._lines[host, user]

    async def _ask(self, host: HostId, user: str, question: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        line = self._line(host, user)
        mark = quoting.mark()
        try:
            with anyio.fail_after(limit_s):
                async with line.looks:
                    connection = await line.connection()
                    # Without site-packages it starts in half of the time, and needs nothing of them.
                    argv = (self._of(host).python, "-I", "-S", "-c", payload.OPEN)
                    ran = await commands.ask(connection, argv, payload.pack(dict(question), mark))
        except TimeoutError as error:
            self._went_unanswered(host, line)
            raise ContactLost(f"{host} did not answer within {limit_s:g} s") from error
        except NotDone as error:
            raise ContactLost(f"{host}: {error}") from error
        self._unanswered.pop(host, None)
        try:
            return payload.unpack(ran.stdout, mark)
        except ValueError as error:
            raise ContactLost(f"{host}: {self._no_answer(host, ran)}") from error

    def _went_unanswered(self, host: HostId, line: HostConnection) -> None:
        """What hangs in a driver there keeps its place on the connection: another connection has places again."""
        self._unanswered[host] = self._unanswered.get(host, 0) + 1
        if self._unanswered[host] >= _UNANSWERED:
            del self._unanswered[host]
            line.drop()

    def _no_answer(self, host: HostId, ran: Ran) -> str:
        python = self._of(host).python
        said = (ran.stderr or ran.stdout).decode(errors="replace").strip().splitlines()[-1:] or ["nothing"]
        if ran.exit_code == 127:
            return f"there is no {python} there; install Python 3.8 or newer, or name one in options.python ({said[0]})"
        return f"{python} ended with exit code {ran.exit_code} and said: {said[0]}"


async def _hang_up(opened: tuple[Any, Any]) -> None:
    opened[1].close()


class _As(Asking[SshOptions]):
    """The same hosts, asked as another user."""

    def __init__(self, backend: SshBackend, user: str) -> None:
        super().__init__(backend.hosts, backend.options, backend._owner)  # noqa: SLF001  # they are one
        self._backend = backend
        self._user = user

    def _become(self, host: HostId, order: ProcessOrder) -> str:
        return ""  # that user is asked

    async def ask(self, host: HostId, question: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        return await self._backend._ask(host, self._user, question, limit_s)  # noqa: SLF001
