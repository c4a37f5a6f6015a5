"""``rollmuxd top``: the live view, over any terminal; ``--once`` for scripts."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Final

import click
from rich.live import Live

from rollmuxd.cli.common import Call, console, part, print_plainly, talks
from rollmuxd.cli.job import explained
from rollmuxd.cli.top import view
from rollmuxd.cli.top.screen import Action, Screen
from rollmuxd.client.errors import RollmuxError

LISTS: Final = ("pools", "nodes", "hosts", "groups", "jobs", "slots")


@click.command(short_help="Live view of pools, jobs and what waits.")
@click.option(
    "--once", is_flag=True, help="Print it once, and end: for scripts. So it does where there is no terminal."
)
@click.option("--interval", default=2.0, show_default=True, type=click.FloatRange(0.2, 3600), help="Seconds.")
@click.option("--owner", help="Only this owner's jobs.")
@talks
def top(call: Call, once: bool, interval: float, owner: str | None) -> None:
    """Pools and nodes, which jobs hold them, how jobs keep their bounds, and what waits.

    The arrow keys choose a job: e explains it, p pauses or resumes it, x ends it (p and x ask first). / shows only jobs
    with a text in their name, owner, group, phase or status. q ends the view.

    With --json, one object: when (at), and the lists pools, nodes, hosts, groups, jobs and slots of the HTTP
    interface. Jobs that are over are not in it, and of the slots only those that hold GPUs.
    """
    watch = Watch(call, owner)
    if call.as_json:
        call.answer(watch.look(), lambda _: None)
    elif once or not sys.stdout.isatty() or not sys.stdin.isatty():
        _print_once(watch)
    else:
        _live(watch, interval)


class Watch:
    """Looks at the daemon again and again, and asks only for what is new."""

    def __init__(self, call: Call, owner: str | None) -> None:
        self._call, self._owner = call, owner
        self._tag: str | None = None
        self._seen: dict[str, list[dict[str, Any]]] = {}

    def look(self) -> dict[str, Any]:
        """What there is now: the daemon's own views, as its lists have them."""
        answer = self._call.get(
            "/v1/overview", since=self._tag, slots="holding", over="false", owner=self._owner, limit=1000
        )
        # Without lists they are as they were.
        if (lists := answer["lists"]) is not None:
            self._tag = answer["tag"]
            self._seen = {name: self._whole(name, lists[name]) for name in LISTS}
            self._seen["pools"].sort(key=lambda pool: pool["pool"])
        at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        return {"at": at, **self._seen}

    def act(self, action: Action, screen: Screen) -> None:
        """Make a call about a job, and show its answer."""
        path = f"/v1/jobs/{part(action.job)}"
        if action.verb == "explain":
            screen.page = explained(self._call, action.job)
        elif action.verb == "end":
            view = self._call.delete(path, {"reason": "rollmuxd top"})
            screen.said = f"{action.name}: it is {view['status']}"
        else:
            view = self._call.post(f"{path}/{action.verb}")
            screen.said = f"{action.name}: {action.verb}; it is {view['status']}"

    def _whole(self, name: str, page: dict[str, Any]) -> list[dict[str, Any]]:
        """A list of which the first page is here."""
        items = list(page["items"])
        if page["next"] is not None:
            asked = {
                "jobs": {"over": "false", "owner": self._owner},
                "slots": {"which": "holding", "why": "false", "owner": self._owner},
            }
            items += self._call.items(f"/v1/{name}", after=page["next"], limit=1000, **asked.get(name, {}))
        return items


def _print_once(watch: Watch) -> None:
    print_plainly(view.picture(watch.look(), width=console().width, rows=None))


def _live(watch: Watch, interval: float) -> None:
    out = console()
    screen, trouble = Screen(), ""
    seen = watch.look()
    with keys() as pressed, Live(console=out, screen=True, auto_refresh=False) as live:
        due = time.monotonic() + interval
        while not screen.over:
            picture = view.picture(seen, width=out.width, rows=out.height, screen=screen, trouble=trouble)
            live.update(picture, refresh=True)
            for action in screen.press(pressed(max(0.0, due - time.monotonic())), seen["jobs"]):
                try:
                    watch.act(action, screen)
                except RollmuxError as error:
                    screen.said = f"{action.verb} {action.name}: {error}"
                due = time.monotonic()
            if time.monotonic() >= due:
                due = time.monotonic() + interval
                try:
                    seen, trouble = watch.look(), ""
                except RollmuxError as error:
                    trouble = f"trying again: {error}"


@contextmanager
def keys() -> Iterator[Any]:
    """Key by key, without their showing: a function that waits so long for one. The terminal is put back at the end."""
    import termios
    import tty

    where = sys.stdin.fileno()
    before = termios.tcgetattr(where)

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([where], [], [], seconds)
        return os.read(where, 8).decode(errors="replace") if ready else ""

    try:
        tty.setcbreak(where)
        yield pressed
    finally:
        termios.tcsetattr(where, termios.TCSADRAIN, before)
