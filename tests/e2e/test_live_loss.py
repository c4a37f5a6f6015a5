"""Trainers that are killed, stopped or interrupted, where that can happen, and what becomes of their GPUs."""

import os
import signal
import time

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def lost_within_a_lease(live, daemon, name, last_beat):
    """The job is lost a lease after its last heartbeat (``daemon.renew``), no sooner and no later. Wall time of it."""
    job = daemon.job(name)["job"]
    lost = live.until(f"{name} is lost", lambda: daemon.facts("job_lost", job=job))
    at = lost[-1]["at"] / 1000
    not_before, not_after = last_beat
    # A loop that was late (this machine is busy) renews every lease, and says so.
    late, late_s = daemon.loop_late_s(not_before, at)
    assert at - not_before >= live.lease_s - 0.02, "lost before its lease had run out"  # (by two clocks)
    assert at - not_after <= live.lease_s * (1 + late) + late_s + live.slack_s
    return at


def test_killed_while_waiting_it_leaves_the_queue_within_a_lease_and_is_never_granted(live):
    daemon = live.daemon()
    a = live.holder("a")
    b, _ = live.waiter("b")
    c, asked = live.waiter("c")
    waiting = daemon.job("b")["slot"]
    assert daemon.slot(daemon.job("c")["slot"])["position"] > daemon.slot(waiting)["position"]

    b.kill()
    last_beat = daemon.renew("b")
    # Its turn comes while nobody knows yet that it is dead: still it is given nothing.
    a.do("leave")
    lost_within_a_lease(live, daemon, "b", last_beat)

    assert daemon.facts("slot_withdrawn", slot=waiting)
    c.answer(asked)
    assert daemon.facts("slot_granted", slot=waiting) == []
    assert daemon.facts("slot_claimed", slot=waiting) == []
    assert daemon.job("b")["status"] == "ended"


@pytest.mark.parametrize("where", ["in its phase", "between its phases"])
def test_killed_it_is_lost_at_the_last_beat_of_its_heartbeat_and_its_gpus_are_given_on(live, where):
    daemon = live.daemon(lease_s=600.0)
    a = live.holder("a")
    b, asked = live.waiter("b")
    if where == "between its phases":
        a.do("leave")
        b.answer(asked)
    heartbeat = a.heartbeat
    job = daemon.job("a")["job"]

    killed_at = a.kill(heartbeat_too=False)

    # Long before its lease has run out.
    (lost,) = live.until("it is lost", lambda: daemon.facts("job_lost", job=job))
    assert lost["reason"]["text"].startswith(f"its process (pid {a.pid} on ")
    assert lost["reason"]["text"].endswith(" is gone")
    print(f"lost {lost['at'] / 1000 - killed_at:.3f} s after it was killed")
    assert b.answer(asked)["gpus"] == ["mock/gpu0"]
    live.until("its heartbeat has ended", lambda: not live.lives(heartbeat))
    assert daemon.facts("session_lost")


@pytest.mark.parametrize("clean_later", [False, True], ids=["clean at once", "clean later"])
def test_killed_while_holding_its_gpus_are_given_on_only_when_they_were_verified_clean(live, clean_later):
    daemon = live.daemon()
    a = live.holder("a")
    b, asked = live.waiter("b")
    if clean_later:  # the process is gone, and its bytes are not: a hung driver, a child that nobody knows of
        left = {"gpu": "mock/gpu0", "mb": 2000, "process": f"pid {a.pid} [python] <defunct>"}
        daemon.fault(strangers=[left])

    a.kill()
    lost_at = lost_within_a_lease(live, daemon, "a", daemon.renew("a"))

    if clean_later:
        seen = len(daemon.facts())
        time.sleep(1.2)  # at least two looks at the host, by its settings: nothing comes of them
        assert b.done(asked) is None
        waits = daemon.slot(daemon.job("b")["slot"])
        held = next(why for why in waits["reasons"] if why["code"] == "held_by_lost")
        assert held["text"] == f"mock/gpu0 is held by lost job a, pid {a.pid}, until it was verified clean"
        assert held["data"]["pid"] == a.pid
        assert f"lost job a, pid {a.pid}" in " ".join(daemon.get("/v1/jobs/b/explain")["sentences"])
        assert daemon.facts("gpus_verified_clean", node="mock/gpu0", after=seen) == []
        daemon.fault()
    granted = b.answer(asked)

    facts = daemon.facts()
    number = {fact["fact"]: fact["seq"] for fact in facts if fact.get("slot") == granted["slot"]}
    cleared = [fact for fact in facts if fact["fact"] == "gpus_verified_clean" and fact["node"] == "mock/gpu0"]
    assert cleared[-1]["at"] / 1000 >= lost_at
    assert cleared[-1]["seq"] < number["slot_claimed"]


def test_an_asynchronous_trainer_that_is_killed_in_its_slot_holds_no_other_up_once_its_gpus_are_clean(live):
    daemon = live.daemon((("0", "train"),))
    alone = dict(rollout=None, phases={"train": "train"}, asynchronous=True)
    a = live.holder("a", "train", **alone)
    (b, b_asked), (c, c_asked) = (live.waiter(name, "train", **alone) for name in "bc")
    left = {"gpu": "mock/gpu0", "mb": 2000, "process": f"pid {a.pid} [python] <defunct>"}
    daemon.fault(strangers=[left])

    a.kill()
    lost_within_a_lease(live, daemon, "a", daemon.renew("a"))

    held = {why["code"] for why in daemon.slot(daemon.job("b")["slot"])["reasons"]}
    assert "held_by_lost" in held
    assert (b.done(b_asked), c.done(c_asked)) == (None, None)
    daemon.fault()
    for one, asked in ((b, b_asked), (c, c_asked)):
        one.answer(asked)
        one.do("leave")
    for one in (b, c):  # its rollouts are its own affair: these two share the trainer as before
        one.do("loop", rounds=2, seconds=0.02, phases=["train"])
    assert {name: job["status"] == "ended" for name, job in daemon.jobs().items()} == {
        "a": True,
        "b": False,
        "c": False,
    }


def test_killed_while_its_state_is_being_loaded_its_gpus_go_to_the_next(live):
    daemon = live.daemon()
    daemon.fault(faults=[{"do": "delay", "method": "load", "job": "a", "delay_s": 8.0}])  # by then it is dead
    a, b = live.trainer("a"), live.trainer("b")
    b.do("start")
    a.ask("enter", phase="rollout")
    slot = live.until("its state is being loaded", lambda: daemon.facts("slot_claimed"))[0]["slot"]

    a.kill()
    last_beat = daemon.renew("a")
    asked = b.ask("enter", phase="rollout")
    lost_within_a_lease(live, daemon, "a", last_beat)

    assert b.answer(asked)["gpus"] == ["mock/gpu0"]
    assert daemon.facts("slot_granted", slot=slot) == []
    assert daemon.facts("slot_taken_away", slot=slot, how="lost")


def test_a_trainer_that_is_lost_and_still_lives_keeps_its_gpus_from_others_until_it_is_gone(live):
    daemon = live.daemon()
    a = live.holder("a")
    b, asked = live.waiter("b")
    heartbeat = a.heartbeat
    # Nothing of it answers any more, but its bytes are there.
    a.freeze()
    os.kill(heartbeat, signal.SIGKILL)
    lost_within_a_lease(live, daemon, "a", daemon.renew("a"))

    def reasons():
        return {why["code"]: why["text"] for why in daemon.slot(daemon.job("b")["slot"])["reasons"]}

    assert f"lost job a, pid {a.pid}" in reasons()["held_by_lost"]
    assert b.done(asked) is None
    a.kill()
    assert b.answer(asked)["gpus"] == ["mock/gpu0"]


def test_a_trainer_that_wakes_after_it_was_lost_is_told_when_it_leaves_its_phase(live):
    daemon = live.daemon()
    a = live.holder("a", bytes_=False)
    b, asked = live.waiter("b", bytes_=False)
    a.freeze()
    os.kill(a.heartbeat, signal.SIGKILL)
    # It keeps nothing on the GPU, so that there is nothing to wait for.
    assert b.answer(asked)["gpus"] == ["mock/gpu0"]
    at = time.monotonic()

    a.thaw()

    lost = a.fails("leave")
    assert lost["error"] == "SlotLost"
    assert a.fails("enter", phase="train")["error"] == "JobEnded"
    assert daemon.job("b")["slot"] == b.happened("granted")[0]["slot"]
    # What it did while it did not know is no fault of anybody here.
    a.died = min(a.died, b.happened("granted")[0]["at"])
    assert at < lost["at"]


def test_killed_between_its_slots_it_is_lost_and_its_group_goes_on(live):
    daemon = live.daemon()
    a, b = live.trainer("a"), live.trainer("b")
    for one in (a, b):
        one.do("loop", rounds=1, seconds=0.0)
    a.do("enter", phase="rollout")
    a.do("leave")

    a.kill()
    last_beat = daemon.renew("a")
    # It asks while the dead one's state is still loaded, as far as anybody knows.
    b.do("loop", rounds=3, seconds=0.02)
    lost_within_a_lease(live, daemon, "a", last_beat)

    b.do("loop", rounds=2, seconds=0.02)
    live.until("nothing of a is left", lambda: daemon.job("a")["status"] == "ended")
    assert daemon.jobs()["b"]["status"] in {"admitted", "probing"}


def test_a_heartbeat_that_is_killed_is_started_again_and_nothing_is_lost(live):
    daemon = live.daemon()
    a = live.holder("a")
    first = a.heartbeat

    os.kill(first, signal.SIGKILL)
    live.until("there is another", lambda: [pid for pid in live.children_of(a.pid) if pid != first])
    session = daemon.job("a")["session"]
    time.sleep(live.lease_s + 0.5)  # a lease goes by

    assert daemon.job("a")["session"] == session
    a.do("leave")
    a.do("loop", rounds=1, seconds=0.0)
    assert daemon.facts("session_lost") == []


def test_a_stopped_trainer_keeps_its_slot_through_its_heartbeat_and_goes_on_when_it_wakes(live):
    daemon = live.daemon()
    a = live.holder("a")
    b, asked = live.waiter("b")

    a.freeze()  # a debugger, a long save, a held GIL
    time.sleep(live.lease_s + 1.0)  # a lease goes by, and more

    assert daemon.facts("session_lost") == []
    assert daemon.slot(a.happened("granted")[0]["slot"])["status"] == "running"
    assert b.done(asked) is None
    a.thaw()
    a.do("leave")
    assert b.answer(asked)["gpus"] == ["mock/gpu0"]
    a.do("enter", phase="train")


def test_a_trainer_that_fails_in_a_phase_gives_its_gpus_back_at_once(live):
    daemon = live.daemon(lease_s=6000.0)
    live.script("failing.py", "failing")
    live.until("it holds", lambda: daemon.facts("slot_granted"))
    b, asked = live.waiter("b")

    (daemon.folder / "fail").touch()

    b.answer(asked)  # long before any lease has run out
    live.until("its job has ended", lambda: daemon.job("failing")["status"] == "ended")
    assert daemon.job("failing")["reason"] == "failed: ZeroDivisionError: division by zero"


def test_ctrl_c_in_a_wait_takes_the_request_back_and_the_trainer_goes_on(live):
    daemon = live.daemon()
    a = live.holder("a")
    b, asked = live.waiter("b")
    waiting = daemon.job("b")["slot"]

    os.kill(b.pid, signal.SIGINT)

    live.until("b was interrupted", lambda: b.done(asked))
    assert b.done(asked)["error"] == "KeyboardInterrupt"
    assert daemon.facts("slot_withdrawn", slot=waiting)
    a.do("leave")
    assert b.do("enter", phase="rollout")["gpus"] == ["mock/gpu0"]
    assert len(daemon.facts("session_opened", job=daemon.job("b")["job"])) == 1


@pytest.mark.parametrize("heard", [True, False], ids=["heard", "not heard"])
def test_a_slot_whose_release_was_interrupted_twice_is_given_on_once_its_state_is_parked(live, heard):
    daemon = live.daemon()
    a = live.holder("a")
    b, asked = live.waiter("b")
    slot = a.happened("granted")[0]["slot"]
    a.do("interrupt", paths=["/release", "/give-back"], heard=heard)

    assert a.fails("leave")["error"] == "KeyboardInterrupt"

    if not heard:  # its process lives, and it is not known whether it computes
        assert daemon.slot(slot)["status"] == "running"
        assert b.done(asked) is None
    train = a.ask("enter", phase="train")
    assert b.answer(asked)["gpus"] == ["mock/gpu0"]
    a.answer(train)
    assert daemon.slot(slot)["status"] == "over"
    assert daemon.facts("slot_taken_away") == []


def test_memory_that_an_interrupted_trainer_left_on_a_gpu_keeps_it_from_others(live):
    """It lives, and no driver moves what it has there."""
    daemon = live.daemon()
    a = live.holder("a", bytes_=False)
    b, asked = live.waiter("b", bytes_=False)
    daemon.fault(strangers=[{"gpu": "mock/gpu0", "mb": 2000, "process": f"pid {a.pid} [python]"}])
    a.do("interrupt", paths=["/release", "/give-back"], heard=False)
    assert a.fails("leave")["error"] == "KeyboardInterrupt"

    train = a.ask("enter", phase="train")
    live.until("it is given back", lambda: daemon.facts("slot_released"))
    a.answer(train)

    time.sleep(1.2)  # at least two looks at the host
    assert b.done(asked) is None
    assert daemon.facts("slot_granted", job=daemon.job("b")["job"]) == []
    daemon.fault(strangers=[])
    assert b.answer(asked)["gpus"] == ["mock/gpu0"]
