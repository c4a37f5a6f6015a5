"""``RayBackend``: hosts that are nodes of Ray clusters, each reached through an actor that is pinned to it."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from rollmuxd.spi import ContactLost, Finding, HostConfig, HostId
from rollmuxd_backend_local.agent import NodeStream, Reached, frames
from rollmuxd_backend_local.agent.reached import Said, why
from rollmuxd_backend_ray.connection import ClusterConnection
from rollmuxd_backend_ray.options import RayOptions


class RayBackend(Reached[RayOptions]):
    """Nodes of Ray clusters. What is asked goes through the actor on the node."""

    name, kind = "ray", RayOptions

    def __init__(self, hosts: Mapping[HostId, HostConfig], options: Mapping[HostId, RayOptions], owner: str) -> None:
        super().__init__(hosts, options, owner)
        self._lines: dict[str, ClusterConnection] = {}

    @classmethod
    async def open(cls, hosts: Sequence[HostConfig], options: Mapping[str, Any]) -> Self:
        """As all of them; Ray is not imported here."""
        opened = await super().open(hosts, options)
        for host, its in opened.options.items():
            if its.users:
                raise ValueError(f"{host}: options.users is not for backend ray: what it starts runs as the node's Ray")
        return opened

    async def check(self, host: HostId) -> tuple[Finding, ...]:
        """The cluster, the node as it has it, and what the node says of itself."""
        options = self._of(host)
        try:
            seen = await self._wish(host, frames.Look(), options.connect_s)
        except ContactLost as error:
            return (Finding(what="cluster", level="bad", said=str(error)),)
        if not isinstance(seen, frames.Seen):
            return (Finding(what="node", level="bad", said=why(seen)),)
        found = Finding(what="node", level="good", said=f"{seen.name} at {seen.address}, node {seen.id[:12]}")
        gpus = seen.resources.get("GPU", 0)
        if not gpus:
            return (found, *await super().check(host))
        return (
            found,
            Finding(
                what="GPU resource",
                level="warning",
                said=f"Ray itself has {gpus:g} GPUs to give there, to any task",
                remedy="rollmuxd finds them occupied then; start the node with --num-gpus 0, and give jobs their own "
                "Ray or their own node ([ray] in job.toml)",
            ),
            *await super().check(host),
        )

    async def close(self) -> None:
        """End the cluster members. Processes on the nodes continue."""
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

    async def _wish(self, host: HostId, wish: frames.Wish, limit_s: float) -> Said:
        options = self._of(host)
        try:
            return await self._line(options).ask(self._node(host), options.reach_s, wish, limit_s)
        except ContactLost as error:
            raise ContactLost(f"{host}: {error}") from error

    def _reach_s(self, host: HostId) -> float:
        return self._of(host).reach_s

    def _stream(self, host: HostId, name: str) -> NodeStream:
        options = self._of(host)
        return NodeStream(self._line(options), self._node(host), name, options.reach_s)
