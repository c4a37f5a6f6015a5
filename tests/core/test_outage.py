"""What a job's request waited while there was no daemon is no slowdown, and is left out once."""

from rollmuxd.core import inputs as i
from rollmuxd.core.config import Config
from rollmuxd.core.model import SlotStatus
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.core.spec import JobSpec, PhaseSpec, StateSpec, Want
from rollmuxd.policies.rollmux import RollMux

NODES = tuple(i.NodeSpec(f"{it}/gpu0", it, (f"{it}/gpu0",), (it,)) for it in ("rollout", "train"))
HOSTS = tuple(i.HostSpec(node.host, "mock", 1_000) for node in NODES)
STATES = tuple(StateSpec(it, driver="mock", gpu_mb=100, ram_mb=100) for it in ("rollout", "train"))


def two_jobs():
    """Both ask for the rollout node: the state of the first is loaded there, the second waits."""
    core = Scheduler(Config(), RollMux())
    core.handle(i.Start(HOSTS, NODES), 1)
    for node in NODES:
        core.handle(i.HostObserved(node.host, tuple(i.GpuObservation(gpu, 0) for gpu in node.gpus)), 1)
    phases, wants = (
        (PhaseSpec("rollout", ("rollout",)), PhaseSpec("train", ("train",))),
        (Want("rollout"), Want("train")),
    )
    for name in "ab":
        spec = JobSpec(name, phases, wants, states=STATES)
        job = core.handle(i.RegisterJob("team", "ann", spec), 1_000).answer.job
        session = core.handle(i.OpenSession(job, "", pid=1, host="h"), 1_000).answer.session
        core.handle(i.RequestSlot(job, session, "rollout", "r"), 1_000)
    loading, waiting = core.state.slots.values()
    assert (loading.status, waiting.status) == (SlotStatus.LOADING, SlotStatus.QUEUED)
    return core, loading, waiting


def test_a_request_that_waits_or_whose_state_is_loaded_is_excused_the_outage_and_no_more():
    core, *slots = two_jobs()
    core.handle(i.Start(HOSTS, NODES, 2, away_ms=300_000), 401_000)

    for slot in slots:
        assert core.state.jobs[slot.job].progress.iteration_excused_ms == 300_000
        assert slot.queued_at == 301_000  # placed again, the job is excused what is left of the wait


def test_an_outage_that_began_before_the_request_is_excused_for_as_long_as_it_waited():
    core, *slots = two_jobs()
    core.handle(i.Start(HOSTS, NODES, 2, away_ms=300_000), 101_000)

    assert [core.state.jobs[slot.job].progress.iteration_excused_ms for slot in slots] == [100_000] * 2
