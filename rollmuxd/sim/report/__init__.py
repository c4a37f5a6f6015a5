"""A comparison as one HTML file: tables, and pictures inside it. It fetches nothing, and prints.

``write`` is all there is. :mod:`~rollmuxd.sim.report.page` makes the page, :mod:`~rollmuxd.sim.report.pictures` draws
(the one place where matplotlib is imported), :mod:`~rollmuxd.sim.report.colours` says who has which colour, in every
report the same. No date is in it: equal outcomes give equal bytes.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from rollmuxd.sim.outcome import Outcome


class Unavailable(ValueError):
    """What draws is not installed."""


def check() -> None:
    """Raise :class:`Unavailable` if a report could not be drawn: to be asked before a long run, not after."""
    if find_spec("matplotlib") is None:
        raise Unavailable(
            "the report is drawn with matplotlib, which is not installed; it comes with: pip install '.[sim]'"
        )


def write(path: Path, outcomes: Sequence[Outcome], *, title: str, command: str) -> None:
    """Write a report of these outcomes, which are of one workload and setting.

    ``command`` is what made them, so that you can make them again.

    Raises:
        Unavailable: matplotlib is not installed; says how to get it.
        ValueError: nothing ran, or the outcomes are not of one workload.
    """
    check()
    from rollmuxd.sim.report import page

    path.write_text(page.made(outcomes, title=title, command=command), encoding="utf-8")
