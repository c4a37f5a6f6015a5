"""To be called when a module was imported: for hooks that a framework loads before its own trainer."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_waiting: dict[str, list[Callable[[ModuleType], None]]] = {}


def when_imported(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call ``then`` with a module once it has been imported: at once, if that is so already.

    An importer sees what ``then`` has made of it; what ``then`` raises, the import raises.
    """
    if name in sys.modules:
        then(sys.modules[name])
        return
    _waiting.setdefault(name, []).append(then)
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what the others find, and has its loader call those that wait."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _waiting:
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target) if finder is not self else None
            if spec is not None and spec.loader is not None:
                _call_after(spec.loader, _waiting.pop(name))
                return spec
        return None


def _call_after(loader: Any, then: list[Callable[[ModuleType], None]]) -> None:
    """Have a loader, which is this one module's, call these once it has run the module."""
    run = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        run(module)
        for one in then:
            one(module)

    loader.exec_module = exec_module


_FINDER = _Finder()
