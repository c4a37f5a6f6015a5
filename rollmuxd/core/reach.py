"""Which nodes are within a job's reach, by what it has parked.

What is parked on a host is loaded there, or elsewhere by a driver that can fetch it. And a node on which a job has, or
has left, the state of one pool is not taken for another pool of the same job: its bytes there, and what is to become of
them, are known by the node.
"""

from msgspec.structs import replace

from rollmuxd.core.cycle import Cycle
from rollmuxd.core.fold.pins import follow
from rollmuxd.core.model import HostId, Job, Movable, Node, NodeId, PoolName
from rollmuxd.core.state import State

Pins = dict[PoolName, tuple[NodeId, ...]]


def out_of_reach(c: Cycle, job: Job, pins: Pins) -> str:
    """Why a job cannot have its states on those nodes, from where they are; empty: it can."""
    for key in job.states:
        kept = c.state.states[key]
        if kept.node not in pins.get(kept.pool, ()) and any(kept.node in names for names in pins.values()):
            return f"node {kept.node} has its {kept.pool} state, and would be used for another pool"
    return "" if job.spec.movable is Movable.RELAUNCH else _too_far(c, job, pins)


def _too_far(c: Cycle, job: Job, pins: Pins) -> str:
    hosts = {name: node.host for name, node in c.state.nodes.items()}
    for spec in job.spec.states:
        newest = job.newest.get(spec.pool, job.pins.get(spec.pool, ()))
        names = pins.get(spec.pool, ())
        sources = follow(job.pins.get(spec.pool, newest), newest, names)
        near = all(hosts.get(source) == hosts[name] for source, name in zip(sources, names, strict=True))
        if not near and not c.traits(spec.driver).copies:
            return f"its {spec.pool} state is parked on another host, and driver {spec.driver} cannot fetch it"
    return ""


def within_reach(c: Cycle, job: Job) -> State:
    """The state as placement is to see it for a job that fell back: nodes out of its reach are as if drained."""
    if not job.fell_back:
        return c.state
    bound = bound_to(c, job)
    nodes = {name: _as_seen(node, _pools_within_reach(c, job, node, bound)) for name, node in c.state.nodes.items()}
    same = all(nodes[name] is node for name, node in c.state.nodes.items())
    return c.state if same else replace(c.state, nodes=nodes)


def bound_to(c: Cycle, job: Job) -> dict[PoolName, list[HostId]]:
    """The hosts on which alone a job that fell back can have nodes, by pool; of a pool that is not there, any."""
    bound: dict[PoolName, list[HostId]] = {}
    for spec in job.spec.states if job.fell_back else ():
        if not c.traits(spec.driver).copies:
            known = (c.state.nodes.get(name) for name in job.newest.get(spec.pool, ()))
            bound[spec.pool] = list(dict.fromkeys(node.host for node in known if node is not None))
    return bound


def _pools_within_reach(c: Cycle, job: Job, node: Node, bound: dict[PoolName, list[HostId]]) -> tuple[PoolName, ...]:
    """The pools for which the job can have the node."""
    has = {c.state.states[key].pool for key in job.states if c.state.states[key].node == node.id}
    here = node.pools if job.spec.colocate or not has else [pool for pool in node.pools if pool in has]
    return tuple(pool for pool in here if node.host in bound.get(pool, (node.host,)))


def _as_seen(node: Node, pools: tuple[PoolName, ...]) -> Node:
    return node if pools == tuple(node.pools) else replace(node, pools=pools, drain=node.drain or not pools)
