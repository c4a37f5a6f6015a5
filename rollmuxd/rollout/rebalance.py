"""Move requests off the replica that will be last, a few at a time.

It pays where replicas differ in speed, or where one got more long responses than forecast. Each move costs the target a
prefill of the context, so moves are few. A token bucket bounds their rate, and a request moves twice at most. Lengths
are scenarios, all of them drawn together: a move that helps in some and harms in others is not made.
"""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from rollmuxd.rollout.engine import Engine, estimate

Floats = NDArray[np.float64]


class Limits(Struct, frozen=True):
    """When a move is worth it."""

    #: moves per second, and how many at once after a pause
    per_s: float = 2.0
    burst: float = 4.0
    #: moves of one request at most
    per_request: int = 2
    #: the slowest replica is later than the fastest by this share of its time
    gap: float = 0.15
    #: the end comes earlier by so many seconds, and by this share
    least_s: float = 1.0
    least_share: float = 0.01
    #: of the slowest replica, so many of the longest requests are tried, one by one and several together
    tried: int = 4


class Open(Struct, frozen=True):
    """An unfinished request: tokens of context now, tokens still to come, and how often it was moved."""

    id: int | str
    context: int
    #: in each scenario, of which all requests have as many; one number where there is one forecast (the 60 % quantile)
    remaining: float | Sequence[float] | Floats
    moves: int = 0
    #: it must stay where it is
    pinned: bool = False


class Load(Struct, frozen=True):
    """A replica with its requests. ``slower``: measured step time over the engine model's."""

    engine: Engine
    requests: Sequence[Open]
    slower: float = 1.0
    #: whether it may be given more requests; and whether its own may leave
    takes: bool = True
    gives: bool = True

    def finish_s(self, without: Sequence[Open] = (), more: Sequence[Open] = ()) -> Floats:
        """Seconds until its last request is finished, in each scenario; with some of its own gone, or others here."""
        gone = {it.id for it in without}
        held = [*(it for it in self.requests if it.id not in gone), *more]
        if not held:
            return np.zeros(1)
        remaining = np.stack([np.atleast_1d(np.asarray(it.remaining, dtype=np.float64)) for it in held], axis=1)
        context = np.array([it.context for it in held], dtype=np.float64)
        took = estimate(self.engine, remaining, context)
        found: Floats = self.slower * (took + self.engine.prefill_s(sum(it.context for it in more)))
        return found


class Move(Struct, frozen=True):
    """Move these requests; replicas are places in the sequence that was given."""

    requests: tuple[int | str, ...]
    source: int
    target: int
    #: the later of the two ends earlier by this
    gain_s: float


class Bucket(Struct):
    """A token bucket: how many moves there may be now. Times are the caller's, in seconds."""

    limits: Limits
    tokens: float = -1.0
    since: float = 0.0

    def held(self, now: float) -> int:
        """So many requests may be moved now."""
        full = self.limits.burst
        self.tokens = full if self.tokens < 0 else min(full, self.tokens + (now - self.since) * self.limits.per_s)
        self.since = now
        return int(self.tokens)

    def take(self, count: int) -> None:
        """So many were moved: at most :meth:`held`."""
        self.tokens -= count


def pick(replicas: Sequence[Load], limits: Limits | None = None, most: int = 4) -> Move | None:
    """The move of up to ``most`` requests that helps most of those tried; None: none is worth it.

    Several together, since one of two equally long responses gone makes no end come earlier.
    """
    limits = limits or Limits()
    takers = [place for place, load in enumerate(replicas) if load.takes]
    if not takers or len(replicas) < 2 or most < 1:
        return None
    ends = [load.finish_s() for load in replicas]
    mean = [float(end.mean()) for end in ends]
    source = max(range(len(replicas)), key=lambda place: (mean[place], -place))
    target = min(takers, key=lambda place: (mean[place], place))
    slowest = mean[source]
    if source == target or not replicas[source].gives or slowest - mean[target] <= limits.gap * slowest:
        return None
    movable = [it for it in replicas[source].requests if it.moves < limits.per_request and not it.pinned]
    movable.sort(key=lambda it: (-float(np.mean(it.remaining)), str(it.id)))
    longest = movable[: limits.tried]
    several = [longest[:count] for count in range(2, min(most, len(longest)) + 1)]
    best: Move | None = None
    now = np.maximum(ends[source], ends[target])
    for some in [[it] for it in longest] + several:
        if sum(it.context + float(np.max(it.remaining)) for it in some) > replicas[target].engine.kv_tokens:
            continue
        after = np.maximum(replicas[source].finish_s(without=some), replicas[target].finish_s(more=some))
        gain = float((now - after).mean())
        worth = max(limits.least_s, limits.least_share * slowest)
        if gain > worth and (best is None or gain > best.gain_s):
            best = Move(tuple(it.id for it in some), source, target, gain)
    return best
