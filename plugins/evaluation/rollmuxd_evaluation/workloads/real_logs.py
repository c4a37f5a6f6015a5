"""Jobs whose every iteration is a logged step of a real RL run.

Arrivals, durations and types are the production trace's. Each job replays one public log, drawn by seed: first a family
(runs of one code base), then one of its runs. So the family with eleven runs counts as much as the one with one. A
log's first step is dropped (it includes warm-up). Rollout is its generation time. Train is all that would occupy the
training pool: actor update, old log-probabilities, reference, values, critic, advantages. Each phase is scaled so that
its mean over the log is the mean of the job's type. The shape stays: noise, spikes, drift. When a log is over it begins
again.

The logs are of small co-located runs (0.5B to 7.6B parameters): shape and variance are real, absolute times are not.
How long single responses took is not in them, so no tail is released.

``logs`` takes every other family (``odd``, ``even``), so that what was tried on one half can be held against the other.
"""

import random
from pathlib import Path
from typing import Final

from rollmuxd.sim.workload import Malformed, Options, find
from rollmuxd_evaluation.workloads.series import Drawn, Iterated, Series, Step, scaled
from rollmuxd_evaluation.workloads.shapes import Shape
from rollmuxd_evaluation.workloads.tables import opened

FOLDER: Final = "rl_steps"
ORIGIN: Final = (
    "it is a folder with runs.csv (columns run, source_repo) and one CSV of steps per run (columns gen_s and train_s, "
    "and old_logprob_s, ref_s, values_s, critic_update_s, adv_s where logged; seconds), made from public training logs "
    "such as those of github.com/HappynessI/verl-for-AgentGym or github.com/jianghoucheng/Agent_On_Policy_Distillation "
    "(both Apache-2.0). Give the folder above it as --data or $ROLLMUX_DATA"
)
#: which families are drawn from, counted from 1 as ``runs.csv`` has them
LOGS: Final = ("all", "odd", "even")
#: passes that run on the trainer beside the actor's update
PASSES: Final = ("old_logprob_s", "ref_s", "values_s", "critic_update_s", "adv_s")


def steps(path: Path) -> list[Step]:
    """Rollout and training seconds of each step of a log but the first."""
    logged = [
        (
            row.number("gen_s", above=True),
            row.number("train_s", above=True) + sum(row.number(name, empty=0.0) for name in PASSES),
        )
        for row in opened(path, ("gen_s", "train_s"))
    ]
    if not logged:
        raise Malformed(str(path), 2, "gen_s", "no row is there, expected at least one")
    return logged[1:] or logged


def families(folder: Path) -> list[list[tuple[str, list[Step]]]]:
    """The runs that are there, by code base. A run whose log was left out is left out."""
    known: dict[str, list[tuple[str, list[Step]]]] = {}
    for row in opened(folder / "runs.csv", ("run", "source_repo")):
        path = folder / f"{row.text('run')}.csv"
        if path.is_file():
            known.setdefault(row.text("source_repo"), []).append((row.text("run"), steps(path)))
    if not known:
        raise FileNotFoundError(f"none of the runs that {folder / 'runs.csv'} names is beside it: {ORIGIN}")
    return list(known.values())


class RealLogs(Iterated):
    """The production trace's jobs, each replaying a log; a seed draws which."""

    def __init__(self, name: str, summary: str, options: Options) -> None:
        super().__init__(name, summary, options, ("logs",))
        known = families(find(f"{FOLDER}/runs.csv", options.data, ORIGIN).parent)
        self._families = {"all": known, "odd": known[::2], "even": known[1::2]}[self._terms.choice("logs", LOGS)]
        if not self._families:
            raise ValueError(f"logs=even wants two code bases, and {len(known)} is there")

    def _source(self) -> str:
        return f"arrivals and types of the production trace, iterations of {sum(map(len, self._families))} logged runs"

    def _drawn(self, seed: int) -> Drawn:
        draw = random.Random(f"logs {seed}")

        def drawn(shape: Shape, count: int) -> Series:
            del count  # a log that is over begins again
            _, logged = draw.choice(draw.choice(self._families))
            return Series(scaled(logged, shape.planned))

        return drawn
