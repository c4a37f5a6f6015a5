"""The report of ``rollmuxd sim rollout``: what each policy took, and one step of each drawn replica by replica."""

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.ticker import MaxNLocator

from rollmuxd.sim.report import page
from rollmuxd.sim.report.colours import of_policy
from rollmuxd.sim.report.pictures import Picture, as_svg, axes_of, in_style
from rollmuxd.sim.rollouts.run import Result
from rollmuxd.sim.rollouts.study import Row, Study

_WORDS: Final = (
    "OVER static-tp2: times faster than 2 GPUs per replica with the samples of a prompt on one replica. OVER best "
    "static: times faster than the best degree in hindsight, with the samples spread. The first is what a paper may "
    "say, the second is what planning brings."
)


def write(path: Path, found: Study, one: Mapping[str, Result], *, title: str, command: str) -> None:
    """Write the page. ``one``: a result of the same step for each policy."""
    cases = dict.fromkeys((row.lengths, row.c_step_ms) for row in found.rows)
    tables = [
        page.table(
            f"{lengths}, {c_step:g} ms a step",
            (
                ["POLICY", "DISPATCH", "TP", "#ROLLOUT s", "#OVER static-tp2", "#OVER best static", "#ITERATION",
                 "#MOVES", "#SWITCHES", "#PREEMPTED"],
                [_cells(row) for row in found.rows if (row.lengths, row.c_step_ms) == (lengths, c_step)],
            ),
        )
        for lengths, c_step in cases
    ]  # fmt: skip
    pictures = [_done(one, 1), _replicas(one, 2), _degree(one, 3)]
    shown = [f"<figure>\n{it.svg}\n<figcaption>{escape(it.caption)}</figcaption>\n</figure>" for it in pictures]
    switches = [
        [name, f"{it.at:.0f}", "x".join(map(str, sorted(set(it.layout)))), f"{it.gain_s:.1f}", f"{it.cost_s:.1f}",
         f"{of.unchanged_s - of.seconds:.1f}" if it is of.switches[-1] else ""]
        for name, of in one.items()
        for it in of.switches
    ]  # fmt: skip
    body = "\n".join(
        [
            f"<h1>{escape(title)}</h1>\n<pre><code>{escape(command)}</code></pre>",
            f'<p class="meaning">{escape(_WORDS)}</p>',
            *tables,
            "<h2>One step, policy by policy</h2>",
            *shown,
            page.table("Changes of the degree within that step: what each was to win and to cost, and what all of them "
                       "have won, against the same step without them",
                       (["POLICY", "#AT s", "TP", "#GAIN s", "#COST s", "#REALISED s"], switches)) if switches else "",
            _checks(found),
        ]
    )  # fmt: skip
    path.write_text(page.document(title, body), encoding="utf-8")


def _cells(row: Row) -> list[str]:
    over = ["" if it is None else f"{it:.2f}" for it in (row.over_static_tp2, row.over_best_static, row.end_to_end)]
    counts = [str(it) for it in (row.moves, row.switches, row.preemptions)]
    return [row.policy, row.dispatch, ",".join(map(str, row.degrees)), f"{row.seconds:.1f}", *over, *counts]


def _checks(found: Study) -> str:
    if not found.checks:
        return ""
    rows = []
    for it in found.checks:
        bar = " to ".join("" if bound is None else f"{bound:g}" for bound in it.bar)
        value = "" if it.value is None else f"{it.value:.3f}"
        rows.append([it.check, value, bar, "ok" if it.ok else "MISSED"])
    return "<h2>Checks</h2>" + page.table(
        "Each figure beside its bar", (["CHECK", "#VALUE", "BAR", ""], rows), marked=False
    )


@in_style
def _done(one: Mapping[str, Result], number: int) -> Picture:
    """The share of responses that are finished, over time."""
    figure, (axes,) = axes_of(1, 8.0, 3.0)
    for name, of in one.items():
        ends, look = np.sort(of.ends), of_policy(name)
        axes.step(
            [0, *ends], np.arange(len(ends) + 1) / len(ends), where="post", color=look.colour, label=name,
            dashes=look.dash or (None, None),
        )  # fmt: skip
    axes.axhline(0.8, color="#888888", linewidth=0.7)
    axes.set(xlabel="seconds", ylabel="responses finished", ylim=(0, 1))
    axes.legend(loc="lower right")
    says = "Share of responses that are finished. Above the line is the tail: few responses, and GPUs that wait."
    return Picture(as_svg(figure, number, "Responses finished", says), says)


@in_style
def _degree(one: Mapping[str, Result], number: int) -> Picture:
    """The degree over time: the mean over nodes, to the end of the step."""
    figure, (axes,) = axes_of(1, 8.0, 2.4)
    for name, of in one.items():
        layouts = [(0.0, of.layout), *((it.at, it.layout) for it in of.switches)]
        times = [*(at for at, _ in layouts), of.seconds]
        means = [sum(layout) / len(layout) for _, layout in layouts]
        look = of_policy(name)
        axes.step(
            times, [*means, means[-1]], where="post", color=look.colour, label=name, dashes=look.dash or (None, None)
        )
    axes.set(xlabel="seconds", ylabel="GPUs per replica", ylim=(0, None))
    axes.legend(loc="lower right")
    says = "GPUs per replica, in the mean over nodes. Each line ends with the step."
    return Picture(as_svg(figure, number, "Degree over time", says), says)


@in_style
def _replicas(one: Mapping[str, Result], number: int) -> Picture:
    """How many requests each replica has, over time: a row per replica."""
    figure, parts = axes_of(len(one), 3.2 * len(one), 3.4)
    longest = max(of.seconds for of in one.values())
    for axes, (name, of) in zip(parts, one.items(), strict=True):
        grid = np.linspace(0, longest, 240)
        rows = np.zeros((len(of.replicas), len(grid)))
        for span in of.spans:
            rows[span.replica] += (grid >= span.begins) & (grid < span.ends)
        axes.imshow(
            np.where(rows > 0, rows / max(1.0, rows.max()), np.nan), aspect="auto", cmap="viridis", vmin=0, vmax=1,
            extent=(0, longest, len(rows) - 0.5, -0.5), interpolation="nearest",
        )  # fmt: skip
        for switch in of.switches:
            axes.axvline(switch.at, color="#d4505b", linewidth=1)
        axes.set(title=name, xlabel="seconds", ylabel="replica")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(visible=False)
    says = "Requests on each replica, dark for few. Red lines: the degree changes, and other replicas take over."
    return Picture(as_svg(figure, number, "Requests per replica", says), says)
