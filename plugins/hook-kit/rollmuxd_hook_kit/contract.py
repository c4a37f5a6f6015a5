"""What must be so of a framework for its hook to be right, read from its source. Standard library only.

Hooks rest on methods that a framework may change in any release. So a hook checks before training starts. The version
must be one that was looked at. The methods must have the parameters that they had, and must call what they called.
"""

import ast
import contextlib
import importlib.metadata
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

_Function = ast.FunctionDef | ast.AsyncFunctionDef


class UnknownFramework(ImportError):
    """The framework, or a class made from it, is none that the hook knows; nothing has begun."""


class Method(NamedTuple):
    """A method as the hook knows it."""

    #: by name, ``self`` included; ``...`` at the end: and any others
    parameters: tuple[str, ...]
    #: what it must call of its own object: ``_generate``, or ``checkpoint_manager.sleep_replicas``
    calls: tuple[str, ...] = ()


class Class(NamedTuple):
    """A class as the hook knows it; with no name, the functions of a module."""

    #: the file, from the root of the package or of the repository
    path: str
    name: str
    methods: Mapping[str, Method]
    #: attributes that its source must speak of, as written: ``self.use_vllm``
    mentions: tuple[str, ...] = ()
    #: the first release that has it
    since: tuple[int, ...] = ()

    @property
    def key(self) -> str:
        """How facts name it."""
        return f"{self.path}:{self.name}"


class Contract(NamedTuple):
    """All that a hook rests on."""

    framework: str
    #: on the package index; empty where it is only had as a repository
    package: str
    hook: str
    #: releases that were looked at: from the first, to before the last
    known: tuple[tuple[int, ...], tuple[int, ...]]
    classes: tuple[Class, ...]
    #: what to do to run without the hook
    take_out: str
    #: what a class between the hook's and the framework's may override only by calling the framework's
    chained: tuple[str, ...] = ()
    #: where its releases are tags, if it is on no package index
    repository: str = ""


#: how a checkout that is not installed says what it is
_SAID = re.compile(r"""^\s*version\s*=\s*["']([^"']+)["']""", re.MULTILINE)
_METHOD = re.compile(r"(\w+)\((.*)\)(?:: (.*))?")


def classes(table: str) -> tuple[Class, ...]:
    """Return the classes of a table: a line for each, ``path/to/file.py:Class``, and below it, indented, its methods.

    A method is written as ``fit(self, batch, ...): what.it calls``. ``mentions self.this self.that`` is for the class.
    A line that is too long continues in the next one, indented further.
    """
    found: list[Class] = []
    for line in re.sub(r"\n {8,}", " ", inspect.cleandoc(table)).splitlines():
        if not line.startswith(" "):
            path, _, name = line.partition(":")
            found.append(Class(path, name, {}))
        elif (method := _METHOD.fullmatch(line.strip())) is not None:
            name, parameters, calls = method.groups("")
            known = Method(tuple(filter(None, parameters.split(", "))), tuple(calls.split()))
            found[-1] = found[-1]._replace(methods={**found[-1].methods, name: known})
        else:
            found[-1] = found[-1]._replace(mentions=tuple(line.split()[1:]))
    return tuple(found)


def facts_of(source: str, what: Class) -> dict[str, Any]:
    """Return what :func:`differences` needs to know of a class, from the text of its module."""
    found = _class(ast.parse(source), what.name)
    if found is None:
        return {"methods": {}, "mentions": []}
    named = {ast.unparse(part) for part in ast.walk(found) if isinstance(part, ast.Attribute)}
    wanted = {*what.methods, *(call for method in what.methods.values() for call in method.calls)}
    return {
        "methods": {
            method.name: {"parameters": _parameters(method), "calls": sorted(wanted & set(_own_calls(method)))}
            for method in found.body
            if isinstance(method, _Function) and method.name in what.methods
        },
        "mentions": [attribute for attribute in what.mentions if attribute in named],
    }


def facts_under(root: Path, contract: Contract) -> dict[str, Any]:
    """Return the facts of all classes of a contract, from a folder with the framework's source."""
    facts = {}
    for what in contract.classes:
        path = root / what.path
        if path.is_file():
            facts[what.key] = facts_of(path.read_text(encoding="utf-8"), what)
    return facts


def differences(contract: Contract, version: str, facts: Mapping[str, Any]) -> list[str]:
    """Return in words what is not as it must be; nothing, if the hook is right for this release."""
    return [*_unknown(contract, version), *_changed(contract, version, facts)]


def check(contract: Contract, version: str, facts: Mapping[str, Any]) -> None:
    """Raise :class:`UnknownFramework` if the hook is not right for this release."""
    found = differences(contract, version, facts)
    if found:
        raise UnknownFramework(
            f"{contract.hook} cannot tell when this {contract.framework} rolls out and trains: {'; '.join(found)}. "
            f"Install a known one, or take the hook out again: {contract.take_out}"
        )


def look_at(contract: Contract) -> None:
    """Raise :class:`UnknownFramework` unless the hook is right for what is installed. Nothing of that is run."""
    package = contract.classes[0].path.partition("/")[0]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UnknownFramework(
            f"{contract.hook} is for {contract.framework}, and there is no package {package} here: install "
            f"{contract.framework} {_known(contract)} for {sys.executable}, or start the Python that has it"
        )
    root = Path(next(iter(spec.submodule_search_locations))).parent
    check(contract, version_of(package, root), facts_under(root, contract))


def look_at_or_exit(contract: Contract, module: str) -> None:
    """As :func:`look_at`, for a module that may be run by itself (``__main__``): that ends with the refusal alone."""
    try:
        look_at(contract)
    except UnknownFramework as error:
        if module != "__main__":
            raise
        sys.exit(str(error))


def version_of(package: str, root: Path) -> str:
    """Return what is installed under that name; else what the checkout says in which it lies; else nothing."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    for path in (root / "pyproject.toml", root / "setup.py"):
        found = _SAID.search(path.read_text(encoding="utf-8")) if path.is_file() else None
        if found:
            return found[1]
    return ""


def check_class(contract: Contract, used: type, hook: type, framework: type) -> None:
    """Raise :class:`UnknownFramework` for a class made from the framework's that hides what the hook looks at."""
    for between in used.__mro__[: used.__mro__.index(framework)]:
        if between is hook:
            continue
        for name in contract.chained:
            method = vars(between).get(name)
            if isinstance(method, FunctionType) and name not in inspect.unwrap(method).__code__.co_names:
                raise UnknownFramework(
                    f"{between.__name__}.{name} takes the place of {contract.framework}'s, which the hook needs to be "
                    f"called: call super().{name}(...) in it, or take the hook out again: {contract.take_out}"
                )


def _unknown(contract: Contract, version: str) -> Iterator[str]:
    first, last = contract.known
    if not first <= release(version) < last:
        yield f"the hook knows {contract.framework} {_known(contract)}, and this is {version or 'unknown'}"


def _known(contract: Contract) -> str:
    first, last = contract.known
    return f"{'.'.join(map(str, first))} to {'.'.join(map(str, (*last[:-1], last[-1] - 1)))}"


def _changed(contract: Contract, version: str, facts: Mapping[str, Any]) -> Iterator[str]:
    for what in contract.classes:
        if release(version) < what.since:
            continue
        if what.key not in facts:
            yield f"there is no {what.path}"
            continue
        where = what.name or what.path
        yield from _changed_in(where, what, facts[what.key])


def _changed_in(where: str, what: Class, facts: Mapping[str, Any]) -> Iterator[str]:
    for name, method in what.methods.items():
        if name not in facts["methods"]:
            yield f"{where} has no {'method' if what.name else 'function'} {name}"
            continue
        has = facts["methods"][name]
        if not _fits(has["parameters"], method.parameters):
            yield f"{where}.{name} is known as ({', '.join(method.parameters)}), not ({', '.join(has['parameters'])})"
        for call in method.calls:
            if call not in has["calls"]:
                yield f"{where}.{name} does not call {call}"
    for attribute in what.mentions:
        if attribute not in facts["mentions"]:
            yield f"{where} does not speak of {attribute}"


def release(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with: ``1.16.0.dev0`` is 1, 16, 0."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def _class(module: ast.Module, name: str) -> ast.ClassDef | ast.Module | None:
    if not name:
        return module
    return next((node for node in module.body if isinstance(node, ast.ClassDef) and node.name == name), None)


def _parameters(method: _Function) -> list[str]:
    has = method.args
    return [argument.arg for argument in (*has.posonlyargs, *has.args, *has.kwonlyargs)]


def _fits(has: list[str], parameters: tuple[str, ...]) -> bool:
    if parameters[-1:] == ("...",):
        return has[: len(parameters) - 1] == list(parameters[:-1])
    return has == list(parameters)


def _own_calls(method: _Function) -> Iterator[str]:
    """What a function calls: methods of its own object without ``self.``, all else as it is written."""
    for node in ast.walk(method):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            yield ast.unparse(node.func).removeprefix("self.")
