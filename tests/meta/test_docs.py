"""What the docs draw from the code is drawn from this code (ROLLMUX_REWRITE=1 draws it again); links lead somewhere."""

import os
import re
from pathlib import Path

import pytest

from rollmuxd.core import facts, lifecycle

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "life-cycles.md"
PAGES = [REPOSITORY / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES += sorted((REPOSITORY / "docs").rglob("*.md"))
#: The README is read on package indexes, too, so its links are absolute.
HERE = re.compile(r"https://github\.com/rollmuxd/rollmuxd/(?:blob|raw|tree)/main/")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)[^)]*\)|^\[[^\]]+\]:\s+(\S+)", re.MULTILINE)

HEAD = """# Life cycles

Drawn from the tables in `rollmuxd/core/lifecycle.py` (`ROLLMUX_REWRITE=1 make test` draws them again). What is not here
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
        ("State, on a node", lifecycle.STATE),
    ):
        edges = [
            (str(source), str(target), _fact(event[0]) + f" ({event[1]})" if isinstance(event, tuple) else _fact(event))
            for source, moves in table.items()
            for event, targets in moves.items()
            for target in targets
        ]
        pages.append(_diagram(title, edges))
    return "".join(pages)


def test_the_life_cycles_in_the_docs_are_those_of_the_tables() -> None:
    drawn = draw()
    if os.environ.get("ROLLMUX_REWRITE"):
        PAGE.write_text(drawn)

    assert PAGE.read_text() == drawn


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_link_within_the_repository_leads_somewhere(page: Path) -> None:
    # Code is no prose: what looks like a link in it is none.
    text = re.sub(r"^```.*?^```|`[^`\n]+`", "code", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = [(found[1] or found[2]).partition("#")[0] for found in LINK.finditer(text)]
    if page.name == "README.md" and page.parent == REPOSITORY:
        assert [target for target in targets if target and "://" not in target] == []
        targets = [HERE.sub("", target) for target in targets]
    within = [target for target in targets if target and "://" not in target and not target.startswith("mailto:")]
    assert [target for target in within if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_nothing_is_left_to_be_filled_in(page: Path) -> None:
    assert [line for line in page.read_text().splitlines() if "@@" in line] == []
