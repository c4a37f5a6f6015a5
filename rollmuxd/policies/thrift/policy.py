"""Thrift: the least price for what was promised over a job's life, by spending the credit that jobs have.

A promise is a mean over a job's life. A job that is ahead of it has credit, and may be slowed beyond it for as long as
that lasts (:mod:`~rollmuxd.policies.thrift.credit`). All plans keep the bounds that follow.

- **Arrival**: the job joins the group whose value grows least, on any of its nodes and on new ones; the members stay
  where they are. Where no group can take it, it has nodes of its own.
- **Departure**: the schedule goes on without the job's turns, which is certified whatever else there is.
- **Improve**: pairs of groups are partitioned in a better way (:mod:`~rollmuxd.policies.thrift.improve`): of jobs that
  may be moved, whose credit pays for the whole of what moving takes, and only where it pays for itself.
- **Exhausted**: a job whose credit is down to its reserve runs within its promise again: by another schedule on the
  same nodes, else a member moves, at worst the job itself to nodes of its own.

What is dear is said by the **objective**:

- ``cost``: dollars per hour, however a job is slowed within its bound.
- ``work``: dollars for the work that there is: a slowed job stays, and pays, longer, so progress has a price too.
- ``throughput`` (the default): for nodes that one owns. A pool's nodes cost nothing while enough of them idle, and
  their full price when they are scarce; what is left to be won is progress. No credit is spent: nodes to go back to
  cannot be bought.

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
from rollmuxd.core.policy import Binding, Leg, Move, Placed, Reorder, Replan
from rollmuxd.core.spec import Movable
from rollmuxd.core.state import State
from rollmuxd.core.steps.guard import JUDGED_AFTER, RESERVE, mean_solo_ms
from rollmuxd.policies.rollmux import (
    TIGHT_SLO,
    Candidate,
    Miss,
    RollMux,
    Shape,
    enough,
    free_nodes,
    limit_of,
    may_share,
    price_of_pins,
    subsets,
)
from rollmuxd.policies.schedule import Bound, binding, first_turn_feasible
from rollmuxd.policies.thrift.catalogue import RATES, Planner
from rollmuxd.policies.thrift.credit import TIE, Standing, progress_price, standing
from rollmuxd.policies.thrift.improve import (
    UNION_JOBS,
    GroupOption,
    Limits,
    RegroupPlan,
    Search,
    Step,
    horizon_hours,
)
from rollmuxd.policies.thrift.model import JobDemand, Pins, Plan, PoolCapacity, Profile
from rollmuxd.policies.thrift.snapshot import (
    GroupSnapshot,
    Inventory,
    free_by_pool,
    pools_in_use,
    price_of,
    profile_of,
    usable,
    used_by,
    value_of,
)

#: some groups as they are: whether looking at them together can find what it did not find before
Key: TypeAlias = tuple[object, ...]
Objective: TypeAlias = Literal["cost", "work", "throughput"]

#: groups that are planned with a newcomer, at most
GROUPS_TRIED: Final = 24
#: by the share of a pool that is free (at least so much): what of its price counts, where nodes are owned
SCARCITY: Final = ((0.25, 0.05), (0.1, 0.5), (0.0, 1.0))
#: unions that are looked at in one search, at most; those with most to win first
UNIONS: Final = 400
#: up to so many groups all pairs are looked at; beyond, so many that have changed, each beside all others
GROUPS_MATCHED, GROUPS_CHANGED = 40, 4
#: frontiers that a newcomer's search may begin, as no other input is heard meanwhile
SEARCHED_AT_ONCE: Final = 6
#: moves that are refused, after which a search ends
REFUSED: Final = 8
#: groups, and unions of them, that are looked at between two yields; and unions that are remembered
GROUPS_A_STEP, UNIONS_A_STEP, REMEMBERED = 10, 200, 50_000
#: an unsuccessful look at a union is repeated when the time over which it would have to pay has grown so much
AGAIN: Final = 1.25
#: without spent credit groups are looked at again after this; and after no less than this
LOOK_AGAIN_MS, AT_ONCE_MS = 7_200_000, 60_000
#: what a group has of a pool of which it has nothing
NOTHING: Final = (0, 0.0)
HOUR_MS: Final = 3_600_000


class Ahead(Struct):
    """What is left of a regrouping that is under way."""

    scheme: RegroupPlan
    #: the jobs that were there when it was found
    present: tuple[JobId, ...]
    steps: list[Step]
    #: groups that its steps have opened: by the name that they have in the steps, a job that went there
    opened: dict[GroupId, JobId] = field(default_factory=dict)


class Thrift(RollMux):
    """The policy.

    Args:
        objective: what is dear; see the module's head.
        rounds: iterations of one job in a rotation, at most; 1: strict round robin.
        regroup: whether jobs are moved.
        steady: promises hold at every instant: no credit is spent.
        warm_s: what moving a job takes that loads its state elsewhere.
        relaunch_s: what moving a job takes that is started again.
        max_group: jobs in a group at most.
        uncertain: phases take times that no plan knows: groups go by credit, with the guard.
    """

    name = "thrift"

    def __init__(
        self,
        *,
        objective: Objective = "throughput",
        rounds: int = max(RATES.values()),
        regroup: bool = True,
        steady: bool = False,
        warm_s: float = 30,
        relaunch_s: float = 300,
        max_group: int = 5,
        uncertain: bool = False,
    ) -> None:
        super().__init__(prune=False, max_group=max_group, whole_pools=(), uncertain=uncertain)
        if objective not in get_args(Objective):
            raise ValueError(f"objective is {objective!r}, and it is one of {', '.join(get_args(Objective))}")
        if not 1 <= rounds <= max(RATES.values()):
            raise ValueError(f"rounds is {rounds}, and it is 1 to {max(RATES.values())}")
        if min(warm_s, relaunch_s) < 0:
            raise ValueError(f"moving takes {warm_s} s and {relaunch_s} s, and neither can be below 0")
        self.objective, self.moves, self.steady = objective, regroup, steady
        self.rates = {jobs: min(rounds, most) for jobs, most in RATES.items()}
        self._takes_ms = {Movable.WARM: round(warm_s * 1000), Movable.RELAUNCH: round(relaunch_s * 1000)}
        self._known_planner: tuple[Key, Planner] | None = None
        self._inventory: Inventory | None = None
        self._sittings: dict[GroupId, GroupSnapshot | None] = {}
        #: unions, as they were when nothing was found there, and the hours over which it did not pay
        self._settled: dict[Key, float] = {}
        #: by group: the version that was looked at last; the one that was looked at longest ago comes first
        self._seen: dict[GroupId, int] = {}
        self._ahead: Ahead | None = None

    # ---- what a job asks of plans now --------------------------------------------------------------------------------

    def _standing(self, job: Job, limit_ms: Millis, now: Millis | None = None) -> Standing:
        standing_now = standing(job, limit_ms, self._takes_ms.get(job.spec.movable, 0), now)
        return replace(standing_now, spare_ms=min(0, standing_now.spare_ms)) if not self._lends(job) else standing_now

    def _lends(self, job: Job) -> bool:
        """Whether the job's credit may be spent: there has to be a way back to its promised pace."""
        judged = self.dispatch is not Dispatch.CREDIT or job.progress.finished >= JUDGED_AFTER
        return not self.steady and judged and self.objective != "throughput" and job.spec.movable in self._takes_ms

    def _demand(self, planner: Planner, job: Job, *, promised: bool, now: Millis | None = None) -> JobDemand | None:
        """The job for planning; None: a plan cannot say it."""
        known = profile_of(job)
        return None if known is None else self._need(planner, job, *known, promised=promised, now=now)

    def _need(
        self,
        planner: Planner,
        job: Job,
        profile: Profile,
        solo_ms: Millis,
        limit_ms: Millis | None,
        *,
        promised: bool,
        now: Millis | None,
    ) -> JobDemand:
        need = JobDemand(job.id, profile, solo_ms, None)
        alone = planner.alone_price(need)
        if not promised or limit_ms is None:
            return replace(need, worth=progress_price(self.objective, alone, None))
        stands = self._standing(job, limit_ms, now)
        return replace(
            need,
            limit_ms=int(limit_ms * stands.factor),
            worth=progress_price(self.objective, alone, stands.spare_ms if self._lends(job) else None),
        )

    def _needs(
        self, state: State, planner: Planner, sitting: GroupSnapshot, now: Millis | None = None
    ) -> tuple[JobDemand, ...]:
        """A group's members for planning, with the bounds that they have now."""
        jobs = map(state.jobs.__getitem__, sitting.jobs)
        return tuple(
            self._need(planner, job, *known, promised=job.promised, now=now)
            for job, known in zip(jobs, sitting.profiles, strict=True)
        )

    def bound_ms(self, job: Job) -> Millis | None:
        """What an iteration of the job may take now: its limit, lifted by the credit that it can spare."""
        limit = limit_of(job)
        return None if limit is None else int(limit * self._standing(job, limit).factor)

    def lasts_ms(self, job: Job, pace_ms: Millis, now: Millis) -> Millis | None:
        """How long the credit lasts that the job can spare; None: for ever, or none is spent."""
        limit = limit_of(job)
        return None if limit is None or not self._lends(job) else self._standing(job, limit, now).lasts_ms(pace_ms)

    # ---- arrivals ----------------------------------------------------------------------------------------------------

    def place(self, state: State, job: Job) -> Placed | None:
        """Where the group's value grows by least; a tie keeps an existing group, the fullest."""
        planner = self._planner(state)
        need = self._demand(planner, job, promised=job.spec.slo is not None)
        if need is None:
            return self._unplanned(state, job)
        free = free_by_pool(state)
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
        # by credit no first turn is played; else it is, and may be borne as the bound is, with nothing to spare
        tried = (spare,) if self.dispatch is Dispatch.CREDIT else tuple(dict.fromkeys((need, spare)))
        began = planner.searched
        for group, sitting in self._likely(state, planner, job, need)[:GROUPS_TRIED]:
            needs = self._needs(state, planner, sitting)
            if not planner.knows((*needs, need)) and planner.searched - began >= SEARCHED_AT_ONCE and not waits:
                continue
            below = inf if best is None else best[0] - 1e-9
            best = self._plan_with(state, planner, free, job, tried, group, sitting, needs, below) or best
            if best is not None and best[0] <= TIE and self.objective == "cost":
                break  # nothing is cheaper than nothing
        return best

    def _likely(self, state: State, planner: Planner, job: Job, need: JobDemand) -> list[tuple[Group, GroupSnapshot]]:
        """Groups that could take the job, the fullest first: what they have left is wasted soonest."""
        found: list[tuple[float, float, int, Group, GroupSnapshot]] = []
        mine, dearest = used_by([need]), planner.dearest
        adds, widest = mine.get(dearest, 0.0), dict(need.profile.widths).get(dearest, 0)
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
        needs: tuple[JobDemand, ...],
        below: float,
    ) -> tuple[float, Placed] | None:
        """The group with the job: by how much its value grows, if by less than that, and where the job would go."""
        if not planner.may_share((*needs, tried[0])):
            return None
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
        was = value_of(planner, sitting, needs)
        for joins in tried:
            plan = planner.fit((*needs, joins), dict(enumerate(sitting.seats)), rooms, closed, was + below + 1e-9)
            pins = None if plan is None else _named(plan.seats[-1], sitting.names, free)
            if plan is None or pins is None:
                continue  # by a lower bound he goes round more often: worth more than what was found so far, maybe
            grows = plan.value - was
            if grows >= below or self._short(state, job, Candidate(group, pins, "", 0.0)):
                continue
            order = self._feasible_order(state, group, sitting, job, plan, pins)
            if order is not None:
                bought = [n for pool, some in pins.items() for n in some if n not in sitting.names.get(pool, ())]
                members = (*sitting.jobs, job.id)
                return grows, self._answer(state, job, group, members, replace(plan, order=order), pins, bought)
        return None

    def _feasible_order(
        self, state: State, group: Group, sitting: GroupSnapshot, job: Job | None, plan: Plan, pins: Pins
    ) -> tuple[tuple[int, int], ...] | None:
        """The plan's order, as it is or beginning with the newcomer: one in which each job bears the first turns.

        By what it has in hand, and at once; a job that is not judged yet, by the time that it is.
        """
        if self.dispatch is Dispatch.CREDIT:
            return plan.order  # it is not followed
        seats = sitting.pins if job is None else (*sitting.pins, pins)
        legs = [
            [
                Leg(it.job, tuple(n for pool in pools for n in mine[pool]), took, gap, phase)
                for phase, (pools, took, gap) in enumerate(it.profile.phases)
            ]
            for it, mine in zip(plan.needs, seats, strict=True)
        ]
        bounds = {}
        for it in plan.needs:
            known = job if job is not None and it.job == job.id else state.jobs[it.job]
            limit = limit_of(known)
            if it.limit_ms is None or limit is None:
                continue
            # what lifts the bound is spent by that: what is left pays for the first turns
            credit = (credit_ms(known) or 0) - max(0, self._standing(known, limit).spare_ms)
            left = JUDGED_AFTER - known.progress.finished
            bound = max(it.limit_ms, int(limit * self._standing(known, limit).factor))
            bounds[it.job] = Bound(bound, credit if left > 0 else max(0, credit), max(1, left))
        each = {it.job: len(it.profile.phases) for it in plan.needs}
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
        """The group as it stands where that is certified, else the schedule of least value on the nodes that it has."""
        stands, known = super().replan(state, group), state.groups[group]
        if not stands.at_risk or known.coming:
            return stands
        sitting = self._look(state, known)
        return (sitting and self._in_place(state, known, sitting)) or stands

    def _in_place(self, state: State, group: Group, sitting: GroupSnapshot, now: Millis | None = None) -> Replan | None:
        """Another schedule for the same jobs on the same nodes, within the bounds that they have now."""
        planner = self._planner(state)
        needs = self._needs(state, planner, sitting, now)
        plan = planner.fit_named(needs, dict(zip(sitting.jobs, sitting.pins, strict=True)))
        if plan is None:
            return None
        phases = [state.jobs[name].spec.phases for name in sitting.jobs]
        return Replan(
            plan.period_ms,
            schedule=tuple(PlannedTurn(sitting.jobs[at], phases[at][phase].name) for at, phase in plan.order),
        )

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
        profiles, pins = [], []
        for name in jobs:
            job = state.jobs[name]
            known = profile_of(job)
            if known is None:
                return None
            profiles.append(known)
            pins.append(state.pins_in(job, group.id))
        names: dict[PoolName, list[NodeId]] = {}
        for each in pins:
            for pool, nodes in each.items():
                mine = names.setdefault(pool, [])
                mine += [node for node in nodes if node not in mine]
        if not jobs or len({n for some in names.values() for n in some}) < sum(len(some) for some in names.values()):
            return None  # a node that serves two pools is two nodes to a plan
        summary = self._summary(state, group)
        if any(name not in summary.rates for name in jobs):
            return None  # it was measured since, and is not judged yet
        used = used_by(
            [
                JobDemand(name, profile, solo, limit)
                for name, (profile, solo, limit) in zip(jobs, profiles, strict=True)
                if state.jobs[name].promised
            ]
        )
        return GroupSnapshot(
            version=group.version,
            jobs=jobs,
            profiles=tuple(profiles),
            pins=tuple(pins),
            names={pool: tuple(some) for pool, some in names.items()},
            seats=tuple(
                {pool: tuple(names[pool].index(node) for node in nodes) for pool, nodes in each.items()}
                for each in pins
            ),
            rates=tuple(summary.rates[name] for name in jobs),
            period_ms=profiles[0][1] if len(jobs) == 1 else self._period_ms(summary.legs),
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
        key = (dearest, *((pool, room.worth, room.ram_mb, room.gpu_mb) for pool, room in rooms.items()))
        if self._known_planner is None or self._known_planner[0] != key:
            self._known_planner = key, Planner(rooms, rates=self.rates, dearest=dearest)
        self._known_planner[1].price(rooms)
        return self._known_planner[1]

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

    # ---- improve -----------------------------------------------------------------------------------------------------

    def regroup(self, state: State, now: Millis) -> Iterator[Move | Reorder | None]:
        """What is due for jobs whose credit is spent; else the next move of a regrouping, or of the best one."""
        due = yield from self._exhausted(state, now)
        if due or not self.moves:
            return
        move = self._go_on(state)
        if move is not None:
            yield move
            self._ahead = None  # asked on: it is not to be
            return
        free = free_by_pool(state)
        if self.objective == "throughput" and not state.waiting and len(free) < len({*pools_in_use(state)}):
            return  # no job needs what could be freed, and there is nowhere to spread
        planner = self._planner(state, scarce=bool(state.waiting))
        crews, needs, costs, twice, rigid = yield from self._options(state, planner, now)
        if not costs:
            return
        limits = self._limits(state, needs)
        search = Search(planner, needs, costs, free, twice=twice, rigid=rigid, max_group=self.max_group, limits=limits)
        ages = {name: (now - state.jobs[name].registered_at) / HOUR_MS for name in needs}
        refused: set[Key] = set()
        while len(refused) < REFUSED:
            best = yield from self._best(search, crews, ages, refused)
            if best is None:
                return
            scheme, key = best
            self._ahead = Ahead(scheme, _present(state), list(scheme.steps))
            move = self._go_on(state)
            if move is None:
                return
            yield move
            self._ahead = None
            refused.add(key)  # asked on: the move is not to be, and another one may

    def look_again_ms(self, state: State, now: Millis) -> Millis:
        """Until some job's spare credit is spent at the pace that it has; two hours at most, and a minute at least."""
        wait = LOOK_AGAIN_MS
        for group in state.groups.values():
            for _, stands, pace in self._paces(state, group, now):
                lasts = stands.lasts_ms(pace)
                wait = wait if lasts is None else min(wait, lasts)
        return max(wait, AT_ONCE_MS)

    def _paces(self, state: State, group: Group, now: Millis) -> Iterator[tuple[Job, Standing, Millis]]:
        """The promised members of a group that goes by a schedule: how each stands, and what an iteration takes it."""
        sitting = self._snapshot(state, group) if group.dispatch is Dispatch.SCHEDULE else None
        if sitting is None or group.coming:
            return
        for name, (_, _, limit), rate in zip(sitting.jobs, sitting.profiles, sitting.rates, strict=True):
            job = state.jobs[name]
            if job.promised and limit is not None and job.move is None:
                yield job, self._standing(job, limit, now), -(-sitting.period_ms // rate)

    def _exhausted(self, state: State, now: Millis) -> Generator[Move | Reorder | None, None, bool]:
        """Bring jobs back within their promises whose spare credit is spent. Whether something was found to do."""
        for group in tuple(state.groups.values()):
            short = next((job for job, it, pace in self._paces(state, group, now) if it.lasts_ms(pace) == 0), None)
            sitting = None if short is None else self._snapshot(state, group)
            if short is None or sitting is None:
                continue
            yield None
            why = f"job {short.spec.name} has spent the credit that it could spare"
            other = self._in_place(state, group, sitting, now)
            if other is not None:
                yield Reorder(group.id, short.id, other, why)
                return True
            if not self.moves:
                continue
            leaves = [move for job in sitting.jobs if (move := self._leaves(state, group, sitting, job, short, now))]
            if leaves:
                yield replace(min(leaves, key=lambda it: it[0])[1], why=why)
                return True
        return False

    def _leaves(
        self, state: State, group: Group, sitting: GroupSnapshot, name: JobId, short: Job, now: Millis
    ) -> tuple[float, Move] | None:
        """What it costs that a member leaves, after which the job that is short keeps its promise; and its move."""
        job, planner = state.jobs[name], self._planner(state)
        takes, times = self._affords(job)
        if not times and job is not short:
            return None
        needs = self._needs(state, planner, sitting, now)
        rest = [need for need in needs if need.job != name]
        pins = {it: mine for it, mine in zip(sitting.jobs, sitting.pins, strict=True) if it != name}
        plan = planner.fit_named(rest, pins) if rest else None
        if rest and plan is None and job is not short:
            return None
        others = {known.id: known for known in state.groups.values() if known.id != group.id}
        placed = self.place(replace(state, groups=others), job)
        if placed is None or (job.promised and not placed.promised):
            return None
        mine = planner.alone_price(needs[sitting.jobs.index(name)])
        return placed.cost_per_hour + mine * takes / HOUR_MS, Move(job.id, placed, "")

    def _best(
        self, search: Search, crews: Sequence[GroupOption], ages: Mapping[JobId, float], refused: set[Key]
    ) -> Generator[None, None, tuple[RegroupPlan, Key] | None]:
        """The regrouping of a pair that pays most, and has not been refused."""
        best: tuple[RegroupPlan, Key] | None = None
        unions = yield from self._unions(search, crews, ages)
        for hours, union, key in unions:
            if key in refused:
                continue
            found = yield from search.regroup(union, hours)
            yield
            if found is None:
                self._settled[key] = hours
            elif best is None or found.net > best[0].net:
                best = found, key
        return best

    def _unions(
        self, search: Search, crews: Sequence[GroupOption], ages: Mapping[JobId, float]
    ) -> Generator[None, None, list[tuple[float, list[GroupOption], Key]]]:
        """Pairs of groups to be looked at together, those with most to win first."""
        found: list[tuple[float, int, float, list[GroupOption], Key]] = []
        prices = [room.price for room in search.planner.rooms.values()]
        cheapest = {
            crew.group: min((search.costs[job] for job in crew.seats if job in search.costs), default=None)
            for crew in crews
        }
        for looked, union in enumerate(self._near(crews)):
            if looked % UNIONS_A_STEP == UNIONS_A_STEP - 1:
                yield
            costs = [cost for crew in union if (cost := cheapest[crew.group]) is not None]
            jobs = [job for crew in union for job in crew.seats]
            hours = horizon_hours([ages[job] for job in jobs])
            win = (sum(crew.value for crew in union) - search.least(jobs)) * hours
            if not costs or win <= min(costs):
                continue
            key = (
                *prices,
                *(len(owner.nodes) for owner in search.limits.held.values()),
                *((crew.group, crew.version) for crew in union),
                *((search.needs[job], job in search.costs, job in search.twice, job in search.rigid) for job in jobs),
            )
            if len(union) == 1 and not any(job in search.costs for job in jobs):
                continue
            if hours >= self._settled.get(key, 0.0) * AGAIN:
                found.append((win, len(found), hours, list(union), key))
        found.sort(key=lambda it: (-it[0], it[1]))
        if len(self._settled) > REMEMBERED:
            self._settled.clear()
        return [(hours, union, key) for _, _, hours, union, key in found[:UNIONS]]

    def _near(self, crews: Sequence[GroupOption]) -> Iterator[tuple[GroupOption, ...]]:
        """Groups to be looked at together: all, where there are few; else what has changed, beside every other.

        Where nothing has, those that were looked at longest ago: they have earned credit since, and grown older.
        """
        if len(crews) <= GROUPS_MATCHED:
            few = sum(len(crew.seats) for crew in crews) <= UNION_JOBS
            for size in (1, 2, 3) if few else (1, 2):
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
            yield (crew,)
            before = {other.group for other in changed[: number + 1]}
            for other in crews:
                if other.group not in before:
                    yield crew, other
        if len(self._seen) > 2 * len(crews) + 16:
            there = {crew.group for crew in crews}
            self._seen = {group: version for group, version in self._seen.items() if group in there}

    def _options(
        self, state: State, planner: Planner, now: Millis
    ) -> Generator[
        None,
        None,
        tuple[list[GroupOption], dict[JobId, JobDemand], dict[JobId, float], dict[JobId, None], dict[JobId, None]],
    ]:
        """Groups; jobs; the price of a move, of each job that can pay for it; which pay for two, or for no newcomer."""
        rigid: dict[JobId, None] = {}
        placed = [job for job in state.jobs.values() if job.pins]
        longest_ms = max((self._takes_ms.get(job.spec.movable, 0) for job in placed), default=0)
        crews: list[GroupOption] = []
        needs: dict[JobId, JobDemand] = {}
        costs: dict[JobId, float] = {}
        twice: dict[JobId, None] = {}
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
            mine = self._needs(state, planner, sitting, now)
            for name, need in zip(sitting.jobs, mine, strict=True):
                needs[name] = need
                takes, moves = self._affords(state.jobs[name])
                if moves:
                    costs[name] = planner.alone_price(need) * takes / HOUR_MS
                if moves > 1:
                    twice[name] = None
                if not self._can_afford_load(state.jobs[name], longest_ms):
                    rigid[name] = None
            seats = dict(zip(sitting.jobs, sitting.pins, strict=True))
            crews.append(GroupOption(group.id, seats, value_of(planner, sitting, mine), group.version))
        return crews, needs, costs, twice, rigid

    def _limits(self, state: State, needs: Mapping[JobId, JobDemand]) -> Limits:
        """How many nodes owners may hold, where they may not hold any number."""
        owner = {name: state.jobs[name].owner for name in needs if self.max_nodes.get(state.jobs[name].owner)}
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

    def _can_afford_load(self, job: Job, takes: Millis) -> bool:
        """Whether a member's credit, where it needs any, covers a newcomer's load, and a turn's wait."""
        limit = limit_of(job)
        if not job.promised or limit is None or not takes or self.dispatch is Dispatch.CREDIT:
            return True
        return (credit_ms(job) or 0) >= takes + limit

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
        while ahead.steps and _sits(state, ahead.steps[0]):
            step = ahead.steps.pop(0)
            ahead.opened.setdefault(step.to, step.job)
        move = self._as_move(state, ahead) if ahead.steps and ahead.present == _present(state) else None
        if move is None:
            self._ahead = None
        return move

    def _as_move(self, state: State, ahead: Ahead) -> Move | None:
        """The first step, certified in the state as it is."""
        step, scheme, planner = ahead.steps[0], ahead.scheme, self._planner(state)
        name = step.job
        job = state.jobs[name]
        need = self._demand(planner, job, promised=job.promised)
        if need is None or job.move is not None or job.status is not JobStatus.ADMITTED:
            return None
        opened = state.jobs.get(ahead.opened.get(step.to, ""))
        group = state.groups.get((opened and opened.group) or step.to)
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
            there = [it for it in self._needs(state, planner, sitting) if it.job != name]
            members = (*(it.job for it in there), name)
            pins = {**dict(zip(sitting.jobs, sitting.pins, strict=True)), name: dict(step.pins)}
            found = planner.fit_named((*there, need), pins)
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
    """The newcomer with a bound so much lower as makes up for a turn's wait in the iterations before he is judged.

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


def _sits(state: State, step: Step) -> bool:
    """Whether the job is where the step brings it, or on its way there."""
    job = state.jobs.get(step.job)
    if job is None:
        return False
    pins = job.pins if job.move is None else job.move.pins
    return pins == dict(step.pins)


def _present(state: State) -> tuple[JobId, ...]:
    """The jobs that have a place."""
    return tuple(sorted(name for group in state.groups.values() for name in group.jobs))
