"""``rollmuxd job``: RL post-training jobs."""

from __future__ import annotations

import math
import time
from typing import Any

import click

from rollmuxd.cli.common import Call, Columns, Failed, cell, fields, listing, part, printable, talks
from rollmuxd.cli.logs import logs
from rollmuxd.client.calls import QUESTION_S

OVER = ("ended", "lost")
PLACED = ("probing", "admitted")
STATUSES = ("waiting", "probing", "admitted", "moving", "paused", "quarantined", "lost", "ended")


@click.group()
def job() -> None:
    """Jobs: list, show, explain, logs, pause, resume, end, reinstate, wait."""


def why(view: dict[str, Any]) -> str:
    """The first reason why a job waits, or what is to be said of it; then that nothing is heard of it."""
    waiting, silent_s = view.get("waiting"), view.get("silent_s")
    if waiting and waiting["reasons"]:
        reason = str(waiting["reasons"][0]["text"])
    else:
        reason = view.get("reason") or ""
    if not reason and silent_s is None and view["status"] == "waiting":
        return f"rollmuxd job explain {view['job']}"
    return "; ".join(filter(None, [reason, "" if silent_s is None else f"silent for {round(silent_s)} s"]))


def doing(view: dict[str, Any]) -> str:
    """The status, which says for a job that waits what it waits for, and for a silent one that it is silent."""
    if view.get("silent_s") is not None:
        return f"silent ({view['status']})"
    if view.get("filler") and view["status"] in PLACED:
        return f"lent {view['lent']}" if view.get("lent") else "waiting for a loan" if view.get("slot") else "no work"
    if view["status"] == "waiting":
        return "waiting for a place"
    # Of a job that has a placement the daemon's list gives a reason only while it waits for its slot.
    turn = view["status"] in PLACED and view.get("slot") and view.get("reason")
    return "waiting for its turn" if turn else str(view["status"])


@job.command("list")
@click.option("--owner", help="Only this owner's.")
@click.option("--status", type=click.Choice(STATUSES), help="Only jobs of this status.")
@click.option("--pool", help="Only those that want this pool.")
@click.option("--all", "everything", is_flag=True, help="Those that are over, too.")
@talks
def list_(call: Call, owner: str | None, status: str | None, pool: str | None, everything: bool) -> None:
    """Jobs that are not over."""
    columns: Columns = {"JOB": "job", "NAME": "name", "OWNER": "owner", "STATUS": doing, "GROUP": "group"}
    figures: Columns = {"PHASE": "phase", "#ITERATIONS": "iterations", "#SLOWDOWN": "slowdown", "#SLO": _slo}
    over = None if everything or status else "false"
    asked = {"owner": owner, "status": status, "pool": pool, "over": over}
    call.answer_rows("/v1/jobs", {**columns, **figures, "WHY": why}, "no jobs", owned=True, **asked)


def _slo(view: dict[str, Any]) -> str:
    """What the job asked for, and whether it has it."""
    slo = view.get("slo")
    return "" if slo is None else cell(slo) if view.get("promised") else f"{cell(slo)} (not promised)"


@job.command()
@click.argument("job")
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
            "lent": view.get("lent"),
            "harvested": f"{cell(view['harvested_s'])} s" if view.get("filler") else None,
            "held up by fillers": f"{cell(view['held_up_s'])} s at most" if view.get("held_up_s") else None,
            "moves": f"{view.get('loads_warm', 0)} warm loads, {view.get('loads_cold', 0)} cold, "
            f"{view.get('parks', 0)} parks",
        }
    )
    estimates = view.get("estimates") or {}
    if estimates:
        click.echo()
        columns: Columns = {"PHASE": "phase", "#STATED s": "planned_s", "#PLANNED s": "estimate_s"}
        seen = {"#MEAN s": "mean_s", "#MEDIAN s": "p50_s", "#P95 s": "p95_s", "#TIMES": "count"}
        rows = [{"phase": name, **estimate} for name, estimate in estimates.items()]
        listing(rows, {**columns, "PLANNED ON": _planned_on, **seen}, "")


def _planned_on(seen: dict[str, Any]) -> str:
    """What the time that plans reckon with was made of."""
    if seen.get("estimate_s") is None:
        return ""
    return f"{seen['estimate_samples']} times" if seen.get("estimate_samples") else "as stated"


def _promise(view: dict[str, Any]) -> str:
    if view.get("slo") is None:
        return "none: best effort"
    if view.get("unmet"):
        return str(view["unmet"])
    if view.get("at_risk"):
        return f"{cell(view['slo'])}, promised, and at risk: the plan has no room for it"
    return f"{cell(view['slo'])}, {'promised' if view.get('promised') else 'not promised (yet)'}"


@job.command()
@click.argument("job")
@talks
def explain(call: Call, job: str) -> None:
    """Why a job waits, or where it sits and why."""
    call.answer(_explanation(call, job), lambda view: click.echo("\n".join(map(printable, _sentences(view)))))


def explained(call: Call, job: str) -> list[str]:
    """The sentences of ``job explain``."""
    return _sentences(_explanation(call, job))


def _explanation(call: Call, job: str) -> dict[str, Any]:
    found: dict[str, Any] = call.get(f"/v1/jobs/{part(job)}/explain", timeout_s=QUESTION_S)
    return found


def _sentences(view: dict[str, Any]) -> list[str]:
    return view["sentences"] or [reason["text"] for reason in view["reasons"]]


def _said(verb: str) -> Any:
    return lambda view: click.echo(f"{view['name']} ({view['job']}): {verb}; it is {view['status']}")


def _add(verb: str, said: str, about: str) -> None:
    """A command that makes one call about a job."""

    @job.command(verb, help=about)
    @click.argument("job")
    @talks
    def command(call: Call, job: str) -> None:
        call.answer(call.post(f"/v1/jobs/{part(job)}/{verb}"), _said(said))


_add("pause", "pausing", "Give a job no new slot; the one it has runs to its end.")
_add("resume", "resumed", "Let a paused job continue.")
_add("reinstate", "reinstated", "Take a quarantined job back.")


@job.command()
@click.argument("job")
@click.option("--reason", default="", help="Told to the job, and kept in the journal.")
@talks
def end(call: Call, job: str, reason: str) -> None:
    """End a job and free all that it holds."""
    call.answer(call.delete(f"/v1/jobs/{part(job)}", {"reason": reason}), _said("ended"))


@job.command()
@click.argument("job")
@click.option("--for", "until", type=click.Choice(["over", "placed"]), default="over", help="Default: over.")
@click.option("--timeout", type=click.FloatRange(min=0), help="Seconds; then exit with 1.")
@talks
def wait(call: Call, job: str, until: str, timeout: float | None) -> None:
    """Wait until a job is over, or has a placement; also over a restart of the daemon.

    Exits with 0 when its loop has come to its end, or it has its placement. Exits with 1 and the reason if it ended
    otherwise (lost, failed, interrupted, ended by a call), is quarantined, or was never placed.

    A program that ends by itself, or by sys.exit(1) outside of `with rollmuxd.job(...)`, counts as come to its end. Its
    exit status is not known; an uncaught error is.
    """
    path = f"/v1/jobs/{part(job)}"
    give_up = math.inf if timeout is None else time.monotonic() + timeout
    view = call.get(path)
    while True:
        status = view["status"]
        if status in OVER or status == "quarantined" or (until == "placed" and status in PLACED):
            break
        left_s = give_up - time.monotonic()
        time.sleep(max(0.0, min(1.0, left_s)))
        if left_s <= 1.0:
            raise Failed(f"{view['name']} is still {status} after {timeout:g} s")
        view = call.get_again(path, until=give_up)
    call.answer(view, lambda view: click.echo(f"{view['name']} ({view['job']}): {status}"))
    reason = view.get("reason") or ""
    if status == "ended" and (until == "placed" or not view.get("finished")):
        raise Failed(f"{view['name']} ended: {reason or 'no reason was given'}")
    if status != "ended" and not (until == "placed" and status in PLACED):
        raise Failed(f"{view['name']} is {status}: {reason or 'no reason was given'}")


job.add_command(logs)
