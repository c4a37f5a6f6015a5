"""What plans are about: jobs as planning looks at them, pools, and plans."""

from collections.abc import Mapping, Sequence
from math import inf
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from rollmuxd.core.ids import JobId, Millis, NodeId, PoolName

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
    #: what an iteration may take now (:mod:`~rollmuxd.policies.thrift.credit`); None: the job has no promise
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
