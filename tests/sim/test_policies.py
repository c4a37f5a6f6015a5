"""Policies by name: the simulator's own, and those of installed packages."""

import pytest

from rollmuxd.core.errors import BrokenInvariant
from rollmuxd.core.spec import JobSpec, PhaseSpec, StateSpec, Want
from rollmuxd.policies import rollmux
from rollmuxd.policies.rollmux import RollMux
from rollmuxd.sim import policies
from rollmuxd.sim.policies import bound, known_policies, policy_under_test
from rollmuxd.sim.workload import Pool, SimJob, Workload
from rollmuxd.sim.world import World

OURS = ("default", "rollmux", "solo")
PAPERS = ("rollmux-artifact", "colocated", "gavel", "random", "most-idle", "optimal")


def test_the_default_comes_first_then_our_own_then_those_of_packages():
    assert tuple(known_policies()) == (*OURS, *PAPERS)
    assert all(policy.name == name and policy.summary for name, policy in known_policies().items())


def test_a_bound_is_no_policy_that_a_scheduler_runs():
    assert bound("optimal").name == "optimal"
    assert bound("gavel") is None
    with pytest.raises(ValueError, match="there is no policy 'optimal'"):
        policy_under_test("optimal")


def test_without_packages_there_are_our_own(monkeypatch):
    monkeypatch.setattr(policies.discovery, "added", lambda group: {})
    assert tuple(known_policies()) == OURS
    with pytest.raises(ValueError, match=r"there is no policy 'rolmux'; did you mean rollmux\? \(default"):
        policy_under_test("rolmux")
    with pytest.raises(ValueError, match=r"there is no policy 'gavel' \(default, rollmux, solo\)"):
        policy_under_test("gavel")


def test_a_policy_that_a_daemon_could_run_is_listed_too_and_hides_none_of_ours(monkeypatch):
    class Theirs(RollMux):
        name = "theirs"

    monkeypatch.setattr(policies.discovery, "names", lambda kind: ("rollmux", "theirs"))
    monkeypatch.setattr(policies.discovery, "find", lambda kind, name: {"theirs": Theirs}[name])
    assert tuple(known_policies()) == (*OURS, *PAPERS, "theirs")
    assert known_policies()["rollmux"] is policy_under_test("rollmux")
    assert isinstance(policy_under_test("theirs").policy(0), Theirs)


def test_a_policy_that_forgets_what_hosts_have_is_told_so(monkeypatch):
    monkeypatch.setattr(rollmux, "ram_mb_on", lambda *_: 0)
    monkeypatch.setattr(rollmux, "check", lambda *_: None)
    phases = (PhaseSpec("rollout", ("rollout",), planned_ms=10_000), PhaseSpec("train", ("train",), planned_ms=5_000))
    states = tuple(StateSpec(it, ram_mb=900_000, driver="sim") for it in ("rollout", "train"))
    jobs = tuple(
        SimJob(
            it, "made", 0, 100_000, JobSpec(it, phases, (Want("rollout"), Want("train")), states=states),
            ((10_000, 5_000),), {"rollout": 1, "train": 1}, iterations=6,
        )
        for it in "abc"
    )  # fmt: skip
    pools = (Pool("rollout", "H20", 1.85, nodes=1), Pool("train", "H800", 5.28, nodes=1))

    with pytest.raises(BrokenInvariant, match="policy rollmux has placed j3 where host rollout1 has too little RAM"):
        World(Workload("made", jobs, pools), policy_under_test("rollmux"), seed=0, accounting="work").run()
