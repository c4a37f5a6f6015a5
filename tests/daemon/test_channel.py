"""Every rank is told each order until it has answered it; nobody is told what was taken back. In virtual time."""

import asyncio
import contextlib
from types import SimpleNamespace

import anyio
import pytest

from rollmuxd.core.apply import apply
from rollmuxd.core.errors import Conflict
from rollmuxd.core.facts import JobEnded, JobRegistered, SessionClosed, SessionLost, SessionOpened
from rollmuxd.core.model import Order, OrderKind, SessionStatus
from rollmuxd.core.spec import JobSpec
from rollmuxd.core.state import State
from rollmuxd.daemon.entries import Entry
from rollmuxd.daemon.hosts.channel import LATELY_S, LINGER_S, ChannelHub
from rollmuxd.spi import ChannelCommand, ContactLost, RankResult

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]


def park(order: str = "o1") -> ChannelCommand:
    return ChannelCommand(order, OrderKind.PARK, "rollout", "box/gpu0", ("box/gpu0",), warm=False)


def ok(rank: int) -> RankResult:
    return RankResult(rank, ok=True)


def entry(seq, fact, job="j1") -> Entry:
    return Entry(seq, fact, SimpleNamespace(id=getattr(fact, "job", job)), None, None)


def restarted(*open_orders: str) -> ChannelHub:
    """The hub of a daemon that has found these orders of job j1 open."""
    state = State()
    apply(state, JobRegistered(0, "j1", "me", "me", 1, JobSpec("a", (), ())))
    apply(state, SessionOpened(0, "n1", "j1", 1))
    for name in open_orders:
        state.orders[name] = Order(name, OrderKind.LOAD, "j1", 1, "rollout", "box/gpu0", "channel", issued_at=0)
    hub = ChannelHub()
    hub.begin(state)
    return hub


async def rank_works(hub: ChannelHub, rank: int, ranks: int, session: str = "n1", done: list | None = None) -> None:
    hub.dial("j1", session, rank, ranks)
    while True:
        command = await hub.next_order("j1", session, rank, 20)
        if command is not None:
            if done is not None:
                done.append((rank, command.order))
            hub.result("j1", session, rank, command.order, ok(rank))


async def test_all_ranks_are_told_and_all_answers_are_waited_for():
    hub, done = ChannelHub(), []
    async with anyio.create_task_group() as tasks:
        for rank in range(3):
            tasks.start_soon(rank_works, hub, rank, 3, "n1", done)
        await anyio.sleep(1)
        began = anyio.current_time()
        results = await hub.tell("j1", 3, park())

        assert anyio.current_time() - began < 0.1  # those who wait are told at once
        assert results == (ok(0), ok(1), ok(2))
        assert sorted(done) == [(0, "o1"), (1, "o1"), (2, "o1")]
        assert hub.last("j1", "o1") == results
        assert hub.ranks("j1") == (0, 1, 2)
        tasks.cancel_scope.cancel()


async def test_a_rank_that_dials_in_late_is_told_too():
    hub = ChannelHub()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rank_works, hub, 0, 2)

        async def late() -> None:
            await anyio.sleep(50)
            await rank_works(hub, 1, 2)

        tasks.start_soon(late)
        assert len(await hub.tell("j1", 2, park())) == 2
        tasks.cancel_scope.cancel()


async def test_told_twice_each_rank_does_it_once():
    hub, done = ChannelHub(), []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rank_works, hub, 0, 1, "n1", done)
        first = await hub.tell("j1", 1, park())
        await anyio.sleep(1)

        assert await hub.tell("j1", 1, park()) == first
        assert done == [(0, "o1")]
        tasks.cancel_scope.cancel()


async def test_what_was_fetched_and_not_answered_is_handed_out_again():
    hub = ChannelHub()
    hub.dial("j1", "n1", 0, 1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hub.tell, "j1", 1, park())
        await anyio.sleep(0.1)
        assert await hub.next_order("j1", "n1", 0, 1) == park()
        assert await hub.next_order("j1", "n1", 0, 1) == park()
        hub.result("j1", "n1", 0, "o1", ok(0))
        assert await hub.next_order("j1", "n1", 0, 1) is None


async def test_a_command_that_was_given_up_is_handed_out_to_nobody():
    hub = ChannelHub()
    hub.dial("j1", "n1", 0, 1)
    with anyio.move_on_after(5):
        await hub.tell("j1", 1, park())

    assert await hub.next_order("j1", "n1", 0, 1) is None
    assert hub.last("j1", "o1") is None


async def test_a_result_that_comes_after_the_telling_was_given_up_is_still_known():
    hub = ChannelHub()
    hub.dial("j1", "n1", 0, 1)
    with anyio.move_on_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hub.tell, "j1", 1, park())
            await anyio.sleep(0.1)
            assert await hub.next_order("j1", "n1", 0, 1) == park()
    hub.result("j1", "n1", 0, "o1", ok(0))
    hub.result("j1", "n1", 0, "o1", RankResult(0, ok=False, error="a second time, otherwise"))

    assert hub.last("j1", "o1") == (ok(0),)
    assert await hub.tell("j1", 1, park()) == (ok(0),)


async def test_a_result_from_before_a_restart_of_the_daemon_is_taken():
    hub = restarted("o9")
    hub.dial("j1", "n1", 0, 1)
    hub.result("j1", "n1", 0, "o9", ok(0))

    assert hub.last("j1", "o9") == (ok(0),)
    assert hub.last("j1", "o8") is None
    assert hub.last("j2", "o9") is None


def results_kept(hub: ChannelHub) -> list[RankResult]:
    return [result for told in hub._lines["j1"].told.values() for result in told.results.values()]


async def test_a_result_for_an_order_that_was_never_sent_is_acknowledged_and_not_kept():
    hub = restarted("o9")
    hub.dial("j1", "n1", 0, 2)
    hub.dial("j1", "n1", 1, 2)
    for number in range(1000):
        hub.result("j1", "n1", 0, f"made-up-{number}", RankResult(0, ok=False, error="x" * 10_000))
    assert results_kept(hub) == []

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hub.tell, "j1", 2, park("o10"))
        await anyio.sleep(0.1)
        assert await hub.next_order("j1", "n1", 0, 1) == park("o10")
        hub.result("j1", "n1", 1, "o10", ok(1))  # it was not handed to this rank
        assert results_kept(hub) == []
        hub.result("j1", "n1", 0, "o10", ok(0))
        assert await hub.next_order("j1", "n1", 1, 1) == park("o10")
        hub.result("j1", "n1", 1, "o10", ok(1))
    assert hub.last("j1", "o10") == (ok(0), ok(1))


async def test_what_was_open_at_a_restart_was_not_sent_to_the_process_that_comes_next():
    hub = restarted("o9")
    hub.dial("j1", "n1", 0, 1)
    hub.dial("j1", "n2", 0, 1)
    hub.result("j1", "n2", 0, "o9", ok(0))
    assert results_kept(hub) == []


async def test_a_rank_that_the_job_was_not_registered_with_is_refused():
    hub = ChannelHub()
    for rank in (2, 3, 9_999):
        with pytest.raises(Conflict, match=r"registered with ranks=2"):
            hub.dial("j1", "n1", rank, 2)
    assert hub.ranks("j1") == ()
    with pytest.raises(Conflict, match="dial in first"):
        hub.result("j1", "n1", 2, "o1", ok(2))


async def test_what_is_kept_of_a_jobs_results_has_an_end():
    ranks, orders, most, longest = 1_000, 25, 21_000, 100_000
    hub = ChannelHub()
    for rank in range(ranks):
        hub.dial("j1", "n1", rank, ranks)
    for number in range(orders):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hub.tell, "j1", ranks, park(f"o{number}"))
            await anyio.sleep(0.1)
            for rank in range(ranks):
                await hub.next_order("j1", "n1", rank, 1)
                hub.result("j1", "n1", rank, f"o{number}", RankResult(rank, ok=False, error="x" * 10_000))
        told = hub._lines["j1"].told
        assert sum(len(result.error) for result in told[f"o{number}"].results.values()) <= longest
        assert len(results_kept(hub)) <= most
    assert len(hub.last("j1", f"o{orders - 1}")) == ranks


async def test_a_newer_session_takes_the_line_over_and_what_the_older_had_fetched_is_lost():
    hub = ChannelHub()
    hub.dial("j1", "n1", 0, 1)
    errors = []

    async def tell(order: str) -> None:
        try:
            await hub.tell("j1", 1, park(order))
        except ContactLost as error:
            errors.append(str(error))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tell, "o1")
        await anyio.sleep(0.1)
        await hub.next_order("j1", "n1", 0, 1)
        tasks.start_soon(tell, "o2")  # not fetched: the newer session's to do
        await anyio.sleep(0.1)
        hub.dial("j1", "n2", 0, 1)
        await anyio.sleep(0.1)
        assert len(errors) == 1
        with pytest.raises(Conflict):
            await hub.next_order("j1", "n1", 0, 1)
        with pytest.raises(Conflict):
            hub.result("j1", "n1", 0, "o2", ok(0))
        tasks.start_soon(rank_works, hub, 0, 1, "n2")
        await anyio.sleep(0.1)
        assert hub.last("j1", "o2") == (ok(0),)
        tasks.cancel_scope.cancel()


async def test_what_a_process_did_that_was_replaced_is_no_answer_of_its_successor():
    """After a restart the old process says once more that it has loaded; then it dies, and with it what it loaded."""
    hub = restarted("o1")
    hub.dial("j1", "n1", 0, 1)
    hub.result("j1", "n1", 0, "o1", ok(0))
    hub.dial("j1", "n2", 0, 1)

    with pytest.raises(ContactLost, match="was replaced"):
        await hub.tell("j1", 1, park("o1"))


async def test_what_is_lost_is_handed_to_no_newer_session_in_the_same_moment():
    hub = ChannelHub()
    hub.dial("j1", "n1", 0, 1)
    lost = []

    async def tell() -> None:
        with pytest.raises(ContactLost):
            await hub.tell("j1", 1, park())
        lost.append(anyio.current_time())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tell)
        await anyio.sleep(0.1)
        await hub.next_order("j1", "n1", 0, 1)
        hub.dial("j1", "n2", 0, 1)
        assert await hub.next_order("j1", "n2", 0, 0.5) is None
    assert len(lost) == 1


async def test_ranks_not_heard_of_for_long_are_not_counted():
    hub = ChannelHub()
    hub.dial("j1", "n1", 0, 2)
    await anyio.sleep(LATELY_S - 1)
    hub.dial("j1", "n1", 1, 2)
    await anyio.sleep(2)

    assert hub.ranks("j1") == (1,)
    assert hub.ranks("j2") == ()


async def test_a_poll_ends_in_time_and_when_the_daemon_stops():
    hub = ChannelHub()
    hub.dial("j1", "n1", 0, 1)
    with anyio.fail_after(20.1):
        assert await hub.next_order("j1", "n1", 0, 20) is None
    with anyio.fail_after(1):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hub.next_order, "j1", "n1", 0, 1000)
            await anyio.sleep(0.1)
            hub.close()


async def test_the_line_of_a_job_that_ended_is_taken_down():
    hub = ChannelHub()
    hub.dial("j1", "n1", 0, 1)
    hub.on_facts([entry(1, JobEnded(at=0, job="j1", reason=""))])
    await anyio.sleep(LINGER_S)
    with pytest.raises(Conflict):
        await hub.next_order("j1", "n1", 0, 1)


async def how_it_ends(hub: ChannelHub, order: str = "o1", ranks: int = 1) -> tuple[str, float]:
    """What became of an order, and after how many seconds."""
    began = anyio.current_time()
    try:
        with anyio.fail_after(1000):
            await hub.tell("j1", ranks, park(order))
    except ContactLost as error:
        return str(error), anyio.current_time() - began
    return "done", anyio.current_time() - began


@pytest.mark.parametrize("over", [JobEnded(0, "j1", ""), SessionClosed(0, "n1"), SessionLost(0, "n1")])
async def test_the_ranks_of_a_process_that_is_gone_are_not_counted_and_not_waited_for(over):
    hub = ChannelHub()
    hub.dial("j1", "n1", 0, 1)
    assert await hub.next_order("j1", "n1", 0, 1) is None
    ended = []

    async def tell() -> None:
        ended.append(await how_it_ends(hub))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tell)
        await anyio.sleep(10)
        hub.on_facts([entry(1, over)])
        await anyio.sleep(0.1)
        assert hub.ranks("j1") == ()
        assert ended, "what it was told before is waited for in vain"
        assert ended[0][1] < 10.2
    later, after = await how_it_ends(hub, "o2")
    assert later != "done"
    assert after < 5


async def test_a_process_that_ends_its_job_may_still_do_its_discards():
    hub, done = ChannelHub(), []

    async def rank() -> None:
        with contextlib.suppress(Conflict):
            await rank_works(hub, 0, 1, "n1", done)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rank)
        await anyio.sleep(3)
        hub.on_facts([entry(1, JobEnded(0, "j1", "finished")), entry(2, SessionClosed(0, "n1"))])
        assert hub.lingers("j1", "n1")
        assert not hub.lingers("j1", "n0")
        assert hub.ranks("j1") == (0,)  # it is on the line at this moment
        assert await how_it_ends(hub) == ("done", 0)
        assert done == [(0, "o1")]
        await anyio.sleep(LINGER_S)
        assert not hub.lingers("j1", "n1")
        assert (await how_it_ends(hub, "o2"))[0] != "done"
        tasks.cancel_scope.cancel()


async def test_a_process_that_ends_its_job_has_only_seconds_for_its_discards():
    hub = ChannelHub()
    hub.dial("j1", "n1", 0, 1)

    async def takes_the_order_and_hangs() -> None:
        await hub.next_order("j1", "n1", 0, 20)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(takes_the_order_and_hangs)
        await anyio.sleep(1)
        hub.on_facts([entry(1, JobEnded(0, "j1", "finished")), entry(2, SessionClosed(0, "n1"))])
        what, after = await how_it_ends(hub)
        assert what != "done"
        assert after <= LINGER_S + 1


async def test_a_new_session_is_waited_for_again():
    hub = ChannelHub()
    hub.dial("j1", "n1", 0, 1)
    hub.on_facts([entry(1, SessionClosed(0, "n1"))])
    hub.on_facts([entry(2, SessionOpened(0, "n2", "j1", 1))])

    async def late() -> None:
        await anyio.sleep(30)
        await rank_works(hub, 0, 1, "n2")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(late)
        assert (await how_it_ends(hub))[0] == "done"
        tasks.cancel_scope.cancel()


async def test_after_a_restart_of_the_daemon_a_rank_is_waited_for_while_its_session_lives():
    hub = ChannelHub()  # it has heard of nobody

    async def late() -> None:
        await anyio.sleep(60)
        await rank_works(hub, 0, 1)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(late)
        assert (await how_it_ends(hub))[0] == "done"
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(("status", "lives"), [("alive", True), ("lost", False), ("closed", False)])
async def test_after_a_restart_nobody_is_waited_for_whose_session_is_over(status, lives):
    state = State()
    apply(state, JobRegistered(0, "j1", "me", "me", 1, JobSpec("a", (), ())))
    apply(state, SessionOpened(0, "n1", "j1", 1))
    state.sessions["n1"].status = SessionStatus(status)
    hub = ChannelHub()
    hub.begin(state)

    async def late() -> None:
        await anyio.sleep(60)
        if lives:
            await rank_works(hub, 0, 1)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(late)
        what, after = await how_it_ends(hub)
        assert (what == "done") == lives
        assert lives or after < 5
        tasks.cancel_scope.cancel()


TAKEN_OVER = [entry(1, SessionOpened(0, "n2", "j1", 1))]


async def test_a_process_whose_session_was_taken_over_is_told_nothing_though_its_successor_has_not_dialled_in_yet():
    hub, done, refused = ChannelHub(), [], []

    async def older() -> None:
        with pytest.raises(Conflict):
            await rank_works(hub, 0, 1, "n1", done)
        refused.append(anyio.current_time())

    async def newer() -> None:
        await anyio.sleep(30)
        await rank_works(hub, 0, 1, "n2", done)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(older)
        await anyio.sleep(3)
        began = anyio.current_time()
        hub.on_facts(TAKEN_OVER)
        assert hub.ranks("j1") == ()
        await anyio.sleep(0.1)
        assert refused == [began]
        tasks.start_soon(newer)
        assert await how_it_ends(hub) == ("done", 30)
        assert done == [(0, "o1")]
        tasks.cancel_scope.cancel()


async def test_what_a_process_had_fetched_is_lost_as_soon_as_its_session_is_taken_over():
    hub = ChannelHub()
    hub.dial("j1", "n1", 0, 1)
    ended = []

    async def tell() -> None:
        ended.append(await how_it_ends(hub))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tell)
        await anyio.sleep(1)
        assert await hub.next_order("j1", "n1", 0, 1) == park()
        hub.on_facts(TAKEN_OVER)
        await anyio.sleep(0.1)
        assert [what for what, _ in ended] == ["the job's process was replaced by another while this was to be done"]


async def test_what_a_process_was_to_discard_as_it_ended_is_not_for_the_process_of_the_next_run():
    hub, done = ChannelHub(), []
    hub.dial("j1", "n1", 0, 1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(how_it_ends, hub, "o1")
        await anyio.sleep(0.1)
        assert await hub.next_order("j1", "n1", 0, 1) == park("o1")  # it has its hands full
        hub.on_facts([entry(1, JobEnded(0, "j1", "")), entry(2, SessionClosed(0, "n1"))])
        tasks.start_soon(how_it_ends, hub, "o2")
        await anyio.sleep(0.1)
        hub.on_facts([entry(3, SessionOpened(0, "n2", "j1", 2))])
        tasks.start_soon(rank_works, hub, 0, 1, "n2", done)
        await anyio.sleep(1)
        assert done == []
        tasks.cancel_scope.cancel()


async def test_a_poll_that_ends_as_its_session_is_taken_over_does_not_count_for_the_newer_one():
    hub = ChannelHub()
    hub.dial("j1", "n1", 0, 1)
    async with anyio.create_task_group() as tasks:

        async def poll() -> None:
            with pytest.raises(Conflict):
                await hub.next_order("j1", "n1", 0, 5)

        tasks.start_soon(poll)
        await anyio.sleep(4.9)
        asyncio.get_running_loop().call_later(0.1, hub.on_facts, TAKEN_OVER)
    assert hub.ranks("j1") == ()


def lives(session: str = "n1") -> State:
    """What a replay has given: the job has this session."""
    state = State()
    apply(state, JobRegistered(0, "j1", "me", "me", 1, JobSpec("a", (), ())))
    apply(state, SessionOpened(0, session, "j1", 1))
    return state


async def test_a_process_that_went_while_the_daemon_was_away_is_waited_for_until_its_session_is_lost_and_no_longer():
    hub = ChannelHub()
    hub.begin(lives())
    with pytest.raises(Conflict):
        await hub.next_order("j1", "n1", 0, 1)  # it has to dial in first
    ended = []

    async def tell() -> None:
        ended.append(await how_it_ends(hub))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tell)
        await anyio.sleep(60)
        assert not ended
        hub.on_facts([entry(1, SessionLost(0, "n1"))])
        await anyio.sleep(0.1)
        assert ended == [("the session of the job's process is lost", 60)]


async def test_a_session_that_a_replay_tells_of_first_is_waited_for():
    """The writer went down between the commit and the telling: the hub has heard of the end of the one before only."""
    hub = ChannelHub()
    hub.dial("j1", "n1", 0, 1)
    hub.on_facts([entry(1, SessionLost(0, "n1"))])
    hub.begin(lives("n2"))

    async def late() -> None:
        await anyio.sleep(3)
        await rank_works(hub, 0, 1, "n2")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(late)
        assert await how_it_ends(hub) == ("done", 3)
        tasks.cancel_scope.cancel()


async def test_what_is_remembered_is_bounded():
    hub = ChannelHub()
    hub.dial("j1", "n1", 0, 1)
    for number in range(500):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hub.tell, "j1", 1, park(f"o{number}"))
            await anyio.sleep(0.1)
            await hub.next_order("j1", "n1", 0, 1)
            hub.result("j1", "n1", 0, f"o{number}", ok(0))

    assert hub.last("j1", "o499") is not None
    assert hub.last("j1", "o0") is None


async def test_lines_of_jobs_that_have_ended_are_forgotten_and_not_looked_through_for_each():
    hub, looks = ChannelHub(), 0

    class Lines(dict):
        def items(self):
            nonlocal looks
            looks += 1
            return super().items()

    hub._lines = Lines()
    for number in range(300):
        hub.on_facts([entry(1, SessionOpened(0, f"n{number}", f"j{number}", 1))])
        hub.on_facts([entry(2, JobEnded(0, f"j{number}", "")), entry(3, SessionClosed(0, f"n{number}"), f"j{number}")])
        await anyio.sleep(1)
    assert len(hub._lines) <= 2 * LATELY_S + LINGER_S + 1
    assert looks <= 300 / LATELY_S + 1


async def test_a_line_that_was_taken_down_is_known_to_be_down_and_nobody_is_waited_for():
    """A discard may be due long after the end of a job: its host was away, or it failed and is tried again."""
    hub = ChannelHub()
    hub.begin(lives())
    hub.on_facts([entry(1, JobEnded(0, "j1", "")), entry(2, SessionClosed(0, "n1"))])
    await anyio.sleep(2 * LATELY_S)
    hub.on_facts([entry(3, JobEnded(0, "j2", ""))])
    assert "j1" not in hub._lines

    assert await how_it_ends(hub) == ("the job has no process: its last one has ended, and its line was taken down", 0)
    assert "j1" not in hub._lines  # nor does asking put it up again, to stay

    hub.on_facts([entry(4, SessionOpened(0, "n2", "j1", 2))])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rank_works, hub, 0, 1, "n2")
        assert await how_it_ends(hub, "o2") == ("done", 0)
        tasks.cancel_scope.cancel()
