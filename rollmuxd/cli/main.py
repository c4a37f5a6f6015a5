"""``rollmuxd``: the command line, one file per noun.

It sits in job scripts, so its start time is their start time: what is heavy (httpx, rich, the daemon) is imported
inside the commands.
"""

import os
import sys

#: what the extra `daemon` brings, as it is imported
OF_THE_EXTRA = (
    *("anyio", "click", "httptools", "prometheus_client", "pydantic"),
    *("pydantic_settings", "rich", "starlette", "structlog", "uvicorn"),
)


def lacks(error: ModuleNotFoundError) -> str | None:
    """The line for whoever has the client only; None: it is something else that is missing."""
    if (error.name or "").partition(".")[0] not in OF_THE_EXTRA:
        return None
    return f"rollmuxd: the command line needs {error.name}, which comes with: pip install 'rollmuxd[daemon]'"


try:
    import click

    from rollmuxd.cli.daemon import daemon
    from rollmuxd.cli.demo.command import demo
    from rollmuxd.cli.doctor import doctor
    from rollmuxd.cli.facts import facts
    from rollmuxd.cli.group import group
    from rollmuxd.cli.host import host
    from rollmuxd.cli.job import job
    from rollmuxd.cli.journal import journal
    from rollmuxd.cli.key import key
    from rollmuxd.cli.node import node
    from rollmuxd.cli.report import report
    from rollmuxd.cli.sim import sim
    from rollmuxd.cli.slot import slot
    from rollmuxd.cli.trace import trace
except ModuleNotFoundError as missing:
    if (said := lacks(missing)) is None:
        raise
    sys.exit(said)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="rollmuxd", message="rollmuxd %(version)s")
def cli() -> None:
    """Let several RL post-training jobs share GPU pools, phase by phase.

    See it work, without a GPU: rollmuxd demo
    """


for command in (daemon, demo, doctor, facts, group, host, job, journal, key, node, report, sim, slot, trace):
    cli.add_command(command)


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
