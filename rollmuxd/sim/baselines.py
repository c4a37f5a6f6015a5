"""What RollMux is measured against: policies of the scheduler's own core, each with what it registers for a job.

| name | what it is | sources |
|---|---|---|
| ``rollmux-artifact`` | RollMux as its published code behaves | RollMux's artifact |
| ``solo`` | every job alone on its own rollout and training nodes | RollMux 7.1, *Solo-D* |
| ``colocated`` | every job alone, both phases on the same training nodes | RollMux 7.1, *veRL* |

(Paragraphs of ``research/rollmux.md``: 1.9, 1.15, 1.18.) Times are integer milliseconds.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from typing import Final, TypeAlias

from msgspec.structs import replace

from rollmuxd.core.estimates import solo_ms
from rollmuxd.core.model import Dispatch, GroupId, JobId, Millis, NodeId, PoolName, StateSpec, Want
from rollmuxd.core.placement import RollMux, Summary
from rollmuxd.core.policy import Policy
from rollmuxd.core.state import State
from rollmuxd.core.wheel import Leg, work_conserving_ms
from rollmuxd.sim.contender import Contender, InWheelOrder, RollMuxPaper, RollMuxUnpruned
from rollmuxd.sim.workload import Durations, Impossible, SimJob, Starts

#: iterations that every job runs when the artifact plans a group
ROUNDS: Final = 100

#: the legs of one job: nodes as a bit mask, how long, the job's own gap before
_Track: TypeAlias = tuple[tuple[int, Millis, Millis], ...]


# ---- rollmux-artifact --------------------------------------------------------------------------------------------


class FirstComeFirstServed(RollMux):
    """Algorithm 1 with the published code's test of a group (research 1.18).

    A group is simulated: whoever asked first goes first, all jobs begin at 0 in the order in which they joined, and
    each runs 100 iterations. An iteration is then said to take a hundredth of the time until the last one is through,
    the same for everybody (*lock-step*); the group will not do when that is as much as somebody's SLO allows, or more.
    Planned loading and parking, of which the published code knows nothing, are in the phases as everywhere here.
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


class Artifact:
    """RollMux as its published code behaves."""

    name = "rollmux-artifact"
    summary = "as the published code: no pruning, first come first served, groups judged by a simulated makespan"

    def policy(self, seed: int) -> Policy:
        """First come first served; nothing is drawn."""
        return FirstComeFirstServed()

    def adapt(self, job: SimJob) -> SimJob:
        """As it is."""
        return job

    def paces(self, policy: Policy, state: State, group: GroupId) -> dict[JobId, Millis]:
        """Each member's own mean period, as nobody waits for the others; alone, it is the solo iteration."""
        members = state.groups[group].jobs
        if len(members) == 1 or not isinstance(policy, FirstComeFirstServed):
            return {name: solo_ms(state.jobs[name]) or 0 for name in members}
        tracks = _by_job(policy.legs(state, group))
        return dict(zip(tracks, _own_periods(tuple(tracks.values())), strict=True))


def _by_job(wheel: Sequence[Leg]) -> dict[JobId, _Track]:
    """The legs of each job, without names: nodes are numbered as they come, so that groups that are alike are equal."""
    bits: dict[NodeId, int] = {}
    tracks: dict[JobId, list[tuple[int, Millis, Millis]]] = {}
    for leg in wheel:
        mask = 0
        for node in leg.nodes:
            mask |= bits.setdefault(node, 1 << len(bits))
        tracks.setdefault(leg.job, []).append((mask, leg.busy_ms, leg.gap_ms))
    return {job: tuple(track) for job, track in tracks.items()}


def _tracks(wheel: Sequence[Leg]) -> tuple[_Track, ...]:
    return tuple(_by_job(wheel).values())


@lru_cache(maxsize=1 << 16)
def _own_periods(tracks: tuple[_Track, ...]) -> tuple[Millis, ...]:
    """Per job, in order: its own mean period when whoever is ready goes (:func:`work_conserving_ms`)."""
    wheel = [
        Leg(str(job), tuple(str(bit) for bit in range(mask.bit_length()) if mask >> bit & 1), busy, gap)
        for job, track in enumerate(tracks)
        for mask, busy, gap in track
    ]
    periods = work_conserving_ms(wheel)
    return tuple(periods[str(job)] for job in range(len(tracks)))


@lru_cache(maxsize=1 << 16)
def makespan_ms(tracks: tuple[_Track, ...], rounds: int) -> Millis:
    """Until the last job is through, if each goes round so often and whoever asked first goes first.

    A phase starts when all its nodes are free; one that has to wait for some does not keep the others from later
    comers. Once the jobs stand to each other as they stood before, what happened since will happen again, so whole
    repetitions are leapt over; the result is the same as without.
    """
    line = _Line(tracks, rounds)
    seen: dict[object, tuple[Millis, list[int]]] = {}
    while line.running:
        round_over, somebody_through = line.step()
        if somebody_through:
            seen.clear()
        elif round_over == line.pacer():
            stand = line.stand()
            if stand in seen:
                line.leap(*seen[stand])
                seen.clear()
            else:
                seen[stand] = (line.now, list(line.done))
    return line.now


class _Line:
    """Jobs that go round their phases and stand in line for nodes."""

    def __init__(self, tracks: tuple[_Track, ...], rounds: int) -> None:
        self.tracks, self.rounds = tracks, rounds
        self.now: Millis = 0
        self.done = [0] * len(tracks)
        self.at = [0] * len(tracks)
        #: those that wait, the first comer first
        self.waiting: list[int] = []
        #: (when, number, job, whether it holds its nodes: else it is in its own gap)
        self.running: list[tuple[Millis, int, int, bool]] = []
        self._held = 0
        self._number = 0
        self._longest_first = sorted(range(len(tracks)), key=lambda job: -sum(busy for _, busy, _ in tracks[job]))
        for job in range(len(tracks)):
            self._go_to(job, 0)
        self._start()

    def step(self) -> tuple[int | None, bool]:
        """The next thing that happens; whose round is over with it, if anybody's, and whether that was its last."""
        self.now, _, job, holds = heappop(self.running)
        over: int | None = None
        through = False
        if not holds:
            self.waiting.append(job)
        else:
            self._held &= ~self.tracks[job][self.at[job]][0]
            following = self.at[job] + 1
            if following == len(self.tracks[job]):
                self.done[job] += 1
                over, following = job, 0
                through = self.done[job] == self.rounds
            if not through:
                self._go_to(job, following)
        self._start()
        return over, through

    def pacer(self) -> int:
        """The longest of the jobs that are not through: after each of its rounds it is looked how the jobs stand."""
        return next((job for job in self._longest_first if self.done[job] < self.rounds), -1)

    def stand(self) -> object:
        """How the jobs stand to each other, without when and how often."""
        running = tuple((when - self.now, job, holds) for when, _, job, holds in sorted(self.running))
        return (running, tuple(self.waiting), tuple(self.at))

    def leap(self, then: Millis, done_then: list[int]) -> None:
        """Repeat what happened since ``then`` as often as leaves everybody something to do."""
        gained = [now - before for now, before in zip(self.done, done_then, strict=True)]
        times = min((self.rounds - 1 - done) // more for done, more in zip(self.done, gained, strict=True) if more)
        ahead = times * (self.now - then)
        self.now += ahead
        self.done = [done + times * more for done, more in zip(self.done, gained, strict=True)]
        self.running = [(when + ahead, number, job, holds) for when, number, job, holds in self.running]

    def _go_to(self, job: int, leg: int) -> None:
        self.at[job] = leg
        gap = self.tracks[job][leg][2]
        if gap:
            self._number += 1
            heappush(self.running, (self.now + gap, self._number, job, False))
        else:
            self.waiting.append(job)

    def _start(self) -> None:
        left = []
        for job in self.waiting:
            mask, busy, _ = self.tracks[job][self.at[job]]
            if mask & self._held:
                left.append(job)
                continue
            self._held |= mask
            self._number += 1
            heappush(self.running, (self.now + busy, self._number, job, True))
        self.waiting = left


# ---- everybody alone -----------------------------------------------------------------------------------------------


class Isolated(RollMux):
    """A group of its own for every job."""

    name = "isolated"

    def __init__(self) -> None:
        super().__init__(max_group=1)


class Solo(InWheelOrder):
    """Dedicated disaggregation."""

    name = "solo"
    summary = "dedicated disaggregation (Solo-D): every job alone on its own rollout and training nodes"

    def policy(self, seed: int) -> Policy:
        """Everybody alone."""
        return Isolated()

    def adapt(self, job: SimJob) -> SimJob:
        """With as many nodes as it has to itself, which can be more than it counts with where it shares."""
        wants = tuple(replace(want, nodes=job.footprint.get(want.pool, want.nodes)) for want in job.spec.wants)
        return replace(job, spec=replace(job.spec, wants=wants))


class Colocated(InWheelOrder):
    """Both phases of a job on the same nodes, nobody else there."""

    name = "colocated"
    summary = "co-located (as veRL): every job alone, both phases on the same training nodes"

    def policy(self, seed: int) -> Policy:
        """Everybody alone."""
        return Isolated()

    def adapt(self, job: SimJob) -> SimJob:
        """On the nodes of :attr:`SimJob.colocated`; see :func:`on_one_pool`."""
        return on_one_pool(job)


def on_one_pool(job: SimJob) -> SimJob:
    """The job as it runs co-located.

    Its phases take what they take there: the means as measured, each iteration's own times in the same proportion.
    What it keeps for its pools lies on the same nodes: the RAM adds up; of the GPU memory it is the larger, as the one
    is put aside for the other. It has as many iterations to do as it would have had otherwise, and its solo iteration
    is the co-located one: it has the nodes to itself, so it is never slowed, and its SLO is kept whatever it is.
    No tail is released: nobody is there to take it.

    Raises:
        Impossible: how it would run co-located is not known.
    """
    alone = job.colocated
    if alone is None:
        raise Impossible(f"job {job.name} ({job.kind}) cannot run co-located: its times on one pool are not known")
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
        starts=_both(job.starts, alone.pool),
        tail_from=(),
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
            leftover_mb=min(max(kept.gpu_mb for kept in states), sum(kept.leftover_mb for kept in states)),
            ram_mb=sum(kept.ram_mb for kept in states),
            driver=states[0].driver,
            load_ms=sum(kept.load_ms for kept in states),
            park_ms=sum(kept.park_ms for kept in states),
        ),
    )


def _both(starts: Mapping[PoolName, Starts], pool: PoolName) -> dict[PoolName, Starts]:
    """Both engines are built, and loaded, on the same nodes: one after the other."""
    if not starts:
        return {}
    cold = sum(start.cold_ms for start in starts.values())
    return {pool: Starts(cold_ms=cold, warm_ms=sum(start.warm_ms for start in starts.values()))}


_OURS: Final[tuple[Contender, ...]] = (
    RollMuxPaper(),
    RollMuxUnpruned(),
    Artifact(),
    Solo(),
    Colocated(),
)

#: every contender by its name, in the order in which they are shown
CONTENDERS: Final[dict[str, Contender]] = {contender.name: contender for contender in _OURS}
