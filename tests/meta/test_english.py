"""The English of pages, docstrings and comments is plain, and the pages are short."""

import importlib.util
from pathlib import Path

spec = importlib.util.spec_from_file_location("english", Path(__file__).with_name("english.py"))
assert spec is not None
assert spec.loader is not None
english = importlib.util.module_from_spec(spec)
spec.loader.exec_module(english)

WORDS = 45_000


def test_pages_docstrings_and_comments_have_no_forbidden_phrase_and_no_long_sentence():
    _, places = english.count(english.pages() + english.modules())

    assert not places, "see: python tests/meta/english.py --where"


def test_the_pages_have_at_most_45_000_words():
    words, _ = english.count(english.pages())

    assert words <= WORDS, f"{words:,}: which page says a thing that another says?"


def test_it_finds_phrases_and_long_sentences_in_pages_docstrings_and_comments(tmp_path):
    long = "It is so that " + "very " * 25 + "long sentences are found."
    page, module = tmp_path / "page.md", tmp_path / "module.py"
    page.write_text(f"# A page\n\nNobody is told. `nobody` is a user.\n\n```\nwho\n```\n\n{long}\n\n| anew | x |\n")
    module.write_text(f'"""{long}"""\n\nwho = 1\n#: whoever reads this\n')

    _, places = english.count([page, module])

    assert [(path.name, line, kind) for path, line, kind, _ in places] == [
        ("page.md", 3, "phrase"),
        ("page.md", 3, "phrase"),
        ("page.md", 11, "phrase"),
        ("page.md", 9, "long"),
        ("module.py", 1, "long"),
        ("module.py", 4, "phrase"),
    ]


def test_a_wrapped_docstring_is_read_as_one_text_and_its_examples_are_not(tmp_path):
    words = ["six words stand in this line"] * 5
    module = tmp_path / "module.py"
    lines = [
        *("class A:", '    """Like this.', "", *("        " + line for line in words), '    """', ""),
        *("    b: int = 0", '    """' + words[0], *("    " + line for line in words), '    """'),
    ]
    module.write_text("\n".join(lines))

    assert [(line, kind) for _, line, kind, _ in english.count([module])[1]] == [(12, "long")]


def test_items_cells_and_code_are_not_counted_as_one_long_sentence(tmp_path):
    page = tmp_path / "page.md"
    item = "ten words that stand in one item of this list"
    page.write_text(
        "\n".join(f"- {item}" for _ in range(5))
        + "\n\n| "
        + " | ".join([item] * 5)
        + " |\n"
        + "say `a b c d e f` " * 12
    )

    assert english.count([page])[1] == []
