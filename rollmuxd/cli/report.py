"""``rollmuxd report``: what GPUs were held and used for, and what sharing saved."""

from __future__ import annotations

import math
from typing import Any

import click

from rollmuxd.cli.calls import Call, table, talks


@click.command(short_help="What GPUs were used for, and what sharing saved.")
@click.option("--since", help="From this time on: 2025-06-01, 2025-06-01T12:00.")
@click.option("--until", help="Up to this time (default: now).")
@click.option(
    "--by", type=click.Choice(["job", "owner", "pool"]), default="job", help="A row per job (default), owner or pool."
)
@click.option("--csv", "as_csv", is_flag=True, help="The rows of work as CSV.")
@talks
def report(call: Call, since: str | None, until: str | None, by: str, as_csv: bool) -> None:
    """GPU-hours held and used, against what each job alone would have used."""
    if as_csv and call.as_json:
        raise click.UsageError("--csv and --json are two answers; ask for one")
    if as_csv:
        asked = {name: value for name, value in {"since": since, "until": until}.items() if value is not None}
        click.echo(call.daemon.text("/v1/report", by=by, format="csv", **asked), nl=False)
    else:
        call.answer(call.get("/v1/report", since=since, until=until, by=by), _show)


def _show(view: dict[str, Any]) -> None:
    click.echo(f"{view['since']} to {view['until']}\n")
    table(
        ["NAME", "OWNER", "#HELD h", "#USED h", "#ALLOCATED h", "#ALONE h", "#ITERATIONS", "#SLOWDOWN", "#WAITED h"],
        [
            [
                row["name"],
                row["owner"],
                hours(row["gpu_hours_held"]),
                hours(row["gpu_hours_used"]),
                hours(row["gpu_hours_allocated"]),
                hours(row["gpu_hours_alone"]),
                row["iterations"],
                row["slowdown"],
                hours(row["wait_turn_hours"]),
            ]
            for row in view["work"]
        ],
        "no job held GPUs in that time",
    )
    click.echo()
    table(
        ["POOL", "#GPUS", "#CAPACITY h", "#USED h", "#SWITCHING h", "#IDLE h", "#UNALLOCATED h", "#UTILISATION"],
        [
            [
                row["pool"],
                row["gpus"],
                hours(row["gpu_hours_capacity"]),
                hours(row["gpu_hours_used"]),
                hours(row["gpu_hours_switching"]),
                hours(row["gpu_hours_idle"]),
                hours(row["gpu_hours_unallocated"]),
                None if row["utilisation"] is None else f"{row['utilisation']:.0%}",
            ]
            for row in view["pools"]
        ],
        "no pools",
    )
    click.echo(f"\n{_saving(view['saving'])}")


def hours(value: float) -> str:
    """Three digits that say something, however short the time was."""
    if not value:
        return "0"
    digits = max(0, min(6, 2 - math.floor(math.log10(abs(value)))))
    shown = f"{value:.{digits}f}"
    return shown.rstrip("0").rstrip(".") if digits else shown


def _saving(saving: dict[str, Any]) -> str:
    saved = saving["gpu_hours_saved"]
    sides = (
        f"{hours(saving['gpu_hours_allocated'])} allocated, "
        f"against {hours(saving['gpu_hours_alone'])} for {saving['baseline']}"
    )
    if saved >= 0:
        return f"saved {hours(saved)} GPU-hours: {sides}"
    if not saving["gpu_hours_alone"]:
        return f"nothing to compare yet, since no iteration has finished: {sides}"
    return (
        f"not saved, but used on top: {hours(-saved)} GPU-hours: {sides} "
        "(iterations that have not finished count on the first side only: a longer span tells more)"
    )
