"""A workload is what its source says, is the same for the same seed, and refuses what it cannot read.

- The production trace has the published counts, hours and peaks.
- The nine classes keep their ranges, and a draw of them has the paper's hours.
- Equal seeds give equal workloads, in every process; another seed gives another one.
- Logged and generated iterations have their type's mean.
- A malformed row names file, line and column; an option that makes no sense says so; missing data says how to get it.
"""

import os
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from msgspec.structs import replace
from simkit import checked

from rollmuxd.fabric.topology import CARD
from rollmuxd.fabric.traffic import Training
from rollmuxd.rollout.hardware import gpu
from rollmuxd.rollout.models import model
from rollmuxd.sim.compare import Task
from rollmuxd.sim.executions.engines import course
from rollmuxd.sim.outcome import WORK
from rollmuxd.sim.policies import ROLLMUX
from rollmuxd.sim.workload import Options, SimJob, Workload
from rollmuxd.sim.workloads import read
from rollmuxd.sim.world import World
from rollmuxd_evaluation.workloads import WORKLOADS, across_racks
from rollmuxd_evaluation.workloads.shapes import sync_ms

HOUR = 3_600_000
#: data sets that do not come with the package, where a checkout has them beside it
DATA = Path(__file__).parents[4] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"the data sets that are not shipped are not at {DATA}")
#: workloads that need nothing but the package
SHIPPED = [name for name in WORKLOADS if name != "real-logs"]
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
    [({}, 1.76, 5.28), ({"H20": 1.85}, 1.85, 5.28), ({"H20": 2.5, "H800": 7.0}, 2.5, 7.0)],
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
    assert job.cold_ms == {}
    assert job.spec.side == ()


def test_starts_by_table_are_warm_on_switches_and_cold_once():
    job = job_of(read("weave-production", Options(switch="table")).draw(0), "7B_8k")
    assert [(state.load_ms, state.park_ms) for state in job.spec.states] == [(900, 900), (4100, 4100)]
    assert list(job.cold_ms.values()) == [38_800, 32_700]
    (init,) = job.spec.side
    assert (init.name, init.pools, init.planned_ms) == ("init", ("rollout", "train"), 38_800)


def test_a_number_is_the_load_of_every_switch_and_nothing_is_built():
    job = read("weave-production", Options(switch=5000)).draw(0).jobs[0]
    assert [(state.load_ms, state.park_ms) for state in job.spec.states] == [(5000, 0), (5000, 0)]
    assert job.cold_ms == {}
    assert job.spec.side == ()


def test_handing_on_weights_is_a_phase_on_both_pools_that_training_no_longer_has():
    """Research 1.12: 0.9 s of a 7B job's 112.8 s of training are the paper's way."""
    job = job_of(read("weave-production", Options(sync="table")).draw(0), "7B_8k")
    assert [(phase.name, phase.pools, phase.planned_ms) for phase in job.spec.phases] == [
        ("rollout", ("rollout",), 133_800), ("train", ("train",), 111_900), ("sync", ("rollout", "train"), 900),
    ]  # fmt: skip
    assert job.series == ((133_800, 111_900, 900),)
    assert job.colocated.planned == (159_600, 98_200, 1), "where both are on the same nodes nothing is handed on"


@pytest.mark.parametrize(("place", "trains", "gap"), [("within", 112_800, 0), ("between", 111_900, 900)])
def test_weights_may_travel_within_training_or_while_no_gpu_is_held(place, trains, gap):
    job = job_of(read("weave-production", Options(sync="table", sync_place=place)).draw(0), "7B_8k")
    assert [(phase.name, phase.planned_ms, phase.gap_ms) for phase in job.spec.phases] == [
        ("rollout", 133_800, gap), ("train", trains, 0),
    ]  # fmt: skip
    assert job.series == ((133_800, trains),)
    assert job.colocated.planned == (159_600, 98_200)


#: the paper's table 4: seconds of a flat all-gather and of its two stages, on 8 + 8 and on 16 + 16 GPUs
MEASURED = {
    "flat": {(7, 1): 7.5, (14, 1): 13.8, (32, 1): 30.7, (7, 2): 8.2, (14, 2): 15.2, (32, 2): 33.8},
    "two": {(7, 1): 0.9, (14, 1): 1.7, (32, 1): 3.9, (7, 2): 3.1, (14, 2): 5.8, (32, 2): 12.3},
}


@pytest.mark.parametrize(
    ("how", "size_b", "nodes", "paper_s"),
    [(how, *cell, paper_s) for how, cells in MEASURED.items() for cell, paper_s in cells.items()],
)
def test_computed_times_are_within_8_percent_of_what_the_paper_measured(how, size_b, nodes, paper_s):
    assert sync_ms(how, size_b, nodes) / 1000 == pytest.approx(paper_s, rel=0.08)


def test_an_exchange_by_rails_spares_what_the_paper_loses_between_nodes():
    assert 5 * sync_ms("rails", 7, 2) < sync_ms("two", 7, 2)
    assert sync_ms("rails", 7, 1) == pytest.approx(sync_ms("two", 7, 1), rel=0.01), (
        "on one node there is nothing to spare"
    )


@pytest.mark.parametrize(
    ("kind", "table"),
    # 3B in proportion to 7B, 8B a seventh of the way to 14B; 32B is on two nodes of each pool
    [("3B_8k", 386), ("8B_32k", 1_014), ("14B_8k", 1_700), ("32B_8k", 12_300)],
)
def test_weights_take_as_long_as_models_are_large_and_links_are_many(kind, table):
    assert job_of(read("weave-production-honest", Options(sync="table")).draw(0), kind).planned[2] == table


def test_every_iteration_hands_on_its_weights_whatever_else_it_takes():
    job = job_of(read("generated", Options(sync="table", jobs=20)).draw(0), "7B_8k")
    plain = job_of(read("generated", Options(jobs=20)).draw(0), "7B_8k")
    assert {took[2] for took in job.series} == {900}
    assert [took[0] for took in job.series] == [took[0] for took in plain.series]
    assert [took[1] for took in job.series] == [max(1, took[1] - 900) for took in plain.series]
    assert job.work == plain.work


# ---- SLOs and seeds ----------------------------------------------------------------------------------------------


def test_slos_are_drawn_between_the_bounds():
    slos = [job.spec.slo for job in read("weave-production", Options(slo=(1.1, 2.0))).draw(3).jobs]
    assert all(1.1 <= slo <= 2.0 for slo in slos)
    assert 1.5 < sum(slos) / len(slos) < 1.6
    assert slos != [job.spec.slo for job in read("weave-production", Options(slo=(1.1, 2.0))).draw(4).jobs]
    assert all(job.spec.slo is None for job in read("weave-production", Options(slo=None)).draw(3).jobs)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_seed_gives_one_workload_and_another_seed_another(name):
    first, again = read(name, Options(jobs=8)), read(name, Options(jobs=8))
    assert first.draw(1) == again.draw(1)
    assert first.draw(1) != first.draw(2) or name.startswith(("micro-", "tail-"))
    first.draw(1).check()
    assert [job.arrives_ms for job in first.draw(1).jobs] == sorted(job.arrives_ms for job in first.draw(1).jobs)


def test_a_seed_gives_the_same_workload_in_every_process():
    say = (
        "import hashlib; from rollmuxd.sim.workload import Options; from rollmuxd.sim.workloads import read\n"
        f"text = repr([read(name, Options(jobs=3, switch='table')).draw(7) for name in {SHIPPED}])\n"
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


def test_a_draw_has_the_papers_hours():
    jobs = read("mixed").draw(4).jobs
    assert len(jobs) == 300
    assert 0 <= jobs[0].arrives_ms < jobs[-1].arrives_ms <= 580 * HOUR
    assert sum(job.lasts_ms for job in jobs) / 300 / HOUR == pytest.approx(14.4, abs=0.001)
    assert max(job.lasts_ms for job in jobs) / HOUR == pytest.approx(142.9, abs=0.001)
    assert all(job.colocated is None for job in jobs)


def test_missing_data_says_where_it_looked_and_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.delenv("ROLLMUX_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match=r"rl_steps/runs.csv is not there: neither --data nor"):
        read("real-logs")
    with pytest.raises(FileNotFoundError, match=rf"looked for {tmp_path}/rl_steps/runs.csv.*Apache-2.0"):
        read("real-logs", Options(data=str(tmp_path)))
    monkeypatch.setenv("ROLLMUX_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=f"looked for {tmp_path}/rl_steps/runs.csv"):
        read("real-logs")


# ---- logged and generated iterations -----------------------------------------------------------------------------


def logs(folder: Path, **runs: list[tuple[float, float]]) -> Options:
    """Options that name a folder with these runs, each of its own family. All training time but a second is ``ref``."""
    (folder / "rl_steps").mkdir()
    (folder / "rl_steps" / "runs.csv").write_text("run,source_repo\n" + "".join(f"{run},{run}/code\n" for run in runs))
    for run, steps in runs.items():
        rows = "".join(f"{n},{gen},1,,{train - 1}\n" for n, (gen, train) in enumerate(steps))
        (folder / "rl_steps" / f"{run}.csv").write_text("step,gen_s,train_s,old_logprob_s,ref_s\n" + rows)
    return Options(data=str(folder))


def test_a_logged_run_keeps_its_shape_and_gets_its_types_mean(tmp_path):
    options = logs(tmp_path, one=[(900, 900), (10, 4), (30, 4), (20, 16)])
    job = job_of(read("real-logs", options).draw(0), "7B_8k")
    assert job.series == ((66_900, 56_400), (200_700, 56_400), (133_800, 225_600))
    assert job.planned == (133_800, 112_800)
    assert job.work == round(job.lasts_ms / 246_600)


def test_a_plan_is_the_mean_the_first_ten_steps_or_the_worst_and_the_work_is_the_same(tmp_path):
    options = logs(tmp_path, one=[(1, 1), *[(10, 10)] * 5, *[(20, 20)] * 5, *[(30, 30)] * 10])
    planned, work = {}, set()
    for plan in ("mean", "first10", "max"):
        job = job_of(read("real-logs", Options(data=options.data, more={"plan": plan})).draw(0), "7B_8k")
        planned[plan] = job.planned
        work.add(job.work)
    assert planned == {"mean": (133_800, 112_800), "first10": (89_200, 75_200), "max": (178_400, 150_400)}
    assert len(work) == 1


@needs_data
def test_families_of_logs_weigh_alike():
    workload = read("real-logs", Options(data=str(DATA), slo=None)).draw(0)
    lengths = Counter(len(job.series) for job in workload.jobs)
    assert lengths[194] > 10, "the one run of EasyR1, a seventh of the 200 jobs and not a 23rd"
    for job in workload.jobs[:20]:
        for phase, mean in zip(zip(*job.series, strict=True), job.planned, strict=True):
            assert statistics.fmean(phase) == pytest.approx(mean, rel=1e-4)


@pytest.mark.parametrize(("multi_turn", "low", "high"), [(False, 0.03, 0.06), (True, 0.2, 0.45)])
def test_generated_rollouts_vary_as_real_ones(multi_turn, low, high):
    jobs = [
        job
        for job in read("generated", Options(jobs=60)).draw(0).jobs
        if len(job.series) > 100 and job.kind.startswith(("4B", "8B")) is multi_turn
    ]
    spread = statistics.median(
        statistics.pstdev(gen := [step[0] for step in job.series]) / statistics.fmean(gen) for job in jobs
    )
    assert low < spread < high


def test_generated_iterations_are_as_many_as_fit_and_have_their_types_mean():
    for job in read("generated", Options(jobs=20)).draw(0).jobs:
        assert len(job.series) == len(job.tail_from) == job.work == max(1, round(job.lasts_ms / job.solo_ms))
        for phase, mean in zip(zip(*job.series, strict=True), job.planned, strict=True):
            assert statistics.fmean(phase) == pytest.approx(mean, rel=1e-4)


def test_the_tail_begins_when_80_percent_of_the_responses_are_done():
    jobs = read("generated", Options(jobs=20)).draw(0).jobs
    shares = [share for job in jobs for share in job.tail_from]
    assert all(0 < share <= 1 for share in shares)
    assert 0.5 < statistics.fmean(shares) < 0.75


def test_a_tail_keeps_one_gpu_of_eight():
    workload = read("generated", Options(jobs=60)).draw(0)
    assert {(wants(job)["rollout"], job.spec.phases[0].min_gpus) for job in workload.jobs} == {(1, 1), (2, 2)}
    assert all(job.spec.phases[1].min_gpus == 0 for job in workload.jobs)


# ---- the micro-benchmarks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kinds", "nodes"),
    [
        ("micro-temporal", "AA", (1, 1)),
        ("micro-train", "DDE", (3, 1)),
        ("micro-spatial", "CDD", (2, 2)),
    ],
)
def test_a_micro_benchmark_has_its_jobs_at_once_on_its_nodes(name, kinds, nodes):
    workload = read(name).draw(0)
    workload.check()
    assert "".join(job.kind for job in workload.jobs) == kinds
    assert tuple(pool.nodes for pool in workload.pools) == nodes
    assert all(job.arrives_ms == 0 and job.spec.slo is None for job in workload.jobs)


def test_multi_turn_types_have_the_ratios_of_table_3():
    shapes = {job.kind: job.planned for name in ("micro-train", "micro-spatial") for job in read(name).draw(0).jobs}
    assert shapes["D"][0] / shapes["D"][1] == pytest.approx(2.5, abs=0.1)
    assert shapes["E"][0] / shapes["E"][1] == pytest.approx(6.0, abs=0.001)
    assert shapes["C"] == (267_600, 361_800)


def test_a_tail_case_has_the_measured_times_on_twice_as_many_training_gpus():
    workload = read("tail-7B8k-14B8k").draw(0)
    workload.check()
    assert {pool.name: pool.nodes for pool in workload.pools} == {"rollout": 1, "train": 2}
    assert [(job.kind, job.planned, job.tail_from, job.work) for job in workload.jobs] == [
        ("7B_8k", (126_000, 54_000), (0.42,), 5),
        ("14B_8k", (228_000, 82_000), (0.37,), 5),
    ]
    assert {(wants(job)["rollout"], wants(job)["train"], job.spec.phases[0].min_gpus) for job in workload.jobs} == {
        (1, 2, 1)
    }


@pytest.mark.parametrize(
    ("case", "paper"), [("tail-7B4k", 1.12), ("tail-7B8k", 1.19), ("tail-7B8k-14B8k", 1.06), ("tail-14B8k", 1.28)]
)
def test_releasing_tails_gains_what_the_paper_measured_or_a_little_more(case, paper):
    """The next job has the rest at once when a tail is over; the paper does not say how soon it has it there."""

    def wall(tail):
        workload = read(case, Options(slo=None, switch="table", more={"tail": tail})).draw(0)
        played = World(workload, ROLLMUX, seed=0, accounting=WORK).run()
        return max(job.elapsed_ms for job in played.jobs)

    assert paper - 0.04 <= wall("off") / wall("on") <= paper + 0.05


# ---- what cannot be ----------------------------------------------------------------------------------------------


def test_a_log_without_steps_is_named(tmp_path):
    options = logs(tmp_path, one=[])
    with pytest.raises(ValueError, match=r"one.csv: no step in it tells what rollout and training took"):
        read("real-logs", options)


def test_an_unknown_workload_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match="there is no workload 'weave-prodution'; did you mean weave-production"):
        read("weave-prodution")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (Options(slo=(2.0, 1.0)), "LO:HI"),
        (Options(slo=(0.9, 2.0)), "slo begins at 0.9"),
        (Options(sync="tabel"), "did you mean table"),
        (Options(sync_place="betwen"), "did you mean between"),
        (Options(slo=(float("nan"), 2.0)), "slo begins at nan"),
        (Options(slo=(1.0, float("inf"))), "finite"),
        (Options(ram_gb=0), "ram_gb is 0"),
        (Options(ram_gb=float("nan")), "ram_gb is nan"),
        (Options(prices={"H20": -1.0, "H800": 2.0}), "price of H20 is -1"),
        (Options(prices={"H20": 1.0, "H800": 2.0, "H100": 3.0}), "price is given for 'H100'"),
        (Options(switch="tabel"), "did you mean table"),
        (Options(switch=-1), "switch is -1"),
        (Options(jobs=-1), "jobs is -1"),
        (Options(fillers=-1), "fillers is -1"),
        (Options(fillers=20_000), "fillers is 20000: .* 0 to 10000"),
        (Options(nodes={"rolout": 3}), "pool 'rolout'"),
        (Options(nodes={"rollout": 0}), "given 0 nodes"),
        (Options(more={"modell": "7"}), "did you mean model"),
        (Options(more={"model": "big"}), "model is 'big'"),
    ],
)
def test_an_option_that_makes_no_sense_says_which_and_why(options, said):
    with pytest.raises(ValueError, match=said):
        read("mixed", options)


def test_without_its_tails_a_tail_case_has_the_same_iterations() -> None:
    on, off = (read("tail-7B8k", Options(more={"tail": tail})).draw(3) for tail in ("on", "off"))
    assert [job.series for job in on.jobs] == [job.series for job in off.jobs]
    assert all(job.tail_from and job.spec.phases[0].min_gpus for job in on.jobs)
    assert not any(job.tail_from or job.spec.phases[0].min_gpus for job in off.jobs)


def test_jobs_wider_than_a_rack_take_what_the_models_say() -> None:
    drawn = read("across-racks", Options(sync="rails")).draw(0)
    for kind, (name, _, _, train_s) in {"dense": across_racks.DENSE, "experts": across_racks.EXPERTS}.items():
        job = next(it for it in drawn.jobs if it.name == f"{kind}-1")
        of, batches = model(name), job.inside.batches
        hosts = tuple(range(8 * across_racks.NODES[0]))
        ends = [course(job.inside, number, ((0, hosts),)).ends for number in range(len(batches))]
        assert job.planned[0] == pytest.approx(sum(ends) / len(ends), rel=0.001)
        tokens = sum(sum(batch) + 200 * len(batch) for batch in batches) / len(batches)
        training = Training(1e9 * of.parameters_b, of.layers, 128, tokens, 1e12 * gpu("h800").tflops, active=of.active)
        exposed = 0.0 if of.experts else training.optimizer_steps * training.exposed_s(3 / 4 / CARD)
        assert train_s == pytest.approx(training.compute_s + exposed, rel=0.002)
        assert job.planned[1] == pytest.approx(1000 * train_s, abs=1)
    assert [job.inside.parallelism for job in drawn.jobs] == ["tp8", "ep64", "tp8", "ep64"]


@pytest.mark.parametrize(
    ("jobs", "ahead", "slowdown", "use"),
    [
        (2, 1, 1.0, 0.8),  # 2 x 40 s of training in each 100 s
        (3, 1, 1.2, 1.0),  # 3 x 40 s: a turn takes 120 s
        (2, 0, 1.0, 0.8),  # the second begins 40 s after the first, and stays there
    ],
)
def test_asynchronous_runs_wait_for_each_other_only_where_their_trainer_is_full(jobs, ahead, slowdown, use):
    more = {"jobs": str(jobs), "ahead": str(ahead), "noise": "0", "hours": "3"}
    task = Task("async", Options(slo=None, more=more), "default", "phase", WORK, 0)
    found = checked.perform(task)
    assert all(job.slowdown == pytest.approx(slowdown, abs=0.02) for job in found.jobs)
    (train,) = (pool for pool in found.pools if pool.name == "train")
    assert train.utilisation == pytest.approx(use, abs=0.03)


def test_a_share_of_the_production_jobs_may_be_asynchronous_and_takes_the_same_times():
    plain = read("weave-production", Options(jobs=40)).draw(3)
    half = read("weave-production", Options(jobs=40, more={"async": "0.5"})).draw(3)
    beside = [job for job in half.jobs if job.spec.asynchronous]
    assert len(beside) == 20
    of = {job.name: job for job in plain.jobs}
    assert [job for job in half.jobs if job not in beside] == [
        of[job.name] for job in half.jobs if job.name not in {one.name for one in beside}
    ]
    for job in beside:
        rollout, train = of[job.name].planned
        assert (job.spec.asynchronous.pace_ms, job.batches, job.series) == (rollout, (rollout,), ((train,),))
        assert (job.planned, job.solo_ms) == ((train,), max(rollout, train))
        assert (wants(job), job.footprint) == tuple(
            {"train": nodes["train"]} for nodes in (wants(of[job.name]), of[job.name].footprint)
        )
        assert job.spec.slo == of[job.name].spec.slo


@pytest.mark.parametrize("place", ["phase", "within", "between"])
def test_an_asynchronous_jobs_slot_includes_what_its_weights_take(place):
    options = Options(jobs=4, sync="table", sync_place=place)
    plain = read("weave-production", options).draw(0).jobs
    asynchronous = read("weave-production", replace(options, more={"async": "1"})).draw(0).jobs
    assert [job.planned[0] for job in asynchronous] == [job.solo_ms - job.planned[0] for job in plain]


@pytest.mark.parametrize("given", ["1.5", "-1", "half"])
def test_a_share_is_at_most_all_of_them(given):
    with pytest.raises(ValueError, match=f"async is '{given}': expected a number of at least 0 and at most 1"):
        read("weave-production", Options(more={"async": given}))


def test_where_half_the_production_jobs_are_asynchronous_all_keep_their_slos_on_fewer_training_nodes():
    options = Options(more={"async": "0.5"})
    ours, solo = (
        checked.perform(Task("weave-production", options, policy, "cost", "paper", 0)) for policy in ("rollmux", "solo")
    )
    assert ours.attainment == 1
    (mine, alone) = (next(pool for pool in found.pools if pool.name == "train") for found in (ours, solo))
    assert mine.peak_gpus <= 0.7 * alone.peak_gpus


def test_synchronous_and_asynchronous_jobs_keep_their_slos_phase_by_phase():
    options = Options(jobs=16, nodes={"rollout": 4, "train": 4}, more={"async": "0.5"})
    found = checked.perform(Task("weave-production", options, "default", "phase", WORK, 0))
    assert found.attainment == 1
    assert len(found.jobs) == 16
