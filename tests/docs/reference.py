"""Draws the pages of ``docs/reference`` from the code. Each function returns a whole page.

What is said of a thing is said once, where it is made: the help of a command, the docstring of a route, the comment
above a field (``#: ...``), the help of a metric, the comment above a key in the sample ``rollmux.toml``.
"""

import inspect
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any, get_args, get_origin

import click
import msgspec

from rollmuxd.cli.main import cli
from rollmuxd.core import facts
from rollmuxd.core.state import State
from rollmuxd.daemon.http.app import ENDPOINTS
from rollmuxd.daemon.http.routing import Endpoint, Plain
from rollmuxd.daemon.metrics import Metrics, gauges
from rollmuxd.wire.answers import Page

REPOSITORY = Path(__file__).parents[2]
HEAD = "Drawn from the code by `ROLLMUX_REWRITE=1 make test ARGS=tests/docs`; change it there.\n"


def pages() -> dict[str, str]:
    """All pages, by the name of their file."""
    return {
        "cli.md": cli_page(),
        "http.md": http_page(),
        "configuration.md": configuration_page(),
        "metrics.md": metrics_page(),
        "facts.md": facts_page(),
    }


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().replace("|", "\\|")


def _prose(text: str) -> str:
    """A docstring as Markdown: one paragraph to a line, code in single backquotes, no links into the code."""
    text = re.sub(r":\w+:`~?([^`]*)`", lambda m: f"`{m[1].rpartition('.')[2]}`", inspect.cleandoc(text))
    text = text.replace("``", "`")
    return "\n\n".join(re.sub(r"\s*\n\s*", " ", part) for part in text.split("\n\n"))


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    lines += [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows]
    return "\n".join(lines)


# ---- the command line ------------------------------------------------------------------------------------------------


def cli_page() -> str:
    parts = [
        f"# Command line\n\n{HEAD}",
        (
            "Every command that talks to the daemon takes `--json`, `--url` (or `ROLLMUX_URL`) and `--api-key` (or "
            "`ROLLMUX_API_KEY`), which are left out below. With `--json` it prints the daemon's own answer on "
            "one line, "
            "whose fields are those of the [HTTP interface](http.md) and stay; lists are one page with all `items`.\n"
        ),
        "Exit status: 0 done, 1 refused or failed, 2 wrongly called, 3 no daemon.\n",
    ]
    for path, command in _commands(cli, ("rollmuxd",)):
        parts.append(_command(path, command))
    return "\n".join(parts)


def _commands(group: click.Group, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from _commands(command, (*path, name))


def _command(path: tuple[str, ...], command: click.Command) -> str:
    heading = "#" * len(path)
    said = _help(command)
    if isinstance(command, click.Group):
        return f"{heading} {path[-1]}\n\n{said}\n"
    words = [
        param.make_metavar(click.Context(command)) for param in command.params if isinstance(param, click.Argument)
    ]
    usage = " ".join([*path, "[OPTIONS]", *words])
    options = [
        [", ".join(f"`{name}`" for name in (*param.opts, *param.secondary_opts)), _value(param), param.help or ""]
        for param in command.params
        if isinstance(param, click.Option) and param.name not in ("as_json", "url", "api_key") and not param.hidden
    ]
    drawn = f"\n\n{_table(['option', 'value', ''], options)}" if options else ""
    return f"{heading} {' '.join(path[1:])}\n\n```text\n{usage}\n```\n\n{said}{drawn}\n"


def _help(command: click.Command) -> str:
    """Its help; what click is told to leave as it is (``\\b``) is a block."""
    parts = []
    for part in inspect.cleandoc(command.help or "").split("\n\n"):
        if part.startswith("\b"):
            parts.append("```text\n" + part.removeprefix("\b").strip("\n") + "\n```")
        else:
            parts.append(re.sub(r"\s*\n\s*", " ", part))
    return "\n\n".join(parts)


def _value(option: click.Option) -> str:
    if option.is_flag or option.count:
        return ""
    kind = option.type
    if isinstance(kind, click.Choice):
        told = ", ".join(f"`{choice}`" for choice in kind.choices)
    else:
        told = option.make_metavar(click.Context(click.Command("x"))).lower()
    default = option.default
    shown = option.show_default and isinstance(default, int | float | str)
    return f"{told} ({default})" if shown else told


# ---- HTTP ------------------------------------------------------------------------------------------------------------


def http_page() -> str:
    parts = [
        f"# HTTP interface\n\n{HEAD}",
        (
            "How to use it, with errors, paging and roles: [HTTP](../how-to/http-api.md). The same for programs: "
            "`GET /v1/openapi.json` (OpenAPI 3.1). *Role*: the least that may call it; what it may be done to "
            "depends on "
            "whose it is.\n"
        ),
    ]
    by_tag: dict[str, list[Endpoint]] = {}
    for endpoint in ENDPOINTS:
        by_tag.setdefault(endpoint.tag, []).append(endpoint)
    for tag in sorted(by_tag):
        parts.append(f"## {tag[:1].upper()}{tag[1:]}\n")
        parts += [_endpoint(endpoint) for endpoint in by_tag[tag]]
    shapes = _shapes()
    parts.append("## Bodies and answers\n")
    parts += [_shape(shape) for shape in sorted(shapes, key=lambda shape: shape.__name__)]
    return "\n".join(parts)


def _endpoint(endpoint: Endpoint) -> str:
    said = _prose(endpoint.handler.__doc__ or "")
    lines = [f"### `{endpoint.method} {endpoint.format_path}`\n", said, ""]
    needs = "no key is needed" if endpoint.needs is None else f"role {endpoint.needs}"
    takes = f"; body {_type(endpoint.body)}" if endpoint.body is not None else ""
    statuses = ", ".join(map(str, (endpoint.status, *endpoint.also, *endpoint.problems)))
    gives = " or ".join(_answers(endpoint))
    lines.append(f"{needs[:1].upper()}{needs[1:]}{takes}; answers {gives}. Statuses: {statuses}.\n")
    if endpoint.query is not None and (rows := _fields(endpoint.query)):
        lines.append(_table(["query", "type", "default", ""], rows) + "\n")
    return "\n".join(lines)


def _answers(endpoint: Endpoint) -> list[str]:
    origin = get_origin(endpoint.answer)
    if origin in (dict, list):
        return ["JSON"]
    parts = (endpoint.answer,) if origin is Page else get_args(endpoint.answer) or (endpoint.answer,)
    shown = [_type(part) for part in parts if part is not Plain]
    return [*shown, *(f"`{kind}`" for kind in endpoint.produces)] or ["bytes"]


def _shapes() -> list[type[msgspec.Struct]]:
    """All structs that bodies and answers are made of, with those within them."""
    found: dict[type[msgspec.Struct], None] = {}

    def add(kind: Any) -> None:
        for part in get_args(kind):
            add(part)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind is not Plain and kind not in found:
            found[kind] = None
            for field in msgspec.structs.fields(kind):
                add(field.type)

    for endpoint in ENDPOINTS:
        add(endpoint.body)
        add(endpoint.answer)
    return list(found)


def _shape(shape: type[msgspec.Struct]) -> str:
    rows = _fields(shape)
    return (
        f"### {shape.__name__}\n\n{_prose(shape.__doc__ or '')}\n\n{_table(['field', 'type', 'default', ''], rows)}\n"
    )


def _fields(shape: type[msgspec.Struct]) -> list[list[str]]:
    comments = _comments(shape)
    return [
        [f"`{field.encode_name}`", _type(field.type), _default(field), _said(comments.get(field.name, ""), field.type)]
        for field in msgspec.structs.fields(shape)
    ]


def _comments(shape: type) -> dict[str, str]:
    """What ``#:`` says above each field, of the class and of those that it is made of."""
    found: dict[str, str] = {}
    for base in reversed(shape.__mro__):
        if not issubclass(base, msgspec.Struct) or base is msgspec.Struct:
            continue
        said: list[str] = []
        for line in inspect.getsource(base).splitlines():
            line = line.strip()
            if line.startswith("#: "):
                said.append(line.removeprefix("#: "))
            elif match := re.match(r"(\w+)\s*:", line):
                if said:
                    found[match[1]] = " ".join(said).replace("``", "`")
                said = []
            else:
                said = []
    return found


def _said(comment: str, kind: Any) -> str:
    described = [
        part.description
        for part in getattr(kind, "__metadata__", ())
        if isinstance(part, msgspec.Meta) and part.description
    ]
    return "; ".join([comment, *described] if comment else described)


def _type(kind: Any) -> str:
    if kind is Any:
        return "any"
    if kind is type(None):
        return "null"
    if hasattr(kind, "__metadata__"):
        return _limited(_type(kind.__origin__), kind.__metadata__)
    origin, args = get_origin(kind), get_args(kind)
    if origin is dict:
        return f"object of {_type(args[1])}"
    if origin is Page:
        return f"page of {_type(args[0])}"
    if origin in (list, tuple):
        return f"list of {_type(args[0])}"
    if args and all(isinstance(arg, str | int) for arg in args):
        return ", ".join(f"`{arg}`" for arg in args)
    if args:
        return " or ".join(_type(arg) for arg in args if arg is not msgspec.UnsetType)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return f"[{kind.__name__}](#{kind.__name__.lower()})"
    names = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object"}
    if kind in names:
        return names[kind]
    if hasattr(kind, "__members__"):
        return ", ".join(f"`{member.value}`" for member in kind)
    return str(getattr(kind, "__name__", kind))


def _limited(name: str, metas: tuple[Any, ...]) -> str:
    limits = []
    for meta in metas:
        if not isinstance(meta, msgspec.Meta):
            continue
        for word, value in (("at least", meta.ge), ("above", meta.gt), ("at most", meta.le)):
            if value is not None:
                # typing keeps one of two equal annotations, and which one depends on imports: 1 and 1.0 look alike
                limits.append(f"{word} {int(value) if value == int(value) else value:,}")
        if meta.min_length:
            limits.append("not empty" if meta.min_length == 1 else f"at least {meta.min_length} long")
        if meta.max_length:
            limits.append(f"up to {meta.max_length:,} long")
    return f"{name}, {', '.join(limits)}" if limits else name


def _default(field: Any) -> str:
    if field.required:
        return "required"
    value = field.default
    if value is msgspec.NODEFAULT:
        value = field.default_factory()
    if value is msgspec.UNSET:
        return ""
    return f"`{msgspec.json.encode(value).decode()}`"


# ---- configuration ---------------------------------------------------------------------------------------------------


def configuration_page() -> str:
    parts = [
        f"# Configuration\n\n{HEAD.replace('the code', 'the sample `rollmux.toml`')}",
        (
            "`rollmux.toml` is looked for in `./`, `~/.config/rollmux/` and `/etc/rollmux/`; the first one counts (or "
            "`--config`, `ROLLMUX_CONFIG`). The environment overrides it: `lease.lease_s` is "
            "`ROLLMUX_LEASE__LEASE_S`. What "
            "is not set has the value below. A typo is answered with the file, the key, and the key that was meant.\n"
        ),
    ]
    for table, rows, intro in _tables():
        parts.append(f"## {table}\n" + (f"\n{intro}\n" if intro else ""))
        if rows:
            parts.append(_table(["key", "default", ""], rows) + "\n")
    return "\n".join(parts)


def _tables() -> Iterator[tuple[str, list[list[str]], str]]:
    """The tables of the sample: name, keys with what is said of them, and what is said of the whole."""
    table, rows, said, intro = "", [], [], ""
    for line in (REPOSITORY / "rollmux.toml").read_text().splitlines():
        if match := re.fullmatch(r"#? ?(\[\[?[\w.]+\]\]?)", line):
            if table:
                yield table, rows, intro
            table, rows, intro, said = f"`{match[1]}`", [], " ".join(said), []
        elif match := re.fullmatch(r"(?:# )?([A-Za-z_][\w-]*) = (.+)", line):
            value = match[2].strip()
            unset = line.startswith("#")
            default = "" if unset else f"`{value}`"
            rows.append([f"`{match[1]}`", default, " ".join(said) + (f" (as in `{value}`)" if unset else "")])
            said = []
        elif line.startswith("# ----"):
            said = []
        elif line.startswith("#"):
            said.append(line.lstrip("# ").strip())
        elif not line.strip():
            said = []
    if table:
        yield table, rows, intro


# ---- metrics ---------------------------------------------------------------------------------------------------------


def metrics_page() -> str:
    counters = Metrics().registry._collector_to_names
    rows = [_metric(family, one._labelnames) for one in counters for family in one.collect()]
    rows += [_metric(family, family._labelnames) for family in gauges(State(), 0, bool, Path(__file__))]
    return (
        f"# Metrics\n\n{HEAD}\n"
        "`GET /metrics`, for Prometheus ([how to](../how-to/monitor.md)). Counters start at zero with the daemon. "
        "The series of single jobs are shown to whom the jobs are, those of an owner to its people and to monitors.\n\n"
        + _table(["name", "type", "labels", ""], sorted(rows))
        + "\n"
    )


def _metric(family: Any, labels: Any) -> list[str]:
    ending = "_total" if family.type == "counter" else ""
    labelled = ", ".join(f"`{name}`" for name in labels)
    return [f"`{family.name}{ending}`", family.type, labelled, unescape(family.documentation)]


# ---- facts -----------------------------------------------------------------------------------------------------------


def facts_page() -> str:
    parts = [
        f"# Facts\n\n{HEAD}",
        (
            "What `GET /v1/facts` and `rollmuxd facts` show, and the journal keeps. Each has `seq`, `fact` (its "
            "name below) "
            "and `at` (milliseconds, UTC). Fields get added, with a default; nothing is renamed.\n\n"
            "A `Cause` says why: `code`, `data`, maybe a `cause` behind it, and here its sentence, `text`.\n"
        ),
    ]
    for kind in facts.KINDS:
        rows = [row for row in _fields(kind) if row[0] != "`at`"]
        parts.append(f"## {kind.__struct_config__.tag}\n\n{_prose(kind.__doc__ or '')}\n")
        if rows:
            parts.append(
                _table(["field", "type", "default", ""], [[row[0], _plain(row[1]), *row[2:]] for row in rows]) + "\n"
            )
    return "\n".join(parts)


def _plain(text: str) -> str:
    """A type without a link: the core's structs have no page."""
    return re.sub(r"\[(\w+)\]\(#\w+\)", r"\1", text)


if __name__ == "__main__":
    for name, page in pages().items():
        (REPOSITORY / "docs" / "reference" / name).write_text(page)
