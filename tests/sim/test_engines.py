"""Fidelity ``engine``: rollouts are requests in replicas, and a tail moves them."""

import subprocess
import sys

import pytest
from simkit import checked
from simkit.chaos_policy import UNPRUNED

from rollmuxd.core import facts as f
from rollmuxd.core.spec import JobSpec, PhaseSpec, Want
from rollmuxd.sim import compare
from rollmuxd.sim.execution import Begun
from rollmuxd.sim.executions.engines import Engines, Rollout, course
from rollmuxd.sim.inside import Inside, drawn, hard_math
from rollmuxd.sim.workload import Options, Pool, SimJob, Workload

#: two long responses, and 14 short ones; 8 replicas of one GPU get two each
FEW = Inside("qwen2.5-7b", "h20", 1, ((8000, *[500] * 7, 6000, *[500] * 7),))
ALL = tuple(range(8))


def job(name, inside=FEW, iterations=2, min_gpus=1, train=50_000):
    phases = (
        PhaseSpec("rollout", ("rollout",), planned_ms=60_000, min_gpus=min_gpus),
        PhaseSpec("train", ("train",), planned_ms=train),
    )
    spec = JobSpec(name, phases, (Want("rollout"), Want("train")))
    nodes = {"rollout": 1, "train": 1}
    return SimJob(name, "made", 0, 1, spec, ((60_000, train),), nodes, iterations=iterations, inside=inside)


def run(*jobs):
    found = []
    pools = (Pool("rollout", "H20", 1.85, nodes=1), Pool("train", "H800", 5.28, nodes=1))
    outcome = checked.run(
        Workload("made", jobs, pools), UNPRUNED, seed=0, accounting="work", hear=found.append,
        executions=Engines(),
    )  # fmt: skip
    return outcome, found


def test_a_rollout_takes_as_long_as_its_longest_response_and_a_tail_begins_at_four_fifths():
    alone = course(Inside("qwen2.5-7b", "h20", 1, ((8000,),)), 0, ((0, ALL),))
    whole = course(FEW, 0, ((0, ALL),))
    assert whole.ends == pytest.approx(alone.ends, rel=0.02)
    assert whole.tail == pytest.approx(whole.ends / 16, rel=0.15)
    assert course(FEW, 0, ((0, (0, 1)),)).ends > whole.ends


def test_what_is_paid_beside_the_requests_is_paid_once():
    paid = Inside(FEW.model, FEW.gpu, FEW.tp, FEW.batches, fixed_ms=7000)
    assert course(paid, 0, ((0, ALL),)).ends == course(FEW, 0, ((0, ALL),)).ends + 7000
    assert course(paid, 0, ((0, ALL), (12_000, (0,)))).ends == course(FEW, 0, ((0, ALL), (5000, (0,)))).ends + 7000


def test_a_tail_that_moves_ends_a_little_later_and_loses_no_response():
    whole = course(FEW, 0, ((0, ALL),))
    moved = course(FEW, 0, ((0, ALL), (whole.tail, (1,))))
    assert whole.ends < moved.ends < 1.3 * whole.ends
    assert moved.moved == 2
    back = course(FEW, 0, ((0, ALL), (whole.tail, (1,)), (whole.tail + 5000, ALL)))
    assert whole.ends <= back.ends <= 1.3 * whole.ends


def test_a_rollout_alone_is_played_as_computed_and_the_train_by_its_duration():
    outcome, facts = run(job("X"))
    took = course(FEW, 0, ((0, ALL),)).ends
    assert [fact.at for fact in facts if isinstance(fact, f.SlotReleased)] == [
        took, took + 50_000, 2 * took + 50_000, 2 * took + 100_000
    ]  # fmt: skip
    assert outcome.jobs[0].slowdown == 1


def test_a_job_that_waits_gets_the_gpus_of_a_tail():
    tails, facts = run(job("X", train=5000, iterations=4), job("Y", train=5000, iterations=4))
    assert any(isinstance(fact, f.SlotResized) for fact in facts)
    whole, facts = run(job("X", train=5000, iterations=4, min_gpus=0), job("Y", train=5000, iterations=4, min_gpus=0))
    assert not any(isinstance(fact, f.SlotResized) for fact in facts)
    assert whole.span_ms > 1.2 * tails.span_ms


def test_a_job_on_more_nodes_than_it_wants_is_compared_with_those_that_it_wants():
    begun = Begun(job("X"), job("X").spec.phases[0], 0, 0, tuple(f"g{i}" for i in range(16)), 16, 2)
    rollout = Rollout(begun, FEW, 0)
    assert rollout.solo_ms == course(FEW, 0, ((0, ALL),)).ends
    assert rollout.ends_ms <= rollout.solo_ms


def test_jobs_without_an_inside_go_by_their_durations():
    _, facts = run(job("X", inside=None))
    assert [fact.at for fact in facts if isinstance(fact, f.SlotReleased)] == [60_000, 110_000, 170_000, 220_000]


def test_lengths_are_the_same_for_the_same_seed_and_within_the_limit():
    assert hard_math(4096, 100, "1") == hard_math(4096, 100, "1") != hard_math(4096, 100, "2")
    assert 1 <= min(hard_math(4096, 500, "1")) <= max(hard_math(4096, 500, "1")) <= 4096
    assert len(set(drawn("qwen2.5-7b", "h20", 1, 4096, 64).batches)) == 8


def test_the_papers_tail_case_gains_and_a_second_run_gives_the_same_bytes():
    def outcome(tail):
        options = Options(slo=None, more={"tail": tail})
        (task,) = (
            it for it in compare.tasks("tail-7B8k", options, ["rollmux"], "engine", [0]) if it.accounting == "work"
        )
        return compare.perform(task)

    kept, released = outcome("off"), outcome("on")
    assert 1.05 < kept.span_ms / released.span_ms < 1.30
    assert released.fidelity == "engine"
    assert outcome("on").facts_digest == released.facts_digest


def test_the_other_fidelities_need_no_numpy():
    program = (
        "import sys; sys.modules['numpy'] = None\n"
        "from rollmuxd.sim import compare\n"
        "from rollmuxd.sim.workload import Options\n"
        "for fidelity in ('cost', 'phase'):\n"
        "    tasks = compare.tasks('micro-temporal', Options(more={'hours': '1'}), ['rollmux'], fidelity, [0])\n"
        "    assert compare.perform(tasks[0]).facts\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
