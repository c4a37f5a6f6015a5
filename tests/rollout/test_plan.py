"""The planner: near the optimum where that can be computed, and silent where a change would not pay."""

import random
from itertools import product

import numpy as np
import pytest

from rollmuxd.rollout.engine import Engine, estimate
from rollmuxd.rollout.hardware import gpu
from rollmuxd.rollout.lengths import Prior
from rollmuxd.rollout.models import model
from rollmuxd.rollout.plan import (
    Gate,
    Plan,
    assign,
    candidates,
    contiguous,
    dealt,
    free_kv,
    improve,
    replicas,
    spread,
    start,
    value,
)

ENGINES = {tp: Engine(gpu("h800"), model("qwen2.5-14b"), tp) for tp in (1, 2, 4, 8)}


def optimum(layouts, gpus, remaining, context):
    """The best layout and assignment, of all there are."""
    count, best = len(context), np.inf
    masks = range(1 << count)
    for layout in layouts:
        took = {}
        for degree in set(layout):
            took[degree] = [
                float(estimate(ENGINES[degree], remaining[:, places], context[places])[0])
                for places in ([i for i in range(count) if mask >> i & 1] for mask in masks)
            ]
        degrees = replicas(layout, gpus)
        so_far = list(took[degrees[0]])
        for degree in degrees[1:]:
            made = []
            for mask in masks:
                part, least = mask, np.inf
                while True:
                    least = min(least, max(took[degree][part], so_far[mask ^ part]))
                    if not part:
                        break
                    part = (part - 1) & mask
                made.append(least)
            so_far = made
        best = min(best, so_far[-1])
    return best


@pytest.mark.slow
def test_a_plan_is_within_a_tenth_of_the_best_of_all_on_200_cases():
    worst = 1.0
    for seed in range(200):
        draw = random.Random(seed)
        count, nodes = draw.randint(2, 7), draw.randint(1, 3)
        remaining = np.array([[draw.uniform(100, 16_000) for _ in range(count)]])
        context = np.array([draw.uniform(10, 4000) for _ in range(count)])
        # one replica a node, of each degree; or a node of one and a node of two
        layouts, gpus = ([(tp,) * nodes for tp in ENGINES], 0) if seed % 2 else ([(8, 8), (8, 4)], 8)
        mine = min(assign(layout, remaining, context, ENGINES, gpus or layout[0]).value_s for layout in layouts)
        worst = max(worst, mine / min(optimum([it], gpus or it[0], remaining, context) for it in layouts))
    assert worst <= 1.10


def test_candidates_are_at_most_16_and_fit_their_nodes():
    found = candidates(8, ENGINES)
    assert len(found) <= 16
    assert (1,) * 8 in found
    assert (8, 8, 8, 8, 2, 2, 2, 2) in found
    assert (8, 1, 1, 1, 1, 1, 1, 1) in found
    assert candidates(1, ENGINES) == [(1,), (2,), (4,), (8,)]
    assert replicas((8, 2)) == [8, 2, 2, 2, 2]


def test_dealing_goes_there_and_back():
    assert dealt(7, 3).tolist() == [0, 1, 2, 2, 1, 0, 0]
    groups = np.repeat(np.arange(4), 2)
    assert spread(groups, 4).tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert contiguous(groups, 4).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_value_is_the_slowest_replica_of_each_scenario():
    draw = np.random.default_rng(0)
    remaining, context = draw.uniform(100, 5000, (3, 20)), draw.uniform(10, 500, 20)
    layout, at = (8, 4), np.arange(20) % 3
    by_hand = [
        max(
            float(estimate(ENGINES[tp], remaining[s : s + 1, at == k], context[at == k])[0]) * slower
            for k, (tp, slower) in enumerate([(8, 1.0), (4, 1.5), (4, 1.5)])
        )
        for s in range(3)
    ]
    assert value(layout, at, remaining, context, ENGINES, slower=(1.0, 1.5)) == pytest.approx(by_hand)


def test_a_step_of_long_responses_starts_wide_and_one_of_many_short_ones_narrow():
    draw = np.random.default_rng(0)
    few = start(Prior(9.0, 0.4, 0.4, 16_384), 4, 4, 200, 1, ENGINES, draw)
    many = start(Prior(6.0, 0.1, 0.1, 16_384), 512, 8, 200, 1, ENGINES, draw)
    assert few.layout[0] > many.layout[0]


def current(layout, count):
    return Plan(layout, np.arange(count) % len(replicas(layout)), 0.0)


def test_a_few_stragglers_are_given_more_gpus_each():
    remaining, context = np.full((4, 8), 14_000.0), np.full(8, 2000.0)
    better = improve(current((1,), 8), remaining, context, ENGINES)
    assert better is not None
    assert better.layout[0] > 1
    now = float(value((1,), current((1,), 8).at, remaining, context, ENGINES).mean())
    assert better.value_s + better.change_s < 0.92 * now
    assert better.change_s > Gate().switch_s


@pytest.mark.parametrize(
    ("what", "context", "more"),
    [
        ("nothing is left", 2000.0, {"remaining": np.zeros((4, 0))}),
        ("too soon after the last", 2000.0, {"since_s": 5.0}),
        ("changed twice", 2000.0, {"changes": 2}),
        ("the KV cache is short", 180_000.0, {}),
        ("the rest is short", 2000.0, {"remaining": np.full((4, 8), 300.0)}),
        ("the switch costs more", 2000.0, {"gate": Gate(switch_s=120.0, least_left=0.0)}),
    ],
)
def test_no_change_is_made_where(what, context, more):
    remaining = more.pop("remaining", np.full((4, 8), 14_000.0))
    held = np.full(remaining.shape[1], context)
    plan = current((1,), remaining.shape[1])
    assert improve(plan, remaining, held, ENGINES, **more) is None, what


def test_the_fullest_replica_says_how_much_kv_is_free():
    plan = Plan((1,), np.array([0, 0, 1]), 0.0)
    room = ENGINES[1].kv_tokens
    assert free_kv(plan, np.array([room / 2, room / 4, room / 8]), ENGINES) == pytest.approx(0.25)


def test_every_assignment_uses_each_request_once():
    for layout, count in product([(1,), (8, 2), (4, 4)], [1, 5, 40]):
        draw = np.random.default_rng(count)
        plan = assign(layout, draw.uniform(10, 9000, (4, count)), np.full(count, 50.0), ENGINES)
        assert len(plan.at) == count
        assert set(plan.at) <= set(range(len(replicas(layout))))
