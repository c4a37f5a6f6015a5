"""What is shown while the demo runs: what ``rollmuxd top`` shows of its daemon, and the rewards so far.

Drawing costs the jobs time, for their cores are all there is: it is done once a second. Where there is no terminal,
lines come instead.
"""

from __future__ import annotations

import time
from typing import Any, Final, Self

import click
from rich.console import Group
from rich.live import Live

from rollmuxd.cli.common import Call, console
from rollmuxd.cli.top.command import Watch
from rollmuxd.cli.top.view import held_by, picture
from rollmuxd.client.errors import RollmuxError
from rollmuxd_demo.run import Event, Exited, Iterated

DRAW_EVERY_S: Final = 1.0
SAY_EVERY_S: Final = 5.0


class _Shown:
    """What both know of the run."""

    def __init__(self) -> None:
        self._watch: Watch | None = None
        #: by job, one of each iteration
        self._rewards: dict[str, list[float]] = {}

    def begins(self, url: str) -> None:
        """Look at this daemon from now on: its jobs begin."""
        self._watch, self._rewards = Watch(Call(url, None, as_json=False), None), {}

    def saw(self, event: Event) -> None:
        """Take in what happened."""
        if isinstance(event, Iterated):
            self._rewards.setdefault(event.job, []).append(event.line["reward"])

    def _look(self) -> dict[str, Any] | None:
        """None: no daemon is there, or it was killed and starts again."""
        try:
            return None if self._watch is None else self._watch.look()
        except RollmuxError:
            return None

    def _so_far(self) -> list[str]:
        """Each job's iterations, and its first and last reward."""
        return [
            f"{job} {len(all_of_it)}, reward {all_of_it[0]:.2f} to {all_of_it[-1]:.2f}"
            for job, all_of_it in self._rewards.items()
        ]


class Screen(_Shown):
    """Draws on a terminal, below a title."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self._console = console()
        self._console.print(title, style="bold")
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._drawn = 0.0

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.__exit__(None, None, None)

    def note(self, text: str) -> None:
        """A line above the picture."""
        self._console.print(text)

    def tick(self) -> None:
        """Draw, if it is time."""
        now = time.monotonic()
        if now - self._drawn < DRAW_EVERY_S:
            return
        self._drawn = now
        if (seen := self._look()) is not None:
            drawn = picture(seen, width=self._console.width, rows=None)
            self._live.update(Group(drawn, "", *self._so_far()), refresh=True)


class Lines(_Shown):
    """Tells how far the jobs are, where there is no terminal; on stderr if stdout is for a machine."""

    def __init__(self, title: str, *, err: bool) -> None:
        super().__init__()
        self.err = err
        self._began = self._said = time.monotonic()
        self.note(title)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def saw(self, event: Event) -> None:
        """Take in what happened, and say which job has ended."""
        super().saw(event)
        if isinstance(event, Exited):
            how = "done" if event.status == 0 else f"failed ({event.status})"
            self.note(f"  {time.monotonic() - self._began:5.1f} s  {event.job} is {how}")

    def note(self, text: str) -> None:
        """A line."""
        click.echo(text, err=self.err)

    def tick(self) -> None:
        """A line every few seconds: which job holds which pool, and how far each is."""
        now = time.monotonic()
        if now - self._said < SAY_EVERY_S:
            return
        self._said = now
        seen = self._look() or {"nodes": [], "jobs": [], "slots": []}
        names = {job["job"]: job["name"] for job in seen["jobs"]}
        holders = {slot["slot"]: slot for slot in seen["slots"]}
        held = [f"{', '.join(it['pools'])}: {held_by(it, holders, names)}" for it in seen["nodes"]]
        self.note(f"  {now - self._began:5.1f} s  {'; '.join((*held, *self._so_far()))}")
