"""A comparison of policies, as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from rollmuxd.cli.calls import table

if TYPE_CHECKING:
    from rollmuxd.sim.outcome import Outcome

#: fewer digits after the point the larger the number is
_DIGITS = ((1000.0, 0), (100.0, 1), (1.0, 2))


def render(outcomes: Sequence[Outcome]) -> None:
    """Print one table per accounting, how they came about, and the paired differences from the first policy."""
    from rollmuxd.sim import tables

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
            _how(shown)
            click.echo()
    seeds = len({outcome.seed for outcome in outcomes})
    if len(rows) > 1:
        first = rows[0]["policy"]
        click.echo(f"DIFFERENCE FROM {first}, seed by seed (mean +- sd over {seeds} seed{'' if seeds == 1 else 's'})\n")
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
                spread(of["cost_per_hour"]),
                spread(of["total_cost_spread"]),
                spread(of["relative_to_solo"]),
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
        ["ACCOUNTING", "POLICY", "#$/h", "#TOTAL $", "#SLOWDOWN", "#SLO kept", "#JOB h"],
        [
            [
                row["accounting"],
                row["policy"],
                spread(row["cost_per_hour"], signed=True),
                spread(row["total_cost"], signed=True),
                spread(row["mean_slowdown"], signed=True),
                spread(row["slo_attainment"], signed=True, scale=100, unit=" pp"),
                spread(row["mean_completion_s"], signed=True, scale=1 / 3600),
            ]
            for row in rows
        ],
        "no two policies ran on one seed",
    )


def number(value: float | None, *, signed: bool = False) -> str:
    """Three or four digits that say something; ``-`` for None."""
    if value is None:
        return "-"
    digits = next((digits for least, digits in _DIGITS if abs(value) >= least), 3)
    shown = f"{value:{'+' if signed else ''},.{digits}f}"
    shown = shown.rstrip("0").rstrip(".") if "." in shown else shown
    return "0" if shown in ("-0", "+0") else shown


def spread(of: dict[str, float] | None, *, signed: bool = False, scale: float = 1.0, unit: str = "") -> str:
    """``523 +- 14``; the mean alone where nothing spreads; ``-`` for None."""
    if of is None:
        return "-"
    mean, sd = number(of["mean"] * scale, signed=signed), number(of["sd"] * scale)
    return f"{mean}{unit}" if sd == "0" else f"{mean} +- {sd}{unit}"


def share(value: float | None) -> str:
    """``97.5%``; ``-`` for None. Only what is whole reads 100%."""
    if value is None:
        return "-"
    shown = f"{min(value * 100, 99.99) if value < 1 else value * 100:.2f}"
    return f"{shown.rstrip('0').rstrip('.')}%"
