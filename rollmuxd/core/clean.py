"""When a GPU is clean: the one rule.

| its holder | bytes on it may be of | that job's state on the node | verdict |
| --- | --- | --- | --- |
| a slot, by right | any job | any | in use |
| none, or a slot that has ended | no job | any | clean |
| none, or a slot that has ended | a job | loaded, loading or parking; or its load may still be done | expected |
| none, or a slot that has ended | a job | any other; or a tail's, which gave this GPU back | due |

A clean GPU may be claimed. An expected one comes clean by an order or by the next claim, and an observation of an empty
GPU proves nothing there. A due one is clean when it was observed empty; until then it is observed again.
"""

from rollmuxd.core.ids import JobId
from rollmuxd.core.model import Gpu, JobState, Node, OrderKind, SlotStatus, StateStatus
from rollmuxd.core.state import State


def is_due(state: State, node: Node, gpu: Gpu) -> bool:
    """Whether the last row of the table holds for a GPU of the node."""
    return gpu.dirty_by is not None and is_given_back(state, gpu) and not may_still_fill(state, node, gpu.dirty_by)


def is_seen_clean(state: State, node: Node, gpu: Gpu, used_mb: int) -> bool:
    """Whether a GPU is due, and what was seen on it, within the tolerance, is no state of a job.

    Beside a discard it may be the state itself, which the tolerance would hide.
    """
    return is_due(state, node, gpu) and not (used_mb and is_discarding(state, node, gpu.dirty_by))


def is_given_back(state: State, gpu: Gpu) -> bool:
    """Whether no slot uses the GPU by right: only what is left on it keeps it."""
    by_right = (SlotStatus.LOADING, SlotStatus.RUNNING, SlotStatus.TAIL)
    return gpu.holder is None or state.slots[gpu.holder].status not in by_right


def may_still_fill(state: State, node: Node, job: JobId) -> bool:
    """Whether a state of the job is, or is about to be, loaded on the node."""
    for key in node.states:  # often asked: no list is made
        kept = state.states[key]
        if kept.job != job or is_tails(state, kept):
            continue
        if kept.status in (StateStatus.LOADED, StateStatus.LOADING, StateStatus.PARKING):
            return True
        order = state.order_of(kept)
        if order is not None and order.kind is OrderKind.LOAD and state.process_of(order):
            return True  # no word of it, and the process lives: it may yet load
    return False


def is_discarding(state: State, node: Node, job: JobId | None) -> bool:
    """Whether the discard of a state of the job has not ended on the node."""
    return any(kept.job == job and kept.status is StateStatus.DISCARDING for kept in state.states_on(node))


def is_dirty_by(node: Node, job: JobId) -> bool:
    """Whether bytes of the job may be on the node's GPUs, beyond what it has agreed to leave there."""
    return any(gpu.dirty_by == job for gpu in node.gpus.values())


def is_tails(state: State, kept: JobState) -> bool:
    """Whether the state's slot runs on as a tail: the GPUs that it gave back come clean one by one.

    A state that the job has for another pool stays where it is meanwhile.
    """
    job = state.jobs[kept.job]
    if job.slot is None or state.slots[job.slot].status is not SlotStatus.TAIL:
        return False
    return kept.pool in job.spec.phase(state.slots[job.slot].phase).pools
