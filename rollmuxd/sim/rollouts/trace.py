"""One step of each policy as a trace for Perfetto: a process per policy, and two tracks per replica.

The one has a slice for the time in which the replica has work, and instants where requests arrive from another replica.
The other counts its requests. Chrome's trace events, times in microseconds.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from rollmuxd.sim.rollouts.run import Result


def encode(results: Mapping[str, Result]) -> bytes:
    """The trace of one result per policy, as JSON."""
    events = [event for number, (name, of) in enumerate(results.items(), 1) for event in _events(number, name, of)]
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})


def _events(process: int, policy: str, of: Result) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": policy}}
    for place, (degree, node, _) in enumerate(of.replicas):
        mine = [span for span in of.spans if span.replica == place]
        name, thread = f"node {node} replica {place} (TP{degree})", process * 10_000 + place
        yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": place}}
        if not mine:
            continue
        begins, ends = min(span.begins for span in mine), max(span.ends for span in mine)
        yield {
            "ph": "X", "pid": process, "tid": thread, "name": f"TP{degree}", "ts": _us(begins),
            "dur": _us(ends - begins), "args": {"requests": len(mine), "tokens": sum(span.tokens for span in mine)},
        }  # fmt: skip
        changes = sorted([(span.begins, 1) for span in mine] + [(span.ends, -1) for span in mine])
        running = 0
        for at, change in changes:
            running += change
            yield {"ph": "C", "pid": process, "name": f"requests: {name}", "ts": _us(at), "args": {"running": running}}
        for span in mine:
            if span.begins > begins:
                args = {"request": span.request}
                yield {"ph": "i", "s": "t", "pid": process, "tid": thread, "name": "moved here", "ts": _us(span.begins),
                       "args": args}  # fmt: skip


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
