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
from rollmuxd.core.model import JobStatus, nodes_in
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
    #: the part of its life at hand, whose end is not known yet
    part: SlotSpan
    gpus: tuple[GpuId, ...] = ()


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


#: what a node is from such a fact on; of the others it is simply there, or not known
_NODE_IS: Final[dict[type[f.Fact], str]] = {
    f.NodeUp: "",
    f.NodeUnknown: "",
    f.NodeUndrained: "",
    f.NodeOccupied: "occupied",
    f.NodeLost: "lost",
    f.NodeQuarantined: "quarantined",
    f.NodeDraining: "draining",
    f.NodeDrained: "drained",
}


class History:
    """Told facts in order, hands out what is over."""

    def __init__(self) -> None:
        self.at: Millis = 0
        self._hosts: dict[HostId, None] = {}
        self._nodes: dict[NodeId, NodeInfo] = {}
        self._node_of: dict[GpuId, NodeId] = {}
        self._jobs: dict[JobId, _Job] = {}
        self._slots: dict[SlotId, _Slot] = {}
        # spans whose end is not known yet
        self._not_up: dict[NodeId, NodeSpan] = {}
        self._orders: dict[OrderId, OrderSpan] = {}

    def see(self, fact: f.Fact) -> list[Item]:
        """What this fact brings to an end."""
        self.at = max(self.at, fact.at)
        found: list[Item] = []
        for of_noun in (self._of_slot, self._of_order, self._of_job, self._of_node):
            of_noun(fact, found)
        return found

    def close(self, at: Millis | None = None) -> Iterator[Item]:
        """What has not ended, cut at ``at`` (else at the last fact). The history is over then."""
        at = self.at if at is None else at
        found: list[Item] = []
        for slot in self._slots.values():
            self._part_over(slot, at, "", found)
        for order in list(self._orders):
            self._order_over(order, at, "", found)
        for job in self._jobs.values():
            self._status_over(job, at, found)
        for node in list(self._not_up):
            self._node_over(node, at, found)
        self._slots, self._jobs = {}, {}
        for item in found:
            if isinstance(item, Span):
                item.open = True
            yield item

    # ---- the daemon, nodes -------------------------------------------------------------------------------------------

    def _of_node(self, fact: f.Fact, found: list[Item]) -> None:
        match fact:
            case f.DaemonStarted():
                found.append(Moment(at=fact.at, what=f"daemon started (incarnation {fact.incarnation})"))
            case f.LoopStalled():
                found.append(Moment(at=fact.at, what=f"daemon late by {fact.late_ms} ms"))
            case f.HostBooted():
                if fact.host in self._hosts:  # else this is our first look at it
                    found.append(Moment(at=fact.at, what=f"host {fact.host} booted"))
                self._hosts[fact.host] = None
            case f.NodeAdded(node=spec):
                info = NodeInfo(id=spec.id, pool="+".join(spec.pools), gpu_type=spec.gpu_type)
                self._nodes[spec.id] = info
                self._node_of.update(dict.fromkeys(spec.gpus, spec.id))
                found.append(info)
            case f.NodeRemoved():
                self._node_over(fact.node, fact.at, found)
                self._nodes.pop(fact.node, None)
                self._node_of = {gpu: node for gpu, node in self._node_of.items() if node != fact.node}
            case _ if type(fact) in _NODE_IS:
                self._node_is(fact, _NODE_IS[type(fact)], found)

    def _node_is(self, fact: Any, kind: str, found: list[Item]) -> None:
        """The node is something else from now on."""
        self._node_over(fact.node, fact.at, found)
        if kind:
            cause = getattr(fact, "reason", None)
            reason = self._words(cause) if cause else f"by {fact.by}" if hasattr(fact, "by") else ""
            self._not_up[fact.node] = NodeSpan(start=fact.at, end=fact.at, kind=kind, node=fact.node, reason=reason)

    def _node_over(self, node: NodeId, at: Millis, found: list[Item]) -> None:
        span = self._not_up.pop(node, None)
        if span is not None and at > span.start:
            self._known(node, found)
            span.end = at
            found.append(span)

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

    def _of_job(self, fact: f.Fact, found: list[Item]) -> None:
        match fact:
            case f.JobRegistered():
                known = self._turns(fact, JobStatus.WAITING, found)
                known.who.name, known.who.owner, known.run = fact.spec.name, fact.owner, fact.run
            case f.JobPlaced():
                known = self._turns(fact, fact.status, found)
                known.group, known.admission = fact.group, fact.admission
                for node in nodes_in(fact.pins):
                    self._known(node, found)
            case f.JobPromised() | f.FillerPlaced():
                self._turns(fact, JobStatus.ADMITTED, found)
            case f.JobUnplaced():
                self._turns(fact, JobStatus.WAITING, found, self._words(fact.reason))
            case f.JobPaused():
                resume_to = self._job(fact.job, fact.at).status
                self._turns(fact, JobStatus.PAUSED, found, f"by {fact.by}").resume_to = resume_to
            case f.JobResumed():
                self._turns(fact, self._job(fact.job, fact.at).resume_to, found)
            case f.JobQuarantined():
                known = self._turns(fact, JobStatus.QUARANTINED, found, self._words(fact.reason))
                known.resume_to = JobStatus.WAITING
            case f.JobLost():
                self._turns(fact, JobStatus.LOST, found, self._words(fact.reason))
            case f.JobEnded():
                known = self._turns(fact, JobStatus.ENDED, found, self._words(fact.reason))
                found.append(Moment(at=fact.at, what=f"ended: {known.reason}", who=known.who))
                self._forget(known)
            case f.PlacementEnded():
                known = self._job(fact.job, fact.at)
                known.group = None
                self._forget(known)

    def _words(self, cause: Cause | None) -> str:
        return sentence(cause, lambda job: self._jobs[job].who.name if job in self._jobs else job)

    def _forget(self, job: _Job) -> None:
        if job.status is JobStatus.ENDED and job.group is None:
            self._jobs.pop(job.who.job, None)

    def _turns(self, fact: Any, status: JobStatus | None, found: list[Item], reason: str = "") -> _Job:
        """The job, which has another status from now on."""
        job = self._job(fact.job, fact.at)
        self._status_over(job, fact.at, found)
        job.status, job.since, job.reason = status, fact.at, reason
        return job

    def _status_over(self, job: _Job, at: Millis, found: list[Item]) -> None:
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

    def _of_slot(self, fact: f.Fact, found: list[Item]) -> None:
        match fact:
            case f.SlotQueued():
                who = self._job(fact.job, fact.at).who
                self._begins(fact, "queued", who, fact.run, fact.phase, side=fact.side)
            case f.SlotClaimed():
                self._next(fact, "loading", "claimed", found).gpus = fact.gpus
            case f.SlotGranted():
                self._next(fact, "running", "granted", found).part.fence = fact.fence
            case f.SlotResized():
                to = ("tail", "shrunk") if fact.tail else ("running", "grown")
                self._next(fact, *to, found).gpus = fact.gpus
            case f.SlotReleased():
                self._next(fact, "released", "released", found)
            case f.SlotTakenAway():
                by = f" by {fact.by}" if fact.by else ""
                self._next(fact, "reclaiming", f"{fact.how}{by}: {self._words(fact.reason)}", found)
            case f.SlotWithdrawn():
                self._next(fact, "", f"withdrawn: {self._words(fact.reason)}", found)
                del self._slots[fact.slot]
            case f.SlotOver():
                self._next(fact, "", "over", found)
                del self._slots[fact.slot]

    def _begins(self, fact: Any, kind: str, who: Who, run: int, phase: str, *, side: bool) -> _Slot:
        about = {"who": who, "run": run, "phase": phase, "slot": fact.slot, "side": side}
        part = SlotSpan(start=fact.at, end=fact.at, kind=kind, nodes={}, fence=None, ended_by="", **about)
        self._slots[fact.slot] = _Slot(part)
        return self._slots[fact.slot]

    def _next(self, fact: Any, kind: str, ended_by: str, found: list[Item]) -> _Slot:
        """The slot, in the part of its life that begins now."""
        slot = self._slots.get(fact.slot)
        if slot is None:  # it was asked for before our first fact
            return self._begins(fact, kind, Who("", "?"), 1, "?", side=False)
        self._part_over(slot, fact.at, ended_by, found)
        slot.part.kind, slot.part.start = kind, fact.at
        return slot

    def _part_over(self, slot: _Slot, at: Millis, ended_by: str, found: list[Item]) -> None:
        if at == slot.part.start and slot.part.kind not in ("running", "tail"):
            return
        nodes: dict[NodeId, int] = {}
        for gpu in slot.gpus:
            # `host1/gpu0` is on the host's one node, as far as is known
            node = self._node_of.get(gpu) or gpu.rpartition("/")[0] or gpu
            nodes[node] = nodes.get(node, 0) + 1
        for node in nodes:
            self._known(node, found)
        found.append(msgspec.structs.replace(slot.part, end=at, nodes=nodes, ended_by=ended_by))

    # ---- orders ------------------------------------------------------------------------------------------------------

    def _of_order(self, fact: f.Fact, found: list[Item]) -> None:
        match fact:
            case f.OrderIssued():
                self._orders[fact.order] = OrderSpan(
                    start=fact.at,
                    end=fact.at,
                    kind=fact.kind.value,
                    who=self._job(fact.job, fact.at).who,
                    order=fact.order,
                    pool=fact.pool,
                    node=fact.node,
                    driver=fact.driver,
                    slot=fact.slot,
                    outcome="",
                )
            case f.OrderEnded():
                self._order_over(fact.order, fact.at, "done", found)
            case f.OrderFaulted():
                self._order_over(fact.order, fact.at, f"failed: {self._words(fact.error)}", found)
            case f.OrderContactLost():
                self._order_over(fact.order, fact.at, f"contact lost: {self._words(fact.error)}", found)
            case f.StateObserved() | f.StateUnknown():
                # Nothing is left to be learnt of an order that was to move this state.
                status = f"seen {fact.status}" if isinstance(fact, f.StateObserved) else "not known"
                state = (fact.job, fact.pool, fact.node)
                for order in [o for o in self._orders.values() if (o.who.job, o.pool, o.node) == state]:
                    self._order_over(order.order, fact.at, status, found)

    def _order_over(self, id: OrderId, at: Millis, outcome: str, found: list[Item]) -> None:
        span = self._orders.pop(id, None)
        if span is None or (at == span.start and outcome in ("", "done")):
            return
        self._known(span.node, found)
        span.end, span.outcome = at, outcome
        found.append(span)
