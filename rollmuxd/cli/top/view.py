"""What ``rollmuxd top`` shows, made of one look at the daemon. Pure: the same look gives the same picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rollmuxd.cli.common import Columns, View, cell, printable
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
    parts: list[RenderableType] = [_head(seen, trouble), _table(_POOLS, seen["pools"]), Text()]
    parts += [_table(_nodes(holders, names), nodes, width), *_more("nodes", len(nodes), len(seen["nodes"])), Text()]
    columns = _jobs(holders, seen["at"], screen.chosen)
    parts.append(_table(columns, jobs, width) if placed else Text(_no_job(screen)))
    parts += _more("jobs", len(jobs), len(placed))
    if unmet:
        some = unmet[: room.unmet]
        told = _table(_reasons("NO PROMISE", "unmet"), some)
        parts += [Text(), told, *_more("without their promise", len(some), len(unmet))]
    if waiting:
        few = _window(waiting, room.waiting, screen.chosen)
        told = _table(_reasons("WAITING FOR A PLACE", "reason", screen.chosen), few)
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


def _window(jobs: Sequence[View], room: int | None, chosen: str | None) -> Sequence[View]:
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


#: columns that a screen narrower than this goes without
_NARROW: Final = 110
_DISPENSABLE: Final = frozenset(("POOLS", "GROUP", "#GPUS", "OWNER", "STATUS"))


def _table(columns: Columns, views: Sequence[View], width: int = _NARROW) -> Table:
    """A table no wider than the screen: what is cut ends in an ellipsis, and of the widest most is cut.

    A screen that is narrower than usual goes without some of the columns.
    """
    shown = {head: of for head, of in columns.items() if width >= _NARROW or head not in _DISPENSABLE}
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for head in shown:
        number, least = head.startswith("#"), len(head) if head in _ANY_PART else None
        made.add_column(
            head.removeprefix("#"), justify="right" if number else "left", min_width=least, no_wrap=least is None
        )
    for view in views:
        values = [view.get(of) if isinstance(of, str) else of(view) for of in shown.values()]
        cells = [value if isinstance(value, Text) else Text(cell(value)) for value in values]
        for text in cells:
            text.no_wrap, text.overflow = True, "ellipsis"
        made.add_row(*cells)
    return made


def bar(share: float, width: int) -> str:
    """``█████░░░``: how much of it."""
    full = min(width, max(0, round(share * width)))
    return "█" * full + "░" * (width - full)


_POOLS: Final[Columns] = {
    "POOL": "pool",
    "#GPUS": "gpus",
    "HELD": lambda pool: Text(bar(_share(pool), 20), "green"),
    "#": lambda pool: f"{_share(pool):.0%}",
    "#NODES": lambda pool: len(pool["nodes"]),
    "#FREE": "nodes_free",
}


def _share(pool: View) -> float:
    """How much of a pool is held."""
    return float(pool["gpus_held"] / pool["gpus"]) if pool["gpus"] else 0.0


def _nodes(holders: Mapping[str, View], names: Mapping[str, str]) -> Columns:
    return {
        # A narrow screen has no column for it, so the node's colour says what is wrong, too.
        "NODE": lambda node: Text(node["node"], "" if node["status"] == "up" else _COLOUR.get(node["status"], "")),
        "POOLS": "pools",
        "STATUS": _status,
        "GROUP": "group",
        "#GPUS": lambda node: len(node["gpus"]),
        "HELD BY": lambda node: held_by(node, holders, names),
        "STATES": lambda node: _states(node, names),
    }


def _status(view: View) -> Text:
    return Text(view["status"], _COLOUR.get(view["status"], ""))


def held_by(node: View, holders: Mapping[str, View], names: Mapping[str, str]) -> str:
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


def _states(node: View, names: Mapping[str, str]) -> str:
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


def _jobs(holders: Mapping[str, View], at: str, chosen: str | None) -> Columns:
    return {
        "JOB": lambda job: _name(job, chosen),
        "OWNER": "owner",
        "STATUS": _status,
        "GROUP": "group",
        "NOW": lambda job: Text(_silent(job), "red") if _silent(job) else _now(job, holders),
        "#FOR": lambda job: duration(_seconds(job["phase_since"], at)) if job.get("phase_since") else None,
        "#ITER": lambda job: job.get("iterations", 0),
        "#SLOWDOWN": lambda job: None if job.get("slowdown") is None else f"{job['slowdown']:.2f}",
        "OF ITS BOUND": lambda job: Text(_against(job), "red" if (job.get("credit_s") or 0) < 0 else "green"),
        "#CREDIT": lambda job: None if job.get("credit_s") is None else f"{job['credit_s']:+.0f} s",
    }


def _name(job: View, chosen: str | None) -> Text:
    return Text(printable(job["name"]), "reverse" if job["job"] == chosen else "")


def _silent(job: View) -> str:
    """That no heartbeat of its process comes; empty: they come."""
    return "" if job.get("silent_s") is None else f"silent for {job['silent_s']:.0f} s"


def _now(job: View, holders: Mapping[str, View]) -> str:
    slot = holders.get(job.get("slot") or "")
    if slot is not None:
        return str(slot["phase"]) if slot["status"] == "running" else f"{slot['phase']} ({slot['status']})"
    return f"waits its turn for {job['phase']}" if job.get("slot") and job["status"] != "paused" else "-"


def _against(job: View) -> str:
    """The slowdown on the way from 1 to the bound: ``██░░░░░░ 2``."""
    slo, slowdown = job.get("slo"), job.get("slowdown")
    if slo is None:
        return "best effort"
    share = 0.0 if slowdown is None else (slowdown - 1) / (slo - 1) if slo > 1 else float(slowdown > 1)
    return f"{bar(share, 8)} {slo:g}{'' if job.get('promised') else ' (not promised)'}"


def _reasons(head: str, reason: str, chosen: str | None = None) -> Columns:
    """Jobs and why it is so, on a line each."""

    def why(job: View) -> str:
        said = (reason == "reason" and _silent(job)) or job.get(reason)
        return said or f"rollmuxd job explain {job['job']}"

    return {head: lambda job: _name(job, chosen), "OWNER": "owner", "#SLO": "slo", "WHY": why}


def _more(what: str, shown: int, there: int) -> list[RenderableType]:
    return [Text(f"... and {there - shown} more {what}", "dim")] if there > shown else []


def _seconds(since: str, at: str) -> float:
    return (datetime.fromisoformat(at) - datetime.fromisoformat(since)).total_seconds()
