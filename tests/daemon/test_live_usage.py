"""The usage of today is counted as facts come. It is what a fold of all facts gives.

Random histories (processes die, hosts vanish, orders fail) become durable bit by bit; days are a few seconds long, so
that they end while facts come; now and then somebody asks.
"""

import random
from functools import cache
from unittest.mock import patch

import anyio
import pytest
from memory_journal import MemoryJournal
from simkit import swarm

from rollmuxd.core.model import Job, JobStatus
from rollmuxd.core.spec import JobSpec
from rollmuxd.core.state import State
from rollmuxd.daemon.journal.file import JournalDamaged, JournalFailed
from rollmuxd.daemon.usage import daily
from rollmuxd.daemon.usage.daily import LiveUsage
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
    """A journal and the usage beside it."""

    def __init__(self, facts):
        self.facts = facts
        self.durable = 0
        self.journal = MemoryJournal()
        self.today = LiveUsage(self.journal, self.settled)

    @property
    def now(self):
        return self.facts[self.durable - 1].at if self.durable else self.facts[0].at

    async def settled(self):
        return self.now, self.durable

    async def tell(self, count):
        """So many more facts are durable."""
        batch = [(self.durable + n, fact) for n, fact in enumerate(self.facts[self.durable : self.durable + count], 1)]
        if batch:
            await self.journal.append(batch)
            self.durable = batch[-1][0]

    async def report(self, since=None):
        usage, end = await self.today.between(since, None, self.now, self.durable)
        return usage.view(since or 0, end)

    def plainly(self, since=None):
        """The same, of all facts from the first one on."""
        ledger = UsageLedger(since=since or 0)
        for fact in self.facts[: self.durable]:
            ledger.see(fact)
        usage, end = ledger.close(self.now)
        return usage.view(ledger.since, end)


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
            if left and chance.random() < 0.3:
                await told.today.usage(told.now, told.durable)
            else:
                begun = told.now // daily.DAY * daily.DAY
                for since in (None, begun) if begun < told.now else ():
                    same(await told.report(since), told.plainly(since))


async def test_a_day_has_nothing_of_jobs_that_were_over_before_it():
    state = State()
    for name, status in (("over", JobStatus.ENDED), ("waits", JobStatus.WAITING)):
        state.jobs[name] = Job(name, "team", "ann", JobSpec(name, (), ()), 0, status=status)
    usage, _ = UsageLedger(since=0, until=1000, state=state).close()
    assert list(usage.work) == ["waits"]


async def test_a_report_over_today_looks_at_the_facts_that_came_since_the_last_one_and_at_no_others():
    told = Told(history(1))
    seen, see = [], UsageLedger.see
    with patch.object(UsageLedger, "see", lambda ledger, fact: seen.append(fact) or see(ledger, fact)):
        await told.tell(len(told.facts) - 47)
        await told.report()  # the daemon has just begun: what is there is read
        for more in (0, 7, 0, 40):
            seen.clear()
            await told.tell(more)
            await told.report()
            await told.report(since=0)
            assert len(seen) == more


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

    told.journal.read, wanted = slowly, told.plainly()
    same(await told.report(), wanted)
    assert len(came) == 3
    same(await told.report(), told.plainly())


async def test_a_report_is_of_its_moment_whatever_is_booked_while_it_is_made():
    told = Told(history(0))
    await told.tell(200)
    usage, wanted = await told.today.usage(told.now, told.durable), told.plainly()
    now = told.now
    await told.tell(200)
    await told.today.usage(told.now, told.durable)
    same(usage.view(0, now), wanted)


async def test_the_books_of_a_day_that_is_over_are_in_the_journal_before_any_report_is_made():
    facts = history(3)
    day = facts[-1].at // 2 + 1
    with patch.object(daily, "DAY", day):
        told = Told(facts)
        await told.tell(sum(fact.at < day // 2 for fact in facts))
        await told.report()
        await told.tell(len(facts))
        await told.report()
        assert await told.journal.days() == [0]
        with patch.object(told.journal, "read", side_effect=AssertionError("it reads facts")):
            same(await told.report(), told.plainly())


@pytest.mark.parametrize("error", [JournalFailed("just now"), JournalDamaged("j.sqlite3", "its end")])
async def test_a_day_that_is_over_is_reported_though_the_books_of_today_cannot_be_read(error):
    facts = history(3)
    day = facts[-1].at // 2 + 1
    with patch.object(daily, "DAY", day):
        told = Told(facts)
        await told.tell(len(facts))
        await told.report()  # which writes the books of the day that is over

        async def of_that_day():
            return (await told.today.between(None, day, told.now, told.durable))[0].view(0, day)

        whole = await of_that_day()
        with patch.object(told.today, "usage", side_effect=error):
            same(await of_that_day(), whole)
    assert whole.work


async def test_what_was_booked_in_part_when_the_journal_failed_is_booked_once():
    told = Told(history(1))
    await told.tell(300)
    await told.report()
    await told.tell(400)
    read = told.journal.read

    async def fails(after, limit):
        if after >= 500:
            raise JournalFailed("the disk does not answer")
        return await read(after, limit)

    told.journal.read = fails
    with pytest.raises(JournalFailed):
        await told.today.usage(told.now, told.durable)
    told.journal.read = read
    same(await told.report(), told.plainly())


@pytest.mark.looptime
async def test_facts_are_booked_soon_after_they_come_so_that_whoever_asks_waits_for_none():
    told = Told(history(1))
    await told.tell(300)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(told.today.run)
        await anyio.sleep(daily.EVERY_S * 1.5)  # the day so far is read
        await told.tell(100)
        await anyio.sleep(daily.EVERY_S)
        wanted = told.plainly()
        with (
            patch.object(UsageLedger, "see", side_effect=AssertionError("it counts facts")),
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
        await anyio.sleep(daily.EVERY_S * 3.5)
        assert downs == []
        with patch.object(told.journal, "read", side_effect=AssertionError("it reads facts")):
            same(await told.report(), told.plainly())
        tasks.cancel_scope.cancel()
