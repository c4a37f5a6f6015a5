"""A history as a trace that Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

It is a fold over facts of a simulated or a live history, one at a time. A slice is written when it is over, so memory
holds only what is open. The fold is lenient, as its facts may be a part of the story: those that one owner may see, or
those after a compaction. What a fact speaks of and no fact introduced goes by its id. (A
:class:`~rollmuxd.core.state.State` would refuse such facts, and rightly: it has to decide on them.) What takes no time
is left out, but for phases, which are the point, and orders that failed.

The format is Chrome's trace events, as JSON. It has complete events (``X``) for spans, instants (``i``), and metadata
(``M``) that names and sorts the tracks. Times are microseconds. Three of its rules shape what is here:

- Slices on one track must nest, and which of two that begin together is the outer one is decided by chance. So slices
  on a track of ours never overlap at all; what would is put on a further track of the same name (``r1 +1``).
- Perfetto names threads by their id, whatever process they are in: no two tracks share one.
- Complete events may come in any order. So each is written when its span is over, and nothing is kept.

The screen has a process per pool, with three tracks per node: what runs there, what is moved there, and when it was not
up. One process is for jobs, each with its phases and its status (and the group that it is in). One is the daemon
itself. A simulated network adds one of circuits, with a track per pair of racks.
"""

import gzip
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import msgspec
from msgspec import Struct

from rollmuxd.core import facts as f
from rollmuxd.core.causes import Cause
from rollmuxd.core.ids import Fence, GpuId, GroupId, HostId, JobId, Millis, NodeId, OrderId, PoolName, SlotId
from rollmuxd.core.model import JobStatus, nodes_in
from rollmuxd.explain.causes import sentence

if TYPE_CHECKING:
    from rollmuxd.fabric.network import Lit

#: above all process ids, as a thread with its process's id would be taken for the main one
_FIRST_THREAD: Final = 1_000
#: tracks of one node or job, before its neighbour's begin; and kinds of them
_STRIDE, _KINDS = 64, 4
#: of processes: the daemon comes before the pools, what follows comes after them
_JOBS_PLACE, _CIRCUITS_PLACE = 1_000_000, 3_000_000

_Args: TypeAlias = dict[str, Any]
_ENCODER: Final = msgspec.json.Encoder()


class Written(NamedTuple):
    """What was written, and from when to when it is."""

    slices: int
    start: Millis
    end: Millis


def write(
    path: Path,
    facts: Iterable[f.Fact],
    since: Millis | None = None,
    until: Millis | None = None,
    lit: Iterable["Lit"] = (),
) -> Written:
    """Write a trace, gzipped if the name ends in ``.gz``. Equal histories, equal bytes.

    Args:
        path: where to; a pipe or a device is written to, too.
        facts: the history. Facts from before the window are needed, as they say what was going on when it began.
        since: where the window begins, and
        until: ends: what reaches out of it is cut to it. Default: all.
        lit: the circuits of a simulated network.
    """
    with path.open("wb", buffering=1 << 20) as file:
        # neither a name nor a time in its header
        packed = gzip.GzipFile("", "wb", compresslevel=6, fileobj=file, mtime=0) if path.suffix == ".gz" else file
        with packed as out:
            out.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
            trace = _Trace(out, since)
            history = _History(trace)
            _circuits(trace, lit)
            history.tell(facts, until)
            out.write(b"\n]}\n")
    return Written(trace.slices, trace.start or 0, trace.end)


def _circuits(trace: "_Trace", lit: Iterable["Lit"]) -> None:
    pid: int | None = None
    for (a, b), count, start, end in sorted(lit, key=lambda it: it[3]):
        pid = pid or trace.process("circuits", _CIRCUITS_PLACE)
        track = trace.track(pid, f"{a} {b}", 0, f"rack {a} to rack {b}")
        span = round(start * 1000), round(end * 1000)
        trace.slice(track, *span, f"{count} circuits", "circuit", {"circuits": count})


# ---- the file --------------------------------------------------------------------------------------------------------


class _Track(NamedTuple):
    pid: int
    #: place among the tracks of the process
    place: int
    name: str


class _Trace:
    """Processes, tracks, and what is on them. What is before the window is cut off."""

    def __init__(self, out: IO[bytes] | gzip.GzipFile, since: Millis | None) -> None:
        self._out, self._since = out, since
        self._between = b""
        #: what comes from now on had not ended
        self.closing = False
        self.slices = 0
        self.start: Millis | None = None
        self.end: Millis = 0
        self._processes = self._threads = 0
        self._places: dict[tuple[int, str], int] = {}
        #: per track its threads: id, and when the last slice on it ended
        self._lanes: dict[tuple[int, int], list[tuple[int, Millis]]] = {}

    def process(self, name: str, place: int | None = None) -> int:
        """A further process, at its place, else after those before."""
        self._processes += 1
        pid = self._processes
        self._metadata(pid, {}, "process_name", {"name": name})
        self._metadata(pid, {}, "process_sort_index", {"sort_index": pid if place is None else place})
        return pid

    def track(self, pid: int, of: str, kind: int, name: str) -> _Track:
        """A track of a node, a job or another thing. Things are sorted as they came."""
        place = self._places.setdefault((pid, of), len(self._places))
        return _Track(pid, (place * _KINDS + kind) * _STRIDE, name)

    def slice(self, track: _Track, start: Millis, end: Millis, name: str, category: str, args: _Args) -> None:
        """What took from ``start`` to ``end``. Slices of a track come by their end."""
        if self._since is not None:
            if end < self._since or end == self._since > start:
                return
            start = max(start, self._since)
        shown = {key: value for key, value in args.items() if value not in (None, "")}
        if self.closing:
            shown["open"] = "had not ended when the trace was made"
        more = {"cat": category, "dur": (end - start) * 1000, "args": shown}
        self._event("X", track.pid, {"tid": self._lane(track, start, end), "ts": start * 1000}, name, more)
        self.slices += 1
        self._span_of_time(start, end)

    def instant(self, track: _Track, at: Millis, name: str) -> None:
        """What took no time."""
        if self._since is None or at >= self._since:
            self._event("i", track.pid, {"tid": self._lane(track, at, at), "ts": at * 1000}, name, {"s": "t"})
            self._span_of_time(at, at)

    def _lane(self, track: _Track, start: Millis, end: Millis) -> int:
        """The thread of the first of the track's lanes that is free by then.

        Spans come by their end, so that whatever is on a lane ended no later than this one does. If the last one there
        ended by our start, nothing overlaps.
        """
        lanes = self._lanes.setdefault((track.pid, track.place), [])
        for number, (tid, until) in enumerate(lanes):
            if until <= start:
                lanes[number] = tid, max(end, until)
                return tid
        tid = _FIRST_THREAD + self._threads
        self._threads += 1
        name = f"{track.name} +{len(lanes)}" if lanes else track.name
        self._metadata(track.pid, {"tid": tid}, "thread_name", {"name": name})
        self._metadata(track.pid, {"tid": tid}, "thread_sort_index", {"sort_index": track.place + len(lanes)})
        lanes.append((tid, end))
        return tid

    def _metadata(self, pid: int, thread: _Args, name: str, args: _Args) -> None:
        self._event("M", pid, thread, name, {"args": args})

    def _event(self, phase: str, pid: int, where: _Args, name: str, more: _Args) -> None:
        event: _Args = {"ph": phase, "pid": pid, **where, "name": name, **more}
        self._out.write(self._between + _ENCODER.encode(event))
        self._between = b",\n"

    def _span_of_time(self, start: Millis, end: Millis) -> None:
        self.start = start if self.start is None else min(start, self.start)
        self.end = max(end, self.end)


# ---- the fold --------------------------------------------------------------------------------------------------------


class _Job(Struct):
    id: JobId
    name: str
    since: Millis
    owner: str = ""
    run: int = 1
    #: None: its story began before our first fact
    status: JobStatus | None = None
    reason: str = ""
    resume_to: JobStatus | None = JobStatus.WAITING
    #: its placement
    group: GroupId | None = None
    admission: str = ""

    @property
    def named(self) -> _Args:
        return {"job": self.id, "owner": self.owner}


class _Slot(Struct):
    """The part of a slot's life at hand, whose end is not known yet.

    ``kind`` is ``queued`` (asked for, not claimed), ``loading`` (claimed, not granted), ``running``, or ``tail``
    (running on fewer GPUs). GPUs that are still held afterwards are ``released`` by the job, or ``reclaiming`` from it.
    """

    id: SlotId
    kind: str
    start: Millis
    job: _Job
    run: int = 1
    phase: str = "?"
    gpus: tuple[GpuId, ...] = ()
    fence: Fence | None = None


class _Down(NamedTuple):
    """A node that is not simply there: ``occupied``, ``lost``, ``quarantined``, ``draining``, ``drained``."""

    kind: str
    start: Millis
    reason: str


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


class _History:
    """Told facts in order, writes what is over."""

    def __init__(self, trace: _Trace) -> None:
        self._trace = trace
        daemon = trace.process("daemon", 0)
        self._jobs_process = trace.process("jobs", _JOBS_PLACE)
        self._events = trace.track(daemon, "", 0, "events")
        self._pools: dict[PoolName, int] = {}
        self._hosts: dict[HostId, None] = {}
        #: the process of each node
        self._nodes: dict[NodeId, int] = {}
        self._node_of: dict[GpuId, NodeId] = {}
        self._jobs: dict[JobId, _Job] = {}
        self._slots: dict[SlotId, _Slot] = {}
        self._orders: dict[OrderId, tuple[_Job, f.OrderIssued]] = {}
        self._down: dict[NodeId, _Down] = {}

    def tell(self, facts: Iterable[f.Fact], until: Millis | None) -> None:
        """All of it; what has not ended is cut at ``until``, or at the last fact."""
        last: Millis = 0
        for fact in facts:
            if until is not None and fact.at >= until:
                last = until
                break
            last = max(last, fact.at)
            for of_noun in (self._of_slot, self._of_order, self._of_job, self._of_node):
                of_noun(fact)
        self._trace.closing = True
        for slot in self._slots.values():
            self._part_over(slot, last, "")
        for order in list(self._orders):
            self._order_over(order, last, "")
        for job in self._jobs.values():
            self._status_over(job, last)
        for node in list(self._down):
            self._node_over(node, last)

    def _words(self, cause: Cause | None) -> str:
        return sentence(cause, lambda job: self._jobs[job].name if job in self._jobs else job)

    # ---- the daemon, nodes -------------------------------------------------------------------------------------------

    def _of_node(self, fact: f.Fact) -> None:
        match fact:
            case f.DaemonStarted():
                self._trace.instant(self._events, fact.at, f"daemon started (incarnation {fact.incarnation})")
            case f.LoopStalled():
                self._trace.instant(self._events, fact.at, f"daemon late by {fact.late_ms} ms")
            case f.HostBooted():
                if fact.host in self._hosts:  # else this is our first look at it
                    self._trace.instant(self._events, fact.at, f"host {fact.host} booted")
                self._hosts[fact.host] = None
            case f.NodeAdded(node=spec):
                self._node_of.update(dict.fromkeys(spec.gpus, spec.id))
                self._introduce(spec.id, "+".join(spec.pools), spec.gpu_type)
            case f.NodeRemoved():
                self._node_over(fact.node, fact.at)
                self._nodes.pop(fact.node, None)
                self._node_of = {gpu: node for gpu, node in self._node_of.items() if node != fact.node}
            case _ if type(fact) in _NODE_IS:
                self._node_is(fact, _NODE_IS[type(fact)])

    def _introduce(self, node: NodeId, pool: PoolName, gpu_type: str = "") -> None:
        if pool not in self._pools:
            self._pools[pool] = self._trace.process(f"pool {pool} ({gpu_type})" if gpu_type else f"pool {pool}")
        self._nodes[node] = self._pools[pool]
        self._on(node, 0)

    def _on(self, node: NodeId, kind: int, what: str = "") -> _Track:
        """A track of a node. One that no fact has introduced is of a pool that is not known."""
        if node not in self._nodes:
            self._introduce(node, "?")
        return self._trace.track(self._nodes[node], node, kind, f"{node} {what}".rstrip())

    def _node_is(self, fact: Any, kind: str) -> None:
        """The node is something else from now on."""
        self._node_over(fact.node, fact.at)
        if kind:
            cause = getattr(fact, "reason", None)
            reason = self._words(cause) if cause else f"by {fact.by}" if hasattr(fact, "by") else ""
            self._down[fact.node] = _Down(kind, fact.at, reason)

    def _node_over(self, node: NodeId, at: Millis) -> None:
        down = self._down.pop(node, None)
        if down is not None and at > down.start:
            track = self._on(node, 2, "state")
            self._trace.slice(track, down.start, at, down.kind, down.kind, {"reason": down.reason})

    # ---- jobs --------------------------------------------------------------------------------------------------------

    def _job(self, job: JobId, at: Millis) -> _Job:
        """The job; of one that no fact introduced we know that it is there, and nothing else."""
        return self._jobs.setdefault(job, _Job(job, job, at))

    def _of(self, job: _Job, kind: int, what: str = "") -> _Track:
        return self._trace.track(self._jobs_process, job.id, kind, f"{job.name} ({job.id}) {what}".rstrip())

    def _of_job(self, fact: f.Fact) -> None:
        match fact:
            case f.JobRegistered():
                known = self._job(fact.job, fact.at)
                known.name, known.owner = fact.spec.name, fact.owner
                self._turns(fact, JobStatus.WAITING).run = fact.run
            case f.JobPlaced():
                known = self._turns(fact, fact.status)
                known.group, known.admission = fact.group, fact.admission
                for node in nodes_in(fact.pins):
                    self._on(node, 0)
            case f.JobPromised() | f.FillerPlaced():
                self._turns(fact, JobStatus.ADMITTED)
            case f.JobUnplaced():
                self._turns(fact, JobStatus.WAITING, self._words(fact.reason))
            case f.JobPaused():
                resume_to = self._job(fact.job, fact.at).status
                self._turns(fact, JobStatus.PAUSED, f"by {fact.by}").resume_to = resume_to
            case f.JobResumed():
                self._turns(fact, self._job(fact.job, fact.at).resume_to)
            case f.JobQuarantined():
                known = self._turns(fact, JobStatus.QUARANTINED, self._words(fact.reason))
                known.resume_to = JobStatus.WAITING
            case f.JobLost():
                self._turns(fact, JobStatus.LOST, self._words(fact.reason))
            case f.JobEnded():
                known = self._turns(fact, JobStatus.ENDED, self._words(fact.reason))
                self._trace.instant(self._of(known, 1, "status"), fact.at, f"ended: {known.reason}")
                self._forget(known)
            case f.PlacementEnded():
                known = self._job(fact.job, fact.at)
                known.group = None
                self._forget(known)

    def _forget(self, job: _Job) -> None:
        if job.status is JobStatus.ENDED and job.group is None:
            self._jobs.pop(job.id, None)

    def _turns(self, fact: Any, status: JobStatus | None, reason: str = "") -> _Job:
        """The job, which has another status from now on."""
        job = self._job(fact.job, fact.at)
        self._status_over(job, fact.at)
        job.status, job.since, job.reason = status, fact.at, reason
        return job

    def _status_over(self, job: _Job, at: Millis) -> None:
        if job.status is None or job.status is JobStatus.ENDED or at == job.since:
            return
        name, args = job.status.value, job.named | {"run": job.run, "reason": job.reason}
        if job.group is not None and job.status is not JobStatus.WAITING:
            name, args = f"{name} in {job.group}", args | {"group": job.group, "admission": job.admission}
        self._trace.slice(self._of(job, 1, "status"), job.since, at, name, job.status.value, args)

    # ---- slots -------------------------------------------------------------------------------------------------------

    def _of_slot(self, fact: f.Fact) -> None:
        match fact:
            case f.SlotQueued():
                job = self._job(fact.job, fact.at)
                self._slots[fact.slot] = _Slot(fact.slot, "queued", fact.at, job, fact.run, fact.phase)
            case f.SlotClaimed():
                self._next(fact, "loading", "claimed").gpus = fact.gpus
            case f.SlotGranted():
                self._next(fact, "running", "granted").fence = fact.fence
            case f.SlotResized():
                to = ("tail", "shrunk") if fact.tail else ("running", "grown")
                self._next(fact, *to).gpus = fact.gpus
            case f.SlotReleased():
                self._next(fact, "released", "released")
            case f.SlotTakenAway():
                by = f" by {fact.by}" if fact.by else ""
                self._next(fact, "reclaiming", f"{fact.how}{by}: {self._words(fact.reason)}")
            case f.SlotWithdrawn():
                self._next(fact, "", f"withdrawn: {self._words(fact.reason)}")
                del self._slots[fact.slot]
            case f.SlotOver():
                self._next(fact, "", "over")
                del self._slots[fact.slot]

    def _next(self, fact: Any, kind: str, ended_by: str) -> _Slot:
        """The slot, in the part of its life that begins now."""
        slot = self._slots.get(fact.slot)
        if slot is None:  # it was asked for before our first fact
            slot = self._slots[fact.slot] = _Slot(fact.slot, kind, fact.at, _Job("", "?", fact.at))
        else:
            self._part_over(slot, fact.at, ended_by)
        slot.kind, slot.start = kind, fact.at
        return slot

    def _part_over(self, slot: _Slot, at: Millis, ended_by: str) -> None:
        if at == slot.start and slot.kind not in ("running", "tail"):
            return
        # `host1/gpu0` is on the host's one node, as far as is known
        nodes = Counter(self._node_of.get(gpu) or gpu.rpartition("/")[0] or gpu for gpu in slot.gpus)
        doing = {"queued": f"waits for {slot.phase}", "running": slot.phase, "tail": f"{slot.phase}, tail"}
        name, fence = doing.get(slot.kind, slot.kind), slot.fence
        args = slot.job.named | {
            "run": slot.run,
            "phase": slot.phase,
            "slot": slot.id,
            "fence": None if fence is None else f"{fence.incarnation}.{fence.number}",
            "ended by": ended_by or "not ended",
            "GPUs": len(slot.gpus) or None,
            "nodes": ", ".join(nodes),
        }
        self._trace.slice(self._of(slot.job, 0), slot.start, at, name, slot.kind, args)
        for node, gpus in nodes.items():
            here = f"{slot.job.name} {name}"
            self._trace.slice(self._on(node, 0), slot.start, at, here, slot.kind, args | {"GPUs here": gpus})

    # ---- orders ------------------------------------------------------------------------------------------------------

    def _of_order(self, fact: f.Fact) -> None:
        match fact:
            case f.OrderIssued():
                self._orders[fact.order] = self._job(fact.job, fact.at), fact
            case f.OrderEnded():
                self._order_over(fact.order, fact.at, "done")
            case f.OrderFaulted():
                self._order_over(fact.order, fact.at, f"failed: {self._words(fact.error)}")
            case f.OrderContactLost():
                self._order_over(fact.order, fact.at, f"contact lost: {self._words(fact.error)}")
            case f.StateObserved() | f.StateUnknown():
                # Nothing is left to be learnt of an order that was to move this state.
                status = f"seen {fact.status}" if isinstance(fact, f.StateObserved) else "not known"
                state = (fact.job, fact.pool, fact.node)
                for order in [o for _, o in self._orders.values() if (o.job, o.pool, o.node) == state]:
                    self._order_over(order.order, fact.at, status)

    def _order_over(self, order: OrderId, at: Millis, outcome: str) -> None:
        job, issued = self._orders.pop(order, (None, None))
        if job is None or issued is None or (at == issued.at and outcome in ("", "done")):
            return
        kind = issued.kind.value
        args = job.named | {"order": order, "pool": issued.pool, "driver": issued.driver}
        args |= {"slot": issued.slot, "outcome": outcome}
        self._trace.slice(self._on(issued.node, 1, "moves"), issued.at, at, f"{kind} {job.name}", kind, args)
