"""What planning looks at: jobs, pools, groups as they sit and nodes that are free; and what comes of it: plans."""

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from rollmuxd.core.estimates import rollouts_rest_ms
from rollmuxd.core.ids import GroupId, JobId, Millis, NodeId, PoolName
from rollmuxd.core.model import Job
from rollmuxd.core.state import State
from rollmuxd.policies.rollmux import Shape, price_of, usable

#: numbers of a job's nodes, by pool
Assignment: TypeAlias = Mapping[PoolName, tuple[int, ...]]
#: names of them
Pins: TypeAlias = Mapping[PoolName, tuple[NodeId, ...]]


class Profile(Struct, frozen=True, cache_hash=True, order=True):
    """What a job does, whatever it was promised: jobs of one profile are equal to the catalogue."""

    #: its cycle: the pools that a phase claims, how long it keeps them in a shared group, its own gap before
    phases: tuple[tuple[tuple[PoolName, ...], Millis, Millis], ...]
    #: nodes of each pool
    widths: tuple[tuple[PoolName, int], ...]
    #: an iteration with the moves of its states, as in a group
    round_ms: Millis
    #: per pool: parked RAM, and of each GPU what stays there while parked, and what loading takes beyond that
    kept: tuple[tuple[PoolName, int, int, int], ...] = ()

    def busy_ms(self, pool: PoolName) -> Millis:
        """How long an iteration keeps the job's nodes of a pool."""
        return sum(took for pools, took, _ in self.phases if pool in pools)

    def one_in(self, iterations: float) -> "Profile":
        """What an iteration of another job sees of it if it has one in so many."""
        phases = tuple((pools, int(took / iterations), int(gap / iterations)) for pools, took, gap in self.phases)
        return replace(self, phases=phases, round_ms=int(self.round_ms / iterations))


class JobDemand(Struct, frozen=True, cache_hash=True):
    """A job, as planning looks at it now."""

    job: JobId
    profile: Profile
    #: an iteration alone
    solo_ms: Millis
    #: what an iteration may take: by its SLO, or in plans now (:mod:`~rollmuxd.policies.thrift.credit`); None: as long
    #: as it likes
    limit_ms: Millis | None
    #: dollars per hour that the job's progress is worth at its solo pace
    worth: float = 0.0


class PoolCapacity(Struct, frozen=True):
    """A pool, as planning looks at it: what a node of it costs and has."""

    #: per hour, as scarce as it is now; and as it would be if it were bought: by this progress is measured
    price: float
    worth: float
    ram_mb: float = inf
    gpu_mb: float = inf
    #: nodes that there are
    count: int = 0


class Plan(Struct, frozen=True):
    """How a set of jobs runs as one group."""

    needs: tuple[JobDemand, ...]
    #: by job and pool: numbers of nodes
    seats: tuple[dict[PoolName, tuple[int, ...]], ...]
    #: nodes per pool
    nodes: dict[PoolName, int]
    #: the turns of one rotation: a place among ``needs``, and the number of a phase
    order: tuple[tuple[int, int], ...]
    period_ms: Millis
    #: dollars per hour: what the nodes cost, less what the members' progress is worth. This is minimised
    value: float
    #: the names of the first nodes of each pool: those that the seated have
    had: dict[PoolName, list[NodeId]] = {}

    def by_name(
        self, free: Mapping[PoolName, Sequence[NodeId]], taken: set[NodeId]
    ) -> dict[JobId, dict[PoolName, tuple[NodeId, ...]]] | None:
        """Each job's nodes: those that are had, then free ones that are not ``taken``; None: there are not so many."""
        names: dict[PoolName, list[NodeId]] = {}
        for pool, count in self.nodes.items():
            mine = names[pool] = [*self.had.get(pool, ())]
            mine += [node for node in free.get(pool, ()) if node not in taken][: max(0, count - len(mine))]
            if len(mine) < count:
                return None
            taken.update(mine)
        return {
            need.job: {pool: tuple(names[pool][node] for node in nodes) for pool, nodes in seats.items()}
            for need, seats in zip(self.needs, self.seats, strict=True)
        }


def numbered(
    pins: Mapping[JobId, Pins],
) -> tuple[dict[PoolName, list[NodeId]], dict[JobId, dict[PoolName, tuple[int, ...]]]]:
    """The nodes of some jobs by pool, in order, and each job's by number."""
    names: dict[PoolName, list[NodeId]] = {}
    seats: dict[JobId, dict[PoolName, tuple[int, ...]]] = {}
    for job, mine in pins.items():
        seats[job] = {}
        for pool, nodes in mine.items():
            known = names.setdefault(pool, [])
            known += [node for node in nodes if node not in known]
            seats[job][pool] = tuple(known.index(node) for node in nodes)
    return names, seats


# ---- the state as planning looks at it -------------------------------------------------------------------------------


class GroupSnapshot(Struct, frozen=True):
    """A group as planning looks at it, derived once per version."""

    group: GroupId
    version: int
    #: its jobs, by their SLOs, and where each sits
    known: dict[JobId, JobDemand]
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


def demand_of(job: Job) -> JobDemand | None:
    """What the job asks for by its SLO; None: a plan cannot say it."""
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
    return JobDemand(job.id, profile, shape.solo_ms, shape.limit_ms)


def used_by(demands: Iterable[JobDemand]) -> dict[PoolName, float]:
    """What share of nodes some jobs need at least, to be within their bounds, by pool."""
    used: dict[PoolName, float] = {}
    for it in demands:
        for pool, width in it.profile.widths if it.limit_ms else ():
            used[pool] = used.get(pool, 0.0) + width * it.profile.busy_ms(pool) / (it.limit_ms or 1)
    return used


def value_of(rooms: Mapping[PoolName, PoolCapacity], sitting: GroupSnapshot, needs: Sequence[JobDemand]) -> float:
    """What a group as it stands is worth, by the plan's measure."""
    price = sum(rooms[pool].price * count for pool, (count, _) in sitting.room.items())
    done = sum(need.worth * need.solo_ms * rate for need, rate in zip(needs, sitting.rates, strict=True))
    return price - done / (sitting.period_ms or 1)


def free_by_pool(state: State) -> dict[PoolName, list[NodeId]]:
    """Nodes in no group, the cheapest first."""
    free: dict[PoolName, list[NodeId]] = {}
    for node in sorted((node for node in state.nodes.values() if node.group is None and usable(node)), key=price_of):
        for pool in node.pools:
            free.setdefault(pool, []).append(node.id)
    return free
