"""``MockFabric``: a switch in this process, with the faults of real ones. Entry point ``mock``; no hardware.

A :class:`FakeSwitch` outlives its controllers, as a device outlives restarts of a daemon. :mod:`rollmuxd.spi` imports
neither.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any, Literal, Self, TypeAlias

import anyio
import msgspec

from rollmuxd.spi.errors import ContactLost, NotDone
from rollmuxd.spi.fabric import Circuit, FabricOrder, Ports, after

#: what the next order meets: not done or done without an answer; half done; a dark port; a restart that forgot all
#: circuits
Fault: TypeAlias = Literal["silent", "silent-done", "half", "dark", "reboot"]


class FakeSwitch:
    """The device: circuits, and what goes wrong with it."""

    def __init__(self, ports: Ports) -> None:
        self.ports = ports
        self.circuits: frozenset[Circuit] = frozenset()
        #: one for each order to come; none: it is carried out
        self.faults: deque[Fault] = deque()
        #: nothing reaches it
        self.unplugged = False
        #: every order that it has obeyed
        self.obeyed: list[FabricOrder] = []

    async def set(self, order: FabricOrder) -> None:
        """Obey, or fail as the next fault says."""
        self.reached()
        then = after(order, self.circuits, self.ports)
        fault = self.faults.popleft() if self.faults else ""
        await anyio.sleep(self.ports.switch_s)
        self.reached()
        if fault == "reboot":
            self.circuits = frozenset()
            raise ContactLost("the switch was restarted")
        if fault == "silent":
            raise ContactLost("the switch does not answer")
        if fault == "half":
            kept = sorted(order.add)[: len(order.add) // 2]
            self.circuits = (self.circuits - set(order.remove)) | set(kept)
            raise ContactLost("the switch does not answer")
        self.circuits = then
        self.obeyed.append(order)
        if fault == "dark" and order.add:
            self.circuits -= {order.add[0]}
        if fault == "silent-done":
            raise ContactLost("the switch does not answer")

    def seen(self) -> frozenset[Circuit]:
        """The circuits that there are."""
        self.reached()
        return self.circuits

    def reached(self) -> None:
        """Raise ContactLost where nothing reaches it."""
        if self.unplugged:
            raise ContactLost("the switch cannot be reached")


class MockFabric:
    """A controller of a :class:`FakeSwitch`. Options: ``ports`` (64), ``switch_s`` (0.02), ``protected`` (none)."""

    def __init__(self, switch: FakeSwitch) -> None:
        self.switch = switch
        self._stamp = 0

    @classmethod
    async def open(cls, options: Mapping[str, Any]) -> Self:
        """A switch of its own."""
        if unknown := sorted(set(options) - {"ports", "switch_s", "protected"}):
            raise ValueError(f"{unknown[0]} is not an option; known are ports, protected, switch_s")
        given = {"count": options.get("ports", 64), **options}
        try:
            ports = msgspec.convert(given, Ports)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from None
        if not 2 <= ports.count <= 10_000:
            raise ValueError(f"ports = {ports.count}: a number from 2 to 10,000")
        return cls(FakeSwitch(ports))

    async def ports(self) -> Ports:
        """What the switch has."""
        self.switch.reached()
        return self.switch.ports

    async def seen(self) -> frozenset[Circuit]:
        """The circuits that there are."""
        return self.switch.seen()

    async def set(self, order: FabricOrder) -> None:
        """Do the order."""
        if order.stamp <= self._stamp:
            raise NotDone(f"order {order.stamp} is not newer than order {self._stamp}")
        after(order, self.switch.seen(), self.switch.ports)
        self._stamp = order.stamp
        await self.switch.set(order)

    async def close(self) -> None:
        """Nothing to close."""
