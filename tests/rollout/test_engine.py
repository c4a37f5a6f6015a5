"""One replica's arithmetic: against hand-worked times, and its jumps against one iteration per step."""

import copy
import math
import random

import numpy as np
import pytest

from rollmuxd.rollout.engine import Engine, Replica, Request, Tuning, degrees, estimate, kv_capacity, step_by_step
from rollmuxd.rollout.hardware import GPUS, gpu
from rollmuxd.rollout.models import MODELS, model

H800, B14 = gpu("h800"), model("qwen2.5-14b")
#: only reading weights takes time: 10 ms a step
PLAIN = Tuning(weights=29.54 / (0.01 * 3350), contexts=1e9, decode=1e9, prefill=1e9, layer_s=0, step_s=0, sequence_s=0)


def random_case(seed):
    draw = random.Random(seed)
    engine = Engine(
        H800,
        model("qwen2.5-7b"),
        draw.choice((1, 2, 4)),
        max_seqs=draw.choice((16, 256)),
        kv_tokens=draw.choice((0, 20_000, 40_000)),
    )
    requests = [
        Request(i, draw.randint(20, 2000), draw.randint(1, 3000), draw.choice((0.0, draw.uniform(0, 20))))
        for i in range(draw.randint(5, 60))
    ]
    return engine, requests


def finished(replica, until=math.inf):
    return {name: when for when, name in replica.advance(until)}


def test_a_step_takes_what_its_parts_take():
    engine = Engine(H800, B14, 2)
    weights = 29.54e9 / (2 * 0.87 * 3.35e12)
    contexts = 4096 * 196_608 / (2 * 0.88 * 3.35e12)
    reduces = 2 * 48 * (4.6e-6 + 2 * 5120 / (137e9 * 400 / 900))
    assert engine.step_s(1, 4096) == pytest.approx(weights + contexts + 48 * 35e-6 + 2e-3 + 15e-6 + reduces)


def test_a_large_batch_is_bound_by_arithmetic():
    engine = Engine(H800, B14)
    assert engine.step_s(2000, 0) - engine.step_s(1000, 0) == pytest.approx(
        1000 * (2 * 14.77e9 / (0.7 * 989.5e12) + 15e-6)
    )


def test_the_kv_cache_is_what_weights_and_activations_leave():
    assert kv_capacity(H800, B14, 1) == pytest.approx((0.9 * 80 - 4 - 29.54) * 1e9 / 196_608, abs=1)
    assert degrees(H800, model("qwen2.5-32b"), 16_384) == (2, 4, 8)
    assert degrees(gpu("rtx-4090"), B14, 16_384) == (2, 4, 8)
    with pytest.raises(ValueError, match=r"qwen2.5-72b does not fit on 1 h800: its weights are 145"):
        Engine(H800, model("qwen2.5-72b"))


def test_a_step_over_few_tokens_reads_few_experts():
    moe = model("qwen3-30b-a3b")
    assert moe.touched(1) == pytest.approx(2 * moe.active)
    assert moe.touched(10_000) == pytest.approx(moe.weights)


@pytest.mark.parametrize("name", ["H20", "nope"])
def test_names_are_known_in_any_case_and_refused_with_those_that_are(name):
    if name == "H20":
        assert gpu(name) is GPUS["h20"]
    else:
        with pytest.raises(ValueError, match="no figures are known for GPU 'nope'; known are h20, h800"):
            gpu(name)
        with pytest.raises(ValueError, match="known are qwen2"):
            model(name)
    assert all(it.source for it in GPUS.values())
    assert all(it.kv > 0 for it in MODELS.values())


def test_responses_end_when_they_have_their_tokens():
    replica = Replica(Engine(H800, B14, tuning=PLAIN))
    replica.submit([Request(1, 100, 100), Request(2, 100, 50), Request(3, 100, 1)])
    assert finished(replica) == {3: pytest.approx(0.01), 2: pytest.approx(0.5), 1: pytest.approx(1.0)}
    assert replica.idle


def test_a_request_is_begun_when_it_comes():
    replica = Replica(Engine(H800, B14, tuning=PLAIN))
    replica.submit([Request(1, 100, 100, arrives=5.0)])
    assert replica.advance(4.0) == []
    assert finished(replica) == {1: pytest.approx(6.0)}


@pytest.mark.parametrize("seed", range(25))
def test_jumps_end_each_response_when_single_steps_do(seed):
    engine, requests = random_case(seed)
    reference = step_by_step(engine, copy.deepcopy(requests))
    replica = Replica(engine)
    replica.submit(copy.deepcopy(requests))
    assert finished(replica) == pytest.approx(reference, rel=1e-9)


def test_the_cases_above_preempt():
    preempted = 0
    for seed in range(25):
        engine, requests = random_case(seed)
        replica = Replica(engine)
        replica.submit(requests)
        replica.advance()
        preempted += replica.preemptions > 10
    assert preempted >= 5


@pytest.mark.parametrize("seed", range(5))
def test_looking_at_a_replica_often_changes_nothing(seed):
    engine, requests = random_case(seed)
    whole, looked = Replica(engine), Replica(engine)
    whole.submit(copy.deepcopy(requests))
    looked.submit(copy.deepcopy(requests))
    found = {}
    for second in range(1000):
        found |= finished(looked, second / 3)
        assert sum(it.made for it in looked.requests()) <= sum(it.length for it in requests)
    assert found == pytest.approx(finished(whole), rel=1e-9)


def test_a_request_that_is_taken_goes_on_elsewhere_from_its_last_token():
    here, there = (Replica(Engine(H800, B14, tuning=PLAIN)) for _ in range(2))
    here.submit([Request(1, 100, 200), Request(2, 100, 300)])
    here.advance(1.0)
    (moved,) = here.take([1])
    assert (moved.made, moved.remaining) == (100, 100)
    moved.arrives = 1.5
    there.submit([moved])
    assert finished(there) == {1: pytest.approx(2.5)}
    assert finished(here) == {2: pytest.approx(3.0)}


def test_the_estimate_is_what_a_replica_takes_but_for_prefill():
    engine = Engine(H800, B14)
    draw = np.random.default_rng(1)
    lengths = draw.integers(500, 8000, 40)
    replica = Replica(engine)
    replica.submit([Request(i, 10, int(length)) for i, length in enumerate(lengths)])
    took = max(finished(replica).values())
    assert float(estimate(engine, lengths[None].astype(float), np.full(40, 10.0))[0]) == pytest.approx(took, rel=0.01)


def test_an_estimate_with_too_little_kv_takes_waves():
    few, many = Engine(H800, B14, kv_tokens=20_000), Engine(H800, B14)
    lengths, context = np.full((1, 40), 2000.0), np.full(40, 10.0)
    assert estimate(few, lengths, context)[0] > 1.5 * estimate(many, lengths, context)[0]
    replica = Replica(few)
    replica.submit([Request(i, 10, 2000) for i in range(40)])
    assert float(estimate(few, lengths, context)[0]) == pytest.approx(max(finished(replica).values()), rel=0.25)


def test_padding_changes_no_estimate():
    engine = Engine(H800, B14)
    lengths, context = np.array([[100.0, 900.0]]), np.array([10.0, 20.0])
    padded = np.array([[0.0, 100.0, 0.0, 900.0]]), np.array([0.0, 10.0, 0.0, 20.0])
    assert estimate(engine, *padded) == pytest.approx(estimate(engine, lengths, context))
