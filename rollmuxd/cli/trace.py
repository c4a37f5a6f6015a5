"""``rollmuxd trace``: a history to look at, opened by https://ui.perfetto.dev."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rollmuxd.cli.common import Call, Failed, talks
from rollmuxd.cli.top.feed import say_unreadable

if TYPE_CHECKING:
    from rollmuxd.sim.history import Fact

#: facts that are asked of a daemon at a time
PAGE = 5_000
_UNITS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


@click.group()
def trace() -> None:
    """Look at a history: what ran where and when, what was moved, what waited."""


@trace.command(short_help="Write a trace for https://ui.perfetto.dev.")
@click.option(
    "--facts", "lines", type=click.File("rb"), help="Of these facts, as `facts --json` prints them (-: stdin)."
)
@click.option("--from", "since", help="From this time on: 2026-11-21T12:00 (UTC), or 90m after the first fact.")
@click.option("--to", "until", help="Up to this time; likewise.")
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@talks
def export(call: Call, *, lines: Any, since: str | None, until: str | None, out: Path) -> None:
    """Write OUT, a trace in Chrome's JSON format (gzipped if it ends in .gz): open it on https://ui.perfetto.dev.

    Pools, nodes and jobs are tracks. The history is the running daemon's, as far as your API key may see it.
    """
    from rollmuxd.sim import history, perfetto

    facts = _of_daemon(call) if lines is None else _of_lines(lines)
    first = next(facts, None)
    if first is None:
        raise Failed("there are no facts, and so nothing to show")
    start, end = _time("--from", since, first.at), _time("--to", until, first.at)
    if start is not None and end is not None and start >= end:
        raise click.UsageError(f"--from {since} is not before --to {until}")
    try:
        written = perfetto.write(out, history.items(chain([first], facts), start, end))
    except OSError as error:
        raise Failed(f"{out}: {error.strerror or error}") from error
    view = {"path": str(out), "bytes": out.stat().st_size, "slices": written.slices}
    view |= {"start_ms": written.start, "end_ms": written.end}
    call.answer(view, _show)


def _show(view: dict[str, Any]) -> None:
    if not view["slices"]:
        click.echo(f"{view['path']}: written, but nothing took any time in that window", err=True)
        return
    hours = (view["end_ms"] - view["start_ms"]) / _UNITS["h"]
    click.echo(
        f"{view['path']}: {view['slices']:,} slices of {hours:,.2f} h, {view['bytes'] / 1e6:,.1f} MB; "
        "open it on https://ui.perfetto.dev"
    )


def _time(option: str, text: str | None, first: int) -> int | None:
    """A time in ms: one of the calendar, or so long after the first fact (a simulation begins at 0)."""
    if text is None:
        return None
    after = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)", text)
    if after is not None:
        return first + round(float(after[1]) * _UNITS[after[2]])
    try:
        at = datetime.fromisoformat(text)
        return round((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000)
    except (ValueError, OverflowError):
        raise click.UsageError(
            f"{option}: {text!r} is no time; write it like 2026-11-21T12:00 (UTC), or like 90m: so long after the "
            "first fact"
        ) from None


# ---- where facts come from -------------------------------------------------------------------------------------------


def _of_daemon(call: Call) -> Iterator[Fact]:
    after = 0
    while True:
        page = call.get("/v1/facts", after=after, limit=PAGE)
        yield from _read(((f"fact {fact['seq']}", fact) for fact in page["facts"]), "the daemon")
        say_unreadable(page.get("unreadable", ()))
        if page["last"] == after:
            return
        after = page["last"]


def _of_lines(lines: Any) -> Iterator[Fact]:
    numbered = ((f"line {number}", line) for number, line in enumerate(lines, 1) if line.strip())
    yield from _read(numbered, getattr(lines, "name", "stdin"))


def _read(found: Iterable[tuple[str, Any]], source: str) -> Iterator[Fact]:
    from rollmuxd.sim.history import fact_of

    read: Callable[[Any], Fact] = fact_of
    for where, body in found:
        try:
            fact = read(body)
        except ValueError as error:
            shown = json.dumps(body) if isinstance(body, dict) else body if isinstance(body, str) else repr(body)
            raise Failed(f"{source}, {where} is no fact that this rollmuxd knows ({error}): {shown[:120]}") from error
        yield fact
