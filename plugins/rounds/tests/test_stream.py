"""Training that begins while the rollout runs."""

import numpy as np
import pytest

from rollmuxd_rounds import Accumulator, Adaptive, EarlyStart


def loss_gradients(weights, inputs, targets):
    """Gradients of the summed squared errors of a linear model."""
    errors = inputs @ weights - targets
    return [2 * inputs.T @ errors, np.array([errors.sum()])]


def test_the_accumulator_gives_the_gradient_of_the_batch_whatever_the_streamed_batches():
    rng = np.random.default_rng(0)
    weights, inputs, targets = rng.normal(size=7), rng.normal(size=(64, 7)), rng.normal(size=64)
    whole = [gradient / 64 for gradient in loss_gradients(weights, inputs, targets)]
    one, other = Accumulator(), Accumulator()
    for to, (first, last) in ((one, (0, 3)), (other, (3, 20)), (one, (20, 63)), (other, (63, 64))):
        to.add(loss_gradients(weights, inputs[first:last], targets[first:last]), last - first)
    one.merge(other)

    streamed = one.mean()

    assert max(np.abs(a - b).max() for a, b in zip(streamed, whole, strict=True)) <= 1e-12
    with pytest.raises(ValueError, match="no batch was added"):
        one.mean()


def test_what_was_added_is_not_changed():
    gradient = np.ones(3)
    sums = Accumulator()
    sums.add([gradient], 1)
    sums.add([gradient], 1)

    assert gradient.tolist() == [1, 1, 1]


def ask(gate, done, *, replicas=4, kv_tokens=1000, made=(100,) * 10):
    return gate.may_move(done, 100, replicas=replicas, kv_tokens=kv_tokens, made=made, lengths=[150] * 9)


def test_the_gate_asks_once_at_each_further_five_percent_and_says_yes_once():
    gate, full = EarlyStart(), {"kv_tokens": 700}
    assert [ask(gate, done, **full) for done in (10, 19, 20, 21)] == [False] * 4  # 1,500 tokens do not fit on 1,400
    assert ask(gate, 24, kv_tokens=750) is False, "20 % was asked"
    assert ask(gate, 25, kv_tokens=750) is True
    assert ask(gate, 30, kv_tokens=10_000) is False, "half of them have gone"


def test_no_replica_is_split_and_it_is_too_late_after_half():
    assert ask(EarlyStart(), 30, replicas=1, kv_tokens=10**6) is False
    assert ask(EarlyStart(), 51, kv_tokens=10**6) is False
    assert ask(EarlyStart(), 50, kv_tokens=10**6) is True


def test_of_three_replicas_two_stay():
    assert ask(EarlyStart(), 30, replicas=3, kv_tokens=750) is True
    assert ask(EarlyStart(), 30, replicas=2, kv_tokens=750) is False


def test_the_limit_follows_the_longest_correct_answer_within_its_bounds():
    limits = Adaptive(factor=1.5, least_s=2, most_s=30)
    assert limits.limit_s("p") == 30
    limits.took("p", 20.0, correct=False)
    assert limits.limit_s("p") == 30
    for seconds, limit in ((0.5, 2.0), (4.0, 6.0), (3.0, 6.0), (25.0, 30.0)):
        limits.took("p", seconds, correct=True)
        assert limits.limit_s("p") == limit
    assert limits.limit_s("q") == 30
