"""What flows get of the links that they share: max-min fair rates, by progressive filling.

All rates rise together until a link is full; its flows keep what they have, and the others rise further. Equal flows
over the same links are one :class:`Flow` with a count, so that 2,048 GPUs are some hundred flows.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct

#: a link with less than this share of its capacity left is full
_FULL = 1e-12


class Flow(Struct, frozen=True):
    """``count`` equal flows of ``size`` bytes each, over the same links. No link: it stays inside a host."""

    links: tuple[int, ...]
    size: float = 0.0
    count: int = 1


class _Uses:
    """Which flow uses which link, as two arrays."""

    def __init__(self, capacity: Sequence[float], flows: Sequence[Flow]) -> None:
        self.capacity = np.asarray(capacity, float)
        self.flow = np.repeat(np.arange(len(flows)), [len(flow.links) for flow in flows])
        self.link = np.array([link for flow in flows for link in flow.links], int)
        self.count = np.array([flow.count for flow in flows], float)

    def rates(self, live: Any) -> Any:
        """The rate of each live flow; 0 for the others, infinite for flows without links."""
        rate = np.where(live, np.inf, 0.0)
        live = live & (np.bincount(self.flow, minlength=len(self.count)) > 0)
        rate[live] = 0.0
        left = self.capacity.copy()
        while live.any():
            weight = np.where(live, self.count, 0.0)[self.flow]
            load = np.bincount(self.link, weight, minlength=len(left))
            used = np.flatnonzero(load)
            shares = left[used] / load[used]
            rise = shares.min()
            rate[live] += rise
            left[used] -= rise * load[used]
            full = np.zeros(len(left), bool)
            full[used] = left[used] <= _FULL * self.capacity[used]
            full[used[shares.argmin()]] = True
            live = live & ~np.isin(np.arange(len(live)), self.flow[full[self.link]])
        return rate


def rates(capacity: Sequence[float], flows: Sequence[Flow]) -> Any:
    """Return the max-min fair rate of each flow (of each of its ``count``), in the unit of ``capacity``; an array."""
    return _Uses(capacity, flows).rates(np.ones(len(flows), bool))


def ends(capacity: Sequence[float], flows: Sequence[Flow]) -> Any:
    """Return when each flow is over, where all begin at 0: an array. Rates change whenever a flow is over."""
    uses = _Uses(capacity, flows)
    left = np.array([flow.size for flow in flows], float)
    end, now = np.zeros(len(flows)), 0.0
    live = left > 0
    while live.any():
        rate = uses.rates(live)
        takes = np.where(live, left / np.where(live, rate, 1.0), np.inf)
        step = takes.min()
        over = live & (takes <= step * (1 + 1e-9))
        now += step
        left = np.where(live, left - np.where(live & np.isfinite(rate), rate, 0.0) * step, 0.0)
        end[over] = now
        live &= ~over
    return end


def seconds(capacity: Sequence[float], flows: Sequence[Flow]) -> float:
    """Return when the last of the flows is over; 0 for none."""
    return float(ends(capacity, flows).max()) if flows else 0.0


def together(capacity: Sequence[float], uses: Any, fair: Sequence[float]) -> Any:
    """Return how fast bundles of flows make progress that must keep step: units per second of each; an array.

    ``uses``: bytes on each link (column) of a unit of each bundle (row). ``fair``: units of each by which all rise
    together, until a link is full: its bundles keep what they have, and the others rise further.
    """
    speed = np.zeros(len(uses))
    left = np.asarray(capacity, float).copy()
    live = np.ones(len(uses), bool)
    while live.any():
        rises = np.where(live, fair, 0.0)
        load = rises @ uses
        used = np.flatnonzero(load)
        steps = left[used] / load[used]
        rise = steps.min()
        speed[live] += rise * rises[live]
        left[used] -= rise * load[used]
        full = np.union1d(used[left[used] <= _FULL * np.asarray(capacity)[used]], used[steps.argmin()])
        live &= ~(uses[:, full] > 0).any(axis=1)
    return speed
