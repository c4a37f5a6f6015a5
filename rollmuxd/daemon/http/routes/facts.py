"""The journal as a feed."""

from contextlib import nullcontext
from typing import Annotated, Any

import anyio
import msgspec
from msgspec import UNSET, Meta, UnsetType

from rollmuxd.core.causes import Cause
from rollmuxd.core.errors import TooMany
from rollmuxd.core.facts import Fact
from rollmuxd.daemon.access.audience import wanted
from rollmuxd.daemon.access.gate import find_job
from rollmuxd.daemon.access.visibility import Visibility
from rollmuxd.daemon.http import limits, problems
from rollmuxd.daemon.http.problems import Refusal
from rollmuxd.daemon.http.routing import Call, Id, Query, Routes
from rollmuxd.daemon.journal.file import Unreadable
from rollmuxd.wire.answers import FactsPage, UnreadableFact

routes = Routes("facts")

#: facts that are read at a time while they are sifted
BATCH = 100
#: what a call may take beyond its ``wait_ms``, reading
READ_S = 60.0
#: fields of facts that say why something happened
_CAUSES = ("reason", "why", "error")


class FactsQuery(Query, frozen=True):
    """From where on, how long to wait for more, and how many at most."""

    after: Annotated[int, Meta(ge=0, le=2**62)] = 0
    #: none with a number above this one, which is not waited for; 0: all
    until: Annotated[int, Meta(ge=0, le=2**62)] = 0
    wait_ms: Annotated[int, Meta(ge=0, le=60_000)] = 0
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 1_000
    job: Id | UnsetType = UNSET
    #: only what operators did, and failed logins
    audit: bool = False


@routes.get("/v1/facts", problems=(404, 410, 429, 503))
async def read_facts(call: Call, query: FactsQuery) -> FactsPage:
    """Facts with numbers above ``after``. Where there are none, waits up to ``wait_ms`` for some (a long poll).

    Ask next with ``after=last``. Admins see all facts; other callers see those about their owner's jobs and about the
    inventory. ``job``: only what is about this job, named by its id or its name. ``audit``: only what operators did and
    logins that failed; admins see these, and they are kept for three years.

    A page has fewer than ``limit`` facts where they are large: it ends after 2 MB.

    A fact that is damaged is named in ``unreadable`` with what is wrong, and the rest is delivered.
    Facts that were compacted away are 410, with the number of the first one that is there; ``after=0`` begins with it.
    More calls of one owner that wait at the same time than ``limits.max_facts_waiting`` are 429.
    """
    if query.audit and not call.caller.admin:
        raise Refusal(problems.FORBIDDEN, f"only admins see what is audited, and {call.caller.name} is none")
    writer = call.services.writer
    of: str | None = None
    if query.job is not UNSET:
        name = query.job
        of = await call.read(lambda core, now: find_job(core.state, call.caller, name).id)
    topics = wanted(call.caller, job=of, audit=query.audit)
    journal = call.services.journal
    found: list[Any] = []
    unreadable: list[UnreadableFact] = []
    size = 0
    last = query.after
    if last > writer.durable_seq:
        raise Refusal(
            problems.GONE,
            f"the last fact is {writer.durable_seq}, and you know of {last}: the journal was restored from a backup, "
            f"lost its end, or is another one; continue after {writer.durable_seq}, or begin again",
            data={"first": journal.first, "last": writer.durable_seq},
        )

    def keep(seq: int, fact: Fact | Unreadable, shown: Visibility) -> None:
        nonlocal last, size
        last = seq
        if isinstance(fact, Unreadable):  # it may be about anything
            unreadable.append(UnreadableFact(seq, fact.reason))
        elif not topics.isdisjoint(writer.belongs.topics(fact, writer.scheduler.state)):
            text = msgspec.json.encode({"seq": seq, **_told(fact, shown)})
            found.append(msgspec.Raw(text))
            size += len(text)

    if query.audit and last < journal.first - 1:
        shown = call.visibility(writer.scheduler)
        for seq, fact in await journal.audited(last, query.limit):
            keep(seq, fact, shown)
        if len(found) + len(unreadable) == query.limit:
            return FactsPage(facts=found, last=last, first=journal.first, unreadable=unreadable)
        last = journal.first - 1
    last = last or journal.first - 1
    _there(journal.first, last)
    give_up = anyio.current_time() + query.wait_ms / 1000
    until = query.until or 2**63

    def is_full() -> bool:
        if (found or unreadable) and last < journal.first - 1:
            return True  # the facts that follow are compacted away by now: the next call is 410
        return len(found) + len(unreadable) >= query.limit or size >= limits.PAGE or last >= until

    async def take(wait_ms: int) -> None:
        """Take in the facts that follow, with a pause wherever that has held the loop up."""
        nonlocal last
        batch, following = await writer.facts_after(last, wait_ms, min(BATCH, until - last), topics)
        if last < journal.first - 1:
            if not is_full():
                if query.after:
                    _there(journal.first, last)
                last = journal.first - 1
            return
        slices, shown = limits.Slices(), call.visibility(writer.scheduler)
        for seq, fact in batch:
            if await slices.pause():
                shown = call.visibility(writer.scheduler)
            keep(seq, fact, shown)
            if is_full():
                break
        else:
            last = max(last, following)
        if batch:
            await slices.pause(0.0)

    async def collect() -> None:
        while not is_full():
            if last < writer.durable_seq:
                async with call.shared.pages.turn(call.caller.owner):
                    while not is_full() and last < writer.durable_seq:
                        await take(0)
                continue
            wait_ms = (
                0 if found or unreadable or query.until else max(0, round((give_up - anyio.current_time()) * 1000))
            )
            if wait_ms == 0 or writer.draining.is_set():
                return
            await take(wait_ms)

    owner = call.caller.owner
    most, number = call.services.settings.limits.max_facts_waiting, call.shared.facts_waiting[owner]
    if query.wait_ms and number >= most:
        raise TooMany(
            f"{number} calls of owner {owner} wait for facts, which is the limit (limits.max_facts_waiting); follow "
            "with fewer, ask with wait_ms=0, or have the limit raised"
        )
    with call.waiting() if query.wait_ms else nullcontext():
        await call.park(collect, query.wait_ms / 1000 + READ_S)
    return FactsPage(facts=found, last=last, first=journal.first, unreadable=unreadable)


def _told(fact: Fact, visibility: Visibility) -> dict[str, Any]:
    """A fact as the journal has it, and its causes in words, too, for this caller."""
    told: dict[str, Any] = msgspec.to_builtins(fact)
    for name in _CAUSES:
        cause = getattr(fact, name, None)
        if isinstance(cause, Cause):
            told[name]["text"] = visibility.sentence(cause)
    return told


def _there(first: int, after: int) -> None:
    """Refuse if the fact that comes next was compacted away: no reader may miss facts without knowing it."""
    if after < first - 1:
        raise Refusal(
            problems.GONE,
            f"facts {after + 1} to {first - 1} were compacted away; continue after {first - 1}",
            data={"first": first},
        )
