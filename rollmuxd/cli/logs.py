"""``rollmuxd job logs``: what a job's commands have printed, where ``rollmuxd run --detach`` or the daemon keeps it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import click

from rollmuxd.cli.common import Call, Failed, echo_output, part, print_json, talks
from rollmuxd.daemon import files

#: how often a followed job is looked at
LOOK_S: Final = 0.3
#: how much of a file is read at once
PIECE: Final = 1 << 16


def folder_of(name: str, key: str) -> Path:
    """Where a detached run of this user keeps its output: a file a role, and ``run.log`` of the one that watches."""
    home = os.environ.get("XDG_STATE_HOME") or str(Path("~/.local/state").expanduser())
    return Path(home) / "rollmux" / "runs" / name / key[:12]


def begin(folder: Path, roles: Iterable[str]) -> None:
    """Make the folder of a run, and let ``logs`` find it as the job's latest."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for role in roles:
        (folder / f"{role}.log").touch(mode=0o600)
    link = folder.parent / "latest.new"
    link.unlink(missing_ok=True)
    link.symlink_to(folder.name)
    link.replace(folder.parent / "latest")


def watched_by(folder: Path, pid: int) -> None:
    """Note the process that looks after the run: it is over when that process is gone."""
    (folder / "pid").write_text(f"{pid} {files.started(pid)}\n", encoding="ascii")


@click.command()
@click.argument("job")
@click.option("-f", "--follow", is_flag=True, help="Follow the output until the run is over.")
@click.option("--role", help="Of this role only.")
@talks
def logs(call: Call, job: str, *, follow: bool, role: str | None) -> None:
    """What a job's commands have printed: of its last detached run here, else of what the daemon has started."""
    folder = folder_of(job, "latest")
    if not folder.exists():
        folder = folder_of(call.get(f"/v1/jobs/{part(job)}")["name"], "latest")
    if folder.exists():
        _from_files(folder.resolve(), role, follow=follow, as_json=call.as_json)
    else:
        _from_daemon(call, job, follow=follow)


def _from_files(folder: Path, role: str | None, *, follow: bool, as_json: bool) -> None:
    if role is not None and role not in (there := [path.stem for path in sorted(folder.glob("*.log"))]):
        raise Failed(f"{folder} has no role {role}; it has {', '.join(there) or 'none yet'}")
    open_line: Path | None = None
    for path, text in _pieces(folder, role, follow=follow):
        if as_json:
            print_json({"role": path.stem, "text": text})
            continue
        if open_line not in (None, path):
            click.echo()
        prefix = "" if role is not None else f"{path.stem} | "
        for number, line in enumerate(text.splitlines(keepends=True)):
            goes_on = number == 0 and open_line == path
            echo_output(f"{'' if goes_on else prefix}{line}")
        open_line = None if text.endswith("\n") else path


def _pieces(folder: Path, role: str | None, *, follow: bool) -> Iterator[tuple[Path, str]]:
    """What the files of a run have, and what comes to them until it is over."""
    read: dict[Path, int] = {}
    while True:
        over, more = not follow or _is_over(folder), True
        while more:
            more = False
            for path in sorted(folder.glob(f"{role or '*'}.log")):
                with path.open("rb") as file:
                    file.seek(read.get(path, 0))
                    piece = file.read(PIECE)
                if piece:
                    read[path] = read.get(path, 0) + len(piece)
                    more = True
                    yield path, piece.decode(errors="replace")
        if over:
            return
        time.sleep(LOOK_S)


def _is_over(folder: Path) -> bool:
    try:
        pid, started = (folder / "pid").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return True
    return files.started(int(pid)) != started


def _from_daemon(call: Call, job: str, *, follow: bool) -> None:
    at, get = 0, call.get
    while True:
        page: dict[str, Any] = get(f"/v1/jobs/{part(job)}/logs", after=at)
        at, get = page["next"], call.get_again if follow else call.get
        if call.as_json and page["text"]:
            print_json(page)
        elif page["text"]:
            echo_output(page["text"])
        elif page["over"] or not follow:
            return
        else:
            time.sleep(LOOK_S)
