"""A thousand clients may fall silent at once (a network, a login node): that is one decision, not a thousand."""

from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.config import Config
from rollmuxd.core.model import JobSpec, PhaseSpec, Want
from rollmuxd.core.placement import RollMux
from rollmuxd.core.scheduler import Scheduler

NODES, JOBS, WAITING = 12, 60, 6


class Counting(RollMux):
    """Tells how often it was asked for a place."""

    asked = 0

    def place(self, state, job):
        self.asked += 1
        return super().place(state, job)


def test_when_many_leases_run_out_at_once_each_waiting_job_is_tried_once():
    policy = Counting(max_group=5)
    core = Scheduler(Config(), policy)
    nodes = [
        i.NodeSpec(f"{pool}{n}/gpu0", f"{pool}{n}", (f"{pool}{n}/gpu0",), (pool,))
        for pool in ("rollout", "train")
        for n in range(NODES)
    ]
    core.handle(i.Start(tuple(i.HostSpec(node.host, "mock", 0) for node in nodes), tuple(nodes)), 1)
    for node in nodes:
        core.handle(i.HostSeen(node.host, tuple(i.GpuSight(gpu, 0) for gpu in node.gpus)), 1)

    def register(number):
        phases = (PhaseSpec("rollout", ("rollout",), planned_ms=1_000 + number), PhaseSpec("train", ("train",)))
        spec = JobSpec(f"j{number}", phases, (Want("rollout"), Want("train")))
        job = core.handle(i.RegisterJob("team", "ann", spec), 2).answer.job
        return job, core.handle(i.OpenSession(job, "", pid=number, host="h"), 2).answer.session

    for number in range(JOBS):
        register(number)
    late = [register(number) for number in range(JOBS, JOBS + WAITING)]
    lease = Config().lease_ms
    for _, session in late:  # those that wait are heard of, and nobody else
        core.handle(i.Heartbeat(session), lease)
    assert len(core.state.waiting) == WAITING

    policy.asked = 0
    decision = core.handle(i.Tick(), lease + 3)

    assert sum(isinstance(fact, f.JobLost) for fact in decision.facts) == JOBS
    assert [fact.job for fact in decision.facts if isinstance(fact, f.JobPlaced)] == [job for job, _ in late]
    assert policy.asked <= WAITING
