"""The daemon is killed, stopped and started again, under load. Jobs notice a pause and nothing else."""

import json
import re
import resource
import shutil
import socket
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_killed_while_one_holds_and_two_wait_it_finds_all_three_again(live):
    # In the schedule's order, which nothing changes while they wait (credit does); and nobody's turn is passed over,
    # however late he asks again.
    daemon = live.daemon(policy="rollmux", grace_s=15.0)
    a = live.holder("a")
    b, b_asked = live.waiter("b")
    c, c_asked = live.waiter("c")
    held = a.happened("granted")[0]
    waiting = {name: daemon.job(name)["slot"] for name in "bc"}
    order = sorted("bc", key=lambda name: daemon.slot(waiting[name])["position"])
    before = daemon.last_seq()

    daemon.kill9()
    daemon.restart()

    assert daemon.facts("daemon_started")[-1]["away_ms"] > 0, "what b and c waited meanwhile would count as slowdown"
    # The slot, its holder and its fence are what they were; so are the requests.
    slot = daemon.slot(held["slot"])
    assert (slot["status"], slot["fence"], slot["gpus"]) == ("running", held["fence"], held["gpus"])
    assert {name: daemon.job(name)["slot"] for name in "bc"} == waiting
    for name in "bc":
        live.until(f"{name} has come back", lambda name=name: daemon.waits(name))
    assert sorted("bc", key=lambda name: daemon.slot(waiting[name])["position"]) == order
    a.do("leave")
    for one, asked in ((b, b_asked), (c, c_asked)):
        assert one.answer(asked)["slot"] == waiting[one.name]
        one.do("leave")
    after = daemon.facts("slot_granted", after=before)
    assert [fact["slot"] for fact in after] == [waiting[name] for name in order]
    assert daemon.facts("slot_taken_away", "slot_withdrawn", "session_lost", "job_lost") == []


def test_a_holder_that_was_killed_while_the_daemon_was_away_is_lost_one_lease_after_its_return(live):
    daemon = live.daemon()
    a = live.holder("a")

    daemon.kill9()
    a.kill()
    daemon.restart()

    # From the start on, since nobody could have renewed it before.
    started = daemon.facts("daemon_started")[-1]["at"]
    lost = live.until("it is lost", lambda: daemon.facts("session_lost"))
    assert lost[0]["at"] - started >= (live.lease_s - 0.1) * 1000
    b = live.trainer("b")
    b.do("enter", phase="rollout")


def test_killed_again_and_again_under_load_every_job_does_all_its_iterations(live):
    # (A client that has found nobody for long looks again after ten seconds: by then a lease of ten may be over for
    # who was just about to open a session. Nobody dies here, so leases may be long.)
    daemon = live.daemon(lease_s=60.0)
    trainers = [live.trainer(name) for name in "abc"]
    asked = [(one, one.ask("loop", rounds=4, seconds=0.02, then=one.name == "b")) for one in trainers]

    seen = 0
    for _ in range(2):
        # Not at a moment of our choosing: somewhere among the next facts.
        live.until("there is news", lambda seen=seen: daemon.last_seq() >= seen + 15)
        daemon.kill9()
        daemon.restart()
        seen = daemon.last_seq()
    for one, number in asked:
        assert "error" not in one.answer(number)

    assert {len(one.happened("granted")) for one in trainers} == {8}
    # Every stay is in the journal once, under the fence that its client was told.
    told = {(event["slot"], event["fence"]) for one in trainers for event in one.happened("granted")}
    assert {(fact["slot"], ".".join(map(str, fact["fence"]))) for fact in daemon.facts("slot_granted")} == told
    assert len(daemon.facts("daemon_started")) == 3


def test_killed_in_the_middle_of_a_load_it_sees_the_load_through(live):
    daemon = live.daemon()
    daemon.fault(faults=[{"do": "delay", "method": "load", "delay_s": 30.0, "times": 1}])  # it dies with the daemon
    a = live.trainer("a")
    number = a.ask("enter", phase="rollout")
    live.until("its state is being loaded", lambda: daemon.facts("order_issued"))

    daemon.kill9()
    assert a.done(number) is None
    daemon.restart()

    assert a.answer(number)["gpus"] == ["mock/gpu0"]
    assert [line["event"] for line in daemon.witness() if line.get("gpu") == "mock/gpu0"] == ["load", "loaded"]
    a.do("leave")


def test_a_hook_that_ran_while_the_daemon_was_killed_is_not_run_again(live):
    daemon = live.daemon()
    own = {"rollout": {"gpu_gb": 2, "ram_gb": 2, "driver": "channel"}, "train": None, "phases": ["rollout"]}
    a = live.trainer("a", bytes_=False, **own)
    a.do("hooks", kinds=["load", "park", "discard"], seconds=1.0)
    number = a.ask("enter", phase="rollout")
    live.until("its hook runs", lambda: a.happened("hook"))

    daemon.kill9()
    daemon.restart()

    # It is told once more, and answers what it answered before.
    assert a.answer(number)["gpus"] == ["mock/gpu0"]
    assert [event["hook"] for event in a.happened("hook")] == ["load"]
    a.do("leave")


def test_stopped_under_load_it_ends_with_0_stops_no_job_and_all_finish_after_its_return(live):
    # In that policy's order b waits for a to end, and c for b to begin.
    daemon = live.daemon(policy="rollmux", shutdown_s=60.0)
    feed = live.script("follow.py", "follow")
    a = live.holder("a")
    b, b_asked = live.waiter("b")
    c, c_asked = live.waiter("c", phase="train")
    live.until("somebody follows", lambda: feed.happened("facts"))
    with socket.socket(socket.AF_UNIX) as poll:
        poll.connect(str(daemon.socket))
        path = f"/v1/facts?after={daemon.last_seq()}&wait_ms=60000"
        poll.sendall(f"GET {path} HTTP/1.1\r\nhost: rollmuxd\r\n\r\n".encode())
        daemon.last_seq()  # by this answer the daemon has read the poll, too
        with pytest.raises(BlockingIOError):
            poll.recv(1, socket.MSG_DONTWAIT)

        began = time.monotonic()
        assert daemon.stop() == 0
        assert time.monotonic() - began < 45, "a long poll held it up"  # which lasts 60 s
        assert poll.recv(12) == b"HTTP/1.1 200"
    assert daemon.socket.exists(), "a job that is started now would run alone, beside the holder"
    assert not (daemon.state / "daemon.json").exists()

    # The holder works on through it, and is still there afterwards; what it asks for in between waits.
    assert a.process.poll() is None
    leaving = a.ask("leave")
    time.sleep(0.3)
    assert a.done(leaving) is None
    daemon.restart()

    assert "error" not in a.answer(leaving)
    assert "error" not in b.answer(b_asked)
    b.do("leave")
    assert "error" not in c.answer(c_asked)
    c.do("leave")
    assert daemon.facts("slot_taken_away", "slot_withdrawn", "session_lost") == []
    # The feed has missed nothing, and told nothing twice.
    last = daemon.last_seq()
    live.until("the feed has caught up", lambda: feed.happened("facts")[-1]["seqs"][-1] >= last)
    seqs = [seq for event in feed.happened("facts") for seq in event["seqs"]]
    assert seqs == list(range(1, len(seqs) + 1))


def test_a_caller_that_holds_up_the_stop_costs_no_job_its_slot(live):
    daemon = live.daemon(shutdown_s=live.lease_s + 1.0)
    a = live.holder("a")
    with socket.socket(socket.AF_UNIX) as slow:
        slow.connect(str(daemon.socket))
        slow.sendall(b"POST /v1/jobs HTTP/1.1\r\nhost: rollmuxd\r\ncontent-length: 100\r\n\r\n{")
        time.sleep(0.1)  # for it to be read; the rest never comes

        assert daemon.stop() == 0
    daemon.restart()

    assert daemon.facts("session_lost") == []
    a.do("leave")


#: a policy that never finishes placing a job, and notes that it is at it
ENDLESS = """
import pathlib

from rollmuxd.policies.rollmux import RollMux


class Endless(RollMux):
    def place(self, state, job):
        pathlib.Path({begun!r}).touch()
        while True:
            pass
"""


def test_a_stop_ends_while_a_plan_is_being_computed_and_the_directory_is_free_afterwards(live):
    plugins, begun = live.folder / "plugins", live.folder / "begun"
    info = plugins / "rollmuxd_policy_endless-0.dist-info"
    info.mkdir(parents=True)
    (plugins / "rollmuxd_policy_endless.py").write_text(ENDLESS.format(begun=str(begun)))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rollmuxd-policy-endless\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[rollmuxd.policies]\nendless = rollmuxd_policy_endless:Endless\n")
    daemon = live.daemon(policy="endless", shutdown_s=1.0)
    job = {"name": "a", "phases": [{"name": "rollout", "pools": ["rollout"], "seconds": 1}], "wants": {"rollout": {}}}
    call = json.dumps({"jobs": [job]}).encode()
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(daemon.socket))
        caller.sendall(b"POST /v1/plan HTTP/1.1\r\nhost: rollmuxd\r\ncontent-length: %d\r\n\r\n%s" % (len(call), call))
        live.until("the plan is being computed", begun.exists)

        assert daemon.stop() == 0
    daemon.restart()

    assert len(daemon.facts("daemon_started")) == 2


def test_a_disk_that_takes_nothing_more_is_answered_with_503_and_all_go_on_when_it_does(live):
    daemon = live.daemon()
    a = live.holder("a")
    b, asked = live.waiter("b")
    before = daemon.last_seq()
    unlimited = resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE)

    # No file of the daemon may grow: neither the journal's log nor anything else.
    resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (4096, unlimited[1]))
    body = {"name": "late", "phases": [{"name": "rollout", "pools": ["rollout"]}], "wants": {"rollout": {}}}
    refused = live.until("it refuses", lambda: (r := daemon.call("POST", "/v1/jobs", body)).status_code == 503 and r)
    assert refused.headers["content-type"] == "application/problem+json"
    assert int(refused.headers["retry-after"]) >= 1
    leaving = a.ask("leave")
    time.sleep(0.5)
    assert a.done(leaving) is None, "released, and nobody has written that down"
    assert b.done(asked) is None

    resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, unlimited)
    assert "error" not in a.answer(leaving)
    assert "error" not in b.answer(asked)
    assert daemon.process.poll() is None
    assert not any(fact["fact"] == "slot_taken_away" for fact in daemon.facts(after=before))
    assert "late" not in daemon.jobs()


def test_on_the_sample_file_a_held_slot_is_still_held_after_a_kill(live):
    sample = (Path(__file__).parents[2] / "rollmux.toml").read_text()
    daemon = live.daemon()
    daemon.stop()
    text, times = re.subn(
        r"^listen = .*$",
        f'listen = "127.0.0.1:0"\nstate_dir = {json.dumps(str(daemon.state))}',
        sample,
        flags=re.MULTILINE,
    )
    assert times == 1
    (daemon.folder / "rollmux.toml").write_text(text)
    shutil.rmtree(daemon.state)
    daemon.start()
    a = live.holder("a")
    held = a.happened("granted")[0]

    daemon.kill9()
    daemon.restart()

    live.until("the hosts were seen", lambda: all(node["status"] == "up" for node in daemon.get("/v1/nodes")["items"]))
    slot = daemon.slot(held["slot"])
    assert (slot["status"], slot["fence"], slot["gpus"]) == ("running", held["fence"], held["gpus"])
    a.do("leave")
    a.do("enter", phase="train")
    a.do("leave")
    assert len(daemon.facts("host_booted")) == 2, "a restart of the daemon is none of the machines"
    assert daemon.facts("slot_taken_away", "session_lost", "job_lost") == []
