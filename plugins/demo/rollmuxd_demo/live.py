"""The picture while the demo runs: which job holds which pool, how far each job is, and what it waits for.

Drawing costs the jobs time, for their cores are all there is: it is done twice a second, and only when something
changed. Where there is no terminal, lines come instead.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import click

from rollmuxd_demo.measure import POOLS
from rollmuxd_demo.run import Event, Exited, Happened, Iterated

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

DRAW_EVERY_S = 0.5
SAY_EVERY_S = 5.0
#: Columns of the running timeline, and the seconds that each stands for.
COLUMNS, SECONDS_EACH = 48, 0.5
COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")
ENDS = {"slot_released", "slot_taken_away", "slot_withdrawn"}


@dataclass
class JobState:
    """One row of the picture."""

    name: str
    letter: str
    step: int = 0
    first: float | None = None
    reward: float | None = None
    doing: str = "starting"
    waits_for: str | None = None


@dataclass
class Picture:
    """What the facts and the jobs' own lines have told so far."""

    names: Sequence[str]
    iterations: int
    jobs: dict[str, JobState] = field(init=False)
    #: by pool: the name of the job that holds it
    holds: dict[str, str] = field(default_factory=dict)
    #: of each pool: job, from, to (None: still there), in the daemon's seconds
    stays: dict[str, list[tuple[str, float, float | None]]] = field(default_factory=lambda: {p: [] for p in POOLS})
    now: float = 0.0
    _names_by_id: dict[str, str] = field(default_factory=dict)
    _slots: dict[str, tuple[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.jobs = {name: JobState(name, letter(index)) for index, name in enumerate(self.names)}

    def saw(self, event: Event) -> None:
        """Take in what happened."""
        match event:
            case Iterated(job, line):
                state = self.jobs[job]
                state.step, state.reward = line["step"] + 1, line["reward"]
                state.first = state.first if state.first is not None else line["reward"]
            case Exited(job, status):
                self.jobs[job].doing = "done" if status == 0 else f"failed ({status})"
                self.jobs[job].waits_for = None
            case Happened(facts):
                for fact in facts:
                    self._fact(fact)

    def _fact(self, fact: Mapping[str, Any]) -> None:
        at = fact["at"] / 1000
        self.now = max(self.now, at)
        match fact["fact"]:
            case "job_registered":
                self._names_by_id[fact["job"]] = fact["spec"]["name"]
            case "slot_queued":
                self._slots[fact["slot"]] = self._names_by_id[fact["job"]], fact["phase"]
                self._does(fact["slot"], "waits", waits=True)
            case "slot_claimed":
                job, pool = self._slots[fact["slot"]]
                self.holds[pool] = job
                self._does(fact["slot"], f"loads its state for {pool}")
            case "slot_granted":
                job, pool = self._slots[fact["slot"]]
                self._does(fact["slot"], pool)
                self.stays[pool].append((job, at, None))
            case kind if kind in ENDS and fact["slot"] in self._slots:
                job, pool = self._slots.pop(fact["slot"])
                if self.holds.get(pool) == job:
                    del self.holds[pool]
                stays = self.stays[pool]
                if stays and stays[-1][0] == job and stays[-1][2] is None:
                    stays[-1] = (job, stays[-1][1], at)
                if self.jobs[job].doing != "done":
                    self.jobs[job].doing, self.jobs[job].waits_for = "between phases", None

    def _does(self, slot: str, what: str, *, waits: bool = False) -> None:
        job, pool = self._slots[slot]
        self.jobs[job].doing, self.jobs[job].waits_for = what, pool if waits else None

    def says(self, job: JobState) -> str:
        """What a job does now, and if it waits, for which job."""
        if job.waits_for is None:
            return job.doing
        holder = self.holds.get(job.waits_for)
        return f"waits for {job.waits_for}" + (f": {holder} has it" if holder and holder != job.name else "")

    def line(self) -> str:
        """The picture in one line."""
        done = sum(job.step for job in self.jobs.values())
        held = ", ".join(f"{pool}: {self.holds.get(pool, 'free')}" for pool in POOLS)
        return f"{done} of {self.iterations * len(self.jobs)} iterations; {held}"

    def timeline(self, pool: str) -> list[str | None]:
        """Which job held the pool in each of the last columns of time."""
        cells: list[str | None] = []
        for column in range(COLUMNS):
            middle = self.now - (COLUMNS - column - 0.5) * SECONDS_EACH
            at = (job for job, start, end in reversed(self.stays[pool]) if start <= middle < (end or self.now + 1))
            cells.append(next(at, None))
        return cells

    def render(self) -> RenderableType:
        """The picture, for rich."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        letters = {job.name: job.letter for job in self.jobs.values()}
        pools = Table(box=None, show_header=False, pad_edge=False)
        for pool in POOLS:
            holder = self.holds.get(pool)
            pools.add_row(Text(pool, "bold"), bar(self.timeline(pool), letters), holder or "free")
        rows = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("", "job", "iteration", "reward", "now"):
            rows.add_column(column)
        for job in self.jobs.values():
            reward = "" if job.reward is None else f"{job.first:.2f} → {job.reward:.2f}"
            rows.add_row(bar([job.name], letters), job.name, f"{job.step} of {self.iterations}", reward, self.says(job))
        return Group(pools, Text(), rows)


def letter(index: int) -> str:
    """A, B, C, ..., and round again after Z."""
    return chr(ord("A") + index % 26)


def colour(of: str) -> str:
    """The colour of a job's letter."""
    return COLOURS[(ord(of) - ord("A")) % len(COLOURS)]


def bar(cells: Sequence[str | None], letters: Mapping[str, str]) -> Any:
    """Cells of time as text: a job's letter on its colour, and a dot where no job was."""
    from rich.text import Text

    text = Text()
    for cell in cells:
        if cell is None:
            text.append("·", "dim")
        else:
            text.append(letters[cell], f"black on {colour(letters[cell])}")
    return text


class Screen:
    """Draws a picture on a terminal."""

    def __init__(self, picture: Picture, title: str) -> None:
        from rich.console import Console
        from rich.live import Live

        self.picture = picture
        self._console = Console(highlight=False)
        self._console.print(f"[bold]{title}[/bold]")
        self._live: Live = Live(console=self._console, auto_refresh=False, transient=True)
        self._changed, self._drawn = True, 0.0

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.__exit__(None, None, None)

    def saw(self, event: Event) -> None:
        """Take in what happened."""
        self.picture.saw(event)
        self._changed = True

    def note(self, text: str) -> None:
        """A line above the picture."""
        self._console.print(text, markup=False)

    def tick(self) -> None:
        """Draw, if it is time and there is something new."""
        now = time.monotonic()
        if self._changed and now - self._drawn >= DRAW_EVERY_S:
            self._changed, self._drawn = False, now
            self._live.update(self.picture.render(), refresh=True)


class Lines:
    """Tells a picture in lines, where there is no terminal; on stderr if stdout is for a machine."""

    def __init__(self, picture: Picture, title: str, *, err: bool) -> None:
        self.picture, self.err = picture, err
        self._began = self._said = time.monotonic()
        self.note(title)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def saw(self, event: Event) -> None:
        """Take in what happened."""
        self.picture.saw(event)
        if isinstance(event, Exited):
            self.note(f"  {time.monotonic() - self._began:5.1f} s  {event.job} is {self.picture.jobs[event.job].doing}")

    def note(self, text: str) -> None:
        """A line."""
        click.echo(text, err=self.err)

    def tick(self) -> None:
        """A line every few seconds."""
        now = time.monotonic()
        if now - self._said >= SAY_EVERY_S:
            self._said = now
            self.note(f"  {now - self._began:5.1f} s  {self.picture.line()}")
