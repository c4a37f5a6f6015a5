"""Phase slots, from the request to the end."""

from rollmuxd.core import facts as f
from rollmuxd.core.apply.groups import drop_once
from rollmuxd.core.apply.hosts import all_gpus_clean
from rollmuxd.core.apply.measures import count_release, count_request
from rollmuxd.core.errors import BrokenInvariant
from rollmuxd.core.ids import Millis
from rollmuxd.core.lifecycle import meet
from rollmuxd.core.model import Job, Node, Slot, SlotStatus, nodes_in
from rollmuxd.core.state import State

#: ended slots of a job that are remembered, so that a repeated call gets the answer it got before
SLOTS_REMEMBERED = 4
#: of what a slot measured: how much work there was, and is for the phase that comes next
WORK = "work"


def slot_queued(state: State, fact: f.SlotQueued) -> None:
    state.mint("s")
    job = state.jobs[fact.job]
    state.slots[fact.slot] = Slot(
        fact.slot, fact.job, fact.run, fact.session, fact.phase, fact.request_id, queued_at=fact.at, side=fact.side
    )
    state.slots_of[job.id].append(fact.slot)
    job.queued = fact.slot
    state.queued_of[job.owner] = state.queued_of.get(job.owner, 0) + 1
    count_request(job, fact)


def step(state: State, fact: f.SlotFact, to: SlotStatus | None = None) -> Slot:
    """The slot of a fact, in the status that the fact leads to."""
    slot = state.slots[fact.slot]
    meet(slot, fact, to)
    return slot


def slot_withdrawn(state: State, fact: f.SlotWithdrawn) -> None:
    slot = step(state, fact)
    slot.reason, slot.ended_at, slot.ended = fact.reason, fact.at, slot.status
    job = state.jobs[slot.job]
    leave_queue(state, job)
    if slot.side:
        drop_once(state, job, slot.phase)
    _forget_old_slots(state, job)


def _forget_old_slots(state: State, job: Job) -> None:
    mine = state.slots_of[job.id]
    if len(mine) <= SLOTS_REMEMBERED:
        return
    lent = [state.nodes[name].loan for name in nodes_in(job.pins)]  # a loan ends after its slot, and reads it
    ended = (SlotStatus.OVER, SlotStatus.WITHDRAWN)
    over = [s for s in mine if state.slots[s].status in ended and s not in lent]
    for slot in over[: len(mine) - SLOTS_REMEMBERED]:
        mine.remove(slot)
        del state.slots[slot]


def leave_queue(state: State, job: Job) -> None:
    job.queued = None
    state.queued_of[job.owner] -= 1


def slot_claimed(state: State, fact: f.SlotClaimed) -> None:
    slot = step(state, fact)
    job = state.jobs[slot.job]
    leave_queue(state, job)
    slot.gpus, slot.claimed_at, job.slot = fact.gpus, fact.at, slot.id
    for node in (state.nodes[name] for name in nodes_in(job.pins)):
        hold(slot, node, fact.at)
        if fact.turn is None:
            node.loan = slot.id
    job.progress.lent_ms += fact.lent_ms
    if fact.turn is None:
        return
    group = state.its_group(job)
    turn = group.schedule[fact.turn]
    if turn.once:
        del group.schedule[fact.turn]
        group.version += 1
    else:
        turn.rotation += 1


def hold(slot: Slot, node: Node, at: Millis) -> None:
    """The slot holds those of its GPUs that are the node's."""
    for gpu in slot.gpus:
        mine = node.gpus.get(gpu)
        if mine is not None and mine.holder != slot.id:
            if mine.holder is not None:
                raise BrokenInvariant(f"{gpu} is held by slot {mine.holder}, and slot {slot.id} claims it")
            mine.holder, mine.dirty_by, mine.touched_at = slot.id, slot.job, at
    all_gpus_clean(node, slot.gpus)  # whose bytes they are holds them again


def slot_granted(state: State, fact: f.SlotGranted) -> None:
    slot = step(state, fact)
    slot.fence, slot.granted_at = fact.fence, fact.at
    state.fence_number = fact.fence.number


def slot_resized(state: State, fact: f.SlotResized) -> None:
    slot = state.slots[fact.slot]
    if fact.tail and slot.status is SlotStatus.RUNNING:  # until here it holds what it claimed
        slot.claimed = slot.gpus
    meet(slot, fact, SlotStatus.TAIL if fact.tail else SlotStatus.RUNNING)
    _unhold(state, slot, keep=fact.gpus)
    slot.gpus = fact.gpus
    for name in nodes_in(state.jobs[slot.job].pins):
        hold(slot, state.nodes[name], fact.at)


def _unhold(state: State, slot: Slot, keep: tuple[str, ...] = ()) -> None:
    for name in nodes_in(state.jobs[slot.job].pins):
        for gpu, it in state.nodes[name].gpus.items():
            if it.holder == slot.id and gpu not in keep:
                it.holder, it.touched_at = None, state.at


def slot_released(state: State, fact: f.SlotReleased) -> None:
    slot = step(state, fact)
    slot.ended_at, slot.ended = fact.at, slot.status
    slot.next_slot, slot.next_refused = fact.next_slot, fact.next_refused
    job = state.jobs[slot.job]
    job.slot = None
    job.closing.append(slot.id)
    away = slot.fence is not None and slot.fence.incarnation != state.incarnation
    count_release(job, slot, fact.at, fact.measured.get(WORK, 0.0), away=away)


def slot_taken_away(state: State, fact: f.SlotTakenAway) -> None:
    slot = step(state, fact, fact.how)
    slot.reason, slot.ended_at, slot.ended = fact.reason, fact.at, slot.status
    job = state.jobs[slot.job]
    job.slot = None
    job.closing.append(slot.id)
    job.progress.idle_from = fact.at


def slot_overran(state: State, fact: f.SlotOverran) -> None:
    step(state, fact).overrun_at = fact.at


def slot_over(state: State, fact: f.SlotOver) -> None:
    slot = step(state, fact)
    _unhold(state, slot)
    job = state.jobs[slot.job]
    job.closing.remove(slot.id)
    _forget_old_slots(state, job)


def yield_asked(state: State, fact: f.YieldAsked) -> None:
    slot = step(state, fact)
    slot.yield_by, slot.reason = fact.due, fact.reason


def loan_ended(state: State, fact: f.LoanEnded) -> None:
    node = state.nodes[fact.node]
    node.loan, node.loan_ended_at = None, fact.at
    state.jobs[fact.job].harvested_ms += fact.used_ms
