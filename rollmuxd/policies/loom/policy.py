"""Loom, past the paper: wheels in which short jobs go round more often, and jobs that move where that pays.

On arrival a job joins the group whose price grows least, on any of its nodes and on new ones; the members stay where
they are. The group's wheel is planned again and certified (:mod:`~rollmuxd.policies.loom.plan`). Where no group can
take the job, it has nodes of its own. Between arrivals and departures pairs and triples of groups are looked at for a
better partition of their jobs (:mod:`~rollmuxd.policies.loom.regroup`): of jobs that may be moved, whose credit affords
the whole of what moving takes, and only where it pays for itself. On a departure the old wheel goes on without the
job's visits, which is certified whatever else there is.

What is dear is said by the **objective**:

- ``cost``: dollars per hour, whoever is slowed within his bound.
- ``work``: dollars for the work that there is: a slowed job stays, and pays, longer, so progress has a price too.
- ``throughput`` (the default): for nodes that one owns. A pool's nodes cost nothing while enough of them idle, and
  their full price when they are scarce; what is left to be won is progress.

What a plan cannot say (times not known yet, nodes by name or by GPUs, pools that share nodes) goes by the paper's
rule, of which this is a kind. With ``throughput`` such a job goes where it disturbs least instead: free nodes first,
then the nodes that have the fewest jobs.
"""

from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from itertools import combinations
from math import inf
from typing import Final, Literal, TypeAlias, get_args

from msgspec import Struct, field
from msgspec.structs import replace

from rollmuxd.core.decision import Reason
from rollmuxd.core.estimates import credit_ms, solo_ms
from rollmuxd.core.facts import PlannedTurn
from rollmuxd.core.ids import GroupId, JobId, Millis, NodeId, PoolName
from rollmuxd.core.model import Dispatch, Group, Job, JobStatus, NodeStatus
from rollmuxd.core.policy import Binding, Leg, Move, Placed, Replan
from rollmuxd.core.spec import Movable
from rollmuxd.core.state import State
from rollmuxd.core.steps.guard import JUDGED_AFTER, RESERVE, mean_solo_ms
from rollmuxd.policies.loom.model import JobDemand, Pins, Plan, PoolCapacity
from rollmuxd.policies.loom.plan import MOST_ROUNDS, Planner
from rollmuxd.policies.loom.regroup import GroupOption, Limits, RegroupPlan, Search, Step, horizon_hours
from rollmuxd.policies.loom.snapshot import (
    GroupSnapshot,
    Inventory,
    demand_of,
    free_by_pool,
    pools_in_use,
    price_of,
    usable,
    used_by,
    value_of,
)
from rollmuxd.policies.rollmux import (
    TIGHT_SLO,
    Candidate,
    Miss,
    RollMux,
    Shape,
    enough,
    free_nodes,
    may_share,
    price_of_pins,
    subsets,
)
from rollmuxd.policies.schedule import Bound, binding, first_turn_feasible

#: some groups as they are: whether looking at them together can find what it did not find before
Key: TypeAlias = tuple[object, ...]
Objective: TypeAlias = Literal["cost", "work", "throughput"]

#: groups that are planned with a newcomer, at most
GROUPS_TRIED: Final = 24
#: objective: what progress is worth, in units of what the job costs alone; for the work that there is a tenth costs
#: least (decision 0016), and on nodes that one owns there is little else to be won
MU: Final[Mapping[str, float]] = {"cost": 0.0, "work": 0.1, "throughput": 0.7}
#: by the share of a pool that is free (at least so much): what of its price counts, where nodes are owned
SCARCITY: Final = ((0.25, 0.05), (0.1, 0.5), (0.0, 1.0))
#: up to so many jobs in all groups together triples are looked at as well as pairs
TRIPLES_UP_TO: Final = 40
#: unions that are looked at in one search, at most; those with most to win first
UNIONS: Final = 400
#: up to so many groups all pairs are looked at; beyond, so many that have changed, each beside all others
GROUPS_MATCHED, GROUPS_CHANGED = 40, 4
#: beyond so many groups a newcomer's search is bounded, as nobody is heard meanwhile: rates and candidates that are
#: tried once it has found something, and until it does (`make bench BENCH=core`: among 755 groups p99 12 ms, else 73)
MANY_GROUPS: Final = 200
TRIED_ONCE_FOUND, TRIED_AT_MOST = 150, 450
#: moves that are refused, after which a search ends
REFUSED: Final = 8
#: groups, and unions of them, that are looked at between two yields; and unions that are remembered
GROUPS_A_STEP, UNIONS_A_STEP, REMEMBERED = 10, 200, 50_000
#: jobs, each as often as its times or bound have changed, after which a planner forgets them all
NEEDS_REMEMBERED: Final = 20_000
#: an unsuccessful look at a union is repeated when the time over which it would have to pay has grown so much
AGAIN: Final = 1.25
#: what a group has of a pool of which it has nothing
NOTHING: Final = (0, 0.0)
HOUR_MS: Final = 3_600_000


class Ahead(Struct):
    """What is left of a regrouping that is under way."""

    scheme: RegroupPlan
    #: the jobs that were there when it was found
    present: tuple[JobId, ...]
    steps: list[tuple[JobId, Step]]
    #: groups that its steps have opened: by the name that they have in the steps, a job that went there
    opened: dict[GroupId, JobId] = field(default_factory=dict)


class Loom(RollMux):
    """The policy.

    Args:
        objective: what is dear; see the module's head.
        rounds: iterations of one job in a turn, at most; 1: strict round robin.
        regroup: how many groups are looked at together: 3, 2, or 1: nobody is moved.
        warm_s: what moving a job takes that loads its state elsewhere.
        relaunch_s: what moving a job takes that is started anew.
        max_group: jobs in a group at most.
        uncertain: nobody knows how long phases take: groups go by credit, with the guard.
    """

    name = "loom"

    def __init__(
        self,
        *,
        objective: Objective = "throughput",
        rounds: int = MOST_ROUNDS,
        regroup: int = 3,
        warm_s: float = 30,
        relaunch_s: float = 300,
        max_group: int = 5,
        uncertain: bool = False,
    ) -> None:
        super().__init__(prune=False, max_group=max_group, whole_pools=(), uncertain=uncertain)
        if objective not in get_args(Objective):
            raise ValueError(f"objective is {objective!r}, and it is one of {', '.join(get_args(Objective))}")
        if not 1 <= rounds <= MOST_ROUNDS:
            raise ValueError(f"rounds is {rounds}, and it is 1 to {MOST_ROUNDS}")
        if regroup not in (1, 2, 3):
            raise ValueError(f"regroup is {regroup}, and it is 1 (nobody is moved), 2 (pairs) or 3 (triples as well)")
        if min(warm_s, relaunch_s) < 0:
            raise ValueError(f"moving takes {warm_s} s and {relaunch_s} s, and neither can be below 0")
        self.objective, self.rounds, self.together = objective, rounds, regroup
        self._takes_ms = {Movable.WARM: round(warm_s * 1000), Movable.RELAUNCH: round(relaunch_s * 1000)}
        self._planners: dict[tuple[PoolName, tuple[tuple[PoolName, float], ...]], Planner] = {}
        self._inventory: Inventory | None = None
        self._sittings: dict[GroupId, GroupSnapshot | None] = {}
        #: unions, as they were when nothing was found there, and the hours over which it did not pay
        self._settled: dict[Key, float] = {}
        #: by group: the version that was looked at last; who was looked at longest ago comes first
        self._seen: dict[GroupId, int] = {}
        self._ahead: Ahead | None = None

    # ---- arrivals ----------------------------------------------------------------------------------------------------

    def place(self, state: State, job: Job) -> Placed | None:
        """Where the group's value grows by least; a tie keeps an existing group, the fullest."""
        need = demand_of(job, promised=job.spec.slo is not None)
        if need is None:
            return self._unplanned(state, job)
        planner, free = self._planner(state), free_by_pool(state)
        alone = self._isolated(state, job)
        if alone is not None and job.spec.slo is None:
            return self._placed(state, Shape(job, ()), alone)
        joined = self._join(state, planner, free, job, need, waits=alone is None)
        if alone is not None and (joined is None or planner.alone(need).value < joined[0]):
            return self._placed(state, Shape(job, ()), alone)
        return self._unplanned(state, job) if joined is None else joined[1]

    def _unplanned(self, state: State, job: Job) -> Placed | None:
        """The place of a job that no plan can say: by the paper's rule, or where it disturbs least."""
        if self.objective != "throughput":
            return super().place(state, job)
        shape = Shape(job, self.whole_pools)
        best = self._isolated(state, job) or self._first(state, shape, iter(self._least_crowded(state, shape)))
        return None if best is None else self._placed(state, shape, best)

    def _least_crowded(self, state: State, shape: Shape) -> list[Candidate]:
        """Places in groups: those where the most crowded node has the fewest jobs first, then the smallest groups."""
        groups = [it for it in state.groups.values() if self._worth_trying(state, shape, it)]
        found: list[tuple[int, int, int, Candidate]] = []
        for group in groups:
            if not may_share(state, shape.job, group):
                continue
            jobs = [state.jobs[name] for name in (*group.jobs, *group.coming)]
            there = Counter(node for it in jobs for pins in state.pins_in(it, group.id).values() for node in {*pins})
            for place in (*self._beside(state, shape.job, group), *self._packings(state, shape.job, group)):
                crowd = max(there[node] for nodes in place.pins.values() for node in nodes)
                found.append((crowd, len(jobs), len(found), place))
        return [place for *_, place in sorted(found)]

    def _beside(self, state: State, job: Job, group: Group) -> Iterator[Candidate]:
        """Free nodes of the pools that have enough of them, beside nodes of the group's in the others."""
        wants = job.spec.wants
        if job.spec.colocate or any(want.named for want in wants) or not self.can_afford_newcomer(state, group.id):
            return
        bought = [want for want in wants if free_nodes(state, job, [want])]
        pins = free_nodes(state, job, bought) if bought else None
        if pins:
            used_for = self._summary(state, group).used_for
            for rest in subsets(state, [want for want in wants if want not in bought], used_for, set()):
                yield Candidate(group, {**rest, **pins}, "scaling", price_of_pins(state, pins))

    def _join(
        self,
        state: State,
        planner: Planner,
        free: Mapping[PoolName, Sequence[NodeId]],
        job: Job,
        need: JobDemand,
        *,
        waits: bool,
    ) -> tuple[float, Placed] | None:
        """The group that grows dearer by least. ``waits``: where none is found there is nothing else for the job."""
        best: tuple[float, Placed] | None = None
        spare = _with_a_turn_to_spare(job, need)
        # by credit nobody's first turn is played; else it is, and may be borne as the bound is, with nothing to spare
        tried = (spare,) if self.dispatch is Dispatch.CREDIT else tuple(dict.fromkeys((need, spare)))
        began = planner.tried
        for group, sitting in self._likely(state, planner, job, need)[:GROUPS_TRIED]:
            most = TRIED_ONCE_FOUND if best is not None else inf if waits else TRIED_AT_MOST
            if len(state.groups) > MANY_GROUPS and planner.tried - began > most:
                break
            below = inf if best is None else best[0] - 1e-9
            best = self._plan_with(state, planner, free, job, tried, group, sitting, below) or best
            if best is not None and best[0] <= 1e-3 and planner.mu < 0.01:
                break  # nothing is cheaper than nothing
        return best

    def _likely(self, state: State, planner: Planner, job: Job, need: JobDemand) -> list[tuple[Group, GroupSnapshot]]:
        """Groups that could take the job, the fullest first: what they have left is wasted soonest."""
        found: list[tuple[float, float, int, Group, GroupSnapshot]] = []
        mine, dearest = used_by([need]), planner.dearest
        adds, widest = mine.get(dearest, 0.0), dict(need.widths).get(dearest, 0)
        pools = [(pool, room.worth, mine.get(pool, 0.0)) for pool, room in planner.rooms.items()]
        kind = (job.spec.side, None if job.spec.slo is None else job.spec.slo < TIGHT_SLO)
        for group in state.groups.values():
            if len(group.jobs) + len(group.coming) >= self.max_group or group.dispatch is not self.dispatch:
                continue
            sitting = self._snapshot(state, group)
            if sitting is None:
                continue
            has, uses = sitting.room.get(dearest, NOTHING)
            if uses + adds > max(has, widest) + 1e-9:
                continue
            takes = sitting.takes.get(kind)
            if takes is None:
                takes = sitting.takes[kind] = may_share(state, job, group)
            if not takes or not self.can_afford_newcomer(state, group.id):
                continue
            over = left = 0.0
            for pool, price, more in pools:
                has, uses = sitting.room.get(pool, NOTHING)
                uses += more
                if uses > has:
                    over += (uses - has) * price
                else:
                    left += (has - uses) * price
            found.append((over, left, len(found), group, sitting))
        found.sort()
        return [(group, sitting) for _, _, _, group, sitting in found]

    def _plan_with(
        self,
        state: State,
        planner: Planner,
        free: Mapping[PoolName, Sequence[NodeId]],
        job: Job,
        tried: Sequence[JobDemand],
        group: Group,
        sitting: GroupSnapshot,
        below: float,
    ) -> tuple[float, Placed] | None:
        """The group with the job: by how much its value grows, if by less than that, and where the job would go."""
        if not planner.may_fit(sitting.needs, sitting.seats, tried[0]):
            return None  # most are seen here, at a twentieth of what looking for a plan takes
        closed = {
            pool: frozenset(n for n, name in enumerate(names) if not self._takes(state, job, pool, name))
            for pool, names in sitting.names.items()
        }
        most, owner = self.max_nodes.get(job.owner), state.owners.get(job.owner)
        left = len(state.nodes) if not most else max(0, most - len(owner.nodes if owner is not None else ()))
        rooms = {
            pool: PoolCapacity(room.price, room.worth, room.ram_mb, room.gpu_mb, min(left, len(free.get(pool, ()))))
            for pool, room in planner.rooms.items()
        }
        was = value_of(planner, sitting)
        for joins in tried:
            plan = planner.fit(
                (*sitting.needs, joins), dict(enumerate(sitting.seats)), rooms, closed, was + below + 1e-9
            )
            pins = None if plan is None else _named(plan.seats[-1], sitting.names, free)
            if plan is None or pins is None:
                continue  # by a lower bound he goes round more often: worth more than what was found so far, maybe
            grows = plan.value - was
            if grows >= below or self._short(state, job, Candidate(group, pins, "", 0.0)):
                continue
            order = self._feasible_order(state, group, sitting, job, tried[0], plan, pins)
            if order is not None:
                bought = [n for pool, some in pins.items() for n in some if n not in sitting.names.get(pool, ())]
                members = (*sitting.jobs, job.id)
                return grows, self._answer(state, job, group, members, replace(plan, order=order), pins, bought)
        return None

    def _feasible_order(
        self, state: State, group: Group, sitting: GroupSnapshot, job: Job, need: JobDemand, plan: Plan, pins: Pins
    ) -> tuple[tuple[int, int], ...] | None:
        """The plan's order, as it is or beginning with the job: that in which everybody bears the first turns.

        By what he has in hand, and at once; who is not judged yet, by the time that he is.
        """
        if self.dispatch is Dispatch.CREDIT:
            return plan.order  # nobody goes by it
        legs = [
            [
                Leg(it.job, tuple(n for pool in pools for n in mine[pool]), took, gap, phase)
                for phase, (pools, took, gap) in enumerate(it.phases)
            ]
            for it, mine in zip(plan.needs, (*sitting.pins, pins), strict=True)
        ]
        bounds = {}
        for known, it in zip((*map(state.jobs.__getitem__, sitting.jobs), job), (*sitting.needs, need), strict=True):
            if it.limit_ms is not None:
                credit, left = credit_ms(known) or 0, JUDGED_AFTER - known.progress.finished
                bounds[it.job] = Bound(it.limit_ms, credit if left > 0 else max(0, credit), max(1, left))
        each = {it.job: len(it.phases) for it in plan.needs}
        first = plan.order.index((len(plan.needs) - 1, 0))
        before = [leg for leg in self._summary(state, group).legs if leg.job in each]
        for order in dict.fromkeys((plan.order, plan.order[first:] + plan.order[:first])):
            if first_turn_feasible(before, [legs[place][phase] for place, phase in order], each, bounds):
                return order
        return None

    def _takes(self, state: State, job: Job, pool: PoolName, name: NodeId) -> bool:
        """Whether the job can be put on a node."""
        node = state.nodes[name]
        if node.status is not NodeStatus.UP or node.drain or pool not in node.pools:
            return False
        return self._short(state, job, Candidate(None, {pool: (name,)}, "", 0.0)) is None

    def _answer(
        self,
        state: State,
        job: Job,
        group: Group | None,
        members: Sequence[JobId],
        plan: Plan,
        pins: dict[PoolName, tuple[NodeId, ...]],
        bought: Sequence[NodeId],
    ) -> Placed:
        """A plan's last job, as a placement; ``members`` are the plan's jobs."""
        once = () if group is None else tuple(PlannedTurn(v.job, v.phase, True) for v in group.schedule if v.once)
        phases = [(job if name == job.id else state.jobs[name]).spec.phases for name in members]
        visits = (PlannedTurn(members[at], phases[at][phase].name) for at, phase in plan.order)
        return Placed(
            group=None if group is None else group.id,
            pins={want.pool: pins[want.pool] for want in job.spec.wants},
            schedule=(*once, *visits),
            admission="isolated" if group is None else "scaling" if bought else "packing",
            status=JobStatus.ADMITTED,
            promised=plan.needs[-1].limit_ms is not None,
            period_ms=plan.period_ms,
            cost_per_hour=sum(price_of(state.nodes[name]) for name in dict.fromkeys(bought)),
            dispatch=self.dispatch,
        )

    def _packings(self, state: State, job: Job, group: Group) -> Iterator[Candidate]:
        """Who has all its pools on the same nodes, which no plan can say, shares as few of the group's as will do."""
        wants = job.spec.wants
        if not job.spec.colocate or any(want.named for want in wants):
            yield from super()._packings(state, job, group)
            return
        there = [name for name in group.nodes if {want.pool for want in wants} <= {*state.nodes[name].pools}]
        for count in range(1, len(there) + 1):
            some = [nodes for nodes in combinations(there, count) if all(enough(state, w, nodes) for w in wants)]
            for nodes in some:
                yield Candidate(group, {want.pool: nodes for want in wants}, "packing", 0.0)
            if some:
                return

    # ---- with other times ----------------------------------------------------------------------------------------

    def replan(self, state: State, group: GroupId) -> Replan:
        """The group as it stands where that is certified, else the wheel of least value on the nodes that it has."""
        stands, known = super().replan(state, group), state.groups[group]
        if not stands.at_risk or known.coming:
            return stands
        sitting = self._look(state, known)
        if sitting is None:
            return stands
        planner = self._planner(state)
        pins = {planner.number(need): dict(mine) for need, mine in zip(sitting.needs, sitting.pins, strict=True)}
        plan = planner.fit_named(pins)
        if plan is None:
            return stands
        phases = [state.jobs[name].spec.phases for name in sitting.jobs]
        wheel = tuple(PlannedTurn(sitting.jobs[at], phases[at][phase].name) for at, phase in plan.order)
        return Replan(plan.period_ms, schedule=wheel)

    def binding(self, state: State, group: GroupId) -> Binding | None:
        """The cycle of the event graph that is the group's period."""
        summary = self._summary(state, state.groups[group], fresh=True)
        return None if summary.unknown or self.dispatch is not Dispatch.SCHEDULE else binding(summary.legs)

    # ---- what planning looks at --------------------------------------------------------------------------------------

    def _snapshot(self, state: State, group: Group) -> GroupSnapshot | None:
        """The group for planning; None: a plan cannot say it."""
        known = self._sittings.get(group.id)
        if known is not None and known.version == group.version:
            return known
        made = self._sittings[group.id] = self._look(state, group)
        if len(self._sittings) > 2 * len(state.groups) + 16:  # groups that are gone
            self._sittings = {name: kept for name, kept in self._sittings.items() if name in state.groups}
        return made

    def _look(self, state: State, group: Group) -> GroupSnapshot | None:
        jobs = tuple(dict.fromkeys(visit.job for visit in group.schedule if not visit.once))
        needs, pins = [], []
        for name in jobs:
            job = state.jobs[name]
            need = demand_of(job, promised=job.promised)
            if need is None:
                return None
            needs.append(need)
            pins.append(state.pins_in(job, group.id))
        names: dict[PoolName, list[NodeId]] = {}
        for each in pins:
            for pool, nodes in each.items():
                known = names.setdefault(pool, [])
                known += [node for node in nodes if node not in known]
        if not jobs or len({n for some in names.values() for n in some}) < sum(len(some) for some in names.values()):
            return None  # a node that serves two pools is two nodes to a plan
        summary = self._summary(state, group)
        if any(name not in summary.rates for name in jobs):
            return None  # it was measured since, and is not judged yet
        used = used_by(needs)
        return GroupSnapshot(
            version=group.version,
            jobs=jobs,
            needs=tuple(needs),
            pins=tuple(pins),
            names={pool: tuple(some) for pool, some in names.items()},
            seats=tuple(
                {pool: tuple(names[pool].index(node) for node in nodes) for pool, nodes in each.items()}
                for each in pins
            ),
            rates=tuple(summary.rates[name] for name in jobs),
            period_ms=needs[0].solo_ms if len(jobs) == 1 else self._period_ms(summary.legs),
            room={pool: (len(some), used.get(pool, 0.0)) for pool, some in names.items()},
        )

    def _planner(self, state: State, *, scarce: bool | None = None) -> Planner:
        """A planner for the pools as they are: as scarce as they look, or as is said, where nodes are owned."""
        self._inventory = inventory = Inventory.of(state, self._inventory)
        owned = self.objective == "throughput"
        free = free_by_pool(state) if owned and scarce is None else {}
        rooms = {}
        for name, pool in inventory.pools.items():
            counts = 1.0
            if owned:
                left = 0 if scarce else pool.nodes if scarce is False else len(free.get(name, ()))
                counts = next(counts for share, counts in SCARCITY if left >= share * pool.nodes)
            rooms[name] = PoolCapacity(pool.worth * counts, pool.worth, pool.ram_mb, pool.gpu_mb)
        # of pools that cost the same the one that has fewer nodes
        dearest = max(rooms, key=lambda pool: (rooms[pool].worth, -inventory.pools[pool].nodes, pool), default="")
        key = (dearest, tuple((pool, room.price) for pool, room in rooms.items()))
        known = self._planners.get(key)
        if known is None or known.rooms != rooms or len(known.needs) > NEEDS_REMEMBERED:
            known = self._planners[key] = Planner(rooms, mu=MU[self.objective], rounds=self.rounds, dearest=dearest)
        return known

    def _why_not_group(self, state: State, shape: Shape, group: Group) -> Miss:
        """As for the paper's rule, unless the job's own bound would do: a member's credit is awaited then."""
        miss = super()._why_not_group(state, shape, group)
        member = self._short_of_credit(state, group)
        if member is None or miss.own_slo or miss.reason.code in {"group_full", "shares_not"}:
            return miss
        has, wants = (credit_ms(member) or 0) / 1000, self._reserve_ms(member) / 1000
        text = (
            f"group {group.id} is joined on further nodes when job {member.spec.name} has {wants:.3g} s of credit, "
            f"and it has {has:.3g} s: what comes unforeseen is paid for with it"
        )
        data = {"group": group.id, "job": member.id, "credit_s": has, "wanted_s": wants}
        return replace(miss, reason=Reason("member_credit", text, data))

    # ---- regrouping --------------------------------------------------------------------------------------------------

    def regroup(self, state: State, now: Millis) -> Iterator[Move | None]:
        """The next move of a regrouping that is under way, else of the best one that is found."""
        if self.together == 1:
            return
        move = self._go_on(state)
        if move is not None:
            yield move
            self._ahead = None  # asked on: it is not to be
            return
        free = free_by_pool(state)
        if self.objective == "throughput" and not state.waiting and len(free) < len({*pools_in_use(state)}):
            return  # nobody needs what could be freed, and there is nowhere to spread
        planner = self._planner(state, scarce=bool(state.waiting))
        crews, costs, twice, rigid = yield from self._options(state, planner)
        if not costs:
            return
        limits = self._limits(state, planner, [sitting for _, sitting in crews])
        search = Search(planner, costs, free, twice=twice, rigid=rigid, max_group=self.max_group, limits=limits)
        ages = {
            planner.number(need): (now - state.jobs[name].registered_at) / HOUR_MS
            for crew, sitting in crews
            for name, need in zip(sitting.jobs, sitting.needs, strict=True)
        }
        numbers = {planner.number(need): name for _, it in crews for name, need in zip(it.jobs, it.needs, strict=True)}
        refused: set[Key] = set()
        while len(refused) < REFUSED:
            best = yield from self._best(search, [crew for crew, _ in crews], ages, refused)
            if best is None:
                return
            scheme, key = best
            self._ahead = Ahead(scheme, _present(state), [(numbers[step.job], step) for step in scheme.steps])
            move = self._go_on(state)
            if move is None:
                return
            yield move
            self._ahead = None
            refused.add(key)  # who asks on has not made the move: it may not be, and another one may

    def _best(
        self, search: Search, crews: Sequence[GroupOption], ages: Mapping[int, float], refused: set[Key]
    ) -> Generator[None, None, tuple[RegroupPlan, Key] | None]:
        """The regrouping of a pair that pays most, and has not been refused; where none does, of a triple."""
        for size in range(2, self.together + 1):
            if size == 3 and sum(len(crew.seats) for crew in crews) > TRIPLES_UP_TO:
                break
            best: tuple[RegroupPlan, Key] | None = None
            unions = yield from self._unions(search, crews, ages, size)
            for hours, union, key in unions:
                if key in refused:
                    continue
                found = yield from search.regroup(union, hours)
                yield
                if found is None:
                    self._settled[key] = hours
                elif best is None or found.net > best[0].net:
                    best = found, key
            if best is not None:
                return best
        return None

    def _unions(
        self, search: Search, crews: Sequence[GroupOption], ages: Mapping[int, float], size: int
    ) -> Generator[None, None, list[tuple[float, list[GroupOption], Key]]]:
        """Groups to be looked at together, those with most to win first."""
        found: list[tuple[float, int, float, list[GroupOption], Key]] = []
        prices = [room.price for room in search.planner.rooms.values()]
        cheapest = {
            crew.group: min((search.costs[job] for job in crew.seats if job in search.costs), default=None)
            for crew in crews
        }
        for looked, union in enumerate(self._near(crews, size)):
            if looked % UNIONS_A_STEP == UNIONS_A_STEP - 1:
                yield
            costs = [cost for crew in union if (cost := cheapest[crew.group]) is not None]
            hours = horizon_hours([ages[job] for crew in union for job in crew.seats])
            least = search.planner.least([job for crew in union for job in crew.seats])
            win = (sum(crew.value for crew in union) - least) * hours
            if not costs or win <= min(costs):
                continue
            key = (
                *prices,
                *(len(owner.nodes) for owner in search.limits.held.values()),
                *(crew.group for crew in union),
                *(crew.version for crew in union),
                *(
                    (job, job in search.costs, job in search.twice, job in search.rigid)
                    for crew in union
                    for job in crew.seats
                ),
            )
            if hours >= self._settled.get(key, 0.0) * AGAIN:
                found.append((win, len(found), hours, list(union), key))
        found.sort(key=lambda it: (-it[0], it[1]))
        if len(self._settled) > REMEMBERED:
            self._settled.clear()
        return [(hours, union, key) for _, _, hours, union, key in found[:UNIONS]]

    def _near(self, crews: Sequence[GroupOption], size: int) -> Iterator[tuple[GroupOption, ...]]:
        """Groups to be looked at together: all, where there are few; else what has changed, beside every other.

        Where nothing has, those that were looked at longest ago: they have earned credit since, and grown older.
        """
        if len(crews) <= GROUPS_MATCHED:
            yield from combinations(crews, size)
            return
        changed = [crew for crew in crews if self._seen.get(crew.group) != crew.version]
        if not changed:
            looked_at = {group: number for number, group in enumerate(self._seen)}
            changed = sorted(crews, key=lambda crew: looked_at[crew.group])
        del changed[GROUPS_CHANGED:]
        for number, crew in enumerate(changed):
            self._seen.pop(crew.group, None)
            self._seen[crew.group] = crew.version
            before = {other.group for other in changed[: number + 1]}
            for other in crews:
                if other.group not in before:
                    yield crew, other
        if len(self._seen) > 2 * len(crews) + 16:
            there = {crew.group for crew in crews}
            self._seen = {group: version for group, version in self._seen.items() if group in there}

    def _options(
        self, state: State, planner: Planner
    ) -> Generator[
        None, None, tuple[list[tuple[GroupOption, GroupSnapshot]], dict[int, float], dict[int, None], dict[int, None]]
    ]:
        """Groups; what a move costs, of each job that can afford one; who affords two; who not that anybody comes."""
        rigid: dict[int, None] = {}
        placed = [job for job in state.jobs.values() if job.pins]
        longest_ms = max((self._takes_ms.get(job.spec.movable, 0) for job in placed), default=0)
        crews: list[tuple[GroupOption, GroupSnapshot]] = []
        costs: dict[int, float] = {}
        twice: dict[int, None] = {}
        for looked, group in enumerate(tuple(state.groups.values())):
            if looked % GROUPS_A_STEP == GROUPS_A_STEP - 1:
                yield
            if group.dispatch is not self.dispatch or group.coming:
                continue
            if group.jobs and not may_share(state, state.jobs[group.jobs[0]], group):
                continue
            if not self.can_afford_newcomer(state, group.id):
                continue
            sitting = self._snapshot(state, group)
            if sitting is None or len(sitting.jobs) < len(group.jobs):
                continue
            seats = {}
            for name, need, pins in zip(sitting.jobs, sitting.needs, sitting.pins, strict=True):
                number = planner.number(need)
                seats[number] = pins
                takes, moves = self._affords(state.jobs[name])
                if moves:
                    costs[number] = planner.worth(need) * takes / HOUR_MS
                if moves > 1:
                    twice[number] = None
                if not self._can_afford_load(state.jobs[name], need, longest_ms):
                    rigid[number] = None
            crews.append((GroupOption(group.id, seats, value_of(planner, sitting), group.version), sitting))
        return crews, costs, twice, rigid

    def _limits(self, state: State, planner: Planner, sittings: Sequence[GroupSnapshot]) -> Limits:
        """How many nodes owners may hold, where they may not hold any number."""
        owner = {
            planner.number(need): state.jobs[name].owner
            for sitting in sittings
            for name, need in zip(sitting.jobs, sitting.needs, strict=True)
            if self.max_nodes.get(state.jobs[name].owner)
        }
        held = {name: state.owners[name] for name in self.max_nodes if name in state.owners}
        return Limits(owner, self.max_nodes, held)

    def _affords(self, job: Job) -> tuple[Millis, int]:
        """What moving the job takes, and how often its credit covers all that this may cost it: 0, 1, or 2."""
        takes = self._takes_ms.get(job.spec.movable)
        if takes is None or job.status is not JobStatus.ADMITTED or job.move is not None:
            return 0, 0
        if not job.promised or job.spec.slo is None or not takes:
            return takes, 2
        credit, pays = credit_ms(job) or 0, int(job.spec.slo * takes)
        if self.dispatch is Dispatch.CREDIT:
            if job.progress.finished < JUDGED_AFTER:
                return takes, 0
            credit -= self._reserve_ms(job)  # what the guard asks for stays with it, or it would be sent away again
        return takes, max(0, min(2, credit // pays))

    def _can_afford_load(self, job: Job, need: JobDemand, takes: Millis) -> bool:
        """Whether a member's credit, where it needs any, covers that somebody comes: his load, and a turn's wait."""
        if need.limit_ms is None or not takes or self.dispatch is Dispatch.CREDIT:
            return True
        return (credit_ms(job) or 0) >= takes + need.limit_ms

    def can_afford_newcomer(self, state: State, group: GroupId) -> bool:
        """Whether all members can afford that somebody comes, if it is credit that keeps promises there.

        Whoever comes loads what he has, and takes what nobody knows. The guard acts for whom it has begun to judge;
        before that, nobody but who already has what it asks for can be helped any more.
        """
        return self._short_of_credit(state, state.groups[group]) is None

    def _short_of_credit(self, state: State, group: Group) -> Job | None:
        """The first member who cannot afford that somebody comes."""
        if group.dispatch is not Dispatch.CREDIT:
            return None
        members = (state.jobs[name] for name in group.jobs)
        return next((it for it in members if it.promised and (credit_ms(it) or 0) < self._reserve_ms(it)), None)

    def _reserve_ms(self, job: Job) -> Millis:
        """What the guard wants a job to keep: the way out, and an iteration."""
        takes = self._takes_ms.get(job.spec.movable, 0)
        return int((job.spec.slo or 1) * takes) + RESERVE * (mean_solo_ms(job) or solo_ms(job) or 0)

    def _go_on(self, state: State) -> Move | None:
        """The next step of the regrouping that is under way; None: there is none, or something came in between."""
        ahead = self._ahead
        if ahead is None:
            return None
        while ahead.steps and _sits(state, *ahead.steps[0]):
            name, step = ahead.steps.pop(0)
            ahead.opened.setdefault(step.to, name)
        move = self._as_move(state, ahead) if ahead.steps and ahead.present == _present(state) else None
        if move is None:
            self._ahead = None
        return move

    def _as_move(self, state: State, ahead: Ahead) -> Move | None:
        """The first step, certified in the state as it is."""
        name, step = ahead.steps[0]
        job, scheme = state.jobs[name], ahead.scheme
        need = demand_of(job, promised=job.promised)
        if need is None or job.move is not None or job.status is not JobStatus.ADMITTED:
            return None
        opened = state.jobs.get(ahead.opened.get(step.to, ""))
        group = state.groups.get((opened and opened.group) or step.to)
        planner = self._planner(state)
        bought = [n for nodes in step.pins.values() for n in nodes if state.nodes[n].group is None]
        if group is None:
            members: tuple[JobId, ...] = (name,)
            plan = planner.alone(need)
            if any(state.nodes[n].group is not None for nodes in step.pins.values() for n in nodes):
                return None
        else:
            sitting = self._snapshot(state, group)
            if sitting is None:
                return None
            there = {
                planner.number(other): dict(pins)
                for member, other, pins in zip(sitting.jobs, sitting.needs, sitting.pins, strict=True)
                if member != name
            }
            members = (*(member for member in sitting.jobs if member != name), name)
            found = planner.fit_named({**there, planner.number(need): step.pins})
            if found is None:
                return None
            plan = found
        candidate = Candidate(group, dict(step.pins), "", 0.0)
        if self._miss_ram(state, job, candidate) or self._miss_memory(state, job, candidate):
            return None
        if any(not usable(state.nodes[n]) for nodes in step.pins.values() for n in nodes):
            return None
        return Move(
            job=name,
            placed=self._answer(state, job, group, members, plan, dict(step.pins), bought),
            why=f"saves {scheme.saves:.2f} per hour with {len(scheme.steps)} move(s), which cost {scheme.costs:.2f}",
            saves_per_hour=scheme.saves,
            costs=scheme.costs,
        )


def _with_a_turn_to_spare(job: Job, need: JobDemand) -> JobDemand:
    """Who joins, with a bound so much lower as makes up for a turn's wait in the iterations before he is judged.

    Where the first turns are too long by the bounds as they are, a plan with more room may bear them: one in which
    (JUDGED_AFTER + 1) iterations fit into what JUDGED_AFTER may take. Credit of an iteration pays for as much.
    """
    if need.limit_ms is None or (credit_ms(job) or 0) >= need.limit_ms:
        return need
    return replace(need, limit_ms=need.limit_ms * JUDGED_AFTER // (JUDGED_AFTER + 1))


def _named(
    seats: Mapping[PoolName, tuple[int, ...]],
    names: Mapping[PoolName, Sequence[NodeId]],
    free: Mapping[PoolName, Sequence[NodeId]],
) -> dict[PoolName, tuple[NodeId, ...]] | None:
    """Nodes by name: those that the group has, and free ones, each once; None: there are not so many."""
    pins: dict[PoolName, tuple[NodeId, ...]] = {}
    taken: dict[NodeId, None] = {}
    for pool, numbers in seats.items():
        had = names.get(pool, ())
        fresh = [node for node in free.get(pool, ()) if node not in taken][: sum(n >= len(had) for n in numbers)]
        mine = [had[n] for n in numbers if n < len(had)] + fresh
        if len(mine) < len(numbers):
            return None
        taken.update(dict.fromkeys(fresh))
        pins[pool] = tuple(mine)
    return pins


def _sits(state: State, name: JobId, step: Step) -> bool:
    """Whether the job is where the step brings it, or on its way there."""
    job = state.jobs.get(name)
    if job is None:
        return False
    pins = job.pins if job.move is None else job.move.pins
    return pins == dict(step.pins)


def _present(state: State) -> tuple[JobId, ...]:
    """The jobs that have a place."""
    return tuple(sorted(name for group in state.groups.values() for name in group.jobs))
