"""A client names the journal that it registered with; a daemon that has another one refuses it, and its run is over."""

import threading

import pytest
from patience import PATIENCE_S

import rollmuxd
from rollmuxd.client import rank_group
from rollmuxd.client.errors import JobEnded, NotFound, SlotLost
from rollmuxd.client.session import Held, Session
from rollmuxd.testing import FakeDaemon
from rollmuxd.wire.answers import RegisteredView, SessionView
from rollmuxd.wire.requests import PhaseBody, RegisterBody, WantBody

ANOTHER = NotFound("another journal: register again", status=410)


class Store(dict):
    set = dict.__setitem__
    get = dict.__getitem__

    def check(self, keys):
        return all(key in self for key in keys)


@pytest.fixture(autouse=True)
def first_start(monkeypatch):
    monkeypatch.setattr(rank_group, "_starts", {})


def test_every_call_after_the_registration_names_the_journal_whichever_process_or_rank_makes_it(listening, until):
    daemon = FakeDaemon()
    server = listening(daemon)
    store = Store()
    channels = threading.Barrier(2)

    def calls(start):
        return [seen for seen in server.headers_seen if seen[":call"].startswith(start)]

    def run(rank):
        state = dict(gpu_gb=1)
        with rollmuxd.job("a", url=server.url, ranks=2, rank=rank, store=store, rollout=state, train=state) as job:
            job.on_load(lambda order: None)
            with job.phase("rollout", then="train"):
                channels.wait(PATIENCE_S)
                until(lambda: sorted(daemon.dialled.get("j1", [])) == [0, 1])
                until(lambda: calls("POST /v1/sessions/"))
            with job.phase("train"):
                pass

    follower = threading.Thread(target=run, args=(1,), daemon=True)
    follower.start()
    run(0)
    follower.join(PATIENCE_S)
    assert not follower.is_alive()

    (registration,) = calls("POST /v1/jobs") if len(calls("POST /v1/jobs")) == 1 else calls("POST /v1/jobs")[:1]
    assert "rollmux-journal" not in registration
    later = [seen for seen in server.headers_seen if seen is not registration]
    assert {seen.get("rollmux-journal") for seen in later} == {"fake"}, later
    said = " ".join(seen[":call"] for seen in later)
    for call in ("/sessions", "/slots", "/release", "/heartbeat", "/v1/channel/j1/orders"):
        assert call in said
    assert "DELETE /v1/jobs/j1" in said


@pytest.fixture
def session(play):
    body = RegisterBody("a", [PhaseBody("rollout", ["rollout"])], {"rollout": WantBody()}, idempotency_key="key")
    made = Session(body, tell=lambda text: None)
    registered = RegisteredView("j1", "me", "me", "a", 1, "admitted", "2026-01-01T00:00:00Z", journal="mine")
    play(made.start(), [registered, SessionView("s1", "j1", 1, 60, 15)])
    return made


def test_a_request_to_another_journal_ends_the_job_here(session, play):
    with pytest.raises(JobEnded, match="another journal: register again"):
        play(session.enter("rollout"), [ANOTHER, ANOTHER])
    with pytest.raises(JobEnded):
        play(session.enter("rollout"), [])


def test_a_slot_that_another_journal_is_to_release_is_lost(session, play):
    session.held = held = Held("t1", "rollout", "1.7", ("h/gpu0",))
    with pytest.raises(SlotLost, match="another journal"):
        play(session.leave(held, measured={}, then=None, failing=False), [ANOTHER])


def test_a_heartbeat_that_another_journal_refuses_ends_the_job_and_opens_no_session(session, play):
    session.held = held = Held("t1", "rollout", "1.7", ("h/gpu0",))
    with pytest.raises(JobEnded):
        play(session.beat_refused(410, "another journal"), [ANOTHER])
    assert held.lost


def test_the_end_of_a_job_that_another_journal_does_not_know_is_quiet(session, play):
    taken, steps = play(session.end("finished", keep=False), [ANOTHER])
    assert not taken
    assert [step.journal for step in steps] == ["mine"]
