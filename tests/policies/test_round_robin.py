"""Round robin's optimality (RollMux section 4.3, theorem 1): where it holds, and where it does not.

The theorem: in a group that is not over-saturated, round robin uses both pools most. Its proof repeats one job, on one
rollout node and one train node, with two phases. An order here is any cyclic sequence of turns in which each job goes
round at least once; its period is that of the certificate.
"""

import random
from collections.abc import Sequence

from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollmuxd.policies.schedule import Leg, period_ms

#: rollout and train of a job, ms
Times = tuple[int, int]


def longest_of(jobs: Sequence[Times]) -> int:
    return max(range(len(jobs)), key=lambda job: sum(jobs[job]))


def not_over_saturated(jobs: Sequence[Times]) -> bool:
    loads = [sum(phase) for phase in zip(*jobs, strict=True)]
    return max(loads) <= max(map(sum, jobs))


def ordered(jobs: Sequence[Times], turns: Sequence[int]) -> list[Leg]:
    """One rotation: each mention of a job is its next phase."""
    phase = [0] * len(jobs)
    legs = []
    for job in turns:
        at = phase[job] % 2
        legs.append(Leg(f"j{job}", (("r", "t")[at],), jobs[job][at], 0, at))
        phase[job] += 1
    return legs


def use_of(jobs: Sequence[Times], turns: Sequence[int]) -> float:
    """Of both nodes together: 2 where neither idles."""
    legs = ordered(jobs, turns)
    return sum(leg.busy_ms for leg in legs) / period_ms(legs)


def round_robin(jobs: Sequence[Times]) -> list[int]:
    return [job for job in range(len(jobs)) for _ in range(2)]


def any_order(rates: Sequence[int], chance: random.Random) -> list[int]:
    turns = [job for job, rate in enumerate(rates) for _ in range(2 * rate)]
    chance.shuffle(turns)
    return turns


@st.composite
def groups(draw: st.DrawFn) -> list[Times]:
    """Jobs that fit into the bubbles of the longest one."""
    long = draw(st.tuples(st.integers(1, 60), st.integers(1, 60)))
    jobs, left = [long], [long[1], long[0]]
    for _ in range(draw(st.integers(1, 3))):
        if min(left) < 1:
            break
        job = draw(st.tuples(st.integers(1, left[0]), st.integers(1, left[1])))
        if sum(job) <= sum(long):
            jobs.append(job)
            left = [rest - took for rest, took in zip(left, job, strict=True)]
    return jobs


@given(groups(), st.integers(2, 4), st.integers(0, 3), st.randoms(use_true_random=False))
@settings(max_examples=600, deadline=None)
def test_no_order_in_which_one_job_goes_round_more_often_uses_the_pools_more(
    jobs: list[Times], rate: int, which: int, chance: random.Random
) -> None:
    """What the theorem's proof is about: repeating one job makes the rotation longer by its whole iteration."""
    assert not_over_saturated(jobs)
    rates = [1] * len(jobs)
    rates[which % len(jobs)] = rate
    even = use_of(jobs, round_robin(jobs))
    assert period_ms(ordered(jobs, round_robin(jobs))) == max(map(sum, jobs))
    for _ in range(5):
        assert use_of(jobs, any_order(rates, chance)) <= even + 1e-9


@given(groups(), st.lists(st.integers(1, 3), min_size=4, max_size=4), st.randoms(use_true_random=False))
@example([(10, 5), (1, 1), (1, 1)], [1, 2, 2, 1], random.Random(0))
@settings(max_examples=600, deadline=None)
def test_while_the_longest_job_never_waits_no_other_goes_round_more_often(
    jobs: list[Times], rates: list[int], chance: random.Random
) -> None:
    """Each of the others rolls out while the longest trains, and trains while that rolls out: once each time."""
    long = longest_of(jobs)
    turns = any_order(rates[: len(jobs)], chance)
    if period_ms(ordered(jobs, turns)) == rates[long] * sum(jobs[long]):
        assert max(rates[: len(jobs)]) == rates[long]
    if max(rates[: len(jobs)]) > rates[long]:
        assert period_ms(ordered(jobs, turns)) > rates[long] * sum(jobs[long])


# ---- where it does not hold ------------------------------------------------------------------------------------------


def test_two_short_jobs_that_both_go_round_more_often_use_the_pools_more() -> None:
    """The theorem's text says any order; two that repeat fill each other's bubbles, and only the longest job pays."""
    jobs: list[Times] = [(1000, 500), (50, 50), (50, 50)]
    assert not_over_saturated(jobs)
    # beside the long one's turns the two alternate, ten times more
    turns = [0, 1, 2, 0, 1, 2, *([1, 2] * 20)]
    assert use_of(jobs, round_robin(jobs)) == 1700 / 1500
    assert use_of(jobs, turns) == 3700 / 2550


def test_in_an_over_saturated_group_a_job_that_goes_round_twice_uses_the_pools_more() -> None:
    jobs: list[Times] = [(4, 1), (4, 1), (1, 4)]
    assert not not_over_saturated(jobs)
    chance = random.Random(1)
    best = max(use_of(jobs, any_order((1, 1, 2), chance)) for _ in range(500))
    assert use_of(jobs, round_robin(jobs)) == 15 / 9
    assert best == 2.0


def test_a_job_with_a_rollout_node_of_its_own_goes_round_ten_times_within_one_rollout_of_another() -> None:
    """Rollout scaling: the short job shares the train node only, and needs it while the long one rolls out."""
    jobs = [Leg("long", ("r1",), 1000), Leg("long", ("t",), 500), Leg("short", ("r2",), 50), Leg("short", ("t",), 50)]
    often = [jobs[0], *(jobs[2:] * 10), jobs[1]]
    assert period_ms(jobs) == period_ms(often) == 1500


def test_a_sync_over_both_pools_makes_round_robin_of_whole_iterations_take_turns() -> None:
    """Two equal jobs with r = 4, t = 3 and s = 0.5 s: the pipelined order of the same turns takes 9 s, not 15."""
    a, b = ([Leg(job, ("r",), 4000), Leg(job, ("t",), 3000, 0, 1), Leg(job, ("r", "t"), 500, 0, 2)] for job in "ab")
    assert period_ms([*a, *b]) == 15_000
    assert period_ms([a[0], *b[1:], b[0], *a[1:]]) == 9_000


def test_jobs_on_overlapping_pairs_of_rollout_nodes_take_turns_though_no_node_is_over_saturated() -> None:
    """The period is 3000, where the longest job takes 1010 and the busiest node 2000."""
    jobs = [
        [Leg(f"j{n}", nodes, 1000), Leg(f"j{n}", ("t",), 10, 0, 1)]
        for n, nodes in enumerate(map(tuple, ("ab", "bc", "ac")))
    ]
    assert period_ms([leg for job in jobs for leg in job]) == 3000
