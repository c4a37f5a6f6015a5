"""``rollmuxd group``: jobs and the nodes that they share."""

from __future__ import annotations

from typing import Any

import click

from rollmuxd.cli.common import Call, Columns, cell, fields, part, table, talks


@click.group()
def group() -> None:
    """Co-execution groups: list, show."""


@group.command("list")
@talks
def list_(call: Call) -> None:
    """All groups."""
    groups = list(call.items("/v1/groups"))

    columns: Columns = {"GROUP": "group", "JOBS": lambda view: list(names(view).values()), "NODES": "nodes"}
    figures = {"#PERIOD s": "period_s", "#COST PER HOUR": "cost_per_hour", "REASON": "reason"}
    call.answer_rows(groups, {**columns, **figures}, "no groups: no job has a placement")


def names(view: dict[str, Any]) -> dict[str, str]:
    """A group's jobs by their names; those of other owners are known by their ids alone."""
    told = {turn["job"]: turn["name"] for turn in view["schedule"] if turn["name"]}
    return {job: told.get(job, job) for job in view["jobs"]}


@group.command()
@click.argument("group")
@talks
def show(call: Call, group: str) -> None:
    """One group: its members against their bounds, and its schedule, the cyclic order of turns."""
    call.answer(call.get(f"/v1/groups/{part(group)}"), lambda view: _show(call, view))


def _show(call: Call, view: dict[str, Any]) -> None:
    fields(
        {
            "group": view["group"],
            "nodes": view["nodes"],
            "period": None if view["period_s"] is None else f"{cell(view['period_s'])} s",
            "cost per hour": view["cost_per_hour"],
            "reason": view.get("reason"),
        }
    )
    click.echo()
    table(
        ["JOB", "OWNER", "STATUS", "NODES", "#ITERATIONS", "#SLOWDOWN", "#PLANNED", "#SLO", "PROMISED", "#CREDIT s"],
        [_member(call, job, name) for job, name in names(view).items()],
        "no jobs",
    )
    click.echo()
    table(
        ["TURN OF", "PHASE", "ROTATION"],
        [[turn["name"] or turn["job"], turn["phase"], turn["rotation"]] for turn in view["schedule"]],
        "an empty schedule",
    )


def _member(call: Call, job: str, name: str) -> list[Any]:
    """A row of one member; of another owner's job there is nothing to see but that it is there."""
    from rollmuxd.client.errors import NotFound

    try:
        view = call.get(f"/v1/jobs/{part(job)}")
    except NotFound:
        return [name, *[None] * 9]
    nodes = dict.fromkeys(node for nodes in view.get("pins", {}).values() for node in nodes)
    return [
        view["name"],
        view["owner"],
        view["status"],
        list(nodes),
        view.get("iterations"),
        view.get("slowdown"),
        view.get("planned_slowdown"),
        view.get("slo"),
        None if view.get("slo") is None else bool(view.get("promised")),
        view.get("credit_s"),
    ]
