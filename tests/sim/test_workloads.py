"""A workload is what its source says, is the same for the same seed, and refuses what it cannot read.

- The production trace has the published counts, hours and peaks.
- The nine classes keep their ranges, and a draw of them has the paper's hours.
- Equal seeds give equal workloads, in every process; another seed gives another one.
- A malformed row names file, line and column; an option that makes no sense says so.
"""

import itertools
import os
import subprocess
import sys
from collections import Counter

import pytest

from rollmuxd.sim.workload import Options, SimJob, Workload
from rollmuxd.sim.workloads import names, read

HOUR = 3_600_000
#: what a class's phases take, in seconds, as the paper prints it
TABLE_6 = {
    "BL-small": ((50, 100), (50, 100)),
    "BL-medium": ((100, 200), (100, 200)),
    "BL-large": ((200, 300), (200, 300)),
    "RH-small": ((100, 200), (25, 50)),
    "RH-medium": ((200, 400), (50, 100)),
    "RH-large": ((400, 600), (100, 200)),
    "TH-small": ((25, 50), (100, 200)),
    "TH-medium": ((50, 100), (200, 400)),
    "TH-large": ((100, 200), (400, 600)),
}


def peak(workload: Workload, of=lambda job: 1) -> int:
    """The most of something at once, while jobs last as their trace says."""
    changes = [(job.arrives_ms, 1, of(job)) for job in workload.jobs]
    changes += [(job.arrives_ms + job.lasts_ms, 0, -of(job)) for job in workload.jobs]
    most = there = 0
    for _, _, change in sorted(changes):
        there += change
        most = max(most, there)
    return most


def job_of(workload: Workload, kind: str) -> SimJob:
    return next(job for job in workload.jobs if job.kind == kind)


def wants(job: SimJob) -> dict[str, int]:
    return {want.pool: want.nodes for want in job.spec.wants}


# ---- the production trace ----------------------------------------------------------------------------------------


def test_the_production_trace_is_the_published_one():
    workload = read("weave-production").draw(0)
    assert len(workload.jobs) == 200
    assert workload.jobs[0].arrives_ms == 0
    assert max(job.arrives_ms + job.lasts_ms for job in workload.jobs) / HOUR == pytest.approx(370.16, abs=0.005)
    assert sum(job.lasts_ms for job in workload.jobs) / 200 / HOUR == pytest.approx(27.95, abs=0.005)
    assert peak(workload) == 38
    assert Counter(job.kind for job in workload.jobs)["7B_8k"] == 100


def test_dedicated_nodes_would_peak_at_328_gpus_of_each_kind():
    workload = read("weave-production").draw(0)
    assert peak(workload, lambda job: job.footprint["rollout"]) == 41
    assert peak(workload, lambda job: job.footprint["train"]) == 41
    assert peak(workload, lambda job: job.colocated.nodes) == 41


def test_a_type_takes_its_measured_times():
    job = job_of(read("weave-production").draw(0), "14B_8k")
    assert job.planned == (238_600, 197_400)
    assert job.series == (job.planned,)
    assert job.colocated.planned == (182_400, 173_600)
    assert job.solo_ms == 436_000


def test_a_32b_job_shares_one_training_node_in_the_artifact_and_two_in_honesty():
    artifact = job_of(read("weave-production").draw(0), "32B_8k")
    honest = job_of(read("weave-production-honest").draw(0), "32B_8k")
    assert wants(artifact) == {"rollout": 2, "train": 1}
    assert wants(honest) == {"rollout": 2, "train": 2}
    assert artifact.footprint == honest.footprint == {"rollout": 2, "train": 2}
    assert artifact.planned == honest.planned
    assert artifact.colocated.nodes == 2


@pytest.mark.parametrize(
    ("prices", "h20", "h800"),
    [("artifact", 1.76, 5.28), ("table1", 1.85, 5.28), ({"H20": 2.5, "H800": 7.0}, 2.5, 7.0)],
)
def test_pools_cost_what_was_asked(prices, h20, h800):
    pools = read("weave-production", Options(prices=prices)).draw(0).pools
    assert [(pool.name, pool.gpu_type, pool.gpus_per_node, pool.nodes) for pool in pools] == [
        ("rollout", "H20", 8, None),
        ("train", "H800", 8, None),
    ]
    assert [pool.price_per_gpu_hour for pool in pools] == [pytest.approx(h20), pytest.approx(h800)]


def test_an_inventory_and_its_ram_are_as_given():
    pools = read("weave-production", Options(nodes={"rollout": 20, "train": 12}, ram_gb=1000)).draw(0).pools
    assert [(pool.nodes, pool.ram_mb) for pool in pools] == [(20, 1_000_000), (12, 1_000_000)]


def test_states_take_the_ram_of_table_2_and_sizes_between_are_interpolated():
    workload = read("weave-production").draw(0)
    ram = {
        kind: [state.ram_mb for state in job_of(workload, kind).spec.states] for kind in ("7B_8k", "8B_32k", "4B_8k")
    }
    assert ram["7B_8k"] == [275_700, 240_000]
    assert ram["8B_32k"] == [round((275.7 + (445.4 - 275.7) / 7) * 1000), round((240.0 + (456.1 - 240.0) / 7) * 1000)]
    assert ram["4B_8k"] == [round((113.4 + (275.7 - 113.4) / 4) * 1000), round((156.2 + (240.0 - 156.2) / 4) * 1000)]
    assert {state.driver for job in workload.jobs for state in job.spec.states} == {"sim"}


# ---- starts ------------------------------------------------------------------------------------------------------


def test_without_switches_nothing_is_loaded_parked_or_built():
    job = read("weave-production", Options(switch="none")).draw(0).jobs[0]
    assert [(state.load_ms, state.park_ms) for state in job.spec.states] == [(0, 0), (0, 0)]
    assert job.starts == {}
    assert job.spec.side == ()


def test_starts_by_table_are_warm_on_switches_and_cold_once():
    job = job_of(read("weave-production", Options(switch="table")).draw(0), "7B_8k")
    assert [(state.load_ms, state.park_ms) for state in job.spec.states] == [(900, 900), (4100, 4100)]
    assert [(start.cold_ms, start.warm_ms) for start in job.starts.values()] == [(38_800, 900), (32_700, 4100)]
    (init,) = job.spec.side
    assert (init.name, init.pools, init.planned_ms) == ("init", ("rollout", "train"), 38_800)


def test_a_number_is_the_load_of_every_switch_and_nothing_is_built():
    job = read("weave-production", Options(switch=5000)).draw(0).jobs[0]
    assert [(state.load_ms, state.park_ms) for state in job.spec.states] == [(5000, 0), (5000, 0)]
    assert [(start.cold_ms, start.warm_ms) for start in job.starts.values()] == [(0, 5000), (0, 5000)]
    assert job.spec.side == ()


# ---- SLOs and seeds ----------------------------------------------------------------------------------------------


def test_slos_are_drawn_between_the_bounds():
    slos = [job.spec.slo for job in read("weave-production", Options(slo=(1.1, 2.0))).draw(3).jobs]
    assert all(1.1 <= slo <= 2.0 for slo in slos)
    assert 1.5 < sum(slos) / len(slos) < 1.6
    assert all(job.spec.slo is None for job in read("weave-production", Options(slo=None)).draw(3).jobs)


@pytest.mark.parametrize("name", [name for name, _ in names()])
def test_a_seed_gives_one_workload_and_another_seed_another(name):
    first, again = read(name), read(name)
    assert first.draw(1) == again.draw(1)
    assert first.draw(1) != first.draw(2)
    first.draw(1).check()
    assert [job.arrives_ms for job in first.draw(1).jobs] == sorted(job.arrives_ms for job in first.draw(1).jobs)


def test_a_seed_gives_the_same_workload_in_every_process():
    say = (
        "import hashlib; from rollmuxd.sim.workloads import names, read\n"
        "text = repr([read(name).draw(7) for name, _ in names()])\n"
        "print(hashlib.sha256(text.encode()).hexdigest())"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", say],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert said[0] == said[1] != ""


def test_fewer_jobs_are_some_of_them_in_their_order():
    whole, some = read("weave-production").draw(5), read("weave-production", Options(jobs=30)).draw(5)
    assert len(some.jobs) == 30
    places = [[job.name for job in whole.jobs].index(job.name) for job in some.jobs]
    assert places == sorted(places)
    assert places != list(range(30))


# ---- the nine classes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TABLE_6)
def test_a_class_keeps_to_its_row_of_table_6(kind):
    workload = read(kind).draw(0)
    assert {job.kind for job in workload.jobs} == {kind}
    for place, (low, high) in enumerate(TABLE_6[kind]):
        took = [job.planned[place] / 1000 for job in workload.jobs]
        assert low <= min(took) < low + 0.05 * (high - low)
        assert high - 0.05 * (high - low) < max(took) <= high


@pytest.mark.parametrize(("name", "there"), [("BL", 3), ("RH", 3), ("TH", 3), ("mixed", 9)])
def test_a_kind_has_its_classes_about_equally_often(name, there):
    counts = Counter(job.kind for job in read(name).draw(0).jobs)
    assert len(counts) == there
    assert all(kind in TABLE_6 for kind in counts)
    assert all(kind.startswith(name) for kind in counts) or name == "mixed"
    assert min(counts.values()) > 0.5 * 300 / there


@pytest.mark.parametrize("arrivals", ["uniform", "weibull"])
def test_a_draw_has_the_papers_hours(arrivals):
    jobs = read("mixed", Options(more={"arrivals": arrivals})).draw(4).jobs
    assert len(jobs) == 300
    assert 0 <= jobs[0].arrives_ms < jobs[-1].arrives_ms <= 580 * HOUR
    assert sum(job.lasts_ms for job in jobs) / 300 / HOUR == pytest.approx(14.4, abs=0.001)
    assert max(job.lasts_ms for job in jobs) / HOUR == pytest.approx(142.9, abs=0.001)
    assert all(job.colocated is None for job in jobs)


def test_weibull_arrivals_are_burstier_than_uniform_ones():
    def gaps(arrivals: str) -> float:
        come = [
            job.arrives_ms
            for seed in range(3)
            for job in read("mixed", Options(more={"arrivals": arrivals})).draw(seed).jobs
        ]
        between = [b - a for a, b in itertools.pairwise(come) if b >= a]
        mean = sum(between) / len(between)
        return (sum((it - mean) ** 2 for it in between) / len(between)) ** 0.5 / mean

    assert gaps("uniform") < 1.2
    assert gaps("weibull") > 2


# ---- what cannot be ----------------------------------------------------------------------------------------------


def test_an_unknown_workload_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match="there is no workload 'weave-prodution'; did you mean weave-production"):
        read("weave-prodution")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (Options(slo=(2.0, 1.0)), "LO:HI"),
        (Options(slo=(0.9, 2.0)), "slo begins at 0.9"),
        (Options(slo=(float("nan"), 2.0)), "slo begins at nan"),
        (Options(slo=(1.0, float("inf"))), "finite"),
        (Options(ram_gb=0), "ram_gb is 0"),
        (Options(ram_gb=float("nan")), "ram_gb is nan"),
        (Options(prices="artefact"), "did you mean artifact"),
        (Options(prices={"H20": 1.0}), "no price for H800"),
        (Options(prices={"H20": -1.0, "H800": 2.0}), "price of H20 is -1"),
        (Options(prices={"H20": 1.0, "H800": 2.0, "H100": 3.0}), "price is given for 'H100'"),
        (Options(switch="tabel"), "did you mean table"),
        (Options(switch=-1), "switch is -1"),
        (Options(jobs=-1), "jobs is -1"),
        (Options(nodes={"rolout": 3}), "pool 'rolout'"),
        (Options(nodes={"rollout": 0}), "given 0 nodes"),
        (Options(more={"arivals": "uniform"}), "did you mean arrivals"),
        (Options(more={"arrivals": "weibul"}), "did you mean weibull"),
        (Options(more={"model": "big"}), "model is 'big'"),
    ],
)
def test_an_option_that_makes_no_sense_says_which_and_why(options, said):
    with pytest.raises(ValueError, match=said):
        read("mixed", options)
