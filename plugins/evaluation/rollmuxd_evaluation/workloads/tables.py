"""CSV tables of a user's numbers: read by column, and never believed.

Whatever cannot be read raises :class:`~rollmuxd.sim.workload.Malformed`: file, line, column, what is there, what was
expected.
"""

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rollmuxd.sim.workload import Malformed


class Row(NamedTuple):
    """One line of a table."""

    file: str
    line: int
    cells: Mapping[str, str]

    def text(self, column: str) -> str:
        """What is there; "" where the table has no such column."""
        return self.cells.get(column, "").strip()

    def number(self, column: str, *, above: bool = False, empty: float | None = None) -> float:
        """A finite number of at least 0 (more, if ``above``); ``empty``: what an empty cell means."""
        there = self.text(column)
        if not there and empty is not None:
            return empty
        try:
            value = float(there)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 0 or (above and not value):
            expected = f"a finite number {'above' if above else 'of at least'} 0"
            raise Malformed(self.file, self.line, column, f"{there[:60]!r} is there, expected {expected}")
        return value


def opened(path: Path, needs: Sequence[str]) -> Iterator[Row]:
    """The rows of a file with column names on top, of which it must have ``needs``."""
    file = str(path)
    try:
        reader = csv.DictReader(path.read_text(encoding="utf-8-sig").splitlines(), strict=True)
        columns = [name.strip() for name in reader.fieldnames or ()]
        for column in needs:
            if column not in columns:
                there = f"the columns are {', '.join(columns)[:200]}" if columns else "the file is empty"
                raise Malformed(file, 1, column, f"there is no such column ({there})")
        reader.fieldnames = columns
        for cells in reader:
            if None in cells or None in cells.values():
                raise Malformed(file, reader.line_num, columns[-1], f"not {len(columns)} cells are there, as expected")
            yield Row(file, reader.line_num, cells)
    except (csv.Error, UnicodeDecodeError) as error:
        raise Malformed(file, 1, needs[0], f"no CSV in UTF-8: {error}") from None
