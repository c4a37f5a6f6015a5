"""Where every rank of a workload dials in to be told to load and park."""

from typing import Annotated

from msgspec import Meta, convert

from rollmuxd.core.errors import Conflict, UnknownThing
from rollmuxd.core.model import Job, SessionStatus
from rollmuxd.core.state import State
from rollmuxd.daemon.access.gate import Caller, find_job
from rollmuxd.daemon.http.routing import Call, Query, Routes
from rollmuxd.spi.residency import RankResult
from rollmuxd.wire.answers import ChannelOrder, ChannelView
from rollmuxd.wire.requests import ResultBody

routes = Routes("channel", charged=False)

Rank = Annotated[int, Meta(ge=0, lt=10_000)]


class OrdersQuery(Query, frozen=True):
    """Which rank of which session asks, and how long it waits."""

    session: Annotated[str, Meta(min_length=1, max_length=100)]
    rank: Rank
    wait_s: Annotated[float, Meta(ge=0, le=300)] = 0


@routes.get("/v1/channel/{job}/orders", problems=(409,))
async def next_order(call: Call, job: str, query: OrdersQuery) -> ChannelView:
    """The next thing for a rank to do, if one comes in time. Asked again until its result was acknowledged.

    A rank that asks is there, and can be told to load and park.
    """
    mine = await _line(call, job, query.session, query.rank)
    told = await call.park(
        lambda: call.services.hub.next_order(mine.id, query.session, query.rank, query.wait_s), query.wait_s + 5
    )
    return ChannelView(order=None if told is None else convert(told, ChannelOrder, from_attributes=True))


@routes.post("/v1/channel/{job}/results", problems=(409,))
async def result(call: Call, job: str, body: ResultBody) -> ChannelView:
    """What a rank did. This answer is the acknowledgement; said again, it changes nothing."""
    mine = await _line(call, job, body.session, body.rank)
    done = RankResult(rank=body.rank, ok=body.ok, error=body.error, seconds=body.seconds)
    call.services.hub.result(mine.id, body.session, body.rank, body.order, done)
    if call.others:
        await call.note(body.order, f"rank {body.rank}", once=body.order)
    return ChannelView()


async def _line(call: Call, ref: str, session: str, rank: int) -> Job:
    """The job on whose line the rank is, if this is its present session, or the last one, which does its discards."""

    def find(state: State, caller: Caller, ref: str, *, act: bool) -> Job:
        job = find_job(state, caller, ref, act=act)
        known = state.sessions.get(session)
        if known is None or known.job != job.id:
            raise UnknownThing("session", session)
        alive = job.session == session and known.status is SessionStatus.ALIVE
        lingers = known.status is SessionStatus.CLOSED and call.services.hub.lingers(job.id, session)
        if not alive and not lingers:
            raise Conflict(f"session {session} of job {job.id} is {known.status}; open a new one")
        return job

    mine = await call.act_on(find, ref)
    call.services.hub.dial(mine.id, session, rank, mine.spec.ranks)
    return mine
