"""What one rollout host fetches next, and from where. Pure: an event and the time go in, chunks to ask for come out.

Every slow line between the clusters has a shard, in proportion to what it was measured to carry. A host fetches its own
shards over its slow lines, in order, and everything else from the hosts that have it. All hosts end up with all chunks,
so each sees what is missing, and there is no coordinator. A host that has its shards takes over chunks of a host that
is silent, or far from its end. Hosts tell each other what they have and what is under way to them (*claims*). What
comes twice is the same bytes.
"""

import bisect
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from rollmuxd.fabric.sync import shards

#: a host is silent after this long, or after so many times what a chunk takes here
STALL_S: Final = 1.0
STALL_CHUNKS: Final = 5
#: a host is helped that is this far from its end, in seconds and in our chunk times
LATE_S: Final = 0.3
LATE_CHUNKS: Final = 3
#: how long a part of what is to be taken over is one host's
ROTATE_S: Final = 0.3
#: how long one request over a slow line may take: a host that takes over must find something that is not under way
REQUEST_S: Final = 1.0
#: chunks that one request may ask for
MOST_CHUNKS: Final = 64


class Line(NamedTuple):
    """A slow line: from a trainer host to a rollout host, by one network card each."""

    host: str
    rail: int
    trainer: str
    trainer_rail: int

    def __str__(self) -> str:
        return f"{self.trainer}/{self.trainer_rail}-{self.host}/{self.rail}"


class Meter:
    """What a slow line carries, and for how long it is asked for something, by one stream or by several."""

    def __init__(self) -> None:
        self.bytes = 0
        self.busy_s = 0.0
        self._asking = 0
        self._since = 0.0

    def ask(self, now: float) -> None:
        """Note that something is asked for."""
        self._count(now)
        self._asking += 1

    def end(self, now: float, *, in_vain: bool = False) -> None:
        """Note that it came, or will not come. ``in_vain``: there was nothing to carry, so no time counts."""
        self._since = now if in_vain else self._since
        self._count(now)
        self._asking -= 1

    def rate(self, now: float) -> float | None:
        """Bytes per second while it was busy; None where nothing came, but too soon to call it silent."""
        self._count(now)
        return self.bytes / max(self.busy_s, 1e-9) if self.bytes or self.busy_s >= STALL_S else None

    def _count(self, now: float) -> None:
        if self._asking:
            self.busy_s += now - self._since
        self._since = now


def lines(trainers: Mapping[str, int], rollouts: Mapping[str, int]) -> list[Line]:
    """Pair the hosts, whose network cards are counted. Every trainer and every card of a rollout host is used."""
    names = list(trainers)
    found = []
    for at, (host, rails) in enumerate(rollouts.items()):
        for trainer in names[at % len(names) :: max(1, len(rollouts))][: None if len(names) > len(rollouts) else 1]:
            found += [Line(host, rail, trainer, rail % trainers[trainer]) for rail in range(rails)]
    return found


def cut(offsets: Sequence[int], between: Sequence[Line], rates: Mapping[str, float]) -> list[range]:
    """Return each line's shard: chunks, contiguous, of bytes in proportion to its rate.

    A line that was not measured counts as the mean of those that were; without any all are equal. Where there are
    enough chunks each line gets one that has bytes: a line that carries nothing would never be measured again.
    """
    known = [rates[str(line)] for line in between if str(line) in rates]
    mean = sum(known) / len(known) if known else 1.0
    # Of differences, a chunk that has not changed is no byte.
    filled = [chunk for chunk, (begin, end) in enumerate(itertools.pairwise(offsets)) if begin < end]
    begins = [offsets[chunk] for chunk in filled] + [offsets[-1]]
    edges = [0]
    for place, part in enumerate(shards(offsets[-1], [rates.get(str(line), mean) for line in between]), 1):
        last = len(filled) - (len(between) - place)
        edges.append(max(edges[-1], min(max(_nearest(begins, part.stop), edges[-1] + 1), last)))
    chunks = [0, *((filled + [len(offsets) - 1])[edge] for edge in edges[1:-1]), len(offsets) - 1]
    return [range(*pair) for pair in itertools.pairwise(chunks)]


def _nearest(offsets: Sequence[int], edge: int) -> int:
    above = bisect.bisect_left(offsets, edge)
    if above and edge - offsets[above - 1] < offsets[above] - edge:
        return above - 1
    return above


class Pull:
    """One version on its way to host ``me``. ``have``: chunks that are here already."""

    def __init__(
        self, me: str, between: Sequence[Line], cuts: Sequence[range], *, chunks: int, have: Iterable[int], now: float
    ) -> None:
        self.me = me
        self.chunks = chunks
        self._lines = between
        self._cuts = cuts
        self._began = now
        self._missing = dict.fromkeys(range(chunks))
        for chunk in have:
            self._missing.pop(chunk, None)
        #: chunks on their way: over a slow line; from a peer
        self._crossing: set[int] = set()
        self._coming: set[int] = set()
        #: of each other host: what it has and we miss, what is under way to it, and whether it answers
        self._offered: dict[str, dict[int, None]] = {}
        self._claimed: dict[str, dict[int, float]] = {}
        self._reachable: dict[str, bool] = {}
        self._left_out: set[str] = set()
        #: of each host: its shards, when a chunk of them was last seen, and how many were
        self._shards: dict[str, list[int]] = {}
        for line, shard in zip(between, cuts, strict=True):
            self._shards.setdefault(line.host, []).extend(shard)
        self._owner = {chunk: host for host, shard in self._shards.items() for chunk in shard}
        self._news = dict.fromkeys(self._shards, now)
        self._seen = dict.fromkeys(self._shards, 0)
        #: what a chunk takes over one of our lines, measured
        self._chunk_s = 0.0
        self.last_progress = now
        self.taken_over = 0

    # ---- what is -----------------------------------------------------------------------------------------------------

    @property
    def missing(self) -> list[int]:
        """Chunks that are not here."""
        return list(self._missing)

    @property
    def whole(self) -> bool:
        """Whether all chunks are here."""
        return not self._missing

    def misses(self, chunk: int) -> bool:
        """Whether one is not here."""
        return chunk in self._missing

    # ---- what happens ------------------------------------------------------------------------------------------------

    def got(self, chunk: int, now: float, *, took_s: float = 0.0) -> bool:
        """Note that a chunk is here and right; false if it was before. ``took_s``: over a slow line."""
        if took_s:
            self._chunk_s = took_s if not self._chunk_s else 0.7 * self._chunk_s + 0.3 * took_s
        self._crossing.discard(chunk)
        self._coming.discard(chunk)
        if chunk not in self._missing:
            return False
        del self._missing[chunk]
        self.last_progress = now
        for offered in self._offered.values():
            offered.pop(chunk, None)
        return True

    def failed(self, chunks: Iterable[int]) -> None:
        """Note that a request failed: what it asked for is not on its way."""
        self._crossing.difference_update(chunks)
        self._coming.difference_update(chunks)

    def heard(self, peer: str, log: Iterable[int], now: float) -> None:
        """Take in what a peer has logged: ``chunk + 1`` is there, ``-(chunk + 1)`` is under way to it."""
        if peer in self._left_out:
            return
        self._reachable[peer] = True
        offered, claimed = self._offered.setdefault(peer, {}), self._claimed.setdefault(peer, {})
        for entry in log:
            chunk = abs(entry) - 1
            if not 0 <= chunk < self.chunks:
                raise ValueError(f"host {peer} tells of chunk {chunk}, and there are {self.chunks}")
            if entry < 0:
                claimed[chunk] = now
                continue
            claimed.pop(chunk, None)
            if self._owner.get(chunk) == peer:
                self._news[peer] = now
                self._seen[peer] += 1
            if chunk in self._missing:
                offered[chunk] = None

    def lost(self, peer: str) -> None:
        """Note that a peer does not answer: what it had and claimed counts no longer."""
        self._reachable[peer] = False
        self._offered.pop(peer, None)
        self._claimed.pop(peer, None)

    def leave_out(self, peer: str) -> None:
        """Take nothing more from a peer, and do not hear it again: what it offers is wrong, or comes too slowly."""
        self._left_out.add(peer)
        self.lost(peer)

    # ---- what next ---------------------------------------------------------------------------------------------------

    def over_line(self, line: int, now: float) -> list[int]:
        """Return the chunks to ask a trainer for over one of our lines: contiguous; empty: none now."""
        working = self._working(now)
        taken = self._taken(now, working)
        ours = [number for number, other in enumerate(self._lines) if other.host == self.me]
        for number in (line, *(other for other in ours if other != line)):
            wanted = [chunk for chunk in self._cuts[number] if chunk in self._missing and chunk not in taken]
            if wanted:
                return self._ask(wanted, self._run_of(len(wanted)))
        wanted = self._of_others(now, working, taken)
        found = self._ask(wanted, self._run_of(len(wanted))) if wanted else []
        self.taken_over += len(found)
        return found

    def from_peer(self, peer: str) -> list[int]:
        """Return the chunks to ask a peer for: contiguous; empty: it has none that we need."""
        wanted = [chunk for chunk in self._offered.get(peer, ()) if chunk not in self._coming]
        found = _contiguous(wanted, MOST_CHUNKS)
        self._coming.update(found)
        return found

    def _ask(self, wanted: list[int], most: int) -> list[int]:
        found = _contiguous(wanted, most)
        self._crossing.update(found)
        return found

    def _taken(self, now: float, working: list[str]) -> set[int]:
        """Chunks that are on their way here, that a peer has, or that a host that works has claimed recently."""
        taken = self._crossing | self._coming
        for offered in self._offered.values():
            taken.update(offered)
        fresh = now - 3 * self.stall_s
        for host in working:
            claimed = self._claimed.get(host, {})
            taken.update(chunk for chunk, since in claimed.items() if since > fresh)
        return taken

    def _run_of(self, remaining: int) -> int:
        """So many chunks as a request may take, and half of what remains: so the last requests are of one chunk."""
        in_time = int(REQUEST_S / self._chunk_s) if self._chunk_s else 1
        return max(1, min(in_time, remaining // 2, MOST_CHUNKS))

    def _of_others(self, now: float, working: list[str], taken: set[int]) -> list[int]:
        """What to take over, from the host that is furthest from its end; of a host that works, from its end.

        Each host that works has a part of it, so that two do not fetch the same before they hear of each other's
        claims. The parts change hands with time, in case one of these hosts is not as well as it looks.
        """
        rank = (working.index(self.me) + int(now / ROTATE_S)) % len(working)
        offered = {chunk for peer in self._offered.values() for chunk in peer}
        late = []
        for host, shard in self._shards.items():
            left = [chunk for chunk in shard if chunk in self._missing and chunk not in offered]
            if host == self.me or not left:
                continue
            works = host in working
            if works and not self._seen[host]:  # it has just begun
                continue
            rate = self._seen[host] / max(1e-9, now - self._began)
            remaining_s = len(left) / rate if works else math.inf
            if remaining_s > max(LATE_S, LATE_CHUNKS * self._chunk_s):
                late.append((remaining_s, left, works))
        for _, left, works in sorted(late, key=lambda one: -one[0]):
            wanted = [chunk for chunk in left if chunk not in taken]
            wanted = wanted[len(wanted) // 2 :] if works else wanted
            begin, end = (at * len(wanted) // len(working) for at in (rank, rank + 1))
            if wanted[begin:end]:
                return wanted[begin:end]
        return []

    def too_slow_s(self, least_s: float) -> float:
        """How long a peer may take for a chunk: so long, or so many times what one takes over our slow lines."""
        return max(least_s, STALL_CHUNKS * self._chunk_s)

    @property
    def stall_s(self) -> float:
        """How long a host may send nothing before it counts as silent."""
        return max(STALL_S, STALL_CHUNKS * self._chunk_s)

    def _working(self, now: float) -> list[str]:
        """Hosts that answer, or may just not have begun, and whose shards are seen to come, or are all here; and we."""
        fresh = now - self.stall_s
        return [
            host
            for host, shard in self._shards.items()
            if host == self.me
            or (
                (self._reachable.get(host, False) or self._began >= fresh)
                and (self._news[host] >= fresh or not any(chunk in self._missing for chunk in shard))
            )
        ]


def _contiguous(wanted: Sequence[int], most: int) -> list[int]:
    """The first of these, and those that follow it one by one."""
    found: list[int] = []
    for chunk in wanted:
        if len(found) == most or (found and chunk != found[-1] + 1):
            break
        found.append(chunk)
    return found
