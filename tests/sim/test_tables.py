"""The figures of a comparison say what was measured, and nothing that was not.

- A spread is over seeds; policies are compared seed by seed.
- What cannot be judged is null, never zero.
- The fields that machines read are all there, in both accountings.
"""

import json

import msgspec
import pytest

from rollmuxd.cli.sim import table
from rollmuxd.sim import tables
from rollmuxd.sim.outcome import JobOutcome, Outcome, PoolOutcome

HOUR = 3_600_000


def job(name="a", slowdown=1.2, slo=1.5, waited_ms=0, admission="packing", **more):
    return JobOutcome(
        name,
        slo,
        0,
        placed_ms=waited_ms,
        ended_ms=2 * HOUR,
        admission=admission,
        iterations=10.0,
        elapsed_ms=slowdown * 1000,
        solo_ms=1000,
        **more,
    )


def pool(name="train", gpu_type="H800", bought_h=10.0, busy_h=6.0, peak=16, price=1.0):
    return PoolOutcome(name, gpu_type, 8, price, peak, bought_h * HOUR, busy_h * HOUR)


def outcome(policy="rollmux", seed=0, accounting="paper", jobs=None, pools=None, **more):
    return Outcome(
        policy,
        "tiny",
        seed,
        "phase",
        accounting,
        span_ms=10 * HOUR,
        jobs=[job()] if jobs is None else jobs,
        pools=[pool()] if pools is None else pools,
        **more,
    )


def test_a_spread_has_the_sample_standard_deviation_and_none_for_one_seed():
    assert tables.spread([1.0, 2.0, 3.0, 6.0]) == {
        "mean": 3.0,
        "sd": pytest.approx(14**0.5 / 3**0.5),
        "min": 1,
        "max": 6,
    }
    assert tables.spread([0.1]) == {"mean": 0.1, "sd": 0.0, "min": 0.1, "max": 0.1}
    assert tables.spread([0.1] * 3)["sd"] == 0.0


def test_a_quantile_lies_between_its_neighbours():
    assert tables.quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert tables.quantile([0.0, 10.0], 0.95) == pytest.approx(9.5)
    assert tables.quantile([7.0], 0.99) == 7.0


def test_the_row_of_a_policy_has_what_machines_read():
    runs = [outcome(accounting=accounting, seed=seed) for accounting in ("paper", "work") for seed in (0, 1)]
    (row,) = json.loads(json.dumps(tables.summary(runs)))
    assert (row["policy"], row["exact"]) == ("rollmux", None)
    for accounting in ("paper", "work"):
        assert {name: row[accounting][name] for name in READ_BY_MACHINES} == {
            "cost_per_hour": {"mean": 8.0, "sd": 0.0, "min": 8.0, "max": 8.0},
            "slo_attainment": {"mean": 1.0, "sd": 0.0, "min": 1.0, "max": 1.0},
            "peak_gpus": {"H800": 16},
            "total_cost": 80.0,
            "admissions": {"packing": 1.0},
            "pools": {"train": {"utilisation": 0.6, "bubble": 0.4}},
            "slowdown": {"mean": 1.2, "p50": 1.2, "p95": 1.2, "max": 1.2},
            "switches": {"warm": 0.0, "cold": 0.0, "parks": 0.0},
            "decision_ms": None,
            "mean_completion_s": 7200.0,
            "mean_wait_s": 0.0,
        }


READ_BY_MACHINES = (
    *("cost_per_hour", "slo_attainment", "peak_gpus", "total_cost", "admissions", "pools", "slowdown"),
    *("switches", "decision_ms", "mean_completion_s", "mean_wait_s"),
)


def test_policies_keep_the_order_in_which_they_were_asked_for():
    runs = [outcome("solo"), outcome("rollmux"), outcome("solo", accounting="work")]
    assert [row["policy"] for row in tables.summary(runs)] == ["solo", "rollmux"]


def test_an_accounting_that_did_not_run_is_null():
    (row,) = tables.summary([outcome()])
    assert row["work"] is None


def test_nobody_attains_what_nobody_was_promised():
    (row,) = tables.summary([outcome(jobs=[job(slo=None)])])
    assert row["paper"]["slo_attainment"] is None


def test_a_seed_without_promises_does_not_count_as_kept_or_missed():
    runs = [outcome(seed=0, jobs=[job(slo=None)]), outcome(seed=1, jobs=[job(slowdown=1.4), job(slowdown=1.6)])]
    (row,) = tables.summary(runs)
    assert row["paper"]["slo_attainment"] == {"mean": 0.5, "sd": 0.0, "min": 0.5, "max": 0.5}


def test_a_pool_that_nobody_bought_is_neither_used_nor_idle():
    (row,) = tables.summary([outcome(pools=[pool(), pool("rollout", "H20", bought_h=0.0, busy_h=0.0, peak=0)])])
    assert row["paper"]["pools"]["rollout"] == {"utilisation": None, "bubble": None}
    assert row["paper"]["peak_gpus"] == {"H800": 16, "H20": 0}


def test_a_peak_is_the_largest_over_the_seeds():
    (row,) = tables.summary([outcome(seed=seed, pools=[pool(peak=peak)]) for seed, peak in enumerate((8, 24, 16))])
    assert row["paper"]["peak_gpus"] == {"H800": 24}


def test_counts_are_means_over_seeds_also_of_what_only_one_seed_had():
    runs = [
        outcome(seed=0, jobs=[job(warm=3, cold=1, parks=2), job(admission="isolated", warm=1)]),
        outcome(seed=1, jobs=[job(warm=2)]),
    ]
    (row,) = tables.summary(runs)
    assert row["paper"]["admissions"] == {"isolated": 0.5, "packing": 1.0}
    assert row["paper"]["switches"] == {"warm": 3.0, "cold": 0.5, "parks": 1.0}


def test_slowdowns_are_of_all_jobs_of_all_seeds():
    (row,) = tables.summary([outcome(seed=seed, jobs=[job(slowdown=slow)]) for seed, slow in enumerate((1.0, 2.0))])
    assert row["paper"]["slowdown"] == {"mean": 1.5, "p50": 1.5, "p95": pytest.approx(1.95), "max": 2.0}


def test_a_job_without_a_finished_iteration_has_no_slowdown():
    never = JobOutcome("b", 1.5, 0)
    (row,) = tables.summary([outcome(jobs=[never])])
    assert row["paper"]["slowdown"] is None
    assert row["paper"]["never_placed"] == 1.0


def test_decisions_are_told_in_milliseconds():
    (row,) = tables.summary([outcome(decision_us=[1000.0, 2000.0, 3000.0])])
    assert row["paper"]["decision_ms"] == {"p50": 2.0, "p99": pytest.approx(2.98)}


def test_an_optimum_is_exact_only_if_it_was_in_every_run():
    runs = [outcome("optimal", seed=0, exact=True), outcome("optimal", seed=1, exact=False)]
    assert [row["exact"] for row in tables.summary(runs)] == [False]
    assert [row["exact"] for row in tables.summary(runs[:1])] == [True]


def test_costs_are_told_relative_to_solo_seed_by_seed():
    runs = [
        outcome("rollmux", seed=seed, pools=[pool(bought_h=bought)]) for seed, bought in enumerate((10.0, 30.0))
    ] + [outcome("solo", seed=seed, pools=[pool(bought_h=bought)]) for seed, bought in enumerate((20.0, 40.0))]
    row = tables.summary(runs)[0]
    assert row["paper"]["relative_to_solo"]["mean"] == pytest.approx((0.5 + 0.75) / 2)


def test_differences_are_paired_so_that_what_seeds_have_in_common_cancels():
    bought = {"solo": (100.0, 200.0, 300.0), "rollmux": (60.0, 150.0, 270.0)}
    runs = [
        outcome(policy, seed=seed, pools=[pool(bought_h=hours)])
        for policy, of in bought.items()
        for seed, hours in enumerate(of)
    ]
    (row,) = tables.paired(runs, "solo")
    assert (row["policy"], row["against"], row["accounting"], row["seeds"]) == ("rollmux", "solo", "paper", 3)
    assert row["total_cost"] == {
        "mean": pytest.approx(-320), "sd": pytest.approx(80), "min": -400, "max": -240,
        "ci95": pytest.approx(4.3027 * 80 / 3**0.5, rel=1e-4),
    }  # fmt: skip


def test_only_seeds_that_both_ran_are_compared():
    runs = [outcome("solo", seed=0), outcome("solo", seed=1), outcome("rollmux", seed=1), outcome("rollmux", seed=2)]
    assert [row["seeds"] for row in tables.paired(runs, "solo")] == [1]
    assert tables.paired([outcome("solo", seed=0), outcome("rollmux", seed=1)], "solo") == []


def test_two_runs_of_one_seed_have_no_common_mean():
    twice = [outcome(), msgspec.structs.replace(outcome(), workload="other")]
    with pytest.raises(ValueError, match=r"two outcomes of seed 0 in accounting paper \(workloads tiny and other"):
        tables.summary(twice)


def test_the_terminal_shows_both_accountings_and_the_differences(capsys):
    runs = [
        outcome(policy, seed=seed, accounting=accounting, pools=[pool(bought_h=hours + seed)])
        for policy, hours in (("rollmux", 60.0), ("solo", 100.0))
        for accounting in ("paper", "work")
        for seed in (0, 1)
    ]
    table.render(runs)
    shown = capsys.readouterr().out
    assert shown.index("PAPER: A job ends when its trace says") < shown.index("WORK: A job ends when it has done")
    assert "DIFFERENCE FROM rollmux, seed by seed (mean +- sd over 2 seeds; 95 %: where the mean is)" in shown
    assert "16 H800" in shown
    assert "+320" in shown
    assert "+320 to +320" in shown, "the 95 % interval"
    assert "1 - utilisation" in shown


def test_who_was_never_placed_waited_to_the_end_and_is_told_of(capsys):
    """Else a policy that leaves jobs out would look cheap, and quick."""
    left_out = job("b")
    left_out.placed_ms = None
    runs = [outcome(jobs=[job("a", waited_ms=HOUR), left_out])]
    assert runs[0].mean_wait_s == 1.5 * 3600
    table.render(runs)
    assert "rollmux: 1 of 2 jobs were never placed" in capsys.readouterr().out
    table.render([outcome()])
    assert "never placed" not in capsys.readouterr().out


def test_the_mean_of_a_difference_is_told_with_its_confidence():
    """Student's t: 2.776 for five seeds, 12.706 for two; a single seed tells of no other."""
    assert tables.confidence([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2.7764 * (2.5 / 5) ** 0.5, rel=1e-4)
    assert tables.confidence([1.0, 2.0]) == pytest.approx(12.7062 * 0.5, rel=1e-4)
    assert tables.confidence([1.0]) is None
    assert tables.confidence([2.0] * 4) == 0.0
    assert tables.confidence([0.0, 1.0] * 500) == pytest.approx(1.96235 * 0.5002502 / 1000**0.5, rel=1e-4)
    runs = [outcome(policy, seed=seed, pools=[pool(bought_h=hours + seed * (policy == "solo"))])
            for policy, hours in (("rollmux", 60.0), ("solo", 100.0)) for seed in (0, 1, 2)]  # fmt: skip
    (row,) = tables.paired(runs, "rollmux")
    assert row["total_cost"]["mean"] == pytest.approx(8 * 41)
    assert row["total_cost"]["ci95"] == pytest.approx(4.3027 * 8 / 3**0.5, rel=1e-4)


def test_an_optimum_that_was_not_proved_is_called_best_found(capsys):
    table.render([outcome("optimal", exact=False)])
    assert "optimal (best found)" in capsys.readouterr().out


def test_numbers_have_the_digits_that_say_something():
    assert [tables.number(value) for value in (None, 0.0, 0.0123, 1.5, 523.46, 12345.6)] == [
        *("-", "0", "0.012", "1.5", "523.5", "12,346"),
    ]
    assert tables.number(0.00001, signed=True) == "0"
    assert tables.plus_minus({"mean": 557.62, "sd": 14.371}) == "557.6 +- 14.4"
    assert tables.plus_minus({"mean": -0.0012, "sd": 14.371}, signed=True) == "0 +- 14.37"
    assert tables.plus_minus({"mean": 0.25, "sd": 0.0}, scale=100, unit=" pp", signed=True) == "+25 pp"
    assert tables.share(0.99999) == "99.99%"
    assert tables.share(1.0) == "100%"
