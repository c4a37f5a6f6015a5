"""Policies as the simulator runs them: each with what it registers for a job, and what its plan says of a pace.

The simulator's own are the daemon's (``default``, ``rollmux``) and ``solo``, which costs are relative to.
Packages add others by entry point: the group ``rollmuxd.sim_policies`` names dicts of policies by name. What a daemon
could run (group ``rollmuxd.policies``) is listed too.

A policy goes through the scheduler's core as in a live daemon. What it does differently is in its
:class:`~rollmuxd.core.policy.Policy` and in what it registers; never in the world.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, Self

from msgspec import Struct
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


def unchanged(job: SimJob) -> SimJob:
    """The job as it is."""
    return job


def movable(job: SimJob) -> SimJob:
    """The job as one that may be moved: as it says itself, else with its process."""
    if job.spec.movable is not Movable.NO:
        return job
    return replace(job, spec=replace(job.spec, movable=Movable.WARM))


class PolicyUnderTest(Struct, frozen=True):
    """One competitor. As it is here it keeps schedule order."""

    name: str
    #: one line for ``sim policies`` and the report
    summary: str
    #: a new policy object for one run, from the run's seed and from what a move takes, in seconds
    make: Callable[[int, float], Policy]
    #: the job as this policy registers and runs it; may raise ``Impossible``
    adapt: Callable[[SimJob], SimJob] = unchanged
    #: what a move takes: so long the job does nothing, and in cost fidelity its own nodes are paid for twice
    move_s: float = 0.0
    #: fields of the core's :class:`~rollmuxd.core.config.Config` about observed times (phase fidelity)
    estimates: Mapping[str, Any] = AS_STATED
    #: a job is moved again after this time; 0: the world's own (phase fidelity)
    move_interval_ms: Millis = 0
    #: jobs in a group at most
    max_group: int = MAX_GROUP

    def where(self, *, max_group: int = MAX_GROUP, move_s: float | None = None) -> Self:
        """The same, with other groups; and with other moves, if it moves jobs."""
        return replace(self, max_group=max_group, move_s=move_s if move_s is not None and self.move_s else self.move_s)

    def within(self, workload: Workload, fidelity: str, accounting: str) -> Self:
        """The same, set for the world that it is to run in."""
        return self

    def policy(self, seed: int) -> Policy:
        """A new policy object for one run, with this limit to its groups; one that shares nothing stays so."""
        made: Any = self.make(seed, self.move_s)
        if self.max_group != MAX_GROUP and getattr(made, "max_group", 1) > 1:
            made.max_group = self.max_group
        policy: Policy = made
        return policy

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


def moving(
    name: str,
    summary: str,
    made: Callable[[float], Policy],
    *,
    move_s: float = 30,
    estimates: Mapping[str, Any] = AS_STATED,
) -> PolicyUnderTest:
    """A policy that moves jobs, made from the seconds that a move takes. Every job may be moved."""
    return PolicyUnderTest(name, summary, lambda _, takes_s: made(takes_s), movable, move_s, estimates)


class Default(PolicyUnderTest, frozen=True):
    """What a daemon runs by default. Without a world: on nodes that one owns, where phases vary."""

    def within(self, workload: Workload, fidelity: str, accounting: str) -> Self:
        """The objective is the bill where nodes are bought on demand. With cost fidelity orders are certified."""
        bill: Objective = "work" if accounting == WORK else "cost"
        objective: Objective = bill if workload.on_demand else "throughput"
        varies: dict[str, Any] = {"rounds": 1, "promise": "measured"} if fidelity == "phase" else {}
        return replace(self, make=lambda _, move_s: Thrift(objective=objective, warm_move_s=move_s, **varies))


class Isolated(RollMux):
    """A group of its own for every job."""

    name = "isolated"

    def __init__(self) -> None:
        super().__init__(max_group=1)


def on_its_footprint(job: SimJob) -> SimJob:
    """With as many nodes as it has to itself, which can be more than it counts with where it shares."""
    wants = tuple(replace(want, nodes=job.footprint.get(want.pool, want.nodes)) for want in job.spec.wants)
    return replace(job, spec=replace(job.spec, wants=wants))


# ---- by name ---------------------------------------------------------------------------------------------------------

#: Algorithm 1 as the paper has it: saturated groups are left out of the search, which the artifact does not do
ROLLMUX: Final = PolicyUnderTest(
    "rollmux",
    "the paper's Algorithm 1: packing, scaling, isolated; saturated groups pruned; strict round robin",
    lambda *_: RollMux(prune=True),
)
_OURS: Final[Mapping[str, PolicyUnderTest]] = {
    "default": Default(
        "default",
        "what a daemon runs by default: thrift; least $/h where nodes are bought on demand, else least waiting",
        lambda _, move_s: Thrift(objective="throughput", warm_move_s=move_s, rounds=1, promise="measured"),
        adapt=movable,
        move_s=30,
        estimates=AS_OBSERVED,
    ),
    "rollmux": ROLLMUX,
    "solo": PolicyUnderTest(
        "solo",
        "dedicated disaggregation (Solo-D): every job alone on its own rollout and training nodes",
        lambda *_: Isolated(),
        on_its_footprint,
    ),
}


def _plugged(name: str) -> PolicyUnderTest:
    """A policy of an installed package (entry point group ``rollmuxd.policies``), taken to keep schedule order.

    Its class is imported for a run, and made without arguments. It raises
    :class:`~rollmuxd.spi.errors.PluginError` where it cannot be used.
    """
    return PolicyUnderTest(name, "of an installed package", lambda *_: discovery.find("policy", name)())


def known_policies() -> dict[str, PolicyUnderTest | Bound]:
    """All, by name: ours, the daemon's default first, then those of installed packages."""
    known = {**_OURS, **discovery.added("rollmuxd.sim_policies"), **_OURS}  # ours come first, and under their names
    plugged = (name for name in discovery.names("policy") if name != Thrift.name)
    return known | {name: _plugged(name) for name in plugged if name not in known}


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
