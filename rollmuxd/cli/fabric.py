"""``rollmuxd fabric``: optical switches between nodes."""

from __future__ import annotations

from typing import Any

import click

from rollmuxd.cli.common import Call, part, table, talks


@click.group()
def fabric() -> None:
    """Optical switches: show, plan, degrade, restore."""


@fabric.command()
@talks
def show(call: Call) -> None:
    """Each switch, and the circuits that there are."""
    views = list(call.items("/v1/fabrics"))

    def shown(views: list[dict[str, Any]]) -> None:
        table(
            ["FABRIC", "DRIVER", "STATUS", "#CIRCUITS", "#WANTED", "REASON"],
            [
                [
                    view["name"],
                    view["driver"],
                    view["status"],
                    "?" if view.get("circuits") is None else len(view["circuits"]),
                    len(view["wanted"]),
                    view.get("reason"),
                ]
                for view in views
            ],
            "no switches; add [[fabric]] to rollmux.toml",
        )
        circuits = [(view["name"], circuit) for view in views for circuit in view.get("circuits") or ()]
        if circuits:
            click.echo()
            _circuits([["", name, circuit] for name, circuit in circuits])

    call.answer_list(views, shown)


@fabric.command()
@talks
def plan(call: Call) -> None:
    """What each switch has to change for the slots that are held now; nothing is changed by asking."""
    plans = [_plan(view) for view in call.items("/v1/fabrics")]

    def shown(plans: list[dict[str, Any]]) -> None:
        rows = [
            [sign, plan["name"], circuit]
            for plan in plans
            for sign, key in (("+", "add"), ("keep", "keep"))
            for circuit in plan[key]
        ]
        _circuits(rows)

    call.answer_list(plans, shown)


def _plan(view: dict[str, Any]) -> dict[str, Any]:
    there, wanted = view.get("circuits") or [], view["wanted"]
    return {
        "name": view["name"],
        "degraded": view["degraded"],
        "add": [circuit for circuit in wanted if circuit not in there],
        "keep": [circuit for circuit in wanted if circuit in there],
    }


def _circuits(rows: list[list[Any]]) -> None:
    table(
        ["", "FABRIC", "FROM", "#PORT", "TO", "#PORT"],
        [
            [sign, name, circuit["from_node"], circuit["from_port"], circuit["to_node"], circuit["to_port"]]
            for sign, name, circuit in rows
        ],
        "no held slot wants a circuit",
    )


def _said(view: dict[str, Any]) -> None:
    reason = f" ({view['reason']})" if view.get("reason") else ""
    click.echo(f"{view['name']}: {view['status']}{reason}")


@fabric.command()
@click.argument("fabric")
@click.option("--reason", default="", help="Kept in the journal.")
@talks
def degrade(call: Call, fabric: str, reason: str) -> None:
    """Leave a switch alone: everything travels over the electrical network until it is restored, over restarts too."""
    call.answer(call.post(f"/v1/fabrics/{part(fabric)}/degrade", {"reason": reason}), _said)


@fabric.command()
@click.argument("fabric")
@talks
def restore(call: Call, fabric: str) -> None:
    """Set a switch's circuits again."""
    call.answer(call.post(f"/v1/fabrics/{part(fabric)}/restore"), _said)
