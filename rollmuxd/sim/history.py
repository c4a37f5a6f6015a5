"""What happened, as spans of time: what ran where and when, what was moved, what a job was waiting for.

A fold over facts, one at a time, of a simulated or a live history. A span is handed out when it is over, so memory
holds only what is open. :meth:`History.close` hands out what has not ended. Spans come by the time of their end.

It is lenient, as its facts may be a part of the story: those that one owner may see, or those after a compaction. What
a fact speaks of and no fact introduced goes by its id. (A :class:`~rollmuxd.core.state.State` would refuse such facts,
and rightly: it has to decide on them.) A span that takes no time is left out, but for phases, which are the point, and
orders that failed.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias

import msgspec
from msgspec import Struct

from rollmuxd.core import facts as f
from rollmuxd.core.causes import Cause
from rollmuxd.core.facts import Fact as Fact  # noqa: PLC0414 handed on: the command line knows facts by us
from rollmuxd.core.ids import Fence, GpuId, GroupId, HostId, JobId, Millis, NodeId, OrderId, PoolName, SlotId
from rollmuxd.core.model import JobStatus
from rollmuxd.explain.causes import sentence

HOUR: Final = 3_600_000


# ---- what is handed out ----------------------------------------------------------------------------------------------


class Who(Struct):
    """A job as people know it. One object per job: what is learnt of it later shows in its earlier spans, too."""

    job: JobId
    name: str
    owner: str = ""


class Span(Struct, kw_only=True):
    """Something that took from ``start`` to ``end``."""

    start: Millis
    end: Millis
    #: it had not ended when the history was closed
    open: bool = False


class SlotSpan(Span, kw_only=True):
    """A part of a slot's life.

    ``kind`` is ``queued`` (asked for, not claimed), ``loading`` (claimed, not granted), ``running``, or ``tail``
    (running on fewer GPUs). GPUs that are still held afterwards are ``released`` by the job, or ``reclaiming`` from it.
    """

    kind: str
    who: Who
    run: int
    phase: str
    slot: SlotId
    side: bool
    #: how many GPUs on each node
    nodes: dict[NodeId, int]
    fence: Fence | None
    #: what ended it: granted, shrunk, released, or ``lost: no heartbeat for 30 s``
    ended_by: str


class OrderSpan(Span, kw_only=True):
    """A state being moved; ``kind`` is ``load``, ``park`` or ``discard``."""

    kind: str
    who: Who
    order: OrderId
    pool: PoolName
    node: NodeId
    driver: str
    slot: SlotId | None
    #: done, or why not
    outcome: str


class JobSpan(Span, kw_only=True):
    """A job in one status, ``kind``: waiting, probing, admitted, moving, paused, quarantined, or lost."""

    kind: str
    who: Who
    run: int
    reason: str
    group: GroupId | None
    admission: str


class NodeSpan(Span, kw_only=True):
    """A node that was not simply there: ``occupied``, ``lost``, ``quarantined``, ``draining``, ``drained``."""

    kind: str
    node: NodeId
    reason: str


class Moment(Struct, kw_only=True):
    """Something that took no time. ``who``: it happened to that job; else to the daemon."""

    at: Millis
    what: str
    who: Who | None = None


class NodeInfo(Struct, frozen=True):
    """A node as it was added. ``pool`` joins its pools' names where it has several."""

    id: NodeId
    pool: PoolName
    gpu_type: str = ""


#: a :class:`NodeInfo` comes before anything on that node does
Item: TypeAlias = SlotSpan | OrderSpan | JobSpan | NodeSpan | Moment | NodeInfo


def fact_of(shown: Mapping[str, Any]) -> Fact:
    """A fact as ``/v1/facts`` has it. Raises :class:`ValueError` for what is none (of this version)."""
    try:
        found: Fact = msgspec.convert(shown, f.AnyFact)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    return found


def items(facts: Iterable[f.Fact], since: Millis | None = None, until: Millis | None = None) -> Iterator[Item]:
    """The whole fold, or a window of it: spans that reach out of it are cut to it.

    Facts from before the window are needed, too, as they say what was going on when it began.
    """
    history = History()
    for fact in facts:
        if until is not None and fact.at >= until:
            found = history.close(until)
            break
        yield from _within(since, history.see(fact))
    else:
        found = history.close()
    yield from _within(since, found)


def _within(since: Millis | None, found: Iterable[Item]) -> Iterator[Item]:
    return (shown for item in found if (shown := _cut(item, since)) is not None)


def _cut(item: Item, since: Millis | None) -> Item | None:
    if since is None or isinstance(item, NodeInfo):
        return item
    if isinstance(item, Moment):
        return item if item.at >= since else None
    if item.end < since or item.end == since > item.start:
        return None
    return item if item.start >= since else msgspec.structs.replace(item, start=since)


# ---- the fold --------------------------------------------------------------------------------------------------------


class _Slot(Struct):
    id: SlotId
    who: Who
    run: int
    phase: str
    side: bool
    kind: str
    since: Millis
    gpus: tuple[GpuId, ...] = ()
    fence: Fence | None = None


class _Job(Struct):
    who: Who
    run: int
    #: None: its story began before our first fact
    status: JobStatus | None
    since: Millis
    reason: str = ""
    resume_to: JobStatus | None = JobStatus.WAITING
    #: its placement
    group: GroupId | None = None
    admission: str = ""


class _NodeNow(Struct):
    kind: str
    since: Millis
    reason: str


class History:
    """Told facts in order, hands out what is over."""

    def __init__(self) -> None:
        self.at: Millis = 0
        self._hosts: dict[HostId, None] = {}
        self._nodes: dict[NodeId, NodeInfo] = {}
        self._node_of: dict[GpuId, NodeId] = {}
        self._not_up: dict[NodeId, _NodeNow] = {}
        self._jobs: dict[JobId, _Job] = {}
        self._slots: dict[SlotId, _Slot] = {}
        self._orders: dict[OrderId, tuple[f.OrderIssued, Who]] = {}

    def see(self, fact: f.Fact) -> list[Item]:
        """What this fact brings to an end."""
        self.at = max(self.at, fact.at)
        found: list[Item] = []
        _SEE.get(type(fact), History._nothing)(self, fact, found)
        return found

    def close(self, at: Millis | None = None) -> Iterator[Item]:
        """What has not ended, cut at ``at`` (else at the last fact). The history is over then."""
        at = self.at if at is None else at
        found: list[Item] = []
        for slot in self._slots.values():
            self._slot_part(slot, at, "", found)
        for order, who in self._orders.values():
            self._order_part(order, who, at, "", found)
        for job in self._jobs.values():
            self._status_part(job, at, found)
        for node in list(self._not_up):
            self._node_part(node, at, found)
        self._slots, self._orders, self._jobs, self._not_up = {}, {}, {}, {}
        for item in found:
            if isinstance(item, Span):
                item.open = True
            yield item

    # ---- the daemon, nodes -------------------------------------------------------------------------------------------

    def _nothing(self, fact: f.Fact, found: list[Item]) -> None:
        """It is of no span's concern."""

    def _daemon_started(self, fact: f.DaemonStarted, found: list[Item]) -> None:
        found.append(Moment(at=fact.at, what=f"daemon started (incarnation {fact.incarnation})"))

    def _loop_stalled(self, fact: f.LoopStalled, found: list[Item]) -> None:
        found.append(Moment(at=fact.at, what=f"daemon late by {fact.late_ms} ms"))

    def _host_booted(self, fact: f.HostBooted, found: list[Item]) -> None:
        if fact.host in self._hosts:  # else this is our first look at it
            found.append(Moment(at=fact.at, what=f"host {fact.host} booted"))
        self._hosts[fact.host] = None

    def _node_added(self, fact: f.NodeAdded, found: list[Item]) -> None:
        spec = fact.node
        info = NodeInfo(id=spec.id, pool="+".join(spec.pools), gpu_type=spec.gpu_type)
        self._nodes[spec.id] = info
        self._node_of.update(dict.fromkeys(spec.gpus, spec.id))
        found.append(info)

    def _node_removed(self, fact: f.NodeRemoved, found: list[Item]) -> None:
        self._node_part(fact.node, fact.at, found)
        self._nodes.pop(fact.node, None)
        self._node_of = {gpu: node for gpu, node in self._node_of.items() if node != fact.node}

    def _node_moved(self, fact: Any, found: list[Item]) -> None:
        self._node_part(fact.node, fact.at, found)
        kind = _NOT_UP.get(type(fact))
        if kind is not None:
            cause = getattr(fact, "reason", None)
            reason = self._words(cause) if cause else f"by {fact.by}" if hasattr(fact, "by") else ""
            self._not_up[fact.node] = _NodeNow(kind, fact.at, reason)

    def _node_part(self, node: NodeId, at: Millis, found: list[Item]) -> None:
        now = self._not_up.pop(node, None)
        if now is not None and at > now.since:
            self._known(node, found)
            found.append(NodeSpan(start=now.since, end=at, kind=now.kind, node=node, reason=now.reason))

    def _known(self, node: NodeId, found: list[Item]) -> None:
        """Introduce a node that no fact has introduced."""
        if node not in self._nodes:
            self._nodes[node] = NodeInfo(node, "?")
            found.append(self._nodes[node])

    # ---- jobs --------------------------------------------------------------------------------------------------------

    def _job(self, job: JobId, at: Millis) -> _Job:
        """The job; of one that no fact introduced we know that it is there, and nothing else."""
        known = self._jobs.get(job)
        if known is None:
            known = self._jobs[job] = _Job(Who(job, job), 1, None, at)
        return known

    def _registered(self, fact: f.JobRegistered, found: list[Item]) -> None:
        known = self._job(fact.job, fact.at)
        self._status_part(known, fact.at, found)
        known.who.name, known.who.owner = fact.spec.name, fact.owner
        known.run, known.status, known.since, known.reason = fact.run, JobStatus.WAITING, fact.at, ""

    def _placed(self, fact: f.JobPlaced, found: list[Item]) -> None:
        job = self._job(fact.job, fact.at)
        self._turn(job, fact.status, fact.at, found)
        job.group, job.admission = fact.group, fact.admission
        for node in dict.fromkeys(node for of in fact.pins.values() for node in of):
            self._known(node, found)

    def _admitted(self, fact: f.JobPromised | f.FillerPlaced, found: list[Item]) -> None:
        self._turn(self._job(fact.job, fact.at), JobStatus.ADMITTED, fact.at, found)

    def _unplaced(self, fact: f.JobUnplaced, found: list[Item]) -> None:
        self._turn(self._job(fact.job, fact.at), JobStatus.WAITING, fact.at, found, self._words(fact.reason))

    def _paused(self, fact: f.JobPaused, found: list[Item]) -> None:
        job = self._job(fact.job, fact.at)
        job.resume_to = job.status
        self._turn(job, JobStatus.PAUSED, fact.at, found, f"by {fact.by}")

    def _resumed(self, fact: f.JobResumed, found: list[Item]) -> None:
        job = self._job(fact.job, fact.at)
        self._turn(job, job.resume_to, fact.at, found)

    def _quarantined(self, fact: f.JobQuarantined, found: list[Item]) -> None:
        job = self._job(fact.job, fact.at)
        job.resume_to = JobStatus.WAITING
        self._turn(job, JobStatus.QUARANTINED, fact.at, found, self._words(fact.reason))

    def _lost(self, fact: f.JobLost, found: list[Item]) -> None:
        self._turn(self._job(fact.job, fact.at), JobStatus.LOST, fact.at, found, self._words(fact.reason))

    def _ended(self, fact: f.JobEnded, found: list[Item]) -> None:
        job = self._job(fact.job, fact.at)
        self._turn(job, JobStatus.ENDED, fact.at, found, self._words(fact.reason))
        found.append(Moment(at=fact.at, what=f"ended: {self._words(fact.reason)}", who=job.who))
        self._forget(job)

    def _placement_ended(self, fact: f.PlacementEnded, found: list[Item]) -> None:
        job = self._job(fact.job, fact.at)
        job.group = None
        self._forget(job)

    def _words(self, cause: Cause | None) -> str:
        return sentence(cause, lambda job: self._jobs[job].who.name if job in self._jobs else job)

    def _forget(self, job: _Job) -> None:
        if job.status is JobStatus.ENDED and job.group is None:
            self._jobs.pop(job.who.job, None)

    def _turn(self, job: _Job, status: JobStatus | None, at: Millis, found: list[Item], reason: str = "") -> None:
        """The job has another status from now on."""
        self._status_part(job, at, found)
        job.status, job.since, job.reason = status, at, reason

    def _status_part(self, job: _Job, at: Millis, found: list[Item]) -> None:
        if job.status is not None and job.status is not JobStatus.ENDED and at > job.since:
            placed = job.group is not None and job.status is not JobStatus.WAITING
            found.append(
                JobSpan(
                    start=job.since,
                    end=at,
                    kind=job.status.value,
                    who=job.who,
                    run=job.run,
                    reason=job.reason,
                    group=job.group if placed else None,
                    admission=job.admission if placed else "",
                )
            )

    # ---- slots -------------------------------------------------------------------------------------------------------

    def _queued(self, fact: f.SlotQueued, found: list[Item]) -> None:
        who = self._job(fact.job, fact.at).who
        self._slots[fact.slot] = _Slot(fact.slot, who, fact.run, fact.phase, fact.side, "queued", fact.at)

    def _next(self, fact: Any, kind: str, ended_by: str, found: list[Item]) -> _Slot:
        """The slot, in the part of its life that begins now."""
        slot = self._slots.get(fact.slot)
        if slot is None:  # it was asked for before our first fact
            slot = self._slots[fact.slot] = _Slot(fact.slot, Who("", "?"), 1, "?", False, kind, fact.at)
            return slot
        self._slot_part(slot, fact.at, ended_by, found)
        slot.kind, slot.since = kind, fact.at
        return slot

    def _withdrawn(self, fact: f.SlotWithdrawn, found: list[Item]) -> None:
        self._next(fact, "", f"withdrawn: {self._words(fact.reason)}", found)
        del self._slots[fact.slot]

    def _claimed(self, fact: f.SlotClaimed, found: list[Item]) -> None:
        self._next(fact, "loading", "claimed", found).gpus = fact.gpus

    def _granted(self, fact: f.SlotGranted, found: list[Item]) -> None:
        self._next(fact, "running", "granted", found).fence = fact.fence

    def _shrunk(self, fact: f.SlotShrunk, found: list[Item]) -> None:
        self._next(fact, "tail", "shrunk", found).gpus = fact.kept

    def _grown(self, fact: f.SlotGrown, found: list[Item]) -> None:
        self._next(fact, "running", "grown", found).gpus = fact.gpus

    def _released(self, fact: f.SlotReleased, found: list[Item]) -> None:
        self._next(fact, "released", "released", found)

    def _taken_away(self, fact: f.SlotTakenAway, found: list[Item]) -> None:
        by = f" by {fact.by}" if fact.by else ""
        self._next(fact, "reclaiming", f"{fact.how}{by}: {self._words(fact.reason)}", found)

    def _over(self, fact: f.SlotOver, found: list[Item]) -> None:
        self._next(fact, "", "over", found)
        del self._slots[fact.slot]

    def _slot_part(self, slot: _Slot, at: Millis, ended_by: str, found: list[Item]) -> None:
        if at == slot.since and slot.kind not in ("running", "tail"):
            return
        nodes: dict[NodeId, int] = {}
        for gpu in slot.gpus:
            # `host1/gpu0` is on the host's one node, as far as is known
            node = self._node_of.get(gpu) or gpu.rpartition("/")[0] or gpu
            nodes[node] = nodes.get(node, 0) + 1
        for node in nodes:
            self._known(node, found)
        found.append(
            SlotSpan(
                start=slot.since,
                end=at,
                kind=slot.kind,
                who=slot.who,
                run=slot.run,
                phase=slot.phase,
                slot=slot.id,
                side=slot.side,
                nodes=nodes,
                fence=slot.fence,
                ended_by=ended_by,
            )
        )

    # ---- orders ------------------------------------------------------------------------------------------------------

    def _issued(self, fact: f.OrderIssued, found: list[Item]) -> None:
        self._orders[fact.order] = fact, self._job(fact.job, fact.at).who

    def _order_ended(self, fact: f.OrderEnded, found: list[Item]) -> None:
        self._order_over(fact.order, fact.at, "done", found)

    def _order_faulted(self, fact: f.OrderFaulted, found: list[Item]) -> None:
        self._order_over(fact.order, fact.at, f"failed: {self._words(fact.error)}", found)

    def _contact_lost(self, fact: f.OrderContactLost, found: list[Item]) -> None:
        self._order_over(fact.order, fact.at, f"contact lost: {self._words(fact.error)}", found)

    def _state_observed(self, fact: Any, found: list[Item]) -> None:
        """Nothing is left to be learnt of an order that was to move this state."""
        status = f"seen {fact.status}" if isinstance(fact, f.StateObserved) else "not known"
        state = (fact.job, fact.pool, fact.node)
        for order in [o for o, _ in self._orders.values() if (o.job, o.pool, o.node) == state]:
            self._order_over(order.order, fact.at, status, found)

    def _order_over(self, id: OrderId, at: Millis, outcome: str, found: list[Item]) -> None:
        known = self._orders.pop(id, None)
        if known is not None:
            self._order_part(*known, at, outcome, found)

    def _order_part(self, order: f.OrderIssued, who: Who, at: Millis, outcome: str, found: list[Item]) -> None:
        if at == order.at and outcome in ("", "done"):
            return
        self._known(order.node, found)
        found.append(
            OrderSpan(
                start=order.at,
                end=at,
                kind=order.kind.value,
                who=who,
                order=order.order,
                pool=order.pool,
                node=order.node,
                driver=order.driver,
                slot=order.slot,
                outcome=outcome,
            )
        )


_NOT_UP: Final[dict[type[f.Fact], str]] = {
    f.NodeOccupied: "occupied",
    f.NodeLost: "lost",
    f.NodeQuarantined: "quarantined",
    f.NodeDraining: "draining",
    f.NodeDrained: "drained",
}

_SEE: Final[dict[type[f.Fact], Any]] = {
    f.DaemonStarted: History._daemon_started,
    f.LoopStalled: History._loop_stalled,
    f.HostBooted: History._host_booted,
    f.NodeAdded: History._node_added,
    f.NodeRemoved: History._node_removed,
    f.NodeUp: History._node_moved,
    f.NodeOccupied: History._node_moved,
    f.NodeUnknown: History._node_moved,
    f.NodeLost: History._node_moved,
    f.NodeQuarantined: History._node_moved,
    f.NodeDraining: History._node_moved,
    f.NodeDrained: History._node_moved,
    f.NodeUndrained: History._node_moved,
    f.JobRegistered: History._registered,
    f.JobPlaced: History._placed,
    f.FillerPlaced: History._admitted,
    f.JobPromised: History._admitted,
    f.PlacementEnded: History._placement_ended,
    f.JobUnplaced: History._unplaced,
    f.JobPaused: History._paused,
    f.JobResumed: History._resumed,
    f.JobQuarantined: History._quarantined,
    f.JobLost: History._lost,
    f.JobEnded: History._ended,
    f.SlotQueued: History._queued,
    f.SlotWithdrawn: History._withdrawn,
    f.SlotClaimed: History._claimed,
    f.SlotGranted: History._granted,
    f.SlotShrunk: History._shrunk,
    f.SlotGrown: History._grown,
    f.SlotReleased: History._released,
    f.SlotTakenAway: History._taken_away,
    f.SlotOver: History._over,
    f.OrderIssued: History._issued,
    f.OrderEnded: History._order_ended,
    f.OrderFaulted: History._order_faulted,
    f.OrderContactLost: History._contact_lost,
    f.StateUnknown: History._state_observed,
    f.StateObserved: History._state_observed,
}
