"""How a set of jobs shares nodes: the certified schedules of each set of profiles, and the best of them for some jobs.

What rates a set of profiles can have on so many nodes depends on neither promises nor credit nor prices. So for each
set the **frontier** is searched once: for each choice of rates and of nodes the shortest rotation that is certified
(:mod:`~rollmuxd.policies.schedule`), where no other is as fast for all jobs on no more nodes. A plan for some jobs is
the cheapest entry that keeps the bounds that they have now. Rates of 4, 3, 2 and 1 are enough for 2, 3, 4 and 5 jobs
(decision 0038).

Nodes are numbers here, counted per pool: those that a group has (``seats``), then those that it would take. A job that
is seated stays where it sits: then the frontier gives rates and nodes, and the seats are filled around it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from math import ceil, gcd, inf
from typing import Final, TypeAlias

from msgspec import Struct

from rollmuxd.core.ids import JobId, Millis, PoolName
from rollmuxd.policies.schedule import Step, is_feasible, is_feasible_narrow, pipelined, spanning
from rollmuxd.policies.thrift.credit import TIE
from rollmuxd.policies.thrift.model import Assignment, JobDemand, Pins, Plan, PoolCapacity, Profile, numbered

#: by how many jobs share: iterations of one of them in a rotation, at most
RATES: Final[Mapping[int, int]] = {1: 1, 2: 4, 3: 3, 4: 2}
#: no plan slows a job beyond this
SLOWEST: Final = 8
#: an entry that is as fast to this share, on no more nodes, takes another's place
ALIKE: Final = 1.02
#: rotations that are tried: the least that could be, so much more, and then closer to the shortest by halves
STRETCHES: Final = (1.02, 1.1, 1.4)
HALVINGS: Final = 3
#: rotations after which a fixpoint that was not met is given up: those that exist are met in three
ROTATIONS: Final = 3
#: seatings of one frontier's entry that are tried beyond the fewest nodes
EXTRA_NODES: Final = 2
#: sets of profiles, and plans of jobs, that are remembered
REMEMBERED, PLANS = 20_000, 50_000

#: by pool: the numbers of each job's nodes
Seats: TypeAlias = dict[PoolName, tuple[tuple[int, ...], ...]]


class Entry(Struct, frozen=True):
    """One way to run a set of profiles: rates, nodes, and the rotation that is certified with them."""

    rates: tuple[int, ...]
    nodes: tuple[int, ...]
    seats: Seats
    order: tuple[tuple[int, int], ...]
    period_ms: Millis


class Planner:
    """Plans sets of jobs.

    Args:
        rooms: the pools.
        rates: iterations of one job in a rotation at most, by how many jobs share; beyond, 1: round robin.
        dearest: of which pool a group has no more nodes than its widest member; default: the one that costs most.
    """

    def __init__(
        self, rooms: Mapping[PoolName, PoolCapacity], *, rates: Mapping[int, int] = RATES, dearest: PoolName = ""
    ) -> None:
        self._rooms, self.rates = rooms, rates
        self.dearest = dearest or max(rooms, key=lambda pool: rooms[pool].worth, default="")
        self._frontiers: dict[tuple[Profile, ...], tuple[Entry, ...]] = {}
        self._plans: dict[tuple[JobDemand, ...], Plan | None] = {}
        self._least: dict[JobDemand, tuple[float, tuple[tuple[int, float], ...]]] = {}
        #: frontiers that were searched: a measure of the planner's work, the same on every machine
        self.searched = 0

    @property
    def rooms(self) -> Mapping[PoolName, PoolCapacity]:
        """The pools, with the prices that they have now."""
        return self._rooms

    def price(self, rooms: Mapping[PoolName, PoolCapacity]) -> None:
        """Prices have changed, and nothing else of the pools."""
        if rooms != self._rooms:
            self._rooms = rooms
            self._plans.clear()
            self._least.clear()

    # ---- what is known without planning ------------------------------------------------------------------------------

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

    def least(self, needs: Iterable[JobDemand]) -> float:
        """No partition of these jobs into groups has less value than this."""
        value = worth = 0.0
        work = [0.0] * len(self.rooms)
        for need in needs:
            known = self._least.get(need)
            if known is None:
                known = self._least[need] = self._least_of(need)
            value += known[0]
            worth += need.worth
            for at, share in known[1]:
                work[at] += share
        price = 0.0
        for share, room in zip(work, self._rooms.values(), strict=True):
            price += ceil(share - 1e-6) * room.price
        return max(value, price - worth)

    def _least_of(self, need: JobDemand) -> tuple[float, tuple[tuple[int, float], ...]]:
        """The job's least part of any group's value; by pool, its share of nodes at its bound."""
        slow = inf if need.limit_ms is None else need.limit_ms
        used, shares = 0.0, []
        for at, (pool, room) in enumerate(self.rooms.items()):
            busy = dict(need.profile.widths).get(pool, 0) * need.profile.busy_ms(pool)
            used += busy * room.price
            if busy:
                shares.append((at, busy / slow))
        gain = used - need.worth * need.solo_ms
        return min(gain / (need.solo_ms or 1), gain / slow), tuple(shares)

    # ---- one group ---------------------------------------------------------------------------------------------------

    def plan(self, needs: Sequence[JobDemand]) -> Plan | None:
        """The plan of least value of some jobs, on any nodes; None: they cannot share."""
        if len(needs) == 1:
            return self.alone(needs[0])
        key = tuple(needs)
        if key not in self._plans:
            if len(self._plans) >= PLANS:
                self._plans.clear()
            self._plans[key] = self._plan(needs)
        return self._plans[key]

    def _plan(self, needs: Sequence[JobDemand]) -> Plan | None:
        found = min(self._within(needs), default=None, key=lambda it: it[0])
        if found is None:
            return None
        value, entry, places = found
        return Plan(
            needs=tuple(needs[place] for place in places),
            seats=tuple(
                {pool: seats[place] for pool, seats in entry.seats.items() if seats[place]}
                for place in range(len(needs))
            ),
            nodes=dict(zip(self.rooms, entry.nodes, strict=True)),
            order=entry.order,
            period_ms=entry.period_ms,
            value=value,
        )

    def fit(
        self,
        needs: Sequence[JobDemand],
        seated: Mapping[int, Assignment] | None = None,
        rooms: Mapping[PoolName, PoolCapacity] | None = None,
        closed: Mapping[PoolName, frozenset[int]] | None = None,
        below: float = inf,
    ) -> Plan | None:
        """A certified plan in which the seated stay where they sit.

        Args:
            needs: the group's jobs.
            seated: by place among ``needs``: numbers of their nodes, which are counted from 0 in each pool.
            rooms: the pools, where they differ from the planner's.
            closed: nodes that no other job is to be put on.
            below: plans of this value or more are of no use, and need not be found.
        """
        best: Plan | None = None
        tried: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        seating = _Seating([need.profile for need in needs], seated or {}, rooms or self.rooms, closed or {})
        for value, entry, places in sorted(self._within(needs), key=lambda it: it[0]):
            if value >= below - TIE:
                break
            rates = [0] * len(needs)
            for place, rate in zip(places, entry.rates, strict=True):
                rates[place] = rate
            for counts in seating.counts(entry.nodes, self.dearest):
                key = tuple(rates), counts
                if key in tried:
                    continue
                tried.add(key)
                made = self._seated(needs, *key, seating, below)
                if made is not None:
                    break
            else:
                continue
            best, below = made, made.value
        return best

    def fit_named(self, needs: Sequence[JobDemand], pins: Mapping[JobId, Pins]) -> Plan | None:
        """A certified plan of jobs, each of which sits on given nodes."""
        _, seats = numbered({need.job: pins[need.job] for need in needs})
        return self.fit(needs, dict(enumerate(seats.values())))

    def may_share(self, needs: Sequence[JobDemand]) -> bool:
        """Whether some entry keeps all bounds, wherever the jobs would sit."""
        return bool(self._within(needs))

    def _within(self, needs: Sequence[JobDemand]) -> list[tuple[float, Entry, tuple[int, ...]]]:
        """Entries that keep the bounds: the value of each, and which job has which place of it."""
        places = tuple(
            sorted(range(len(needs)), key=lambda at: (needs[at].profile, needs[at].limit_ms or inf, needs[at].job))
        )
        ordered = [needs[place] for place in places]
        limits = [need.limit_ms or inf for need in ordered]
        if any(need.profile.round_ms > limit for need, limit in zip(ordered, limits, strict=True)):
            return []
        worth = [need.worth * need.solo_ms for need in ordered]
        prices = [room.price for room in self.rooms.values()]
        found = []
        for entry in self.frontier(tuple(need.profile for need in ordered)):
            period, gain = entry.period_ms, 0.0
            for rate, limit, mine in zip(entry.rates, limits, worth, strict=True):
                if period > rate * limit:
                    break
                gain += rate * mine
            else:
                price = 0.0
                for count, each in zip(entry.nodes, prices, strict=True):
                    price += count * each
                found.append((price - gain / (period or 1), entry, places))
        return found

    def _seated(
        self,
        needs: Sequence[JobDemand],
        rates: tuple[int, ...],
        counts: tuple[int, ...],
        seating: "_Seating",
        below: float,
    ) -> Plan | None:
        """These rates on so many nodes of each pool, with seats around those that are taken."""
        turn = min(rate * (need.limit_ms or inf) for rate, need in zip(rates, needs, strict=True))
        seats, busiest = seating.fill(rates, counts)
        low = max(busiest, *(rate * need.profile.round_ms for rate, need in zip(rates, needs, strict=True)))
        if seats is None or low > turn:
            return None
        nodes = dict(zip(self.rooms, counts, strict=True))
        price = sum(count * self.rooms[pool].price for pool, count in nodes.items())
        worth = sum(rate * need.worth * need.solo_ms for rate, need in zip(rates, needs, strict=True))
        if price - worth / (low or 1) >= below - TIE:
            return None
        found = _certify(seating.profiles, rates, seats, nodes, low, turn)
        if found is None:
            return None
        period, order = found
        return Plan(
            needs=tuple(needs),
            seats=tuple(
                {pool: mine[place] for pool, mine in seats.items() if mine[place]} for place in range(len(needs))
            ),
            nodes=nodes,
            order=order,
            period_ms=period,
            value=price - worth / (period or 1),
        )

    # ---- the catalogue -----------------------------------------------------------------------------------------------

    def frontier(self, profiles: tuple[Profile, ...]) -> tuple[Entry, ...]:
        """What these profiles (sorted) can do together, none of it in vain. Searched once, and remembered."""
        known = self._frontiers.get(profiles)
        if known is None:
            for _ in self._search(profiles):
                pass
            known = self._frontiers[profiles]
        return known

    def prepare(self, needs: Sequence[JobDemand]) -> Iterator[None]:
        """Search the frontier of these jobs, in steps of a few milliseconds: to plan them takes little afterwards."""
        profiles = tuple(sorted(need.profile for need in needs))
        if profiles not in self._frontiers:
            yield from self._search(profiles)

    def knows(self, needs: Sequence[JobDemand]) -> bool:
        """Whether the frontier of these jobs is remembered: what it takes to plan them is then next to nothing."""
        return tuple(sorted(need.profile for need in needs)) in self._frontiers

    def _search(self, profiles: tuple[Profile, ...]) -> Iterator[None]:
        kept: list[Entry] = []
        seating = _Seating(profiles, {}, self.rooms, {})
        fewest = tuple(max(dict(it.widths).get(pool, 0) for it in profiles) for pool in self.rooms)
        for rates in _rates(profiles, self.rates.get(len(profiles), 1)):
            own = max(rate * it.round_ms for rate, it in zip(rates, profiles, strict=True))
            slow = SLOWEST * min(rate * it.round_ms for rate, it in zip(rates, profiles, strict=True))
            for counts in seating.counts(fewest, self.dearest, most=True):
                seats, busiest = seating.fill(rates, counts)
                low = max(own, busiest)
                if seats is None or low > slow or any(_covers(it, rates, counts, low) for it in kept):
                    continue
                found = _certify(profiles, rates, seats, dict(zip(self.rooms, counts, strict=True)), low, inf)
                if found is None:
                    continue
                period, order = found
                if not any(_covers(it, rates, counts, period) for it in kept):
                    kept = [it for it in kept if not _covers_entry(rates, counts, period, it)]
                    kept.append(Entry(rates, counts, seats, order, period))
                if period <= max(own, seating.load(self.dearest, rates)):
                    break  # further nodes of other pools make it no faster
            yield
        if len(self._frontiers) >= REMEMBERED:
            self._frontiers.clear()
        self.searched += 1
        self._frontiers[profiles] = tuple(kept)


def _covers(it: Entry, rates: Sequence[int], nodes: Sequence[int], period: Millis) -> bool:
    """Whether an entry does on no more nodes what these rates do, at nearly the pace."""
    return all(a <= b for a, b in zip(it.nodes, nodes, strict=True)) and all(
        it.period_ms * rate <= ALIKE * period * mine for rate, mine in zip(rates, it.rates, strict=True)
    )


def _covers_entry(rates: Sequence[int], nodes: Sequence[int], period: Millis, it: Entry) -> bool:
    return all(a <= b for a, b in zip(nodes, it.nodes, strict=True)) and all(
        period * rate <= it.period_ms * mine for rate, mine in zip(it.rates, rates, strict=True)
    )


def _rates(profiles: tuple[Profile, ...], most: int) -> Iterator[tuple[int, ...]]:
    """How often each goes round in a rotation, the shortest rotations first; of equal profiles the first most often."""
    choices = sorted(product(range(1, most + 1), repeat=len(profiles)), key=lambda rates: (sum(rates), rates))
    same = [at for at in range(1, len(profiles)) if profiles[at] == profiles[at - 1]]
    for rates in choices:
        if gcd(*rates) == 1 and all(rates[at - 1] >= rates[at] for at in same):
            yield rates


# ---- who sits where --------------------------------------------------------------------------------------------------


class _Seating:
    """Seats for some jobs, around those that have theirs.

    Args:
        profiles: the jobs.
        seated: by place: numbers of the nodes of those that sit somewhere.
        rooms: what a node of each pool has, and how many further ones may be taken.
        closed: nodes on which no other job is to be put.
    """

    def __init__(
        self,
        profiles: Sequence[Profile],
        seated: Mapping[int, Assignment],
        rooms: Mapping[PoolName, PoolCapacity],
        closed: Mapping[PoolName, frozenset[int]],
    ) -> None:
        self.profiles, self.seated, self.rooms, self.closed = profiles, seated, rooms, closed
        self.wide = {pool: [dict(it.widths).get(pool, 0) for it in profiles] for pool in rooms}
        self.busy = {pool: [it.busy_ms(pool) for it in profiles] for pool in rooms}
        self.kept = {
            pool: [next((some[1:] for some in it.kept if some[0] == pool), (0, 0, 0)) for it in profiles]
            for pool in rooms
        }
        self.had = {
            pool: 1 + max((node for mine in seated.values() for node in mine.get(pool, ())), default=-1)
            for pool in rooms
        }

    def load(self, pool: PoolName, rates: Sequence[int]) -> Millis:
        """What a node of the pool is kept in a rotation, if each job is on all of them."""
        return sum(
            rate * busy for rate, busy, wide in zip(rates, self.busy[pool], self.wide[pool], strict=True) if wide
        )

    def counts(self, nodes: Sequence[int], dearest: PoolName, *, most: bool = False) -> list[tuple[int, ...]]:
        """How many nodes of each pool to try, the fewest first: so many, to a few more, or to as many as are of use.

        Of the dearest pool no more than the widest job has, or than are there: two such groups are two.
        """
        each = []
        for (pool, room), count in zip(self.rooms.items(), nodes, strict=True):
            least = max(count, self.had[pool], *self.wide[pool])
            top = sum(self.wide[pool]) if most else min(least + EXTRA_NODES, sum(self.wide[pool]))
            if pool == dearest:
                top = least = max(self.had[pool], *self.wide[pool])
            if least > self.had[pool] + room.spare:
                return []
            each.append(range(least, max(least, int(min(top, self.had[pool] + room.spare))) + 1))
        return sorted(product(*each), key=sum)

    def fill(self, rates: Sequence[int], counts: Sequence[int]) -> tuple[Seats | None, Millis]:
        """Seats on so many nodes, the longest job on the least busy ones; and what keeps the busiest of all."""
        found: Seats = {}
        busiest = 0
        for (pool, room), count in zip(self.rooms.items(), counts, strict=True):
            loads = [rate * busy for rate, busy in zip(rates, self.busy[pool], strict=True)]
            nodes = _Nodes(room, count)
            seats: list[tuple[int, ...]] = [()] * len(loads)
            loose = []
            for place, width in enumerate(self.wide[pool]):
                if place in self.seated:
                    seats[place] = tuple(self.seated[place].get(pool, ()))
                    for node in seats[place]:
                        nodes.put(node, loads[place], self.kept[pool][place])
                elif width:
                    loose.append(place)
            closed = self.closed.get(pool, frozenset())
            for place in sorted(loose, key=lambda at: (-self.wide[pool][at] * loads[at], at)):
                width = self.wide[pool][place]
                free = [n for n in range(count) if n not in closed and nodes.takes(n, self.kept[pool][place])]
                if len(free) < width:
                    return None, 0
                free.sort(key=lambda n: (nodes.load[n], n))
                seats[place] = tuple(sorted(free[:width]))
                for node in seats[place]:
                    nodes.put(node, loads[place], self.kept[pool][place])
            if any(nodes.load[n] == 0 and not nodes.used[n] for n in range(count)) and count > self.had[pool]:
                return None, 0  # a node that no job is on: fewer will do
            found[pool] = tuple(seats)
            busiest = max(busiest, *nodes.load, 0)
        return found, busiest


class _Nodes:
    """Nodes of one pool while they are filled."""

    def __init__(self, room: PoolCapacity, count: int) -> None:
        self.room = room
        self.load = [0] * count
        self.used = [False] * count
        self.ram = [0] * count
        #: of each GPU: what the states there leave, and what the largest takes beyond
        self.left, self.top = [0] * count, [0] * count

    def takes(self, node: int, kept: tuple[int, int, int]) -> bool:
        """Whether a job's states fit there."""
        ram, left, top = kept
        return (
            self.ram[node] + ram <= self.room.ram_mb
            and self.left[node] + left + max(self.top[node], top) <= self.room.gpu_mb
        )

    def put(self, node: int, load: Millis, kept: tuple[int, int, int]) -> None:
        """Put a job there."""
        ram, left, top = kept
        self.load[node] += load
        self.used[node] = True
        self.ram[node] += ram
        self.left[node] += left
        self.top[node] = max(self.top[node], top)


# ---- in which order --------------------------------------------------------------------------------------------------


def _certify(
    profiles: Sequence[Profile],
    rates: tuple[int, ...],
    seats: Seats,
    nodes: Mapping[PoolName, int],
    low: Millis,
    turn: float,
) -> tuple[Millis, tuple[tuple[int, int], ...]] | None:
    """The shortest rotation that is certified, and its order; None: none is that keeps within ``turn``."""
    clocks = len(profiles)
    first: dict[PoolName, int] = {}
    for pool, count in nodes.items():
        first[pool] = clocks
        clocks += count
    steps: list[list[Step]] = [
        [
            (place, tuple(first[pool] + n for pool in pools for n in seats[pool][place]), took, gap)
            for pools, took, gap in it.phases
        ]
        for place, it in enumerate(profiles)
    ]
    narrow = all(len(claims) == 1 for mine in steps for _, claims, _, _ in mine)
    most = turn if turn < inf else sum(rate * it.round_ms for rate, it in zip(rates, profiles, strict=True))
    order = _spread(rates)
    orders = [tuple((place, phase) for place in order for phase in range(len(steps[place])))]
    if not narrow:
        orders.append(tuple(pipelined(order, [spanning([pools for pools, _, _ in it.phases]) for it in profiles])))
    compiled = []
    for visits in filter(None, orders):
        if narrow:
            slim = [(at, claims[0], took, gap) for at, claims, took, gap in (steps[p][q] for p, q in visits)]
            compiled.append((visits, partial(is_feasible_narrow, slim, clocks)))
        else:
            compiled.append((visits, partial(is_feasible, [steps[p][q] for p, q in visits], clocks)))
    high, found, below = int(most), None, low
    for period in (low, *(ceil(low * stretch) for stretch in STRETCHES), high):
        if low <= period <= high:
            found = next((visits for visits, certain in compiled if certain(period, ROTATIONS)), None)
            if found is not None:
                high = period
                break
            below = period
    if found is None:
        return None
    for _ in range(HALVINGS if high > below else 0):
        middle = (below + high) // 2
        better = next((visits for visits, certain in compiled if certain(middle, ROTATIONS)), None)
        if better is None:
            below = middle
        else:
            high, found = middle, better
    return high, found


def _spread(rates: tuple[int, ...]) -> tuple[int, ...]:
    """A rotation in which the iterations of each job are spread evenly, as places."""
    places = [((number + 0.5) / rate, -rate, place) for place, rate in enumerate(rates) for number in range(rate)]
    return tuple(place for _, _, place in sorted(places)) if max(rates) > 1 else tuple(range(len(rates)))
