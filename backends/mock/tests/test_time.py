"""Moving takes the time that the bytes take. On a virtual clock: these seconds are not waited for."""

import asyncio

import anyio
import pytest

from rollmuxd.spi import HostConfig, OrderKind, StateOrder, StateSpec
from rollmuxd_backend_mock import MockBackend, MockResidency

GPUS = ("h/gpu0", "h/gpu1")
pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]


async def world(**options):
    backend = await MockBackend.open([HostConfig(id="h", gpus=GPUS), HostConfig(id="i", gpus=("i/gpu0",))], options)

    async def tell(kind, job="a", gpus=GPUS, host="h"):
        state = StateSpec(pool="rollout", gpu_mb=40_000, residual_mb=10_000)
        driver = MockResidency()
        order = StateOrder(
            order="o", kind=kind, job=job, run=1, owner="t", name=job, pool="rollout", node="+".join(gpus), host=host,
            gpus=gpus, state=state, ranks=1, warm=False, pid=0, started="", backend=backend,
        )  # fmt: skip
        before = asyncio.get_running_loop().time()
        await getattr(driver, kind.value)(order)
        return asyncio.get_running_loop().time() - before

    return tell


async def test_a_cold_start_takes_cold_s_a_park_and_a_warm_start_their_bytes():
    tell = await world(copy_gbps=20, cold_s=30)
    assert await tell(OrderKind.LOAD) == pytest.approx(30)
    assert await tell(OrderKind.PARK) == pytest.approx(3), "2 x (40 - 10) GB at 20 GB/s: residual memory is not moved"
    assert await tell(OrderKind.LOAD) == pytest.approx(4), "2 x 40 GB at 20 GB/s"
    assert await tell(OrderKind.LOAD) == pytest.approx(0), "it is there"
    assert await tell(OrderKind.PARK) == pytest.approx(3)
    assert await tell(OrderKind.DISCARD) == pytest.approx(0)
    assert await tell(OrderKind.LOAD) == pytest.approx(30), "nothing is parked any more"


async def test_copies_on_one_host_take_turns_and_other_hosts_do_not_wait():
    tell = await world(copy_gbps=10)
    for job, gpus, host in (("a", GPUS[:1], "h"), ("b", GPUS[1:], "h"), ("c", ("i/gpu0",), "i")):
        await tell(OrderKind.LOAD, job, gpus, host)
    took = {}

    async def park(job, gpus, host):
        took[job] = await tell(OrderKind.PARK, job, gpus, host)

    async with anyio.create_task_group() as group:
        group.start_soon(park, "a", GPUS[:1], "h")
        group.start_soon(park, "b", GPUS[1:], "h")
        group.start_soon(park, "c", ("i/gpu0",), "i")
    assert sorted((took["a"], took["b"])) == pytest.approx([3, 6])
    assert took["c"] == pytest.approx(3)


async def test_a_cancelled_copy_gives_its_turn_to_the_next():
    tell = await world(copy_gbps=10)
    await tell(OrderKind.LOAD, "a", GPUS[:1])
    await tell(OrderKind.LOAD, "b", GPUS[1:])
    async with anyio.create_task_group() as group:
        group.start_soon(tell, OrderKind.PARK, "a", GPUS[:1])
        await anyio.sleep(1)
        group.cancel_scope.cancel()
    assert await tell(OrderKind.PARK, "b", GPUS[1:]) == pytest.approx(3)
