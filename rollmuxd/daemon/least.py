"""The smallest inventory that does for a purpose: how many nodes of each kind, cheapest where prices are known.

Nodes of a kind can stand for each other. A count is tried by asking whether so many nodes do. The search reduces the
kinds one after the other by bisection, the dearest first and the cheapest first. Then it tries one more node of a kind
for fewer of another, until that gains nothing. What it finds does for the purpose, since it was tried. It is the
smallest if more nodes never do worse, and if no exchange of two kinds leads past a worse one.
"""

from bisect import bisect_left
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


class _Over(Exception):
    """The search may not continue."""


def least(
    nodes: Sequence[NodeSpec], does: Callable[[Sequence[NodeSpec]], bool], may_continue: Callable[[], bool]
) -> Found | None:
    """The smallest of all inventories that have some of these nodes; None: not even all of them do."""
    of = kinds(nodes)
    every = tuple(map(len, of.values()))
    priced = all(kind.price for kind in of)
    tried: dict[Counts, bool] = {}

    def fit(counts: Counts) -> bool:
        """Whether so many nodes do. The first try is free; raises _Over where another may not be."""
        if counts not in tried:
            if tried and not may_continue():
                raise _Over
            tried[counts] = does(
                [node for alike, count in zip(of.values(), counts, strict=True) for node in alike[:count]]
            )
        return tried[counts]

    def size(counts: Counts) -> tuple[float, int, int]:
        each = list(zip(of, counts, strict=True))
        gpus = sum(kind.gpus * count for kind, count in each)
        return (sum(kind.price * count for kind, count in each) if priced else gpus, gpus, sum(counts))

    def best() -> Counts:
        return min((counts for counts, did in tried.items() if did), key=size)

    def reduce(counts: Counts, order: Sequence[int]) -> None:
        """Try as few nodes of each kind as do, given as many of the others as there are when it is its turn."""
        for at in order:
            few = bisect_left(range(counts[at]), True, key=lambda count: fit(_with(counts, at, count)))
            counts = _with(counts, at, few)

    def exchanged() -> bool:
        """Whether one more node of a kind, and fewer of another, are less than the best."""
        before = best()
        for more, fewer in permutations(range(len(before)), 2):
            if before[more] < every[more] and before[fewer]:
                reduce(_with(before, more, before[more] + 1), [fewer])
        return best() != before

    if not fit(every):
        return None
    complete = True
    dearest = [at for at, _ in sorted(enumerate(of), key=lambda it: -(it[1].price if priced else it[1].gpus))]
    try:
        reduce(every, dearest)
        reduce(every, dearest[::-1])
        while exchanged():
            pass
    except _Over:
        complete = False
    return Found(dict(zip(of, best(), strict=True)), complete)


def _with(counts: Counts, at: int, count: int) -> Counts:
    return (*counts[:at], count, *counts[at + 1 :])
