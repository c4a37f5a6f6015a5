"""Wheels in which jobs go round at rates of their own: what is certified is what happens, whatever the durations.

The execution below is its own: a list of visits is served one by one, each node and each job taking its visits in the
wheel's order, with durations drawn for each. It shares no code with the certificate. ``make certificates`` tries more
plans (``ROLLMUX_PLANS`` of each width).
"""

import os
import random
from fractions import Fraction
from functools import lru_cache
from itertools import permutations
from math import ceil

import pytest
from msgspec.structs import replace

from rollmuxd.core.policy import Leg
from rollmuxd.policies.schedule import binding, certified, lower_bound_ms, period_ms, pipelined, spanning
from rollmuxd.policies.thrift.catalogue import Planner
from rollmuxd.policies.thrift.model import JobDemand, Plan, PoolCapacity, Profile

ROOMS = {"rollout": PoolCapacity(1.0, 1.0), "train": PoolCapacity(3.0, 3.0)}
TURNS = 40
#: turns until any wheel that began with everybody there at once goes evenly; each job is late once by what that takes
STARTED = 10
PLANS = int(os.environ.get("ROLLMUX_PLANS", "400"))


def drawn_need(chance: random.Random, number: int, *, widest: int = 1, gaps: bool = False) -> JobDemand:
    """A job of the shapes that real ones have, from a few seconds to a quarter of an hour."""
    rollout, train = (round(10 ** chance.uniform(3.5, 6)) for _ in range(2))
    gap = chance.randrange(5_000) if gaps else 0
    phases = ((("rollout",), rollout, gap), (("train",), train, 0))
    if chance.random() < 0.2:
        phases = (*phases, (("rollout", "train"), chance.randint(100, 9_000), 0))
    solo = sum(took + before for _, took, before in phases)
    widths = (("rollout", chance.randint(1, widest)), ("train", chance.choice([1, 1, min(2, widest)])))
    return JobDemand(f"j{number}", Profile(phases, widths, solo), solo, int(chance.uniform(1, 2.5) * solo))


@lru_cache
def drawn_plans(widest: int, count: int = PLANS) -> list[Plan]:
    chance = random.Random(widest)
    planner, plans = Planner(ROOMS), []
    while len(plans) < count:
        needs = [drawn_need(chance, number, widest=widest, gaps=widest > 1) for number in range(chance.randint(2, 4))]
        plan = planner.fit(needs)
        if plan is not None:
            plans.append(plan)
    return plans


def rate(plan: Plan, place: int) -> int:
    """Iterations of a job in one rotation."""
    return plan.order.count((place, 0))


def legs_of(plan: Plan) -> list[Leg]:
    """The wheel of a plan, spelled out."""
    legs = []
    for place, phase in plan.order:
        need, seats = plan.needs[place], plan.seats[place]
        pools, took, gap = need.profile.phases[phase]
        legs.append(Leg(need.job, tuple(f"{pool}{node}" for pool in pools for node in seats[pool]), took, gap, phase))
    return legs


def ends(wheel: list[Leg], turns: int, chance: random.Random | None, without: str = "") -> dict[str, list[float]]:
    """When each job's iterations end, served in order; durations as planned, or 0.4 to 1 of that."""
    job_free: dict[str, float] = {}
    node_free: dict[str, float] = {}
    last: dict[str, list[float]] = {}
    kinds: dict[str, int] = {}
    for leg in wheel:
        kinds[leg.job] = kinds.get(leg.job, 0) + 1
    for _ in range(turns):
        for leg in wheel:
            if leg.job == without:
                continue
            start = max([job_free.get(leg.job, 0.0) + leg.gap_ms, *(node_free.get(node, 0.0) for node in leg.nodes)])
            end = start + leg.busy_ms * (chance.uniform(0.4, 1) if chance else 1)
            job_free[leg.job] = end
            node_free.update(dict.fromkeys(leg.nodes, end))
        for job, at in job_free.items():
            last.setdefault(job, []).append(at)
    return last


def worst_mean(plan: Plan, turns: int, chance: random.Random | None, without: str = "", *, started: int = 0) -> float:
    """The largest mean iteration over bound; the first turn, in which nobody was waited for yet, is the start.

    In the second somebody may wait, too, for who had nobody to wait for in the first. That is the start-up constant,
    and what it comes to once is in nobody's mean for long: of 3,000 plans one is found by it, and ``started`` turns
    later it is over.
    """
    wheel = legs_of(plan)
    worst = 0.0
    for job, at in ends(wheel, turns, chance, without).items():
        place = next(number for number, need in enumerate(plan.needs) if need.job == job)
        done = rate(plan, place) * (turns - 1 - started)
        worst = max(worst, (at[-1] - at[started]) / done / (plan.needs[place].limit_ms or 1))
    return worst


@pytest.mark.parametrize("widest", [1, 3])
def test_who_is_planned_keeps_his_bound_when_everything_takes_as_long_as_planned(widest: int) -> None:
    several = 0
    for plan in drawn_plans(widest):
        assert worst_mean(plan, TURNS, None, started=STARTED) <= 1 + 1e-9, plan
        several += max(rate(plan, place) for place in range(len(plan.needs))) > 1
    assert several > 100  # most of them are no round robin


def test_and_when_anything_takes_less() -> None:
    """Over a whole run: a turn that began late because the one before was long is caught up with."""
    chance = random.Random(2)
    for plan in drawn_plans(3):
        wheel = legs_of(plan)
        slack = sum(leg.busy_ms + leg.gap_ms for leg in wheel) * 2  # the start-up constant z, generously
        for job, at in ends(wheel, TURNS, chance).items():
            place = next(number for number, need in enumerate(plan.needs) if need.job == job)
            done, limit = rate(plan, place) * TURNS, plan.needs[place].limit_ms or 0
            assert at[-1] <= done * limit + slack, plan


def test_who_stays_keeps_his_bound_when_others_leave() -> None:
    """What is left of the wheel is certified for the same turn, whoever leaves, whatever order were found anew."""
    for plan in drawn_plans(3):
        wheel = legs_of(plan)
        for need in plan.needs:
            left = [leg for leg in wheel if leg.job != need.job]
            assert certified(left, plan.period_ms)
            assert worst_mean(plan, TURNS, None, without=need.job, started=STARTED) <= 1 + 1e-9


def test_a_plan_says_what_its_wheel_takes() -> None:
    """Its period is certified, is within everybody's bound, and is hardly longer than the least that is."""
    for plan in drawn_plans(1):
        wheel = legs_of(plan)
        assert period_ms(wheel) <= plan.period_ms <= 1.2 * period_ms(wheel)
        for place, need in enumerate(plan.needs):
            assert plan.period_ms <= rate(plan, place) * (need.limit_ms or 0)


def test_what_binds_is_a_cycle_of_legs_that_takes_the_period() -> None:
    """Each leg of it waits for the one before, on a node of both or as the same job's; its mean is the period."""
    crossed = 0
    for plan in drawn_plans(3):
        wheel = legs_of(plan)
        found = binding(wheel)
        assert found is not None
        assert ceil(Fraction(found.took_ms, found.turns)) == period_ms(wheel)
        assert found.took_ms == sum(
            link.leg.busy_ms + (link.leg.gap_ms if link.node is None else 0) for link in found.links
        )
        for before, link in zip((found.links[-1], *found.links), found.links, strict=False):
            if link.node is None:
                assert before.leg.job == link.leg.job
            else:
                assert link.node in before.leg.nodes
                assert link.node in link.leg.nodes
        crossed += period_ms(wheel) > lower_bound_ms(wheel)
    assert crossed  # not only a job's own iteration, or one node's load


def test_a_wheel_that_takes_no_time_hangs_on_nothing() -> None:
    assert binding([]) is None
    assert binding([Leg("a", ("r1",), 0)]) is None


def test_a_sync_over_both_pools_takes_its_own_time_only_where_the_next_job_rolls_out_while_one_trains() -> None:
    """Job after job the second could not roll out before the first has handed its weights on."""
    phases = ((("rollout",), 4000, 0), (("train",), 3000, 0), (("rollout", "train"), 500, 0))
    one = JobDemand("a", Profile(phases, (("rollout", 1), ("train", 1)), 7500), 7500, None)
    spans = [spanning([pools for pools, _, _ in phases])] * 2
    order = pipelined((0, 1), spans)
    assert order == [(0, 0), (1, 1), (1, 2), (1, 0), (0, 1), (0, 2)]
    plan = Planner(ROOMS).fit([one, replace(one, job="b")])
    assert plan is not None
    assert plan.nodes == {"rollout": 1, "train": 1}
    assert (plan.order, plan.period_ms) == (tuple(order), 9000)
    by_job = [leg for name in "ab" for leg in legs_of(plan) if leg.job == name]
    assert period_ms(sorted(by_job, key=lambda leg: (leg.job, leg.phase))) == 15_000


def test_an_order_is_pipelined_only_where_a_phase_spans_and_another_job_comes_next() -> None:
    narrow, wide = (False, False), (False, True)
    assert pipelined((0, 1), [narrow, narrow]) == []
    assert pipelined((0,), [wide]) == []
    assert pipelined((0, 0, 1), [wide, wide]) == []
    assert pipelined((0, 1), [narrow, wide]) == [(0, 0), (1, 1), (1, 0), (0, 1)]
    # a sync that comes first, as with verl, begins the iteration
    assert pipelined((0, 1), [(True, False, False)] * 2)[:3] == [(0, 0), (0, 1), (1, 2)]


def test_a_short_job_goes_round_thrice_while_a_long_one_goes_round_once() -> None:
    """In round robin each would have to keep to the other's pace, and the short one's bound is a quarter of that."""
    widths = (("rollout", 1), ("train", 1))
    long = JobDemand("long", Profile(((("rollout",), 900, 0), (("train",), 100, 0)), widths, 1000), 1000, 1300)
    short = JobDemand("short", Profile(((("rollout",), 150, 0), (("train",), 150, 0)), widths, 300), 300, 420)
    assert Planner(ROOMS, rates={}).fit([long, short]) is None
    plan = Planner(ROOMS).fit([long, short])
    assert plan is not None
    assert rate(plan, 1) >= 3 * rate(plan, 0)
    assert plan.nodes == {"rollout": 2, "train": 1}
    assert worst_mean(plan, TURNS, None) <= 1


def test_a_frontier_is_searched_once_for_all_jobs_of_the_same_profiles() -> None:
    planner, need = Planner(ROOMS), drawn_need(random.Random(5), 0)
    jobs = [replace(need, job=f"j{number}", limit_ms=(2 + number) * need.solo_ms) for number in range(4)]
    made = [planner.plan([one, other]) for one in jobs for other in jobs if one is not other]
    assert all(made)
    assert planner.searched == 1


def test_no_entry_of_a_frontier_is_as_fast_as_another_for_all_jobs_on_no_more_nodes() -> None:
    chance, planner = random.Random(6), Planner(ROOMS)
    several = 0
    for _ in range(40):
        profiles = tuple(sorted(drawn_need(chance, number).profile for number in range(chance.randint(2, 4))))
        entries = planner.frontier(profiles)
        for one, other in permutations(entries, 2):
            fewer = all(a <= b for a, b in zip(one.nodes, other.nodes, strict=True))
            faster = all(one.period_ms * b <= other.period_ms * a for a, b in zip(one.rates, other.rates, strict=True))
            assert not (fewer and faster), (one, other)
        several += len(entries) > 1
    assert several > 20


@pytest.mark.parametrize("widest", [1, 2])
def test_jobs_that_cannot_share_on_any_nodes_cannot_beside_jobs_that_are_seated(widest: int) -> None:
    chance, planner = random.Random(5), Planner(ROOMS)
    found = {(may, has_one): 0 for may in (False, True) for has_one in (False, True)}
    for plan in drawn_plans(widest, 150):
        for joins in (drawn_need(chance, 9, widest=widest), replace(drawn_need(chance, 9), limit_ms=None)):
            needs = (*plan.needs, joins)
            made = planner.fit(needs, dict(enumerate(plan.seats)))
            found[planner.may_share(needs), made is not None] += 1
    assert found[False, True] == 0
    assert found[True, True] > found[True, False]  # hardly anything else is in the way


def test_a_plan_that_would_be_of_no_use_is_not_looked_for_and_any_other_is_the_same() -> None:
    planner = Planner(ROOMS)
    for plan in drawn_plans(1, 40):
        found = planner.fit(plan.needs)
        assert found is not None
        assert planner.fit(plan.needs, below=found.value + 0.1) == found
        assert planner.fit(plan.needs, below=found.value) is None
