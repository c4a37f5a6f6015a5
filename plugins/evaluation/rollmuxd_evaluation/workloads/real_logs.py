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
``plan`` says what a job registers: see :func:`planned`.
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from rollmuxd.core.config import PlanWith
from rollmuxd.sim.workload import Durations, Options, SimJob, Workload, find
from rollmuxd_evaluation.workloads import production
from rollmuxd_evaluation.workloads.shapes import Shape, Terms, ms
from rollmuxd_evaluation.workloads.tables import opened

#: rollout and train of one iteration, in whatever unit
Step: TypeAlias = tuple[float, float]

FOLDER: Final = "rl_steps"
ORIGIN: Final = (
    "it is a folder with runs.csv (columns run, source_repo) and one CSV of steps per run (columns gen_s and train_s, "
    "and old_logprob_s, ref_s, values_s, critic_update_s, adv_s where logged; seconds), made from public training logs "
    "such as those of github.com/HappynessI/verl-for-AgentGym or github.com/jianghoucheng/Agent_On_Policy_Distillation "
    "(both Apache-2.0). Give the folder above it as --data or $ROLLMUX_DATA"
)
#: which families are drawn from, counted from 1 as ``runs.csv`` has them
LOGS: Final = ("all", "odd", "even")
#: what a job registers as its phases' times: see :func:`planned`
PLANS: Final = ("mean", "first10", "max", "p90", "worst")
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


def scaled(steps: Sequence[Step], means: Durations) -> tuple[Durations, ...]:
    """The steps as integer milliseconds, each phase scaled by one factor so that its mean is as given."""
    rollout = means[0] * len(steps) / sum(step[0] for step in steps) / 1000
    train = means[1] * len(steps) / sum(step[1] for step in steps) / 1000
    return tuple((ms(rollout * gen), ms(train * update)) for gen, update in steps)


def planned(series: Sequence[Durations], shape: Shape, plan: str) -> Durations:
    """What a job registers.

    ``mean``: of the whole series, as if the future were known. ``first10``: of the first ten iterations, which is what
    a short profile sees. ``max``: the longest of each phase, the paper's worst case. ``p90`` and ``worst``: the mean;
    it is the policy that plans with a quantile of what it sees, if it follows that.
    """
    if plan in ("mean", "p90", "worst"):
        return shape.planned
    seen = series[:10] if plan == "first10" else series
    if plan == "first10":
        return tuple(round(sum(phase) / len(seen)) for phase in zip(*seen, strict=True))
    return tuple(max(phase) for phase in zip(*seen, strict=True))


class RealLogs:
    """The production trace's jobs, each replaying a log.

    A seed draws which, the SLOs, and which jobs stay if fewer are wanted.
    """

    def __init__(self, name: str, summary: str, options: Options) -> None:
        self.name, self.summary = name, summary
        self._terms = Terms(options, ("logs", "plan"))
        self._plan = self._terms.choice("plan", PLANS)
        self._profiles = production.profiles()
        self._arrivals = production.arrivals(list(self._profiles))
        known = families(find(f"{FOLDER}/runs.csv", options.data, ORIGIN).parent)
        self._families = {"all": known, "odd": known[::2], "even": known[1::2]}[self._terms.choice("logs", LOGS)]
        if not self._families:
            raise ValueError(f"logs=even wants two code bases, and {len(known)} is there")

    def draw(self, seed: int) -> Workload:
        """The workload of one seed."""
        runs = sum(map(len, self._families))
        source = f"arrivals and types of the production trace, iterations of {runs} logged runs"
        sees = PlanWith(self._plan) if self._plan in ("p90", "worst") else PlanWith.MEAN
        return Workload(self.name, tuple(self._jobs(seed)), self._terms.pools(), source, sees)

    def _jobs(self, seed: int) -> Iterator[SimJob]:
        draw = random.Random(f"logs {seed}")
        chosen = self._terms.thinned(self._arrivals, seed)
        known: dict[tuple[str, str], tuple[Durations, ...]] = {}
        for it, slo in zip(chosen, self._terms.slos(len(chosen), seed), strict=True):
            shape = self._profiles[it.kind]
            run, logged = draw.choice(draw.choice(self._families))
            if (run, shape.kind) not in known:
                known[run, shape.kind] = scaled(logged, shape.planned)
            series, lasts = known[run, shape.kind], ms(it.duration_s)
            yield self._terms.job(
                it.job,
                shape,
                arrives_ms=round(it.submit_s * 1000),
                lasts_ms=lasts,
                slo=slo,
                planned=planned(series, shape, self._plan),
                series=series,  # a log that is over begins again
                iterations=max(1, round(lasts / sum(shape.planned))),
            )
