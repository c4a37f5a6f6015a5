"""How plain the English is: ``python tests/meta/english.py`` (``--json``: one object; ``--where``: each place).

It counts words of the pages that people write by hand. In these pages, in the product's docstrings and comments and in
the sample rollmux.toml it finds the phrases that CONTRIBUTING.md forbids and the sentences of more than 25 words.
"""

import argparse
import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).parents[2]
PRODUCT: Final = ("rollmuxd", "backends", "plugins")
LONGEST: Final = 25
PHRASES: Final = (
    *("who", "whoever", "whom", "nobody", "somebody", "anybody", "he", "his", "him"),
    *("anew", "goes on", "go on", "is told", "are told", "was told", "no more", "in the midst of", "for want of"),
    *("of late", "such a one"),
)
_PHRASE: Final = re.compile(r"\b(" + "|".join(re.escape(phrase) for phrase in PHRASES) + r")\b", re.IGNORECASE)
#: `nobody` in code is the Unix user; what is quoted as code (in a command's help by `\b`), or linked to, is no prose
_CODE: Final = re.compile(r"\x08(?:\n[^\n]+)*|``[^`]*``|`[^`\n]*`|\]\([^)]*\)|<[^>\n]*>|https?://\S+")
_FENCE: Final = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
#: headings, list items, cells and rows of tables and empty lines end a sentence
_BREAK: Final = re.compile(r"\n\s*\n|\n(?= *[\w:=][\w:=, ]*? {2,}\S)|\n(?=\s*(?:[-*#|>]|\d+\.) )|\n(?=\|)|(?<!\\)\|")
_END: Final = re.compile(r"(?<=[.!?])[)\"'*_]*\s+")
_STRING_OR_COMMENT: Final = re.compile(
    r""""{3}(?:\\.|[^\\])*?"{3}|'{3}(?:\\.|[^\\])*?'{3}|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|\#[^\n]*""", re.DOTALL
)
_WORD: Final = re.compile(r"[^\W_][\w'.-]*")


def pages() -> list[Path]:
    """The pages that people write; the reference is drawn from the code."""
    top = [REPOSITORY / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
    return top + [page for page in sorted((REPOSITORY / "docs").rglob("*.md")) if page.parent.name != "reference"]


def modules() -> list[Path]:
    """The product's Python files, tests left out, and the sample of the settings."""
    found = (path for name in PRODUCT for path in sorted((REPOSITORY / name).rglob("*.py")))
    return [*(path for path in found if "tests" not in path.parts), REPOSITORY / "rollmux.toml"]


def without_examples(docstring: str) -> str:
    """The same lines, without paragraphs that are indented by four or more: code, and tables."""
    lines = docstring.split("\n")[1:]
    indents = [len(line) - len(line.lstrip()) for line in lines if line.strip() or line is lines[-1]]
    example = rf"(?<=\n\n)(?: {{{min(indents, default=0) + 4},}}\S[^\n]*(?:\n|$))+"
    return re.sub(example, lambda found: "\n" * found[0].count("\n"), docstring)


def statements(tree: ast.Module) -> Iterator[ast.AST]:
    """A module and its statements, as :func:`ast.walk` has them, without expressions: these are nine nodes of ten."""
    found: list[ast.AST] = [tree]
    for node in found:
        for inside in ("body", "orelse", "finalbody", "handlers", "cases"):
            found += getattr(node, inside, ())
        yield node


def comments(text: str) -> Iterator[tuple[int, str]]:
    """Each comment with its line. A # in a string begins none."""
    line, at = 1, 0
    for found in _STRING_OR_COMMENT.finditer(text):
        if found[0].startswith("#"):
            line, at = line + text.count("\n", at, found.start()), found.start()
            yield line, found[0]


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Pieces of prose with the line on which each begins: a page, or docstrings and blocks of comments."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield 1, _FENCE.sub(lambda block: "\n" * block[0].count("\n"), text)
        return
    for node in statements(ast.parse(text if path.suffix == ".py" else "")):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and (
            said := ast.get_docstring(node, clean=False)
        ):
            yield (
                node.body[0].lineno,
                without_examples(said),
            )
        if isinstance(node, ast.ClassDef):  # what stands under a field
            for said in node.body[1:]:
                if isinstance(said, ast.Expr) and isinstance(said.value, ast.Constant):
                    yield said.lineno, str(said.value.value)
    begins, last, lines = 0, 0, list[str]()
    for line, comment in comments(text):
        if line != last + 1 and lines:
            yield begins, "\n".join(lines)
            lines = []
        begins, last = begins if lines else line, line
        lines.append(comment.lstrip("#:! "))
    if lines:
        yield begins, "\n".join(lines)


def phrases_in(text: str) -> list[tuple[int, str]]:
    """Forbidden phrases with their line, counted from 0."""
    plain = _CODE.sub(lambda code: " " * len(code[0]), text)
    return [(plain.count("\n", 0, found.start()), found[0].lower()) for found in _PHRASE.finditer(plain)]


def long_sentences_in(text: str) -> list[tuple[int, str]]:
    """Sentences of more than 25 words with their line, counted from 0. What is quoted as code counts as one word."""
    plain = _CODE.sub(lambda code: "x" + "\n" * code[0].count("\n"), text)
    found, at = [], 0
    for block in _BREAK.split(plain):
        start = plain.index(block, at)
        at = start + len(block)
        inside = start
        for sentence in _END.split(block):
            inside = plain.index(sentence, inside)
            if len(_WORD.findall(sentence)) > LONGEST:
                found.append((plain.count("\n", 0, inside), " ".join(sentence.split())))
            inside += len(sentence)
    return found


def count(files: list[Path]) -> tuple[int, list[tuple[Path, int, str, str]]]:
    """The words of the pages among these, and each place: file, line, ``phrase`` or ``long``, and what it says."""
    words, places = 0, []
    for path in files:
        for first, text in prose(path):
            words += len(text.split()) if path.suffix == ".md" else 0
            places += [(path, first + line, "phrase", what) for line, what in phrases_in(text)]
            places += [(path, first + line, "long", what) for line, what in long_sentences_in(text)]
    return words, places


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--where", action="store_true", help="each phrase and each long sentence, with its place")
    parser.add_argument("under", nargs="*", type=Path, help="only these files and folders")
    asked = parser.parse_args()
    under = [path.resolve() for path in asked.under] or [REPOSITORY]
    words, places = count([path for path in pages() + modules() if any(path.is_relative_to(at) for at in under)])
    if asked.where:
        for path, line, kind, what in places:
            print(f"{path.relative_to(REPOSITORY)}:{line}: {kind}: {what}")
        return 0
    phrases = Counter(what for _, _, kind, what in places if kind == "phrase")
    long = len(places) - phrases.total()
    figures = {"words": words, "phrases": dict(phrases.most_common()), "sentences_over_25_words": long}
    if asked.json:
        json.dump(figures, sys.stdout)
        print()
    else:
        print(f"{words:,} words; {phrases.total():,} forbidden phrases; {long:,} sentences of over {LONGEST} words")
        for phrase, times in phrases.most_common():
            print(f"{times:6} {phrase}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
