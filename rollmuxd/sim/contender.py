"""Policies as the simulator runs them: each with what it registers for a job, and what its plan says of a pace.

A contender goes through the scheduler's core like any policy of a live daemon. What a baseline does differently from
us is in its :class:`~rollmuxd.core.policy.Policy` and in what it registers; never in the world.
"""

from typing import Any, Protocol

from msgspec.structs import replace

from rollmuxd.core.estimates import solo_ms
from rollmuxd.core.loom import Loom
from rollmuxd.core.model import GroupId, JobId, Millis, Movable
from rollmuxd.core.placement import RollMux, rate_of
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

    def move_ms(self) -> Millis:
        """What a move takes in cost fidelity: so long the job does nothing, and its own nodes are paid for twice."""
        ...


def that_moves(job: SimJob) -> SimJob:
    """The job as one that may be moved: as it says itself, else with its process."""
    if job.spec.movable is not Movable.NO:
        return job
    return replace(job, spec=replace(job.spec, movable=Movable.WARM))


class InWheelOrder:
    """What contenders in wheel order have in common: everybody's iteration takes the group's period."""

    def adapt(self, job: SimJob) -> SimJob:
        """As it is."""
        return job

    def paces(self, policy: Policy, state: State, group: GroupId) -> dict[JobId, Millis]:
        """The period by the job's rate; alone, nothing is moved, and it is the solo iteration."""
        known = state.groups[group]
        if len(known.jobs) == 1 and not known.coming:
            return {known.jobs[0]: solo_ms(state.jobs[known.jobs[0]]) or 0}
        period = policy.period_ms(state, group) or 0
        return {name: -(-period // max(1, rate_of(known, state.jobs[name]))) for name in known.jobs}

    def move_ms(self) -> Millis:
        """Nobody is moved."""
        return 0


class RollMuxPaper(InWheelOrder):
    """Algorithm 1 as the paper has it."""

    name = "rollmux"
    summary = "the paper's Algorithm 1: packing, scaling, isolated; saturated groups pruned; strict round robin"

    def policy(self, seed: int) -> Policy:
        """Pruning on."""
        return RollMux(prune=True)


class RollMuxUnpruned(InWheelOrder):
    """Algorithm 1 without pruning: what the daemon runs as ``rollmux``."""

    name = "rollmux-unpruned"
    summary = "the same without pruning, as the daemon runs it: only promises, RAM and GPU memory reject"

    def policy(self, seed: int) -> Policy:
        """Pruning off."""
        return RollMux(prune=False)


class Woven(InWheelOrder):
    """Loom, in one of its settings. Every job may be moved, and what that takes is charged."""

    def __init__(self, name: str, summary: str, **options: Any) -> None:
        self.name, self.summary, self._options = name, summary, options

    def policy(self, seed: int) -> Policy:
        """A new one: it draws nothing."""
        return Loom(**self._options)

    def adapt(self, job: SimJob) -> SimJob:
        """One that may be moved, where this setting moves any."""
        if self._options.get("regroup") == 1:
            return job
        return that_moves(job)

    def move_ms(self) -> Millis:
        """As long as the policy takes it to be."""
        return round(float(self._options.get("warm_s", 30)) * 1000)


LOOMS = (
    Woven("loom", "wheels, and regrouping that pays for itself: pairs and triples, 300 s a move; least $/h",
          objective="cost", warm_s=300),
    Woven("loom-warm", "the same, 30 s a move", objective="cost", warm_s=30),
    Woven("loom-work", "the same as loom, with a price on progress: least cost of the work that there is",
          objective="work", warm_s=300),
    Woven("loom-work-warm", "the same, 30 s a move", objective="work", warm_s=30),
    Woven("loom-owned", "for nodes that one owns: idle ones cost nothing, scarce ones their price; 300 s a move",
          objective="throughput", warm_s=300),
    Woven("loom-pairs", "loom, regrouping pairs only", objective="cost", warm_s=300, regroup=2),
    Woven("loom-pairs-work", "the same, with a price on progress", objective="work", warm_s=300, regroup=2),
    Woven("loom-rr", "loom in strict round robin", objective="cost", warm_s=300, rounds=1),
    Woven("loom-greedy", "wheels only: nobody is ever moved", objective="cost", regroup=1),
)  # fmt: skip
