"""``RayBackend``: hosts that are nodes of Ray clusters, each reached through an actor that is pinned to it."""

from typing import Final

import msgspec

from rollmuxd.spi import ContactLost, Finding, HostId
from rollmuxd_backend_local.agent import AgentConnection, Reached, frames
from rollmuxd_backend_local.agent.reached import why
from rollmuxd_backend_ray.connection import ClusterConnection
from rollmuxd_backend_ray.options import RayOptions

_NO_GPUS: Final = (
    "rollmuxd finds them occupied then; start the node with --num-gpus 0, and give jobs their own Ray or their own "
    "node ([ray] in job.toml)"
)


class RayBackend(Reached[RayOptions]):
    """Nodes of Ray clusters. What is asked goes through the actor on the node."""

    name, kind, runs_as = "ray", RayOptions, "the node's Ray"

    async def check(self, host: HostId) -> tuple[Finding, ...]:
        """The cluster, the node as it has it, and what the node says of itself."""
        options = self._of(host)
        try:
            seen = await self._wish(host, frames.Look(), options.connect_s)
        except ContactLost as error:
            return (Finding("cluster", "bad", str(error)),)
        if not isinstance(seen, frames.Data):
            return (Finding("node", "bad", why(seen)),)
        node = msgspec.json.decode(seen.data)
        about = f"{node['NodeName']} at {node['NodeManagerAddress']}, node {node['NodeID'][:12]}"
        found = Finding("node", "good", about)
        gpus = node["Resources"].get("GPU", 0)
        if not gpus:
            return (found, *await super().check(host))
        said = f"Ray itself has {gpus:g} GPUs to give there, to any task"
        return (found, Finding("GPU resource", "warning", said, _NO_GPUS), *await super().check(host))

    def _line(self, host: HostId, user: str = "") -> AgentConnection:
        address = self._of(host).address
        if address not in self._lines:
            self._lines[address] = self._new_line(self.options[host])
        return self._lines[address]

    def _new_line(self, options: RayOptions) -> AgentConnection:
        return ClusterConnection(options.address, options.connect_s)

    def _where(self, host: HostId) -> frames.Node:
        options = self._of(host)
        told = options.labels or options.resources
        return frames.Node(
            options.node or ("" if told else host), tuple(options.labels.items()), tuple(options.resources.items())
        )

    def _reach_s(self, host: HostId) -> float:
        return self._of(host).reach_s
