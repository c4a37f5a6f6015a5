"""What transcripts of drained nodes do not show: how much is tried, when, and under what names."""

import pytest
from msgspec.structs import replace

from rollmuxd.core import inputs as i
from rollmuxd.core.config import Config, DriverTraits, Moves
from rollmuxd.core.model import JobState
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.core.spec import JobSpec, Movable, PhaseSpec, StateSpec, Want
from rollmuxd.core.steps import guard
from rollmuxd.explain.explainer import Explainer
from rollmuxd.explain.what_if import without
from rollmuxd.policies.rollmux import RollMux


def test_who_stays_is_looked_at_again_every_minute_as_not_all_that_lets_him_go_is_a_fact():
    cluster = Cluster()
    cluster.policy.shut = True
    cluster.hand(0, i.DrainNode("r0", "ops"))
    cluster.hand(1_000, i.Tick())
    assert "no other nodes would have it" in cluster.said(1_000)
    assert cluster.core.deadline() == 61_000

    cluster.hand(61_000, i.Tick())
    assert cluster.core.deadline() == 121_000

    cluster.policy.shut = False
    assert "it will be moved within 60 s" in cluster.said(90_000)
    assert cluster.nodes() == ("r0",)

    cluster.hand(121_000, i.Tick())
    assert cluster.nodes() == ("r1",)
    assert cluster.core.deadline() != 181_000


@pytest.mark.parametrize(("movable", "moves"), [(Movable.NO, Moves.ON), (Movable.WARM, Moves.OFF)])
def test_who_is_never_moved_is_not_looked_at_again(movable, moves):
    cluster = Cluster(movable, moves)
    cluster.hand(0, i.DrainNode("r0", "ops"))
    cluster.hand(1_000, i.Tick())

    assert cluster.nodes() == ("r0",)
    assert cluster.core.deadline() > 1_000_000


def test_nobody_is_put_beside_a_member_who_is_guarded():
    cluster = Cluster(together=True)
    guarded = cluster.core.state.jobs[cluster.other]
    guarded.guarded = True
    cluster.hand(0, i.DrainNode("r0", "ops"))
    cluster.hand(1_000, i.Tick())
    assert cluster.nodes() == ("r0",)

    guarded.guarded = False
    cluster.hand(61_000, i.Tick())
    assert cluster.nodes() == ("r1",)


def test_a_promise_that_is_at_risk_where_a_job_sits_does_not_keep_it_there():
    cluster = Cluster(alone=True)
    cluster.policy.shut, cluster.policy.risky = True, (cluster.job,)
    cluster.hand(0, i.DrainNode("r0", "ops"))
    cluster.hand(1_000, i.Tick())
    assert cluster.nodes() == ("r0",)  # it would be newly at risk

    cluster.core.state.at_risk[cluster.job] = None
    cluster.hand(61_000, i.Tick())
    assert cluster.nodes() == ("r1",)


def test_no_two_groups_that_are_only_thought_of_pass_for_each_other():
    """A policy may keep what it derives of a group under the group's version."""
    cluster = Cluster(alone=True)
    cluster.policy.risky = (cluster.job,)  # nothing is moved, and its place is tried again and again
    cluster.policy.shut = True
    cluster.hand(0, i.DrainNode("r0", "ops"))
    for at in (1_000, 61_000, 121_000):
        cluster.hand(at, i.Tick())
    job = cluster.core.state.jobs[cluster.job]
    job.progress.solo_ms = 1_000_000  # it could pay for a move
    for _ in range(2):
        guard._way_out(cluster.core.context, cluster.core.state.groups[job.group], job, "")

    tried = cluster.policy.replanned
    assert len(tried) == 5
    assert len(set(tried)) == len(tried)
    assert all(version < 0 for version in tried)  # no group has such a version


class Policy(RollMux):
    """Lets nobody in while it is shut, as one does until members have earned credit: there is no fact of that."""

    shut = False
    #: at risk, whatever is planned
    risky = ()

    def __init__(self):
        super().__init__()
        self.replanned = []

    def place(self, state, job):
        return None if self.shut else super().place(state, job)

    def replan(self, state, group):
        self.replanned.append(state.groups[group].version)
        return replace(super().replan(state, group), at_risk=self.risky)


class Cluster:
    """Two nodes, and two groups of one job each; there is room for both on either.

    ``together``: one group of them. ``alone``: the second node is free.
    """

    def __init__(self, movable=Movable.WARM, moves=Moves.ON, *, together=False, alone=False):
        self.policy = Policy()
        config = Config(lease_ms=1 << 50, moves=moves, drivers={"channel": DriverTraits(copies=True)})
        self.core = Scheduler(config, self.policy)
        nodes = tuple(i.NodeSpec(name, "h", (f"h/{name}",), ("rollout",)) for name in ("r0", "r1"))
        self.hand(0, i.Start((i.HostSpec("h", "mock", 0),), nodes))
        self.hand(0, i.HostObserved("h", tuple(i.GpuObservation(f"h/{name}", 0) for name in ("r0", "r1"))))
        at_most, self.policy.max_group = self.policy.max_group, 5 if together else 1
        self.job = self.register("A", movable)
        self.other = None if alone else self.register("B", Movable.NO, "r1")
        self.policy.max_group = at_most
        assert self.nodes() == ("r0",)

    def register(self, name, movable, *named, at=0):
        phases = (PhaseSpec("rollout", ("rollout",), planned_ms=10_000),)
        spec = JobSpec(name, phases=phases, wants=(Want("rollout", named=named),), slo=4.0, movable=movable)
        job = self.hand(at, i.RegisterJob("team", "ann", spec)).job
        self.hand(at, i.OpenSession(job, pid=1, host="box"))
        return job

    def hand(self, now, given):
        return self.core.handle(given, now).answer

    def nodes(self):
        return self.core.state.jobs[self.job].pins["rollout"]

    def said(self, now):
        return " ".join(Explainer(self.core.context).explain(self.job, now)[1])


def test_a_state_without_a_job_has_nothing_of_it_on_the_nodes_that_it_has_left_either():
    cluster = Cluster(Movable.WARM)
    state, job = cluster.core.state, cluster.core.state.jobs[cluster.job]
    state.states["left"] = JobState(job.id, "rollout", "r1", StateSpec("rollout", 1, 0, 1, "d"))
    state.nodes["r1"].states.append("left")
    job.states.append("left")
    job.left.append("r1")

    there = without(state, job)
    assert "left" not in there.states
    assert [key for node in there.nodes.values() for key in node.states] == []
    assert state.nodes["r1"].states == ["left"]
