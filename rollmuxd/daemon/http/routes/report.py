"""What the GPUs were used for."""

from datetime import UTC, datetime
from typing import Annotated, Literal

import anyio
import anyio.lowlevel
from msgspec import UNSET, Meta, UnsetType

from rollmuxd.core.model import Millis
from rollmuxd.daemon.http import problems
from rollmuxd.daemon.http.glue import Call, Plain, Query, Routes
from rollmuxd.daemon.http.problems import Refusal
from rollmuxd.daemon.report import Ledger, as_csv
from rollmuxd.wire.answers import ReportView

routes = Routes("report")

#: facts that are booked between two breaths of the loop: a few milliseconds
BATCH = 500

Time = Annotated[str, Meta(max_length=40, description="2026-11-21, 2026-11-21T12:00, 2026-11-21T12:00:00+01:00; UTC")]


class ReportQuery(Query, frozen=True):
    """The span of time, and the rows."""

    since: Time | UnsetType = UNSET
    until: Time | UnsetType = UNSET
    by: Literal["job", "owner", "pool"] = "job"
    format: Literal["json", "csv"] | UnsetType = UNSET


@routes.get("/v1/report", produces=("text/csv",), problems=(422, 503))
async def get_report(call: Call, query: ReportQuery) -> ReportView | Plain:
    """GPU-hours held and used, waits, switches, and what each job alone would have used.

    JSON, or CSV (``format=csv``, or ``Accept: text/csv``). Others than admins see the rows of their owner's jobs.
    """
    since, until = _time("since", query.since), _time("until", query.until)
    if since is not None and until is not None and since > until:
        raise Refusal(problems.INVALID, "query: since is after until", data={"in": "query", "field": "since"})
    driver = call.services.driver
    now, durable = await call.read(lambda core, now: (now, driver.durable_seq))
    ledger = Ledger(since=since or 0, until=until)
    after, going = 0, True
    while going and (batch := await call.services.journal.read(after, BATCH)):
        for seq, fact in batch:
            if after == 0 and seq != 1:
                raise Refusal(
                    problems.INVALID, f"the journal begins at fact {seq}: a report needs it from the beginning"
                )
            after = seq
            going = seq <= durable and ledger.see(fact)
            if not going:
                break
        await anyio.lowlevel.checkpoint()
    report = ledger.report(by=query.by, owner=None if call.caller.admin else call.caller.owner, now=now)
    wants_csv = query.format == "csv" if query.format else "text/csv" in (call.header(b"accept") or "")
    return Plain(as_csv(report), "text/csv; charset=utf-8") if wants_csv else report


def _time(name: str, text: str | UnsetType) -> Millis | None:
    if text is UNSET:
        return None
    try:
        at = datetime.fromisoformat(text)
        return round((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000)
    except (ValueError, OverflowError):
        raise Refusal(
            problems.INVALID,
            f"query: {name}: {text!r} is no time; write it like 2026-11-21 or 2026-11-21T12:00",
            data={"in": "query", "field": name},
        ) from None
