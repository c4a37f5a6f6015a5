"""``make fuzz BUDGET_S=N``: fuzz a live daemon, what is decoded, the configuration and journals; one JSON object.

Progress goes to stderr. The exit status is 1 if anything was found.
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import live
import offline

from rollmuxd.daemon import logs


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz rollmuxd; one JSON object on stdout.")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds, roughly (default: %(default)g)")
    parser.add_argument("--seed", type=int, default=None, help="of what is tried (default: another each time)")
    asked = parser.parse_args()
    logs.set_up("error")  # to stderr: stdout is one object
    seed = time.time_ns() % 2**32 if asked.seed is None else asked.seed
    parts = {"live": 0.7, "wire": 0.1, "settings": 0.1, "journal": 0.1}
    said = {"seed": seed, "cases": 0, "server_errors": 0, "findings": [], "by": {}}
    for name, share in parts.items():
        begun = time.monotonic()
        print(f"fuzz: {name} for {asked.budget * share:.0f} s (seed {seed})", file=sys.stderr, flush=True)
        fuzz = live.fuzz if name == "live" else getattr(offline, f"fuzz_{name}")
        found = fuzz(asked.budget * share, seed)
        said["cases"] += found.cases
        said["server_errors"] += found.server_errors
        said["findings"] += [f"{name}: {what}" for what in found.findings]
        said["by"][name] = {
            "cases": found.cases,
            "findings": len(found.findings),
            "seconds": round(time.monotonic() - begun, 1),
            "answers": {str(status): count for status, count in sorted(found.answers.items())},
        }
    print(json.dumps(said, indent=1))
    return 1 if said["findings"] or said["server_errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
