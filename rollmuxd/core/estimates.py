"""What a phase takes: what plans reckon with, and what was observed.

A phase is exclusive, so its time in a slot *is* its solo time, shared or not: no job has to leave to be measured.

Plans use the times that a job states, until the measured ones differ (:mod:`~rollmuxd.core.steps.replan`). Where the
job states none, they use the mean of the first few observations, and then likewise. A setting has them use a quantile
in place of the mean (:class:`~rollmuxd.core.config.PlanWith`). That changes by facts only, so a plan and a later
question about it see the same times. The last 64 times are kept and sorted on demand: any quantile of them is exact.
"""

from collections.abc import Collection, Mapping, Sequence

from rollmuxd.core.config import PlanWith
from rollmuxd.core.ids import Millis, NodeId, PoolName
from rollmuxd.core.model import Job, JobState, PhaseTimes, Slot, StateStatus
from rollmuxd.core.spec import PhaseSpec
from rollmuxd.core.state import State

#: observations after which a mean is used for planning
ENOUGH = 3
#: so many phases with known work before them are needed before their times are derived from it
KNOWN = 8
#: a mean has left what was planned when it is off by more than so many of its standard errors
SURE = 2


def quantile_ms(seen: Sequence[Millis], share: float) -> Millis:
    """Of some times, at least one, that below which this share of them lies."""
    return sorted(seen)[min(len(seen) - 1, int(share * len(seen)))]


def phase_ms(job: Job, phase: PhaseSpec) -> Millis | None:
    """The phase's time for planning; None while it is neither stated nor measured."""
    times = job.times.get(phase.name)
    if times is not None and times.planned_ms is not None:
        return times.planned_ms
    if phase.planned_ms is not None:
        return phase.planned_ms
    return None if times is None or times.count < ENOUGH else max(1, sum(times.recent_ms) // len(times.recent_ms))


def planned_with(seen: Sequence[Millis], plan: PlanWith) -> Millis:
    """What plans reckon with, of the times that a phase was seen to take."""
    if plan is PlanWith.MEAN:
        return sum(seen) // len(seen)
    return quantile_ms(seen, 0.9 if plan is PlanWith.P90 else 1.0)


def promised_ms(job: Job, phase: PhaseSpec) -> Millis | None:
    """The phase's time for promises: as for planning, unless plans reckon with more than the mean."""
    times = job.times.get(phase.name)
    return phase_ms(job, phase) if times is None or times.mean_ms is None else times.mean_ms


def has_left(seen: list[Millis], planned: Millis, share: float, plan: PlanWith = PlanWith.MEAN) -> bool:
    """Whether what plans would reckon with has left what was planned: by more than a share of it, and than chance.

    Chance is twice the mean's standard error. Over twenty steps of a multi-turn run, a mean is off by 8 % one time in
    three, by chance alone.
    """
    count = len(seen)
    mean = sum(seen) // count
    off = abs(planned_with(seen, plan) - planned)
    if off <= share * planned:
        return False
    return off * off * count * (count - 1) > SURE * SURE * sum((took - mean) ** 2 for took in seen)


def by_work_ms(job: Job, phase: PhaseSpec) -> Millis | None:
    """What the phase is to take for the work that the job has reported before it; None where that tells little.

    Training time is nearly a function of tokens, and their number is known when the rollout has ended. So it is the
    median time for a unit of work, if that halves the error at least: recent times against their own median.
    """
    times = job.times.get(phase.name, PhaseTimes())
    pairs = [(took, work) for took, work in zip(times.recent_ms, times.works, strict=True) if work > 0]
    if not job.work or len(pairs) < KNOWN:
        return None
    each = sorted(took / work for took, work in pairs)[len(pairs) // 2]
    middle = sorted(took for took, _ in pairs)[len(pairs) // 2]
    if 2 * sum(abs(took - each * work) for took, work in pairs) > sum(abs(took - middle) for took, _ in pairs):
        return None
    return round(each * job.work)


def solo_ms(job: Job) -> Millis | None:
    """One iteration alone, in the mean: all phases and own gaps; None while a phase's time is not known."""
    total = 0
    for phase in job.spec.phases:
        took = promised_ms(job, phase)
        if took is None:
            return None
        total += took + phase.gap_ms
    if job.spec.asynchronous is None:
        return total
    pace = pace_ms(job)
    return None if pace is None else max(pace, total)


def pace_ms(job: Job) -> Millis | None:
    """In what time an asynchronous job's rollouts make one batch; None: it is none, or that is not known yet."""
    return None if job.spec.asynchronous is None else promised_ms(job, job.spec.asynchronous.rollouts)


def judged_by_ms(job: Job, now: Millis) -> Millis:
    """The pace by which an asynchronous job's iteration that ends now is judged; 0: it is no asynchronous job.

    While its pace is not known, an iteration counts as one that has lost nothing.
    """
    if job.spec.asynchronous is None:
        return 0
    began = job.progress.iteration_from
    return pace_ms(job) or (1 if began is None else max(1, now - began - job.progress.iteration_excused_ms))


def rollouts_rest_ms(job: Job) -> Millis:
    """How long an asynchronous job's training rests in each iteration alone, because the next batch is not made."""
    took, pace = promised_ms(job, job.spec.phases[0]), pace_ms(job)
    return 0 if took is None or pace is None else max(0, pace - took)


def moves_ms(job: Job, pools: Collection[PoolName]) -> Millis:
    """What loading and parking the job's states of some pools takes in plans, once each."""
    stated: dict[PoolName, Millis] = {}
    for spec in job.spec.states:
        stated[spec.pool] = stated.get(spec.pool, 0) + spec.load_ms + spec.park_ms
    return sum(job.moves_ms.get(pool, took) for pool, took in stated.items() if pool in pools)


def observed_moves_ms(job: Job, states: Mapping[str, JobState]) -> dict[PoolName, Millis]:
    """By pool, what the last load and park of the job's states took, once enough of its loads were warm ones.

    A pool on whose nodes not each state was loaded and parked yet is left out. Nodes are loaded at the same time, so
    the slowest counts.
    """
    if job.progress.loads_warm < ENOUGH:
        return {}
    kept = [states[key] for key in job.states]
    seen: dict[PoolName, dict[NodeId, Millis]] = {}
    for it in kept:
        if it.node in job.pins.get(it.pool, ()):
            nodes = seen.setdefault(it.pool, {})
            nodes[it.node] = nodes.get(it.node, 0) + it.loads_ms + it.parks_ms
    unseen = {it.pool for it in kept if it.load_ms is None or it.park_ms is None}
    return {pool: max(nodes.values()) for pool, nodes in seen.items() if pool not in unseen}


def credit_ms(job: Job) -> Millis | None:
    """By how much the job is ahead of its bound: slo x realised solo time less elapsed time; None without an SLO."""
    return None if job.spec.slo is None else ahead_ms(job, job.spec.slo)


def ahead_ms(job: Job, slo: float, now: Millis | None = None) -> Millis:
    """By how much the job is ahead of a bound, in its finished iterations; with ``now``, in the one at hand too."""
    progress = job.progress
    solo, elapsed = progress.solo_ms, progress.elapsed_ms
    if now is not None and progress.iteration_from is not None:
        solo += max(progress.iteration_solo_ms, min(pace_ms(job) or 0, now - progress.iteration_from))
        elapsed += now - progress.iteration_from - progress.iteration_excused_ms
    return int(slo * solo) - elapsed


def held_up_by_loans_ms(state: State, job: Job, slot: Slot, now: Millis) -> Millis:
    """How long loans of its nodes to fillers have held a request up, at most: the wait for their ends, and a load."""
    most, since = 0, max(slot.queued_at, job.placed_at or 0)
    for node in map(state.nodes.__getitem__, state.phase_nodes(job, slot.phase)):
        ended = node.loan_ended_at if node.loan is None else now
        if ended is None:
            continue
        # no job was there since
        again = all(it.loaded_at is None or it.loaded_at <= ended for it in state.states_on(node))
        mine = state.states_at(job, node) if again else ()
        loads = sum(it.loads_ms for it in mine if it.status is not StateStatus.LOADED)
        most = max(most, max(0, ended - since) + loads)
    return most
