"""What a conversation with the daemon is made of: calls and pauses. Nothing here sends or sleeps.

A *flow* is a generator that yields a :class:`~rollmuxd.client.calls.Call` or a :class:`Pause`. It gets the answer back
(or the error thrown in), and returns its result. So the logic is written once, and run by the sync and the async
sender. A test can play the daemon and the clock by stepping it by hand.
"""

import contextlib
import os
import random
import sys
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeAlias, TypeVar

from msgspec import Struct, structs

from rollmuxd.client.calls import Call
from rollmuxd.client.errors import GaveUp, Refused, RollmuxError, TooManyRequests, Unavailable, Unreachable
from rollmuxd.wire.requests import SlotBody

T = TypeVar("T")


class Pause(Struct, frozen=True):
    """Sleep for so many seconds."""

    seconds: float


Flow: TypeAlias = Generator[Call[Any] | Pause, Any, T]

#: seconds between tries. The first is silent and at once: a kept connection that the other side has closed looks just
#: like a daemon that is gone
FIRST_PAUSE_S = 0.1
LAST_PAUSE_S = 10.0
#: the daemon's own wish is believed up to here
LONGEST_RETRY_AFTER_S = 60.0
#: seconds between two lines about the same trouble
SAY_EVERY_S = 60.0


#: where lines for the user go: the first is the default
LOGS = ("stderr", "logging", "off")


def say(text: str) -> None:
    """One line for the user, to where ``ROLLMUX_LOG`` says: ``stderr``, ``off``, or the logger ``rollmuxd``.

    The logger gets warnings, which programs show that configured nothing. stdout belongs to the program.
    """
    where = os.environ.get("ROLLMUX_LOG", "").strip().lower()
    if where == "off":
        return
    if where == "logging":
        import logging

        logging.getLogger("rollmuxd").warning("%s", text)
        return
    # A closed stderr, or none at all, is no reason to stop a training loop.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(f"rollmuxd: {text}", file=sys.stderr, flush=True)


def patience_from(environ: Mapping[str, str]) -> float | None:
    """Return ``ROLLMUX_GIVE_UP_S`` in seconds; None: no limit."""
    text = environ.get("ROLLMUX_GIVE_UP_S", "").strip()
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):  # nan neither
        raise RollmuxError(f"ROLLMUX_GIVE_UP_S={text} is no number of seconds")
    return seconds


def persist(
    call: Call[T],
    *,
    patience_s: float | None = None,
    until: float | None = None,
    unless: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
    tell: Callable[[str], None] = say,
) -> Flow[T]:
    """Send until it was answered: again after connection errors, 408, 429, 502, 503 and 504, with back-off and jitter.

    Says so at the second failure in a row, then each minute, and when it is over. Raises :class:`GaveUp` when that has
    lasted for ``patience_s`` (None: never), and every other refusal at once. ``until`` is a moment of ``clock`` at
    which it gives up, also during a call without an answer. Where ``unless`` says so, it repeats nothing.
    """
    since: float | None = None
    said: float | None = None
    tries, trouble = 0, ""
    while True:
        sent = call
        if until is not None:
            left_s = until - clock()
            if left_s <= 0:
                raise GaveUp(f"{call} got no answer in time{trouble}")
            sent = structs.replace(call, timeout_s=min(call.timeout_s, left_s))
        try:
            answer: T = yield sent
        except (Unreachable, Unavailable, TooManyRequests) as error:
            if not call.repeat:
                raise
            now = clock()
            since = now if since is None else since
            if patience_s is not None and now - since >= patience_s:
                raise GaveUp(f"{call} got no answer for {duration(now - since)}: {error}") from error
            if tries > 0 and (said is None or now - said >= SAY_EVERY_S):
                said = now
                tell(f"{error}; trying again{f' (for {duration(now - since)} now)' if now - since >= 1 else ''}")
            pause_s = _back_off(tries, error)
            yield Pause(pause_s if until is None else max(0.0, min(pause_s, until - now)))
            tries, trouble = tries + 1, f": {error}"
            if isinstance(error, Unreachable) and isinstance(call.body, SlotBody):
                # so that a daemon which is back is heard at once, and not at the end of a long poll
                call = structs.replace(call, body=structs.replace(call.body, wait_s=0.0))
            if unless():
                raise GaveUp(f"{call} is not wanted any more{trouble}") from error
        else:
            if said is not None and since is not None:
                tell(f"the daemon answers again, after {duration(clock() - since)}")
            return answer


def _back_off(tries: int, error: RollmuxError) -> float:
    pause = min(LAST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(tries, 16)) * random.uniform(0.5, 1.5)
    wished = error.retry_after_s if isinstance(error, Refused) else None
    return max(pause, min(wished or 0.0, LONGEST_RETRY_AFTER_S))


def duration(seconds: float) -> str:
    """Write seconds for people: ``8 s``, ``3 min 20 s``, ``2 h 5 min``."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest and minutes < 10 else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"
