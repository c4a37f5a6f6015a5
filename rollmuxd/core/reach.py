"""Which nodes are within a job's reach, by what it has parked.

What is parked on a host is loaded there, or elsewhere by a driver that can fetch it. And a node on which a job has, or
has left, the state of one pool is not taken for another pool of the same job: its bytes there, and what is to become of
them, are known by the node.
"""

from msgspec.structs import replace

from rollmuxd.core.cycle import Cycle
from rollmuxd.core.fold.pins import follow
from rollmuxd.core.model import HostId, Job, Movable, Node, NodeId, PoolName, StateStatus
from rollmuxd.core.state import State, state_key

Pins = dict[PoolName, tuple[NodeId, ...]]


def out_of_reach(c: Cycle, job: Job, pins: Pins) -> str:
    """Why a job cannot have its states on those nodes, from where they are; empty: it can."""
    for key in job.states:
        kept = c.state.states[key]
        if kept.node not in pins.get(kept.pool, ()) and any(kept.node in names for names in pins.values()):
            return f"node {kept.node} has its {kept.pool} state, and would be used for another pool"
    return "" if job.spec.movable is Movable.RELAUNCH else _too_far(c, job, pins)


def _too_far(c: Cycle, job: Job, pins: Pins) -> str:
    """By a move it leaves something wherever it sits; after a fall-back, only what is still there has to be fetched."""
    hosts = {name: node.host for name, node in c.state.nodes.items()}
    for spec in job.spec.states:
        newest = job.newest.get(spec.pool, job.pins.get(spec.pool, ()))
        names = pins.get(spec.pool, ())
        sources = follow(job.pins.get(spec.pool, newest), newest, names)
        far = [source for source, name in zip(sources, names, strict=True) if hosts.get(source) != hosts[name]]
        if job.fell_back:
            far = [source for source in far if _is_there(c, job, spec.pool, source)]
        if far and not c.traits(spec.driver).copies:
            return f"its {spec.pool} state is parked on another host, and driver {spec.driver} cannot fetch it"
    return ""


def _is_there(c: Cycle, job: Job, pool: PoolName, node: NodeId) -> bool:
    """Whether the job's state is on the node, or may be."""
    kept = c.state.states.get(state_key(job.id, pool, node))
    return kept is not None and kept.run == job.run and kept.status is not StateStatus.GONE


def paired(c: Cycle, job: Job, pins: Pins) -> Pins:
    """The same nodes, each in the place of one on which the job has a state that is nearest: itself, or its host's."""
    return {pool: _paired(c, job.newest.get(pool, ()), names) for pool, names in pins.items()}


def _paired(c: Cycle, newest: tuple[NodeId, ...], names: tuple[NodeId, ...]) -> tuple[NodeId, ...]:
    host = {name: node.host for name, node in c.state.nodes.items()}
    left, places = list(names), [""] * len(names)
    for where in (str, host.get):
        for place, old in enumerate(newest[: len(names)]):
            near = [name for name in left if where(name) == where(old)]
            if near and not places[place]:
                places[place] = near[0]
                left.remove(near[0])
    return tuple(name or left.pop(0) for name in places)


def within_reach(c: Cycle, job: Job) -> State:
    """The state as placement is to see it for a job that fell back: nodes out of its reach are as if drained."""
    if not job.fell_back:
        return c.state
    bound = bound_to(c, job)
    pools = {name: _pools_within_reach(c, job, node, bound) for name, node in c.state.nodes.items()}
    if all(pools[name] == node.pools for name, node in c.state.nodes.items()):
        return c.state
    somewhere = {pool for some in pools.values() for pool in some}
    nodes = {}
    for name, node in c.state.nodes.items():
        # A node that is drained keeps its pools: of a pool of which there is no node a policy has never heard.
        seen = pools[name] if somewhere.issuperset(node.pools) else ()
        nodes[name] = replace(node, pools=seen or node.pools, drain=node.drain or not seen)
    return replace(c.state, nodes=nodes)


def bound_to(c: Cycle, job: Job) -> dict[PoolName, list[HostId]]:
    """The hosts on which alone a job that fell back can have nodes, by pool; of a pool that is not there, any."""
    bound: dict[PoolName, list[HostId]] = {}
    for spec in job.spec.states if job.fell_back else ():
        there = [name for name in job.newest.get(spec.pool, ()) if _is_there(c, job, spec.pool, name)]
        if there and not c.traits(spec.driver).copies:
            bound[spec.pool] = list(dict.fromkeys(c.state.nodes[name].host for name in there))
    return bound


def _pools_within_reach(c: Cycle, job: Job, node: Node, bound: dict[PoolName, list[HostId]]) -> tuple[PoolName, ...]:
    """The pools for which the job can have the node."""
    has = {c.state.states[key].pool for key in job.states if c.state.states[key].node == node.id}
    here = node.pools if job.spec.colocate or not has else [pool for pool in node.pools if pool in has]
    return tuple(pool for pool in here if node.host in bound.get(pool, (node.host,)))
