"""The docs that are drawn from the code are drawn from this code; ROLLMUX_REWRITE=1 draws them anew."""

import os
from pathlib import Path

from rollmuxd.core import facts, lifecycle

PAGE = Path(__file__).parents[2] / "docs" / "life-cycles.md"

HEAD = """# Life cycles

Drawn from the tables in `rollmuxd/core/lifecycle.py` (`ROLLMUX_REWRITE=1 make test` draws them anew). What is not here
cannot happen. An arrow's label is the fact that leads along it.
"""


def _fact(kind: type[facts.Fact]) -> str:
    return str(kind.__struct_config__.tag)


def _diagram(title: str, edges: list[tuple[str, str, str]]) -> str:
    by_pair: dict[tuple[str, str], list[str]] = {}
    for source, target, label in edges:
        by_pair.setdefault((source, target), []).append(label)
    lines = [f"    {source} --> {target}: {', '.join(labels)}" for (source, target), labels in by_pair.items()]
    return "\n".join([f"\n## {title}\n", "```mermaid", "stateDiagram-v2", *lines, "```", ""])


def draw() -> str:
    pages = [HEAD]
    for title, table in (
        ("Job", lifecycle.JOB),
        ("Slot", lifecycle.SLOT),
        ("Node", lifecycle.NODE),
        ("Order", lifecycle.ORDER),
    ):
        edges = [
            (str(source), str(target), _fact(kind))
            for source, moves in table.items()
            for kind, targets in moves.items()
            for target in targets
        ]
        pages.append(_diagram(title, edges))
    edges = [
        (str(source), str(target), _fact(kind) + (f" ({order})" if order else ""))
        for source, moves in lifecycle.STATE.items()
        for (kind, order), targets in moves.items()
        for target in targets
    ]
    pages.append(_diagram("State, on a node", edges))
    return "".join(pages)


def test_the_life_cycles_in_the_docs_are_those_of_the_tables() -> None:
    drawn = draw()
    if os.environ.get("ROLLMUX_REWRITE"):
        PAGE.write_text(drawn)

    assert PAGE.read_text() == drawn
