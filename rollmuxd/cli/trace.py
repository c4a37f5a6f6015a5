"""``rollmuxd trace``: a history to look at, opened by https://ui.perfetto.dev."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import click

from rollmuxd.cli.common import Call, Failed, talks
from rollmuxd.cli.feed import Time, at_ms, every_fact
from rollmuxd.sim import perfetto


@click.group()
def trace() -> None:
    """Look at a history: what ran where and when, what was moved, what waited."""


@trace.command(short_help="Write a trace for https://ui.perfetto.dev.")
@click.option("--from", "since", type=Time(), help="From this time on: 7d (ago), 2025-06-01, 2025-06-01T12:00 (UTC).")
@click.option("--to", "until", type=Time(), help="Up to this time; likewise.")
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@talks
def export(call: Call, *, since: str | None, until: str | None, out: Path) -> None:
    """Write OUT, a trace in Chrome's JSON format (gzipped if it ends in .gz): open it on https://ui.perfetto.dev.

    Pools, nodes and jobs are tracks. The history is the running daemon's, as far as your API key may see it.
    """
    facts = every_fact(call)
    first = next(facts, None)
    if first is None:
        raise Failed("there are no facts, and so nothing to show")
    start, end = (None if given is None else at_ms(given) for given in (since, until))
    if start is not None and end is not None and start >= end:
        raise click.UsageError(f"--from {since} is not before --to {until}")
    try:
        written = perfetto.write(out, chain([first], facts), start, end)
    except OSError as error:
        raise Failed(f"{out}: {error.strerror or error}") from error
    view = {"path": str(out), "bytes": out.stat().st_size, "slices": written.slices}
    view |= {"start_ms": written.start, "end_ms": written.end}
    call.answer(view, _show)


def _show(view: dict[str, Any]) -> None:
    if not view["slices"]:
        click.echo(f"{view['path']}: written, but nothing took any time in that window", err=True)
        return
    hours = (view["end_ms"] - view["start_ms"]) / 3_600_000
    click.echo(
        f"{view['path']}: {view['slices']:,} slices of {hours:,.2f} h, {view['bytes'] / 1e6:,.1f} MB; "
        "open it on https://ui.perfetto.dev"
    )
