"""Jobs are moved about for no good reason, calmly and while everything fails; every promise holds, and is watched."""

import pytest
from msgspec.structs import replace
from simkit import checked, swarm
from simkit.chaos_policy import chaos_policy

from rollmuxd.core import facts as f
from rollmuxd.core.errors import BrokenInvariant
from rollmuxd.core.model import JobStatus, StateStatus
from rollmuxd.core.spec import JobSpec, PhaseSpec, StateSpec, Want
from rollmuxd.core.state import State
from rollmuxd.core.steps import move, reclaim
from rollmuxd.policies.rollmux import RollMux
from rollmuxd.sim.policies import moving
from rollmuxd.sim.workload import Pool, SimJob, Workload


def job(name, rollout=100.0, train=50.0, *, slo=None, iterations=12, series=None, wide=1):
    times = (round(rollout * 1000), round(train * 1000))
    phases = (PhaseSpec("rollout", ("rollout",), times[0]), PhaseSpec("train", ("train",), times[1]))
    states = tuple(StateSpec(pool, ram_mb=100_000, driver="sim", load_ms=2_000, park_ms=1_000) for pool in nodes())
    spec = JobSpec(name, phases, (Want("rollout", wide), Want("train")), states=states, slo=slo)
    took = tuple(tuple(round(1000 * each) for each in step) for step in series) if series else (times,)
    return SimJob(name, "made", 0, 10**9, spec, took, nodes(wide), iterations=iterations)


def nodes(wide=1):
    return {"rollout": wide, "train": 1}


def played(under_test, *jobs, rollout=3, train=3):
    """The facts of a run, and its outcome."""
    pools = (Pool("rollout", "H20", 1.85, nodes=rollout), Pool("train", "H800", 5.28, nodes=train))
    facts = []
    made = checked.run(Workload("made", jobs, pools), under_test, seed=0, accounting="work", hear=facts.append)
    return made, facts


def count(facts, kind):
    return sum(isinstance(fact, kind) for fact in facts)


def test_jobs_that_move_again_and_again_finish_their_work():
    made, facts = played(chaos_policy(), *(job(name) for name in "ABC"))

    assert [each.iterations for each in made.jobs] == [12] * 3
    assert count(facts, f.MoveEnded) == sum(each.moves for each in made.jobs) >= 6
    assert [fact for fact in facts if isinstance(fact, f.OrderIssued) and fact.source is not None]


def test_what_a_move_takes_is_its_jobs_own_time():
    """Two nodes for each pool and nobody else: a move costs parking, and fetching and loading both states."""
    once = chaos_policy(move_interval_ms=10**9)
    made, facts = played(once, job("A", iterations=5), rollout=2, train=2)
    stayed, _ = played(once, job("A", iterations=5), rollout=1, train=1)

    assert count(facts, f.MoveEnded) == 1
    parked, fetched_and_loaded = 1_000, once.move_ms() // 2 + 2_000
    assert made.jobs[0].elapsed_ms - stayed.jobs[0].elapsed_ms == parked + 2 * fetched_and_loaded


@pytest.mark.parametrize("seed", range(12))
def test_moves_in_a_world_where_much_goes_wrong_break_no_promise(seed):
    swarm.run(replace(swarm.draw(seed), policy=swarm.RESTLESS))


def test_a_guarded_job_keeps_a_promise_that_its_plan_would_have_broken():
    """Planned to share a rollout node in turns of 200 s; but B's rollouts take three times as long as it says."""
    jobs = (
        job("A", 100, 20, slo=2.0, iterations=40),
        job("B", 100, 20, slo=2.5, iterations=40, series=((300, 20),)),
    )
    by_credit = moving("by credit", "", lambda _: RollMux(promise="measured"), move_s=10)
    guarded, facts = played(by_credit, *jobs)
    open_, _ = played(chaos_policy(move_interval_ms=10**9), *jobs, rollout=1, train=1)

    assert count(facts, f.GuardChanged) >= 1
    assert guarded.jobs[0].slowdown <= 2.0 < open_.jobs[0].slowdown
    assert guarded.jobs[1].slowdown <= 2.5


# ---- a scheduler that breaks a promise is caught ---------------------------------------------------------------------


def sabotaged(monkeypatch, name, by, where=move):
    monkeypatch.setattr(where, name, by)
    with pytest.raises(BrokenInvariant) as caught:
        played(chaos_policy(), *(job(name) for name in "ABC"))
    return str(caught.value)


def test_dropping_what_was_not_loaded_elsewhere_yet_is_noticed(monkeypatch):
    assert "what_a_job_still_needs_is_not_dropped" in sabotaged(monkeypatch, "is_of_use", lambda *_: False, reclaim)


def first_parked(state, kept):
    """What is parked on the node that the job of a state that is not here has left first."""
    job = state.jobs[kept.job]
    there = [state.states[key] for key in job.states if state.states[key].node in job.left]
    parked = [it for it in there if it.pool == kept.pool and it.status is StateStatus.PARKED]
    return min(parked, key=lambda it: job.left.index(it.node)) if parked and kept.status is StateStatus.GONE else None


def test_loading_what_another_node_had_is_noticed(monkeypatch):
    monkeypatch.setattr(State, "source_of", first_parked)
    with pytest.raises(BrokenInvariant, match="what_is_loaded_is_what_was_left"):
        played(chaos_policy(), job("A", wide=2), rollout=4)


def test_jobs_of_several_nodes_each_move_and_load_what_they_had():
    made, facts = played(chaos_policy(), job("A", wide=2), job("B", wide=2), rollout=5)

    assert [each.iterations for each in made.jobs] == [12] * 2
    assert count(facts, f.MoveEnded) >= 4


def test_moving_in_mid_iteration_is_noticed(monkeypatch):
    said = sabotaged(monkeypatch, "may_begin", lambda c, job, move: job.status is not JobStatus.MOVING)
    assert "a_job_moves_between_two_iterations" in said


def test_leaving_with_something_loaded_is_noticed(monkeypatch):
    assert "nothing_is_in_use_where_a_job_moves_away" in sabotaged(monkeypatch, "is_ready", lambda *_: True)


def test_moving_more_often_than_allowed_is_noticed(monkeypatch):
    said = sabotaged(monkeypatch, "refused", lambda c, move, **_: "" if c.state.jobs[move.job].move is None else "no")
    assert "moves_keep_to_their_limits" in said
