"""What sharing could cost at the very least: at every arrival and departure the best regrouping of the jobs present.

It is a bound and no policy. Moves are free and take no time, so there is nothing for phases to run through, and no
``phase`` fidelity. A group is as in RollMux: strict round robin, each iteration within its job's SLO, and states that
fit their hosts. It has at most five jobs and uses the training pool whole.

A **plan** of a set of jobs is the cheapest such group. Its training pool is as wide as its widest member (or wider,
which shortens the others' training in proportion). It has the fewest rollout nodes. If rollouts are one node wide, or
their node sets equal or disjoint, a closed form decides. No iteration and no node's load may exceed the least bound.
Else the members' orders are tried until one is certified.

The cheapest **partition** of the jobs into plans is found by dynamic programming over subsets. That goes up to
``EXACT_JOBS`` jobs that could share with each other, directly or by way of others. Above that it is the best that was
found. The newcomer is inserted into the partition of before where it costs least. Then pairs and triples of groups that
changed are regrouped in the best way, until nothing improves or the budget is spent. Such a run says ``exact = False``
and is no optimum. Either way it looks no further than now: what is cheapest for these jobs, whatever comes.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, permutations
from math import ceil, inf
from typing import Final, TypeAlias

from msgspec import Struct

from rollmuxd.core.ids import Millis, PoolName
from rollmuxd.core.spec import StateSpec
from rollmuxd.policies.schedule import Leg, certified, period_ms
from rollmuxd.sim.fluid import busy_node_ms
from rollmuxd.sim.outcome import JobOutcome, Outcome, PoolOutcome
from rollmuxd.sim.policies import MAX_GROUP, Bound
from rollmuxd.sim.workload import Impossible, Pool, SimJob, Workload, by_arrival

#: the pool that a group uses whole
WHOLE: Final = "train"
#: up to so many jobs that could share the partition is exact
EXACT_JOBS: Final = 12
#: pinnings, and orders of them, that are tried for one group at most; beyond, each job has rollout nodes of its own
TRIES: Final = 4_000
#: up to so many jobs pairs and triples of groups are regrouped
UNION_JOBS: Final = 10
#: steps of dynamic programming after one event that are spent on pairs and triples
STEPS: Final = 100_000
#: up to so many groups triples are regrouped as well as pairs
TRIPLES_UP_TO: Final = 24
#: plans and unions that are remembered
REMEMBERED: Final = 200_000

#: prices are exact integers here: millionths of a dollar per hour
MICRO: Final = 1_000_000
#: of partitions that cost the same the one that slows its members least is taken: what a price weighs beside slowdown
PRICE: Final = 1 << 40

#: jobs of a group, ascending
Members: TypeAlias = tuple[int, ...]


class Plan(Struct, frozen=True):
    """How a group is run: its nodes, and what everybody's iteration takes."""

    whole: int
    part: int
    period_ms: Millis
    #: price, then slowdown: what is minimised
    value: int


class Need(Struct, frozen=True):
    """A job, as far as planning looks at it."""

    name: str
    #: nodes of the rollout pool, and of the training pool
    part: int
    whole: int
    #: per phase: on rollout nodes, on training nodes, how long, how long its loading and parking, own gap before
    phases: tuple[tuple[bool, bool, Millis, Millis, Millis], ...]
    solo_ms: Millis
    limit_ms: Millis | None
    part_states: tuple[StateSpec, ...]
    whole_states: tuple[StateSpec, ...]

    def busy(self, whole: int) -> tuple[Millis, ...]:
        """How long each phase keeps its nodes in a shared group whose training pool is so wide; moves included."""
        return tuple(
            (took * self.whole // whole if on_whole and not on_part else took) + moves
            for on_part, on_whole, took, moves, _ in self.phases
        )

    @property
    def simple(self) -> bool:
        """A rollout and then training, each on its own pool: the case that the closed form is for."""
        return [phase[:2] for phase in self.phases] == [(True, False), (False, True)]


class Optimal(Bound):
    """The bound for one workload."""

    name = "optimal"
    summary = "the cheapest grouping at every event, with free moves: exact for few jobs at once, else the best found"

    def run(self, workload: Workload, *, seed: int, accounting: str, max_group: int = MAX_GROUP) -> Outcome:
        """The outcome. Nothing is drawn here.

        Raises:
            Impossible: the workload has an inventory, or jobs that this does not know how to group.
        """
        workload.check()
        if not workload.on_demand:
            raise Impossible("optimal buys what it needs; with a fixed number of nodes there is no such bound")
        search = Search(by_arrival(workload.jobs), workload.pools, max_group)
        return _Course(workload, seed, accounting, search).run()


class Partition(Struct, frozen=True):
    """Groups of jobs, each with its plan."""

    groups: tuple[tuple[Members, Plan], ...]
    #: dollars per hour
    cost: float
    exact: bool


# ---- one group -----------------------------------------------------------------------------------------------------


class Planner:
    """The cheapest way to run a set of jobs as one group."""

    def __init__(self, jobs: Sequence[SimJob], pools: Sequence[Pool]) -> None:
        wanted = {want.pool: None for job in jobs for want in job.spec.wants}
        parts = [name for name in wanted if name != WHOLE]
        if len(parts) > 1:
            raise Impossible(f"optimal groups jobs of one pool beside {WHOLE}, and these want {' and '.join(parts)}")
        self.part_pool: PoolName = parts[0] if parts else ""
        self.pools = {pool.name: pool for pool in pools}
        self.part_price, self.whole_price = self._price(self.part_pool), self._price(WHOLE)
        self.needs = [self._need(job) for job in jobs]
        self.widest = max((need.whole for need in self.needs), default=0)
        #: no group had more ways to be run than were tried
        self.exact = True
        self._known: dict[Members, Plan | None] = {}

    def plan(self, members: Members) -> Plan | None:
        """The cheapest plan; None: they cannot share. Jobs that can share with others can share with fewer of them."""
        if members in self._known:
            return self._known[members]
        if len(self._known) >= REMEMBERED:
            self._known.clear()
        needs = [self.needs[job] for job in members]
        made = self._known[members] = self._alone(needs[0]) if len(needs) == 1 else self._together(needs)
        return made

    def dollars(self, plan: Plan) -> int:
        """Price per hour, in millionths."""
        return plan.whole * self.whole_price + plan.part * self.part_price

    def _price(self, pool: PoolName) -> int:
        known = self.pools.get(pool)
        return 0 if known is None else round(known.gpus_per_node * known.price_per_gpu_hour * MICRO)

    def _need(self, job: SimJob) -> Need:
        spec = job.spec
        if spec.colocate or any(want.gpus or want.named for want in spec.wants):
            raise Impossible(
                f"optimal groups jobs that want whole nodes, and job {job.name} names some, or wants parts"
            )
        wants = {want.pool: want.nodes for want in spec.wants}
        phases = tuple(
            (
                self.part_pool in phase.pools,
                WHOLE in phase.pools,
                phase.planned_ms or 0,
                sum(kept.load_ms + kept.park_ms for kept in spec.states if kept.pool in phase.pools),
                phase.gap_ms,
            )
            for phase in spec.phases
        )
        return Need(
            name=job.name,
            part=wants.get(self.part_pool, 0),
            whole=wants.get(WHOLE, 0),
            phases=phases,
            solo_ms=job.solo_ms,
            limit_ms=None if spec.slo is None else int(spec.slo * job.solo_ms),
            part_states=tuple(kept for kept in spec.states if kept.pool == self.part_pool),
            whole_states=tuple(kept for kept in spec.states if kept.pool == WHOLE),
        )

    def _made(self, needs: Sequence[Need], whole: int, part: int, period: Millis) -> Plan:
        slowdown = sum(1000 * period // (need.solo_ms or 1) for need in needs)
        price = whole * self.whole_price + part * self.part_price
        return Plan(whole, part, period, price * PRICE + slowdown)

    def _alone(self, need: Need) -> Plan:
        """Nothing is moved, and there are no waits."""
        return self._made([need], need.whole, need.part, need.solo_ms)

    def _together(self, needs: Sequence[Need]) -> Plan | None:
        limit = min((need.limit_ms for need in needs if need.limit_ms is not None), default=inf)
        if not self.holds(WHOLE, [need.whole_states for need in needs]):
            return None
        best: Plan | None = None
        narrowest = max(need.whole for need in needs)
        if self.widest > narrowest and _shortest(needs, [need.busy(self.widest) for need in needs]) > limit:
            return None  # on a narrower pool it takes longer still
        fewest = _fewest(needs, limit)
        for whole in range(narrowest, self.widest + 1):
            if best is not None and whole * self.whole_price + fewest * self.part_price >= self.dollars(best):
                break
            made = self._on(needs, whole, limit, fewest)
            if made is not None and (best is None or made.value < best.value):
                best = made
        return best

    def _on(self, needs: Sequence[Need], whole: int, limit: float, fewest: int) -> Plan | None:
        """The fewest rollout nodes beside a training pool of this width; None: it will not do with any number."""
        busy = [need.busy(whole) for need in needs]
        shortest = _shortest(needs, busy)
        if shortest > limit:
            return None
        pinning = _Pinning(self, needs, busy, limit)
        tries = TRIES
        for part in range(fewest, sum(need.part for need in needs) + 1):
            for classes in pinning.all(part):
                for period in self._periods(needs, busy, classes, whole, shortest, limit):
                    if period is not None:
                        return self._made(needs, whole, part, period)
                    tries -= 1
                    if not tries:
                        self.exact = False
                        return self._each_on_its_own(needs, busy, whole, shortest, limit)
        return None

    def _periods(
        self, needs: Sequence[Need], busy: Sequence[tuple[Millis, ...]], classes: Sequence["Class"], whole: int,
        shortest: Millis, limit: float,
    ) -> Iterator[Millis | None]:  # fmt: skip
        """The period of a pinned group whose nodes are not overloaded, order by order; None: it is not certified."""
        if _apart(classes) and all(need.simple for need in needs):
            yield max([shortest, *(each.load for each in classes)])
            return
        for legs in _orders(needs, busy, classes, whole):
            yield period_ms(legs) if limit == inf or certified(legs, int(limit)) else None

    def _each_on_its_own(
        self, needs: Sequence[Need], busy: Sequence[tuple[Millis, ...]], whole: int, shortest: Millis, limit: float
    ) -> Plan | None:
        """The group with rollout nodes for each job alone."""
        pinning = _Pinning(self, needs, busy, limit)
        classes = tuple(Class((job,), need.part, pinning.took[job]) for job, need in enumerate(needs) if need.part)
        periods = self._periods(needs, busy, classes, whole, shortest, limit)
        found = next((period for period in periods if period is not None), None)
        return None if found is None else self._made(needs, whole, sum(need.part for need in needs), found)

    def holds(self, pool: PoolName, kept: Sequence[tuple[StateSpec, ...]]) -> bool:
        """Whether the states of several jobs fit a node: its host's RAM, and each GPU the largest beside the rest."""
        states = [state for each in kept for state in each]
        known = self.pools.get(pool)
        if known is None or not states:
            return True
        if sum(state.ram_mb for state in states) > known.ram_mb:
            return False
        left = sum(state.residual_mb for state in states)
        return not known.gpu_mb or left + max(state.gpu_mb - state.residual_mb for state in states) <= known.gpu_mb


def _shortest(needs: Sequence[Need], busy: Sequence[tuple[Millis, ...]]) -> Millis:
    """No period is shorter, however many rollout nodes there are: the longest member, and the training pool's load."""
    load = longest = 0
    for need, each in zip(needs, busy, strict=True):
        own = 0
        for (_, on_whole, _, _, gap), took in zip(need.phases, each, strict=True):
            own += took + gap
            load += took * on_whole
        longest = max(longest, own)
    return max(longest, load)


def _fewest(needs: Sequence[Need], limit: float) -> int:
    """Fewer rollout nodes will certainly not do: the widest member, and room for all the rollouts together."""
    work = sum(need.part * took for need in needs for on_part, _, took, _, _ in need.phases if on_part)
    return max(*(need.part for need in needs), ceil(work / limit) if limit else 0)


class Class(Struct, frozen=True):
    """Rollout nodes that serve the same jobs, and so are all alike."""

    #: of the group's members, by their place
    jobs: tuple[int, ...]
    nodes: int
    load: Millis


class _Pinning:
    """Ways to put a group's rollouts on nodes: each once, nodes that serve the same jobs being alike."""

    def __init__(
        self, planner: Planner, needs: Sequence[Need], busy: Sequence[tuple[Millis, ...]], limit: float
    ) -> None:
        self.planner, self.needs, self.limit = planner, needs, limit
        self.took = [
            sum(took for phase, took in zip(need.phases, each, strict=True) if phase[0])
            for need, each in zip(needs, busy, strict=True)
        ]
        self.order = sorted(range(len(needs)), key=lambda job: (-self.took[job] * needs[job].part, job))

    def all(self, nodes: int) -> Iterator[tuple[Class, ...]]:
        """With so many nodes at most; those that share whole sets of nodes first."""
        return self._from(0, (), nodes)

    def _from(self, place: int, classes: tuple[Class, ...], free: int) -> Iterator[tuple[Class, ...]]:
        if place == len(self.order):
            yield classes
            return
        job = self.order[place]
        for chosen, new in self._choices(job, classes, 0, self.needs[job].part, free):
            after = [*classes]
            made: list[Class] = []
            for index, count in chosen:
                old = classes[index]
                made.append(Class((*old.jobs, job), count, old.load + self.took[job]))
                after[index] = Class(old.jobs, old.nodes - count, old.load)
            if new:
                made.append(Class((job,), new, self.took[job]))
            yield from self._from(place + 1, (*(each for each in after if each.nodes), *made), free - new)

    def _choices(
        self, job: int, classes: tuple[Class, ...], index: int, count: int, free: int
    ) -> Iterator[tuple[tuple[tuple[int, int], ...], int]]:
        """So many nodes: how many of each class, and how many new ones."""
        if index == len(classes) or not count:
            if count <= free:
                yield (), count
            return
        here = classes[index]
        most = min(count, here.nodes) if self._could(job, here) else 0
        for some in range(most, -1, -1):
            for rest, new in self._choices(job, classes, index + 1, count - some, free):
                yield ((index, some), *rest) if some else rest, new

    def _could(self, job: int, here: Class) -> bool:
        if here.load + self.took[job] > self.limit:
            return False
        return self.planner.holds(self.planner.part_pool, [self.needs[one].part_states for one in (*here.jobs, job)])


def _apart(classes: Sequence[Class]) -> bool:
    """Whether any two jobs have the same rollout nodes or none in common: then a set of nodes is as good as one."""
    seen: dict[int, tuple[int, ...]] = {}
    for each in classes:
        ordered = tuple(sorted(each.jobs))
        if any(seen.setdefault(job, ordered) != ordered for job in each.jobs):
            return False
    return len(set(seen.values())) == len(classes)


def _orders(
    needs: Sequence[Need], busy: Sequence[tuple[Millis, ...]], classes: Sequence[Class], whole: int
) -> Iterator[list[Leg]]:
    """The schedules of a pinned group: every cyclic order of its jobs."""
    part: list[list[str]] = [[] for _ in needs]
    for index, each in enumerate(classes):
        for job in each.jobs:
            part[job] += [f"r{index}.{node}" for node in range(each.nodes)]
    pool = tuple(f"t{node}" for node in range(whole))
    legs = [
        [
            Leg(str(job), (*(part[job] if on_part else ()), *(pool if on_whole else ())), took, gap)
            for (on_part, on_whole, _, _, gap), took in zip(need.phases, busy[job], strict=True)
        ]
        for job, need in enumerate(needs)
    ]
    for rest in permutations(range(1, len(needs))):
        yield [leg for job in (0, *rest) for leg in legs[job]]


# ---- all groups ----------------------------------------------------------------------------------------------------


class Search:
    """The jobs that are present, and how they are grouped."""

    def __init__(self, jobs: Sequence[SimJob], pools: Sequence[Pool], max_group: int = MAX_GROUP) -> None:
        self.planner = Planner(jobs, pools)
        self.max_group = max_group
        #: of each job that is present, the group that it is in
        self.groups: dict[int, Members] = {}
        #: the partition is the best there is
        self.exact = True
        #: of each job that is present, those that it could share with
        self._near: dict[int, dict[int, None]] = {}
        #: jobs whose groups changed since it was last looked for better ones
        self._touched: dict[int, None] = {}
        #: jobs with fewer possible partners than when their partition was last made
        self._bereft: dict[int, None] = {}
        #: the least value of a union of groups, where it was looked for
        self._settled: dict[Members, int] = {}
        #: groups that were looked at in dynamic programming
        self._steps = 0

    def arrive(self, job: int) -> None:
        """One more, alone for now."""
        near = [other for other in self._near if self._could_share(other, job)]
        for other in near:
            self._near[other][job] = None
        self._near[job] = dict.fromkeys(near)
        self._take([(job,)])

    def depart(self, job: int) -> None:
        """One less; the others of its group stay together for now."""
        for other in self._near.pop(job):
            del self._near[other][job]
            self._bereft[other] = None
        self._touched.pop(job, None)
        self._bereft.pop(job, None)
        left = tuple(other for other in self.groups.pop(job) if other != job)
        if left:
            self._take([left])

    def regroup(self) -> None:
        """Bring the partition to the best that is known."""
        self.exact = True
        for jobs in self._components():
            if len(jobs) <= EXACT_JOBS:
                if any(job in self._touched or job in self._bereft for job in jobs):
                    self._take(self.best(jobs))
            else:
                self.exact = False
                self._insert(jobs)
                self._improve(jobs)
        self._touched.clear()
        self._bereft.clear()
        self.exact = self.exact and self.planner.exact

    def partition(self) -> Partition:
        """What the groups are, and what they cost."""
        groups = tuple((group, self._plan(group)) for group in self._all(sorted(self.groups)))
        cost = sum(self.planner.dollars(plan) for _, plan in groups) / MICRO
        return Partition(groups, cost, self.exact)

    # ---- exact -----------------------------------------------------------------------------------------------------

    def best(self, jobs: Members) -> list[Members]:
        """The best partition of some jobs, by dynamic programming over their subsets."""
        columns = self._columns(jobs)
        known: dict[int, tuple[int, int]] = {0: (0, 0)}

        def least(mask: int) -> int:
            """The value of the best partition of a subset; its first job's group is remembered."""
            best_value, best_group = -1, 0
            for group, value in columns[(mask & -mask).bit_length() - 1]:
                if mask & group == group:
                    rest = known.get(mask ^ group)
                    together = value + (least(mask ^ group) if rest is None else rest[0])
                    if together < best_value or best_value < 0:
                        best_value, best_group = together, group
            known[mask] = (best_value, best_group)
            return best_value

        left = (1 << len(jobs)) - 1
        least(left)
        self._steps += sum(len(columns[(mask & -mask).bit_length() - 1]) for mask in known if mask)
        made = []
        while left:
            group = known[left][1]
            made.append(tuple(job for bit, job in enumerate(jobs) if group >> bit & 1))
            left ^= group
        return made

    def _columns(self, jobs: Members) -> list[list[tuple[int, int]]]:
        """By first job: the groups that are any good, as bit masks over the jobs, and their values."""
        columns: list[list[tuple[int, int]]] = []
        for first, job in enumerate(jobs):
            alone = self._plan((job,)).value
            mine = [(1 << first, alone)]
            grow: list[tuple[Members, int, int, int]] = [((job,), 1 << first, first, alone)]
            while grow:  # a subset of jobs that can share can share too: its first jobs lead to every group
                members, mask, last, apart = grow.pop()
                near = self._near[members[-1]]
                for bit in range(last + 1, len(jobs)):
                    other = jobs[bit]
                    if other not in near or other not in self._near[job]:
                        continue
                    together = (*members, other)
                    plan = self.planner.plan(together)
                    if plan is None:
                        continue
                    value = apart + self._plan((other,)).value
                    if plan.value < value:
                        mine.append((mask | 1 << bit, plan.value))
                    if len(together) < self.max_group:
                        grow.append((together, mask | 1 << bit, bit, value))
            columns.append(mine)
        return columns

    def _components(self) -> list[Members]:
        """The jobs that are present, in parts: no job of one part could share with one of another."""
        left = dict.fromkeys(sorted(self._near))
        found = []
        while left:
            edge = [next(iter(left))]
            part = dict.fromkeys(edge)
            while edge:
                for other in self._near[edge.pop()]:
                    if other not in part:
                        part[other] = None
                        edge.append(other)
            for job in part:
                del left[job]
            found.append(tuple(sorted(part)))
        return found

    # ---- the best found ----------------------------------------------------------------------------------------------

    def _insert(self, jobs: Members) -> None:
        """A new job that is alone joins where it costs least."""
        for job in [job for job in self._touched if self.groups.get(job) == (job,) and job in jobs]:
            cheapest_one, saved = None, 0
            for group in self._all(self._near[job]):
                if len(group) < self.max_group:
                    plan = self.planner.plan(tuple(sorted((*group, job))))
                    saves = 0 if plan is None else self._plan(group).value + self._plan((job,)).value - plan.value
                    if saves > saved:
                        cheapest_one, saved = group, saves
            if cheapest_one is not None:
                self._take([tuple(sorted((*cheapest_one, job)))])

    def _improve(self, jobs: Members) -> None:
        """Regroup pairs and triples of groups, of which one at least has changed, until nothing improves."""
        spent_before = self._steps
        improved = True
        while improved:
            improved = False
            for groups in self._unions(jobs):
                value = sum(self._plan(group).value for group in groups)
                union = tuple(sorted(job for group in groups for job in group))
                if self._settled.get(union) == value or value // PRICE <= self._bound(union):
                    continue
                if self._steps - spent_before >= STEPS:
                    return
                better = self.best(union)
                if len(self._settled) >= REMEMBERED:
                    self._settled.clear()
                self._settled[union] = sum(self._plan(group).value for group in better)
                if self._settled[union] < value:
                    self._take(better)
                    improved = True
                    break

    def _unions(self, jobs: Members) -> Iterator[tuple[Members, ...]]:
        """Pairs, then triples, of groups near each other, of which the first has changed."""
        groups = self._all(jobs)
        changed = self._all(job for job in jobs if job in self._touched)
        near = {group: [other for other in groups if other != group and self._touch(group, other)] for group in changed}
        for group in changed:
            for other in near[group]:
                if len(group) + len(other) <= UNION_JOBS:
                    yield group, other
        if len(groups) > TRIPLES_UP_TO:
            return
        for group in changed:
            for one, other in combinations(near[group], 2):
                if len(group) + len(one) + len(other) <= UNION_JOBS:
                    yield group, one, other

    def _bound(self, jobs: Members) -> int:
        """What these jobs cost at least: as many nodes as their work within their bounds fills."""
        needs = [self.planner.needs[job] for job in jobs]
        whole = part = 0.0
        for need in needs:
            if need.limit_ms:
                for on_part, on_whole, took, _, _ in need.phases:
                    part += min(1.0, took / need.limit_ms) * need.part * on_part
                    whole += min(1.0, took / need.limit_ms) * need.whole * on_whole
        groups = -(-len(jobs) // self.max_group) * min(need.whole for need in needs)
        return (
            max(groups, *(need.whole for need in needs), ceil(whole - 0.01)) * self.planner.whole_price
            + max(*(need.part for need in needs), ceil(part - 0.01)) * self.planner.part_price
        )

    # ---- small things ------------------------------------------------------------------------------------------------

    def _could_share(self, one: int, other: int) -> bool:
        return self.max_group > 1 and self.planner.plan((min(one, other), max(one, other))) is not None

    def _touch(self, one: Members, other: Members) -> bool:
        return any(job in self._near[mine] for mine in one for job in other)

    def _plan(self, group: Members) -> Plan:
        plan = self.planner.plan(group)
        assert plan is not None
        return plan

    def _all(self, jobs: Iterable[int]) -> list[Members]:
        """The groups of some jobs, each once."""
        return list(dict.fromkeys(self.groups[job] for job in jobs))

    def _take(self, groups: Sequence[Members]) -> None:
        """Group these jobs so from now on."""
        for group in groups:
            for job in group:
                if self.groups.get(job) != group:
                    self.groups[job] = group
                    self._touched[job] = None


# ---- a run -----------------------------------------------------------------------------------------------------------


class _Job(Struct):
    """One job under way."""

    outcome: JobOutcome
    pace_ms: Millis = 0
    ends_ms: Millis | None = None


class _Course:
    """Arrivals and departures; between them everybody's iteration takes its group's period."""

    def __init__(self, workload: Workload, seed: int, accounting: str, search: Search) -> None:
        self.began = time.perf_counter()
        self.jobs = by_arrival(workload.jobs)
        self.by_work = accounting == "work"
        self.search = search
        self.outcome = Outcome("optimal", workload.name, seed, "cost", accounting, exact=True)
        self.pools = {
            pool.name: PoolOutcome(pool.name, pool.gpu_type, pool.gpus_per_node, pool.price_per_gpu_hour)
            for pool in workload.pools
        }
        self.present: dict[int, _Job] = {}
        self.bought: dict[PoolName, int] = {}
        self.now: Millis = 0

    def run(self) -> Outcome:
        outcome = self.outcome
        coming = 0
        while coming < len(self.jobs) or self.present:
            ends = [job.ends_ms for job in self.present.values() if job.ends_ms is not None]
            times = [*ends, self.jobs[coming].arrives_ms] if coming < len(self.jobs) else ends
            self.flow(min(times))
            for name in [name for name, job in self.present.items() if job.ends_ms == self.now]:
                self.present.pop(name).outcome.ended_ms = self.now
                self.search.depart(name)
                outcome.events += 1
            arrived = 0
            began = time.perf_counter()
            while coming < len(self.jobs) and self.jobs[coming].arrives_ms == self.now:
                self.arrive(coming)
                coming, arrived = coming + 1, arrived + 1
            self.search.regroup()
            self.follow(self.search.partition())
            if arrived:
                outcome.decision_us += [(time.perf_counter() - began) * 1e6 / arrived] * arrived
        outcome.span_ms = self.now - self.jobs[0].arrives_ms if self.jobs else 0
        outcome.pools = list(self.pools.values())
        outcome.wall_s = time.perf_counter() - self.began
        return outcome

    def arrive(self, name: int) -> None:
        job = self.jobs[name]
        made = JobOutcome(job.name, job.kind, job.spec.slo, job.arrives_ms, placed_ms=job.arrives_ms)
        self.outcome.jobs.append(made)
        self.outcome.events += 1
        self.present[name] = _Job(made, ends_ms=None if self.by_work else job.arrives_ms + job.lasts_ms)
        self.search.arrive(name)

    def flow(self, to: Millis) -> None:
        """Count what is done and paid for until then."""
        passed = to - self.now
        for pool, nodes in self.bought.items():
            self.pools[pool].bought_node_ms += nodes * passed
        for name, course in self.present.items():
            share = passed / course.pace_ms
            course.outcome.iterations += share
            course.outcome.elapsed_ms += passed
            course.outcome.solo_ms += share * self.jobs[name].solo_ms
            for pool, node_ms in busy_node_ms(self.jobs[name]).items():
                self.pools[pool].busy_node_ms += share * node_ms
        self.now = to

    def follow(self, partition: Partition) -> None:
        """Pay for these groups, and continue at their paces."""
        outcome, planner = self.outcome, self.search.planner
        outcome.exact = bool(outcome.exact) and partition.exact
        self.bought = {}
        for members, plan in partition.groups:
            for pool, nodes in ((planner.part_pool, plan.part), (WHOLE, plan.whole)):
                if nodes:
                    self.bought[pool] = self.bought.get(pool, 0) + nodes
            for name in members:
                self.pace(name, plan.period_ms)
        for pool, nodes in self.bought.items():
            known = self.pools[pool]
            known.peak_gpus = max(known.peak_gpus, nodes * known.gpus_per_node)

    def pace(self, name: int, pace_ms: Millis) -> None:
        course = self.present[name]
        if course.pace_ms == pace_ms:
            return
        course.pace_ms = max(1, pace_ms)
        if self.by_work:
            left = max(0.0, self.jobs[name].work - course.outcome.iterations)
            course.ends_ms = self.now + ceil(left * pace_ms)
