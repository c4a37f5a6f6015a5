"""``rollmuxd report``: what GPUs were held and used for, which job is charged with what, and what sharing saved."""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import click

from rollmuxd.cli.common import Call, Columns, listing, talks
from rollmuxd.cli.feed import Time
from rollmuxd.cli.sim.estimate import sharing, show_sharing
from rollmuxd.client.calls import QUESTION_S
from rollmuxd.daemon.usage.ledger import HEADS


@click.command(short_help="What GPUs were used for, and what sharing saved.")
@click.option("--since", type=Time(), help="From this time on: 7d (ago), 2025-06-01, 2025-06-01T12:00 (UTC).")
@click.option("--until", type=Time(), help="Up to this time (default: now).")
@click.option(
    "--by", type=click.Choice(["job", "owner", "pool"]), default="job", help="A row per job (default), owner or pool."
)
@click.option("--csv", "as_csv", is_flag=True, help="The rows as CSV.")
@talks
def report(call: Call, since: str | None, until: str | None, by: str, as_csv: bool) -> None:
    """GPU-hours held, used and charged, against what each job alone would have used.

    Of a daemon that only watches (mode observe): what sharing would have saved, as the simulator plays what was seen.

    Held time is charged to its holder. Time in which a group's nodes were not held is split among its jobs by what they
    held. The rest of the inventory is unallocated. So the rows and the rest add up to all GPU-hours.
    """
    if as_csv and call.as_json:
        raise click.UsageError("--csv and --json are two answers; ask for one")
    view = call.get("/v1/report", timeout_s=QUESTION_S, since=since, until=until, by=by)
    if as_csv:
        rows = "pools" if by == "pool" else "work"
        _print_csv(view[rows], HEADS[rows])
    elif view.get("mode") == "observe":
        call.answer({**view, "sharing": sharing(call, since)}, _show_watched)
    else:
        call.answer(view, _show)


def _print_csv(rows: list[dict[str, Any]], heads: tuple[str, ...]) -> None:
    """A line of heads, also where there is no row, and the rows."""
    writer = csv.DictWriter(sys.stdout, heads, extrasaction="ignore")
    writer.writeheader()
    for row in rows:
        # A spreadsheet would run a name that begins like a formula.
        runs = {key for key, it in row.items() if isinstance(it, str) and it[:1] in tuple("=+-@\t")}
        writer.writerow({key: f"'{it}" if key in runs else it for key, it in row.items()})


def _show_watched(view: dict[str, Any]) -> None:
    """Of a daemon that has given no job a GPU: what it could have made of what it saw."""
    click.echo("this daemon only watches (mode observe): no GPU was held, and nothing is charged\n")
    show_sharing(view["sharing"])


def _show(view: dict[str, Any]) -> None:
    since = "the beginning" if view["since"].startswith("1970-01-01T00:00:00") else view["since"]
    click.echo(f"{since} to {view['until']}\n")
    if view["by"] != "pool":
        owner: Columns = {} if view["by"] == "owner" else {"OWNER": "owner"}
        work: Columns = {
            view["by"].upper(): "name",
            **owner,
            "#CHARGED h": _hours("gpu_hours_charged"),
            "#USED h": _hours("gpu_hours_used"),
            "#ALONE h": _hours("gpu_hours_alone"),
            "#COST": _hours("cost_charged"),
            "#ITERATIONS": "iterations",
            "#SLOWDOWN": "slowdown",
            "KEPT": _kept,
            "SWITCHES": lambda row: f"{row['loads_warm']} warm, {row['loads_cold']} cold, {row['parks']} parks",
            "#SWITCHING h": _hours("gpu_hours_switching"),
            "#WAITED h": _hours("wait_turn_hours"),
        }
        listing(view["work"], work, "no job held GPUs in that time")
        click.echo()
    figures = ("capacity", "used", "switching", "idle", "unallocated")
    pools: Columns = {
        "POOL": "pool",
        "#GPUS": "gpus",
        **{f"#{figure.upper()} h": _hours(f"gpu_hours_{figure}") for figure in figures},
        "#UTILISATION": lambda row: None if row["utilisation"] is None else f"{row['utilisation']:.0%}",
    }
    listing(view["pools"], pools, "no pools")
    click.echo(f"\n{_bill(view['bill'])}\n{_saving(view['saving'])}")
    if harvested := sum(row.get("gpu_hours_harvested", 0.0) for row in view["pools"]):
        held_up = sum(row.get("held_up_hours", 0.0) for row in view["work"])
        click.echo(
            f"fillers ran {hours(harvested)} GPU-hours of what is idle or unallocated, and are charged nothing; "
            f"jobs waited {hours(held_up)} h for them at most"
        )
    if missing := view.get("unreadable"):
        click.echo(
            f"not exact: {len(missing)} damaged facts (number {', '.join(map(str, missing[:10]))}) and what follows "
            "from them are left out; `rollmuxd journal check` looks for more",
            err=True,
        )


def _kept(row: Mapping[str, Any]) -> str:
    """Whether the promise was kept; of an owner, of how many jobs."""
    if row["job"] is None:
        return f"{row['slo_kept']} of {row['slo_judged']}" if row["slo_judged"] else "-"
    if row["slo"] is None:
        return "-"
    return f"{row['slo']:g} {'kept' if row['slo_kept'] else 'missed' if row['slo_judged'] else 'not judged'}"


def _bill(bill: Mapping[str, Any]) -> str:
    """That everything is charged to a job, or unallocated."""
    others = f" + {hours(bill['gpu_hours_others'])} to other owners" if bill["gpu_hours_others"] else ""
    said = (
        f"{hours(bill['gpu_hours_charged'])} GPU-hours charged{others} + {hours(bill['gpu_hours_unallocated'])} "
        f"unallocated = {hours(bill['gpu_hours_capacity'])} of the inventory"
    )
    if not bill["cost_capacity"]:
        return said
    return f"{said}; in money {hours(bill['cost_charged'])} of {hours(bill['cost_capacity'])}"


def _hours(key: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: hours(row[key])


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
        f"{hours(saving['gpu_hours_charged'])} charged, "
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
