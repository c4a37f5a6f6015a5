"""How a set of jobs shares nodes: the certified schedules of each set of profiles, and the best of them for some jobs.

What rates a set of profiles can have on so many nodes depends on neither promises nor credit nor prices. So each choice
of rates is searched once, when the bounds of some jobs first allow it. On ever more nodes it has the shortest rotation
that is certified (:mod:`~rollmuxd.policies.schedule`). A plan for some jobs is the cheapest of these that keeps the
bounds that they have now.

Nodes are numbers here, counted per pool: those that a group has (``seats``), then those that it would take. A job that
is seated stays where it sits: plans give rates and nodes, and the seats are filled around it.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice, permutations, product
from math import gcd, inf
from operator import le, mul
from typing import Final, TypeAlias

from msgspec import Struct

from rollmuxd.core.ids import JobId, Millis, PoolName
from rollmuxd.policies.schedule import Step, bounds_ms, pipelined
from rollmuxd.policies.thrift.credit import TIE
from rollmuxd.policies.thrift.model import Assignment, JobDemand, Pins, Plan, PoolCapacity, Profile, numbered

#: iterations of one job in a rotation, and of all of them, at most
ROUNDS, TURNS = 4, 10
#: orders in which jobs begin, at most
ORDERS: Final = 8
#: rates are no use with which some job is slowed beyond this while another is not slowed
SLOWEST: Final = 4
#: further nodes are of use where they make a rotation shorter by this factor
ALIKE: Final = 1.005
#: sets of profiles, and values of sets of jobs, that are remembered
REMEMBERED, VALUES = 5_000, 50_000

#: by pool: the numbers of each job's nodes
Seats: TypeAlias = dict[PoolName, tuple[tuple[int, ...], ...]]
#: the turns of a rotation: a job's place, and the number of a phase
Order: TypeAlias = tuple[tuple[int, int], ...]


class Entry(Struct):
    """What one choice of rates can do for a set of profiles."""

    rates: tuple[int, ...]
    #: what a rotation takes at least
    least_ms: Millis
    #: nodes of each pool, and the rotation that is certified with them; None: not searched yet
    certified: list[tuple[tuple[int, ...], Millis]] | None = None


class Planner:
    """Plans sets of jobs.

    Args:
        rooms: the pools.
        rounds: iterations of one job in a rotation at most; 1: round robin.
        dearest: the pool of which a group has as many nodes as its widest member; default: the one that costs most.
    """

    def __init__(self, rooms: Mapping[PoolName, PoolCapacity], *, rounds: int = ROUNDS, dearest: PoolName = "") -> None:
        self.rooms, self.rounds = rooms, rounds
        self.dearest = dearest or max(rooms, key=lambda pool: rooms[pool].worth, default="")
        #: by set of profiles; each entry is searched when the bounds of some jobs first allow it
        self._catalogue: dict[tuple[Profile, ...], list[Entry]] = {}
        self._values: dict[tuple[JobDemand, ...], float | None] = {}

    def price(self, rooms: Mapping[PoolName, PoolCapacity]) -> None:
        """Prices have changed, and nothing else of the pools."""
        if rooms != self.rooms:
            self.rooms = rooms
            self._values.clear()

    def alone_price(self, profile: Profile) -> float:
        """What such a job would cost per hour alone, on nodes that are bought."""
        return sum(width * self.rooms[pool].worth for pool, width in profile.widths)

    def alone(self, need: JobDemand) -> Plan:
        """The job on nodes of its own: nothing is moved, and it waits for no other job."""
        return Plan(
            needs=(need,),
            seats=({pool: tuple(range(width)) for pool, width in need.profile.widths},),
            nodes=dict(need.profile.widths),
            order=tuple((0, phase) for phase in range(len(need.profile.phases))),
            period_ms=need.solo_ms,
            value=sum(width * self.rooms[pool].price for pool, width in need.profile.widths) - need.worth,
        )

    # ---- one group ---------------------------------------------------------------------------------------------------

    def value(self, needs: Sequence[JobDemand]) -> Generator[None, None, float | None]:
        """The least value of some jobs as a group, wherever they would sit; None: they cannot share.

        In steps of a few milliseconds, as far as no jobs of these profiles with such bounds were looked at before.
        """
        key = tuple(needs)
        if key in self._values:
            return self._values[key]
        ordered = sorted(needs, key=lambda need: (need.profile, need.limit_ms or inf, need.job))
        profiles, limits, worth = _columns(ordered)
        prices = [room.price for room in self.rooms.values()]
        costs: dict[tuple[int, ...], float] = {}
        found = self.alone(ordered[0]).value if len(ordered) == 1 else None
        for entry in self._of(profiles) if len(ordered) > 1 else ():
            turn = min(map(mul, entry.rates, limits))
            if entry.least_ms > turn:
                continue
            if entry.certified is None:
                entry.certified = self._search(profiles, entry)
                yield
            gain = sum(map(mul, entry.rates, worth))
            for nodes, period in entry.certified:
                if period <= turn:
                    if nodes not in costs:
                        costs[nodes] = sum(map(mul, nodes, prices))
                    value = costs[nodes] - gain / (period or 1)
                    if found is None or value < found:
                        found = value
        if len(self._values) >= VALUES:
            self._values.clear()
        self._values[key] = found
        return found

    def fit(
        self,
        needs: Sequence[JobDemand],
        seated: Mapping[JobId, Pins] | None = None,
        spare: Mapping[PoolName, float] | None = None,
        below: float = inf,
    ) -> Plan | None:
        """The certified plan of least value in which the seated stay where they sit.

        Args:
            needs: the group's jobs.
            seated: the nodes of those.
            spare: how many further nodes may be taken, by pool; default: any number.
            below: plans of this value or more are of no use, and need not be found.
        """
        if len(needs) == 1 and not seated:
            return self.alone(needs[0])
        best: Plan | None = None
        profiles, limits, worth = _columns(needs)
        had, seats_of = numbered(seated or {})
        places = {at: seats_of[need.job] for at, need in enumerate(needs) if need.job in seats_of}
        seating = _Seating(profiles, places, self.rooms, spare)
        for least, rates, counts, price in sorted(self._choices(limits, worth, seating, below)):
            if least >= below - TIE:
                break
            seats, low = seating.fill(rates, counts)
            turn, gain = min(map(mul, rates, limits)), sum(map(mul, rates, worth))
            if price > below - TIE:  # no longer rotation is worth enough
                turn = min(turn, gain / (price - below + TIE))
            if seats is None or low > turn:
                continue
            period, order = _certify(profiles, rates, seats, counts, low, turn)
            value = price - gain / (period or 1)
            if order and value < below - TIE:
                below, nodes = value, dict(zip(self.rooms, counts, strict=True))
                mine = ({pool: some[at] for pool, some in seats.items() if some[at]} for at in range(len(needs)))
                best = Plan(tuple(needs), tuple(mine), nodes, order, period, value, had)
        return best

    def _choices(
        self, limits: Sequence[float], worth: Sequence[float], seating: "_Seating", below: float
    ) -> Iterator[tuple[float, tuple[int, ...], tuple[int, ...], float]]:
        """Value, rates, nodes of each pool and their price, as may keep the bounds for less than ``below``."""
        prices = [room.price for room in self.rooms.values()]
        counts = [(nodes, sum(map(mul, nodes, prices))) for nodes in seating.counts(self.dearest)]
        for rates in _rates(len(limits), self.rounds):
            turn, low = min(map(mul, rates, limits)), max(map(mul, rates, seating.rounds))
            if low > turn:
                continue
            gain = sum(map(mul, rates, worth))
            areas = [sum(map(mul, rates, mine)) for mine in seating.areas.values()]
            for nodes, price in counts:
                least = max(low, *(area / (count or 1) for area, count in zip(areas, nodes, strict=True)))
                if least <= turn and (value := price - gain / (least or 1)) < below - TIE:
                    yield value, rates, nodes, price

    # ---- the catalogue -----------------------------------------------------------------------------------------------

    def _of(self, profiles: tuple[Profile, ...]) -> list[Entry]:
        """The entries of a set of profiles (sorted)."""
        if profiles not in self._catalogue:
            if len(self._catalogue) >= REMEMBERED:
                self._catalogue.clear()
            seating = _Seating(profiles, {}, self.rooms)
            same = [at for at in range(1, len(profiles)) if profiles[at] == profiles[at - 1]]
            made = self._catalogue[profiles] = []
            for rates in _rates(len(profiles), self.rounds):
                rounds = [*map(mul, rates, seating.rounds)]
                # of equal jobs the one with the tightest bound goes most often
                if max(rounds) <= SLOWEST * min(rounds) and all(rates[at - 1] >= rates[at] for at in same):
                    made.append(Entry(rates, seating.least(self.dearest, rates)))
        return self._catalogue[profiles]

    def _search(self, profiles: tuple[Profile, ...], entry: Entry) -> list[tuple[tuple[int, ...], Millis]]:
        """What the entry's rates can do on ever more nodes, none of it in vain."""
        found: list[tuple[tuple[int, ...], Millis]] = []
        seating = _Seating(profiles, {}, self.rooms)
        for counts in seating.counts(self.dearest):
            seats, low = seating.fill(entry.rates, counts)
            if seats is None or any(low * ALIKE >= period and all(map(le, nodes, counts)) for nodes, period in found):
                continue
            period, order = _certify(profiles, entry.rates, seats, counts, low, inf)
            if order:
                found.append((counts, period))
                if period <= entry.least_ms:
                    break  # further nodes of other pools make it no faster
        return found


def _columns(needs: Sequence[JobDemand]) -> tuple[tuple[Profile, ...], list[float], list[float]]:
    """Of each job its profile, its bound, and what an iteration of it is worth (dollars per hour, times ms)."""
    return (
        tuple(need.profile for need in needs),
        [need.limit_ms or inf for need in needs],
        [need.worth * need.solo_ms for need in needs],
    )


@cache
def _rates(jobs: int, rounds: int) -> tuple[tuple[int, ...], ...]:
    """How often each of some jobs goes round in a rotation, the shortest rotations first."""
    most = min(rounds, max(1, TURNS + 1 - jobs))
    choices = sorted(product(range(1, most + 1), repeat=jobs), key=lambda rates: (sum(rates), rates))
    return tuple(rates for rates in choices if gcd(*rates) == 1 and sum(rates) <= max(TURNS, jobs))


# ---- jobs and their nodes --------------------------------------------------------------------------------------------


class _Seating:
    """Seats for some jobs, around those that have theirs.

    Args:
        profiles: the jobs.
        seated: by place: numbers of the nodes of those that sit somewhere, counted from 0 in each pool.
        rooms: what a node of each pool has.
        spare: how many further ones may be taken; default: any number.
    """

    def __init__(
        self,
        profiles: Sequence[Profile],
        seated: Mapping[int, Assignment],
        rooms: Mapping[PoolName, PoolCapacity],
        spare: Mapping[PoolName, float] | None = None,
    ) -> None:
        self.profiles, self.seated, self.rooms = profiles, seated, rooms
        self.wide = {pool: [dict(it.widths).get(pool, 0) for it in profiles] for pool in rooms}
        self.busy = {pool: [it.busy_ms(pool) for it in profiles] for pool in rooms}
        self.rounds = [it.round_ms for it in profiles]
        #: by pool, of each job: for how long an iteration has one node, in all
        self.areas = {pool: list(map(mul, self.wide[pool], self.busy[pool])) for pool in rooms}
        self.kept = {
            pool: [next((some[1:] for some in it.kept if some[0] == pool), (0, 0, 0)) for it in profiles]
            for pool in rooms
        }
        self.had = {
            pool: 1 + max((node for mine in seated.values() for node in mine.get(pool, ())), default=-1)
            for pool in rooms
        }

        self.most = {pool: had + (inf if spare is None else spare.get(pool, 0)) for pool, had in self.had.items()}

    def least(self, pool: PoolName, rates: Sequence[int]) -> Millis:
        """What a rotation takes at least, with as many nodes of the pool as are of use."""
        area, nodes = sum(map(mul, rates, self.areas[pool])), max(1, self.had[pool], *self.wide[pool])
        least: Millis = max(-(-area // nodes), *map(mul, rates, self.rounds))
        return least

    def counts(self, dearest: PoolName) -> list[tuple[int, ...]]:
        """How many nodes of each pool to try, the fewest first, and as many as are of use.

        Of the dearest pool at most what the widest job has, and what there is: wider would be two groups.
        """
        each = []
        for pool, most in self.most.items():
            least = max(self.had[pool], *self.wide[pool])
            if least > most:
                return []
            of_use = least if pool == dearest else max(least, sum(self.wide[pool]))
            each.append(range(least, int(min(of_use, most)) + 1))
        return sorted(product(*each), key=sum)

    def fill(self, rates: Sequence[int], counts: Sequence[int]) -> tuple[Seats | None, Millis]:
        """Seats on so many nodes, the longest job on the least busy ones; and the least that a rotation takes there."""
        found: Seats = {}
        low = max(rate * it.round_ms for rate, it in zip(rates, self.profiles, strict=True))
        for (pool, room), count in zip(self.rooms.items(), counts, strict=True):
            loads = [rate * busy for rate, busy in zip(rates, self.busy[pool], strict=True)]
            kept, wide = self.kept[pool], self.wide[pool]
            seats = [tuple(self.seated[at].get(pool, ())) if at in self.seated else () for at in range(len(loads))]
            load, ram, residuals, loaded = [0] * count, [0] * count, [0] * count, [0] * count
            used = [False] * count
            loose = [at for at, width in enumerate(wide) if width and at not in self.seated]
            for at in (*self.seated, *sorted(loose, key=lambda at: (-wide[at] * loads[at], at))):
                in_ram, residual, when_loaded = kept[at]
                if at not in self.seated:
                    # A node holds what its jobs keep there: in RAM, and on each GPU beside the largest that is loaded.
                    free = [
                        n
                        for n in range(count)
                        if ram[n] + in_ram <= room.ram_mb
                        and residuals[n] + residual + max(loaded[n], when_loaded) <= room.gpu_mb
                    ]
                    seats[at] = tuple(sorted(sorted(free, key=load.__getitem__)[: wide[at]]))
                    if len(seats[at]) < wide[at]:
                        return None, 0
                for node in seats[at]:
                    used[node] = True
                    load[node] += loads[at]
                    ram[node] += in_ram
                    residuals[node] += residual
                    loaded[node] = max(loaded[node], when_loaded)
            if count > self.had[pool] and not all(used):
                return None, 0  # a node that no job is on: fewer will do
            found[pool] = tuple(seats)
            low = max(low, *load, 0)
        return found, low


# ---- in which order --------------------------------------------------------------------------------------------------


def _certify(
    profiles: Sequence[Profile], rates: tuple[int, ...], seats: Seats, counts: Sequence[int], low: Millis, turn: float
) -> tuple[Millis, Order]:
    """The shortest rotation that is certified, and its order; no order: none is that keeps within ``turn``."""
    first, clocks = {}, len(profiles)
    for pool, count in zip(seats, counts, strict=True):
        first[pool] = clocks
        clocks += count
    steps: dict[tuple[int, int], Step] = {
        (place, number): (place, tuple(first[pool] + n for pool in pools for n in seats[pool][place]), took, gap)
        for place, it in enumerate(profiles)
        for number, (pools, took, gap) in enumerate(it.phases)
    }
    best: float = turn + 1
    found: Order = ()
    for order in _orders(rates, tuple(tuple(pools for pools, _, _ in it.phases) for it in profiles)):
        _, period = bounds_ms([*map(steps.__getitem__, order)], clocks, best)
        if period < best:
            best, found = period, order
        if best <= low:
            break
    return int(best) if found else 0, found


@cache
def _orders(rates: tuple[int, ...], claims: tuple[tuple[tuple[PoolName, ...], ...], ...]) -> tuple[Order, ...]:
    """Rotations in which the iterations of each job are spread evenly: by which job begins before which, and pipelined.

    Args:
        rates: iterations of each job.
        claims: by job, the pools of each of its phases.
    """
    spread: dict[tuple[int, ...], None] = {}
    for begins in islice(permutations(range(len(rates))), ORDERS):
        at = sorted(
            ((number + (begins[place] + 0.5) / len(rates)) / rate, place)
            for place, rate in enumerate(rates)
            for number in range(rate)
        )
        order = tuple(place for _, place in at)
        spread[min(order[turn:] + order[:turn] for turn in range(len(order)))] = None
        if max(rates) == 1:
            break  # round robin: in which order hardly matters
    by_job = [tuple((at, number) for at in order for number in range(len(claims[at]))) for order in spread]
    return (*by_job, *(tuple(made) for order in spread for made in pipelined(order, claims)))
