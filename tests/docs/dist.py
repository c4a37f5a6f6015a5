"""Build a release and check it: ``make -s dist``. Nothing is published, and no tag is set.

The last commit is packed into ``dist/`` as a source archive, and the wheel is built from that archive; ``twine check``
reads both. Then each goes into a new environment of each Python from 3.11 to 3.14 that this machine has, and the demo
and the tutorial are typed there; beside that ``deploy/install.sh`` installs the wheel.

Progress is on stderr. stdout has one JSON object: the two files, the Pythons on which all of that works, and whether
the demo and the tutorial work from each file. The exit status is 1 if anything does not work.
``PYTHONS="python3.12 /path/to/python3"`` names the Pythons to use. It needs a package index.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

spec = importlib.util.spec_from_file_location("newcomer", Path(__file__).with_name("newcomer.py"))
assert spec is not None
assert spec.loader is not None
newcomer = importlib.util.module_from_spec(spec)
spec.loader.exec_module(newcomer)

REPOSITORY = newcomer.console.REPOSITORY
#: where pyenv and uv keep Pythons that are not on PATH
KEPT = (".pyenv/versions/3.*/bin/python3", ".local/share/uv/python/cpython-3.*/bin/python3")
#: three a core, as tests are run: most of the time an install, a demo or a tutorial waits
AT_A_TIME = 3 * (os.cpu_count() or 1)
_VERSION = "import ensurepip, platform, venv; print(platform.python_version())"


def main(dist: Path = REPOSITORY / "dist") -> int:
    with tempfile.TemporaryDirectory(prefix="dist-") as folder:
        os.environ.setdefault("PIP_CACHE_DIR", f"{folder}/pip")  # each package is downloaded once
        verdict, works = check(Path(folder), dist, pythons(os.environ.get("PYTHONS", "").split() or candidates()))
    print(json.dumps(verdict))
    return 0 if works else 1


def check(folder: Path, dist: Path, found: dict[str, str]) -> tuple[dict[str, object], bool]:
    """Build, and try everything even if something does not work: the verdict, and whether all works."""
    for old in [*dist.glob("rollmuxd-*.tar.gz"), *dist.glob("rollmuxd-*.whl")]:
        old.unlink()
    archive, wheel = newcomer.build(folder, dist)
    checkout = newcomer.unpack(archive, folder / "checkout")
    newcomer.say(f"Pythons: {', '.join(found) or 'none'}")

    works = tried("twine check", read_by_twine, archive, wheel, folder) and bool(found)
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        home = newcomer.new_home(folder, "script")
        script = pool.submit(
            tried, "deploy/install.sh with the wheel: tutorial", newcomer.run_script, [wheel], checkout, home
        )
        steps = {
            (package, version): pool.submit(
                tried, f"Python {version}: demo and tutorial from {package.name}", newcomer.install, package, python,
                checkout, newcomer.new_home(folder, f"{package.suffix[1:]}-{version}"),
            )
            for version, python in found.items()
            for package in (wheel, archive)
        }  # fmt: skip
    works &= script.result()
    on = {step: ran.result() for step, ran in steps.items()}
    verdict: dict[str, object] = {
        "wheel": str(wheel),
        "sdist": str(archive),
        "pythons": [version for version in found if on[wheel, version] and on[archive, version]],
        "demo_from_wheel": bool(found) and all(on[wheel, version] for version in found),
        "demo_from_sdist": bool(found) and all(on[archive, version] for version in found),
    }
    return verdict, works and all(on.values())


def read_by_twine(archive: Path, wheel: Path, folder: Path) -> None:
    """Would an index take both, and show their description? Twine is in an environment of its own, used only here."""
    newcomer.shell([newcomer.PYTHON, "-m", "venv", folder / "twine"], folder, folder)
    binaries = folder / "twine" / "bin"
    newcomer.shell([binaries / "pip", "install", "--quiet", "twine"], folder, folder)
    newcomer.shell([binaries / "twine", "check", "--strict", wheel, archive], folder, folder)


def tried(what: str, step, *words) -> bool:
    """Whether a step works; what stands in its way is said on stderr."""
    try:
        step(*words)
    except (newcomer.Stumbled, AssertionError) as error:
        newcomer.say(f"{what}: does not work\n{error}")
        return False
    newcomer.say(f"{what}: works")
    return True


def candidates() -> list[str]:
    """Every Python that may be of use: this one, those on PATH, and those of pyenv and uv, newest first."""
    kept = [str(path) for pattern in KEPT for path in sorted(Path.home().glob(pattern), reverse=True)]
    return [newcomer.PYTHON, *(f"python{minor}" for minor in supported()), *kept]


def supported() -> list[str]:
    """The versions that the project declares: ``3.11`` and so on."""
    said = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["classifiers"]
    return [found[1] for line in said if (found := re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", line))]


def pythons(words: Iterable[str]) -> dict[str, str]:
    """The first Python of each supported version that can make environments, by its full version."""
    found: dict[str, tuple[str, str]] = {}
    for word in words:
        path = shutil.which(word)
        ran = path and subprocess.run([path, "-c", _VERSION], capture_output=True, text=True)
        if path and ran and ran.returncode == 0:
            version = ran.stdout.strip()
            found.setdefault(version.rpartition(".")[0], (version, path))
    return {found[minor][0]: found[minor][1] for minor in supported() if minor in found}


if __name__ == "__main__":
    sys.exit(main())
