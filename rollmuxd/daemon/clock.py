"""The time: wall-clock milliseconds that never go back.

Wall time is asked once; from there the monotonic clock carries on, so that somebody setting the system's clock moves
no lease. After a restart it begins at the last journalled ``at`` or later, since facts must be in order.

So the wall clock of one start can take the time years ahead, and it stays there. Which of two clocks is wrong cannot
be told from here: a machine may have been off for a month. Where they differ by much that is said (``doubt``).
"""

import time
from collections.abc import Callable
from typing import Final, Protocol

from rollmuxd.core.model import Millis

#: a difference to the machine's clock that is worth a word; and a time without facts that is
_DAY: Final = 86_400_000
_WEEK: Final = 7 * _DAY


class Clock(Protocol):
    """Where the driver has its ``now`` from."""

    def now(self) -> Millis:
        """Milliseconds since 1970, never less than the answer before."""
        ...

    def not_before(self, at: Millis) -> None:
        """From now on, never answer less than this."""
        ...


class SystemClock:
    """Wall time, anchored once, carried on by a monotonic clock (seconds, as floats).

    Tests give the running loop's clock as ``monotonic``, and have virtual time.
    """

    def __init__(
        self, *, monotonic: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ) -> None:
        self._monotonic = monotonic
        self._wall = wall
        self._from = monotonic()
        self._anchor_ms = wall() * 1000
        self._last: Millis = 0
        #: the last fact before the first beginning, and when that was; None: it has not begun
        self._begun: tuple[Millis, Millis] | None = None

    def now(self) -> Millis:
        # Rounded, not cut: 0.3 s of virtual time is 300 ms, although 0.1 * 3 in floats is a hair less.
        self._last = max(self._last, round(self._anchor_ms + (self._monotonic() - self._from) * 1000))
        return self._last

    def not_before(self, at: Millis) -> None:
        behind = at - self.now()
        if self._begun is None:
            self._begun = at, self.now()
        if behind > 0:
            # Moved along, not held: a clock that stood still until the past is made up would let no lease run out.
            self._anchor_ms += behind

    def doubt(self) -> str:
        """What speaks against this being the time, for people; "": nothing."""
        now = self.now()
        ahead = now - round(self._wall() * 1000)
        if ahead > _DAY:
            return (
                f"the daemon's time is {_date(now)}, {round(ahead / _DAY)} days ahead of this machine's clock, which "
                "is wrong now, or was wrong when the last facts were written"
            )
        if ahead < -_DAY:
            return (
                f"the daemon's time is {_date(now)}, {round(-ahead / _DAY)} days behind this machine's clock, which "
                "was set since the daemon began; if it is right, restart the daemon"
            )
        last, began = self._begun or (0, 0)
        if last and began - last > _WEEK and now - began < _DAY:
            return (
                f"the daemon began {round((began - last) / _DAY)} days after its last fact, of {_date(last)}: either "
                "it did not run for so long, or this machine's clock is ahead"
            )
        return ""


def _date(at: Millis) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(at / 1000))
