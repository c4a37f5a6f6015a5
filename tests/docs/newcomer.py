"""A newcomer's walk: what git has, installed into a clean home by ``deploy/install.sh``, and the tutorial typed there.

``make newcomer``; it needs a package index, and says how long it took. Nothing of this checkout's environment is used.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

spec = importlib.util.spec_from_file_location("console", Path(__file__).with_name("console.py"))
assert spec is not None
assert spec.loader is not None
console = importlib.util.module_from_spec(spec)
spec.loader.exec_module(console)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        home, checkout = Path(folder) / "home", Path(folder) / "checkout"
        home.mkdir()
        began = time.monotonic()
        subprocess.run(
            ["git", "clone", "--quiet", "--depth", "1", f"file://{console.REPOSITORY}", checkout], check=True
        )
        kept = {
            name: value for name, value in os.environ.items() if name.startswith(("PIP_", "LANG", "SSL_", "REQUESTS_"))
        }
        system = {"HOME": str(home), "PATH": os.environ["PATH"], "PYTHON": sys._base_executable}  # type: ignore[attr-defined]
        installed = subprocess.run(["sh", "deploy/install.sh"], cwd=checkout, env={**kept, **system})
        if installed.returncode:
            return installed.returncode
        print(f"installed after {time.monotonic() - began:.0f} s")
        console.BIN = home / ".local" / "share" / "rollmux" / "bin"
        (home / "tutorial").mkdir()
        for seen in console.run(checkout / "docs" / "tutorial.md", home / "tutorial"):
            trouble = console.as_shown(seen.typed.shown, seen.out)
            if seen.status or trouble:
                print(f"$ {seen.typed.command}\n{trouble or f'exits with {seen.status}'}\n" + "\n".join(seen.out))
                return 1
        print(f"two jobs have shared a box after {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
