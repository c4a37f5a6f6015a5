"""Hold released TRLs against what the hook knows: ``python drift.py [VERSION ...]`` (default: the newest).

Each release is downloaded by pip and its source read, not run; ``--write`` puts what was read into ``facts.json``, from
which the contract's tests take releases other than the installed one. Ends with 1 if one of them is not as it must be.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from rollmuxd_hook_trl import contract

FACTS = Path(__file__).with_name("facts.json")


def released(version: str | None) -> tuple[str, dict[str, Any]]:
    """The version (the newest, where none is asked for), and what its trainer is like."""
    with tempfile.TemporaryDirectory() as folder:
        what = f"trl=={version}" if version else "trl"
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*pip, "--dest", folder, what], check=True)
        wheel = next(Path(folder).glob("trl-*.whl"))
        found = re.match(r"trl-([^-]+)-", wheel.name)
        assert found is not None
        with zipfile.ZipFile(wheel) as packed:
            source = packed.read("trl/trainer/grpo_trainer.py").decode()
    return found[1], contract.facts_of(source)


def main() -> int:
    """Say of each release what is different."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="*")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    recorded = json.loads(FACTS.read_text()) if FACTS.exists() else {}
    drifted = False
    for wanted in asked.versions or [None]:
        version, facts = released(wanted)
        found = contract.differences(version, facts)
        drifted = drifted or bool(found)
        print(f"TRL {version}: {'; '.join(found) or 'as the hook knows it'}")
        recorded[version] = facts
    if asked.write:
        FACTS.write_text(json.dumps(recorded, indent=1) + "\n")
    return int(drifted)


if __name__ == "__main__":
    sys.exit(main())
