"""What the channel driver defends.

- One verdict over all ranks: done only if every rank said so.
- A rank that is not there yet is waited for; a discard does not wait for ever.
- What is not known is never said to be done.
"""

import anyio
import pytest

from rollmuxd.spi import ContactLost, NotDone, OrderKind, Probed, RankResult, StateOrder, StateSpec
from rollmuxd.spi.fakes import FakeChannel
from rollmuxd_channel import ChannelResidency, RanksFailed

LOAD, PARK, DISCARD = OrderKind.LOAD, OrderKind.PARK, OrderKind.DISCARD


def order(kind, *, ranks=2, id="o1"):
    return StateOrder(
        order=id, kind=kind, job="j1", run=1, owner="t", name="math-7b", pool="rollout", node="h/gpu0-3", host="h",
        gpus=("h/gpu0",), state=StateSpec(pool="rollout"), ranks=ranks, warm=True, pid=0, started="", backend=None,
    )  # fmt: skip


def channel_of(ranks, **failing):
    """Ranks of which some fail: ``rank1="out of memory"``."""
    channel = FakeChannel()
    for rank in range(ranks):
        channel.dial("j1", rank, failure(failing.get(f"rank{rank}")))
    return channel


def failure(error):
    async def work(command):
        if error is not None:
            raise RuntimeError(error)

    return work


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", list(OrderKind))
async def test_all_ranks_are_told_the_order_and_all_ok_is_done(kind):
    channel = channel_of(2)
    driver = await ChannelResidency.open(channel, {})
    await getattr(driver, kind.value)(order(kind))
    assert [(job, rank) for job, rank, _ in channel.worked] == [("j1", 0), ("j1", 1)]
    command = channel.worked[0][2]
    told = (command.order, command.kind, command.pool, command.node, command.gpus, command.warm)
    assert told == ("o1", kind, "rollout", "h/gpu0-3", ("h/gpu0",), True)


@pytest.mark.asyncio
async def test_any_rank_that_failed_is_not_done_and_named_with_its_error():
    driver = ChannelResidency(channel_of(3, rank1="out of memory"))
    with pytest.raises(RanksFailed) as failed:
        await driver.park(order(PARK, ranks=3))
    assert isinstance(failed.value, NotDone)
    assert str(failed.value) == (
        "park of job 'math-7b' for pool rollout on h/gpu0-3 (order o1): 1 of 3 ranks failed: rank 1: out of memory"
    )
    assert [result.rank for result in failed.value.failed] == [1]
    assert len(failed.value.results) == 3


@pytest.mark.asyncio
async def test_the_verdict_over_many_long_errors_stays_readable():
    driver = ChannelResidency(channel_of(100, **{f"rank{rank}": "no room\n" * 1_000 for rank in range(100)}))
    with pytest.raises(RanksFailed) as failed:
        await driver.load(order(LOAD, ranks=100))
    text = str(failed.value)
    assert "100 of 100 ranks failed: rank 0: no room no room" in text
    assert text.endswith("; and 96 more")
    assert len(text) < 3_000
    assert "\n" not in text


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", [LOAD, PARK])
@pytest.mark.parametrize("there", [0, 1])
@pytest.mark.looptime
async def test_a_rank_that_reconnects_late_is_waited_for(kind, there):
    channel = channel_of(there)
    driver = ChannelResidency(channel)
    async with anyio.create_task_group() as group:
        group.start_soon(getattr(driver, kind.value), order(kind))
        await anyio.sleep(3_600)
        assert channel.worked == []
        for rank in range(there, 2):
            channel.dial("j1", rank)
    assert len(channel.worked) == 2


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", [LOAD, PARK])
async def test_the_wait_for_ranks_can_be_cancelled_and_the_order_told_again(kind):
    channel = channel_of(1)
    driver = ChannelResidency(channel)
    with pytest.raises(TimeoutError), anyio.fail_after(0.003):
        await getattr(driver, kind.value)(order(kind))
    channel.dial("j1", 1)
    await getattr(driver, kind.value)(order(kind))


@pytest.mark.asyncio
@pytest.mark.looptime
async def test_a_discard_waits_a_bounded_time_for_ranks_that_are_not_there():
    channel = channel_of(1)
    driver = await ChannelResidency.open(channel, {"discard_wait_s": 7})
    with pytest.raises(TimeoutError), anyio.fail_after(6.9):
        await driver.discard(order(DISCARD, ranks=3))
    with anyio.fail_after(7.1), pytest.raises(ContactLost, match="ranks 1, 2 of 3 did not dial in within 7 s"):
        await driver.discard(order(DISCARD, ranks=3))
    async with anyio.create_task_group() as group:
        group.start_soon(driver.discard, order(DISCARD))
        await anyio.sleep(6)
        channel.dial("j1", 1)


@pytest.mark.asyncio
@pytest.mark.looptime
@pytest.mark.parametrize("late", [False, True])
async def test_a_discard_that_is_being_done_is_not_cut_short(late):
    channel, done = FakeChannel(), []

    async def slowly(command):
        await anyio.sleep(100)
        done.append(command)

    driver = ChannelResidency(channel, discard_wait_s=7)
    async with anyio.create_task_group() as group:
        if not late:
            channel.dial("j1", 0, slowly)
        group.start_soon(driver.discard, order(DISCARD, ranks=1))
        await anyio.sleep(6)
        channel.dial("j1", 0, slowly)
    assert len(done) == 1


@pytest.mark.asyncio
@pytest.mark.looptime
async def test_a_discard_is_done_as_soon_as_the_late_ranks_did_it():
    channel = channel_of(1)
    with anyio.fail_after(2):
        async with anyio.create_task_group() as group:
            group.start_soon(ChannelResidency(channel, discard_wait_s=7).discard, order(DISCARD))
            await anyio.sleep(1)
            channel.dial("j1", 1)


@pytest.mark.asyncio
async def test_what_the_channel_raises_comes_through_as_it_is():
    class Broken(FakeChannel):
        async def tell(self, job, ranks, command):
            raise ContactLost("the channel is closing")

    with pytest.raises(ContactLost, match="the channel is closing"):
        await ChannelResidency(Broken()).discard(order(DISCARD))


@pytest.mark.asyncio
async def test_told_twice_each_rank_does_it_once_and_an_error_is_answered_again():
    channel = channel_of(2, rank0="broken")
    driver = ChannelResidency(channel)
    for _ in range(2):
        with pytest.raises(RanksFailed):
            await driver.load(order(LOAD))
    assert len(channel.worked) == 2


class Telling(FakeChannel):
    """Answers with what the test gives."""

    def __init__(self, *results):
        super().__init__()
        self.results = results

    def ranks(self, job):
        return (0, 1)

    async def tell(self, job, ranks, command):
        return self.results

    def last(self, job, order):
        return self.results


OK0, OK1, BAD1 = RankResult(0, True), RankResult(1, True), RankResult(1, False, "no")


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", list(OrderKind))
@pytest.mark.parametrize("results", [(), (OK0,), (OK0, OK0), (OK1,)])
async def test_a_rank_without_an_answer_is_contact_lost_never_done(kind, results):
    driver = ChannelResidency(Telling(*results))
    with pytest.raises(ContactLost, match="no answer is known of rank"):
        await getattr(driver, kind.value)(order(kind))
    assert await driver.probe(order(kind)) == Probed(known=False)


@pytest.mark.asyncio
async def test_a_rank_that_says_both_has_failed():
    with pytest.raises(RanksFailed):
        await ChannelResidency(Telling(OK0, OK1, BAD1)).load(order(LOAD))


@pytest.mark.asyncio
async def test_a_probe_tells_done_failed_and_not_known():
    channel = channel_of(2, rank1="no room")
    driver = ChannelResidency(channel)
    assert await driver.probe(order(LOAD)) == Probed(known=False)
    with pytest.raises(RanksFailed):
        await driver.load(order(LOAD))
    probed = await driver.probe(order(LOAD))
    assert (probed.known, probed.done) == (True, False)
    assert "rank 1: no room" in probed.error
    channel.dial("j1", 1)
    await driver.park(order(PARK, id="o2"))
    assert await driver.probe(order(PARK, id="o2")) == Probed(known=True, done=True)
    channel.forget()
    assert await driver.probe(order(PARK, id="o2")) == Probed(known=False)
    assert (await ChannelResidency(Telling(OK0, BAD1)).probe(order(LOAD))).known
    assert (await ChannelResidency(Telling(BAD1)).probe(order(LOAD))).known, "one error is enough to know"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"discard_wait": 1}, "discard_wait is not an option of residency driver channel; did you mean discard_wait_s"),
        ({"port": 1}, "port is not an option of residency driver channel; known are discard_wait_s"),
        ({"discard_wait_s": -1}, "it must be seconds, 0 or more"),
        ({"discard_wait_s": "5"}, "it must be seconds, 0 or more"),
        ({"discard_wait_s": True}, "it must be seconds, 0 or more"),
        ({"discard_wait_s": float("nan")}, "it must be seconds, 0 or more"),
    ],
)
async def test_a_wrong_option_is_refused(options, said):
    with pytest.raises(ValueError) as refused:
        await ChannelResidency.open(FakeChannel(), options)
    assert said in str(refused.value)
