"""The nodes of a simulated world, as a configuration would name them: a host for each node, or for several."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final, TypeAlias

from rollmuxd.core.facts import Fact
from rollmuxd.core.ids import GpuId, HostId, Millis, PoolName
from rollmuxd.core.inputs import GpuObservation, HostObserved, HostSpec, NodeSpec, Start
from rollmuxd.sim.outcome import Outcome
from rollmuxd.sim.workload import Impossible, SimJob, Workload

Told: TypeAlias = Callable[[Fact], None] | None

BACKEND = "sim"
BOOT = "boot-1"


#: up to so many jobs, nodes are there for all of them at once: no job can be short
ALL_AT_ONCE: Final = 1_000


#: of more jobs than that, it is guessed at most this often how many are there at once
GUESSES: Final = 6


class TooFewNodes(Exception):
    """A job waits although nodes can be bought: there were not enough of them to sell. Says what it waits for."""


def with_enough(workload: Workload, attempt: Callable[[float, Told], Outcome], hear: Told) -> Outcome:
    """Run with so many nodes that no job waits for one to be bought. ``hear`` hears of the run that counts only.

    How long slowed jobs stay is known afterwards. Few jobs get nodes for all of them. For many, it is guessed how many
    are there at once, and too low a guess is doubled. (Where some pools are of so many nodes and others are bought, a
    waiting job may wait for either: there are nodes for all.)

    Raises:
        Impossible: a job waits though there are nodes for all: its policy will not have it.
    """
    if len(workload.jobs) > ALL_AT_ONCE and workload.on_demand:
        for guess in range(GUESSES):
            stretch = 1.5 * 2**guess
            with suppress(TooFewNodes):
                outcome = attempt(stretch, None)
                return outcome if hear is None else attempt(stretch, hear)
    try:
        return attempt(float("inf"), hear)
    except TooFewNodes as waits:
        raise Impossible(f"{waits}, though any number of nodes can be bought") from waits


class Inventory:
    """A workload's nodes. On demand there are as many as the jobs could ever use, and only those in groups are paid."""

    def __init__(self, workload: Workload, jobs: Iterable[SimJob], *, stretch: float) -> None:
        needs = peak(jobs, stretch)
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

    def seen_empty(self) -> list[HostObserved]:
        """Every host, with nothing on it."""
        return [
            HostObserved(host, tuple(GpuObservation(gpu, 0) for gpu in gpus), BOOT)
            for host, gpus in self.gpus_of.items()
        ]


def peak(jobs: Iterable[SimJob], stretch: float) -> dict[PoolName, int]:
    """Most nodes per pool that the jobs could use at once if none shared, each staying ``stretch`` times as long."""
    changes: list[tuple[Millis, int, PoolName, int]] = []
    for job in jobs:
        for want in job.spec.wants:
            width = max(want.nodes, job.footprint.get(want.pool, 0))
            changes.append((job.arrives_ms, 1, want.pool, width))
            if stretch < float("inf"):
                changes.append((job.arrives_ms + round(job.lasts_ms * stretch), 0, want.pool, -width))
    used: dict[PoolName, int] = {}
    most: dict[PoolName, int] = {}
    for _, _, pool, width in sorted(changes):
        used[pool] = used.get(pool, 0) + width
        most[pool] = max(most.get(pool, 0), used[pool])
    return most
