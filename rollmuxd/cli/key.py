"""``rollmuxd key``: API keys."""

from __future__ import annotations

from typing import Any

import click

from rollmuxd.cli.calls import Call, part, table, talks


@click.group()
def key() -> None:
    """API keys: add, list, revoke."""


@key.command()
@click.argument("owner")
@click.argument("user")
@click.option("--role", type=click.Choice(["admin", "lead", "user", "viewer"]), default="user", help="Default: user.")
@talks
def add(call: Call, owner: str, user: str, role: str) -> None:
    """Make a key for a user of an owner (a team). Its secret is shown this once."""

    def show(view: dict[str, Any]) -> None:
        click.echo(view["secret"])
        click.echo(f"key {view['key']} of {view['owner']}/{view['user']}, {view['role']}; not shown again", err=True)

    call.answer(call.post("/v1/keys", {"owner": owner, "user": user, "role": role}), show)


@key.command("list")
@talks
def list_(call: Call) -> None:
    """All keys, without their secrets."""
    keys = list(call.items("/v1/keys"))

    def show(keys: list[dict[str, Any]]) -> None:
        table(
            ["KEY", "OWNER", "USER", "ROLE", "CREATED", "REVOKED"],
            [
                [view["key"], view["owner"], view["user"], view["role"], view["created_at"], view["revoked"]]
                for view in keys
            ],
            "no keys; on the Unix socket none is needed",
        )

    call.answer_list(keys, show)


@key.command()
@click.argument("key")
@talks
def revoke(call: Call, key: str) -> None:
    """Make a key invalid, from now on."""
    call.answer(call.delete(f"/v1/keys/{part(key)}"), lambda _: click.echo(f"{key}: revoked"))
