"""What an owner has used: half is forgotten in a half-life, in one step or in many."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmuxd.core.model import Owner
from rollmuxd.core.shares import use_of

#: the half-life
DAY = 86_400_000


@pytest.mark.parametrize(("days", "left"), [(0, 1000), (1, 500), (2, 250), (3, 125)])
def test_half_is_forgotten_in_each_half_life(days: int, left: int) -> None:
    assert use_of(Owner(use=1000), days * DAY) == pytest.approx(left, abs=1)


@given(st.integers(0, 10**15), st.integers(0, 400 * DAY))
def test_it_is_what_the_formula_says(amount: int, elapsed: int) -> None:
    assert use_of(Owner(use=amount), elapsed) == pytest.approx(amount * 0.5 ** (elapsed / DAY), rel=1e-6, abs=1)


@given(st.integers(0, 5_000), st.integers(0, 10**13), st.lists(st.integers(0, DAY), min_size=1, max_size=8))
def test_counted_in_steps_it_is_what_it_is_counted_at_once(gpus: int, use: int, steps: list[int]) -> None:
    at_once = use_of(Owner(gpus=gpus, use=use, at=0), sum(steps))
    owner = Owner(gpus=gpus, use=use, at=0)
    for step in steps:
        owner.use, owner.at = use_of(owner, owner.at + step), owner.at + step
    assert owner.use == pytest.approx(at_once, rel=1e-9, abs=(2 + gpus) * len(steps))  # a ms for each step


def test_gpus_held_for_a_short_time_count_in_full() -> None:
    assert use_of(Owner(gpus=8, at=0), 1_000) == pytest.approx(8_000, rel=1e-3)
    assert sum(use_of(Owner(gpus=8, at=at), at + 1) for at in range(1_000)) == pytest.approx(8_000, rel=0.01)


def test_who_holds_for_ever_comes_near_a_limit_and_never_beyond() -> None:
    limit = 4 * DAY / math.log(2)
    assert use_of(Owner(gpus=4, at=0), 60 * DAY) == pytest.approx(limit, rel=1e-5)
    assert use_of(Owner(gpus=4, use=round(limit), at=0), DAY) == pytest.approx(limit, rel=1e-5)


def test_an_owner_of_whom_nothing_is_known_has_used_nothing() -> None:
    assert use_of(None, DAY) == 0
