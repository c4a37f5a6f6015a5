"""``rollmuxd``: the command line, one file per noun.

It sits in job scripts, so its start time is their start time. A noun's file is imported when that noun is used, with
what it needs. What only some of its commands need (httpx, the daemon) is imported inside these. Packages add commands
by entry point (group ``rollmuxd.commands``): the name of the command, and the click command that it is.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

#: what the extra `daemon` brings, as it is imported
OF_THE_EXTRA = (
    *("anyio", "click", "httptools", "prometheus_client", "pydantic"),
    *("pydantic_settings", "rich", "starlette", "structlog", "uvicorn"),
)


def lacks(error: ModuleNotFoundError) -> str | None:
    """The line where the client only is installed; None: it is something else that is missing."""
    if (error.name or "").partition(".")[0] not in OF_THE_EXTRA:
        return None
    return f"rollmuxd: the command line needs {error.name}, which comes with: pip install 'rollmuxd[daemon]'"


try:
    import click
except ModuleNotFoundError as missing:
    if (said := lacks(missing)) is None:
        raise
    sys.exit(said)

#: every command of ours: where it is, and what it is for. ``--help`` must not import them all to know; a test compares
#: the two. A command is the attribute of its own name.
COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "daemon": ("daemon", "The daemon: run, start, stop, status."),
    "dashboard": ("dashboard", "Print a link that opens the dashboard, with a login."),
    "doctor": ("doctor", "Look at each configured host as an operator would, and say what to do."),
    "estimate": ("sim.estimate", "Is sharing worth it, from a training log?"),
    "fabric": ("fabric", "Optical switches: show, plan, degrade, restore."),
    "facts": ("facts", "What happened, in order."),
    "group": ("group", "Co-execution groups: list, show."),
    "host": ("host", "Hosts: list, show, drain, undrain, declare-clean."),
    "init": ("init", "Write a rollmux.toml with the GPUs of this machine."),
    "job": ("job", "Jobs: list, show, explain, logs, pause, resume, end, reinstate, wait."),
    "journal": ("journal", "The journal: check, backup, restore."),
    "key": ("key", "API keys: add, list, revoke."),
    "node": ("node", "Nodes: list, show, drain, undrain, declare-clean."),
    "plan": ("plan", "What would become of jobs, if they came."),
    "report": ("report", "What GPUs were used for, and what sharing saved."),
    "run": ("run.command", "Start a job's commands once it has its place."),
    "sim": ("sim.command", "Simulate policies on traces."),
    "slot": ("slot", "Slots: list, revoke."),
    "top": ("top.command", "Live view of pools, jobs and what waits."),
    "trace": ("trace", "Look at a history: what ran where and when, what was moved, what waited."),
}


class Commands(Mapping[str, click.Command]):
    """All commands by name, each imported when it is used."""

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*COMMANDS, *_plugged()}))

    def __len__(self) -> int:
        return len({*COMMANDS, *_plugged()})

    def __getitem__(self, name: str) -> click.Command:
        if name not in COMMANDS:
            plugged: click.Command = _plugged()[name].load()
            return plugged
        command: click.Command = getattr(import_module(f"rollmuxd.cli.{COMMANDS[name][0]}"), name)
        return command


class Listed(click.Group):
    """A group that lists its commands without importing those of ours."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list in ``--help``."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._about(name)) for name in self.commands])

    def _about(self, name: str) -> str:
        return COMMANDS[name][1] if name in COMMANDS else self.commands[name].get_short_help_str(limit=80)


def _plugged() -> "dict[str, EntryPoint]":
    """The commands that packages add, by name, none of them imported."""
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group="rollmuxd.commands")}


@click.group(
    cls=Listed, commands=Commands(), context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(package_name="rollmuxd", message="rollmuxd %(version)s")
def cli() -> None:
    """Let several RL post-training jobs share GPU pools, phase by phase.

    See it work, without a GPU: rollmuxd demo
    """


def main() -> None:
    """The console script."""
    try:
        cli.main(prog_name="rollmuxd")
    except ModuleNotFoundError as missing:
        if (said := lacks(missing)) is None:
            raise
        sys.exit(said)
    except BrokenPipeError:
        # The reader (`| head`) has seen enough. What is still buffered must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
