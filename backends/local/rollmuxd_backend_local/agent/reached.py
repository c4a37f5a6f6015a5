"""The part of a backend that asks, runs and exchanges bytes by what is on the node (:mod:`agent.onnode`)."""

import secrets
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias, TypeVar

import anyio

from rollmuxd.spi import ContactLost, HostConfig, HostId, NotDone, Ran
from rollmuxd_backend_local import payload
from rollmuxd_backend_local.agent import frames
from rollmuxd_backend_local.agent.connection import AgentConnection
from rollmuxd_backend_local.asking import Asking, JobProcesses
from rollmuxd_backend_local.options import HostOptions, Options

#: beyond a command's own time limit, which the node keeps to: for reaching it, and for its answer
_WAY_S: Final = 2.0
_MARK: Final = f"rollmuxd-{secrets.token_hex(8)}"

Said: TypeAlias = frames.Ran | frames.Data | frames.Failed


class OnNodes(JobProcesses[Options]):
    """A question is a program that the node's Python reads from its input."""

    @abstractmethod
    async def _wish(self, host: HostId, wish: frames.Wish, limit_s: float | None, user: str = "") -> Said:
        """What is answered on the node. Raises ContactLost, with the host's name."""

    @abstractmethod
    def _reach_s(self, host: HostId) -> float:
        """What reaching the node, or an address from there, may take."""

    def _python(self, host: HostId) -> str:
        """The Python for questions; empty: the one that runs there."""
        return ""

    async def ask(self, host: HostId, question: Mapping[str, Any], limit_s: float, user: str = "") -> dict[str, Any]:
        """As a command there: the program that answers it is there already."""
        python = self._python(host)
        wish = frames.Question(python, payload.needed(question), _MARK, dict(question), limit_s)
        said = await self._wish(host, wish, limit_s, user)
        if not isinstance(said, frames.Ran):
            raise ContactLost(f"{host}: {why(said)}")
        try:
            return payload.unpack(said.stdout, _MARK)
        except ValueError as error:
            spoken = (said.stderr or said.stdout).decode(errors="replace").strip().splitlines()[-1:] or ["nothing"]
            raise ContactLost(
                f"{host}: {python or 'its Python'} ended with exit code {said.exit_code} and said: {spoken[0]}"
            ) from error

    async def run(
        self,
        host: HostId,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float = 60.0,
    ) -> Ran:
        """On the node, as the user that the process there runs as."""
        reach_s = self._reach_s(host)
        if not argv or not argv[0]:
            raise NotDone(f"{host}: a command needs at least the name of its program")
        wish = frames.Run(tuple(argv), dict(env or {}), stdin, timeout_s)
        said = await self._wish(host, wish, reach_s + timeout_s + _WAY_S)
        if not isinstance(said, frames.Ran):
            done = isinstance(said, frames.Failed) and said.how == "not_done"
            raise (NotDone if done else ContactLost)(f"{host}: {why(said)}")
        return Ran(exit_code=said.exit_code, stdout=said.stdout, stderr=said.stderr)

    async def exchange(
        self, host: HostId, address: str, port: int, data: bytes, *, most: int, trust: str = ""
    ) -> bytes:
        """From the node itself: engines listen on its loopback."""
        said = await self._wish(host, frames.Exchange(address, port, data, most, trust), None)
        if isinstance(said, frames.Failed) and said.how == "not_done":
            raise NotDone(f"{host}: nothing can be reached at {address} port {port} ({said.why})")
        if not isinstance(said, frames.Data):
            raise ContactLost(f"{host}: {address} port {port}: {why(said)}")
        return said.data


class ReachedOptions(HostOptions, frozen=True, kw_only=True):
    """What can be said of a host that is reached so."""

    #: a Python of the node, 3.8 or newer; empty: the one that the process there runs in
    python: str = ""


ReachedBy = TypeVar("ReachedBy", bound=ReachedOptions)


class Reached(OnNodes[ReachedBy], Asking[ReachedBy]):
    """Over connections that are kept."""

    def __init__(self, hosts: Mapping[HostId, HostConfig], options: Mapping[HostId, ReachedBy], owner: str) -> None:
        super().__init__(hosts, options, owner)
        self._lines: dict[Any, AgentConnection] = {}

    @abstractmethod
    def _line(self, host: HostId, user: str = "") -> AgentConnection:
        """The kept connection, in ``_lines``; of a ``user``, where logins have connections of their own."""

    def _where(self, host: HostId) -> frames.Node:
        """Which node it is, where a connection reaches several."""
        return frames.Node()

    def _python(self, host: HostId) -> str:
        return self._of(host).python

    async def close(self) -> None:
        """Close all connections. Jobs' processes on the hosts continue."""
        lines, self._lines = self._lines, {}
        async with anyio.create_task_group() as tasks:
            for line in lines.values():
                tasks.start_soon(line.close)

    async def _wish(self, host: HostId, wish: frames.Wish, limit_s: float | None, user: str = "") -> Said:
        try:
            return await self._line(host, user).ask(self._where(host), self._reach_s(host), wish, limit_s)
        except ContactLost as error:
            raise ContactLost(f"{host}: {error}") from error


def why(said: object) -> str:
    """What went wrong, of an answer that is not the one that was hoped for."""
    return said.why if isinstance(said, frames.Failed) else f"{type(said).__name__} is no answer to this"
