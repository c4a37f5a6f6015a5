"""The period of a schedule (research 6.12, rows 1 to 3): closed form, recurrence, certificate and execution agree.

The recurrence and the execution below are written anew from research 6.4, in the plainest way, so that a mistake in
``rollmuxd.policies.schedule`` does not check itself.
"""

import random
from math import ceil, inf

from hypothesis import given, settings
from hypothesis import strategies as st

from rollmuxd.policies.schedule import (
    Bound,
    Leg,
    bounds_ms,
    first_turn_feasible,
    is_feasible,
    period_ms,
    steps_of,
)

Jobs = list[tuple[int, int, tuple[str, ...]]]  # rollout ms, train ms, rollout nodes


def schedule_of(jobs: Jobs) -> list[Leg]:
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
    for rotation in range(warmup + measure):
        for number, (rollout, train, nodes) in enumerate(jobs):
            start = max(own_end[number], *(roll_free.get(node, 0) for node in nodes))
            end = start + rollout
            roll_free.update(dict.fromkeys(nodes, end))
            own_end[number] = train_free = max(end, train_free) + train
        if rotation == warmup - 1:
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
        schedule = schedule_of(jobs)
        if abs(recurrence(jobs) - closed_form(jobs)) > 0.001 * closed_form(
            jobs
        ):  # nearly two bottlenecks: it settles late
            assert abs(recurrence(jobs, warmup=2000) - closed_form(jobs)) <= 0.001 * closed_form(jobs), jobs
        assert period_ms(schedule) == closed_form(jobs)


def test_with_wider_rollouts_the_closed_form_is_never_above_and_sometimes_below() -> None:
    below = 0
    for jobs in random_groups(2, width=2):
        schedule, exact = schedule_of(jobs), recurrence(jobs)
        if abs(period_ms(schedule) - exact) > 0.001 * exact + 1:  # as above
            exact = recurrence(jobs, warmup=2000, measure=60)
        assert closed_form(jobs) <= min(exact * 1.001, period_ms(schedule)), jobs
        assert abs(period_ms(schedule) - exact) <= 0.001 * exact + 1, jobs
        below += exact > 1.001 * closed_form(jobs)
    assert 0 < below < 400  # about 3 % of random groups


def test_three_jobs_on_overlapping_pairs_of_nodes_take_longer_than_the_closed_form() -> None:
    jobs: Jobs = [(1000, 10, ("a", "b")), (1000, 10, ("b", "c")), (1000, 10, ("a", "c"))]
    assert closed_form(jobs) == 2000
    assert period_ms(schedule_of(jobs)) == 3000


def test_a_schedule_of_nothing_takes_no_time() -> None:
    assert period_ms([]) == 0


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


def execute(schedule: list[Leg], rotations: int, shares: random.Random | None) -> tuple[dict[str, list[float]], float]:
    """Run the schedule: when each job's last turn of each rotation ends, durations up to the planned ones (in full:
    None)."""
    free: dict[str, float] = {}
    own: dict[str, float] = {}
    ends: dict[str, list[float]] = {}
    for _ in range(rotations):
        for leg in schedule:
            share = shares.choice([0, 0.1, 0.5, 0.9, 1, 1, 1]) if shares else 1
            start = max([own.get(leg.job, 0) + share * leg.gap_ms, *(free.get(node, 0) for node in leg.nodes)])
            own[leg.job] = start + share * leg.busy_ms
            free.update(dict.fromkeys(leg.nodes, own[leg.job]))
        for job, end in own.items():
            ends.setdefault(job, []).append(end)
    return ends, max(own.values())


@given(LEGS)
@settings(max_examples=400, deadline=None)
def test_the_period_is_the_growth_of_the_execution(schedule: list[Leg]) -> None:
    ends, _ = execute(schedule, 121, None)
    # over 120 rotations (a multiple of every cycle length up to 6): the critical cycle's mean, start-up aside
    growth = max(end[-1] - end[60] for end in ends.values()) / 60
    start_up = sum(leg.busy_ms + leg.gap_ms for leg in schedule)
    assert period_ms(schedule) >= growth - start_up / 60 - 1
    assert period_ms(schedule) <= growth + start_up / 60 + 1


@given(LEGS, st.integers(0, 2**32))
@settings(max_examples=400, deadline=None)
def test_what_is_certified_holds_for_every_duration_up_to_the_planned_one(schedule: list[Leg], seed: int) -> None:
    bound = period_ms(schedule)
    assert period_ms(schedule) <= bound
    start_up = sum(leg.busy_ms + leg.gap_ms for leg in schedule)
    rotations = 50
    ends, _ = execute(schedule, rotations, random.Random(seed))
    for job, end in ends.items():
        assert end[-1] <= rotations * bound + start_up, f"{job}: mean {end[-1] / rotations}, bound {bound}"


def slowest_cycle_ms(schedule: list[Leg]) -> int:
    """The greatest mean of a cycle of waits: how far any clock can push itself in up to as many rotations as clocks."""
    clocks = dict.fromkeys(clock for leg in schedule for clock in (leg.job, *leg.nodes))
    slowest = 0
    for pushed in clocks:
        at = dict.fromkeys(clocks, -inf)
        at[pushed] = 0
        for rotations in range(1, len(clocks) + 1):
            for leg in schedule:
                end = max([at[leg.job] + leg.gap_ms, *(at[node] for node in leg.nodes)]) + leg.busy_ms
                at.update(dict.fromkeys((leg.job, *leg.nodes), end))
            if at[pushed] > -inf:
                slowest = max(slowest, ceil(at[pushed] / rotations))
    return slowest


@given(LEGS)
@settings(max_examples=400, deadline=None)
def test_the_period_is_the_slowest_cycle(schedule: list[Leg]) -> None:
    period = period_ms(schedule)
    assert period == slowest_cycle_ms(schedule)
    assert is_feasible(*steps_of(schedule), period)
    assert not is_feasible(*steps_of(schedule), period - 1)


def test_the_period_is_the_slowest_cycle_where_bounds_meet_late() -> None:
    """Turns that take nearly as long: another cycle than the slowest sets the pace for many rotations."""
    chance, late = random.Random(3), 0
    for _ in range(1_000):
        turns = range(chance.randint(4, 10))
        schedule = [leg(chance.choice("abcd"), chance.choice("rstu"), 100 + chance.randint(0, 20)) for _ in turns]
        slowest = slowest_cycle_ms(schedule)
        assert period_ms(schedule) == slowest, schedule
        late += bounds_ms(*steps_of(schedule))[1] > slowest
    assert late


@given(LEGS, st.integers(0, 5000))
@settings(max_examples=200, deadline=None)
def test_bounds_that_were_left_early_are_bounds_and_tell_no_less_of_a_shorter_period(
    schedule: list[Leg], below: int
) -> None:
    low, high = bounds_ms(*steps_of(schedule), below)
    assert low <= slowest_cycle_ms(schedule) <= high <= sum(leg.busy_ms + leg.gap_ms for leg in schedule)
    assert (high < below) == (bounds_ms(*steps_of(schedule))[1] < below)


@given(LEGS, st.integers(0, 9), st.integers(0, 100))
@settings(max_examples=300, deadline=None)
def test_a_longer_turn_never_makes_the_period_shorter(schedule: list[Leg], which: int, more: int) -> None:
    """Monotonicity: why a turn of length zero (a skipped one) is safe."""
    longer = list(schedule)
    leg = longer[which % len(schedule)]
    longer[which % len(schedule)] = Leg(leg.job, leg.nodes, leg.busy_ms + more, leg.gap_ms)
    assert period_ms(longer) >= period_ms(schedule)


def leg(name: str, node: str, busy_ms: int, phase: int = 0) -> Leg:
    return Leg(name, (node,), busy_ms, 0, phase)


def test_the_first_turns_are_borne_by_who_joins_and_by_who_was_there() -> None:
    """On one node an iteration of 100 rotations into one of 200: the first wait is at most for what has just begun."""
    before, after = [leg("a", "r", 100)], [leg("b", "r", 100), leg("a", "r", 100)]
    each = {"a": 1, "b": 1}

    def are_borne(job: str, limit_ms: int, credit_ms: int, judged_at: int) -> bool:
        return first_turn_feasible(before, after, each, {job: Bound(limit_ms, credit_ms, judged_at)})

    assert are_borne("b", 200, 0, 1)  # 100 of a's, and its own
    assert not are_borne("b", 199, 0, 1)
    assert are_borne("b", 199, 10, 1)  # or it has earned what it loses in ten
    assert not are_borne("a", 199, 0, 8)
    assert are_borne("a", 199, 10, 8)
    first = [leg("a", "r", 100), leg("b", "r", 100)]  # a's next turn of this rotation comes before b's
    assert not first_turn_feasible(before, first, each, {"b": Bound(250, 0, 1)})


def test_who_was_there_counts_from_the_end_of_his_last_iteration() -> None:
    """At worst a newcomer whose 300 go first comes just before the third turn, 99 into an iteration."""
    before = [leg("a", "u", 50), leg("a", "v", 50, 1), leg("a", "r", 100, 2)]
    after = [leg("b", "r", 300), leg("b", "w", 10, 1), *before]
    each = {"a": 3, "b": 2}
    assert first_turn_feasible(before, after, each, {"a": Bound(400, 99, 1)})
    assert not first_turn_feasible(before, after, each, {"a": Bound(400, 98, 1)})


def test_a_pipelined_schedule_is_borne_as_its_jobs_go_through_it() -> None:
    """Who joins begins with its rollout, though the schedule has its train and sync before that."""
    a = [Leg("a", ("r",), 40, 0, 0), Leg("a", ("t",), 30, 0, 1), Leg("a", ("r", "t"), 5, 0, 2)]
    b = [Leg("b", it.nodes, it.busy_ms, 0, it.phase) for it in a]
    after = [a[0], b[1], b[2], b[0], a[1], a[2]]
    each = {"a": 3, "b": 3}
    assert period_ms(after) == 90
    # at worst b comes as a begins its sync: it waits for that and a's rollout, and then goes with the schedule
    assert first_turn_feasible(a, after, each, {"b": Bound(90, 45, 1), "a": Bound(90, 24, 1)})
    assert not first_turn_feasible(a, after, each, {"b": Bound(90, 44, 1)})
    # and for a just before that, at 69: its sync waits for b's rollout and ends at 114
    assert not first_turn_feasible(a, after, each, {"a": Bound(90, 23, 1)})
