"""Jobs whose every iteration is a logged step of a real RL run.

Arrivals, durations and types are the production trace's. Each job replays one public log, drawn by seed: first a family
(runs of one code base), then one of its runs. So the family with eleven runs counts as much as the one with one. A
log's first step is dropped (it includes warm-up). Rollout is its generation time. Train is all that would occupy the
training pool: actor update, old log-probabilities, reference, values, critic, advantages. Each phase is scaled so that
its mean over the log is the mean of the job's type. The shape stays: noise, spikes, drift. When a log is over it begins
again.

The logs are of small co-located runs (0.5B to 7.6B parameters): shape and variance are real, absolute times are not.
How long single responses took is not in them, so no tail is released.
"""

import csv
import random
from pathlib import Path
from typing import Final

from rollmuxd.sim import training_logs
from rollmuxd.sim.workload import Options, find
from rollmuxd_evaluation.workloads.series import Drawn, Iterated, Series, Step, scaled
from rollmuxd_evaluation.workloads.shapes import Shape

FOLDER: Final = "rl_steps"
ORIGIN: Final = (
    "it is a folder with runs.csv (columns run, source_repo) and one CSV of steps per run (columns gen_s and train_s, "
    "and old_logprob_s, ref_s, values_s, critic_update_s, adv_s where logged; seconds), made from public training logs "
    "such as those of github.com/HappynessI/verl-for-AgentGym or github.com/jianghoucheng/Agent_On_Policy_Distillation "
    "(both Apache-2.0). Give the folder above it as --data or $ROLLMUX_DATA"
)


def families(folder: Path) -> list[list[list[Step]]]:
    """The runs that are there, by code base. A run whose log was left out is left out."""
    known: dict[str, list[list[Step]]] = {}
    with (folder / "runs.csv").open(encoding="utf-8") as runs:
        for row in csv.DictReader(runs):
            path = folder / f"{row.get('run')}.csv"
            if path.is_file():
                logged = [(step.rollout_s, step.train_s) for step in training_logs.read(path)]
                known.setdefault(row.get("source_repo", ""), []).append(logged)
    if not known:
        raise FileNotFoundError(f"none of the runs that {folder / 'runs.csv'} names is beside it: {ORIGIN}")
    return list(known.values())


class RealLogs(Iterated):
    """The production trace's jobs, each replaying a log; a seed draws which."""

    def __init__(self, name: str, options: Options) -> None:
        super().__init__(name, options)
        self._families = families(find(f"{FOLDER}/runs.csv", options.data, ORIGIN).parent)

    def _drawn(self, seed: int) -> Drawn:
        draw = random.Random(f"logs {seed}")

        def drawn(shape: Shape, count: int) -> Series:
            del count  # a log that is over begins again
            return Series(scaled(draw.choice(draw.choice(self._families)), shape.planned))

        return drawn
