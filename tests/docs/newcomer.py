"""A newcomer's walk: install what would be published into clean homes, and type the README and the tutorial there.

``make newcomer``; it needs a package index, takes about ten minutes, and says on stderr how long each step took. The
last commit is packed as a source archive, and the wheel is built from that archive. Then, each in a home of its own:

- the archive is unpacked into a folder called ``rollmuxd``: the README's commands, and the tutorial
- the wheel goes into a new environment: ``rollmuxd demo``, and the tutorial
- ``deploy/install.sh`` of the unpacked archive: the tutorial

Nothing of this checkout's environment is used, but for the builder of the archive.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

spec = importlib.util.spec_from_file_location("console", Path(__file__).with_name("console.py"))
assert spec is not None
assert spec.loader is not None
console = importlib.util.module_from_spec(spec)
spec.loader.exec_module(console)

PYTHON = sys._base_executable  # type: ignore[attr-defined]
BEGAN = time.monotonic()
#: one run of it is too long for this walk, and CI has it
NOT_TYPED = ("make test",)
READY_S = 120
#: the tutorial takes one minute, on a machine that does nothing else
TUTORIAL_S = 1200


class Stumbled(Exception):
    """Something that a newcomer types does not work, or does not show what it should."""


def main() -> int:
    try:
        with tempfile.TemporaryDirectory(prefix="newcomer-") as folder:
            walk(Path(folder))
    except Stumbled as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def walk(folder: Path) -> None:
    archive, wheel = build(folder, folder / "dist")

    home = new_home(folder, "archive")
    checkout = unpack(archive, home)
    type_readme(checkout, home)
    type_tutorial(checkout, home, checkout / ".venv" / "bin")
    say("archive: the README and the tutorial work")

    install(wheel, PYTHON, checkout, new_home(folder, "wheel"))
    say("wheel: the demo and the tutorial work")

    run_script([], checkout, new_home(folder, "script"))
    say("deploy/install.sh: the tutorial works")


def install(package: Path, python: str, checkout: Path, home: Path) -> None:
    """Install an archive or a wheel into a new environment; then type the demo and the tutorial there."""
    shell([python, "-m", "venv", home / "venv"], home, home)
    binaries = home / "venv" / "bin"
    shell([binaries / "pip", "install", "--quiet", f"{package}[daemon,demo,ssh]"], home, home)
    shell([binaries / "rollmuxd", "demo"], home, home)
    type_tutorial(checkout, home, binaries)


def run_script(words: list[str | Path], checkout: Path, home: Path) -> None:
    """Run ``deploy/install.sh`` with these arguments; then type the tutorial."""
    shell(["sh", "deploy/install.sh", *words], checkout, home)
    type_tutorial(checkout, home, home / ".local" / "share" / "rollmux" / "bin")


def build(folder: Path, dist: Path) -> tuple[Path, Path]:
    """Build into ``dist`` the source archive of the last commit, and the wheel from that archive."""
    clone = folder / "clone"
    git = ["git", "clone", "--quiet", "--depth", "1", f"file://{console.REPOSITORY}", clone]
    shell(git, folder, folder)
    builder = [sys.executable, "-m", "hatchling", "build", "--directory", dist]
    shell([*builder, "--target", "sdist"], clone, folder)
    (archive,) = dist.glob("*.tar.gz")
    shell([*builder, "--target", "wheel"], unpack(archive, folder / "unpacked"), folder)
    (wheel,) = dist.glob("*.whl")
    say(f"built {archive.name} and {wheel.name}")
    return archive, wheel


def unpack(archive: Path, where: Path) -> Path:
    """The unpacked archive, in a folder called ``rollmuxd``, as a clone would be."""
    with tarfile.open(archive) as packed:
        packed.extractall(where, filter="data")
    (unpacked,) = where.glob("rollmuxd-*")
    return unpacked.rename(where / "rollmuxd")


def new_home(folder: Path, name: str) -> Path:
    home = folder / name
    home.mkdir()
    return home


def type_readme(checkout: Path, home: Path) -> None:
    """What the README has its reader type, in order; its daemon runs beside until the end."""
    with daemons_end(checkout, home):
        for line in commands(checkout / "README.md"):
            if " daemon run " in line:
                start_daemon(line, checkout, home)
            elif line not in NOT_TYPED:
                shell(["bash", "-c", f"{line} --once" if line.endswith(" top") else line], checkout, home)


def commands(readme: Path) -> list[str]:
    """The command lines of the README's plain blocks, without their comments."""
    lines = [line for block in console.blocks(readme) if block.lang == "text" for line in block.body.splitlines()]
    return [line.partition("#")[0].strip() for line in lines if re.match(r"(make|cp|\.venv/bin/\w+) ", line)]


def start_daemon(line: str, checkout: Path, home: Path) -> None:
    """Run the daemon in the background, and wait until it is ready."""
    shell(["bash", "-c", f"{line} > daemon.log 2>&1 &"], checkout, home)
    status = [checkout / ".venv" / "bin" / "rollmuxd", "daemon", "status"]
    give_up = time.monotonic() + READY_S
    while subprocess.run(status, cwd=checkout, env=environment(home), capture_output=True).returncode:
        if time.monotonic() > give_up:
            raise Stumbled(f"$ {line}\nis not ready after {READY_S} s\n" + (checkout / "daemon.log").read_text())
        time.sleep(0.2)


@contextmanager
def daemons_end(checkout: Path, home: Path):
    try:
        yield
    finally:
        rollmuxd = checkout / ".venv" / "bin" / "rollmuxd"
        if rollmuxd.exists():
            subprocess.run([rollmuxd, "daemon", "stop"], cwd=checkout, env=environment(home), capture_output=True)


def type_tutorial(checkout: Path, home: Path, binaries: Path) -> None:
    folder = home / "tutorial"
    folder.mkdir()
    for seen in console.run(checkout / "docs" / "tutorial.md", folder, TUTORIAL_S, binaries):
        trouble = console.as_shown(seen.typed.shown, seen.out)
        if seen.status or trouble:
            what = trouble or f"exits with {seen.status}"
            raise Stumbled(f"$ {seen.typed.command}\n{what}\n" + "\n".join(seen.out))
    shutil.rmtree(folder)


def shell(words: list[str | Path], where: Path, home: Path) -> None:
    """Run a command, and show what it says only where it fails."""
    ran = subprocess.run(words, cwd=where, env=environment(home), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if ran.returncode:
        line = " ".join(map(str, words))
        raise Stumbled(f"$ {line}\nexits with {ran.returncode}\n{ran.stdout.decode(errors='replace')}")


def environment(home: Path) -> dict[str, str]:
    """A clean home, a daemon that listens nowhere else, and how the package index is reached."""
    kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "LANG", "SSL_", "REQUESTS_"))}
    state = home / "state"
    return {
        **kept,
        "HOME": str(home),
        "PATH": os.environ["PATH"],
        "PYTHON": PYTHON,
        "ROLLMUX_URL": f"unix://{state}/rollmux.sock",
        "ROLLMUX_DAEMON__STATE_DIR": str(state),
        "ROLLMUX_DAEMON__LISTEN": "",
    }


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGAN:4.0f} s  {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
