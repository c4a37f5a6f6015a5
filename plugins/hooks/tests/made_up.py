"""What frameworks import, made up: modules of anything, as much of Ray as drivers ask for, and released modules."""

import importlib.abc
import importlib.machinery
import importlib.metadata
import inspect
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

#: releases, as ``make drift ARGS="--keep .venv/frameworks ..."`` leaves them
FRAMEWORKS = Path(sys.prefix) / "frameworks"


class Config(SimpleNamespace):
    """With anything for what is not in it."""

    def __getattr__(self, name):
        return Anything()


class Anything:
    """Whatever is asked of it: a decorator that leaves things as they are, a base class, a config, a tensor."""

    def __call__(self, *args, **kwargs):
        plain = len(args) == 1 and not kwargs and (inspect.isfunction(args[0]) or inspect.isclass(args[0]))
        return args[0] if plain else Anything()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __mro_entries__(self, bases):
        return ()

    def __getitem__(self, key):
        return Anything()

    def __setitem__(self, key, value): ...

    def __iter__(self):
        return iter(())

    def __len__(self):
        return 0

    def __or__(self, other):
        return self

    __ror__ = __add__ = __radd__ = __truediv__ = __rtruediv__ = __mul__ = __rmul__ = __or__

    def __gt__(self, other):
        return False

    def __index__(self):
        return 0

    def __format__(self, how):
        return "anything"

    def __enter__(self):
        return self

    def __exit__(self, *_): ...


class Ref:
    """What Ray answers with."""

    def __init__(self, value):
        self.value = value


class Handle:
    """An actor: its methods run where they are called."""

    def __init__(self, target):
        self._target = target

    def __getattr__(self, name):
        method = getattr(self._target, name)
        return SimpleNamespace(remote=lambda *args, **kwargs: Ref(method(*args, **kwargs)))


def made_up_ray():
    """As much of Ray as these loops ask for."""

    def actor(what):
        if not inspect.isclass(what):
            function = SimpleNamespace(remote=lambda *args, **kwargs: Ref(what(*args, **kwargs)))
            function.options = lambda **_: function
            return function
        return SimpleNamespace(
            __ray_metadata__=SimpleNamespace(modified_class=what), remote=lambda *a, **k: Handle(what(*a, **k))
        )

    def value(ref):
        return [value(one) for one in ref] if isinstance(ref, list) else ref.value if isinstance(ref, Ref) else ref

    return dict(
        remote=lambda *args, **kwargs: actor(args[0]) if args else actor,
        get=lambda ref, **_: value(ref),
        put=Ref,
        wait=lambda refs, **_: (refs, []),
        is_initialized=lambda: True,
        ObjectRef=Ref,
    )


class MadeUp(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules under ``roots`` (all) that are not in ``real``, and has them consist of :class:`Anything`."""

    def __init__(self, roots, real, **contents):
        self._roots = roots
        self._real = real
        self._contents = {name.replace("__", "."): content for name, content in contents.items()}

    def find_spec(self, name, path, target=None):
        if name in self._real or (self._roots and name.partition(".")[0] not in self._roots):
            return None
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
        # Packages on the way to real modules lead to where these are.
        spec.submodule_search_locations = [str(Path(root, *name.split("."))) for root in sys.path[:1]]
        return spec

    def create_module(self, spec):
        content = self._contents.get(spec.name, {})

        class Module(ModuleType):
            def __getattr__(self, attribute):
                if attribute.startswith("__"):
                    raise AttributeError(attribute)
                return Anything()

        module = Module(spec.name)
        vars(module).update(content)
        return module

    def exec_module(self, module): ...


def install(version, real, *, heavy=("ray", "torch", "transformers", "numpy", "datasets"), **contents):
    """Have a release found, of which only the modules ``real`` are its own; what is ``heavy`` is made up, too."""
    framework = real[0].partition(".")[0]
    sys.path.insert(0, str(FRAMEWORKS / f"{framework.replace('_', '-')}-{version}"))
    sys.meta_path.insert(0, MadeUp({framework, *heavy}, set(real), ray=made_up_ray(), **contents))
    sys.meta_path.append(MadeUp(set(), set()))
    # Its metadata is not where an environment has it.
    version_of = importlib.metadata.version
    importlib.metadata.version = lambda name: version if name == framework else version_of(name)
