"""Jobs that are wider than a rack, for fidelity ``network``: the paper's own jobs have one or two hosts each.

No trace of such jobs is public, so these are made, and nothing of them is measured: two jobs of Qwen2.5-72B and two of
Qwen3-235B-A22B. Each generates on eight H20 hosts (two racks), and trains on sixteen H800 hosts (four racks). They come
at once and do ``iterations`` each (20).

- A step has 2,048 responses of Weibull lengths, 8,192 tokens at most (:mod:`rollmuxd.sim.inside`).
- Dense jobs train four ranks of a rack each, whose gradients go from rack to rack. Their rollouts stay within hosts.
- Mixtures of experts generate with experts over 64 GPUs; ``--set experts=afd``, ``ep32`` or ``tp8`` gives another way.
  Their training is not modelled, and takes its duration.
- Times are computed: training at 0.4 of the peaks (:class:`rollmuxd.fabric.traffic.Training`, on a full fat tree),
  rollouts by :func:`rollmuxd.sim.executions.engines.course`. They are written down here, since only those need numpy.
"""

from functools import cache
from typing import Final, cast

from msgspec.structs import replace

from rollmuxd.fabric.parallelism import Parallelism
from rollmuxd.sim.inside import Inside, drawn
from rollmuxd.sim.workload import Options, Workload
from rollmuxd_evaluation.workloads.shapes import Shape, Terms, ms, sync_ms

RESPONSES: Final = 2048
LIMIT: Final = 8192
NODES: Final = (8, 16)
#: model, billions of parameters, seconds of rollout and of training without new weights
DENSE: Final = ("qwen2.5-72b", 72.0, 313.8, 68.2)
EXPERTS: Final = ("qwen3-235b-a22b", 235.0, 227.1, 20.5)
ITERATIONS: Final = 20.0
WAYS: Final = ("ep64", "ep32", "afd", "tp8")


@cache
def _inside(model: str, way: Parallelism) -> Inside:
    return replace(drawn(model, "h20", 8, LIMIT, RESPONSES), parallelism=way)


class AcrossRacks:
    """Two dense jobs and two mixtures of experts. Nothing is drawn: every seed gives the same."""

    def __init__(self, name: str, options: Options) -> None:
        self.name = name
        self._terms = Terms(options, ("experts", "iterations"))
        self._way = cast(Parallelism, self._terms.choice("experts", WAYS))
        self._iterations = round(self._terms.amount("iterations", ITERATIONS, 1))

    def draw(self, seed: int) -> Workload:
        """The workload."""
        shapes = {"dense": self._shape(*DENSE, "tp8"), "experts": self._shape(*EXPERTS, self._way)}
        chosen = self._terms.thinned([(kind, number) for number in (1, 2) for kind in shapes], seed)
        jobs = tuple(
            self._terms.job(
                f"{kind}-{number}", shapes[kind], arrives_ms=0, slo=slo,
                lasts_ms=self._iterations * sum(shapes[kind].planned), iterations=self._iterations,
            )
            for (kind, number), slo in zip(chosen, self._terms.slos(len(chosen), seed), strict=True)
        )  # fmt: skip
        return Workload(self.name, jobs, self._terms.pools())

    def _shape(self, model: str, size_b: float, rollout_s: float, train_s: float, way: Parallelism) -> Shape:
        inside = _inside(model, way)
        # as in the other workloads new weights are within training, by the paper's table, unless --sync says how
        train_ms = ms(train_s) + sync_ms("table", size_b, NODES[1])
        return Shape(model, size_b, (ms(rollout_s), train_ms), NODES, NODES, inside=inside)
