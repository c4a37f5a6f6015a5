"""Slots that change their size.

A tail is asked to shrink, and offered what it gave back while no other job can use it. A slot that began on a part of
its phase's GPUs is offered the others when they are clean.
"""

from collections.abc import Sequence

from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.causes import Cause
from rollmuxd.core.context import HOLDS, NOTHING, Context
from rollmuxd.core.decision import Answer, Directive
from rollmuxd.core.errors import Conflict
from rollmuxd.core.handlers.jobs import live_session
from rollmuxd.core.handlers.slots import check_holder
from rollmuxd.core.ids import GpuId, SessionId, SlotId
from rollmuxd.core.model import (
    Group,
    Job,
    Node,
    NodeStatus,
    OrderKind,
    SessionStatus,
    Slot,
    SlotStatus,
    StateStatus,
    nodes_in,
)
from rollmuxd.core.steps.dispatch import (
    engines_of,
    in_whole_engines,
    is_waited_for,
    issue,
    needed,
    request_of,
)
from rollmuxd.core.steps.lines import line_of, next_turn_on
from rollmuxd.core.steps.reclaim import orders_for


def grow(c: Context, ask: i.GrowSlot) -> Answer:
    """The job takes what was offered.

    A tail's own bytes on what it gave back are no hindrance: they are the job's. Onto GPUs that a slot has not had
    before, its state is loaded first.
    """
    slot = c.state.slot(ask.slot)
    check_holder(c, slot, ask.fence)
    more, is_tail = rest_of(c, slot), slot.status is SlotStatus.TAIL
    if not more:
        if is_tail:
            raise Conflict(f"slot {slot.id} cannot have back what it gave; it continues on {', '.join(slot.gpus)}")
        return Answer(slot=slot.id, repeated=True)
    c.fact(f.SlotResized(c.now, slot.id, slot_with(c, slot, more)))
    job = c.state.jobs[slot.job]
    for kept in () if is_tail else needed(c, job, slot):
        engines = engines_of(c, job, slot.phase, (kept.node,))
        there = tuple(gpu for gpus in engines if any(gpu in more for gpu in gpus) for gpu in gpus)
        if there:
            issue(c, OrderKind.LOAD, kept, slot.id, there)
    return Answer(slot=slot.id)


def slot_with(c: Context, slot: Slot, more: tuple[GpuId, ...]) -> tuple[GpuId, ...]:
    """The GPUs of a slot and more of them, in the order of their nodes."""
    nodes = c.state.phase_nodes(c.state.jobs[slot.job], slot.phase)
    return tuple(gpu for name in nodes for gpu in c.state.nodes[name].gpus if gpu in slot.gpus or gpu in more)


def rest_of(c: Context, slot: Slot) -> tuple[GpuId, ...]:
    """The GPUs that a slot can have beside its own; () before its grant, while it loads, and where its job leaves.

    A tail can have back all that it gave, and no others: it began without them, so nothing of it was loaded there. A
    slot that began on a part of its phase's GPUs can have the others, engine by engine, until its own tail. No other
    slot may claim them: one that begins on a part does so beside a tail.
    """
    job, is_tail = c.state.jobs[slot.job], slot.status is SlotStatus.TAIL
    if slot.fence is None or not job.has_place or orders_for(c, slot) or (not is_tail and is_tail_bound(c, slot)):
        return ()
    nodes = [c.state.nodes[name] for name in c.state.phase_nodes(job, slot.phase)]
    if len(slot.gpus) == sum(len(node.gpus) for node in nodes):
        return ()
    usable = [node for node in nodes if node.status is NodeStatus.UP and is_at_rest(c, node, slot)]
    gpus = [it for node in usable for it in node.gpus.items()]
    free = {name for name, gpu in gpus if gpu.holder is None and gpu.dirty_by in (None, job.id)}
    if is_tail:
        gave = tuple(gpu for gpu in slot.claimed if gpu not in slot.gpus)
        return gave if free.issuperset(gave) else ()
    whole = in_whole_engines(c, job, slot.phase, [node.id for node in usable], free.union(slot.gpus))
    return tuple(gpu for gpu in whole if gpu in free)


def is_at_rest(c: Context, node: Node, slot: Slot) -> bool:
    """Whether the slot's states on a node are loaded, if it holds GPUs there or did, and else parked or not there."""
    job = c.state.jobs[slot.job]
    pools = job.spec.phase(slot.phase).pools
    mine = [kept.status for kept in c.state.states_at(job, node) if kept.pool in pools]
    if slot.status is SlotStatus.TAIL or slot.id in node.holders:
        return all(status is StateStatus.LOADED for status in mine)
    return all(status in (StateStatus.PARKED, StateStatus.GONE) for status in mine)


def is_tail_bound(c: Context, slot: Slot) -> bool:
    """Whether the slot's progress has reached its tail."""
    done, total = c.timers.progress.get(slot.id, (0, 0))
    return bool(total) and done >= c.config.tail_from * total


def heartbeat(c: Context, ask: i.Heartbeat) -> Answer:
    """The lease is renewed, and the holder of a slot hears what is asked of it."""
    session = c.state.sessions.get(ask.session)
    if session is None or session.status is not SessionStatus.ALIVE:  # it is the most frequent input: no call
        session = live_session(c, ask.session)
    c.timers.seen[session.id] = c.now
    if ask.slot is None:
        return NOTHING
    slot = c.state.slots.get(ask.slot)
    if slot is not None and slot.session == session.id and slot.status in HOLDS:
        c.timers.progress[slot.id] = (ask.done, ask.total)
    found = directives(c, ask.session, ask.slot)
    return Answer(directives=found) if found else NOTHING


def directives(c: Context, session: SessionId, slot: SlotId) -> tuple[Directive, ...]:
    """What the holder of a slot is asked, offered or told now. Changes nothing."""
    known = c.state.slots.get(slot)
    if known is None or known.session != session:
        return (Directive("stop", slot, reason=Cause("not_yours")),)
    if known.status not in HOLDS:
        return (Directive("stop", slot, reason=known.reason or Cause("slot_is", {"status": str(known.status)})),)
    if known.yield_by is not None:
        filler = c.state.jobs[known.job].spec.filler
        within = 0 if filler is None else filler.yield_ms
        return (Directive("yield", slot, reason=known.reason, within_ms=within),)
    keep = shrink_wish(c, known)
    if keep:
        return (Directive("shrink", slot, keep),)
    job = c.state.jobs[known.job]
    more = rest_of(c, known)
    if more and not (known.status is SlotStatus.TAIL and is_waited_for(c, job, c.state.phase_nodes(job, known.phase))):
        return (Directive("grow", slot, gpus=slot_with(c, known, more)),)
    if job.move is None:
        return ()
    there = tuple(gpu for name in nodes_in(job.move.pins) for gpu in c.state.nodes[name].gpus)
    return (Directive("move", slot, reason=job.move.why, gpus=there),)


def shrink_wish(c: Context, slot: Slot) -> tuple[str, ...]:
    """The GPUs that a tail should keep; () while it should keep all, as when no job can use the part."""
    if slot.status is not SlotStatus.RUNNING or not is_tail_bound(c, slot) or orders_for(c, slot):
        return ()
    job = c.state.jobs[slot.job]
    group, keep = c.state.group_of(job), least_of(c, job, slot)
    if group is None or len(keep) in (0, len(slot.gpus)):
        return ()
    nodes = c.rotation.nodes_of(c.state, group, job.id, slot.phase)
    line = line_of(c, group)
    heads = dict.fromkeys(next_turn_on(c, group, node, line) for node in nodes)
    return keep if any(part_helps(c, group, head, slot, keep, line) for head in heads if head is not None) else ()


def least_of(c: Context, job: Job, slot: Slot) -> tuple[GpuId, ...]:
    """The first GPUs of a slot that are enough for its tail: whole engines, where its state is several."""
    keep: tuple[GpuId, ...] = ()
    least = job.spec.phase(slot.phase).min_gpus
    for engine in engines_of(c, job, slot.phase, c.state.phase_nodes(job, slot.phase)):
        if len(keep) < least and all(gpu in slot.gpus for gpu in engine):
            keep += engine
    return keep if len(keep) >= least else slot.gpus


def part_helps(c: Context, group: Group, head: int, slot: Slot, keep: tuple[str, ...], line: Sequence[Slot]) -> bool:
    """Whether a turn could begin on what the slot would give back, beside what is free already."""
    turn = group.schedule[head]
    job = c.state.jobs[turn.job]
    least, asked = job.spec.phase(turn.phase).min_gpus, request_of(c, job)
    if not least or asked is None or asked.phase != turn.phase or job.group != group.id:
        return False
    nodes = c.rotation.nodes_of(c.state, group, job.id, turn.phase)
    if any(next_turn_on(c, group, node, line) != head for node in nodes):
        return False
    gpus = [(name, gpu.holder) for node in nodes for name, gpu in c.state.nodes[node].gpus.items()]
    free = {name for name, holder in gpus if holder is None or (holder == slot.id and name not in keep)}
    return len(in_whole_engines(c, job, turn.phase, nodes, free)) >= least
