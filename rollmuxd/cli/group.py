"""``rollmuxd group``: jobs and the nodes that they share."""

from __future__ import annotations

from typing import Any

import click

from rollmuxd.cli.common import Call, Columns, listing, part, show_fields, talks


@click.group()
def group() -> None:
    """Co-execution groups: list, show."""


@group.command("list")
@talks
def list_(call: Call) -> None:
    """All groups."""
    columns: Columns = {"GROUP": "group", "JOBS": lambda view: list(names(view).values()), "NODES": "nodes"}
    figures = {"#PERIOD s": "period_s", "#COST PER HOUR": "cost_per_hour", "REASON": "reason"}
    call.answer_rows("/v1/groups", {**columns, **figures}, "no groups: no job has a placement")


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
    show_fields(view, jobs=None, schedule=None)
    click.echo()
    # of another owner's job there is nothing to see but that it is there
    seen = {of["job"]: of for of in call.items("/v1/jobs", over="false")}
    columns: Columns = {"JOB": "name", "OWNER": "owner", "STATUS": "status", "NODES": placed_on}
    figures: Columns = {"#ITERATIONS": "iterations", "#SLOWDOWN": "slowdown", "#PLANNED": "planned_slowdown"}
    promise: Columns = {"#SLO": "slo", "PROMISED": _promised, "#CREDIT s": "credit_s"}
    members = [seen.get(job, {"name": name}) for job, name in names(view).items()]
    listing(members, {**columns, **figures, **promise}, "no jobs")
    click.echo()
    turns: Columns = {"TURN OF": lambda turn: turn["name"] or turn["job"], "PHASE": "phase", "ROTATION": "rotation"}
    listing(view["schedule"], turns, "an empty schedule")


def placed_on(view: dict[str, Any]) -> list[str]:
    """The nodes of a job, each once."""
    return list(dict.fromkeys(node for nodes in view.get("pins", {}).values() for node in nodes))


def _promised(view: dict[str, Any]) -> bool | None:
    return None if view.get("slo") is None else bool(view.get("promised"))
