"""CSV tables of other people's numbers: read by column, and never believed.

Whatever cannot be read raises :class:`~rollmuxd.sim.workload.Malformed`: file, line, column, what is there, what was
expected.
"""

import csv
import difflib
import math
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path

from rollmuxd.sim.workload import Malformed


class Row:
    """One line of a table."""

    __slots__ = ("cells", "line", "table")

    def __init__(self, table: "Table", line: int, cells: Sequence[str]) -> None:
        self.table, self.line, self.cells = table, line, cells

    def text(self, column: str) -> str:
        """What is there; "" where the table has no such column."""
        place = self.table.places.get(column)
        return "" if place is None else self.cells[place].strip()

    def number(self, column: str, least: float = 0.0, *, above: bool = False, empty: float | None = None) -> float:
        """A finite number of at least ``least`` (more than it, if ``above``); ``empty``: what an empty cell means."""
        there = self.text(column)
        if not there and empty is not None:
            return empty
        try:
            value = float(there)
        except ValueError:
            raise self.bad(column, "a number") from None
        if not math.isfinite(value):
            raise self.bad(column, "a finite number")
        if value < least or (above and value == least):
            raise self.bad(column, f"a number {'above' if above else 'of at least'} {least:g}")
        return value

    def count(self, column: str, least: int = 0) -> int:
        """A whole number of at least ``least``."""
        value = self.number(column, least)
        if value != int(value):
            raise self.bad(column, "a whole number")
        return int(value)

    def word(self, column: str, known: Sequence[str]) -> str:
        """One of the known words."""
        there = self.text(column)
        if there not in known:
            near = difflib.get_close_matches(there, known, n=1)
            raise self.bad(column, f"{f'did you mean {near[0]}? ' if near else ''}one of {', '.join(known)}")
        return there

    def bad(self, column: str, expected: str) -> Malformed:
        """What to raise about one cell."""
        there = self.text(column)
        return Malformed(self.table.file, self.line, column, f"{there[:60]!r} is there, expected {expected}")


class Table:
    """The rows of one CSV file with a line of column names on top. ``needs`` are the columns it must have."""

    def __init__(self, file: str, body: bytes, needs: Sequence[str]) -> None:
        self.file = file
        self._lines = _text(file, body).splitlines()
        head = next(csv.reader(self._lines[:1]), [])
        if not head:
            raise Malformed(
                file, 1, needs[0], f"the file is empty, expected a line of column names: {', '.join(needs)}"
            )
        self.places = {name.strip(): place for place, name in enumerate(head)}
        for column in needs:
            if column not in self.places:
                near = difflib.get_close_matches(column, self.places, n=1)
                meant = f" ({near[0]!r} is there)" if near else f" (the columns are {', '.join(self.places)[:200]})"
                raise Malformed(file, 1, column, f"there is no such column{meant}")
        self._width = len(head)
        self._needs = needs

    def __iter__(self) -> Iterator[Row]:
        reader = csv.reader(self._lines[1:], strict=True)
        rows = 0
        while True:
            try:
                cells = next(reader, None)
            except csv.Error as error:
                raise Malformed(self.file, reader.line_num + 1, self._needs[0], f"no CSV: {error}") from None
            if cells is None:
                break
            line = reader.line_num + 1
            if not cells:
                continue
            if len(cells) != self._width:
                missing = list(self.places)[min(len(cells), self._width - 1)]
                raise Malformed(self.file, line, missing, f"{len(cells)} cells are there, expected {self._width}")
            rows += 1
            yield Row(self, line, cells)
        if not rows:
            raise Malformed(self.file, 2, self._needs[0], "no row is there, expected at least one")


def _text(file: str, body: bytes) -> str:
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = body.count(b"\n", 0, error.start) + 1
        raise Malformed(file, line, "", f"byte {error.start} is no UTF-8, expected a text file (CSV)") from None
    if "\0" in text:
        raise Malformed(file, text.count("\n", 0, text.index("\0")) + 1, "", "a NUL byte, expected a text file (CSV)")
    return text


def shipped(name: str, needs: Sequence[str]) -> Table:
    """A table that comes with the package."""
    return Table(name, (resources.files("rollmuxd_evaluation") / "data" / name).read_bytes(), needs)


def opened(path: Path, needs: Sequence[str]) -> Table:
    """A table of the user's."""
    return Table(str(path), path.read_bytes(), needs)
