"""The policy that only watches: nobody waits, nothing is ordered, and a run leaves nothing behind however it ends."""

import pytest
from msgspec.structs import replace

from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.apply import apply
from rollmuxd.core.causes import Cause
from rollmuxd.core.config import Config
from rollmuxd.core.model import SlotStatus
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.core.spec import JobSpec, LaunchSpec, OnLoss, PhaseSpec, StateSpec, Want
from rollmuxd.core.state import State
from rollmuxd.explain.explainer import Explainer
from rollmuxd.policies.observe import Watch

PHASES = (PhaseSpec("rollout", ("rollout",)), PhaseSpec("train", ("train",)))
WANTS = (Want("rollout"), Want("train"))


class Watched:
    """A scheduler that watches one node of each pool, and what goes in."""

    def __init__(self):
        self.core, self.now, self.facts = Scheduler(Config(), Watch()), 1, []
        nodes = tuple(
            i.NodeSpec(f"h/gpu{n}", "h", (f"h/gpu{n}",), (pool,)) for n, pool in enumerate(("rollout", "train"))
        )
        self.start = i.Start((i.HostSpec("h", "mock", 1000),), nodes)
        self.hand(self.start)
        self.hand(i.HostObserved("h", (i.GpuObservation("h/gpu0", 0), i.GpuObservation("h/gpu1", 0))))

    def hand(self, given, after=10):
        self.now += after
        decision = self.core.handle(given, self.now)
        self.facts += decision.facts
        return decision

    def job(self, name, **more):
        states = tuple(StateSpec(pool, gpu_mb=10, ram_mb=10) for pool in ("rollout", "train"))
        spec = JobSpec(name, PHASES, WANTS, states=states, **more)
        job = self.hand(i.RegisterJob("team", "ann", spec, idempotency_key=name)).answer.job
        session = self.hand(i.OpenSession(job, name, pid=1, host="h")).answer.session
        return job, session

    def ask(self, job, session, phase, request):
        return self.core.state.slots[self.hand(i.RequestSlot(job, session, phase, request)).answer.slot]


def test_jobs_that_want_the_same_nodes_run_at_the_same_time_and_no_state_is_moved():
    watched = Watched()
    slots = [watched.ask(*watched.job(name), "rollout", "r1") for name in ("a", "b", "c")]
    assert [slot.status for slot in slots] == [SlotStatus.RUNNING] * 3
    assert not any(isinstance(fact, f.OrderIssued) for fact in watched.facts)

    for slot in slots:
        watched.hand(i.ReleaseSlot(slot.id, slot.fence), after=5_000)
    times = [watched.core.state.jobs[slot.job].times["rollout"].total_ms for slot in slots]
    assert times == [5_060, 10_030, 15_000]  # each from its grant to its release


@pytest.mark.parametrize("how", ["lost", "ended"])
def test_a_run_that_is_over_in_the_middle_of_a_phase_leaves_no_slot_and_no_group(how):
    watched = Watched()
    job, session = watched.job("a", on_loss=OnLoss.HOLD)
    slot = watched.ask(job, session, "rollout", "r1")
    if how == "lost":
        watched.hand(i.Tick(), after=Config().lease_ms + 1)
    else:
        watched.hand(i.EndJob(job, by="ann"))

    assert slot.status is SlotStatus.OVER
    assert watched.core.state.jobs[job].status == "ended"
    assert watched.core.state.groups == {}
    # and the journal says the same
    again = State()
    for fact in watched.facts:
        apply(again, fact)
    assert again == watched.core.state


def test_what_is_explained_of_a_job_that_is_only_watched_names_no_nodes_and_leaves_no_gap_for_them():
    watched = Watched()
    job, session = watched.job("a")
    slot = watched.ask(job, session, "rollout", "r1")

    said = Explainer(watched.core.context).explain(job, watched.now).sentences

    assert "It sits in group g1 alone (observed)." in said
    assert f"Its rollout slot {slot.id} is running." in said


def test_a_job_goes_on_after_a_restore_and_only_the_phase_that_it_was_in_is_over():
    watched = Watched()
    job, session = watched.job("a")
    slot = watched.ask(job, session, "rollout", "r1")
    watched.hand(replace(watched.start, incarnation=2, lost=Cause("restored")))

    assert slot.status is SlotStatus.OVER
    watched.hand(i.Heartbeat(session))
    assert watched.ask(job, session, "train", "t1").status is SlotStatus.RUNNING


def test_a_process_that_the_daemon_is_to_start_is_not_started_and_the_reason_said():
    watched = Watched()
    watched.core.config = Config(launch_hosts=("h",))
    watched.core.context.config = watched.core.config
    job = watched.hand(
        i.RegisterJob("team", "ann", JobSpec("a", PHASES, WANTS, launch=LaunchSpec(("train.sh",))))
    ).answer.job
    assert watched.core.state.jobs[job].status == "waiting"
    assert [reason.code for reason in Explainer(watched.core.context).why_job_waits(job, watched.now).reasons] == [
        "observing"
    ]
