"""``RayBackend``: hosts that are nodes of Ray clusters, each reached through an actor that is pinned to it."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

import anyio
import anyio.abc

from rollmuxd.spi import ContactLost, Finding, HostConfig, HostId, NotDone, Ran
from rollmuxd_backend_local import Asking, parcel
from rollmuxd_backend_local.asking import configs, read_owner
from rollmuxd_backend_local.options import read
from rollmuxd_backend_ray import frames
from rollmuxd_backend_ray.line import ClusterConnection
from rollmuxd_backend_ray.options import RayOptions
from rollmuxd_backend_ray.stream import NodeStream

#: beyond a command's own time limit, which the node keeps to: for reaching it, and for its answer
_WAY_S: Final = 2.0


class RayBackend(Asking[RayOptions]):
    """Nodes of Ray clusters. A question is a program that the node's Python reads from its input."""

    def __init__(self, hosts: Mapping[HostId, HostConfig], options: Mapping[HostId, RayOptions], owner: str) -> None:
        super().__init__(hosts, options, owner)
        self._lines: dict[str, ClusterConnection] = {}

    @classmethod
    async def open(cls, hosts: Sequence[HostConfig], options: Mapping[str, Any]) -> Self:
        """Make the backend. Nothing is joined before it is asked for, and Ray is not imported here.

        Raises:
            ValueError: an option that is not known or out of range; names host and key.
        """
        defaults = dict(options)
        state_dir = defaults.pop("state_dir", None)
        known, said = configs(hosts, defaults, lambda where, given: read(RayOptions, "ray", where, given))
        for host, its in said.items():
            if its.users:
                raise ValueError(f"{host}: options.users is not for backend ray: what it starts runs as the node's Ray")
        return cls(known, said, read_owner(state_dir))

    async def ask(self, host: HostId, question: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """A question and the program that answers it, through the node's actor."""
        mark = f"rollmuxd-{secrets.token_hex(8)}"
        # Without site-packages it starts in half of the time, and needs nothing of them.
        argv = (self._of(host).python, "-I", "-S", "-c", parcel.OPEN)
        wish = frames.Run(argv, {}, parcel.pack(dict(question), mark), limit_s)
        said = await self._ask(host, wish, limit_s)
        if not isinstance(said, frames.Ran):
            raise ContactLost(f"{host}: {_why(said)}")
        try:
            return parcel.unpack(said.stdout, mark)
        except ValueError as error:
            spoken = (said.stderr or said.stdout).decode(errors="replace").strip().splitlines()[-1:] or ["nothing"]
            raise ContactLost(
                f"{host}: {argv[0] or 'its Python'} ended with exit code {said.exit_code} and said: {spoken[0]}"
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
        """On the node, as the user that its Ray runs as."""
        options = self._of(host)
        if not argv or not argv[0]:
            raise NotDone(f"{host}: a command needs at least the name of its program")
        wish = frames.Run(tuple(argv), dict(env or {}), stdin, timeout_s)
        said = await self._ask(host, wish, options.reach_s + timeout_s + _WAY_S)
        if not isinstance(said, frames.Ran):
            raise _error(host, said)
        return Ran(exit_code=said.exit_code, stdout=said.stdout, stderr=said.stderr)

    async def connect(self, host: HostId, address: str, port: int) -> anyio.abc.ByteStream:
        """From the node's actor: engines listen on its loopback."""
        options, name = self._of(host), secrets.token_hex(6)
        said = await self._ask(host, frames.Connect(name, address, port), 2 * options.reach_s + _WAY_S)
        if isinstance(said, frames.Failed) and said.how == "not_done":
            raise NotDone(f"{host}: nobody can be reached at {address} port {port} ({said.why})")
        if not isinstance(said, frames.Data):
            raise ContactLost(f"{host}: {address} port {port}: {_why(said)}")
        return NodeStream(self._line(options), self._node(host), name, options.reach_s)

    async def check(self, host: HostId) -> tuple[Finding, ...]:
        """The cluster, the node as it has it, and what the node says of itself."""
        options = self._of(host)
        try:
            seen = await self._ask(host, frames.Look(), options.connect_s)
        except ContactLost as error:
            return (Finding(what="cluster", level="bad", said=str(error)),)
        if not isinstance(seen, frames.Seen):
            return (Finding(what="node", level="bad", said=_why(seen)),)
        found = Finding(what="node", level="good", said=f"{seen.name} at {seen.address}, node {seen.id[:12]}")
        gpus = seen.resources.get("GPU", 0)
        if not gpus:
            return (found, *await super().check(host))
        return (
            found,
            Finding(
                what="GPU resource",
                level="warning",
                said=f"Ray itself has {gpus:g} GPUs to give there, to whoever asks it",
                remedy="rollmuxd finds them occupied then; start the node with --num-gpus 0, and give jobs their own "
                "Ray or their own node ([ray] in job.toml)",
            ),
            *await super().check(host),
        )

    async def close(self) -> None:
        """End the envoys. Processes on the nodes go on."""
        lines, self._lines = self._lines, {}
        for line in lines.values():
            await line.close()

    def _line(self, options: RayOptions) -> ClusterConnection:
        if options.address not in self._lines:
            self._lines[options.address] = self._new_line(options)
        return self._lines[options.address]

    def _new_line(self, options: RayOptions) -> ClusterConnection:
        return ClusterConnection(options.address, options.connect_s)

    def _node(self, host: HostId) -> frames.Node:
        options = self.options[host]
        told = options.labels or options.resources
        return frames.Node(
            options.node or ("" if told else host), tuple(options.labels.items()), tuple(options.resources.items())
        )

    async def _ask(
        self, host: HostId, wish: frames.Wish, limit_s: float
    ) -> frames.Ran | frames.Data | frames.Seen | frames.Failed:
        options = self._of(host)
        try:
            return await self._line(options).ask(self._node(host), options.reach_s, wish, limit_s)
        except ContactLost as error:
            raise ContactLost(f"{host}: {error}") from error


def _error(host: HostId, said: object) -> NotDone | ContactLost:
    done = isinstance(said, frames.Failed) and said.how == "not_done"
    return (NotDone if done else ContactLost)(f"{host}: {_why(said)}")


def _why(said: object) -> str:
    return said.why if isinstance(said, frames.Failed) else f"{type(said).__name__} is no answer to this"
