"""The bill: which nodes were in groups, and for how long. A fold over facts that keeps its own books."""

from rollmuxd.core import facts as f
from rollmuxd.core.ids import JobId, Millis, NodeId, PoolName
from rollmuxd.core.model import nodes_in
from rollmuxd.sim.outcome import PoolOutcome
from rollmuxd.sim.workload import Workload


class Meter:
    """Nodes are paid for from the placement that brings them into a group until no job is placed on them."""

    def __init__(self, workload: Workload, pool_of: dict[NodeId, PoolName]) -> None:
        self.pools = {
            pool.name: PoolOutcome(pool.name, pool.gpu_type, pool.gpus_per_node, pool.price_per_gpu_hour)
            for pool in workload.pools
        }
        self._pool_of = pool_of
        self._since: Millis = 0
        self._placed: dict[JobId, list[NodeId]] = {}
        self._coming: dict[JobId, list[NodeId]] = {}
        self._users: dict[NodeId, int] = {}
        self._bought = dict.fromkeys(self.pools, 0)

    def hear(self, fact: f.Fact) -> None:
        """One more fact, in the order in which they happened. A job on the move counts in both places."""
        if isinstance(fact, f.JobPlaced):
            self._placed[fact.job] = nodes_in(fact.pins)
            self._change(fact.at, self._placed[fact.job], 1)
        elif isinstance(fact, f.MovePlanned):
            self._coming[fact.job] = nodes_in(fact.pins)
            self._change(fact.at, self._coming[fact.job], 1)
        elif isinstance(fact, f.MoveEnded):
            self._change(fact.at, self._placed[fact.job], -1)
            self._placed[fact.job] = self._coming.pop(fact.job)
        elif isinstance(fact, f.MoveAbandoned):
            self._change(fact.at, self._coming.pop(fact.job), -1)
        elif isinstance(fact, f.PlacementEnded):
            self._change(fact.at, self._placed.pop(fact.job, []), -1)

    def charge_move(self, nodes: dict[PoolName, int], took: Millis) -> None:
        """A move takes its job's own nodes for a while, beside those that it sits on."""
        for pool, count in nodes.items():
            self.pools[pool].moving_node_ms += count * took

    def until(self, now: Millis) -> None:
        """Charge what is bought up to a time."""
        passed = now - self._since
        if passed:
            for name, count in self._bought.items():
                self.pools[name].bought_node_ms += count * passed
            self._since = now

    def _change(self, at: Millis, nodes: list[NodeId], by: int) -> None:
        self.until(at)
        for node in nodes:
            users = self._users.get(node, 0) + by
            pool = self.pools[self._pool_of[node]]
            if users == 0 or (users == 1 and by == 1):
                self._bought[pool.name] += by
                pool.peak_gpus = max(pool.peak_gpus, self._bought[pool.name] * pool.gpus_per_node)
            self._users[node] = users
