"""What all workloads make of a user's options: those that make no sense are refused, in one line each."""

import difflib
import math
import random
from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

from rollmuxd.core.ids import Millis, PoolName
from rollmuxd.fabric.sync import WAYS
from rollmuxd.sim.workload import Options

T = TypeVar("T")

#: every node is simulated, used or not
MOST_NODES: Final = 100_000
#: each of them waits for a loan; the scheduler takes twice as many requests that wait
MOST_FILLERS: Final = 10_000
#: how new weights may be handed on
SYNCS: Final[tuple[str, ...]] = ("none", "table", *WAYS)
#: and what is held meanwhile
SYNC_PLACES: Final[tuple[str, ...]] = ("within", "phase", "between")

#: $ per GPU-hour where none is given, as the artifact of RollMux has them: an H20 node is a third of an H800 node
PRICES: Final[Mapping[str, float]] = {"H20": 5.28 / 3, "H800": 5.28}


def nearest(word: str, known: Sequence[str]) -> str:
    """``; did you mean this?``, or nothing."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


def thinned(items: Sequence[T], count: int, seed: int) -> Sequence[T]:
    """So many of them, chosen at random, in their order; 0: all."""
    if not count or count >= len(items):
        return items
    return [items[place] for place in sorted(random.Random(f"thin {seed}").sample(range(len(items)), count))]


def check(options: Options, more: Sequence[str], pools: Sequence[PoolName]) -> None:
    """Raise ``ValueError`` for the first option that makes no sense."""
    _check_slo(options.slo)
    _check_switch(options.switch)
    for name, word, words in (("sync", options.sync, SYNCS), ("sync_place", options.sync_place, SYNC_PLACES)):
        if word not in words:
            raise ValueError(f"{name} is {word!r}{nearest(word, words)} ({', '.join(words)})")
    if not 0 < options.ram_gb < math.inf:
        raise ValueError(f"ram_gb is {options.ram_gb:g}: a node has more than 0 GB of host RAM, and a finite amount")
    if options.jobs < 0:
        raise ValueError(f"jobs is {options.jobs}: it is how many jobs at most, or 0 for all")
    if not 0 <= options.fillers <= MOST_FILLERS:
        raise ValueError(f"fillers is {options.fillers}: it is how many there are, 0 to {MOST_FILLERS}")
    for gpu_type, price in options.prices.items():
        if not 0 <= price < math.inf:
            raise ValueError(f"the price of {gpu_type} is {price:g}: dollars per GPU-hour are at least 0, and finite")
    for pool, nodes in options.nodes.items():
        if pool not in pools:
            raise ValueError(
                f"nodes are given for pool {pool!r}{nearest(pool, pools)} (the pools are {', '.join(pools)})"
            )
        if not 1 <= nodes <= MOST_NODES:
            raise ValueError(f"pool {pool} is given {nodes} nodes: 1 to {MOST_NODES}, or leave it out to buy on demand")
    for key in options.more:
        if key not in more:
            known = f"its settings are {', '.join(more)}" if more else "this workload has no settings of its own"
            raise ValueError(f"{key!r} is no setting of this workload{nearest(key, more)} ({known})")


def _check_slo(slo: tuple[float, float] | None) -> None:
    if slo is None:
        return
    low, high = slo
    if not 1 <= low < math.inf:
        raise ValueError(f"slo begins at {low:g}: no job is faster shared than alone, so it is at least 1, and finite")
    if not low <= high < math.inf:
        raise ValueError(f"slo is {low:g}:{high:g}: LO:HI, where HI is finite and no less than LO")


def _check_switch(switch: str | Millis) -> None:
    if isinstance(switch, int):
        if switch < 0:
            raise ValueError(f"switch is {switch}: milliseconds of load on every switch are at least 0")
    elif switch not in ("none", "table"):
        raise ValueError(f"switch is {switch!r}{nearest(switch, ['none', 'table'])} (none, table, or milliseconds)")
