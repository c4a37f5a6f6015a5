"""What sharing gains on real work: ``rollmuxd demo`` (real RL loops, real processes), three times.

Its floor is what no schedule can beat: the busiest pool's phases one after the other, and the time in which that pool
cannot work in any order. Its ceiling is what this machine's two cores gain over one, measured in the same minute.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from figures import Json, at_least, at_most, median, say, short
from live import clean_environment

RUNS: Final = 3


def run(budget_s: float, *, small: bool = False) -> Json:
    """The median of three runs; of one, where the machine has no two cores to show anything with."""
    runs = [_once(number, small=small) for number in range(1 if small else RUNS)]
    gains = [run["core_gain"] for run in runs if run["core_gain"]]
    found: Json = {
        "runs": len(runs),
        "ratio_to_bound": short(median([run["wall_s"] / (run["lower_bound_s"] + run["first_fill_s"]) for run in runs])),
        "speedup": short(median([run["speedup"] for run in runs])),
        "core_gain": short(median(gains)) if gains else None,
        "wall_s": short(median([run["wall_s"] for run in runs])),
        "weights_identical": all(run["weights_identical"] for run in runs),
        "violations": sum(len(run["violations"]) for run in runs),
    }
    found["targets"] = {
        "ratio_to_bound": at_most(found["ratio_to_bound"], 1.10),
        "violations": at_most(found["violations"], 0),
        "weights_identical": at_least(found["weights_identical"], 1),
    }
    if gains:
        found["speedup_over_core_gain"] = short(median([run["speedup"] / run["core_gain"] for run in runs]))
        found["targets"]["speedup_over_core_gain"] = at_least(found["speedup_over_core_gain"], 0.8)
    return found


def _once(number: int, *, small: bool) -> Json:
    say(f"demo: run {number + 1} begins")
    options = ["--iterations", "2", "--scale", "0.05"] if small else []
    with tempfile.TemporaryDirectory(prefix="rollmuxd-bench-") as folder:
        ended = subprocess.run(
            [sys.executable, "-m", "rollmuxd", "demo", "--json", *options],
            env=clean_environment(Path(folder)),
            stdout=subprocess.PIPE,
            check=False,
        )
    if not ended.stdout:
        raise RuntimeError(f"the demo ended with {ended.returncode}, and printed nothing")
    found = json.loads(ended.stdout)
    assert isinstance(found, dict)
    return found
