"""The journal's upkeep."""

from rollmuxd.daemon.driver import Unavailable
from rollmuxd.daemon.http import problems
from rollmuxd.daemon.http.glue import Call, Routes
from rollmuxd.daemon.http.problems import Refusal
from rollmuxd.daemon.journal_file import JournalError
from rollmuxd.daemon.keys import Role
from rollmuxd.wire.answers import TendedView

routes = Routes("journal")


@routes.post("/v1/journal/compact", needs=Role.ADMIN, problems=(404, 503))
async def compact(call: Call) -> TendedView:
    """Close the books of days that are over, and let go of facts as the settings say: now, and not within the hour."""
    keeper = call.services.keeper
    if keeper is None:
        raise Refusal(problems.UNKNOWN, "this daemon keeps its journal in memory only")
    try:
        done = await keeper.tend()
    except JournalError as error:
        raise Unavailable(str(error), retry_after_s=60) from error
    return TendedView(
        booked=done.booked,
        cut=done.cut,
        first=done.first,
        bytes_before=done.bytes_before,
        bytes_after=done.bytes_after,
        longest_ms=done.longest_ms,
    )
