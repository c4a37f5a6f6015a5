"""Small worlds of a few jobs and hours, drawn by seed: for the presets of faults, and for determinism.

Each seed is another workload (jobs that park at once or lazily, build engines, shed tails, span nodes, share or wait;
on nodes that are bought or of which there are a few), policy and accounting. Hunting for what nobody thought of is
``make swarm``'s.
"""

from functools import cache
from random import Random

from rollmuxd.core.spec import JobSpec, OnLoss, Park, PhaseSpec, StateSpec, Want
from rollmuxd.sim.outcome import Outcome
from rollmuxd.sim.policies import policy_under_test
from rollmuxd.sim.workload import Pool, SimJob, Workload
from simkit import checked
from simkit.chaos_policy import UNPRUNED
from simkit.faults import PRESETS
from simkit.faulty_world import FaultyWorld

POLICIES = (policy_under_test("rollmux"), UNPRUNED, policy_under_test("rollmux-artifact"))
POOLS = ("rollout", "train")


def small(seed: int, jobs: int = 6) -> Workload:
    """A workload of a few jobs and hours, on nodes that are bought or of which there are a few."""
    draw = Random(f"small:{seed}")
    made, at = [], 0
    for number in range(jobs):
        made.append(_job(draw, f"job{number}", at))
        at += draw.choice([0, 60, 1_800, 3_600]) * 1_000
    fixed = draw.random() < 0.5
    pools = (
        Pool("rollout", "H20", 1.85, nodes=3 if fixed else None, ram_mb=1_500_000),
        Pool("train", "H800", 5.28, nodes=2 if fixed else None, ram_mb=1_500_000),
    )
    return Workload(f"small-{seed}", tuple(made), pools)


def _job(draw: Random, name: str, at: int) -> SimJob:
    rollout, train = draw.choice([60, 130, 300, 500]) * 1_000, draw.choice([50, 110, 250]) * 1_000
    tails, gap, move = draw.random() < 0.4, draw.choice([0, 0, 5_000]), draw.choice([0, 5_000, 20_000])
    series: list[tuple[int, ...]] = [
        (round(rollout * draw.uniform(0.5, 1.2)), round(train * draw.uniform(0.8, 1.1))) for _ in range(7)
    ]
    phases = [
        PhaseSpec("rollout", ("rollout",), planned_ms=rollout, min_gpus=1 if tails else 0),
        PhaseSpec("train", ("train",), planned_ms=train, gap_ms=gap),
    ]
    if draw.random() < 0.3:
        phases.insert(1, PhaseSpec("sync", POOLS, planned_ms=10_000))
        series = [(first, 10_000, last) for first, *_, last in series]
    park, width = draw.choice([Park.LAZY, Park.LAZY, Park.AT_RELEASE]), draw.choice([1, 1, 2])
    states = tuple(
        StateSpec(
            pool, gpu_mb=50_000, residual_mb=draw.choice([0, 2_000]), ram_mb=200_000,
            driver=draw.choice(["sim", "other"]), load_ms=move, park_ms=move,
        )
        for pool in POOLS
    )  # fmt: skip
    spec = JobSpec(
        name, tuple(phases), (Want("rollout", nodes=width), Want("train")), park=park,
        side=(PhaseSpec("init", POOLS, planned_ms=60_000),) if draw.random() < 0.4 else (),
        states=states if draw.random() < 0.9 else (),
        # one that parks at once and promises much could be placed nowhere
        slo=draw.choice([None, 1.3, 2.0, 3.0]) if park is Park.LAZY else None,
        on_loss=draw.choice([OnLoss.HOLD, OnLoss.KILL]),
    )  # fmt: skip
    lasts = draw.choice([1, 2, 4]) * 3_600_000
    return SimJob(
        name, "made", at, lasts, spec, tuple(series), {"rollout": width, "train": 1},
        cold_ms={"rollout": 30_000, "train": 20_000},
        tail_from=(0.6,) * 7 if tails else (),
    )  # fmt: skip


@cache
def play(preset: str, seed: int) -> tuple[Outcome, dict[str, int]]:
    """One seed; what came of it, and what went wrong how often. Raises BrokenInvariant with all that is known."""
    accounting = ("work", "paper")[seed % 2]
    under_test = POLICIES[seed // 2 % len(POLICIES)]
    world = checked.make(PRESETS[preset], small(seed), under_test, seed, accounting)
    outcome = world.run()
    return outcome, world.counted if isinstance(world, FaultyWorld) else {}
