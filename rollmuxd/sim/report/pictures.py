"""The pictures, as SVG to stand inside a page: its text and lines take the page's own colours, light or dark.

Drawn with matplotlib, without pyplot: no display, no state between two pictures. What is drawn in ``INK`` is turned
into the page's text colour, ``FAINT`` into that of its rules.
"""

import io
import re
from collections.abc import Callable, Sequence
from html import escape
from typing import Any, Final, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from rollmuxd.core.ids import Millis
from rollmuxd.sim import tables
from rollmuxd.sim.outcome import Outcome
from rollmuxd.sim.report.colours import of_policy

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
#: points at which a curve of several seeds is drawn
_POINTS: Final = 300
_PARTS: Final = {"paper": "paper: end times fixed by the trace", "work": "work: every job does its iterations"}


class Picture(NamedTuple):
    """What the page shows, and says of it."""

    svg: str
    caption: str


def as_svg(figure: Figure, number: int, title: str, says: str) -> str:
    """The figure for a page that has other figures; ``says`` is for who cannot see it."""
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


def _accountings(outcomes: Sequence[Outcome]) -> list[str]:
    return [name for name in tables.ACCOUNTINGS if any(outcome.accounting == name for outcome in outcomes)]


def _legend(figure: Figure, names: Sequence[str]) -> None:
    lines = []
    for name in names:
        look = of_policy(name)
        lines.append(Line2D([], [], color=look.colour, linewidth=2, dashes=look.dash or (None, None), label=name))
    figure.legend(handles=lines, loc="outside upper left", ncols=min(7, len(lines)), handlelength=3)


def _unit(span: Millis) -> tuple[float, str]:
    for ms, name in ((86_400_000, "days"), (3_600_000, "hours"), (60_000, "minutes")):
        if span >= (20 if name == "days" else 3) * ms:
            return ms, name
    return 1_000, "seconds"


def in_style(draw: Callable[..., Any]) -> Callable[..., Any]:
    def styled(*args: Any, **more: Any) -> Any:
        with mpl.rc_context():  # whatever somebody's matplotlibrc says
            mpl.rcdefaults()
            mpl.rcParams.update(_STYLE)
            return draw(*args, **more)

    return styled


# ---- cost over time --------------------------------------------------------------------------------------------------


@in_style
def cost(outcomes: Sequence[Outcome], number: int) -> Picture | None:
    """Dollars per hour over time: the mean over seeds, and a band from the least to the most."""
    drawn = [outcome for outcome in outcomes if outcome.cost_curve]
    if not drawn:
        return None
    names = tables.policies(drawn)
    parts = _accountings(drawn)
    figure, axes = axes_of(len(parts), 9.6, 3.4)
    several = False
    for axis, accounting in zip(axes, parts, strict=True):
        curves = [outcome.cost_curve for outcome in drawn if outcome.accounting == accounting]
        start, end = min(curve[0][0] for curve in curves), max(curve[-1][0] for curve in curves)
        ms, unit = _unit(end - start)
        for name in names:
            runs = tables.runs(drawn, name, accounting)
            if not runs:
                continue
            look = of_policy(name)
            dashes: Any = look.dash or (None, None)
            style: dict[str, Any] = {"color": look.colour, "linewidth": 1.4, "dashes": dashes}
            if len(runs) == 1:
                curve = [*runs[0].cost_curve, (runs[0].cost_curve[-1][0], 0.0)]
                axis.plot([at / ms for at, _ in curve], [level for _, level in curve], drawstyle="steps-post", **style)
                continue
            several = True
            grid = [start + (end - start) * point // _POINTS for point in range(_POINTS + 1)]
            levels = [_sampled(outcome.cost_curve, grid) for outcome in runs]
            at = [point / ms for point in grid]
            middle = [sum(of) / len(of) for of in zip(*levels, strict=True)]
            axis.fill_between(
                at,
                [min(of) for of in zip(*levels, strict=True)],
                [max(of) for of in zip(*levels, strict=True)],
                color=look.colour,
                alpha=0.18,
                linewidth=0,
                step="post",
            )
            axis.plot(at, middle, drawstyle="steps-post", **style)
        axis.set_title(_PARTS[accounting])
        axis.set_xlabel(f"{unit} of the trace")
        axis.set_ylabel("dollars per hour")
        axis.set_ylim(bottom=0)
        axis.set_xlim(start / ms, max(end, start + 1) / ms)
    _legend(figure, names)
    band = " Lines are means over the seeds, bands reach from the cheapest seed to the dearest." if several else ""
    caption = f"What all nodes in groups cost, over time.{band}"
    says = "; ".join(
        f"{row['policy']} {accounting} mean {tables.plus_minus(row[accounting]['cost_per_hour'])} dollars per hour"
        for row in tables.summary(drawn)
        for accounting in parts
        if row[accounting] is not None
    )
    return Picture(as_svg(figure, number, "Cost over time", f"{caption} {says}."), caption)


def _sampled(curve: Sequence[tuple[Millis, float]], grid: Sequence[Millis]) -> list[float]:
    """The curve's level at each point of the grid; nothing before its beginning, and from its end on."""
    levels, place, level = [], 0, 0.0
    for at in grid:
        while place < len(curve) and curve[place][0] <= at:
            level = curve[place][1]
            place += 1
        levels.append(0.0 if place == len(curve) and at >= curve[-1][0] else level)
    return levels


# ---- slowdowns -------------------------------------------------------------------------------------------------------


@in_style
def slowdowns(outcomes: Sequence[Outcome], number: int) -> Picture | None:
    """What share of the jobs is slowed down by no more than so much: of their bound, where they have one."""
    bounded = any(job.kept is not None for outcome in outcomes for job in outcome.jobs)
    names, parts = tables.policies(outcomes), _accountings(outcomes)
    of = {
        (name, accounting): sorted(
            ratio
            for outcome in tables.runs(outcomes, name, accounting)
            for job in outcome.jobs
            if (slow := job.slowdown) is not None
            if (ratio := (slow / job.slo if job.slo and job.kept is not None else None) if bounded else slow)
            is not None
        )
        for name in names
        for accounting in parts
    }
    if not any(of.values()):
        return None
    most = max(tables.quantile(found, 0.99) for found in of.values() if found)
    least = min(found[0] for found in of.values() if found)
    most = max(most, 1.05 if bounded else least * 1.05)
    room = (most - least) * 0.04
    #: some policies let jobs wait ten times longer than others
    ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 1.5, 2, 3, 5, 10, 20, 50, 100) if least * 0.95 <= tick <= most]
    logarithmic = most > 3 * least and len(ticks) > 2
    figure, axes = axes_of(len(parts), 9.6, 3.4)
    beyond = False
    for axis, accounting in zip(axes, parts, strict=True):
        for name in names:
            found = of[name, accounting]
            if not found:
                continue
            look = of_policy(name)
            dashes: Any = look.dash or (None, None)
            beyond = beyond or found[-1] > most + room
            shares = [100 * (place + 1) / len(found) for place in range(len(found))]
            # from nobody at the least to everybody at the right edge
            axis.plot(
                [found[0], *found, max(most + room, found[-1])],
                [0.0, *shares, 100.0],
                drawstyle="steps-post",
                color=look.colour,
                linewidth=1.4,
                dashes=dashes,
            )
        if bounded:
            axis.axvline(1.0, color=INK, linewidth=0.9)
            for side, text in ((-4, "kept"), (4, "missed")):
                style: dict[str, Any] = {"ha": "right" if side < 0 else "left", "fontsize": 8, "color": INK}
                axis.annotate(text, (1.0, 3), xytext=(side, 0), textcoords="offset points", **style)
        axis.set_title(_PARTS[accounting])
        axis.set_xlabel("slowdown / SLO" if bounded else "slowdown (mean iteration / solo iteration)")
        axis.set_ylabel("% of the jobs, at most so slow")
        if logarithmic:
            axis.set_xscale("log")
            axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axis.set_xticks([], minor=True)
            axis.set_xlim(least * 0.95, most * 1.05)
        else:
            axis.set_xlim(least - room, most + room)
        axis.set_ylim(0, 101)
    _legend(figure, names)
    what = (
        "each job's slowdown as a share of its SLO (1: just kept)" if bounded else "each job's slowdown (1: as alone)"
    )
    caption = f"How slow jobs were, all seeds together: {what}."
    if beyond:
        caption += " The slowest 1 % of some policy's jobs are beyond the right edge."
    says = "; ".join(
        f"{name} {accounting}: median {tables.number(tables.quantile(found, 0.5))}, "
        f"95th percentile {tables.number(tables.quantile(found, 0.95))}"
        for (name, accounting), found in of.items()
        if found
    )
    return Picture(as_svg(figure, number, "Slowdowns", f"{caption} {says}."), caption)


# ---- utilisation -----------------------------------------------------------------------------------------------------


@in_style
def utilisation(outcomes: Sequence[Outcome], number: int) -> Picture | None:
    """Bars: the share of the paid time in which a phase was running, and the bubble."""
    rows, parts = tables.summary(outcomes), _accountings(outcomes)
    pools = list(dict.fromkeys(pool.name for outcome in outcomes for pool in outcome.pools))
    if not pools:
        return None
    places = [(pool, row) for pool in pools for row in rows]
    figure, axes = axes_of(len(parts), 9.6, 0.9 + 0.26 * len(places) + 0.3 * len(pools))
    told = []
    for axis, accounting in zip(axes, parts, strict=True):
        ticks, labels = [], []
        height = 0.0
        for pool in pools:
            axis.text(0, height - 0.7, f"pool {pool}", fontweight="bold", fontsize=9, va="center", color=INK)
            for row in rows:
                of = row[accounting] and row[accounting]["pools"].get(pool)
                ticks.append(height)
                labels.append(row["policy"])
                used = of["utilisation"] if of else None
                if used is None:
                    axis.text(1, height, "not bought", va="center", fontsize=8, fontstyle="italic", color=INK)
                else:
                    colour = of_policy(row["policy"]).colour
                    axis.barh(height, 100 * used, 0.72, color=colour, linewidth=0)
                    axis.barh(
                        height, 100 - 100 * used, 0.72, 100 * used, facecolor="none", edgecolor=colour, hatch="////",
                        linewidth=0.6,
                    )  # fmt: skip
                    axis.text(101, height, tables.share(round(used, 3)), va="center", fontsize=8, color=INK)
                    told.append(f"{row['policy']} {pool} {accounting} {tables.share(round(used, 3))}")
                height += 1
            height += 1.2
        axis.set_yticks(ticks, labels)
        axis.tick_params(axis="y", length=0)
        axis.set_ylim(height - 1.2 - 0.4, -1.15)
        axis.set_xlim(0, 112)
        axis.set_xticks([0, 25, 50, 75, 100])
        axis.grid(axis="y", visible=False)
        axis.set_title(_PARTS[accounting])
        axis.set_xlabel("% of the paid node-time")
    handles = [
        Patch(facecolor=INK, label="a phase was running"),
        Patch(facecolor="none", edgecolor=INK, hatch="////", linewidth=0.6, label="bubble"),
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=2)
    caption = f"{tables.UTILISATION} {tables.BUBBLE} Means over the seeds."
    return Picture(as_svg(figure, number, "Utilisation of the pools", f"{'; '.join(told)}."), caption)
