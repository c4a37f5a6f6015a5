"""``rollmuxd doctor``: is every host fit, and what to do if not; and a file to send with a bug report."""

from __future__ import annotations

import os
import pwd
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollmuxd.cli.common import Failed, config_option, load_settings, print_json

if TYPE_CHECKING:
    from rollmuxd.daemon.doctor import Examined


@click.command()
@click.option("--host", "hosts", multiple=True, help="Look at this host only; can be given again.")
@config_option
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
def doctor(hosts: tuple[str, ...], config: Path | None, as_json: bool) -> None:
    """Look at each configured host as an operator would, and say what to do. Exits with 1 if one cannot be used.

    Connection, driver, GPUs, RAM, limits, clock and Python. Nothing is changed, and the daemon may run.
    """
    import anyio

    from rollmuxd.daemon import doctor as looking
    from rollmuxd.daemon import logs
    from rollmuxd.daemon.settings import without_hosts

    logs.set_up("warning")
    settings = load_settings(config)
    there = [host.id for host in settings.hosts]
    if not there:
        raise Failed(
            f"{without_hosts(settings)}; `rollmuxd init` writes a file with the GPUs of this machine, and "
            "`rollmuxd init --mock` one with pretended GPUs"
        )
    if unknown := [host for host in hosts if host not in there]:
        raise Failed(f"there is no host {unknown[0]!r} in {settings.source}; there are {', '.join(there)}")
    examined = anyio.run(looking.examine, settings, hosts)
    if as_json:
        print_json({"hosts": examined, "good": all(host.good for host in examined)})
    else:
        for host in examined:
            _show(host)
    if bad := [host.host for host in examined if not host.good]:
        words = f"not fit to be used: {', '.join(bad)}{_daemons_user(settings.daemon.state_dir)}"
        raise SystemExit(1) if as_json else Failed(words)


def _daemons_user(state_dir: Path) -> str:
    """As which user to look, where it is not this one: the daemon uses the keys and ``known_hosts`` of its own."""
    with suppress(OSError, KeyError):
        if (uid := state_dir.stat().st_uid) != os.geteuid():
            name = pwd.getpwuid(uid).pw_name
            return f". The daemon reaches them as {name}, so look as that user: sudo -Hu {name} rollmuxd doctor"
    return ""


def _show(host: Examined) -> None:
    click.echo(f"{host.host} ({host.backend})")
    for finding in host.findings:
        colour = {"good": "green", "warning": "yellow", "bad": "red"}[finding.level]
        level = click.style(f"{finding.level:<8}", fg=colour)
        click.echo(f"  {level} {finding.what:<14} {finding.said}")
        if finding.remedy:
            click.echo(f"  {'':<8} {'':<14} -> {finding.remedy}")
