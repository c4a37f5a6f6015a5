"""How new weights get from trainers to rollout hosts: which host fetches what over which line, and how long it takes.

Two clusters: within each a fast *fabric*, between them *slow lines*, one per pair of hosts (per pair of network cards,
where hosts have several). RollMux (arXiv 2512.11306, section 5.2) calls it topology-aware model synchronisation:

- **flat**: each rollout host fetches everything over its own slow line, so as many copies cross as there are hosts.
- **two**: each line carries one shard, so one copy crosses; then the shards are broadcast within the rollout cluster.
  The second stage begins when the first is over. This is the paper's shape.
- **rails**: as ``two``, but hosts exchange chunks while others still cross, card by card. This is what
  ``rollmuxd_weights`` does.

Sizes are bytes, rates bytes per second, times seconds. Pure: no clock, no IO.
"""

import math
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

from msgspec import Struct

Way: TypeAlias = Literal["flat", "two", "rails"]
WAYS: Final[tuple[Way, ...]] = ("flat", "two", "rails")


class Links(Struct, frozen=True):
    """The lines of one transfer.

    Raises ValueError where a rate or a count cannot be.
    """

    #: rate of each slow line
    slow: tuple[float, ...]
    #: rollout hosts
    hosts: int
    #: what one rollout host sends, and receives, within its cluster; all its cards together
    fabric: float
    #: rate at which the second stage of ``two`` hands the shards to every GPU; 0: that of the fabric
    broadcast: float = 0.0
    #: rate between the GPUs of one host, or between its processes
    inside: float = math.inf
    #: the share of a slow line that ``flat`` reaches, where many streams cross at once
    flat_share: float = 1.0
    #: to begin and to end, whatever the size
    start_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.slow or self.hosts < 1:
            raise ValueError(f"{len(self.slow)} slow lines and {self.hosts} rollout hosts: at least one of each")
        for rate in (*self.slow, self.fabric, self.inside):
            if not rate > 0:
                raise ValueError(f"a line of {rate:g} bytes per second: rates are above 0")


def seconds(way: Way, size: float, links: Links, chunk: float = 0.0) -> float:
    """Return how long ``size`` bytes take. ``chunk``: what a host has to receive before it can hand it on.

    ``flat`` waits for the slowest line. In ``rails`` the fabric works while chunks still cross, so the slower of both
    stages counts, and the last chunk's way through the fabric.
    """
    if way == "flat":
        return links.start_s + size / (links.flat_share * min(links.slow))
    crosses = size / math.fsum(links.slow)
    if way == "two":
        return links.start_s + crosses + size / (links.broadcast or links.fabric)
    others = links.hosts - 1
    exchange = size * others / links.hosts / links.fabric
    last = chunk / min(links.slow) + others * chunk / links.fabric
    return links.start_s + max(crosses, exchange) + last + size / links.inside


def shards(chunks: int, rates: Sequence[float]) -> tuple[range, ...]:
    """Cut chunks 0 to ``chunks`` into one contiguous shard per line, in proportion to its rate.

    Lines of equal rate get shards that differ by one chunk at most. A line without a rate (0: dead) gets none, unless
    all are: then all are equal.
    """
    told = [max(0.0, rate) for rate in rates]
    if not any(told):
        told = [1.0] * len(told)
    whole, cut, passed = math.fsum(told), 0, 0.0
    found = []
    for rate in told:
        passed += rate
        end = round(chunks * passed / whole)
        found.append(range(cut, end))
        cut = end
    return tuple(found)
