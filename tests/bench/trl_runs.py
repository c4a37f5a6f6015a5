"""The hook for TRL on real runs: what it costs without a daemon, with one and nobody else, and what three runs reach.

All on the CPU, each run with one thread. The bound of the three is made of their own phases, as long as they were in
company: two at once on two cores take longer than one alone, which no schedule can help.
"""

import importlib.util
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from figures import Json, at_most, median, say, short
from live import HERE, clean_environment, daemon

from rollmuxd_demo.measure import JobRecord, Phase, first_fill, lower_bound

HOSTS: Final = [("r0", "rollout", 1.0), ("t0", "train", 1.0)]
#: a rollout and the steps on it, roughly
ROLLOUT_S: Final = 1.2


def run(budget_s: float, *, small: bool = False) -> Json:
    """The three parts, one after the other; raises RuntimeError where TRL is not installed."""
    missing = [name for name in ("torch", "trl", "rollmuxd_hook_trl") if importlib.util.find_spec(name) is None]
    if missing:
        raise RuntimeError(f"{', '.join(missing)} not installed: pip install 'trl>=1.0,<1.17', with a torch")
    found = _measured(2 if small else max(9, round(budget_s / ROLLOUT_S)), 8 if small else 64)
    three = _three([_record(name, found[name]["phases"]) for name in ("one", "two", "three")])
    hook, alone = found["hook"], found["alone"]
    shares = {
        "hook_share": short(hook["hook_s"] / hook["step_s"]),
        "daemon_share": short(alone["kept_s"] / alone["step_s"]),
    }
    return {
        **shares,
        "hook_us": short(1e6 * hook["hook_s"]),
        "hook_step_ms": short(1e3 * hook["step_s"]),
        "daemon_ms": short(1e3 * alone["kept_s"]),
        "daemon_step_ms": short(1e3 * alone["step_s"]),
        "daemon_calls": short(alone["calls"]),
        "daemon_cpu_ms": short(1e3 * alone["cpu_s"]),
        "daemon_paired": short(alone["paired"]),
        "daemon_steps": alone["steps"],
        **three,
        "targets": {
            "hook_share": at_most(shares["hook_share"], 0.001),
            "daemon_share": at_most(shares["daemon_share"], 0.01),
            "ratio_to_bound": at_most(three["ratio_to_bound"], 1.15),
        },
    }


def _measured(rollouts: int, tokens: int) -> Json:
    with tempfile.TemporaryDirectory(prefix="rollmuxd-bench-") as name:
        folder = Path(name)
        with daemon(folder, HOSTS) as made:
            say(f"trl: {rollouts} rollouts in each part")
            # (-P: beside it lie modules of names that are others' too.)
            command = [sys.executable, "-P", "-W", "ignore", str(HERE / "trl_workload.py"), str(made.socket), name]
            with (folder / "trl.log").open("w+") as log:
                ended = subprocess.run(
                    [*command, str(rollouts), str(tokens)],
                    env={**clean_environment(folder), "PYTHONPATH": str(HERE.parents[1] / "examples")},
                    stdout=subprocess.PIPE,
                    stderr=log,
                    check=False,
                )
                log.seek(0)
                said = log.read()[-3_000:]
            if ended.returncode:
                raise RuntimeError(f"the runs ended with {ended.returncode}:\n{said}")
    found = json.loads(ended.stdout)
    assert isinstance(found, dict)
    return found


def _record(name: str, phases: list[tuple[str, float, float]]) -> JobRecord:
    steps = {"rollout": 0, "train": 0}
    made = []
    for phase, start, end in phases:
        made.append(Phase(name, steps[phase], phase, start, end))
        steps[phase] += 1
    return JobRecord(name, steps["train"], (), "", tuple(made))


def _three(jobs: list[JobRecord]) -> Json:
    """What three runs took, against what their phases could not take less than."""
    phases = sorted((phase for job in jobs for phase in job.phases), key=lambda phase: phase.start)
    wall_s = max(phase.end for phase in phases) - phases[0].start
    bound, fill_s = lower_bound(jobs), first_fill(jobs)
    busy = [phase for phase in phases if phase.pool == bound.by] if bound.by != "longest" else []
    idle = [later.start - earlier.end for earlier, later in itertools.pairwise(busy)]
    return {
        "wall_s": short(wall_s),
        "bound_s": short(bound.seconds),
        "bound_by": bound.by,
        "first_fill_s": short(fill_s),
        "ratio_to_bound": short(wall_s / (bound.seconds + fill_s)),
        "rollout_s": short(median([phase.seconds for phase in phases if phase.pool == "rollout"])),
        "train_s": short(median([phase.seconds for phase in phases if phase.pool == "train"])),
        "between_ms": short(1e3 * median(idle)) if idle else None,
        "between_s": short(sum(idle)),
    }
