"""The mock switch keeps the contract of controllers of optical switches."""

from contextlib import asynccontextmanager

import pytest

from rollmuxd.spi.contract import FabricContract
from rollmuxd.spi.fake_fabric import MockFabric


class TestMockFabric(FabricContract):
    @asynccontextmanager
    async def made(self):
        yield await MockFabric.open({"ports": 16, "switch_s": 0.001, "protected": [8]})

    async def again(self, controller):
        return MockFabric(controller.switch)

    async def unplug(self, controller):
        controller.switch.unplugged = True


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"url": "http://s"}, "url is not an option; known are ports, protected, switch_s"),
        ({"ports": 16, "protected": [99]}, "protected: port 99 is not one of 1 to 16"),
        ({"ports": 16, "protected": 9}, "protected"),
        ({"switch_s": "soon"}, "switch_s"),
    ],
)
async def test_wrong_options_are_refused_by_name(options, says):
    with pytest.raises(ValueError, match=says):
        await MockFabric.open(options)
