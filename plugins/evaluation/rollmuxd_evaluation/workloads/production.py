"""The paper's production trace: 200 jobs of two weeks, with the measured profiles of their types.

RollMux (arXiv 2512.11306), as published with its artifact. It has 370.16 h, a mean duration of 27.95 h, and at most 38
jobs at once, half of them 7B with 8k tokens. Profiles are means, not worst cases.

A 32B job takes two nodes of each pool by the paper's rule. The artifact counts it so where it is alone, and with *one*
training node where it shares (in both, its phases take the same time). That is ``weave-production``, whose figures
compare with the published ones. In ``weave-production-honest`` it wants two training nodes wherever it is.

The share ``async`` of the jobs (0) is asynchronous, with the same times: they roll out on nodes of their own, which
nothing here counts.
"""

import random
from typing import NamedTuple

from rollmuxd.sim.workload import Options, Workload, by_arrival
from rollmuxd_evaluation.workloads.shapes import Shape, Terms, apart, inside, ms
from rollmuxd_evaluation.workloads.tables import shipped

SOURCE = "wutianyuan1/ROLL, trace/wild.trace and trace/profile.json (Apache-2.0)"


class Arrival(NamedTuple):
    """One line of the trace. Seconds."""

    job: str
    submit_s: float
    duration_s: float
    kind: str


def profiles(*, honest: bool = False) -> dict[str, Shape]:
    """The sixteen types by name."""
    needs = (
        "type",
        "model_b",
        "max_tokens_k",
        "rollout_s",
        "train_s",
        "colocated_rollout_s",
        "colocated_train_s",
        "rollout_nodes",
        "train_nodes",
    )
    known: dict[str, Shape] = {}
    for row in shipped("weave_profiles.csv", needs):
        rollout, train = row.count("rollout_nodes", 1), row.count("train_nodes", 1)
        kind = row.text("type")
        known[kind] = Shape(
            kind=kind,
            model_b=row.number("model_b", above=True),
            planned=(ms(row.number("rollout_s", above=True)), ms(row.number("train_s", above=True))),
            nodes=(rollout, train if honest else 1),
            footprint=(rollout, train),
            inside=inside(row.number("model_b"), 1024 * row.count("max_tokens_k", 1)),
            colocated=(
                ms(row.number("colocated_rollout_s", above=True)),
                ms(row.number("colocated_train_s", above=True)),
            ),
        )
    return known


def arrivals(kinds: list[str]) -> list[Arrival]:
    """The trace, by arrival."""
    rows = shipped("weave_production.csv", ("job_id", "submit_s", "duration_s", "type"))
    return [
        Arrival(
            f"job{row.text('job_id')}",
            row.number("submit_s"),
            row.number("duration_s", above=True),
            row.word("type", kinds),
        )
        for row in rows
    ]


class Production:
    """The trace. A seed draws the SLOs, which jobs stay if fewer are wanted, and which are asynchronous."""

    def __init__(self, name: str, summary: str, options: Options) -> None:
        self.name, self.summary = name, summary
        self._terms = Terms(options, ("async",))
        self._asynchronous = self._terms.amount("async", 0.0, most=1.0)
        self._profiles = profiles(honest=name.endswith("-honest"))
        self._arrivals = arrivals(list(self._profiles))

    def draw(self, seed: int) -> Workload:
        """The workload of one seed."""
        chosen = self._terms.thinned(self._arrivals, seed)
        jobs = [
            self._terms.job(
                it.job,
                self._profiles[it.kind],
                arrives_ms=round(it.submit_s * 1000),
                lasts_ms=ms(it.duration_s),
                slo=slo,
            )
            for it, slo in zip(chosen, self._terms.slos(len(chosen), seed), strict=True)
        ]
        for number in random.Random(f"async {seed}").sample(range(len(jobs)), round(self._asynchronous * len(jobs))):
            jobs[number] = apart(jobs[number])
        return Workload(self.name, by_arrival(tuple(jobs)), self._terms.pools(), SOURCE)
