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
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from rollmuxd.core import facts as f
from rollmuxd.core.apply import apply
from rollmuxd.core.ids import GroupId, JobId, Millis, NodeId
from rollmuxd.core.model import Job, JobStatus, Node, Order, OrderKind, OrderStatus, Slot, SlotStatus, nodes_in
from rollmuxd.core.state import State, state_key
from rollmuxd.daemon.clock import iso
from rollmuxd.daemon.entries import job_of
from rollmuxd.wire.answers import Bill, PoolRow, ReportView, Saving, WorkRow

R = TypeVar("R", bound=Struct)

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


class _Sums:
    """Figures that add up."""

    __slots__ = ()

    def add(self, later: "_Sums") -> None:
        """Add those of a span that comes later, or of another job."""
        for name in _FIGURES[type(later)]:
            setattr(self, name, getattr(self, name) + getattr(later, name))


@dataclass(slots=True)
class _Work(_Sums):
    """The usage of one job. Sums of GPU-milliseconds, milliseconds, and money times milliseconds."""

    job: JobId
    owner: str
    name: str
    held: float = 0
    cost_held: float = 0
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
    #: of the nodes on which states were loaded or parked, while they were
    switching: float = 0
    cost_switching: float = 0
    #: of a filler: what it ran on nodes that were lent to it. It is charged nothing for that
    harvested: float = 0
    #: milliseconds that loans of its nodes to fillers have held it up, at most
    held_up: float = 0
    #: as it was last
    slo: float | None = None
    promised: bool = False


@dataclass(slots=True)
class _Bill(_Work):
    """The usage of a job, or of several, and what follows from it and from that of their groups."""

    charged: float = 0
    cost_charged: float = 0
    #: jobs whose promise can be judged, and those of them for which it was kept
    slo_judged: int = 0
    slo_kept: int = 0

    @property
    def slowdown(self) -> float | None:
        """Of the finished iterations."""
        return round(self.elapsed / self.solo, 4) if self.solo else None


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
class _Pool(_Sums):
    """The usage of one pool."""

    #: at the end of the span
    gpus: int = 0
    capacity: float = 0
    cost_capacity: float = 0
    held: float = 0
    used: float = 0
    pinned: float = 0
    cost_pinned: float = 0
    harvested: float = 0


_NO_FIGURES: Final = ("job", "owner", "name", "slo", "promised")
_FIGURES: Final[dict[type[_Sums], tuple[str, ...]]] = {
    kind: tuple(item.name for item in fields(kind) if item.name not in _NO_FIGURES) for kind in (_Work, _Bill, _Pool)
}
#: all fields of a job's usage, with which a bill begins
_WORK: Final = attrgetter(*(item.name for item in fields(_Work)))


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
        for job, work in later.work.items():
            mine = self.work.setdefault(job, _Work(job, work.owner, work.name))
            mine.name, mine.slo, mine.promised = work.name, work.slo, work.promised
            mine.add(work)
        for pool in self.pools.values():
            pool.gpus = 0
        for name, of_pool in later.pools.items():
            self.pools.setdefault(name, _Pool()).add(of_pool)
        for group, shared in later.groups.items():
            self.groups.setdefault(group, _Shared()).add(shared)
        self.unreadable += later.unreadable

    def bills(self) -> list[_Bill]:
        """What each job used, and is charged with."""
        made = {}
        for job, work in self.work.items():
            bill = made[job] = _Bill(*_WORK(work))
            bill.charged, bill.cost_charged = work.held, work.cost_held
        for shared in self.groups.values():
            for job, part in shared.shares().items():
                made[job].charged += part * shared.idle
                made[job].cost_charged += part * shared.cost_idle
        for bill in made.values():
            if bill.slo is not None and bill.promised and bill.iterations >= JUDGED_FROM and bill.solo:
                bill.slo_judged, bill.slo_kept = 1, int(bill.elapsed <= bill.slo * bill.solo)
        return list(made.values())

    def view(self, since: Millis, until: Millis, *, by: str = "job", owner: str | None = None) -> ReportView:
        """The usage as it is shown; ``owner``: only theirs."""
        everybody = self.bills()
        mine = [bill for bill in everybody if owner is None or bill.owner == owner]
        rows = [it for it in mine if it.charged or it.harvested or it.wait_placement or it.wait_turn or it.iterations]
        if by == "owner":
            theirs: dict[str, _Bill] = {}
            for it in rows:
                theirs.setdefault(it.owner, _Bill("", it.owner, it.owner)).add(it)
            rows = [theirs[name] for name in sorted(theirs)]
        of, pools = _Bill("", "", ""), _Pool()
        for it in mine:
            of.add(it)
        for pool in self.pools.values():
            pools.add(pool)
        return ReportView(
            since=iso(since),
            until=iso(until),
            by=by,
            work=[] if by == "pool" else [_row(WorkRow, it, job=it.job or None) for it in rows],
            pools=[_pool_row(name, self.pools[name]) for name in sorted(self.pools)],
            saving=_row(
                Saving,
                of,
                baseline=BASELINE,
                gpu_hours_saved=of.alone - of.charged,
                cost_saved=of.cost_alone - of.cost_charged,
            ),
            bill=_row(
                Bill,
                of,
                gpu_hours_others=sum(it.charged for it in everybody) - of.charged,
                gpu_hours_unallocated=pools.capacity - pools.pinned,
                gpu_hours_capacity=pools.capacity,
                cost_others=sum(it.cost_charged for it in everybody) - of.cost_charged,
                cost_unallocated=pools.cost_capacity - pools.cost_pinned,
                cost_capacity=pools.cost_capacity,
            ),
            unreadable=self.unreadable,
        )


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
                self._work[order.job].switching += took
                self._work[order.job].cost_switching += took * node.price_per_gpu_hour

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
        pool.cost_capacity += span * gpus * price
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
    return _row(
        PoolRow,
        pool,
        pool=name,
        gpu_hours_switching=pool.held - pool.used,
        gpu_hours_idle=pool.pinned - pool.held,
        gpu_hours_unallocated=pool.capacity - pool.pinned,
        utilisation=round(pool.used / pool.capacity, 4) if pool.capacity else None,
    )


def _row(kind: type[R], of: _Sums, **more: Any) -> R:
    """A row of these figures and of ``more``. What is of hours or of money there is of milliseconds in them."""
    told = {}
    for name in kind.__struct_fields__:
        short = name.removeprefix("gpu_hours_").removesuffix("_hours")
        value = more[name] if name in more else getattr(of, short)
        told[name] = _hours(value) if short != name or name.startswith("cost_") else value
    return kind(**told)


def _hours(milliseconds: float) -> float:
    return round(milliseconds / HOUR, 6)
