"""Jobs that may be moved are moved while they run, by a policy from outside that finds every other place better."""

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

#: a policy as a stranger would install it: RollMux, and who has run where he sits is better placed elsewhere
POLICY = """
from msgspec.structs import replace

from rollmuxd.policies.rollmux import RollMux
from rollmuxd.core.causes import said
from rollmuxd.core.policy import Move


class Restless(RollMux):
    name = "restless"

    def regroup(self, state, now):
        for job in state.jobs.values():
            has_run = [key for key in job.states if state.states[key].status == "loaded"]
            if has_run and job.status == "admitted" and job.spec.movable != "no" and job.move is None:
                others = {name: group for name, group in state.groups.items() if name != job.group}
                placed = self.place(replace(state, groups=others), job)
                yield None
                yield None if placed is None else Move(job.id, placed, said("there is another place"))
"""
PAIRS = (("0", "rollout"), ("1", "train"), ("2", "rollout"), ("3", "train"), ("4", "rollout"), ("5", "train"))
MOVES = '\n[moves]\nenabled = "on"\nmin_interval_h = 0\n'


@pytest.fixture
def restless(live):
    """A daemon with that policy."""
    plugins = live.folder / "plugins"
    info = plugins / "rollmuxd_policy_restless-0.dist-info"
    info.mkdir(parents=True)
    (plugins / "rollmuxd_policy_restless.py").write_text(POLICY)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rollmuxd-policy-restless\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[rollmuxd.policies]\nrestless = rollmuxd_policy_restless:Restless\n")

    def start(nodes: tuple[tuple[str, str], ...] = PAIRS, **settings):
        return live.daemon(nodes, tables=MOVES, policy="restless", **settings)

    return start


def moves(daemon, *kinds: str) -> list[dict]:
    return daemon.facts(*(f"move_{kind}" for kind in kinds))


def test_two_jobs_move_again_and_again_and_the_daemon_is_killed_in_the_middle_of_a_move(live, restless):
    """Nobody loses a step, nobody is ever on GPUs that are in use, and in the end nothing is left anywhere."""
    daemon = restless(lease_s=60.0)  # longer than a client waits before it looks again for who was away for long
    trainers = [live.trainer(name, movable="warm") for name in "ab"]
    asked = [one.ask("loop", rounds=14, seconds=0.05, then=one.name == "b") for one in trainers]

    # Parking takes a while, so that there is a middle.
    daemon.fault(faults=[{"do": "delay", "method": "park", "delay_s": 0.3, "times": 1000}])
    for _ in range(2):
        begun = len(moves(daemon, "began"))
        live.until("a move has begun", lambda begun=begun: len(moves(daemon, "began")) > begun, every=0.01)
        daemon.kill9()
        daemon.restart()
    for one, number in zip(trainers, asked, strict=True):
        assert "error" not in one.answer(number)
        one.do("end")

    assert {len(one.happened("granted")) for one in trainers} == {28}
    assert len(moves(daemon, "ended")) >= 4
    assert {gpu for one in trainers for told in one.happened("granted") for gpu in told["gpus"]} >= {
        "mock/gpu0", "mock/gpu2", "mock/gpu4"
    }  # fmt: skip
    assert [fact for fact in daemon.facts("order_issued") if fact.get("source")], "nothing was loaded from elsewhere"
    assert daemon.facts("job_quarantined", "slot_taken_away", "job_lost") == []
    live.until("nothing is left", lambda: not daemon.get("/v1/groups")["items"])
    left = {}
    for line in daemon.witness():
        if "gpu" in line and "job" in line:
            left[line["job"], line["pool"], line["gpu"]] = line["mb"]
    assert set(left.values()) == {0}


def test_a_load_that_fails_after_a_move_is_the_jobs_own_trouble(live, restless):
    daemon = restless()
    a = live.trainer("a", movable="warm", rollout={"seconds": 0.2}, train={"seconds": 0.2})
    a.do("loop", rounds=1, seconds=0.0)
    daemon.fault(faults=[{"do": "fail", "method": "load", "times": 3}])  # told again, it fails again
    a.do("enter", phase="rollout")
    b = live.trainer("b")
    b.do("start")  # so there is news, and the policy is asked
    live.until("it is to move", lambda: moves(daemon, "planned"))
    a.do("leave")
    a.do("loop", rounds=1, seconds=0.0, phases=["train"])
    number = a.ask("loop", rounds=1, seconds=0.0)  # its state is loaded where it has moved to

    live.until("it is quarantined", lambda: daemon.facts("job_quarantined"))
    assert "error" in a.answer(number)
    assert daemon.job("a")["status"] == "quarantined"
    b.do("loop", rounds=3, seconds=0.0)
    assert daemon.facts("node_quarantined") == []


def test_a_job_on_the_move_says_from_where_to_where_and_why(live, restless):
    daemon = restless(PAIRS[:4])
    a = live.trainer("a", movable="warm", rollout={"seconds": 0.2}, train={"seconds": 0.2})
    a.do("loop", rounds=1, seconds=0.0)
    daemon.fault(faults=[{"do": "delay", "method": "park", "delay_s": 4.0, "times": 1000}])
    a.do("enter", phase="rollout")
    live.trainer("b").do("start")
    live.until("it is to move", lambda: moves(daemon, "planned"))
    a.do("leave")
    number = a.ask("loop", rounds=1, seconds=0.0)

    live.until("it moves", lambda: daemon.job("a")["status"] == "moving")
    said = " ".join(daemon.get("/v1/jobs/a/explain")["sentences"])
    assert "moves from mock/gpu0, mock/gpu1 to mock/gpu2, mock/gpu3" in said
    assert "there is another place" in said
    assert "error" not in a.answer(number)
    assert daemon.facts("move_abandoned") == []
    a.do("end")
