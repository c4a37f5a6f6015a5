"""What the GPUs were used for, and what the same work would have taken without sharing.

A pure fold over facts. The facts run through a :class:`~rollmuxd.core.state.State`, so an iteration, a slowdown or a
held GPU means here what it means to the scheduler. Between two facts about a node its use is constant, and is added
up by its time. Usable offline, on any list of facts::

    ledger = UsageLedger(since=0, until=None)
    for fact in facts:
        ledger.see(fact)
    usage, until = ledger.close()
    report = usage.view(0, until, by="job")

Usage adds up: that of spans that follow each other is, added, that of the whole. So a daemon closes it once for
each day (UTC), keeps that, and deletes the day's facts when they are old (:mod:`rollmuxd.daemon.usage.daily`).

The bill is made of the usage when it is shown. Held time is charged to its holder. Time in which a group's nodes
were not held (between slots, while states were parked) is split among its jobs by what they held. The rest of the
inventory is *unallocated*. So charges and the unallocated rest are the inventory's hours, in GPU-hours and in money.
What fillers ran on lent nodes is counted as harvested, and charged to no job.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Final, NamedTuple

import msgspec

from rollmuxd.core import facts as f
from rollmuxd.core.apply import apply
from rollmuxd.core.ids import GroupId, JobId, Millis, NodeId
from rollmuxd.core.model import Job, JobStatus, Node, Order, OrderKind, OrderStatus, Slot, SlotStatus, nodes_in
from rollmuxd.core.state import State, state_key
from rollmuxd.daemon.clock import iso
from rollmuxd.daemon.entries import job_of
from rollmuxd.wire.answers import Bill, PoolRow, ReportView, Saving, WorkRow

HOUR: Final = 3_600_000
BASELINE: Final = (
    "each job alone on the nodes it was placed on: GPUs of its placement x solo iteration time x finished iterations"
)
_USING = (SlotStatus.RUNNING, SlotStatus.TAIL)
#: facts that change which jobs are placed on which nodes
_PLACES = ("job_placed", "placement_ended", "move_planned", "move_began", "move_ended", "move_abandoned", "node_left")
#: iterations after which a slowdown is judged
JUDGED_FROM: Final = 8
#: what the rows of a report tell, in order
HEADS: Final = {"work": WorkRow.__struct_fields__, "pools": PoolRow.__struct_fields__}


@dataclass(slots=True)
class _Work:
    """The usage of one job. Sums of GPU-milliseconds, milliseconds, and money times milliseconds."""

    job: JobId
    owner: str
    name: str
    held: float = 0
    used: float = 0
    alone: float = 0
    cost_alone: float = 0
    iterations: int = 0
    solo: int = 0
    elapsed: int = 0
    loads_warm: int = 0
    loads_cold: int = 0
    parks: int = 0
    wait_placement: int = 0
    wait_turn: int = 0
    cost_held: float = 0
    #: of the nodes on which states were loaded or parked, while they were
    switch_gpu: float = 0
    cost_switch: float = 0
    #: of a filler: what it ran on nodes that were lent to it. It is charged nothing for that
    harvested: float = 0
    #: milliseconds that loans of its nodes to fillers have held it up, at most
    held_up: float = 0
    #: as it was last
    slo: float | None = None
    promised: bool = False


@dataclass(slots=True)
class _Shared:
    """The usage of one group: how long its nodes were not held, and which jobs held them."""

    idle: float = 0
    cost_idle: float = 0
    held: dict[JobId, float] = field(default_factory=dict)
    pinned: dict[JobId, float] = field(default_factory=dict)

    def add(self, later: "_Shared") -> None:
        self.idle += later.idle
        self.cost_idle += later.cost_idle
        for mine, more in ((self.held, later.held), (self.pinned, later.pinned)):
            for job, time in more.items():
                mine[job] = mine.get(job, 0) + time

    def shares(self) -> dict[JobId, float]:
        """Each job's part of what was not held: by what it held, or, where no job held anything, by its time there."""
        by = self.held if any(self.held.values()) else self.pinned
        total = sum(by.values())
        return {job: time / total for job, time in by.items()} if total else {}


@dataclass(slots=True)
class _Pool:
    """The usage of one pool."""

    #: at the end of the span
    gpus: int = 0
    capacity: float = 0
    held: float = 0
    used: float = 0
    pinned: float = 0
    cost: float = 0
    cost_pinned: float = 0
    harvested: float = 0


@dataclass(slots=True)
class DailyUsage:
    """What was booked in one span of time, or in several."""

    work: dict[JobId, _Work] = field(default_factory=dict)
    pools: dict[str, _Pool] = field(default_factory=dict)
    groups: dict[GroupId, _Shared] = field(default_factory=dict)
    #: facts of the span that are damaged: what follows from them is left out
    unreadable: list[int] = field(default_factory=list)

    def add(self, later: "DailyUsage") -> None:
        """Add the usage of a span that comes later."""
        for job, of_job in later.work.items():
            mine = self.work.setdefault(job, _Work(job, of_job.owner, of_job.name))
            mine.name, mine.slo, mine.promised = of_job.name, of_job.slo, of_job.promised
            for name in _SUMS:
                setattr(mine, name, getattr(mine, name) + getattr(of_job, name))
        for pool in self.pools.values():
            pool.gpus = 0
        for name, of_pool in later.pools.items():
            total = self.pools.setdefault(name, _Pool())
            total.gpus = of_pool.gpus
            for figure in ("capacity", "held", "used", "pinned", "cost", "cost_pinned", "harvested"):
                setattr(total, figure, getattr(total, figure) + getattr(of_pool, figure))
        for group, shared in later.groups.items():
            self.groups.setdefault(group, _Shared()).add(shared)
        self.unreadable += later.unreadable

    def charges(self) -> dict[JobId, "Charge"]:
        """What each job is charged with."""
        made = {job: Charge(book.held, book.cost_held) for job, book in self.work.items()}
        for shared in self.groups.values():
            for job, part in shared.shares().items():
                charge = made[job]
                made[job] = Charge(charge.gpu_ms + part * shared.idle, charge.cost + part * shared.cost_idle)
        return made

    def view(self, since: Millis, until: Millis, *, by: str = "job", owner: str | None = None) -> ReportView:
        """The usage as it is shown; ``owner``: only theirs."""
        charges = self.charges()
        usage = [book for book in self.work.values() if owner is None or book.owner == owner]
        shown = [
            book
            for book in usage
            if charges[book.job].gpu_ms or book.harvested or book.wait_placement or book.wait_turn or book.iterations
        ]
        return ReportView(
            since=iso(since),
            until=iso(until),
            by=by,
            work=[] if by == "pool" else _rows(shown, charges, by),
            pools=[_pool_row(name, self.pools[name]) for name in sorted(self.pools)],
            saving=_saving(usage, charges),
            bill=self._bill(usage, charges),
            unreadable=self.unreadable,
        )

    def _bill(self, usage: Sequence[_Work], charges: Mapping[JobId, "Charge"]) -> Bill:
        """All of the inventory's hours: those charged to the jobs of this usage, to others, and to no job."""
        mine = _sum(charges[book.job] for book in usage)
        everybody = _sum(charges.values())
        pools = self.pools.values()
        capacity, cost = sum(pool.capacity for pool in pools), sum(pool.cost for pool in pools)
        return Bill(
            gpu_hours_charged=_hours(mine.gpu_ms),
            gpu_hours_others=_hours(everybody.gpu_ms - mine.gpu_ms),
            gpu_hours_unallocated=_hours(capacity - sum(pool.pinned for pool in pools)),
            gpu_hours_capacity=_hours(capacity),
            cost_charged=_hours(mine.cost),
            cost_others=_hours(everybody.cost - mine.cost),
            cost_unallocated=_hours(cost - sum(pool.cost_pinned for pool in pools)),
            cost_capacity=_hours(cost),
        )


class Charge(NamedTuple):
    """A charge: GPU-milliseconds, and money times milliseconds an hour."""

    gpu_ms: float
    cost: float


def _sum(charges: Iterable[Charge]) -> Charge:
    gpu_ms = cost = 0.0
    for charge in charges:
        gpu_ms, cost = gpu_ms + charge.gpu_ms, cost + charge.cost
    return Charge(gpu_ms, cost)


class UsageLedger:
    """Counts use from facts. ``state`` is what was before the first of them (of a snapshot), if anything was."""

    def __init__(self, *, since: Millis = 0, until: Millis | None = None, state: State | None = None) -> None:
        self.since = since
        self.until = until
        self._state = State() if state is None else state
        self._usage = DailyUsage()
        self._work, self._pools, self._groups = self._usage.work, self._usage.pools, self._usage.groups
        #: until when the use of each node is booked
        self._settled: dict[NodeId, Millis] = dict.fromkeys(self._state.nodes, self._state.at)
        #: when the usage was last closed: what began before is booked until then
        self._closed: Millis = 0
        #: jobs that wait for a placement, since when
        self._waiting: dict[JobId, Millis] = {}
        for job in self._state.jobs.values():
            # A thousand that are over are remembered: in each day's usage they would hold the loop up.
            if job.status is not JobStatus.ENDED or job.pins or job.closing or job.left:
                self._book_of(job)
            if job.status is JobStatus.WAITING:
                self._waiting[job.id] = self._state.at

    # ---- booking -----------------------------------------------------------------------------------------------------

    def see(self, fact: f.Fact) -> bool:
        """Book one fact. False: it is after the end of the span, and so are all that follow."""
        if self.until is not None and fact.at >= self.until:
            return False
        try:
            self._book(fact)
        except Exception:  # of any kind: what it speaks of may be missing
            if not self._usage.unreadable:
                raise
        return True

    def miss(self, seq: int) -> None:
        """A fact cannot be read. Facts after it that do not fit without it are left out, too."""
        self._usage.unreadable.append(seq)

    def _book(self, fact: f.Fact) -> None:
        state, job_id = self._state, job_of(fact, self._state)
        for name in self._touched(fact, job_id):
            self._settle(name, fact.at)
        self._book_before(fact)
        job = state.jobs.get(job_id)
        status, pins = (None, {}) if job is None else (job.status, job.pins)
        before = None
        if job is not None and isinstance(fact, f.SlotQueued | f.OrderEnded | f.JobEnded) and fact.at >= self.since:
            before = msgspec.structs.replace(job.progress)
        apply(state, fact)
        job = state.jobs.get(job_id)
        if job is None:
            return
        book = self._book_of(job)
        if job.status is not status:
            self._status_changed(job, book, fact.at)
        if before is not None:
            now = job.progress
            book.loads_warm += now.loads_warm - before.loads_warm
            book.loads_cold += now.loads_cold - before.loads_cold
            book.parks += now.parks - before.parks
            if now.finished > before.finished:
                solo = now.solo_ms - before.solo_ms
                book.iterations += 1
                book.solo += solo
                book.elapsed += now.elapsed_ms - before.elapsed_ms
                # A node that is in several of the job's pools is one node.
                alone = [state.nodes[name] for name in nodes_in(pins)]
                book.alone += solo * sum(len(node.gpus) for node in alone)
                book.cost_alone += solo * sum(len(node.gpus) * node.price_per_gpu_hour for node in alone)

    def _book_before(self, fact: f.Fact) -> None:
        """What can only be booked while the state still knows it."""
        state = self._state
        match fact:
            case f.SlotClaimed(turn=int()) | f.SlotWithdrawn():  # no job is kept waiting by a loan that has not begun
                slot = state.slots[fact.slot]
                self._waited(slot, fact.at)
                if isinstance(fact, f.SlotClaimed) and fact.at >= self.since:
                    self._work[slot.job].held_up += fact.lent_ms
            case f.OrderEnded() | f.OrderFaulted() | f.OrderContactLost():
                order = state.orders.get(fact.order)
                if order is not None:
                    self._switched(order, fact.at)
            case f.StateObserved():  # the end of its order was not reported
                kept = state.states.get(state_key(fact.job, fact.pool, fact.node))
                order = None if kept is None else state.orders.get(kept.order or "")
                if order is not None:
                    self._switched(order, fact.at)
            case _:
                pass

    def _switched(self, order: Order, at: Millis) -> None:
        # When contact was lost it was booked so far; what came of it later is not known to have taken any time.
        if order.kind is not OrderKind.DISCARD and order.status is OrderStatus.ISSUED and order.job in self._work:
            node = self._state.nodes.get(order.node)
            if node is not None:
                took = self._within(order.issued_at, at) * len(node.gpus)
                self._work[order.job].switch_gpu += took
                self._work[order.job].cost_switch += took * node.price_per_gpu_hour

    def _waited(self, slot: Slot, at: Millis) -> None:
        if self._state.jobs[slot.job].spec.filler is None:  # a filler has no turn
            self._work[slot.job].wait_turn += self._within(slot.queued_at, at)

    def _status_changed(self, job: Job, book: _Work, at: Millis) -> None:
        since = self._waiting.pop(job.id, None)
        if since is not None:
            book.wait_placement += self._within(since, at)
        if job.status is JobStatus.WAITING:
            self._waiting[job.id] = at

    def _book_of(self, job: Job) -> _Work:
        book = self._work.get(job.id)
        if book is None:
            book = self._work[job.id] = _Work(job.id, job.owner, job.spec.name)
        book.slo, book.promised = job.spec.slo, job.promised
        return book

    def _settle(self, name: NodeId, at: Millis) -> None:
        """Add what the node was used for since it was last looked at; to be called before that changes."""
        node = self._state.nodes.get(name)
        span = self._within(self._settled.get(name, at), at)
        self._settled[name] = at
        if node is None or span <= 0:
            return
        held, used, harvested = Counter[JobId](), Counter[JobId](), Counter[JobId]()
        for gpu in node.gpus.values():
            slot = None if gpu.holder is None else self._state.slots.get(gpu.holder)
            if slot is None:
                continue
            if self._state.jobs[slot.job].spec.filler is None:
                held[slot.job] += 1
                used[slot.job] += slot.status in _USING
            else:
                harvested[slot.job] += slot.status in _USING
        pool, gpus, price = self._pool_of(node), len(node.gpus), node.price_per_gpu_hour
        pool.capacity += span * gpus
        pool.cost += span * gpus * price
        pool.held += span * held.total()
        pool.used += span * used.total()
        pool.harvested += span * harvested.total()
        pinned = gpus if node.pinned else held.total()
        pool.pinned += span * pinned
        pool.cost_pinned += span * pinned * price
        for job, number in held.items():
            self._work[job].held += span * number
            self._work[job].cost_held += span * number * price
            self._work[job].used += span * used[job]
        for job, number in harvested.items():
            self._work[job].harvested += span * number
        if node.group is not None and node.pinned:
            shared = self._groups.setdefault(node.group, _Shared())
            shared.idle += span * (gpus - held.total())
            shared.cost_idle += span * (gpus - held.total()) * price
            for job, number in held.items():
                shared.held[job] = shared.held.get(job, 0) + span * number
            for job in node.pinned:
                shared.pinned[job] = shared.pinned.get(job, 0) + span * gpus / len(node.pinned)

    def _pool_of(self, node: Node) -> _Pool:
        return self._pools.setdefault("+".join(node.pools), _Pool())

    def _within(self, start: Millis, end: Millis) -> Millis:
        """How much of a stretch of time lies in the report's span, and is not booked yet."""
        if self.until is not None:
            end = min(end, self.until)
        return max(0, end - max(start, self.since, self._closed))

    def _touched(self, fact: f.Fact, job: JobId) -> Iterable[NodeId]:
        """The nodes whose use a fact about this job may change."""
        match fact:
            case f.NodeAdded():
                return (fact.node.id,)
            case f.NodeRemoved():
                return (fact.node,)
            case f.SlotFact() if job in self._state.jobs:
                return nodes_in(self._state.jobs[job].pins)
            case _ if f.name(fact) in _PLACES:  # where a job is placed, or no longer; of a move, both ends
                there = [node.id for node in self._state.nodes.values() if job in node.pinned]
                return dict.fromkeys((*there, *nodes_in(getattr(fact, "pins", {}))))
            case _:
                return ()

    # ---- the report --------------------------------------------------------------------------------------------------

    def close(self, now: Millis | None = None) -> tuple[DailyUsage, Millis]:
        """The usage, with all that has not ended booked as well; and the time until which it is.

        That is ``until``, or ``now`` where that is earlier; without either, the last fact. Later facts may follow:
        the same usage then continues.
        """
        end = self.until if now is None and self.until is not None else max(now or 0, self._state.at)
        if self.until is not None:
            end = min(end, self.until)
        for pool in self._pools.values():
            pool.gpus = 0
        for node in self._state.nodes.values():
            self._settle(node.id, end)
            self._pool_of(node).gpus += len(node.gpus)
        for job, since in self._waiting.items():
            self._work[job].wait_placement += self._within(since, end)
            self._waiting[job] = end
        for slot in self._state.slots.values():
            if slot.status is SlotStatus.QUEUED:
                self._waited(slot, end)
        for order in self._state.orders.values():
            self._switched(order, end)
        self._closed = max(self._closed, end)
        return self._usage, end


def _pool_row(name: str, pool: _Pool) -> PoolRow:
    return PoolRow(
        pool=name,
        gpus=pool.gpus,
        gpu_hours_capacity=_hours(pool.capacity),
        gpu_hours_held=_hours(pool.held),
        gpu_hours_used=_hours(pool.used),
        gpu_hours_switching=_hours(pool.held - pool.used),
        gpu_hours_idle=_hours(pool.pinned - pool.held),
        gpu_hours_unallocated=_hours(pool.capacity - pool.pinned),
        utilisation=round(pool.used / pool.capacity, 4) if pool.capacity else None,
        cost_capacity=_hours(pool.cost),
        gpu_hours_harvested=_hours(pool.harvested),
    )


def _rows(usage: Iterable[_Work], charges: Mapping[JobId, Charge], by: str) -> list[WorkRow]:
    if by == "job":
        return [_row([book], charges, book.name, book.job) for book in usage]
    owners: dict[str, list[_Work]] = {}
    for book in usage:
        owners.setdefault(book.owner, []).append(book)
    return [_row(theirs, charges, owner, None) for owner, theirs in sorted(owners.items())]


_NO_SUMS: Final = ("job", "owner", "name", "slo", "promised")
_SUMS: Final = tuple(item.name for item in fields(_Work) if item.name not in _NO_SUMS)


def _row(usage: Sequence[_Work], charges: Mapping[JobId, Charge], name: str, job: JobId | None) -> WorkRow:
    """A row of one job, or of all jobs of one owner."""
    book = _Work(job or "", usage[0].owner, name)
    for of_job in usage:
        for figure in _SUMS:
            setattr(book, figure, getattr(book, figure) + getattr(of_job, figure))
    charge = _sum(charges[of_job.job] for of_job in usage)
    kept = [_kept(of_job) for of_job in usage]
    return WorkRow(
        name=name,
        owner=book.owner,
        job=job,
        gpu_hours_held=_hours(book.held),
        gpu_hours_used=_hours(book.used),
        gpu_hours_alone=_hours(book.alone),
        cost_alone=_hours(book.cost_alone),
        iterations=book.iterations,
        slowdown=round(book.elapsed / book.solo, 4) if book.solo else None,
        loads_warm=book.loads_warm,
        loads_cold=book.loads_cold,
        parks=book.parks,
        wait_placement_hours=_hours(book.wait_placement),
        wait_turn_hours=_hours(book.wait_turn),
        gpu_hours_charged=_hours(charge.gpu_ms),
        cost_charged=_hours(charge.cost),
        gpu_hours_switching=_hours(book.switch_gpu),
        cost_switching=_hours(book.cost_switch),
        gpu_hours_harvested=_hours(book.harvested),
        held_up_hours=_hours(book.held_up),
        slo=usage[0].slo if job is not None else None,
        slo_judged=sum(one is not None for one in kept),
        slo_kept=sum(one is True for one in kept),
    )


def _kept(book: _Work) -> bool | None:
    """Whether a job's promise was kept in the span; None: it has none, or there were too few iterations to judge."""
    if book.slo is None or not book.promised or book.iterations < JUDGED_FROM or not book.solo:
        return None
    return book.elapsed <= book.slo * book.solo


def _saving(usage: Sequence[_Work], charges: Mapping[JobId, Charge]) -> Saving:
    alone = sum(book.alone for book in usage)
    charged = _sum(charges[book.job] for book in usage)
    return Saving(
        baseline=BASELINE,
        gpu_hours_alone=_hours(alone),
        gpu_hours_charged=_hours(charged.gpu_ms),
        gpu_hours_saved=_hours(alone - charged.gpu_ms),
        cost_saved=_hours(sum(book.cost_alone for book in usage) - charged.cost),
    )


def _hours(milliseconds: float) -> float:
    return round(milliseconds / HOUR, 6)
