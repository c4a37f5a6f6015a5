"""The books of today are kept as facts come, and nobody can tell: they are what a fold of all facts gives.

Random histories (processes die, hosts vanish, orders fail) are told bit by bit; days are a few seconds long, so that
they end while facts come; now and then somebody asks, or the writer begins anew.
"""

import random
from functools import cache
from unittest.mock import patch

import anyio
import pytest
from memory_journal import MemoryJournal
from simkit import swarm

from rollmuxd.core.state import State
from rollmuxd.daemon.usage import daily
from rollmuxd.daemon.usage.daily import LiveUsage, compute_usage
from rollmuxd.daemon.usage.ledger import UsageLedger
from rollmuxd.daemon.writer import Unavailable

pytestmark = pytest.mark.asyncio
#: seeds of histories in which much happens, and which are short
HISTORIES = (0, 1, 3, 4, 6, 8)


@cache
def history(seed):
    """All facts of one random history."""
    heard = []
    swarm.run(swarm.draw(seed), heard.append)
    return tuple(heard)


class Told:
    """A journal and the books beside it, told facts as a driver does: first durable, then heard of."""

    def __init__(self, facts):
        self.facts = facts
        self.durable = 0
        self.journal = MemoryJournal()
        self.today = LiveUsage(self.journal, self.settled)
        self.today.begin(State())
        self.reads = 0

    @property
    def now(self):
        return self.facts[self.durable - 1].at if self.durable else self.facts[0].at

    async def settled(self):
        return self.now, self.durable

    async def tell(self, count, *, later=False):
        """So many more facts come to pass. ``later``: they are durable, and heard of with what this returns."""
        batch = [(self.durable + n, fact) for n, fact in enumerate(self.facts[self.durable : self.durable + count], 1)]
        if batch:
            await self.journal.append(batch)
            self.durable = batch[-1][0]
            if not later:
                self.today.on_facts(batch)
        return batch

    async def report(self, since=None):
        books, end = await compute_usage(
            self.journal, since=since, until=None, now=self.now, durable=self.durable, today=self.today
        )
        return books.view(since or 0, end)

    def plainly(self, since=None):
        """The same, of all facts from the first one on."""
        ledger = UsageLedger(since=since or 0)
        for fact in self.facts[: self.durable]:
            ledger.see(fact)
        return ledger.report(now=self.now)


def same(one, other):
    """Figures are sums of the same numbers in another order."""
    mine, theirs = {row.job: row for row in one.work}, {row.job: row for row in other.work}
    assert list(mine) == list(theirs)
    assert [row.pool for row in one.pools] == [row.pool for row in other.pools]
    for left, right in (
        *((mine[job], theirs[job]) for job in mine),
        *zip(one.pools, other.pools, strict=True),
        (one.saving, other.saving),
        (one.bill, other.bill),
    ):
        for name in left.__struct_fields__:
            value = getattr(right, name)
            wanted = pytest.approx(value, abs=2e-5) if isinstance(value, float) else value
            assert getattr(left, name) == wanted, name


@pytest.mark.parametrize("seed", range(12))
async def test_it_is_what_a_fold_of_all_facts_gives_whenever_somebody_asks(seed):
    chance = random.Random(seed)
    facts = history(HISTORIES[seed % len(HISTORIES)])
    length = chance.choice([0.2, 0.7, 3])  # of a day, in lengths of the history
    with patch.object(daily, "DAY", max(1, round(length * facts[-1].at))):
        told = Told(facts)
        for left in reversed(range(6)):
            await told.tell(chance.randrange(len(facts) // 3) if left else len(facts))
            match chance.choice(["ask", "ask", "restart", "book"]) if left else "ask":
                case "restart":
                    told.today.begin(State())
                case "book":
                    await told.today.books(told.now)
                case _:
                    begun = told.now // daily.DAY * daily.DAY
                    for since in (None, begun) if begun < told.now else ():
                        same(await told.report(since), told.plainly(since))


async def test_a_report_over_today_looks_at_the_facts_that_came_since_the_last_one_and_at_no_others():
    told = Told(history(1))
    reads, seen = [], []
    read, see = told.journal.read, UsageLedger.see
    told.journal.read = lambda after, limit: reads.append(after) or read(after, limit)
    with patch.object(UsageLedger, "see", lambda ledger, fact: seen.append(fact) or see(ledger, fact)):
        await told.tell(500)
        await told.report()  # the daemon has just begun: what is there is read
        for more in (0, 7, 0, 40):
            reads.clear()
            seen.clear()
            await told.tell(more)
            await told.report()
            await told.report(since=0)
            assert (reads, len(seen)) == ([], more)


async def test_facts_that_come_while_the_day_is_read_are_booked_once():
    told = Told(history(0))
    await told.tell(250)
    read, came = told.journal.read, []

    async def slowly(after, limit):
        found = await read(after, limit)
        if len(came) < 3:
            came.append(after)
            await told.tell(30)
        return found

    told.journal.read = slowly
    same(await told.report(), told.plainly())
    assert len(came) == 3


async def test_facts_that_are_durable_when_the_day_is_read_and_heard_of_afterwards_are_booked_once():
    """Sinks hear of facts a little later than the disk has them."""
    told = Told(history(0))
    await told.tell(200)
    late = await told.tell(50, later=True)
    await told.report()
    told.today.on_facts(late)
    await told.tell(100)
    same(await told.report(), told.plainly())


async def test_a_report_is_of_its_moment_whatever_is_booked_while_it_is_made():
    told = Told(history(0))
    await told.tell(200)
    books, wanted = await told.today.books(told.now), told.plainly()
    now = told.now
    await told.tell(200)
    await told.today.books(told.now)
    same(books.view(0, now), wanted)


async def test_what_a_failed_commit_left_in_the_journal_is_booked_once_the_writer_is_back():
    """Nobody was told of it: so the writer's new life is what counts, and not what was heard."""
    told = Told(history(0))
    await told.tell(200)
    await told.report()
    await told.tell(50, later=True)
    told.today.begin(State())
    await told.tell(100)
    same(await told.report(), told.plainly())


async def test_books_of_the_day_before_are_remembered_until_the_journal_has_them():
    facts = history(3)
    day = facts[-1].at // 2 + 1
    with patch.object(daily, "DAY", day):
        told = Told(facts)
        await told.tell(sum(fact.at < day // 2 for fact in facts))
        await told.report()
        await told.tell(len(facts))
        await told.report()
        assert list(told.today.over) == [0]
        with patch.object(told.journal, "read", side_effect=AssertionError("it reads facts")):
            same(await told.report(), told.plainly())


async def test_a_writer_that_begins_anew_while_the_day_is_read_makes_it_be_read_again():
    """What the first reading has seen may not be what the journal has now."""
    told = Told(history(8))
    await told.tell(300)
    settled, times = told.settled, []

    async def restarted():
        times.append(told.durable)
        if len(times) == 1:
            told.today.begin(State())
        return await settled()

    told.today._settled = restarted
    same(await told.report(), told.plainly())
    assert len(times) == 2


@pytest.mark.looptime
async def test_facts_are_booked_a_moment_after_they_come_so_that_whoever_asks_waits_for_none():
    told = Told(history(1))
    await told.tell(300)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(told.today.run)
        await anyio.sleep(daily.FIRST_S + 30)  # the day so far is read
        await told.tell(100)
        await anyio.sleep(daily.EVERY_S + 1)
        wanted = told.plainly()
        with (
            patch.object(UsageLedger, "see", side_effect=AssertionError("it books facts")),
            patch.object(told.journal, "read", side_effect=AssertionError("it reads facts")),
        ):
            same(await told.report(), wanted)
        tasks.cancel_scope.cancel()


@pytest.mark.looptime
async def test_a_writer_that_is_down_when_the_day_is_to_be_read_is_asked_again_later():
    told = Told(history(1))
    await told.tell(300)
    settled, downs = told.settled, [Unavailable("the daemon is starting")] * 2

    async def up_again():
        if downs:
            raise downs.pop()
        return await settled()

    told.today._settled = up_again
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(told.today.run)
        for _ in range(5):
            await anyio.sleep(daily.FIRST_S * 1.5)
            await told.tell(20)
        assert downs == []
        with patch.object(told.journal, "read", side_effect=AssertionError("it reads facts")):
            same(await told.report(), told.plainly())
        tasks.cancel_scope.cancel()
