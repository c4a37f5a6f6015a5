"""A page, and tables for it."""

from html import escape
from typing import Final

from rollmuxd.sim.report.colours import of_policy
from rollmuxd.sim.tables import Table

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


def document(title: str, body: str) -> str:
    """A page in the report's style: it fetches nothing."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def table(caption: str, shown: Table, *, marked: bool = True) -> str:
    """A table whose columns with a ``#`` are of numbers. ``marked``: its rows begin with the colours of policies."""
    heads, rows = shown
    words = ["" if head.startswith("#") else ' class="words"' for head in heads]
    head = "".join(
        f'<th scope="col"{of}>{escape(name.removeprefix("#"))}</th>' for name, of in zip(heads, words, strict=True)
    )
    body = "\n".join(
        f'<tr><th scope="row">{_marked(row[0]) if marked else escape(row[0])}</th>'
        + "".join(f"<td{of}>{escape(cell)}</td>" for cell, of in zip(row[1:], words[1:], strict=True))
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="wide"><table>\n<caption>{escape(caption)}</caption>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _marked(name: str) -> str:
    """A policy's name, with its colour in the pictures."""
    colour = of_policy(name).colour
    return f'<span class="mark" style="background:{colour}"></span>{escape(name)}'
