"""``rollmuxd sim``: what would it have cost, and would every job have kept its bound?"""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rollmuxd.cli.common import Failed, table
from rollmuxd.cli.progress import Bar

if TYPE_CHECKING:
    from rollmuxd.sim.outcome import Outcome
    from rollmuxd.sim.workload import Options


class Bounds(click.ParamType[Any]):
    """``LO:HI``, ``1.5``, or ``none``."""

    name = "LO:HI"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Two numbers, or None."""
        if not isinstance(value, str):
            return value
        if value == "none":
            return None
        low, _, high = value.partition(":")
        try:
            return (float(low), float(high or low))
        except ValueError:
            self.fail(f"{value!r} is not LO:HI (1.1:2), one number (1.5), or none", param, ctx)


class Assigned(click.ParamType[Any]):
    """``NAME=VALUE``."""

    name = "NAME=VALUE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        """The two sides."""
        if isinstance(value, tuple):
            return value
        left, equals, right = str(value).partition("=")
        if not left or not equals or not right:
            self.fail(f"{value!r} is not NAME=VALUE", param, ctx)
        return left, right


_WORKLOAD = (
    click.option("--workload", "-w", required=True, metavar="NAME", help="See: rollmuxd sim workloads."),
    click.option(
        "--fidelity",
        type=click.Choice(["cost", "phase"]),
        default="cost",
        show_default=True,
        help="cost: arrivals and departures only. phase: every phase of every iteration.",
    ),
    click.option(
        "--slo",
        type=Bounds(),
        default="1:2",
        show_default=True,
        help="SLOs are drawn uniformly between these; one number for all; none.",
    ),
    click.option(
        "--prices",
        default="artifact",
        show_default=True,
        help="artifact, table1, or your own per GPU-hour: H20=1.85,H800=5.28.",
    ),
    click.option(
        "--switch",
        default="none",
        show_default=True,
        help="none: switching is free, as the paper plans. table: by model size. Or seconds for every load.",
    ),
    click.option(
        "--sync",
        type=click.Choice(["none", "table", "flat"]),
        default="none",
        show_default=True,
        help="none: new weights are handed on within training. table, flat: in a phase of its own on both pools, by "
        "model size, as the paper does it or as a flat all-gather.",
    ),
    click.option("--ram", "ram_gb", default=2000.0, show_default=True, help="Host RAM per node, GB."),
    click.option(
        "--nodes", type=Assigned(), multiple=True, help="Nodes that there are: POOL=COUNT. Default: bought on demand."
    ),
    click.option(
        "--move-s",
        type=click.IntRange(0, 86_400),
        metavar="SECONDS",
        help="What a move takes, for policies that move jobs. Default: 30.",
    ),
    click.option("--take", default=0, metavar="N", help="So many jobs at most."),
    click.option("--data", default="", metavar="DIR", help="Where large traces lie (default: $ROLLMUX_DATA)."),
    click.option("--set", "more", type=Assigned(), multiple=True, help="A setting of the workload itself."),
)


def _describes_a_workload(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that say what is to be simulated; the command gets ``options``."""

    @wraps(command)
    def wrapped(*, slo: Any, prices: str, switch: str, sync: str, ram_gb: float, **rest: Any) -> Any:
        from rollmuxd.sim.workload import Options

        own: str | dict[str, float] = prices
        if "=" in prices:
            pairs = [part.partition("=") for part in prices.split(",")]
            own = {kind.strip(): _number(price, f"the price of {kind}") for kind, _, price in pairs}
        moves: str | int = switch
        if switch not in ("none", "table"):
            moves = round(_number(switch, "--switch") * 1000)
        counts = {name: _count(count, f"--nodes {name}") for name, count in rest.pop("nodes")}
        options = Options(
            slo=slo,
            prices=own,
            switch=moves,
            sync=sync,
            ram_gb=ram_gb,
            nodes=counts,
            jobs=rest.pop("take"),
            data=rest.pop("data"),
            more=dict(rest.pop("more")),
        )
        return _plainly(lambda: command(options=options, **rest))

    for option in reversed(_WORKLOAD):
        wrapped = option(wrapped)
    return wrapped


def _number(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise click.UsageError(f"{what} is {text!r}, and a finite number is needed")
    return value


def _count(text: str, what: str) -> int:
    value = _number(text, what)
    if value != int(value):
        raise click.UsageError(f"{what} is {text!r}, and a whole number is needed")
    return int(value)


def _plainly(call: Callable[[], Any]) -> Any:
    """What the simulator refuses is one line; a broken promise is a bug of ours, and says how to find it."""
    from rollmuxd.sim import Violation

    try:
        return call()
    except OSError as no:  # a data set that is not there says where was looked, and how to get it
        raise Failed(f"{no.filename}: {no.strerror}" if no.filename else no.strerror or str(no)) from no
    except ValueError as no:
        raise Failed(str(no)) from no
    except Violation as broken:
        click.echo(str(broken), err=True)
        raise Failed("a promise was broken; this is a bug of rollmuxd, please report it with the lines above") from None


@click.group(short_help="Simulate policies on traces.")
def sim() -> None:
    """What would it have cost, and would every job have kept its bound?

    The scheduler that is simulated is the one that the daemon runs.
    """


@sim.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def workloads(*, as_json: bool) -> None:
    """What can be simulated."""
    from rollmuxd.sim.workloads import names

    _list(names(), as_json=as_json)


@sim.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def policies(*, as_json: bool) -> None:
    """Who can be compared."""
    from rollmuxd.sim.policies import known_policies

    _list([(name, policy.summary) for name, policy in known_policies().items()], as_json=as_json)


def _list(told: list[tuple[str, str]], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(dict(told)))
        return
    table(["NAME", "WHAT"], [[name, summary] for name, summary in told], "none")


@sim.command()
@_describes_a_workload
@click.option("--policies", "names", default="rollmux,solo", show_default=True, help="See: rollmuxd sim policies.")
@click.option("--seeds", default=1, show_default=True, type=click.IntRange(1), help="So many draws, 0 and up.")
@click.option("--max-group", default=5, show_default=True, type=click.IntRange(1), help="Jobs in a group at most.")
@click.option("--jobs", "processes", default=1, show_default=True, type=click.IntRange(1), help="Processes to use.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a report with pictures.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def compare(
    *,
    options: Options,
    workload: str,
    fidelity: str,
    move_s: int | None,
    names: str,
    seeds: int,
    max_group: int,
    processes: int,
    html: Path | None,
    as_json: bool,
) -> None:
    """Several policies on the same draws, in both accountings, with paired differences."""
    from rollmuxd.cli.sim.processes import run_all
    from rollmuxd.sim import compare as runs
    from rollmuxd.sim import report, tables

    asked = [name for name in (part.strip() for part in names.split(",")) if name]
    if not asked:
        raise click.UsageError("--policies names none")
    some = runs.tasks(workload, options, asked, fidelity, range(seeds), max_group, move_s)
    runs.check(some)
    if html is not None:  # better before hours of runs than after them
        report.check()
        _writable(html)
    found = []
    with Bar("runs", len(some)) as advance:
        for task, outcome in run_all(some, processes):
            found.append((task, outcome))
            advance(len(found))
    outcomes = runs.in_order(some, found)
    if html is not None:
        _write_html(html, outcomes, f"{workload}: {', '.join(asked)}")
    if as_json:
        head = {
            "workload": workload,
            "fidelity": fidelity,
            "seeds": seeds,
            "slo": options.slo,
            "prices": options.prices,
        }
        rows = {"policies": tables.summary(outcomes), "paired": tables.paired(outcomes, asked[0])}
        click.echo(json.dumps({**head, "switch": options.switch, "sync": options.sync, **rows}))
        return
    from rollmuxd.cli.sim.table import render

    render(outcomes)


@sim.command()
@_describes_a_workload
@click.option("--policy", "name", default="rollmux", show_default=True, help="See: rollmuxd sim policies.")
@click.option("--seed", default=0, show_default=True, help="Of all that is drawn.")
@click.option("--accounting", type=click.Choice(["paper", "work"]), default="work", show_default=True)
@click.option("--facts", type=click.Path(dir_okay=False, path_type=Path), help="Write every fact, one JSON a line.")
@click.option("--trace", type=click.Path(dir_okay=False, path_type=Path), help="Write a trace for Perfetto.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def run(
    *,
    options: Options,
    workload: str,
    fidelity: str,
    move_s: int | None,
    name: str,
    seed: int,
    accounting: str,
    facts: Path | None,
    trace: Path | None,
    as_json: bool,
) -> None:
    """One policy, one draw, one accounting: with its history, where asked."""
    from rollmuxd.sim import compare as runs
    from rollmuxd.sim import record, tables

    some = runs.tasks(workload, options, [name], fidelity, [seed], move_s=move_s)
    (task,) = (one for one in some if one.accounting == accounting)
    if (facts or trace) and not runs.has_facts(task):
        raise click.UsageError(f"{name} is computed beside the scheduler, and has no facts: no --facts, no --trace")
    runs.check([task])
    for path in (facts, trace):
        if path is not None:
            _writable(path)
    drawn = runs.draw(task)
    with Bar("jobs", len(drawn.jobs)) as advance:
        outcome = record.run(task, drawn, facts=facts, trace=trace, progress=advance)
    if as_json:
        row = tables.summary([outcome])[0]
        more = {"events": outcome.events, "facts": outcome.facts, "facts_digest": outcome.facts_digest}
        click.echo(json.dumps({"workload": workload, "seed": seed, **row, **more, "wall_s": outcome.wall_s}))
        return
    from rollmuxd.cli.sim.table import render

    render([outcome])
    if outcome.facts:
        click.echo(
            f"{outcome.events:,} inputs, {outcome.facts:,} facts in {outcome.wall_s:.1f} s; SHA-256 of the facts:"
        )
        click.echo(outcome.facts_digest)


def _writable(path: Path) -> None:
    """Raise OSError for what cannot be written, before the run rather than after it. Leaves what is there."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: there is no folder {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise PermissionError(f"{path} cannot be written: this user may not")


def _write_html(path: Path, outcomes: list[Outcome], title: str) -> None:
    from rollmuxd.sim import report

    command = shlex.join(["rollmuxd", *sys.argv[1:]])
    report.write(path, outcomes, title=title, command=command)
    click.echo(f"wrote {path}", err=True)
