"""``rollmuxd sim``: what would it have cost, and would every job have kept its bound?"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any, Final

import click

from rollmuxd.cli.common import Failed, answer, needs_numpy, print_json, table
from rollmuxd.cli.progress import bar
from rollmuxd.cli.sim.accounting import Bounds
from rollmuxd.cli.sim.fabric import fabric
from rollmuxd.cli.sim.processes import run_all
from rollmuxd.cli.sim.rollout import rollout
from rollmuxd.cli.sim.table import render
from rollmuxd.cli.sim.validate import calibrate, validate
from rollmuxd.sim import Violation, tables
from rollmuxd.sim import compare as runs
from rollmuxd.sim.policies import bound, known_policies
from rollmuxd.sim.workload import Options
from rollmuxd.sim.workloads import catalogue


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


#: an option whose help says its default
_shown: Final = partial(click.option, show_default=True)
_WORKLOAD = (
    click.option("--workload", "-w", required=True, metavar="NAME", help="See: rollmuxd sim workloads."),
    _shown(
        "--fidelity",
        type=click.Choice(["cost", "phase", "engine", "network"]),
        default="cost",
        help="cost: arrivals and departures only. phase: every phase. engine: every request inside rollouts. "
        "network: training and sync as flows between hosts, too.",
    ),
    click.option(
        "--topology",
        type=click.Choice(["fat-tree", "osub4", "topoopt", "mixnet", "mixnet-striped", "rfabric"]),
        help="Of fidelity network: what lies between hosts. Default: fat-tree.",
    ),
    click.option(
        "--t-ocs",
        "t_ocs_ms",
        type=click.FloatRange(0, 1e6),
        metavar="MS",
        help="Of fidelity network: what changing circuits takes. Default: 20.",
    ),
    _shown(
        "--slo", type=Bounds(), default="1:2", help="SLOs are drawn uniformly between these; one number for all; none."
    ),
    _shown("--prices", default="artifact", help="artifact (H20=1.76,H800=5.28), or others per GPU-hour: H20=1.85."),
    _shown(
        "--switch",
        default="none",
        help="none: switching is free, as the paper plans. table: by model size. Or seconds for every load.",
    ),
    _shown(
        "--sync",
        type=click.Choice(["none", "table", "flat", "two", "rails"]),
        default="none",
        help="none: new weights are handed on within training, as the trace has it. Otherwise by model size. table: as "
        "the paper measured. flat, two, rails: computed, for a flat all-gather, for the paper's two stages, or for two "
        "stages at once.",
    ),
    _shown(
        "--sync-place",
        type=click.Choice(["within", "phase", "between"]),
        default="phase",
        help="What the weights hold on their way: the training slot, both pools in a phase of its own, or no GPU.",
    ),
    _shown("--ram", "ram_gb", default=2000.0, help="Host RAM per node, GB."),
    click.option(
        "--nodes", type=Assigned(), multiple=True, help="Nodes that there are: POOL=COUNT. Default: bought on demand."
    ),
    click.option(
        "--gpu",
        "gpus",
        type=Assigned(),
        multiple=True,
        metavar="POOL=TYPE",
        help="Another GPU type in a pool: what phases take there is computed. Its price: --prices.",
    ),
    click.option(
        "--move-s",
        type=click.IntRange(0, 86_400),
        metavar="SECONDS",
        help="What a move takes, for policies that move jobs. Default: 30.",
    ),
    click.option("--fillers", default=0, metavar="N", help="So many fillers work on idle nodes (phase fidelity)."),
    click.option("--take", "jobs", default=0, metavar="N", help="So many jobs at most."),
    click.option("--data", default="", metavar="DIR", help="Where large traces lie (default: $ROLLMUX_DATA)."),
    click.option("--set", "more", type=Assigned(), multiple=True, help="A setting of the workload itself."),
)


def _describes_a_workload(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that say what is to be simulated; the command gets ``options``."""

    @wraps(command)
    def wrapped(**given: Any) -> Any:
        fidelity = given["fidelity"]
        for option, key in (("--topology", "topology"), ("--t-ocs", "t_ocs_ms")):
            if given[key] is None:
                del given[key]
            elif fidelity != "network":
                raise click.UsageError(f"{option} says nothing at --fidelity {fidelity}; add --fidelity network")
        if given["fillers"] and fidelity == "cost":
            raise click.UsageError("--fillers says nothing at --fidelity cost; add --fidelity phase")
        if given["gpus"] or fidelity in ("engine", "network"):
            needs_numpy()
        prices, switch = given["prices"], given["switch"]
        pairs = [] if prices == "artifact" else [part.partition("=") for part in prices.split(",")]
        for kind, equals, _ in pairs:
            if not equals:
                raise click.UsageError(f"the price of {kind} is missing; write {kind.strip()}=1.85")
        given["prices"] = {kind.strip(): _number(price, f"the price of {kind}") for kind, _, price in pairs}
        if switch not in ("none", "table"):
            given["switch"] = round(_number(switch, "--switch", "none, table, or a finite number of seconds") * 1000)
        given |= {"gpus": dict(given["gpus"]), "more": dict(given["more"])}
        given["nodes"] = {name: _count(count, f"--nodes {name}") for name, count in given["nodes"]}
        options = Options(**{key: given.pop(key) for key in Options.__struct_fields__ if key in given})
        return _plainly(lambda: command(options=options, **given))

    for option in reversed(_WORKLOAD):
        wrapped = option(wrapped)
    return wrapped


def _number(text: str, what: str, needed: str = "a finite number") -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise click.UsageError(f"{what} is {text!r}: {needed} is needed")
    return value


def _count(text: str, what: str) -> int:
    value = _number(text, what)
    if value != int(value):
        raise click.UsageError(f"{what} is {text!r}, and a whole number is needed")
    return int(value)


def _plainly(call: Callable[[], Any]) -> Any:
    """What the simulator refuses is one line; a broken promise is a bug of ours, and says how to find it."""
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


sim.add_command(fabric)


sim.add_command(rollout)
sim.add_command(validate)
sim.add_command(calibrate)


@sim.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def workloads(*, as_json: bool) -> None:
    """What can be simulated."""
    _list({name: summary for name, (summary, _) in catalogue().items()}, as_json=as_json)


@sim.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def policies(*, as_json: bool) -> None:
    """Policies that can be compared."""
    _list({name: policy.summary for name, policy in known_policies().items()}, as_json=as_json)


def _list(told: dict[str, str], *, as_json: bool) -> None:
    answer(told, lambda told: table(["NAME", "WHAT"], list(told.items()), "none"), as_json=as_json)


@sim.command()
@_describes_a_workload
@_shown("--policies", "names", default="rollmux,solo", help="See: rollmuxd sim policies.")
@_shown("--seeds", default=1, type=click.IntRange(1), help="So many draws, 0 and up.")
@_shown("--max-group", default=5, type=click.IntRange(1), help="Jobs in a group at most.")
@_shown("--jobs", "processes", default=1, type=click.IntRange(1), help="Processes to use.")
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
    as_json: bool,
) -> None:
    """Several policies on the same draws, in both accountings, with paired differences."""
    asked = [name for name in (part.strip() for part in names.split(",")) if name]
    if not asked:
        raise click.UsageError("--policies names none")
    some = runs.tasks(workload, options, asked, fidelity, range(seeds), max_group, move_s)
    runs.check(some)
    found = []
    with bar("runs", len(some)) as advance:
        for task, outcome in run_all(some, processes):
            found.append((task, outcome))
            advance(len(found))
    outcomes = runs.in_order(some, found)
    if as_json:
        head = {
            "workload": workload,
            "fidelity": fidelity,
            "seeds": seeds,
            "slo": options.slo,
            "prices": options.prices or "artifact",
        }
        rows = {
            "policies": tables.summary(outcomes),
            "paired": tables.paired(outcomes, asked[0]),
            "runs": tables.each(outcomes),
        }
        told: dict[str, Any] = {"switch": options.switch, "sync": options.sync, "sync_place": options.sync_place}
        if options.gpus:
            told["gpus"] = options.gpus
        if fidelity == "network":
            told |= {"topology": options.topology, "t_ocs_ms": options.t_ocs_ms}
        print_json({**head, **told, **rows})
        return
    render(outcomes)


@sim.command()
@_describes_a_workload
@_shown("--policy", "name", default="rollmux", help="See: rollmuxd sim policies.")
@_shown("--seed", default=0, help="Of all that is drawn.")
@_shown("--accounting", type=click.Choice(["paper", "work"]), default="work")
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
    some = runs.tasks(workload, options, [name], fidelity, [seed], move_s=move_s)
    (task,) = (one for one in some if one.accounting == accounting)
    if (facts or trace) and bound(name) is not None:
        raise click.UsageError(f"{name} is computed beside the scheduler, and has no facts: no --facts, no --trace")
    runs.check([task])
    for path in (facts, trace):
        if path is not None:
            writable(path)
    drawn = runs.draw(task)
    with bar("jobs", len(drawn.jobs)) as advance:
        outcome = runs.recorded(task, drawn, facts=facts, trace=trace, progress=advance)
    if as_json:
        row = tables.summary([outcome])[0]
        more: dict[str, Any] = {} if outcome.network is None else {"network": outcome.network}
        if outcome.harvest is not None:
            more["harvest"] = tables.harvest(outcome.harvest)
            more["pools_node_h"] = {
                pool.name: {"in_groups": pool.bought_node_ms / 3_600_000, "busy": pool.busy_node_ms / 3_600_000}
                for pool in outcome.pools
            }
        more |= {"events": outcome.events, "facts": outcome.facts, "facts_digest": outcome.facts_digest}
        print_json({"workload": workload, "seed": seed, **row, **more, "wall_s": outcome.wall_s})
        return
    render([outcome])
    if outcome.harvest is not None:
        click.echo(tables.harvest_line(outcome.harvest))
    if outcome.facts:
        click.echo(
            f"{outcome.events:,} inputs, {outcome.facts:,} facts in {outcome.wall_s:.1f} s; SHA-256 of the facts:"
        )
        click.echo(outcome.facts_digest)


def writable(path: Path) -> None:
    """Raise OSError for what cannot be written, before the run rather than after it. Leaves what is there."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: there is no folder {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise PermissionError(f"{path} cannot be written: this user may not")
