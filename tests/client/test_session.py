"""The conversation, step by step: the daemon's answers are played by hand."""

import pytest
from msgspec import structs

from rollmuxd.client.errors import (
    Conflict,
    GaveUp,
    JobEnded,
    NotFound,
    SlotFaulted,
    SlotLost,
    Unavailable,
    Unprocessable,
    Unreachable,
)
from rollmuxd.client.session import Held, Session
from rollmuxd.wire.answers import Reason, RegisteredView, ReleaseView, SessionView, SlotView, Waiting
from rollmuxd.wire.requests import PhaseBody, RegisterBody, WantBody

BODY = RegisterBody("a", [PhaseBody("rollout", ["rollout"])], {"rollout": WantBody()}, idempotency_key="key")


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def talk():
    said = []
    made = Session(BODY, clock=Clock(), tell=said.append)
    made.said, made.job, made.session = said, "j1", "s1"
    return made


def view(status="admitted", **more):
    return RegisteredView("j1", "me", "me", "a", 1, status, "2026-01-01T00:00:00Z", **more)


def slot(status, request_id="", **more):
    return SlotView("t1", "j1", "rollout", status, request_id, **more)


RUNNING = slot("running", fence="1.7", gpus=["h/gpu0"])


def bodies(steps):
    return [(step.method, step.path, step.body) for step in steps if type(step).__name__ == "Call"]


def test_a_start_registers_with_its_key_and_opens_a_session_for_this_process(talk, play):
    sessions = []
    talk.on_session = sessions.append

    _, steps = play(talk.start(), [view(), SessionView("s1", "j1", 1, 60, 15)])

    (_, _, register), (_, path, session) = bodies(steps)
    assert register.idempotency_key == "key"
    assert path == "/v1/jobs/j1/sessions"
    assert session.pid > 0
    assert session.started.isdigit()
    assert sessions[0].heartbeat_s == 15


def test_a_process_that_joins_its_run_waits_for_a_daemon_that_is_away_while_it_tidies_up_after_the_one_before(talk):
    flow = talk.start()
    next(flow)
    flow.send(view(slot="t1"))
    flow.send(SessionView("s1", "j1", 1, 60, 15))
    step = flow.send(RUNNING)
    assert step.path == "/v1/slots/t1/release"

    for _ in range(8):  # a long restart
        talk._clock.now += 5
        step = flow.throw(Unreachable("away")) if type(step).__name__ == "Call" else flow.send(None)
    step = flow.send(None) if type(step).__name__ == "Pause" else step

    with pytest.raises(StopIteration):
        flow.send(ReleaseView("t1", "over"))


def test_a_process_that_joins_its_run_while_a_load_is_under_way_releases_what_comes_of_it(talk, play):
    _, steps = play(
        talk.start(),
        [view(slot="t1"), SessionView("s1", "j1", 1, 60, 15), slot("loading"), slot("loading"), RUNNING]
        + [ReleaseView("t1", "over")],
    )

    assert [path for _, path, _ in bodies(steps)][2:] == ["/v1/slots/t1"] * 3 + ["/v1/slots/t1/release"]
    assert "which the process before this one held" in talk.said[0]


def test_a_job_without_a_place_says_why_and_what_would_let_it_in(talk, play):
    waiting = Waiting([Reason("full", "both rollout nodes are taken")], 2, ["slo=2.0"])

    play(talk.start(), [view("waiting", waiting=waiting), SessionView("s1", "j1", 1, 60, 15)])

    assert talk.said == [
        "a (run 1) waits for a place, number 2: both rollout nodes are taken; would start now with slo=2.0"
    ]


def test_a_run_that_is_over_cannot_be_joined(talk, play):
    with pytest.raises(JobEnded, match="run 1 of job a is lost"):
        play(talk.start(), [view("lost")])


def test_a_slot_of_the_process_before_this_one_is_released(talk, play):
    answers = [view(slot="t1"), SessionView("s2", "j1", 1, 60, 15), RUNNING, ReleaseView("t1", "released")]

    _, steps = play(talk.start(), answers)

    assert bodies(steps)[-1][1] == "/v1/slots/t1/release"
    assert bodies(steps)[-1][2].fence == "1.7"


def test_a_request_keeps_its_id_until_it_is_granted(talk, play):
    held, steps = play(talk.enter("rollout"), [slot("queued"), slot("loading"), Unreachable("restart"), RUNNING])

    ids = {body.request_id for _, _, body in bodies(steps)}
    assert len(ids) == 1
    assert (held.slot, held.fence, held.gpus) == ("t1", "1.7", ("h/gpu0",))


def test_each_stay_has_a_request_of_its_own(talk, play):
    first, _ = play(talk.enter("rollout"), [RUNNING])
    second, _ = play(talk.enter("rollout"), [RUNNING])

    assert first.request_id != second.request_id


def waiting(talk, flow, view, until):
    """Answer each ask with ``view`` after the time for which it may block; the seconds at which a line was said."""
    step, lines_at = next(flow), []
    while talk._clock.now < 1000 + until:
        talk._clock.now += step.seconds if type(step).__name__ == "Pause" else step.body.wait_s
        step = flow.send(None if type(step).__name__ == "Pause" else view)
        lines_at += [round(talk._clock.now - 1000)] * (len(talk.said) - len(lines_at))
    return lines_at


@pytest.mark.parametrize("status", ["queued", "loading"])
def test_a_wait_below_ten_seconds_writes_no_line(talk, status):
    flow = talk.enter("rollout")
    next(flow)
    talk._clock.now += 9.9
    with pytest.raises(StopIteration):
        for answer in (slot(status), RUNNING):
            flow.send(answer)

    assert talk.said == []


@pytest.mark.parametrize("status", ["queued", "loading"])
def test_a_wait_is_told_after_ten_seconds_and_then_each_minute(talk, status):
    flow = talk.enter("rollout")
    queued = slot(status, position=2, expected_wait_s=190, reason="held by job b")

    assert waiting(talk, flow, queued, 200) == [10, 70, 130, 190]
    what = "its state is being loaded" if status == "loading" else "2 before it"
    assert talk.said[0] == f"a waits for rollout (for 10 s now): {what}, about 3 min 10 s, held by job b"
    assert talk.said[1].startswith("a waits for rollout (for 1 min 10 s now): ")
    flow.close()


def test_the_end_of_a_wait_that_was_told_is_told_too(talk):
    flow = talk.enter("rollout")
    next(flow)
    talk._clock.now += 11
    flow.send(slot("queued", position=0))
    talk._clock.now += 15
    with pytest.raises(StopIteration):
        flow.send(RUNNING)

    assert talk.said == ["a waits for rollout (for 11 s now): it is next", "a has rollout, after 26 s"]


def test_a_turn_that_comes_at_once_is_no_news(talk, play):
    play(talk.enter("rollout"), [RUNNING])

    assert talk.said == []


def test_a_daemon_that_does_not_block_is_not_asked_in_a_tight_loop(talk, play):
    _, steps = play(talk.enter("rollout"), [slot("queued")] * 50 + [RUNNING])

    pauses = [step.seconds for step in steps if type(step).__name__ == "Pause"]
    assert len(pauses) == 50
    assert pauses[-1] == 1.0


def test_a_request_that_was_dropped_while_the_daemon_was_away_is_made_anew(talk, play):
    _, steps = play(talk.enter("rollout"), [slot("queued"), slot("withdrawn"), RUNNING])

    ids = [body.request_id for _, _, body in bodies(steps)]
    assert ids[0] == ids[1] != ids[2]


def test_state_that_cannot_be_loaded_is_a_fault_with_its_reason(talk, play):
    with pytest.raises(SlotFaulted, match="CUDA out of memory") as raised:
        play(talk.enter("rollout"), [slot("loading"), slot("faulted", reason="CUDA out of memory")])

    assert raised.value.phase == "rollout"


def test_a_request_that_ended_is_known_by_its_refusal_too(talk, play):
    # The daemon answers 409 for a request whose slot will never run; `data` says what became of it.
    data = {"slot": "t1", "status": "faulted", "reason": "CUDA out of memory"}
    with pytest.raises(SlotFaulted, match="CUDA out of memory"):
        play(talk.enter("rollout"), [slot("loading"), Conflict("slot t1 is faulted", data=data)])

    data = {"slot": "t1", "status": "withdrawn", "reason": "nobody asked for it any more"}
    _, steps = play(talk.enter("rollout"), [slot("queued"), Conflict("slot t1 is withdrawn", data=data), RUNNING])
    ids = [body.request_id for _, _, body in bodies(steps)]
    assert ids[0] == ids[1] != ids[2]


def test_a_fault_is_known_while_the_gpus_are_being_reclaimed(talk, play):
    with pytest.raises(SlotFaulted):
        play(talk.enter("rollout"), [slot("loading"), slot("reclaiming")])


def over(ended, **data):
    """How the daemon answers for a slot that is over, and how it ended."""
    data = {"slot": "t1", "status": "over", "ended": ended, "reason": "so it is", **data}
    return Conflict("slot t1 is over", status=409, data=data)


@pytest.mark.parametrize("granted_at", [None, "2026-01-01T00:00:00Z"])
@pytest.mark.parametrize("how", ["lost", "revoked"])
def test_a_slot_that_was_taken_away_before_we_heard_of_it_is_asked_for_anew(talk, play, how, granted_at):
    held, steps = play(talk.enter("rollout"), [slot("queued"), over(how, granted_at=granted_at), RUNNING])

    ids = [body.request_id for _, _, body in bodies(steps)]
    assert ids[0] == ids[1] != ids[2]
    assert held.slot == "t1"
    assert talk.said[0] == f"a: slot t1 was {how} before rollout began (so it is); asking again"


def test_a_slot_that_is_over_says_rightly_why_it_never_began(talk, play):
    with pytest.raises(SlotFaulted, match=r"could not be loaded \(so it is\)"):
        play(talk.enter("rollout"), [slot("loading"), over("faulted", granted_at=None)])
    with pytest.raises(SlotLost, match="was released before it began"):
        play(talk.enter("rollout"), [slot("loading"), over("released", granted_at="2026-01-01T00:00:00Z")])


def in_quarantine(reason=""):
    """How the daemon refuses a request of a job that is quarantined."""
    data = {"name": "a", "status": "quarantined", "reason": reason}
    return Conflict(f"job a is quarantined: {reason}", status=409, data=data)


def test_while_its_job_is_quarantined_it_waits_and_goes_on_when_it_is_reinstated(talk, play):
    refused = in_quarantine("it will not sleep")
    quarantined = view("quarantined", reason="it will not sleep", session="s1")
    gone = {"slot": "t1", "status": "withdrawn", "ended": "withdrawn", "reason": "job quarantined"}
    answers = [slot("queued"), Conflict("slot t1 is withdrawn", data=gone), *[refused, quarantined] * 20, RUNNING]

    held, steps = play(talk.enter("rollout"), answers)

    assert held.fence == "1.7"
    pauses = [step.seconds for step in steps if type(step).__name__ == "Pause"][2:]
    assert pauses[0] <= 1
    assert pauses[-1] == 5
    assert talk.said[0] == (
        "a waits for rollout: quarantined: it will not sleep; `rollmuxd job reinstate a` lets it go on"
    )
    assert not any("POST /v1/jobs/j1/sessions" in str(step) for step in steps)


def test_a_job_that_is_reinstated_between_the_refusal_and_the_question_why_asks_again(talk, play):
    """Its loop would else end for the one reason that somebody has just helped it."""
    refused = in_quarantine("it will not sleep")
    answers = [refused, view("admitted", session="s1"), refused, view("waiting", session="s1"), RUNNING]

    held, _ = play(talk.enter("rollout"), answers)
    assert held.fence == "1.7"


def test_a_refusal_for_a_reason_that_speaks_of_quarantine_is_none_for_quarantine(talk, play):
    """It would be asked for again, without a word of what was refused."""
    data = {"name": "a", "status": "lost", "reason": "node h1/gpu0 is quarantined"}
    refused = Conflict("job a is lost: node h1/gpu0 is quarantined", status=409, data=data)

    with pytest.raises(Conflict, match="job a is lost"):
        play(talk.enter("rollout"), [refused, view("waiting", session="s1"), refused])  # (the last withdraws it)


def test_a_job_that_is_ended_in_quarantine_is_over(talk, play):
    refused = in_quarantine()
    with pytest.raises(JobEnded, match="by root"):
        play(
            talk.enter("rollout"),
            [refused, view("quarantined", session="s1"), refused, view("ended", reason="by root")],
        )


def test_the_line_about_a_quarantine_comes_each_minute(talk):
    flow = talk.enter("rollout")
    step = next(flow)
    while talk._clock.now < 1000 + 170:
        talk._clock.now += getattr(step, "seconds", 0)
        if type(step).__name__ == "Pause":
            step = flow.send(None)
        elif step.path.endswith("/slots"):
            step = flow.throw(in_quarantine())
        else:
            step = flow.send(view("quarantined", reason="it will not sleep", session="s1"))
    flow.close()

    assert len(talk.said) == 3


def test_ctrl_c_while_waiting_withdraws_the_request(talk, play):
    answers = [slot("queued"), KeyboardInterrupt(), slot("queued"), None]

    flow = talk.enter("rollout")
    with pytest.raises(KeyboardInterrupt):
        _, steps = play(recorded(flow, steps := []), answers)

    assert bodies(steps)[-1][:2] == ("DELETE", "/v1/slots/t1")
    assert bodies(steps)[-2][2].wait_s == 0


def test_if_it_was_granted_in_the_meantime_it_is_released(talk, play):
    with pytest.raises(KeyboardInterrupt):
        play(
            recorded(talk.enter("rollout"), steps := []),
            [slot("queued"), KeyboardInterrupt(), RUNNING, ReleaseView("t1", "released")],
        )

    assert bodies(steps)[-1][1] == "/v1/slots/t1/release"
    assert bodies(steps)[-1][2].fence == "1.7"


def test_if_its_turn_comes_between_asking_and_withdrawing_it_is_released_too(talk, play):
    with pytest.raises(KeyboardInterrupt):
        play(
            recorded(talk.enter("rollout"), steps := []),
            [KeyboardInterrupt(), slot("queued"), Conflict("it is running"), RUNNING, ReleaseView("t1", "released")],
        )

    assert bodies(steps)[-1][1] == "/v1/slots/t1/release"


def recorded(flow, steps):
    """Pass a flow through, keeping its steps even when it raises."""
    answer = error = None
    while True:
        try:
            step = flow.throw(error) if error else flow.send(answer)
        except StopIteration as end:
            return end.value
        steps.append(step)
        answer = error = None
        try:
            answer = yield step
        except GeneratorExit:
            raise
        except BaseException as thrown:
            error = thrown


def test_a_request_that_could_not_be_taken_back_is_settled_before_the_next_one(talk):
    # The daemon is away during the clean-up, which ends after seconds all the same.
    steps = []
    flow = recorded(talk.enter("rollout"), steps)
    next(flow)
    step = flow.throw(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        while True:
            talk._clock.now += 1
            step = flow.throw(Unreachable("away")) if type(step).__name__ == "Call" else flow.send(None)
    assert talk._clock.now - 1000 < 15
    left_behind = bodies(steps)[0][2].request_id

    step = next(talk.enter("rollout"))

    assert step.body.request_id == left_behind


def test_a_request_whose_taking_back_is_interrupted_too_is_settled_before_the_next_one(talk, play):
    """A second Ctrl-C; and a cancelled scope of anyio cancels every wait in it, also the clean-up's."""
    with pytest.raises(KeyboardInterrupt):
        play(recorded(talk.enter("rollout"), steps := []), [slot("queued"), KeyboardInterrupt(), KeyboardInterrupt()])
    left_behind = bodies(steps)[0][2].request_id

    _, steps = play(talk.enter("train"), [slot("queued"), None, RUNNING])

    assert [method for method, _, _ in bodies(steps)] == ["POST", "DELETE", "POST"]
    assert bodies(steps)[0][2].request_id == left_behind
    assert bodies(steps)[2][2].request_id != left_behind


def over_time(talk, flow, answers):
    """Play a flow while time passes: pauses take theirs, and a call that is answered "hangs" all that it may take."""
    answers, steps = list(answers), []
    step = next(flow)
    while True:
        steps.append(step)
        answer = None
        if type(step).__name__ == "Pause":
            talk._clock.now += step.seconds
        else:
            answer = answers.pop(0) if len(answers) > 1 else answers[0]
            if answer == "hangs":
                talk._clock.now += step.timeout_s
                answer = Unreachable("timed out")
        try:
            step = flow.throw(answer) if isinstance(answer, BaseException) else flow.send(answer)
        except StopIteration as end:
            return end.value, steps


def released_into(talk, play, next_slot):
    """Release t1 with a request for train, which gets ``next_slot``; returns that request's id."""
    held = Held("t1", "rollout", "r1", "1.7", (), "s1")
    flow = talk.leave(held, measured={}, then="train", failing=False)
    _, steps = play(flow, [ReleaseView("t1", "released", next_slot)])
    return bodies(steps)[0][2].next.request_id


@pytest.mark.parametrize("what", ["away", "loading"])
def test_what_is_not_wanted_any_more_is_taken_back_before_anything_else_is_asked_for_however_long_it_takes(
    talk, play, what
):
    """It may have been granted: then the job would wait for itself, without end."""
    carried = released_into(talk, play, RUNNING)
    meanwhile = Unreachable("away") if what == "away" else slot("loading")

    answers = [*[meanwhile] * 100, RUNNING, ReleaseView("t1", "released"), RUNNING]
    held, steps = over_time(talk, talk.enter("rollout"), answers)

    assert talk._clock.now - 1000 > 60
    *asked, released, anew = bodies(steps)
    assert {body.request_id for _, _, body in asked} == {carried}
    assert released[1] == "/v1/slots/t1/release"
    assert anew[2].request_id == held.request_id != carried


def test_what_could_not_be_taken_back_before_patience_ended_is_still_to_be_taken_back(talk, play):
    carried = released_into(talk, play, slot("queued"))
    talk._patience_s = 30
    with pytest.raises(GaveUp):
        over_time(talk, talk.enter("rollout"), [Unreachable("away")])

    _, steps = play(talk.enter("rollout"), [slot("queued"), None, RUNNING])

    assert [method for method, _, _ in bodies(steps)] == ["POST", "DELETE", "POST"]
    assert bodies(steps)[0][2].request_id == carried != bodies(steps)[2][2].request_id


def test_what_went_over_to_a_new_session_is_taken_back_from_it(talk, play):
    carried = released_into(talk, play, RUNNING)
    again = [NotFound("no session s1", status=404), view(), SessionView("s2", "j1", 1, 60, 15)]

    newer = slot("running", fence="1.9")
    _, steps = play(talk.enter("rollout"), [*again, newer, ReleaseView("t1", "released"), RUNNING])

    *_, asked, released, anew = bodies(steps)
    assert (asked[2].request_id, asked[2].session) == (carried, "s2")
    assert released[2].fence == "1.9"
    assert anew[2].request_id != carried


def test_what_is_refused_for_good_is_not_taken_back_for_ever(talk, play):
    released_into(talk, play, slot("queued"))
    play(talk.enter("rollout"), [Unprocessable("no phase train"), RUNNING])

    released_into(talk, play, slot("queued"))
    play(talk.enter("rollout"), [Conflict("no"), view(session="s1"), RUNNING])

    released_into(talk, play, slot("queued"))
    play(talk.enter("rollout"), [slot("queued"), Conflict("no")] * 4 + [RUNNING])


def test_a_request_whose_taking_back_was_heard_and_not_answered_is_made_anew(talk, play):
    """We have released it ourselves: nothing was lost."""
    with pytest.raises(KeyboardInterrupt):
        play(recorded(talk.enter("rollout"), []), [slot("queued"), KeyboardInterrupt(), RUNNING, KeyboardInterrupt()])

    held, steps = play(talk.enter("rollout"), [over("released", granted_at="2026-01-01T00:00:00Z"), RUNNING])

    first, second = bodies(steps)
    assert first[2].request_id != second[2].request_id == held.request_id
    assert talk.said == []  # no word of a slot that was lost


def test_ctrl_c_gives_the_prompt_back_within_seconds_also_while_a_release_parks(talk):
    """``park=at_release``: a daemon in good health answers it after minutes."""
    with pytest.raises(KeyboardInterrupt):
        over_time(talk, talk.enter("rollout"), [KeyboardInterrupt(), RUNNING, "hangs"])

    assert talk._clock.now - 1000 < 11


@pytest.mark.parametrize("answer", ["hangs", Unreachable("away")])
def test_ctrl_c_in_a_release_and_the_end_after_it_take_seconds_all_together(talk, answer):
    held = Held("t1", "rollout", "r1", "1.7", (), "s1")
    with pytest.raises(KeyboardInterrupt):
        over_time(talk, talk.leave(held, measured={}, then="train", failing=False), [KeyboardInterrupt(), answer])
    over_time(talk, talk.end("interrupted", keep=False), [answer])

    assert talk._clock.now - 1000 < 13
    assert talk.said[-1].endswith("timed out" if answer == "hangs" else "away")


def interrupted_phase(talk, answers):
    """Play the release of t1, in whose phase Ctrl-C came; returns what was sent of it."""
    held = talk.held = Held("t1", "rollout", "r1", "1.7", (), "s1")
    flow = talk.leave(held, measured={"reward": 1.0}, then="train", failing=True, until=talk._clock() + 10)
    steps = []
    try:
        over_time(talk, recorded(flow, steps), answers)
    finally:
        assert talk.held is None
    return bodies(steps)


@pytest.mark.parametrize("answer", ["hangs", Unreachable("away")])
def test_ctrl_c_in_a_phase_gives_the_prompt_back_within_seconds_also_if_the_daemon_hangs(talk, play, answer):
    with pytest.raises(GaveUp):
        interrupted_phase(talk, [answer])
    assert talk._clock.now - 1000 < 11
    over_time(talk, talk.end("interrupted", keep=False), [answer])
    assert talk._clock.now - 1000 < 13


def test_what_ctrl_c_in_a_phase_could_not_release_in_time_is_settled_before_the_next_request(talk, play):
    with pytest.raises(GaveUp):
        interrupted_phase(talk, ["hangs"])

    _, steps = play(talk.enter("train"), [ReleaseView("t1", "released"), RUNNING])

    assert [path for _, path, _ in bodies(steps)] == ["/v1/slots/t1/release", "/v1/jobs/j1/slots"]


def test_a_second_ctrl_c_ends_at_once_what_the_first_one_in_a_phase_began(talk, play):
    with pytest.raises(KeyboardInterrupt):
        assert len(interrupted_phase(talk, [KeyboardInterrupt()])) == 1
    talk.hurry()
    over_time(talk, talk.end("interrupted", keep=False), ["hangs"])
    assert talk._clock.now - 1000 <= 1

    talk.job = "j1"
    _, steps = play(talk.enter("train"), [ReleaseView("t1", "released"), RUNNING])  # but it is not forgotten
    assert bodies(steps)[0][1] == "/v1/slots/t1/release"


def test_a_second_ctrl_c_ends_at_once_what_the_first_one_in_a_wait_began(talk):
    with pytest.raises(KeyboardInterrupt):
        over_time(talk, talk.enter("rollout"), [KeyboardInterrupt(), KeyboardInterrupt()])
    over_time(talk, talk.end("interrupted", keep=False), ["hangs"])

    assert talk._clock.now - 1000 <= 1


def test_a_release_that_ctrl_c_in_a_phase_began_and_that_was_answered_is_not_repeated(talk, play):
    assert len(interrupted_phase(talk, [ReleaseView("t1", "released")])) == 1
    talk._clock.now += 20
    taken, _ = over_time(talk, talk.end("interrupted", keep=False), [Unreachable("away")] * 5 + [None])
    assert taken  # nor is the daemon taken for one that does not answer

    talk.job = "j1"
    with pytest.raises(SlotLost):
        interrupted_phase(talk, [Conflict("it is revoked by root")])
    talk._clock.now += 20
    taken, _ = over_time(talk, talk.end("interrupted", keep=False), [Unreachable("away")] * 5 + [None])
    assert taken

    talk.job = "j1"
    _, steps = play(talk.enter("train"), [RUNNING])
    assert len(steps) == 1


@pytest.mark.parametrize("hurried", [False, True])
def test_a_clean_up_that_nobody_answered_says_nothing_of_a_daemon_at_an_end_an_hour_later(talk, hurried):
    """The phase was cancelled, and the program went on without another one."""
    with pytest.raises(GaveUp):
        interrupted_phase(talk, ["hangs"])
    if hurried:
        talk.hurry()
    talk._clock.now += 3600
    taken, _ = over_time(talk, talk.end("finished", keep=False), [Unreachable("away")] * 5 + [None])

    assert taken


def test_the_end_of_a_job_outlives_a_short_restart_of_the_daemon(talk, play):
    with pytest.raises(KeyboardInterrupt):  # answered: this says nothing of the daemon
        over_time(talk, talk.enter("rollout"), [KeyboardInterrupt(), slot("queued"), None])
    talk._clock.now += 20
    taken, _ = over_time(talk, talk.end("finished", keep=False), [Unreachable("away")] * 5 + [None])

    assert taken


def test_a_request_whose_flow_is_dropped_while_it_waits_is_settled_before_the_next_one(talk, play):
    flow = talk.enter("rollout")
    left_behind = next(flow).body.request_id
    flow.send(slot("queued"))
    flow.close()

    _, steps = play(talk.enter("train"), [slot("queued"), None, RUNNING])

    assert [method for method, _, _ in bodies(steps)] == ["POST", "DELETE", "POST"]
    assert bodies(steps)[0][2].request_id == left_behind


def interrupted_release(talk, play, *answers, then="train"):
    """What is sent from the release of t1 on, which Ctrl-C interrupts before it is answered."""
    held = Held("t1", "rollout", "r1", "1.7", (), "s1")
    flow = recorded(talk.leave(held, measured={"reward": 1.0}, then=then, failing=False), steps := [])
    with pytest.raises(KeyboardInterrupt):
        play(flow, [KeyboardInterrupt(), *answers])
    assert talk.held is None
    return bodies(steps)


def test_a_release_that_is_interrupted_is_repeated_and_what_it_asked_for_is_taken_back(talk, play):
    """Whether it was heard nobody knows: a slot that is not given back keeps its own job waiting, without end."""
    heard = ReleaseView("t1", "released", slot("queued"))

    first, again, asked, withdrawn = interrupted_release(talk, play, heard, slot("queued"), None)

    assert again[1] == first[1] == "/v1/slots/t1/release"
    assert (again[2].fence, again[2].measured, again[2].next) == ("1.7", {"reward": 1.0}, None)
    assert asked[2].request_id == first[2].next.request_id
    assert withdrawn[0] == "DELETE"
    _, steps = play(talk.enter("train"), [RUNNING])
    assert bodies(steps)[0][2].request_id != first[2].next.request_id


def test_what_an_interrupted_release_was_to_ask_for_and_did_not_is_not_asked_for(talk, play):
    assert len(interrupted_release(talk, play, ReleaseView("t1", "released"))) == 2


@pytest.mark.parametrize("then", ["train", None])
def test_a_release_that_cannot_be_repeated_within_seconds_is_settled_before_the_next_request(talk, play, then):
    held = Held("t1", "rollout", "r1", "1.7", (), "s1")
    flow = recorded(talk.leave(held, measured={}, then=then, failing=False), steps := [])
    next(flow)
    step = flow.throw(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        while True:
            assert type(step).__name__ == "Pause" or step.timeout_s < 10
            talk._clock.now += 1
            step = flow.throw(Unreachable("away")) if type(step).__name__ == "Call" else flow.send(None)
    assert talk._clock.now - 1000 < 15
    carried = bodies(steps)[0][2].next

    coming = slot("queued") if then else None
    _, steps = play(talk.enter("train"), [Unreachable("away"), ReleaseView("t1", "released", coming), RUNNING])

    *_, again, asked = bodies(steps)
    assert again[1] == "/v1/slots/t1/release"
    assert carried is None or asked[2].request_id == carried.request_id
    _, steps = play(talk.enter("train"), [RUNNING])
    assert len(steps) == 1  # once is enough


def test_a_release_whose_repetition_is_interrupted_too_is_settled_before_the_next_request(talk, play):
    interrupted_release(talk, play, KeyboardInterrupt(), then=None)

    _, steps = play(talk.enter("train"), [ReleaseView("t1", "over"), RUNNING])

    assert [path for _, path, _ in bodies(steps)] == ["/v1/slots/t1/release", "/v1/jobs/j1/slots"]


def test_a_release_that_is_given_up_is_settled_before_the_next_request(talk, play):
    talk._patience_s = 0
    held = Held("t1", "rollout", "r1", "1.7", (), "s1")
    with pytest.raises(GaveUp):
        play(talk.leave(held, measured={}, then=None, failing=False), [Unreachable("away")])

    _, steps = play(talk.enter("train"), [ReleaseView("t1", "released"), RUNNING])

    assert len(steps) == 2


def test_a_slot_that_was_lost_before_its_interrupted_release_could_be_repeated_keeps_nobody_waiting(talk, play):
    interrupted_release(talk, play, Conflict("slot t1 is revoked"))

    _, steps = play(talk.enter("train"), [RUNNING])

    assert len(steps) == 1


def test_a_refused_release_is_not_repeated(talk, play):
    held = Held("t1", "rollout", "r1", "1.7", (), "s1")
    with pytest.raises(SlotLost):
        play(talk.leave(held, measured={}, then="train", failing=False), [Conflict("it is revoked by root")])

    _, steps = play(talk.enter("train"), [RUNNING])

    assert len(steps) == 1


def test_a_release_carries_the_next_request_and_the_next_phase_uses_it(talk, play):
    held = Held("t1", "rollout", "r1", "1.7", (), "s1")
    _, steps = play(
        talk.leave(held, measured={"reward": 1.0}, then="train", failing=False),
        [ReleaseView("t1", "released", slot("queued"))],
    )
    carried = bodies(steps)[0][2]
    assert carried.measured == {"reward": 1.0}

    _, steps = play(talk.enter("train"), [RUNNING])

    assert bodies(steps)[0][2].request_id == carried.next.request_id


def test_a_next_that_is_granted_in_the_release_needs_no_further_call(talk, play):
    held = Held("t1", "rollout", "r1", "1.7", (), "s1")
    play(talk.leave(held, measured={}, then="train", failing=False), [ReleaseView("t1", "released", RUNNING)])

    entered, _ = talk.enter("train"), None
    with pytest.raises(StopIteration) as end:
        next(entered)

    assert end.value.value.fence == "1.7"


def test_a_next_that_is_not_entered_is_given_back_before_another_phase(talk, play):
    held = Held("t1", "rollout", "r1", "1.7", (), "s1")
    play(talk.leave(held, measured={}, then="train", failing=False), [ReleaseView("t1", "released", RUNNING)])

    _, steps = play(talk.enter("rollout"), [RUNNING, ReleaseView("t1", "released"), RUNNING])

    assert [path for _, path, _ in bodies(steps)] == ["/v1/jobs/j1/slots", "/v1/slots/t1/release", "/v1/jobs/j1/slots"]


def test_a_next_that_was_refused_is_asked_for_anew(talk, play):
    held = Held("t1", "rollout", "r1", "1.7", (), "s1")
    _, steps = play(
        talk.leave(held, measured={}, then="train", failing=False),
        [ReleaseView("t1", "released", None, "the job is paused")],
    )

    _, more = play(talk.enter("train"), [RUNNING])

    assert bodies(more)[0][2].request_id != bodies(steps)[0][2].next.request_id


def test_a_release_outlives_any_absence_of_the_daemon(talk, play):
    held = Held("t1", "rollout", "r1", "1.7", (), "s1")

    view, _ = play(
        talk.leave(held, measured={}, then=None, failing=False),
        [Unreachable("away")] * 500 + [ReleaseView("t1", "released")],
    )

    assert view.status == "released"


def test_a_failing_program_waits_for_a_minute_and_no_longer(talk):
    held = Held("t1", "rollout", "r1", "1.7", (), "s1")
    flow = talk.leave(held, measured={}, then="train", failing=True)
    step = next(flow)
    assert step.body.next is None

    with pytest.raises(GaveUp):
        while True:
            talk._clock.now += 5
            step = flow.throw(Unreachable("away")) if type(step).__name__ == "Call" else flow.send(None)

    assert 60 <= talk._clock.now - 1000 <= 80


def test_a_failing_program_waits_for_a_minute_also_where_the_daemon_hangs(talk, play):
    """A release may take ten minutes, while the daemon parks."""
    held = Held("t1", "rollout", "r1", "1.7", (), "s1")
    with pytest.raises(GaveUp):
        over_time(talk, recorded(talk.leave(held, measured={}, then=None, failing=True), steps := []), ["hangs"])

    assert talk._clock.now - 1000 <= 60
    tries = [step.timeout_s for step in steps if type(step).__name__ == "Call"]
    assert tries[0] >= 30  # it parks: in no hurry
    assert len(tries) > 1  # a connection that hangs is worth a second one
    _, steps = play(talk.enter("train"), [ReleaseView("t1", "released"), RUNNING])
    assert bodies(steps)[0][1] == "/v1/slots/t1/release"


def test_the_job_of_a_failing_program_whose_release_nobody_answered_is_ended_in_ten_seconds_all_the_same(talk):
    held = Held("t1", "rollout", "r1", "1.7", (), "s1")
    with pytest.raises(GaveUp):
        over_time(talk, talk.leave(held, measured={}, then=None, failing=True), ["hangs"])
    taken, _ = over_time(talk, talk.end("failed: ValueError", keep=False), [Unreachable("away")] * 5 + [None])

    assert taken


def test_a_failing_program_tries_once_at_least_however_little_patience_it_was_given(talk, play):
    talk._patience_s = 0
    held = Held("t1", "rollout", "r1", "1.7", (), "s1")
    _, steps = play(talk.leave(held, measured={}, then=None, failing=True), [ReleaseView("t1", "released")])

    assert len(steps) == 1


def test_ctrl_c_in_the_release_of_a_failing_program_gives_the_prompt_back_within_seconds(talk):
    held = Held("t1", "rollout", "r1", "1.7", (), "s1")
    with pytest.raises(KeyboardInterrupt):
        flow = talk.leave(held, measured={}, then=None, failing=True)
        over_time(talk, recorded(flow, steps := []), [KeyboardInterrupt(), "hangs"])
    assert [path for _, path, _ in bodies(steps)] == ["/v1/slots/t1/release"] * 3
    over_time(talk, talk.end("interrupted", keep=False), ["hangs"])

    assert talk._clock.now - 1000 <= 13


def test_a_refused_release_is_a_lost_slot_with_the_daemons_reason(talk, play):
    held = Held("t1", "rollout", "r1", "1.7", (), "s1")

    with pytest.raises(SlotLost, match="it is revoked by root") as raised:
        play(talk.leave(held, measured={}, then=None, failing=False), [Conflict("it is revoked by root")])

    assert (raised.value.slot, raised.value.phase) == ("t1", "rollout")
    assert held.lost


def test_figures_that_the_daemon_refuses_do_not_keep_the_gpus(talk, play):
    held = Held("t1", "rollout", "r1", "1.7", (), "s1")

    _, steps = play(
        talk.leave(held, measured={"x": 1.0}, then="nap", failing=False),
        [Unprocessable("no phase nap"), ReleaseView("t1", "released")],
    )

    assert bodies(steps)[1][2].measured == {}
    assert bodies(steps)[1][2].next is None


def test_a_session_that_is_gone_is_opened_anew_with_the_same_key(talk, play):
    gone, new = NotFound("no session s1", status=404), SessionView("s2", "j1", 1, 60, 15)

    _, steps = play(talk.enter("rollout"), [gone, view(), new, RUNNING])

    assert bodies(steps)[2][2].idempotency_key == "key"
    assert bodies(steps)[3][2].session == "s2"
    assert bodies(steps)[3][2].request_id == bodies(steps)[0][2].request_id


def test_a_slot_held_across_a_new_session_is_released_with_its_newer_fence(talk, play):
    held, _ = play(talk.enter("rollout"), [RUNNING])
    play(talk.beat_refused("s1", 404, ""), [view(), SessionView("s2", "j1", 1, 60, 15)])
    newer = slot("running", fence="1.9")

    _, steps = play(
        talk.leave(held, measured={}, then=None, failing=False),
        [Conflict("stale fence"), newer, ReleaseView("t1", "released")],
    )

    assert bodies(steps)[1][2].request_id == held.request_id
    assert bodies(steps)[2][2].fence == "1.9"


def test_a_newer_fence_that_nobody_told_us_is_asked_for_again(talk, play):
    """The slot would else be given up as lost, which is ours."""
    held, _ = play(talk.enter("rollout"), [RUNNING])
    play(talk.beat_refused("s1", 404, ""), [view(), SessionView("s2", "j1", 1, 60, 15)])
    with pytest.raises(KeyboardInterrupt):
        stale = Conflict("stale fence")
        answers = [stale, KeyboardInterrupt(), stale, slot("running", fence="1.9"), KeyboardInterrupt()]
        play(recorded(talk.leave(held, measured={}, then=None, failing=False), steps := []), answers)
    assert bodies(steps)[-1][2].fence == "1.9"

    _, steps = play(talk.enter("train"), [ReleaseView("t1", "released"), RUNNING])

    assert bodies(steps)[0][2].fence == "1.9"


def test_a_release_that_is_refused_with_the_newest_fence_is_not_repeated_without_end(talk, play):
    held, _ = play(talk.enter("rollout"), [RUNNING])
    play(talk.beat_refused("s1", 404, ""), [view(), SessionView("s2", "j1", 1, 60, 15)])

    with pytest.raises(SlotLost, match="it is revoked by root"):
        answers = [Conflict("stale fence"), slot("running", fence="1.9"), Conflict("it is revoked by root")]
        play(talk.leave(held, measured={}, then=None, failing=False), answers)


def test_a_slot_that_asking_for_a_newer_fence_has_made_is_given_back(talk, play):
    """A daemon that has forgotten the slot takes that for a new request."""
    held, _ = play(talk.enter("rollout"), [RUNNING])
    play(talk.beat_refused("s1", 404, ""), [view(), SessionView("s2", "j1", 1, 60, 15)])
    another = SlotView("t9", "j1", "rollout", "queued", held.request_id)
    with pytest.raises(SlotLost):
        play(talk.leave(held, measured={}, then=None, failing=False), [NotFound("there is no slot t1"), another])

    _, steps = play(talk.enter("train"), [another, None, RUNNING])

    assert bodies(steps)[1][:2] == ("DELETE", "/v1/slots/t9")


def test_a_job_that_was_ended_gets_no_more_slots(talk, play):
    with pytest.raises(JobEnded, match=r"ended .*by root"):
        play(talk.enter("rollout"), [Conflict("job j1 is ended"), view("ended", reason="by root")])
    with pytest.raises(JobEnded):
        next(talk.enter("rollout"))


def test_a_process_that_was_taken_over_does_not_fight_for_the_session(talk, play):
    with pytest.raises(JobEnded, match="another process has taken over"):
        play(talk.beat_refused("s1", 409, "fenced"), [view(session="s9")])


def test_a_lost_job_marks_the_slot_that_it_holds(talk, play):
    held, _ = play(talk.enter("rollout"), [RUNNING])

    with pytest.raises(JobEnded):
        play(talk.beat_refused("s1", 404, "no session"), [NotFound("no job")])

    assert held.lost


def test_endless_refusals_are_not_repeated_endlessly(talk, play):
    answers = []
    for number in range(4):
        answers += [NotFound("nothing here"), view(), SessionView(f"s{number + 2}", "j1", 1, 60, 15)]

    with pytest.raises(NotFound):
        play(talk.enter("rollout"), answers)


def test_a_heartbeat_that_is_refused_because_we_end_the_job_is_no_news(talk, play):
    """The refusal may overtake the answer to the end."""
    ends = talk.end("finished", keep=False)
    next(ends)

    assert play(talk.beat_refused("s1", 409, "session s1 is closed"), [view("ended", session="s1")])[0] is None

    assert talk.ended == ""


def test_a_start_that_is_interrupted_while_its_session_is_opened_ends_its_own_run_and_no_newer_one(talk, play):
    talk.job = talk.session = ""
    with pytest.raises(KeyboardInterrupt):
        play(talk.start(), [view(), KeyboardInterrupt()])
    taken, steps = play(talk.end("it could not start", keep=False), [Conflict("run 1 is not the present one")])

    assert [(method, path, body.run) for method, path, body in bodies(steps)] == [("DELETE", "/v1/jobs/j1", 1)]
    assert not taken
    assert talk.said == []


def interrupted_registration(talk, play, *answers):
    """What is sent by the end of a job of which the registration was interrupted."""
    talk.job = talk.session = ""
    with pytest.raises(KeyboardInterrupt):
        play(talk.start(), [KeyboardInterrupt()])
    taken, steps = play(talk.end("it could not start", keep=False), answers)
    return taken, bodies(steps)


def test_a_job_of_which_the_registration_was_interrupted_is_looked_for_by_its_key_and_ended(talk, play):
    """It may have been heard; and would keep its place until the daemon misses a session of it."""
    talk.body = structs.replace(BODY, replace=True)
    taken, ((_, _, again), ended) = interrupted_registration(talk, play, view(), None)

    assert taken
    assert (again.idempotency_key, again.replace) == ("key", False)  # in nobody's place
    assert ended[:2] == ("DELETE", "/v1/jobs/j1")
    assert ended[2].run == 1


def test_a_job_of_which_the_registration_was_interrupted_and_that_another_process_runs_is_left_to_it(talk, play):
    taken, sent = interrupted_registration(talk, play, Conflict("run 1 of job a is alive"))

    assert (taken, len(sent)) == (False, 1)
    assert talk.said == []


@pytest.mark.parametrize("answer", [Conflict("run 1 of job a is alive"), Unprocessable("no")])
def test_a_job_of_which_the_registration_was_refused_is_not_looked_for(talk, play, answer):
    talk.job = talk.session = ""
    with pytest.raises(type(answer)):
        play(talk.start(), [answer])
    with pytest.raises(StopIteration) as end:
        next(talk.end("it could not start", keep=False))
    assert end.value.value is False


def interrupted_in_trouble(talk, *errors, where):
    """Let tries to register end in such errors, and interrupt the pause after them, or the next call."""
    talk.job = talk.session = ""
    flow = talk.start()
    next(flow)
    for error in errors[:-1]:
        flow.throw(error)
        flow.send(None)
    step = flow.throw(errors[-1])
    if where == "call":
        step = flow.send(None)
    assert type(step).__name__.lower() == where
    with pytest.raises(KeyboardInterrupt):
        flow.throw(KeyboardInterrupt())


NOBODY = Unreachable("connection refused", heard=False)


@pytest.mark.parametrize("tries", [1, 3])
def test_ctrl_c_at_the_start_while_the_daemon_is_away_gives_the_prompt_back_at_once(talk, tries):
    """Nobody has heard of the job: nothing is looked for, and nothing said."""
    interrupted_in_trouble(talk, *[NOBODY] * tries, where="pause")
    talk.said.clear()
    with pytest.raises(StopIteration) as end:
        next(talk.end("it could not start", keep=False))

    assert end.value.value is False
    assert talk.said == []


@pytest.mark.parametrize(
    ("errors", "where"),
    [
        ([Unreachable("timed out")], "pause"),
        ([Unavailable("of a proxy", status=504)], "pause"),
        ([Unreachable("timed out"), NOBODY], "pause"),
        ([NOBODY], "call"),
    ],
)
def test_a_job_that_a_daemon_in_trouble_may_have_heard_of_is_looked_for_for_a_second(talk, errors, where):
    interrupted_in_trouble(talk, *errors, where=where)
    _, steps = over_time(talk, talk.end("it could not start", keep=False), ["hangs"])

    assert [method for method, _, _ in bodies(steps)] == ["POST"]
    assert talk._clock.now == 1001


def test_the_end_of_a_job_that_has_started_after_trouble_takes_its_ten_seconds(talk):
    talk.job = talk.session = ""
    over_time(talk, talk.start(), [Unreachable("timed out"), view(), SessionView("s1", "j1", 1, 60, 15)])
    began = talk._clock.now
    over_time(talk, talk.end("finished", keep=False), ["hangs"])

    assert talk._clock.now - began == 10


def test_the_end_of_a_job_that_is_looked_for_first_takes_ten_seconds_all_the_same(talk, play):
    talk.job = talk.session = ""
    with pytest.raises(KeyboardInterrupt):
        play(talk.start(), [KeyboardInterrupt()])
    taken, steps = over_time(talk, talk.end("it could not start", keep=False), ["hangs", view(), "hangs"])

    assert not taken
    assert talk._clock.now - 1000 <= 10
    assert bodies(steps)[-1][0] == "DELETE"


@pytest.mark.parametrize("answers", [[], [view()]], ids=["why", "a new session"])
def test_who_asks_beside_the_loop_for_a_refused_session_asks_no_more_once_the_job_ends(talk, answers):
    """The daemon may be away for hours, of which the program would be told each minute."""
    flow = talk.beat_refused("s1", 404, "")
    step = next(flow)
    for answer in answers:
        step = flow.send(answer)
    for _ in range(20):
        talk._clock.now += 10
        step = flow.throw(Unreachable("away")) if type(step).__name__ == "Call" else flow.send(None)
    assert len(talk.said) > 1
    said = len(talk.said)
    next(talk.end("finished", keep=False))
    step = step if type(step).__name__ == "Pause" else flow.throw(Unreachable("away"))

    with pytest.raises(StopIteration):
        flow.send(None)
    assert len(talk.said) == said


def test_what_gives_up_before_the_job_ends_is_an_error_also_beside_the_loop(talk):
    talk._patience_s = 30
    with pytest.raises(GaveUp):
        over_time(talk, talk.beat_refused("s1", 404, ""), [Unreachable("away")])


def test_the_end_of_a_job_never_raises(talk, play):
    play(talk.end("finished", keep=False), [Unprocessable("no")])

    assert "could not tell the daemon" in talk.said[0]


def test_leaving_closes_the_session_and_nothing_else(talk, play):
    _, steps = play(talk.end("", keep=True), [None])

    assert bodies(steps)[0][:2] == ("DELETE", "/v1/sessions/s1")
