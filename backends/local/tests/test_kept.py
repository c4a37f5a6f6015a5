"""Inputs that both ends of a connection keep."""

import random

import pytest

from rollmuxd_backend_local.agent.kept import Kept


def test_each_command_gets_its_own_input_and_what_is_used_often_is_carried_once():
    chance = random.Random(7)
    inputs = [b"%d" % number * 400 for number in range(40)]
    here, there = Kept(), Kept()
    carried: list[bytes] = []
    for stdin in (inputs[0] if turn % 2 else chance.choice(inputs) for turn in range(2_000)):
        name = here.name(stdin)
        sent = "" if here.has(name) else stdin.decode()
        here.whole(name, stdin.decode())
        carried += [stdin] if sent else []
        assert there.whole(name, sent) == stdin.decode()
    assert carried.count(inputs[0]) == 1
    assert carried.count(inputs[1]) > 1, "only the last ones are kept"


def test_short_and_long_inputs_are_not_kept():
    kept = Kept()
    assert [kept.name(b"x" * size) == "" for size in (0, 299, 300, 2**16, 2**16 + 1)] == [
        True,
        True,
        False,
        False,
        True,
    ]
    assert kept.whole("", "short") == "short"


def test_an_input_that_never_came_is_an_error():
    with pytest.raises(KeyError, match="is not kept"):
        Kept().whole("a1", "")
