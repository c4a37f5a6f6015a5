"""The heap: what happens next, and when. Integer time; of equal times, what was planned first happens first."""

from collections.abc import Callable
from heapq import heappop, heappush

from rollmuxd.core.ids import Millis


class Kernel:
    """A queue of things to do at times that never go back."""

    def __init__(self) -> None:
        self.now: Millis = 0
        self._heap: list[tuple[Millis, int, Callable[..., None], tuple[object, ...]]] = []
        self._count = 0

    def at(self, when: Millis, what: Callable[..., None], *args: object) -> None:
        """Have ``what(*args)`` done at a time, which is now at the earliest."""
        self._count += 1
        heappush(self._heap, (max(when, self.now), self._count, what, args))

    def after(self, wait: Millis, what: Callable[..., None], *args: object) -> None:
        """Have it done after a while."""
        self.at(self.now + wait, what, *args)

    def next_at(self) -> Millis | None:
        """When the next thing is to be done; None: nothing is planned."""
        return self._heap[0][0] if self._heap else None

    def step(self) -> None:
        """Do the next thing."""
        self.now, _, what, args = heappop(self._heap)
        what(*args)
