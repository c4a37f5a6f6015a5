"""The framework that is installed, held against what its hook knows. Its source is read, and nothing of it is run."""

import importlib.metadata
import importlib.util
import re
from pathlib import Path

from rollmuxd_hook_kit.contract import Contract, UnknownFramework, check, facts_under

#: how a checkout that is not installed says what it is
_SAID = re.compile(r"""^\s*version\s*=\s*["']([^"']+)["']""", re.MULTILINE)


def look_at(contract: Contract, package: str) -> None:
    """Raise :class:`~rollmuxd_hook_kit.contract.UnknownFramework` unless the hook is right for what is installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UnknownFramework(f"{contract.hook} is for {contract.framework}, and there is no package {package} here")
    root = Path(next(iter(spec.submodule_search_locations))).parent
    check(contract, version_of(package, root), facts_under(root, contract))


def version_of(package: str, root: Path) -> str:
    """What is installed under that name; else what the checkout says that the package lies in; else nothing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pass
    for name in ("pyproject.toml", "setup.py"):
        path = root / name
        found = _SAID.search(path.read_text(encoding="utf-8")) if path.is_file() else None
        if found:
            return found[1]
    return ""
