"""What transcripts of drained nodes do not show: how much is tried, and under what names."""

from itertools import islice, permutations

from rollmuxd.core import draining


def names(count):
    return [f"n{index}" for index in range(count)]


def test_every_way_to_take_other_nodes_is_tried_once_and_takes_no_node_twice():
    ways = list(draining._distinct((names(5),) * 3))

    assert ways == list(permutations(names(5), 3))


def test_where_there_is_one_node_too_few_that_is_found_after_as_many_tries_as_any():
    """Every way ends before the last node: counted only at its end, none would ever be counted."""
    ways = list(islice(draining._distinct((names(29),) * 30), 5))

    assert ways == [None] * 5
