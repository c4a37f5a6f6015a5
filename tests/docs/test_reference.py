"""The reference is what the code says (ROLLMUX_REWRITE=1 draws it anew), and says something of everything."""

import importlib.util
import os
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
REWRITE = os.environ.get("ROLLMUX_REWRITE") == "1"


def generator():
    spec = importlib.util.spec_from_file_location("reference", Path(__file__).with_name("reference.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def drawn():
    return generator().pages()


@pytest.mark.parametrize("name", ["cli.md", "http.md", "configuration.md", "metrics.md", "facts.md"])
def test_the_page_is_drawn_from_the_code_as_it_is(drawn, name):
    file = FOLDER / name
    if REWRITE:
        FOLDER.mkdir(exist_ok=True)
        file.write_text(drawn[name])
    again = "draw it anew: ROLLMUX_REWRITE=1 make test ARGS=tests/docs"
    assert file.read_text() == drawn[name], again


def test_no_other_page_lies_there(drawn):
    assert {file.name for file in FOLDER.glob("*.md")} == set(drawn)


def test_the_pages_have_what_people_look_for(drawn):
    assert "### job explain" in drawn["cli.md"]
    assert "| `--once` |" in drawn["cli.md"]
    assert "### `POST /v1/jobs/{job}/slots`" in drawn["http.md"]
    assert "[RegisterBody](#registerbody)" in drawn["http.md"]
    assert "| `lease_s` | `60` | Seconds without a heartbeat" in drawn["configuration.md"]
    assert "| `rollmux_slot_wait_seconds` | histogram | `owner` |" in drawn["metrics.md"]
    assert "## slot_granted" in drawn["facts.md"]


def test_every_command_and_route_says_what_it_is_for(drawn):
    for name in ("cli.md", "http.md"):
        lines = drawn[name].splitlines()
        for number, line in enumerate(lines):
            if line.startswith("###"):
                body = [text for text in lines[number + 1 : number + 8] if text.strip()]
                assert any(len(text) > 8 and not text.startswith(("#", "```", "rollmuxd ")) for text in body), line
