"""``rollmuxd facts``: the journal, as a feed."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import click

from rollmuxd.cli.common import Call, print_json, printable, talks
from rollmuxd.cli.feed import say_unreadable

#: The daemon answers as soon as there is a fact, so a long wait costs nothing.
FOLLOW_WAIT_MS = 20_000


@click.command()
@click.option("--follow", "-f", is_flag=True, help="Continue with what happens from now on.")
@click.option("--after", default=0, type=click.IntRange(min=0), help="Only facts after this number.")
@click.option("--job", help="Only what is about this job (its id, or its name).")
@click.option("--audit", is_flag=True, help="Only what operators did, and failed logins (for admins).")
@talks
def facts(call: Call, follow: bool, after: int, job: str | None, audit: bool) -> None:
    """What happened, in order. With --json one object per line.

    Following continues over a restart of the daemon, and misses nothing.
    """
    caught_up = reached = False
    wait_ms = FOLLOW_WAIT_MS
    try:
        while True:
            get = call.get_again if follow and reached else call.get
            page = get(
                "/v1/facts",
                after=after,
                wait_ms=wait_ms if caught_up else 0,
                job=job,
                audit="true" if audit else None,
            )
            if not reached and after == 0 and page.get("first", 1) > 1:
                click.echo(f"rollmuxd: facts before {page['first']} were compacted away", err=True)
            reached = True
            say_unreadable(page.get("unreadable", ()))
            for fact in page["facts"]:
                if call.as_json:
                    print_json(fact)
                else:
                    click.echo(line(fact))
            # Not the number of the last fact shown: there may be later ones that are not ours to see.
            caught_up, after = page["last"] == after, page["last"]
            if caught_up and not follow:
                return
    except KeyboardInterrupt:
        if not follow:
            raise


def line(fact: dict[str, Any]) -> str:
    """``17  12:30:01.250  slot_granted  slot=s4 fence=1.9``."""
    # Of what is audited one asks long afterwards.
    form = "%Y-%m-%d %H:%M:%S.%f" if fact["fact"] == "audited" else "%H:%M:%S.%f"
    at = datetime.fromtimestamp(fact["at"] / 1000, UTC).astimezone().strftime(form)[:-3]
    rest = " ".join(f"{name}={_short(value)}" for name, value in fact.items() if name not in {"seq", "at", "fact"})
    return f"{fact['seq']:>6}  {at}  {fact['fact']}{f'  {rest}' if rest else ''}"


def _short(value: Any) -> str:
    match value:
        case dict() if "name" in value:
            return str(value["name"])
        case dict() if "text" in value:  # a cause
            return _short(str(value["text"]))
        case dict():
            return "{" + ",".join(f"{name}:{_short(item)}" for name, item in value.items()) + "}"
        case list() if value and all(isinstance(item, int) for item in value):
            return ".".join(map(str, value))  # a fence
        case list():
            return ",".join(_short(item) for item in value)
        case str() if " " in value:
            return f'"{printable(value)}"'
        case _:
            return printable(str(value))
