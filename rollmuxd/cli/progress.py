"""A bar on stderr for what takes long, while a user watches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, and nothing elsewhere; call what it yields with how much is done."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    watched = sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not watched) as shown:
        task = shown.add_task(what, total=total)
        yield lambda done: shown.update(task, completed=done)
