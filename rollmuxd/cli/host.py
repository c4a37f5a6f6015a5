"""``rollmuxd host``: machines that backends reach."""

from __future__ import annotations

from typing import Any

import click

from rollmuxd.cli.common import Call, Columns, cell, part, show_fields, talks
from rollmuxd.cli.node import add_drains, pinned


@click.group()
def host() -> None:
    """Hosts: list, show, drain, undrain, declare-clean."""


@host.command("list")
@talks
def list_(call: Call) -> None:
    """All hosts, and what of their RAM is reserved for parked states."""
    columns: Columns = {"HOST": "host", "BACKEND": "backend", "REACHABLE": "reachable", "RAM RESERVED GB": _reserved}
    call.answer_rows("/v1/hosts", {**columns, "NODES": "nodes"}, "no hosts; add some to rollmux.toml")


def _reserved(view: dict[str, Any]) -> str:
    return f"{cell(view['ram_reserved_gb'])} of {cell(view['ram_gb'])}"


@host.command()
@click.argument("host")
@talks
def show(call: Call, host: str) -> None:
    """One host."""
    call.answer(call.get(f"/v1/hosts/{part(host)}"), lambda view: show_fields(view, jobs=pinned(view)))


_SAID = {
    "drain": "draining",
    "undrain": "undrained, and used again once they were looked at:",
    "declare-clean": "declared clean",
}
add_drains(
    host,
    "host",
    "Start nothing new on a host's nodes, and let what is parked in its RAM go.",
    lambda verb, view: f"{view['host']}: {_SAID[verb]} {cell(view['nodes'])}",
)
