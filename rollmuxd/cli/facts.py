"""``rollmuxd facts``: the journal, as a feed."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import click

from rollmuxd.cli.calls import Call, print_json, talks

#: The daemon answers as soon as there is a fact, so a long wait costs nothing.
FOLLOW_WAIT_MS = 20_000


@click.command()
@click.option("--follow", "-f", is_flag=True, help="Go on with what happens from now on.")
@click.option("--after", default=0, type=click.IntRange(min=0), help="Only facts after this number.")
@talks
def facts(call: Call, follow: bool, after: int) -> None:
    """What happened, in order. With --json one object per line."""
    caught_up = False
    try:
        while True:
            page = call.get("/v1/facts", after=after, wait_ms=FOLLOW_WAIT_MS if caught_up else 0)
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
    at = datetime.fromtimestamp(fact["at"] / 1000, UTC).astimezone().strftime("%H:%M:%S.%f")[:-3]
    rest = " ".join(f"{name}={_short(value)}" for name, value in fact.items() if name not in {"seq", "at", "fact"})
    return f"{fact['seq']:>6}  {at}  {fact['fact']}{f'  {rest}' if rest else ''}"


def _short(value: Any) -> str:
    match value:
        case dict() if "name" in value:
            return str(value["name"])
        case dict():
            return "{" + ",".join(f"{name}:{_short(item)}" for name, item in value.items()) + "}"
        case list() if value and all(isinstance(item, int) for item in value):
            return ".".join(map(str, value))  # a fence
        case list():
            return ",".join(_short(item) for item in value)
        case str() if " " in value:
            return f'"{value}"'
        case _:
            return str(value)
