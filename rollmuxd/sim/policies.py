"""Policies as the simulator runs them: each with what it registers for a job, and what its plan says of a pace.

The simulator's own are the daemon's (``default``, ``rollmux``) and ``solo``, which costs are relative to.
Packages add others by entry point: the group ``rollmuxd.sim_policies`` names dicts of policies by name. What a daemon
could run (group ``rollmuxd.policies``) is listed too.

A policy goes through the scheduler's core as in a live daemon. What it does differently is in its
:class:`~rollmuxd.core.policy.Policy` and in what it registers; never in the world.
"""

import copy
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, Self

from msgspec.structs import replace

from rollmuxd.core.config import Config
from rollmuxd.core.estimates import solo_ms
from rollmuxd.core.ids import GroupId, JobId, Millis
from rollmuxd.core.policy import Policy
from rollmuxd.core.spec import Movable
from rollmuxd.core.state import State
from rollmuxd.policies.rollmux import RollMux, rate_of
from rollmuxd.policies.thrift.policy import Objective, Thrift
from rollmuxd.sim.outcome import WORK, Outcome
from rollmuxd.sim.workload import SimJob, Workload
from rollmuxd.sim.workloads.options import nearest
from rollmuxd.spi import discovery

#: plans are made with the times that jobs state, and stay so, as in the paper
AS_STATED: Final[Mapping[str, Any]] = MappingProxyType({"drift": 0.0})
#: plans follow the times that phases are seen to take, as in a daemon
AS_OBSERVED: Final[Mapping[str, Any]] = MappingProxyType({"drift": Config().drift})

#: jobs in a group at most, unless another number is asked for
MAX_GROUP: Final = 5


class PolicyUnderTest:
    """One competitor. As it is here it keeps schedule order, and moves no job."""

    name: str
    #: one line for ``sim policies`` and the report
    summary: str
    #: fields of the core's :class:`~rollmuxd.core.config.Config` about observed times (phase fidelity)
    estimates: Mapping[str, Any] = AS_STATED
    #: a job is moved again after this time; 0: the world's own (phase fidelity)
    move_interval_ms: Millis = 0
    #: what a move takes: so long the job does nothing, and in cost fidelity its own nodes are paid for twice
    move_s: float = 0.0
    #: jobs in a group at most
    max_group: int = MAX_GROUP

    def where(self, *, max_group: int = MAX_GROUP, move_s: float | None = None) -> Self:
        """The same, with other groups; and with other moves, if it moves jobs."""
        other = copy.copy(self)
        other.max_group = max_group
        if move_s is not None and self.move_s:
            other.move_s = move_s
        return other

    def within(self, workload: Workload, fidelity: str, accounting: str) -> Self:
        """The same, set for the world that it is to run in."""
        return self

    def policy(self, seed: int) -> Policy:
        """A new policy object for one run, with this limit to its groups; one that shares nothing stays so."""
        made: Any = self.make(seed)
        if self.max_group != MAX_GROUP and getattr(made, "max_group", 1) > 1:
            made.max_group = self.max_group
        policy: Policy = made
        return policy

    def make(self, seed: int) -> Policy:
        """A new policy object."""
        raise NotImplementedError

    def adapt(self, job: SimJob) -> SimJob:
        """The job as this policy registers and runs it. Raises ``Impossible`` where it cannot."""
        return job

    def paces(self, policy: Policy, state: State, group: GroupId) -> dict[JobId, Millis]:
        """What an iteration of each member takes, by the plan, while the group stays as it is.

        The period by the job's rate; alone, nothing is moved, and it is the solo iteration.
        """
        known = state.groups[group]
        if len(known.jobs) == 1 and not known.coming:
            return {known.jobs[0]: solo_ms(state.jobs[known.jobs[0]]) or 0}
        period = policy.period_ms(state, group) or 0
        return {name: -(-period // max(1, rate_of(known, state.jobs[name]))) for name in known.jobs}

    def move_ms(self) -> Millis:
        """What a move takes."""
        return round(self.move_s * 1000)


class Bound:
    """What no policy can go below: computed from the workload alone, beside the scheduler. It has no facts."""

    name: str
    summary: str

    def run(self, workload: Workload, *, seed: int, accounting: str, max_group: int) -> Outcome:
        """The outcome of one workload, in cost fidelity."""
        raise NotImplementedError


class RollMuxPaper(PolicyUnderTest):
    """Algorithm 1 as the paper has it: saturated groups are left out of the search, which the artifact does not do."""

    name = "rollmux"
    summary = "the paper's Algorithm 1: packing, scaling, isolated; saturated groups pruned; strict round robin"

    def make(self, seed: int) -> Policy:
        """A new one: it draws nothing."""
        return RollMux(prune=True)


class Moving(PolicyUnderTest):
    """A policy that moves jobs. Every job may be moved, and what a move takes is charged.

    Args:
        name: what it is called.
        summary: its line.
        made: a new policy object for one run, from the seconds that a move takes.
        move_s: the seconds that a move takes.
        estimates: as in :class:`PolicyUnderTest`.
    """

    def __init__(
        self,
        name: str,
        summary: str,
        made: Callable[[float], Policy],
        *,
        move_s: float = 30,
        estimates: Mapping[str, Any] = AS_STATED,
    ) -> None:
        self.name, self.summary, self.estimates = name, summary, estimates
        self.made, self.move_s = made, move_s

    def make(self, seed: int) -> Policy:
        """A new one: it draws nothing."""
        return self.made(self.move_s)

    def adapt(self, job: SimJob) -> SimJob:
        """The job as one that may be moved: as it says itself, else with its process."""
        if job.spec.movable is not Movable.NO:
            return job
        return replace(job, spec=replace(job.spec, movable=Movable.WARM))


class Default(Moving):
    """What a daemon runs by default. Without a world: on nodes that one owns, where phases vary."""

    def __init__(self) -> None:
        super().__init__(
            "default",
            "what a daemon runs by default: thrift; least $/h where nodes are bought on demand, else least waiting",
            lambda move_s: Thrift(objective="throughput", warm_move_s=move_s, rounds=1, promise="measured"),
            estimates=AS_OBSERVED,
        )

    def within(self, workload: Workload, fidelity: str, accounting: str) -> Self:
        """The objective is the bill where nodes are bought on demand. With cost fidelity orders are certified."""
        bill: Objective = "work" if accounting == WORK else "cost"
        objective: Objective = bill if workload.on_demand else "throughput"
        varies: dict[str, Any] = {"rounds": 1, "promise": "measured"} if fidelity == "phase" else {}
        other = copy.copy(self)
        other.made = lambda move_s: Thrift(objective=objective, warm_move_s=move_s, **varies)
        return other


class Isolated(RollMux):
    """A group of its own for every job."""

    name = "isolated"

    def __init__(self) -> None:
        super().__init__(max_group=1)


class Solo(PolicyUnderTest):
    """Dedicated disaggregation."""

    name = "solo"
    summary = "dedicated disaggregation (Solo-D): every job alone on its own rollout and training nodes"

    def make(self, seed: int) -> Policy:
        """Everybody alone."""
        return Isolated()

    def adapt(self, job: SimJob) -> SimJob:
        """With as many nodes as it has to itself, which can be more than it counts with where it shares."""
        wants = tuple(replace(want, nodes=job.footprint.get(want.pool, want.nodes)) for want in job.spec.wants)
        return replace(job, spec=replace(job.spec, wants=wants))


# ---- by name ---------------------------------------------------------------------------------------------------------


class Plugged(PolicyUnderTest):
    """A policy of an installed package (entry point group ``rollmuxd.policies``), taken to keep schedule order.

    Its class is made without arguments, once for each run.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.summary = "of an installed package"

    def make(self, seed: int) -> Policy:
        """Imported only now. Raises :class:`~rollmuxd.spi.errors.PluginError` where it cannot be used."""
        made: Policy = discovery.find("policy", self.name)()
        return made


_OURS: Final[Mapping[str, PolicyUnderTest]] = {known.name: known for known in (Default(), RollMuxPaper(), Solo())}


def known_policies() -> dict[str, PolicyUnderTest | Bound]:
    """All, by name: ours, the daemon's default first, then those of installed packages."""
    known = {**_OURS, **discovery.added("rollmuxd.sim_policies"), **_OURS}  # ours come first, and under their names
    plugged = (name for name in discovery.names("policy") if name != Thrift.name)
    return known | {name: Plugged(name) for name in plugged if name not in known}


def bound(name: str) -> Bound | None:
    """The bound of this name; None: it is a policy, or there is none."""
    found = None if name in _OURS else known_policies().get(name)
    return found if isinstance(found, Bound) else None


def policy_under_test(name: str) -> PolicyUnderTest:
    """The policy of this name.

    Raises:
        ValueError: there is none.
    """
    found = _OURS.get(name) or known_policies().get(name)
    if found is None or isinstance(found, Bound):
        known = tuple(known_policies())
        raise ValueError(f"there is no policy {name!r}{nearest(name, known)} ({', '.join(known)})")
    return found
