"""Circuits for the slots that are held: which a phase wants, and what has to change on a switch. Pure.

A phase says how its nodes talk (``traffic``). It is ``ring``, ``mesh`` (each to each), or ``pairs`` (the nodes of its
first pool with those of its second). Circuits of a slot stay until it has ended; those of an ended one stay until
another slot needs one of their ports.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from msgspec import Struct

from rollmuxd.fabric.circuits import shared_out

Circuit: TypeAlias = tuple[int, int]
#: ports of a switch that a node's cables end at
Wired: TypeAlias = Mapping[str, tuple[int, ...]]


class Wish(Struct, frozen=True):
    """What one held slot wants."""

    slot: str
    traffic: str
    #: the nodes of each of its pools
    pools: tuple[tuple[str, ...], ...]


class Change(Struct, frozen=True):
    """What an order has to do; nothing where both are empty."""

    remove: tuple[Circuit, ...] = ()
    add: tuple[Circuit, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.remove or self.add)


def talking(wish: Wish) -> list[tuple[str, str]]:
    """Which node sends to which."""
    nodes = list(dict.fromkeys(node for pool in wish.pools for node in pool))
    if wish.traffic == "ring":
        return [(a, b) for a, b in zip(nodes, nodes[1:] + nodes[:1], strict=True) if a != b]
    if wish.traffic == "mesh":
        return [(a, b) for a in nodes for b in nodes if a != b]
    if wish.traffic == "pairs" and len(wish.pools) > 1:
        return [pair for a in wish.pools[0] for b in wish.pools[1] if a != b for pair in ((a, b), (b, a))]
    return []


def wanted(wishes: Iterable[Wish], wired: Wired, seen: frozenset[Circuit]) -> dict[str, frozenset[Circuit]]:
    """Return the circuits of each slot, the first wish first: a later one has only the ports that are left.

    Circuits that are there already are taken before others, so that as few as possible change.
    """
    sends: set[int] = set()
    receives: set[int] = set()
    got: dict[str, frozenset[Circuit]] = {}
    for wish in wishes:
        free = {node: tuple(port for port in ports if port not in sends) for node, ports in wired.items()}
        into = {node: tuple(port for port in ports if port not in receives) for node, ports in wired.items()}
        pairs = [(a, b) for a, b in talking(wish) if free.get(a) and into.get(b)]
        names = sorted({node for pair in pairs for node in pair})
        number = {name: at for at, name in enumerate(names)}
        counts = shared_out(
            {(number[a], number[b]): 1.0 for a, b in pairs},
            {number[name]: min(len(free[name]), len(into[name])) for name in names},
        )
        circuits: set[Circuit] = set()
        for (a, b), count in counts.items():
            there = [pair for pair in sorted(seen) if pair[0] in free[names[a]] and pair[1] in into[names[b]]]
            for _ in range(count):
                kept = next((pair for pair in there if pair[0] not in sends and pair[1] not in receives), None)
                made = kept or (_first(free[names[a]], sends), _first(into[names[b]], receives))
                circuits.add(made)
                sends.add(made[0])
                receives.add(made[1])
        got[wish.slot] = frozenset(circuits)
    return got


def change(seen: frozenset[Circuit], circuits: Iterable[Circuit]) -> Change:
    """Return what has to be done so that these circuits are there. Others go only where their ports are needed."""
    target = frozenset(circuits)
    add = target - seen
    sends, receives = {a for a, _ in add}, {b for _, b in add}
    remove = {(a, b) for a, b in seen - target if a in sends or b in receives}
    return Change(tuple(sorted(remove)), tuple(sorted(add)))


def _first(ports: Sequence[int], taken: set[int]) -> int:
    return next(port for port in ports if port not in taken)
