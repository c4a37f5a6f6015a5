"""All that a picture of the whole needs, in one call: what the dashboard and ``rollmuxd top`` ask for all the time."""

from typing import Annotated, Literal
from zlib import crc32

from msgspec import UNSET, Meta, UnsetType

from rollmuxd.daemon.http import views
from rollmuxd.daemon.http.routes.inventory import (
    GroupsQuery,
    NodesQuery,
    list_groups,
    list_hosts,
    list_nodes,
    list_pools,
)
from rollmuxd.daemon.http.routes.jobs import JobsQuery, page_of_jobs
from rollmuxd.daemon.http.routes.slots import SlotsQuery, list_slots
from rollmuxd.daemon.http.routes.web import whoami
from rollmuxd.daemon.http.routing import Call, Id, Limit, PageQuery, Query, Routes
from rollmuxd.wire.answers import Overview, OverviewLists

routes = Routes("overview")

#: what is seen on GPUs changes all the time, and is worth a new answer so often
OBSERVATIONS_MS = 60_000
#: while a job is silent, its seconds are worth a new answer so often
SILENCE_MS = 2_000


class OverviewQuery(Query, frozen=True):
    """How much of it, and what is known of it already."""

    #: the ``tag`` of an answer that the caller has
    since: Annotated[str, Meta(max_length=100)] | UnsetType = UNSET
    #: of each list
    limit: Limit = 1000
    #: whose jobs and slots
    owner: Id | UnsetType = UNSET
    #: jobs that are over, too, while the daemon remembers them
    over: bool = True
    slots: Literal["open", "holding", "none"] = "none"


@routes.get("/v1/overview", problems=(503,))
async def overview(call: Call, query: OverviewQuery) -> Overview:
    """The caller, and the first page of each list: pools, nodes, hosts, groups, jobs and slots.

    A ``next`` that is not null leads on in that list's own route, asked with the same filters. ``slots`` and ``over``
    mean what ``which`` of ``/v1/slots`` (with ``why=false``) and ``over`` of ``/v1/jobs`` do.

    With ``since``, the ``tag`` of an answer before: where nothing has happened since, ``lists`` is null, and what that
    answer had still holds. So to ask again costs next to nothing while nothing happens.
    """
    me = await whoami(call)
    seen = max((seen.at for seen in call.services.actuator.seen.values()), default=0) // OBSERVATIONS_MS
    silent = await call.read(
        lambda core, now: (
            [session for session in core.context.timers.seen if views.silent_ms(core, session, now) is not None],
            now // SILENCE_MS,
        )
    )
    # For how long a job is silent changes all the time, and nothing has happened.
    asked = (call.caller.name, me.role, query.limit, query.owner, query.over, query.slots, silent[0] and silent)
    tag = f"{call.services.writer.scheduler.state.incarnation}.{me.last}.{seen}.{crc32(repr(asked).encode()):x}"
    if query.since == tag:
        return Overview(me=me, tag=tag)
    # One after the other, so that no call waits for all of it; what happens meanwhile changes the next tag.
    return Overview(
        me=me,
        tag=tag,
        lists=OverviewLists(
            pools=await list_pools(call, PageQuery(limit=query.limit)),
            nodes=await list_nodes(call, NodesQuery(limit=query.limit)),
            hosts=await list_hosts(call, PageQuery(limit=query.limit)),
            groups=await list_groups(call, GroupsQuery(limit=query.limit)),
            jobs=await page_of_jobs(
                call, JobsQuery(owner=query.owner, over=query.over, limit=query.limit), turns=False
            ),
            slots=None
            if query.slots == "none"
            else await list_slots(call, SlotsQuery(owner=query.owner, which=query.slots, why=False, limit=query.limit)),
        ),
    )
