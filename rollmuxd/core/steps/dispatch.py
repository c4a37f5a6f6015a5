"""Whose turn it is: grant what a group's schedule allows, and make room for it."""

from collections.abc import Collection, Iterable, Sequence

from rollmuxd.core import effects as e
from rollmuxd.core import facts as f
from rollmuxd.core.context import SERVED, Context
from rollmuxd.core.estimates import held_up_by_loans_ms
from rollmuxd.core.ids import Fence, GpuId, NodeId, SlotId
from rollmuxd.core.model import (
    Dispatch,
    Group,
    Job,
    JobState,
    NodeStatus,
    OrderKind,
    ScheduledTurn,
    Slot,
    SlotStatus,
    StateStatus,
)
from rollmuxd.core.spec import engines_on
from rollmuxd.core.steps.lines import line_of, next_turn_on, patient_until, waits_for_another, yields_to

#: slots that hold all the GPUs that they have claimed
HOLD_ALL = (SlotStatus.LOADING, SlotStatus.RUNNING)
#: nodes on which nothing can be started, for an unknown time
OUT = (NodeStatus.OCCUPIED, NodeStatus.DRAINING, NodeStatus.DRAINED, NodeStatus.QUARANTINED, NodeStatus.LOST)


def dispatch(c: Context) -> None:
    """Grant what the schedule of each marked group allows. A group that was marked may be gone meanwhile."""
    groups = c.dirty.groups
    while groups:
        name = next(iter(groups))
        if name in c.state.groups:
            take_turns(c, c.state.groups[name])
        del groups[name]  # its turns were given until none was left: marks that this pass set are done


def take_turns(c: Context, known: Group) -> None:
    """Grant whatever of a group can be granted, in the order of its schedule."""
    line: list[Slot] | None = None
    moved = True
    while moved:
        moved = False
        for job in c.state.members(known):
            if job.queued is None or (known.dispatch is not Dispatch.SCHEDULE and is_kept_out(c, known, job)):
                continue
            if line is None:
                line = line_of(c, known)
            if advance(c, known, job, line):
                line, moved = None, True  # a claim changes which request is next
    if known.dispatch is Dispatch.CREDIT and line is not None and len(line) > 1:
        for slot in line:
            c.is_past(patient_until(c.state.jobs[slot.job], slot), "dispatch", known.id)


def is_kept_out(c: Context, group: Group, job: Job) -> bool:
    """Whether slots that have not ended hold every GPU that a job asks for.

    Nothing can be done for it then, and when one of them ends its group is looked at again.
    """
    nodes = c.rotation.nodes_of(c.state, group, job.id, c.state.slots[job.queued or ""].phase)
    holders = (gpu.holder for name in nodes for gpu in c.state.nodes[name].gpus.values())
    return all(holder is not None and c.state.slots[holder].status in HOLD_ALL for holder in holders)


def request_of(c: Context, job: Job) -> Slot | None:
    """The request of a job that could be granted; None while it holds a slot, is not served, or no call attends it."""
    if job.queued is None or job.slot is not None or job.status not in SERVED or job.queued in c.timers.detached:
        return None
    return c.state.slots[job.queued]


def advance(c: Context, group: Group, job: Job, line: Sequence[Slot]) -> bool:
    """Bring a job's request, if it has one, nearer to its grant. True: the schedule went on, so others may go now."""
    slot = request_of(c, job)
    turn = None if slot is None else c.rotation.turn_of(c.state, group, job.id, slot.phase)
    if slot is None or turn is None:
        return False
    nodes = c.rotation.nodes_of(c.state, group, job.id, slot.phase)
    if not c.state.are_up(nodes):
        # A job that cannot start passes no other: two such would pass each other for ever. And an order that cannot be
        # carried out would be held against its job.
        return False
    first_on = []
    for node in nodes:
        head = next_turn_on(c, group, node, line)
        if head == turn:
            first_on.append(node)
        elif head is not None and group.dispatch is Dispatch.SCHEDULE:
            absent = group.schedule[head]
            # its own earlier turn is past: it asks for a later one
            if absent.job == job.id or (may_skip(c, group, head) and not keeps_its_place(c, absent, slot)):
                c.fact(f.TurnSkipped(c.now, group.id, head, absent.job, absent.phase))
                return True
    stands_in_line = slot in line
    if stands_in_line and not first_on:
        return False  # on each node another comes first
    if group.dispatch is Dispatch.CREDIT and not job.guarded and waits_for_another(c, group, slot, nodes):
        return False
    if not stands_in_line and (yields := yields_to(c, group, slot)) is not None:
        c.timers.at(yields[1], "dispatch", group.id)
        return False
    if not make_room(c, job, slot.phase, first_on) or len(first_on) < len(nodes):
        return False
    gpus = claimable(c, job, slot, nodes)
    if gpus is None:
        return False
    claim(c, job, slot, turn, gpus)
    return True


def may_skip(c: Context, group: Group, index: int) -> bool:
    """Whether the schedule may pass a turn that is not asked for, or whose request no call attends.

    It is awaited while its job is in, or queued for, an earlier phase, and for a grace after the job's planned gap. A
    job that is away longer, paused, lost or not yet begun is skipped, and comes back at its own turn. A request that no
    call attends stays queued, and other jobs wait for it no longer than that.
    """
    turn = group.schedule[index]
    job = c.state.jobs[turn.job]
    if job.status not in SERVED or job.group != group.id:  # it is on its way, to elsewhere or here
        return True
    if job.slot is not None:
        return False
    if job.queued is not None:
        asked = c.state.slots[job.queued].phase
        mine = c.rotation.turn_of(c.state, group, job.id, asked)
        if mine is not None and (turn.rotation, index) < (group.schedule[mine].rotation, mine):
            return True  # it asks for a later one: the turn that it asks for was passed meanwhile
        if any(c.state.nodes[name].status in OUT for name in c.rotation.nodes_of(c.state, group, job.id, asked)):
            return True  # it cannot have its turn: no job waits for what comes after that
        if job.queued not in c.timers.detached:
            return False
        _, due = c.timers.detached[job.queued]  # asked for, but its process no longer waits
    elif job.progress.idle_from is None:
        return True
    else:
        _, comes = min((it.rotation, index) for index, it in enumerate(group.schedule) if it.job == job.id)
        due = job.progress.idle_from + job.spec.phase(group.schedule[comes].phase).gap_ms + c.config.grace_ms
    return c.is_past(due, "dispatch", group.id)


def keeps_its_place(c: Context, absent: ScheduledTurn, slot: Slot) -> bool:
    """Whether a turn whose request no call attends is not passed yet: the one behind it could not start either.

    Passed, it would come again only in the next rotation. While another job holds a node that ``slot`` asks for, that
    would win nothing. A slot that begins on a part does win: the holder is asked to shrink for it.
    """
    job = c.state.jobs[absent.job]
    asks = job.status in SERVED and job.queued in c.timers.detached and c.state.slots[job.queued].phase == absent.phase
    if not asks or c.state.jobs[slot.job].spec.phase(slot.phase).min_gpus:
        return False
    nodes = c.rotation.nodes_of(c.state, c.state.its_group(job), slot.job, slot.phase)
    holders = (c.state.slots[holder] for name in nodes for holder in c.state.nodes[name].holders)
    return any(holder.status in HOLD_ALL for holder in holders)


def make_room(c: Context, job: Job, phase: str, nodes: list[NodeId]) -> bool:
    """Have other states parked on the nodes where a job's turn is next; True when none is in the way."""
    pools = job.spec.phase(phase).pools
    clean = True
    for name in nodes:
        for key in c.state.nodes[name].states:
            kept = c.state.states[key]
            if kept.status in (StateStatus.PARKED, StateStatus.GONE):
                continue
            if kept.job == job.id and kept.pool in pools:
                clean = clean and kept.status is StateStatus.LOADED
                continue
            park_if_unheld(c, kept)
            # for the others (a tail's, one being discarded, an unknown one) each GPU's ``dirty_by`` decides
            clean = clean and kept.status is not StateStatus.PARKING
    return clean


def is_waited_for(c: Context, job: Job, nodes: Collection[NodeId]) -> bool:
    """Whether a job of its group, which could start, waits for one of these nodes; not this job, which runs."""
    group = c.state.group_of(job)
    if group is None:
        return False
    for other in c.state.members(group):
        asked = request_of(c, other)
        if asked is not None and not set(nodes).isdisjoint(c.rotation.nodes_of(c.state, group, other.id, asked.phase)):
            return True
    return False


def park_if_unheld(c: Context, kept: JobState) -> None:
    """Have a state parked that is loaded, where no slot of its job holds a GPU of the node."""
    if kept.status is StateStatus.LOADED:
        if all(c.state.slots[holder].job != kept.job for holder in c.state.nodes[kept.node].holders):
            issue(c, OrderKind.PARK, kept, None)


def engines_of(c: Context, job: Job, phase: str, nodes: Iterable[NodeId]) -> list[tuple[GpuId, ...]]:
    """The GPUs of each engine of a phase, node by node; where its states are not of several engines: each GPU."""
    pools = job.spec.phase(phase).pools
    each = max((kept.engine_gpus for kept in job.spec.states if kept.pool in pools), default=0)
    return [gpus for name in nodes for gpus in engines_on(tuple(c.state.nodes[name].gpus), each or 1)]


def in_whole_engines(
    c: Context, job: Job, phase: str, nodes: Iterable[NodeId], usable: Collection[GpuId]
) -> list[GpuId]:
    """Of these GPUs those on which a phase can run: all GPUs of an engine are among them."""
    return [gpu for engine in engines_of(c, job, phase, nodes) if all(it in usable for it in engine) for gpu in engine]


def claimable(c: Context, job: Job, slot: Slot, nodes: tuple[NodeId, ...]) -> tuple[str, ...] | None:
    """The GPUs that the slot would hold: all of its nodes', or a part where its phase starts on a part.

    That is beside a tail, or beside GPUs that do not become clean. It is not beside a slot that itself runs on a part:
    the two would then stay on parts for ever.
    """
    gpus = [it for name in nodes for it in c.state.nodes[name].gpus.items()]
    mine = tuple(name for name, gpu in gpus if gpu.holder is None and gpu.dirty_by in (None, job.id))
    if len(mine) == len(gpus):
        return mine
    least = job.spec.phase(slot.phase).min_gpus
    holders = (c.state.slots[holder] for name in nodes for holder in c.state.nodes[name].holders)
    if not least or any(holder.status in HOLD_ALL for holder in holders):
        return None
    return mine if least <= len(in_whole_engines(c, job, slot.phase, nodes, set(mine))) else None


def claim(c: Context, job: Job, slot: Slot, turn: int, gpus: tuple[str, ...]) -> None:
    c.fact(f.SlotClaimed(c.now, slot.id, gpus, turn, held_up_by_loans_ms(c.state, job, slot, c.now)))
    for kept in needed(c, job, slot):
        if kept.status is not StateStatus.LOADED:
            issue(c, OrderKind.LOAD, kept, slot.id)
    grant_if_loaded(c, job, slot)


def needed(c: Context, job: Job, slot: Slot) -> list[JobState]:
    """The states of the slot's phase on the nodes that it holds GPUs of: on a part, these need not be all."""
    pools = job.spec.phase(slot.phase).pools
    here = [it for it in c.state.states_of(job) if it.pool in pools and it.node in job.pins.get(it.pool, ())]
    return [kept for kept in here if any(gpu in slot.gpus for gpu in c.state.nodes[kept.node].gpus)]


def grant_if_loaded(c: Context, job: Job, slot: Slot) -> None:
    """Grant a slot whose states are all there, unless no call attends it: one that asks again in time gets it then."""
    if slot.status is not SlotStatus.LOADING or slot.id in c.timers.detached:
        return
    if all(kept.status is StateStatus.LOADED for kept in needed(c, job, slot)):
        c.fact(f.SlotGranted(c.now, slot.id, Fence(c.state.incarnation, c.state.fence_number + 1)))
        c.timers.at(c.now + c.config.min_overrun_ms, "overrun", job.id)


def issue(c: Context, kind: OrderKind, kept: JobState, slot: SlotId | None, gpus: tuple[GpuId, ...] = ()) -> None:
    job = c.state.jobs[kept.job]
    driver, order = kept.spec.driver, c.state.next_id("o")
    source = c.state.source_of(kept) if kind is OrderKind.LOAD else None
    fetched = None if source is None else source.node
    c.fact(f.OrderIssued(c.now, order, kind, job.id, kept.run, kept.pool, kept.node, driver, slot, fetched, gpus))
    c.do(e.Perform(order))


def go_to_turn(c: Context, job: Job) -> None:
    """Give what a job asks for its turn: a side phase a new one, else the next of that phase.

    It passes the job's earlier turns: a job that asks for a later one has left them.
    """
    slot, group = c.state.request_of(job), c.state.group_of(job)
    if slot is None or group is None or all(turn.job != job.id for turn in group.schedule):
        return
    mine = c.rotation.turn_of(c.state, group, job.id, slot.phase)
    if slot.side and mine is None:
        c.fact(f.TurnAdded(c.now, group.id, job.id, slot.phase))
    if slot.side or mine is None:
        return
    place = (group.schedule[mine].rotation, mine)
    for index, turn in enumerate(group.schedule):
        # it may lag by several rotations
        while turn.job == job.id and not turn.once and (turn.rotation, index) < place:
            c.fact(f.TurnSkipped(c.now, group.id, index, job.id, turn.phase))
