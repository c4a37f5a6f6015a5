"""The page: what was run, tables per accounting, pictures, what the words mean."""

from collections.abc import Sequence
from html import escape
from typing import Final

from rollmuxd.sim import tables
from rollmuxd.sim.outcome import Outcome
from rollmuxd.sim.report import pictures
from rollmuxd.sim.report.colours import of_policy
from rollmuxd.sim.tables import Row, Table, number

_CSS: Final = """
:root {
  color-scheme: light dark;
  --ink: #1d2125; --soft: #59636e; --page: #ffffff; --rule: #d3d8de; --shade: #f4f6f8;
  --sans: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
}
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ec; --soft: #9aa5b1; --page: #14171b; --rule: #383f47; --shade: #1c2126; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 var(--sans); }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 1rem; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .3rem; border-bottom: 1px solid var(--rule); }
h3 { font-size: 1rem; margin: 1.4rem 0 .3rem; }
p, li { max-width: 48rem; }
p.meaning { color: var(--soft); margin: .2rem 0 .8rem; }
pre { background: var(--shade); padding: .6rem .8rem; white-space: pre-wrap; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; }
dt { color: var(--soft); } dd { margin: 0; }
.wide { overflow-x: auto; margin-bottom: 1rem; }
table { border-collapse: collapse; font-size: .87rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); padding: .3rem 0; }
th, td { padding: .25rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--rule); }
thead th { vertical-align: bottom; font-weight: 600; }
th:first-child, .words { text-align: left; }
tbody th { font-weight: 600; }
tbody tr:hover { background: var(--shade); }
.mark { display: inline-block; width: .7em; height: .7em; margin-right: .45em; border-radius: 2px; }
figure { margin: 1.2rem 0; } figure svg { width: 100%; height: auto; display: block; }
figcaption { color: var(--soft); max-width: 48rem; margin-top: .3rem; }
@media print {
  :root { color-scheme: light; --ink: #000; --soft: #333; --page: #fff; --rule: #bbb; --shade: #f4f4f4; }
  body { padding: 0; max-width: none; font-size: 10pt; }
  .wide { overflow: visible; } table { font-size: 7.5pt; } th, td { padding: .1rem .35rem; white-space: normal; }
  tbody th { white-space: nowrap; }
  figure, table, pre { break-inside: avoid; } h2, h3 { break-after: avoid; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""


def made(outcomes: Sequence[Outcome], *, title: str, command: str) -> str:
    """The whole page."""
    if not outcomes:
        raise ValueError("nothing ran, and so there is nothing to report")
    rows = tables.summary(outcomes)
    parts = [_head(outcomes, title, command)]
    for accounting in tables.ACCOUNTINGS:
        parts.append(_accounting(accounting, rows))
    parts.append(_paired(outcomes, rows))
    parts.append(_pictures(outcomes))
    parts.append(_words())
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _head(outcomes: Sequence[Outcome], title: str, command: str) -> str:
    first = outcomes[0]
    seeds = sorted({outcome.seed for outcome in outcomes})
    jobs = sorted({len(outcome.jobs) for outcome in outcomes})
    pools = {pool.name: pool for outcome in outcomes for pool in outcome.pools}
    told = {
        "Workload": ", ".join(dict.fromkeys(outcome.workload for outcome in outcomes)),
        "Jobs": number(jobs[0]) if len(jobs) == 1 else f"{number(jobs[0])} to {number(jobs[-1])}",
        "Policies": ", ".join(tables.policies(outcomes)),
        "Seeds": _run_together(seeds),
        "Fidelity": first.fidelity,
        "Prices": "; ".join(
            f"{pool.name}: nodes of {pool.gpus_per_node} {pool.gpu_type}, {number(pool.price_per_gpu_hour)} $/GPU-hour"
            for pool in pools.values()
        ),
    }
    listed = "\n".join(f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in told.items() if value)
    return f"<h1>{escape(title)}</h1>\n<pre><code>{escape(command)}</code></pre>\n<dl>\n{listed}\n</dl>"


def _run_together(seeds: Sequence[int]) -> str:
    """``0 to 19``, ``3, 5``."""
    if len(seeds) > 2 and list(seeds) == list(range(seeds[0], seeds[-1] + 1)):
        return f"{seeds[0]} to {seeds[-1]} ({len(seeds)} of them)"
    return ", ".join(map(str, seeds))


def _table(caption: str, shown: Table) -> str:
    heads, rows = shown
    words = ["" if head.startswith("#") else ' class="words"' for head in heads]
    head = "".join(
        f'<th scope="col"{of}>{escape(name.removeprefix("#"))}</th>' for name, of in zip(heads, words, strict=True)
    )
    body = "\n".join(
        f'<tr><th scope="row">{_marked(row[0])}</th>'
        + "".join(
            f"<td{of}>{escape(cell.replace('+-', '±'))}</td>" for cell, of in zip(row[1:], words[1:], strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="wide"><table>\n<caption>{escape(caption)}</caption>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _marked(name: str) -> str:
    """A policy's name, with its colour in the pictures."""
    colour = of_policy(name.removesuffix(" (best found)")).colour
    return f'<span class="mark" style="background:{colour}"></span>{escape(name)}'


def _accounting(accounting: str, rows: Sequence[Row]) -> str:
    head = f'<h2>Accounting: {accounting}</h2>\n<p class="meaning">{escape(tables.MEANING[accounting])}</p>'
    shown = [(tables.called(row), row[accounting]) for row in rows if row[accounting] is not None]
    if not shown:
        return f"{head}\n<p>It was not run.</p>"
    return "\n".join(
        [
            head,
            _table("What it cost, and how the jobs fared (mean ± sd over the seeds)", tables.figures(shown)),
            *(f"<p>{escape(said)}</p>" for said in tables.never_placed(shown)),
            _table("How it came about", tables.how(shown)),
        ]
    )


def _paired(outcomes: Sequence[Outcome], rows: Sequence[Row]) -> str:
    first = rows[0]["policy"]
    found = tables.paired(outcomes, first)
    if not found:
        return ""
    says = (
        f"Seed by seed on the same draw, theirs minus that of {first}: what the seeds have in common cancels. "
        "Mean ± standard deviation of the differences; 95 %: the confidence interval of their mean (Student's t)."
    )
    head = f'<h2>Differences from {escape(first)}</h2>\n<p class="meaning">{escape(says)}</p>'
    return f"{head}\n{_table(f'Positive: more than {first}', tables.differences(found))}"


def _pictures(outcomes: Sequence[Outcome]) -> str:
    drawn = [
        ("Cost over time", pictures.cost(outcomes, 1)),
        ("Slowdowns", pictures.slowdowns(outcomes, 2)),
        ("Utilisation", pictures.utilisation(outcomes, 3)),
    ]
    shown = [
        f"<h2>{name}</h2>\n<figure>\n{picture.svg}\n<figcaption>{escape(picture.caption)}</figcaption>\n</figure>"
        for name, picture in drawn
        if picture is not None
    ]
    return "\n".join(shown)


def _words() -> str:
    words = {
        "accounting paper": tables.MEANING["paper"],
        "accounting work": tables.MEANING["work"],
        "utilisation": tables.UTILISATION,
        "bubble": tables.BUBBLE,
        "slowdown": "A job's mean iteration, divided by what it would have been alone on the same nodes.",
        "SLO kept": "Of the jobs with a bound on their slowdown, the share whose mean iteration kept it.",
        "solo": "Every job on nodes of its own, rollout and training apart: what is bought without sharing.",
        "PEAK GPUS": "The most GPUs in groups at once, of all seeds; added over pools of one GPU type.",
        "ADMITTED": "Packing: on a group's nodes; scaling: with nodes added to a group; isolated: in a new group.",
        "best found": "An optimum that could not be proved within its budget; the true one may be cheaper.",
    }
    listed = "\n".join(f"<dt>{name}</dt><dd>{escape(meaning)}</dd>" for name, meaning in words.items())
    return f"<h2>What the words mean</h2>\n<dl>\n{listed}\n</dl>"
