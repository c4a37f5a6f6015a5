"""Left-overs: what parked states leave on GPUs, as seen, against what was agreed.

The first park of a state writes down what it left. More than was agreed need not end the job. If every other job of the
node still fits beside it, what it takes is written down, and other jobs get the GPUs. That raises an alarm, and
placement counts it from then on. If another job would not fit, the job that takes its room has to leave.

A job that declared no state for a node has agreed to leave nothing there. What its process keeps has no known size, and
no driver can move it. So that job has to leave too, rather than keep the node from others.
"""

from collections.abc import Mapping, Sequence

from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.causes import Cause
from rollmuxd.core.clean import is_dirty_by, is_given_back, may_still_fill
from rollmuxd.core.context import Context
from rollmuxd.core.model import Job, JobState, Node, StateStatus
from rollmuxd.core.state import allowed_residual_mb
from rollmuxd.core.steps.launch import is_ended_for_it, kill
from rollmuxd.core.steps.observe import clean_limit_mb, gpus_observed
from rollmuxd.core.steps.reclaim import quarantine

#: a state that leaves more than this part of itself (a quarter) was not parked
A_STATE_ITSELF = 4


def record_residual(c: Context, kept: JobState, seen: Sequence[i.GpuObservation]) -> None:
    """What a state has left, the first time that it was parked and its GPUs were verified clean."""
    node = c.state.nodes[kept.node]
    if kept.status is not StateStatus.PARKED or kept.residual_mb is not None or not seen:
        return
    limit = clean_limit_mb(c, node)
    # what others have not given back yet, and what is a stranger's, is none of its
    free = {name for name, gpu in node.gpus.items() if gpu.free}
    used = [it.used_mb for it in seen if it.gpu in free and it.used_mb <= limit]
    left = max(used, default=0) - c.state.residual_mb_on(node, but_of=kept.job)
    if left > 0 and not is_dirty_by(node, kept.job):
        c.fact(f.ResidualMemoryObserved(c.now, kept.job, kept.pool, kept.node, left, allowed_residual_mb(kept)))


def judge(c: Context, node: Node, observations: Mapping[str, i.GpuObservation]) -> None:
    """Parked states that leave more than was agreed, once memory had the time that it takes to be given back."""
    for name in dict.fromkeys(gpu.dirty_by for gpu in node.gpus.values() if gpu.dirty_by is not None):
        job, since = c.state.jobs[name], node.not_clean_since
        if since is None or c.now - since < c.config.residual_grace_ms:
            return
        why = _kept(c, node, job, observations) if job.live else None
        # what is not let may still go, and half of the time is left for it to be discarded
        if why is not None and c.now - since >= c.config.clean_timeout_ms // 2:
            quarantine(c, job, why)
            if is_ended_for_it(job):
                c.do(kill(job))


def _kept(c: Context, node: Node, job: Job, observations: Mapping[str, i.GpuObservation]) -> Cause | None:
    """What a job keeps on a GPU and is not let keep. What it is let keep is written down."""
    gpus = node.gpus.items()
    not_clean = [observations[name] for name, gpu in gpus if gpu.dirty_by == job.id and is_given_back(c.state, gpu)]
    if not not_clean:
        return None
    worst = max(not_clean, key=lambda seen: seen.used_mb)
    states = c.state.states_at(job, node)
    parked = [kept for kept in states if kept.status is StateStatus.PARKED]
    limit = clean_limit_mb(c, node)
    if not states and worst.used_mb > limit:
        gb = worst.used_mb / 1000
        return Cause("memory_kept", {"kept_gb": gb, "gpu": worst.gpu, "clean_gb": limit / 1000, "pools": node.pools})
    if not parked or may_still_fill(c.state, node, job.id):
        return None
    kept = parked[-1]
    agreed = allowed_residual_mb(kept)
    left = worst.used_mb - (c.state.residual_mb_on(node) - agreed)
    if left <= agreed + c.config.clean_tolerance_mb:
        return None
    trouble = _why_not_let(c, node, job, kept, left, worst.used_mb)
    if trouble is None:
        c.fact(f.ResidualMemoryObserved(c.now, job.id, kept.pool, node.id, left, agreed))
        gpus_observed(c, (node.id,), observations.values())
        return None
    data = {"pool": kept.pool, "left_gb": left / 1000, "gpu": worst.gpu, "agreed_gb": agreed / 1000}
    return Cause("residual_memory", data, trouble)


def _why_not_let(c: Context, node: Node, job: Job, kept: JobState, residual_mb: int, used_mb: int) -> Cause | None:
    """What speaks against letting it leave so much: it may not have been parked at all, or another would not fit beside
    it. What is not known fits nowhere.
    """
    if not kept.spec.gpu_mb:
        return Cause("size_unknown")
    if residual_mb > kept.spec.gpu_mb // A_STATE_ITSELF:
        return Cause("not_parked", {"state_gb": kept.spec.gpu_mb / 1000})
    for other in c.state.states_that_stay(node):
        if other.job == job.id:
            continue
        if not node.gpu_mb or not other.spec.gpu_mb:
            return Cause("fit_unknown", {"job": other.job})
        there = allowed_residual_mb(other) if other.status is not StateStatus.GONE else 0
        if used_mb + other.spec.gpu_mb - there > node.gpu_mb:
            gb = {"needed_gb": other.spec.gpu_mb / 1000, "gpu_gb": node.gpu_mb / 1000}
            return Cause("does_not_fit", {"job": other.job, **gb})
    return None
