"""``job.toml``: one job as a file says it, with the keys of :func:`rollmuxd.job`, and the commands that make it up."""

from __future__ import annotations

import difflib
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from rollmuxd.cli.common import Failed
from rollmuxd.cli.run.private_ray import RayTable
from rollmuxd.client.registration import POOL_KEYS, registration

T = TypeVar("T", bound=Struct)

#: keys of a job that are no pools
KEYS: Final = frozenset(
    (
        *("phases", "side", "init", "slo", "priority", "on_loss", "movable", "park", "if_unmet", "colocate", "ranks"),
        *("asynchronous", "filler"),
    )
)
#: those of them that are tables, as a pool is
_TABLES: Final = ("phases", "side", "init", "asynchronous", "filler")
#: pools of a job that names none, as :func:`rollmuxd.job` has it
_BY_DEFAULT: Final = ("rollout", "train")


@dataclass(frozen=True)
class Role:
    """One command of a job, and the pools whose GPUs it sees; none named: all of the job's."""

    name: str
    argv: tuple[str, ...]
    pools: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = ""


class RoleTable(Struct, forbid_unknown_fields=True):
    """What ``[roles.NAME]`` says: a line, or a list of strings; a pool, or several."""

    command: str | list[str]
    pool: str | list[str] = []
    env: dict[str, str] = {}
    cwd: str = ""


@dataclass(frozen=True)
class JobFile:
    """What ``job.toml`` says."""

    path: Path
    table: Mapping[str, Any]
    roles: tuple[Role, ...]
    #: a Ray of the job's own is wanted
    ray: RayTable | None = None

    def registration(self, key: str, **more: Any) -> Any:
        """The body of ``POST /v1/jobs``. Raises Failed, naming the file and the key."""
        return registration_of(str(self.path), self.table, self.table["name"], idempotency_key=key, **more)


def registration_of(where: str, table: Mapping[str, Any], name: str, **more: Any) -> Any:
    """What a job's table registers: its keys are those of :func:`rollmuxd.job`. Raises Failed, saying where."""
    pools = {key: value for key, value in table.items() if key not in KEYS and key != "name"}
    rest = {key: value for key, value in table.items() if key in KEYS}
    for key, value in pools.items():
        if key in _BY_DEFAULT or (isinstance(value, dict) and (not value or value.keys() & POOL_KEYS)):
            continue
        near = difflib.get_close_matches(key, _TABLES if isinstance(value, dict) else KEYS, n=1)
        if near:
            raise Failed(f"{where}: {key!r} is not a key; did you mean {near[0]}?")
        if key == "pools" or not isinstance(value, dict):
            such = f"train = {{{key} = ...}}" if key in POOL_KEYS else "train = {nodes = 1}"
            raise Failed(f"{where}: {key}={value!r}: {key!r} is not a key here; pools are tables, such as {such}")
    try:
        return registration(name, pools=pools, **{**rest, **more})
    except (TypeError, ValueError) as error:
        raise Failed(f"{where}: {error}") from error


def read(path: Path, command: Sequence[str]) -> JobFile:
    """The job of a file, whose command is given there (``[roles.NAME]``) or here. Raises Failed."""
    try:
        said = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Failed(f"{path}: {error}") from error
    if not isinstance(said.get("name"), str):
        raise Failed(f'{path}: there is no name in it; say name = "math-7b"')
    roles = said.pop("roles", {})
    ray = _converted(f"{path}: ray", said.pop("ray"), RayTable) if "ray" in said else None
    if not isinstance(roles, dict):
        raise Failed(f"{path}: roles are tables, [roles.trainer] with a command")
    if bool(roles) == bool(command):
        one = "says what to run (roles), and so does the command line" if roles else "does not say what to run"
        raise Failed(f"{path} {one}; give either [roles.NAME] with command there, or -- COMMAND here")
    pools = [name for name in said if name not in KEYS and name != "name"] or list(_BY_DEFAULT)
    if command:
        return JobFile(path, said, (Role("main", tuple(command)),), ray)
    return JobFile(path, said, tuple(_role(path, name, table, pools) for name, table in roles.items()), ray)


def _role(path: Path, name: str, given: Any, pools: Sequence[str]) -> Role:
    where = f"{path}: role {name}"
    table = _converted(where, given, RoleTable)
    try:
        argv = shlex.split(table.command) if isinstance(table.command, str) else table.command
    except ValueError as error:  # a quotation without an end
        raise Failed(f"{where}: command = {table.command!r}: {error}") from error
    if not argv:
        raise Failed(f"{where}: command is empty; say what the role runs")
    mine = [table.pool] if isinstance(table.pool, str) else table.pool
    if any(pool not in pools for pool in mine):
        raise Failed(f"{where}: pool is {table.pool!r}, and the job has {', '.join(pools)}")
    return Role(name, tuple(argv), tuple(mine), table.env, table.cwd)


def _converted(where: str, given: Any, kind: type[T]) -> T:
    """A table, as it must be. Raises Failed, naming the key and what there is."""
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        keys = ", ".join(it.name for it in msgspec.structs.fields(kind))
        raise Failed(f"{where}: {error}; it is a table with the keys {keys}") from error
