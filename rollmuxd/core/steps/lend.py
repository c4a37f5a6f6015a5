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

from itertools import chain
from typing import Final

from rollmuxd.core import facts as f
from rollmuxd.core.causes import Cause
from rollmuxd.core.clean import is_dirty_by
from rollmuxd.core.context import HOLDS, SERVED, Context
from rollmuxd.core.estimates import credit_ms, pace_ms, phase_ms, quantile_ms
from rollmuxd.core.feasible import needed_mb
from rollmuxd.core.ids import JobId, Millis, NodeId
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
    nodes_in,
)
from rollmuxd.core.spec import PhaseSpec
from rollmuxd.core.steps.dispatch import grant_if_loaded, issue, needed
from rollmuxd.core.steps.guard import debit_ms, reserve_ms
from rollmuxd.core.steps.launch import launch
from rollmuxd.core.steps.lines import next_phase
from rollmuxd.core.steps.reclaim import take_away

#: the times of a phase that tell when it ends: so many of the last, and that quantile of what is left
RECENT: Final = 8
SHARE: Final = 0.25
#: fillers that share a node at most; further ones wait
PER_NODE: Final = 16
#: one input causes at most so many searches and looks at nodes; after a pause, fillers that are left have their turn
LOOKS: Final = 1_000
#: sending a filler away, or placing it, takes about as long as so many looks
MOVE: Final = 5
PAUSE_MS: Final = 100


def lend(c: Context) -> None:
    """Give fillers a node; have loans back that are due; lend marked nodes, or load again what belongs there."""
    if c.dirty.homes or c.dirty.fillers:
        find_homes(c)
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


class Search:
    """One search for nodes on which fillers can be. What it knows is kept up as fillers come and go."""

    def __init__(self, c: Context) -> None:
        self.c = c
        #: fillers of each node that do not leave it
        jobs = c.state.jobs
        self.crowds = {it.id: sum(jobs[name].has_place for name in it.fillers) for it in c.state.nodes.values()}
        #: whether some leave a node on which what they have can be seen to go: where they come to is not known yet
        seen = (it for it in c.state.nodes.values() if it.status not in (NodeStatus.LOST, NodeStatus.QUARANTINED))
        self.moving = any(jobs[name].status is JobStatus.WAITING for it in seen for name in it.fillers)
        #: what was searched for in vain, on nodes with fewer fillers than so many
        self._in_vain: dict[tuple[object, ...], int] = {}

    def emptiest(self, job: Job, below: int) -> Node | None:
        """The node on which the filler can be that fewest others have, fewer than so many; None: it has no room."""
        want = job.spec.wants[0]
        # A process stays where it was started.
        host = None if job.launch is None or job.launch.over else job.launch.host
        states = ((it.ram_mb, it.gpu_mb, it.residual_mb) for it in job.spec.states)
        asks = (want.pool, want.gpus, want.named, host, *states)
        if self._in_vain.get(asks, 0) >= below:
            return None
        self.c.spent += 1
        nodes = [
            node
            for node in self.c.state.nodes.values()
            if want.pool in node.pools
            and (not want.named or node.id in want.named)
            and len(node.gpus) >= want.gpus
            and host in (None, node.host)
            and node.status is NodeStatus.UP
            and self.crowds[node.id] < below
            and len(node.fillers) < PER_NODE
        ]
        for node in sorted(nodes, key=lambda it: self.crowds[it.id]):
            self.c.spent += 1
            if no_room(self.c, job, node) is None:
                return node
        self._in_vain[asks] = below
        return None


def find_homes(c: Context) -> None:
    """Search a node for marked fillers now, and for all of them after a pause, for nodes come one after the other."""
    found, left = Search(c), iter(c.dirty.fillers)
    while c.spent < LOOKS and (name := next(left, None)) is not None:
        job = c.state.jobs.get(name)
        if job is not None and job.slot is None and not job.closing:
            find_home(c, job, found)
    c.timers.fillers |= dict.fromkeys(left) | (c.state.fillers if c.dirty.homes else {})
    c.dirty.fillers, c.dirty.homes = {}, False
    if c.timers.fillers:
        c.timers.at(c.now + PAUSE_MS, "homes", "")


def search_again(c: Context, _: str) -> None:
    """A pause is over."""
    c.dirty.fillers |= c.timers.fillers
    c.timers.fillers = {}


def find_home(c: Context, job: Job, search: Search) -> None:
    """Give a filler the node of its pool that fewest fillers have, if one has room for it."""
    if job.status is JobStatus.WAITING and not job.pins:
        home = search.emptiest(job, PER_NODE)
        if home is not None:
            c.spent += MOVE
            search.crowds[home.id] += 1
            c.fact(f.FillerPlaced(c.now, job.id, job.spec.wants[0].pool, home.id))
            launch(c, job)
            c.dirty.lend[home.id] = None  # it may have asked before
    elif job.status is JobStatus.ADMITTED and not search.moving:
        (name,) = nodes_in(job.pins)
        home = search.emptiest(job, search.crowds[name] - 1)
        if home is not None:
            c.spent += MOVE
            search.crowds[name] -= 1
            search.crowds[home.id] += 1
            c.fact(f.JobUnplaced(c.now, job.id, Cause("emptier_node", {"node": home.id})))


def no_room(c: Context, job: Job, node: Node) -> Cause | None:
    """Why a filler cannot have its state on a node beside what jobs have there; None: it can."""
    if node.status in (NodeStatus.DRAINING, NodeStatus.DRAINED):
        return Cause("node_is", {"node": node.id, "status": str(node.status)})
    host = c.state.hosts[node.host]
    fillers = dict.fromkeys(chain((job.id,), *(c.state.nodes[name].fillers for name in host.nodes)))
    ram = host.reserved_mb + sum(spec.ram_mb for it in fillers for spec in c.state.jobs[it].spec.states)
    if ram > host.ram_mb:
        return Cause("host_ram", {"host": host.id, "ram_gb": host.ram_mb / 1000, "needed_gb": ram / 1000})
    need = needed_mb(job.spec.states, (it for it in c.state.states_on(node) if it.job != job.id))
    if node.gpu_mb and need > node.gpu_mb:
        return Cause("gpu_memory", {"node": node.id, "gpu_gb": node.gpu_mb / 1000, "needed_gb": need / 1000})
    return None


def leave_where_there_is_no_room(c: Context, node: Node) -> None:
    """Fillers give way to placements and drains: they discard what they have, and look for another node."""
    for name in list(reversed(node.fillers)):
        job = c.state.jobs[name]
        if job.status is not JobStatus.ADMITTED or job.slot is not None:
            continue
        why = no_room(c, job, node)
        if why is not None:
            c.fact(f.JobUnplaced(c.now, job.id, why))  # the others may have room now


# ---- when a node is wanted ------------------------------------------------------------------------------------------


def next_due(c: Context, node: Node) -> tuple[Millis | None, Job | None]:
    """When a job may ask for the node at the earliest, and which; None: none is expected there."""
    group = c.state.group_of(node)
    jobs = () if group is None else map(c.state.jobs.__getitem__, (*group.jobs, *group.coming))
    asks = [(at, job) for job in jobs if (at := asks_at(c, job, node.id)) is not None]
    return min(asks, key=lambda it: it[0], default=(None, None))


def asks_at(c: Context, job: Job, node: NodeId) -> Millis | None:
    """When the job may ask for the node at the earliest; None: that is not foreseen, as while it is paused."""
    if job.status is JobStatus.MOVING or (job.move is not None and node in nodes_in(job.move.pins)):
        return c.now
    if job.status not in SERVED or node not in nodes_in(job.pins):
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
        if node in c.state.phase_nodes(job, phase.name):
            return c.now
        at = c.now + left_ms(job, phase, 0 if slot.granted_at is None else c.now - slot.granted_at)
    for _ in phases:
        place = (place + 1) % len(phases)
        at = max(c.now, at + gap_ms(job, phases[place]))
        if node in c.state.phase_nodes(job, phases[place].name):
            return at
        at += left_ms(job, phases[place], 0)
    return None


def left_ms(job: Job, phase: PhaseSpec, elapsed: Millis) -> Millis:
    """What is left of a phase at the least, as its last times say; before any was seen, as it was stated."""
    times = job.times.get(phase.name)
    if times is None or not times.recent_ms:
        return max(0, (phase_ms(job, phase) or 0) - elapsed)
    longer = [took - elapsed for took in times.recent_ms[-RECENT:] if took > elapsed]
    return quantile_ms(longer, SHARE) if longer else 0


def gap_ms(job: Job, phase: PhaseSpec) -> Millis:
    """The job's own time before a phase; of an asynchronous one, what its rollouts still need for their batch."""
    began, idle, pace = job.progress.iteration_from, job.progress.idle_from, pace_ms(job)
    if pace and began is not None and idle is not None:
        return max(0, began + pace - idle)
    return phase.gap_ms


# ---- what a loan takes ----------------------------------------------------------------------------------------------


def wake_ms(filler: Job, kept: JobState) -> Millis:
    """What loading a filler's state takes: as observed, of a start or of a wake; else as stated, or as a park.

    A start that took longer than was stated says little of the next: the first one may have fetched the weights.
    """
    if not kept.warm and filler.progress.start_ms is not None:
        return min(kept.spec.load_ms, filler.progress.start_ms)
    if kept.load_ms is None and kept.park_ms is not None:
        return min(kept.spec.load_ms, kept.park_ms)
    return kept.loads_ms


def back_ms(c: Context, node: Node, filler: Job, next_: Job | None) -> Millis:
    """From ``yield`` until the node is as the next job left it."""
    parks = sum(it.parks_ms for it in c.state.states_at(filler, node))
    loads = 0 if next_ is None else sum(it.loads_ms for it in c.state.states_at(next_, node))
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
    if node.status is not NodeStatus.UP or node.holders:
        return
    due, next_ = next_due(c, node)
    first = min(asking(c, node), default=None) if c.config.fillers else None
    filler = None if first is None else c.state.jobs[first[2]]
    if filler is not None and is_worth_it(c, node, filler, due, next_):
        begin_loan(c, node, filler, due)
    elif due is not None and next_ is not None and node.loan_ended_at is not None:
        parked = [it for it in c.state.states_at(next_, node) if it.status is StateStatus.PARKED]
        at = due - sum(it.loads_ms for it in parked) - c.config.fillers_margin_ms
        if c.is_past(at, "lend", node.id) and may_load_ahead(c, node, next_):
            for kept in parked:
                issue(c, OrderKind.LOAD, kept, None)


def may_load_ahead(c: Context, node: Node, job: Job) -> bool:
    """Whether the job's state can be loaded although no slot of its own holds the node yet.

    Where a request waits for the node, its turn decides what is loaded.
    """
    group = c.state.group_of(node)
    for other in () if group is None else c.state.members(group):
        slot = c.state.request_of(other)
        if slot is not None and node.id in c.state.phase_nodes(other, slot.phase):
            return False
    clean = all(gpu.dirty_by in (None, job.id) for gpu in node.gpus.values())
    return clean and job.move is None and not job.left and job.status in SERVED


def asking(c: Context, node: Node) -> list[tuple[Millis, Millis, JobId]]:
    """Fillers that can be lent the node: least comes the one that has had the least; of equals, that asked first."""
    found: list[tuple[Millis, Millis, JobId]] = []
    for name in node.fillers:
        job = c.state.jobs[name]
        slot = c.state.request_of(job)
        ready = all(it.status in (StateStatus.GONE, StateStatus.PARKED) for it in c.state.states_at(job, node))
        if slot is not None and job.status is JobStatus.ADMITTED and slot.id not in c.timers.detached and ready:
            found.append((job.harvested_ms, slot.queued_at, name))
    return found


def is_worth_it(c: Context, node: Node, filler: Job, due: Millis | None, next_: Job | None) -> bool:
    """Whether a loan gives the filler its least time before a job is due, and no job is held up for too long by it."""
    back = back_ms(c, node, filler, next_)
    if not may_wait(c, c.state.group_of(node), back):
        return False
    there = sum(wake_ms(filler, it) for it in c.state.states_at(filler, node))
    there += sum(it.parks_ms for it in loaded_by_others(c, node, filler))
    assert filler.spec.filler is not None
    return due is None or c.now + there + filler.spec.filler.min_run_ms + back <= due


def loaded_by_others(c: Context, node: Node, filler: Job) -> list[JobState]:
    states = c.state.states_on(node)
    return [it for it in states if it.job != filler.id and it.status is StateStatus.LOADED]


def begin_loan(c: Context, node: Node, filler: Job, due: Millis | None) -> None:
    """Park what others have loaded. When the node is clean, the filler has it."""
    for kept in loaded_by_others(c, node, filler):
        issue(c, OrderKind.PARK, kept, None)
    if all(gpu.dirty_by in (None, filler.id) for gpu in node.gpus.values()):
        slot = c.state.slots[filler.queued or ""]
        c.fact(f.SlotClaimed(c.now, slot.id, tuple(node.gpus), until=due))
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
    if not stays or not c.config.fillers or (due is not None and due <= c.now):
        ask_back(c, slot, filler, "wanted")
    elif due is not None and c.is_past(due - back_ms(c, node, filler, next_), "lend", node.id):
        ask_back(c, slot, filler, "expected")


def ask_back(c: Context, slot: Slot, filler: Job, reason: str) -> None:
    """Ask a filler to give way. One whose state is still being loaded has nothing to end."""
    if slot.status is SlotStatus.LOADING:
        take_away(c, slot, Cause(reason), "yield")
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
