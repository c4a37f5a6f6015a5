"""A live job whose phases grow: its group is planned anew, and where that does not do, it is moved while it runs.

Under the paper's policy, which shares before nodes run short, and plans in an order that drift can break.
"""

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PAIRS = (("0", "rollout"), ("1", "train"), ("2", "rollout"), ("3", "train"))
SOON = "\n[estimates]\nwindow = 4\nmin_samples = 2\nreplan_every_s = 0\n"
MOVES = '\n[moves]\nenabled = "on"\nmin_interval_h = 0\nmove_cost_s = 0\n'


def grows(live, **options):
    """A job that states 0.05 s for each of its phases, beside one that is promised to go round in 0.4 s."""
    stated = {"seconds": 0.05}
    a = live.trainer("a", slo=8.0, rollout=stated, train=stated, **options)
    a.do("start")
    b = live.trainer("b", slo=2.0, rollout={"seconds": 0.1}, train={"seconds": 0.1})
    b.do("start")
    return a, b


def test_a_job_whose_phases_grow_is_moved_to_where_all_promises_hold(live):
    daemon = live.daemon(PAIRS, tables=SOON + MOVES, policy="rollmux")
    a, b = grows(live, movable="warm")
    assert daemon.job("a")["group"] == daemon.job("b")["group"]

    assert "error" not in a.do("loop", rounds=5, seconds=0.4)

    drifted = daemon.facts("times_drifted")
    assert drifted[0]["was"] == {"rollout": 50, "train": 50}
    assert min(drifted[0]["times"].values()) >= 400
    # (How often that was said hangs on how even the phases were.)
    at_risk = {tuple(fact["at_risk"]) for fact in daemon.facts("group_replanned") if fact.get("at_risk")}
    assert at_risk == {(daemon.job("b")["job"],)}
    assert len(daemon.facts("move_ended")) == 1
    assert daemon.job("a")["group"] != daemon.job("b")["group"]
    assert not daemon.job("b")["at_risk"]
    assert "error" not in b.do("loop", rounds=2, seconds=0.1)
    for one in (a, b):
        one.do("end")


def test_where_nobody_may_be_moved_the_promise_is_said_to_be_at_risk_also_after_a_restart(live):
    daemon = live.daemon(PAIRS, tables=SOON + MOVES, policy="rollmux")
    a, b = grows(live)

    assert "error" not in a.do("loop", rounds=4, seconds=0.4)

    for _ in range(2):
        assert daemon.job("b")["at_risk"]
        assert "at risk" in " ".join(daemon.get("/v1/jobs/b/explain")["sentences"])
        seen = daemon.job("a")["estimates"]["rollout"]
        assert seen["planned_s"] == 0.05
        assert seen["estimate_s"] >= 0.4
        assert seen["estimate_samples"] >= 2
        daemon.kill9()
        daemon.restart()
    a.do("end")
    live.until("who has left puts nobody at risk", lambda: not daemon.job("b")["at_risk"])
    b.do("end")
