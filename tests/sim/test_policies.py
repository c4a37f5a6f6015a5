"""Policies by name: the simulator's own, and those of installed packages."""

import pytest

from rollmuxd.policies.rollmux import RollMux
from rollmuxd.sim import policies
from rollmuxd.sim.policies import bound, known_policies, policy_under_test

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
    with pytest.raises(ValueError, match=r"there is no policy 'gavel' \(default, rollmux, solo\)"):
        policy_under_test("gavel")


def test_a_policy_that_a_daemon_could_run_is_listed_too_and_hides_none_of_ours(monkeypatch):
    class Theirs(RollMux):
        name = "theirs"

    monkeypatch.setattr(policies.discovery, "names", lambda kind: ("rollmux", "theirs"))
    monkeypatch.setattr(policies.discovery, "find_policy", lambda name: {"theirs": Theirs}[name])
    assert tuple(known_policies()) == (*OURS, *PAPERS, "theirs")
    assert known_policies()["rollmux"] is policy_under_test("rollmux")
    assert isinstance(policy_under_test("theirs").policy(0), Theirs)
