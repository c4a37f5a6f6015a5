"""The fakes are as bad as they say, in the methods they are told to, and pass on the rest."""

import anyio
import pytest
from bad_plugins import (
    CrashingBackend,
    CrashingResidency,
    LyingBackend,
    LyingResidency,
    SilentBackend,
    SilentResidency,
    SlowBackend,
)
from faulty_mock import FaultyMock as MockBackend
from faulty_mock import FaultyResidency as MockResidency

from rollmuxd.spi import Backend, Channel, ChannelCommand, HostConfig, OrderKind, Residency, StateSpec
from rollmuxd.spi.contract import ResidencyContract, Rig
from rollmuxd.spi.fakes import FakeChannel

GPUS = ("h/gpu0",)


async def mock():
    return await MockBackend.open([HostConfig(id="h", gpus=GPUS)], {})


def order(kind, backend):
    rig = Rig(MockResidency(), backend, "h", GPUS, StateSpec(pool="rollout", gpu_mb=1_000))
    return ResidencyContract().order(rig, kind)


@pytest.mark.asyncio
async def test_fakes_are_backends_and_drivers_and_channels():
    inner = await mock()
    assert isinstance(SlowBackend(inner, 0.0), Backend)
    assert isinstance(LyingResidency(MockResidency()), Residency)
    channel: Channel = FakeChannel()
    assert channel.ranks("j") == ()


@pytest.mark.asyncio
async def test_a_silent_backend_never_answers_and_can_be_cancelled():
    backend = SilentBackend(await mock(), only=("observe",))
    with pytest.raises(TimeoutError), anyio.fail_after(0.005):
        await backend.observe("h")
    assert len((await backend.inventory("h")).gpus) == 1
    assert {name: count for name, count in backend.calls.items() if count} == {"observe": 1, "inventory": 1}


@pytest.mark.asyncio
async def test_a_crashing_backend_raises_what_it_was_given():
    with pytest.raises(RuntimeError, match="bug"):
        await CrashingBackend(await mock()).observe("h")
    with pytest.raises(KeyError):
        await CrashingBackend(await mock(), KeyError("x")).kill("h", 4711, "1", "j1", "team")


@pytest.mark.asyncio
async def test_a_lying_driver_says_parked_and_the_backend_sees_that_it_is_not():
    backend = await mock()
    driver = LyingResidency(MockResidency())
    await driver.load(order(OrderKind.LOAD, backend))
    await driver.park(order(OrderKind.PARK, backend))
    assert (await backend.observe("h")).gpus[0].used_mb == 1_000
    assert [method for method, _ in driver.told] == ["load", "park"]


@pytest.mark.asyncio
async def test_a_lying_backend_shows_clean_what_is_not():
    backend = await mock()
    backend.faults.occupy("h/gpu0", 7_000)
    assert (await LyingBackend(backend).observe("h")).gpus[0].used_mb == 0
    assert (await backend.observe("h")).gpus[0].used_mb == 7_000


@pytest.mark.asyncio
async def test_silent_and_crashing_drivers():
    backend = await mock()
    with pytest.raises(TimeoutError), anyio.fail_after(0.005):
        await SilentResidency(MockResidency()).load(order(OrderKind.LOAD, backend))
    with pytest.raises(RuntimeError, match="bug"):
        await CrashingResidency(MockResidency()).park(order(OrderKind.PARK, backend))
    assert (await backend.observe("h")).gpus[0].used_mb == 0


@pytest.mark.asyncio
async def test_a_fake_opens_nothing_by_itself_and_knows_its_methods():
    with pytest.raises(TypeError, match=r"SlowBackend\(inner\)"):
        await SlowBackend.open([], {})
    with pytest.raises(ValueError, match="watch cannot be spoilt"):
        SilentBackend(await mock(), only=("watch",))


@pytest.mark.asyncio
async def test_a_rank_of_the_fake_channel_does_an_order_once_and_answers_the_same_again():
    channel = FakeChannel()
    fails = iter(["out of memory"])

    async def work(command):
        for error in fails:
            raise RuntimeError(error)

    channel.dial("j", 0, work)
    channel.dial("j", 1)
    command = ChannelCommand(order="o1", kind=OrderKind.LOAD, pool="rollout", node="n", gpus=GPUS, warm=False)
    first = await channel.tell("j", 2, command)
    assert [(result.rank, result.ok, result.error) for result in first] == [(0, False, "out of memory"), (1, True, "")]
    assert await channel.tell("j", 2, command) == first
    assert channel.last("j", "o1") == first
    assert channel.last("j", "o2") is None
    assert len(channel.worked) == 2
