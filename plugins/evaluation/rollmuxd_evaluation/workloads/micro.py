"""The paper's micro-benchmarks: a few jobs that come at once and stay, on a fixed inventory.

RollMux (arXiv 2512.11306), table 3 and the evaluation of multiplexing. ``micro-temporal`` is two jobs of type A on 8
H20 + 8 H800. ``micro-train`` is two D and an E on 24 + 8, ``micro-spatial`` a C and two D on 16 + 16. Tail migration
has two jobs on 8 H20 + 16 H800.

The paper has no phase times for its types A to E. Here they are the artifact's profiles of the same model and length:

- A (7B, 8K) is 7B_8k, B (14B, 8K) is 14B_8k, and C (32B, 8K, two nodes of each) is 32B_8k. D (8B, 8K per turn) is
  8B_8k: its ratio of rollout to train, 2.57, is the 2.5 that the paper gives.
- E (14B, 16K per turn, batch 64) has no profile. Its train is that of 8B_16k times 14/8 for the model (14B_8k against
  7B_8k: 1.75) and 64/256 for the batch. Its rollout is six times that, the ratio that the paper gives. Co-located, each
  phase is in the same proportion to it as with 8B_16k.

In ``micro-spatial`` the C comes first and owns its nodes. If groups share training nodes whole, a D that joins it
trains on both, in half the time (the paper adapts its data parallelism).

No job has an SLO: the paper does not speak of any here, and ``slo`` is ignored. ``hours`` is how long the jobs of
multiplexing last (24). Given nodes replace the inventory.

The tail cases have the times of the authors' own scheduler logs of that figure (the artifact's repository,
``eval/migration_ablation``, October 2025). Runs without migration give the means of a phase. Runs with it give the
share of a rollout after which seven of eight GPUs were released (at most 16 of 128 responses unfinished). Each job does
five iterations, as there. The authors' wall times begin when both jobs have been started, so no start is counted.
``tail=off`` releases no tail: the same iterations, to compare with.
"""

from typing import Final

import msgspec

from rollmuxd.sim.workload import Durations, Options, SimJob, Workload
from rollmuxd_evaluation.workloads import production
from rollmuxd_evaluation.workloads.shapes import ROLLOUT, TRAIN, Shape, Terms, inside, ms

#: jobs by type, and nodes of rollout and train
MULTIPLEXING: Final = {
    "micro-temporal": ("AA", (1, 1)),
    "micro-train": ("DDE", (3, 1)),
    "micro-spatial": ("CDD", (2, 2)),
}
#: jobs by model and token limit, on one node of rollout and two of train
TAILS: Final = {
    "tail-7B4k": ("7B_4k", "7B_4k"),
    "tail-7B8k": ("7B_8k", "7B_8k"),
    "tail-7B8k-14B8k": ("7B_8k", "14B_8k"),
    "tail-14B8k": ("14B_8k", "14B_8k"),
}
#: of each: billions of parameters, seconds of rollout and of train, and where in the rollout its tail begins
MEASURED: Final = {
    "7B_4k": (7, 76.0, 42.0, 0.54),
    "7B_8k": (7, 126.0, 54.0, 0.42),
    "14B_8k": (14, 228.0, 82.0, 0.37),
}
#: of the tail cases
ITERATIONS: Final = 5
E_ROLLOUT_TO_TRAIN: Final = 6
#: of table 3, for the inside of rollouts: responses of a step, tokens at most, and an engine's own time
BATCH, LIMIT = 256, 8192
HOST_BOUND_MS: Final = 8.0
#: GPUs that a tail keeps: those logs' one GPU had 16 responses at most, and a fifth of 256 is three times as many
TAIL_GPUS: Final = round(BATCH / 5 / 16)
#: responses of a step in the logs of the tail cases
TAIL_BATCH: Final = 128
E_BATCH: Final = 64 / 256


def types() -> dict[str, Shape]:
    """Table 3, with times as the module's head says.

    With engines of 8 ms a step the rollout of A takes 130 s, and 134 s in its profile.
    """
    known = production.profiles(honest=True)
    named = {"A": "7B_8k", "B": "14B_8k", "C": "32B_8k", "D": "8B_8k"}
    made = {}
    for letter, kind in named.items():
        of = inside(known[kind].model_b, LIMIT, BATCH, 1, HOST_BOUND_MS)
        made[letter] = msgspec.structs.replace(known[kind], kind=letter, inside=of)
    like, alone = known["8B_16k"].planned, known["8B_16k"].colocated or (0, 0)
    train = like[1] * (14 / 8) * E_BATCH
    times: Durations = (round(E_ROLLOUT_TO_TRAIN * train), round(train))
    colocated: Durations = (round(times[0] * alone[0] / like[0]), round(times[1] * alone[1] / like[1]))
    return {**made, "E": Shape("E", 14, times, colocated=colocated)}


class Micro:
    """What the two kinds of cases have in common: all jobs are there from the start, on a few nodes."""

    def __init__(self, name: str, options: Options, tail: tuple[str, str], *more: str) -> None:
        self.name = name
        self._terms = Terms(options, ("tail", *more))
        self._released = self._terms.choice("tail", tail) == "on"

    def _workload(self, jobs: tuple[SimJob, ...], nodes: tuple[int, int]) -> Workload:
        return Workload(self.name, jobs, self._terms.pools({ROLLOUT: nodes[0], TRAIN: nodes[1]}))


class Multiplexing(Micro):
    """Jobs of table 3. Nothing is drawn: every seed gives the same."""

    def __init__(self, name: str, options: Options) -> None:
        # with fidelity `engine`: where a tail begins is known only inside the rollout
        super().__init__(name, options, ("off", "on"), "hours")
        self._lasts_ms = ms(3600 * self._terms.amount("hours", 24.0, 0.01))

    def draw(self, seed: int) -> Workload:
        """The workload."""
        letters, nodes = MULTIPLEXING[self.name]
        shapes = types()
        if self._released:
            shapes = {letter: msgspec.structs.replace(it, min_gpus=TAIL_GPUS) for letter, it in shapes.items()}
        chosen = self._terms.thinned([*enumerate(letters, 1)], seed)
        jobs = tuple(
            self._terms.job(f"{letter}-{number}", shapes[letter], arrives_ms=0, lasts_ms=self._lasts_ms, slo=None)
            for number, letter in chosen
        )
        return self._workload(jobs, nodes)


class Tails(Micro):
    """Two jobs whose rollouts have tails. Nothing is drawn: every seed gives the same."""

    def __init__(self, name: str, options: Options) -> None:
        super().__init__(name, options, ("on", "off"))

    def draw(self, seed: int) -> Workload:
        """The workload."""
        chosen = self._terms.thinned([*enumerate(TAILS[self.name], 1)], seed)
        jobs = tuple(self._with_tail(number, kind) for number, kind in chosen)
        return self._workload(jobs, (1, 2))

    def _with_tail(self, number: int, kind: str) -> SimJob:
        size_b, rollout_s, train_s, tail_from = MEASURED[kind]
        times = (ms(rollout_s), ms(train_s))
        of = inside(size_b, 1024 * int(kind.partition("_")[2].removesuffix("k")), TAIL_BATCH, 1, HOST_BOUND_MS)
        keep = 1 if self._released else 0
        shape = Shape(kind, size_b, times, nodes=(1, 2), footprint=(1, 2), min_gpus=keep, inside=of)
        job = self._terms.job(
            f"{kind}-{number}",
            shape,
            arrives_ms=0,
            lasts_ms=ITERATIONS * sum(times),
            slo=None,
            tail_from=(tail_from,) if self._released else (),
            iterations=ITERATIONS,
        )
        return msgspec.structs.replace(job, spec=msgspec.structs.replace(job.spec, side=()))
