"""Compaction: what is let go of, what outlives it, and that nobody is told less than before without knowing it.

- A report says the same of days whose facts are gone as it said when they were there.
- A daemon that starts on a compacted journal has the state that it had.
- A daemon that is killed in the middle goes on where it was; commits wait no more than a moment.
"""

import asyncio
import contextlib
import random
import sqlite3
import time
from contextlib import closing
from types import SimpleNamespace
from unittest.mock import patch

import anyio
import msgspec
import pytest
from memory_journal import MemoryJournal

from rollmuxd.core import facts as f
from rollmuxd.core.apply import apply
from rollmuxd.core.config import Config, DriverTraits
from rollmuxd.core.decision import Decision
from rollmuxd.core.effects import Observe, Perform
from rollmuxd.core.inputs import (
    DrainNode,
    GpuObservation,
    HostObserved,
    HostSpec,
    NodeSpec,
    OpenSession,
    OrderDone,
    RegisterJob,
    ReleaseSlot,
    RequestSlot,
    Start,
    Tick,
    UndrainNode,
)
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.core.spec import JobSpec, PhaseSpec, StateSpec, Want
from rollmuxd.core.state import State
from rollmuxd.daemon.journal.backup import backup, check, restore
from rollmuxd.daemon.journal.file import JournalDamaged, JournalFailed
from rollmuxd.daemon.journal.store import Journal
from rollmuxd.daemon.usage import daily
from rollmuxd.daemon.usage.daily import DAY, FactsGone, LiveUsage
from rollmuxd.daemon.usage.ledger import UsageLedger
from rollmuxd.policies.rollmux import RollMux

pytestmark = pytest.mark.asyncio
HOUR = 3_600_000
DAYS = 5


class Cluster:
    """Three jobs of two owners take turns on two nodes, for days; nothing fails. All of it is facts."""

    def __init__(self, begin=20_000 * DAY + 7 * HOUR):
        self.facts = []
        config = Config(drivers={"mock": DriverTraits(idempotent=True, probes=True)}, lease_ms=40 * DAY)
        self.core = Scheduler(config, RollMux())
        self.now = begin
        nodes = tuple(
            NodeSpec(f"{pool}/gpu0-1", pool, (f"{pool}/gpu0", f"{pool}/gpu1"), (pool,), "H", 80_000, price)
            for pool, price in (("rollout", 2.0), ("train", 5.0))
        )
        self.tell(Start(tuple(HostSpec(pool, "fake", 900_000) for pool in ("rollout", "train")), nodes))
        self.jobs = {}
        for owner, name in (("team", "a"), ("team", "b"), ("others", "c")):
            spec = JobSpec(
                name=name,
                phases=tuple(PhaseSpec(pool, (pool,), planned_ms=HOUR) for pool in ("rollout", "train")),
                wants=(Want("rollout"), Want("train")),
                states=tuple(
                    StateSpec(pool, gpu_mb=20_000, ram_mb=20_000, driver="mock") for pool in ("rollout", "train")
                ),
            )
            job = self.tell(RegisterJob(owner, "ann", spec)).answer.job
            self.jobs[job] = self.tell(OpenSession(job, pid=1, host="box", started=name)).answer.session
        self.asked = dict.fromkeys(self.jobs, 0)
        self.orders = []

    def tell(self, given) -> Decision:
        done = self.core.handle(given, self.now)
        self.facts += done.facts
        for effect in done.effects:
            if isinstance(effect, Perform):
                self.orders = [*getattr(self, "orders", []), effect.order]
            elif isinstance(effect, Observe):
                self.tell(HostObserved(effect.host, self.observe(effect.host), "boot"))
        return done

    def observe(self, host):
        return tuple(GpuObservation(f"{host}/gpu{number}", 0) for number in (0, 1))

    def live(self, until, rng):
        """Somebody does something, at times of nobody's choosing."""
        while self.now < until:
            self.now += rng.randrange(1, 20 * 60_000)
            if (due := self.core.deadline()) is not None and due <= self.now:
                self.tell(Tick())
            state = self.core.state
            if self.orders and rng.random() < 0.7:
                order = self.orders.pop(0)
                self.tell(OrderDone(order, self.observe(state.nodes[state.orders[order].node].host)))
                continue
            job = rng.choice(list(self.jobs))
            slot = state.jobs[job].slot
            if rng.random() < 0.03:
                self.tell(DrainNode("train/gpu0-1", by="ops"))
                self.tell(UndrainNode("train/gpu0-1", by="ops"))
            elif slot is not None and state.slots[slot].status == "running":
                node = state.slots[slot].gpus[0].partition("/")[0]
                self.tell(ReleaseSlot(slot, state.slots[slot].fence, self.observe(node)))
            elif slot is None and state.jobs[job].queued is None:
                self.asked[job] += 1
                phase = ("rollout", "train")[self.asked[job] % 2]
                self.tell(RequestSlot(job, self.jobs[job], phase, f"{job}-{self.asked[job]}"))


@pytest.fixture(scope="module")
def lived():
    cluster = Cluster()
    cluster.live(20_000 * DAY + DAYS * DAY + 9 * HOUR, random.Random(4))
    kinds = {f.name(fact) for fact in cluster.facts}
    assert {"slot_granted", "order_ended", "node_draining", "turn_skipped"} & kinds
    assert len({fact.at // DAY for fact in cluster.facts}) == DAYS + 1
    return cluster


async def written(folder, cluster):
    journal = Journal.open(folder)
    await journal.append(list(enumerate(cluster.facts, 1)))
    await journal.snapshot(len(cluster.facts), msgspec.json.encode(cluster.core.state))
    return journal


def keeper(journal, cluster, keep):
    async def settled():
        return cluster.now, len(cluster.facts)

    return LiveUsage(journal, settled, keep)


ALL, ONE = 1_000, 1


def plainly(cluster, since, until):
    """The report as it always was: fold everything from the first fact on."""
    ledger = UsageLedger(since=since or 0, until=until)
    for fact in cluster.facts:
        if not ledger.see(fact):
            break
    usage, end = ledger.close(cluster.now)
    return usage.view(ledger.since, end)


def same(one, other):
    """Figures are sums of the same numbers in another order."""
    assert [row.name for row in one.work] == [row.name for row in other.work]
    assert [row.pool for row in one.pools] == [row.pool for row in other.pools]
    for mine, theirs in zip(
        (*one.work, *one.pools, one.saving), (*other.work, *other.pools, other.saving), strict=True
    ):
        for name in mine.__struct_fields__:
            value = getattr(theirs, name)
            wanted = pytest.approx(value, abs=3e-6) if isinstance(value, float) else value
            assert getattr(mine, name) == wanted, name


async def reported(journal, cluster, since, until):
    of = keeper(journal, cluster, ALL)
    with patch.object(of, "usage", side_effect=JournalFailed("nothing is written down by a report")):
        usage, end = await of.between(since, until, cluster.now, len(cluster.facts))
    return usage.view(since or 0, end)


BEGIN = 20_000 * DAY
SPANS = [
    (None, None),
    (BEGIN, BEGIN + DAY),
    (BEGIN + DAY, BEGIN + 4 * DAY),
    (BEGIN + 2 * DAY, None),
    (BEGIN + 4 * DAY + HOUR, None),
    (None, BEGIN + 5 * DAY + 2 * HOUR),
]
WITHIN = [
    (BEGIN + DAY + HOUR, BEGIN + DAY + 3 * HOUR),
    (BEGIN + 9 * HOUR, BEGIN + 3 * DAY + 5 * HOUR),
    (None, BEGIN + DAY + 1),
]


@pytest.mark.parametrize("keep", [None, ALL, ONE], ids=["not booked", "booked", "compacted"])
async def test_a_report_says_the_same_before_and_after_the_facts_are_gone(tmp_path, lived, keep):
    journal = await written(tmp_path, lived)
    if keep is not None:
        await keeper(journal, lived, keep).run_once()
        assert len(await journal.days()) == DAYS
        assert (journal.first > 1) == (keep is ONE)
    for since, until in SPANS + ([] if keep is ONE else WITHIN):
        same(await reported(journal, lived, since, until), plainly(lived, since, until))
    await journal.close()


async def test_a_report_of_a_part_of_a_day_whose_facts_are_gone_says_so(tmp_path, lived):
    journal = await written(tmp_path, lived)
    await keeper(journal, lived, ONE).run_once()
    for since, until in WITHIN:
        with pytest.raises(FactsGone, match="begin and end the span at the beginning of a day"):
            await reported(journal, lived, since, until)
    await journal.close()


async def test_a_report_from_memory_is_the_same(lived):
    journal = MemoryJournal()
    await journal.append(list(enumerate(lived.facts, 1)))
    for since, until in SPANS + WITHIN:
        same(await reported(journal, lived, since, until), plainly(lived, since, until))


async def test_days_are_booked_one_by_one_as_they_pass_and_come_to_the_same(tmp_path):
    cluster, rng = Cluster(), random.Random(4)
    journal = Journal.open(tmp_path)
    told = 0
    for day in range(1, DAYS + 1):
        cluster.live(BEGIN + day * DAY + 5 * HOUR, rng)
        await journal.append(list(enumerate(cluster.facts, 1))[told:])
        told = len(cluster.facts)
        await keeper(journal, cluster, ONE).run_once()
        assert len(await journal.days()) == day
    same(await reported(journal, cluster, None, None), plainly(cluster, None, None))
    await journal.close()


async def test_a_daemon_that_starts_on_a_compacted_journal_has_the_state_that_it_had(tmp_path, lived):
    journal = await written(tmp_path, lived)
    await keeper(journal, lived, ONE).run_once()
    first = journal.first
    await journal.close()
    assert first > 100
    journal = Journal.open(tmp_path)
    assert journal.first == first
    for snapshot in (True, False):
        if not snapshot:
            await journal.operate(damage("DELETE FROM snapshots WHERE day IS NULL"))
        past = journal.load()
        state = msgspec.json.decode(past.snapshot, type=State)
        count = 0
        for seq, fact in past.facts:
            count += 1
            assert fact == lived.facts[seq - 1]
            apply(state, fact)
        assert snapshot or count > 10
        assert msgspec.json.encode(state) == msgspec.json.encode(lived.core.state)
    await journal.append([(len(lived.facts) + 1, f.HostAdded(lived.now, HostSpec("new", "fake", 0)))])
    await journal.close()
    found = check(tmp_path / "journal.sqlite3")
    assert found.good, found.line()
    assert (found.first, found.last) == (first, len(lived.facts) + 1)
    assert "compacted" in found.line()


async def test_a_compacted_journal_is_backed_up_and_restored_like_any(tmp_path, lived):
    journal = await written(tmp_path / "live", lived)
    await keeper(journal, lived, ONE).run_once()
    backup(tmp_path / "live" / "journal.sqlite3", tmp_path / "kept")
    first = journal.first
    await journal.close()
    restore(tmp_path / "kept", tmp_path / "new")
    journal = Journal.open(tmp_path / "new")
    assert journal.first == first
    same(await reported(journal, lived, None, None), plainly(lived, None, None))
    await journal.close()


async def test_damage_after_the_cut_is_found_as_before_and_the_state_at_the_cut_is_proven(tmp_path, lived):
    journal = await written(tmp_path, lived)
    await keeper(journal, lived, ONE).run_once()
    first = journal.first
    await journal.close()
    with closing(sqlite3.connect(tmp_path / "journal.sqlite3", isolation_level=None)) as connection:
        connection.execute("DELETE FROM snapshots WHERE day IS NULL OR seq >= ?", (first,))
        connection.execute("UPDATE facts SET body = body || ' ' WHERE seq = ?", (first,))
    journal = Journal.open(tmp_path)
    with pytest.raises(JournalDamaged, match=f"fact {first} is"):
        list(journal.load().facts)
    await journal.close()
    with closing(sqlite3.connect(tmp_path / "journal.sqlite3", isolation_level=None)) as connection:
        connection.execute("UPDATE snapshots SET sum = sum + 1")
    journal = Journal.open(tmp_path)
    with pytest.raises(
        JournalDamaged, match=f"facts up to {first - 1} were compacted away, and the state after them is damaged"
    ):
        journal.load()
    await journal.close()


def damage(statement):
    return lambda writer: writer.execute(statement).rowcount


async def test_a_report_goes_round_what_is_damaged_where_there_are_facts(tmp_path, lived):
    journal = await written(tmp_path, lived)
    await keeper(journal, lived, ALL).run_once()
    await journal.operate(damage("UPDATE usage SET body = x'00' WHERE day = 20002"))
    await journal.operate(damage("UPDATE snapshots SET body = x'00' WHERE day IN (20003, 20005)"))
    for since, until in SPANS + WITHIN:
        same(await reported(journal, lived, since, until), plainly(lived, since, until))
    await journal.close()


async def test_a_report_of_damaged_books_whose_facts_are_gone_says_so(tmp_path, lived):
    journal = await written(tmp_path, lived)
    await keeper(journal, lived, ONE).run_once()
    await journal.operate(damage("UPDATE usage SET body = x'00' WHERE day = 20002"))
    with pytest.raises(FactsGone):
        await reported(journal, lived, None, None)
    await journal.close()


async def test_what_keeps_the_books_from_being_closed_shows_until_it_is_gone(tmp_path, lived):
    journal = await written(tmp_path, lived)
    of = keeper(journal, lived, ALL)
    await journal.operate(damage("UPDATE facts SET sum = sum + 1 WHERE seq = 40"))
    with pytest.raises(JournalDamaged, match=r"fact 40 is .*journal check"):
        await of.run_once()
    assert "fact 40 is damaged" in of.trouble
    await journal.operate(damage("UPDATE facts SET sum = sum - 1 WHERE seq = 40"))
    of = keeper(journal, lived, ALL)  # as after a restart
    await of.run_once()
    assert of.trouble == ""
    assert len(await journal.days()) == DAYS
    await journal.close()


async def test_no_day_is_booked_of_damaged_facts(tmp_path, lived):
    journal = await written(tmp_path, lived)
    await journal.operate(damage("UPDATE facts SET body = replace(body, '\"at\":', '\"at\": ') WHERE seq = 40"))
    with pytest.raises(JournalDamaged, match="fact 40 is damaged"):
        await keeper(journal, lived, ONE).run_once()
    assert await journal.days() == []
    await journal.close()


@pytest.fixture
def later(lived, monkeypatch):
    """A clock that is ahead by a year: nothing happens on all these days."""
    monkeypatch.setattr(daily, "PAUSE_S", 0)
    return SimpleNamespace(facts=lived.facts, core=lived.core, now=lived.now + 340 * DAY)


LATER = [
    *((None, None), (None, BEGIN + 100 * DAY + HOUR), (BEGIN + 2 * DAY, BEGIN + 300 * DAY)),
    *((BEGIN + 50 * DAY, None), (BEGIN + 4 * DAY + HOUR, BEGIN + 250 * DAY + HOUR)),
]


async def states(journal):
    def days(writer):
        return [day - 20_000 for (day,) in writer.execute("SELECT day FROM snapshots WHERE day NOT NULL ORDER BY day")]

    return await journal.operate(days)


async def test_days_with_facts_after_days_without_are_booked_as_any(tmp_path, monkeypatch):
    monkeypatch.setattr(daily, "PAUSE_S", 0)
    cluster, rng = Cluster(), random.Random(4)
    cluster.live(BEGIN + DAY + 9 * HOUR, rng)
    cluster.now += 30 * DAY
    cluster.live(cluster.now + 2 * DAY, rng)
    journal = await written(tmp_path, cluster)
    await keeper(journal, cluster, ALL).run_once()
    for since in (None, BEGIN + 2 * DAY, BEGIN + 20 * DAY + HOUR, BEGIN + 31 * DAY, BEGIN + 32 * DAY + HOUR):
        for until in (None, BEGIN + 31 * DAY + HOUR, BEGIN + 32 * DAY):
            if until is None or (since or 0) < until:
                same(await reported(journal, cluster, since, until), plainly(cluster, since, until))
    await journal.close()
    assert check(tmp_path / "journal.sqlite3").good


async def test_after_a_cut_within_days_without_facts_all_is_as_after_any(tmp_path, lived, later):
    journal = await written(tmp_path, lived)
    soon = SimpleNamespace(facts=lived.facts, now=lived.now + 4 * DAY)
    await keeper(journal, soon, ONE).run_once()
    assert journal.first == len(lived.facts) + 1
    for ahead in (5, 6, 340):
        now = SimpleNamespace(facts=lived.facts, now=lived.now + ahead * DAY)
        await keeper(journal, now, ONE).run_once()
    for since, until in (LATER[0], LATER[2], LATER[3]):
        same(await reported(journal, later, since, until), plainly(later, since, until))
    await journal.operate(damage("DELETE FROM snapshots WHERE day IS NULL"))
    state = msgspec.json.decode(journal.load().snapshot, type=State)
    assert msgspec.json.encode(state) == msgspec.json.encode(lived.core.state)
    await journal.close()
    assert check(tmp_path / "journal.sqlite3").good


async def test_the_state_at_a_cut_stays_whatever_comes_after_it(tmp_path, lived):
    """The days before the cut have none, though they begin after the same fact."""
    journal = await written(tmp_path, lived)
    soon = SimpleNamespace(facts=list(lived.facts), now=lived.now + 4 * DAY)
    await keeper(journal, soon, ALL).run_once()
    await keeper(journal, soon, 0).run_once()
    assert await states(journal) == [9]
    soon.facts.append(f.HostAdded(soon.now, HostSpec("new", "fake", 0)))
    await journal.append([(len(soon.facts), soon.facts[-1])])
    soon.now += 3 * DAY
    await keeper(journal, soon, ALL).run_once()
    assert await states(journal) == [9, 10, 11, 12]
    await journal.operate(damage("DELETE FROM snapshots WHERE seq >= (SELECT max(seq) FROM facts)"))
    assert len(list(journal.load().facts)) == 1
    await journal.close()
    assert check(tmp_path / "journal.sqlite3").good


async def test_who_did_what_outlives_the_facts_and_goes_when_it_is_old_too(tmp_path, monkeypatch):
    did = f.Audited(BEGIN + 1, action="drain_node", who="ops/op")
    facts = [f.HostAdded(BEGIN, HostSpec("h", "fake", 0)), did, f.LoopStalled(BEGIN + 2, 7)]
    cluster = SimpleNamespace(facts=facts, now=BEGIN + 3 * DAY)
    journal = Journal.open(tmp_path)
    await journal.append(list(enumerate(facts, 1)))
    await keeper(journal, cluster, ONE).run_once()
    assert journal.first == 4
    assert await journal.audited(0, 10) == [(2, did)]
    assert await journal.audited(2, 10) == []
    await journal.operate(damage("UPDATE facts SET sum = 1"))
    assert check(tmp_path / "journal.sqlite3").wrong == ["the audit trail is damaged at fact 2"]
    monkeypatch.setattr(daily, "AUDIT_DAYS", 2)
    await keeper(journal, cluster, ONE).run_once()
    assert await journal.audited(0, 10) == []
    await journal.close()
    assert check(tmp_path / "journal.sqlite3").good


async def test_nothing_goes_whose_state_could_not_be_read(tmp_path, lived):
    journal = await written(tmp_path, lived)
    await keeper(journal, lived, ALL).run_once()
    await journal.operate(lambda writer: writer.execute("UPDATE snapshots SET body = x'00' WHERE day < 20005"))
    await keeper(journal, lived, ONE).run_once()
    assert journal.first == 1
    assert len(await journal.read(0, 10_000)) == len(lived.facts)
    await journal.close()


async def test_a_cut_whose_commit_fails_costs_no_fact(tmp_path, lived, monkeypatch):
    journal = await written(tmp_path, lived)
    await keeper(journal, lived, ALL).run_once()
    of, operate = keeper(journal, lived, ONE), journal.operate

    async def operating(operation):
        def fails(writer):
            operation(writer)
            raise sqlite3.OperationalError("disk I/O error")

        return await operate(fails)

    monkeypatch.setattr(journal, "operate", operating)
    with pytest.raises(JournalFailed):
        await of.run_once()
    monkeypatch.setattr(journal, "operate", operate)
    await journal.recover()
    assert check(tmp_path / "journal.sqlite3").first == journal.first == 1
    await of.run_once()
    assert check(tmp_path / "journal.sqlite3").first == journal.first > 1
    await journal.close()


async def test_on_a_full_disk_no_day_is_written_down_and_reports_say_the_same(tmp_path, lived):
    journal = await written(tmp_path, lived)
    of, journal.tight = keeper(journal, lived, ONE), True
    with pytest.raises(JournalFailed, match="disk of the state directory is full"):
        await of.run_once()
    for since, until in SPANS + WITHIN:
        usage, end = await of.between(since, until, lived.now, len(lived.facts))
        same(usage.view(since or 0, end), plainly(lived, since, until))
    assert await journal.days() == []
    journal.tight = False
    await of.run_once()
    assert len(await journal.days()) == DAYS
    await journal.close()


@pytest.mark.parametrize("number", [0, 3, 5, 6, 7], ids=["books", "books more", "cuts", "sweeps", "sweeps on"])
@pytest.mark.parametrize("how", ["cancelled", "killed"])
async def test_wherever_it_breaks_off_the_next_one_goes_on(tmp_path, lived, monkeypatch, number, how):
    journal = await written(tmp_path, lived)
    of, operate, scope, left = keeper(journal, lived, ONE), journal.operate, anyio.CancelScope(), number

    async def operating(operation):
        nonlocal left
        left -= 1
        if left < 0 and how == "killed":
            raise KeyboardInterrupt
        if left < 0:
            scope.cancel()
        return await operate(operation)

    monkeypatch.setattr(journal, "operate", operating)
    with scope, contextlib.suppress(KeyboardInterrupt):
        await of.run_once()
    assert left == -1
    assert of.trouble == ""
    monkeypatch.setattr(journal, "operate", operate)
    await journal.close()
    assert check(tmp_path / "journal.sqlite3").good
    journal = Journal.open(tmp_path)
    await keeper(journal, lived, ONE).run_once()
    assert journal.first > 1
    same(await reported(journal, lived, None, None), plainly(lived, None, None))
    await journal.close()
    assert check(tmp_path / "journal.sqlite3").good


async def test_space_is_used_again_and_commits_wait_no_more_than_a_moment(tmp_path):
    journal = Journal.open(tmp_path)
    fact = f.SlotQueued(0, "s123", "j12", 1, "n1", "rollout", "0123456789abcdef" * 8)
    day = 20_000 * DAY
    first = f.HostAdded(day, HostSpec("h", "fake", 0))
    state = State()
    apply(state, first)
    rows = [(1, first), *((seq, f.LoopStalled(day + seq, 7)) for seq in range(2, 24_001))]
    await journal.append(rows)
    assert fact.at == 0
    before = (tmp_path / "journal.sqlite3").stat().st_size + (tmp_path / "journal.sqlite3-wal").stat().st_size
    seq, waits, going = 24_000, [], True

    async def write_on():
        nonlocal seq
        while going:
            seq += 1
            began = time.perf_counter()
            await journal.append([(seq, f.LoopStalled(day + 3 * DAY, 7))])
            waits.append(time.perf_counter() - began)
            await asyncio.sleep(0.002)

    async def settled():
        return day + 3 * DAY, 24_000

    writing = asyncio.create_task(write_on())
    began = time.perf_counter()
    await LiveUsage(journal, settled, ONE).run_once()
    took = time.perf_counter() - began
    going = False
    await writing
    assert journal.first == 24_001
    await journal.append([(n, f.LoopStalled(day + 3 * DAY, 7)) for n in range(seq + 1, seq + 20_001)])
    await journal.close()

    assert (tmp_path / "journal.sqlite3").stat().st_size < 1.1 * before  # some facts came before any were deleted
    waits.sort()
    assert len(waits) > 20
    # As a rule a commit waits 1 ms, and 10 to 30 ms at most; all of it takes seconds. A busy machine slows both.
    assert waits[len(waits) // 2] < took / 40
    assert waits[-1] < took / 4
    assert check(tmp_path / "journal.sqlite3").good
