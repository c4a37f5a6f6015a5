"""A bar on stderr for what takes long, while somebody watches."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Self


class Bar:
    """``with Bar("facts") as bar: bar(done, total)``: shown on a terminal, and nowhere else."""

    def __init__(self, what: str, total: int | None = None) -> None:
        self._what, self._total = what, total
        self._shown: Any = None
        self._move: Callable[[int, int | None], None] | None = None

    def __enter__(self) -> Self:
        if not sys.stderr.isatty():
            return self
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn(self._what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        shown = self._shown = Progress(*columns, console=Console(stderr=True), transient=True)
        shown.start()
        task = shown.add_task(self._what, total=self._total)
        self._move = lambda done, total: shown.update(task, completed=done, total=total)
        return self

    def __call__(self, done: int, total: int | None = None) -> None:
        """So much is done, of so much."""
        if self._move is not None:
            self._move(done, self._total if total is None else total)

    def __exit__(self, *_: object) -> None:
        if self._shown is not None:
            self._shown.stop()
