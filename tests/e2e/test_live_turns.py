"""Jobs that take turns on a real daemon: what the clients, the journal and the hardware each say of it."""

import itertools
from types import SimpleNamespace

import pytest
from patience import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def concurrent(one, other, gpu, other_gpu):
    """Whether one held its GPU while the other held another."""
    mine = [(begin, end) for name, begin, end in one.stays() if name == gpu]
    theirs = [(begin, end) for name, begin, end in other.stays() if name == other_gpu]
    return any(a < d and c < b for (a, b), (c, d) in itertools.product(mine, theirs))


def test_two_jobs_take_turns_and_no_gpu_is_ever_held_twice(live):
    daemon = live.daemon()
    a, b = live.trainer("a"), live.trainer("b")

    asked = [(one, one.ask("loop", rounds=5, seconds=0.05)) for one in (a, b)]
    for one, number in asked:
        assert "error" not in one.answer(number)

    assert live.overlaps(a, b) == []
    assert [len(one.stays()) for one in (a, b)] == [10, 10]
    # One trains while the other rolls out: that is what it is all for. (In the loops too, but there one of them may be
    # through before the other begins.)
    for one, other in ((a, b), (b, a)):
        one.do("enter", phase="train")
        other.do("enter", phase="rollout")
        assert concurrent(other, one, "mock/gpu0", "mock/gpu1")
        one.do("leave")
        other.do("leave")
    seen = {line["event"] for line in daemon.witness()}
    assert {"load", "park", "clean"} <= seen
    assert "violation" not in seen


def test_the_checks_of_these_tests_see_a_double_hold(live):
    def line(event, name, mb):
        about = {"gpu": "h/gpu0", "job": f"j-{name}", "name": name, "run": 1, "pool": "rollout"}
        return {"event": event, "mb": mb, **about}

    parked = [line("load", "a", 9), line("park", "a", 0), line("load", "b", 9), line("dead", "b", 0)]
    assert live.doubles(parked) == []
    assert live.doubles([parked[0], parked[2]])

    def one(name, begin, end):
        return SimpleNamespace(name=name, stays=lambda: [("h/gpu0", begin, end)])

    assert live.overlaps(one("a", 1.0, 2.0), one("b", 2.0, 3.0)) == []
    assert live.overlaps(one("a", 1.0, 2.1), one("b", 2.0, 3.0))


def test_a_release_carries_the_request_for_the_next_phase(live):
    daemon = live.daemon()
    a, b = live.trainer("a"), live.trainer("b")

    asked = [(one, one.ask("loop", rounds=3, seconds=0.02, then=True)) for one in (a, b)]
    for one, number in asked:
        assert "error" not in one.answer(number)

    # Of six stays each, five were asked for by the release before.
    for job in daemon.jobs().values():
        queued = daemon.facts("slot_queued", job=job["job"])
        carried = {fact.get("next_slot") for fact in daemon.facts("slot_released")}
        assert [fact["slot"] in carried for fact in queued] == [False, *[True] * 5]
    assert not any(fact.get("next_refused") for fact in daemon.facts("slot_released"))


def test_the_async_client_and_decorated_functions_take_turns_too(live):
    daemon = live.daemon()

    programs = [live.script("asyncio_loop.py", "with-asyncio"), live.script("decorated.py", "decorated")]
    for program in programs:
        assert program.process.wait(PATIENCE_S) == 0, program.log.read_text()

    jobs = daemon.jobs()
    for program in programs:
        job = jobs[program.name]
        assert (job["status"], job["reason"]) == ("ended", "finished")
        phases = [fact["phase"] for fact in daemon.facts("slot_queued", job=job["job"])]
        assert phases == ["init", *["rollout", "train"] * 3]
        assert [event["value"] for event in program.happened("trained")] == [0, 10, 20]
    released = daemon.facts("slot_released")
    assert [fact["measured"]["tokens"] for fact in released if fact.get("measured")]


def test_a_tail_shrinks_when_another_can_use_the_part(live):
    daemon = live.daemon(nodes=(("0-1", "rollout"), ("2", "train")))
    some = {"nodes": 1, "min_gpus": 1}
    a = live.holder("a", rollout=some)
    a.do("progress", done=90, total=100)
    # Nobody could use the part yet.
    assert a.do("directive")["kind"] is None
    b, asked = live.waiter("b", rollout=some)

    live.until("a is asked to shrink", lambda: a.do("directive")["kind"] == "shrink")
    keep = a.do("directive")["keep"]
    assert keep == ["mock/gpu0"]
    # A real trainer frees the other GPU first; the mock is told by its file that this has happened.
    daemon.fault(given_back=[{"job": "a", "gpu": "mock/gpu1"}])
    a.do("shrink", keep=keep)

    assert b.answer(asked)["gpus"] == ["mock/gpu1"]
    assert daemon.slot(a.happened("granted")[0]["slot"])["status"] == "tail"
    a.do("leave")
    b.do("leave")


def test_who_started_on_a_part_of_a_node_has_its_state_on_all_of_it_when_it_is_given_all(live):
    daemon = live.daemon(nodes=(("0-1", "rollout"), ("2", "train")))
    some = {"nodes": 1, "min_gpus": 1}
    a = live.holder("a", rollout=some)
    a.do("progress", done=90, total=100)
    b, asked = live.waiter("b", rollout=some)
    live.until("a is asked to shrink", lambda: a.do("directive")["kind"] == "shrink")
    daemon.fault(given_back=[{"job": "a", "gpu": "mock/gpu1"}])
    a.do("shrink", keep=["mock/gpu0"])
    assert b.answer(asked)["gpus"] == ["mock/gpu1"]
    a.do("leave")
    a.do("end")
    b.do("leave")

    assert b.do("enter", phase="rollout")["gpus"] == ["mock/gpu0", "mock/gpu1"]

    there = {}
    for line in daemon.witness():
        if line.get("name") == "b" and line["pool"] == "rollout":
            there[line["gpu"]] = line["mb"]
    assert there == {"mock/gpu0": 2000, "mock/gpu1": 2000}


def test_hooks_run_in_the_clients_process_load_then_park_then_load(live):
    daemon = live.daemon()
    own = {"rollout": {"gpu_gb": 2, "ram_gb": 2, "driver": "channel"}, "train": None, "phases": ["rollout"]}
    a, b = live.trainer("a", bytes_=False, **own), live.trainer("b", bytes_=False, **own)
    for one in (a, b):
        one.do("hooks", kinds=["load", "park", "discard"])

    for one in (a, b, a, b):
        one.do("enter", phase="rollout")
        one.do("leave")
    for one in (a, b):
        one.do("end")

    for one in (a, b):
        ran = one.happened("hook")
        assert [event["hook"] for event in ran][:3] == ["load", "park", "load"]
        assert [event["warm"] for event in ran if event["hook"] == "load"] == [False, True]
        assert {event["pid"] for event in ran} == {one.pid}
    # The load of one comes after the park of the other, on the one clock that both have.
    order = sorted((event["at"], one.name, event["hook"]) for one in (a, b) for event in one.happened("hook"))
    assert [(name, hook) for _, name, hook in order][:6] == [
        ("a", "load"), ("a", "park"), ("b", "load"), ("b", "park"), ("a", "load"), ("a", "park"),
    ]  # fmt: skip
    assert daemon.facts("job_quarantined") == []


def test_a_park_that_fails_quarantines_that_job_only_and_it_can_be_reinstated(live):
    daemon = live.daemon()
    own = {"rollout": {"gpu_gb": 2, "ram_gb": 2, "driver": "channel"}, "train": None, "phases": ["rollout"]}
    a, b, c = (live.trainer(name, bytes_=False, **own) for name in "abc")
    for one in (a, b, c):
        one.do("hooks", kinds=["load", "park", "discard"])
        one.do("start")
    a.do("spoil", park="the engine will not sleep")

    a.do("enter", phase="rollout")
    a.do("leave")
    for one in (b, c):
        one.do("enter", phase="rollout")
        one.do("leave")

    job = daemon.job("a")
    assert job["status"] == "quarantined"
    assert "the engine will not sleep" in job["reason"]
    a.do("spoil", park="")
    waits = a.ask("enter", phase="rollout")
    live.until("a says what it waits for", lambda: "`rollmuxd job reinstate a`" in a.log.read_text())
    assert "quarantined: could not park" in a.log.read_text()
    assert "the engine will not sleep" in a.log.read_text()
    assert a.done(waits) is None
    assert {daemon.job(name)["status"] for name in "bc"} <= {"admitted", "probing"}

    daemon.post("/v1/jobs/a/reinstate")
    assert "error" not in a.answer(waits)
    a.do("leave")
    # In the same run, and the same session.
    assert len(daemon.facts("session_opened", job=job["job"])) == 1
    b.do("enter", phase="rollout")
    b.do("leave")
    assert daemon.job("a")["status"] in {"admitted", "probing"}


def test_the_end_of_a_job_with_state_holds_nobody_up(live):
    # Who is waited for is waited for longer than anything here takes.
    daemon = live.daemon(order_s=6000.0, clean_timeout_s=6000.0, policy="rollmux")
    own = {"rollout": {"gpu_gb": 2, "ram_gb": 2, "driver": "channel"}, "train": None, "phases": ["rollout"]}

    def first_in(name):
        one = live.trainer(name, bytes_=False, **own)
        one.do("hooks", kinds=["load", "park", "discard"])
        one.do("enter", phase="rollout")
        one.do("leave")
        return one

    # In good order: its discards are done by its own hooks, and nothing is left to be waited for.
    a = first_in("a")
    job = daemon.job("a")["job"]
    a.do("end")
    assert [event["hook"] for event in a.happened("hook")] == ["load", "discard"]
    live.until("a's place is free", lambda: daemon.facts("placement_ended", job=job))
    assert daemon.facts("order_contact_lost") == [], "its last seconds were waited for"

    # Killed, and ended by an operator: nobody is waited for.
    b = first_in("b")
    b.kill()
    daemon.call("DELETE", "/v1/jobs/b", {"reason": "it was killed"})
    job = daemon.job("b")["job"]
    live.until("b's place is free", lambda: daemon.facts("placement_ended", job=job))
    c = first_in("c")

    # Killed, while another waits for its state to be parked.
    d = live.holder("d", bytes_=False, **own)
    d.do("leave")
    d.kill()
    c.do("enter", phase="rollout")
