"""Runs of a job one after the other, fences, and what operators and strangers may do, while trainers run."""

import os
import pwd
import socket
import time

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TWO_AND_ONE = (("0", "rollout"), ("1", "rollout"), ("2", "train"))
ROLLOUT = {"train": None, "phases": ["rollout"]}


def since(daemon, seq):
    """What has happened since, but for this machine's being busy."""
    return [fact for fact in daemon.facts(after=seq) if fact["fact"] != "loop_stalled"]


# ---- runs ------------------------------------------------------------------------------------------------------------


def test_a_restarted_trainer_is_run_2_of_its_job_on_its_old_nodes(live):
    daemon = live.daemon(TWO_AND_ONE)
    first = live.trainer("first", **ROLLOUT)
    first.do("start")
    a = live.trainer("a", **ROLLOUT)
    assert a.do("enter", phase="rollout")["gpus"] == ["mock/gpu1"]
    a.do("leave")
    # Were it new, it would sit on the node that is now free.
    first.do("end")
    live.until("gpu0 is free", lambda: not daemon.get("/v1/nodes/mock/gpu0")["group"])

    a.kill()
    again = live.trainer("a", **ROLLOUT)
    started = again.answer(again.ask("start"))
    if "error" in started:  # what has died is not yet lost
        assert started["error"] == "JobAlive"
        live.until("run 1 is over", lambda: daemon.job("a")["status"] == "ended")
        again.do("start")

    assert again.do("enter", phase="rollout")["gpus"] == ["mock/gpu1"]
    job = daemon.job("a")
    assert (job["run"], job["job"], job["estimates"]["rollout"]["count"]) == (2, "j2", 1)
    again.do("leave")


def test_a_second_trainer_of_a_living_job_is_refused_and_may_replace_it(live):
    daemon = live.daemon()
    a = live.holder("a")
    other = live.trainer("a")

    refused = other.fails("start")
    assert (refused["error"], refused["status"]) == ("JobAlive", 409)
    assert (refused["data"]["pid"], refused["data"]["host"]) == (a.pid, socket.gethostname())
    assert str(a.pid) in refused["text"]
    assert daemon.job("a")["run"] == 1

    third = live.trainer("a", replace=True)
    asked = third.ask("enter", phase="rollout")
    # Run 1 sits in its phase, with its bytes there; its driver can be told to let them go, and is.
    assert third.answer(asked)["gpus"] == ["mock/gpu0"]
    assert daemon.job("a")["run"] == 2
    a.died = third.happened("granted")[0]["at"]  # if it goes on from here, it is at fault itself
    lost = a.fails("leave")
    assert lost["error"] == "SlotLost"
    assert a.fails("enter", phase="train")["error"] == "JobEnded"
    third.do("leave")
    third.do("end")


def test_a_release_under_an_old_fence_is_refused_and_changes_nothing(live):
    daemon = live.daemon()
    a = live.holder("a")
    first = a.happened("granted")[0]
    a.do("leave")
    second = a.do("enter", phase="train")
    assert tuple(map(int, second["fence"].split("."))) > tuple(map(int, first["fence"].split(".")))
    before = daemon.last_seq()

    for slot, fence in ((second["slot"], first["fence"]), (second["slot"], "0.1"), (second["slot"], "9.9")):
        answer = daemon.call("POST", f"/v1/slots/{slot}/release", {"fence": fence, "next": None})
        assert answer.status_code == 409, answer.text
        shrunk = daemon.call("POST", f"/v1/slots/{slot}/shrink", {"fence": fence, "keep": second["gpus"]})
        assert shrunk.status_code == 409, shrunk.text
    # A repeat of what was done is answered as it was then.
    repeated = daemon.call("POST", f"/v1/slots/{first['slot']}/release", {"fence": first["fence"]})
    assert repeated.status_code == 200

    assert since(daemon, before) == []
    assert daemon.slot(second["slot"])["status"] == "running"
    a.do("leave")


# ---- access ----------------------------------------------------------------------------------------------------------


def test_who_may_do_what_over_tcp_and_over_the_socket(live):
    daemon = live.daemon()
    mine = live.holder("mine")
    slot = mine.happened("granted")[0]
    session = daemon.job("mine")["session"]
    keys = {
        user: daemon.post("/v1/keys", {"owner": "others", "user": user, "role": role})["secret"]
        for user, role in (("ann", "user"), ("ben", "user"), ("eve", "viewer"))
    }
    routes = [
        ("GET", "/v1/jobs/mine", None),
        ("GET", f"/v1/slots/{slot['slot']}", None),
        ("POST", "/v1/jobs/mine/pause", None),
        ("DELETE", "/v1/jobs/mine", {}),
        ("POST", f"/v1/slots/{slot['slot']}/release", {"fence": slot["fence"]}),
        ("POST", f"/v1/sessions/{session}/heartbeat", {}),
        ("POST", "/v1/jobs/mine/slots", {"phase": "train", "request_id": "r", "session": session}),
    ]
    before = daemon.last_seq()

    for method, path, body in routes:
        assert daemon.call(method, path, body, tcp=True).status_code == 401, path
        assert daemon.call(method, path, body, tcp=True, key="rmx_deadbeef_nothing").status_code == 401, path
        # Another owner does not even learn that it exists.
        assert daemon.call(method, path, body, tcp=True, key=keys["ann"]).status_code == 404, path
    assert daemon.call("POST", "/v1/nodes/mock/gpu0/drain", {}, tcp=True, key=keys["ann"]).status_code == 403
    assert daemon.call("POST", f"/v1/slots/{slot['slot']}/revoke", {}, tcp=True, key=keys["ann"]).status_code == 403
    assert daemon.call("GET", "/v1/jobs", tcp=True, key=keys["ann"]).json()["items"] == []
    # Nothing has changed; who could not log in is written down.
    told = since(daemon, before)
    assert {(fact["fact"], fact["action"]) for fact in told} == {("audited", "login_failed")}
    assert daemon.call("GET", "/healthz", tcp=True).status_code == 200
    mine.do("leave")

    # A trainer with a key, over TCP: its job is its owner's, and its heartbeat has the key too.
    theirs = live.trainer("theirs", url=daemon.tcp, api_key=keys["ann"])
    theirs.do("enter", phase="train")
    assert (daemon.job("theirs")["owner"], daemon.job("theirs")["user"]) == ("others", "ann")
    seen = daemon.call("GET", "/v1/jobs/theirs", tcp=True, key=keys["ben"])
    assert (seen.status_code, seen.json()["user"]) == (200, "ann")
    for key in (keys["ben"], keys["eve"]):
        assert daemon.call("DELETE", "/v1/jobs/theirs", {}, tcp=True, key=key).status_code == 403
    time.sleep(live.lease_s)  # one goes by
    assert daemon.facts("session_lost") == []
    theirs.do("leave")

    # On the socket the kernel says who calls: ourselves, who are the daemon's operator.
    assert daemon.job("mine")["owner"] == pwd.getpwuid(os.getuid()).pw_name
    assert daemon.call("GET", "/v1/keys").status_code == 200
    # No secret is anywhere in what the daemon writes.
    written = [path for path in (daemon.log, *daemon.state.iterdir()) if path.is_file()]
    assert not any(secret.encode() in path.read_bytes() for secret in keys.values() for path in written)


# ---- operators -------------------------------------------------------------------------------------------------------


def test_a_node_is_drained_under_load_and_undrained(live):
    daemon = live.daemon()
    a = live.holder("a")
    b, asked = live.waiter("b")

    daemon.post("/v1/nodes/mock/gpu0/drain", {})

    def node():
        return daemon.get("/v1/nodes/mock/gpu0")

    # The slot at hand goes on to its end; then what is loaded parks, and nothing new begins.
    assert node()["status"] == "draining"
    a.do("leave")
    live.until("it is drained", lambda: node()["status"] == "drained")
    assert b.done(asked) is None
    waits = daemon.slot(daemon.job("b")["slot"])
    assert [why["data"] for why in waits["reasons"] if why["code"] == "node"] == [
        {"node": "mock/gpu0", "status": "drained"}
    ]
    assert daemon.witness()[-1]["event"] == "clean"
    # The other node is used all the while.
    a.do("enter", phase="train")
    a.do("leave")

    daemon.post("/v1/nodes/mock/gpu0/undrain")
    assert b.answer(asked)["gpus"] == ["mock/gpu0"]
    b.do("leave")
    assert daemon.job("a")["parks"] >= 1


def test_a_job_is_paused_at_its_phase_boundary_and_resumed(live):
    daemon = live.daemon()
    a, b = live.holder("a"), live.trainer("b")

    assert daemon.post("/v1/jobs/a/pause")["status"] == "paused"

    assert daemon.slot(a.happened("granted")[0]["slot"])["status"] == "running"
    a.do("leave")
    asked = a.ask("enter", phase="train")
    waiting = live.until("a waits", lambda: daemon.waits("a"))
    assert waiting["reasons"][0]["code"] == "paused"
    b.do("loop", rounds=3, seconds=0.02)
    assert a.done(asked) is None

    daemon.post("/v1/jobs/a/resume")
    assert a.answer(asked)["phase"] == "train"
    a.do("leave")


def test_a_revoked_slot_is_told_to_its_holder_when_it_leaves_its_phase(live):
    daemon = live.daemon()
    a = live.holder("a")
    b, asked = live.waiter("b")
    slot = a.happened("granted")[0]["slot"]

    daemon.post(f"/v1/slots/{slot}/revoke", {"reason": "it has been there for too long"})

    b.answer(asked)
    a.died = b.happened("granted")[0]["at"]
    asked_of = live.until("a is asked to stop", lambda: a.do("directive")["kind"])
    assert asked_of == "stop"
    lost = a.fails("leave")
    assert lost["error"] == "SlotLost"
    assert "it has been there for too long" in lost["text"]
    # Only the slot was lost: the job goes on, with a new one.
    a.died = float("inf")
    b.do("leave")
    a.events = [event for event in a.events if event.get("slot") != slot]
    a.do("enter", phase="train")
    a.do("leave")


def test_a_job_that_is_ended_by_an_operator_is_over_for_its_trainer_too(live):
    daemon = live.daemon()
    a = live.holder("a")
    b, asked = live.waiter("b")

    assert daemon.call("DELETE", "/v1/jobs/b", {"reason": "not needed"}).status_code == 200

    ended = b.answer(asked)
    assert ended["error"] == "JobEnded"
    assert "not needed" in ended["text"]
    a.do("leave")
    a.do("enter", phase="train")
