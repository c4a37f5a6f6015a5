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
from rollmuxd.core.cycle import Cycle
from rollmuxd.core.launching import kill
from rollmuxd.core.letting_go import clear_limit_mb, given_back, may_still_fill, quarantine, see_gpus, settle
from rollmuxd.core.model import Job, JobState, Millis, Node, OnLoss, StateStatus
from rollmuxd.core.state import leaves_mb
from rollmuxd.core.turns import dispatch

#: a state that leaves more than this part of itself (a quarter) was not parked
A_STATE_ITSELF = 4


def write_down(c: Cycle, kept: JobState, seen: Sequence[i.GpuSight]) -> None:
    """What a state has left, the first time that it was parked and its GPUs were seen clear."""
    node = c.state.nodes[kept.node]
    if kept.status is not StateStatus.PARKED or kept.left_mb is not None or not seen:
        return
    if any(gpu.stain == kept.job for gpu in node.gpus.values()):
        return
    limit = c.state.left_over_mb(node) + c.config.clear_tolerance_mb
    # what others have not given back yet, and what is a stranger's, is none of its
    free = [sight for sight in seen if (it := node.gpus[sight.gpu]).holder is None and it.stain is None]
    used = [sight.used_mb for sight in free if sight.used_mb <= limit]
    left = max(used, default=0) - c.state.left_over_mb(node, but_of=kept.job)
    if left > 0:
        c.fact(f.LeftOverSeen(c.now, kept.job, kept.pool, kept.node, left, leaves_mb(kept)))


def judge(c: Cycle, node: Node, sights: Mapping[str, i.GpuSight]) -> None:
    """Parked states that leave more than was agreed, once memory had the time that it takes to be given back."""
    for name in dict.fromkeys(gpu.stain for gpu in node.gpus.values() if gpu.stain is not None):
        job = c.state.jobs[name]
        states = _states(c, node, job)
        parked = [kept for kept in states if kept.status is StateStatus.PARKED]
        if node.unclear_since is None or c.now - node.unclear_since < c.config.left_over_ms:
            return
        if parked and job.live and not may_still_fill(c, node, name):
            _judge(c, node, job, parked[-1], sights, node.unclear_since)
        elif not states and job.live:
            _judge_stateless(c, node, job, sights, node.unclear_since)


def _judge(c: Cycle, node: Node, job: Job, kept: JobState, sights: Mapping[str, i.GpuSight], since: Millis) -> None:
    worst = _worst(c, node, job, sights)
    if worst is None:
        return
    used = sights[worst].used_mb
    agreed = leaves_mb(kept)
    left = used - (c.state.left_over_mb(node) - agreed)
    if left <= agreed + c.config.clear_tolerance_mb:
        return
    trouble = _why_not_let(c, node, job, kept, left, used)
    if trouble is not None and c.now - since < c.config.clear_limit_ms // 2:
        return  # what is not let may still go, and half of the time is left for it to be discarded
    if trouble is None:
        c.fact(f.LeftOverSeen(c.now, job.id, kept.pool, node.id, left, agreed))
        see_gpus(c, tuple(sights[gpu] for gpu in node.gpus))
        return
    quarantine(
        c,
        job,
        f"its {kept.pool} state left {left / 1000:g} GB on {worst} when parked, {agreed / 1000:g} GB were agreed "
        f"(leftover_gb), and {trouble}",
    )
    _has_gone(c, node, job)


def _judge_stateless(c: Cycle, node: Node, job: Job, sights: Mapping[str, i.GpuSight], since: Millis) -> None:
    worst = _worst(c, node, job, sights)
    limit = clear_limit_mb(c, node)
    if worst is None or sights[worst].used_mb <= limit or c.now - since < c.config.clear_limit_ms // 2:
        return
    quarantine(
        c,
        job,
        f"it keeps {sights[worst].used_mb / 1000:g} GB on {worst}, which it has released ({limit / 1000:g} GB would be "
        f"clear), and declared no state for {' and '.join(node.pools)}: declare one, or free the memory in the phase",
    )
    _has_gone(c, node, job)


def _has_gone(c: Cycle, node: Node, job: Job) -> None:
    """After a quarantine: end its process where that is ours to do, and let the others go on."""
    if job.spec.on_loss is OnLoss.KILL or job.launch is not None:
        c.do(kill(job))
    settle(c, job)
    dispatch(c, node.group)


def _worst(c: Cycle, node: Node, job: Job, sights: Mapping[str, i.GpuSight]) -> str | None:
    """Of the GPUs that the job gave back and that were not seen clear since, the one with most on it."""
    unclear = [gpu for gpu, known in node.gpus.items() if known.stain == job.id and given_back(c, known)]
    return max(unclear, key=lambda gpu: sights[gpu].used_mb, default=None)


def _why_not_let(c: Cycle, node: Node, job: Job, kept: JobState, left_mb: int, used_mb: int) -> str | None:
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
        there = leaves_mb(other) if other.status is not StateStatus.GONE else 0
        if used_mb + other.spec.gpu_mb - there > node.gpu_mb:
            return f"{name} needs {other.spec.gpu_mb / 1000:g} GB of the GPU's {node.gpu_mb / 1000:g} GB"
    return None


def _states(c: Cycle, node: Node, job: Job) -> list[JobState]:
    return [c.state.states[key] for key in node.states if c.state.states[key].job == job.id]
