"""A file to send with a bug report: what a daemon is, has and did, without anything that opens a door.

What gets in is chosen (nothing is taken from the environment, no table of keys is read, of plugins' options only the
names), and all that gets in is scrubbed besides: values under names like ``token``, ``env`` or ``idempotency_key``,
whatever looks like a secret, and each value that is a secret by what is known here, wherever it turns up again.
Names of owners, users, jobs and hosts do get in: without them a report cannot be read.
"""

import io
import json
import os
import platform
import re
import shutil
import sqlite3
import stat
import sys
import tarfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import msgspec
from pydantic import BaseModel

from rollmuxd.core.apply import apply
from rollmuxd.core.errors import BrokenInvariant
from rollmuxd.core.state import State
from rollmuxd.daemon.journal import backup, file
from rollmuxd.daemon.journal.file import JournalError, JournalRefused, connect
from rollmuxd.daemon.settings import Settings

LEFT_OUT: Final = "(left out)"
FACTS: Final = 2_000
LOG_LINES: Final = 2_000
PACKAGES: Final = (
    *("rollmuxd", "anyio", "click", "httptools", "httpx", "msgspec", "prometheus_client", "pydantic"),
    *("pydantic-settings", "rich", "starlette", "structlog", "uvicorn", "uvloop"),
)

#: what a secret's name has in it, wherever; and what it is called when that is all of a name, or a word of it
_WITHIN: Final = (
    r"secret|token|passw|passphrase|credential|api_?-?key|private_?-?key|idempotency|authori[sz]ation|cookie|signature"
)
_WORD: Final = r"pwd|pass|auth|sig"
#: names under which nothing is shown but a number or a yes
_NAMES: Final = re.compile(
    rf"{_WITHIN}|(^|[_-])({_WORD}|keys?)($|[_-])|(pass|pwd)$|hash|^env|environ|^arg(v|s)$|^command$|private",
    re.IGNORECASE,
)
#: what looks like a secret wherever it stands
_LOOKS: Final = tuple(
    re.compile(pattern, re.IGNORECASE | re.DOTALL)
    for pattern in (
        r"-----BEGIN [A-Z ]+-----.*?(-----END [A-Z ]+-----|\Z)",
        r"rmx_[0-9a-z]+_[\w-]+",
        r"\b(?:hf|gh[opsur]|github_pat|glpat|xox[a-z]|sk|pk|rk|gsk|npm|pypi|nvapi|dckr_pat)[_-][\w-]{10,}",
        r"\bAIza[\w-]{20,}",
        r"\bA[KS]IA[0-9A-Z]{16}\b",
        r"\beyJ[\w-]{8,}\.[\w-]+\.?[\w-]*",
        r"\b[0-9a-f]{40,}\b",
        r"(?<=bearer )[^\s\"']+",
        r"(?<=basic )[A-Za-z0-9+/=]{8,}",
        r"(?<=://)[^/\s@]+(?=@)",
    )
)
#: what is asked of a URL: it may be signed
_ASKED: Final = re.compile(r"(://[^\s?\"'<>]{0,2000}\?)[^\s\"'<>]+")
#: a value in a line of text: in quotes up to where they close (escaped ones close nothing), or a word
_VALUE: Final = r"(?:(?P<quote>\\*[\"'])(?:(?s:.{0,4000}?)(?<!\\)(?P=quote)|.*$)|[^\s,;}\]]+)"
#: ``token=...``, ``"api_key": "..."``, ``PASSWORD: ...``, ``MYSQL_PWD=...`` in a line of text
_SAID: Final = re.compile(
    rf"((?:(?:{_WITHIN})[\w-]{{0,64}}|pass|pwd|(?<![^\W_])(?:{_WORD}))(?:\\*[\"'])?\s*[:=]\s*)" + _VALUE,
    re.IGNORECASE | re.MULTILINE,
)
#: ``--password``, alone, in a list of words
_FLAG: Final = rf"--?(?:[\w-]{{0,64}}(?:{_WITHIN})[\w-]{{0,64}}|(?:[\w-]{{0,64}}-)?(?:{_WORD}|keys?))"
_IS_FLAG: Final = re.compile(_FLAG, re.IGNORECASE)
#: ``--password ...``, or ``'--password', '...'``, in a line of text
_FLAGGED: Final = re.compile(
    rf"((?<![\w-]){_FLAG}(?:\\*[\"'])?(?:\s*,\s*|\s+)(?!--)){_VALUE}", re.IGNORECASE | re.MULTILINE
)
#: the folder that a shell is in, and was in
_NO_SECRETS: Final = ("PWD", "OLDPWD")
#: shorter ones are words
_LONG_ENOUGH: Final = 6


class Scrubber:
    """Takes out of text and structures what must not be told."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        secrets = sorted({value for value in known if len(value) >= _LONG_ENOUGH}, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, secrets))) if secrets else None

    def text(self, text: str) -> str:
        """The text, without secrets."""
        if self._known is not None:
            text = self._known.sub(LEFT_OUT, text)
        for looks in _LOOKS:
            text = looks.sub(LEFT_OUT, text)
        for said in (_ASKED, _SAID, _FLAGGED):
            text = said.sub(lambda found: found[1] + LEFT_OUT, text)
        return text

    def value(self, value: Any, name: str = "") -> Any:
        """A structure, without secrets."""
        match value:
            case bool() | int() | float() | None:
                return value
            case _ if name and _NAMES.search(name) and value not in ("", [], (), {}):
                return LEFT_OUT
            case str():
                return self.text(value)
            case dict():
                return {self.text(str(key)): self.value(item, str(key)) for key, item in value.items()}
            case [str() as said, item] if not _IS_FLAG.fullmatch(said):  # a name and its value, maybe
                return [self.value(said), self.value(item, said)]
            case list() | tuple():
                flagged = [False, *(isinstance(item, str) and bool(_IS_FLAG.fullmatch(item)) for item in value)]
                return [LEFT_OUT if hide else self.value(item) for item, hide in zip(value, flagged, strict=False)]
        return LEFT_OUT


def make(to: Path, settings: Settings, *, facts: int = FACTS, log_lines: int = LOG_LINES) -> dict[str, int]:
    """Write the bundle; the names and sizes of what is in it.

    Raises:
        JournalRefused: the file is there already, or cannot be written.
    """
    state_dir = settings.daemon.state_dir
    scrub = Scrubber([*_secrets_of_the_environment(), *_secrets_of(settings)])
    parts = {
        "about.json": _json(_about(state_dir)),
        "settings.json": _json(scrub.value(_shown(settings))),
        **_of_journal(backup.journal_in(state_dir), scrub, facts),
        "daemon.log": scrub.text(_of_log(state_dir / "daemon.log", log_lines)).encode(),
    }
    try:
        opened = os.open(to, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except FileExistsError:
        raise JournalRefused(f"{to} is there already; name another file, or move it away") from None
    except OSError as error:
        raise JournalRefused(f"{to} cannot be written: {error.strerror}") from error
    with os.fdopen(opened, "wb") as out, tarfile.open(fileobj=out, mode="w:gz") as bundle:
        for name, content in parts.items():
            member = tarfile.TarInfo(f"rollmuxd-bundle/{name}")
            member.size, member.mtime, member.mode = len(content), int(time.time()), 0o600
            bundle.addfile(member, io.BytesIO(content))
    return {name: len(content) for name, content in parts.items()}


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1, default=str).encode() + b"\n"


def _about(state_dir: Path) -> dict[str, Any]:
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "not installed"
    there = state_dir if state_dir.exists() else Path("/")
    disk = shutil.disk_usage(there)
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "packages": packages,
        "python": sys.version,
        "sqlite": sqlite3.sqlite_version,
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "state_dir": str(state_dir),
        "disk_free_bytes": disk.free,
        "disk_bytes": disk.total,
        "files": _sizes(state_dir),
    }


def _sizes(folder: Path) -> dict[str, int]:
    sizes = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        with suppress(FileNotFoundError):  # a daemon that runs has files that come and go
            found = path.stat()
            if stat.S_ISREG(found.st_mode):
                sizes[path.name] = found.st_size
    return sizes


# ---- settings --------------------------------------------------------------------------------------------------------


def _shown(table: BaseModel) -> dict[str, Any]:
    """Our own settings, and of what plugins are given the names only: what they mean is not known here."""
    shown: dict[str, Any] = {}
    for name in type(table).model_fields:
        value = getattr(table, name)
        if isinstance(value, BaseModel):
            shown[name] = _shown(value)
        elif isinstance(value, tuple | list) and value and isinstance(value[0], BaseModel):
            shown[name] = [_shown(item) for item in value]
        elif isinstance(value, Mapping):
            shown[name] = _names_of(value)
        else:
            shown[name] = value if isinstance(value, bool | int | float | None) else _plain(value)
    if table.model_extra:
        shown.update(_names_of(table.model_extra))
    return shown


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else str(value)


def _names_of(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        str(name): _names_of(value) if isinstance(value, Mapping) else f"(left out: {type(value).__name__})"
        for name, value in options.items()
    }


def _secrets_of(table: Any, *, inside: bool = False) -> Iterator[str]:
    """Every text that a plugin is given, and what our own settings have under a name that says so."""
    if isinstance(table, BaseModel):
        for name in type(table).model_fields:
            yield from _secrets_of(getattr(table, name), inside=bool(_NAMES.search(name)))
        yield from _secrets_of(table.model_extra or {}, inside=True)
    elif isinstance(table, Mapping):
        for value in table.values():
            yield from _secrets_of(value, inside=True)
    elif isinstance(table, tuple | list):
        for value in table:
            yield from _secrets_of(value, inside=inside)
    elif inside and isinstance(table, str):
        yield table


def _secrets_of_the_environment() -> Iterator[str]:
    return (value for name, value in os.environ.items() if _NAMES.search(name) and name not in _NO_SECRETS)


# ---- the journal, and the log ----------------------------------------------------------------------------------------


def _of_journal(path: Path, scrub: Scrubber, count: int) -> dict[str, bytes]:
    try:
        checked = msgspec.to_builtins(backup.check(path))
    except JournalError as error:
        return {"journal.json": _json({"good": False, "wrong": [str(error)]})}
    parts = {"journal.json": _json(scrub.value(checked))}
    try:
        with closing(connect(path, readonly=True)) as connection:
            connection.execute("BEGIN")
            # Of a damaged journal there is what can be read of it.
            rows = connection.execute(
                "SELECT seq, CAST(body AS BLOB) FROM facts ORDER BY seq DESC LIMIT ?", (count,)
            ).fetchall()
            parts["facts.jsonl"] = b"".join(_fact(seq, body, scrub) for seq, body in reversed(rows))
            parts["state.json"] = _json(
                scrub.value(_without_options(json.loads(msgspec.json.encode(replayed(connection, path)))))
            )
    except (sqlite3.Error, JournalError, BrokenInvariant, msgspec.MsgspecError, KeyError, ValueError) as error:
        parts["state.json"] = _json({"cannot be made": scrub.text(str(error))})
    return parts


def _fact(seq: int, body: bytes, scrub: Scrubber) -> bytes:
    try:
        fact = scrub.value(_without_options(json.loads(body)))
    except ValueError:
        # Where options or an environment end cannot be told.
        fact = {"damaged": scrub.text(re.split(r'"(?:options|argv|env)"', body.decode(errors="replace"))[0])}
    return json.dumps({"seq": seq, **fact}).encode() + b"\n"


def _without_options(value: Any) -> Any:
    """What jobs give drivers: of it, too, the names only. In the journal it is pairs of a name and a value."""
    match value:
        case dict():
            return {key: _named(item) if key == "options" else _without_options(item) for key, item in value.items()}
        case list() | tuple():
            return [_without_options(item) for item in value]
    return value


def _named(options: Any) -> Any:
    try:
        return _names_of(dict(options))
    except (TypeError, ValueError):
        return LEFT_OUT


def replayed(connection: sqlite3.Connection, path: Path) -> State:
    """The state that a journal comes to, read without a word to whoever writes it. Raises JournalError."""
    begin, base = file.base_of(connection, path)
    state = State() if base is None else msgspec.json.decode(base, type=State)
    for seq, body in file.rows_after(connection, begin, path):
        apply(state, file.decode(path, seq, body))
    return state


def _of_log(path: Path, count: int) -> str:
    most = 400 * count
    try:
        with path.open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - most))
            said = log.read(most)
    except OSError as error:
        return f"{path}: {error.strerror}; where systemd or a container keeps the log, add the last of it\n"
    return "".join(f"{line}\n" for line in said.decode(errors="replace").splitlines()[-count:])
