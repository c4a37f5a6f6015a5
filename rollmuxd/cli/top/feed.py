"""Times, and the last of the daemon's facts, for commands that work something out from them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import click

from rollmuxd.cli.common import Call, Failed

#: so many are read at most: a hundred iterations and more of each of thirty jobs
LAST: Final = 50_000
_PAGE: Final = 5_000
_AGO: Final = re.compile(r"(\d+(?:\.\d+)?)([mhdw])")
_UNITS: Final = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def say_unreadable(facts: Iterable[Mapping[str, Any]]) -> None:
    """Say which facts are missing because they are damaged, on stderr."""
    for fact in facts:
        click.echo(
            f"rollmuxd: fact {fact['seq']} cannot be read: {fact['reason']}; the rest is here, and "
            "`rollmuxd journal check` looks for more",
            err=True,
        )


class Time(click.ParamType[str]):
    """A time of the calendar, as it is passed on, or so long ago: ``7d``."""

    name = "time"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The time as the daemon takes it."""
        ago = _AGO.fullmatch(value)
        if ago is None:
            return value
        at = datetime.now(UTC) - timedelta(**{_UNITS[ago[2]]: float(ago[1])})
        return at.isoformat(timespec="seconds").replace("+00:00", "Z")


def last_facts(call: Call, since: str | None = None, *, most: int = LAST) -> list[Any]:
    """The last of the daemon's facts that the caller may see, those from ``since`` on (a time of the calendar).

    How many the daemon keeps makes no difference to how much is read. Raises :class:`Failed` for what is no time.
    """
    from rollmuxd.sim.history import fact_of

    feed = call.get("/v1/me")
    after = max(feed["first"] - 1, feed["last"] - most)
    begin = 0 if since is None else _ms(since)
    found: list[Any] = []
    while after < feed["last"]:
        page = call.get("/v1/facts", after=after, limit=_PAGE)
        found += [fact_of(fact) for fact in page["facts"] if fact["at"] >= begin]
        say_unreadable(page.get("unreadable", ()))
        if page["last"] == after:
            break
        after = page["last"]
    return found


def _ms(time: str) -> int:
    try:
        at = datetime.fromisoformat(time)
    except ValueError as error:
        raise Failed(f"{time} is no time: 7d (ago), 2025-06-01, 2025-06-01T12:00 (UTC)") from error
    return round((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000)
