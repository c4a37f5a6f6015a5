"""The time: wall-clock milliseconds that never go back.

Wall time is asked once; from there the monotonic clock continues, so that setting the system's clock moves no lease.
After a restart it begins at the last journalled ``at`` or later, since facts must be in order.

So a wall clock that is ahead at one start takes the time ahead, and it stays there. A start whose wall clock is far
behind the last fact is refused (:func:`~rollmuxd.daemon.app.check_clock`).
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime

from rollmuxd.core.ids import Millis


def iso(at: Millis) -> str:
    """A time as people and programs read it: ``2026-11-21T09:30:00.125Z``."""
    return datetime.fromtimestamp(at / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def ms_of(text: str) -> Millis:
    """A time as people and programs write it, in UTC unless it says where. Raises ValueError and OverflowError."""
    given = datetime.fromisoformat(text)
    return round((given if given.tzinfo else given.replace(tzinfo=UTC)).timestamp() * 1000)


class SystemClock:
    """Wall time, anchored once, carried on by a monotonic clock (seconds, as floats).

    Tests give the running loop's clock as ``monotonic``, and have virtual time.
    """

    def __init__(
        self, *, monotonic: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ) -> None:
        self._monotonic = monotonic
        self._from = monotonic()
        self._anchor_ms = wall() * 1000
        self._last: Millis = 0

    def now(self) -> Millis:
        """Milliseconds since 1970, never less than the answer before."""
        # Rounded, not cut: 0.3 s of virtual time is 300 ms, although 0.1 * 3 in floats is a hair less.
        self._last = max(self._last, round(self._anchor_ms + (self._monotonic() - self._from) * 1000))
        return self._last

    def not_before(self, at: Millis) -> None:
        """From now on, never answer less than this."""
        behind = at - self.now()
        if behind > 0:
            # Moved along, not held: a clock that stood still until the past is made up would let no lease run out.
            self._anchor_ms += behind
