"""Jobs with generated series: noise, spikes and drift as fitted to 23 public training logs.

Arrivals, durations and types are the production trace's. Each job has as many iterations as fit into its duration, all
different, scaled so that their means are its type's. x is the ln of the mean response length relative to the start, T
the number of iterations:

- ``x_t = d t/T + u_t``, ``u_t = phi u_(t-1) + s N(0,1)``, ``d ~ N(d_mean, d_sd)``
- ``rollout_t ~ exp(e x_t + r_t)``, times a spike now and then; r is AR(1) with correlation rho and deviation g
- ``train_t ~ exp(e_train x_t + 0.02 N(0,1))``

s and g are drawn once per job, log-normal around their medians. Qwen3 models (4B and 8B) are multi-turn agents, with
five times the noise. The others are single-turn: short answers, little noise. So it is in the production workloads of
the paper's figure 2.

Responses inside a rollout are drawn (:mod:`.lengths`) up to the type's token limit. They decide after what share of it
80 % are done. They do not decide its time, which is the fit's.

A rollout may start on the GPUs that a tail has left. A tail keeps as many GPUs as its job has rollout nodes (one in
eight, as in the artifact).
"""

import math
import random
from typing import Final, NamedTuple

from msgspec.structs import replace

from rollmuxd.sim.workload import Options
from rollmuxd_evaluation.workloads.lengths import tail_from
from rollmuxd_evaluation.workloads.series import Drawn, Iterated, Series, Step, scaled
from rollmuxd_evaluation.workloads.shapes import Shape

#: models of which the paper's frequent workloads are multi-turn (figure 2), in billions of parameters
MULTI_TURN: Final = (4, 8)
TRAIN_SD: Final = 0.02


class Fit(NamedTuple):
    """One row of the fit; names as in the module's head."""

    phi: float
    s: float
    s_ln_sd: float
    d_mean: float
    d_sd: float
    e: float
    rho: float
    g: float
    g_ln_sd: float
    e_train: float
    #: share of the jobs that have spikes; each step of theirs with a probability, by a factor, drawn in these bounds
    spiky: float = 0.0
    spike_share: tuple[float, float] = (0.02, 0.15)
    spike_factor: tuple[float, float] = (1.3, 2.5)


SINGLE: Final = Fit(0.68, 0.027, 0.5, -0.12, 0.20, 0.33, 0.03, 0.029, 0.5, 0.15)
MULTI: Final = Fit(0.23, 0.147, 0.5, -0.30, 0.90, 0.71, 0.10, 0.15, 0.6, 0.78, spiky=0.35)


class Course(NamedTuple):
    """How one job goes: its steps relative to its means, and x at each."""

    steps: list[Step]
    shifts: list[float]


def course(fit: Fit, count: int, draw: random.Random) -> Course:
    """A job of so many iterations."""
    s = fit.s * math.exp(draw.gauss(0, fit.s_ln_sd))
    g = fit.g * math.exp(draw.gauss(0, fit.g_ln_sd))
    drift = draw.gauss(fit.d_mean, fit.d_sd)
    spikes = draw.uniform(*fit.spike_share) if draw.random() < fit.spiky else 0.0
    low, high = (math.log(bound) for bound in fit.spike_factor)
    u, r = 0.0, draw.gauss(0, g)
    fresh = g * math.sqrt(1 - fit.rho**2)
    done = Course([], [])
    for t in range(count):
        u = fit.phi * u + draw.gauss(0, s)
        x = drift * t / count + u
        r = fit.rho * r + draw.gauss(0, fresh)
        spike = draw.uniform(low, high) if spikes and draw.random() < spikes else 0.0
        done.steps.append((math.exp(fit.e * x + r + spike), math.exp(fit.e_train * x + draw.gauss(0, TRAIN_SD))))
        done.shifts.append(x)
    return done


def limit_of(kind: str) -> int:
    """The token limit of a type: 8192 for ``7B_8k``."""
    return 1024 * int(kind.rpartition("_")[2].removesuffix("k"))


class Generated(Iterated):
    """The production trace's jobs with generated iterations."""

    def __init__(self, name: str, options: Options) -> None:
        super().__init__(name, options)
        for kind, shape in self._profiles.items():
            self._profiles[kind] = replace(shape, min_gpus=shape.nodes[0])

    def _drawn(self, seed: int) -> Drawn:
        draw, responses = random.Random(f"courses {seed}"), random.Random(f"responses {seed}")

        def drawn(shape: Shape, count: int) -> Series:
            went = course(MULTI if shape.model_b in MULTI_TURN else SINGLE, count, draw)
            limit = limit_of(shape.kind)
            tails = tuple(tail_from(limit, x, responses) for x in went.shifts)
            return Series(scaled(went.steps, shape.planned), tails)

        return drawn
