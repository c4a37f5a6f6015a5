"""Whatever the disk, the core and the clock do, these sentences about the writer stay true.

- No answer, refusal, reading or effect leaves before the facts that it hangs on are durable.
- After a failed commit memory is what the journal is, and nobody was told otherwise.
- Who could not be heard is not held silent.

All of it in virtual time.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from typing import NamedTuple

import anyio
import pytest
from memory_journal import MemoryJournal

from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.causes import said
from rollmuxd.core.decision import Answer, Decision
from rollmuxd.core.effects import Observe
from rollmuxd.core.errors import BrokenInvariant, UnknownThing
from rollmuxd.core.facts import encode
from rollmuxd.core.inputs import Heartbeat, HostObserved, RegisterJob, WithdrawSlot
from rollmuxd.core.model import Job, Slot
from rollmuxd.core.spec import JobSpec
from rollmuxd.daemon import writer
from rollmuxd.daemon.entries import entries
from rollmuxd.daemon.journal.file import JournalFailed
from rollmuxd.daemon.writer import Unavailable

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]


def now() -> float:
    return asyncio.get_running_loop().time()


def add(host: str) -> HostObserved:
    return HostObserved(host, unreachable=said(""))


def kept(journal: MemoryJournal) -> list[str]:
    return [fact.host.id for _, fact in journal.facts() if isinstance(fact, f.HostAdded)]


async def test_an_answer_waits_until_its_facts_are_durable(running, slow_journal):
    async with running(slow_journal(1.0)) as rig:
        began = now()
        answer = await rig.writer.submit(add("a"))

        assert now() - began == pytest.approx(1.0)
        assert answer.slot == "a"


async def test_a_refusal_and_a_reading_wait_for_the_facts_that_they_may_have_seen(running, slow_journal):
    async with running(slow_journal(1.0)) as rig:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(rig.writer.submit, add("a"))
            await anyio.sleep(0.25)
            began = now()

            assert "a" in await rig.writer.read(lambda core, _: list(core.state.hosts))
            assert now() - began == pytest.approx(0.75)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(rig.writer.submit, add("b"))
            await anyio.sleep(0.25)
            began = now()
            with pytest.raises(UnknownThing):
                await rig.writer.submit(WithdrawSlot("s1"))

            assert now() - began == pytest.approx(0.75)


async def test_a_heartbeat_that_finds_no_commit_under_way_is_answered_at_once(running, slow_journal):
    async with running(slow_journal(1.0)) as rig:
        await rig.writer.submit(add("a"))
        beat = rig.writer.submit(Heartbeat("n1"))

        with pytest.raises(StopIteration):  # it comes to its end without waiting once
            beat.send(None)


async def test_inputs_that_come_during_a_commit_share_the_next_one_and_are_answered_in_order(running, slow_journal):
    async with running(slow_journal(1.0)) as rig:
        answered = []

        async def submit(host: str) -> None:
            answered.append((await rig.writer.submit(add(host))).slot)

        began = now()
        async with anyio.create_task_group() as tasks:
            for number in range(100):
                tasks.start_soon(submit, f"h{number}")

        assert answered == [f"h{number}" for number in range(100)]
        assert now() - began == pytest.approx(1.0)


async def test_effects_come_after_their_facts_are_durable_and_in_order(running, slow_journal):
    async with running(slow_journal(1.0)) as rig:
        rig.writer.post(add("a"))
        rig.writer.post(add("b"))
        await anyio.sleep(0.5)
        rig.writer.post(add("c"))
        assert rig.performed == []
        await anyio.sleep(0.6)
        assert rig.performed == [Observe("a"), Observe("b")]
        await anyio.sleep(0.5)

        assert rig.performed == [Observe("a"), Observe("b"), Observe("c")]


async def test_sinks_know_of_a_fact_before_anything_of_its_effects_has_begun(running):
    async with running(MemoryJournal()) as rig:
        seen = []
        # As the actuator does it: a task, which runs in the loop's next turn.
        rig.writer._perform = lambda _: asyncio.get_running_loop().call_soon(lambda: seen.append(len(rig.sunk)))
        await rig.writer.submit(add("a"))
        await anyio.sleep(0.01)

        assert seen == [len(rig.sunk)]


async def test_sinks_get_each_fact_once_with_its_number(running):
    async with running(MemoryJournal()) as rig:
        await rig.writer.submit(add("a"))
        await anyio.sleep(0.01)

        assert [(seq, f.name(fact)) for seq, fact in rig.sunk] == [(1, "daemon_started"), (2, "host_added")]
        assert rig.later == []  # logs and metrics keep nobody waiting

        await anyio.sleep(0.02)

        assert [(entry.seq, entry.fact) for entry in rig.later] == rig.sunk


async def test_after_a_failed_commit_who_waits_and_who_comes_is_told_unavailable(running, slow_journal):
    journal = slow_journal(1.0)
    async with running(journal) as rig:
        journal.failing = JournalFailed("disk on fire")
        refused = []

        async def submit(host: str) -> None:
            try:
                await rig.writer.submit(add(host))
            except Unavailable:
                refused.append(host)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(submit, "a")
            tasks.start_soon(submit, "b")
        assert refused == ["a", "b"]
        with pytest.raises(Unavailable):
            await rig.writer.submit(Heartbeat("n1"))
        with pytest.raises(Unavailable):
            await rig.writer.read(lambda core, _: core.state)

        assert rig.performed == []
        assert kept(journal) == []


async def test_the_writer_comes_back_with_what_the_journal_has(running):
    journal = MemoryJournal()
    async with running(journal) as rig:
        await rig.writer.submit(add("a"))
        journal.failing = JournalFailed("disk full")
        with pytest.raises(Unavailable):
            await rig.writer.submit(add("lost"))
        await anyio.sleep(60)
        journal.failing = None
        await anyio.sleep(6)

        assert rig.hosts() == ["a"]
        await rig.writer.submit(add("b"))
        assert kept(journal) == ["a", "b"]
        assert rig.performed == [Observe("a"), Observe("b")]  # and nothing of what was lost
        assert [seq for seq, _ in journal.load().facts] == [1, 2, 3, 4]
        assert sum(isinstance(given, i.Start) for core in rig.cores for _, given in core.given) == 2


async def test_a_result_that_comes_while_the_writer_is_down_is_kept(running):
    journal = MemoryJournal()
    async with running(journal) as rig:
        journal.failing = JournalFailed("disk full")
        with pytest.raises(Unavailable):
            await rig.writer.submit(add("a"))
        rig.writer.post(i.OrderDone("o1"))
        rig.writer.post(i.OrderNotBegun("o2"))
        rig.writer.post(i.HostObserved("a", ()))
        journal.failing = None
        await anyio.sleep(1)

        assert [type(given) for _, given in rig.core.given][:3] == [i.Start, i.OrderDone, i.OrderNotBegun]


async def test_of_the_results_that_were_kept_one_that_crashes_the_core_costs_none_but_itself(running, monkeypatch):
    journal, posts = MemoryJournal(), 0
    async with running(journal) as rig:
        handle, post = type(rig.core).handle, rig.writer.post

        def crashes(core, given, at):
            if given == i.OrderDone("crash"):
                raise KeyError("crash")
            return handle(core, given, at)

        def counted(given):
            nonlocal posts
            posts += 1
            assert posts < 100, "it goes round and round"
            post(given)

        monkeypatch.setattr(type(rig.core), "handle", crashes)
        journal.failing = JournalFailed("disk full")
        with pytest.raises(Unavailable):
            await rig.writer.submit(add("a"))
        for order in ("o1", "crash", "o2"):
            rig.writer.post(i.OrderDone(order))
        journal.failing = None
        monkeypatch.setattr(rig.writer, "post", counted)
        await anyio.sleep(5)

        assert [given for _, given in rig.core.given if isinstance(given, i.OrderDone)] == [i.OrderDone("o2")]
        await rig.writer.submit(add("b"))


async def test_a_bug_of_ours_stops_the_writer_and_the_journal_has_not_seen_it(running):
    journal = MemoryJournal()
    async with running(journal) as rig:
        await rig.writer.submit(add("a"))
        with pytest.raises(BrokenInvariant):
            await rig.writer.submit(i.CloseSession("broken"))
        await rig.writer.stopped.wait()

        assert len(rig.failed) == 1
        assert kept(journal) == ["a"]
        assert journal.load().snapshot is None


async def test_an_input_that_crashes_the_core_harms_its_sender_only(running):
    journal = MemoryJournal()
    async with running(journal) as rig:
        await rig.writer.submit(add("a"))
        with pytest.raises(KeyError):
            await rig.writer.submit(i.CloseSession("crash"))
        await anyio.sleep(1)

        assert rig.hosts() == ["a"]  # the half-done host is gone
        await rig.writer.submit(add("b"))
        assert kept(journal) == ["a", "b"]


async def test_a_fact_that_cannot_be_written_down_has_not_happened(running):
    """Memory would else be ahead of the journal for ever, and the journal have a hole that no restart gets over."""
    journal = MemoryJournal()
    async with running(journal) as rig:
        await rig.writer.submit(add("a"))
        with pytest.raises(UnicodeEncodeError):
            await rig.writer.submit(add("no text \udcff"))
        rig.writer.post(add("nor this \udcff"))
        await anyio.sleep(1)

        assert rig.hosts() == ["a"]
        await rig.writer.submit(add("b"))
        rig.writer.post(add("nor that \udcff"))
        await anyio.sleep(1)
        await rig.writer.submit(add("c"))
        assert kept(journal) == ["a", "b", "c"]
        seqs = [seq for seq, _ in journal.load().facts]
        assert seqs == list(range(1, len(seqs) + 1))


@pytest.mark.parametrize("error", [KeyError("tick"), UnknownThing("job", "j1")], ids=["a crash", "a refusal"])
async def test_a_tick_that_crashes_each_time_does_not_take_the_whole_processor(running, error):
    async with running(MemoryJournal()) as rig:
        rig.core.crash_on_tick = error
        rig.core.due = rig.core.state.at + 1
        rig.writer.post(Heartbeat("n1"))
        await anyio.sleep(1)

        assert 3 <= len(rig.cores) <= 12  # two are made for a start


async def test_the_core_is_called_at_its_deadline(running):
    async with running(MemoryJournal()) as rig:
        rig.core.due = rig.core.state.at + 3_000
        rig.writer.post(Heartbeat("n1"))
        await anyio.sleep(3.1)

        assert [at for at, given in rig.core.given if isinstance(given, i.Tick)] == [1_003_000]


class Plain(NamedTuple):
    """A handle that can be cancelled, and no more."""

    cancel: Callable[[], None]


async def test_a_core_with_one_deadline_after_the_other_leaves_the_loop_to_calls(running, monkeypatch):
    """While waiting jobs are tried, the next tick is due at once. A tick of 3 ms is followed by 30 without one.

    uvloop gives a plain handle for what is due within half a millisecond: it does not say when.
    """
    loop = asyncio.get_running_loop()
    call_at = loop.call_at

    def as_uvloop(when, callback, *args, **more):
        handle = call_at(when, callback, *args, **more)
        return Plain(handle.cancel) if getattr(callback, "__name__", "") == "_on_time" else handle

    monkeypatch.setattr(loop, "call_at", as_uvloop)
    async with running(MemoryJournal()) as rig:
        handle, began = rig.core.handle, []

        def takes_3_ms(given, now):
            if isinstance(given, i.Tick):
                began.append(asyncio.get_running_loop().time())
                rig.jumped[0] += 0.003
            decision = handle(given, now)
            rig.core.due = now
            return decision

        rig.core.handle = takes_3_ms
        rig.writer.post(Heartbeat("n1"))
        for _ in range(40):
            await anyio.sleep(0.005)
            rig.writer.post(Heartbeat("n1"))  # nor does another input make it come sooner
        assert len(began) > 3
        assert all(later - before >= 0.0299 for before, later in pairwise(began))


async def test_an_earlier_deadline_moves_the_timer_forward(running):
    async with running(MemoryJournal()) as rig:
        rig.core.due = rig.core.state.at + 5_000
        rig.writer.post(Heartbeat("n1"))
        rig.core.due = rig.core.state.at + 1_000
        rig.writer.post(Heartbeat("n1"))
        await anyio.sleep(1.1)

        assert [at for at, given in rig.core.given if isinstance(given, i.Tick)] == [1_001_000]


async def test_a_loop_that_was_late_is_on_record_before_anything_else_is_handled(running):
    async with running(MemoryJournal(), lease_ms=60_000) as rig:
        rig.jumped[0] = 30.0
        await rig.writer.submit(Heartbeat("n1"))

        kinds = [type(given) for _, given in rig.core.given]
        assert kinds == [i.Start, i.Stalled, Heartbeat]
        assert rig.core.given[1][1].late_ms == 30_000 - 7_500  # a pulse, an eighth of the lease, was not due before


async def test_a_loop_that_was_late_by_less_than_a_quarter_lease_is_not(running):
    async with running(MemoryJournal(), lease_ms=60_000) as rig:
        rig.jumped[0] = 7.5 + 14.0
        await rig.writer.submit(Heartbeat("n1"))

        assert i.Stalled not in [type(given) for _, given in rig.core.given]


async def test_one_stall_is_one_fact_however_many_inputs_come_before_the_next_tick(running):
    async with running(MemoryJournal(), lease_ms=60_000) as rig:
        rig.jumped[0] = 30.0
        rig.core.due = rig.core.state.at  # what was due in the stall is done by the next tick
        for _ in range(100):
            rig.writer.post(Heartbeat("n1"))

        assert [type(given) for _, given in rig.core.given].count(i.Stalled) == 1


async def test_a_long_stop_is_no_stall(running):
    async with running(MemoryJournal()) as rig:
        rig.core.due = 0  # a lease that has run out: no job can renew it while the daemon stops
        rig.writer.drain()
        for name in "abcd":
            await anyio.sleep(60)
            await rig.writer.submit(add(name))
        assert [fact for _, fact in rig.sunk if isinstance(fact, f.LoopStalled)] == []


async def test_quiet_hours_are_no_stall(running):
    async with running(MemoryJournal(), lease_ms=60_000) as rig:
        await anyio.sleep(7_200)

        assert i.Stalled not in [type(given) for _, given in rig.core.given]


async def test_snapshots_are_written_and_a_restart_begins_with_one(running):
    journal = MemoryJournal()
    async with running(journal, snapshot_every=10) as rig:
        for number in range(25):
            await rig.writer.submit(add(f"h{number}"))
    past = journal.load()
    assert past.seq >= 20
    assert len(list(past.facts)) <= 6
    async with running(journal) as rig:
        assert rig.hosts() == [f"h{number}" for number in range(25)]
        await rig.writer.submit(add("next"))
        assert rig.writer.durable_seq == 28


async def test_only_a_start_after_a_kill_is_told_that_the_daemon_crashed_and_the_first_when_it_was_there(running):
    journal, told = MemoryJournal(), []
    journal.away_ms = 40_000

    async def live(*, stopped: bool) -> None:
        async with running(journal) as rig:
            await rig.writer.submit(add("a"))
            journal.failing = JournalFailed("disk full")
            with pytest.raises(Unavailable):
                await rig.writer.submit(add("b"))
            journal.failing = None
            await anyio.sleep(1)  # the writer has begun again, and nothing crashed
            starts = [given for core in rig.cores for _, given in core.given if isinstance(given, i.Start)]
            assert [given.away_ms for given in starts] == [40_000, 0], "none was away in between"
            told.append([given.crashed for given in starts])
            if stopped:
                rig.writer.stop()
                await rig.writer.stopped.wait()

    for stopped in (True, False, False, True, True):
        await live(stopped=stopped)

    assert told == [[False, False], [False, False], [True, False], [True, False], [False, False]]


async def test_a_daemon_to_which_nothing_happens_notes_that_it_is_there(running, monkeypatch):
    journal, noted = MemoryJournal(), []
    monkeypatch.setattr(journal, "touch", lambda: noted.append(1))
    async with running(journal):
        noted.clear()
        await anyio.sleep(60)

    assert len(noted) >= 5


async def hosts_in(journal, running, number):
    async with running(journal) as rig:
        for host in range(number):
            await rig.writer.submit(add(f"h{host}"))


async def test_a_replay_tells_how_far_it_is_and_the_loop_turns_meanwhile(running, monkeypatch):
    """Else a signal is not heard, and systemd ends a start that takes long, and the next one, for ever."""
    journal, turns, told = MemoryJournal(), [0], []
    await hosts_in(journal, running, 9)
    monkeypatch.setattr(writer, "REPLAYED_AT_ONCE", 3)
    monkeypatch.setattr(writer, "TOLD_EVERY_S", 0)

    def turn():
        turns[0] += 1
        loop.call_soon(turn)

    loop = asyncio.get_running_loop()
    loop.call_soon(turn)
    async with running(journal, replaying=lambda done, of: told.append((done, of, turns[0]))) as rig:
        assert rig.hosts() == [f"h{host}" for host in range(9)]
    assert [(done, of) for done, of, _ in told] == [(3, 10), (6, 10), (9, 10), (10, 10), (10, 10)]
    assert told[0][2] < told[1][2] < told[2][2] < told[3][2]


async def test_a_short_replay_tells_nothing(running):
    journal, told = MemoryJournal(), []
    await hosts_in(journal, running, 9)
    async with running(journal, replaying=lambda *said: told.append(said)):
        assert told == []


async def test_a_stop_ends_a_replay_that_follows_a_failed_commit(running, monkeypatch):
    read = 0

    class Long(MemoryJournal):
        def load(self):
            past = super().load()
            return past._replace(facts=self.told(past.facts))

        def told(self, facts):
            nonlocal read
            for read, told in enumerate(facts, 1):
                if self.failed and read == 20:
                    rig.writer.stop()
                yield told

    journal = Long()
    journal.failed = False
    await hosts_in(journal, running, 100)
    monkeypatch.setattr(writer, "REPLAYED_AT_ONCE", 10)
    async with running(journal) as rig:
        journal.failing, journal.failed = JournalFailed("no disk"), True
        with pytest.raises(Unavailable):
            await rig.writer.submit(add("lost"))
        journal.failing = None
        with anyio.fail_after(100):
            await rig.writer.stopped.wait()
        assert read == 20
        assert journal.load().seq == 0
        assert len(list(journal.facts())) == 102  # the second start, and nothing of a third


async def test_a_stop_in_good_order_leaves_a_snapshot_of_everything(running):
    journal = MemoryJournal()
    async with running(journal) as rig:
        rig.writer.post(add("a"))
        rig.writer.stop()
        await rig.writer.stopped.wait()

        assert journal.load().seq == 2
        with pytest.raises(Unavailable):
            await rig.writer.submit(Heartbeat("n1"))


async def test_a_stop_is_not_kept_waiting_by_a_disk_that_fails(running):
    journal = MemoryJournal()
    async with running(journal) as rig:
        journal.failing = JournalFailed("no disk")
        rig.writer.post(add("a"))
        await anyio.sleep(100)
        rig.writer.stop()
        with anyio.fail_after(0.1):
            await rig.writer.stopped.wait()


async def test_time_goes_on_from_the_last_fact_where_the_wall_clock_was_set_back(running):
    journal = MemoryJournal()
    async with running(journal, wall=5_000.0) as rig:
        await rig.writer.submit(add("a"))
    async with running(journal, wall=10.0) as rig:
        await anyio.sleep(2)
        await rig.writer.submit(add("b"))
        facts = [fact for _, fact in journal.load().facts]

        assert [fact.at for fact in facts] == sorted(fact.at for fact in facts)
        assert facts[-1].at == 5_002_000


async def test_while_the_disk_is_full_only_what_makes_more_work_is_refused(running):
    journal = MemoryJournal()
    async with running(journal) as rig:
        journal.tight = True
        with pytest.raises(Unavailable, match="full"):
            await rig.writer.submit(RegisterJob("o", "u", JobSpec("a", (), ())))
        await rig.writer.submit(add("a"))
        await anyio.sleep(11)

        assert not journal.tight


async def test_a_request_that_waits_is_not_turned_away_by_a_full_disk_when_it_is_asked_again(running):
    """It would be nobody's then, and passed over at the very release that spends the reserve."""
    journal = MemoryJournal()
    async with running(journal) as rig:
        state = rig.writer.scheduler.state
        state.slots["s1"] = Slot("s1", "j1", 1, "e1", "rollout", "asked", 0)
        state.slots_of["j1"] = ["s1"]
        journal.tight = True
        with pytest.raises(Unavailable, match="full"):
            await rig.writer.submit(i.RequestSlot("j1", "e1", "rollout", "another"))

        await rig.writer.submit(i.RequestSlot("j1", "e1", "rollout", "asked"))


# ---- who waits for news --------------------------------------------------------------------------------------------


def knows(rig, slot):
    """The state has this slot, of job j1."""
    rig.core.state.slots[slot] = Slot(slot, "j1", 1, "n1", "rollout", "r", 0)
    rig.core.state.jobs["j1"] = Job(id="j1", owner="o", user="u", spec=JobSpec("math", (), ()), registered_at=0)


async def test_a_waiter_is_woken_by_facts_of_its_slot_and_of_its_job_and_no_others(running):
    async with running(MemoryJournal()) as rig:
        knows(rig, "s1")
        with rig.writer.subscribe("s1") as waiter:
            for number, fact in enumerate(
                [
                    f.SlotWithdrawn(at=0, slot="s1", reason=said("")),
                    f.JobPaused(at=0, job="j1", by="x"),
                ]
            ):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(waiter.changed)
                    await anyio.sleep(0.01)
                    rig.writer._wake_for(entries(rig.core.state, [(number, fact)], {}))
            rig.writer._wake_for(entries(rig.core.state, [(9, f.SlotWithdrawn(at=0, slot="s2", reason=said("")))], {}))
            with anyio.move_on_after(1) as scope:
                await waiter.changed()

            assert scope.cancelled_caught
        assert rig.writer._waiters == {}


async def test_news_between_looking_and_waiting_is_not_missed(running):
    async with running(MemoryJournal()) as rig:
        knows(rig, "s1")
        with rig.writer.subscribe("s1") as waiter:
            rig.writer._wake_for(entries(rig.core.state, [(1, f.SlotWithdrawn(at=0, slot="s1", reason=said("")))], {}))
            with anyio.fail_after(0.1):
                await waiter.changed()


async def test_draining_and_a_failing_disk_wake_everybody(running):
    journal = MemoryJournal()
    async with running(journal) as rig:
        woken = 0

        async def wait() -> None:
            nonlocal woken
            with rig.writer.subscribe("s1") as waiter:
                await waiter.changed()
                woken += 1

        async with anyio.create_task_group() as tasks:
            for _ in range(1000):
                tasks.start_soon(wait)
            await anyio.sleep(0.1)
            journal.failing = JournalFailed("x")
            rig.writer.post(add("a"))
        assert woken == 1000
        rig.writer.drain()
        with anyio.fail_after(0.1):
            await wait()
        assert woken == 1001


async def test_a_thousand_parked_waiters_cost_a_handover_nothing(running):
    async with running(MemoryJournal()) as rig:
        fact = f.SlotWithdrawn(at=0, slot="s0", reason=said(""))
        knows(rig, "s0")

        def takes():
            began = time.process_time()
            for number in range(1000):
                rig.writer._wake_for(entries(rig.core.state, [(number, fact)], {}))
            return time.process_time() - began

        with ExitStack() as waiters:
            waiters.enter_context(rig.writer.subscribe("s0"))
            alone = takes()
            for number in range(1, 1000):
                waiters.enter_context(rig.writer.subscribe(f"s{number}"))
            assert takes() < 50 * alone + 0.01  # a look at each waiter would be a thousand times


async def test_the_feed_waits_for_facts_and_gives_up_in_time(running, slow_journal):
    async with running(slow_journal(1.0)) as rig:
        assert [seq for seq, _ in (await rig.writer.facts_after(0, 0, 10))[0]] == [1]
        began = now()
        assert await rig.writer.facts_after(1, 500, 10) == ([], 1)
        assert now() - began == pytest.approx(0.5)
        rig.writer.post(add("a"))
        facts, last = await rig.writer.facts_after(1, 30_000, 10)

        assert now() - began == pytest.approx(1.5)
        assert [f.name(fact) for _, fact in facts] == ["host_added"]
        assert last == 2
        assert rig.writer._followers == {}


async def test_the_feed_comes_in_pages(running):
    async with running(MemoryJournal()) as rig:
        for number in range(10):
            await rig.writer.submit(add(f"h{number}"))
        seen, last = [], 0
        while page := (await rig.writer.facts_after(last, 0, 4))[0]:
            seen += [seq for seq, _ in page]
            last = page[-1][0]

        assert seen == list(range(1, 12))


@pytest.fixture
def of_hosts(monkeypatch):
    """Has each fact's topic be its host, as the tiny core knows nothing else."""

    def of_hosts(rig) -> None:
        def topics(fact, state):
            return (("host", fact.host.id),) if isinstance(fact, f.HostAdded) else ()

        monkeypatch.setattr(rig.writer.belongs, "topics", topics)

    return of_hosts


async def test_who_waits_for_some_facts_is_not_woken_by_others_and_need_not_read_them(running, of_hosts):
    async with running(MemoryJournal()) as rig:
        of_hosts(rig)
        async with anyio.create_task_group() as tasks:
            read = []

            async def follow() -> None:
                read.append(await rig.writer.facts_after(1, 30_000, 10, [("host", "b"), ("host", "c")]))

            tasks.start_soon(follow)
            await anyio.sleep(1)
            for name in "aba":
                await rig.writer.submit(add(name))
        (facts, last), *_ = read
        assert (facts[0][0], facts[0][1].host.id) == (3, "b")
        assert last == facts[-1][0] <= 4
        began = now()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(rig.writer.submit, add("a"))
            assert await rig.writer.facts_after(4, 500, 10, [("host", "b")]) == ([], 5)
        assert now() - began == pytest.approx(0.5)
        assert rig.writer._followers == {}


async def test_what_comes_in_the_moment_in_which_who_waits_gives_up_is_not_passed_over(running, of_hosts):
    async with running(MemoryJournal()) as rig:
        of_hosts(rig)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        done.set_result(None)
        given_up = []

        def comes() -> None:
            (follower,) = rig.writer._followers["host", "b"]
            given_up.append(waiting.cancelling() > 0 and follower.after is None)
            fact = f.HostAdded(at=0, host=i.HostSpec("b", "fake", 0))
            rig.writer._committed(rig.writer._life, entries(rig.core.state, [(2, fact)], {}), done)

        waiting = loop.create_task(rig.writer.facts_after(1, 1_000, 10, [("host", "b")]))
        await asyncio.sleep(0)
        loop.call_later(1.0, comes)
        facts, last = await waiting
        assert given_up == [True]
        assert ([seq for seq, _ in facts], last) == ([2], 2)


class SaysNothing(MemoryJournal):
    """Writes, and then fails: nobody is told that it is on the disk."""

    def _commit(self, write):
        if self.failing is not None:
            write()
        return super()._commit(write)


async def test_who_waits_is_shown_what_turns_out_to_be_durable_when_the_writer_is_back(running, of_hosts):
    journal = SaysNothing()
    async with running(journal) as rig:
        of_hosts(rig)
        read = []

        async def follow() -> None:
            last = 1
            while not read:  # woken as the writer goes down, too
                facts, last = await rig.writer.facts_after(last, 5_000, 10, [("host", "b")])
                read.extend((seq, f.name(fact)) for seq, fact in facts)

        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(follow)
                await anyio.sleep(1)
                journal.failing = JournalFailed("the disk says nothing")
                with pytest.raises(Unavailable):
                    await rig.writer.submit(add("b"))
                await anyio.sleep(1)
                journal.failing = None
        assert read[0] == (2, "host_added")


async def test_new_facts_are_read_in_memory_and_old_ones_in_the_journal(running, monkeypatch):
    monkeypatch.setattr("rollmuxd.daemon.writer.RECENT", 5)
    journal, reads = MemoryJournal(), []
    async with running(journal) as rig:
        read = journal.read

        async def counted(after, limit):
            reads.append(after)
            return await read(after, limit)

        monkeypatch.setattr(journal, "read", counted)
        for number in range(10):
            await rig.writer.submit(add(f"h{number}"))
        whole = list(journal.facts())
        for after in range(11):
            for limit in (1, 3, 100):
                facts, last = await rig.writer.facts_after(after, 0, limit)
                assert facts == whole[after : after + limit]
                assert last == (facts[-1][0] if facts else after)
        assert reads == [after for after in range(6) for _ in range(3)]


async def test_a_fact_that_is_told_from_memory_reads_as_the_journal_will_tell_it(running):
    journal = MemoryJournal()
    async with running(journal) as rig:
        # a whole number in place of a float
        rig.core.handle = lambda _, at: Decision((f.SlotReleased(at, "s1", {"work": 1}),), (), Answer())
        await rig.writer.submit(i.Tick())
        (_, now), (_, later) = (await rig.writer.facts_after(1, 0, 10))[0][-1], list(journal.load().facts)[-1]
        assert encode(now) == encode(later) != encode(rig.sunk[-1][1])
