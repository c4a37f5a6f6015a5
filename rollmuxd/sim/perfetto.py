"""A history as a trace that Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

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
import io
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, TypeAlias, cast

import msgspec

from rollmuxd.core.ids import Millis, NodeId, PoolName
from rollmuxd.sim.history import (
    Item,
    JobSpan,
    Moment,
    NodeInfo,
    NodeSpan,
    OrderSpan,
    SlotSpan,
    Span,
    Who,
)

_DAEMON, _JOBS, _CIRCUITS, _FIRST_POOL = 1, 2, 4, 10
#: above all process ids, as a thread with its process's id would be taken for the main one
_FIRST_THREAD: Final = 1_000
#: tracks of one node or job, before its neighbour's begin
_STRIDE: Final = 64

_Args: TypeAlias = dict[str, Any]
_ENCODER: Final = msgspec.json.Encoder()


class Written(NamedTuple):
    """What was written, and from when to when it is."""

    slices: int
    start: Millis
    end: Millis


class CircuitSpan(Span, kw_only=True):
    """So many circuits from one rack to another, lit for one phase (fidelity ``network``)."""

    racks: tuple[int, int]
    count: int


def write(path: Path, items: Iterable[Item | CircuitSpan]) -> Written:
    """Write a trace, gzipped if the name ends in ``.gz``. Equal histories, equal bytes.

    Until all is written there is no file of that name, or the one that was there. A pipe or a device is written to.
    """
    if path.exists() and not path.is_file():
        with _opened(path, packed=path.suffix == ".gz") as out:
            return _Writer(out).write(items)
    path = path.resolve()  # where a link leads, and not the link, is replaced
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with _opened(unfinished, packed=path.suffix == ".gz") as out:
            written = _Writer(out).write(items)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return written


@contextmanager
def _opened(path: Path, *, packed: bool) -> Iterator[IO[bytes]]:
    with path.open("wb", buffering=1 << 20) as file:
        if not packed:
            yield file
            return
        # neither a name nor a time in its header
        zipped = gzip.GzipFile("", "wb", compresslevel=6, fileobj=file, mtime=0)
        with zipped, io.BufferedWriter(cast("io.RawIOBase", zipped), 1 << 16) as gathered:
            yield gathered


class _Track(NamedTuple):
    pid: int
    #: place among the tracks of the process
    place: int
    name: str


class _Writer:
    def __init__(self, out: IO[bytes]) -> None:
        self._out = out
        self._first = True
        self._slices = 0
        self._start: Millis | None = None
        self._end: Millis = 0
        self._threads = 0
        self._pools: dict[PoolName, int] = {}
        self._nodes: dict[NodeId, tuple[int, int]] = {}
        self._places: dict[tuple[int, str], int] = {}
        #: per track its threads: id, and when the last slice on it ended
        self._lanes: dict[tuple[int, int], list[tuple[int, Millis]]] = {}

    def write(self, items: Iterable[Item | CircuitSpan]) -> Written:
        self._out.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        self._process(_DAEMON, "daemon", 0)
        self._process(_JOBS, "jobs", 1_000_000)
        for item in items:
            self._item(item)
        self._out.write(b"\n]}\n")
        return Written(self._slices, self._start or 0, self._end)

    def _item(self, item: Item | CircuitSpan) -> None:
        match item:
            case SlotSpan():
                self._slot(item)
            case OrderSpan():
                args: _Args = {"order": item.order, "pool": item.pool, "driver": item.driver}
                args |= {"slot": item.slot, "outcome": item.outcome}
                name = f"{item.kind} {item.who.name}"
                self._slice(self._node(item.node, 1, "moves"), item, name, item.kind, _job(item.who) | args)
            case JobSpan():
                name = f"{item.kind} in {item.group}" if item.group else item.kind
                args = {"run": item.run, "reason": item.reason, "group": item.group, "admission": item.admission}
                self._slice(self._of_job(item.who, 1, "status"), item, name, item.kind, _job(item.who) | args)
            case CircuitSpan():
                a, b = item.racks
                if (_CIRCUITS, "") not in self._places:
                    self._places[_CIRCUITS, ""] = 0
                    self._process(_CIRCUITS, "circuits", 3_000_000)
                track = self._track(_CIRCUITS, f"{a:06} {b:06}", 0, f"rack {a} to rack {b}")
                self._slice(track, item, f"{item.count} circuits", "circuit", {"circuits": item.count})
            case NodeSpan():
                self._slice(self._node(item.node, 2, "state"), item, item.kind, item.kind, {"reason": item.reason})
            case Moment():
                at = self._of_job(item.who, 1, "status") if item.who else _Track(_DAEMON, 0, "events")
                tid = self._lane(at, item.at, item.at)
                self._event("i", item.at, at.pid, tid, item.what, {"s": "t"})
                self._span_of_time(item.at, item.at)
            case NodeInfo():
                self._nodes[item.id] = self._pool(item.pool, item.gpu_type), self._place(self._pool(item.pool), item.id)

    def _slot(self, item: SlotSpan) -> None:
        doing = {"queued": f"waits for {item.phase}", "running": item.phase, "tail": f"{item.phase}, tail"}.get(
            item.kind, item.kind
        )
        args: _Args = _job(item.who) | {
            "run": item.run,
            "phase": item.phase,
            "slot": item.slot,
            "fence": None if item.fence is None else f"{item.fence.incarnation}.{item.fence.number}",
            "ended by": item.ended_by or "not ended",
        }
        if item.nodes:
            args["GPUs"] = sum(item.nodes.values())
            args["nodes"] = ", ".join(item.nodes)
        self._slice(self._of_job(item.who, 0), item, doing, item.kind, args)
        for node, gpus in item.nodes.items():
            track = self._node(node, 0)
            self._slice(track, item, f"{item.who.name} {doing}", item.kind, args | {"GPUs here": gpus})

    # ---- tracks ------------------------------------------------------------------------------------------------------

    def _process(self, pid: int, name: str, place: int) -> None:
        self._metadata(pid, None, "process_name", {"name": name})
        self._metadata(pid, None, "process_sort_index", {"sort_index": place})

    def _pool(self, name: PoolName, gpu_type: str = "") -> int:
        pid = self._pools.get(name)
        if pid is None:
            pid = self._pools[name] = _FIRST_POOL + len(self._pools)
            self._process(pid, f"pool {name} ({gpu_type})" if gpu_type else f"pool {name}", pid)
        return pid

    def _place(self, pid: int, of: str) -> int:
        """The place of a node, job or group in its process: as it came."""
        key = (pid, of)
        if key not in self._places:
            self._places[key] = len(self._places) * _STRIDE * 4
        return self._places[key]

    def _track(self, pid: int, of: str, kind: int, name: str) -> _Track:
        return _Track(pid, self._place(pid, of) + kind * _STRIDE, name)

    def _node(self, node: NodeId, kind: int, what: str = "") -> _Track:
        pid, place = self._nodes[node]
        return _Track(pid, place + kind * _STRIDE, f"{node} {what}".rstrip())

    def _of_job(self, who: Who, kind: int, what: str = "") -> _Track:
        return self._track(_JOBS, who.job, kind, f"{who.name} ({who.job}) {what}".rstrip())

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
        self._metadata(track.pid, tid, "thread_name", {"name": name})
        self._metadata(track.pid, tid, "thread_sort_index", {"sort_index": track.place + len(lanes)})
        lanes.append((tid, end))
        return tid

    # ---- events ------------------------------------------------------------------------------------------------------

    def _slice(self, track: _Track, item: Any, name: str, category: str, args: _Args) -> None:
        tid = self._lane(track, item.start, item.end)
        shown = {key: value for key, value in args.items() if value not in (None, "")}
        if item.open:
            shown["open"] = "had not ended when the trace was made"
        more = {"cat": category, "dur": (item.end - item.start) * 1000, "args": shown}
        self._event("X", item.start, track.pid, tid, name, more)
        self._slices += 1
        self._span_of_time(item.start, item.end)

    def _metadata(self, pid: int, tid: int | None, name: str, args: _Args) -> None:
        self._event("M", None, pid, tid, name, {"args": args})

    def _event(self, phase: str, at: Millis | None, pid: int, tid: int | None, name: str, more: _Args) -> None:
        event: _Args = {"ph": phase, "pid": pid}
        if tid is not None:
            event["tid"] = tid
        if at is not None:
            event["ts"] = at * 1000
        event["name"] = name
        event |= more
        self._out.write(b"" if self._first else b",\n")
        self._first = False
        self._out.write(_ENCODER.encode(event))

    def _span_of_time(self, start: Millis, end: Millis) -> None:
        self._start = start if self._start is None else min(start, self._start)
        self._end = max(end, self._end)


def _job(who: Who) -> _Args:
    return {"job": who.job, "owner": who.owner}
