"""How a set of jobs shares nodes: the certified schedules of each set of profiles, and the best of them for some jobs.

What rates a set of profiles can have on so many nodes depends on neither promises nor credit nor prices. So for each
set the **frontier** is searched once. For each choice of rates and nodes it has the shortest rotation that is certified
(:mod:`~rollmuxd.policies.schedule`). No other entry is as fast for all jobs on as few nodes. A plan for some jobs is
the cheapest entry that keeps the bounds that they have now. Rates of 4, 3, 2 and 1 are enough for 2, 3, 4 and 5 jobs
(decision 0038).

Nodes are numbers here, counted per pool: those that a group has (``seats``), then those that it would take. A job that
is seated stays where it sits: the frontier gives rates and nodes, and the seats are filled around it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import permutations, product
from math import ceil, gcd, inf
from operator import mul
from typing import Final, TypeAlias

from msgspec import Struct

from rollmuxd.core.ids import JobId, Millis, PoolName
from rollmuxd.policies.schedule import Step, is_feasible, is_feasible_narrow, pipelined
from rollmuxd.policies.thrift.credit import TIE
from rollmuxd.policies.thrift.model import Assignment, JobDemand, Pins, Plan, PoolCapacity, Profile, numbered

#: by how many jobs share: iterations of one of them in a rotation, at most
RATES: Final[Mapping[int, int]] = {1: 1, 2: 4, 3: 3, 4: 2}
#: no plan slows a job beyond this
SLOWEST: Final = 8
#: an entry that is as fast within this factor, on as few nodes, replaces another
ALIKE: Final = 1.005
#: rotations that are tried: the least that could be, so much more, and then closer to the shortest by halves
STRETCHES: Final = (1.02, 1.1, 1.4)
HALVINGS: Final = 5
#: rotations after which a fixpoint that was not met is given up: those that exist are met in three
ROTATIONS: Final = 3
#: sets of profiles, and values of sets of jobs, that are remembered
REMEMBERED, VALUES = 20_000, 50_000

#: by pool: the numbers of each job's nodes
Seats: TypeAlias = dict[PoolName, tuple[tuple[int, ...], ...]]
#: the turns of a rotation: a job's place, and the number of a phase
Order: TypeAlias = tuple[tuple[int, int], ...]


class Entry(Struct, frozen=True):
    """One way to run a set of profiles: rates, nodes, and the rotation that is certified with them."""

    rates: tuple[int, ...]
    nodes: tuple[int, ...]
    period_ms: Millis

    def covers(self, other: "Entry", slack: float = 1.0) -> bool:
        """Whether it does what the other does on as few nodes, at its pace or nearly."""
        period, allowed = self.period_ms, slack * other.period_ms
        for mine, theirs in zip(self.rates, other.rates, strict=True):  # a search asks this most, so no generators
            if period * theirs > allowed * mine:
                return False
        for mine, theirs in zip(self.nodes, other.nodes, strict=True):  # noqa: SIM110
            if mine > theirs:
                return False
        return True


class Planner:
    """Plans sets of jobs.

    Args:
        rooms: the pools.
        rates: iterations of one job in a rotation at most, by how many jobs share; beyond, 1: round robin.
        dearest: the pool of which a group has as many nodes as its widest member; default: the one that costs most.
    """

    def __init__(
        self, rooms: Mapping[PoolName, PoolCapacity], *, rates: Mapping[int, int] = RATES, dearest: PoolName = ""
    ) -> None:
        self.rooms, self.rates = rooms, rates
        self.dearest = dearest or max(rooms, key=lambda pool: rooms[pool].worth, default="")
        #: what has been found so far, and the search for the rest
        self._frontiers: dict[tuple[Profile, ...], tuple[list[Entry], Iterator[None]]] = {}
        self._values: dict[tuple[JobDemand, ...], float | None] = {}

    def price(self, rooms: Mapping[PoolName, PoolCapacity]) -> None:
        """Prices have changed, and nothing else of the pools."""
        if rooms != self.rooms:
            self.rooms = rooms
            self._values.clear()

    def alone_price(self, need: JobDemand) -> float:
        """What the job would cost per hour alone, on nodes that are bought."""
        return sum(width * self.rooms[pool].worth for pool, width in need.profile.widths)

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

    def value(self, needs: Sequence[JobDemand]) -> float | None:
        """The least value of some jobs as a group, wherever they would sit; None: they cannot share."""
        if len(needs) == 1:
            return self.alone(needs[0]).value
        key = tuple(needs)
        if key not in self._values:
            if len(self._values) >= VALUES:
                self._values.clear()
            self._values[key] = min(self._within(needs), default=None)
        return self._values[key]

    def fit(
        self,
        needs: Sequence[JobDemand],
        seated: Mapping[int, Assignment] | None = None,
        rooms: Mapping[PoolName, PoolCapacity] | None = None,
        below: float = inf,
    ) -> Plan | None:
        """The certified plan of least value in which the seated stay where they sit.

        Args:
            needs: the group's jobs.
            seated: by place among ``needs``: numbers of their nodes, which are counted from 0 in each pool.
            rooms: the pools, where they differ from the planner's.
            below: plans of this value or more are of no use, and need not be found.
        """
        if len(needs) == 1 and not seated:
            return self.alone(needs[0])
        best: Plan | None = None
        seating = _Seating([need.profile for need in needs], seated or {}, rooms or self.rooms)
        for value, rates, counts in sorted(self._choices(needs, seating, below)):
            if value >= below - TIE:
                break
            made = self._seated(needs, rates, counts, seating, below)
            if made is not None:
                best, below = made, made.value
        return best

    def _choices(
        self, needs: Sequence[JobDemand], seating: "_Seating", below: float
    ) -> Iterator[tuple[float, tuple[int, ...], tuple[int, ...]]]:
        """Rates, and nodes of each pool, that may keep the bounds for less than that; the first is the least value."""
        limits = [need.limit_ms or inf for need in needs]
        worth = [need.worth * need.solo_ms for need in needs]
        counts = [
            (nodes, sum(map(mul, nodes, (room.price for room in self.rooms.values()))))
            for nodes in seating.counts(self.dearest)
        ]
        for rates in _rates(len(needs), self.rates.get(len(needs), 1)):
            turn, low = min(map(mul, rates, limits)), max(map(mul, rates, seating.rounds))
            if low > turn:
                continue
            gain = sum(map(mul, rates, worth))
            areas = [sum(map(mul, rates, mine)) for mine in seating.areas]
            for nodes, price in counts:
                least = max(low, *(area / (count or 1) for area, count in zip(areas, nodes, strict=True)))
                if least <= turn and (value := price - gain / (least or 1)) < below - TIE:
                    yield value, rates, nodes

    def fit_named(self, needs: Sequence[JobDemand], pins: Mapping[JobId, Pins]) -> Plan | None:
        """A certified plan of jobs, each of which sits on given nodes."""
        _, seats = numbered({need.job: pins[need.job] for need in needs})
        return self.fit(needs, dict(enumerate(seats.values())))

    def _within(self, needs: Sequence[JobDemand]) -> Iterator[float]:
        """The value of each entry that keeps the bounds."""
        ordered = sorted(needs, key=lambda need: (need.profile, need.limit_ms or inf, need.job))
        limits = [need.limit_ms or inf for need in ordered]
        if any(need.profile.round_ms > limit for need, limit in zip(ordered, limits, strict=True)):
            return
        worth = [need.worth * need.solo_ms for need in ordered]
        prices = [room.price for room in self.rooms.values()]
        for entry in self.frontier(tuple(need.profile for need in ordered)):
            if entry.period_ms <= min(map(mul, entry.rates, limits)):
                gain = sum(map(mul, entry.rates, worth)) / (entry.period_ms or 1)
                yield sum(map(mul, entry.nodes, prices)) - gain

    def _seated(
        self,
        needs: Sequence[JobDemand],
        rates: tuple[int, ...],
        counts: tuple[int, ...],
        seating: "_Seating",
        below: float,
    ) -> Plan | None:
        """These rates on so many nodes of each pool, with seats around those that are taken, if it is worth more."""
        turn = min(rate * (need.limit_ms or inf) for rate, need in zip(rates, needs, strict=True))
        seats, low = seating.fill(rates, counts)
        price = sum(count * room.price for count, room in zip(counts, self.rooms.values(), strict=True))
        worth = sum(rate * need.worth * need.solo_ms for rate, need in zip(rates, needs, strict=True))
        if seats is None or low > turn or price - worth / (low or 1) >= below - TIE:
            return None
        if price > below - TIE:  # no longer rotation is worth enough
            turn = min(turn, worth / (price - below + TIE))
        period, order = _certify(seating.profiles, rates, seats, counts, low, turn)
        value = price - worth / (period or 1)
        if not order or value >= below - TIE:
            return None
        return Plan(
            needs=tuple(needs),
            seats=tuple(
                {pool: mine[place] for pool, mine in seats.items() if mine[place]} for place in range(len(needs))
            ),
            nodes=dict(zip(self.rooms, counts, strict=True)),
            order=order,
            period_ms=period,
            value=value,
        )

    # ---- the catalogue -----------------------------------------------------------------------------------------------

    def frontier(self, profiles: tuple[Profile, ...]) -> list[Entry]:
        """What these profiles (sorted) can do together, none of it in vain. Searched once, and remembered."""
        found, search = self._frontier(profiles)
        for _ in search:
            pass
        return found

    def prepare(self, needs: Sequence[JobDemand]) -> Iterator[None]:
        """Search the frontier of these jobs, in steps of a few milliseconds: to plan them takes little afterwards."""
        if len(needs) > 1:
            for _ in self._frontier(tuple(sorted(need.profile for need in needs)))[1]:  # yield from would close it
                yield

    def _frontier(self, profiles: tuple[Profile, ...]) -> tuple[list[Entry], Iterator[None]]:
        if profiles not in self._frontiers:
            if len(self._frontiers) >= REMEMBERED:
                self._frontiers.clear()
            found: list[Entry] = []
            self._frontiers[profiles] = found, self._search(profiles, found)
        return self._frontiers[profiles]

    def _search(self, profiles: tuple[Profile, ...], kept: list[Entry]) -> Iterator[None]:
        seating = _Seating(profiles, {}, self.rooms)
        nodes = seating.counts(self.dearest)
        same = [at for at in range(1, len(profiles)) if profiles[at] == profiles[at - 1]]
        for rates in _rates(len(profiles), self.rates.get(len(profiles), 1)):
            if any(rates[at - 1] < rates[at] for at in same):
                continue  # of equal profiles the first goes most often
            slow = SLOWEST * min(rate * it.round_ms for rate, it in zip(rates, profiles, strict=True))
            for counts in nodes:
                seats, low = seating.fill(rates, counts)
                if seats is None or low > slow or any(it.covers(Entry(rates, counts, low), ALIKE) for it in kept):
                    continue
                period, order = _certify(profiles, rates, seats, counts, low, inf)
                made = Entry(rates, counts, period)
                if not order:
                    continue
                if not any(it.covers(made, ALIKE) for it in kept):
                    kept[:] = [*(it for it in kept if not made.covers(it)), made]
                if made.period_ms <= seating.least(self.dearest, rates):
                    break  # further nodes of other pools make it no faster
            yield


@cache
def _rates(jobs: int, most: int) -> tuple[tuple[int, ...], ...]:
    """How often each of some jobs goes round in a rotation, the shortest rotations first."""
    choices = sorted(product(range(1, most + 1), repeat=jobs), key=lambda rates: (sum(rates), rates))
    return tuple(rates for rates in choices if gcd(*rates) == 1)


# ---- jobs and their nodes --------------------------------------------------------------------------------------------


class _Seating:
    """Seats for some jobs, around those that have theirs.

    Args:
        profiles: the jobs.
        seated: by place: numbers of the nodes of those that sit somewhere.
        rooms: what a node of each pool has, and how many further ones may be taken.
    """

    def __init__(
        self,
        profiles: Sequence[Profile],
        seated: Mapping[int, Assignment],
        rooms: Mapping[PoolName, PoolCapacity],
    ) -> None:
        self.profiles, self.seated, self.rooms = profiles, seated, rooms
        self.wide = {pool: [dict(it.widths).get(pool, 0) for it in profiles] for pool in rooms}
        self.busy = {pool: [it.busy_ms(pool) for it in profiles] for pool in rooms}
        self.rounds = [it.round_ms for it in profiles]
        #: by pool, of each job: for how long an iteration has one node, in all
        self.areas = [list(map(mul, self.wide[pool], self.busy[pool])) for pool in rooms]
        self.kept = {
            pool: [next((some[1:] for some in it.kept if some[0] == pool), (0, 0, 0)) for it in profiles]
            for pool in rooms
        }
        self.had = {
            pool: 1 + max((node for mine in seated.values() for node in mine.get(pool, ())), default=-1)
            for pool in rooms
        }

    def least(self, pool: PoolName, rates: Sequence[int]) -> Millis:
        """A rotation takes no less if each job is on all nodes of the pool."""
        return max(
            sum(rate * busy for rate, busy in zip(rates, self.busy[pool], strict=True)),
            *(rate * it.round_ms for rate, it in zip(rates, self.profiles, strict=True)),
        )

    def counts(self, dearest: PoolName) -> list[tuple[int, ...]]:
        """How many nodes of each pool to try, the fewest first, and as many as are of use.

        Of the dearest pool at most what the widest job has, and what there is: wider would be two groups.
        """
        each = []
        for pool, room in self.rooms.items():
            least = max(self.had[pool], *self.wide[pool])
            if least > self.had[pool] + room.spare:
                return []
            most = least if pool == dearest else max(least, sum(self.wide[pool]))
            each.append(range(least, int(min(most, self.had[pool] + room.spare)) + 1))
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
    orders = _orders(rates, tuple(tuple(pools for pools, _, _ in it.phases) for it in profiles))
    tests: list[Callable[[Millis, int], bool]]
    if all(len(claims) == 1 for _, claims, _, _ in steps.values()):
        slim = {turn: (at, claims[0], took, gap) for turn, (at, claims, took, gap) in steps.items()}
        tests = [partial(is_feasible_narrow, list(map(slim.__getitem__, order)), clocks) for order in orders]
    else:
        tests = [partial(is_feasible, list(map(steps.__getitem__, order)), clocks) for order in orders]

    def certain(period: Millis) -> Order:
        return next((order for order, test in zip(orders, tests, strict=True) if test(period, ROTATIONS)), ())

    # one after the other always is
    high = int(turn if turn < inf else sum(rate * it.round_ms for rate, it in zip(rates, profiles, strict=True)))
    below, found = low, certain(high)
    for period in (low, *(ceil(low * stretch) for stretch in STRETCHES)):
        if not found or period >= high:
            break
        if better := certain(period):
            high, found = period, better
        else:
            below = period
    for _ in range(HALVINGS if found and high > below else 0):
        middle = (below + high) // 2
        if better := certain(middle):
            high, found = middle, better
        else:
            below = middle
    return high, found


@cache
def _orders(rates: tuple[int, ...], claims: tuple[tuple[tuple[PoolName, ...], ...], ...]) -> tuple[Order, ...]:
    """Rotations in which the iterations of each job are spread evenly: by which job begins before which, and pipelined.

    Args:
        rates: iterations of each job.
        claims: by job, the pools of each of its phases.
    """
    spread: dict[tuple[int, ...], None] = {}
    for begins in permutations(range(len(rates))):
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
