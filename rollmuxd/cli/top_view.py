"""What ``rollmuxd top`` shows, made of one look at the daemon. Pure: the same look gives the same picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rollmuxd.cli.calls import printable

SORTS: Final = ("group", "slowdown", "owner")
_SPARKS: Final = " ▁▂▃▄▅▆▇█"
_COLOUR: Final = {
    "up": "green", "occupied": "yellow", "draining": "yellow", "drained": "yellow", "unknown": "yellow",
    "quarantined": "red", "lost": "red", "paused": "yellow", "probing": "cyan", "waiting": "magenta",
}  # fmt: skip


def picture(
    seen: Mapping[str, Any],
    held: Mapping[str, Sequence[float]],
    *,
    width: int,
    rows: int | None,
    first: int = 0,
    sort: str = "group",
    trouble: str = "",
) -> RenderableType:
    """The whole view. ``rows``: of the screen; None: as many as it takes. ``first``: the first job shown."""
    names = {job["job"]: job["name"] for job in seen["jobs"]}
    holders = {slot["slot"]: slot for slot in seen["slots"]}
    placed = [job for job in seen["jobs"] if job["status"] != "waiting"]
    waiting = [job for job in seen["jobs"] if job["status"] == "waiting"]
    left = None if rows is None else max(6, rows - 4 - len(seen["pools"]) - 3)
    nodes = seen["nodes"] if left is None else seen["nodes"][: max(3, left // 3)]
    if left is not None:
        left -= len(nodes) + 3
    jobs = _sorted(placed, sort)[first:]
    shown = jobs if left is None else jobs[: max(2, left - min(len(waiting), 4) - 3)]
    parts: list[RenderableType] = [_head(seen, sort, trouble), _pools(seen["pools"], held), Text()]
    parts += [_nodes(nodes, holders, names), *_more("nodes", len(nodes), len(seen["nodes"])), Text()]
    parts.append(_jobs(shown, holders, seen["at"]) if placed else Text("no job has a placement"))
    parts += _more("jobs", first + len(shown), len(placed))
    if waiting:
        few = waiting if rows is None else waiting[:3]
        parts += [Text(), _waiting(few, width), *_more("waiting", len(few), len(waiting))]
    return Group(*parts)


def _head(seen: Mapping[str, Any], sort: str, trouble: str) -> Text:
    if trouble:
        return Text(printable(trouble), "bold red", no_wrap=True, overflow="ellipsis")
    count = len(seen["jobs"])
    waiting = sum(job["status"] == "waiting" for job in seen["jobs"])
    said = f"{seen['at'][11:19]} UTC   {_of(len(seen['nodes']), 'node')}, {_of(len(seen['groups']), 'group')}, "
    said += f"{_of(count, 'job')}{f', {waiting} waiting' if waiting else ''}"
    return Text.assemble(("rollmuxd top   ", "bold"), said, (f"   by {sort}", "dim"))


def _of(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _table(*columns: str) -> Table:
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        number = column.startswith("#")
        made.add_column(column.removeprefix("#"), justify="right" if number else "left", no_wrap=True)
    return made


def bar(share: float, width: int) -> str:
    """``█████░░░``: how much of it."""
    full = min(width, max(0, round(share * width)))
    return "█" * full + "░" * (width - full)


def _pools(pools: Sequence[Mapping[str, Any]], held: Mapping[str, Sequence[float]]) -> RenderableType:
    table = _table("POOL", "#GPUS", "HELD", "#", "#NODES", "#FREE", "OF LATE")
    for pool in pools:
        share = pool["gpus_held"] / pool["gpus"] if pool["gpus"] else 0.0
        late = list(held.get(pool["pool"], ()))[-40:]
        table.add_row(
            printable(pool["pool"]),
            str(pool["gpus"]),
            Text(bar(share, 20), "green"),
            f"{share:.0%}",
            str(len(pool["nodes"])),
            str(pool["nodes_free"]),
            Text("".join(_SPARKS[round(v * (len(_SPARKS) - 1))] for v in late), "green"),
        )
    return table


def _nodes(
    nodes: Sequence[Mapping[str, Any]], holders: Mapping[str, Mapping[str, Any]], names: Mapping[str, str]
) -> RenderableType:
    table = _table("NODE", "POOLS", "STATUS", "GROUP", "#GPUS", "HELD BY", "STATES")
    for node in nodes:
        table.add_row(
            node["node"],
            ", ".join(node["pools"]),
            Text(node["status"], _COLOUR.get(node["status"], "")),
            node.get("group") or "-",
            str(len(node["gpus"])),
            printable(_held_by(node, holders, names)),
            printable(_states(node, names)),
        )
    return table


def _held_by(node: Mapping[str, Any], holders: Mapping[str, Mapping[str, Any]], names: Mapping[str, str]) -> str:
    """Who holds the node's GPUs, and how many of them where it is not all."""
    counts: dict[str, int] = {}
    for gpu in node["gpus"]:
        if gpu["holder"]:
            counts[gpu["holder"]] = counts.get(gpu["holder"], 0) + 1
    said = []
    for name, count in counts.items():
        slot = holders.get(name)
        who = name if slot is None else f"{names.get(slot['job'], slot['job'])} {slot['phase']}"
        how = "" if slot is None or slot["status"] == "running" else f" ({slot['status']})"
        said.append(f"{who}{how}{'' if count == len(node['gpus']) else f' on {count}'}")
    if not said and node.get("reason"):
        return str(node["reason"])
    return ", ".join(said) or "-"


def _states(node: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """How many states are where: ``1 loaded, 2 parked``; one that moves is named."""
    counts: dict[str, int] = {}
    moving = []
    for key, status in node.get("states", {}).items():
        if status in ("loading", "parking"):
            job = key.partition(" ")[0]
            moving.append(f"{status} {names.get(job, job)}")
        elif status != "gone":
            counts[status] = counts.get(status, 0) + 1
    return ", ".join([*moving, *(f"{count} {status}" for status, count in counts.items())]) or "-"


def _sorted(jobs: Sequence[Mapping[str, Any]], sort: str) -> list[Mapping[str, Any]]:
    if sort == "slowdown":
        return sorted(jobs, key=lambda job: -(job.get("slowdown") or 0))
    if sort == "owner":
        return sorted(jobs, key=lambda job: (job["owner"], job["name"]))
    return sorted(jobs, key=lambda job: (len(job.get("group") or ""), job.get("group") or "", job["name"]))


def _jobs(jobs: Sequence[Mapping[str, Any]], holders: Mapping[str, Mapping[str, Any]], at: str) -> RenderableType:
    table = _table("JOB", "OWNER", "STATUS", "GROUP", "NOW", "#FOR", "#ITER", "#SLOWDOWN", "OF ITS BOUND", "#CREDIT")
    for job in jobs:
        now, since = _now(job, holders)
        credit = job.get("credit_s")
        broken = credit is not None and credit < 0
        table.add_row(
            printable(job["name"]),
            printable(job["owner"]),
            Text(job["status"], _COLOUR.get(job["status"], "")),
            job.get("group") or "-",
            now,
            _span(_seconds(since, at)) if since else "-",
            str(job.get("iterations", 0)),
            "-" if job.get("slowdown") is None else f"{job['slowdown']:.2f}",
            Text(_against(job), "red" if broken else "green"),
            "-" if credit is None else f"{credit:+.0f} s",
        )
    return table


def _now(job: Mapping[str, Any], holders: Mapping[str, Mapping[str, Any]]) -> tuple[str, str | None]:
    """What the job does, and since when."""
    slot = holders.get(job.get("slot") or "")
    if slot is not None:
        doing = slot["phase"] if slot["status"] == "running" else f"{slot['phase']} ({slot['status']})"
        return doing, slot.get("granted_at") or slot.get("queued_at")
    if job.get("slot"):
        return f"waits for {job['phase']}", None
    return "-", None


def _against(job: Mapping[str, Any]) -> str:
    """The slowdown on the way from 1 to the bound: ``██░░░░░░ 2``."""
    slo, slowdown = job.get("slo"), job.get("slowdown")
    if slo is None:
        return "best effort"
    share = 0.0 if slowdown is None else (slowdown - 1) / (slo - 1) if slo > 1 else float(slowdown > 1)
    return f"{bar(share, 8)} {slo:g}{'' if job.get('promised') else ' (not promised)'}"


def _waiting(jobs: Sequence[Mapping[str, Any]], width: int) -> RenderableType:
    table = _table("WAITING", "OWNER", "#SLO", "WHY")
    table.columns[-1].no_wrap = False
    for job in jobs:
        why = job.get("reason") or f"rollmuxd job explain {job['job']}"
        slo = "-" if job.get("slo") is None else f"{job['slo']:g}"
        table.add_row(printable(job["name"]), printable(job["owner"]), slo, printable(why))
    return table


def _more(what: str, shown: int, there: int) -> list[RenderableType]:
    return [Text(f"... and {there - shown} more {what}", "dim")] if there > shown else []


def _seconds(since: str, at: str) -> float:
    return (datetime.fromisoformat(at) - datetime.fromisoformat(since)).total_seconds()


def _span(seconds: float) -> str:
    """``34 s``, ``12 min``, ``3 h``."""
    if seconds < 120:
        return f"{max(0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
