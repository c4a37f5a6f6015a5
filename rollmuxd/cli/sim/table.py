"""A comparison of policies, as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from rollmuxd.cli.common import table
from rollmuxd.sim import tables
from rollmuxd.sim.tables import interval, number, plus_minus, share

if TYPE_CHECKING:
    from rollmuxd.sim.outcome import Outcome


def render(outcomes: Sequence[Outcome]) -> None:
    """Print one table per accounting, how they came about, and the paired differences from the first policy."""
    rows = tables.summary(outcomes)
    if not rows:
        click.echo("nothing ran")
        return
    for accounting in tables.ACCOUNTINGS:
        shown = [(_called(row), row[accounting]) for row in rows if row[accounting] is not None]
        if shown:
            click.echo(f"{accounting.upper()}: {tables.MEANING[accounting]}\n")
            _figures(shown)
            click.echo()
            for name, of in shown:
                if of["never_placed"]:
                    click.echo(
                        f"{name}: {number(of['never_placed'])} of {number(of['jobs'])} jobs were never placed; only "
                        "JOB h and WAIT h count them.\n"
                    )
            _how(shown)
            click.echo()
    seeds = len({outcome.seed for outcome in outcomes})
    if len(rows) > 1:
        first, of = rows[0]["policy"], f"{seeds} seed{'' if seeds == 1 else 's'}"
        click.echo(f"DIFFERENCE FROM {first}, seed by seed (mean +- sd over {of}; 95 %: where the mean is)\n")
        _differences(tables.paired(outcomes, first))
        click.echo()
    click.echo(f"{tables.UTILISATION} {tables.BUBBLE}")


def _called(row: dict[str, Any]) -> str:
    """An optimum that was not proved must not look like one."""
    return f"{row['policy']} (best found)" if row["exact"] is False else str(row["policy"])


def _figures(shown: Sequence[tuple[str, dict[str, Any]]]) -> None:
    table(
        ["POLICY", "#$/h", "#TOTAL $", "#x SOLO", "#PEAK GPUS", "#SLOWDOWN", "#p95", "#SLO kept", "#JOB h", "#WAIT h"],
        [
            [
                name,
                plus_minus(of["cost_per_hour"]),
                plus_minus(of["total_cost_spread"]),
                plus_minus(of["relative_to_solo"]),
                ", ".join(f"{gpus} {gpu_type}" for gpu_type, gpus in of["peak_gpus"].items()),
                number(of["slowdown"] and of["slowdown"]["mean"]),
                number(of["slowdown"] and of["slowdown"]["p95"]),
                share(of["slo_attainment"] and of["slo_attainment"]["mean"]),
                number(of["mean_completion_s"] / 3600),
                number(of["mean_wait_s"] / 3600),
            ]
            for name, of in shown
        ],
        "",
    )


def _how(shown: Sequence[tuple[str, dict[str, Any]]]) -> None:
    pools = list(dict.fromkeys(pool for _, of in shown for pool in of["pools"]))
    table(
        ["POLICY", *(f"#USED {pool}" for pool in pools), "ADMITTED", "WARM/COLD/PARKED", "#DECISION ms p50", "#p99"],
        [
            [
                name,
                *(share(of["pools"].get(pool, {}).get("utilisation")) for pool in pools),
                ", ".join(f"{number(count)} {kind}" for kind, count in of["admissions"].items()),
                "/".join(number(of["switches"].get(kind, 0)) for kind in ("warm", "cold", "parks")),
                number(of["decision_ms"] and of["decision_ms"]["p50"]),
                number(of["decision_ms"] and of["decision_ms"]["p99"]),
            ]
            for name, of in shown
        ],
        "",
    )


def _differences(rows: Sequence[dict[str, Any]]) -> None:
    table(
        ["ACCOUNTING", "POLICY", "#$/h", "#95 %", "#TOTAL $", "#95 %", "#SLOWDOWN", "#SLO kept", "#JOB h"],
        [
            [
                row["accounting"],
                row["policy"],
                plus_minus(row["cost_per_hour"], signed=True),
                interval(row["cost_per_hour"]),
                plus_minus(row["total_cost"], signed=True),
                interval(row["total_cost"]),
                plus_minus(row["mean_slowdown"], signed=True),
                plus_minus(row["slo_attainment"], signed=True, scale=100, unit=" pp"),
                plus_minus(row["mean_completion_s"], signed=True, scale=1 / 3600),
            ]
            for row in rows
        ],
        "no two policies ran on one seed",
    )
