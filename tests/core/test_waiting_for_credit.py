"""Who waits for a member of a group to earn credit is let in when it has, and not only when somebody leaves."""

from rollmuxd.core import inputs as i
from rollmuxd.core.config import Config
from rollmuxd.core.loom import Loom
from rollmuxd.core.model import JobSpec, JobStatus, PhaseSpec, Want
from rollmuxd.core.scheduler import Scheduler

ROLLOUT_MS, TRAIN_MS, SLO = 10_000, 3_000, 1.2


def spec(name):
    """It keeps a rollout node busy for most of its time, so that a second one needs another, and the same trainer."""
    phases = (
        PhaseSpec("rollout", ("rollout",), planned_ms=ROLLOUT_MS),
        PhaseSpec("train", ("train",), planned_ms=TRAIN_MS),
    )
    return JobSpec(name, phases=phases, wants=(Want("rollout"), Want("train")), slo=SLO)


def test_a_job_is_let_in_beside_one_as_soon_as_that_has_earned_its_reserve():
    core, now = Scheduler(Config(lease_ms=1 << 50), Loom(uncertain=True, rounds=1)), 0

    def hand(given):
        return core.handle(given, now).answer

    hosts = {"r0": "rollout", "r1": "rollout", "t0": "train"}
    price = {"rollout": 1.0, "train": 3.0}
    hand(
        i.Start(
            tuple(i.HostSpec(host, "mock", 0) for host in hosts),
            tuple(
                i.NodeSpec(host, host, (f"{host}/gpu0",), (pool,), price_per_gpu_hour=price[pool])
                for host, pool in hosts.items()
            ),
        )
    )
    for host in hosts:
        hand(i.HostSeen(host, (i.GpuSight(f"{host}/gpu0", 0),)))
    first = hand(i.RegisterJob("team", "ann", spec("first"))).job
    second = hand(i.RegisterJob("team", "ann", spec("second"))).job
    session = hand(i.OpenSession(first, pid=1, host="box")).session

    def second_waits():
        return core.state.jobs[second].status is JobStatus.WAITING

    waited = []
    for number in range(8):
        for phase, took_ms in (("rollout", ROLLOUT_MS), ("train", TRAIN_MS)):
            slot = hand(i.RequestSlot(first, session, phase, f"{phase} {number}")).slot
            waited.append(second_waits())
            now += took_ms
            hand(i.ReleaseSlot(slot, core.state.slots[slot].fence))

    # An iteration alone earns a fifth of its time: what one takes has been earned after five, when the sixth begins.
    assert waited.index(False) == 2 * 5
    assert core.state.jobs[first].group == core.state.jobs[second].group
