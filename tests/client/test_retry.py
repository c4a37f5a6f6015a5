"""Retries: what is repeated, how long, and what is said meanwhile. The clock and the daemon are played by hand."""

import pytest

from rollmuxd.client.calls import Call
from rollmuxd.client.errors import GaveUp, NotFound, TooManyRequests, Unavailable, Unreachable
from rollmuxd.client.retry import Pause, duration, patience_from, persist

CALL = Call("GET", "/v1/jobs", dict)


class Clock:
    """Stands still but for the pauses of the flow."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def drive(answers, *, call=CALL, patience_s=None):
    """Play a list of answers; returns (result or error, pauses, lines said)."""
    clock, said, pauses, answers = Clock(), [], [], iter(answers)
    flow = persist(call, patience_s=patience_s, clock=clock, tell=said.append)
    try:
        step = next(flow)
        while True:
            if isinstance(step, Pause):
                pauses.append(step.seconds)
                clock.now += step.seconds
                step = flow.send(None)
            else:
                answer = next(answers)
                step = flow.throw(answer) if isinstance(answer, Exception) else flow.send(answer)
    except StopIteration as end:
        return end.value, pauses, said
    except Exception as error:
        return error, pauses, said


def test_connection_errors_and_503_are_tried_again_until_there_is_an_answer():
    result, pauses, _ = drive([Unreachable("refused"), Unavailable("starting"), TooManyRequests("slow down"), "jobs"])

    assert result == "jobs"
    assert len(pauses) == 3


def test_a_refusal_that_no_repetition_cures_is_raised_at_once():
    result, pauses, _ = drive([NotFound("no such job")])

    assert isinstance(result, NotFound)
    assert pauses == []


def test_a_call_that_may_not_be_repeated_is_not():
    result, pauses, _ = drive([Unreachable("refused")], call=Call("POST", "/v1/keys", dict, repeat=False))

    assert isinstance(result, Unreachable)
    assert pauses == []


def test_pauses_grow_to_some_ten_seconds_and_never_beyond_fifteen():
    _, pauses, _ = drive([Unreachable("refused")] * 40 + ["jobs"])

    assert pauses[0] <= 0.15
    assert 5 <= pauses[-1] <= 15
    assert max(pauses) <= 15
    assert len({round(pause, 6) for pause in pauses[-10:]}) > 1  # jitter: clients must not come back in step


def test_the_daemons_own_wish_how_long_to_wait_is_respected():
    _, pauses, _ = drive([TooManyRequests("full", status=429, retry_after_s=7.0), "jobs"])

    assert 7.0 <= pauses[0] < 7.2


def test_a_daemon_that_asks_for_a_week_is_asked_again_within_a_minute():
    _, pauses, _ = drive([Unavailable("no", status=503, retry_after_s=604_800.0), "jobs"])

    assert pauses[0] <= 60.0


def test_one_stale_connection_is_not_worth_a_line():
    _, _, said = drive([Unreachable("server disconnected"), "jobs"])

    assert said == []


def test_trouble_is_said_once_then_every_minute_and_so_is_its_end():
    _, pauses, said = drive([Unreachable("connection refused")] * 30 + ["jobs"])

    minutes = sum(pauses) / 60
    assert 3 < minutes < 7
    assert minutes - 1 < len(said) - 1 <= minutes + 2  # the last one says that it is over
    assert "connection refused" in said[0]
    assert "answers again" in said[-1]


def test_without_a_limit_it_goes_on_for_hours():
    result, pauses, _ = drive([Unreachable("refused")] * 5000 + ["jobs"])

    assert result == "jobs"
    assert sum(pauses) > 3600


def test_with_a_limit_it_gives_up_and_says_why():
    result, pauses, _ = drive([Unreachable("connection refused")] * 100, patience_s=30.0)

    assert isinstance(result, GaveUp)
    assert "connection refused" in str(result)
    assert 30 <= sum(pauses) <= 46


def test_the_limit_comes_from_the_environment():
    assert patience_from({}) is None
    assert patience_from({"ROLLMUX_GIVE_UP_S": "90"}) == 90.0


def test_a_limit_that_is_no_number_is_named():
    with pytest.raises(Exception, match="ROLLMUX_GIVE_UP_S=soon"):
        patience_from({"ROLLMUX_GIVE_UP_S": "soon"})


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (59, "59 s"), (60, "1 min"), (200, "3 min 20 s"), (700, "11 min"), (7500, "2 h 5 min")],
)
def test_durations_read_as_people_write_them(seconds, text):
    assert duration(seconds) == text
