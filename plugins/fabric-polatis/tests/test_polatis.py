"""The Polatis driver before a server with the switch's data model, on a real socket."""

import importlib.util
import threading
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from patience import PATIENCE_S

from rollmuxd.spi import ContactLost, NotDone
from rollmuxd.spi.contract import FabricContract
from rollmuxd.spi.fabric import FabricOrder
from rollmuxd_fabric_polatis import PolatisFabric

_spec = importlib.util.spec_from_file_location("fake_polatis", Path(__file__).with_name("fake_polatis.py"))
fake_polatis = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fake_polatis)


@asynccontextmanager
async def device(tmp_path, **options):
    """A switch's server, its state, and a controller of it."""
    switch = fake_polatis.Switch()
    server = fake_polatis.serve(switch)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    password = tmp_path / "password"
    password.write_text("secret\n")
    url = f"http://127.0.0.1:{server.server_address[1]}"
    told = {"url": url, "ports": 16, "password_file": str(password), "protected": [8], **options}
    controller = await PolatisFabric.open(told)
    try:
        yield switch, server, controller, told
    finally:
        await controller.close()
        server.shutdown()
        server.server_close()
        thread.join()


class TestContract(FabricContract):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        self.tmp_path = tmp_path

    @asynccontextmanager
    async def made(self):
        async with device(self.tmp_path) as (_, self.server, controller, self.told):
            yield controller

    async def again(self, controller):
        return await PolatisFabric.open(self.told)

    async def unplug(self, controller):
        self.server.shutdown()
        self.server.server_close()


pytestmark = pytest.mark.asyncio


async def test_a_circuit_is_an_ingress_and_an_egress_beyond_the_ports(tmp_path):
    async with device(tmp_path) as (switch, _, controller, _told):
        await controller.set(FabricOrder(1, add=((1, 2), (3, 4))))
        assert switch.pairs == {1: 18, 3: 20}


async def test_many_circuits_change_in_one_request(tmp_path):
    async with device(tmp_path) as (switch, _, controller, _told):
        ring = tuple((port, port % 7 + 1) for port in range(1, 8))
        await controller.set(FabricOrder(1, add=ring))
        back = tuple((b, a) for a, b in ring)
        await controller.set(FabricOrder(2, remove=ring, add=back))
        assert switch.puts == 2
        assert await controller.seen() == set(back)


async def test_an_order_that_was_overtaken_while_it_read_the_circuits_sends_nothing(tmp_path):
    async with device(tmp_path) as (switch, _, controller, _told), anyio.create_task_group() as tasks:
        switch.reads.clear()  # no read is answered
        refused = []

        async def old():
            try:
                await controller.set(FabricOrder(1, add=((1, 2),)))
            except NotDone as error:
                refused.append(str(error))

        tasks.start_soon(old)
        await anyio.to_thread.run_sync(switch.reading.acquire)
        tasks.start_soon(controller.set, FabricOrder(2, add=((1, 3),)))
        await anyio.to_thread.run_sync(switch.reading.acquire)
        switch.reads.set()
        with anyio.fail_after(PATIENCE_S):
            while not refused or not switch.puts:
                await anyio.sleep(0.01)
        assert refused == ["order 1 is not newer than order 2"]
        assert (switch.pairs, switch.puts) == ({1: 19}, 1)


async def test_an_overtaken_order_does_not_blame_the_newer_circuits(tmp_path):
    async with device(tmp_path) as (switch, _, controller, _told):
        seen = controller.seen

        async def slow():  # the read of the old order is answered after the newer order is done
            controller.seen = seen
            await controller.set(FabricOrder(2, add=((1, 3),)))
            return await seen()

        controller.seen = slow
        with pytest.raises(NotDone, match="order 1 is not newer than order 2"):
            await controller.set(FabricOrder(1, add=((1, 2),)))
        assert switch.pairs == {1: 19}


async def test_circuits_of_others_stay(tmp_path):
    async with device(tmp_path) as (switch, _, controller, _told):
        switch.replace({10: 28})
        await controller.set(FabricOrder(1, add=((1, 2),)))
        assert switch.pairs == {1: 18, 10: 28}


async def test_a_switch_of_another_size_than_configured_is_not_set(tmp_path):
    async with device(tmp_path, ports=12) as (switch, _, controller, _told):
        switch.replace({14: 30})
        with pytest.raises(ContactLost, match="the switch leads 14 to 30, which a switch of 12 ports cannot"):
            await controller.set(FabricOrder(1, add=((2, 3),)))
        assert switch.pairs == {14: 30}


async def test_what_the_switch_refuses_is_not_done(tmp_path):
    async with device(tmp_path) as (switch, _, controller, _told):
        switch.ports = 2  # it has fewer than was configured
        with pytest.raises(NotDone, match=r"the switch refused the circuits: 400 .*no such port"):
            await controller.set(FabricOrder(1, add=((3, 4),)))


async def test_a_wrong_password_is_said(tmp_path):
    async with device(tmp_path) as (switch, _, controller, _told):
        switch.auth = "another"
        with pytest.raises(ContactLost, match="does not say its circuits: 401"):
            await controller.seen()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "url of fabric driver polatis is missing: .*http://switch:8008"),
        ({"url": "http://s"}, "ports of fabric driver polatis is missing: "),
        ({"url": 3, "ports": 8}, "url of fabric driver polatis is 3: expected `str`, got `int`"),
        (
            {"url": "http://s", "ports": 8, "protected": ["x"]},
            "protected of fabric driver polatis is .*: expected `int`",
        ),
        ({"url": "switch", "ports": 8}, "it begins with http"),
        ({"url": "http://s", "ports": 1}, "ports = 1: a number from 2"),
        ({"url": "http://s", "ports": 16, "protected": [99]}, "protected: port 99 is not one of 1 to 16"),
        (
            {"url": "http://s", "ports": 8, "prots": 1},
            "prots is not an option of fabric driver polatis; did you mean ports",
        ),
        ({"url": "http://s", "ports": 8, "password_file": "/nowhere"}, "password_file = /nowhere: "),
        ({"url": "http://s", "ports": 8, "password_file": "latin"}, "password_file = latin: .* can't decode"),
        ({"url": "https://s", "ports": 8, "ca_file": "/nowhere"}, "ca_file = /nowhere: "),
        ({"url": "https://s", "ports": 8, "ca_file": "latin"}, "ca_file = latin: .*PEM file with certificates"),
        ({"url": "http://", "ports": 8}, "url = 'http://': it has no host"),
        ({"url": "http://s:port", "ports": 8}, "url = 'http://s:port': Invalid port"),
        ({"url": "http://s", "ports": 8, "timeout_s": 0}, "timeout_s of fabric driver polatis is 0: .*> 0.0"),
        ({"url": "http://s", "ports": 8, "timeout_s": float("nan")}, "timeout_s"),
        ({"url": "http://s", "ports": 8, "switch_s": -1}, "switch_s of fabric driver polatis is -1: .*>= 0.0"),
    ],
)
async def test_wrong_options_are_refused_by_name(options, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("latin").write_bytes("geheim\xe4\n".encode("latin-1"))
    with pytest.raises(ValueError, match=says):
        await PolatisFabric.open(options)
