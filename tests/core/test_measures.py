"""What is counted of a job is what its phases took, and not what the daemon was away for."""

from rollmuxd.core.apply.measures import count_release
from rollmuxd.core.model import Job, Slot
from rollmuxd.core.spec import JobSpec, PhaseSpec


def job_and_slot():
    job = Job("j1", "me", "me", JobSpec("a", (PhaseSpec("rollout", ("rollout",)),), {}), registered_at=0)
    return job, Slot("s1", "j1", 1, "", "rollout", "r", queued_at=0, granted_at=0)


def test_a_release_that_waited_for_the_daemon_to_come_back_is_no_time_of_the_phase():
    job, slot = job_and_slot()
    count_release(job, slot, 10_000, 0.0)
    count_release(job, slot, 3_600_000, 7.0, away=True)

    assert job.times["rollout"].recent_ms == [10_000]
    assert (job.progress.iteration_solo_ms, job.progress.iteration_excused_ms) == (20_000, 3_590_000)
    assert job.work == 7.0


def test_the_first_time_of_a_phase_is_counted_even_over_a_restart():
    job, slot = job_and_slot()
    count_release(job, slot, 10_000, 0.0, away=True)

    assert job.times["rollout"].recent_ms == [10_000]
