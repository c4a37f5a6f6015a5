"""The state as planning looks at it: jobs, groups as they sit, and nodes that are free."""

from collections.abc import Iterable, Iterator, Sequence
from math import inf
from operator import attrgetter
from typing import TypeAlias

from msgspec import Struct

from rollmuxd.core.estimates import rollouts_rest_ms
from rollmuxd.core.ids import JobId, Millis, NodeId, PoolName
from rollmuxd.core.model import Job, Node, NodeStatus
from rollmuxd.core.state import State
from rollmuxd.policies.rollmux import Shape
from rollmuxd.policies.thrift.catalogue import Planner
from rollmuxd.policies.thrift.model import JobDemand, Pins, PoolCapacity, Profile

#: a job's profile, its solo iteration, and what its promise allows
Known: TypeAlias = tuple[Profile, Millis, Millis | None]


class GroupSnapshot(Struct, frozen=True):
    """A group as planning looks at it, derived once per version."""

    version: int
    jobs: tuple[JobId, ...]
    #: of each
    profiles: tuple[Known, ...]
    #: by job: its nodes by pool
    pinned: dict[JobId, Pins]
    #: the group's nodes by pool, and each job's by number
    names: dict[PoolName, tuple[NodeId, ...]]
    seats: tuple[dict[PoolName, tuple[int, ...]], ...]
    #: iterations in a rotation, and the period
    rates: tuple[int, ...]
    period_ms: Millis
    #: by pool: how many nodes it has, and what share of nodes its jobs need at least
    room: dict[PoolName, tuple[int, float]]


class Inventory(Struct, frozen=True):
    """The pools by name, and what they were derived from: a node's own traits never change, its host's RAM may."""

    nodes: list[Node]
    hosts_mb: list[int]
    #: a node's price in the mean, what the best of its nodes have, and how many there are
    pools: dict[PoolName, PoolCapacity]

    @classmethod
    def of(cls, state: State, known: "Inventory | None") -> "Inventory":
        """That of the state: the one that is known, if it has the same nodes."""
        nodes = list(state.nodes.values())
        hosts_mb = list(map(attrgetter("ram_mb"), state.hosts.values()))
        if known is not None and known.nodes == nodes and known.hosts_mb == hosts_mb:
            return known
        ram_mb = [state.hosts[node.host].ram_mb for node in nodes]
        priced = any(node.price_per_gpu_hour for node in nodes)  # else each GPU is as dear as another
        members: dict[PoolName, list[int]] = {}
        for number, node in enumerate(nodes):
            for pool in node.pools:
                members.setdefault(pool, []).append(number)
        pools = {}
        for pool, mine in sorted(members.items()):
            worth = sum(price_of(nodes[at]) if priced else len(nodes[at].gpus) for at in mine) / len(mine)
            most_gpu_mb = max(nodes[at].gpu_mb or inf for at in mine)
            pools[pool] = PoolCapacity(worth, worth, max(ram_mb[at] for at in mine), most_gpu_mb, len(mine))
        return cls(nodes, hosts_mb, pools)


def profile_of(job: Job) -> Known | None:
    """The job's profile, its solo iteration, and what its promise allows; None: a plan cannot say it."""
    spec = job.spec
    if spec.colocate or any(want.gpus or want.named for want in spec.wants):
        return None
    shape = Shape(job, ())
    if shape.solo_ms is None:
        return None
    kept: dict[PoolName, tuple[int, int, int]] = {}
    for one in spec.states:
        ram, left, top = kept.get(one.pool, (0, 0, 0))
        more = max(top, one.gpu_mb - one.residual_mb)
        kept[one.pool] = (ram + one.ram_mb, left + one.residual_mb, more)
    profile = Profile(
        phases=tuple(
            (phase.pools, took + moves, phase.gap_ms + rollouts_rest_ms(job)) for phase, (took, moves) in shape.busy
        ),
        widths=tuple((want.pool, want.nodes) for want in spec.wants),
        round_ms=shape.shared_ms,
        kept=tuple((pool, *sizes) for pool, sizes in kept.items()),
    )
    return profile, shape.solo_ms, shape.limit_ms


def used_by(jobs: Iterable[tuple[Profile, Millis | None]]) -> dict[PoolName, float]:
    """What share of nodes some jobs need at least, to be within their bounds, by pool."""
    used: dict[PoolName, float] = {}
    for profile, limit in jobs:
        for pool, width in profile.widths if limit else ():
            used[pool] = used.get(pool, 0.0) + width * profile.busy_ms(pool) / (limit or 1)
    return used


def value_of(planner: Planner, sitting: GroupSnapshot, needs: Sequence[JobDemand]) -> float:
    """What a group as it stands is worth, by the plan's measure."""
    price = sum(planner.rooms[pool].price * len(names) for pool, names in sitting.names.items())
    done = sum(need.worth * need.solo_ms * rate for need, rate in zip(needs, sitting.rates, strict=True))
    return price - done / (sitting.period_ms or 1)


def pools_in_use(state: State) -> Iterator[PoolName]:
    """The pools that the nodes in groups are of."""
    for node in state.nodes.values():
        if node.group is not None:
            yield from node.pools


def usable(node: Node) -> bool:
    return node.status is NodeStatus.UP and not node.drain


def free_by_pool(state: State) -> dict[PoolName, list[NodeId]]:
    """Nodes in no group, the cheapest first."""
    free: dict[PoolName, list[NodeId]] = {}
    for node in sorted((node for node in state.nodes.values() if node.group is None and usable(node)), key=price_of):
        for pool in node.pools:
            free.setdefault(pool, []).append(node.id)
    return free


def price_of(node: Node) -> float:
    return node.price_per_gpu_hour * len(node.gpus)
