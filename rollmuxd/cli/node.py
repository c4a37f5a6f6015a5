"""``rollmuxd node``: sets of GPUs that are shared as a unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from rollmuxd.cli.common import Call, Columns, ask, listing, part, show_fields, talks


@click.group()
def node() -> None:
    """Nodes: list, show, drain, undrain, declare-clean."""


@node.command("list")
@click.option("--pool", help="Only those of this pool.")
@talks
def list_(call: Call, pool: str | None) -> None:
    """All nodes, which jobs are placed there, and which of them hold their GPUs."""
    columns: Columns = {
        "NODE": "node",
        "POOLS": "pools",
        "STATUS": "status",
        "GROUP": "group",
        "GPUS": lambda view: f"{len(view['gpus'])} {view['gpu_type']}".strip(),
        "JOBS": pinned,
        "HELD BY": lambda view: sorted({_holder(view, gpu) for gpu in view["gpus"] if gpu["holder"]}),
        "STATES": _states,
        "REASON": "reason",
    }
    call.answer_rows("/v1/nodes", columns, "no nodes; add hosts to rollmux.toml", pool=pool)


@node.command()
@click.argument("node")
@talks
def show(call: Call, node: str) -> None:
    """One node and its GPUs."""
    call.answer(call.get(f"/v1/nodes/{part(node)}"), _show)


def _show(view: dict[str, Any]) -> None:
    show_fields(view, gpus=None, jobs=pinned(view), states=_states(view))
    click.echo()
    columns: Columns = {"GPU": "gpu", "HELD BY": "holder", "BYTES OF": "dirty_by"}
    seen = {"#USED GB": "used_gb", "PROCESSES": "processes", "OBSERVED": "observed_at"}
    listing(view["gpus"], {**columns, **seen}, "no GPUs")


def pinned(view: dict[str, Any]) -> list[str]:
    """The jobs that are placed on a node or host, as people know them."""
    return [f"{job['name']} ({job['job']})" if job.get("name") else str(job["job"]) for job in view.get("jobs", [])]


def _holder(view: dict[str, Any], gpu: dict[str, Any]) -> str:
    """The job that holds a GPU, by its name where the caller may know it. The bytes there are its own meanwhile."""
    names = {job["job"]: job["name"] for job in view.get("jobs", [])}
    return str(names.get(gpu["dirty_by"]) or gpu["dirty_by"] or gpu["holder"])


def _states(view: dict[str, Any]) -> dict[str, str]:
    """What is loaded or parked there, by the names of jobs that are placed there, else by their ids."""
    names = {job["job"]: job["name"] for job in view.get("jobs", []) if job.get("name")}
    states = ((*key.partition(" "), status) for key, status in view.get("states", {}).items())  # "j1 rollout"
    return {f"{names.get(job, job)}{space}{pool}": status for job, space, pool, status in states}


def _tell_who_stays(view: dict[str, Any], *, evicted: bool) -> None:
    """After a drain: the jobs that will get nothing there, what becomes of them, and what can be done about it."""
    stay = pinned(view)
    if not stay:
        return
    if evicted:
        click.echo(f"ending: {', '.join(stay)}")
    else:
        click.echo(f"placed there: {', '.join(stay)}")
        click.echo("movable jobs go where there is room, the others wait until it is undrained (--evict ends them)")


def _said(verb: str, view: dict[str, Any]) -> str:
    if verb == "undrain" and view["status"] == "unknown" and not view.get("reason"):
        return f"{view['node']}: undrained; it is used again once it was looked at"
    reason = f" ({view['reason']})" if view.get("reason") else ""
    return f"{view['node']}: {view['status']}{reason}"


def add_drains(group: click.Group, noun: str, drains: str, said: Callable[[str, dict[str, Any]], str]) -> None:
    """Give a group of commands ``drain`` (``drains`` is its help), ``undrain`` and ``declare-clean``.

    ``said`` is the line that answers one of them: of its name, and of the daemon's view of the node or host.
    """
    which = click.argument("name", metavar=noun.upper())

    def post(call: Call, name: str, verb: str, body: dict[str, Any], *, evicted: bool | None = None) -> None:
        def show(view: dict[str, Any]) -> None:
            click.echo(said(verb, view))
            if evicted is not None:
                _tell_who_stays(view, evicted=evicted)

        call.answer(call.post(f"/v1/{noun}s/{part(name)}/{verb}", body), show)

    @group.command(help=drains)
    @which
    @click.option("--evict", is_flag=True, help="End the jobs that are pinned there.")
    @click.option("--reason", help="Kept in the journal.")
    @talks
    def drain(call: Call, name: str, evict: bool, reason: str | None) -> None:
        body = {"evict": evict, **({} if reason is None else {"reason": reason})}
        post(call, name, "drain", body, evicted=evict)

    @group.command(help=f"Use a {noun} again.")
    @which
    @talks
    def undrain(call: Call, name: str) -> None:
        post(call, name, "undrain", {})

    about = f"Declare that nothing of any job is left on a {noun}'s GPUs. Your word replaces the proof."

    @group.command("declare-clean", help=about)
    @which
    @click.option("--reason", default="", help="How you know; it is kept in the journal.")
    @click.option("--yes", is_flag=True, help="Do not ask.")
    @talks
    def declare_clean(call: Call, name: str, reason: str, yes: bool) -> None:
        ask(f"Nothing of any job is left on the GPUs of {name}?", yes=yes)
        post(call, name, "declare-clean", {"reason": reason})


add_drains(
    node, "node", "Start nothing new on a node; it is drained when its slots have ended and its GPUs are clean.", _said
)
