"""What the docs tell people to type works, and shows what they say that it shows (``console.py`` says how)."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import forked
import pytest
from patience import until

from rollmuxd.cli.main import cli
from rollmuxd.daemon.hosts.circuits import ports_of
from rollmuxd.daemon.settings import FabricTable
from rollmuxd.spi.discovery import find

spec = importlib.util.spec_from_file_location("console", Path(__file__).with_name("console.py"))
console = importlib.util.module_from_spec(spec)
spec.loader.exec_module(console)

PAGES = [console.REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES += sorted(page for page in (console.REPOSITORY / "docs").rglob("*.md") if page.parent.name != "reference")
BY_NAME = {str(page.relative_to(console.REPOSITORY)): page for page in PAGES}


def terminals(page):
    return [block for block in console.blocks(page) if block.lang == "console" and not block.not_run]


RUN = [name for name, page in BY_NAME.items() if any(console.typed(block) for block in terminals(page))]


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """Where ``rollmuxd`` and ``python`` are, as processes that begin with their imports."""
    folder = tmp_path_factory.mktemp("bin")
    waits = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with forked.Popen(waits, stdin=subprocess.PIPE, stand_in=folder / "python"):
        until("there is a python", lambda: os.access(folder / "python", os.X_OK))
        # what starts a daemon waits for the pid of its child, which a stand-in is
        real = f"[ \"$1 $2\" != 'daemon start' ] || exec '{console.BIN}/rollmuxd' \"$@\""
        (folder / "rollmuxd").write_text(f"#!/bin/sh\n{real}\nexec '{folder}/python' -m rollmuxd \"$@\"\n")
        (folder / "rollmuxd").chmod(0o700)
        yield folder


#: this is typed to what is installed
INSTALLED = "docs/how-to/upgrade.md"


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_what_a_page_has_one_type_works_and_shows_what_it_says(name, tmp_path, copies):
    for seen in console.run(BY_NAME[name], tmp_path, binaries=console.BIN if name == INSTALLED else copies):
        fails = re.search(r"# exits with (\d+)", seen.typed.command)
        expected = int(fails[1]) if fails else 0
        out = "\n".join(seen.out)
        assert seen.status == expected, f"$ {seen.typed.command}\n{out}"
        trouble = console.as_shown(seen.typed.shown, seen.out)
        assert trouble is None, f"$ {seen.typed.command}\n{trouble}\nall of it:\n{out}"


def lines_with(word):
    """Command lines in fenced blocks that run ``rollmuxd``."""
    for name, page in BY_NAME.items():
        for block in console.blocks(page):
            if block.lang not in ("", "console", "sh", "bash"):
                continue
            lines = [one.command for one in console.typed(block)] if block.lang == "console" else [block.body]
            for line in "\n".join(lines).replace("\\\n", " ").splitlines():
                line = line.strip()
                for part in re.split(r"\s(?:&&|\|\|?|;|&)(?:\s|$)", line):
                    if match := re.match(rf"(?:\S*/)?{word}\s+(.*)", part):
                        yield name, match[1]


def wrong(words):
    """What is wrong with a command line, by the command line's own parser; it is not run."""
    command, context = cli, click.Context(cli, info_name="rollmuxd")
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name = words.pop(0)
        found = command.get_command(context, name)
        if found is None:
            return f"there is no command {name}"
        command, context = found, click.Context(found, info_name=name, parent=context)
    try:
        command.make_parser(context).parse_args(list(words))
    except click.UsageError as error:
        return error.format_message()
    return None


COMMAND_LINES = sorted(set(lines_with("rollmuxd")))


@pytest.mark.parametrize(("page", "line"), COMMAND_LINES, ids=[line[:60] for _, line in COMMAND_LINES])
def test_every_command_line_in_the_docs_is_one_that_there_is(page, line):
    words = shlex.split(re.sub(r"\s+[<>].*", "", line), comments=True)
    if any(word in ("...", "|") or "|" in word for word in words):  # a choice, not a command
        pytest.skip("it stands for several")
    assert (words, wrong(list(words))) == (words, None), page


def test_a_wrong_command_line_would_be_found():
    assert wrong(["job", "lsit"]) == "there is no command lsit"
    assert "--frobnicate" in wrong(["top", "--frobnicate"])
    assert wrong(["node", "drain", "box/gpu0-3", "--evict"]) is None


def test_what_is_not_as_shown_would_be_found():
    as_shown = console.as_shown
    assert as_shown(("JOB  STATUS", "a    admitted  12.5"), ("JOB STATUS", "a       admitted     7")) is None
    assert as_shown(("a    admitted",), ("a waiting",)) is not None
    assert as_shown(("first", "..."), ("first", "second")) is None
    assert as_shown(("...", "third"), ("first", "second", "third")) is None
    assert as_shown(("first", "third"), ("first", "second", "third")) is not None
    assert as_shown(("pid ... is gone",), ("pid 17 of box is gone",)) is None


def test_a_command_that_hangs_is_ended_and_told(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```console\n$ echo hello\nhello\n$ sleep 60\n```\n")
    with pytest.raises(AssertionError, match="only 1 of 2 commands"):
        console.run(page, tmp_path, limit_s=0.5)


def test_a_block_within_a_list_is_typed_too(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("1. First:\n\n   <!-- not run: why -->\n   ```console\n   $ false\n   ```\n\n"
                    "2. Then:\n\n   ```console\n   $ echo hello\n   hello\n   ```\n")  # fmt: skip
    assert [(one.typed.command, one.out) for one in console.run(page, tmp_path)] == [("echo hello", ("hello",))]


@pytest.mark.parametrize("name", BY_NAME)
def test_nothing_of_ours_is_installed_from_an_index_that_does_not_have_it(name):
    """The name is free there, so another project could take it: rollmuxd comes from the checkout."""
    extras = tomllib.loads((console.REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for line in re.findall(r"pip install ([^`#\n]*)", BY_NAME[name].read_text()):
        words = shlex.split(line)
        assert not [word for word in words if word.startswith("rollmuxd")], line
        for here in [word for word in words if word.startswith(".")]:
            folder, _, asked = here.rstrip("]").partition("[")
            assert folder == ".", line
            assert set(filter(None, asked.split(","))) <= set(extras), line


def shown_switches():
    """The ``[[fabric]]`` tables of the page about optical switches, by their drivers."""
    bodies = [block.body for block in console.blocks(BY_NAME["docs/how-to/optical-switch.md"]) if block.lang == "toml"]
    tables = [table for body in bodies for table in tomllib.loads(body)["fabric"]]
    return {table["driver"]: FabricTable(**table) for table in tables}


@pytest.mark.asyncio
@pytest.mark.parametrize("driver", ["polatis", "mock"])
async def test_the_switches_that_the_page_shows_can_be_opened_and_have_the_ports(driver, tmp_path):
    table = shown_switches()[driver]
    options = dict(table.options)
    if "password_file" in options:
        options["password_file"] = str(tmp_path / "password")
        (tmp_path / "password").write_text("secret")
    controller = await find("fabric", driver).open(options)
    await ports_of("fabric[0]", controller, table.ports, 1.0)
    await controller.close()


def test_a_page_can_give_a_file_and_leave_a_block_out(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- file: a.txt -->\n```text\nin the file\n```\n"
        "<!-- not run: it would take too long -->\n```console\n$ false\n```\n"
        "```console\n$ cat a.txt\nin the file\n$ exit_with() { return 3; }; exit_with  # exits with 3\n```\n"
    )
    seen = console.run(page, tmp_path)
    assert [one.status for one in seen] == [0, 3]
    assert seen[0].out == ("in the file",)
