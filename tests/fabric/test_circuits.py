"""Circuits follow the demand, and are changed only where that pays."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rollmuxd.fabric.circuits import Gate, shared_out


def test_a_ring_gets_all_ports_of_its_racks():
    assert shared_out({(0, 1): 1.0, (1, 2): 1.0, (2, 0): 1.0}, 31) == {(0, 1): 31, (1, 2): 31, (2, 0): 31}


def test_a_full_mesh_gets_equal_shares():
    got = shared_out({(a, b): 1.0 for a in range(4) for b in range(4) if a != b}, 30)
    assert set(got.values()) == {10}


def test_two_halves_get_one_another_and_nothing_within_a_half():
    got = shared_out({(a, b): 1.0 for a in (0, 1) for b in (2, 3)}, 8)
    assert got == {(0, 2): 4, (0, 3): 4, (1, 2): 4, (1, 3): 4}


def test_twice_the_bytes_get_twice_the_circuits():
    assert shared_out({(0, 1): 2.0, (0, 2): 1.0}, 9) == {(0, 1): 6, (0, 2): 3}


def test_circuits_between_pods_use_the_ports_that_reach_the_core():
    assert shared_out({(0, 1): 1.0}, 31, far={0: 0, 1: 1}, far_ports=24) == {(0, 1): 24}
    assert shared_out({(0, 1): 1.0}, 31, far={0: 0, 1: 0}, far_ports=24) == {(0, 1): 31}


_demands = st.dictionaries(st.tuples(st.integers(0, 5), st.integers(0, 5)), st.floats(0.0, 10.0), max_size=15)


@given(_demands, st.integers(1, 12))
def test_no_rack_has_more_circuits_than_ports_and_no_port_idles_beside_a_demand(demand, ports):
    got = shared_out(demand, ports)
    sends, receives = Counter(), Counter()
    for (a, b), circuits in got.items():
        assert demand[a, b] > 0
        sends[a] += circuits
        receives[b] += circuits
    assert max([0, *sends.values(), *receives.values()]) <= ports
    for (a, b), size in demand.items():
        assert a == b or not size or ports in (sends[a], receives[b])


def test_a_change_is_made_where_its_gain_exceeds_what_the_next_phase_waits():
    gate = Gate(t_ocs_s=0.02)
    assert gate.opens(window_s=0.0, gain_s=0.05)
    assert not gate.opens(window_s=0.0, gain_s=0.02)
    # in a window that is long enough a small gain will do
    assert gate.opens(window_s=1.0, gain_s=0.002)
    # a window is predicted: one that is just long enough does not count in full
    assert gate.exposed_s(0.02) > 0
    assert gate.exposed_s(0.024) == 0
