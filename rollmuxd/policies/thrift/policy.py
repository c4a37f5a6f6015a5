"""Thrift: the least price for what was promised over a job's life, by spending the credit that jobs have.

A promise is a mean over a job's life. A job that is ahead of it may be slowed beyond it for as long as its credit lasts
(:mod:`~rollmuxd.policies.thrift.credit`). All plans keep the bounds that follow.

- **Arrival**: the job joins the group whose value grows least. The members keep their nodes. Else it gets its own.
- **Departure**: the schedule continues without the job's turns, which is always certified.
- **Improve**: each group gets a better schedule in place, and groups are partitioned in a better way
  (:mod:`~rollmuxd.policies.thrift.improve`), where that pays.
- **Exhausted**: a job that has spent its credit runs within its promise again. Another schedule on the same nodes is
  tried first. Else a member moves, at worst the job itself to nodes of its own.

The **objective** says what is dear. ``cost``: dollars per hour. ``work``: dollars for the work that there is, so that
progress has a price too. ``throughput`` (the default) is for nodes that one owns: they cost nothing while enough of
them idle, and their full price when they are scarce. No credit is spent there, since nodes to go back to cannot be
bought.

A plan cannot say every job: times are unknown, nodes are named, pools share nodes. The paper's rule places such a job.
With ``throughput`` it goes where it disturbs least instead.
"""

from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from itertools import chain, islice
from math import inf
from typing import Final, Literal, TypeAlias, get_args

from msgspec.structs import replace

from rollmuxd.core.causes import Cause
from rollmuxd.core.decision import Reason
from rollmuxd.core.estimates import ahead_ms, credit_ms
from rollmuxd.core.ids import GroupId, JobId, Millis, NodeId, PoolName
from rollmuxd.core.model import Dispatch, Group, Job, JobStatus, Node, PlannedTurn
from rollmuxd.core.order import PROMISED_NOTHING
from rollmuxd.core.policy import Move, Placed, Replan
from rollmuxd.core.spec import Movable
from rollmuxd.core.state import State
from rollmuxd.core.steps.guard import JUDGED_AFTER, reserve_ms
from rollmuxd.policies.rollmux import (
    Candidate,
    Promise,
    RollMux,
    Shape,
    free_nodes,
    limit_of,
    may_share,
    price_of,
    price_of_pins,
    subsets,
    usable,
)
from rollmuxd.policies.schedule import Bound, first_turn_feasible
from rollmuxd.policies.thrift.catalogue import ROUNDS, Planner
from rollmuxd.policies.thrift.credit import FACTORS, TIE, Standing, progress_price, standing
from rollmuxd.policies.thrift.improve import UNION_JOBS, RegroupPlan, Search
from rollmuxd.policies.thrift.model import (
    GroupSnapshot,
    JobDemand,
    Pins,
    Plan,
    PoolCapacity,
    demand_of,
    free_by_pool,
    numbered,
    pools_of,
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
#: up to so many groups all pairs are looked at; beyond, so many that have changed, each beside all others
GROUPS_MATCHED, GROUPS_CHANGED = 40, 4
#: moves that are refused, after which a search ends
REFUSED: Final = 8
#: groups, and unions of them, that are looked at between two yields; and unions that are remembered
GROUPS_A_STEP, UNIONS_A_STEP, REMEMBERED = 10, 200, 50_000
#: an unsuccessful look at a union is repeated when the time over which it would have to pay has grown so much
AGAIN: Final = 1.25
#: without spent credit groups are looked at again after this; and after no less than this
LOOK_AGAIN_MS, AT_ONCE_MS = 7_200_000, 60_000
#: bounds that differ by less than this part of a job's limit are one
BOUNDS_STEPS: Final = 32
#: what a group has of a pool of which it has nothing
NOTHING: Final = (0, 0.0)
HOUR_MS: Final = 3_600_000
#: what moving a job takes that is started again
RELAUNCH_MS: Final = 300_000


class Thrift(RollMux):
    """The policy.

    Args:
        objective: what is dear; see the module's head.
        rounds: iterations of one job in a rotation, at most; 1: strict round robin.
        steady: promises hold at every instant: no credit is spent.
        warm_move_s: what moving a job takes that loads its state elsewhere.
        max_group: jobs in a group at most.
        promise: as for ``rollmux``: ``measured`` by credit and the guard, or ``certified`` by a proven order.
    """

    name = "thrift"

    def __init__(
        self,
        *,
        objective: Objective = "throughput",
        rounds: int = ROUNDS,
        steady: bool = False,
        warm_move_s: float = 30,
        max_group: int = 5,
        promise: Promise = "certified",
    ) -> None:
        super().__init__(prune=False, max_group=max_group, whole_pools=(), promise=promise)
        if objective not in get_args(Objective):
            raise ValueError(f"objective is {objective!r}, and it is one of {', '.join(get_args(Objective))}")
        if not 1 <= rounds <= ROUNDS:
            raise ValueError(f"rounds is {rounds}, and it is 1 to {ROUNDS}")
        if warm_move_s < 0:
            raise ValueError(f"moving takes {warm_move_s} s, and that cannot be below 0")
        self.objective, self.steady, self.rounds = objective, steady, rounds
        self._takes_ms = {Movable.WARM: round(warm_move_s * 1000), Movable.RELAUNCH: RELAUNCH_MS}
        self._known_planner: tuple[Key, Planner] | None = None
        #: the pools, and the nodes and RAM that they were derived from
        self._seen_pools: tuple[tuple[list[Node], list[int]], dict[PoolName, PoolCapacity]] | None = None
        self._sittings: dict[GroupId, GroupSnapshot | None] = {}
        #: unions, as they were when nothing was found there, and the hours over which it did not pay
        self._settled: dict[Key, float] = {}
        #: by group: the version that was looked at last; the one that was looked at longest ago comes first
        self._seen: dict[GroupId, int] = {}
        #: the regrouping that is under way, and the jobs that were there when it was found
        self._ahead: tuple[RegroupPlan, list[JobId]] | None = None

    # ---- what a job asks of plans now --------------------------------------------------------------------------------

    def _standing(self, job: Job, limit_ms: Millis, now: Millis | None = None) -> Standing:
        return standing(job, limit_ms, self._takes_ms.get(job.spec.movable, 0), now, lends=self._lends(job))

    def _lends(self, job: Job) -> bool:
        """Whether the job's credit may be spent: there has to be a way back to its promised pace."""
        judged = self.dispatch is not Dispatch.CREDIT or job.progress.finished >= JUDGED_AFTER
        return not self.steady and judged and self.objective != "throughput" and job.spec.movable in self._takes_ms

    def _need(
        self, planner: Planner, job: Job, known: JobDemand, *, promised: bool, now: Millis | None = None
    ) -> JobDemand:
        """The job for planning, with the bound that it has now."""
        limit, spare = known.limit_ms, None
        if promised and limit is not None:
            stands = self._standing(job, limit, now)
            limit, spare = int(limit * stands.factor), stands.spare_ms if self._lends(job) else None
        worth = progress_price(self.objective, planner.alone_price(known.profile), spare)
        return replace(known, limit_ms=limit if promised else None, worth=worth)

    def _needs(
        self, state: State, planner: Planner, sitting: GroupSnapshot, now: Millis | None = None
    ) -> tuple[JobDemand, ...]:
        """A group's members for planning."""
        jobs = map(state.jobs.__getitem__, sitting.known)
        return tuple(self._need(planner, it, sitting.known[it.id], promised=it.promised, now=now) for it in jobs)

    def bound_ms(self, job: Job) -> Millis | None:
        """What an iteration of the job may take now: its limit, or any plan's pace while it has credit to spare."""
        limit = limit_of(job)
        return None if limit is None else int(limit * (FACTORS[0] if self._standing(job, limit).spare_ms > 0 else 1))

    def lasts_ms(self, job: Job, pace_ms: Millis, now: Millis) -> Millis | None:
        """How long the credit lasts that the job can spare; None: for ever, or none is spent."""
        limit = limit_of(job)
        return None if limit is None or not self._lends(job) else self._standing(job, limit, now).lasts_ms(pace_ms)

    # ---- arrivals ----------------------------------------------------------------------------------------------------

    def place(self, state: State, job: Job) -> Placed | None:
        """Where the group's value grows by least; a tie keeps an existing group, the fullest."""
        planner, known = self._planner(state), demand_of(job)
        if known is None:
            return self._unplanned(state, job)
        need = self._need(planner, job, known, promised=job.spec.slo is not None)
        alone = self._isolated(state, job)
        best: tuple[float, Placed] | None = None
        if alone is None or job.spec.slo is not None:
            best = self._join(state, planner, job, need)
        if alone is not None and (best is None or planner.alone(need).value < best[0]):
            return self._placed(state, Shape(job, ()), alone)
        return self._unplanned(state, job) if best is None else best[1]

    def _join(self, state: State, planner: Planner, job: Job, need: JobDemand) -> tuple[float, Placed] | None:
        """The group whose value grows by least, by how much, and where the job would go there."""
        best: tuple[float, Placed] | None = None
        free, most, owner = free_by_pool(state), self.max_nodes[job.owner], state.owners.get(job.owner)
        left = len(state.nodes) if not most else max(0, most - len(owner.nodes if owner is not None else ()))
        spare = {pool: min(left, len(nodes)) for pool, nodes in free.items()}
        for group, sitting in islice(self._likely(state, planner, job, need), GROUPS_TRIED):
            needs = (*self._needs(state, planner, sitting), need)
            was = value_of(planner.rooms, sitting, needs[:-1])
            below = inf if best is None else was + best[0]
            ways = filter(None, (needs, self._yielding(needs)))
            plans = (planner.fit(asked, sitting.seats, spare, below) for asked in ways)
            plan = next((it for it in plans if it is not None), None)
            pins = {} if plan is None else (plan.by_name(free, set()) or {}).get(job.id, {})
            if plan is None or not pins or not self._holds(state, job, group, pins):
                continue
            if plan.needs != needs:  # where jobs yield: what a rotation takes if they do not
                whole = [replace(it, limit_ms=None) for it in needs]
                plan = planner.fit(whole, {**sitting.seats, job.id: pins}, {})
            plan = plan and self._borne(state, group, sitting, job, replace(plan, needs=needs), pins)
            if plan is None:
                continue
            best = plan.value - was, self._answer(state, job, group, plan, pins)
            if best[0] <= TIE and self.objective == "cost":
                break  # nothing is cheaper than nothing
        return best

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
        if job.spec.colocate or any(want.named for want in wants) or self._short_of_credit(state, group):
            return
        bought = [want for want in wants if free_nodes(state, job, [want])]
        pins = free_nodes(state, job, bought) if bought else None
        if pins:
            used_for = self._summary(state, group).used_for
            for rest in subsets(state, [want for want in wants if want not in bought], used_for, set()):
                yield Candidate(group, {**rest, **pins}, "scaling", price_of_pins(state, pins))

    def _likely(
        self, state: State, planner: Planner, job: Job, need: JobDemand
    ) -> Iterator[tuple[Group, GroupSnapshot]]:
        """Groups that could take the job: those first that it would fill best."""
        found: list[tuple[float, int, Group, GroupSnapshot]] = []
        mine, widths, dearest = used_by([need]), dict(need.profile.widths), planner.dearest
        pools = [(pool, room.worth, mine.get(pool, 0.0)) for pool, room in planner.rooms.items()]
        for group in state.groups.values():
            if len(group.jobs) + len(group.coming) >= self.max_group or group.dispatch is not self.dispatch:
                continue
            sitting = self._snapshot(state, group)
            if sitting is None:
                continue
            off = 0.0
            for pool, price, more in pools:
                has, uses = sitting.room.get(pool, NOTHING)
                uses += more
                if pool == dearest and uses > max(has, widths.get(pool, 0)) + 1e-9:
                    break
                off += abs(uses - has) * price
            else:
                found.append((off, len(found), group, sitting))
        for *_, group, sitting in sorted(found):
            settled = may_share(state, job, group) and self._has_settled(state, group)
            if settled and not self._short_of_credit(state, group):
                yield group, sitting

    def _yielding(self, needs: tuple[JobDemand, ...]) -> tuple[JobDemand, ...]:
        """By credit, where a promised job comes to jobs that have none: what is planned, as these yield (0047).

        Each of them has an iteration in ten of its own; none: there is no such job, or the newcomer is one.
        """
        yields = sum(it.limit_ms is None for it in needs)
        if self.dispatch is not Dispatch.CREDIT or not yields or needs[-1].limit_ms is None:
            return ()
        rest = max(0.0, 1 - yields / PROMISED_NOTHING)
        return tuple(
            replace(it, limit_ms=int(it.limit_ms * rest))
            if it.limit_ms is not None
            else replace(it, profile=it.profile.one_in(PROMISED_NOTHING))
            for it in needs
        )

    def _borne(
        self, state: State, group: Group, sitting: GroupSnapshot, job: Job, plan: Plan, pins: Pins
    ) -> Plan | None:
        """The plan, from the first iteration in its order from which each job bears the first turns.

        By what it has in hand, and at once; a job that is not judged yet, by the time that it is.
        """
        if self.dispatch is Dispatch.CREDIT:
            return plan  # its order is not followed
        jobs = [job if it.job == job.id else state.jobs[it.job] for it in plan.needs]
        seats = {**sitting.seats, job.id: pins}
        legs = [Shape(it, ()).legs(dict(seats[it.id])) for it in jobs]
        loads = self._takes_ms.get(job.spec.movable, 0) if job.pins and job.pins != pins else 0
        bounds = {}
        for need, known in zip(plan.needs, jobs, strict=True):
            limit = limit_of(known)
            if need.limit_ms is None or limit is None:
                continue
            # what lifts the bound is spent by that: what is left pays for the load of a job that moves, and first turns
            stands = self._standing(known, limit)
            credit = (credit_ms(known) or 0) - max(0, stands.spare_ms) - loads
            bound = max(need.limit_ms, int(limit * stands.factor))
            bounds[known.id] = Bound(bound, credit, max(1, JUDGED_AFTER - known.progress.finished))
        each = {it.id: len(it.spec.phases) for it in jobs}
        before = [leg for leg in self._summary(state, group).legs if leg.job in each]
        for begin in (at for at, (_, phase) in enumerate(plan.order) if not phase):
            order = plan.order[begin:] + plan.order[:begin]
            if first_turn_feasible(before, [legs[place][phase] for place, phase in order], each, bounds):
                return replace(plan, order=order)
        return None

    def _answer(
        self, state: State, job: Job, group: Group | None, plan: Plan, pins: dict[PoolName, tuple[NodeId, ...]]
    ) -> Placed:
        """A plan's last job, as a placement."""
        jobs = {**state.jobs, job.id: job}
        nodes = {name: state.nodes[name] for some in pins.values() for name in some}
        bought = [node for node in nodes.values() if node.group is None]
        once = () if group is None else tuple(PlannedTurn(v.job, v.phase, True) for v in group.schedule if v.once)
        return Placed(
            group=None if group is None else group.id,
            pins={want.pool: pins[want.pool] for want in job.spec.wants},
            schedule=(*once, *_turns(plan, jobs)),
            admission="isolated" if group is None else "scaling" if bought else "packing",
            status=JobStatus.ADMITTED,
            promised=plan.needs[-1].limit_ms is not None,
            period_ms=plan.period_ms,
            cost_per_hour=sum(map(price_of, bought)),
            dispatch=self.dispatch,
        )

    # ---- with other times ----------------------------------------------------------------------------------------

    def replan(self, state: State, group: GroupId) -> Replan:
        """The group as it stands where that is certified, else the schedule of least value on the nodes that it has."""
        stands, known = super().replan(state, group), state.groups[group]
        if not stands.at_risk or known.coming:
            return stands
        sitting, planner = self._look(state, known), self._planner(state)
        if sitting is None:
            return stands
        plan = planner.fit(self._needs(state, planner, sitting), sitting.seats, {})
        return stands if plan is None else Replan(plan.period_ms, schedule=_turns(plan, state.jobs))

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
        jobs = tuple(dict.fromkeys(turn.job for turn in group.schedule if not turn.once))
        known = {name: it for name in jobs if (it := demand_of(state.jobs[name])) is not None}
        seats: dict[JobId, Pins] = {name: state.pins_in(state.jobs[name], group.id) for name in jobs}
        names, _ = numbered(seats)
        summary = self._summary(state, group)
        if not jobs or len(known) < len(jobs) or any(name not in summary.rates for name in jobs):
            return None  # times are not known, or it was measured since, and is not judged yet
        if len({n for some in names.values() for n in some}) < sum(len(some) for some in names.values()):
            return None  # a node that serves two pools is two nodes to a plan
        used = used_by(it for it in known.values() if state.jobs[it.job].promised)
        return GroupSnapshot(
            group=group.id,
            version=group.version,
            known=known,
            seats=seats,
            rates=(1,) if len(jobs) == 1 else tuple(summary.rates[name] for name in jobs),
            period_ms=known[jobs[0]].solo_ms if len(jobs) == 1 else self._period_ms(summary.legs),
            room={pool: (len(some), used.get(pool, 0.0)) for pool, some in names.items()},
        )

    def _planner(self, state: State, *, scarce: bool | None = None) -> Planner:
        """A planner for the pools as they are: as scarce as they look, or as is said, where nodes are owned."""
        seen = [*state.nodes.values()], [host.ram_mb for host in state.hosts.values()]
        if self._seen_pools is None or self._seen_pools[0] != seen:  # a node's own traits never change
            self._seen_pools = seen, pools_of(state)
        pools = self._seen_pools[1]
        owned = self.objective == "throughput"
        free = free_by_pool(state) if owned and scarce is None else {}
        rooms = {}
        for name, pool in pools.items():
            counts = 1.0
            if owned:
                left = 0 if scarce else pool.count if scarce is False else len(free.get(name, ()))
                counts = next(it for share, it in SCARCITY if left >= share * pool.count)
            rooms[name] = replace(pool, price=pool.worth * counts)
        # of pools that cost the same the one that has fewer nodes
        dearest = max(rooms, key=lambda pool: (rooms[pool].worth, -pools[pool].count, pool), default="")
        key = (dearest, *((pool, room.worth, room.ram_mb, room.gpu_mb) for pool, room in rooms.items()))
        if self._known_planner is None or self._known_planner[0] != key:
            self._known_planner = key, Planner(rooms, rounds=self.rounds, dearest=dearest)
        self._known_planner[1].price(rooms)
        return self._known_planner[1]

    def _why_not_group(self, state: State, shape: Shape, group: Group) -> Reason:
        """As for the paper's rule, unless the job's own bound would do: a member's credit is awaited then."""
        miss = super()._why_not_group(state, shape, group)
        member = self._short_of_credit(state, group)
        if member is None or "slo" in miss.data or miss.code in {"group_full", "shares_not"}:
            return miss
        has, wants = (credit_ms(member) or 0) / 1000, self._reserve_ms(member) / 1000
        text = (
            f"group {group.id} is joined on further nodes when job {member.spec.name} has {wants:.3g} s of credit, "
            f"and it has {has:.3g} s: what comes unforeseen is paid for with it"
        )
        data = {"group": group.id, "job": member.id, "credit_s": has, "wanted_s": wants}
        return Reason("member_credit", text, data)

    # ---- improve -----------------------------------------------------------------------------------------------------

    def regroup(self, state: State, now: Millis) -> Iterator[Move | None]:
        """The next move of a regrouping that is under way; else the first of the best one, of a group or of a pair."""
        if (move := self._go_on(state, now)) is not None:
            yield move
        self._ahead = None  # asked on: it is not to be
        free = free_by_pool(state)
        in_use = {pool for node in state.nodes.values() if node.group is not None for pool in node.pools}
        if self.objective == "throughput" and not state.waiting and len(free) < len(in_use):
            return  # no job needs what could be freed, and there is nowhere to spread
        planner = self._planner(state, scarce=bool(state.waiting))
        options, search = yield from self._options(state, planner, free, now)
        in_place = self.dispatch is Dispatch.SCHEDULE and self.objective != "throughput"  # there 1 % slower
        for option in options if in_place else ():
            yield self._reordered(state, search, option)
        for _ in range(REFUSED):
            best = yield from self._best(search, options)
            if best is None:
                return
            scheme, key, hours = best
            self._ahead = scheme, _placed(state)
            if (move := self._go_on(state, now)) is not None:
                yield move
            self._ahead = None
            self._settled[key] = hours  # asked on: it is not to be, and another one may

    def _reordered(self, state: State, search: Search, option: GroupSnapshot) -> Move | None:
        """A group's jobs where they sit, in a schedule that pays for the rotation which they may lose by it."""
        group, mine, planner = state.groups[option.group], [search.needs[it] for it in option.seats], search.planner
        key, was = (option.group, option.version, *mine), search.values[option.group]
        if len(mine) < 2 or key in self._settled or not self._has_settled(state, group):
            return None
        plan, job = planner.fit(mine, option.seats, {}, was), state.jobs[mine[-1].job]
        if plan is None:
            self._settled[key] = inf
            return None
        price = sum(planner.rooms[pool].price * count for pool, count in plan.nodes.items())
        saves, costs = was - plan.value, price * plan.period_ms / HOUR_MS
        pays = saves * search.hours(option.seats) > costs
        borne = self._borne(state, group, option, job, plan, job.pins) if pays else None
        if borne is None:
            return None
        why = Cause("order_saves", {"saves": saves, "costs": costs})
        return Move(job.id, self._answer(state, job, group, borne, job.pins), why)

    def look_again_ms(self, state: State, now: Millis) -> Millis:
        """Until some job's spare credit is spent at the pace that it has; two hours at most, and a minute at least."""
        paces = chain.from_iterable(self._paces(state, group, now) for group in state.groups.values())
        lasts = (stands.lasts_ms(pace) for _, stands, pace in paces)
        return max(AT_ONCE_MS, min([LOOK_AGAIN_MS, *(it for it in lasts if it is not None)]))

    def exhausted(self, state: State, now: Millis) -> Iterator[JobId]:
        """The jobs that run slower than promised and have spent the credit for it, one of each group."""
        for group in state.groups.values():
            short = (job.id for job, stands, pace in self._paces(state, group, now) if stands.lasts_ms(pace) == 0)
            yield from islice(short, 1)

    def _paces(self, state: State, group: Group, now: Millis) -> Iterator[tuple[Job, Standing, Millis]]:
        """The promised members of a group that goes by a schedule: how each stands, and what an iteration takes it."""
        sitting = self._snapshot(state, group) if group.dispatch is Dispatch.SCHEDULE else None
        if sitting is None or group.coming:
            return
        for known, rate in zip(sitting.known.values(), sitting.rates, strict=True):
            job, limit = state.jobs[known.job], known.limit_ms
            if job.promised and limit is not None and job.move is None:
                yield job, self._standing(job, limit, now), -(-sitting.period_ms // rate)

    def _best(
        self, search: Search, options: Sequence[GroupSnapshot]
    ) -> Generator[None, None, tuple[RegroupPlan, Key, float] | None]:
        """The regrouping that pays most, and over how many hours. What was looked at in vain is not for a while."""
        best: tuple[RegroupPlan, Key, float] | None = None
        prices = [room.price for room in search.planner.rooms.values()]
        for looked, union in enumerate(self._unions(options)):
            if looked % UNIONS_A_STEP == UNIONS_A_STEP - 1:
                yield
            jobs = [job for option in union for job in option.seats]
            hours = search.hours(jobs)
            demands = ((search.needs[job], job in search.costs, search.among.get(job)) for job in jobs)
            key = (*prices, *((option.group, option.version) for option in union), *demands)
            if hours < self._settled.get(key, 0.0) * AGAIN:
                continue
            found = yield from search.regroup(union)
            yield
            if found is None:
                self._settled[key] = hours
            elif best is None or found.net > best[0].net:
                best = found, key, hours
        if len(self._settled) > REMEMBERED:
            self._settled.clear()
        return best

    def _unions(self, options: Sequence[GroupSnapshot]) -> Iterator[tuple[GroupSnapshot, ...]]:
        """Groups to be looked at: each, each pair, and of few jobs all together; of many groups some, each with all.

        These are the ones that have changed; where none has, those that were looked at longest ago.
        """
        if len(options) > 2 and sum(len(option.seats) for option in options) <= UNION_JOBS:
            yield tuple(options)
        at = {group: number for number, group in enumerate(self._seen)}
        some = sorted(options, key=lambda it: at[it.group] if self._seen.get(it.group) == it.version else -1)
        if len(options) > GROUPS_MATCHED:
            del some[GROUPS_CHANGED:]
        there = {option.group for option in options} - {option.group for option in some}
        self._seen = {group: version for group, version in self._seen.items() if group in there}
        self._seen |= {option.group: option.version for option in some}
        names = {option.group: number for number, option in enumerate(some)}
        for number, option in enumerate(some):
            yield (option,)
            yield from ((option, other) for other in options if names.get(other.group, number + 1) > number)

    def _options(
        self, state: State, planner: Planner, free: Mapping[PoolName, Sequence[NodeId]], now: Millis
    ) -> Generator[None, None, tuple[list[GroupSnapshot], Search]]:
        """The groups that a search looks at, and the search: with the jobs, and what moving them costs."""
        placed = [job for job in state.jobs.values() if job.pins]
        longest_ms = max((self._takes_ms.get(job.spec.movable, 0) for job in placed), default=0)
        search = Search(planner, {}, {}, {}, free, {}, self.max_group, {})
        options: list[GroupSnapshot] = []
        for looked, group in enumerate(tuple(state.groups.values())):
            if looked % GROUPS_A_STEP == GROUPS_A_STEP - 1:
                yield
            if group.dispatch is not self.dispatch or group.coming or not group.jobs:
                continue
            sitting = self._snapshot(state, group)
            if sitting is None or len(sitting.known) < len(group.jobs):
                continue
            if not may_share(state, state.jobs[group.jobs[0]], group) or self._short_of_credit(state, group):
                continue
            mine, settled = self._needs(state, planner, sitting, now), self._has_settled(state, group)
            for name, need in zip(sitting.known, mine, strict=True):
                job = state.jobs[name]
                search.needs[name], search.ages[name] = need, (now - job.registered_at) / HOUR_MS
                if self._affords(job, now):
                    takes = self._takes_ms[job.spec.movable]
                    search.costs[name] = planner.alone_price(need.profile) * takes / HOUR_MS
                if settled and (joined := self._among(job, need, longest_ms, now)) is not None:
                    search.among[name] = joined
            options.append(sitting)
            search.values[group.id] = value_of(planner.rooms, sitting, mine)
        return options, search

    def _affords(self, job: Job, now: Millis) -> bool:
        """Whether the job may be moved, and its credit covers all that this may cost it."""
        takes = self._takes_ms.get(job.spec.movable)
        if takes is None or job.status is not JobStatus.ADMITTED or job.move is not None:
            return False
        if not job.promised or job.spec.slo is None or not takes:
            return True
        counted = job.progress.iteration_from  # where no iteration is seen to end, credit is counted before each search
        if (job.placed_at or 0) > (now - 1 if counted is None else counted):
            return False  # what the move here took is not in its credit yet
        credit = credit_ms(job) or 0
        if self.dispatch is Dispatch.CREDIT:
            if job.progress.finished < JUDGED_AFTER:
                return False
            credit -= self._reserve_ms(job)  # what the guard asks for stays with it, or it would be sent away again
        return credit >= job.spec.slo * takes

    def _has_settled(self, state: State, group: Group) -> bool:
        """Whether the first turns of the job that came last are over, and paid for: credit pays for one at a time."""
        members = [state.jobs[name] for name in group.jobs]
        if self.dispatch is Dispatch.CREDIT:
            return True
        last = max((it.placed_at or 0 for it in members), default=0)
        began = [it.progress.iteration_from for it in members if it.placed_at != last]
        return not group.coming and all(at is None or at > last for at in began)

    def _among(self, job: Job, need: JobDemand, takes: Millis, now: Millis) -> JobDemand | None:
        """How the job may be planned where a newcomer comes, or it comes itself; None: it cannot pay for that.

        That costs a load and a turn, once. Credit pays for both. Or the plan is so much faster than promised that it
        makes up for both before the job is judged.
        """
        limit = limit_of(job)
        slo = job.spec.slo
        if not job.promised or slo is None or limit is None or not takes or self.dispatch is Dispatch.CREDIT:
            return need
        left = max(0, JUDGED_AFTER - job.progress.finished)
        bound = (left * limit + ahead_ms(job, slo, now) - takes) // (left + 1)
        if bound >= limit:
            return need
        bound -= bound % (limit // BOUNDS_STEPS or 1)  # the same for a while, so that few plans have to be looked for
        return replace(need, limit_ms=bound) if bound >= need.profile.round_ms else None

    def _short_of_credit(self, state: State, group: Group) -> Job | None:
        """The first member that cannot afford a newcomer, if it is credit that keeps promises there.

        A newcomer loads its states, and its times are not known. The guard acts for jobs that it has begun to judge.
        Before that, it is too late to help any member except one that already holds what it asks for.
        """
        members = [state.jobs[name] for name in group.jobs] if group.dispatch is Dispatch.CREDIT else []
        return next((it for it in members if it.promised and (credit_ms(it) or 0) < self._reserve_ms(it)), None)

    def _reserve_ms(self, job: Job) -> Millis:
        """What the guard wants a job to keep: the way out, and an iteration."""
        return reserve_ms(job, int((job.spec.slo or 1) * self._takes_ms.get(job.spec.movable, 0)))

    def _go_on(self, state: State, now: Millis) -> Move | None:
        """The next move of the regrouping that is under way; None: there is none, or something came in between."""
        if self._ahead is None or self._ahead[1] != _placed(state):
            return None
        scheme = self._ahead[0]
        left = ((state.jobs[name], pins) for name, pins in scheme.moves.items())
        step = next(((job, pins) for job, pins in left if (job.move or job).pins != pins), None)
        return None if step is None else self._as_move(state, scheme, *step, now)

    def _as_move(self, state: State, scheme: RegroupPlan, job: Job, pins: Pins, now: Millis) -> Move | None:
        """One move of a regrouping, if it is certified in the state as it is."""
        planner, known = self._planner(state), demand_of(job)
        of = (state.nodes[name].group for nodes in pins.values() for name in nodes)
        group = next((state.groups[name] for name in of if name is not None), None)
        if known is None or not self._affords(job, now) or not self._holds(state, job, group, pins):
            return None
        need = self._need(planner, job, known, promised=job.promised)
        plan: Plan | None = planner.alone(need)
        if group is not None:
            sitting = self._snapshot(state, group)
            if sitting is None:
                return None
            needs = [*(it for it in self._needs(state, planner, sitting) if it.job != job.id), need]
            plan = planner.fit(needs, {**sitting.seats, job.id: pins}, {})
        if plan is None:
            return None
        return Move(
            job=job.id,
            placed=self._answer(state, job, group, plan, dict(pins)),
            why=Cause("saves", {"saves": scheme.saves, "moves": len(scheme.moves), "costs": scheme.costs}),
        )

    def _holds(self, state: State, job: Job, group: Group | None, pins: Pins) -> bool:
        """Whether the job can be put on these nodes, free ones or the group's: they are up, and have what it keeps."""
        of = {None, group and group.id}
        nodes = [state.nodes[name] for some in pins.values() for name in some]
        fit = all(usable(node) and node.group in of for node in nodes)
        return fit and self._short(state, job, Candidate(group, dict(pins), "", 0.0)) is None


def _placed(state: State) -> list[JobId]:
    """The jobs that are in groups."""
    return sorted(name for group in state.groups.values() for name in group.jobs)


def _turns(plan: Plan, jobs: Mapping[JobId, Job]) -> tuple[PlannedTurn, ...]:
    """The turns of a plan's rotation."""
    names = [(plan.needs[at].job, phase) for at, phase in plan.order]
    return tuple(PlannedTurn(job, jobs[job].spec.phases[phase].name) for job, phase in names)
