"""The page of ``rollmuxd sim fabric``: performance against cost, what an iteration spends, and the table."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from rollmuxd.sim.report.page import document, table
from rollmuxd.sim.report.pictures import FAINT, INK, as_svg, in_style

_COLOURS = {"fat-tree": "#7f858c", "osub4": "#c76a12", "topoopt": "#8266d4", "mixnet": "#2b9a57",
            "mixnet-striped": "#8bb82d", "rfabric": "#2f7fd6"}  # fmt: skip
_PARTS = (("compute_s", "#7f858c"), ("exposed_s", "#c76a12"), ("sync_s", "#2f7fd6"), ("switching_s", "#d4505b"))


def page(result: Mapping[str, Any], command: str) -> str:
    """The whole page, of what :func:`rollmuxd.sim.fabric_study.study` returns."""
    title = f"Fabrics for {result['model']} on {result['gpu']}"
    parts = [f"<h1>{escape(title)}</h1>\n<pre><code>{escape(command)}</code></pre>"]
    if result["rows"]:
        of_one = [row for row in result["rows"] if _same_setting(row, result["rows"][0])]
        parts += [
            _figure(_scatter(of_one)),
            _figure(_spent(of_one)),
            *([_figure(_circuits(lit))] if (lit := [it for it in result["circuits"] if it["circuits"]]) else ()),
            _figure(_busy(result["circuits"])),
            table("All settings", _rows(result["rows"]), marked=False),
            table("Bill of materials for one GPU", _bills(result["rows"]), marked=False),
            table("Prices, $", _prices(result["prices"]), marked=False),
        ]
    if result["generation"]:
        parts.append(table("Network of one decoding step, ms", _steps(result["generation"]), marked=False))
    judged: list[list[Any]] = [
        [check["name"], f"{check['value']:.3f}", "{:g} to {:g}".format(*check["bar"]), "yes" if check["ok"] else "NO"]
        for check in result["checks"]
    ]
    parts.append(table("Checks", (("CHECK", "#VALUE", "#BAR", "HOLDS"), judged), marked=False))
    return document(title, "\n".join(parts))


def _same_setting(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(row[key] == other[key] for key in ("gpus", "t_ocs_ms"))


def _figure(drawn: tuple[str, str]) -> str:
    svg, caption = drawn
    return f"<figure>\n{svg}\n<figcaption>{escape(caption)}</figcaption>\n</figure>"


@in_style
def _scatter(rows: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Performance against cost; lines span the range of what is not published, and of the two price lists."""
    figure = Figure(figsize=(7.0, 3.8), layout="constrained")
    axis = figure.subplots()
    for row in rows:
        costs, colour = list(row["cost"].values()), _COLOURS[row["fabric"]]
        low, high = row["performance_range"]
        axis.plot([costs[0]] * 2, [low, high], color=colour, linewidth=1)
        axis.plot([min(costs), max(costs)], [row["performance"]] * 2, color=colour, linewidth=1, linestyle=":")
        axis.plot(costs[0], row["performance"], "o", color=colour)
        axis.annotate(
            row["fabric"], (costs[0], row["performance"]), xytext=(5, 5), textcoords="offset points", color=INK
        )
        axis.plot(row["reported"]["cost"], row["reported"]["performance"], "x", color=colour)
    axis.set(xlabel="cost per GPU port (fat tree = 1)", ylabel="performance (fat tree = 1)")
    caption = (
        "Dots: this model at the first price list. Upright lines: optimizer steps and micro-batches, which are not "
        "published. Dotted lines: the other price lists. Crosses: as OrchestrRL's table is reported."
    )
    return as_svg(figure, 1, "Performance against cost", caption), caption


@in_style
def _spent(rows: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Bars of what an iteration spends."""
    figure = Figure(figsize=(7.0, 0.45 * len(rows) + 1.0), layout="constrained")
    axis = figure.subplots()
    names = [row["fabric"] for row in rows]
    left = [0.0] * len(rows)
    for part, colour in _PARTS:
        values = [row[part] for row in rows]
        axis.barh(names, values, left=left, color=colour, label=part.removesuffix("_s"), edgecolor=FAINT, linewidth=0.3)
        left = [begin + value for begin, value in zip(left, values, strict=True)]
    axis.invert_yaxis()
    axis.set(xlabel="seconds of an iteration: training, then new weights", xlim=(0, 1.03 * max(left)))
    figure.legend(loc="outside upper left", ncols=len(_PARTS))
    caption = "Exposed: collectives that no computation hides. Switching: waiting for light."
    return as_svg(figure, 2, "What an iteration spends", caption), caption


@in_style
def _circuits(phases: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Racks on a circle, and lines where circuits are: a picture for each fabric and phase."""
    figure = Figure(figsize=(3.6 * min(2, len(phases)), 3.6 * -(-len(phases) // 2)), layout="constrained")
    axes = figure.subplots(-(-len(phases) // 2), min(2, len(phases)), squeeze=False).ravel()
    for axis in axes:
        axis.axis("off")
    for axis, of in zip(axes, phases, strict=False):
        angle = np.linspace(np.pi / 2, -3 * np.pi / 2, of["racks"], endpoint=False)
        x, y = np.cos(angle), np.sin(angle)
        most = max(count for _, _, count in of["circuits"])
        for a, b, count in of["circuits"]:
            axis.plot(x[[a, b]], y[[a, b]], color=_COLOURS[of["fabric"]], linewidth=0.3 + 1.7 * count / most)
        trains = np.arange(of["racks"]) < of["racks"] // 2
        axis.plot(x[trains], y[trains], "o", markersize=3, color=INK)
        axis.plot(x[~trains], y[~trains], "o", markersize=3, markerfacecolor="none", color=INK)
        axis.set(title=f"{of['fabric']}: {of['phase']}", aspect="equal")
    caption = (
        "Racks in a circle: filled ones train, the others generate. A line is circuits between two racks, thicker for "
        "more of them. All else travels by electrical switches."
    )
    return as_svg(figure, 3, "Circuits by phase", caption), caption


@in_style
def _busy(phases: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """How busy each kind of link is in each phase."""
    bars = [
        (f"{of['fabric']}, {of['phase']}: {kind}", its["mean"], its["most"], _COLOURS[of["fabric"]])
        for of in phases
        for kind, its in of["links"].items()
        if its["most"]
    ]
    figure = Figure(figsize=(7.0, 0.24 * len(bars) + 1.0), layout="constrained")
    axis = figure.subplots()
    names, means, mosts, colours = zip(*bars, strict=True)
    axis.barh(names, mosts, color=colours, alpha=0.35)
    axis.barh(names, means, color=colours, height=0.4)
    axis.invert_yaxis()
    axis.set(xlabel="share of the time that links are busy", xlim=(0, 1.03))
    caption = (
        "While gradients or new weights are sent. Dark: the mean of such links. Pale: the busiest; at 1 it decides."
    )
    return as_svg(figure, 4, "Use of links", caption), caption


def _bills(rows: Sequence[Mapping[str, Any]]) -> Any:
    bills = {row["fabric"]: row["bill"] for row in rows}
    heads = [f"#{name.replace('_', ' ').upper()}" for name in rows[0]["bill"]]
    return ("FABRIC", *heads), [[name, *(f"{it:.2f}" for it in of.values())] for name, of in bills.items()]


def _prices(prices: Mapping[str, Mapping[str, Any]]) -> Any:
    of_things = [name for name in next(iter(prices.values())) if name not in ("source", "date", "verified")]
    heads = ("LINKS", *(f"#{name.replace('_', ' ').upper()}" for name in of_things), "SOURCE", "DATE", "VERIFIED")
    return heads, [
        [at, *(f"{of[name]:g}" for name in of_things), of["source"], of["date"], "yes" if of["verified"] else "no"]
        for at, of in prices.items()
    ]


def _rows(rows: Sequence[Mapping[str, Any]]) -> Any:
    ats = list(rows[0]["cost"])
    heads = (
        "FABRIC",
        "#GPUS",
        "#T_OCS, ms",
        "#PERFORMANCE",
        "#RANGE",
        *(f"#COST {at}" for at in ats),
        "#CIRCUITS CHANGED",
    )
    return heads, [
        (
            row["fabric"], str(row["gpus"]), f"{row['t_ocs_ms']:g}", f"{row['performance']:.3f}",
            "{:.2f} to {:.2f}".format(*row["performance_range"]), *(f"{row['cost'][at]:.2f}" for at in ats),
            str(row["circuits_changed"]),
        )
        for row in rows
    ]  # fmt: skip


def _steps(rows: Sequence[Mapping[str, Any]]) -> Any:
    heads = ("FABRIC", "GENERATION", "PLACEMENT", "#OWN CIRCUITS", "#TRAINING'S CIRCUITS")
    return heads, [
        (
            row["fabric"], row["generation"], row["placement"], f"{row['own_circuits_ms']:.2f}",
            "" if row["training_circuits_ms"] is None else f"{row['training_circuits_ms']:.2f}",
        )
        for row in rows
    ]  # fmt: skip
