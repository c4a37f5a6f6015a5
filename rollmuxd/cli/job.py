"""``rollmuxd job``: RL post-training jobs."""

from __future__ import annotations

import math
import re
import time
from typing import Any

import click

from rollmuxd.cli.common import Call, Failed, cell, fields, part, printable, table, talks
from rollmuxd.cli.completion import names_of
from rollmuxd.cli.logs import logs

OVER = ("ended", "lost")
PLACED = ("probing", "admitted")
#: the reasons of runs that came to their own end: the loop's, its process's, and that of `rollmuxd run`'s command
WELL = re.compile(r"finished|its process ended|.* ended with exit status 0|", re.DOTALL)


@click.group()
def job() -> None:
    """Jobs: list, show, explain, logs, pause, resume, end, reinstate, wait."""


def why(view: dict[str, Any]) -> str:
    """That nothing is heard of it, the first reason why a job waits, or what is to be said of it."""
    if view.get("silent_s") is not None:
        return f"silent for {round(view['silent_s'])} s"
    waiting = view.get("waiting")
    if waiting and waiting["reasons"]:
        return str(waiting["reasons"][0]["text"])
    if view.get("reason") or view["status"] != "waiting":
        return view.get("reason") or ""
    return f"rollmuxd job explain {view['job']}"


@job.command("list")
@click.option("--owner", help="Only this owner's.")
@click.option("--status", help="Only those waiting, probing, admitted, paused, quarantined, lost, ended.")
@click.option("--pool", help="Only those that want this pool.")
@click.option("--all", "everything", is_flag=True, help="Those that are over, too.")
@talks
def list_(call: Call, owner: str | None, status: str | None, pool: str | None, everything: bool) -> None:
    """Jobs that are not over."""
    jobs = list(call.items("/v1/jobs", owner=owner, status=status, pool=pool))
    if not everything and status is None:
        jobs = [view for view in jobs if view["status"] not in OVER]

    def show(jobs: list[dict[str, Any]]) -> None:
        table(
            ["JOB", "NAME", "OWNER", "STATUS", "GROUP", "PHASE", "#ITERATIONS", "#SLOWDOWN", "#SLO", "WHY"],
            [
                [
                    view["job"],
                    view["name"],
                    view["owner"],
                    view["status"],
                    view.get("group"),
                    view.get("phase"),
                    view.get("iterations"),
                    view.get("slowdown"),
                    view.get("slo"),
                    why(view),
                ]
                for view in jobs
            ],
            "no jobs",
        )

    call.answer_list(jobs, show)


@job.command()
@click.argument("job", shell_complete=names_of("/v1/jobs", "name", "job"))
@talks
def show(call: Call, job: str) -> None:
    """One job: where it sits, how fast it goes, what it was promised."""
    call.answer(call.get(f"/v1/jobs/{part(job)}"), _show)


def _show(view: dict[str, Any]) -> None:
    waiting = view.get("waiting") or {}
    fields(
        {
            "job": view["job"],
            "name": f"{view['name']} (run {view['run']})",
            "owner": f"{view['owner']}, registered by {view['user']} at {view['registered_at']}",
            "status": view["status"],
            "why": why(view),
            "position": waiting.get("position"),
            "would start with": waiting.get("would_start_with"),
            "group": view.get("group"),
            "nodes": view.get("pins"),
            "admission": view.get("admission"),
            "slot": view.get("slot") and f"{view['slot']} ({view.get('phase')})",
            "iterations": view.get("iterations"),
            "slowdown": view.get("slowdown"),
            "planned slowdown": view.get("planned_slowdown"),
            "bound": _promise(view),
            "credit": None if view.get("credit_s") is None else f"{cell(view['credit_s'])} s",
            "moves": f"{view.get('loads_warm', 0)} warm loads, {view.get('loads_cold', 0)} cold, "
            f"{view.get('parks', 0)} parks",
        }
    )
    estimates = view.get("estimates") or {}
    if estimates:
        click.echo()
        table(
            ["PHASE", "#STATED s", "#PLANNED s", "PLANNED ON", "#MEAN s", "#MEDIAN s", "#P95 s", "#TIMES"],
            [
                [
                    name,
                    seen.get("planned_s"),
                    seen.get("reckoned_s"),
                    _planned_on(seen),
                    seen.get("mean_s"),
                    seen.get("p50_s"),
                    seen.get("p95_s"),
                    seen["count"],
                ]
                for name, seen in estimates.items()
            ],
            "",
        )


def _planned_on(seen: dict[str, Any]) -> str:
    """What the time that plans reckon with was made of."""
    if seen.get("reckoned_s") is None:
        return ""
    return f"{seen['reckoned_from']} times" if seen.get("reckoned_from") else "as stated"


def _promise(view: dict[str, Any]) -> str:
    if view.get("slo") is None:
        return "none: best effort"
    if view.get("unmet"):
        return str(view["unmet"])
    if view.get("at_risk"):
        return f"{cell(view['slo'])}, promised, and at risk: the plan has no room for it"
    return f"{cell(view['slo'])}, {'promised' if view.get('promised') else 'not promised (yet)'}"


@job.command()
@click.argument("job", shell_complete=names_of("/v1/jobs", "name", "job"))
@talks
def explain(call: Call, job: str) -> None:
    """Why a job waits, or where it sits and why."""

    def show(view: dict[str, Any]) -> None:
        for sentence in view["sentences"] or [reason["text"] for reason in view["reasons"]]:
            click.echo(printable(sentence))

    call.answer(call.get(f"/v1/jobs/{part(job)}/explain"), show)


def _said(verb: str) -> Any:
    return lambda view: click.echo(f"{view['name']} ({view['job']}): {verb}; it is {view['status']}")


@job.command()
@click.argument("job", shell_complete=names_of("/v1/jobs", "name", "job"))
@talks
def pause(call: Call, job: str) -> None:
    """Give a job no new slot; the one it has runs to its end."""
    call.answer(call.post(f"/v1/jobs/{part(job)}/pause"), _said("pausing"))


@job.command()
@click.argument("job", shell_complete=names_of("/v1/jobs", "name", "job"))
@talks
def resume(call: Call, job: str) -> None:
    """Let a paused job go on."""
    call.answer(call.post(f"/v1/jobs/{part(job)}/resume"), _said("resumed"))


@job.command()
@click.argument("job", shell_complete=names_of("/v1/jobs", "name", "job"))
@talks
def reinstate(call: Call, job: str) -> None:
    """Take a quarantined job back."""
    call.answer(call.post(f"/v1/jobs/{part(job)}/reinstate"), _said("reinstated"))


@job.command()
@click.argument("job", shell_complete=names_of("/v1/jobs", "name", "job"))
@click.option("--reason", default="", help="Told to the job, and kept in the journal.")
@talks
def end(call: Call, job: str, reason: str) -> None:
    """End a job and free all that it holds."""
    call.answer(call.delete(f"/v1/jobs/{part(job)}", {"reason": reason}), _said("ended"))


@job.command()
@click.argument("job", shell_complete=names_of("/v1/jobs", "name", "job"))
@click.option("--for", "until", type=click.Choice(["over", "placed"]), default="over", help="Default: over.")
@click.option("--timeout", type=click.FloatRange(min=0), help="Seconds; then exit with 1.")
@talks
def wait(call: Call, job: str, until: str, timeout: float | None) -> None:
    """Wait until a job is over, or has a placement; also over a restart of the daemon.

    Exits with 0 when its loop has come to its end, or it has its placement; with 1 and the reason if it is over in any
    other way (lost, failed, interrupted, ended by somebody), is quarantined, or is over without having been placed.

    A program that ends by itself, or by sys.exit(1) outside of `with rollmuxd.job(...)`, counts as come to its end: of
    its exit status nobody is told. An error that nobody catches is.
    """
    path = f"/v1/jobs/{part(job)}"
    give_up = math.inf if timeout is None else time.monotonic() + timeout
    view = call.get(path)
    while True:
        status = view["status"]
        if status in OVER or status == "quarantined" or (until == "placed" and status in PLACED):
            break
        if time.monotonic() >= give_up:
            raise Failed(f"{view['name']} is still {status} after {timeout:g} s")
        time.sleep(1.0)
        view = call.get_again(path, until=give_up)
    call.answer(view, lambda view: click.echo(f"{view['name']} ({view['job']}): {status}"))
    reason = view.get("reason") or ""
    if status == "ended" and (until == "placed" or not WELL.fullmatch(reason)):
        raise Failed(f"{view['name']} ended: {reason or 'no reason was given'}")
    if status != "ended" and not (until == "placed" and status in PLACED):
        raise Failed(f"{view['name']} is {status}: {reason or 'no reason was given'}")


job.add_command(logs)
