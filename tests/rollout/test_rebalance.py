"""Moves between replicas: few, bounded, and only where the end comes earlier."""

import pytest

from rollmuxd.rollout.engine import Engine, Tuning
from rollmuxd.rollout.hardware import gpu
from rollmuxd.rollout.models import model
from rollmuxd.rollout.parallelism import next_degree
from rollmuxd.rollout.rebalance import Bucket, Limits, Load, Open, pick

ENGINE = Engine(gpu("h800"), model("qwen2.5-14b"), 2)


def load(*remaining, slower=1.0, moves=0, pinned=False, first=0, **more):
    return Load(
        ENGINE, [Open(first + i, 1000, left, moves, pinned) for i, left in enumerate(remaining)], slower, **more
    )


def test_the_last_replica_gives_to_the_first():
    move = pick([load(9000, 9000, 9000, slower=2.0), load(100, first=10), load(500, first=20)])
    assert move is not None
    assert (move.source, move.target) == (0, 1)
    assert move.gain_s > 1


def test_a_slow_replica_gives_what_would_end_last():
    move = pick([load(3000, 9000, 2000, slower=2.0), load(100, first=10)])
    assert move is not None
    assert 1 in move.requests


def test_a_lone_response_on_equal_replicas_stays():
    """A move could only delay it."""
    assert pick([load(9000), load(100, first=10)]) is None


@pytest.mark.parametrize(
    ("why", "replicas"),
    [
        ("alone", [load(9000)]),
        ("alike", [load(9000, 8000, slower=2.0), load(9000, 8000, slower=1.8, first=10)]),
        ("pinned", [load(9000, 9000, slower=2.0, pinned=True), load(100, first=10)]),
        ("moved twice already", [load(9000, 9000, slower=2.0, moves=2), load(100, first=10)]),
        ("the source may not give", [load(9000, 9000, slower=2.0, gives=False), load(100, first=10)]),
        ("no target takes", [load(9000, 9000, slower=2.0), load(100, first=10, takes=False)]),
        ("too little is won", [load(40, 40, slower=2.0), load(10, first=10)]),
        ("it does not fit", [load(600_000, slower=9.0), load(100, first=10)]),
        ("nothing is there", []),
        ("nothing is left", [load(), load()]),
    ],
)
def test_nothing_is_moved_where(why, replicas):
    assert pick(replicas) is None, why


def test_one_of_two_equally_long_responses_is_not_moved_alone():
    """With a step that takes the same for any batch, only the longest response of a replica counts."""
    flat = Tuning(contexts=1e9, decode=1e9, prefill=1e9, sequence_s=0)
    engine = Engine(gpu("h800"), model("qwen2.5-14b"), 1, flat)
    slow = Load(engine, [Open(i, 1000, 9000) for i in range(3)], 2.0)
    fast = Load(engine, [Open(10, 1000, 100)])
    assert pick([slow, fast], most=1) is None
    move = pick([slow, fast], most=4)
    assert move is not None
    assert set(move.requests) == {0, 1, 2}
    assert pick([slow, fast], most=0) is None


def test_the_gain_is_the_mean_over_scenarios():
    def replicas(*scenarios):
        return [
            Load(ENGINE, [Open(0, 1000, [long for long, _ in scenarios])], 2.0),
            Load(ENGINE, [Open(10, 1000, [other for _, other in scenarios])]),
        ]

    cases = [(9000.0, 100.0), (7000.0, 6000.0)]
    first, second, both = (pick(replicas(*some)) for some in ([cases[0]], [cases[1]], cases))
    assert both.gain_s == pytest.approx((first.gain_s + second.gain_s) / 2)


def test_moves_come_at_two_a_second_after_a_burst_of_four():
    bucket = Bucket(Limits())
    assert bucket.held(0.0) == 4
    bucket.take(4)
    assert bucket.held(0.4) == 0
    assert bucket.held(1.0) == 2
    bucket.take(1)
    assert bucket.held(1.0) == 1
    assert bucket.held(100.0) == 4


@pytest.mark.parametrize(
    ("preemptions", "tp", "becomes"),
    [
        ([100, 106], 2, 4),
        ([100, 104], 2, 2),
        ([0, 1], 2, 4),
        ([5], 2, 2),
        ([], 2, 2),
        ([0, 0, 0, 0], 4, 2),
        ([3, 0, 0, 0], 4, 4),
        ([0, 0, 0, 0], 1, 1),
        ([100, 200], 8, 8),
    ],
)
def test_rollpackers_rule(preemptions, tp, becomes):
    assert next_degree(tp, preemptions, (1, 2, 4, 8)) == becomes
