"""``rollmuxd report``: what GPUs were held and used for, and what sharing saved."""

from __future__ import annotations

from typing import Any

import click

from rollmuxd.cli.calls import Call, cell, table, talks


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
                row["gpu_hours_held"],
                row["gpu_hours_used"],
                row["gpu_hours_allocated"],
                row["gpu_hours_alone"],
                row["iterations"],
                row["slowdown"],
                row["wait_turn_hours"],
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
                row["gpu_hours_capacity"],
                row["gpu_hours_used"],
                row["gpu_hours_switching"],
                row["gpu_hours_idle"],
                row["gpu_hours_unallocated"],
                None if row["utilisation"] is None else f"{row['utilisation']:.0%}",
            ]
            for row in view["pools"]
        ],
        "no pools",
    )
    saving = view["saving"]
    click.echo(
        f"\nsaved {cell(saving['gpu_hours_saved'])} GPU-hours: {cell(saving['gpu_hours_allocated'])} allocated, "
        f"against {cell(saving['gpu_hours_alone'])} for {saving['baseline']}"
    )
