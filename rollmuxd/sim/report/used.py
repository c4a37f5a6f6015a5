"""What GPUs were used for in a span of time, as one HTML file: tables and pictures of ``GET /v1/report``.

The report comes as the daemon's JSON has it, and what ran as items of a history; nothing is asked of anybody here.
"""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

from rollmuxd.sim import tables
from rollmuxd.sim.history import Item
from rollmuxd.sim.report import check

#: rows of a picture, at most
_BARS: Final = 30
_PARTS: Final = {
    "used": ("gpu_hours_used", "#2b9a57"),
    "switching": ("gpu_hours_switching", "#c76a12"),
    "idle": ("gpu_hours_idle", "#a5822a"),
    "unallocated": ("gpu_hours_unallocated", "#7f858c"),
}
_CHARGED, _ALONE = "#2f7fd6", "#7f858c"


def write(path: Path, report: Mapping[str, Any], *, command: str, spans: Sequence[Item] = ()) -> None:
    """Write the page of a report; ``spans`` are what ran last, drawn as they ran on each node.

    Raises:
        Unavailable: matplotlib is not installed; says how to get it.
    """
    check()
    path.write_text(made(report, command=command, spans=spans), encoding="utf-8")


def made(report: Mapping[str, Any], *, command: str, spans: Sequence[Item] = ()) -> str:
    """The whole page."""
    from rollmuxd.sim.report.page import _CSS

    since, until = (report[side][:16].replace("T", " ") for side in ("since", "until"))
    title = f"GPU-hours, {'the beginning' if since.startswith('1970-01-01 00:00') else since} to {until} UTC"
    parts = [
        f"<h1>{escape(title)}</h1>\n<pre><code>{escape(command)}</code></pre>",
        f"<p>{escape(saved(report))}</p>\n<p>{escape(adds_up(report['bill']))}</p>",
        _work(report),
        _pools(report["pools"]),
        *_pictures(report, spans),
        _words(report["saving"]["baseline"]),
    ]
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def saved(report: Mapping[str, Any]) -> str:
    """What sharing saved, and against what."""
    saving = report["saving"]
    verb = "Saved" if saving["gpu_hours_saved"] >= 0 else "Not saved, but used on top:"
    return (
        f"{verb} {tables.number(abs(saving['gpu_hours_saved']))} GPU-hours ({tables.number(saving['cost_saved'])} in "
        f"money): {tables.number(saving['gpu_hours_charged'])} charged, against "
        f"{tables.number(saving['gpu_hours_alone'])} for {saving['baseline']}."
    )


def adds_up(bill: Mapping[str, float]) -> str:
    """That everything is charged to somebody, or to nobody."""
    others = f" + {tables.number(bill['gpu_hours_others'])} to other owners" if bill["gpu_hours_others"] else ""
    return (
        f"{tables.number(bill['gpu_hours_charged'])} GPU-hours charged{others} + "
        f"{tables.number(bill['gpu_hours_unallocated'])} unallocated = {tables.number(bill['gpu_hours_capacity'])} of "
        f"the inventory; in money {tables.number(bill['cost_charged'])} of {tables.number(bill['cost_capacity'])}."
    )


# ---- tables ----------------------------------------------------------------------------------------------------------


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """The first column is of words."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    body = "\n".join(
        f'<tr><th scope="row">{escape(str(row[0]))}</th>'
        + "".join(f"<td>{_cell(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'


def _cell(value: Any) -> str:
    return escape(value) if isinstance(value, str) else tables.number(value)


def _work(report: Mapping[str, Any]) -> str:
    rows = report["work"]
    if not rows:
        return ""
    heads = (
        *(report["by"], "owner", "charged h", "of it held h", "used h", "alone h", "cost", "iterations", "slowdown"),
        *("SLO", "promises kept", "warm", "cold", "parks", "switching h", "switching cost", "waited h"),
    )
    shown = [
        (
            row["name"],
            row["owner"],
            row["gpu_hours_charged"],
            row["gpu_hours_held"],
            row["gpu_hours_used"],
            row["gpu_hours_alone"],
            row["cost_charged"],
            row["iterations"],
            row["slowdown"],
            row["slo"],
            f"{row['slo_kept']} of {row['slo_judged']}" if row["slo_judged"] else "-",
            row["loads_warm"],
            row["loads_cold"],
            row["parks"],
            row["gpu_hours_switching"],
            row["cost_switching"],
            row["wait_turn_hours"],
        )
        for row in rows
    ]
    return f"<h2>Who</h2>\n{_table(heads, shown)}"


def _pools(pools: Sequence[Mapping[str, Any]]) -> str:
    heads = ("pool", "GPUs", "capacity h", *(f"{name} h" for name in _PARTS), "utilisation", "cost")
    shown = [
        (
            pool["pool"],
            pool["gpus"],
            pool["gpu_hours_capacity"],
            *(pool[key] for key, _ in _PARTS.values()),
            tables.share(pool["utilisation"]),
            pool["cost_capacity"],
        )
        for pool in pools
    ]
    return f"<h2>Pools</h2>\n{_table(heads, shown)}"


def _words(baseline: str) -> str:
    words = {
        "charged": "What a job held, and a part of what its group's nodes were not held: by what its jobs held.",
        "held, used": "From the claim of GPUs until they are given on; from the grant to the release.",
        "alone": f"The baseline: {baseline}.",
        "switching": "While states were loaded and parked: GPU-hours of the nodes on which they were.",
        "unallocated": "On nodes where no job was placed.",
        "promises kept": "Of jobs with a promise and eight iterations at least, those whose slowdown was within it.",
    }
    listed = "\n".join(f"<dt>{name}</dt><dd>{escape(meaning)}</dd>" for name, meaning in words.items())
    return f"<h2>What the words mean</h2>\n<dl>\n{listed}\n</dl>"


# ---- pictures --------------------------------------------------------------------------------------------------------


def _pictures(report: Mapping[str, Any], spans: Sequence[Item]) -> list[str]:
    from rollmuxd.sim.report import pictures

    drawn = [
        ("What became of each pool", _pool_bars(report["pools"], 1)),
        ("Charged, and alone", _work_bars(report["work"], 2)),
        ("Slowdown against the bound", _slowdowns(report["work"], 3)),
        ("Who ran where, at the end", pictures.gantt(spans, 4) if spans else None),
    ]
    return [
        f"<h2>{name}</h2>\n<figure>\n{picture.svg}\n<figcaption>{escape(picture.caption)}</figcaption>\n</figure>"
        for name, picture in drawn
        if picture is not None
    ]


def _pool_bars(pools: Sequence[Mapping[str, Any]], number: int) -> Any:
    from rollmuxd.sim.report.pictures import Picture, as_svg, axes_of, in_style

    if not any(pool["gpu_hours_capacity"] for pool in pools):
        return None

    @in_style
    def draw() -> Picture:
        figure, (axis,) = axes_of(1, 9.6, 0.9 + 0.4 * len(pools))
        left = [0.0] * len(pools)
        for name, (key, colour) in _PARTS.items():
            shares = [
                100 * pool[key] / pool["gpu_hours_capacity"] if pool["gpu_hours_capacity"] else 0 for pool in pools
            ]
            axis.barh(range(len(pools)), shares, left=left, color=colour, label=name, height=0.6)
            left = [before + share for before, share in zip(left, shares, strict=True)]
        axis.set_yticks(range(len(pools)), [pool["pool"] for pool in pools])
        axis.set_ylim(len(pools) - 0.5, -0.5)
        axis.set_xlim(0, 100)
        axis.set_xlabel("% of the pool's GPU-hours")
        axis.grid(axis="y", visible=False)
        figure.legend(loc="outside upper left", ncols=4, handlelength=1.2)
        caption = "Each pool's GPU-hours: used by phases, held while states were moved, idle in groups, unallocated."
        return Picture(as_svg(figure, number, "Pools", caption), caption)

    return draw()


def _work_bars(rows: Sequence[Mapping[str, Any]], number: int) -> Any:
    from rollmuxd.sim.report.pictures import Picture, as_svg, axes_of, in_style

    most = sorted(rows, key=lambda row: -row["gpu_hours_charged"])[:_BARS]
    if not most:
        return None

    @in_style
    def draw() -> Picture:
        figure, (axis,) = axes_of(1, 9.6, 1.0 + 0.34 * len(most))
        places = range(len(most))
        charged, alone = [row["gpu_hours_charged"] for row in most], [row["gpu_hours_alone"] for row in most]
        axis.barh([place - 0.19 for place in places], charged, height=0.36, color=_CHARGED, label="charged")
        axis.barh([place + 0.19 for place in places], alone, height=0.36, color=_ALONE, label="alone (the baseline)")
        axis.set_yticks(places, [str(row["name"]) for row in most])
        axis.set_ylim(len(most) - 0.5, -0.5)
        axis.set_xlabel("GPU-hours")
        axis.grid(axis="y", visible=False)
        figure.legend(loc="outside upper left", ncols=2, handlelength=1.2)
        caption = "GPU-hours that each was charged with, and what its finished iterations would have taken unshared."
        if len(rows) > len(most):
            caption += f" The {len(most)} largest of {len(rows)}."
        return Picture(as_svg(figure, number, "Charged, and alone", caption), caption)

    return draw()


def _slowdowns(rows: Sequence[Mapping[str, Any]], number: int) -> Any:
    from rollmuxd.sim.report.pictures import INK, Picture, as_svg, axes_of, in_style

    known = [row for row in rows if row["slowdown"] is not None]
    slowest = sorted(known, key=lambda row: -row["slowdown"])[:_BARS]
    if not slowest:
        return None

    @in_style
    def draw() -> Picture:
        figure, (axis,) = axes_of(1, 9.6, 0.9 + 0.28 * len(slowest))
        for place, row in enumerate(slowest):
            within = row["slo"] is None or row["slowdown"] <= row["slo"]
            axis.barh(place, row["slowdown"], height=0.6, color="#2b9a57" if within else "#d4505b")
            if row["slo"] is not None:
                axis.plot([row["slo"]] * 2, [place - 0.4, place + 0.4], color=INK, linewidth=1.6)
        axis.set_yticks(range(len(slowest)), [str(row["name"]) for row in slowest])
        axis.set_ylim(len(slowest) - 0.5, -0.5)
        axis.set_xlim(left=0)
        axis.axvline(1.0, color=INK, linewidth=0.6, dashes=(3, 3))
        axis.set_xlabel("mean iteration / solo iteration")
        axis.grid(axis="y", visible=False)
        caption = "How slow each was; the upright stroke is its bound, where it has one; 1 is as fast as alone."
        if len(known) > len(slowest):
            caption += f" The {len(slowest)} slowest of {len(known)}."
        return Picture(as_svg(figure, number, "Slowdown against the bound", caption), caption)

    return draw()
