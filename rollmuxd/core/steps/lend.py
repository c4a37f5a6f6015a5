"""Fillers: lend a node to one while no job is due there, and have it back in time.

A filler has its state on one node and takes no part in a group. It is lent the node when the jobs there are expected to
leave it idle for long enough. What they have loaded is parked first, and loaded again before the next of them asks.
When a job may ask is known from its last phases: the lower quartile of what is left of them. So most jobs find their
node as they left it.

Where that is wrong, the job waits for the filler to give way: ``yield_s`` at most, then the slot is revoked. What jobs
have waited for is counted (``lent_ms``). The longest wait that a loan may cause must leave every job of the group
within ``fillers_max_share`` of its time alone. A promised job must have the credit to pay for it. One late turn delays
no later one by more than itself, so that holds for certified schedules too.
"""

from typing import Final

from rollmuxd.core import facts as f
from rollmuxd.core.causes import Cause
from rollmuxd.core.clean import is_dirty_by
from rollmuxd.core.context import HOLDS, SERVED, Context
from rollmuxd.core.decision import Reason
from rollmuxd.core.estimates import credit_ms, pace_ms, phase_ms
from rollmuxd.core.ids import JobId, Millis, NodeId, PoolName
from rollmuxd.core.model import (
    Dispatch,
    Group,
    Job,
    JobState,
    JobStatus,
    Node,
    NodeStatus,
    OrderKind,
    Slot,
    SlotStatus,
    StateStatus,
)
from rollmuxd.core.order import find_phase
from rollmuxd.core.spec import PhaseSpec
from rollmuxd.core.state import allowed_residual_mb
from rollmuxd.core.steps.dispatch import grant_if_loaded, issue, needed, next_phase
from rollmuxd.core.steps.guard import debit_ms, reserve_ms
from rollmuxd.core.steps.launch import launch
from rollmuxd.core.steps.reclaim import revoke_held

#: the times of a phase that tell when it ends: so many of the last, and that quantile of what is left
RECENT: Final = 8
SHARE: Final = 0.25
#: fillers that share a node at most; further ones wait
PER_NODE: Final = 16
#: searches for a home in vain that one input may cause: another change of the nodes causes the next ones
TRIES: Final = 20


def lend(c: Context) -> None:
    """Give fillers a node; have loans back that are due; lend marked nodes, or load again what belongs there."""
    if c.dirty.homes:
        c.dirty.homes = False
        in_vain: set[tuple[object, ...]] = set()
        for name in c.state.fillers:
            job = c.state.jobs[name]
            if job.status is not JobStatus.WAITING or job.pins or job.closing:
                continue
            want, states = job.spec.wants[0], job.spec.states
            asks = (want.pool, want.gpus, want.named, *((it.ram_mb, it.gpu_mb, it.residual_mb) for it in states))
            if asks not in in_vain and not find_home(c, job):
                in_vain.add(asks)
                if len(in_vain) >= TRIES:
                    break
        if c.dirty.spread:
            c.dirty.spread = False
            spread(c)
    names, c.dirty.lend = c.dirty.lend, {}
    for name in names:
        node = c.state.nodes.get(name)
        if node is None or not (node.fillers or node.loan):
            continue
        if node.loan is not None:
            look_at_loan(c, node, c.state.slots.get(node.loan))
        if node.loan is None:
            leave_where_there_is_no_room(c, node)
            use_idle_time(c, node)


# ---- where fillers are ----------------------------------------------------------------------------------------------


def find_home(c: Context, job: Job) -> bool:
    """Give a filler the node of its pool that fewest fillers have. False: none has room for it."""
    home = least_crowded(c, job, {})
    if home is not None:
        c.fact(f.FillerPlaced(c.now, job.id, job.spec.wants[0].pool, home.id))
        launch(c, job)
        c.dirty.lend[home.id] = None  # it may have asked before
    return home is not None


def least_crowded(c: Context, job: Job, coming: dict[NodeId, int]) -> Node | None:
    """The node on which a filler can be that fewest others have, those on their way counted; None: it has no room."""
    want = job.spec.wants[0]
    host = None if job.launch is None or job.launch.over else job.launch.host  # a process stays where it was started
    nodes = [
        node
        for node in c.state.nodes.values()
        if want.pool in node.pools
        and (not want.named or node.id in want.named)
        and len(node.gpus) >= want.gpus
        and host in (None, node.host)
        and node.status is NodeStatus.UP
        and (len(node.fillers) < PER_NODE or node.id in _names(job.pins))
    ]
    for node in sorted(nodes, key=lambda it: crowd(c, it) + coming.get(it.id, 0)):
        if node.id in _names(job.pins) or no_room(c, job, node) is None:
            return node
    return None


def crowd(c: Context, node: Node) -> int:
    """How many fillers a node has that do not leave it."""
    return sum(c.state.jobs[name].has_place for name in node.fillers)


def spread(c: Context) -> None:
    """There are more nodes than before: of fillers that share one, those that are not lent it move to emptier ones."""
    fillers = [c.state.jobs[name] for name in c.state.fillers]
    coming: dict[NodeId, int] = {}
    for job in fillers:
        if job.pins and not job.has_place and not job.closing:
            to = least_crowded(c, job, coming)
            if to is not None:
                coming[to.id] = coming.get(to.id, 0) + 1
    for job in fillers:
        if job.status is not JobStatus.ADMITTED or job.slot is not None or job.closing:
            continue
        (home,) = _names(job.pins)
        here = crowd(c, c.state.nodes[home])
        to = least_crowded(c, job, coming) if here > 1 else None
        if to is not None and crowd(c, to) + coming.get(to.id, 0) + 1 < here:
            c.fact(f.JobUnplaced(c.now, job.id, Cause("emptier_node", {"node": to.id})))
            coming[to.id] = coming.get(to.id, 0) + 1


def no_room(c: Context, job: Job, node: Node) -> Cause | None:
    """Why a filler cannot have its state on a node beside what jobs have there; None: it can."""
    host = c.state.hosts[node.host]
    fillers = dict.fromkeys((*(it for name in host.nodes for it in c.state.nodes[name].fillers), job.id))
    ram = host.reserved_mb + sum(spec.ram_mb for it in fillers for spec in c.state.jobs[it].spec.states)
    if ram > host.ram_mb:
        return Cause("host_ram", {"host": host.id, "ram_gb": host.ram_mb / 1000, "needed_gb": ram / 1000})
    theirs = [it for key in node.states if (it := c.state.states[key]).job != job.id]
    there = [(it.spec.gpu_mb, allowed_residual_mb(it)) for it in theirs]
    there += [(spec.gpu_mb, spec.residual_mb) for spec in job.spec.states]
    need = sum(leaves for _, leaves in there) + max((max(0, mb - leaves) for mb, leaves in there), default=0)
    if node.gpu_mb and need > node.gpu_mb:
        return Cause("gpu_memory", {"node": node.id, "gpu_gb": node.gpu_mb / 1000, "needed_gb": need / 1000})
    return None


def leave_where_there_is_no_room(c: Context, node: Node) -> None:
    """Fillers give way to placements and drains: they discard what they have, and look for another node."""
    for name in list(reversed(node.fillers)):
        job = c.state.jobs[name]
        if job.status is not JobStatus.ADMITTED or job.slot is not None:
            continue
        if node.status in (NodeStatus.DRAINING, NodeStatus.DRAINED):
            why: Cause | None = Cause("node_is", {"node": node.id, "status": str(node.status)})
        else:
            why = no_room(c, job, node)
        if why is not None:
            c.fact(f.JobUnplaced(c.now, job.id, why))  # the others may have room now


# ---- for people -----------------------------------------------------------------------------------------------------


def why_no_home(c: Context, job: Job) -> list[Reason]:
    """Why a filler has no node."""
    want = job.spec.wants[0]
    nodes = [it for it in c.state.nodes.values() if want.pool in it.pools and (not want.named or it.id in want.named)]
    fit = [it for it in nodes if it.status is NodeStatus.UP]
    if not fit:
        return [Reason("no_node", f"no node of pool {want.pool} that it may have is up")]
    found = ((it.id, why) for it in fit if (why := no_room(c, job, it)) is not None)
    return [Reason("no_room", str(why), {"node": node}) for node, why in found][:1]


def why_not_lent(c: Context, filler: Job) -> list[Reason]:
    """Why a filler that has a node, and asks for it, is not lent it now."""
    if not c.config.fillers:
        return [Reason("fillers_off", "no node is lent: fillers are switched off (filler.enabled)")]
    node = c.state.nodes[next(name for names in filler.pins.values() for name in names)]
    holder = next((gpu.holder for gpu in node.gpus.values() if gpu.holder is not None), None)
    if node.status is not NodeStatus.UP:
        return [Reason("node", f"node {node.id} is {node.status}", {"node": node.id})]
    if holder is not None:
        return [Reason("busy", f"slot {holder} holds node {node.id}", {"node": node.id, "slot": holder})]
    due, next_ = next_due(c, node)
    back = back_ms(c, node, filler, next_)
    if not may_wait(c, c.state.groups.get(node.group or ""), back):
        share = f"{100 * c.config.fillers_max_share:g} %"
        text = f"a loan of {node.id} may hold its jobs up by {back / 1000:g} s, and by {share} of their time at most"
        return [Reason("share", text, {"node": node.id, "back_s": back / 1000})]
    if due is not None and next_ is not None and not is_worth_it(c, node, filler, due, next_):
        text = f"another job is expected on {node.id} in {(due - c.now) / 1000:g} s, too soon for a loan"
        return [Reason("due", text, {"node": node.id, "due_s": (due - c.now) / 1000})]
    return [Reason("soon", f"node {node.id} is being made ready, or another filler has it first", {"node": node.id})]


# ---- when a node is wanted ------------------------------------------------------------------------------------------


def next_due(c: Context, node: Node) -> tuple[Millis | None, Job | None]:
    """When a job may ask for the node at the earliest, and which; None: none is expected there."""
    group = c.state.groups.get(node.group or "")
    due: tuple[Millis | None, Job | None] = (None, None)
    for name in () if group is None else (*group.jobs, *group.coming):
        job = c.state.jobs[name]
        at = asks_at(c, job, node.id)
        if at is not None and (due[0] is None or at < due[0]):
            due = at, job
    return due


def asks_at(c: Context, job: Job, node: NodeId) -> Millis | None:
    """When the job may ask for the node at the earliest; None: that is not foreseen, as while it is paused."""
    if job.status is JobStatus.MOVING or (job.move is not None and node in _names(job.move.pins)):
        return c.now
    if job.status not in SERVED or node not in _names(job.pins):
        return None
    phases = job.spec.phases
    slot = c.state.slots.get(job.slot or job.queued or "")
    phase = next_phase(c, job) if slot is None else next((it for it in phases if it.name == slot.phase), None)
    if phase is None:  # it has not begun, or is in a side phase
        return c.now
    place = phases.index(phase)
    if slot is None:
        at, place = job.progress.idle_from or c.now, place - 1
    else:
        if node in c.state.phase_nodes(job, phase):
            return c.now
        at = c.now + left_ms(job, phase, 0 if slot.granted_at is None else c.now - slot.granted_at)
    for _ in phases:
        place = (place + 1) % len(phases)
        at = max(c.now, at + gap_ms(job, phases[place]))
        if node in c.state.phase_nodes(job, phases[place]):
            return at
        at += left_ms(job, phases[place], 0)
    return None


def _names(pins: dict[PoolName, tuple[NodeId, ...]]) -> list[NodeId]:
    return [name for names in pins.values() for name in names]


def left_ms(job: Job, phase: PhaseSpec, elapsed: Millis) -> Millis:
    """What is left of a phase at the least, as its last times say; before any was seen, as it was stated."""
    times = job.times.get(phase.name)
    if times is None or not times.recent_ms:
        return max(0, (phase_ms(job, phase) or 0) - elapsed)
    longer = sorted(took - elapsed for took in times.recent_ms[-RECENT:] if took > elapsed)
    return longer[int(SHARE * len(longer))] if longer else 0


def gap_ms(job: Job, phase: PhaseSpec) -> Millis:
    """The job's own time before a phase; of an asynchronous one, what its rollouts still need for their batch."""
    began, idle, pace = job.progress.iteration_from, job.progress.idle_from, pace_ms(job)
    if pace and began is not None and idle is not None:
        return max(0, began + pace - idle)
    return phase.gap_ms


# ---- what a loan takes ----------------------------------------------------------------------------------------------


def park_ms(kept: JobState) -> Millis:
    return kept.spec.park_ms if kept.park_ms is None else kept.park_ms


def load_ms(kept: JobState) -> Millis:
    return kept.spec.load_ms if kept.load_ms is None else kept.load_ms


def states_of(c: Context, job: Job, node: Node) -> list[JobState]:
    return [c.state.states[key] for key in node.states if c.state.states[key].job == job.id]


def back_ms(c: Context, node: Node, filler: Job, next_: Job | None) -> Millis:
    """From ``yield`` until the node is as the next job left it."""
    parks = sum(map(park_ms, states_of(c, filler, node)))
    loads = 0 if next_ is None else sum(load_ms(it) for it in states_of(c, next_, node))
    assert filler.spec.filler is not None
    return filler.spec.filler.yield_ms + parks + loads + c.config.fillers_margin_ms


def may_wait(c: Context, group: Group | None, wait_ms: Millis) -> bool:
    """Whether each job of a group may be held up once more: within its share, and by credit where it has a promise."""
    for name in () if group is None else group.jobs:
        job = c.state.jobs[name]
        if job.progress.lent_ms + wait_ms > c.config.fillers_max_share * job.progress.solo_ms:
            return False
        if job.promised:
            by_credit = group is not None and group.dispatch is Dispatch.CREDIT
            least = reserve_ms(job, debit_ms(c, job)) if by_credit else 0
            if (credit_ms(job) or 0) < least + 2 * wait_ms:
                return False
    return True


# ---- loans ----------------------------------------------------------------------------------------------------------


def use_idle_time(c: Context, node: Node) -> None:
    """Lend the node if that is worth its moves; else load what the next job has parked, just before it asks."""
    if node.status is not NodeStatus.UP or any(gpu.holder is not None for gpu in node.gpus.values()):
        return
    due, next_ = next_due(c, node)
    filler = next_filler(c, node)
    if filler is not None and is_worth_it(c, node, filler, due, next_):
        begin_loan(c, node, filler, due)
    elif due is not None and next_ is not None and node.loan_ended_at is not None:
        parked = [it for it in states_of(c, next_, node) if it.status is StateStatus.PARKED]
        at = due - sum(map(load_ms, parked)) - c.config.fillers_margin_ms
        if c.now < at:
            c.timers.at(at, "lend", node.id)
        elif may_load_ahead(c, node, next_):
            for kept in parked:
                issue(c, OrderKind.LOAD, kept, None)


def may_load_ahead(c: Context, node: Node, job: Job) -> bool:
    """Whether the job's state can be loaded although no slot of its own holds the node yet.

    Where a request waits for the node, its turn decides what is loaded.
    """
    for name in () if node.group is None else c.state.groups[node.group].jobs:
        slot = c.state.slots.get(c.state.jobs[name].queued or "")
        phase = None if slot is None else find_phase(c.state, name, slot.phase)
        if phase is not None and node.id in c.state.phase_nodes(c.state.jobs[name], phase):
            return False
    clean = all(gpu.dirty_by in (None, job.id) for gpu in node.gpus.values())
    return clean and job.move is None and not job.left and job.status in SERVED


def next_filler(c: Context, node: Node) -> Job | None:
    """Of the fillers that ask for the node, the one that has had the least; of equals, the one that asked first."""
    asking: list[tuple[Millis, Millis, JobId]] = []
    for name in node.fillers:
        job = c.state.jobs[name]
        slot = c.state.slots.get(job.queued or "")
        ready = all(it.status in (StateStatus.GONE, StateStatus.PARKED) for it in states_of(c, job, node))
        if slot is not None and job.status is JobStatus.ADMITTED and slot.id not in c.timers.detached and ready:
            asking.append((job.harvested_ms, slot.queued_at, name))
    return c.state.jobs[min(asking)[2]] if asking and c.config.fillers else None


def is_worth_it(c: Context, node: Node, filler: Job, due: Millis | None, next_: Job | None) -> bool:
    """Whether a loan gives the filler its least time before a job is due, and no job is held up for too long by it."""
    back = back_ms(c, node, filler, next_)
    if not may_wait(c, c.state.groups.get(node.group or ""), back):
        return False
    there = sum(map(load_ms, states_of(c, filler, node)))
    there += sum(park_ms(it) for it in loaded_by_others(c, node, filler))
    assert filler.spec.filler is not None
    return due is None or c.now + there + filler.spec.filler.min_run_ms + back <= due


def loaded_by_others(c: Context, node: Node, filler: Job) -> list[JobState]:
    states = (c.state.states[key] for key in node.states)
    return [it for it in states if it.job != filler.id and it.status is StateStatus.LOADED]


def begin_loan(c: Context, node: Node, filler: Job, due: Millis | None) -> None:
    """Park what others have loaded. When the node is clean, the filler has it."""
    for kept in loaded_by_others(c, node, filler):
        issue(c, OrderKind.PARK, kept, None)
    if all(gpu.dirty_by in (None, filler.id) for gpu in node.gpus.values()):
        slot = c.state.slots[filler.queued or ""]
        c.fact(f.NodeLent(c.now, slot.id, node.id, tuple(node.gpus), due))
        c.timers.waits(filler.owner, -1)
        for kept in needed(c, filler, slot):
            issue(c, OrderKind.LOAD, kept, slot.id)
        grant_if_loaded(c, filler, slot)


def look_at_loan(c: Context, node: Node, slot: Slot | None) -> None:
    """Ask the filler to give way when a job is due; note the end of a loan when the node is clean."""
    if slot is None or slot.status not in HOLDS:
        end_loan(c, node, slot)
        return
    if slot.yield_by is not None:
        return
    filler = c.state.jobs[slot.job]
    due, next_ = next_due(c, node)
    stays = node.status is NodeStatus.UP and filler.status is JobStatus.ADMITTED and no_room(c, filler, node) is None
    at = None if due is None else due - back_ms(c, node, filler, next_)
    if not stays or not c.config.fillers or (due is not None and due <= c.now):
        ask_back(c, slot, filler, "wanted")
    elif at is not None and at <= c.now:
        ask_back(c, slot, filler, "expected")
    elif at is not None:
        c.timers.at(at, "lend", node.id)


def ask_back(c: Context, slot: Slot, filler: Job, reason: str) -> None:
    """Ask a filler to give way. One whose state is still being loaded has nothing to end."""
    if slot.status is SlotStatus.LOADING:
        revoke_held(c, slot, by="yield", reason=Cause(reason))
        return
    assert filler.spec.filler is not None
    due = c.now + filler.spec.filler.yield_ms
    c.fact(f.YieldAsked(c.now, slot.id, Cause(reason), due))
    c.timers.at(due, "yield", slot.id)


def end_loan(c: Context, node: Node, slot: Slot | None) -> None:
    """The loan is over once nothing of the filler can be on the node's GPUs."""
    if slot is None or slot.status is not SlotStatus.OVER or is_dirty_by(node, slot.job):
        return
    used = 0 if slot.granted_at is None else (slot.ended_at or c.now) - slot.granted_at
    asked = "" if slot.reason is None else slot.reason.code
    how = asked if slot.ended is SlotStatus.RELEASED else str(slot.ended)
    c.fact(f.LoanEnded(c.now, slot.id, slot.job, node.id, len(slot.gpus), used, how))
