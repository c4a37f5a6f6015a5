"""``rollmuxd group``: jobs and the nodes that they share."""

from __future__ import annotations

from typing import Any

import click

from rollmuxd.cli.calls import Call, cell, fields, part, table, talks
from rollmuxd.cli.completion import names_of


@click.group()
def group() -> None:
    """Co-execution groups: list, show."""


@group.command("list")
@talks
def list_(call: Call) -> None:
    """All groups."""
    groups = list(call.items("/v1/groups"))

    def show(groups: list[dict[str, Any]]) -> None:
        table(
            ["GROUP", "JOBS", "NODES", "#PERIOD s", "#COST PER HOUR", "REASON"],
            [
                [
                    view["group"],
                    view["jobs"],
                    view["nodes"],
                    view["period_s"],
                    view["cost_per_hour"],
                    view.get("reason"),
                ]
                for view in groups
            ],
            "no groups: no job has a placement",
        )

    call.answer_list(groups, show)


@group.command()
@click.argument("group", shell_complete=names_of("/v1/groups", "group"))
@talks
def show(call: Call, group: str) -> None:
    """One group and its wheel: the cyclic order of visits."""
    call.answer(call.get(f"/v1/groups/{part(group)}"), _show)


def _show(view: dict[str, Any]) -> None:
    fields(
        {
            "group": view["group"],
            "jobs": view["jobs"],
            "nodes": view["nodes"],
            "period": None if view["period_s"] is None else f"{cell(view['period_s'])} s",
            "cost per hour": view["cost_per_hour"],
            "reason": view.get("reason"),
        }
    )
    click.echo()
    table(
        ["VISIT OF", "PHASE", "#TURN"],
        [[visit["name"], visit["phase"], visit["turn"]] for visit in view["wheel"]],
        "an empty wheel",
    )
