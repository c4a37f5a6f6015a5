"""A job that was promised nothing, or is ahead, yields to one that is short of its promise, played phase by phase."""

import pytest
from simkit import checked

from rollmuxd.core.spec import JobSpec, PhaseSpec, StateSpec, Want
from rollmuxd.sim.outcome import JobOutcome
from rollmuxd.sim.policies import policy_under_test
from rollmuxd.sim.workload import Pool, SimJob, Workload

HOUR_MS = 3_600_000
PAIR = (Pool("rollout", "H20", 1.85, nodes=1), Pool("train", "H800", 5.28, nodes=1))


def job(name: str, states: tuple[int, int], takes: float, iterations: int, slo: float | None = None) -> SimJob:
    """``states``: rollout and train, ms, as it states them; ``takes``: how many times as long they really are."""
    phases = (PhaseSpec("rollout", ("rollout",), states[0]), PhaseSpec("train", ("train",), states[1]))
    kept = tuple(StateSpec(pool, ram_mb=1_000, driver="sim") for pool in ("rollout", "train"))
    spec = JobSpec(name, phases, (Want("rollout"), Want("train")), states=kept, slo=slo)
    took = (round(states[0] * takes), round(states[1] * takes))
    return SimJob(name, "made", 0, HOUR_MS, spec, (took,), {"rollout": 1, "train": 1}, iterations=iterations)


@pytest.mark.parametrize("longer", [1.0, 1.2, 1.5])
def test_a_promise_is_kept_beside_a_job_without_one_whose_phases_take_longer_than_stated(longer: float) -> None:
    """The pair of which the promised job was at 1.65 of 1.5, and the other at 1.00: now both are slowed."""
    free, promised = job("free", (4_400, 3_100), longer, 200), job("promised", (1_750, 3_330), 1, 150, slo=1.5)
    outcome = checked.run(
        Workload("pair", (free, promised), PAIR), policy_under_test("default"), seed=0, accounting="work"
    )
    made: dict[str, JobOutcome] = {it.name: it for it in outcome.jobs}
    assert made["promised"].slowdown is not None
    assert made["free"].slowdown is not None
    assert made["promised"].slowdown <= 1.5
    # and what the promise leaves is not thrown away: the promised job has no more than it was promised
    assert made["promised"].slowdown > 1.35
    assert made["free"].slowdown < 3


@pytest.mark.parametrize("slo", [1.2, 1.3])
def test_a_promised_job_does_not_wait_until_a_job_without_a_promise_ends(slo: float) -> None:
    """By turns an iteration takes 7.5 s, and 6.1 or 6.6 s are promised: the other job yields."""
    free, promised = job("free", (4_400, 3_100), 1, 200), job("promised", (1_750, 3_330), 1, 150, slo=slo)
    outcome = checked.run(
        Workload("pair", (free, promised), PAIR), policy_under_test("default"), seed=0, accounting="work"
    )
    made: dict[str, JobOutcome] = {it.name: it for it in outcome.jobs}
    assert made["promised"].placed_ms == 0
    assert made["promised"].kept
    assert (made["free"].slowdown or 9) < 1.5


@pytest.mark.parametrize(("states", "longer"), [((2_000, 2_000), 5), ((1_000, 1_000), 3), ((200, 200), 7.5)])
def test_a_promise_is_kept_beside_a_job_that_understated_its_times_and_is_ahead_of_its_own(
    states: tuple[int, int], longer: float
) -> None:
    """The other was at 1.0, and the promised job at 3.0 to 6.4: it waited for each of the long phases."""
    long, short = job("long", states, longer, 240, slo=2), job("short", (min(1_000, *states),) * 2, 1, 200, slo=2)
    outcome = checked.run(
        Workload("pair", (long, short), PAIR), policy_under_test("default"), seed=0, accounting="work"
    )
    made: dict[str, JobOutcome] = {it.name: it for it in outcome.jobs}
    assert made["long"].kept
    assert (made["short"].slowdown or 9) < 2.02
