"""The nodes of a simulated world, as a configuration would name them: a host for each node, or for several."""

from collections.abc import Iterable

from rollmuxd.core.ids import GpuId, HostId, PoolName
from rollmuxd.core.inputs import Start
from rollmuxd.core.model import HostSpec, NodeSpec
from rollmuxd.sim.workload import SimJob, Workload

BACKEND = "sim"
BOOT = "boot-1"


class Inventory:
    """A workload's nodes. On demand there are as many as the jobs could ever use, and only those in groups are paid."""

    def __init__(self, workload: Workload, jobs: Iterable[SimJob]) -> None:
        needs = peak(jobs)
        hosts, nodes = [], []
        self.gpus_of: dict[HostId, tuple[GpuId, ...]] = {}
        for pool in workload.pools:
            count = pool.nodes if pool.nodes is not None else needs.get(pool.name, 0)
            for first in range(0, count, pool.per_host):
                host, here = f"{pool.name}{first // pool.per_host + 1}", min(pool.per_host, count - first)
                self.gpus_of[host] = tuple(f"{host}/gpu{index}" for index in range(here * pool.gpus_per_node))
                hosts.append(HostSpec(host, BACKEND, here * pool.ram_mb))
                for at in range(0, len(self.gpus_of[host]), pool.gpus_per_node):
                    nodes.append(
                        NodeSpec(
                            id=f"{host}/gpu{at}-{at + pool.gpus_per_node - 1}",
                            host=host,
                            gpus=self.gpus_of[host][at : at + pool.gpus_per_node],
                            pools=(pool.name, *pool.also),
                            gpu_type=pool.gpu_type,
                            gpu_mb=pool.gpu_mb,
                            price_per_gpu_hour=pool.price_per_gpu_hour,
                        )
                    )
        self.start = Start(tuple(hosts), tuple(nodes))
        #: the pool from which each node is
        self.pool_of = {node.id: node.pools[0] for node in nodes}
        #: each GPU's pool, and what share of a node it is
        self.share_of = {gpu: (node.pools[0], 1 / len(node.gpus)) for node in nodes for gpu in node.gpus}


def peak(jobs: Iterable[SimJob]) -> dict[PoolName, int]:
    """Nodes per pool that the jobs could use if all were there at once and none shared."""
    most: dict[PoolName, int] = {}
    for job in jobs:
        for want in job.spec.wants:
            width = max(want.nodes, job.footprint.get(want.pool, 0))
            most[want.pool] = most.get(want.pool, 0) + width
    return most
