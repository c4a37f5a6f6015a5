"""How a set of jobs shares nodes: the wheel of least value, certified.

A **plan** says how often each job goes round in a turn (its rate), which nodes of each pool it has, and in which order
the iterations follow each other. Round robin is among the candidates, being the one in which every rate is 1. The
search (research/policy.md section 5): some job goes round 1 to 8 times in a turn, the others as often as their bounds
then ask for; each pool's nodes are filled to that turn, as few as will do; then a few orders in which every job's
iterations are spread evenly are tried, until one is certified (:mod:`~rollmuxd.policies.schedule`). Counts matter;
orders of iterations hardly ever do. Where phases are over several pools, the pipelined order of phases is tried as
well, and the shorter turn is taken.

Nodes are numbers here, counted per pool: those that a group has (``seats``), then those that it would take. Whoever is
seated stays where he sits. The same search serves an arrival (all but one are seated), a set of jobs as such (nobody
is), and a regrouping (some stay, some come).

The **value** of a plan is what its nodes cost per hour, less ``mu`` times what its members' progress is worth: a job
at its solo pace is worth what it would cost alone. With ``mu`` 0 only dollars per hour count.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from math import ceil, gcd, inf
from operator import mul
from typing import Final, TypeAlias, TypeVar

from rollmuxd.core.ids import Millis, PoolName
from rollmuxd.policies.loom.fill import Filled, Filling, orders
from rollmuxd.policies.loom.model import Assignment, JobDemand, Pins, Plan, PoolCapacity, numbered
from rollmuxd.policies.schedule import Step, is_feasible, is_feasible_narrow, pipelined, spanning

#: iterations of one job in a turn, and of all of them, at most (more is hardly ever of use: research 2.2)
MOST_ROUNDS, MOST_TOKENS = 8, 24
#: nodes beyond the fewest that are tried for a pool
EXTRA_NODES: Final = 2
#: ways to fill so many nodes of a pool that are tried: of a set of jobs, and where some are seated
FILLINGS, FILLINGS_SEATED = 1, 2
#: candidates that are tried for one set of jobs, at most
CANDIDATES: Final = 100
#: rates that are filled, and candidates that are tried, between two yields
FILLED_A_STEP, TRIED_A_STEP = 8, 8
#: turns after which a fixpoint that was not met is given up: those that exist are met in three
TURNS: Final = 3
#: what progress counts for where dollars are equal
TIE: Final = 1e-3
#: plans that are remembered
REMEMBERED: Final = 50_000

T = TypeVar("T")


def at_once(steps: Generator[None, None, T]) -> T:
    """What a search comes to, without a pause."""
    while True:
        try:
            next(steps)
        except StopIteration as over:
            found: T = over.value
            return found


class Planner:
    """Plans sets of jobs.

    Args:
        rooms: the pools.
        mu: what a job's progress is worth, in units of what it costs alone.
        rounds: iterations of one job in a turn, at most; 1: strict round robin.
        dearest: of which pool a group has no more nodes than its widest member; default: the one that costs most.
    """

    def __init__(
        self,
        rooms: Mapping[PoolName, PoolCapacity],
        *,
        mu: float = 0.0,
        rounds: int = MOST_ROUNDS,
        dearest: PoolName = "",
    ) -> None:
        self.rooms, self.mu, self.rounds = rooms, max(mu, TIE), rounds
        #: how exactly periods are known in the search: to so many parts; where only dollars count it hardly matters
        self.grain = 8 if mu <= TIE else 256
        self.dearest = dearest or max(rooms, key=lambda pool: rooms[pool].worth, default="")
        #: jobs by number; one whose times or bound have changed gets another
        self.needs: list[JobDemand] = []
        self._numbers: dict[JobDemand, int] = {}
        self._known: dict[tuple[int, ...], Plan | None] = {}
        self._least: list[tuple[float, tuple[float, ...], float]] = []
        #: rates and candidates that were tried so far: a measure of its work, the same on every machine
        self.tried = 0

    def number(self, need: JobDemand) -> int:
        """The job's number, by which sets are remembered."""
        known = self._numbers.get(need)
        if known is None:
            known = self._numbers[need] = len(self.needs)
            self.needs.append(need)
            self._least.append(self._least_of(need))
        return known

    # ---- what is known without planning ------------------------------------------------------------------------------

    def worth(self, need: JobDemand) -> float:
        """What the job would cost per hour alone, on nodes that are bought."""
        return sum(width * self.rooms[pool].worth for pool, width in need.widths)

    def alone(self, need: JobDemand) -> Plan:
        """The job on nodes of its own: nothing is moved, and nobody is waited for."""
        price = sum(width * self.rooms[pool].price for pool, width in need.widths)
        return Plan(
            needs=(need,),
            seats=({pool: tuple(range(width)) for pool, width in need.widths},),
            nodes=dict(need.widths),
            order=tuple((0, phase) for phase in range(len(need.phases))),
            period_ms=need.solo_ms,
            price=price,
            value=price - self.mu * self.worth(need),
        )

    def least(self, jobs: Sequence[int]) -> float:
        """No partition of these jobs into groups has less value than this."""
        value = worth = 0.0
        work = [0.0] * len(self.rooms)
        for job in jobs:
            mine, shares, solo = self._least[job]
            value += mine
            worth += solo
            for place, share in enumerate(shares):
                work[place] += share
        price = sum(ceil(share - 1e-6) * room.price for share, room in zip(work, self.rooms.values(), strict=True))
        return max(value, price - self.mu * worth)

    def _least_of(self, need: JobDemand) -> tuple[float, tuple[float, ...], float]:
        """The job's least part of any group's value; its share of nodes per pool at its bound; its price alone."""
        widths = dict(need.widths)
        work = [widths.get(pool, 0) * need.busy_ms(pool) for pool in self.rooms]
        worth = self.worth(need)
        used = sum(share * room.price for share, room in zip(work, self.rooms.values(), strict=True))
        slow = inf if need.limit_ms is None else need.limit_ms
        each = [used / period - self.mu * worth * need.solo_ms / period for period in (need.solo_ms or 1, slow)]
        return min(each), tuple(share / slow for share in work), worth

    # ---- one group ---------------------------------------------------------------------------------------------------

    def plan(self, jobs: tuple[int, ...]) -> Generator[None, None, Plan | None]:
        """The plan of least value that was found for some jobs, by ascending number; None: they cannot share."""
        if jobs in self._known:
            return self._known[jobs]
        needs = [self.needs[job] for job in jobs]
        made = self.alone(needs[0]) if len(needs) == 1 else (yield from self.fit_in_steps(needs))
        if len(self._known) >= REMEMBERED:
            self._known.clear()
        self._known[jobs] = made
        return made

    def knows(self, jobs: tuple[int, ...]) -> bool:
        """Whether the plan of some jobs is remembered."""
        return jobs in self._known

    def cannot(self, jobs: tuple[int, ...]) -> bool:
        """Whether it is remembered that some jobs cannot share."""
        return jobs in self._known and self._known[jobs] is None

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
            closed: nodes that nobody else is to be put on.
            below: plans of this value or more are of no use, and need not be found.
        """
        return at_once(self.fit_in_steps(needs, seated, rooms, closed, below))

    def fit_in_steps(
        self,
        needs: Sequence[JobDemand],
        seated: Mapping[int, Assignment] | None = None,
        rooms: Mapping[PoolName, PoolCapacity] | None = None,
        closed: Mapping[PoolName, frozenset[int]] | None = None,
        below: float = inf,
    ) -> Generator[None, None, Plan | None]:
        """The same, for whoever does something else whenever it yields."""
        return _Tries(self, needs, seated or {}, rooms or self.rooms, closed or {}).best(below)

    def fit_named(self, pins: Mapping[int, Pins]) -> Plan | None:
        """A certified plan of jobs, by number, each of whom sits on given nodes."""
        _, seats = numbered(pins)
        return self.fit([self.needs[job] for job in pins], dict(enumerate(seats.values())))

    def may_fit(self, needs: Sequence[JobDemand], seats: Sequence[Assignment], joins: JobDemand) -> bool:
        """Whether, as far as the dearest pool tells, a job could have some rates beside others who are seated.

        With all others somebody is late by his own doing, or a node of that pool is wanted for longer than a turn.
        """
        pool, width = self.dearest, dict(joins.widths).get(self.dearest, 0)
        there = [mine.get(pool, ()) for mine in seats]
        rows = [
            (need.limit_ms, need.round_ms, need.busy_ms(pool), nodes)
            for need, nodes in zip((*needs, joins), (*there, ()), strict=True)
        ]
        limits = [limit for limit, _, _, _ in rows if limit is not None]
        nobody = [0] * max(1, width, *(node + 1 for nodes in there for node in nodes))
        for rounds in range(1, self.rounds + 1):
            for one in limits:
                turn, load, count, busy = rounds * one, nobody.copy(), 1, 0
                for limit, took, busy, nodes in rows:
                    count = 1 if limit is None else -(-turn // limit)
                    if count * took > turn or count > self.rounds:
                        break
                    for node in nodes:
                        load[node] += count * busy
                else:  # the newcomer is the last of them, and has the nodes that are wanted least
                    load.sort()
                    if load[-1] <= turn and (not width or load[width - 1] + count * busy <= turn):
                        return True
        return not limits

    def rates(self, needs: Sequence[JobDemand]) -> list[tuple[int, ...]]:
        """How often each job goes round in a turn: candidates, each once, the shortest turns first."""
        limits = [need.limit_ms for need in needs]
        found: dict[tuple[int, ...], None] = {(1,) * len(needs): None}
        for rounds in range(1, self.rounds + 1):
            for one in limits:
                if one is None:
                    continue
                turn = rounds * one
                counts = tuple(1 if limit is None else -(-turn // limit) for limit in limits)
                if max(counts) > self.rounds or sum(counts) > MOST_TOKENS:
                    continue
                common = gcd(*counts)
                found[counts if common == 1 else tuple(count // common for count in counts)] = None
        return list(found)


#: the value that it could have, tokens, rates, the turn that bounds allow, the least turn, each pool's filling
Candidate: TypeAlias = tuple[float, int, tuple[int, ...], float, Millis, dict[PoolName, tuple[tuple[int, ...], ...]]]


class _Tries:
    """The search for one plan."""

    def __init__(
        self,
        planner: Planner,
        needs: Sequence[JobDemand],
        seated: Mapping[int, Assignment],
        rooms: Mapping[PoolName, PoolCapacity],
        closed: Mapping[PoolName, frozenset[int]],
    ) -> None:
        self.planner, self.needs, self.seated, self.rooms, self.closed = planner, needs, seated, rooms, closed
        wanted = [pool for pool in rooms if any(dict(need.widths).get(pool) for need in needs)]
        #: the dearest first: it fails soonest
        self.pools = sorted(wanted, key=lambda pool: pool != planner.dearest)
        self.widths = [dict(need.widths) for need in needs]
        self.busy = {pool: [need.busy_ms(pool) for need in needs] for pool in self.pools}
        self.kept = {pool: [_kept(need, pool) for need in needs] for pool in self.pools}
        #: by pool: who sits on which nodes of it
        self.sits = {pool: {place: seats.get(pool, ()) for place, seats in seated.items()} for pool in self.pools}
        self.had = {
            pool: 1 + max((node for nodes in sits.values() for node in nodes), default=-1)
            for pool, sits in self.sits.items()
        }
        self.wide = {pool: [widths.get(pool, 0) for widths in self.widths] for pool in self.pools}
        self.most = {pool: self._most(pool) for pool in self.pools}
        self.worth = [planner.worth(need) for need in needs]
        #: by job: which of its phases claim another's pools, and more
        self.spans = [spanning([pools for pools, _, _ in need.phases]) for need in needs]

    def best(self, below: float = inf) -> Generator[None, None, Plan | None]:
        """Candidates by what they could at best be worth, until one is certified that no later one can beat."""
        if not self._may_fit():
            return None
        candidates: list[Candidate] = []
        for filled, counts in enumerate(self.planner.rates(self.needs), 1):
            self.planner.tried += 1
            candidates += self._candidates(counts)
            if filled % FILLED_A_STEP == 0:
                yield
        candidates.sort(key=lambda it: it[:3])
        best: Plan | None = None
        for tried, (bound, _, counts, turn, low, fillings) in enumerate(candidates[:CANDIDATES], 1):
            if bound >= below:
                break
            self.planner.tried += 1
            made = self._certify(counts, turn, low, fillings)
            if made is not None and (best is None or made.value < best.value):
                best, below = made, min(below, made.value - TIE)
            if tried % TRIED_A_STEP == 0:
                yield
        return best

    def _may_fit(self) -> bool:
        """Whether the work fits as many nodes as there may be."""
        limits = [need.limit_ms or inf for need in self.needs]
        for pool in self.pools:
            work = sum(
                widths.get(pool, 0) * took / limit
                for widths, took, limit in zip(self.widths, self.busy[pool], limits, strict=True)
            )
            if work > self.most[pool] + 1e-9:
                return False
        return all(need.round_ms <= limit for need, limit in zip(self.needs, limits, strict=True))

    def _most(self, pool: PoolName) -> int:
        """Nodes that a group may have of a pool. Of the dearest as its widest member has: two such are two groups."""
        widths = self.wide[pool]
        least = max(self.had[pool], *widths)
        if pool == self.planner.dearest:
            return int(min(least, self.had[pool] + self.rooms[pool].spare))
        return int(min(sum(widths), self.had[pool] + self.rooms[pool].spare))

    def _candidates(self, counts: tuple[int, ...]) -> Iterator[Candidate]:
        """These rates, if nobody is late by his own doing, with every pool filled."""
        turn = min(count * (need.limit_ms or inf) for count, need in zip(counts, self.needs, strict=True))
        longest = max(count * need.round_ms for count, need in zip(counts, self.needs, strict=True))
        if longest > turn:
            return
        filled: list[list[Filled]] = []
        for pool in self.pools:
            ways = list(self._fillings(pool, counts, turn))
            if not ways:
                return
            filled.append(ways)
        yield from self._combined(counts, turn, longest, filled)

    def _combined(
        self, counts: tuple[int, ...], turn: float, longest: Millis, filled: list[list[Filled]]
    ) -> Iterator[Candidate]:
        """Each way to fill a pool beside each of the others'."""
        for chosen in product(*filled):
            low = max(longest, *(load for _, load, _ in chosen))
            price = sum(count * self.rooms[pool].price for pool, (count, _, _) in zip(self.pools, chosen, strict=True))
            fillings = {pool: seats for pool, (_, _, seats) in zip(self.pools, chosen, strict=True)}
            yield price - self._progress(counts, low), sum(counts), counts, turn, low, fillings

    def _progress(self, counts: Sequence[int], period: Millis) -> float:
        done = sum(
            worth * need.solo_ms * count for worth, need, count in zip(self.worth, self.needs, counts, strict=True)
        )
        return self.planner.mu * done / (period or 1)

    def _fillings(self, pool: PoolName, counts: Sequence[int], turn: float) -> Iterator[Filled]:
        """Ways to fill a pool's nodes, the fewest nodes first."""
        loads = list(map(mul, counts, self.busy[pool]))
        if max(loads) > turn:
            return
        widths = self.wide[pool]
        work = sum(map(mul, widths, loads))
        least, most = max(self.had[pool], *widths), self.most[pool]
        if turn < inf:
            least = max(least, ceil(work / turn - 1e-9))
        if most == 1 and least == 1 and min(widths) == 1 and not any(map(any, self.kept[pool])):
            if 0 not in self.closed.get(pool, ()) or len(self.seated) == len(widths):
                yield 1, work, ((0,),) * len(widths)
            return
        kept = [0] * self.had[pool]
        for place, sits in self.sits[pool].items():
            for node in sits:
                kept[node] += loads[place]
        if kept and max(kept) > turn:
            return  # whoever else comes, and to however many nodes
        more = 0
        for nodes in range(least, most + 1):
            found = 0
            ways = Filling(
                self.rooms[pool],
                self.kept[pool],
                widths,
                loads,
                self.sits[pool],
                self.had[pool],
                self.closed.get(pool, frozenset()),
                nodes,
                turn,
            )
            for filling in ways.all():
                yield filling
                found += 1
                if found == (FILLINGS_SEATED if self.seated else FILLINGS):
                    break
            more += found > 0
            if more > EXTRA_NODES or (more and pool == self.planner.dearest):
                return

    def _certify(
        self, counts: tuple[int, ...], turn: float, low: Millis, fillings: dict[PoolName, tuple[tuple[int, ...], ...]]
    ) -> Plan | None:
        """The first order that is certified."""
        clocks = len(self.needs)
        first: dict[PoolName, int] = {}
        nodes: dict[PoolName, int] = {}
        for pool in self.pools:
            first[pool] = clocks
            nodes[pool] = max(self.had[pool], 1 + max((n for seats in fillings[pool] for n in seats), default=-1))
            clocks += nodes[pool]
        mine: list[list[Step]] = [
            [
                (place, tuple(first[pool] + n for pool in pools for n in fillings[pool][place]), took, gap)
                for pools, took, gap in need.phases
            ]
            for place, need in enumerate(self.needs)
        ]
        narrow = all(len(nodes) == 1 for steps in mine for _, nodes, _, _ in steps)
        slim = [[(place, nodes[0], took, gap) for place, nodes, took, gap in steps] for steps in mine if narrow]
        for order in orders(counts, narrow=narrow):
            visits = [(place, phase) for place in order for phase in range(len(mine[place]))]
            if narrow:
                settled = partial(is_feasible_narrow, [step for place in order for step in slim[place]], clocks)
            else:
                settled = partial(is_feasible, [mine[place][phase] for place, phase in visits], clocks)
            period = self._period(settled, counts, low, turn)
            other = [] if narrow or period == low else pipelined(order, self.spans)
            if other:
                settled = partial(is_feasible, [mine[place][phase] for place, phase in other], clocks)
                shorter = self._period(settled, counts, low, turn if period is None else period - 1)
                period, visits = (period, visits) if shorter is None else (shorter, other)
            if period is not None:
                price = sum(nodes[pool] * self.rooms[pool].price for pool in self.pools)
                return Plan(
                    needs=tuple(self.needs),
                    seats=tuple(
                        {pool: fillings[pool][place] for pool in self.pools if fillings[pool][place]}
                        for place in range(len(self.needs))
                    ),
                    nodes=nodes,
                    order=tuple(visits),
                    period_ms=period,
                    price=price,
                    value=price - self._progress(counts, period),
                )
        return None

    def _period(
        self, settled: Callable[[Millis, int], bool], counts: Sequence[int], low: Millis, turn: float
    ) -> Millis | None:
        """The period, to a few parts in a thousand; None: it was not found to be within what the bounds allow."""
        if turn == inf:
            turn = sum(count * need.round_ms for count, need in zip(counts, self.needs, strict=True))
        high = int(turn)
        if not settled(high, TURNS):
            return None
        if settled(low, TURNS):
            return low
        while high - low > 1 + high // self.planner.grain:
            middle = (low + high) // 2
            if settled(middle, TURNS):
                high = middle
            else:
                low = middle
        return high


def _kept(need: JobDemand, pool: PoolName) -> tuple[int, int, int]:
    return next(((ram, left, top) for name, ram, left, top in need.kept if name == pool), (0, 0, 0))
