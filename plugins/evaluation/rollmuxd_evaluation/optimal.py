"""What sharing could cost at the very least: at every arrival and departure the best regrouping of the jobs present.

It is a bound and no policy. Moves are free and take no time, so there is nothing for phases to run through, and no
``phase`` fidelity. A group is as in RollMux: strict round robin, each iteration within its job's SLO, and states that
fit their hosts. It has at most five jobs and uses the training pool whole.

A **plan** of a set of jobs is the cheapest such group. Its training pool is as wide as its widest member (or wider,
which shortens the others' training in proportion). It has the fewest rollout nodes. Jobs share a set of rollout nodes
whole, so a closed form decides: no iteration and no node's load may exceed the least bound. For jobs one node wide that
is exact. Wider ones could also share parts of their nodes, so theirs is the best that was found.

The cheapest **partition** of the jobs into plans is found by dynamic programming over subsets. That goes up to
``EXACT_JOBS`` jobs that could share with each other, directly or by way of others. Above that it is the best that was
found. The newcomer is inserted into the partition of before where it costs least. Then pairs and triples of groups that
changed are regrouped in the best way, until nothing improves or the budget is spent. Such a run says ``exact = False``
and is no optimum. Either way it looks no further than now: what is cheapest for these jobs, whatever comes.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import combinations
from math import ceil, inf
from typing import Final, NamedTuple, TypeAlias

from msgspec import Struct

from rollmuxd.core.feasible import needed_mb
from rollmuxd.core.ids import Millis, PoolName
from rollmuxd.core.spec import StateSpec
from rollmuxd.sim.fluid import Course, busy_node_ms
from rollmuxd.sim.outcome import JobOutcome, Outcome, PoolOutcome
from rollmuxd.sim.policies import MAX_GROUP, Bound
from rollmuxd.sim.workload import Impossible, Pool, SimJob, Workload, by_arrival

#: the pool that a group uses whole
WHOLE: Final = "train"
#: up to so many jobs that could share the partition is exact
EXACT_JOBS: Final = 12
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
    #: what rollout and training take, and what loading and parking for them do in a shared group
    rollout_ms: Millis
    train_ms: Millis
    rollout_moves_ms: Millis
    train_moves_ms: Millis
    gaps_ms: Millis
    solo_ms: Millis
    limit_ms: Millis | None
    part_states: tuple[StateSpec, ...]
    whole_states: tuple[StateSpec, ...]

    @property
    def rolls_out_ms(self) -> Millis:
        """How long it keeps its rollout nodes busy in a shared group."""
        return self.rollout_ms + self.rollout_moves_ms

    def trains_ms(self, whole: int) -> Millis:
        """How long it keeps a shared group's training pool busy that is so wide."""
        return self.train_ms * self.whole // whole + self.train_moves_ms


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
        self.exact = all(need.part == 1 for need in self.needs)
        self.plan = lru_cache(REMEMBERED)(self._plan)

    def _plan(self, members: Members) -> Plan | None:
        """The cheapest plan; None: they cannot share. Jobs that can share with others can share with fewer of them."""
        needs = [self.needs[job] for job in members]
        return self._alone(needs[0]) if len(needs) == 1 else self._together(needs)

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
        if [phase.pools for phase in spec.phases] != [(self.part_pool,), (WHOLE,)]:
            raise Impossible(
                f"optimal groups jobs that roll out on one pool and then train on pool {WHOLE}, and job {job.name} has "
                f"the phases {', '.join(phase.name for phase in spec.phases)}"
            )
        wants = {want.pool: want.nodes for want in spec.wants}
        part_states, whole_states = (
            tuple(kept for kept in spec.states if kept.pool == pool) for pool in (self.part_pool, WHOLE)
        )
        return Need(
            name=job.name,
            part=wants[self.part_pool],
            whole=wants[WHOLE],
            rollout_ms=job.planned[0],
            train_ms=job.planned[1],
            rollout_moves_ms=sum(kept.load_ms + kept.park_ms for kept in part_states),
            train_moves_ms=sum(kept.load_ms + kept.park_ms for kept in whole_states),
            gaps_ms=sum(phase.gap_ms for phase in spec.phases),
            solo_ms=job.solo_ms,
            limit_ms=None if spec.slo is None else int(spec.slo * job.solo_ms),
            part_states=part_states,
            whole_states=whole_states,
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
        if self.widest > narrowest and _shortest(needs, self.widest) > limit:
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
        shortest = _shortest(needs, whole)
        if shortest > limit:
            return None
        ordered = sorted(needs, key=lambda need: -need.rolls_out_ms * need.part)
        for part in range(fewest, sum(need.part for need in needs) + 1):
            busiest = self._busiest(ordered, limit, part)
            if busiest is not None:
                return self._made(needs, whole, part, max(shortest, busiest))
        return None

    def _busiest(
        self, needs: Sequence[Need], limit: float, free: int, shared: tuple["Shared", ...] = ()
    ) -> Millis | None:
        """The load of the busiest rollout node if the jobs are put on nodes of others, or on free ones; None: no way.

        The first way is taken in which no load exceeds the limit.
        """
        if not needs:
            return max(nodes.load for nodes in shared)
        need, *others = needs
        for at, nodes in enumerate(shared):
            wider, load = max(0, need.part - nodes.wide), nodes.load + need.rolls_out_ms
            jobs = (*nodes.jobs, need)
            if load > limit or wider > free or not self.holds(self.part_pool, [one.part_states for one in jobs]):
                continue
            rest = (*shared[:at], *shared[at + 1 :], Shared(jobs, nodes.wide + wider, load))
            found = self._busiest(others, limit, free - wider, rest)
            if found is not None:
                return found
        if need.part > free:
            return None
        return self._busiest(others, limit, free - need.part, (*shared, Shared((need,), need.part, need.rolls_out_ms)))

    def holds(self, pool: PoolName, kept: Sequence[tuple[StateSpec, ...]]) -> bool:
        """Whether the states of several jobs fit a node: its host's RAM, and each GPU the largest beside the rest."""
        states = [state for each in kept for state in each]
        known = self.pools.get(pool)
        if known is None or not states:
            return True
        if sum(state.ram_mb for state in states) > known.ram_mb:
            return False
        return not known.gpu_mb or needed_mb(states, ()) <= known.gpu_mb


def _shortest(needs: Sequence[Need], whole: int) -> Millis:
    """No period is shorter, however many rollout nodes there are: the longest member, and the training pool's load."""
    trains = [need.trains_ms(whole) for need in needs]
    longest = max(need.rolls_out_ms + took + need.gaps_ms for need, took in zip(needs, trains, strict=True))
    return max(longest, sum(trains))


def _fewest(needs: Sequence[Need], limit: float) -> int:
    """Fewer rollout nodes will certainly not do: the widest member, and room for all the rollouts together."""
    work = sum(need.part * need.rolls_out_ms for need in needs)
    return max(*(need.part for need in needs), ceil(work / limit) if limit else 0)


class Shared(NamedTuple):
    """Rollout nodes that the same jobs use."""

    jobs: tuple[Need, ...]
    wide: int
    load: Millis


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
                part += min(1.0, need.rollout_ms / need.limit_ms) * need.part
                whole += min(1.0, need.train_ms / need.limit_ms) * need.whole
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
        self.present: dict[int, Course] = {}
        #: when jobs end, as far as is known
        self.ends: dict[int, Millis] = {}
        self.bought: dict[PoolName, int] = {}
        self.now: Millis = 0

    def run(self) -> Outcome:
        outcome = self.outcome
        coming = 0
        while coming < len(self.jobs) or self.present:
            arrives = [job.arrives_ms for job in self.jobs[coming : coming + 1]]
            self.flow(min([*self.ends.values(), *arrives]))
            for name in [name for name in self.present if self.ends.get(name) == self.now]:
                self.present.pop(name).outcome.ended_ms = self.ends.pop(name)
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
        made = JobOutcome(job.name, job.spec.slo, job.arrives_ms, placed_ms=job.arrives_ms)
        self.outcome.jobs.append(made)
        self.outcome.events += 1
        self.present[name] = Course(job, made, job.solo_ms, busy_node_ms(job), since=self.now)
        if not self.by_work:
            self.ends[name] = job.arrives_ms + job.lasts_ms
        self.search.arrive(name)

    def flow(self, to: Millis) -> None:
        """Count what is done and paid for until then."""
        passed = to - self.now
        for pool, nodes in self.bought.items():
            self.pools[pool].bought_node_ms += nodes * passed
        for course in self.present.values():
            course.flow(to, self.pools)
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
            left = max(0.0, course.job.work - course.outcome.iterations)
            self.ends[name] = self.now + ceil(left * pace_ms)
