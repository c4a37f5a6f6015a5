"""Whose turn it is: granting what a group's wheel allows, and having room made for it."""

from rollmuxd.core import effects as e
from rollmuxd.core import facts as f
from rollmuxd.core.context import SERVED, Context
from rollmuxd.core.ids import Fence, GroupId, JobId, NodeId, SlotId
from rollmuxd.core.model import (
    Dispatch,
    Group,
    Job,
    JobState,
    JobStatus,
    Node,
    NodeStatus,
    OrderKind,
    ScheduledTurn,
    Slot,
    SlotStatus,
    StateStatus,
)
from rollmuxd.core.order import find_phase, overtakes_at
from rollmuxd.core.spec import PhaseSpec

#: nodes on which nothing can be started, for who knows how long
OUT = (NodeStatus.OCCUPIED, NodeStatus.DRAINING, NodeStatus.DRAINED, NodeStatus.QUARANTINED, NodeStatus.LOST)

#: a job that has ended a phase asks for the next one within this time, where it has no time of its own in between
ASKS_WITHIN_MS = 250


def dispatch(c: Context, group: GroupId | None) -> None:
    """Grant whatever of a group can be granted, in the order of its wheel."""
    known = c.state.groups.get(group or "")
    if known is None:
        return
    moved = True
    while moved:
        moved = False
        for name in tuple(known.jobs):
            job = c.state.jobs[name]
            if job.queued is not None and job.slot is None and job.status in SERVED and not at_boundary(c, job):
                moved = advance(c, known, job, c.state.slots[job.queued]) or moved
    if known.dispatch is Dispatch.CREDIT:
        waiting = [c.state.slots[job.queued] for job in map(c.state.jobs.__getitem__, known.jobs) if job.queued]
        due = overtakes_at(c.state, waiting, c.now) if len(waiting) > 1 else None
        if due is not None:
            c.timers.at(due, "dispatch", known.id)


def at_boundary(c: Context, job: Job) -> bool:
    """Whether the job is to move, could, holds nothing and is between two iterations: the next is for elsewhere."""
    move = job.move
    if move is None or job.status is not JobStatus.ADMITTED or job.slot is not None or job.closing:
        return False
    if any(c.state.nodes[name].status is not NodeStatus.UP for nodes in move.pins.values() for name in nodes):
        return False
    if job.queued is not None:
        asked = c.state.slots[job.queued]
        return not asked.side and asked.phase == job.spec.phases[0].name
    for name in reversed(c.state.slots_of[job.id]):
        slot = c.state.slots[name]
        if slot.run == job.run and not slot.side and slot.status is not SlotStatus.WITHDRAWN:
            return slot.released and slot.phase == job.spec.phases[-1].name
    return True  # it has not begun


def advance(c: Context, group: Group, job: Job, slot: Slot) -> bool:
    """Bring one queued request nearer to its grant. True: the wheel moved, so others may go now."""
    visit = c.rotation.turn_of(c.state, group, job.id, slot.phase)
    if visit is None:
        return False
    nodes = c.rotation.nodes_of(c.state, group, job.id, slot.phase)
    if any(c.state.nodes[name].status is not NodeStatus.UP for name in nodes) or slot.id in c.timers.awaited:
        return False  # who cannot go passes nobody: two such would pass each other for ever
    first_everywhere = True
    for node in nodes:
        head = next_turn_on(c, group, node)
        if head != visit and head is not None:
            first_everywhere = False
            if group.dispatch is not Dispatch.SCHEDULE:
                continue
            absent = group.schedule[head]
            # its own earlier visit is past: it asks for a later one
            if absent.job == job.id or (may_skip(c, group, head) and not keeps_its_place(c, absent, slot)):
                c.fact(f.TurnSkipped(c.now, group.id, head, absent.job, absent.phase))
                return True
    if group.dispatch is Dispatch.CREDIT and not job.guarded and waits_for_another(c, group, slot, nodes):
        return False
    if not make_room(c, group, visit, job, nodes) or not first_everywhere:
        return False
    gpus = claimable(c, job, slot, nodes)
    if gpus is None:
        return False
    claim(c, job, slot, visit, gpus)
    return True


def waits_for_another(c: Context, group: Group, slot: Slot, nodes: tuple[NodeId, ...]) -> bool:
    """Whether a request waits for a moment, as another job is about to ask for a phase that goes before it.

    Such a phase spans several pools, some of these nodes among them. It is no more than a call away: its job has just
    ended the phase before it.
    """
    if c.rotation.goes_at_once(c.state, group, slot.job, slot.phase):
        return False
    for name in group.jobs:
        job = c.state.jobs[name]
        ended = job.progress.idle_from
        if name == slot.job or job.slot is not None or job.queued is not None or job.status not in SERVED:
            continue
        if ended is None or c.now >= ended + ASKS_WITHIN_MS or not (phase := next_phase(c, job)) or phase.gap_ms:
            continue
        claims = c.rotation.nodes_of(c.state, group, name, phase.name)
        if not set(claims).isdisjoint(nodes) and c.rotation.goes_at_once(c.state, group, name, phase.name):
            c.timers.at(ended + ASKS_WITHIN_MS, "dispatch", group.id)
            return True
    return False


def next_phase(c: Context, job: Job) -> PhaseSpec | None:
    """The phase that the job's cycle goes on with; None: it has not begun."""
    phases = job.spec.phases
    for name in reversed(c.state.slots_of[job.id]):
        slot = c.state.slots[name]
        if slot.run == job.run and slot.released and not slot.side:
            at = next((at for at, phase in enumerate(phases, 1) if phase.name == slot.phase), 0)
            return phases[at % len(phases)]
    return None


def next_turn_on(c: Context, group: Group, node: NodeId) -> int | None:
    """The wheel index of the visit that is next on a node; None: nobody's is."""
    if group.dispatch is Dispatch.SCHEDULE:
        return c.rotation.head(c.state, group, node)
    line = c.rotation.line(c.state, group, node, c.timers.awaited, c.now)
    return c.rotation.turn_of(c.state, group, line[0].job, line[0].phase) if line else None


def may_skip(c: Context, group: Group, index: int) -> bool:
    """Whether the wheel may pass a visit that is not asked for, or whose request nobody attends.

    It is awaited while its job is in, or queued for, an earlier phase of its cycle, and for a grace after the
    job's planned gap; a job that is away longer, paused, lost or not yet begun is skipped, and comes back at its
    own visit. So does a request that was left alone: it stays queued, but nobody waits for it longer than that.
    """
    visit = group.schedule[index]
    job = c.state.jobs[visit.job]
    if job.status not in SERVED or job.group != group.id:  # it is on its way, to elsewhere or here
        return True
    if job.slot is not None:
        return False
    if job.queued is not None:
        asked = c.state.slots[job.queued].phase
        mine = c.rotation.turn_of(c.state, group, job.id, asked)
        if mine is not None and (visit.turn, index) < (group.schedule[mine].turn, mine):
            return True  # it asks for a later one: the visit that it asks for was passed meanwhile
        if any(c.state.nodes[name].status in OUT for name in c.rotation.nodes_of(c.state, group, job.id, asked)):
            return True  # it cannot have its turn: nobody waits for what comes after that
        due = c.timers.awaited.get(job.queued)  # asked for, but its process no longer waits
        if due is None:
            return False
    elif job.progress.idle_from is None:
        return True
    else:
        _, comes = min((it.turn, index) for index, it in enumerate(group.schedule) if it.job == job.id)
        gap = next((phase.gap_ms for phase in job.spec.phases if phase.name == group.schedule[comes].phase), 0)
        due = job.progress.idle_from + gap + c.config.grace_ms
    if c.now < due:
        c.timers.at(due, "dispatch", group.id)
    return c.now >= due


def keeps_its_place(c: Context, absent: ScheduledTurn, slot: Slot) -> bool:
    """Whether a visit whose request nobody attends is not passed yet: the one that waits behind it could not go either.

    Passed, it would come again only in the next turn, and while somebody else holds one of the nodes that ``slot``
    asks for that would win nothing. One that begins on a part does win: who holds the node is asked to shrink for it.
    """
    job, phase = c.state.jobs[absent.job], find_phase(c.state, slot.job, slot.phase)
    asks = job.status in SERVED and job.queued in c.timers.awaited and c.state.slots[job.queued].phase == absent.phase
    if not asks or (phase is not None and phase.min_gpus):
        return False
    nodes = c.rotation.nodes_of(c.state, c.state.groups[job.group or ""], slot.job, slot.phase)
    gpus = (gpu for name in nodes for gpu in c.state.nodes[name].gpus.values())
    holders = [c.state.slots[gpu.holder] for gpu in gpus if gpu.holder is not None]
    return any(holder.status in (SlotStatus.LOADING, SlotStatus.RUNNING) for holder in holders)


def make_room(c: Context, group: Group, visit: int, job: Job, nodes: tuple[NodeId, ...]) -> bool:
    """Have other states parked on the nodes where this visit is next; True when none is in the way."""
    phase = find_phase(c.state, job.id, group.schedule[visit].phase)
    clear = True
    for name in nodes:
        if next_turn_on(c, group, name) != visit:
            clear = False
            continue
        node = c.state.nodes[name]
        if node.status is not NodeStatus.UP:  # an order that cannot be carried out would be held against its job
            clear = False
            continue
        for key in node.states:
            kept = c.state.states[key]
            if kept.status is StateStatus.PARKED or kept.status is StateStatus.GONE:
                continue
            if kept.job == job.id and phase is not None and kept.pool in phase.pools:
                clear = clear and kept.status is StateStatus.LOADED
                continue
            if kept.status is StateStatus.LOADED and unheld_by(c, node, kept.job):
                issue(c, OrderKind.PARK, kept, None)
            # of the others (a tail's, one being discarded, one nobody knows of) each GPU's stain tells
            clear = clear and kept.status is not StateStatus.PARKING
    return clear


def unheld_by(c: Context, node: Node, job: JobId) -> bool:
    """Whether none of the node's GPUs is held by a slot of the job."""
    return all(gpu.holder is None or c.state.slots[gpu.holder].job != job for gpu in node.gpus.values())


def claimable(c: Context, job: Job, slot: Slot, nodes: tuple[NodeId, ...]) -> tuple[str, ...] | None:
    """The GPUs that the slot would hold: all of its nodes', or a part where its phase starts on a part.

    Beside a tail, that is, or GPUs that do not come clear; not beside a slot that itself runs on a part: the two
    would then stay on parts for ever.
    """
    phase = find_phase(c.state, job.id, slot.phase)
    whole = True
    gpus: list[str] = []
    for name in nodes:
        node = c.state.nodes[name]
        if node.status is not NodeStatus.UP:
            return None
        for gpu, it in node.gpus.items():
            if it.holder is None and (it.dirty_by is None or it.dirty_by == job.id):
                gpus.append(gpu)
            elif it.holder is not None and c.state.slots[it.holder].status in (SlotStatus.LOADING, SlotStatus.RUNNING):
                return None
            else:
                whole = False
    if whole:
        return tuple(gpus)
    part = phase.min_gpus if phase is not None else 0
    return tuple(gpus) if part and len(gpus) >= part else None


def claim(c: Context, job: Job, slot: Slot, visit: int, gpus: tuple[str, ...]) -> None:
    c.fact(f.SlotClaimed(c.now, slot.id, gpus, visit))
    c.timers.waits(job.owner, -1)
    for kept in needed(c, job, slot):
        if kept.status is not StateStatus.LOADED:
            issue(c, OrderKind.LOAD, kept, slot.id)
    grant_if_loaded(c, job, slot)


def needed(c: Context, job: Job, slot: Slot) -> list[JobState]:
    """The states of the slot's phase on the nodes that it holds GPUs of: on a part, these need not be all."""
    phase = find_phase(c.state, job.id, slot.phase)
    if phase is None:
        return []
    states = [c.state.states[key] for key in job.states]
    here = [kept for kept in states if kept.pool in phase.pools and kept.node in job.pins.get(kept.pool, ())]
    return [kept for kept in here if holds_on(c, slot, kept.node)]


def holds_on(c: Context, slot: Slot, node: NodeId) -> bool:
    """Whether the slot holds a GPU of the node."""
    return any(gpu.holder == slot.id for gpu in c.state.nodes[node].gpus.values())


def grant_if_loaded(c: Context, job: Job, slot: Slot) -> None:
    """Grant a slot whose states are all there, unless nobody attends it: who asks again in time is granted it then."""
    if slot.id in c.timers.detached:
        return
    if slot.status is SlotStatus.LOADING and all(kept.status is StateStatus.LOADED for kept in needed(c, job, slot)):
        c.fact(f.SlotGranted(c.now, slot.id, next_fence(c)))
        c.timers.at(c.now + c.config.overstay_ms, "overstay", job.id)


def next_fence(c: Context) -> Fence:
    return Fence(c.state.incarnation, c.state.fence_number + 1)


def issue(c: Context, kind: OrderKind, kept: JobState, slot: SlotId | None) -> None:
    job = c.state.jobs[kept.job]
    driver = kept.spec.driver
    order = c.state.next_id("o")
    source = c.state.source_of(kept) if kind is OrderKind.LOAD else None
    fetched = None if source is None else source.node
    c.fact(f.OrderIssued(c.now, order, kind, job.id, kept.run, kept.pool, kept.node, driver, slot, fetched))
    c.do(e.Perform(order))


def take_place(c: Context, job: Job, phase: str, *, side: bool) -> None:
    """Give a side phase its visit, and pass the job's earlier visits: who asks for a later one has left them."""
    group = c.state.groups.get(job.group or "")
    if group is None or all(visit.job != job.id for visit in group.schedule):
        return
    if side:
        if c.rotation.turn_of(c.state, group, job.id, phase) is None:
            c.fact(f.TurnAdded(c.now, group.id, job.id, phase))
        return
    mine = c.rotation.turn_of(c.state, group, job.id, phase)
    if mine is None:
        return
    place = (group.schedule[mine].turn, mine)
    for index, visit in enumerate(group.schedule):
        while visit.job == job.id and not visit.once and (visit.turn, index) < place:  # it may lag by several turns
            c.fact(f.TurnSkipped(c.now, group.id, index, job.id, visit.phase))
