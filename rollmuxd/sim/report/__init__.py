"""Reports as one HTML file each: tables, and pictures inside it. A report fetches nothing, and prints.

:mod:`~rollmuxd.sim.report.page` makes the page, and :mod:`~rollmuxd.sim.report.pictures` draws (the one place where
matplotlib is imported). :mod:`~rollmuxd.sim.report.colours` gives each policy of rollouts its colour, the same in
every report. No date is in it: equal results give equal bytes.
"""

from importlib.util import find_spec


class Unavailable(ValueError):
    """What draws is not installed."""


def check() -> None:
    """Raise :class:`Unavailable` if a report could not be drawn: to be asked before a long run, not after."""
    if find_spec("matplotlib") is None:
        raise Unavailable(
            "the report is drawn with matplotlib, which is not installed; it comes with: pip install 'rollmuxd[sim]'"
        )
