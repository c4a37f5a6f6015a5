"""``SshBackend``: hosts that are reached over SSH, many at a time, each over one kept connection."""

from collections.abc import Mapping

import anyio

from rollmuxd.spi import (
    ContactLost,
    Finding,
    HostConfig,
    HostId,
    JobId,
    LaunchId,
    Output,
    Process,
    ProcessOrder,
)
from rollmuxd_backend_local.agent import NodeStream, Reached, frames
from rollmuxd_backend_local.agent.reached import Said
from rollmuxd_backend_ssh.connection import HostConnection
from rollmuxd_backend_ssh.options import SshOptions


class SshBackend(Reached[SshOptions]):
    """Hosts by SSH. Nothing is installed on them: what is asked there is sent, and goes with the connection."""

    name, kind = "ssh", SshOptions

    def __init__(self, hosts: Mapping[HostId, HostConfig], options: Mapping[HostId, SshOptions], owner: str) -> None:
        super().__init__(hosts, options, owner)
        self._lines: dict[tuple[HostId, str], HostConnection] = {}

    # ---- jobs' processes, each as its owner's user -----------------------------------------------------------------

    async def start(self, host: HostId, order: ProcessOrder) -> Process:
        """As the user that ``users`` has for the job's owner; as the login's where it is empty."""
        return await _As(self, self._user_of(host, order)).start(host, order)

    async def stop(self, host: HostId, launch: LaunchId) -> bool:
        """Whosever it is."""
        return any([await Reached.stop(_As(self, user), host, launch) for user in self._users(host)])

    async def alive(self, host: HostId, launch: LaunchId) -> bool:
        """Whosever it is."""
        return any([await Reached.alive(_As(self, user), host, launch) for user in self._users(host)])

    async def kill(self, host: HostId, pid: int, started: str, job: JobId, owner: str) -> bool:
        """As the user that ``users`` has for the owner; as the login's where it is empty."""
        asked = _As(self, self._of(host).users.get(owner, ""))
        return await Reached.kill(asked, host, pid, started, job, owner)

    async def output(self, host: HostId, launch: LaunchId, after: int, limit: int) -> Output:
        """Whosever it is."""
        for user in self._users(host):
            found = await Reached.output(_As(self, user), host, launch, after, limit)
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
        """Close all connections. Jobs' processes on the hosts continue."""
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

    async def _wish(self, host: HostId, wish: frames.Wish, limit_s: float, user: str = "") -> Said:
        return await self._line(host, user).ask(frames.Node(), self._reach_s(host), wish, limit_s)

    def _reach_s(self, host: HostId) -> float:
        return self._of(host).connect_s

    def _stream(self, host: HostId, name: str) -> NodeStream:
        return NodeStream(self._line(host), frames.Node(), name, self._reach_s(host))


class _As(SshBackend):
    """The same hosts, asked as another user."""

    def __init__(self, backend: SshBackend, user: str) -> None:
        super().__init__(backend.hosts, backend.options, backend._owner)  # noqa: SLF001  # they are one
        self._lines = backend._lines  # noqa: SLF001
        self._user = user

    def _become(self, host: HostId, order: ProcessOrder) -> str:
        return ""  # that user is asked

    async def start(self, host: HostId, order: ProcessOrder) -> Process:
        return await Reached.start(self, host, order)

    async def _wish(self, host: HostId, wish: frames.Wish, limit_s: float, user: str = "") -> Said:
        return await super()._wish(host, wish, limit_s, self._user)
