"""What RollMux is measured against: policies of the scheduler's own core, each with what it registers for a job.

The simulator has ``solo`` itself (RollMux 7.1, *Solo-D*): costs are relative to it.

| name | what it is | sources |
|---|---|---|
| ``rollmux-artifact`` | RollMux as its published code behaves | RollMux's artifact |
| ``colocated`` | every job alone, both phases on the same training nodes | RollMux 7.1, *veRL* |
| ``gavel`` | jobs take turns on a set of nodes, whole iterations at a time | RollMux 7.1, *Gavel+*; Gavel, OSDI'20 |
| ``random`` | a random group or a new one, random rollout nodes in it | RollMux 7.4, its artifact |
| ``most-idle`` | the idlest group or a new one, the idlest rollout nodes in it | RollMux 7.4, its artifact |

(Paragraphs of ``research/rollmux.md``: 1.9, 1.15, 1.18.) Times are integer milliseconds, prices dollars per hour.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from random import Random
from typing import Final, TypeAlias

from msgspec.structs import replace

from rollmuxd.core.estimates import solo_ms
from rollmuxd.core.feasible import check
from rollmuxd.core.ids import GroupId, JobId, Millis, NodeId, PoolName
from rollmuxd.core.model import Dispatch, Group, Job
from rollmuxd.core.policy import Placed, Policy
from rollmuxd.core.spec import PhaseSpec, StateSpec, Want
from rollmuxd.core.state import State
from rollmuxd.policies.rollmux import Candidate, RollMux, Shape, Summary, price_of_pins, usable
from rollmuxd.policies.schedule import Leg
from rollmuxd.sim.kernel import Kernel
from rollmuxd.sim.policies import Bound, Isolated, PolicyUnderTest, on_its_footprint
from rollmuxd.sim.workload import Durations, Impossible, SimJob
from rollmuxd_evaluation.optimal import Optimal

#: iterations that every job runs when the artifact plans a group
ROUNDS: Final = 100
#: and iterations of the longest of them, over which their own periods are measured
HORIZON: Final = 24

#: what a node-hour of each pool is taken to cost where a job has to choose without knowing the workload's prices
NODE_PRICES: Final[Mapping[PoolName, float]] = {"rollout": 8 * 5.28 / 3, "train": 8 * 5.28}
#: from this share of its time on a rollout node is busy enough for another to be bought (research 1.15)
BUSY_ENOUGH: Final = 0.8

#: the legs of one job: nodes as a bit mask, how long, the job's own gap before
_Track: TypeAlias = tuple[tuple[int, Millis, Millis], ...]


# ---- rollmux-artifact --------------------------------------------------------------------------------------------


class FirstComeFirstServed(RollMux):
    """Algorithm 1 with the published code's test of a group (research 1.18).

    A group is simulated, first come first served. All jobs begin at 0 in the order in which they joined, and each runs
    100 iterations. An iteration is then said to take a hundredth of the time until the last job is through, the same
    for every job (*lock-step*). The group is refused when that is as much as a member's SLO allows, or more. Planned
    loading and parking, which the published code does not have, are in the phases as everywhere here.
    """

    name = "rollmux-artifact"
    dispatch = Dispatch.READY

    def __init__(self) -> None:
        super().__init__(prune=False)

    def legs(self, state: State, group: GroupId) -> tuple[Leg, ...]:
        """What the group's members claim, in the order in which they joined."""
        return self._summary(state, state.groups[group]).legs

    def _within(self, summary: Summary, legs: tuple[Leg, ...], limit: Millis) -> bool:
        return makespan_ms(_tracks((*summary.legs, *legs)), ROUNDS) < ROUNDS * limit

    def _period_ms(self, legs: tuple[Leg, ...]) -> Millis:
        return -(-makespan_ms(_tracks(legs), ROUNDS) // ROUNDS)


class Artifact(PolicyUnderTest, frozen=True):
    """RollMux as its published code behaves. Its groups are in no schedule order, so :meth:`paces` differs."""

    def paces(self, policy: Policy, state: State, group: GroupId) -> dict[JobId, Millis]:
        """Each member's own mean period, as no job waits for the others; alone, it is the solo iteration."""
        members = state.groups[group].jobs
        if len(members) == 1 or not isinstance(policy, FirstComeFirstServed):
            return {name: solo_ms(state.jobs[name]) or 0 for name in members}
        tracks = _by_job(policy.legs(state, group))
        return dict(zip(tracks, own_periods(tuple(tracks.values())), strict=True))


def _by_job(schedule: Sequence[Leg]) -> dict[JobId, _Track]:
    """The legs of each job, without names: nodes are numbered as they come, so that groups that are alike are equal."""
    bits: dict[NodeId, int] = {}
    tracks: dict[JobId, list[tuple[int, Millis, Millis]]] = {}
    for leg in schedule:
        mask = 0
        for node in leg.nodes:
            mask |= bits.setdefault(node, 1 << len(bits))
        tracks.setdefault(leg.job, []).append((mask, leg.busy_ms, leg.gap_ms))
    return {job: tuple(track) for job, track in tracks.items()}


def _tracks(schedule: Sequence[Leg]) -> tuple[_Track, ...]:
    return tuple(_by_job(schedule).values())


@lru_cache(maxsize=1 << 16)
def own_periods(tracks: tuple[_Track, ...]) -> tuple[Millis, ...]:
    """Per job, in order: its own mean period when any ready job may start.

    Measured over the last 80 % of about 24 iterations of the longest job (research 6.4, mode ASYNC). It is an
    evaluation, not a certificate: nothing bounds a job's wait in the worst case.
    """
    line = _Line(tracks)
    horizon = HORIZON * max(sum(busy + gap for _, busy, gap in track) for track in tracks)
    while line.kernel.now < horizon:
        line.kernel.step()
    periods = []
    for ends in line.ends:
        late = [end for end in ends if end >= horizon // 5]
        periods.append((late[-1] - late[0]) // (len(late) - 1) if len(late) > 1 else horizon)
    return tuple(periods)


@lru_cache(maxsize=1 << 16)
def makespan_ms(tracks: tuple[_Track, ...], rounds: int) -> Millis:
    """The time until the last job is through, if each goes round so often, first come first served.

    A phase starts when all its nodes are free; one that has to wait for some does not keep the others from later
    comers.
    """
    line = _Line(tracks, rounds)
    while line.kernel.next_at() is not None:
        line.kernel.step()
    return line.kernel.now


class _Line:
    """Jobs that go round their phases, so often or (None) for ever, and stand in line for nodes."""

    def __init__(self, tracks: tuple[_Track, ...], rounds: int | None = None) -> None:
        self.tracks, self.rounds = tracks, rounds
        self.kernel = Kernel()
        #: of each job, when its iterations have ended
        self.ends: list[list[Millis]] = [[] for _ in tracks]
        #: jobs that wait, each with its leg, the first comer first
        self._waiting: list[tuple[int, int]] = []
        self._held = 0
        for job in range(len(tracks)):
            self._go_to(job, 0)
        self._start()

    def _go_to(self, job: int, leg: int) -> None:
        if gap := self.tracks[job][leg][2]:
            self.kernel.after(gap, self._gap_over, job, leg)
        else:
            self._waiting.append((job, leg))

    def _gap_over(self, job: int, leg: int) -> None:
        self._waiting.append((job, leg))
        self._start()

    def _leg_over(self, job: int, leg: int) -> None:
        self._held &= ~self.tracks[job][leg][0]
        following = (leg + 1) % len(self.tracks[job])
        if not following:
            self.ends[job].append(self.kernel.now)
        if self.rounds is None or len(self.ends[job]) < self.rounds:
            self._go_to(job, following)
        self._start()

    def _start(self) -> None:
        left = []
        for job, leg in self._waiting:
            mask, busy, _ = self.tracks[job][leg]
            if mask & self._held:
                left.append((job, leg))
                continue
            self._held |= mask
            self.kernel.after(busy, self._leg_over, job, leg)
        self._waiting = left


# ---- co-located ------------------------------------------------------------------------------------------------------


def on_one_pool(job: SimJob) -> SimJob:
    """The job as it runs co-located: both phases on the same nodes, with no other job there.

    Its phases take what they take there: the means as measured, each iteration's own times in the same proportion.
    What it keeps for its pools lies on the same nodes. The RAM adds up; of the GPU memory it is the larger, as the one
    is parked for the other. It has as many iterations as otherwise, and its solo iteration is the co-located one. It
    has the nodes to itself, so it is never slowed, and any SLO is kept. No tail is released: no job is there to take
    it.

    Raises:
        Impossible: how it would run co-located is not known.
    """
    alone = job.colocated
    if alone is None:
        problem, kind = "its times on one pool are not known", "such jobs"
        if job.spec.asynchronous is not None:
            problem, kind = "it is asynchronous, so its rollouts need GPUs of their own", "asynchronous jobs"
        raise Impossible(
            f"job {job.name} ({job.kind}) cannot run co-located: {problem}; leave out this policy, or {kind}"
        )
    here = (alone.pool,)
    phases = tuple(
        replace(phase, pools=here, planned_ms=took) for phase, took in zip(job.spec.phases, alone.planned, strict=True)
    )
    spec = replace(
        job.spec,
        phases=phases,
        side=tuple(replace(phase, pools=here) for phase in job.spec.side),
        wants=(Want(alone.pool, nodes=alone.nodes),),
        states=_merged(job.spec.states, alone.pool),
        colocate=False,
    )
    return replace(
        job,
        spec=spec,
        series=_in_proportion(job.series, job.planned, alone.planned),
        footprint={alone.pool: alone.nodes},
        # both engines are built on the same nodes, one after the other
        cold_ms={alone.pool: sum(job.cold_ms.values())} if job.cold_ms else {},
        tail_from=(),
        inside=None,
        iterations=job.work,
    )


def _in_proportion(series: tuple[Durations, ...], was: Durations, now: Durations) -> tuple[Durations, ...]:
    """Iterations with each phase longer or shorter by as much as its mean."""
    return tuple(
        tuple(took * new // old if old else new for took, old, new in zip(each, was, now, strict=True))
        for each in series
    )


def _merged(states: tuple[StateSpec, ...], pool: PoolName) -> tuple[StateSpec, ...]:
    """What is kept for several pools, all on one."""
    if not states:
        return ()
    return (
        StateSpec(
            pool=pool,
            gpu_mb=max(kept.gpu_mb for kept in states),
            residual_mb=min(max(kept.gpu_mb for kept in states), sum(kept.residual_mb for kept in states)),
            ram_mb=sum(kept.ram_mb for kept in states),
            driver=states[0].driver,
            load_ms=sum(kept.load_ms for kept in states),
            park_ms=sum(kept.park_ms for kept in states),
        ),
    )


# ---- gavel -----------------------------------------------------------------------------------------------------------


def job_level(job: SimJob) -> SimJob:
    """The job with shares of whole jobs (Gavel, OSDI'20; *Gavel+* of RollMux 7.1, whose details are not published).

    How it was adapted. For Gavel a job either has its nodes or has not. So an iteration is **one phase over both
    pools**, which holds rollout and training nodes together from its beginning to its end. Jobs share a set of nodes by
    taking turns, and a job's share is what the turns leave it. The placement is the price-greedy one of RollMux,
    unpruned. The period of a group is then the sum of its members' iterations, and may exceed no member's SLO. Gavel's
    awareness of heterogeneity is in the choice of nodes. If it is known how a job runs co-located, it takes the
    disaggregated pair or the co-located nodes, whichever makes an iteration cheaper. Its SLO is measured by its time
    alone on these nodes. As all baselines it counts with the nodes that a job has alone (the artifact's 32B jobs train
    on two).

    Generous to Gavel: turns change at iteration boundaries at the price of a warm switch. (A round of Gavel's, 6
    minutes by default, begins with a cold start.) And rounds are no longer than an iteration, so that no share is
    rounded.
    """
    pair = on_its_footprint(job)
    if job.colocated is None:
        return as_one_phase(pair)
    return as_one_phase(min(pair, on_one_pool(job), key=_dollars))


def _dollars(job: SimJob) -> float:
    """What one iteration costs."""
    return sum(NODE_PRICES.get(want.pool, 0.0) * want.nodes for want in job.spec.wants) * job.solo_ms / 3_600_000


def as_one_phase(job: SimJob) -> SimJob:
    """The job with its whole iteration in one phase, which claims all its nodes at once.

    The job's own gap before its first phase stays a gap; those between phases pass with the nodes in hand. Its solo
    iteration, and so its SLO and its work, are what they were.
    """
    phases = job.spec.phases
    inside = sum(phase.gap_ms for phase in phases[1:])
    pools = tuple(dict.fromkeys(pool for phase in phases for pool in phase.pools))
    whole = PhaseSpec("iteration", pools, planned_ms=sum(job.planned) + inside, gap_ms=phases[0].gap_ms)
    took = dict.fromkeys(pools, 0)
    for phase, planned in zip(phases, job.planned, strict=True):
        for pool in phase.pools:
            took[pool] += planned
    return SimJob(
        name=job.name,
        kind=job.kind,
        arrives_ms=job.arrives_ms,
        lasts_ms=job.lasts_ms,
        spec=replace(job.spec, phases=(whole,)),
        series=tuple((sum(each) + inside,) for each in job.series),
        footprint=job.footprint,
        colocated=job.colocated,
        cold_ms=job.cold_ms,
        iterations=job.work,
        busy_share={pool: ms / (whole.planned_ms or 1) for pool, ms in took.items()},
    )


# ---- random and most-idle --------------------------------------------------------------------------------------------


class Heuristic(RollMux):
    """What ``random`` and ``most-idle`` have in common: a coin for a new group, and no look at any SLO.

    Of n groups that could take one more (the cap, the training nodes) a new one is opened with probability 1/(n+1).
    RAM, GPU memory and the cap are respected, which the published code does not look at here. No promise is made, as
    nothing is certified. Each job's draws are its own: asked twice, a policy answers the same.

    The published code charges a group in which an SLO is broken its price times its worst such slowdown. The paper's
    figures for these two are of that kind. Here a node costs what it costs, and a broken SLO counts as one.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(prune=False)
        self.seed = seed

    def _choose(self, state: State, shape: Shape) -> Candidate | None:
        job = shape.job
        if shape.named or job.spec.colocate:
            return super()._choose(state, shape)
        draw = Random(f"{self.seed}:{job.id}:{job.run}")
        groups = [group for group in state.groups.values() if self._could_take(state, job, group)]
        new = draw.randrange(len(groups) + 1) == len(groups)
        if new and (alone := self._isolated(state, job)) is not None:
            return alone
        for group in self._in_order(state, groups, draw):
            if (there := self._in_group(state, job, group, draw)) is not None:
                return there
        return self._isolated(state, job)

    def _in_order(self, state: State, groups: list[Group], draw: Random) -> list[Group]:
        """Groups, the one to be taken first."""
        raise NotImplementedError

    def _pick(self, busy: Mapping[NodeId, float], new: list[NodeId], count: int, draw: Random) -> list[NodeId]:
        """So many of a group's nodes and of new ones; ``busy`` has the share of its time that each of the former is."""
        raise NotImplementedError

    def _could_take(self, state: State, job: Job, group: Group) -> bool:
        return len(group.jobs) < self.max_group and self._whole(state, job, group) is not None

    def _in_group(self, state: State, job: Job, group: Group, draw: Random) -> Candidate | None:
        """The job on the group's training nodes and on picked rollout nodes; None where RAM or nodes are short."""
        pins = self._whole(state, job, group) or {}
        used_for = self._summary(state, group).used_for
        for want in self._parts(job):
            busy = self._busy(state, group, [
                name for name in used_for.get(want.pool, ()) if self._has_room(state, job, want.pool, name)
            ])  # fmt: skip
            new = [name for name in _unused(state, want.pool) if self._has_room(state, job, want.pool, name)]
            nodes = self._pick(busy, new, want.nodes, draw)
            if len(nodes) < want.nodes:
                return None
            pins[want.pool] = tuple(nodes)
        price = price_of_pins(state, pins)
        return None if check(state, job, pins) else Candidate(group, pins, "scaling" if price else "packing", price)

    def _has_room(self, state: State, job: Job, pool: PoolName, node: NodeId) -> bool:
        """Whether the node is up and the job's state fits there."""
        return usable(state.nodes[node]) and check(state, job, {pool: (node,)}) is None

    def _busy(self, state: State, group: Group, nodes: Sequence[NodeId]) -> dict[NodeId, float]:
        """During what share of the group's period each node works."""
        summary = self._summary(state, group)
        period = self._period_ms(summary.legs)
        return {name: summary.load.get(name, 0) / period if period else 0.0 for name in nodes}

    def _placed(self, state: State, shape: Shape, candidate: Candidate) -> Placed:
        return replace(super()._placed(state, shape, candidate), promised=False)


class AtRandom(Heuristic):
    """A group drawn from those there are; each rollout node drawn from the group's and one new one."""

    name = "random"

    def _in_order(self, state: State, groups: list[Group], draw: Random) -> list[Group]:
        return draw.sample(groups, len(groups))

    def _pick(self, busy: Mapping[NodeId, float], new: list[NodeId], count: int, draw: Random) -> list[NodeId]:
        there, fresh = list(busy), list(new)
        picked: list[NodeId] = []
        while len(picked) < count and (there or fresh):
            drawn = draw.randrange(len(there) + (1 if fresh else 0))
            picked.append(there.pop(drawn) if drawn < len(there) else fresh.pop(0))
        return picked


class MostIdle(Heuristic):
    """The group whose nodes idle the greatest share of the time; its idlest rollout nodes while they idle enough."""

    name = "most-idle"

    def _in_order(self, state: State, groups: list[Group], draw: Random) -> list[Group]:
        return sorted(groups, key=lambda group: -self._idle_share(state, group))  # of equal ones the first stays first

    def _pick(self, busy: Mapping[NodeId, float], new: list[NodeId], count: int, draw: Random) -> list[NodeId]:
        idlest_first = sorted(busy, key=lambda name: busy[name])
        idle = [name for name in idlest_first if busy[name] < BUSY_ENOUGH]
        return [*idle, *new, *idlest_first[len(idle) :]][:count]

    def _idle_share(self, state: State, group: Group) -> float:
        """Of the time of all the group's nodes, the share in which nothing runs there."""
        busy = self._busy(state, group, group.nodes)
        return 1 - sum(busy.values()) / len(busy)


def _unused(state: State, pool: PoolName) -> list[NodeId]:
    """Nodes of a pool that are in no group, in their order."""
    return [node.id for node in state.nodes.values() if node.group is None and pool in node.pools]


#: what ``rollmuxd sim`` lists beside its own policies, in this order
POLICIES: Final[dict[str, PolicyUnderTest | Bound]] = {
    known.name: known
    for known in (
        Artifact(
            "rollmux-artifact",
            "as the published code: no pruning, first come first served, groups judged by a simulated makespan",
            lambda *_: FirstComeFirstServed(),
        ),
        PolicyUnderTest(
            "colocated",
            "co-located (as veRL): every job alone, both phases on the same training nodes",
            lambda *_: Isolated(),
            on_one_pool,
        ),
        PolicyUnderTest(
            "gavel",
            "job-level shares (Gavel+): jobs take turns on a set of nodes, whole iterations at a time",
            lambda *_: RollMux(),
            job_level,
        ),
        PolicyUnderTest(
            "random",
            "a random group or a new one, random rollout nodes in it; no look at SLOs",
            lambda seed, _: AtRandom(seed),
        ),
        PolicyUnderTest(
            "most-idle",
            "the idlest group or, by the same coin, a new one, the idlest rollout nodes in it; no look at SLOs",
            lambda seed, _: MostIdle(seed),
        ),
        Optimal(),
    )
}
