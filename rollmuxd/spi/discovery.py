"""Finding plugins: from the name in a configuration to a class, by entry point.

There is no central registry: a package that declares an entry point is found once it is installed. A plugin is imported
when it is asked for (or listed), never before. One that cannot be imported is reported with its own error and hides
none of the others.

    PluginError
      NotInstalled      no plugin of that name; says which are there, and how to get it
      BrokenPlugin      it is installed and cannot be used: does not import, is no class, lacks a method, is there twice
"""

import difflib
import sys
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, Literal, TypeAlias, cast

from msgspec import Struct

from rollmuxd.spi.backend import Backend
from rollmuxd.spi.errors import NotInstalled, PluginError
from rollmuxd.spi.fabric import FabricController

Kind: TypeAlias = Literal["backend", "residency", "policy", "fabric"]

GROUPS: Final[Mapping[Kind, str]] = {
    "backend": "rollmuxd.backends",
    "residency": "rollmuxd.residency",
    "policy": "rollmuxd.policies",
    "fabric": "rollmuxd.fabric",
}

_WORDS: Final[Mapping[Kind, str]] = {
    "backend": "backend",
    "residency": "residency driver",
    "policy": "policy",
    "fabric": "fabric driver",
}

#: What must be there before a class is handed out, so that a half-written plugin is found at start, not at first use.
#: Of a policy nothing is demanded here: what it owes is checked where it is used.
_NEEDED: Final[Mapping[Kind, tuple[str, ...]]] = {
    "backend": ("open", "inventory", "observe", "kill", "close"),
    "residency": ("traits", "open", "load", "park", "discard", "probe", "close"),
    "fabric": ("open", "ports", "seen", "set", "close"),
    "policy": ("place", "why_not", "judge", "replan", "regroup", "period_ms"),
}


class BrokenPlugin(PluginError):
    """A plugin is installed and cannot be used; ``why`` says for what reason, ``__cause__`` has its own error."""

    def __init__(self, kind: Kind, name: str, origin: str, why: str) -> None:
        super().__init__(f'{_WORDS[kind]} "{name}" ({origin}) cannot be used: {why}')
        self.kind, self.name, self.origin, self.why = kind, name, origin, why


class Plugin(Struct, frozen=True):
    """An entry point that was found: its class, or the error that keeps it from being used."""

    kind: Kind
    name: str
    #: where it comes from, for people: ``rollmuxd 0.1.0``
    origin: str
    cls: type[Any] | None = None
    error: BrokenPlugin | None = None

    def use(self) -> type[Any]:
        """The class. Raises BrokenPlugin when there is none."""
        if self.error is not None:
            raise self.error
        assert self.cls is not None
        return self.cls


def names(kind: Kind) -> tuple[str, ...]:
    """The names of all installed plugins of a kind, sorted, importing none of them."""
    return tuple(sorted({point.name for point in _entry_points(GROUPS[kind])}))


def installed(kind: Kind) -> dict[str, Plugin]:
    """All plugins of a kind by name, each imported, those that cannot be used with their error. Never raises."""
    return {name: _import(kind, name, _points(kind, name)) for name in names(kind)}


def find(kind: Kind, name: str) -> type[Any]:
    """The class of one plugin.

    Raises:
        NotInstalled: there is none of that name.
        BrokenPlugin: there is, and it cannot be used.
    """
    points = _points(kind, name)
    if not points:
        raise NotInstalled(_not_installed(kind, name, names(kind)))
    return _import(kind, name, points).use()


def find_backend(name: str) -> type[Backend]:
    """The class that reaches hosts with ``backend = "<name>"``. Raises as :func:`find` does."""
    return cast("type[Backend]", find("backend", name))


def find_fabric(name: str) -> type[FabricController]:
    """The class that sets a switch with ``driver = "<name>"``. Raises as :func:`find` does."""
    return cast("type[FabricController]", find("fabric", name))


def find_policy(name: str) -> type[Any]:
    """The class of a policy. Raises as :func:`find` does."""
    return find("policy", name)


def added(group: str) -> dict[str, Any]:
    """What installed packages add to a list of ours: each entry point of the group names a dict."""
    found: dict[str, Any] = {}
    for point in _entry_points(group):
        found |= point.load()
    return found


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant, if one is near enough."""
    near = difflib.get_close_matches(name, tuple(known), n=1)
    return near[0] if near else None


def _points(kind: Kind, name: str) -> tuple[EntryPoint, ...]:
    return tuple(point for point in _entry_points(GROUPS[kind]) if point.name == name)


def _entry_points(group: str) -> tuple[EntryPoint, ...]:
    return _ours(tuple(sys.path)).get(group, ())


@lru_cache(maxsize=1)
def _ours(path: tuple[str, ...]) -> dict[str, tuple[EntryPoint, ...]]:
    """By group, what there is on ``sys.path``. Kept: each look reads a file of every package that is installed."""
    points = entry_points()
    return {group: tuple(points.select(group=group)) for group in points.groups if group.startswith("rollmuxd.")}


def _not_installed(kind: Kind, name: str, there: tuple[str, ...]) -> str:
    meant = nearest(name, there)
    # Not told to install a project by a name that is not ours.
    hint = f'did you mean "{meant}"?' if meant else "install the project that has it, or name another"
    return f'{_WORDS[kind]} "{name}" is not installed (installed: {", ".join(there) or "none"}); {hint}'


def _import(kind: Kind, name: str, points: tuple[EntryPoint, ...]) -> Plugin:
    """One plugin, imported; whatever goes wrong with it is its own error, since it may be a third party's code."""
    origin = " and ".join(dict.fromkeys(_origin(point) for point in points))

    def broken(why: str, cause: Exception | None = None) -> Plugin:
        error = BrokenPlugin(kind, name, origin, why)
        error.__cause__ = cause
        return Plugin(kind, name, origin, error=error)

    # The same thing found twice is a path listed twice; two different things of one name are a choice not ours to make.
    if len({point.value for point in points}) > 1:
        return broken("two packages claim this name; uninstall one of them")
    try:
        cls = points[0].load()
    except Exception as error:
        if (needed := _needed(points[0], error)) is not None:
            return broken(needed, error)
        return broken(f"{points[0].value} does not import: {type(error).__name__}: {error}", error)
    if not isinstance(cls, type):
        return broken(f"{points[0].value} is {cls!r}, and an entry point must name a class")
    if lacking := [member for member in _NEEDED[kind] if not hasattr(cls, member)]:
        return broken(f"{points[0].value} lacks {', '.join(lacking)}")
    return Plugin(kind, name, origin, cls=cls)


def _needed(point: EntryPoint, error: Exception) -> str | None:
    """What the plugin depends on and is not installed; None: the error is another one.

    A project brings what one plugin depends on by an extra of the plugin's name.
    """
    missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if missing in ("", point.module.partition(".")[0]):
        return None
    extras = point.dist.metadata.get_all("Provides-Extra") or [] if point.dist is not None else []
    if point.dist is None or point.name not in extras:
        return f"{point.value} needs {missing}, which is not installed"
    return f"{point.value} needs {missing}, which comes with {point.dist.name}[{point.name}]"


def _origin(point: EntryPoint) -> str:
    if point.dist is None:
        return point.value
    metadata = point.dist.metadata  # parsed each time that it is asked for
    return f"{metadata['Name']} {metadata['Version']}"
