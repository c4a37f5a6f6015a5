"""``rollmuxd host``: machines that backends reach."""

from __future__ import annotations

from typing import Any

import click

from rollmuxd.cli.common import Call, Columns, ask, cell, fields, part, talks
from rollmuxd.cli.completion import names_of
from rollmuxd.cli.node import pinned, tell_who_stays


@click.group()
def host() -> None:
    """Hosts: list, show, drain, undrain, declare-clean."""


@host.command("list")
@talks
def list_(call: Call) -> None:
    """All hosts, and what of their RAM is reserved for parked states."""
    hosts = list(call.items("/v1/hosts"))

    columns: Columns = {"HOST": "host", "BACKEND": "backend", "REACHABLE": "reachable", "RAM RESERVED GB": _reserved}
    call.answer_rows(hosts, {**columns, "NODES": "nodes"}, "no hosts; add some to rollmux.toml")


def _reserved(view: dict[str, Any]) -> str:
    return f"{cell(view['ram_reserved_gb'])} of {cell(view['ram_gb'])}"


@host.command()
@click.argument("host", shell_complete=names_of("/v1/hosts", "host"))
@talks
def show(call: Call, host: str) -> None:
    """One host."""
    call.answer(
        call.get(f"/v1/hosts/{part(host)}"),
        lambda view: fields(
            {
                "host": view["host"],
                "backend": view["backend"],
                "reachable": view["reachable"],
                "RAM": f"{_reserved(view)} GB reserved",
                "nodes": view["nodes"],
                "jobs": pinned(view),
                **({"ends": view["ends_at"]} if view.get("ends_at") else {}),
            }
        ),
    )


def _said(verb: str) -> Any:
    return lambda view: click.echo(f"{view['host']}: {verb} {cell(view['nodes'])}")


@host.command()
@click.argument("host", shell_complete=names_of("/v1/hosts", "host"))
@click.option("--evict", is_flag=True, help="End the jobs that are pinned to its nodes.")
@click.option("--reason", help="Kept in the journal.")
@talks
def drain(call: Call, host: str, evict: bool, reason: str | None) -> None:
    """Start nothing new on a host's nodes, and let what is parked in its RAM go."""

    def said(view: dict[str, Any]) -> None:
        _said("draining")(view)
        tell_who_stays(view, evicted=evict)

    body = {"evict": evict, **({} if reason is None else {"reason": reason})}
    call.answer(call.post(f"/v1/hosts/{part(host)}/drain", body), said)


@host.command()
@click.argument("host", shell_complete=names_of("/v1/hosts", "host"))
@talks
def undrain(call: Call, host: str) -> None:
    """Use a host's nodes again."""
    call.answer(
        call.post(f"/v1/hosts/{part(host)}/undrain"), _said("undrained, and used again once they were looked at:")
    )


@host.command("declare-clean")
@click.argument("host", shell_complete=names_of("/v1/hosts", "host"))
@click.option("--reason", default="", help="How you know; it is kept in the journal.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@talks
def declare_clean(call: Call, host: str, reason: str, yes: bool) -> None:
    """Declare that nothing of any job is left on a host's GPUs. Your word replaces the proof."""
    ask(f"Nothing of any job is left on any GPU of {host}?", yes=yes)
    call.answer(call.post(f"/v1/hosts/{part(host)}/declare-clean", {"reason": reason}), _said("declared clean"))
