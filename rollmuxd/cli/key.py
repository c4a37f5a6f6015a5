"""``rollmuxd key``: API keys."""

from __future__ import annotations

from typing import Any

import click

from rollmuxd.cli.common import Call, Columns, part, talks
from rollmuxd.cli.feed import Span


@click.group()
def key() -> None:
    """API keys: add, list, revoke."""


@key.command()
@click.argument("owner")
@click.argument("user")
@click.option("--role", type=click.Choice(["admin", "lead", "user", "viewer"]), default="user", help="Default: user.")
@click.option("--expires", type=Span(), metavar="TIME", help="When it ceases to work: 30d, 12h, 90m, 600s.")
@talks
def add(call: Call, owner: str, user: str, role: str, expires: int | None) -> None:
    """Make a key for a user of an owner (a team). Its secret is shown this once."""

    def show(view: dict[str, Any]) -> None:
        click.echo(view["secret"])
        until = f", expires {view['expires_at']}" if view.get("expires_at") else ""
        click.echo(
            f"key {view['key']} of {view['owner']}/{view['user']}, {view['role']}{until}; not shown again", err=True
        )

    body: dict[str, Any] = {"owner": owner, "user": user, "role": role}
    if expires is not None:
        body["expires_s"] = expires
    call.answer(call.post("/v1/keys", body), show)


@key.command("list")
@talks
def list_(call: Call) -> None:
    """All keys, without their secrets."""
    columns: Columns = {
        "KEY": "key",
        "OWNER": "owner",
        "USER": "user",
        "ROLE": "role",
        "STATUS": lambda view: "revoked" if view["revoked"] else "expired" if view.get("expired") else "good",
        "CREATED": "created_at",
        "EXPIRES": "expires_at",
    }
    call.answer_rows("/v1/keys", columns, "no keys; on the Unix socket none is needed")


@key.command()
@click.argument("key")
@talks
def revoke(call: Call, key: str) -> None:
    """Make a key invalid, from now on."""
    call.answer(call.delete(f"/v1/keys/{part(key)}"), lambda _: click.echo(f"{key}: revoked"))
