"""The paper's production trace: 200 jobs of two weeks, with the measured profiles of their types.

RollMux (arXiv 2512.11306), as published with its artifact (wutianyuan1/ROLL, trace/wild.trace and trace/profile.json,
Apache-2.0). It has 370.16 h, a mean duration of 27.95 h, and at most 38
jobs at once, half of them 7B with 8k tokens. Profiles are means, not worst cases.

A 32B job takes two nodes of each pool by the paper's rule. The artifact counts it so where it is alone, and with *one*
training node where it shares (in both, its phases take the same time). That is ``weave-production``, whose figures
compare with the published ones. In ``weave-production-honest`` it wants two training nodes wherever it is.

The share ``async`` of the jobs (0) is asynchronous, with the same times: they roll out on nodes of their own, which
nothing here counts.
"""

import csv
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

from rollmuxd.core.ids import Millis
from rollmuxd.sim.workload import Options, SimJob, Workload, by_arrival
from rollmuxd_evaluation.workloads.shapes import Shape, Terms, apart, inside, ms


class Arrival(NamedTuple):
    """One line of the trace. Seconds."""

    job: str
    submit_s: float
    duration_s: float
    kind: str


def profiles(*, honest: bool = False) -> dict[str, Shape]:
    """The sixteen types by name."""
    known: dict[str, Shape] = {}
    for row in _shipped("weave_profiles.csv"):
        rollout, train = int(row["rollout_nodes"]), int(row["train_nodes"])
        kind, model_b = row["type"], float(row["model_b"])
        known[kind] = Shape(
            kind=kind,
            model_b=model_b,
            planned=(ms(float(row["rollout_s"])), ms(float(row["train_s"]))),
            nodes=(rollout, train if honest else 1),
            footprint=(rollout, train),
            inside=inside(model_b, 1024 * int(row["max_tokens_k"])),
            colocated=(ms(float(row["colocated_rollout_s"])), ms(float(row["colocated_train_s"]))),
        )
    return known


def arrivals() -> list[Arrival]:
    """The trace, by arrival."""
    return [
        Arrival(f"job{row['job_id']}", float(row["submit_s"]), float(row["duration_s"]), row["type"])
        for row in _shipped("weave_production.csv")
    ]


def _shipped(name: str) -> Iterator[dict[str, str]]:
    """The rows of a table that comes with the package."""
    table = resources.files("rollmuxd_evaluation") / "data" / name
    return csv.DictReader(table.read_text(encoding="utf-8").splitlines())


class Production:
    """The trace. A seed draws the SLOs, which jobs stay if fewer are wanted, and which are asynchronous."""

    def __init__(self, name: str, options: Options, own: Sequence[str] = ("async",)) -> None:
        self.name = name
        self._terms = Terms(options, own)
        self._asynchronous = self._terms.amount("async", 0.0, most=1.0)
        self._profiles = profiles(honest=name.endswith("-honest"))
        self._arrivals = arrivals()

    def draw(self, seed: int) -> Workload:
        """The workload of one seed."""
        jobs = list(self._jobs(seed, lambda shape, lasts_ms: {}))
        for number in random.Random(f"async {seed}").sample(range(len(jobs)), round(self._asynchronous * len(jobs))):
            jobs[number] = apart(jobs[number])
        return Workload(self.name, by_arrival(tuple(jobs)), self._terms.pools())

    def _jobs(self, seed: int, more: Callable[[Shape, Millis], Mapping[str, Any]]) -> Iterator[SimJob]:
        """Each with what ``more`` says of a job of its type that lasts so long."""
        chosen = self._terms.thinned(self._arrivals, seed)
        for it, slo in zip(chosen, self._terms.slos(len(chosen), seed), strict=True):
            shape, lasts_ms = self._profiles[it.kind], ms(it.duration_s)
            arrives_ms = round(it.submit_s * 1000)
            yield self._terms.job(
                it.job, shape, arrives_ms=arrives_ms, lasts_ms=lasts_ms, slo=slo, **more(shape, lasts_ms)
            )
