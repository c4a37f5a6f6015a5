"""A comparison of policies, as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

import click

from rollmuxd.cli.common import table
from rollmuxd.sim import tables
from rollmuxd.sim.outcome import Outcome


def render(outcomes: Sequence[Outcome]) -> None:
    """Print one table per accounting, how they came about, and the paired differences from the first policy."""
    rows = tables.summary(outcomes)
    if not rows:
        click.echo("nothing ran")
        return
    for accounting in tables.ACCOUNTINGS:
        shown = [(tables.called(row), row[accounting]) for row in rows if row[accounting] is not None]
        if shown:
            click.echo(f"{accounting.upper()}: {tables.MEANING[accounting]}\n")
            table(*tables.figures(shown), "")
            click.echo()
            for said in tables.never_placed(shown):
                click.echo(f"{said}\n")
            table(*tables.how(shown), "")
            click.echo()
            heads, sent = tables.sent(shown)
            if sent:
                table(heads, sent, "")
                click.echo(f"{tables.SENT}\n")
    seeds = len({outcome.seed for outcome in outcomes})
    if len(rows) > 1:
        first, of = rows[0]["policy"], f"{seeds} seed{'' if seeds == 1 else 's'}"
        click.echo(f"DIFFERENCE FROM {first}, seed by seed (mean +- sd over {of}; 95 %: where the mean is)\n")
        table(*tables.differences(tables.paired(outcomes, first)), "no two policies ran on one seed")
        click.echo()
    click.echo(tables.UTILISATION)
