"""Which nodes are within reach of a placed job, by what it has loaded and parked.

What is parked on a host is loaded there, or elsewhere by a driver that can fetch it. A node that a job has for one
pool is not taken for another of its pools, and none on which it has left something. Its bytes there, and what is to
become of them, are known by the node.

A policy knows nothing of this. A job may be moved with its process. For such a job, it is shown the nodes that are out
of reach as if they were drained.
"""

from functools import partial

from msgspec.structs import replace

from rollmuxd.core.apply.pins import follow
from rollmuxd.core.context import Context
from rollmuxd.core.ids import HostId, NodeId, PoolName
from rollmuxd.core.model import Job, Node
from rollmuxd.core.policy import Placed
from rollmuxd.core.spec import Movable
from rollmuxd.core.state import State

Pins = dict[PoolName, tuple[NodeId, ...]]


def locality_violation(c: Context, job: Job, pins: Pins) -> str:
    """Why a job cannot have its states on those nodes, from where they are; empty: it can."""
    for pool, mine in job.pins.items():
        for name in mine:
            if name not in pins.get(pool, ()) and any(name in names for names in pins.values()):
                return f"node {name} is its for pool {pool}, and would be used for another one"
    return "" if job.spec.movable is Movable.RELAUNCH else _too_far(c, job, pins)


def _too_far(c: Context, job: Job, pins: Pins) -> str:
    for spec in job.spec.states:
        names = pins.get(spec.pool, ())
        sources = follow(job.pins.get(spec.pool, ()), job.newest.get(spec.pool, ()), names)
        far = any(_host(c, source) != _host(c, name) for source, name in zip(sources, names, strict=True))
        if far and not c.traits(spec.driver).copies:
            return f"its {spec.pool} state is parked on another host, and driver {spec.driver} cannot fetch it"
    return ""


def _host(c: Context, name: NodeId) -> HostId | None:
    node = c.state.nodes.get(name)
    return None if node is None else node.host


def place(c: Context, job: Job, state: State) -> Placed | None:
    """What the policy finds for a placed job in that state, or one like it: hardly ever out of reach of what it has."""
    placed = c.policy.place(limited_to_locality(c, job, state), job)
    if placed is None or job.spec.movable is not Movable.WARM:
        return placed
    return replace(placed, pins={pool: _paired(c, job, pool, names) for pool, names in placed.pins.items()})


def place_elsewhere(c: Context, job: Job) -> Placed | None:
    """What the policy finds for a placed job in another group than its own."""
    others = {name: known for name, known in c.state.groups.items() if name != job.group}
    return place(c, job, replace(c.state, groups=others))


def _paired(c: Context, job: Job, pool: PoolName, names: tuple[NodeId, ...]) -> tuple[NodeId, ...]:
    """The same nodes, each in the place of a part that is near: on that very node, else on its host."""
    left, places = list(names), [""] * len(names)
    for where in (str, partial(_host, c)):
        for place, old in enumerate(job.newest.get(pool, ())[: len(names)]):
            near = [name for name in left if where(name) == where(old)]
            if near and not places[place]:
                places[place] = near[0]
                left.remove(near[0])
    return tuple(name or left.pop(0) for name in places)


def limited_to_locality(c: Context, job: Job, state: State) -> State:
    """The state as placement is to see it for a placed job: nodes out of its reach are as if drained."""
    if job.spec.movable is not Movable.WARM:
        return state
    wanted = {want.pool for want in job.spec.wants}
    bound = [spec.pool for spec in job.spec.states if not c.traits(spec.driver).copies]
    hosts = {pool: {_host(c, name) for name in job.newest.get(pool, ())} for pool in bound}
    has = {} if job.spec.colocate else {name: pool for pool, names in job.pins.items() for name in names}

    def reaches(node: Node, pool: PoolName) -> bool:
        near = node.host in hosts.get(pool, (node.host,)) and has.get(node.id, pool) == pool
        return pool not in wanted or (near and node.id not in job.left)

    pools = {it.id: tuple(pool for pool in it.pools if reaches(it, pool)) for it in state.nodes.values()}
    somewhere = {pool for some in pools.values() for pool in some}
    # A node that is drained keeps its pools: of a pool of which there is no node a policy has never heard.
    seen = {it.id: pools[it.id] if somewhere.issuperset(it.pools) else () for it in state.nodes.values()}
    others = {
        it.id: replace(it, pools=seen[it.id] or it.pools, drain=it.drain or not seen[it.id])
        for it in state.nodes.values()
        if seen[it.id] != it.pools
    }
    return replace(state, nodes=state.nodes | others) if others else state
