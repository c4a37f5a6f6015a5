"""``make -s bench``: measure, and print one JSON object.

Each benchmark is a module beside this one; what its figures mean is in docs/how-to/benchmark.md. Progress goes to
stderr. The exit status is 0 however slow the machine is, and 1 where a benchmark could not be run to its end, or misses
what it is held to.
"""

import argparse
import importlib
import json
import os
import platform
import sqlite3
import sys
import time
import traceback
from typing import Final

from figures import Json, say, short

#: in a few minutes; abuse loads the machine, the demo takes six by itself, the simulator three, the soak as long as it
#: is given, the dashboard needs a browser, trl a torch and a TRL, twopool three minutes, async four,
#: weights and delta root for their network namespaces, and eight minutes; they run when they are named
QUICK: Final = ("core", "handover", "directives", "restart", "waiting")
ALL: Final = (
    *QUICK, "abuse", "sim", "demo", "soak", "web", "trl", "twopool", "spread", "rounds", "rewards", "weights", "delta",
    "gateway", "rlsim", "rebalance", "async", "filler",
)  # fmt: skip
#: these are held to their targets: a miss is a failure
HELD: Final = ("weights", "delta", "rlsim", "rounds", "rewards", "rebalance", "filler")
#: and these to some of them: the others are times
HELD_IN: Final = {"gateway": ("lost_streams",)}
#: a module of that very name would take the place of the package, or is a word of the language
MODULES: Final = {"trl": "trl_runs", "async": "asynchronous"}
BUDGET_S: Final = 30.0


def main() -> int:
    """Run the benchmarks that are asked for."""
    asked = _options()
    for name in [name for name in os.environ if name.startswith("ROLLMUX_")]:
        del os.environ[name]  # what is measured is not what somebody has set
    result: Json = {
        "machine": {
            "cores": len(os.sched_getaffinity(0)),
            "processor": _processor(),
            "python": platform.python_version(),
            "sqlite": sqlite3.sqlite_version,
            "load_before": short(os.getloadavg()[0]),
        }
    }
    failed = False
    for name in asked.only:
        say(f"{name} begins")
        began = time.monotonic()
        try:
            found: Json = importlib.import_module(MODULES.get(name, name)).run(asked.budget, small=asked.small)
            found["ok"] = "skipped" not in found and all(target["ok"] for target in found["targets"].values())
            failed = failed or any(not found["targets"][part]["ok"] for part in HELD_IN.get(name, ()))
        except Exception as error:
            traceback.print_exc()
            found, failed = {"ok": False, "error": f"{type(error).__name__}: {error}"}, True
        failed = failed or (name in HELD and not found["ok"])
        result[name] = {**found, "took_s": short(time.monotonic() - began)}
        say(f"{name} ends after {time.monotonic() - began:.0f} s")
    print(json.dumps(result, indent=1))
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure rollmuxd; one JSON object on stdout.")
    parser.add_argument(
        "--only", type=_names, default=QUICK, help=f"of {', '.join(ALL)}, or all (default: {','.join(QUICK)})"
    )
    parser.add_argument(
        "--budget", type=float, default=BUDGET_S, help="seconds for each, roughly (default: %(default)g)"
    )
    parser.add_argument("--small", action="store_true", help="small numbers of everything: to see that it works")
    return parser.parse_args()


def _names(given: str) -> tuple[str, ...]:
    names = ALL if given == "all" else tuple(dict.fromkeys(name.strip() for name in given.split(",")))
    for name in names:
        if name not in ALL:
            raise argparse.ArgumentTypeError(f"{name!r} is no benchmark; there are {', '.join(ALL)}, and all")
    return names


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        return platform.processor()


if __name__ == "__main__":
    sys.exit(main())
