"""``rollmuxd slot``: stays of jobs' phases on their GPUs."""

from __future__ import annotations

import click

from rollmuxd.cli.common import Call, Columns, part, talks

STATUSES = (
    *("queued", "withdrawn", "loading", "running", "tail", "released"),
    *("faulted", "lost", "revoked", "over"),
)


@click.group()
def slot() -> None:
    """Slots: list, revoke."""


@slot.command("list")
@click.option("--job", help="Only this job's.")
@click.option("--pool", help="Only those on this pool.")
@click.option("--status", type=click.Choice(STATUSES), help="Only slots of this status.")
@click.option("--all", "everything", is_flag=True, help="Those that have ended, too.")
@talks
def list_(call: Call, job: str | None, pool: str | None, status: str | None, everything: bool) -> None:
    """Slots that hold GPUs or wait for them."""
    columns: Columns = {
        "SLOT": "slot",
        "JOB": "job_name",
        "PHASE": "phase",
        "STATUS": "status",
        "GPUS": "gpus",
        "SINCE": lambda view: view.get("granted_at") or view.get("queued_at"),
        "#POSITION": "position",
        "#EXPECTED WAIT s": "expected_wait_s",
        "REASON": lambda view: view.get("reason") or "; ".join(it["text"] for it in view.get("reasons", [])),
    }
    which = None if everything or status else "open"
    asked = {"job": job, "pool": pool, "status": status, "which": which}
    call.answer_rows("/v1/slots", columns, "no slots", owned=True, **asked)


@slot.command()
@click.argument("slot")
@click.option("--reason", default="", help="Told to the job, and kept in the journal.")
@talks
def revoke(call: Call, slot: str, reason: str) -> None:
    """End a slot now; its GPUs are given on when they were verified clean."""
    call.answer(
        call.post(f"/v1/slots/{part(slot)}/revoke", {"reason": reason}),
        lambda view: click.echo(f"{view['slot']}: {view['status']}"),
    )
