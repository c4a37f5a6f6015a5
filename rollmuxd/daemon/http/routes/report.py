"""What the GPUs were used for."""

import math
from contextlib import AsyncExitStack
from functools import partial
from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import replace

from rollmuxd.core.ids import Millis
from rollmuxd.daemon.clock import iso, ms_of
from rollmuxd.daemon.http import problems
from rollmuxd.daemon.http.problems import Refusal
from rollmuxd.daemon.http.routing import Call, Query, Routes
from rollmuxd.daemon.usage.daily import FactsGone
from rollmuxd.wire.answers import ReportView

routes = Routes("report")

Time = Annotated[str, Meta(max_length=40, description="2026-11-21, 2026-11-21T12:00, 2026-11-21T12:00:00+01:00; UTC")]


class ReportQuery(Query, frozen=True):
    """The span of time, and the rows."""

    since: Time | UnsetType = UNSET
    until: Time | UnsetType = UNSET
    by: Literal["job", "owner", "pool"] = "job"


@routes.get("/v1/report", problems=(410, 422, 429, 503))
async def get_report(call: Call, query: ReportQuery) -> ReportView:
    """GPU-hours held and used, waits, switches, and what each job alone would have used.

    Of days (UTC) whose facts were compacted away the whole is known: a span that begins or ends within one is 410.
    Others than admins see the rows of their owner's jobs. More than 100 of one owner at a time are 429.
    """
    since, until = _time("since", query.since), _time("until", query.until)
    if since is not None and until is not None and since > until:
        raise Refusal(problems.INVALID, "query: since is after until", data={"in": "query", "field": "since"})
    services, owner = call.services, call.caller.owner
    async with AsyncExitStack() as stack:
        # A caller that hangs up leaves the line. During its turn it does not: a count that is cut short is lost.
        await call.park(partial(stack.enter_async_context, call.shared.reports.turn(owner)), math.inf)
        await call.shared.paces.pause(owner)
        now, durable = await call.read(lambda core, now: (now, services.writer.last_seq))
        try:
            usage, end = await services.today.between(since, until, now, durable)
        except FactsGone as error:
            raise Refusal(problems.GONE, str(error), data={"first": error.first}) from None
        report = usage.view(since or 0, end, by=query.by, owner=None if call.caller.admin else owner)
    return replace(report, mode=services.settings.daemon.mode)


def _time(name: str, text: str | UnsetType) -> Millis | None:
    if text is UNSET:
        return None
    try:
        at = ms_of(text)
        iso(at)  # the report says it in UTC, where the year may be 0 or 10000
    except (ValueError, OverflowError):
        raise Refusal(
            problems.INVALID,
            f"query: {name}: {text!r} is no time; write it like 2026-11-21 or 2026-11-21T12:00",
            data={"in": "query", "field": name},
        ) from None
    return at
