"""Two small searches of a plan's: which jobs are on which nodes of a pool, and in which order a turn goes."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import combinations, islice, permutations
from typing import Final, TypeAlias

from rollmuxd.core.ids import Millis
from rollmuxd.policies.loom.model import PoolCapacity

#: orders of a turn that are tried: where jobs go round several times, and in round robin on several nodes
SPREADS: Final = 3
PERMUTATIONS: Final = 24

#: a pool's nodes, filled: how many, the load of the busiest, and each job's
Filled: TypeAlias = tuple[int, Millis, tuple[tuple[int, ...], ...]]


class Filling:
    """Ways to put jobs on so many nodes of one pool.

    Args:
        room: what a node of the pool has.
        kept: by job, as :attr:`Need.kept` has it for this pool.
        widths: nodes that each job wants.
        loads: how long each keeps its nodes in a turn.
        seated: nodes of those that sit somewhere.
        opened: nodes that somebody sits on, or that are there: the first of all.
        closed: of these, nodes on which nobody else is to be put.
        nodes: that are filled, all of them.
        turn: how long a node may be kept in a turn.
    """

    def __init__(
        self,
        room: PoolCapacity,
        kept: Sequence[tuple[int, int, int]],
        widths: Sequence[int],
        loads: Sequence[Millis],
        seated: Mapping[int, tuple[int, ...]],
        opened: int,
        closed: frozenset[int],
        nodes: int,
        turn: float,
    ) -> None:
        self.room, self.kept, self.widths, self.loads = room, kept, widths, loads
        self.turn, self.nodes, self.closed = turn, nodes, closed
        self.load = [0] * nodes
        self.ram = [0] * nodes
        #: of each GPU: what the states there leave, and what the largest takes beyond
        self.left = [0] * nodes
        self.top = [0] * nodes
        self.seats: list[tuple[int, ...]] = [()] * len(widths)
        #: nodes from here on are all alike: nobody is on them yet
        self.opened = opened
        loose = []
        self.fits = True
        for place, width in enumerate(widths):
            if place in seated:
                self.seats[place] = seated[place]
                for node in self.seats[place]:
                    self._put(place, node)
                    self.fits = self.fits and self.load[node] <= turn
            elif width:
                loose.append(place)
        self.loose = sorted(loose, key=lambda place: (-widths[place] * loads[place], place))

    def all(self) -> Iterator[Filled]:
        """Each way once."""
        if self.fits and self.opened <= self.nodes:
            yield from self._from(0, self.opened)

    def _from(self, at: int, opened: int) -> Iterator[Filled]:
        if at == len(self.loose):
            if opened == self.nodes:
                yield self.nodes, max(self.load, default=0), tuple(self.seats)
            return
        place = self.loose[at]
        width, load = self.widths[place], self.loads[place]
        known = [n for n in range(opened) if n not in self.closed and self.load[n] + load <= self.turn]
        # the fullest first: what is left over is in one piece
        known.sort(key=lambda node: (-self.load[node], node))
        for fresh in range(max(0, width - len(known)), min(width, self.nodes - opened) + 1):
            for old in combinations(known, width - fresh):
                nodes = (*old, *range(opened, opened + fresh))
                before = [(self.load[n], self.ram[n], self.left[n], self.top[n]) for n in nodes]
                if all([self._put(place, node) for node in nodes]):  # noqa: C419 - all are put, and taken off again
                    self.seats[place] = nodes
                    yield from self._from(at + 1, opened + fresh)
                for node, was in zip(nodes, before, strict=True):
                    self.load[node], self.ram[node], self.left[node], self.top[node] = was

    def _put(self, place: int, node: int) -> bool:
        """Put a job on a node; whether its states fit there."""
        ram, left, top = self.kept[place]
        self.load[node] += self.loads[place]
        self.ram[node] += ram
        self.left[node] += left
        self.top[node] = max(self.top[node], top)
        return self.ram[node] <= self.room.ram_mb and self.left[node] + self.top[node] <= self.room.gpu_mb


@lru_cache(maxsize=4096)
def orders(counts: tuple[int, ...], *, narrow: bool = True) -> tuple[tuple[int, ...], ...]:
    """Orders of a turn in which each job's iterations are spread evenly, as places; each once.

    In round robin with everybody on one node per pool the order plays no part.
    """
    if max(counts) == 1:
        some = permutations(range(1, len(counts)))
        return tuple((0, *rest) for rest in islice(some, 1 if narrow else PERMUTATIONS))
    found: dict[tuple[int, ...], None] = {}
    for kind in range(SPREADS):
        places = []
        for place, rounds in enumerate(counts):
            shift = (0.5, 0.0, place / len(counts))[kind]
            places += [((number + shift) / rounds, -rounds, place) for number in range(rounds)]
        found[tuple(place for _, _, place in sorted(places))] = None
    return tuple(found)
