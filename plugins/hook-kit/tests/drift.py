"""Hold released frameworks against what their hooks know: ``make drift``, of each the newest.

``ARGS="trl==1.9.0 verl==0.8.0"`` names releases, which are downloaded by pip; their source is read, not run.
``--source slime=/path/to/checkout --version 0.3.0`` is for what is only had as a repository; ``--only trl,verl`` picks.
``--write`` puts what was read into ``tests/facts-FRAMEWORK.json`` of the hook's project, from which its tests take it.
``--keep DIR`` leaves what was downloaded in ``DIR/PACKAGE-VERSION``: tests that run the loops of real releases look for
them in the environment of their interpreter (``--keep .venv/frameworks``).
Ends with 1 if one of them is not as it must be.
"""

import argparse
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from rollmuxd_hook_kit.contract import Contract, differences, facts_under

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
    """The version (the newest on the package index, where none is asked for), and what is in it."""
    with tempfile.TemporaryDirectory() as folder:
        packed = _downloaded(f"{contract.package}=={version}" if version else contract.package, folder)
        found = re.match(r"[^-]+-([^-]+?)(-|\.tar)", packed.name)
        assert found is not None
        root = _unpacked(packed)
        facts = facts_under(root, contract)
        if keep is not None:
            kept = keep / f"{contract.package}-{found[1]}"
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(root, kept)
        return found[1], facts


def _downloaded(what: str, folder: str) -> Path:
    """A release, for this interpreter or, as it is only read, for another."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, "--only-binary", ":all:"]
    for more in ([], ["--python-version", "3.11"]):
        done = subprocess.run([*pip, *more, what], check=False)
        if done.returncode == 0:
            return next(Path(folder).iterdir())
    raise SystemExit(f"{what} cannot be had from the package index")


def _unpacked(packed: Path) -> Path:
    root = packed.parent / "unpacked"
    if packed.suffix == ".whl":
        with zipfile.ZipFile(packed) as wheel:
            wheel.extractall(root)
        # Where a wheel is for one platform, what is pure Python in it may lie apart.
        return next(root.glob("*.data/purelib"), root)
    with tarfile.open(packed) as archive:
        archive.extractall(root, filter="data")
    return next(root.iterdir())


def main() -> int:
    """Say of each release what is different."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("releases", nargs="*", help="package==version")
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
            version, facts = of_release(contract, version, asked.keep)
        found = differences(contract, version or "", facts)
        drifted = drifted or bool(found)
        print(f"{contract.framework} {version}: {'; '.join(found) or 'as the hook knows it'}")
        if asked.write:
            recorded = json.loads(kept.read_text()) if kept.exists() else {}
            kept.write_text(json.dumps({**recorded, version: facts}, indent=1) + "\n")
    return int(drifted)


def _wanted(asked: Any, known: dict[str, tuple[Contract, Path]]) -> Iterator[tuple[str, str | None, Path | None]]:
    """Of what is asked for: which hook, which version, and where its source is if not on the package index."""
    if asked.source:
        name, _, path = asked.source.partition("=")
        yield name, asked.version, Path(path)
        return
    packages = {contract.package: name for name, (contract, _) in known.items() if contract.package}
    for wanted in asked.releases:
        package, _, version = wanted.partition("==")
        yield packages[package], version or None, None
    if not asked.releases:
        only = asked.only.split(",") if asked.only else list(packages.values())
        for name in only:
            yield name, None, None


if __name__ == "__main__":
    sys.exit(main())
