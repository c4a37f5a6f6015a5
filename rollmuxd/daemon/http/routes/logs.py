"""What jobs' processes have printed, where the daemon has them started."""

import codecs
from typing import Annotated

from msgspec import Meta

from rollmuxd.daemon.access.gate import find_job
from rollmuxd.daemon.http import problems
from rollmuxd.daemon.http.problems import Refusal
from rollmuxd.daemon.http.routing import Call, Query, Routes
from rollmuxd.spi import ContactLost, NotDone
from rollmuxd.wire.answers import LogsView

routes = Routes("logs")

_UTF_8 = codecs.getincrementaldecoder("utf-8")
Bytes = Annotated[int, Meta(ge=-(2**53), le=2**53)]


class LogsQuery(Query, frozen=True):
    """Which part of the output."""

    #: byte to begin with; negative: so many before the end
    after: Bytes = 0
    #: bytes at most
    limit: Annotated[int, Meta(ge=1, le=1_048_576)] = 65_536


@routes.get("/v1/jobs/{job}/logs", problems=(422, 503))
async def get_logs(call: Call, job: str, query: LogsQuery) -> LogsView:
    """The output of the process that the daemon has started for the job last, from a byte on; asked again for more.

    404 where there is none: a job that was not started by the daemon keeps its output itself. What is no UTF-8 is shown
    as U+FFFD.
    """
    mine = await call.act_on(find_job, job)
    # Asked first: of a process that is over by then, nothing is printed after this piece.
    launch = await call.read(lambda core, _: core.state.job(mine.id).launch)
    name, over = ("", True) if launch is None else (launch.id, launch.over)
    try:
        piece = await call.services.actuator.output(mine.id, query.after, query.limit)
    except NotDone as error:
        raise Refusal(problems.UNKNOWN, str(error)) from None
    except (ContactLost, TimeoutError) as error:
        raise Refusal(problems.AWAY, f"{error}") from None
    # A character may be cut in two by the limit: what is left of it comes with the next piece.
    decoder = _UTF_8(errors="replace")
    text = decoder.decode(piece.data, final=len(piece.data) < query.limit)
    cut = len(decoder.getstate()[0])
    return LogsView(job=mine.id, launch=name, text=text, next=piece.next - cut, over=over)
