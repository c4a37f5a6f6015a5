"""Which jobs share which nodes: the protocol that every policy answers to, and its vocabulary.

A policy is pure: it reads the state and answers; it never writes, and asked twice it answers the same. It may keep
what it has derived from the state, under the versions that the state carries. The same object serves the daemon and
the simulator, so what was scored is what will run.
"""

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Final, Protocol, runtime_checkable

from msgspec import Struct

from rollmuxd.core.causes import Cause
from rollmuxd.core.decision import Reason
from rollmuxd.core.ids import GroupId, JobId, Millis, NodeId, PoolName
from rollmuxd.core.model import Dispatch, Job, JobStatus, PlannedTurn
from rollmuxd.core.state import State

#: versions of groups that are only thought of, each used once: what a policy keeps of one is used for no real group
trial_versions: Final = count(-1, -1)


class Placed(Struct, frozen=True):
    """Where a job goes."""

    #: None: a new group
    group: GroupId | None
    pins: dict[PoolName, tuple[NodeId, ...]]
    #: the group's whole schedule, in order, the job's turns included
    schedule: tuple[PlannedTurn, ...]
    #: how: ``packing`` (nodes the group has), ``scaling`` (more rollout nodes), ``isolated`` (a new group)
    admission: str
    status: JobStatus
    #: whether the job's SLO is certified
    promised: bool
    #: what a rotation takes, by the plan; the job's iteration takes that by how often it goes round in it
    period_ms: Millis | None
    #: price per hour of the nodes that no job used before
    cost_per_hour: float
    #: how the group's members follow each other, from now on
    dispatch: Dispatch = Dispatch.SCHEDULE


class Refusal(Struct, frozen=True):
    """Why a job has to wait, and what would let it in now."""

    reasons: tuple[Reason, ...]
    would_start_with: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """All reasons in one line."""
        return "; ".join(reason.text for reason in self.reasons)


class Replan(Struct, frozen=True):
    """A group planned again, with the times that are known now; each job stays on its nodes."""

    #: of the group, as in :class:`Placed`; None: a member's times are not known
    period_ms: Millis | None
    #: members for whose promises the plan has no room
    at_risk: tuple[JobId, ...] = ()
    #: the whole schedule, in order; none: it stays as it is
    schedule: tuple[PlannedTurn, ...] = ()


class Move(Struct, frozen=True):
    """A placed job is better placed elsewhere: one step of a regrouping, certified by itself.

    For as long as the move lasts the job counts in both places, and every member's promise holds in both. Where the
    job sits there already, only the group's schedule becomes another.
    """

    job: JobId
    #: where to, as :meth:`Policy.place` would say it; the group may be one that exists, or a new one
    placed: Placed
    #: what it is good for, with its numbers; in words of your own: ``causes.said(...)``
    why: Cause
    #: the nodes that it leaves because they are drained: the move is given up when they are not any more
    off: tuple[NodeId, ...] = ()


class Policy(Protocol):
    """Decides between groups, and says how a group's members follow each other (:class:`Dispatch`)."""

    name: str

    def place(self, state: State, job: Job) -> Placed | None:
        """Where the job goes now; None: nowhere. Every member's promise must hold with it."""
        ...

    def why_not(self, state: State, job: Job) -> Refusal:
        """Why :meth:`place` found nothing. May take its time: it is asked for people."""
        ...

    def judge(self, state: State, job: Job) -> Replan:
        """The group of a placed job as it stands. It is at risk if its SLO does not hold with the times known now."""
        ...

    def replan(self, state: State, group: GroupId) -> Replan:
        """The group, with the times that are known now: as it stands if that keeps every promise, else in another
        schedule. That has the same members on the same nodes; if there is none, the answer is the jobs whose promises
        are at risk.

        A group may be asked about that is not quite the one of that name (a member taken away): nothing may be
        remembered of it.
        """
        ...

    def regroup(self, state: State, now: Millis) -> Iterator[Move | None]:
        """Look for placed jobs that are better placed elsewhere, in steps of a few milliseconds each.

        None: nothing yet, ask on. A move: worth doing now; the next one is asked of the state in which this move is
        planned. The caller drops the iterator when a group, node or job has changed. Only ``movable`` jobs without a
        move at hand are moved.
        """
        ...

    def look_again_ms(self, state: State, now: Millis) -> Millis:
        """After a search that found nothing: how long until the next one, if nothing changes before."""
        ...

    def period_ms(self, state: State, group: GroupId) -> Millis | None:
        """The planned period of a group; None while a member's times are not known."""
        ...


@runtime_checkable
class SpendsCredit(Protocol):
    """A policy may also slow a job beyond its promise, while the credit lasts that the job can spare."""

    def lasts_ms(self, job: Job, pace_ms: Millis, now: Millis) -> Millis | None:
        """How long that is at a pace; None: for ever, or no credit is spent."""
        ...

    def exhausted(self, state: State, now: Millis) -> Iterator[JobId]:
        """The jobs that run slower than promised and have spent the credit for it: their groups are planned again."""
        ...


@runtime_checkable
class HeedsOwners(Protocol):
    """What a policy is, besides, that plans around how many nodes an owner may hold.

    The scheduler fills it in. Of other policies, a placement that is too wide for its owner is refused.
    """

    #: by owner, of any name; 0: no limit
    max_nodes: Mapping[str, int]
