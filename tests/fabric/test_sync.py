"""Which host fetches what, and how long it takes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmuxd.fabric.sync import Links, seconds, shards

MBIT = 125_000.0
#: 8 + 8 hosts with 10 Mbit/s each between them, and 200 Mbit/s within
EIGHT = Links(slow=(10 * MBIT,) * 8, hosts=8, fabric=200 * MBIT)
M = 64 << 20


def test_flat_sends_every_host_a_copy_over_its_own_line():
    assert seconds("flat", M, EIGHT) == pytest.approx(53.7, abs=0.05)


def test_shards_cross_all_lines_at_once_and_the_fabric_works_meanwhile():
    assert seconds("rails", M, EIGHT) == pytest.approx(6.71, abs=0.01)
    assert seconds("two", M, EIGHT) == pytest.approx(6.71 + 2.68, abs=0.01), "the paper's broadcast comes after it"


def test_the_last_chunk_still_has_to_reach_every_other_host():
    extra = seconds("rails", M, EIGHT, 256 << 10) - seconds("rails", M, EIGHT)
    assert extra == pytest.approx(0.2097 + 7 * 0.0105, abs=0.001)


def test_a_fabric_that_is_slower_than_the_lines_decides():
    slow = Links(slow=(10 * MBIT,) * 8, hosts=8, fabric=20 * MBIT)
    assert seconds("rails", M, slow) == pytest.approx(7 / 8 * M / (20 * MBIT))


@given(
    st.lists(st.floats(1e5, 1e10), min_size=1, max_size=16), st.integers(1, 16), st.floats(1, 1e3), st.floats(1e6, 1e12)
)
def test_rails_misses_the_cheapest_way_by_the_way_of_one_chunk_at_most(slow, hosts, faster, size):
    """So there is no choice to plan, where the fabric is as fast as one slow line."""
    chunk, links = 4 << 20, Links(slow=tuple(slow), hosts=hosts, fabric=faster * min(slow))
    last = chunk / min(slow) + (hosts - 1) * chunk / links.fabric
    cheapest = min(seconds("flat", size, links), seconds("two", size, links))
    assert seconds("rails", size, links, chunk) <= (cheapest + last) * (1 + 1e-9)


def test_a_dead_line_gets_no_shard_and_of_dead_lines_all_are_equal():
    assert shards(8, (1, 0, 1)) == (range(4), range(4, 4), range(4, 8))
    assert shards(8, (0, 0)) == (range(4), range(4, 8))


@given(st.integers(1, 5_000), st.lists(st.floats(0, 1e10), min_size=1, max_size=40))
def test_shards_are_all_chunks_once_and_in_proportion(chunks, rates):
    cut = shards(chunks, rates)
    assert [chunk for shard in cut for chunk in shard] == list(range(chunks))
    whole = sum(rates)
    for rate, shard in zip(rates, cut, strict=True):
        share = rate / whole if whole else 1 / len(rates)
        assert abs(len(shard) - chunks * share) <= 1 + 1e-6 * chunks


@pytest.mark.parametrize(
    "links",
    [
        dict(slow=(), hosts=1, fabric=1.0),
        dict(slow=(1.0,), hosts=0, fabric=1.0),
        dict(slow=(0.0,), hosts=1, fabric=1.0),
    ],
)
def test_lines_that_cannot_be_are_refused(links):
    with pytest.raises(ValueError, match=r"at least one of each|above 0"):
        Links(**links)
