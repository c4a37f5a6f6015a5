"""What every controller of an optical switch must do: subclass, say how yours is made, run pytest."""

from contextlib import AbstractAsyncContextManager

import anyio
import anyio.lowlevel
import pytest

from rollmuxd.spi.errors import ContactLost, NotDone
from rollmuxd.spi.fabric import FabricController, FabricOrder


@pytest.mark.asyncio
class FabricContract:
    """Override :meth:`made`: a switch of at least 8 ports with no circuits, port 8 protected; and :meth:`unplug`."""

    def made(self) -> AbstractAsyncContextManager[FabricController]:
        """A controller of a fresh switch, for a block."""
        raise NotImplementedError

    async def again(self, controller: FabricController) -> FabricController:
        """Another controller of the same switch, as after a restart of the daemon."""
        pytest.skip("override again() with a second controller of the same switch")

    async def unplug(self, controller: FabricController) -> None:
        """Nothing reaches the switch any more."""
        pytest.skip("override unplug() with what cuts the switch off")

    async def test_an_order_is_done_when_it_returns(self) -> None:
        async with self.made() as controller:
            await controller.set(FabricOrder(1, add=((1, 2), (2, 1), (3, 4))))
            assert await controller.seen() == {(1, 2), (2, 1), (3, 4)}

    async def test_ports_change_sides_in_one_order(self) -> None:
        async with self.made() as controller:
            await controller.set(FabricOrder(1, add=((1, 2), (3, 4))))
            await controller.set(FabricOrder(2, remove=((1, 2), (3, 4)), add=((1, 4), (3, 2))))
            assert await controller.seen() == {(1, 4), (3, 2)}

    async def test_an_order_without_circuits_leaves_an_empty_switch(self) -> None:
        async with self.made() as controller:
            await controller.set(FabricOrder(1, add=((1, 2),)))
            await controller.set(FabricOrder(2, remove=((1, 2),)))
            assert await controller.seen() == frozenset()

    @pytest.mark.parametrize(
        ("order", "says"),
        [
            (FabricOrder(2, add=((1, 3),)), "port 1 sends into two circuits"),
            (FabricOrder(2, add=((3, 2),)), "port 2 receives from two circuits"),
            (FabricOrder(2, add=((3, 8),)), "port 8 is protected"),
            (FabricOrder(2, add=((0, 3),)), "port 0 is not one of 1 to"),
            (FabricOrder(2, add=((3, 100_000),)), "port 100000 is not one of 1 to"),
            (FabricOrder(1, add=((3, 4),)), "not newer than order 1"),
        ],
    )
    async def test_what_cannot_be_is_refused_before_anything_is_sent(self, order: FabricOrder, says: str) -> None:
        async with self.made() as controller:
            await controller.set(FabricOrder(1, add=((1, 2),)))
            with pytest.raises(NotDone, match=says):
                await controller.set(order)
            assert await controller.seen() == {(1, 2)}

    async def test_an_older_order_that_comes_while_a_newer_one_is_done_is_refused(self) -> None:
        async with self.made() as controller, anyio.create_task_group() as tasks:
            tasks.start_soon(controller.set, FabricOrder(2, add=((1, 2),)))
            await anyio.lowlevel.checkpoint()
            with pytest.raises(NotDone, match="not newer than order 2"):
                await controller.set(FabricOrder(1, add=((3, 4),)))

    async def test_a_new_controller_finds_what_is_there(self) -> None:
        async with self.made() as controller:
            await controller.set(FabricOrder(1, add=((1, 2),)))
            other = await self.again(controller)
            assert await other.seen() == {(1, 2)}
            await other.set(FabricOrder(1 << 40, remove=((1, 2),), add=((1, 3),)))
            assert await controller.seen() == {(1, 3)}
            await other.close()

    async def test_a_switch_that_cannot_be_reached_is_lost_contact(self) -> None:
        async with self.made() as controller:
            await self.unplug(controller)
            with pytest.raises(ContactLost):
                await controller.seen()
            with pytest.raises((ContactLost, NotDone)):
                await controller.set(FabricOrder(1, add=((1, 2),)))

    async def test_it_says_what_the_switch_has(self) -> None:
        async with self.made() as controller:
            ports = await controller.ports()
            assert ports.count >= 8
            assert 8 in ports.protected
