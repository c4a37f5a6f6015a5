"""``rollmuxd plan``: what would become of jobs, if they came."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click
import msgspec
from click.core import ParameterSource

from rollmuxd.cli.common import Call, Columns, Failed, cell, listing, table, talks
from rollmuxd.cli.group import placed_on
from rollmuxd.cli.other_gpus import computed
from rollmuxd.cli.run.job_file import registration_of
from rollmuxd.cli.sim.accounting import Accounting, from_accounting, show_saving
from rollmuxd.client.registration import check_planned_pool


@click.command(short_help="What would become of jobs, if they came; or what sharing would have saved.")
@click.argument("jobs", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--empty", is_flag=True, help="On the nodes that there are, as if no job used them.")
@click.option("--least", is_flag=True, help="Search longer for the fewest nodes; exit 1 where all do not suffice.")
@click.option(
    "--measured-on",
    multiple=True,
    metavar="POOL=GPU",
    help="What the file's seconds are of; for other GPUs they are computed.",
)
@click.option("--model", "model_name", default="qwen2.5-7b", show_default=True, help="What generates.")
@from_accounting
@talks
def plan(
    call: Call,
    jobs: Path | None,
    empty: bool,
    least: bool,
    measured_on: tuple[str, ...],
    model_name: str,
    accounting: Accounting | None,
) -> None:
    """Where the jobs of a TOML file would be placed, at what price, and which jobs that would slow. Nothing changes.

    The table at the end has two readings. One is on nodes that you own, where idle ones cost nothing. The other is on
    the fewest nodes that keep every promise of these jobs.

    \b
    [[jobs]]
    name = "math-7b"
    count = 2                                  # so many alike
    slo = 2.0
    rollout = {nodes = 1, seconds = 120, gpu_gb = 60, ram_gb = 80}
    train = {nodes = 1, seconds = 90}

    Keys are those of rollmuxd.job(). [pools.NAME] with nodes, gpus, gpu_type, gpu_gb, price_per_gpu_hour and ram_gb
    plans on nodes that there are not.

    With --from: what sharing would have saved on jobs that have run, by Slurm's accounting. No daemon is needed.

    \b
    rollmuxd plan --from month.txt --name 'grpo|ppo' --log train.log
    """  # noqa: D301  # click's sign for lines that are not to be filled
    asked = click.get_current_context().get_parameter_source("model_name") is not ParameterSource.DEFAULT
    if asked and not measured_on:
        raise click.UsageError("--model is of use with --measured-on only: nothing else is computed with it")
    if (jobs is None) == (accounting is None):
        raise click.UsageError("give either JOBS (a TOML file of jobs to come) or --from FILE (of jobs that have run)")
    if accounting is not None:
        if empty or least or measured_on:
            raise click.UsageError(
                "--empty, --least and --measured-on are about jobs to come, and --from is about others"
            )
        call.answer(accounting.saving(), show_saving)
        return
    assert jobs is not None
    body = read(jobs)
    if measured_on:
        for line in computed(call, body, jobs, measured_on, model_name):
            click.echo(line, err=True)
    if empty:
        body["on"] = "empty"
    if least:
        body["least"] = True
    view = call.post("/v1/plan", body)
    call.answer(view, show)
    if least and view["least"]["reason"]:
        raise Failed(view["least"]["reason"])


def read(path: Path) -> dict[str, Any]:
    """The body of ``POST /v1/plan`` that a file says. Raises Failed, naming the file, the job and the key."""
    try:
        said = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Failed(f"{path}: {error}") from error
    stray = sorted(said.keys() - {"jobs", "pools", "on"})
    if stray:
        raise Failed(
            f"{path}: {stray[0]} is not a key beside jobs, pools and on; put each job into a table of its own, [[jobs]]"
        )
    if (on := said.get("on", "live")) not in ("live", "empty"):
        raise Failed(f"{path}: on is {on!r}, and it is 'live' (beside what runs) or 'empty' (the nodes without jobs)")
    pools = said.get("pools", {})
    if not isinstance(pools, dict):
        raise Failed(f"{path}: pools is {pools!r}, and it is a table for each pool, [pools.NAME]")
    for name, pool in pools.items():
        try:
            check_planned_pool(f"{path}: [pools.{name}]", pool)
        except (TypeError, ValueError) as error:
            raise Failed(str(error)) from error
    given = said.get("jobs", [])
    if not isinstance(given, list) or not given or not all(isinstance(job, dict) for job in given):
        raise Failed(f"{path}: there are no jobs in it; each is a table [[jobs]] with a name")
    jobs = [body for number, job in enumerate(given, 1) for body in _bodies(path, number, job)]
    return {**said, "jobs": jobs}


def _bodies(path: Path, number: int, job: Mapping[str, Any]) -> list[Any]:
    """The registrations that one table stands for."""
    name, count = job.get("name"), job.get("count", 1)
    if not isinstance(name, str):
        raise Failed(f"{path}: job {number} has no name")
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= 500:
        raise Failed(f"{path}: job {name}: count is {count!r}, and it is 1 to 500")
    table = {"init": False, **{key: value for key, value in job.items() if key not in ("name", "count")}}
    names = [name] if count == 1 else [f"{name}-{copy}" for copy in range(1, count + 1)]
    bodies = [registration_of(f"{path}: job {name}", table, one) for one in names]
    return [msgspec.to_builtins(body) for body in bodies]


def show(view: Mapping[str, Any]) -> None:
    """The plan, for people."""
    where = {
        "live": "beside the jobs that are there",
        "empty": "on the nodes that there are, as if no job used them",
        "pools": "on nodes that there are not",
    }[view["on"]]
    click.echo(f"by policy {view['policy']}, {where}; nothing has changed\n")
    jobs: Columns = {
        "JOB": "name",
        "STATUS": "status",
        "HOW": "admission",
        "BESIDE": lambda job: [other or "another's" for other in job["beside"]],
        "NODES": placed_on,
        "#ALONE s": "solo_s",
        "#ITERATION s": "iteration_s",
        "#SLOWDOWN": "slowdown",
        "#SLO": "slo",
        "#MORE PER HOUR": lambda job: job["cost_per_hour"] if job["pins"] else None,
    }
    listing(view["jobs"], jobs, "no jobs")
    _waiting(view["jobs"])
    if view["slowed"]:
        click.echo()
        slowed: Columns = {"THERE ALREADY": lambda job: job["name"] or job["job"], "#SLOWDOWN NOW": "before"}
        listing(view["slowed"], {**slowed, "#THEN": "after", "#SLO": "slo"}, "")
    click.echo()
    listing(
        view["pools"],
        {"POOL": "pool", "#NODES": "nodes", "#USED NOW": "used_before", "#THEN": "used_after"},
        "no pools",
    )
    click.echo()
    _readings(view)
    click.echo(f"\n{_price(view)}")


def _readings(view: Mapping[str, Any]) -> None:
    """What these jobs cost on nodes that one owns, and on the fewest that one could rent."""
    more, least = view["cost_per_hour_after"] - view["cost_per_hour_before"], view["least"]
    used = [(pool["used_after"] - pool["used_before"], pool["pool"]) for pool in view["pools"]]
    rows = [["nodes that you own, idle ones free", _nodes(used), more, view["cost_alone_per_hour"] - more]]
    if not least["reason"]:
        rented = [(of["nodes"], "+".join(of["pools"])) for of in least["nodes"]]
        saved = least["cost_alone_per_hour"] - least["cost_per_hour"]
        rows.append(["the fewest nodes, all rented", _nodes(rented), least["cost_per_hour"], saved])
    table(["READING", "NODES", "#PER HOUR", "#SAVED PER HOUR"], rows, "")
    if least["reason"]:
        click.echo(f"the fewest nodes: {least['reason']}")
    elif not least["complete"]:
        click.echo("the search for the fewest nodes was ended by its limit of processor time: there may be fewer")


def _nodes(counts: Iterable[tuple[int, str]]) -> str:
    return " and ".join(f"{count} {pools}" for count, pools in counts)


def _waiting(jobs: list[dict[str, Any]]) -> None:
    """Why those wait that do, and what would let them in."""
    for job in jobs:
        if job["status"] not in ("waiting", "refused"):
            continue
        click.echo(f"\n{job['name']} {'would wait' if job['status'] == 'waiting' else 'would be refused'}:")
        for reason in job["reasons"]:
            click.echo(f"  {cell(reason['text'])}")
        for wish in job["wishes"]:
            how = f"once {wish['text']} has ended" if wish["code"] == "departure" else f"with {wish['text']}"
            click.echo(f"  it would start {how}")


def _price(view: Mapping[str, Any]) -> str:
    placed = [job for job in view["jobs"] if job["pins"]]
    more = view["cost_per_hour_after"] - view["cost_per_hour_before"]
    said = f"{len(placed)} of {len(view['jobs'])} would have a place, for {cell(more)} more per hour"
    alone = view["cost_alone_per_hour"]
    if alone:
        said += f"; on nodes of their own these would cost {cell(alone)}"
    return f"{said} (all nodes in use: {cell(view['cost_per_hour_after'])} per hour)"
