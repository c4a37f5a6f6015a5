"""Which prompts come in which round: no prompt is dropped, whatever is first, whatever fails, wherever it ends."""

import json
import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmuxd_rounds import Ledger


def epoch(ledger, choose):
    """All rounds of one epoch, as (plan, committed prompts)."""
    rounds = []
    while not rounds or not ledger.epoch_done:
        plan = ledger.next()
        done = choose(plan)
        ledger.commit(plan, done)
        rounds.append((plan, done))
    return rounds


def the_first(plan):
    return plan.prompts[: plan.want]


@settings(max_examples=200, deadline=None)
@given(
    count=st.integers(1, 120),
    want=st.integers(1, 12),
    n=st.integers(1, 4),
    eta=st.floats(1.0, 2.5),
    seed=st.integers(0, 5),
    first=st.integers(0, 1 << 32),
)
def test_each_prompt_is_committed_once_in_an_epoch_and_deferred_once_at_most(count, want, n, eta, seed, first):
    chance = random.Random(first)
    ledger = Ledger(count, n=n, want=want, eta=eta, eta_n=eta, seed=seed)
    for _ in range(2):
        rounds = epoch(ledger, lambda plan: chance.sample(plan.prompts, plan.want))

        assert Counter(prompt for _, done in rounds for prompt in done) == Counter(range(count))
        launched = Counter(prompt for plan, _ in rounds for prompt in plan.prompts)
        assert max(launched.values()) <= 2, "deferred once at most"
        assert all(len(done) == want for plan, done in rounds if plan.kind != "flush")
        assert [plan.number for plan, _ in rounds] == sorted(plan.number for plan, _ in rounds)


@settings(max_examples=100, deadline=None)
@given(count=st.integers(1, 80), want=st.integers(1, 8), crash=st.integers(0, 30), seed=st.integers(0, 3))
def test_after_a_crash_the_rounds_go_on_as_if_there_had_been_none(count, want, crash, seed):
    """The state lies in the trainer's checkpoint: as JSON here, which it must survive."""
    whole, broken = (Ledger(count, n=2, want=want, seed=seed) for _ in range(2))
    expected = epoch(whole, the_first)
    saved = None
    for number, (plan, done) in enumerate(expected):
        if number == crash:  # a round was planned, and its weights are lost with it
            broken.next()
            broken = Ledger(count, n=2, want=want, seed=seed)
            broken.load_state_dict(saved)
        assert broken.next() == plan
        broken.commit(plan, done)
        saved = json.loads(json.dumps(broken.state_dict()))


def test_a_long_round_is_of_the_oldest_that_were_deferred_and_launches_no_more_than_it_keeps():
    ledger = Ledger(100, n=8, want=4, seed=1)
    late = []
    while (plan := ledger.next()).kind == "short":
        assert (len(plan.prompts), plan.launch) == (5, 10)
        ledger.commit(plan, plan.prompts[1:])
        late.append(plan.prompts[0])

    assert (plan.kind, plan.prompts, plan.launch, plan.want) == ("long", tuple(late), 8, 4)
    assert len(late) == 4, "four short rounds and a long one"


def test_short_and_long_rounds_come_four_to_one():
    kinds = Counter(plan.kind for plan, _ in epoch(Ledger(16_000, n=8, want=32), the_first))

    assert kinds["short"] / kinds["long"] == pytest.approx(4, rel=0.1)


def test_what_is_left_at_the_end_of_an_epoch_comes_in_rounds_that_launch_no_more():
    rounds = epoch(Ledger(10, n=2, want=4), the_first)

    assert [(plan.kind, plan.want, plan.launch) for plan, _ in rounds] == [
        ("short", 4, 3), ("short", 4, 3), ("flush", 2, 2),
    ]  # fmt: skip


def test_another_order_in_the_next_epoch():
    ledger = Ledger(40, n=1, want=4)

    first, second = ([plan.prompts for plan, _ in epoch(ledger, the_first)] for _ in range(2))

    assert first != second


def test_a_round_is_committed_whole_and_once():
    ledger = Ledger(20, n=1, want=4)
    plan = ledger.next()

    with pytest.raises(ValueError, match="4 groups, and 3 are committed: take all groups"):
        ledger.commit(plan, plan.prompts[:3])
    ledger.commit(plan, the_first(plan))
    with pytest.raises(ValueError, match="is not the one that is to be committed"):
        ledger.commit(plan, the_first(plan))


def test_a_checkpoint_of_other_prompts_is_refused():
    with pytest.raises(ValueError, match="the checkpoint is of 20 prompts and seed 0, and these rounds have 21 and 0"):
        Ledger(21, n=1, want=4).load_state_dict(Ledger(20, n=1, want=4).state_dict())


@pytest.mark.parametrize("wrong", [{"eta": 0.9}, {"eta_n": 0}, {"want": 0}, {"n": 0}])
def test_numbers_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match="each is at least 1"):
        Ledger(10, **{"n": 2, "want": 4, **wrong})


def test_over_sampling_rounds_up():
    plan = Ledger(1000, n=8, want=30).next()

    assert (len(plan.prompts), plan.launch) == (math.ceil(1.25 * 30), 10)
