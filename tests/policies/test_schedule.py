"""The period of a wheel (research 6.12, rows 1 to 3): closed form, recurrence, certificate and execution agree.

The recurrence and the execution below are written anew from research 6.4, in the plainest way, so that a mistake in
``rollmuxd.policies.schedule`` does not check itself.
"""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from rollmuxd.core.policy import Leg
from rollmuxd.policies.schedule import (
    Bound,
    certified,
    closed_form_is_exact,
    first_turn_feasible,
    lower_bound_ms,
    period_ms,
    work_conserving_ms,
)

Jobs = list[tuple[int, int, tuple[str, ...]]]  # rollout ms, train ms, rollout nodes


def wheel_of(jobs: Jobs) -> list[Leg]:
    legs = []
    for number, (rollout, train, nodes) in enumerate(jobs):
        legs += [Leg(f"j{number}", nodes, rollout), Leg(f"j{number}", ("t",), train)]
    return legs


def closed_form(jobs: Jobs) -> int:
    """max(T_cycle, T_load) (research 6.3)."""
    load: dict[str, int] = {}
    for rollout, _, nodes in jobs:
        for node in nodes:
            load[node] = load.get(node, 0) + rollout
    return max(*(r + t for r, t, _ in jobs), sum(t for _, t, _ in jobs), *load.values())


def recurrence(jobs: Jobs, warmup: int = 20, measure: int = 20) -> float:
    """rr_period of research 6.4, line by line."""
    roll_free: dict[str, float] = {}
    own_end = [0.0] * len(jobs)
    train_free = mark = 0.0
    for turn in range(warmup + measure):
        for number, (rollout, train, nodes) in enumerate(jobs):
            start = max(own_end[number], *(roll_free.get(node, 0) for node in nodes))
            end = start + rollout
            roll_free.update(dict.fromkeys(nodes, end))
            own_end[number] = train_free = max(end, train_free) + train
        if turn == warmup - 1:
            mark = train_free
    return (train_free - mark) / measure


def random_groups(seed: int, width: int, count: int = 4000) -> list[Jobs]:
    chance = random.Random(seed)
    groups = []
    for _ in range(count):
        nodes = [f"r{number}" for number in range(chance.randint(width, 4))]
        groups.append(
            [
                (
                    chance.randint(10, 3000),
                    chance.randint(10, 3000),
                    tuple(chance.sample(nodes, chance.randint(1, width))),
                )
                for _ in range(chance.randint(1, 5))
            ]
        )
    return groups


def test_with_rollouts_of_width_one_the_closed_form_is_the_recurrence() -> None:
    for jobs in random_groups(1, width=1):
        wheel = wheel_of(jobs)
        if abs(recurrence(jobs) - closed_form(jobs)) > 0.001 * closed_form(
            jobs
        ):  # nearly two bottlenecks: it settles late
            assert abs(recurrence(jobs, warmup=2000) - closed_form(jobs)) <= 0.001 * closed_form(jobs), jobs
        assert lower_bound_ms(wheel) == period_ms(wheel) == closed_form(jobs)
        assert closed_form_is_exact(wheel)


def test_with_wider_rollouts_the_closed_form_is_never_above_and_sometimes_below() -> None:
    below = 0
    for jobs in random_groups(2, width=2):
        wheel, exact = wheel_of(jobs), recurrence(jobs)
        if abs(period_ms(wheel) - exact) > 0.001 * exact + 1:  # as above
            exact = recurrence(jobs, warmup=2000, measure=60)
        assert closed_form(jobs) <= exact * 1.001, jobs
        assert lower_bound_ms(wheel) <= period_ms(wheel)
        assert abs(period_ms(wheel) - exact) <= 0.001 * exact + 1, jobs
        differs = exact > 1.001 * closed_form(jobs)
        below += differs
        assert not (differs and closed_form_is_exact(wheel)), jobs
    assert 0 < below < 400  # about 3 % of random groups


def test_three_jobs_on_overlapping_pairs_of_nodes_take_longer_than_the_closed_form() -> None:
    jobs: Jobs = [(1000, 10, ("a", "b")), (1000, 10, ("b", "c")), (1000, 10, ("a", "c"))]
    assert closed_form(jobs) == 2000
    assert period_ms(wheel_of(jobs)) == 3000


def test_strict_round_robin_wastes_a_scaled_group_and_work_conserving_does_not() -> None:
    jobs: Jobs = [(1000, 500, ("a",)), (50, 50, ("b",))]
    assert period_ms(wheel_of(jobs)) == 1500
    free = work_conserving_ms(wheel_of(jobs))
    assert abs(free["j0"] - 1500) <= 15
    assert abs(free["j1"] - 150) <= 15


def test_a_wheel_of_nothing_takes_no_time() -> None:
    assert period_ms([]) == lower_bound_ms([]) == 0


LEGS = st.lists(
    st.builds(
        Leg,
        job=st.sampled_from(["a", "b", "c", "d"]),
        nodes=st.lists(st.sampled_from(["r0", "r1", "r2", "t"]), max_size=3, unique=True).map(tuple),
        busy_ms=st.integers(0, 500),
        gap_ms=st.integers(0, 50),
    ),
    min_size=1,
    max_size=10,
)


def execute(wheel: list[Leg], turns: int, shares: random.Random | None) -> tuple[dict[str, list[float]], float]:
    """Run the wheel: when each job's last visit of each turn ends, durations up to the planned ones (in full: None)."""
    free: dict[str, float] = {}
    own: dict[str, float] = {}
    ends: dict[str, list[float]] = {}
    for _ in range(turns):
        for leg in wheel:
            share = shares.choice([0, 0.1, 0.5, 0.9, 1, 1, 1]) if shares else 1
            start = max([own.get(leg.job, 0) + share * leg.gap_ms, *(free.get(node, 0) for node in leg.nodes)])
            own[leg.job] = start + share * leg.busy_ms
            free.update(dict.fromkeys(leg.nodes, own[leg.job]))
        for job, end in own.items():
            ends.setdefault(job, []).append(end)
    return ends, max(own.values())


@given(LEGS)
@settings(max_examples=400, deadline=None)
def test_the_period_is_the_growth_of_the_execution(wheel: list[Leg]) -> None:
    ends, _ = execute(wheel, 121, None)
    # over 120 turns (a multiple of every cycle length up to 6): the critical cycle's mean, start-up aside
    growth = max(end[-1] - end[60] for end in ends.values()) / 60
    start_up = sum(leg.busy_ms + leg.gap_ms for leg in wheel)
    assert period_ms(wheel) >= growth - start_up / 60 - 1
    assert period_ms(wheel) <= growth + start_up / 60 + 1


@given(LEGS, st.integers(0, 2**32))
@settings(max_examples=400, deadline=None)
def test_what_is_certified_holds_for_every_duration_up_to_the_planned_one(wheel: list[Leg], seed: int) -> None:
    bound = period_ms(wheel)
    assert certified(wheel, bound)
    start_up = sum(leg.busy_ms + leg.gap_ms for leg in wheel)
    turns = 50
    ends, _ = execute(wheel, turns, random.Random(seed))
    for job, end in ends.items():
        assert end[-1] <= turns * bound + start_up, f"{job}: mean {end[-1] / turns}, bound {bound}"


@given(LEGS)
@settings(max_examples=400, deadline=None)
def test_nothing_below_the_period_is_certified_and_everything_above_is(wheel: list[Leg]) -> None:
    period = period_ms(wheel)
    assert lower_bound_ms(wheel) <= period <= sum(leg.busy_ms + leg.gap_ms for leg in wheel)
    assert certified(wheel, period + 1)
    assert certified(wheel, 2 * period)
    if period:
        assert not certified(wheel, period - 1)


@given(LEGS, st.integers(0, 9), st.integers(0, 100))
@settings(max_examples=300, deadline=None)
def test_a_longer_visit_never_makes_the_period_shorter(wheel: list[Leg], which: int, more: int) -> None:
    """Monotonicity: why a visit of length zero (a skipped one) is safe."""
    longer = list(wheel)
    leg = longer[which % len(wheel)]
    longer[which % len(wheel)] = Leg(leg.job, leg.nodes, leg.busy_ms + more, leg.gap_ms)
    assert period_ms(longer) >= period_ms(wheel)


def leg(name: str, node: str, busy_ms: int, phase: int = 0) -> Leg:
    return Leg(name, (node,), busy_ms, 0, phase)


def test_the_first_turns_are_borne_by_who_joins_and_by_who_was_there() -> None:
    """On one node an iteration of 100 turns into one of 200: the first wait is at most for what has just begun."""
    before, after = [leg("a", "r", 100)], [leg("b", "r", 100), leg("a", "r", 100)]
    each = {"a": 1, "b": 1}

    def are_borne(job: str, limit_ms: int, credit_ms: int, judged_at: int) -> bool:
        return first_turn_feasible(before, after, each, {job: Bound(limit_ms, credit_ms, judged_at)})

    assert are_borne("b", 200, 0, 1)  # 100 of a's, and its own
    assert not are_borne("b", 199, 0, 1)
    assert are_borne("b", 199, 10, 1)  # or it has earned what it loses in ten
    assert not are_borne("a", 199, 0, 8)
    assert are_borne("a", 199, 10, 8)
    first = [leg("a", "r", 100), leg("b", "r", 100)]  # a's next visit of this turn comes before b's
    assert not first_turn_feasible(before, first, each, {"b": Bound(250, 0, 1)})


def test_who_was_there_counts_from_the_end_of_his_last_iteration() -> None:
    """When somebody comes whose 300 go first he is 50 into an iteration: it takes 50 + 300 + 100."""
    before = [leg("a", "u", 50), leg("a", "v", 50, 1), leg("a", "r", 100, 2)]
    after = [leg("b", "r", 300), leg("b", "w", 10, 1), *before]
    each = {"a": 3, "b": 2}
    assert first_turn_feasible(before, after, each, {"a": Bound(400, 50, 1)})
    assert not first_turn_feasible(before, after, each, {"a": Bound(400, 49, 1)})


def test_a_pipelined_wheel_is_borne_as_its_jobs_go_through_it() -> None:
    """Who joins begins with its rollout, though the wheel has its train and sync before that."""
    a = [Leg("a", ("r",), 40, 0, 0), Leg("a", ("t",), 30, 0, 1), Leg("a", ("r", "t"), 5, 0, 2)]
    b = [Leg("b", it.nodes, it.busy_ms, 0, it.phase) for it in a]
    after = [a[0], b[1], b[2], b[0], a[1], a[2]]
    each = {"a": 3, "b": 3}
    assert period_ms(after) == 90
    # at worst b comes as a begins its sync: it waits for that and a's rollout, and then goes with the wheel
    assert first_turn_feasible(a, after, each, {"b": Bound(90, 45, 1), "a": Bound(90, 0, 1)})
    assert not first_turn_feasible(a, after, each, {"b": Bound(90, 44, 1)})
