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


DAY = 86_400_000


def begun(*, wall, last):
    """A clock that began at this wall time with the last fact of that one; both in days. Set ``wall[0]`` later."""
    monotonic, now = [0.0], [wall * 86_400.0]
    clock = SystemClock(monotonic=lambda: monotonic[0], wall=lambda: now[0])
    clock.not_before(last * DAY)
    return clock, monotonic, now


def test_a_time_that_stays_ahead_of_the_machines_clock_is_in_doubt_and_it_is_said_by_how_much():
    clock, monotonic, wall = begun(wall=20_000, last=21_461)
    assert "2028-10-04, 1461 days ahead of this machine's clock" in clock.doubt()
    monotonic[0] += 3 * 86_400
    wall[0] += 3 * 86_400
    assert "1461 days ahead" in clock.doubt()


def test_a_machines_clock_that_is_set_while_the_daemon_runs_puts_its_time_in_doubt():
    clock, _, wall = begun(wall=20_000, last=20_000)
    assert clock.doubt() == ""
    wall[0] -= 2 * 86_400
    assert "2 days ahead" in clock.doubt()
    wall[0] += 12 * 86_400
    assert "10 days behind this machine's clock" in clock.doubt()


def test_a_beginning_long_after_the_last_fact_is_in_doubt_for_a_day():
    clock, monotonic, wall = begun(wall=20_000, last=18_539)
    assert "began 1461 days after its last fact, of 2020-10-04" in clock.doubt()
    clock.not_before(20_000 * DAY)  # the writer has begun anew
    assert "began 1461 days after" in clock.doubt()
    monotonic[0] += 90_000
    wall[0] += 90_000
    assert clock.doubt() == ""


def test_a_first_start_and_one_after_a_few_days_are_in_no_doubt():
    assert begun(wall=20_000, last=0)[0].doubt() == ""
    assert begun(wall=20_000, last=19_994)[0].doubt() == ""
    assert begun(wall=20_000, last=20_000.9)[0].doubt() == ""
