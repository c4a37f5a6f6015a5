"""``rollmuxd journal``: the daemon's memory on disk. Check, back up, restore, make smaller.

These run on the host where the journal lies, as the daemon's user or root.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import click

from rollmuxd.cli.common import Failed, answer, config_option, load_settings
from rollmuxd.daemon import logs
from rollmuxd.daemon.journal import backup as journal_tools
from rollmuxd.daemon.journal.file import JournalError

dir_option = click.option(
    "--state-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="The state directory (default: the one in the settings).",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print what was found or done as JSON.")


@click.group()
def journal() -> None:
    """The journal: check, backup, restore."""


def of_a_directory(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command ``--config`` and ``--state-dir``, and the directory that they come to."""

    @config_option
    @dir_option
    @json_option
    @wraps(command)
    def run(*args: Any, config: Path | None, state_dir: Path | None, **options: Any) -> None:
        logs.set_up("warning")  # to stderr: stdout is the command's
        configured = load_settings(config).daemon.state_dir
        command(*args, state_dir=state_dir if state_dir is not None else configured, **options)

    return run


@contextmanager
def _refusals(doing: str) -> Iterator[None]:
    """Say on a terminal what may take minutes, and in one line why it cannot be done."""
    if sys.stderr.isatty():
        click.echo(doing, err=True)
    try:
        yield
    except JournalError as error:
        raise Failed(str(error)) from error
    except OSError as error:
        raise Failed(f"{error}: look at the disk, at open files (ulimit -n), and whose file it is") from error


def _line(found: journal_tools.Checked) -> None:
    click.echo(found.line())


@journal.command()
@click.argument("file", required=False, type=click.Path(path_type=Path))
@of_a_directory
def check(file: Path | None, state_dir: Path, as_json: bool) -> None:
    """Read all of a journal or a backup, and replay it. Changes nothing; the daemon may run.

    FILE: a journal, a backup or a state directory; default: the daemon's. Exits with 1 if it is not good.
    """
    path = file if file is not None else state_dir
    with _refusals(f"checking {path}: all of it is read and replayed"):
        found = journal_tools.check(path / "journal.sqlite3" if path.is_dir() else path)
    answer(found, _line, as_json=as_json)
    if not found.good:
        raise click.exceptions.Exit(1)


@journal.command()
@click.argument("file", type=click.Path(path_type=Path))
@of_a_directory
def backup(file: Path, state_dir: Path, as_json: bool) -> None:
    """Copy the journal into FILE, as it is at one instant, and check the copy. The daemon may run.

    The hashes of API keys are in it: only you can read it.
    """
    with _refusals(f"copying {state_dir}, and checking the copy"):
        made = journal_tools.backup(state_dir / "journal.sqlite3", file)
    answer(made, _line, as_json=as_json)


@journal.command()
@click.argument("file", type=click.Path(path_type=Path))
@of_a_directory
def restore(file: Path, state_dir: Path, as_json: bool) -> None:
    """Put the backup FILE in the journal's place. The daemon must be stopped.

    Grants made after the backup are not known, so every run is lost. No earlier fence is given again, and GPUs are free
    once they were verified clean. The journal that was there is kept.

    API keys that were revoked after the backup stay revoked, if the journal that was there can be read.
    """
    with _refusals(f"checking {file}"):
        done = journal_tools.restore(file, state_dir)
    answer(done, _tell, as_json=as_json)


def _tell(done: journal_tools.Restored) -> None:
    click.echo(f"restored: {done.path} ends at fact {done.last}; incarnation {done.incarnation}")
    if done.kept:
        click.echo(f"what was there before is in {done.kept}")
    if not done.revoked_known:
        click.echo("which API keys were revoked since is not known: see `rollmuxd key list`, and revoke them again")
    click.echo("start the daemon: rollmuxd daemon start")
