"""Flows share links fairly: closed forms, and what every sharing must keep."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmuxd.fabric.flows import Flow, ends, rates, seconds

EXACT = 1e-9


def test_a_ring_gets_the_full_rate_of_each_link():
    got = rates([50e9] * 8, [Flow((i,)) for i in range(8)])
    assert np.allclose(got, 50e9, rtol=EXACT)


def test_an_incast_shares_the_one_link_into_the_receiver():
    # links 0 to 6 lead out of the senders, link 7 into the receiver
    got = rates([50e9] * 8, [Flow((i, 7)) for i in range(7)])
    assert np.allclose(got, 50e9 / 7, rtol=EXACT)


def test_a_rack_with_a_quarter_of_its_uplinks_sends_at_a_quarter_of_the_rate():
    cards, uplink = 32, 32
    got = rates([50e9] * cards + [8 * 50e9], [Flow((i, uplink)) for i in range(cards)])
    assert np.allclose(got, 50e9 / 4, rtol=EXACT)


def test_what_one_flow_cannot_use_another_one_gets():
    # the first flow is held to 10 by link 0; link 1 has 100 for both
    assert rates([10.0, 100.0], [Flow((0, 1)), Flow((1,))]).tolist() == pytest.approx([10.0, 90.0], rel=EXACT)


def test_equal_flows_are_one_with_a_count():
    apart = rates([100.0, 60.0], [Flow((0,)), Flow((0,)), Flow((0,)), Flow((0, 1))])
    together = rates([100.0, 60.0], [Flow((0,), count=3), Flow((0, 1))])
    assert together.tolist() == pytest.approx([apart[0], apart[3]], rel=EXACT)


def test_a_flow_within_a_host_takes_no_time():
    assert seconds([10.0], [Flow((), size=5.0)]) == 0.0


def test_a_flow_that_ends_leaves_its_share_to_the_others():
    # 10 and 20 bytes over a link of 10 bytes per second: 5 each until the first is over after 2 s, then 10
    assert ends([10.0], [Flow((0,), 10.0), Flow((0,), 20.0)]).tolist() == pytest.approx([2.0, 3.0], rel=EXACT)


def test_nothing_to_send_takes_no_time():
    assert seconds([10.0], []) == 0.0
    assert seconds([10.0], [Flow((0,), 0.0)]) == 0.0


@st.composite
def _networks(draw):
    links = draw(st.integers(1, 6))
    capacity = draw(st.lists(st.floats(0.5, 100.0), min_size=links, max_size=links))
    over = st.lists(st.integers(0, links - 1), min_size=1, max_size=4, unique=True)
    flows = draw(
        st.lists(st.builds(lambda p, c: Flow(tuple(p), count=c), over, st.integers(1, 4)), min_size=1, max_size=8)
    )
    return capacity, flows


@given(_networks())
def test_no_link_is_above_its_capacity_and_each_flow_has_a_full_one(network):
    capacity, flows = network
    got = rates(capacity, flows)
    load = [sum(flow.count * rate for flow, rate in zip(flows, got, strict=True) if link in flow.links)
            for link in range(len(capacity))]  # fmt: skip
    assert all(used <= limit * (1 + EXACT) for used, limit in zip(load, capacity, strict=True))
    for flow, rate in zip(flows, got, strict=True):
        # full, and no flow over it is faster: that is what max-min means
        assert any(
            load[link] >= capacity[link] * (1 - EXACT)
            and all(other <= rate * (1 + EXACT) for them, other in zip(flows, got, strict=True) if link in them.links)
            for link in flow.links
        )
