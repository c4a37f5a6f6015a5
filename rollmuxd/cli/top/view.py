"""What ``rollmuxd top`` shows, made of one look at the daemon. Pure: the same look gives the same picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rollmuxd.cli.common import printable
from rollmuxd.cli.top.screen import Screen
from rollmuxd.client.retry import duration

_COLOUR: Final = {
    "up": "green", "occupied": "yellow", "draining": "yellow", "drained": "yellow", "unknown": "yellow",
    "quarantined": "red", "lost": "red", "paused": "yellow", "probing": "cyan", "waiting": "magenta",
}  # fmt: skip


def picture(
    seen: Mapping[str, Any],
    *,
    width: int,
    rows: int | None,
    screen: Screen | None = None,
    trouble: str = "",
) -> RenderableType:
    """The whole view. ``rows``: of the screen; None: as many as it takes, without keys."""
    screen = screen or Screen()
    if screen.page is not None:
        return _page(screen, rows)
    names = {job["job"]: job["name"] for job in seen["jobs"]}
    holders = {slot["slot"]: slot for slot in seen["slots"]}
    listed = screen.listed(seen["jobs"])
    placed = [job for job in listed if job["status"] != "waiting"]
    waiting = [job for job in listed if job["status"] == "waiting"]
    unmet = [job for job in placed if job.get("unmet")]
    room = _room(rows, len(seen["pools"]), len(seen["nodes"]), len(placed), len(waiting), len(unmet))
    nodes, jobs = seen["nodes"][: room.nodes], _window(placed, room.jobs, screen.chosen)
    parts: list[RenderableType] = [_head(seen, trouble), _pools(seen["pools"]), Text()]
    parts += [_nodes(nodes, holders, names, width), *_more("nodes", len(nodes), len(seen["nodes"])), Text()]
    parts.append(_jobs(jobs, holders, seen["at"], width, screen.chosen) if placed else Text(_no_job(screen)))
    parts += _more("jobs", len(jobs), len(placed))
    if unmet:
        some = unmet[: room.unmet]
        told = _reasons("NO PROMISE", some, "unmet")
        parts += [Text(), told, *_more("without their promise", len(some), len(unmet))]
    if waiting:
        few = _window(waiting, room.waiting, screen.chosen)
        told = _reasons("WAITING FOR A PLACE", few, "reason", screen.chosen)
        parts += [Text(), told, *_more("waiting", len(few), len(waiting))]
    if rows is not None:
        parts.append(_keys(screen))
    return Group(*parts)


def _page(screen: Screen, rows: int | None) -> RenderableType:
    """What the daemon explains, as much of it as the screen has room for."""
    lines = [Text(printable(line)) for line in screen.page or ()]
    shown = lines if rows is None else lines[: rows // 2]  # a sentence may take two lines
    return Group(*shown, *_more("sentences: rollmuxd job explain JOB", len(shown), len(lines)), Text(), _keys(screen))


def _keys(screen: Screen) -> Text:
    style = "bold yellow" if screen.asked or screen.typing else "bold" if screen.said else "dim"
    return Text(printable(screen.keys()), style, no_wrap=True, overflow="ellipsis")


def _no_job(screen: Screen) -> str:
    return (
        f"no job that has a placement matches {printable(screen.filter)}" if screen.filter else "no job has a placement"
    )


def _window(jobs: Sequence[Mapping[str, Any]], room: int | None, chosen: str | None) -> Sequence[Mapping[str, Any]]:
    """So many of them that there is room for, the chosen one among them."""
    if room is None or len(jobs) <= room:
        return jobs
    at = next((place for place, job in enumerate(jobs) if job["job"] == chosen), 0)
    first = min(max(0, at - room // 2), len(jobs) - room)
    return jobs[first : first + room]


class Room(NamedTuple):
    """How many lines there are for each; None: for all."""

    nodes: int | None
    jobs: int | None
    waiting: int | None
    unmet: int | None


def _room(rows: int | None, pools: int, nodes: int, jobs: int, waiting: int, unmet: int) -> Room:
    """Share a screen of so many rows out: each table has a head, a blank line before it, and a line of what is left."""
    if rows is None:
        return Room(None, None, None, None)
    left = rows - 3 - pools - 1  # the first line and that of the keys, and the pools with their head
    few, some = min(waiting, 3), min(unmet, 3)
    left -= few + 2 + (waiting > few) if waiting else 0
    left -= some + 2 + (unmet > some) if unmet else 0
    left -= 2  # the heads of nodes and jobs
    of_nodes = min(nodes, max(2, left // 3))
    left -= of_nodes + (nodes > of_nodes) + 2
    return Room(of_nodes, max(1, left - 1) if jobs > left else max(1, left), few, some)


def _head(seen: Mapping[str, Any], trouble: str) -> Text:
    if trouble:
        return Text(printable(trouble), "bold red", no_wrap=True, overflow="ellipsis")
    count = len(seen["jobs"])
    waiting = sum(job["status"] == "waiting" for job in seen["jobs"])
    said = f"{seen['at'][11:19]} UTC   {_of(len(seen['nodes']), 'node')}, {_of(len(seen['groups']), 'group')}, "
    said += f"{_of(count, 'job')}{f', {waiting} waiting' if waiting else ''}"
    head = Text.assemble(("rollmuxd top   ", "bold"), said)
    head.no_wrap, head.overflow = True, "ellipsis"
    return head


def _of(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


#: columns of which a part will do, where there is no room for all of it
_ANY_PART: Final = frozenset(("JOB", "NODE", "NOW", "HELD BY", "STATES", "WHY", "OWNER", "WAITING FOR A PLACE"))


def _table(columns: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> Table:
    """A table no wider than the screen: what is cut ends in an ellipsis, and of the widest most is cut."""
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        number, least = column.startswith("#"), len(column) if column in _ANY_PART else None
        made.add_column(
            column.removeprefix("#"), justify="right" if number else "left", min_width=least, no_wrap=least is None
        )
    for row in rows:
        cells = [cell if isinstance(cell, Text) else Text(cell) for cell in row]
        for cell in cells:
            cell.no_wrap, cell.overflow = True, "ellipsis"
        made.add_row(*cells)
    return made


#: columns that a screen narrower than this goes without
_NARROW: Final = 110
_DISPENSABLE: Final = frozenset(("POOLS", "GROUP", "#GPUS", "OWNER", "STATUS"))


def _fitted(columns: Sequence[str], rows: Sequence[Sequence[str | Text]], width: int) -> Table:
    """The same, without what a narrow screen can go without."""
    if width >= _NARROW:
        return _table(columns, rows)
    kept = [place for place, column in enumerate(columns) if column not in _DISPENSABLE]
    return _table([columns[place] for place in kept], [[row[place] for place in kept] for row in rows])


def bar(share: float, width: int) -> str:
    """``█████░░░``: how much of it."""
    full = min(width, max(0, round(share * width)))
    return "█" * full + "░" * (width - full)


def _pools(pools: Sequence[Mapping[str, Any]]) -> RenderableType:
    rows: list[list[str | Text]] = []
    for pool in pools:
        share = pool["gpus_held"] / pool["gpus"] if pool["gpus"] else 0.0
        rows.append(
            [
                printable(pool["pool"]),
                str(pool["gpus"]),
                Text(bar(share, 20), "green"),
                f"{share:.0%}",
                str(len(pool["nodes"])),
                str(pool["nodes_free"]),
            ]
        )
    return _table(["POOL", "#GPUS", "HELD", "#", "#NODES", "#FREE"], rows)


def _nodes(
    nodes: Sequence[Mapping[str, Any]],
    holders: Mapping[str, Mapping[str, Any]],
    names: Mapping[str, str],
    width: int,
) -> RenderableType:
    # A narrow screen has no column for it, so the node's colour says what is wrong, too.
    rows: list[list[str | Text]] = [
        [
            Text(node["node"], "" if node["status"] == "up" else _COLOUR.get(node["status"], "")),
            ", ".join(node["pools"]),
            Text(node["status"], _COLOUR.get(node["status"], "")),
            node.get("group") or "-",
            str(len(node["gpus"])),
            printable(_held_by(node, holders, names)),
            printable(_states(node, names)),
        ]
        for node in nodes
    ]
    return _fitted(["NODE", "POOLS", "STATUS", "GROUP", "#GPUS", "HELD BY", "STATES"], rows, width)


def _held_by(node: Mapping[str, Any], holders: Mapping[str, Mapping[str, Any]], names: Mapping[str, str]) -> str:
    """Which jobs hold the node's GPUs, and how many of them where it is not all."""
    counts = Counter((gpu["holder"], gpu["dirty_by"]) for gpu in node["gpus"] if gpu["holder"])
    said = []
    for (name, job), count in counts.items():
        slot = holders.get(name)  # that of a job which the caller may not see is not listed
        whose = job if slot is None else slot["job"]
        who = names.get(whose, whose) or name
        doing = "" if slot is None else f" {slot['phase']}"
        how = "" if slot is None or slot["status"] == "running" else f" ({slot['status']})"
        said.append(f"{who}{doing}{how}{'' if count == len(node['gpus']) else f' on {count}'}")
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


def _jobs(
    jobs: Sequence[Mapping[str, Any]],
    holders: Mapping[str, Mapping[str, Any]],
    at: str,
    width: int,
    chosen: str | None,
) -> RenderableType:
    rows: list[list[str | Text]] = []
    for job in jobs:
        since = job.get("phase_since")
        credit = job.get("credit_s")
        broken = credit is not None and credit < 0
        rows.append(
            [
                _name(job, chosen),
                printable(job["owner"]),
                Text(job["status"], _COLOUR.get(job["status"], "")),
                job.get("group") or "-",
                _now(job, holders) if job.get("silent_s") is None else Text(_silent(job), "red"),
                duration(_seconds(since, at)) if since else "-",
                str(job.get("iterations", 0)),
                "-" if job.get("slowdown") is None else f"{job['slowdown']:.2f}",
                Text(_against(job), "red" if broken else "green"),
                "-" if credit is None else f"{credit:+.0f} s",
            ]
        )
    heads = ["JOB", "OWNER", "STATUS", "GROUP", "NOW", "#FOR", "#ITER", "#SLOWDOWN", "OF ITS BOUND", "#CREDIT"]
    return _fitted(heads, rows, width)


def _name(job: Mapping[str, Any], chosen: str | None) -> Text:
    return Text(printable(job["name"]), "reverse" if job["job"] == chosen else "")


def _silent(job: Mapping[str, Any]) -> str:
    """That no heartbeat of its process comes; empty: they come."""
    return "" if job.get("silent_s") is None else f"silent for {job['silent_s']:.0f} s"


def _now(job: Mapping[str, Any], holders: Mapping[str, Mapping[str, Any]]) -> str:
    slot = holders.get(job.get("slot") or "")
    if slot is not None:
        return str(slot["phase"]) if slot["status"] == "running" else f"{slot['phase']} ({slot['status']})"
    return f"waits its turn for {job['phase']}" if job.get("slot") and job["status"] != "paused" else "-"


def _against(job: Mapping[str, Any]) -> str:
    """The slowdown on the way from 1 to the bound: ``██░░░░░░ 2``."""
    slo, slowdown = job.get("slo"), job.get("slowdown")
    if slo is None:
        return "best effort"
    share = 0.0 if slowdown is None else (slowdown - 1) / (slo - 1) if slo > 1 else float(slowdown > 1)
    return f"{bar(share, 8)} {slo:g}{'' if job.get('promised') else ' (not promised)'}"


def _reasons(
    head: str,
    jobs: Sequence[Mapping[str, Any]],
    reason: str,
    chosen: str | None = None,
) -> RenderableType:
    """Jobs and why it is so, on a line each."""
    rows: list[list[str | Text]] = [
        [
            _name(job, chosen),
            printable(job["owner"]),
            "-" if job.get("slo") is None else f"{job['slo']:g}",
            printable((reason == "reason" and _silent(job)) or job.get(reason) or f"rollmuxd job explain {job['job']}"),
        ]
        for job in jobs
    ]
    return _table([head, "OWNER", "#SLO", "WHY"], rows)


def _more(what: str, shown: int, there: int) -> list[RenderableType]:
    return [Text(f"... and {there - shown} more {what}", "dim")] if there > shown else []


def _seconds(since: str, at: str) -> float:
    return (datetime.fromisoformat(at) - datetime.fromisoformat(since)).total_seconds()
