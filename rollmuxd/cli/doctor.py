"""``rollmuxd doctor``: a file to send with a bug report. (Its checks of the hosts come later.)"""

from __future__ import annotations

from pathlib import Path

import click

from rollmuxd.cli.calls import Failed, print_json


@click.command()
@click.option(
    "--bundle",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write a file (.tar.gz) to send with a bug report.",
)
@click.option(
    "--config", type=click.Path(path_type=Path, dir_okay=False), help="The rollmux.toml (default: where it usually is)."
)
@click.option("--json", "as_json", is_flag=True, help="Print what is in it as JSON.")
def doctor(bundle: Path, config: Path | None, as_json: bool) -> None:
    """Collect what a bug report needs: version, settings, state, last facts and log lines, and a check of the journal.

    Names of owners, users, jobs and hosts are in it. API keys and their hashes, idempotency keys, environments and
    options of plugins are not. The daemon may run.
    """
    from rollmuxd.daemon import journal_bundle, logs
    from rollmuxd.daemon.journal_file import JournalError
    from rollmuxd.daemon.settings import BadSettings, load_settings

    logs.set_up("warning")
    try:
        made = journal_bundle.make(bundle, load_settings(config))
    except BadSettings as error:
        raise Failed("; ".join(error.lines)) from error
    except JournalError as error:
        raise Failed(str(error)) from error
    if as_json:
        print_json({"bundle": str(bundle), "files": made})
        return
    click.echo(f"{bundle}, only you can read it:")
    for name, size in made.items():
        click.echo(f"  {name:<14} {size:>10} bytes  {WHAT[name]}")
    click.echo("Secrets were left out. Look through it before you send it: names of owners, jobs and hosts are in it.")


WHAT = {
    "about.json": "versions, machine, disk",
    "settings.json": "settings; of plugins' options the names only",
    "journal.json": "whether the journal is good",
    "facts.jsonl": "the last facts",
    "state.json": "jobs, nodes and slots as they are now",
    "daemon.log": "the last lines of the log",
}
