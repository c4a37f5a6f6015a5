"""Runs what a page tells its reader to type.

A block fenced as ``console`` is a terminal: lines after ``$ `` are typed, the others are what is then to be seen. A
page is typed from its first block to its last into one shell, in an empty folder and a home of its own, with a daemon's
socket there. What is seen is compared with what the page shows, with numbers taken as alike, columns as close or as
wide apart as they like, and ``...`` for anything. A comment above a block says what is not seen on the page:

    <!-- file: jobs.toml -->      the block below is the content of this file
    <!-- not run: why -->         it is not typed here, for this reason
"""

import os
import re
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[2]
_FENCE = re.compile(
    r"(?:^ *<!-- (?P<kind>file|not run): (?P<word>.+?) -->\n+)?"
    r"^(?P<indent> *)```(?P<lang>[\w-]*)[^\n]*\n(?P<body>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_MARK = "\x1e"
#: where ``rollmuxd`` and ``python`` are, if a caller does not say
BIN = Path(sys.executable).parent


class Block(NamedTuple):
    """One fenced block of a page."""

    lang: str
    body: str
    #: the file that it is the content of
    file: str = ""
    #: why it is not run
    not_run: str = ""


class Typed(NamedTuple):
    """One command of a page, and what is to be seen after it."""

    command: str
    shown: tuple[str, ...]


class Seen(NamedTuple):
    """What came of it."""

    typed: Typed
    status: int
    out: tuple[str, ...]


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    found = []
    for match in _FENCE.finditer(page.read_text(encoding="utf-8")):
        word = match["word"] or ""
        file, not_run = (word if match["kind"] == kind else "" for kind in ("file", "not run"))
        found.append(Block(match["lang"], textwrap.dedent(match["body"]), file, not_run))
    return found


def typed(block: Block) -> list[Typed]:
    """What a console block has one type, and shows. A backslash at the end of a line goes on in the next."""
    found: list[tuple[str, list[str]]] = []
    for line in block.body.splitlines():
        if found and found[-1][0].endswith("\\") and not found[-1][1]:
            found[-1] = (found[-1][0] + "\n" + line, [])
        elif line.startswith("$ "):
            found.append((line.removeprefix("$ "), []))
        elif found:
            found[-1][1].append(line)
    return [Typed(command, tuple(shown)) for command, shown in found]


def run(page: Path, folder: Path, limit_s: float = 600, binaries: Path = BIN) -> list[Seen]:
    """Type a page's commands into one shell, and see what comes. Whatever it leaves running is ended."""
    lines: list[Typed] = []
    script = ["exec 2>&1 </dev/null"]
    for number, block in enumerate(blocks(page)):
        if block.file:
            (folder / f".block-{number}").write_text(block.body)
            script.append(f"cp .block-{number} '{block.file}'")
        elif block.lang == "console" and not block.not_run:
            for one in typed(block):
                lines.append(one)
                script += [f"printf '{_MARK}begin\\n'", one.command, f"printf '\\n{_MARK}%s\\n' $?"]
    ran = _shell("\n".join(script), folder, limit_s, binaries)
    parts = re.findall(rf"{_MARK}begin\n(.*?)\n?{_MARK}(\d+)$", ran, re.MULTILINE | re.DOTALL)
    assert len(parts) == len(lines), f"{page.name}: only {len(parts)} of {len(lines)} commands came to an end:\n{ran}"
    return [
        Seen(one, int(status), tuple(out.rstrip("\n").splitlines()))
        for one, (out, status) in zip(lines, parts, strict=True)
    ]


def environment(folder: Path, binaries: Path = BIN) -> dict[str, str]:
    """A home of its own, and a daemon that listens nowhere else: nothing of whoever runs the tests."""
    kept = {name: os.environ[name] for name in ("LANG", "TZ", "VIRTUAL_ENV") if name in os.environ}
    state = folder / "state"
    return {
        **kept,
        "HOME": str(folder),
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": "120",
        "ROLLMUX_URL": f"unix://{state}/rollmux.sock",
        "ROLLMUX_DAEMON__STATE_DIR": str(state),
        "ROLLMUX_DAEMON__LISTEN": "",
        "ROLLMUX_LOG__LEVEL": "warning",
    }


def _shell(script: str, folder: Path, limit_s: float, binaries: Path) -> str:
    shell = subprocess.Popen(
        ["bash", "--norc", "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment(folder, binaries),
        start_new_session=True,
    )
    try:
        out, _ = shell.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(shell.pid, signal.SIGKILL)
        out, _ = shell.communicate()
        out += f"\n(ended after {limit_s:g} s)"
    finally:
        _end_daemon(folder, binaries)
        with suppress(ProcessLookupError):  # what it has started in the background
            os.killpg(shell.pid, signal.SIGKILL)
    return out


def _end_daemon(folder: Path, binaries: Path) -> None:
    """End the daemon that a page has started and left: it is in a session of its own."""
    stop = [binaries / "rollmuxd", "daemon", "stop"]
    subprocess.run(stop, cwd=folder, env=environment(folder, binaries), capture_output=True)


def as_shown(shown: tuple[str, ...], out: tuple[str, ...]) -> str | None:
    """None: the page shows what is seen; else what is not as shown. A page need not show all that follows."""
    place = 0
    anything = False
    for line in shown:
        if line.strip() == "...":
            anything = True
            continue
        pattern = re.compile(_pattern(line))
        while place < len(out):
            place += 1
            if pattern.fullmatch(_same(out[place - 1])):
                break
            if not anything:
                return f"shown: {line!r}\nseen:  {out[place - 1]!r}"
        else:
            return f"shown, and not seen: {line!r}"
        anything = False
    return None


def _same(line: str) -> str:
    """Columns as close as they come, numbers, times and bars alike."""
    line = re.sub(r"[█░▁▂▃▄▅▆▇]+", "█", line)
    line = re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+Z?", "#", line)
    line = re.sub(r"\d[\d,.:]*", "#", line)
    return re.sub(r"\s+", " ", line).strip()


def _pattern(line: str) -> str:
    return re.escape(_same(line.replace("...", "\x00"))).replace("\x00", ".*")
