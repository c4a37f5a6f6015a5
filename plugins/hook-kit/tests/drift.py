"""Hold released frameworks against what their hooks know: ``make drift``, of each the newest.

``ARGS="trl==1.9.0 slime==0.3.0"`` names releases. They are downloaded by pip or, of a framework that is on no package
index, by git; their source is read, not run. ``--source slime=/path/to/checkout --version 0.3.0`` reads what is there;
``--only trl,verl`` picks frameworks.
``--write`` puts what was read into ``tests/facts-FRAMEWORK.json`` of the hook's project, from which its tests take it.
``--keep DIR`` leaves what was downloaded in ``DIR/PACKAGE-VERSION``: tests that run the loops of real releases look for
them in the environment of their interpreter (``--keep .venv/frameworks``).
Ends with 1 if one of them is not as it must be, or cannot be had.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from rollmuxd_hook_kit.contract import Contract, differences, facts_under, release

PLUGINS = Path(__file__).parents[2]


def contracts(plugins: Path) -> Iterator[tuple[Contract, Path]]:
    """Every contract under ``plugins/``, and where its facts are kept."""
    for path in sorted(plugins.glob("*/rollmuxd_hook*/contract.py")):
        spec = importlib.util.spec_from_file_location(f"{path.parent.name}.contract", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for contract in getattr(module, "CONTRACTS", ()):
            yield contract, path.parents[1] / "tests" / f"facts-{contract.framework.lower()}.json"


def of_release(contract: Contract, version: str | None, keep: Path | None = None) -> tuple[str, dict[str, Any]]:
    """The version (the newest, where none is asked for), and what is in it. Raises OSError if it cannot be had."""
    with tempfile.TemporaryDirectory() as folder:
        if contract.package:
            version, root = _from_index(f"{contract.package}=={version}" if version else contract.package, Path(folder))
        else:
            version, root = _from_repository(contract.repository, version, Path(folder))
        root = next((below for below in (root, root / "src") if (below / contract.classes[0].path).is_file()), root)
        if keep is not None:
            kept = keep / f"{contract.package or contract.framework.lower()}-{version}"
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(root, kept)
        return version, facts_under(root, contract)


def _from_index(what: str, folder: Path) -> tuple[str, Path]:
    """A wheel, for this interpreter or, as it is only read, for another."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    for more in ([], ["--python-version", "3.11"]):
        if subprocess.run([*pip, "--dest", folder, *more, what], check=False).returncode == 0:
            break
    else:
        raise OSError(f"{what} cannot be had from the package index")
    wheel = next(folder.glob("*.whl"))
    root = folder / "unpacked"
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(root)
    # Where a wheel is for one platform, what is pure Python in it may lie apart.
    return wheel.name.split("-")[1], next(root.glob("*.data/purelib"), root)


def _from_repository(address: str, version: str | None, folder: Path) -> tuple[str, Path]:
    """A tag like ``v0.3.0``."""
    if version is None:
        listed = _git("ls-remote", "--tags", "--refs", address)
        tags = re.findall(r"refs/tags/v(\d+(?:\.\d+)+)$", listed, re.MULTILINE)
        if not tags:
            raise OSError(f"{address} has no tags of releases")
        version = max(tags, key=release)
    root = folder / "checkout"
    _git("clone", "--quiet", "--depth", "1", "--branch", f"v{version}", address, str(root))
    shutil.rmtree(root / ".git")
    return version, root


def _git(*words: str) -> str:
    quiet = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_LFS_SKIP_SMUDGE": "1"}
    done = subprocess.run(["git", *words], env=quiet, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.startswith("fatal:")] or ["git has failed"]
        raise OSError(said[0])
    return done.stdout


def main() -> int:
    """Say of each release what is different."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("releases", nargs="*", help="package==version, or framework==version")
    parser.add_argument("--only", help="frameworks, with commas between")
    parser.add_argument("--source", help="framework=path of a checkout")
    parser.add_argument("--version", help="of the checkout")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--keep", type=Path, help="folder for what is downloaded")
    asked = parser.parse_args()
    known = {contract.framework.lower(): (contract, facts) for contract, facts in contracts(PLUGINS)}
    drifted = False
    for name, version, source in _wanted(asked, known):
        contract, kept = known[name]
        if source is not None:
            facts = facts_under(source, contract)
        else:
            try:
                version, facts = of_release(contract, version, asked.keep)
            except OSError as error:
                print(f"{contract.framework}: {error}")
                drifted = True
                continue
        found = differences(contract, version or "", facts)
        drifted = drifted or bool(found)
        print(f"{contract.framework} {version}: {'; '.join(found) or 'as the hook knows it'}")
        if asked.write:
            recorded = json.loads(kept.read_text()) if kept.exists() else {}
            kept.write_text(json.dumps({**recorded, version: facts}, indent=1) + "\n")
    return int(drifted)


def _wanted(asked: Any, known: dict[str, tuple[Contract, Path]]) -> Iterator[tuple[str, str | None, Path | None]]:
    """Of what is asked for: which hook, which version, and where its source is if it is here."""
    if asked.source:
        name, _, path = asked.source.partition("=")
        yield name, asked.version, Path(path)
        return
    packages = {name: contract.package or name for name, (contract, _) in known.items()}
    for wanted in asked.releases:
        package, _, version = wanted.partition("==")
        if package not in packages.values():
            raise SystemExit(f"there is no hook for {package}: {', '.join(dict.fromkeys(packages.values()))}")
        yield from ((name, version or None, None) for name in packages if packages[name] == package)
    if not asked.releases:
        for name in asked.only.split(",") if asked.only else known:
            yield name, None, None


if __name__ == "__main__":
    sys.exit(main())
