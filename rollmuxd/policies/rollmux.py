"""RollMux's placement (paper, Algorithm 1): pack, else scale the rollout pool, else a group of one's own.

A job is tried on each group in turn: on its nodes (*direct packing*, price 0), or with more rollout nodes (*rollout
scaling*). Or the job gets nodes of its own (*isolated*). Candidates are kept if every member's promise, every host's
RAM and every GPU's memory allow them. The strictly least price is taken, and a tie keeps an existing group. What the
paper leaves open and we had to choose:

- A pool in ``whole_pools`` (``train``) is used whole by every job of a group; the others by subsets of the job's width.
- With a fixed inventory nothing is bought: scaling and isolation take free nodes, and a job that fits nowhere waits.
- A job without an SLO starts on free nodes where there are any, since no bound says how far it may be slowed.
- A job whose times are not known joins no group that has promised anything.
- Pruning (skip a saturated group) is a switch; off, only the promises themselves reject (research 6.5, note b).
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, combinations, islice
from math import ceil, inf
from typing import Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from rollmuxd.core.decision import Reason
from rollmuxd.core.estimates import moves_ms, phase_ms, rollouts_rest_ms, solo_ms
from rollmuxd.core.feasible import check, ram_mb_on, short_of_time
from rollmuxd.core.ids import GroupId, HostId, JobId, Millis, NodeId, PoolName
from rollmuxd.core.model import Dispatch, Group, Job, JobStatus, Node, NodeStatus, PlannedTurn
from rollmuxd.core.order import PROMISED_NOTHING
from rollmuxd.core.policy import Move, Placed, Refusal, Replan
from rollmuxd.core.shares import over_its_nodes
from rollmuxd.core.spec import Park, PhaseSpec, StateSpec, Want
from rollmuxd.core.state import State
from rollmuxd.policies.schedule import Leg, period_ms, pipelined

#: how promises are kept
Promise: TypeAlias = Literal["measured", "certified"]
#: subsets of a group's rollout nodes that are tried for one job, at most
SUBSETS_TRIED = 64
#: where promises are measured, a job with a tighter bound than this shares nothing
TIGHT_SLO = 1.1
#: how long until moves are looked for again
LOOK_AGAIN_MS = 7_200_000
#: groups whose refusals are reported, at most
GROUPS_TOLD = 8


class Summary(Struct, frozen=True):
    """What of a group matters for placement, derived once per version of the group."""

    version: int
    legs: tuple[Leg, ...]
    #: each member's cycle, in the order in which they begin; none where a member goes round several times in a
    #: rotation. A phase whose time is not known takes no time here
    cycles: tuple[tuple[Leg, ...], ...]
    #: load per node and rotation
    load: dict[NodeId, Millis]
    #: the longest job alone (T_cycle), and the load of the busiest node (T_load), per rotation
    longest_ms: Millis
    busiest_ms: Millis
    #: iterations of each member in a rotation
    rates: dict[JobId, int]
    #: the longest rotation with which every promise is kept, and the job that sets it; None: no promise was made
    limit_ms: Millis | None
    limit_job: JobId | None
    #: a member's times are not known yet
    unknown: bool
    #: nodes by the pool that members use them for
    used_for: dict[PoolName, tuple[NodeId, ...]]


class Candidate(Struct, frozen=True):
    """A placement that has not been tried yet."""

    group: Group | None
    pins: dict[PoolName, tuple[NodeId, ...]]
    admission: str
    price: float


class RollMux:
    """The paper's policy.

    Args:
        prune: skip groups that are saturated (T_load >= T_cycle), as Algorithm 1 does. The published artifact does not,
            and we do not by default: it costs 3 to 26 % and only saves time.
        max_group: jobs in a group at most (the paper's residency cap, 2 to 5).
        whole_pools: pools that every job of a group uses whole.
        promise: how promises are kept. ``certified``: by a proven order, if no phase takes longer than planned.
            ``measured``: by credit and the guard, and tight bounds share nothing (:mod:`~rollmuxd.core.steps.guard`).
    """

    name = "rollmux"
    #: its certificate is that of the schedule's order
    dispatch = Dispatch.SCHEDULE

    def __init__(
        self,
        *,
        prune: bool = False,
        max_group: int = 5,
        whole_pools: Sequence[PoolName] = ("train",),
        promise: Promise = "certified",
    ) -> None:
        if max_group < 1:
            raise ValueError(f"max_group is {max_group}, and a group has at least one job")
        self.prune, self.max_group, self.whole_pools = prune, max_group, tuple(whole_pools)
        if promise == "measured":
            self.dispatch = Dispatch.CREDIT
        self.max_nodes: Mapping[str, int] = defaultdict(int)
        self._summaries: dict[GroupId, Summary] = {}

    # ---- the protocol ----------------------------------------------------------------------------------------------

    def place(self, state: State, job: Job) -> Placed | None:
        """Algorithm 1 over the state's inventory; see the module's head for what it leaves open."""
        shape = Shape(job, self.whole_pools)
        best = self._choose(state, shape)
        return None if best is None else self._placed(state, shape, best)

    def _choose(self, state: State, shape: "Shape") -> Candidate | None:
        job = shape.job
        groups = [
            group
            for group in state.groups.values()
            if self._worth_trying(state, shape, group) and may_share(state, job, group)
        ]
        packings = (c for group in groups for c in self._packings(state, job, group))
        if job.spec.slo is None:
            best = self._isolated(state, job) or self._scaled(state, shape, groups)
            best = best or self._first(state, shape, packings)
        else:
            best = self._first(state, shape, packings)
            if best is None:  # packing costs nothing, so a tie keeps the first; free nodes are looked for only now
                best, alone = self._scaled(state, shape, groups), self._isolated(state, job)
                if alone is not None and (best is None or alone.price < best.price):
                    best = alone
        return best

    def _scaled(self, state: State, shape: "Shape", groups: list[Group]) -> Candidate | None:
        """The first group that does with further rollout nodes; these are the same for every group."""
        more = free_nodes(state, shape.job, self._parts(shape.job))
        candidates = (c for group in groups for c in self._scaling(state, shape.job, group, more))
        return self._first(state, shape, candidates)

    def _first(self, state: State, shape: "Shape", candidates: Iterator[Candidate]) -> Candidate | None:
        """The first that does. They come in the order of their price."""
        return next((c for c in candidates if self._fits(state, shape, c)), None)

    def why_not(self, state: State, job: Job) -> Refusal:
        """One reason for each group (the first few), and one for a group of the job's own."""
        shape = Shape(job, self.whole_pools)
        alone, further = self._why_not_alone(state, job)
        reasons = [self._why_not_group(state, shape, group) for group in islice(state.groups.values(), GROUPS_TOLD)]
        reasons += alone
        slos = (f"slo={ceil(it.data['slo'] * 100) / 100:g}" for it in reasons if "slo" in it.data)
        return Refusal(tuple(reasons), tuple(dict.fromkeys(filter(None, (*slos, further)))))

    def judge(self, state: State, job: Job) -> Replan:
        """Whether the group as it stands keeps every promise, this job's included."""
        solo = solo_ms(job)
        if job.group is None or solo is None:
            return Replan(None, (job.id,))
        summary = self._summary(state, state.groups[job.group], fresh=True)
        if summary.unknown:
            return Replan(None, (job.id,))
        period = self._period_ms(summary.legs)
        rate, bound = summary.rates.get(job.id, 1), self.bound_ms(job)
        promised = bound is not None and self._promised_ms(state, summary, period, job.id) <= rate * bound
        return Replan(period, () if promised else (job.id,))

    def _promised_ms(self, state: State, summary: Summary, period: Millis, job: JobId = "") -> Millis:
        """What a rotation takes for those that were promised something, and for this job.

        By credit the others yield (:func:`~rollmuxd.core.steps.lines.yields_to`): each is let in for an iteration
        in ten of its own at most.
        """
        others = (state.jobs[name] for name in summary.rates if name != job)
        yields = [it.id for it in others if it.status is JobStatus.ADMITTED and not it.promised]
        if self.dispatch is not Dispatch.CREDIT or not yields or len(yields) >= PROMISED_NOTHING:
            return period
        legs = tuple(leg for leg in summary.legs if leg.job not in yields)
        return min(period, round(self._period_ms(legs) / (1 - len(yields) / PROMISED_NOTHING)))

    def replan(self, state: State, group: GroupId) -> Replan:
        """The paper's own test of admission, with the times that are known now; its order within groups is one."""
        known = state.groups[group]
        summary = self._summary(state, known, fresh=True)
        if summary.unknown:
            return Replan(None)
        if len(jobs := (*known.jobs, *known.coming)) == 1 and not moves_alone(state.jobs[jobs[0]]):
            return Replan(solo_ms(state.jobs[jobs[0]]))
        period = self._period_ms(summary.legs)
        limits = {name: self.bound_ms(state.jobs[name]) for name in summary.rates if state.jobs[name].promised}
        takes = self._promised_ms(state, summary, period)
        short = (name for name, limit in limits.items() if limit is not None and takes > summary.rates[name] * limit)
        return Replan(period, tuple(short))

    def bound_ms(self, job: Job) -> Millis | None:
        """What an iteration of the job may take now; None: it has no promise, or its times are not known."""
        return limit_of(job)

    def look_again_ms(self, state: State, now: Millis) -> Millis:
        """A search for moves finds nothing here, whenever it is made."""
        del state, now
        return LOOK_AGAIN_MS

    def regroup(self, state: State, now: Millis) -> Iterator[Move | None]:
        """The paper's jobs stay where they were put."""
        del state, now
        return iter(())

    def period_ms(self, state: State, group: GroupId) -> Millis | None:
        """By the recurrence."""
        summary = self._summary(state, state.groups[group], fresh=True)
        return None if summary.unknown else self._period_ms(summary.legs)

    def _why_not_alone(self, state: State, job: Job) -> tuple[list[Reason], str]:
        """Why there is no group of its own, and the further nodes that would make one."""
        groups = dict.fromkeys(
            node.group
            for want in job.spec.wants
            for name in want.named
            if (node := state.nodes[name]).group is not None
        )
        if len(groups) > 1:
            text = f"the nodes that it names are in groups {', '.join(map(str, groups))}, which are not merged"
            return [Reason("named_apart", text)], ""
        reasons, wishes, others = [], [], []
        all_free: dict[PoolName, list[NodeId]] = {}
        for want in job.spec.wants:
            free = [node for node in state.nodes.values() if want.pool in node.pools and _free(node)]
            if len(free) >= want.nodes and sum(len(node.gpus) for node in free) >= want.gpus:
                all_free[want.pool] = [node.id for node in free]
                others.append(want)
                continue
            needed = f"{want.gpus} GPUs" if want.gpus else f"{want.nodes} node{'' if want.nodes == 1 else 's'}"
            text = f"pool {want.pool} has {len(free)} free nodes, and a group of its own needs {needed} there"
            reasons.append(Reason("no_free_nodes", text, {"pool": want.pool, "free": len(free)}))
            wishes.append("" if want.gpus else f"{want.nodes - len(free)} more free {want.pool} node(s)")
        if free_nodes(state, job, others) is None:
            text = "of the free nodes, not enough have the RAM for its parked states on their hosts, or they overlap"
            reasons.append(short_of_time(state, job, all_free) or Reason("no_ram", text))
        elif wishes and all(wishes) and not any(want.named for want in job.spec.wants):
            return reasons, "" if self._owner_is_full(state, job) else " and ".join(wishes)
        elif not wishes:
            reasons += self._why_too_slow_alone(job)
            pins = free_nodes(state, job, [want for want in job.spec.wants if not want.named], {})
            if pins is not None and (over := self._over_its_nodes(state, job, pins)) is not None:
                reasons.append(over)
        return reasons, ""

    def _why_too_slow_alone(self, job: Job) -> list[Reason]:
        shape = Shape(job, self.whole_pools)
        if not moves_alone(job) or shape.limit_ms is None or shape.solo_ms is None or shape.shared_ms <= shape.limit_ms:
            return []
        takes, allowed = shape.shared_ms, shape.limit_ms
        text = f"even alone its iteration would take {_s(takes)} s, as it moves its states, and its SLO allows"
        data = {"period_s": takes / 1000, "limit_s": allowed / 1000, "job": job.id, "slo": takes / shape.solo_ms}
        return [Reason("own_slo", f"{text} {_s(allowed)} s", data)]

    def _owner_is_full(self, state: State, job: Job) -> bool:
        """Whether its owner may not have as many further nodes as it wants."""
        most, owner = self.max_nodes[job.owner], state.owners.get(job.owner)
        wanted = sum(max(want.nodes, len(want.named)) for want in job.spec.wants)
        return bool(most) and owner is not None and len(owner.nodes) + wanted > most

    # ---- candidates --------------------------------------------------------------------------------------------------

    def _worth_trying(self, state: State, shape: "Shape", group: Group) -> bool:
        """What can be said of a group at once, before any placement in it is looked at."""
        if len(group.jobs) + len(group.coming) >= self.max_group:
            return False
        summary = self._summary(state, group)
        if shape.solo_ms is None:
            return summary.limit_ms is None
        if summary.unknown:
            return shape.limit_ms is None
        if self.prune and summary.busiest_ms >= summary.longest_ms:
            return False
        if shape.limit_ms is not None and max(summary.longest_ms, summary.busiest_ms) > shape.limit_ms:
            return False
        return summary.limit_ms is None or shape.solo_ms <= summary.limit_ms

    def _parts(self, job: Job) -> list[Want]:
        """The wants of which a group need not be used whole: what rollout scaling buys more of."""
        return [want for want in job.spec.wants if want.pool not in self.whole_pools]

    def _whole(self, state: State, job: Job, group: Group) -> dict[PoolName, tuple[NodeId, ...]] | None:
        """The group's nodes of the pools that it is used whole of; None where they are not enough, or not up."""
        used_for = self._summary(state, group).used_for
        whole: dict[PoolName, tuple[NodeId, ...]] = {}
        for want in job.spec.wants:
            if want.pool in self.whole_pools:
                whole[want.pool] = used_for.get(want.pool, ())
                if not enough(state, want, whole[want.pool]):
                    return None
        return whole

    def _packings(self, state: State, job: Job, group: Group) -> Iterator[Candidate]:
        """Ways to put the job on nodes that the group has."""
        used_for = self._summary(state, group).used_for
        named = _named_nodes(state, job, group)
        if named is None:
            return
        whole = self._whole(state, job, group)
        if whole is None:
            return
        if job.spec.colocate and (whole or not named):
            yield from self._colocated(state, job, group, whole)
            return
        if any(set(named[pool]) != set(whole[pool]) for pool in named if pool in whole):
            return
        parts = [want for want in self._parts(job) if want.pool not in named]
        fixed = {**whole, **named}
        ways = list(subsets(state, parts, used_for, {node for nodes in fixed.values() for node in nodes}))
        if len(ways) > 1:  # they cost the same, so the least busy nodes come first: everybody's turn is shortest there
            load = self._summary(state, group).load
            ways.sort(key=lambda pins: max((load[name] for nodes in pins.values() for name in nodes), default=0))
        for pins in ways:
            yield Candidate(group, {**fixed, **pins}, "packing", price_of_pins(state, named))

    def _scaling(
        self, state: State, job: Job, group: Group, more: dict[PoolName, tuple[NodeId, ...]] | None
    ) -> Iterator[Candidate]:
        """Free rollout nodes beside the group's training nodes."""
        if not more or job.spec.colocate or any(want.named for want in job.spec.wants):
            return
        whole = self._whole(state, job, group)
        if whole:
            yield Candidate(group, {**whole, **more}, "scaling", price_of_pins(state, more))

    def _colocated(
        self, state: State, job: Job, group: Group, whole: dict[PoolName, tuple[NodeId, ...]]
    ) -> Iterator[Candidate]:
        """A job whose pools share nodes takes the whole pool's. Where none is used whole, as few as it needs."""
        wants = job.spec.wants
        there = [name for name in group.nodes if all(want.pool in state.nodes[name].pools for want in wants)]
        few = (nodes for want in wants for nodes in islice(_choices(state, want, there), SUBSETS_TRIED))
        for nodes in [*whole.values()][:1] or few:
            if all(enough(state, want, nodes) for want in wants):
                yield Candidate(group, {want.pool: nodes for want in wants}, "packing", 0.0)

    def _isolated(self, state: State, job: Job) -> Candidate | None:
        """Free nodes of its own, those it sat on before first, then the cheapest."""
        named = _named_nodes(state, job, None)
        rest = [want for want in job.spec.wants if not want.named]
        pins = None if named is None else free_nodes(state, job, rest, named)
        if pins is None:
            return None
        candidate = Candidate(None, pins, "isolated", price_of_pins(state, pins))
        shape = Shape(job, self.whole_pools)
        nodes = [name for names in pins.values() for name in names]
        moves = job.spec.park is Park.AT_RELEASE or len(set(nodes)) < len(nodes)
        if moves and shape.limit_ms is not None and shape.shared_ms > shape.limit_ms:
            return None  # even alone it moves its states each time, and its promise has no room for that
        return None if self._short(state, job, candidate) else candidate

    # ---- does it do? -------------------------------------------------------------------------------------------------

    def _miss(self, state: State, shape: "Shape", candidate: Candidate) -> Reason | None:
        """Why a candidate does not do, for people; another SLO is no help where RAM or memory are short as well."""
        short, group = self._short(state, shape.job, candidate), candidate.group
        if group is None or not self._is_too_slow(state, shape, candidate):
            return short
        summary = self._summary(state, group)
        period = self._period_ms(self._joined(summary, shape.legs(candidate.pins)))
        return _slo_miss(state, shape, summary, group, period, alone=short is None)

    def _fits(self, state: State, shape: "Shape", candidate: Candidate) -> bool:
        """Whether every member's promise, every host's RAM, every GPU's memory and the owner's limit allow it."""
        return not self._is_too_slow(state, shape, candidate) and self._short(state, shape.job, candidate) is None

    def _short(self, state: State, job: Job, candidate: Candidate) -> Reason | None:
        """What there is too little of, whatever the times."""
        return self._over_its_nodes(state, job, candidate.pins) or check(state, job, candidate.pins)

    def _is_too_slow(self, state: State, shape: "Shape", candidate: Candidate) -> bool:
        """Whether the group's period with the job is more than a member's SLO x T_solo.

        Most candidates fail by the load of one node, so that is looked at first.
        """
        if candidate.group is None or shape.solo_ms is None:
            return False
        summary = self._summary(state, candidate.group)
        limits = [limit for limit in (summary.limit_ms, shape.limit_ms) if limit is not None]
        if not limits or summary.unknown:
            return False
        limit = min(limits)
        bound = max(summary.longest_ms, summary.busiest_ms, shape.shared_ms)
        for phase, busy in shape.busy:
            for pool in phase.pools:
                nodes = candidate.pins[pool]
                took = shape.scaled(phase, busy, len(nodes))
                for node in nodes:
                    bound = max(bound, summary.load.get(node, 0) + took)
        return bound > limit or not self._within(summary, shape.legs(candidate.pins), limit)

    def _within(self, summary: Summary, legs: tuple[Leg, ...], limit: Millis) -> bool:
        """Whether everybody's iteration stays within the limit when these legs join a group that has room for them."""
        return self._period_ms(self._joined(summary, legs)) <= limit

    def _joined(self, summary: Summary, legs: tuple[Leg, ...]) -> tuple[Leg, ...]:
        """The group's schedule with a newcomer: of its ways the shortest."""
        schedules = self._schedules(summary, legs)
        return min(schedules, key=self._period_ms) if len(schedules) > 1 else schedules[0]

    def _schedules(self, summary: Summary, legs: tuple[Leg, ...]) -> list[tuple[Leg, ...]]:
        """The newcomer's legs at the end; then all legs pipelined, unless requests go as they come."""
        last, cycles = (*summary.legs, *legs), (*summary.cycles, legs)
        if self.dispatch is Dispatch.READY or len(cycles) < 2:
            return [last]
        orders = pipelined(range(len(cycles)), [[leg.nodes for leg in cycle] for cycle in cycles])
        return [last, *(tuple(cycles[job][phase] for job, phase in order) for order in orders)]

    def _period_ms(self, legs: tuple[Leg, ...]) -> Millis:
        """What everybody's iteration takes in a group of these legs. Another order within groups has another."""
        return period_ms(legs)

    def _over_its_nodes(self, state: State, job: Job, pins: dict[PoolName, tuple[NodeId, ...]]) -> Reason | None:
        """How many nodes the job's owner may hold."""
        most = self.max_nodes[job.owner]
        over = over_its_nodes(job.owner, state.owners.get(job.owner), pins, most) if most else ""
        return Reason("owner_nodes", over, {"owner": job.owner}) if over else None

    def _why_not_group(self, state: State, shape: "Shape", group: Group) -> Reason:
        """The reason against the best placement in a group."""
        names = ", ".join(state.jobs[name].spec.name for name in group.jobs)
        if len(group.jobs) >= self.max_group:
            return Reason("group_full", f"group {group.id} ({names}) has its {self.max_group} jobs")
        why = shares_not(state, shape.job, group)
        if why:
            return Reason("shares_not", f"group {group.id} ({names}): {why}", {"group": group.id})
        more = free_nodes(state, shape.job, self._parts(shape.job))
        candidates = chain(self._packings(state, shape.job, group), self._scaling(state, shape.job, group, more))
        misses = [miss for candidate in candidates if (miss := self._miss(state, shape, candidate)) is not None]
        summary = self._summary(state, group)
        if shape.solo_ms is None and summary.limit_ms is not None:
            text = (
                f"group {group.id} ({names}) has promises to keep, and this job's times are not known yet: "
                "state them (seconds= for each phase)"
            )
            return Reason("times_unknown", text, {"group": group.id})
        if shape.limit_ms is not None and summary.unknown:
            text = f"group {group.id} ({names}) has a member whose times are not known yet"
            return Reason("member_unknown", text, {"group": group.id})
        if misses:  # the one that the least change of its own would do away with
            return min(misses, key=lambda miss: miss.data.get("slo", inf))
        if self.prune and summary.load and summary.busiest_ms >= summary.longest_ms:
            return Reason("saturated", f"group {group.id} ({names}) is saturated", {"group": group.id})
        text = f"group {group.id} ({names}) has not the nodes it wants, or they are not up"
        return Reason("nodes", text, {"group": group.id})

    # ---- the answer --------------------------------------------------------------------------------------------------

    def _placed(self, state: State, shape: "Shape", candidate: Candidate) -> Placed:
        group, job = candidate.group, shape.job
        legs = shape.legs(candidate.pins)
        schedule = [PlannedTurn(job.id, phase.name) for phase in job.spec.phases]
        unknown = shape.solo_ms is None
        if group is not None:
            summary = self._summary(state, group)
            unknown = unknown or summary.unknown
            there = [PlannedTurn(turn.job, turn.phase, turn.once) for turn in group.schedule]
            last, *others = self._schedules(summary, legs)
            # without everybody's times nothing is certified, and what is pipelined is hardly ever slower
            legs = (*others, last)[0] if unknown else self._joined(summary, legs)
            if legs != last:
                there = [turn for turn in there if turn.once]
                jobs = {**state.jobs, job.id: job}
                schedule = [PlannedTurn(leg.job, jobs[leg.job].spec.phases[leg.phase].name) for leg in legs]
            schedule = [*there, *schedule]
        return Placed(
            group=None if group is None else group.id,
            pins={want.pool: candidate.pins[want.pool] for want in job.spec.wants},
            schedule=tuple(schedule),
            admission=candidate.admission,
            status=JobStatus.PROBING if shape.solo_ms is None else JobStatus.ADMITTED,
            promised=job.spec.slo is not None and shape.solo_ms is not None,
            period_ms=None if unknown else self._period_ms(legs),
            cost_per_hour=candidate.price,
            dispatch=self.dispatch,
        )

    def _summary(self, state: State, group: Group, *, fresh: bool = False) -> Summary:
        """The group's summary; ``fresh`` looks at observed times again, which no version tells of."""
        known = self._summaries.get(group.id)
        if known is not None and known.version == group.version and not fresh:
            return known
        made = _summarise(state, group, self.whole_pools)
        self._summaries[group.id] = made
        if len(self._summaries) > 2 * len(state.groups) + 16:  # groups that are gone
            self._summaries = {name: kept for name, kept in self._summaries.items() if name in state.groups}
        return made


class Shape:
    """A job as placement sees it: its times, on however wide a pool it may come to sit."""

    def __init__(self, job: Job, whole_pools: tuple[PoolName, ...]) -> None:
        self.job = job
        self.named = any(want.named for want in job.spec.wants)
        self.solo_ms = solo_ms(job)
        self.limit_ms = limit_of(job)
        #: each phase, and how long it keeps its nodes busy in a shared group: moving its states included
        self.busy = [(phase, (phase_ms(job, phase) or 0, _besides_ms(job, phase))) for phase in job.spec.phases]
        self.shared_ms = 0 if self.solo_ms is None else self.solo_ms + sum(moves for _, (_, moves) in self.busy)
        self._whole = {want.pool: want.nodes for want in job.spec.wants if want.pool in whole_pools and not want.gpus}

    def scaled(self, phase: PhaseSpec, busy: tuple[Millis, Millis], width: int) -> Millis:
        """A phase on a whole pool that is wider than the job's own want is shorter by as much (data parallel)."""
        own = width  # what was measured was measured on the width that it has
        if phase.planned_ms is not None and len(phase.pools) == 1:
            own = self._whole.get(phase.pools[0], width)
        return busy[0] * own // width + busy[1] if width > own else busy[0] + busy[1]

    def legs(self, pins: dict[PoolName, tuple[NodeId, ...]]) -> tuple[Leg, ...]:
        """The job's legs in a shared group on these nodes."""
        made = []
        for number, (phase, busy) in enumerate(self.busy):
            nodes = tuple(dict.fromkeys(node for pool in phase.pools for node in pins.get(pool, ())))
            made.append(
                Leg(
                    self.job.id,
                    nodes,
                    self.scaled(phase, busy, len(nodes)),
                    phase.gap_ms + rollouts_rest_ms(self.job),
                    number,
                )
            )
        return tuple(made)


def limit_of(job: Job) -> Millis | None:
    """What an iteration may take at most, SLO x T_solo; None: without an SLO, or while its times are not known."""
    solo = solo_ms(job)
    return None if job.spec.slo is None or solo is None else int(job.spec.slo * solo)


def moves_alone(job: Job) -> bool:
    """Whether a job that is alone in a group moves states all the same."""
    return job.spec.park is Park.AT_RELEASE or job.spec.colocate


def rate_of(group: Group, job: Job) -> int:
    """How many iterations the job goes round in one rotation of its group."""
    first = job.spec.phases[0].name
    return sum(turn.job == job.id and turn.phase == first for turn in group.schedule)


def may_share(state: State, job: Job, group: Group) -> bool:
    """Whether the job may join the group at all, whatever its plan would say."""
    return not shares_not(state, job, group)


def shares_not(state: State, job: Job, group: Group) -> str:
    """Why no job may join: a guarded member, unstated side phases beside promises, or by credit too tight bounds."""
    everybody = (job, *(state.jobs[name] for name in (*group.jobs, *group.coming)))
    for one in everybody[1:]:
        if one.guarded:
            return f"job {one.spec.name} is short of credit, and has it to itself until it has earned some"
    unsaid = next((one for one in everybody if _comes_unsaid(one)), None)
    if unsaid is not None and any(one.spec.slo is not None for one in everybody):
        return f"job {unsaid.spec.name} does not say how often its side phases come, so it stands beside no promise"
    for one in everybody if group.dispatch is Dispatch.CREDIT else ():
        if one.spec.slo is not None and one.spec.slo < TIGHT_SLO:
            return f"job {one.spec.name} is promised {one.spec.slo:g} times, too little to share by credit"
    return ""


def _comes_unsaid(job: Job) -> bool:
    """Whether the job has side phases without a stated frequency and length."""
    return any(phase.name != "init" and not phase.every for phase in job.spec.side)


def _besides_ms(job: Job, phase: PhaseSpec) -> Millis:
    """What a phase keeps its nodes busy with beside itself: moving its states, and its part of the side phases.

    A side phase that comes once in so many iterations is load on the first phase that has its pools, by as much.
    """
    load = moves_ms(job, phase.pools)
    for side in job.spec.side:
        bearer = next((it for it in job.spec.phases if set(side.pools) & set(it.pools)), job.spec.phases[0])
        if side.every and bearer is phase:
            load += -(-((side.planned_ms or 0) + moves_ms(job, side.pools)) // side.every)
    return load


def _summarise(state: State, group: Group, whole_pools: tuple[PoolName, ...]) -> Summary:
    legs: list[Leg] = []
    load: dict[NodeId, Millis] = dict.fromkeys(group.nodes, 0)
    used: dict[PoolName, dict[NodeId, None]] = {}
    own: dict[JobId, dict[str, Leg]] = {}
    cycles: dict[JobId, tuple[Leg, ...]] = {}
    unknown = False
    for turn in group.schedule:  # a job that left the schedule takes no time in it, and has no promise
        if turn.job not in own:
            job = state.jobs[turn.job]
            pins = state.pins_in(job, group.id)
            for pool, nodes in pins.items():
                used.setdefault(pool, {}).update(dict.fromkeys(nodes))
            shape = Shape(job, whole_pools)
            known = shape.solo_ms is not None
            unknown = unknown or not known
            names = [phase.name for phase in job.spec.phases]
            cycle = shape.legs(pins)
            cycles[turn.job] = cycle
            own[turn.job] = dict(zip(names, cycle, strict=True)) if known else {}
        leg = own[turn.job].get(turn.phase)
        if leg is not None:  # a side phase comes once, and is in no plan
            legs.append(leg)
            for node in leg.nodes:
                load[node] = load.get(node, 0) + leg.busy_ms
    begins = [turn.job for turn in group.schedule if turn.phase == state.jobs[turn.job].spec.phases[0].name]
    limit: Millis | None = None
    limit_job, longest = None, 0
    rates = {name: rate_of(group, state.jobs[name]) for name, mine in own.items() if mine}
    for name, rate in rates.items():
        job = state.jobs[name]
        longest = max(longest, rate * sum(leg.busy_ms + leg.gap_ms for leg in own[name].values()))
        allowed = limit_of(job)
        if job.promised and allowed is not None and (limit is None or rate * allowed < limit):
            limit, limit_job = rate * allowed, job.id
    return Summary(
        version=group.version,
        legs=tuple(legs),
        cycles=tuple(cycles[name] for name in begins) if len(set(begins)) == len(begins) else (),
        load=load,
        longest_ms=longest,
        busiest_ms=max(load.values(), default=0),
        rates=rates,
        limit_ms=limit,
        limit_job=limit_job,
        unknown=unknown,
        used_for={pool: tuple(nodes) for pool, nodes in used.items()},
    )


def _slo_miss(state: State, shape: Shape, summary: Summary, group: Group, period: Millis, *, alone: bool) -> Reason:
    """The SLO that is in the way, and, where that is ``alone`` and the job's own, the one with which it would do."""
    own = shape.limit_ms
    if own is not None and own < period and (summary.limit_ms is None or period <= summary.limit_ms):
        text = f"in group {group.id} its iteration would take {_s(period)} s, and its SLO allows {_s(own)} s"
        data = {"group": group.id, "period_s": period / 1000, "limit_s": own / 1000, "job": shape.job.id}
        return Reason("own_slo", text, data | ({"slo": period / (shape.solo_ms or 1)} if alone else {}))
    limit, whose = summary.limit_ms or 0, state.jobs[summary.limit_job or shape.job.id]
    text = (
        f"in group {group.id} everybody's iteration would take {_s(period)} s, "
        f"and job {whose.spec.name} is promised {_s(limit)} s"
    )
    data = {"group": group.id, "period_s": period / 1000, "limit_s": limit / 1000, "job": whose.id}
    return Reason("member_slo", text, data)


def usable(node: Node) -> bool:
    """Whether a node can be given to a job at all."""
    return node.status is NodeStatus.UP and not node.drain


def _serves(node: Node, pool: PoolName) -> bool:
    return usable(node) and pool in node.pools


def _free(node: Node) -> bool:
    return node.group is None and usable(node)


def enough(state: State, want: Want, nodes: Sequence[NodeId]) -> bool:
    """Whether the nodes are up, of the pool, and as many (nodes or GPUs) as wanted."""
    if not nodes or not all(_serves(state.nodes[name], want.pool) for name in nodes):
        return False
    if want.gpus:
        return sum(len(state.nodes[name].gpus) for name in nodes) >= want.gpus
    return len(nodes) >= want.nodes


def subsets(
    state: State, parts: list[Want], used_for: dict[PoolName, tuple[NodeId, ...]], taken: set[NodeId]
) -> Iterator[dict[PoolName, tuple[NodeId, ...]]]:
    """Ways to put the wanted parts on nodes that the group uses for those pools, in a stable order."""
    if not parts:
        yield {}
        return
    first, rest = parts[0], parts[1:]
    here = [
        name for name in used_for.get(first.pool, ()) if name not in taken and _serves(state.nodes[name], first.pool)
    ]
    for chosen in islice(_choices(state, first, here), SUBSETS_TRIED):
        for others in subsets(state, rest, used_for, taken | set(chosen)):
            yield {first.pool: chosen, **others}


def _choices(state: State, want: Want, nodes: list[NodeId]) -> Iterator[tuple[NodeId, ...]]:
    if not want.gpus:
        yield from combinations(nodes, want.nodes)
        return
    for width in range(1, len(nodes) + 1):
        fits = [
            chosen
            for chosen in islice(combinations(nodes, width), SUBSETS_TRIED)
            if sum(len(state.nodes[name].gpus) for name in chosen) >= want.gpus
        ]
        if fits:
            yield from fits
            return


def free_nodes(
    state: State, job: Job, wants: list[Want], named: dict[PoolName, tuple[NodeId, ...]] | None = None
) -> dict[PoolName, tuple[NodeId, ...]] | None:
    """Free nodes for the wanted pools beside those named, or None. The pool with the fewest chooses first."""
    if job.spec.colocate and len(wants) > 1:
        return _free_colocated(state, job, wants, named or {})
    before = {name for nodes in job.last_pins.values() for name in nodes}
    free: dict[PoolName, list[Node]] = {want.pool: [] for want in wants}
    for node in state.nodes.values():
        if node.group is None and usable(node):
            for pool in node.pools:
                if pool in free:
                    free[pool].append(node)
    pins: dict[PoolName, tuple[NodeId, ...]] = dict(named or {})
    used = {name for names in pins.values() for name in names}
    ram_taken: dict[HostId, int] = {}
    for want in sorted(wants, key=lambda want: len(free[want.pool])):
        ordered = sorted(free[want.pool], key=lambda node: (node.id not in before, price_of(node)))
        names: list[NodeId] = []
        gpus = 0
        for node in ordered:
            host = state.hosts[node.host]
            taken = ram_taken.get(node.host, 0)
            ram = ram_mb_on(state, job, want.pool, node)
            if node.id in used or host.reserved_mb + taken + ram > host.ram_mb:
                continue
            if short_of_time(state, job, {want.pool: (node.id,)}):
                continue
            names.append(node.id)
            gpus += len(node.gpus)
            ram_taken[node.host] = taken + ram
            if gpus >= want.gpus if want.gpus else len(names) == want.nodes:
                break
        else:
            return None
        used.update(names)
        pins[want.pool] = tuple(names)
    return pins


def _free_colocated(
    state: State, job: Job, wants: list[Want], named: dict[PoolName, tuple[NodeId, ...]]
) -> dict[PoolName, tuple[NodeId, ...]] | None:
    """The same free nodes for all the wanted pools, or None."""
    pools = [want.pool for want in wants]
    most = Want(pool=pools[0], nodes=max(want.nodes for want in wants), gpus=max(want.gpus for want in wants))
    ram = sum(spec.ram_mb for spec in job.spec.states if spec.pool in pools)
    one = replace(job.spec, wants=(most,), states=(StateSpec(pool=most.pool, ram_mb=ram),), colocate=False)
    here = replace(state, nodes={n.id: n for n in state.nodes.values() if all(pool in n.pools for pool in pools)})
    chosen = free_nodes(here, Job(job.id, job.owner, job.user, one, 0, last_pins=job.last_pins), [most])
    return None if chosen is None else {**named, **dict.fromkeys(pools, chosen[most.pool])}


def _named_nodes(state: State, job: Job, group: Group | None) -> dict[PoolName, tuple[NodeId, ...]] | None:
    """The nodes that the job named, by pool, if they are all up, and free or in the group; None otherwise."""
    pins = {want.pool: want.named for want in job.spec.wants if want.named}
    for names in pins.values():
        for name in names:
            node = state.nodes.get(name)
            if node is None or not usable(node) or node.group not in (None, group.id if group else None):
                return None
    return pins


def price_of(node: Node) -> float:
    """Per hour."""
    return node.price_per_gpu_hour * len(node.gpus)


def price_of_pins(state: State, pins: dict[PoolName, tuple[NodeId, ...]]) -> float:
    """Per hour, of the nodes among the pins that no job uses yet."""
    names = dict.fromkeys(name for nodes in pins.values() for name in nodes)
    return sum(price_of(state.nodes[name]) for name in names if state.nodes[name].group is None)


def _s(ms: Millis) -> str:
    return f"{ms / 1000:.1f}" if ms >= 10_000 or ms % 100 == 0 else f"{ms / 1000:.2f}"
