"""Every host is looked at when the writer begins a life, and again and again; gaps in the settings are filled in."""

import asyncio

import anyio
import pytest

from rollmuxd.core.config import Config
from rollmuxd.core.inputs import HostSpec, NodeSpec, Start
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.daemon.hosts.observer import fill_in, watch
from rollmuxd.policies.rollmux import RollMux
from rollmuxd.spi import ContactLost, GpuInfo, Inventory

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]


async def test_each_host_is_looked_at_about_as_often_as_configured_and_not_all_at_once():
    looks: list[tuple[float, str]] = []
    hosts = [f"h{number}" for number in range(20)]

    def perform(effects):
        looks.extend((anyio.current_time(), effect.host) for effect in effects)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch, hosts, 15, perform)
        await anyio.sleep(1500)
        tasks.cancel_scope.cancel()

    for host in hosts:
        assert 90 <= sum(seen == host for _, seen in looks) <= 112
    assert len({at for at, _ in looks}) == len(looks)


class Inventories:
    async def inventory(self, host):
        if host == "away":
            raise ContactLost("no route")
        return Inventory((GpuInfo(f"{host}/gpu0", "H20", 96_000), GpuInfo(f"{host}/gpu1", "H20", 96_000)), 1_000_000)


async def test_what_the_settings_leave_out_comes_from_the_hosts_and_what_they_say_stays():
    start = Start(
        (HostSpec("a", "x", 0), HostSpec("b", "x", 5), HostSpec("away", "x", 0)),
        (
            NodeSpec("a/gpu0-1", "a", ("a/gpu0", "a/gpu1"), ("rollout",)),
            NodeSpec("b/gpu0", "b", ("b/gpu0",), ("train",), gpu_type="H800", gpu_mb=7),
            NodeSpec("away/gpu0", "away", ("away/gpu0",), ("train",)),
        ),
    )
    filled = await fill_in(start, {"x": Inventories()})

    assert [host.ram_mb for host in filled.hosts] == [700_000, 5, 0]
    assert [(node.gpu_type, node.gpu_mb) for node in filled.nodes] == [("H20", 96_000), ("H800", 7), ("", 0)]


async def test_a_host_that_is_away_has_what_it_had_last_time():
    class Backend:
        away = False

        async def inventory(self, host):
            if self.away:
                raise ContactLost("no route to host")
            return Inventory((GpuInfo("a/gpu0", "H20", 96_000),), 1_000_000)

    backend, core = Backend(), Scheduler(Config(), RollMux())
    start = Start(hosts=(HostSpec("a", "x", 0),), nodes=(NodeSpec("a/gpu0", "a", ("a/gpu0",), ("rollout",)),))
    for now, backend.away in ((0, False), (1_000, True)):
        core.handle(await fill_in(start, {"x": backend}), now)
        node = core.state.nodes["a/gpu0"]
        assert (core.state.hosts["a"].ram_mb, node.gpu_type, node.gpu_mb) == (700_000, "H20", 96_000)


@pytest.mark.parametrize("answer", [None, Inventory(None, 7), Inventory((), 0.5), asyncio.CancelledError()])
async def test_an_inventory_that_is_none_is_one_that_was_not_given(answer):
    class Backend:
        async def inventory(self, host):
            if isinstance(answer, BaseException) and host == "a":
                raise answer
            return answer if host == "a" else Inventory((GpuInfo("b/gpu0", "H20", 96_000),), 1_000_000)

    start = Start(hosts=(HostSpec("a", "x", 0), HostSpec("b", "x", 0)), nodes=())

    assert [host.ram_mb for host in (await fill_in(start, {"x": Backend()})).hosts] == [0, 700_000]
