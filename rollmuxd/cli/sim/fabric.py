"""``rollmuxd sim fabric``: which network between the hosts, at what cost?"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from rollmuxd.cli.common import Failed, answer, needs_numpy, table
from rollmuxd.fabric.parallelism import PARALLELISMS

if TYPE_CHECKING:
    from rollmuxd.fabric.cost import Prices


def _numbers(value: str, option: str, least: float) -> list[float]:
    try:
        numbers = [float(part) for part in value.split(",")]
    except ValueError:
        raise Failed(f"{option} {value}: numbers, separated by commas") from None
    if not all(least <= number <= 1e6 for number in numbers):
        raise Failed(f"{option} {value}: from {least:g} to 1e6 each")
    return numbers


def _prices(path: Path | None) -> dict[str, Prices]:
    """The shipped prices, or those of a file. Raises Failed, naming the file, the line and the key."""
    import tomllib

    where = str(path or "prices.toml")
    try:
        text = path.read_text() if path else resources.files("rollmuxd.fabric").joinpath("prices.toml").read_text()
        tables = tomllib.loads(text)
    except (OSError, ValueError) as error:  # tomllib says line and column
        raise Failed(f"{where}: {error}") from None
    if not tables:
        raise Failed(f"{where}: no table is there, and one for each generation of links is needed: [400g]")
    return {at: _priced(where, text, at, of) for at, of in tables.items()}


def _priced(where: str, text: str, at: str, of: Any) -> Prices:
    """One table of prices."""
    from rollmuxd.fabric.cost import Prices

    def no(key: str, problem: str) -> Failed:
        line = _line_of(text, at, key)
        return Failed(f"{where}, line {line}, key '{at}{'.' * bool(key)}{key}': {problem}")

    if not isinstance(of, dict):
        raise no("", f"{of!r} is there, and a table [{at}] of prices is needed")
    fields = msgspec.structs.fields(Prices)
    known = [field.name for field in fields]
    for key in of:
        if key not in known:
            raise no(key, f"there is no such key ({', '.join(known)})")
    for field in fields:
        if field.name not in of and field.required:
            raise no("", f"{field.name} is missing")
        if field.name in of:
            try:
                msgspec.convert(of[field.name], field.type)
            except msgspec.ValidationError as error:
                raise no(field.name, f"{of[field.name]!r} is there: {error}") from None
            if field.type is float and not 0 < of[field.name] < 1e9:
                raise no(field.name, f"{of[field.name]!r} is there, and a price in dollars above 0 is needed")
    return msgspec.convert(of, Prices)


def _line_of(text: str, table: str, key: str) -> int:
    """The line of a key in a table of TOML; of the table itself where it is not found."""
    at = max(0, text.find(f"[{table}]"))
    found = text.find(f"\n{key}", at) + 1 if key else 0
    return text.count("\n", 0, max(at, found)) + 1


@click.command(short_help="Which network between the hosts, at what cost?")
@click.option("--topologies", default="fat-tree,osub4,topoopt,mixnet,rfabric", show_default=True, metavar="A,B")
@click.option("--gpus", default="1024", show_default=True, metavar="N,M", help="Of each of the two clusters.")
@click.option("--t-ocs", default="20", show_default=True, metavar="MS,MS", help="What changing circuits takes.")
@click.option("--model", "model_name", default="qwen2.5-72b", show_default=True)
@click.option("--hardware", default="h800", show_default=True, help="The GPUs that train.")
@click.option("--generation", default="", metavar="A,B", help=f"Decoding steps too, for {', '.join(PARALLELISMS)}.")
@click.option(
    "--prices",
    "price_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A TOML file with your prices, a table for each generation of links (docs/how-to/simulate.md).",
)
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a page with pictures.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def fabric(
    *, topologies: str, gpus: str, t_ocs: str, model_name: str, hardware: str, generation: str,
    price_file: Path | None, html: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Compare fabrics for RL: performance against a full fat tree, and cost per GPU port against it.

    Exits with 1 where a figure lies outside of what the checks allow. What was not published is a range. Costs are held
    to the published ones with the shipped prices only.
    """
    needs_numpy("the study of fabrics needs")
    from rollmuxd.rollout.hardware import gpu
    from rollmuxd.rollout.models import model
    from rollmuxd.sim.fabric_study import study

    if html:
        from rollmuxd.cli.sim.command import writable
        from rollmuxd.sim.report import Unavailable, check

        try:
            check()
            writable(html)
        except (Unavailable, OSError) as error:
            raise Failed(str(error)) from None
    counts = _numbers(gpus, "--gpus", 1)
    if any(count != int(count) for count in counts):
        raise Failed(f"--gpus {gpus}: whole numbers, separated by commas")
    how: list[Any] = [part.strip() for part in generation.split(",") if part.strip()]
    unknown = [part for part in how if part not in PARALLELISMS]
    if unknown:
        raise Failed(f"--generation {unknown[0]}: known are {', '.join(PARALLELISMS)}")
    try:
        result = study(
            [part.strip() for part in topologies.split(",")],
            [int(count) for count in counts],
            _numbers(t_ocs, "--t-ocs", 0),
            model(model_name),
            gpu(hardware),
            _prices(price_file),
            how,
            shipped=price_file is None,
        )
    except ValueError as error:
        raise Failed(str(error)) from None
    if html:
        from rollmuxd.sim.report.fabric import page

        html.write_text(page(result, shlex.join(["rollmuxd", *sys.argv[1:]])), encoding="utf-8")
    answer(result, _show, as_json=as_json)
    if not all(check["ok"] for check in result["checks"]):
        sys.exit(1)


def _show(result: dict[str, Any]) -> None:
    if result["rows"]:
        _show_iterations(result["rows"])
        _show_bills(result)
    for it in result["settings_within_bars"]:
        within = f"{len(it['within'])} of {it['settings']} settings ({len(it['within_in_hundredths'])} in hundredths)"
        where = f"{it['gpus']} GPUs, {it['t_ocs_ms']:g} ms"
        click.echo(f"{where}: every performance is within its published bar at {within}.")
    if result["generation"]:
        table(
            ["FABRIC", "GENERATION", "PLACEMENT", "#OWN CIRCUITS ms/step", "#TRAINING'S ms/step", "#BY THE GATE"],
            [
                [row["fabric"], row["generation"], row["placement"], f"{row['own_circuits_ms']:.2f}",
                 "" if row["training_circuits_ms"] is None else f"{row['training_circuits_ms']:.2f}",
                 f"{row['gated_ms']:.2f}"]
                for row in result["generation"]
            ],
            "",
        )  # fmt: skip
    missed = [check for check in result["checks"] if not check["ok"]]
    click.echo(f"{len(result['checks']) - len(missed)} of {len(result['checks'])} checks hold")
    for check in missed:
        click.echo(f"  {check['name']}: {check['value']:.3f}, not within {check['bar'][0]:g} to {check['bar'][1]:g}")


def _show_bills(result: dict[str, Any]) -> None:
    """What each fabric is made of, and by which prices that is its cost."""
    bills = {row["fabric"]: row["bill"] for row in result["rows"]}
    heads = [f"#{name.replace('_', ' ').upper()}" for name in next(iter(bills.values()))]
    table(["FOR ONE GPU", *heads], [[name, *(f"{it:.2f}" for it in of.values())] for name, of in bills.items()], "")
    for at, of in result["prices"].items():
        each = [f"{key.replace('_', ' ')} {of[key]:g}" for key in of if isinstance(of[key], float | int)]
        read = "" if of["verified"] else ", recalled and not verified"
        click.echo(f"{at}, $: {', '.join(each[:4])} ({of['source']}, {of['date']}{read}).")
    click.echo()


def _show_iterations(rows: Sequence[dict[str, Any]]) -> None:
    ats = list(rows[0]["cost"])
    table(
        ["FABRIC", "#GPUS", "#T_OCS ms", "#EXPOSED s", "#SYNC s", "#PERFORMANCE", "#RANGE",
         *(f"#COST {at}" for at in ats), *(f"#PER COST {at}" for at in ats), "#REPORTED"],
        [
            [
                row["fabric"], row["gpus"], f"{row['t_ocs_ms']:g}", f"{row['exposed_s']:.2f}", f"{row['sync_s']:.2f}",
                f"{row['performance']:.3f}", "{:.2f} to {:.2f}".format(*row["performance_range"]),
                *(f"{row['cost'][at]:.2f}" for at in ats), *(f"{row['performance_per_cost'][at]:.2f}" for at in ats),
                f"{row['reported']['performance']:.2f} / {row['reported']['cost']:.2f}",
            ]
            for row in rows
        ],
        "",
    )  # fmt: skip
    dear = [row for row in rows if row["fabric"] == "rfabric" and row["cost"].get("100g", 0) > 1]
    if dear:
        click.echo(
            f"\nAt 100G prices rfabric costs {dear[0]['cost']['100g']:.2f} times the fat tree: its claim reverses."
        )
    click.echo("Performance: a fat tree's iteration time over this one's. Range: optimizer steps, micro-batches.")
    click.echo("Performance is at 10 steps and micro-batches of 8,192 tokens: 10 was fitted to the published table.")
    if any(row["fabric"] == "topoopt" for row in rows):
        click.echo(
            "topoopt: its speed is that of patched ports alone; its bill has half of them, and an electrical plane."
        )
    click.echo("Reported: OrchestrRL's table (performance / cost), from a summary of the paper.\n")
