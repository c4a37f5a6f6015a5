"""A workload on other GPUs: rollouts are played there, training goes by arithmetic, and all else stays."""

import pytest

from rollmuxd.sim import compare
from rollmuxd.sim.executions.engines import course
from rollmuxd.sim.workload import Options

ALL = ((0, tuple(range(8))),)


def drawn(**options):
    tasks = compare.tasks("weave-production", Options(slo=None, jobs=40, **options), ["rollmux"], "cost", [0])
    return compare.draw(tasks[0])


def test_another_type_for_training_changes_training_alone_and_its_price():
    own = drawn()
    other = drawn(gpus={"train": "H20"}, prices={"H20": 2.0, "H800": 5.0})
    for before, after in zip(own.jobs, other.jobs, strict=True):
        assert after.planned[0] == before.planned[0]
        assert after.planned[1] == pytest.approx(before.planned[1] * 989.5 / 148, abs=1)
        assert [each[1] for each in after.series] == [pytest.approx(after.planned[1], abs=1)]
        assert after.inside == before.inside
    assert [(pool.gpu_type, pool.price_per_gpu_hour) for pool in other.pools] == [("H20", 2.0), ("H20", 2.0)]


def test_a_rollout_is_played_on_the_other_type_with_the_jobs_own_lengths():
    own, other = drawn(), drawn(gpus={"rollout": "H200"}, prices={"H20": 2.0, "H800": 5.0, "H200": 4.0})
    known = 0
    for before, after in zip(own.jobs, other.jobs, strict=True):
        assert after.planned[1] == before.planned[1]
        if before.inside is None:
            continue
        known += 1
        took = [course(it, 0, ALL).ends - it.fixed_ms for it in (after.inside, before.inside)]
        assert after.inside.gpu == "h200"
        assert after.planned[0] / before.planned[0] == pytest.approx(took[0] / took[1], rel=1e-3)
    assert known > 10
    assert other.pools[0].price_per_gpu_hour == 4.0


def test_colocated_jobs_change_with_the_pool_that_they_are_on():
    own, other = drawn(), drawn(gpus={"train": "H200"})
    for before, after in zip(own.jobs, other.jobs, strict=True):
        assert after.colocated.planned[1] == before.colocated.planned[1]  # the same arithmetic
        assert after.colocated.planned[0] < before.colocated.planned[0]  # more bandwidth


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        ({"rolout": "H200"}, "--gpu rolout=H200: there is no pool rolout .there are rollout, train"),
        ({"train": "B900"}, "no figures are known for GPU 'B900'; known are h20"),
    ],
)
def test_what_is_not_known_is_refused(gpus, said):
    with pytest.raises(ValueError, match=said):
        drawn(gpus=gpus)
