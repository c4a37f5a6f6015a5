"""To be called when a module was imported: for hooks that a framework loads before its own trainer."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

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
                spec.loader = _Loader(spec.loader, _waiting.pop(name))
                return spec
        return None


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, then: list[Callable[[ModuleType], None]]) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # (Itself again, for a caller that asks the module for its source.)
        module.__loader__ = self._loader
        assert module.__spec__ is not None
        module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        for then in self._then:
            then(module)


_FINDER = _Finder()
