"""The smallest inventory that does for a purpose: how many nodes of each kind, cheapest where prices are known.

Nodes of a kind can stand for each other. A count is tried by asking whether so many nodes do. The search reduces the
kinds one after the other by bisection, the dearest first and the cheapest first. Then it tries one more node of a kind
for fewer of another, until that gains nothing. What it finds does for the purpose, since it was tried. It is the
smallest if more nodes never do worse, and if no exchange of two kinds leads past a worse one.
"""

from collections.abc import Callable, Sequence
from itertools import permutations

from msgspec import Struct

from rollmuxd.core.model import NodeSpec

Counts = tuple[int, ...]


class Kind(Struct, frozen=True):
    """Nodes that can stand for each other."""

    pools: tuple[str, ...]
    gpu_type: str
    gpu_mb: int
    #: of each node
    gpus: int
    price_per_gpu_hour: float

    @property
    def price(self) -> float:
        """Of one node, per hour."""
        return self.gpus * self.price_per_gpu_hour


class Found(Struct, frozen=True):
    """The smallest inventory."""

    nodes: dict[Kind, int]
    #: whether the search came to its end; false: there may be a smaller one
    complete: bool


def kinds(nodes: Sequence[NodeSpec]) -> dict[Kind, list[NodeSpec]]:
    """The nodes by kind."""
    found: dict[Kind, list[NodeSpec]] = {}
    for node in nodes:
        kind = Kind(tuple(sorted(node.pools)), node.gpu_type, node.gpu_mb, len(node.gpus), node.price_per_gpu_hour)
        found.setdefault(kind, []).append(node)
    return found


def least(
    nodes: Sequence[NodeSpec], does: Callable[[Sequence[NodeSpec]], bool], may_continue: Callable[[], bool]
) -> Found | None:
    """The smallest of all inventories that have some of these nodes; None: not even all of them do."""
    search = _Search(kinds(nodes), does, may_continue)
    return search.found() if search.does(search.all) else None


class _Over(Exception):
    """The search may not continue."""


class _Search:
    """One search, with what it tried."""

    def __init__(
        self,
        kinds: dict[Kind, list[NodeSpec]],
        does: Callable[[Sequence[NodeSpec]], bool],
        may_continue: Callable[[], bool],
    ) -> None:
        self._nodes, self._does, self._may_continue = kinds, does, may_continue
        self._kinds = list(kinds)
        self._priced = all(kind.price for kind in kinds)
        self.all: Counts = tuple(map(len, kinds.values()))
        self._tried: dict[Counts, bool] = {}
        self._best = self.all

    def found(self) -> Found:
        complete = True
        try:
            sizes = [kind.price if self._priced else kind.gpus for kind in self._kinds]
            dearest = sorted(range(len(sizes)), key=lambda at: -sizes[at])
            for order in (dearest, dearest[::-1]):
                self._reduced(self.all, order)
            while self._exchanged():
                pass
        except _Over:
            complete = False
        return Found(dict(zip(self._kinds, self._best, strict=True)), complete)

    def does(self, counts: Counts) -> bool:
        """Whether so many nodes do. The first try is free; raises _Over where another may not be."""
        if counts not in self._tried:
            if self._tried and not self._may_continue():
                raise _Over
            some = [node for kind, count in zip(self._kinds, counts, strict=True) for node in self._nodes[kind][:count]]
            self._tried[counts] = self._does(some)
            if self._tried[counts] and self._size(counts) < self._size(self._best):
                self._best = counts
        return self._tried[counts]

    def _size(self, counts: Counts) -> tuple[float, int, int]:
        each = list(zip(self._kinds, counts, strict=True))
        gpus = sum(kind.gpus * count for kind, count in each)
        return (sum(kind.price * count for kind, count in each) if self._priced else gpus, gpus, sum(counts))

    def _reduced(self, counts: Counts, order: Sequence[int]) -> Counts:
        """As few nodes of each kind as do, given as many of the other kinds as there are when it is its turn."""
        for at in order:
            low, high = 0, counts[at]
            while low < high:
                middle = (low + high) // 2
                if self.does(_with(counts, at, middle)):
                    high = middle
                else:
                    low = middle + 1
            counts = _with(counts, at, high)
        return counts

    def _exchanged(self) -> bool:
        """Whether one more node of a kind, and fewer of another, are less than the best."""
        before = self._best
        for more, fewer in permutations(range(len(before)), 2):
            if before[more] < self.all[more] and before[fewer]:
                self._reduced(_with(before, more, before[more] + 1), [fewer])
        return self._best != before


def _with(counts: Counts, at: int, count: int) -> Counts:
    return (*counts[:at], count, *counts[at + 1 :])
