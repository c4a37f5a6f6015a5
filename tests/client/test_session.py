"""The conversation, step by step: the daemon's answers are played by hand."""

import pytest

from rollmuxd.client.errors import (
    Conflict,
    GaveUp,
    JobEnded,
    NotFound,
    SlotFaulted,
    SlotLost,
    Unprocessable,
    Unreachable,
)
from rollmuxd.client.retry import say
from rollmuxd.client.session import Held, Session
from rollmuxd.wire.answers import Reason, RegisteredView, ReleaseView, SessionView, SlotView, Waiting
from rollmuxd.wire.requests import PhaseBody, RegisterBody, WantBody

BODY = RegisterBody("a", [PhaseBody("rollout", ["rollout"])], {"rollout": WantBody()}, idempotency_key="key")


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def session():
    said = []
    made = Session(BODY, clock=Clock(), tell=said.append)
    made.said, made.job, made.session = said, "j1", "s1"
    return made


def view(status="admitted", **more):
    return RegisteredView("j1", "me", "me", "a", 1, status, "2026-01-01T00:00:00Z", **more)


def slot(status, request_id="", **more):
    return SlotView("t1", "j1", "rollout", status, request_id, **more)


RUNNING = slot("running", fence="1.7", gpus=["h/gpu0"])
SESSION = SessionView("s1", "j1", 1, 60, 15)
GIVE_BACK = "/v1/sessions/s1/give-back"


def bodies(steps):
    return [(step.method, step.path, step.body) for step in steps if type(step).__name__ == "Call"]


def paths(steps):
    return [path for _, path, _ in bodies(steps)]


def test_a_start_registers_with_its_key_and_opens_a_session_for_this_process(session, play):
    sessions = []
    session.on_session = sessions.append

    _, steps = play(session.start(), [view(), SessionView("s1", "j1", 1, 60, 15)])

    (_, _, register), (_, path, session) = bodies(steps)
    assert register.idempotency_key == "key"
    assert path == "/v1/jobs/j1/sessions"
    assert session.pid > 0
    assert session.started.isdigit()
    assert sessions[0].heartbeat_s == 15


def test_a_job_without_a_place_says_why_and_what_would_let_it_in(session, play):
    waiting = Waiting([Reason("full", "both rollout nodes are taken")], 2, ["slo=2.0"])

    play(session.start(), [view("waiting", waiting=waiting), SessionView("s1", "j1", 1, 60, 15)])

    assert session.said == [
        "a (run 1) waits for a place, number 2: both rollout nodes are taken; would start now with slo=2.0"
    ]


def test_a_run_that_is_over_cannot_be_joined(session, play):
    with pytest.raises(JobEnded, match="run 1 of job a is lost"):
        play(session.start(), [view("lost")])


def test_a_request_keeps_its_id_until_it_is_granted(session, play):
    held, steps = play(session.enter("rollout"), [slot("queued"), slot("loading"), Unreachable("restart"), RUNNING])

    ids = {body.request_id for _, _, body in bodies(steps)}
    assert len(ids) == 1
    assert (held.id, held.fence, held.gpus) == ("t1", "1.7", ("h/gpu0",))


def test_each_stay_has_a_request_of_its_own(session, play):
    _, first = play(session.enter("rollout"), [RUNNING])
    _, second = play(session.enter("rollout"), [RUNNING])

    assert bodies(first)[0][2].request_id != bodies(second)[0][2].request_id


def waiting(session, flow, view, until):
    """Answer each ask with ``view`` after the time for which it may block; the seconds at which a line was said."""
    step, lines_at = next(flow), []
    while session._clock.now < 1000 + until:
        session._clock.now += step.seconds if type(step).__name__ == "Pause" else step.body.wait_s
        step = flow.send(None if type(step).__name__ == "Pause" else view)
        lines_at += [round(session._clock.now - 1000)] * (len(session.said) - len(lines_at))
    return lines_at


@pytest.mark.parametrize("status", ["queued", "loading"])
def test_a_wait_below_ten_seconds_writes_no_line(session, status):
    flow = session.enter("rollout")
    next(flow)
    session._clock.now += 9.9
    with pytest.raises(StopIteration):
        for answer in (slot(status), RUNNING):
            flow.send(answer)

    assert session.said == []


@pytest.mark.parametrize("status", ["queued", "loading"])
def test_a_wait_is_told_after_ten_seconds_and_then_each_minute(session, status):
    flow = session.enter("rollout")
    queued = slot(status, position=2, expected_wait_s=190, reason="held by job b")

    assert waiting(session, flow, queued, 200) == [10, 70, 130, 190]
    what = "its state is being loaded" if status == "loading" else "2 before it"
    assert session.said[0] == f"a waits for rollout (for 10 s now): {what}, about 3 min 10 s, held by job b"
    assert session.said[1].startswith("a waits for rollout (for 1 min 10 s now): ")
    flow.close()


def test_a_wait_for_a_slot_that_runs_late_is_not_said_to_be_over_in_no_time(session):
    flow = session.enter("rollout")

    waiting(session, flow, slot("queued", position=0, expected_wait_s=0.0, reason="held by job b"), 80)
    assert [line.partition("now): ")[2] for line in session.said] == ["it is next, held by job b"] * 2
    flow.close()


def test_the_end_of_a_wait_that_was_told_is_told_too(session):
    flow = session.enter("rollout")
    next(flow)
    session._clock.now += 11
    flow.send(slot("queued", position=0))
    session._clock.now += 15
    with pytest.raises(StopIteration):
        flow.send(RUNNING)

    assert session.said == ["a waits for rollout (for 11 s now): it is next", "a has rollout, after 26 s"]


def test_short_waits_are_summed_up_every_five_minutes(session, play):
    for phase in ("rollout", "train") * 20:
        flow = session.enter(phase)
        next(flow)
        session._clock.now += 9 if phase == "rollout" else 3
        with pytest.raises(StopIteration):
            flow.send(RUNNING)
        session._clock.now += 5

    assert session.said == ["a waited 2 min 48 s of the last 5 min 3 s: 2 min 6 s for 14 rollout, 42 s for 14 train"]


def test_waits_that_are_a_twentieth_of_the_time_at_most_are_not_summed_up(session):
    for _ in range(40):
        flow = session.enter("rollout")
        next(flow)
        session._clock.now += 0.5
        with pytest.raises(StopIteration):
            flow.send(RUNNING)
        session._clock.now += 20

    assert session.said == []


@pytest.mark.parametrize(("where", "stderr", "logged"), [("", 1, 0), ("logging", 0, 1), ("off", 0, 0), ("nope", 1, 0)])
def test_lines_for_the_user_go_where_the_environment_says(monkeypatch, capsys, caplog, where, stderr, logged):
    monkeypatch.setenv("ROLLMUX_LOG", where)

    say("a waits")

    assert capsys.readouterr().err == "rollmuxd: a waits\n" * stderr
    assert [(one.name, one.levelname, one.getMessage()) for one in caplog.records] == [
        ("rollmuxd", "WARNING", "a waits")
    ] * logged


def test_a_turn_that_comes_at_once_is_no_news(session, play):
    play(session.enter("rollout"), [RUNNING])

    assert session.said == []


def test_a_daemon_that_does_not_block_is_not_asked_in_a_tight_loop(session, play):
    _, steps = play(session.enter("rollout"), [slot("queued")] * 50 + [RUNNING])

    pauses = [step.seconds for step in steps if type(step).__name__ == "Pause"]
    assert len(pauses) == 50
    assert pauses[-1] == 1.0


def test_a_request_that_was_dropped_while_the_daemon_was_away_is_made_anew(session, play):
    _, steps = play(session.enter("rollout"), [slot("queued"), slot("withdrawn"), RUNNING])

    ids = [body.request_id for _, _, body in bodies(steps)]
    assert ids[0] == ids[1] != ids[2]


def test_state_that_cannot_be_loaded_is_a_fault_with_its_reason(session, play):
    with pytest.raises(SlotFaulted, match="CUDA out of memory") as raised:
        play(session.enter("rollout"), [slot("loading"), slot("faulted", reason="CUDA out of memory")])

    assert raised.value.phase == "rollout"


def test_a_request_that_ended_is_known_by_its_refusal_too(session, play):
    # The daemon answers 409 for a request whose slot will never run; `data` says what became of it.
    data = {"slot": "t1", "status": "faulted", "reason": "CUDA out of memory"}
    with pytest.raises(SlotFaulted, match="CUDA out of memory"):
        play(session.enter("rollout"), [slot("loading"), Conflict("slot t1 is faulted", data=data)])

    data = {"slot": "t1", "status": "withdrawn", "reason": "nobody asked for it any more"}
    _, steps = play(session.enter("rollout"), [slot("queued"), Conflict("slot t1 is withdrawn", data=data), RUNNING])
    ids = [body.request_id for _, _, body in bodies(steps)]
    assert ids[0] == ids[1] != ids[2]


def test_a_fault_is_known_while_the_gpus_are_being_reclaimed(session, play):
    with pytest.raises(SlotFaulted):
        play(session.enter("rollout"), [slot("loading"), slot("faulted")])


def over(ended, **data):
    """How the daemon answers for a slot that is over, and how it ended."""
    data = {"slot": "t1", "status": "over", "ended": ended, "reason": "so it is", **data}
    return Conflict("slot t1 is over", status=409, data=data)


@pytest.mark.parametrize("granted_at", [None, "2026-01-01T00:00:00Z"])
@pytest.mark.parametrize("how", ["lost", "revoked"])
def test_a_slot_that_was_taken_away_before_we_heard_of_it_is_asked_for_anew(session, play, how, granted_at):
    held, steps = play(session.enter("rollout"), [slot("queued"), over(how, granted_at=granted_at), RUNNING])

    ids = [body.request_id for _, _, body in bodies(steps)]
    assert ids[0] == ids[1] != ids[2]
    assert held.id == "t1"
    assert session.said[0] == f"a: slot t1 was {how} before rollout began (so it is); asking again"


def test_a_slot_that_is_over_says_rightly_why_it_never_began(session, play):
    with pytest.raises(SlotFaulted, match=r"could not be loaded \(so it is\)"):
        play(session.enter("rollout"), [slot("loading"), over("faulted", granted_at=None)])
    with pytest.raises(SlotLost, match=r"was released before it began.*one thread or task"):
        play(session.enter("rollout"), [slot("loading"), over("released", granted_at="2026-01-01T00:00:00Z")])


def in_quarantine(reason=""):
    """How the daemon refuses a request of a job that is quarantined."""
    data = {"name": "a", "status": "quarantined", "reason": reason}
    return Conflict(f"job a is quarantined: {reason}", status=409, data=data)


def test_while_its_job_is_quarantined_it_waits_and_goes_on_when_it_is_reinstated(session, play):
    refused = in_quarantine("it will not sleep")
    quarantined = view("quarantined", reason="it will not sleep", session="s1")
    gone = {"slot": "t1", "status": "withdrawn", "ended": "withdrawn", "reason": "job quarantined"}
    answers = [slot("queued"), Conflict("slot t1 is withdrawn", data=gone), *[refused, quarantined] * 20, RUNNING]

    held, steps = play(session.enter("rollout"), answers)

    assert held.fence == "1.7"
    pauses = [step.seconds for step in steps if type(step).__name__ == "Pause"][2:]
    assert pauses[0] <= 1
    assert pauses[-1] == 5
    assert session.said[0] == (
        "a waits for rollout: quarantined: it will not sleep; `rollmuxd job reinstate a` lets it continue"
    )
    assert not any("POST /v1/jobs/j1/sessions" in str(step) for step in steps)


def test_a_job_that_is_reinstated_between_the_refusal_and_the_question_why_asks_again(session, play):
    """Its loop would else end for the one reason that somebody has just helped it."""
    refused = in_quarantine("it will not sleep")
    answers = [refused, view("admitted", session="s1"), refused, view("waiting", session="s1"), RUNNING]

    held, _ = play(session.enter("rollout"), answers)
    assert held.fence == "1.7"


def test_a_refusal_for_a_reason_that_speaks_of_quarantine_is_none_for_quarantine(session, play):
    """It would be asked for again, without a word of what was refused."""
    data = {"name": "a", "status": "lost", "reason": "node h1/gpu0 is quarantined"}
    refused = Conflict("job a is lost: node h1/gpu0 is quarantined", status=409, data=data)

    with pytest.raises(Conflict, match="job a is lost"):
        play(session.enter("rollout"), [refused, view("waiting", session="s1"), refused])  # (the last withdraws it)


def test_a_job_that_is_ended_in_quarantine_is_over(session, play):
    refused = in_quarantine()
    with pytest.raises(JobEnded, match="by root"):
        play(
            session.enter("rollout"),
            [refused, view("quarantined", session="s1"), refused, view("ended", reason="by root")],
        )


def test_the_line_about_a_quarantine_comes_each_minute(session):
    flow = session.enter("rollout")
    step = next(flow)
    while session._clock.now < 1000 + 170:
        session._clock.now += getattr(step, "seconds", 0)
        if type(step).__name__ == "Pause":
            step = flow.send(None)
        elif step.path.endswith("/slots"):
            step = flow.throw(in_quarantine())
        else:
            step = flow.send(view("quarantined", reason="it will not sleep", session="s1"))
    flow.close()

    assert len(session.said) == 3


def test_ctrl_c_while_waiting_has_the_request_taken_back_whatever_became_of_it(session, play):
    with pytest.raises(KeyboardInterrupt):
        play(recorded(session.enter("rollout"), steps := []), [slot("queued"), KeyboardInterrupt(), SESSION])
    assert paths(steps)[-1] == GIVE_BACK

    _, again = play(session.enter("rollout"), [RUNNING])

    assert len(again) == 1
    assert bodies(again)[0][2].request_id != bodies(steps)[0][2].request_id


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


def test_a_request_that_could_not_be_taken_back_is_settled_before_the_next_one(session):
    # The daemon is away during the clean-up, which ends after seconds all the same.
    flow = session.enter("rollout")
    next(flow)
    step = flow.throw(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        while True:
            session._clock.now += 1
            step = flow.throw(Unreachable("away")) if type(step).__name__ == "Call" else flow.send(None)
    assert session._clock.now - 1000 < 15

    assert next(session.enter("rollout")).path == GIVE_BACK


def test_a_request_whose_taking_back_is_interrupted_too_is_settled_before_the_next_one(session, play):
    """A second Ctrl-C; and a cancelled scope of anyio cancels every wait in it, also the clean-up's."""
    with pytest.raises(KeyboardInterrupt):
        play(session.enter("rollout"), [slot("queued"), KeyboardInterrupt(), KeyboardInterrupt()])

    _, steps = play(session.enter("train"), [SESSION, RUNNING])

    assert paths(steps) == [GIVE_BACK, "/v1/jobs/j1/slots"]


def test_a_settling_that_is_interrupted_is_made_up_for_before_the_next_request(session, play):
    released_into(session, play, RUNNING)
    with pytest.raises(KeyboardInterrupt):
        play(session.enter("rollout"), [KeyboardInterrupt()])

    _, steps = play(session.enter("train"), [SESSION, RUNNING])

    assert paths(steps) == [GIVE_BACK, "/v1/jobs/j1/slots"]


def test_an_interrupted_request_that_comes_late_is_taken_back_when_it_is_in_the_way(session, play):
    """It may reach the daemon after the call that was to take it back."""
    answers = [Conflict("slot t7 already waits for phase train"), view(session="s1", slot="t7"), SESSION, RUNNING]

    held, steps = play(session.enter("rollout"), answers)

    assert paths(steps) == ["/v1/jobs/j1/slots", "/v1/jobs/j1", GIVE_BACK, "/v1/jobs/j1/slots"]
    assert held.id == "t1"


def over_time(session, flow, answers):
    """Play a flow while time passes: pauses take theirs, and a call that is answered "hangs" all that it may take."""
    answers, steps = list(answers), []
    step = next(flow)
    while True:
        steps.append(step)
        answer = None
        if type(step).__name__ == "Pause":
            session._clock.now += step.seconds
        else:
            answer = answers.pop(0) if len(answers) > 1 else answers[0]
            if answer == "hangs":
                session._clock.now += step.timeout_s
                answer = Unreachable("timed out")
        try:
            step = flow.throw(answer) if isinstance(answer, BaseException) else flow.send(answer)
        except StopIteration as end:
            return end.value, steps


def released_into(session, play, next_slot):
    """Release t1 with a request for train, which gets ``next_slot``; returns that request's id."""
    held = Held("t1", "rollout", "1.7", ())
    flow = session.leave(held, measured={}, then="train", failing=False)
    _, steps = play(flow, [ReleaseView("t1", "released", next_slot)])
    return bodies(steps)[0][2].next.request_id


def test_what_is_not_wanted_any_more_is_taken_back_before_anything_else_is_asked_for_however_long_it_takes(
    session, play
):
    """It may have been granted: then the job would wait for itself, without end."""
    carried = released_into(session, play, RUNNING)

    _, steps = over_time(session, session.enter("rollout"), [*[Unreachable("away")] * 100, SESSION, RUNNING])

    assert session._clock.now - 1000 > 60
    *asked, anew = bodies(steps)
    assert {path for _, path, _ in asked} == {GIVE_BACK}
    assert anew[2].request_id != carried


def test_what_could_not_be_taken_back_before_patience_ended_is_still_to_be_taken_back(session, play):
    released_into(session, play, slot("queued"))
    session._patience_s = 30
    with pytest.raises(GaveUp):
        over_time(session, session.enter("rollout"), [Unreachable("away")])

    _, steps = play(session.enter("rollout"), [SESSION, RUNNING])

    assert paths(steps) == [GIVE_BACK, "/v1/jobs/j1/slots"]


@pytest.mark.parametrize("why", [Conflict("session s1 is fenced"), NotFound("no session s1", status=404)])
def test_a_session_that_is_over_has_nothing_to_give_back(session, play, why):
    released_into(session, play, slot("queued"))

    _, steps = play(session.enter("rollout"), [why, RUNNING])

    assert paths(steps) == [GIVE_BACK, "/v1/jobs/j1/slots"]


def test_ctrl_c_in_a_wait_gives_the_prompt_back_within_seconds_also_if_the_daemon_hangs(session):
    with pytest.raises(KeyboardInterrupt):
        over_time(session, session.enter("rollout"), [KeyboardInterrupt(), "hangs"])

    assert session._clock.now - 1000 < 11


@pytest.mark.parametrize("answer", ["hangs", Unreachable("away")])
def test_ctrl_c_in_a_release_and_the_end_after_it_take_seconds_all_together(session, answer):
    held = Held("t1", "rollout", "1.7", ())
    with pytest.raises(KeyboardInterrupt):
        over_time(session, session.leave(held, measured={}, then="train", failing=False), [KeyboardInterrupt(), answer])
    over_time(session, session.end("interrupted", keep=False), [answer])

    assert session._clock.now - 1000 < 13
    assert session.said[-1].endswith("timed out" if answer == "hangs" else "away")


def interrupted_phase(session, answers):
    """Play the release of t1, in whose phase Ctrl-C came; returns what was sent of it."""
    held = session.held = Held("t1", "rollout", "1.7", ())
    flow = session.leave(held, measured={"reward": 1.0}, then="train", failing=True, until=session._clock() + 10)
    steps = []
    try:
        over_time(session, recorded(flow, steps), answers)
    finally:
        assert session.held is None
    return bodies(steps)


@pytest.mark.parametrize("answer", ["hangs", Unreachable("away")])
def test_ctrl_c_in_a_phase_gives_the_prompt_back_within_seconds_also_if_the_daemon_hangs(session, play, answer):
    with pytest.raises(GaveUp):
        interrupted_phase(session, [answer])
    assert session._clock.now - 1000 < 11
    over_time(session, session.end("interrupted", keep=False), [answer])
    assert session._clock.now - 1000 < 13


def test_what_ctrl_c_in_a_phase_could_not_release_in_time_is_settled_before_the_next_request(session, play):
    with pytest.raises(GaveUp):
        interrupted_phase(session, ["hangs"])

    _, steps = play(session.enter("train"), [SESSION, RUNNING])

    assert paths(steps) == [GIVE_BACK, "/v1/jobs/j1/slots"]


def test_a_second_ctrl_c_ends_at_once_what_the_first_one_in_a_phase_began(session, play):
    with pytest.raises(KeyboardInterrupt):
        assert len(interrupted_phase(session, [KeyboardInterrupt()])) == 1
    over_time(session, session.end("interrupted", keep=False), ["hangs"])
    assert session._clock.now - 1000 <= 1

    session.job, session.session = "j1", "s1"
    _, steps = play(session.enter("train"), [SESSION, RUNNING])  # but it is not forgotten
    assert paths(steps)[0] == GIVE_BACK


def test_a_second_ctrl_c_ends_at_once_what_the_first_one_in_a_wait_began(session):
    with pytest.raises(KeyboardInterrupt):
        over_time(session, session.enter("rollout"), [KeyboardInterrupt(), KeyboardInterrupt()])
    over_time(session, session.end("interrupted", keep=False), ["hangs"])

    assert session._clock.now - 1000 <= 1


def test_a_release_that_ctrl_c_in_a_phase_began_and_that_was_answered_is_not_repeated(session, play):
    assert len(interrupted_phase(session, [ReleaseView("t1", "released")])) == 1
    session._clock.now += 20
    taken, _ = over_time(session, session.end("interrupted", keep=False), [Unreachable("away")] * 5 + [None])
    assert taken  # nor is the daemon taken for one that does not answer

    session.job = "j1"
    with pytest.raises(SlotLost):
        interrupted_phase(session, [Conflict("it is revoked by root")])
    session._clock.now += 20
    taken, _ = over_time(session, session.end("interrupted", keep=False), [Unreachable("away")] * 5 + [None])
    assert taken

    session.job = "j1"
    _, steps = play(session.enter("train"), [RUNNING])
    assert len(steps) == 1


def test_the_end_of_a_job_outlives_a_short_restart_of_the_daemon(session, play):
    with pytest.raises(KeyboardInterrupt):  # answered: this says nothing of the daemon
        over_time(session, session.enter("rollout"), [KeyboardInterrupt(), SESSION])
    session._clock.now += 20
    taken, _ = over_time(session, session.end("finished", keep=False), [Unreachable("away")] * 5 + [None])

    assert taken


def test_a_request_whose_flow_is_dropped_while_it_waits_is_settled_before_the_next_one(session, play):
    flow = session.enter("rollout")
    next(flow)
    flow.send(slot("queued"))
    flow.close()

    _, steps = play(session.enter("train"), [SESSION, RUNNING])

    assert paths(steps) == [GIVE_BACK, "/v1/jobs/j1/slots"]


def interrupted_release(session, play, *answers, then="train"):
    """What is sent from the release of t1 on, which Ctrl-C interrupts before it is answered."""
    held = Held("t1", "rollout", "1.7", ())
    flow = recorded(session.leave(held, measured={"reward": 1.0}, then=then, failing=False), steps := [])
    with pytest.raises(KeyboardInterrupt):
        play(flow, [KeyboardInterrupt(), *answers])
    assert session.held is None
    return bodies(steps)


def test_what_an_interrupted_release_held_and_asked_for_is_given_back(session, play):
    """Whether it was heard nobody knows: a slot that is not given back keeps its own job waiting, without end."""
    first, given_back = interrupted_release(session, play, SESSION)

    assert [first[1], given_back[1]] == ["/v1/slots/t1/release", GIVE_BACK]
    _, steps = play(session.enter("train"), [RUNNING])
    assert bodies(steps)[0][2].request_id != first[2].next.request_id


def test_a_release_that_cannot_be_made_up_for_within_seconds_is_settled_before_the_next_request(session, play):
    held = Held("t1", "rollout", "1.7", ())
    flow = session.leave(held, measured={}, then="train", failing=False)
    next(flow)
    step = flow.throw(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        while True:
            assert type(step).__name__ == "Pause" or step.timeout_s < 10
            session._clock.now += 1
            step = flow.throw(Unreachable("away")) if type(step).__name__ == "Call" else flow.send(None)
    assert session._clock.now - 1000 < 15

    _, steps = play(session.enter("train"), [Unreachable("away"), SESSION, RUNNING])
    assert paths(steps) == [GIVE_BACK, GIVE_BACK, "/v1/jobs/j1/slots"]
    _, steps = play(session.enter("train"), [RUNNING])
    assert len(steps) == 1  # once is enough


def test_a_release_whose_making_up_is_interrupted_too_is_settled_before_the_next_request(session, play):
    interrupted_release(session, play, KeyboardInterrupt(), then=None)

    _, steps = play(session.enter("train"), [SESSION, RUNNING])

    assert paths(steps) == [GIVE_BACK, "/v1/jobs/j1/slots"]


def test_a_release_that_is_given_up_is_settled_before_the_next_request(session, play):
    session._patience_s = 0
    held = Held("t1", "rollout", "1.7", ())
    with pytest.raises(GaveUp):
        play(session.leave(held, measured={}, then=None, failing=False), [Unreachable("away")])

    _, steps = play(session.enter("train"), [SESSION, RUNNING])

    assert paths(steps) == [GIVE_BACK, "/v1/jobs/j1/slots"]


def test_a_refused_release_is_not_repeated(session, play):
    held = Held("t1", "rollout", "1.7", ())
    with pytest.raises(SlotLost):
        play(session.leave(held, measured={}, then="train", failing=False), [Conflict("it is revoked by root")])

    _, steps = play(session.enter("train"), [RUNNING])

    assert len(steps) == 1


def test_a_release_of_a_slot_that_a_damaged_journal_has_lost_says_what_is_and_what_to_do(session, play):
    held = Held("t1", "rollout", "1.7", ())
    with pytest.raises(SlotLost) as lost:
        play(
            session.leave(held, measured={}, then=None, failing=False), [NotFound("there is no slot 't1'", status=404)]
        )

    for part in ("slot t1 was lost while rollout ran", "its journal was damaged", "start the job again"):
        assert part in str(lost.value)


def test_a_release_carries_the_next_request_and_the_next_phase_uses_it(session, play):
    held = Held("t1", "rollout", "1.7", ())
    _, steps = play(
        session.leave(held, measured={"reward": 1.0}, then="train", failing=False),
        [ReleaseView("t1", "released", slot("queued"))],
    )
    carried = bodies(steps)[0][2]
    assert carried.measured == {"reward": 1.0}

    _, steps = play(session.enter("train"), [RUNNING])

    assert bodies(steps)[0][2].request_id == carried.next.request_id


def test_a_next_that_is_granted_in_the_release_needs_no_further_call(session, play):
    held = Held("t1", "rollout", "1.7", ())
    play(session.leave(held, measured={}, then="train", failing=False), [ReleaseView("t1", "released", RUNNING)])

    entered, _ = session.enter("train"), None
    with pytest.raises(StopIteration) as end:
        next(entered)

    assert end.value.value.fence == "1.7"


def test_a_next_that_was_lost_with_the_run_ends_the_job_and_no_phase(session, play):
    """A repeated release speaks of it: the daemon has lost the end of its journal, and declared the run lost."""
    why = "the journal lost its end"
    lost = slot("lost", reason=why, granted_at="2026-01-01T00:00:00Z")
    released_into(session, play, lost)
    refused = Conflict(f"job a is lost: {why}", status=409, data={"name": "a", "status": "lost", "reason": why})

    with pytest.raises(JobEnded, match=f"is lost \\({why}\\)"):
        play(session.enter("train"), [refused, view("lost", reason=why)])


def test_a_next_that_is_not_entered_is_given_back_before_another_phase(session, play):
    held = Held("t1", "rollout", "1.7", ())
    play(session.leave(held, measured={}, then="train", failing=False), [ReleaseView("t1", "released", RUNNING)])

    _, steps = play(session.enter("rollout"), [SESSION, RUNNING])

    assert paths(steps) == [GIVE_BACK, "/v1/jobs/j1/slots"]


def test_a_next_that_was_refused_is_asked_for_anew(session, play):
    held = Held("t1", "rollout", "1.7", ())
    _, steps = play(
        session.leave(held, measured={}, then="train", failing=False),
        [ReleaseView("t1", "released", None, "the job is paused")],
    )

    _, more = play(session.enter("train"), [RUNNING])

    assert bodies(more)[0][2].request_id != bodies(steps)[0][2].next.request_id


def test_a_release_outlives_any_absence_of_the_daemon(session, play):
    held = Held("t1", "rollout", "1.7", ())

    view, _ = play(
        session.leave(held, measured={}, then=None, failing=False),
        [Unreachable("away")] * 500 + [ReleaseView("t1", "released")],
    )

    assert view.status == "released"


def test_a_failing_program_waits_for_a_minute_and_no_longer(session):
    held = Held("t1", "rollout", "1.7", ())
    flow = session.leave(held, measured={}, then="train", failing=True)
    step = next(flow)
    assert step.body.next is None

    with pytest.raises(GaveUp):
        while True:
            session._clock.now += 5
            step = flow.throw(Unreachable("away")) if type(step).__name__ == "Call" else flow.send(None)

    assert 60 <= session._clock.now - 1000 <= 80


def test_a_failing_program_waits_for_a_minute_also_where_the_daemon_hangs(session, play):
    """A release may take ten minutes, while the daemon parks."""
    held = Held("t1", "rollout", "1.7", ())
    with pytest.raises(GaveUp):
        over_time(session, recorded(session.leave(held, measured={}, then=None, failing=True), steps := []), ["hangs"])

    assert session._clock.now - 1000 <= 60
    tries = [step.timeout_s for step in steps if type(step).__name__ == "Call"]
    assert tries[0] >= 30  # it parks: in no hurry
    assert len(tries) > 1  # a connection that hangs is worth a second one
    _, steps = play(session.enter("train"), [SESSION, RUNNING])
    assert paths(steps)[0] == GIVE_BACK


def test_the_job_of_a_failing_program_whose_release_was_not_answered_is_ended_all_the_same(session):
    held = Held("t1", "rollout", "1.7", ())
    with pytest.raises(GaveUp):
        over_time(session, session.leave(held, measured={}, then=None, failing=True), ["hangs"])
    taken, _ = over_time(session, session.end("failed: ValueError", keep=False), [Unreachable("away"), None])

    assert taken


def test_a_failing_program_tries_once_at_least_however_little_patience_it_was_given(session, play):
    session._patience_s = 0
    held = Held("t1", "rollout", "1.7", ())
    _, steps = play(session.leave(held, measured={}, then=None, failing=True), [ReleaseView("t1", "released")])

    assert len(steps) == 1


def test_ctrl_c_in_the_release_of_a_failing_program_gives_the_prompt_back_within_seconds(session):
    held = Held("t1", "rollout", "1.7", ())
    with pytest.raises(KeyboardInterrupt):
        flow = session.leave(held, measured={}, then=None, failing=True)
        over_time(session, recorded(flow, steps := []), [KeyboardInterrupt(), "hangs"])
    assert paths(steps) == ["/v1/slots/t1/release", GIVE_BACK, GIVE_BACK]
    over_time(session, session.end("interrupted", keep=False), ["hangs"])

    assert session._clock.now - 1000 <= 13


def test_a_daemon_that_is_back_is_heard_at_once_and_not_at_the_end_of_a_long_poll(session, play):
    _, steps = play(session.enter("rollout"), [Unreachable("refused"), Unreachable("refused"), slot("queued"), RUNNING])

    assert [body.wait_s > 0 for _, _, body in bodies(steps)] == [True, False, False, True]
    assert "answers again" in "".join(session.said)


def test_a_refused_release_is_a_lost_slot_with_the_daemons_reason(session, play):
    held = Held("t1", "rollout", "1.7", ())

    with pytest.raises(SlotLost, match="it is revoked by root") as raised:
        play(session.leave(held, measured={}, then=None, failing=False), [Conflict("it is revoked by root")])

    assert (raised.value.slot, raised.value.phase) == ("t1", "rollout")
    assert held.lost


@pytest.mark.parametrize(("reason", "because"), [("no heartbeat for 60 s", " (no heartbeat for 60 s)"), ("ended", "")])
def test_a_slot_that_was_lost_with_its_job_says_to_start_again_from_the_checkpoint(session, play, reason, because):
    stale = Conflict("slot t1 is not yours any more: it is over", status=409)

    with pytest.raises(SlotLost) as lost:
        leaving = session.leave(Held("t1", "train", "1.7", ()), measured={}, then=None, failing=False)
        play(leaving, [stale, view("ended", reason=reason)])

    why = f"job a (run 1) is ended{because}; to continue, start it again from its last checkpoint"
    assert str(lost.value) == f"a: slot t1 was lost while train ran: {why}"


def test_figures_that_the_daemon_refuses_do_not_keep_the_gpus(session, play):
    held = Held("t1", "rollout", "1.7", ())

    _, steps = play(
        session.leave(held, measured={"x": 1.0}, then="nap", failing=False),
        [Unprocessable("no phase nap"), ReleaseView("t1", "released")],
    )

    assert bodies(steps)[1][2].measured == {}
    assert bodies(steps)[1][2].next is None


def test_a_job_that_was_ended_gets_no_more_slots(session, play):
    with pytest.raises(JobEnded, match=r"ended .*by root"):
        play(session.enter("rollout"), [Conflict("job j1 is ended"), view("ended", reason="by root")])
    with pytest.raises(JobEnded):
        next(session.enter("rollout"))


def test_a_process_that_was_taken_over_does_not_fight_for_the_session(session, play):
    with pytest.raises(JobEnded, match="another process has taken over"):
        play(session.beat_refused(409, "fenced"), [view(session="s9")])


def test_a_lost_job_marks_the_slot_that_it_holds(session, play):
    held, _ = play(session.enter("rollout"), [RUNNING])

    with pytest.raises(JobEnded):
        play(session.beat_refused(404, "no session"), [NotFound("no job")])

    assert held.lost


def test_endless_refusals_are_not_repeated_endlessly(session, play):
    answers = [Conflict("slot t7 already waits"), view(session="s1", slot="t7"), SESSION] * 4

    with pytest.raises(Conflict):
        play(session.enter("rollout"), [*answers, SESSION])


def test_a_heartbeat_that_is_refused_because_we_end_the_job_is_no_news(session, play):
    """The refusal may overtake the answer to the end, or be heard after it."""
    ends = session.end("finished", keep=False)
    next(ends)

    assert play(session.beat_refused(409, "session s1 is closed"), [view("ended", session="s1")])[0] is None
    with pytest.raises(StopIteration):
        ends.send(None)
    with pytest.raises(StopIteration):
        next(session.beat_refused(404, "there is no session s1"))

    assert session.ended == ""


def test_a_start_that_is_interrupted_while_its_session_is_opened_ends_its_own_run_and_no_newer_one(session, play):
    session.job = session.session = ""
    with pytest.raises(KeyboardInterrupt):
        play(session.start(), [view(), KeyboardInterrupt()])
    taken, steps = play(session.end("it could not start", keep=False), [Conflict("run 1 is not the present one")])

    assert [(method, path, body.run) for method, path, body in bodies(steps)] == [("DELETE", "/v1/jobs/j1", 1)]
    assert not taken
    assert session.said == []


@pytest.mark.parametrize("answer", [Conflict("run 1 of job a is alive"), Unprocessable("no")])
def test_a_job_of_which_the_registration_was_refused_is_not_looked_for(session, play, answer):
    session.job = session.session = ""
    with pytest.raises(type(answer)):
        play(session.start(), [answer])
    with pytest.raises(StopIteration) as end:
        next(session.end("it could not start", keep=False))
    assert end.value.value is False


def test_the_end_of_a_job_that_has_started_after_trouble_takes_its_ten_seconds(session):
    session.job = session.session = ""
    over_time(session, session.start(), [Unreachable("timed out"), view(), SessionView("s1", "j1", 1, 60, 15)])
    began = session._clock.now
    over_time(session, session.end("finished", keep=False), ["hangs"])

    assert session._clock.now - began == 10


def test_who_asks_beside_the_loop_for_a_refused_session_asks_no_more_once_the_job_ends(session):
    """The daemon may be away for hours, of which the program would be told each minute."""
    flow = session.beat_refused(404, "")
    step = next(flow)
    for _ in range(20):
        session._clock.now += 10
        step = flow.throw(Unreachable("away")) if type(step).__name__ == "Call" else flow.send(None)
    assert len(session.said) > 1
    said = len(session.said)
    next(session.end("finished", keep=False))
    step = step if type(step).__name__ == "Pause" else flow.throw(Unreachable("away"))

    with pytest.raises(StopIteration):
        flow.send(None)
    assert len(session.said) == said


def test_what_gives_up_before_the_job_ends_is_an_error_also_beside_the_loop(session):
    session._patience_s = 30
    with pytest.raises(GaveUp):
        over_time(session, session.beat_refused(404, ""), [Unreachable("away")])


def test_the_end_of_a_job_never_raises(session, play):
    play(session.end("finished", keep=False), [Unprocessable("no")])

    assert "could not tell the daemon" in session.said[0]


def test_leaving_closes_the_session_and_nothing_else(session, play):
    _, steps = play(session.end("", keep=True), [None])

    assert bodies(steps)[0][:2] == ("DELETE", "/v1/sessions/s1")
