"""A GPU that cannot be read takes its node out, and no other node of its host; it comes back when it can be read."""

import msgspec

from rollmuxd.core.causes import said
from rollmuxd.core.config import Config
from rollmuxd.core.inputs import (
    EndJob,
    GpuObservation,
    HostObserved,
    HostSpec,
    NodeSpec,
    OpenSession,
    RegisterJob,
    RequestSlot,
    Start,
)
from rollmuxd.core.model import NodeStatus
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.core.spec import JobSpec, PhaseSpec, Want
from rollmuxd.core.state import State
from rollmuxd.explain.causes import sentence
from rollmuxd.explain.explainer import Explainer
from rollmuxd.policies.rollmux import RollMux

GPUS = ("box/gpu0", "box/gpu1")


def scheduler():
    made = Scheduler(Config(), RollMux())
    nodes = tuple(NodeSpec(gpu, "box", (gpu,), ("rollout",), gpu_mb=80_000) for gpu in GPUS)
    made.handle(Start((HostSpec("box", "local", 1000),), nodes), 0)
    return made


def see(made, now, *gpus, **unread):
    why = {gpu: reason for gpu, reason in zip(GPUS, unread.values(), strict=False) if reason}
    return made.handle(HostObserved("box", tuple(GpuObservation(gpu, 0) for gpu in gpus), "boot1", None, why), now)


def statuses(made):
    return [made.state.nodes[gpu].status for gpu in GPUS]


def test_its_node_is_lost_with_the_reason_once_and_the_other_goes_on():
    made = scheduler()
    see(made, 1, *GPUS)
    assert statuses(made) == [NodeStatus.UP, NodeStatus.UP]

    facts = [see(made, now, "box/gpu0", none="", lost="the GPU is lost").facts for now in (2, 3)]
    assert statuses(made) == [NodeStatus.UP, NodeStatus.LOST]
    assert [sentence(getattr(fact, "reason", None)) for fact in facts[0]] == ["box/gpu1: the GPU is lost"]
    assert list(facts[1]) == []

    see(made, 4, *GPUS)
    assert statuses(made) == [NodeStatus.UP, NodeStatus.UP]


def test_a_lost_node_is_lost_for_the_reason_of_the_last_look_and_since_the_first():
    """An operator that mends the first reason would look for it again."""
    made = scheduler()
    looks = [HostObserved("box", unreachable=said(why)) for why in ("no sshd", "no sshd", "no python3")]
    facts = [made.handle(look, now).facts for now, look in enumerate(looks)]
    assert [[fact.node for fact in heard] for heard in facts] == [[*GPUS], [], [*GPUS]]
    facts = [see(made, now, "box/gpu0", none="", lost="the GPU is lost").facts for now in (4, 5)]

    node = made.state.nodes["box/gpu1"]
    assert (node.status, sentence(node.reason), node.lost_at) == (NodeStatus.LOST, "box/gpu1: the GPU is lost", 0)
    assert not facts[1]


def test_a_gpu_that_is_just_not_reported_changes_nothing():
    made = scheduler()
    see(made, 1, *GPUS)
    see(made, 2, "box/gpu0")
    assert statuses(made) == [NodeStatus.UP, NodeStatus.UP]


def test_since_when_a_node_is_lost_is_not_said_where_an_older_version_did_not_write_it_down():
    made = scheduler()
    see(made, 1, *GPUS)
    job = JobSpec("A", (PhaseSpec("rollout", ("rollout",)),), (Want("rollout"),))
    made.handle(RegisterJob("team", "ann", job), 2)
    session = made.handle(OpenSession("j1"), 2).answer.session
    made.handle(RequestSlot("j1", session, "rollout", "first"), 2)
    made.handle(EndJob("j1", "ann"), 3)
    node = made.state.slots["s1"].gpus[0]
    made.handle(HostObserved("box", unreachable=said("no route")), 4_000)
    heard = [reason for reason in Explainer(made.context).explain("j1", 64_000).sentences if "no word" in reason]
    assert len(heard) == 1
    assert f"gone from the GPUs of {node} since that node was lost, 60 s ago: an operator" in heard[0]

    older = msgspec.to_builtins(made.state)
    for it in older["nodes"].values():
        assert it.pop("lost_at") == 4_000
    loaded = Scheduler(Config(), RollMux(), msgspec.convert(older, State))
    (heard,) = [reason for reason in Explainer(loaded.context).explain("j1", 64_000).sentences if "no word" in reason]
    assert f"gone from the GPUs of {node} since that node was lost: an operator" in heard
