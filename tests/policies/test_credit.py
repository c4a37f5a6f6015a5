"""What credit buys, and that it is paid back: a job is at its promised pace again when its credit is at its reserve."""

import random

import pytest

from rollmuxd.core.model import Job, JobStatus
from rollmuxd.core.spec import JobSpec
from rollmuxd.policies.thrift.credit import BANK_MS, FACTORS, Standing, progress_price, standing

HOUR_MS = 3_600_000


@pytest.mark.parametrize("seed", range(3))
def test_a_job_that_may_be_slowed_is_back_at_its_promised_pace_with_its_reserve_left(seed: int) -> None:
    """A thousand histories each: whatever paces plans give it, as long as each keeps the bound of its time."""
    chance = random.Random(seed)
    slowed = 0
    for _ in range(1_000):
        limit, spare = round(10 ** chance.uniform(3, 7)), chance.uniform(-1, 12) * HOUR_MS
        over = int(chance.uniform(0.5, 5) * HOUR_MS)
        for _ in range(chance.randint(1, 20)):
            now = Standing(limit, int(spare), over)
            pace = int(limit * chance.uniform(0.5, now.factor))
            slowed += pace > limit
            lasts = now.lasts_ms(pace)
            passes = chance.uniform(0, 4) * HOUR_MS if lasts is None else min(chance.uniform(0, 4) * HOUR_MS, lasts)
            was, spare = spare, spare + passes * (limit / max(pace, 1) - 1)
            assert spare >= min(0, was) - 1
            if lasts is not None and passes == lasts:
                assert Standing(limit, int(spare) - 1).factor == 1
    assert slowed > 1_000


@pytest.mark.parametrize(("ran_h", "over_h"), [(0, 0.5), (0.4, 0.5), (2, 2), (5, 5), (90, 5)])
def test_a_bound_is_lifted_only_so_far_as_can_be_paid_for_over_the_time_that_the_job_has_run(
    ran_h: float, over_h: float
) -> None:
    """A job that has run for two hours will probably run for two more: credit kept beyond that is never used."""
    job = Job("j1", "team", "ann", JobSpec("a", (), (), slo=1.0), 0, JobStatus.ADMITTED)
    job.progress.elapsed_ms = int(ran_h * HOUR_MS)
    lifted = 0
    for share in (0.02, 0.1, 0.2, 0.4, 0.8, 0.98):
        job.progress.solo_ms = job.progress.elapsed_ms + 100_000 + int(share * over_h * HOUR_MS)
        at = standing(job, limit_ms=100_000, moves_ms=0)
        pays_for = at.lasts_ms(int(100_000 * at.factor))
        assert pays_for is None or pays_for >= 0.99 * over_h * HOUR_MS
        lifted += at.factor > 1
    assert lifted == 4  # by 11 % of that time at least
    job.progress.solo_ms = job.progress.elapsed_ms + 100_000 + int(over_h * HOUR_MS)
    assert standing(job, limit_ms=100_000, moves_ms=0).factor == FACTORS[0]
    job.progress.solo_ms = job.progress.elapsed_ms + 100_000
    assert standing(job, limit_ms=100_000, moves_ms=0).factor == 1


def test_the_reserve_is_the_way_out_and_a_first_turn_there() -> None:
    job = Job("j1", "team", "ann", JobSpec("a", (), (), slo=1.5), 0, JobStatus.ADMITTED)
    job.progress.solo_ms, job.progress.elapsed_ms = 1_000_000, 1_000_000
    assert standing(job, limit_ms=150_000, moves_ms=30_000).spare_ms == 500_000 - 45_000 - 150_000


def test_progress_is_dear_to_a_job_that_has_no_credit_and_worth_nothing_to_one_that_has_much() -> None:
    prices = [progress_price("cost", 8.0, int(share * BANK_MS)) for share in (0, 0.5, 1, 2)]
    assert prices == [4.0, 2.0, pytest.approx(0.008), pytest.approx(0.008)]
    assert progress_price("work", 8.0, None) == progress_price("work", 8.0, 0) == 5.0
