"""The pictures, as SVG to stand inside a page: its text and lines take the page's own colours, light or dark.

Drawn with matplotlib, without pyplot: no display, no state between two pictures. What is drawn in ``INK`` is turned
into the page's text colour, ``FAINT`` into that of its rules.
"""

import io
import re
from collections.abc import Callable
from html import escape
from typing import Any, Final, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, FAINT = "#010203", "#040506"
_STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",  # text stays text: to be read, searched, and smaller
    "svg.hashsalt": "rollmuxd",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "hatch.linewidth": 0.6,
}


class Picture(NamedTuple):
    """What the page shows, and says of it."""

    svg: str
    caption: str


def as_svg(figure: Figure, number: int, title: str, says: str) -> str:
    """The figure for a page that has other figures; ``says`` is for readers that cannot see it."""
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, bbox_inches="tight")
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    assert size is not None
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="{size[0][9:-1]}" '
        f'style="max-width: {float(size[1]) * 1.6:.0f}px" role="img" '
        f'aria-labelledby="p{number}-title p{number}-desc">\n'
        f'<title id="p{number}-title">{escape(title)}</title>\n<desc id="p{number}-desc">{escape(says)}</desc>'
    )
    svg = head + svg[svg.index(">") + 1 :]
    # ids are the page's, so they must differ between pictures
    svg = re.sub(r'\bid="(?!p\d+-)', f'id="p{number}-', svg)
    svg = svg.replace("url(#", f"url(#p{number}-").replace('xlink:href="#', f'xlink:href="#p{number}-')
    # the page says how letters look; here only how large they are
    svg = re.sub(r"font: ((?:bold |700 )?)([\d.]+)px [^;\"]*", r"font: \1\2px var(--sans)", svg)
    return svg.replace(INK, "currentColor").replace(FAINT, "var(--rule)")


def axes_of(count: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def in_style(draw: Callable[..., Any]) -> Callable[..., Any]:
    def styled(*args: Any, **more: Any) -> Any:
        with mpl.rc_context():  # whatever a matplotlibrc says
            mpl.rcdefaults()
            mpl.rcParams.update(_STYLE)
            return draw(*args, **more)

    return styled
