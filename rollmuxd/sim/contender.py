"""Policies as the simulator runs them: each with what it registers for a job, and what its plan says of a pace.

A contender goes through the scheduler's core like any policy of a live daemon. What a baseline does differently from
us is in its :class:`~rollmuxd.core.policy.Policy` and in what it registers; never in the world.
"""

from typing import Protocol

from rollmuxd.core.estimates import solo_ms
from rollmuxd.core.model import GroupId, JobId, Millis
from rollmuxd.core.placement import RollMux
from rollmuxd.core.policy import Policy
from rollmuxd.core.state import State
from rollmuxd.sim.workload import SimJob


class Contender(Protocol):
    """One competitor."""

    name: str
    #: one line for ``sim policies`` and the report
    summary: str

    def policy(self, seed: int) -> Policy:
        """A new policy object for one run."""
        ...

    def adapt(self, job: SimJob) -> SimJob:
        """The job as this contender registers and runs it. Raises ``Impossible`` where it cannot."""
        ...

    def paces(self, policy: Policy, state: State, group: GroupId) -> dict[JobId, Millis]:
        """What an iteration of each member takes, by the plan, while the group stays as it is."""
        ...


class InWheelOrder:
    """What contenders in wheel order have in common: everybody's iteration takes the group's period."""

    def adapt(self, job: SimJob) -> SimJob:
        """As it is."""
        return job

    def paces(self, policy: Policy, state: State, group: GroupId) -> dict[JobId, Millis]:
        """The period; alone, nothing is moved, and it is the solo iteration."""
        members = state.groups[group].jobs
        if len(members) == 1:
            return {members[0]: solo_ms(state.jobs[members[0]]) or 0}
        period = policy.period_ms(state, group) or 0
        return dict.fromkeys(members, period)


class RollMuxPaper(InWheelOrder):
    """Algorithm 1 as the paper has it."""

    name = "rollmux"
    summary = "the paper's Algorithm 1: packing, scaling, isolated; saturated groups pruned; strict round robin"

    def policy(self, seed: int) -> Policy:
        """Pruning on."""
        return RollMux(prune=True)


class RollMuxUnpruned(InWheelOrder):
    """Algorithm 1 without pruning: what the daemon runs by default."""

    name = "rollmux-unpruned"
    summary = "the same without pruning, as the daemon runs by default: only promises, RAM and GPU memory reject"

    def policy(self, seed: int) -> Policy:
        """Pruning off."""
        return RollMux(prune=False)
