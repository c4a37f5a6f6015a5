"""What is shown while the demo runs: of its daemon, what ``rollmuxd top`` shows.

Drawing costs the jobs time, for their cores are all there is: it is done once a second. Where there is no terminal,
lines come instead.
"""

from __future__ import annotations

import time
from typing import Final, Self

import click
from rich.live import Live

from rollmuxd.cli.common import Call, console
from rollmuxd.cli.top.command import Watch
from rollmuxd.cli.top.view import picture
from rollmuxd.client.errors import RollmuxError
from rollmuxd_demo.run import Event, Exited

DRAW_EVERY_S: Final = 1.0
SAY_EVERY_S: Final = 5.0


class Screen:
    """Draws on a terminal, below a title."""

    def __init__(self, title: str) -> None:
        self._console = console()
        self._console.print(title, style="bold")
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._watch: Watch | None = None
        self._drawn = 0.0

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.__exit__(None, None, None)

    def begins(self, url: str) -> None:
        """Look at this daemon from now on."""
        self._watch = Watch(Call(url, None, as_json=False), None)

    def saw(self, event: Event) -> None:
        """The daemon knows of it."""

    def note(self, text: str) -> None:
        """A line above the picture."""
        self._console.print(text)

    def tick(self) -> None:
        """Draw, if it is time."""
        now = time.monotonic()
        if self._watch is None or now - self._drawn < DRAW_EVERY_S:
            return
        self._drawn = now
        try:
            seen = self._watch.look()
        except RollmuxError:  # it was killed, and starts again
            return
        self._live.update(picture(seen, width=self._console.width, rows=None), refresh=True)


class Lines:
    """Tells how far the jobs are, where there is no terminal; on stderr if stdout is for a machine."""

    def __init__(self, title: str, iterations: int, *, err: bool) -> None:
        self.done, self.iterations, self.err = 0, iterations, err
        self._began = self._said = time.monotonic()
        self.note(title)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def begins(self, url: str) -> None:
        """The jobs say enough."""

    def saw(self, event: Event) -> None:
        """Take in what happened."""
        if isinstance(event, Exited):
            how = "done" if event.status == 0 else f"failed ({event.status})"
            self.note(f"  {time.monotonic() - self._began:5.1f} s  {event.job} is {how}")
        else:
            self.done += 1

    def note(self, text: str) -> None:
        """A line."""
        click.echo(text, err=self.err)

    def tick(self) -> None:
        """A line every few seconds."""
        now = time.monotonic()
        if now - self._said >= SAY_EVERY_S:
            self._said = now
            self.note(f"  {now - self._began:5.1f} s  {self.done} of {self.iterations} iterations")
