"""A GPU that cannot be read takes its node out, and no other node of its host; it comes back when it can be read."""

from rollmuxd.core.config import Config
from rollmuxd.core.inputs import GpuSight, HostSeen, HostSpec, NodeSpec, Start
from rollmuxd.core.model import NodeStatus
from rollmuxd.core.placement import RollMux
from rollmuxd.core.scheduler import Scheduler

GPUS = ("box/gpu0", "box/gpu1")


def scheduler():
    made = Scheduler(Config(), RollMux())
    nodes = tuple(NodeSpec(gpu, "box", (gpu,), ("rollout",), gpu_mb=80_000) for gpu in GPUS)
    made.handle(Start((HostSpec("box", "local", 1000),), nodes), 0)
    return made


def see(made, now, *gpus, **unread):
    why = {gpu: reason for gpu, reason in zip(GPUS, unread.values(), strict=False) if reason}
    return made.handle(HostSeen("box", tuple(GpuSight(gpu, 0) for gpu in gpus), "boot1", None, why), now)


def statuses(made):
    return [made.state.nodes[gpu].status for gpu in GPUS]


def test_its_node_is_lost_with_the_reason_once_and_the_other_goes_on():
    made = scheduler()
    see(made, 1, *GPUS)
    assert statuses(made) == [NodeStatus.UP, NodeStatus.UP]

    facts = [see(made, now, "box/gpu0", none="", lost="the GPU is lost").facts for now in (2, 3)]
    assert statuses(made) == [NodeStatus.UP, NodeStatus.LOST]
    assert [getattr(fact, "reason", "") for fact in facts[0]] == ["box/gpu1: the GPU is lost"]
    assert list(facts[1]) == []

    see(made, 4, *GPUS)
    assert statuses(made) == [NodeStatus.UP, NodeStatus.UP]


def test_a_gpu_that_is_just_not_reported_changes_nothing():
    made = scheduler()
    see(made, 1, *GPUS)
    see(made, 2, "box/gpu0")
    assert statuses(made) == [NodeStatus.UP, NodeStatus.UP]
