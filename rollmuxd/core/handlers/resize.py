"""Tails that grow again: GPUs that a slot gave back are offered to it while nobody else can use them."""

from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.context import NOTHING, SERVED, Context
from rollmuxd.core.decision import Answer, Directive
from rollmuxd.core.errors import Conflict
from rollmuxd.core.handlers import jobs
from rollmuxd.core.handlers.slots import check_holder, phase_nodes
from rollmuxd.core.ids import GpuId
from rollmuxd.core.model import Node, NodeStatus, Slot, SlotStatus, StateStatus
from rollmuxd.core.order import find_phase


def offer(c: Context, slot: Slot) -> tuple[GpuId, ...]:
    """All GPUs that a tail had, where it could have them back; () where it could not, or somebody waits for them.

    No others of its nodes: it began without them, so nothing of it was ever loaded there.
    """
    job = c.state.jobs[slot.job]
    group = c.state.groups.get(job.group or "")
    if slot.status is not SlotStatus.TAIL or group is None or growth_refused(c, slot):
        return ()
    nodes = [node.id for node in nodes_before_shrink(c, slot)]
    for name in group.jobs:
        other = c.state.jobs[name]
        asks = other.queued is not None and other.queued not in c.timers.detached and other.slot is None
        if other is not job and asks and other.status in SERVED:
            claims = c.rotation.nodes_of(c.state, group, name, c.state.slots[other.queued or ""].phase)
            if any(node in claims for node in nodes):
                return ()
    return slot.claimed


def nodes_before_shrink(c: Context, slot: Slot) -> list[Node]:
    """The nodes of which a tail had GPUs."""
    nodes = [c.state.nodes[name] for name in phase_nodes(c, c.state.jobs[slot.job], slot)]
    return [node for node in nodes if not node.gpus.keys().isdisjoint(slot.claimed)]


def growth_refused(c: Context, slot: Slot) -> str:
    """Why the slot cannot have all GPUs that it had; empty: it can."""
    job = c.state.jobs[slot.job]
    phase = find_phase(c.state, job.id, slot.phase)
    if not job.has_place:  # it is to leave these nodes, and what it has there is cleared away
        return f"{job.spec.name} is {job.status}"
    if phase is None:
        return f"{job.spec.name} has no phase {slot.phase} any more"
    for node in nodes_before_shrink(c, slot):
        if node.status is not NodeStatus.UP:
            return f"node {node.id} is {node.status}"
        for gpu in (name for name in node.gpus if name in slot.claimed):
            it = node.gpus[gpu]
            if it.holder not in (None, slot.id):
                return f"{gpu} is held by slot {it.holder}"
            if it.dirty_by not in (None, job.id):
                return f"{gpu} has not been seen clear of {c.state.jobs[it.dirty_by or ''].spec.name}"
        for kept in (c.state.states[key] for key in node.states):
            if kept.job == job.id and kept.pool in phase.pools and kept.status is not StateStatus.LOADED:
                return f"its {kept.pool} state on {node.id} is {kept.status}"
    return ""


def grow(c: Context, ask: i.GrowSlot) -> Answer:
    """The job takes back what was offered. A tail's own bytes on them are no hindrance: they are the job's."""
    slot = c.state.slot(ask.slot)
    check_holder(c, slot, ask.fence)
    if slot.status is SlotStatus.RUNNING:
        return Answer(slot=slot.id, repeated=True)
    why = growth_refused(c, slot)
    if why:
        raise Conflict(f"slot {slot.id} cannot grow: {why}; it goes on on {', '.join(slot.gpus)}")
    c.fact(f.SlotGrown(c.now, slot.id, slot.claimed))
    return Answer(slot=slot.id)


def heartbeat(c: Context, ask: i.Heartbeat) -> Answer:
    """The lease is renewed, and a tail may be asked to shrink; where nothing is asked, something may be offered."""
    answer = jobs.heartbeat(c, ask)
    slot = c.state.slots.get(ask.slot or "")
    if answer is not NOTHING or slot is None:
        return answer
    gpus = offer(c, slot)
    if gpus:
        return Answer(directives=(Directive("grow", slot.id, gpus=gpus),))
    move = c.state.jobs[slot.job].move
    if move is None:
        return answer
    names = dict.fromkeys(name for nodes in move.pins.values() for name in nodes)
    there = tuple(gpu for name in names for gpu in c.state.nodes[name].gpus)
    return Answer(directives=(Directive("move", slot.id, reason=move.why, gpus=there),))
