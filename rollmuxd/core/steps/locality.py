"""Which nodes are within a job's reach, by what it has loaded and parked.

What is parked on a host is loaded there, or elsewhere by a driver that can fetch it. A node that a job has for one
pool, or on which it left that pool's state, is not taken for another of its pools. Its bytes there, and what is to
become of them, are known by the node.

A policy knows nothing of this. For a job that has a state somewhere it is shown the nodes that are out of the job's
reach as if they were drained.
"""

from collections import Counter
from collections.abc import Iterator
from functools import partial

from msgspec.structs import replace

from rollmuxd.core.apply.pins import follow
from rollmuxd.core.context import Context
from rollmuxd.core.ids import HostId, NodeId, PoolName
from rollmuxd.core.model import Job, JobState, Node, NodeStatus, StateStatus
from rollmuxd.core.policy import Placed
from rollmuxd.core.spec import Movable
from rollmuxd.core.state import State, state_key

Pins = dict[PoolName, tuple[NodeId, ...]]


def locality_violation(c: Context, job: Job, pins: Pins) -> str:
    """Why a job cannot have its states on those nodes, from where they are; empty: it can."""
    for pool, name in _older_copies(c, job):
        if name in pins.get(pool, ()):
            return f"an older copy of its {pool} state is still on node {name}"
    for name, pool in _its_nodes(c, job):
        if name not in pins.get(pool, ()) and any(name in names for names in pins.values()):
            return f"node {name} is or was its for pool {pool}, and would be used for another one"
    return "" if job.spec.movable is Movable.RELAUNCH else _too_far(c, job, pins)


def _its_nodes(c: Context, job: Job) -> Iterator[tuple[NodeId, PoolName]]:
    """The nodes where a job sits, and those where it has a state; for which pool."""
    yield from ((name, pool) for pool, names in job.pins.items() for name in names)
    yield from ((kept.node, kept.pool) for kept in c.state.states_of(job))


def _older_copies(c: Context, job: Job) -> set[tuple[PoolName, NodeId]]:
    """Where a job that fell back has what it must not load there, as it would be the wrong part."""
    states = c.state.states_of(job) if job.fell_back else []
    return {(it.pool, it.node) for it in states if it.status is not StateStatus.GONE and is_older(job, it)}


def _too_far(c: Context, job: Job, pins: Pins) -> str:
    for spec in job.spec.states:
        newest = job.newest.get(spec.pool, job.pins.get(spec.pool, ()))
        names, parts = pins.get(spec.pool, ()), _parts(c, job, spec.pool)
        sources = follow(job.pins.get(spec.pool, newest), newest, names)
        pairs = zip(sources, names, strict=True)
        far = any(source in parts and _host(c, source) != _host(c, name) for source, name in pairs)
        if far and not c.traits(spec.driver).copies:
            return f"its {spec.pool} state is parked on another host, and driver {spec.driver} cannot fetch it"
    return ""


def _host(c: Context, name: NodeId) -> HostId | None:
    node = c.state.nodes.get(name)
    return None if node is None else node.host


def _parts(c: Context, job: Job, pool: PoolName) -> list[NodeId]:
    """The nodes that have, or may have, the parts of a job's state; for a placed job, by the time it leaves."""
    newest = dict.fromkeys(job.newest.get(pool, job.pins.get(pool, ())))
    if job.pins:
        return list(newest)
    known = ((name, c.state.states.get(state_key(job.id, pool, name))) for name in newest)
    return [name for name, it in known if it and it.run == job.run and it.status is not StateStatus.GONE]


def is_older(job: Job, kept: JobState) -> bool:
    """Whether a state is a copy of a part that the job has, or had, newer elsewhere: of which part is not known."""
    newest = job.newest.get(kept.pool, ())
    return len(newest) > 1 and kept.node not in newest


def place(c: Context, job: Job, state: State) -> Placed | None:
    """What the policy finds for a job in that state, or one like it: hardly ever out of reach of what it has."""
    placed = c.policy.place(limited_to_locality(c, job, state), job)
    if placed is None or not _has_something(job):
        return placed
    return replace(placed, pins={pool: _paired(c, job, pool, names) for pool, names in placed.pins.items()})


def place_elsewhere(c: Context, job: Job) -> Placed | None:
    """What the policy finds for a placed job in another group than its own."""
    others = {name: known for name, known in c.state.groups.items() if name != job.group}
    return place(c, job, replace(c.state, groups=others))


def _has_something(job: Job) -> bool:
    """Whether it is to keep what it has: it has a place, and may be moved, or it fell back."""
    return job.fell_back or (bool(job.pins) and job.spec.movable is Movable.WARM)


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
    """The state as placement is to see it for a job: nodes out of its reach are as if drained."""
    if not _has_something(job):
        return state
    wanted = {want.pool for want in job.spec.wants}
    offered = {pool: _offered(c, job, pool, hosts) for pool, hosts in bound_to(c, job).items()}
    has: dict[NodeId, set[PoolName]] = {}
    for name, pool in _its_nodes(c, job) if not job.spec.colocate else ():
        has.setdefault(name, set()).add(pool)

    older = _older_copies(c, job)

    def reaches(name: NodeId, pool: PoolName) -> bool:
        if (pool, name) in older:
            return False
        return pool not in wanted or (name in offered.get(pool, (name,)) and pool in has.get(name, (pool,)))

    pools = {it.id: tuple(pool for pool in it.pools if reaches(it.id, pool)) for it in state.nodes.values()}
    somewhere = {pool for some in pools.values() for pool in some}
    # A node that is drained keeps its pools: of a pool of which there is no node a policy has never heard.
    seen = {it.id: pools[it.id] if somewhere.issuperset(it.pools) else () for it in state.nodes.values()}
    if all(seen[it.id] == it.pools for it in state.nodes.values()):
        return state
    return replace(state, nodes={it.id: _as_seen(it, seen[it.id]) for it in state.nodes.values()})


def _as_seen(node: Node, pools: tuple[PoolName, ...]) -> Node:
    return node if pools == node.pools else replace(node, pools=pools or node.pools, drain=node.drain or not pools)


def bound_to(c: Context, job: Job) -> dict[PoolName, Counter[HostId]]:
    """The hosts that have a state of a job, and how many parts of it, by pool: where its driver cannot fetch it."""
    bound: dict[PoolName, Counter[HostId]] = {}
    for spec in job.spec.states if _has_something(job) else ():
        nodes = [c.state.nodes[name] for name in _parts(c, job, spec.pool) if name in c.state.nodes]
        if nodes and not c.traits(spec.driver).copies:
            bound[spec.pool] = Counter(node.host for node in nodes)
    return bound


def _offered(c: Context, job: Job, pool: PoolName, parts: Counter[HostId]) -> set[NodeId]:
    """The nodes of a pool that a job may have whose state lies on some hosts: of the free ones, as many on each."""
    nodes = [node for node in c.state.nodes.values() if pool in node.pools]
    had = job.newest.get(pool, ())
    gone = len(had) - parts.total()  # so many parts it has to build again, on any node
    if job.pins or (len(parts) == 1 and not gone):
        return {node.id for node in nodes if node.host in parts}
    offered = {node.id for node in nodes if node.group is not None and (gone or node.host in parts)}
    free = [node for node in nodes if node.group is None and node.status is NodeStatus.UP and not node.drain]
    free.sort(key=lambda node: (node.id not in had, node.price_per_gpu_hour))
    more = parts.copy()
    for node in free:
        if more[node.host] > 0:
            more[node.host] -= 1
            offered.add(node.id)
    return offered | {node.id for node in [node for node in free if node.id not in offered][:gone]}
