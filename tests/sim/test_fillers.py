"""Fillers in small worlds under all checkers: jobs end, and each GPU is given on clean."""

import pytest
from msgspec.structs import replace
from simkit import checked
from simkit.faults import Faults
from simkit.small import POLICIES, small

from rollmuxd.core import facts as f

FILLERS = 5


# Of seed 1 and 2, an earlier version loaded a state ahead that dispatch parked for a request, again and again.
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_jobs_end_beside_fillers_that_share_their_nodes(seed):
    told = []
    workload = replace(small(seed), fillers=FILLERS)
    world = checked.make(
        Faults(),
        workload,
        POLICIES[seed // 2],
        seed,
        "work",
        hear=told.append,
    )

    outcome = world.run()

    assert len(outcome.jobs) == len(workload.jobs)
    asked = [type(fact) for fact in told]
    lent = sum(isinstance(fact, f.SlotClaimed) and fact.turn is None for fact in told)
    assert outcome.harvest.loans == lent == asked.count(f.LoanEnded) > FILLERS
    assert sum(outcome.harvest.yields.values()) == asked.count(f.YieldAsked)


def test_fillers_that_are_there_for_hours_before_the_first_job_comes_are_not_lost():
    workload = small(0)
    later = [replace(job, arrives_ms=job.arrives_ms + 4 * 3_600_000) for job in workload.jobs]
    told = []
    outcome = checked.run(
        replace(workload, jobs=tuple(later), fillers=FILLERS), POLICIES[0], seed=0, accounting="work", hear=told.append
    )
    assert not any(isinstance(fact, f.SessionLost) for fact in told)
    assert len(outcome.jobs) == len(later)
