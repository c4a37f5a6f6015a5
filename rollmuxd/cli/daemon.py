"""``rollmuxd daemon``: run it here, or in the background; stop it; ask how it is.

A daemon writes ``daemon.json`` (pid, start time, url, socket) into its state directory. Stopping or restarting it never
stops a job: what is held stays held, and clients wait for it to come back.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

import click
import msgspec

from rollmuxd.cli.common import NO_DAEMON, Failed, answer, config_option, fields, load_settings, print_json
from rollmuxd.cli.processes import start_apart
from rollmuxd.client import discovery
from rollmuxd.client.discovery import Address, default_sockets
from rollmuxd.client.errors import RollmuxError
from rollmuxd.client.sync import Daemon
from rollmuxd.daemon.files import Ready, find, started

#: after so long a start says that it still waits
START_S = 30.0
STOP_S = 30.0

clock_option = click.option(
    "--accept-clock", is_flag=True, help="Start although this machine's clock is a month behind the journal."
)


@click.group()
def daemon() -> None:
    """The daemon: run, start, stop, status."""


@daemon.command()
@config_option
@clock_option
def run(config: Path | None, accept_clock: bool) -> None:
    """Run it here, until Ctrl-C, SIGTERM or SIGHUP. Logs go to stderr.

    Exits with 0 when it was stopped. With 75 when it cannot start now but may later (a full disk, another daemon on its
    state directory): start it again. With 1 or 2 when you have to correct something first. With 70 after a fault of its
    own, which is in the log.
    """
    from rollmuxd.daemon import app

    try:
        settings = load_settings(config)
    except Failed as error:
        raise Failed(error.message, app.CANNOT) from error
    app.main(settings, accept_clock=accept_clock)


@daemon.command()
@config_option
@clock_option
@click.option("--json", "as_json", is_flag=True, help="Print pid, url and socket as JSON.")
def start(config: Path | None, accept_clock: bool, as_json: bool) -> None:
    """Start it in the background, and wait until it is ready.

    After an upgrade it may have to replay its whole journal, which can take minutes.
    """
    state_dir, running = _running(config)
    if running is not None:
        raise Failed(f"it runs already, pid {running.pid} ({running.socket}); rollmuxd daemon stop ends it")
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise Failed(
            f"state directory {state_dir} cannot be made: {error.strerror}; set daemon.state_dir to a directory that "
            "this user can write"
        ) from error
    log = state_dir / "daemon.log"
    end = log.stat().st_size if log.exists() else 0
    words = ["daemon", "run", *(["--config", str(config.resolve())] if config is not None else [])]
    words += ["--accept-clock"] if accept_clock else []
    pid = start_apart(words, log, os.environ)
    say_at: float | None = time.monotonic() + START_S
    while True:
        running = find(state_dir)
        if running is not None and running.pid == pid and readiness(running.socket) is not None:
            break
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            last = _said_last(log, end).removeprefix("rollmuxd: ")
            raise Failed(f"the daemon ended with status {os.waitstatus_to_exitcode(status)}: {last} (log: {log})")
        if say_at is not None and time.monotonic() > say_at:
            click.echo(
                f"the daemon, pid {pid}, still starts; Ctrl-C stops waiting and leaves it running (log: {log})",
                err=True,
            )
            say_at = None
        time.sleep(0.05)
    _answer(running, "ready", as_json=as_json)
    from rollmuxd.daemon.settings import without_hosts

    settings = load_settings(config)
    if not settings.hosts:
        click.echo(f"{without_hosts(settings)}, so every job is refused: rollmuxd init writes a file", err=True)
    if not _is_found(running):
        click.echo(f"jobs look elsewhere for it, so: export ROLLMUX_URL=unix://{running.socket}", err=True)


def _is_found(running: Ready) -> bool:
    """Whether jobs find it: by ``ROLLMUX_URL``, over TCP by whatever name this machine has, or where they look."""
    url = os.environ.get("ROLLMUX_URL")
    if not url:
        return running.socket in default_sockets()
    try:
        asked, listens = urlsplit(url), urlsplit(running.url or "")
        if asked.scheme == "unix":
            return unquote(asked.path) == running.socket
        return (asked.scheme, asked.port) == (listens.scheme, listens.port)
    except ValueError:  # no address
        return False


def _said_last(log: Path, end: int) -> str:
    """The last line after this place in the log."""
    with log.open("rb") as file:
        file.seek(end)
        lines = file.read().decode(errors="replace").strip().splitlines()
    if lines:
        return lines[-1]
    try:
        with log.open("ab") as file:
            file.write(b"\n")
    except OSError as error:
        return f"its log cannot be written ({error.strerror}); make room there"
    return "it said nothing"


@daemon.command()
@config_option
@click.option("--for-good", is_flag=True, help="Remove its socket, too: jobs that start later run alone.")
@click.option("--json", "as_json", is_flag=True, help="Print the pid that was stopped as JSON.")
def stop(config: Path | None, for_good: bool, as_json: bool) -> None:
    """Stop it, and wait until it is gone.

    Jobs keep the slots that they hold. At their next phase they wait until a daemon runs again.
    """
    state_dir, running = _running(config)
    if running is None:
        if for_good and (left := load_settings(config).daemon.socket_path).exists():
            left.unlink()
            click.echo(f"no daemon ran; {left} is removed")
            return
        raise Failed(f"no daemon runs on {state_dir}", NO_DAEMON)
    began, log = started(running.pid), _log(running.pid)
    try:
        with suppress(ProcessLookupError):
            os.kill(running.pid, signal.SIGTERM)
    except PermissionError:
        raise Failed(f"the daemon, pid {running.pid}, is another user's; stop it as that user, or as root") from None
    give_up = time.monotonic() + STOP_S
    while started(running.pid) == began is not None:
        if time.monotonic() > give_up:
            raise Failed(f"the daemon, pid {running.pid}, has not ended after {STOP_S:g} s; see its log, {log}")
        time.sleep(0.05)
    if for_good:
        Path(running.socket).unlink(missing_ok=True)
    if as_json:
        print_json({"stopped": running.pid})
    else:
        click.echo(f"stopped, pid {running.pid}")
        click.echo("jobs keep the slots that they hold, and wait at their next phase: rollmuxd daemon start", err=True)
        if Path(running.socket).exists():
            click.echo(
                "jobs that start now wait, too; where ROLLMUX_URL is not set, "
                "rollmuxd daemon stop --for-good lets them run alone",
                err=True,
            )


@daemon.command()
@config_option
@click.option("--json", "as_json", is_flag=True, help="Print pid, url, socket and whether it is ready as JSON.")
def status(config: Path | None, as_json: bool) -> None:
    """Whether it runs and is ready. Exits with 3 if there is none, with 1 if it is not ready."""
    state_dir, running = _running(config)
    if running is None:
        other = discovery.find().address
        do = "start one: rollmuxd daemon start"
        if other is not None and other.socket != str(load_settings(config).daemon.socket_path):
            do = f"commands and jobs here use another, at {other}: do not start one for the same GPUs"
        raise Failed(f"no daemon runs on {state_dir}; {do}", NO_DAEMON)
    said = readiness(running.socket)
    good = said is not None
    _answer(running, "ready" if good else "not ready", as_json=as_json, journal=said or "")
    if not good:
        raise Failed(f"the daemon, pid {running.pid}, runs and is not ready; see its log, {_log(running.pid)}")


def _log(pid: int) -> str:
    """Where a daemon writes its log: the file that is its standard error, if it is one."""
    with suppress(OSError):
        path = Path(f"/proc/{pid}/fd/2").readlink()
        if path.is_file():
            return str(path)
    return "its standard error (of a service: journalctl -u rollmuxd)"


def _answer(running: Ready, said: str, *, as_json: bool, journal: str = "") -> None:
    where = {key: value for key, value in msgspec.to_builtins(running).items() if key != "started"}
    values = {"status": said, **where, "log": _log(running.pid)}
    if journal:
        values["journal"] = journal
    answer(values, fields, as_json=as_json)


def _running(config: Path | None) -> tuple[Path, Ready | None]:
    """The state directory, and the daemon that runs on it."""
    state_dir = load_settings(config).daemon.state_dir
    return state_dir, find(state_dir)


# ---- which one, and how it is ----------------------------------------------------------------------------------------


def readiness(path: str) -> str | None:
    """What the daemon on this Unix socket says of its journal ("": all is well), if it is ready; else None."""
    try:
        with Daemon(address=Address("http://rollmuxd", socket=path)) as there:
            return str(there.get("/readyz", timeout_s=5.0).get("reason", ""))
    except RollmuxError:
        return None
