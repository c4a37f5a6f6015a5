"""What the core remembers beside the state."""

from rollmuxd.core.model import Job
from rollmuxd.core.spec import JobSpec, Want
from rollmuxd.core.timers import Timers


def a_job(name: str, nodes: int, slo: float | None = None) -> Job:
    return Job(name, "team", "ann", JobSpec(name, (), (Want("rollout", nodes),), slo=slo), 0)


def test_jobs_are_of_one_kind_if_placement_takes_their_specs_for_equal() -> None:
    timers = Timers()
    one = timers.kind(a_job("a", 1))
    assert timers.kind(a_job("b", 1, slo=1.5)) == one
    assert timers.kind(a_job("c", 2)) != one
    assert timers.kind(a_job("a", 2)) != one, "a new run may have another spec"
