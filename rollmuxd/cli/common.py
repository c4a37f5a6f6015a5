"""What every command shares: how it reaches the daemon, how it answers, and how it fails.

Exit status: 0 done, 1 refused or failed, 2 wrongly called (click's own), 3 no daemon. A failure is one line on stderr
that ends with the remedy. ``--json`` prints the daemon's own answer on one line, so its fields are those of the HTTP
interface and stay.

The commands of the gateway import this without rich, which comes with the daemon. Only tables import it.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, wraps
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar
from urllib.parse import quote

import click
import msgspec

from rollmuxd.client import calls, errors
from rollmuxd.client.retry import persist
from rollmuxd.client.sync import Daemon

if TYPE_CHECKING:
    from rich.console import Console

    from rollmuxd.daemon.settings import Settings

NO_DAEMON = 3
#: things that `rollmuxd THING list` shows
LISTED = ("fabric", "group", "host", "job", "key", "node", "slot")

F = TypeVar("F", bound=Callable[..., Any])
View: TypeAlias = dict[str, Any]
#: what a table says under each head: a field of the view, or what is made of all of it
Columns: TypeAlias = Mapping[str, str | Callable[[View], Any]]


class Failed(click.ClickException):
    """A command could not do what it was asked: one line on stderr, and an exit status."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]  # click reads it from the instance

    def show(self, file: Any = None) -> None:
        """One line, whatever the message was."""
        click.echo(f"rollmuxd: {' '.join(self.message.split())}", err=True)


def connect(url: str | None, api_key: str | None) -> Daemon:
    """The client.

    Where no URL is given and there is no usual socket, the daemon is the one that ``rollmuxd daemon status`` speaks of.
    """
    try:
        return Daemon(url=url, api_key=api_key)
    except errors.NoDaemon:
        if url or (configured := _configured_socket()) is None:
            raise
        return Daemon(url=f"unix://{quote(str(configured))}", api_key=api_key)


def _configured_socket() -> Path | None:
    """The socket that the configuration names, if it is there."""
    try:
        path = load_settings(None).daemon.socket_path.absolute()
        return path if path.exists() else None
    except (Failed, OSError):
        return None


class Call:
    """One invocation of a command: the daemon it talks to, and how it answers."""

    def __init__(self, url: str | None, api_key: str | None, *, as_json: bool) -> None:
        self.url, self.api_key, self.as_json = url, api_key, as_json

    @cached_property
    def daemon(self) -> Daemon:
        """The daemon; connecting is put off until something is asked of it."""
        return connect(self.url, self.api_key)

    def get(self, path: str, **params: Any) -> Any:
        """GET, without the parameters that were not given."""
        return self.daemon.get(path, **{name: value for name, value in params.items() if value is not None})

    def get_again(self, path: str, *, until: float = math.inf, **params: Any) -> Any:
        """GET for a command that continues over a restart of the daemon, and waits where a limit is reached.

        ``until``: a moment of ``time.monotonic`` at which it gives up.
        """
        given = {name: value for name, value in params.items() if value is not None}
        limit_s = calls.GRACE_S + params.get("wait_ms", 0) / 1000
        sent: calls.Call[Any] = calls.Call("GET", path, Any, params=given, timeout_s=limit_s)
        return self.daemon.run(persist(sent, until=until, clock=time.monotonic))

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """POST."""
        return self.daemon.post(path, dict(body or {}))

    def delete(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """DELETE."""
        return self.daemon.delete(path, dict(body) if body is not None else None)

    def items(self, path: str, *, after: str | None = None, **params: Any) -> Iterator[dict[str, Any]]:
        """Every item of a list, page after page; ``after``: those that come after this one."""
        while True:
            page = self.get(path, after=after, **params)
            yield from page["items"]
            after = page.get("next")
            if after is None:
                return

    def close(self) -> None:
        """Close the connection, if there is one."""
        if "daemon" in vars(self):
            self.daemon.close()

    def answer(self, value: Any, show: Callable[[Any], None]) -> None:
        """The value as JSON, or shown to people."""
        answer(value, show, as_json=self.as_json)

    def answer_list(self, items: list[View], show: Callable[[list[View]], None]) -> None:
        """All items as one page of JSON, or shown to people."""
        self.answer({"items": items, "next": None}, lambda page: show(page["items"]))

    def answer_rows(self, path: str, columns: Columns, empty: str, *, owned: bool = False, **params: Any) -> None:
        """A list of the daemon's in a table. ``owned``: callers see their own owner's only, but for admins."""
        items = list(self.items(path, **params))
        if owned and not items and not self.as_json and (me := self.get("/v1/me"))["role"] != "admin":
            empty += f" of owner {me['owner']}: you are {me['owner']}/{me['user']}, role {me['role']}, "
            empty += "and other owners' are not shown"
        self.answer_list(items, lambda views: listing(views, columns, empty))


def part(id: str) -> str:
    """An id as one part of a path: a node's id has a slash in it."""
    return quote(id, safe="")


def talks(command: F) -> Callable[..., Any]:
    """Give a command ``--json``, ``--url`` and ``--api-key``, its ``Call`` as first argument, and one-line errors."""

    @click.option("--json", "as_json", is_flag=True, help="Print the daemon's answer as JSON.")
    @click.option("--url", envvar="ROLLMUX_URL", help="The daemon (default: $ROLLMUX_URL, else its usual socket).")
    @click.option("--api-key", envvar="ROLLMUX_API_KEY", help="Better given as $ROLLMUX_API_KEY: ps shows options.")
    @wraps(command)
    def run(*args: Any, as_json: bool, url: str | None, api_key: str | None, **options: Any) -> None:
        call = Call(url, api_key, as_json=as_json)
        try:
            command(call, *args, **options)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError, KeyboardInterrupt):
            raise
        except Exception as error:
            fail(error)
        finally:
            call.close()

    return run


def fail(error: Exception) -> NoReturn:
    """Turn what the client raises into one line and an exit status; anything else is a bug and keeps its traceback."""
    if isinstance(error, errors.Unreachable):
        more = "" if error.remedy else "; is it running? rollmuxd daemon status"
        raise Failed(f"{error}{more}", NO_DAEMON) from error
    if isinstance(error, errors.NoDaemon):
        raise Failed(str(error), NO_DAEMON) from error
    if isinstance(error, errors.NotFound):
        noun = error.data.get("kind")  # none: it is not the name that is wrong
        shows = "show" if noun == "fabric" else "list"
        more = f"; `rollmuxd {noun} {shows}` shows what there is" if noun in LISTED else ""
        raise Failed(f"{error}{more}") from error
    if isinstance(error, errors.RollmuxError):
        raise Failed(str(error)) from error
    raise error


def ask(question: str, *, yes: bool) -> None:
    """Continue if the answer is yes, or was given as ``--yes``. Without a terminal: which option to give."""
    if yes:
        return
    try:
        agreed = click.confirm(question, err=True)
    except click.Abort:
        if sys.stdin.isatty():
            raise
        click.echo(err=True)
        raise Failed("no answer came; without a terminal give --yes") from None
    if not agreed:
        raise click.Abort


# ---- settings --------------------------------------------------------------------------------------------------------

config_option = click.option(
    "--config", type=click.Path(path_type=Path, dir_okay=False), help="The rollmux.toml (default: where it usually is)."
)


def load_settings(config: Path | None) -> Settings:
    """The daemon's settings. Raises Failed."""
    from rollmuxd.daemon import settings

    try:
        return settings.load_settings(config)
    except settings.BadSettings as error:
        raise Failed("; ".join(error.lines)) from error


# ---- printing --------------------------------------------------------------------------------------------------------


def print_json(value: Any) -> None:
    """One value on one line of stdout."""
    click.echo(json.dumps(msgspec.to_builtins(value), ensure_ascii=False))


def answer(value: Any, show: Callable[[Any], None], *, as_json: bool) -> None:
    """The value as JSON, or shown to people."""
    if as_json:
        print_json(value)
    else:
        show(value)


def console() -> Console:
    """Where tables go. Piped, they have no colours, and no line is broken to fit a screen that is not there."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 1000, highlight=False, emoji=False, markup=False)


def needs_numpy(it: str = "rollouts as requests need", extra: str = "rollout") -> None:
    """Raise Failed, with the extra that brings it, where it is not installed."""
    if find_spec("numpy") is None:
        raise Failed(f"{it} numpy: pip install 'rollmuxd[{extra}]'")


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], empty: str) -> None:
    """A table, or the sentence that there is nothing in it. A column whose name begins with ``#`` is of numbers.

    Where the screen is too narrow, a last column of sentences goes below it, line by line.
    """
    if not rows:
        click.echo(empty)
        return
    from rich.table import Table

    cells = [[cell(value) for value in row] for row in rows]
    below = not columns[-1].startswith("#") and not _fits(columns, cells, console().width)
    shown = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns[:-1] if below else columns:
        number = column.startswith("#")
        shown.add_column(column.removeprefix("#"), justify="right" if number else "left", overflow="fold")
    for row in cells:
        shown.add_row(*(row[:-1] if below else row))
    print_plainly(shown)
    if below:
        click.echo(f"\n{columns[-1]}")
        fields({row[0]: row[-1] for row in cells if row[-1] != "-"})


def _fits(columns: Sequence[str], cells: Sequence[Sequence[str]], width: int) -> bool:
    """Whether a table is no wider than that; else its last column, of sentences, goes below it."""
    widest = [max(len(column.removeprefix("#")), *(len(row[at]) for row in cells)) for at, column in enumerate(columns)]
    return sum(widest) + 2 * (len(widest) - 1) <= width


def listing(views: Sequence[View], columns: Columns, empty: str) -> None:
    """A table with a row for each view."""
    rows = [[view.get(of) if isinstance(of, str) else of(view) for of in columns.values()] for view in views]
    table(list(columns), rows, empty)


def fields(values: Mapping[str, Any]) -> None:
    """Names and values below one another; those without a value are left out."""
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    shown.add_column(style="bold")
    shown.add_column(overflow="fold")
    for name, value in values.items():
        if value not in (None, "", [], {}):
            shown.add_row(name, cell(value))
    print_plainly(shown)


def show_fields(view: View, **instead: Any) -> None:
    """The fields of an answer, by their own names; some with something else ``instead``, or (None) left out."""
    fields({name.replace("_", " "): value for name, value in {**view, **instead}.items()})


def print_plainly(shown: Any) -> None:
    """What rich draws, without spaces at the ends of lines."""
    out = console()
    with out.capture() as capture:
        out.print(shown)
    for line in capture.get().splitlines():
        click.echo(line.rstrip())


def cell(value: Any) -> str:
    """A value as people read it: ``-`` for nothing, two digits for a fraction."""
    match value:
        case None | "":
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.2f}".rstrip("0").rstrip(".")
        case list() | tuple():
            return ", ".join(cell(item) for item in value) or "-"
        case dict():
            return ", ".join(f"{name}: {cell(item)}" for name, item in value.items()) or "-"
        case _:
            return printable(str(value))


def printable(text: str) -> str:
    """The text as a terminal may have it: a reason that a user gave must not move its cursor or colour its lines."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def echo_output(text: str) -> None:
    """Print what a job has printed. Where a person reads it, it can do nothing to the terminal but end lines."""
    if _to_terminal():
        text = "".join(c if c in "\n\r\t" else printable(c) for c in text)
    click.echo(text, nl=False)


def _to_terminal() -> bool:
    return sys.stdout.isatty()
