"""The state as planning looks at it: jobs, groups as they sit, and nodes that are free."""

from collections.abc import Iterable, Sequence
from math import inf
from typing import TypeAlias

from msgspec import Struct

from rollmuxd.core.estimates import rollouts_rest_ms
from rollmuxd.core.ids import GroupId, JobId, Millis, NodeId, PoolName
from rollmuxd.core.model import Job
from rollmuxd.core.state import State
from rollmuxd.policies.rollmux import Shape, price_of, usable
from rollmuxd.policies.thrift.catalogue import Planner
from rollmuxd.policies.thrift.model import JobDemand, Pins, PoolCapacity, Profile

#: a job's profile, its solo iteration, and what its promise allows
Known: TypeAlias = tuple[Profile, Millis, Millis | None]


class GroupSnapshot(Struct, frozen=True):
    """A group as planning looks at it, derived once per version."""

    group: GroupId
    version: int
    #: its jobs, and where each sits
    known: dict[JobId, Known]
    seats: dict[JobId, Pins]
    #: of each, iterations in a rotation; and the period
    rates: tuple[int, ...]
    period_ms: Millis
    #: by pool: how many nodes it has, and what share of nodes its jobs need at least
    room: dict[PoolName, tuple[int, float]]


def pools_of(state: State) -> dict[PoolName, PoolCapacity]:
    """The pools by name: a node's price in the mean, what the best of its nodes have, and how many there are."""
    nodes = state.nodes.values()
    priced = any(node.price_per_gpu_hour for node in nodes)  # else each GPU is as dear as another
    pools = {}
    for pool in sorted({pool for node in nodes for pool in node.pools}):
        mine = [node for node in nodes if pool in node.pools]
        worth = sum(price_of(node) if priced else len(node.gpus) for node in mine) / len(mine)
        ram_mb = max(state.hosts[node.host].ram_mb for node in mine)
        pools[pool] = PoolCapacity(worth, worth, ram_mb, max(node.gpu_mb or inf for node in mine), len(mine))
    return pools


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
    price = sum(planner.rooms[pool].price * count for pool, (count, _) in sitting.room.items())
    done = sum(need.worth * need.solo_ms * rate for need, rate in zip(needs, sitting.rates, strict=True))
    return price - done / (sitting.period_ms or 1)


def free_by_pool(state: State) -> dict[PoolName, list[NodeId]]:
    """Nodes in no group, the cheapest first."""
    free: dict[PoolName, list[NodeId]] = {}
    for node in sorted((node for node in state.nodes.values() if node.group is None and usable(node)), key=price_of):
        for pool in node.pools:
            free.setdefault(pool, []).append(node.id)
    return free
