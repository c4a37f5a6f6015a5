"""Circuits of an optical switch: which to set for a demand, and when it is worth the time that setting them takes.

A circuit leads from one port to one port, one way. Between two racks there are as many as one gives them ports for.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Mapping

from msgspec import Struct


def shared_out(
    demand: Mapping[tuple[int, int], float],
    ports: int | Mapping[int, int],
    far: Mapping[int, int] | None = None,
    far_ports: int | None = None,
    kept: Mapping[tuple[int, int], int] | None = None,
) -> dict[tuple[int, int], int]:
    """Return how many circuits each pair of racks gets, by the demand in bytes from the first to the second.

    Greedy: the next circuit goes to the pair with most bytes per circuit, while both ends have a port left. So a ring
    gets all ports of its racks, a full mesh equal shares, and what has no demand gets nothing.

    Args:
        ports: what each rack can send on, and as many to receive on; one number for all, or one for each.
        far: rack -> region. Circuits between regions use the ports that reach the core switch.
        far_ports: so many of ``ports`` reach it; None: all.
        kept: circuits that stay as they are, and use ports; they are not in what is returned.
    """
    sends: Counter[int] = Counter()
    receives: Counter[int] = Counter()
    far_sends: Counter[int] = Counter()
    far_receives: Counter[int] = Counter()

    def crosses(a: int, b: int) -> bool:
        return far is not None and far.get(a) != far.get(b)

    def take(a: int, b: int, count: int = 1) -> None:
        sends[a] += count
        receives[b] += count
        if crosses(a, b):
            far_sends[a] += count
            far_receives[b] += count

    def full(a: int, b: int) -> bool:
        room = (ports, ports) if isinstance(ports, int) else (ports[a], ports[b])
        if sends[a] >= room[0] or receives[b] >= room[1]:
            return True
        return crosses(a, b) and far_ports is not None and max(far_sends[a], far_receives[b]) >= far_ports

    for (a, b), count in (kept or {}).items():
        take(a, b, count)

    got: dict[tuple[int, int], int] = {}
    order = itertools.count()
    waiting = [(-size, next(order), pair) for pair, size in sorted(demand.items()) if size > 0 and pair[0] != pair[1]]
    heapq.heapify(waiting)
    while waiting:
        _, _, pair = heapq.heappop(waiting)
        if full(*pair):
            continue
        take(*pair)
        got[pair] = got.get(pair, 0) + 1
        heapq.heappush(waiting, (-demand[pair] / (got[pair] + 1), next(order), pair))
    return got


class Gate(Struct, frozen=True):
    """Whether to change circuits: their gain against what the next phase waits for light (OrchestrRL, section 5)."""

    #: from the decision until light is back: control, mirrors, link
    t_ocs_s: float
    #: a window, in which the circuits carry nothing, is predicted: it counts as shorter by this factor
    margin: float = 1.2
    #: what a change has to gain at least
    least_s: float = 0.001

    def exposed_s(self, window_s: float) -> float:
        """What the next phase waits for light where the circuits carry nothing for ``window_s`` before it."""
        return max(0.0, self.t_ocs_s - window_s / self.margin)

    def opens(self, window_s: float, gain_s: float) -> bool:
        """Whether the change is made; otherwise the circuits stay as they are."""
        return gain_s - self.exposed_s(window_s) > self.least_s
