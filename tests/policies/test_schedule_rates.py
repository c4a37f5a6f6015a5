"""Schedules in which jobs go round at rates of their own: what is certified is what happens, whatever the durations.

The execution below is its own: a list of turns is served one by one, each node and each job taking its turns in the
schedule's order, with durations drawn for each. It shares no code with the certificate. ``make certificates`` tries
more plans (``ROLLMUX_PLANS`` of each width).
"""

import os
import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pytest
from msgspec.structs import replace

from rollmuxd.core.config import Config
from rollmuxd.core.inputs import GpuObservation, HostObserved, HostSpec, NodeSpec, RegisterJob, Start
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.core.spec import JobSpec, PhaseSpec, Want
from rollmuxd.policies.rollmux import RollMux
from rollmuxd.policies.schedule import Leg, period_ms, pipelined
from rollmuxd.policies.thrift import catalogue
from rollmuxd.policies.thrift.catalogue import Planner
from rollmuxd.policies.thrift.model import JobDemand, Plan, PoolCapacity, Profile

ROOMS = {"rollout": PoolCapacity(1.0, 1.0), "train": PoolCapacity(3.0, 3.0)}
ROTATIONS = 40
#: rotations until any schedule that began with everybody there at once goes evenly; each job is late once by what that
#: takes
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
    """The schedule of a plan, spelled out."""
    legs = []
    for place, phase in plan.order:
        need, seats = plan.needs[place], plan.seats[place]
        pools, took, gap = need.profile.phases[phase]
        legs.append(Leg(need.job, tuple(f"{pool}{node}" for pool in pools for node in seats[pool]), took, gap, phase))
    return legs


def ends(
    schedule: list[Leg], rotations: int, chance: random.Random | None, without: str = ""
) -> dict[str, list[float]]:
    """When each job's iterations end, served in order; durations as planned, or 0.4 to 1 of that."""
    job_free: dict[str, float] = {}
    node_free: dict[str, float] = {}
    last: dict[str, list[float]] = {}
    kinds: dict[str, int] = {}
    for leg in schedule:
        kinds[leg.job] = kinds.get(leg.job, 0) + 1
    for _ in range(rotations):
        for leg in schedule:
            if leg.job == without:
                continue
            start = max([job_free.get(leg.job, 0.0) + leg.gap_ms, *(node_free.get(node, 0.0) for node in leg.nodes)])
            end = start + leg.busy_ms * (chance.uniform(0.4, 1) if chance else 1)
            job_free[leg.job] = end
            node_free.update(dict.fromkeys(leg.nodes, end))
        for job, at in job_free.items():
            last.setdefault(job, []).append(at)
    return last


def worst_mean(
    plan: Plan, rotations: int, chance: random.Random | None, without: str = "", *, started: int = 0
) -> float:
    """The largest mean iteration over bound; the first rotation, in which nobody was waited for yet, is the start.

    In the second somebody may wait, too, for who had nobody to wait for in the first. That is the start-up constant,
    and what it comes to once is in nobody's mean for long: of 3,000 plans one is found by it, and ``started`` rotations
    later it is over.
    """
    schedule = legs_of(plan)
    worst = 0.0
    for job, at in ends(schedule, rotations, chance, without).items():
        place = next(number for number, need in enumerate(plan.needs) if need.job == job)
        done = rate(plan, place) * (rotations - 1 - started)
        worst = max(worst, (at[-1] - at[started]) / done / (plan.needs[place].limit_ms or 1))
    return worst


@pytest.mark.parametrize("widest", [1, 3])
def test_who_is_planned_keeps_his_bound_when_everything_takes_as_long_as_planned(widest: int) -> None:
    several = 0
    for plan in drawn_plans(widest):
        assert worst_mean(plan, ROTATIONS, None, started=STARTED) <= 1 + 1e-9, plan
        several += max(rate(plan, place) for place in range(len(plan.needs))) > 1
    assert several > 100  # most of them are no round robin


def test_and_when_anything_takes_less() -> None:
    """Over a whole run: a rotation that began late because the one before was long is caught up with."""
    chance = random.Random(2)
    for plan in drawn_plans(3):
        schedule = legs_of(plan)
        slack = sum(leg.busy_ms + leg.gap_ms for leg in schedule) * 2  # the start-up constant z, generously
        for job, at in ends(schedule, ROTATIONS, chance).items():
            place = next(number for number, need in enumerate(plan.needs) if need.job == job)
            done, limit = rate(plan, place) * ROTATIONS, plan.needs[place].limit_ms or 0
            assert at[-1] <= done * limit + slack, plan


def test_who_stays_keeps_his_bound_when_others_leave() -> None:
    """What is left of the schedule is certified for the same rotation, whoever leaves, whatever order were found
    anew."""
    for plan in drawn_plans(3):
        schedule = legs_of(plan)
        for need in plan.needs:
            left = [leg for leg in schedule if leg.job != need.job]
            assert period_ms(left) <= plan.period_ms
            assert worst_mean(plan, ROTATIONS, None, without=need.job, started=STARTED) <= 1 + 1e-9


def test_a_plan_says_what_its_schedule_takes() -> None:
    """Its period is certified, is within everybody's bound, and is hardly longer than the least that is."""
    for plan in drawn_plans(1):
        schedule = legs_of(plan)
        assert period_ms(schedule) <= plan.period_ms <= 1.2 * period_ms(schedule)
        for place, need in enumerate(plan.needs):
            assert plan.period_ms <= rate(plan, place) * (need.limit_ms or 0)


def test_a_sync_over_both_pools_takes_its_own_time_only_where_the_next_job_rolls_out_while_one_trains() -> None:
    """Job after job the second could not roll out before the first has handed its weights on."""
    phases = ((("rollout",), 4000, 0), (("train",), 3000, 0), (("rollout", "train"), 500, 0))
    one = JobDemand("a", Profile(phases, (("rollout", 1), ("train", 1)), 7500), 7500, None)
    (order,) = pipelined((0, 1), [[pools for pools, _, _ in phases]] * 2)
    assert order == [(0, 0), (1, 1), (1, 2), (1, 0), (0, 1), (0, 2)]
    plan = Planner(ROOMS).fit([one, replace(one, job="b")])
    assert plan is not None
    assert plan.nodes == {"rollout": 1, "train": 1}
    assert (plan.order, plan.period_ms) == (tuple(order), 9000)
    by_job = [leg for name in "ab" for leg in legs_of(plan) if leg.job == name]
    assert period_ms(sorted(by_job, key=lambda leg: (leg.job, leg.phase))) == 15_000


def test_an_order_is_pipelined_only_where_a_job_comes_back_to_a_node_and_another_job_comes_next() -> None:
    narrow, wide, first = ("r", "t"), ("r", "rt"), ("rt", "r", "t")
    assert list(pipelined((0, 1), [narrow, narrow])) == []
    assert list(pipelined((0, 0, 1), [wide, wide])) == []
    assert list(pipelined((0, 1), [narrow, wide])) == [[(0, 0), (1, 1), (1, 0), (0, 1)]]
    # a sync that comes first, as with verl, begins the iteration
    assert next(pipelined((0, 1), [first, first]))[:3] == [(0, 0), (0, 1), (1, 2)]


#: phases of a job (pools, seconds), and what a rotation of so many such jobs takes on one node of each pool
PIPELINES = {
    "a sync at the end": ([("r", 4), ("t", 3), ("rt", 0.5)], [9, 13.5, 18, 22.5]),
    "a sync first": ([("rt", 0.5), ("r", 4), ("t", 3)], [9, 13.5, 18, 22.5]),
    "a reward pool": ([("r", 4), ("w", 4), ("t", 4), ("rt", 0.5)], [12.5, 13.5, 18, 22.5]),
    # two jobs: each sync keeps the other job, too, from its next phase
    "a sync over three pools": ([("r", 4), ("w", 4), ("t", 4), ("rwt", 0.5)], [13, 13.5, 18, 22.5]),
    "an evaluation where it rolled out": ([("r", 4), ("t", 3), ("r", 0.5)], [9, 13.5, 18, 22.5]),
    "no phase that comes back": ([("r", 4), ("w", 3), ("t", 3)], [10, 12, 16, 20]),
}


@pytest.mark.parametrize("case", PIPELINES)
def test_while_one_job_is_in_a_later_stage_the_next_is_in_an_earlier_one_for_any_number_of_jobs_and_pools(
    case: str,
) -> None:
    """The plan, its execution and its certificate agree, in the paper's policy as well."""
    phases, takes = PIPELINES[case]
    pools = sorted({*"".join(claims for claims, _ in phases)})
    planned = tuple((tuple(claims), int(seconds * 1000), 0) for claims, seconds in phases)
    solo = sum(took for _, took, _ in planned)
    profile = Profile(planned, tuple((pool, 1) for pool in pools), solo)
    for count, seconds in enumerate(takes, 2):
        needs = [JobDemand(f"j{at}", profile, solo, 10 * solo) for at in range(count)]
        plan = Planner({pool: PoolCapacity(1.0, 1.0) for pool in pools}, rounds=1).fit(needs)
        assert plan is not None
        assert set(plan.nodes.values()) == {1}
        schedule, period = legs_of(plan), int(seconds * 1000)
        assert (plan.period_ms, period_ms(schedule)) == (period, period)
        for rotations in (ROTATIONS, 2 * ROTATIONS):  # a job may begin late once
            assert max(at[-1] for at in ends(schedule, rotations, None).values()) <= (rotations + count) * period
        assert rollmux_period_ms(phases, count) == period


def rollmux_period_ms(phases: list[tuple[str, float]], count: int) -> int | None:
    """The period of so many equal jobs that the paper's policy puts on one node of each pool."""
    pools = sorted({*"".join(claims for claims, _ in phases)})
    core = Scheduler(Config(), RollMux())
    nodes = tuple(
        NodeSpec(f"{pool}/gpu0-7", pool, tuple(f"{pool}/gpu{at}" for at in range(8)), (pool,)) for pool in pools
    )
    core.handle(Start(tuple(HostSpec(pool, "mock", 1_000_000) for pool in pools), nodes), 0)
    for node in nodes:
        core.handle(HostObserved(node.host, tuple(GpuObservation(gpu, 0) for gpu in node.gpus)), 0)
    spec = JobSpec(
        name="j",
        slo=9.9,
        wants=tuple(Want(pool, nodes=1) for pool in pools),
        phases=tuple(
            PhaseSpec(f"p{at}", tuple(claims), planned_ms=int(seconds * 1000))
            for at, (claims, seconds) in enumerate(phases)
        ),
    )
    for at in range(count):
        core.handle(RegisterJob("team", "ann", replace(spec, name=f"j{at}")), 0)
    (group,) = core.state.groups
    assert len(core.state.groups[group].jobs) == count
    return core.policy.period_ms(core.state, group)


def test_a_short_job_goes_round_thrice_while_a_long_one_goes_round_once() -> None:
    """In round robin each would have to keep to the other's pace, and the short one's bound is a quarter of that."""
    widths = (("rollout", 1), ("train", 1))
    long = JobDemand("long", Profile(((("rollout",), 900, 0), (("train",), 100, 0)), widths, 1000), 1000, 1300)
    short = JobDemand("short", Profile(((("rollout",), 150, 0), (("train",), 150, 0)), widths, 300), 300, 420)
    assert Planner(ROOMS, rounds=1).fit([long, short]) is None
    plan = Planner(ROOMS).fit([long, short])
    assert plan is not None
    assert rate(plan, 1) >= 3 * rate(plan, 0)
    assert plan.nodes == {"rollout": 2, "train": 1}
    assert worst_mean(plan, ROTATIONS, None) <= 1


def test_a_further_node_is_taken_where_the_seated_leave_too_little_of_the_fewest() -> None:
    """Seats from nothing need two rollout nodes. The two that are there have one each, so a third serves better."""
    widths = (("rollout", 1), ("train", 1))
    short = Profile(((("rollout",), 310, 0), (("train",), 120, 0)), widths, 430)
    long = Profile(((("rollout",), 632, 0), (("train",), 106, 0)), widths, 738)
    needs = [
        JobDemand(name, it, it.round_ms, None, worth=4.0) for name, it in (("a", short), ("b", short), ("c", long))
    ]
    seated = {name: {"rollout": (name,), "train": ("t",)} for name in "ab"}
    plan = Planner({**ROOMS, "rollout": PoolCapacity(0.05, 1.0)}, rounds=1).fit(needs, seated)
    assert plan is not None
    assert (plan.nodes["rollout"], plan.seats[2]["rollout"], plan.period_ms) == (3, (2,), 738)


def counted_certificates(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The rates for which a certificate is looked for from now on."""
    certify, asked = catalogue._certify, []

    def counted(profiles: Any, rates: tuple[int, ...], *others: Any) -> Any:
        asked.append(rates)
        return certify(profiles, rates, *others)

    monkeypatch.setattr(catalogue, "_certify", counted)
    return asked


def value_of(planner: Planner, needs: Sequence[JobDemand]) -> float | None:
    """The value, with its steps taken at once."""
    steps = planner.value(needs)
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            found: float | None = stop.value
            return found


def test_a_set_of_profiles_is_searched_once_for_all_its_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    planner, need = Planner(ROOMS), drawn_need(random.Random(5), 0)
    jobs = [replace(need, job=f"j{number}", limit_ms=(2 + number) * need.solo_ms) for number in range(4)]
    asked = counted_certificates(monkeypatch)
    assert value_of(planner, jobs[2:])
    assert asked
    asked.clear()
    assert all(value_of(planner, [one, other]) for one in jobs for other in jobs if one is not other)
    assert not asked


def test_rates_that_the_bounds_rule_out_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = Profile(((("rollout",), 632, 0), (("train",), 106, 0)), (("rollout", 1), ("train", 1)), 738)
    asked = counted_certificates(monkeypatch)
    value_of(Planner(ROOMS), [JobDemand(job, profile, 738, int(1.3 * 738)) for job in "ab"])
    assert set(asked) == {(1, 1)}  # at 3 beside 4 one job would take 1.33 times its round


def test_a_search_that_was_left_goes_on_where_it_was_left(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = drawn_need(random.Random(5), 0).profile
    needs = [JobDemand(str(at), profile.one_in(at), profile.round_ms, None) for at in (1, 2, 3)]
    asked = counted_certificates(monkeypatch)
    whole = value_of(Planner(ROOMS), needs)
    wanted, parts = [*asked], Planner(ROOMS)
    asked.clear()
    steps = parts.value(needs)
    next(steps)
    steps.close()  # as it is when a job comes meanwhile
    assert 0 < len(asked) < len(wanted)
    assert value_of(parts, needs) == whole
    assert asked == wanted


@pytest.mark.parametrize("widest", [1, 2])
def test_jobs_that_cannot_share_on_any_nodes_cannot_beside_jobs_that_are_seated(widest: int) -> None:
    chance, planner = random.Random(5), Planner(ROOMS)
    found = {(may, has_one): 0 for may in (False, True) for has_one in (False, True)}
    for plan in drawn_plans(widest, 150):
        for joins in (drawn_need(chance, 9, widest=widest), replace(drawn_need(chance, 9), limit_ms=None)):
            needs = (*plan.needs, joins)
            made = planner.fit(needs, {need.job: seats for need, seats in zip(plan.needs, plan.seats, strict=True)})
            found[value_of(planner, needs) is not None, made is not None] += 1
    assert found[False, True] < found[True, True] / 5  # entries are shortest to a few per cent, bounds are exact
    assert found[True, True] > found[True, False]  # hardly anything else is in the way


def test_a_plan_that_would_be_of_no_use_is_not_looked_for_and_any_other_is_the_same() -> None:
    planner = Planner(ROOMS)
    for plan in drawn_plans(1, 40):
        found = planner.fit(plan.needs)
        assert found is not None
        assert planner.fit(plan.needs, below=found.value + 0.1) == found
        assert planner.fit(plan.needs, below=found.value) is None
