"""Finding plugins: from the name in a configuration to a class, by entry point.

There is no central registry: a package that declares an entry point is found once it is installed. A plugin is imported
when it is asked for, never before.

    PluginError
      NotInstalled      no plugin of that name; says which are there, and how to get it
      BrokenPlugin      it is installed and cannot be used: does not import, is no class, lacks a method, is there twice
"""

import difflib
import sys
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from rollmuxd.spi.errors import NotInstalled, PluginError

Kind: TypeAlias = Literal["backend", "residency", "policy", "fabric"]


class _About(NamedTuple):
    """A kind of plugin: its entry points, what people call it, and what a class must have.

    The class is looked at before it is handed out, so that a half-written plugin is found at start, not at first use.
    """

    group: str
    word: str
    needed: tuple[str, ...]


_KINDS: Final[Mapping[Kind, _About]] = {
    "backend": _About("rollmuxd.backends", "backend", ("open", "inventory", "observe", "kill", "close")),
    "residency": _About(
        "rollmuxd.residency", "residency driver", ("traits", "open", "load", "park", "discard", "probe", "close")
    ),
    "fabric": _About("rollmuxd.fabric", "fabric driver", ("open", "ports", "seen", "set", "close")),
    "policy": _About("rollmuxd.policies", "policy", ("place", "why_not", "judge", "replan", "regroup", "period_ms")),
}


class BrokenPlugin(PluginError):
    """A plugin is installed and cannot be used; says why, and ``__cause__`` has its own error."""


def names(kind: Kind) -> tuple[str, ...]:
    """The names of all installed plugins of a kind, sorted, importing none of them."""
    return tuple(sorted({point.name for point in _entry_points(_KINDS[kind].group)}))


def find(kind: Kind, name: str) -> Any:
    """The class of one plugin: what reaches hosts with ``backend = "<name>"``, for one.

    Raises:
        NotInstalled: there is none of that name.
        BrokenPlugin: there is, and it cannot be used.
    """
    about = _KINDS[kind]
    points = [point for point in _entry_points(about.group) if point.name == name]
    if not points:
        there = names(kind)
        meant = nearest(name, there)
        # Not told to install a project by a name that is not ours.
        hint = f'did you mean "{meant}"?' if meant else "install the project that has it, or name another"
        raise NotInstalled(f'{about.word} "{name}" is not installed (installed: {", ".join(there) or "none"}); {hint}')
    origin = " and ".join(dict.fromkeys(_origin(point) for point in points))
    broken = f'{about.word} "{name}" ({origin}) cannot be used: '
    point = points[0]
    # The same thing found twice is a path listed twice; two different things of one name are a choice not ours to make.
    if any(other.value != point.value for other in points):
        raise BrokenPlugin(f"{broken}two packages claim this name; uninstall one of them")
    try:
        cls = point.load()
    except Exception as error:  # it may be a third party's code
        why = _needed(point, error) or f"{point.value} does not import: {type(error).__name__}: {error}"
        raise BrokenPlugin(f"{broken}{why}") from error
    if not isinstance(cls, type):
        raise BrokenPlugin(f"{broken}{point.value} is {cls!r}, and an entry point must name a class")
    if lacking := [member for member in about.needed if not hasattr(cls, member)]:
        raise BrokenPlugin(f"{broken}{point.value} lacks {', '.join(lacking)}")
    return cls


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


def _entry_points(group: str) -> tuple[EntryPoint, ...]:
    return _ours(tuple(sys.path)).get(group, ())


@lru_cache(maxsize=1)
def _ours(path: tuple[str, ...]) -> dict[str, tuple[EntryPoint, ...]]:
    """By group, what there is on ``sys.path``. Kept: each look reads a file of every package that is installed."""
    points = entry_points()
    return {group: tuple(points.select(group=group)) for group in points.groups if group.startswith("rollmuxd.")}


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
