"""Left-overs: what parked states leave on GPUs, as seen, against what was agreed.

The first park of a state writes down what it left. More than was agreed is no end in itself: where every other job of
the node still fits beside it, the job is written down with what it takes (an alarm for people, and room that placement
counts from then on), and the GPUs are given on. Where somebody would not fit, the job that takes his room goes.

A job that declared no state for a node has agreed to leave nothing there: what its process keeps is not known to be of
any size, and nobody can have it moved. So it goes too, before the node does, which others have a right to.
"""

from collections.abc import Mapping, Sequence

from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.context import Context
from rollmuxd.core.ids import Millis
from rollmuxd.core.model import Job, JobState, Node, StateStatus
from rollmuxd.core.spec import OnLoss
from rollmuxd.core.state import allowed_residual_mb
from rollmuxd.core.steps.dispatch import dispatch
from rollmuxd.core.steps.launch import kill
from rollmuxd.core.steps.reclaim import (
    clean_limit_mb,
    end_placement_if_empty,
    given_back,
    gpus_observed,
    may_still_fill,
    quarantine,
)

#: a state that leaves more than this part of itself (a quarter) was not parked
A_STATE_ITSELF = 4


def record_residual(c: Context, kept: JobState, seen: Sequence[i.GpuObservation]) -> None:
    """What a state has left, the first time that it was parked and its GPUs were seen clear."""
    node = c.state.nodes[kept.node]
    if kept.status is not StateStatus.PARKED or kept.residual_mb is not None or not seen:
        return
    if any(gpu.dirty_by == kept.job for gpu in node.gpus.values()):
        return
    limit = c.state.residual_mb_on(node) + c.config.clear_tolerance_mb
    # what others have not given back yet, and what is a stranger's, is none of its
    free = [sight for sight in seen if (it := node.gpus[sight.gpu]).holder is None and it.dirty_by is None]
    used = [sight.used_mb for sight in free if sight.used_mb <= limit]
    left = max(used, default=0) - c.state.residual_mb_on(node, but_of=kept.job)
    if left > 0:
        c.fact(f.ResidualMemorySeen(c.now, kept.job, kept.pool, kept.node, left, allowed_residual_mb(kept)))


def judge(c: Context, node: Node, sights: Mapping[str, i.GpuObservation]) -> None:
    """Parked states that leave more than was agreed, once memory had the time that it takes to be given back."""
    for name in dict.fromkeys(gpu.dirty_by for gpu in node.gpus.values() if gpu.dirty_by is not None):
        job = c.state.jobs[name]
        states = _states(c, node, job)
        parked = [kept for kept in states if kept.status is StateStatus.PARKED]
        if node.unclear_since is None or c.now - node.unclear_since < c.config.left_over_ms:
            return
        if parked and job.live and not may_still_fill(c, node, name):
            _judge(c, node, job, parked[-1], sights, node.unclear_since)
        elif not states and job.live:
            _judge_stateless(c, node, job, sights, node.unclear_since)


def _judge(
    c: Context, node: Node, job: Job, kept: JobState, sights: Mapping[str, i.GpuObservation], since: Millis
) -> None:
    worst = _worst(c, node, job, sights)
    if worst is None:
        return
    used = sights[worst].used_mb
    agreed = allowed_residual_mb(kept)
    left = used - (c.state.residual_mb_on(node) - agreed)
    if left <= agreed + c.config.clear_tolerance_mb:
        return
    trouble = _why_not_let(c, node, job, kept, left, used)
    if trouble is not None and c.now - since < c.config.clear_limit_ms // 2:
        return  # what is not let may still go, and half of the time is left for it to be discarded
    if trouble is None:
        c.fact(f.ResidualMemorySeen(c.now, job.id, kept.pool, node.id, left, agreed))
        gpus_observed(c, tuple(sights[gpu] for gpu in node.gpus))
        return
    quarantine(
        c,
        job,
        f"its {kept.pool} state left {left / 1000:g} GB on {worst} when parked, {agreed / 1000:g} GB were agreed "
        f"(leftover_gb), and {trouble}",
    )
    _has_gone(c, node, job)


def _judge_stateless(c: Context, node: Node, job: Job, sights: Mapping[str, i.GpuObservation], since: Millis) -> None:
    worst = _worst(c, node, job, sights)
    limit = clean_limit_mb(c, node)
    if worst is None or sights[worst].used_mb <= limit or c.now - since < c.config.clear_limit_ms // 2:
        return
    quarantine(
        c,
        job,
        f"it keeps {sights[worst].used_mb / 1000:g} GB on {worst}, which it has released ({limit / 1000:g} GB would be "
        f"clear), and declared no state for {' and '.join(node.pools)}: declare one, or free the memory in the phase",
    )
    _has_gone(c, node, job)


def _has_gone(c: Context, node: Node, job: Job) -> None:
    """After a quarantine: end its process where that is ours to do, and let the others go on."""
    if job.spec.on_loss is OnLoss.KILL or job.launch is not None:
        c.do(kill(job))
    end_placement_if_empty(c, job)
    dispatch(c, node.group)


def _worst(c: Context, node: Node, job: Job, sights: Mapping[str, i.GpuObservation]) -> str | None:
    """Of the GPUs that the job gave back and that were not seen clear since, the one with most on it."""
    unclear = [gpu for gpu, known in node.gpus.items() if known.dirty_by == job.id and given_back(c, known)]
    return max(unclear, key=lambda gpu: sights[gpu].used_mb, default=None)


def _why_not_let(c: Context, node: Node, job: Job, kept: JobState, left_mb: int, used_mb: int) -> str | None:
    """What speaks against letting it leave so much: it may not have been parked at all, or another would not fit beside
    it. What is not known fits nowhere.
    """
    if not kept.spec.gpu_mb:
        return "how large it is when loaded is not known (gpu_gb)"
    if left_mb > kept.spec.gpu_mb // A_STATE_ITSELF:
        return f"of a state of {kept.spec.gpu_mb / 1000:g} GB (gpu_gb) that is more than a left-over"
    for key in node.states:
        other = c.state.states[key]
        if other.job == job.id:
            continue
        name = c.state.jobs[other.job].spec.name
        if not node.gpu_mb or not other.spec.gpu_mb:
            return f"whether {name} fits beside that is not known (gpu_gb)"
        there = allowed_residual_mb(other) if other.status is not StateStatus.GONE else 0
        if used_mb + other.spec.gpu_mb - there > node.gpu_mb:
            return f"{name} needs {other.spec.gpu_mb / 1000:g} GB of the GPU's {node.gpu_mb / 1000:g} GB"
    return None


def _states(c: Context, node: Node, job: Job) -> list[JobState]:
    return [c.state.states[key] for key in node.states if c.state.states[key].job == job.id]
