"""How to set an optical switch: the FabricController protocol, as a contract in prose.

A switch leads light from one port to another, one way: a **circuit** is (from port, to port). Each port sends into one
circuit at most, and receives from one at most. The daemon sets circuits beside the phases of jobs. No slot ever waits
for them: what has no circuit travels over the electrical network, which is there in any case.

``set`` does the whole order or nothing, where the device can. It returns when light is there; it raises NotDone (for
certain not done: the circuits are as they were) or ContactLost (not known). After either, and after every start, the
daemon asks ``seen``, and believes only that. The daemon gives one order at a time, and ends a call at its time limit.

**Stamps** fence the orders of one controller: a call that was ended and comes late sends nothing after a newer one.
They fence no second controller of the same switch, as switches keep no stamp: the order that came last stands. One
daemon sets a switch, and the lock of its state directory keeps a second one away. Two daemons with a state directory
each undo each other's circuits.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, Self, TypeAlias, runtime_checkable

from msgspec import Struct

from rollmuxd.spi.errors import NotDone

Circuit: TypeAlias = tuple[int, int]


class Ports(Struct, frozen=True):
    """What a switch has."""

    #: ports are 1 to ``count``
    count: int
    #: ports that are never touched
    protected: tuple[int, ...] = ()
    #: seconds until light is there; as its data sheet says
    switch_s: float = 0.02

    def __post_init__(self) -> None:
        if strange := [port for port in self.protected if not 1 <= port <= self.count]:
            raise ValueError(f"protected: port {strange[0]} is not one of 1 to {self.count}")


class FabricOrder(Struct, frozen=True):
    """Circuits to remove, and circuits to add, in one step."""

    #: a controller refuses an order that is not newer than the last one it was given. The daemon's only grow, over
    #: restarts too
    stamp: int
    remove: tuple[Circuit, ...] = ()
    add: tuple[Circuit, ...] = ()


@runtime_checkable
class FabricController(Protocol):
    """One switch. Found by an entry point of the group ``rollmuxd.fabric``."""

    @classmethod
    async def open(cls, options: Mapping[str, Any]) -> Self:
        """Make one from ``[fabric.options]``. It need not reach the switch yet.

        Raises:
            ValueError: an option is wrong; names it.
        """
        ...

    async def ports(self) -> Ports:
        """What the switch has."""
        ...

    async def seen(self) -> frozenset[Circuit]:
        """The circuits that there are: asked of the device each time."""
        ...

    async def set(self, order: FabricOrder) -> None:
        """Do the order.

        Raises:
            NotDone: it is not newer than another that was given meanwhile or before, or :func:`after` refuses it: then
                nothing was sent. Or the switch has refused it.
            ContactLost: it is not known.
        """
        ...

    async def close(self) -> None:
        """Close connections. The circuits stay."""
        ...


def unusable(port: int, ports: Ports) -> str:
    """Why no circuit may have this port; empty: one may."""
    if not 1 <= port <= ports.count:
        return f"port {port} is not one of 1 to {ports.count}"
    return f"port {port} is protected" if port in ports.protected else ""


def after(order: FabricOrder, seen: Iterable[Circuit], ports: Ports) -> frozenset[Circuit]:
    """Return the circuits that there are when the order is done; a driver calls it before it sends anything.

    Raises:
        NotDone: a port does not exist, is protected, or would be in two circuits.
    """
    for a, b in (*order.remove, *order.add):
        for port in (a, b):
            if why := unusable(port, ports):
                raise NotDone(f"circuit {a} -> {b}: {why}")
    circuits = (frozenset(seen) - set(order.remove)) | set(order.add)
    for side, what in ((0, "sends into"), (1, "receives from")):
        used: set[int] = set()
        for circuit in sorted(circuits):
            if circuit[side] in used:
                raise NotDone(f"port {circuit[side]} {what} two circuits")
            used.add(circuit[side])
    return circuits
