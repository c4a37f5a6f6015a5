"""Iterations are found in a daemon's facts: which phase is which, of which run, and from the middle of a journal."""

import pytest

from rollmuxd.core import facts as f
from rollmuxd.core.ids import Fence
from rollmuxd.core.spec import JobSpec, PhaseSpec
from rollmuxd.sim.observed import ITERATIONS, as_registered, fact_of, observed
from rollmuxd.sim.training_logs import Step


def registered(job, cycle, run=1, at=0):
    phases = tuple(PhaseSpec(phase, tuple(pools)) for phase, pools in cycle.items())
    return f.JobRegistered(at, job, "team", "someone", run, JobSpec(f"name-{job}", phases, ()))


def iterations(job, cycle, count, run=1, at=1000):
    """Facts of so many iterations and the beginning of one more; a phase takes as many seconds as its value."""
    found, number = [], 0
    for iteration in range(count + 1):
        for first, (phase, seconds) in enumerate(cycle.items()):
            number += 1
            slot = f"{job}-{run}-{number}"
            found.append(f.SlotQueued(at, slot, job, run, "e1", phase, slot, iteration=not first))
            if iteration == count:
                break
            found.append(f.SlotGranted(at, slot, (1, number)))
            at += 1000 * seconds
            found.append(f.SlotReleased(at, slot))
    return found


SPLIT = {"rollout": ["rollout"], "train": ["train"], "sync": ["rollout", "train"]}


def test_each_phase_in_its_pool_and_one_over_both():
    told = observed([registered("j1", SPLIT), *iterations("j1", {"rollout": 5, "train": 3, "sync": 1}, 4)])
    assert told["name-j1"].steps == [Step(5, 3, 1, 0)] * 4
    assert told["name-j1"].pool == ""


def test_both_phases_on_the_gpus_that_it_trains_on_are_told_apart_by_their_names():
    told = observed(
        [registered("j1", {"rollout": ["train"], "train": ["train"]}), *iterations("j1", {"rollout": 5, "train": 3}, 4)]
    )
    assert told["name-j1"].steps == [Step(5, 3, 0, 0)] * 4
    assert told["name-j1"].pool == "train"


def test_names_of_ones_own_are_told_apart_by_the_pools():
    told = observed(
        [registered("j1", {"gen": ["big"], "step": ["train"]}), *iterations("j1", {"gen": 5, "step": 3}, 4)]
    )
    assert told["name-j1"].steps == [Step(5, 3, 0, 0)] * 4


def test_the_last_run_that_did_enough_counts_and_of_it_what_it_did_last():
    cycle = {"rollout": ["rollout"], "train": ["train"]}
    first = [registered("j1", cycle), *iterations("j1", {"rollout": 9, "train": 9}, 5)]
    second = [
        registered("j1", cycle, 2, at=10**6),
        *iterations("j1", {"rollout": 5, "train": 3}, ITERATIONS + 7, 2, 10**6),
    ]
    third = [registered("j1", cycle, 3, at=10**8), *iterations("j1", {"rollout": 1, "train": 1}, 2, 3, 10**8)]
    (seen,) = observed(first + second + third).values()
    assert seen.steps == [Step(5, 3, 0, 0)] * ITERATIONS


@pytest.mark.parametrize("lost", range(4))
def test_from_the_middle_of_a_journal_as_from_its_beginning_but_for_the_first_iteration(lost):
    known = [("j1", "name-j1", 1, SPLIT), ("j2", "never heard of", 1, SPLIT)]
    rest = iterations("j1", {"rollout": 5, "train": 3, "sync": 1}, 5)[lost:]
    assert observed(rest) == {}
    (seen,) = observed(as_registered(rest, known)).values()
    assert seen.steps == [Step(5, 3, 1, 0)] * len(seen.steps)
    assert len(seen.steps) == (5 if lost == 0 else 4)


def test_a_registration_that_is_told_is_not_told_twice():
    told = [registered("j1", SPLIT), *iterations("j1", {"rollout": 5, "train": 3, "sync": 1}, 4)]
    assert as_registered(told, [("j1", "name-j1", 1, SPLIT)]) == told


def test_who_began_a_run_last_is_the_last():
    times = {"rollout": 5, "train": 3, "sync": 1}
    one = [registered("j1", SPLIT), *iterations("j1", times, 4)]
    other = [registered("j2", SPLIT), *iterations("j2", times, 4)]
    again = [registered("j1", SPLIT, 2), *iterations("j1", times, 4, 2)]
    assert list(observed(one + other)) == ["name-j1", "name-j2"]
    assert list(observed(one + other + again)) == ["name-j2", "name-j1"]


def test_facts_are_read_as_the_api_has_them():
    shown = {"seq": 17, "at": 30, "fact": "slot_granted", "slot": "s1", "fence": [1, 2]}
    assert fact_of(shown) == f.SlotGranted(30, "s1", Fence(1, 2))
    with pytest.raises(ValueError, match="slot_bought"):
        fact_of({"fact": "slot_bought", "at": 1})
