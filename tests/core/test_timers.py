"""What the core remembers beside the state."""

from rollmuxd.core.model import Job
from rollmuxd.core.spec import JobSpec, Want
from rollmuxd.core.timers import KINDS, Timers


def a_job(name: str, nodes: int, slo: float | None = None) -> Job:
    return Job(name, "team", "ann", JobSpec(name, (), (Want("rollout", nodes),), slo=slo), 0)


def test_jobs_are_of_one_kind_if_placement_takes_their_specs_for_equal() -> None:
    timers = Timers()
    one = timers.kind(a_job("a", 1))
    assert timers.kind(a_job("b", 1, slo=1.5)) == one
    assert timers.kind(a_job("c", 2)) != one
    assert timers.kind(a_job("a", 2)) != one, "a new run may have another spec"


def test_kinds_of_jobs_that_do_not_wait_are_forgotten() -> None:
    timers, stays = Timers(), a_job("stays", 1)
    one = timers.kind(stays)
    for number in range(KINDS + 10):
        timers.kind(a_job(f"j{number}", number + 2))
    timers.forget_kinds(["stays"])
    assert (len(timers._kinds), len(timers._numbers)) == (1, 1)
    assert timers.kind(stays) == one
