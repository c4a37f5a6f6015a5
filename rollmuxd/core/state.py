"""The core's whole memory. ``apply`` writes it, fact by fact. What is not journalled is in ``timers``."""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from msgspec import Struct, field

from rollmuxd.core.errors import UnknownThing
from rollmuxd.core.ids import GroupId, HostId, JobId, Millis, NodeId, OrderId, PoolName, SessionId, SlotId
from rollmuxd.core.model import (
    Group,
    Host,
    Job,
    JobState,
    Node,
    NodeStatus,
    Order,
    Owner,
    Session,
    SessionStatus,
    Slot,
    StateStatus,
)

T = TypeVar("T")


def _known(table: Mapping[str, T], kind: str, name: str) -> T:
    """The thing of that name, or UnknownThing."""
    found = table.get(name)
    if found is None:
        raise UnknownThing(kind, name)
    return found


def state_key(job: JobId, pool: PoolName, node: NodeId) -> str:
    """The key of a job's state for a pool on a node."""
    return f"{job}|{pool}|{node}"


class State(Struct):
    """Everything that a restart must find again. Serialisable as it is (snapshots)."""

    incarnation: int = 1
    #: time of the last fact
    at: Millis = 0
    hosts: dict[HostId, Host] = field(default_factory=dict)
    nodes: dict[NodeId, Node] = field(default_factory=dict)
    jobs: dict[JobId, Job] = field(default_factory=dict)
    sessions: dict[SessionId, Session] = field(default_factory=dict)
    #: open slots, and each job's last few ended ones
    slots: dict[SlotId, Slot] = field(default_factory=dict)
    owners: dict[str, Owner] = field(default_factory=dict)
    groups: dict[GroupId, Group] = field(default_factory=dict)
    states: dict[str, JobState] = field(default_factory=dict)
    #: orders without a final result
    orders: dict[OrderId, Order] = field(default_factory=dict)
    #: "owner/name" -> job
    names: dict[str, JobId] = field(default_factory=dict)
    #: jobs in status WAITING, longest first
    waiting: dict[JobId, None] = field(default_factory=dict)
    #: fillers that live: they wait for no placement
    fillers: dict[JobId, None] = field(default_factory=dict)
    #: jobs with a move at hand, and jobs that have left something on nodes that they moved away from
    moving: dict[JobId, None] = field(default_factory=dict)
    leaving: dict[JobId, None] = field(default_factory=dict)
    #: jobs for whose promises their groups' plans have no room
    at_risk: dict[JobId, None] = field(default_factory=dict)
    slots_of: dict[JobId, list[SlotId]] = field(default_factory=dict)
    #: how many requests of each owner are queued
    queued_of: dict[str, int] = field(default_factory=dict)
    ended: list[JobId] = field(default_factory=list)
    #: how many ids of each kind were minted, and the last fence
    minted: dict[str, int] = field(default_factory=dict)
    fence_number: int = 0

    def next_id(self, prefix: str) -> str:
        """The id that the next fact of this kind will use: ``s17``."""
        return f"{prefix}{self.minted.get(prefix, 0) + 1}"

    def job(self, job: JobId) -> Job:
        return _known(self.jobs, "job", job)

    def slot(self, slot: SlotId) -> Slot:
        return _known(self.slots, "slot", slot)

    def node(self, node: NodeId) -> Node:
        return _known(self.nodes, "node", node)

    def session(self, session: SessionId) -> Session:
        return _known(self.sessions, "session", session)

    def job_named(self, owner: str, name: str) -> Job | None:
        """The owner's job of that name."""
        found = self.names.get(f"{owner}/{name}")
        return None if found is None else self.jobs[found]

    def phase_nodes(self, job: Job, phase: str, group: GroupId | None = None) -> tuple[NodeId, ...]:
        """The pinned nodes that a phase claims, each once, in the order of its pools; () where there is no such phase.

        In a ``group`` to which the job is to move: the nodes that it will claim there.
        """
        pins = job.pins if group is None else self.pins_in(job, group)
        return tuple(dict.fromkeys(node for pool in job.spec.phase(phase).pools for node in pins.get(pool, ())))

    def pins_in(self, job: Job, group: GroupId) -> dict[PoolName, tuple[NodeId, ...]]:
        """The job's nodes in a group: where it sits, or where it is to move to."""
        return job.move.pins if job.move is not None and group != job.group else job.pins

    def states_of(self, job: Job) -> list[JobState]:
        return [self.states[key] for key in job.states]

    def states_on(self, node: Node) -> list[JobState]:
        """The states that may be on a node."""
        return [self.states[key] for key in node.states]

    def states_that_stay(self, node: Node) -> list[JobState]:
        """The states that may be on a node, but for those of fillers, which make room.

        It counts jobs placed there, jobs to move there, and jobs that have not left it altogether.
        """
        return [kept for kept in self.states_on(node) if self.jobs[kept.job].spec.filler is None]

    def states_at(self, job: Job, node: Node) -> list[JobState]:
        """The job's states that may be on a node."""
        return [kept for kept in self.states_on(node) if kept.job == job.id]

    def group_of(self, member: Job | Node) -> Group | None:
        """The group where a job sits, or to which a node belongs."""
        return self.groups.get(member.group) if member.group is not None else None

    def its_group(self, member: Job | Node) -> Group:
        """The group of a placed job, or of a node that it has."""
        return self.groups[member.group or ""]

    def are_up(self, nodes: Iterable[NodeId]) -> bool:
        """Whether all of these nodes are."""
        return all(self.nodes[name].status is NodeStatus.UP for name in nodes)

    def members(self, group: Group) -> list[Job]:
        """The jobs that sit in a group."""
        return [self.jobs[name] for name in group.jobs]

    def slot_of(self, holder: Job | Order) -> Slot | None:
        """The slot between LOADING and TAIL that a job has, or the one that an order is for."""
        return self.slots.get(holder.slot) if holder.slot is not None else None

    def request_of(self, job: Job) -> Slot | None:
        """The slot for which the job waits."""
        return self.slots.get(job.queued) if job.queued is not None else None

    def order_of(self, kept: JobState) -> Order | None:
        """The order that moves a state now."""
        return self.orders.get(kept.order) if kept.order is not None else None

    def state_of(self, order: Order) -> JobState:
        """The state that an order moves."""
        return self.states[state_key(order.job, order.pool, order.node)]

    def session_of(self, job: Job) -> Session | None:
        """The session of the process that its job has now; None: none is taken to be there."""
        session = self.sessions.get(job.session or "")
        return session if session is not None and session.status is SessionStatus.ALIVE else None

    def source_of(self, kept: JobState) -> JobState | None:
        """Where a state is parked that the job has not loaded here yet: on a node that it moved away from, if any.

        What is parked here beside that is older, or the same.
        """
        job = self.jobs[kept.job]
        pins = job.pins.get(kept.pool, ())
        if kept.status not in (StateStatus.GONE, StateStatus.PARKED) or not job.left or kept.node not in pins:
            return None
        newest = self.states.get(state_key(job.id, kept.pool, job.newest[kept.pool][pins.index(kept.node)]))
        if newest is None or newest.node not in job.left or newest.status is not StateStatus.PARKED:
            return None
        return newest if newest.run == kept.run == job.run else None

    def residual_mb_on(self, node: Node, *, but_of: JobId | None = None) -> int:
        """What states may leave on each GPU of a node: parked ones, and ones that are loaded on others of its GPUs.

        And ones that are gone where their job stays: its process may keep what it had left.
        """
        states = [it for it in self.states_on(node) if it.job != but_of]
        return sum(
            allowed_residual_mb(kept) for kept in states if kept.status is not StateStatus.GONE or self._may_leave(kept)
        )

    def _may_leave(self, kept: JobState) -> bool:
        job = self.jobs[kept.job]
        return job.has_place and kept.node not in job.left and self.has_had(kept)

    def process_of(self, it: JobState | Order) -> Session | None:
        """The session of the run whose state or order it is; None if its process is not there to be told anything."""
        job = self.jobs[it.job]
        return self.session_of(job) if it.run == job.run else None

    def has_had(self, kept: JobState) -> bool:
        """Whether the process that its job has now is the one that had the state loaded last."""
        session = self.process_of(kept)
        return session is not None and kept.loaded_at is not None and session.opened_at <= kept.loaded_at

    def mint(self, prefix: str) -> None:
        """That id is used up."""
        self.minted[prefix] = self.minted.get(prefix, 0) + 1


def allowed_residual_mb(kept: JobState) -> int:
    """What a state may leave on each GPU: as agreed, or as it was seen to leave and was let to."""
    return max(kept.spec.residual_mb, kept.residual_mb or 0)
