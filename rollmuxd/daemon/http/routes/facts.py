"""The journal as a feed."""

from typing import Annotated, Any

import anyio
import msgspec
from msgspec import Meta

from rollmuxd.daemon.http.glue import Call, ClientGone, Parked, Query, Routes
from rollmuxd.wire.answers import FactsPage

routes = Routes("facts")

#: facts that are read at a time while they are sifted
BATCH = 1_000
#: what a call may take beyond its ``wait_ms``, reading
READ_S = 60.0


class FactsQuery(Query, frozen=True):
    """From where on, how long to wait for more, and how many at most."""

    after: Annotated[int, Meta(ge=0, le=2**62)] = 0
    wait_ms: Annotated[int, Meta(ge=0, le=60_000)] = 0
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 1_000


@routes.get("/v1/facts", problems=(503,))
async def read_facts(call: Call, query: FactsQuery) -> FactsPage:
    """Facts with numbers above ``after``. Where there are none, waits up to ``wait_ms`` for some (a long poll).

    Ask next with ``after=last``. Admins see all; others what is about their owner's jobs and about the inventory.
    """
    driver = call.services.driver
    found: list[dict[str, Any]] = []
    last = query.after
    until = anyio.current_time() + query.wait_ms / 1000

    async def collect() -> None:
        nonlocal last
        while len(found) < query.limit:
            wait_ms = 0 if found else max(0, round((until - anyio.current_time()) * 1000))
            batch, following = await driver.facts_after(last, wait_ms, min(BATCH, query.limit))
            for seq, fact in batch:
                last = seq
                if call.shared.belongs.visible(fact, call.caller, driver.scheduler.state):
                    found.append({"seq": seq, **msgspec.to_builtins(fact)})
                    if len(found) == query.limit:
                        return
            last = max(last, following)
            if not batch and (wait_ms == 0 or driver.draining.is_set()):
                return

    if await call.park(collect, query.wait_ms / 1000 + READ_S) is Parked.GONE:
        raise ClientGone
    return FactsPage(facts=found, last=last)
