"""``rollmuxd slot``: stays of jobs' phases on their GPUs."""

from __future__ import annotations

from typing import Any

import click

from rollmuxd.cli.common import Call, part, table, talks
from rollmuxd.cli.completion import names_of

ENDED = ("withdrawn", "released", "over")


@click.group()
def slot() -> None:
    """Slots: list, revoke."""


@slot.command("list")
@click.option("--job", help="Only this job's.")
@click.option("--pool", help="Only those on this pool.")
@click.option("--status", help="Only those queued, loading, running, tail, reclaiming, released, ...")
@click.option("--all", "everything", is_flag=True, help="Those that have ended, too.")
@talks
def list_(call: Call, job: str | None, pool: str | None, status: str | None, everything: bool) -> None:
    """Slots that hold GPUs or wait for them."""
    slots = list(call.items("/v1/slots", job=job, pool=pool, status=status))
    if not everything and status is None:
        slots = [view for view in slots if view["status"] not in ENDED]

    def show(slots: list[dict[str, Any]]) -> None:
        table(
            ["SLOT", "JOB", "PHASE", "STATUS", "GPUS", "SINCE", "#POSITION", "#EXPECTED WAIT s", "REASON"],
            [
                [
                    view["slot"],
                    view["job"],
                    view["phase"],
                    view["status"],
                    view.get("gpus"),
                    view.get("granted_at") or view.get("queued_at"),
                    view.get("position"),
                    view.get("expected_wait_s"),
                    view.get("reason") or "; ".join(reason["text"] for reason in view.get("reasons", [])),
                ]
                for view in slots
            ],
            "no slots",
        )

    call.answer_list(slots, show)


@slot.command()
@click.argument("slot", shell_complete=names_of("/v1/slots", "slot"))
@click.option("--reason", default="", help="Told to the job, and kept in the journal.")
@talks
def revoke(call: Call, slot: str, reason: str) -> None:
    """End a slot now; its GPUs are given on when they were seen clear."""
    call.answer(
        call.post(f"/v1/slots/{part(slot)}/revoke", {"reason": reason}),
        lambda view: click.echo(f"{view['slot']}: {view['status']}"),
    )
