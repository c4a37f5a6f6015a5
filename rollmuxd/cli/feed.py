"""Times, and the daemon's facts, for commands that work something out from them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import click

from rollmuxd.cli.common import Call, Failed
from rollmuxd.daemon.clock import ms_of

#: so many are read at most: a hundred iterations and more of each of thirty jobs
LAST: Final = 50_000
PAGE: Final = 5_000
_SPAN: Final = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([smhdw])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def say_unreadable(facts: Iterable[Mapping[str, Any]]) -> None:
    """Say which facts are missing because they are damaged, on stderr."""
    for fact in facts:
        click.echo(
            f"rollmuxd: fact {fact['seq']} cannot be read: {fact['reason']}; the rest is here, and "
            "`rollmuxd journal check` looks for more",
            err=True,
        )


class Span(click.ParamType[int]):
    """A span of time, in seconds: ``30d``."""

    name = "time"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Seconds."""
        seconds = _seconds(value)
        if seconds is None or seconds < 1:
            self.fail(f"{value!r} is no time; write 30d, 12h, 90m or 600s", param, ctx)
        return int(seconds)


class Time(click.ParamType[str]):
    """A time of the calendar, as it is passed on, or so long ago: ``7d``."""

    name = "time"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The time as the daemon takes it."""
        ago = _seconds(value)
        if ago is None:
            return value
        try:
            at = datetime.now(UTC) - timedelta(seconds=ago)
        except OverflowError:
            self.fail(f"{value} ago is before the calendar's first year; write fewer", param, ctx)
        return at.isoformat(timespec="seconds").replace("+00:00", "Z")


def _seconds(span: str) -> float | None:
    """Seconds of ``7d`` or ``1.5h``; None: it is no such span."""
    found = _SPAN.fullmatch(span)
    return None if found is None else float(found[1]) * _SECONDS[found[2]]


def last_facts(call: Call, since: str | None = None, *, most: int = LAST) -> list[Any]:
    """The last of the daemon's facts that the caller may see, those from ``since`` on (a time of the calendar).

    How many the daemon keeps makes no difference to how much is read. Raises :class:`Failed` for what is no time.
    """
    feed = call.get("/v1/me")
    after = max(feed["first"] - 1, feed["last"] - most)
    begin = 0 if since is None else at_ms(since)
    return [fact for fact in every_fact(call, after, feed["last"]) if fact.at >= begin]


def every_fact(call: Call, after: int = 0, last: float = math.inf) -> Iterator[Any]:
    """The daemon's facts that the caller may see, page by page. Raises :class:`Failed` for one that we do not know."""
    from rollmuxd.sim.observed import fact_of

    while after < last:
        page = call.get("/v1/facts", after=after, limit=PAGE)
        for shown in page["facts"]:
            try:
                yield fact_of(shown)
            except ValueError as error:
                unknown = f"fact {shown['seq']} is none that this rollmuxd knows ({error})"
                raise Failed(f"{unknown}: {json.dumps(shown)[:120]}") from error
        say_unreadable(page.get("unreadable", ()))
        if page["last"] == after:
            return
        after = page["last"]


def at_ms(time: str) -> int:
    """A time of the calendar in ms. Raises :class:`Failed` for what is none."""
    try:
        return ms_of(time)
    except (ValueError, OverflowError) as error:
        raise Failed(f"{time} is no time: 7d (ago), 2025-06-01, 2025-06-01T12:00 (UTC)") from error
