"""Time never goes back, whoever sets the wall clock."""

from rollmuxd.daemon.clock import SystemClock


def test_the_wall_clock_is_asked_once():
    monotonic, wall = [5.0], [1000.0]
    clock = SystemClock(monotonic=lambda: monotonic[0], wall=lambda: wall[0])
    assert clock.now() == 1_000_000
    wall[0] = 10.0
    monotonic[0] += 0.3

    assert clock.now() == 1_000_300


def test_it_goes_on_from_a_later_past():
    monotonic = [5.0]
    clock = SystemClock(monotonic=lambda: monotonic[0], wall=lambda: 1.0)
    clock.not_before(9_000)
    assert clock.now() == 9_000
    monotonic[0] += 1

    assert clock.now() == 10_000


def test_an_earlier_past_changes_nothing():
    clock = SystemClock(monotonic=lambda: 0.0, wall=lambda: 10.0)
    clock.not_before(9_000)

    assert clock.now() == 10_000
