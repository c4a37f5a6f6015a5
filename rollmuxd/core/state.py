"""The core's whole memory, and the one place that writes it: ``apply``, fact by fact.

``apply`` holds no policy: every number that was decided is in the fact. It is the same code live, in replay and in
the simulator, so replaying a journal gives the very state that the live scheduler had. What is not here (lease
deadlines, attachment, progress) is soft: it lives in the scheduler, is not journalled, and starts anew with it.
"""

from collections.abc import Callable, Iterable
from typing import Any

from msgspec import Struct, field

from rollmuxd.core import facts as f
from rollmuxd.core import lifecycle
from rollmuxd.core.errors import BrokenInvariant, UnknownThing
from rollmuxd.core.facts import PlannedVisit
from rollmuxd.core.lifecycle import next_state_status, next_status
from rollmuxd.core.model import (
    Gpu,
    Group,
    GroupId,
    Host,
    HostId,
    Job,
    JobId,
    JobMove,
    JobSpec,
    JobState,
    JobStatus,
    Launch,
    Millis,
    Node,
    NodeId,
    NodeStatus,
    Order,
    OrderId,
    OrderKind,
    Owner,
    PhaseSpec,
    PhaseTimes,
    PoolName,
    Progress,
    Session,
    SessionId,
    SessionStatus,
    Slot,
    SlotId,
    SlotStatus,
    StateSpec,
    StateStatus,
    Visit,
)

#: ended slots of a job that are remembered, so that a repeated call gets the answer it got before
SLOTS_REMEMBERED = 4
#: ended jobs that are remembered; older ones are in the journal only
JOBS_REMEMBERED = 1_000
#: of the ids that are minted: jobs, groups, sessions, slots, orders
PREFIXES = ("j", "g", "e", "s", "o")
#: observations of a phase's time that are kept
TIMES_KEPT = 64
#: of what a slot measured: how much work there was, and is for the phase that comes next
WORK = "work"


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
    #: jobs with a move at hand, and jobs that have left something on nodes that they moved away from
    moving: dict[JobId, None] = field(default_factory=dict)
    leaving: dict[JobId, None] = field(default_factory=dict)
    #: jobs for whose promises their groups' plans have no room
    at_risk: dict[JobId, None] = field(default_factory=dict)
    slots_of: dict[JobId, list[SlotId]] = field(default_factory=dict)
    ended: list[JobId] = field(default_factory=list)
    #: how many ids of each kind were minted, and the last fence
    minted: dict[str, int] = field(default_factory=dict)
    fence_number: int = 0

    def apply(self, fact: f.Fact) -> None:
        """Let one thing have happened.

        Raises:
            BrokenInvariant: the life-cycle tables do not know it; the state is then not to be used any more.
        """
        if fact.at < self.at:
            raise BrokenInvariant(f"time went back from {self.at} to {fact.at} ({f.name(fact)})")
        self.at = fact.at
        _APPLY[type(fact)](self, fact)

    # ---- questions ---------------------------------------------------------------------------------------------

    def next_id(self, prefix: str) -> str:
        """The id that the next fact of this kind will use: ``s17``."""
        return f"{prefix}{self.minted.get(prefix, 0) + 1}"

    def job(self, job: JobId) -> Job:
        """The job, or UnknownThing."""
        found = self.jobs.get(job)
        if found is None:
            raise UnknownThing("job", job)
        return found

    def slot(self, slot: SlotId) -> Slot:
        """The slot, or UnknownThing."""
        found = self.slots.get(slot)
        if found is None:
            raise UnknownThing("slot", slot)
        return found

    def node(self, node: NodeId) -> Node:
        """The node, or UnknownThing."""
        found = self.nodes.get(node)
        if found is None:
            raise UnknownThing("node", node)
        return found

    def job_named(self, owner: str, name: str) -> Job | None:
        """The owner's job of that name."""
        found = self.names.get(f"{owner}/{name}")
        return None if found is None else self.jobs[found]

    def phase_nodes(self, job: Job, phase: PhaseSpec, group: GroupId | None = None) -> tuple[NodeId, ...]:
        """The pinned nodes that a phase claims, each once, in the order of its pools.

        In a ``group`` to which the job is to move: the nodes that it will claim there.
        """
        pins = job.pins if group is None else self.pins_in(job, group)
        return tuple(dict.fromkeys(node for pool in phase.pools for node in pins.get(pool, ())))

    def pins_in(self, job: Job, group: GroupId) -> dict[PoolName, tuple[NodeId, ...]]:
        """The job's nodes in a group: where it sits, or where it is to move to."""
        return job.move.pins if job.move is not None and group != job.group else job.pins

    def source_of(self, kept: JobState) -> JobState | None:
        """Where a state is parked that the job has not loaded here yet: on a node that it moved away from, if any."""
        job = self.jobs[kept.job]
        if kept.status is not StateStatus.GONE or not job.left or kept.run != job.run:
            return None
        there = [self.states[key] for key in job.states if self.states[key].node in job.left]
        parked = [it for it in there if it.pool == kept.pool and it.status is StateStatus.PARKED and it.run == kept.run]
        pins = job.pins.get(kept.pool, ())
        return parked[pins.index(kept.node) % len(parked)] if parked and kept.node in pins else None

    def left_over_mb(self, node: Node, *, but_of: JobId | None = None) -> int:
        """What states may leave on each GPU of a node: parked ones, and ones that are loaded on others of its GPUs."""
        states = [self.states[key] for key in node.states if self.states[key].job != but_of]
        return sum(leaves_mb(kept) for kept in states if kept.status is not StateStatus.GONE)

    # ---- writing (by facts only) ---------------------------------------------------------------------------------

    def _mint(self, prefix: str) -> None:
        self.minted[prefix] = self.minted.get(prefix, 0) + 1

    def _daemon_started(self, fact: f.DaemonStarted) -> None:
        self.incarnation = max(self.incarnation, fact.incarnation)
        if fact.ids_skipped:
            self.minted |= {prefix: self.minted.get(prefix, 0) + fact.ids_skipped for prefix in PREFIXES}
        if fact.launches_skipped:
            self.minted["l"] = self.minted.get("l", 0) + fact.launches_skipped
        for node in self.nodes.values():
            if node.status is NodeStatus.UP or node.status is NodeStatus.OCCUPIED:
                node.status = NodeStatus.UNKNOWN
        self._count_owners()

    def _count_owners(self) -> None:
        """Who holds which nodes: a snapshot of a version that did not count it does not say."""
        for owner in self.owners.values():
            owner.nodes, owner.gpus = {}, 0
        for node in self.nodes.values():
            for name in node.pinned:
                owner = self.owners.setdefault(self.jobs[name].owner, Owner(at=self.at))
                owner.gpus += 0 if node.id in owner.nodes else len(node.gpus)
                owner.nodes[node.id] = owner.nodes.get(node.id, 0) + 1

    def _nothing(self, fact: f.Fact) -> None:
        """The fact is for people and other readers of the journal."""

    def _host_added(self, fact: f.HostAdded) -> None:
        known = self.hosts.get(fact.host.id)
        if known is None:
            self.hosts[fact.host.id] = Host(id=fact.host.id, backend=fact.host.backend, ram_mb=fact.host.ram_mb)
        else:
            known.backend, known.ram_mb = fact.host.backend, fact.host.ram_mb

    def _host_removed(self, fact: f.HostRemoved) -> None:
        del self.hosts[fact.host]

    def _host_booted(self, fact: f.HostBooted) -> None:
        self.hosts[fact.host].boot_id = fact.boot_id

    def _node_added(self, fact: f.NodeAdded) -> None:
        spec = fact.node
        host, known = self.hosts[spec.host], self.nodes.get(spec.id)
        if known is not None and known.host != spec.host:
            self.hosts[known.host].nodes.remove(spec.id)
        if spec.id not in host.nodes:
            host.nodes.append(spec.id)
        self.nodes[spec.id] = Node(
            id=spec.id,
            host=spec.host,
            gpus={gpu: Gpu() for gpu in spec.gpus},
            pools=spec.pools,
            gpu_type=spec.gpu_type,
            gpu_mb=spec.gpu_mb,
            price_per_gpu_hour=spec.price_per_gpu_hour,
            drain=known is not None and known.drain,
        )

    def _node_removed(self, fact: f.NodeRemoved) -> None:
        node = self.nodes.pop(fact.node)
        self.hosts[node.host].nodes.remove(node.id)

    def _node_moved(self, fact: Any) -> None:
        """A node's status, for the facts that say nothing else."""
        node = self.nodes[fact.node]
        node.status = next_status(lifecycle.NODE, node.status, fact, f"node {node.id}")
        if not isinstance(fact, f.NodeDrained):  # it keeps the reason for which it was drained
            node.reason = getattr(fact, "reason", "")
        if isinstance(fact, f.NodeDraining):
            node.drain, node.reason = True, f"drained by {fact.by}"
        elif isinstance(fact, f.NodeUndrained):
            node.drain = False

    def _gpus_cleared(self, fact: f.GpusCleared) -> None:
        node = self.nodes[fact.node]
        for gpu in fact.gpus:
            node.gpus[gpu].stain = None
        _no_more_unclear(node, fact.gpus)

    def _gpus_unclear(self, fact: f.GpusUnclear) -> None:
        node = self.nodes[fact.node]
        node.unclear_reason = fact.reason
        node.unclear += [gpu for gpu in fact.gpus if gpu not in node.unclear]
        if node.unclear_since is None:
            node.unclear_since = fact.at

    def _job_registered(self, fact: f.JobRegistered) -> None:
        job = self.jobs.get(fact.job)
        if job is None:
            self._mint("j")
            job = Job(
                id=fact.job, owner=fact.owner, user=fact.user, spec=fact.spec, registered_at=fact.at, run=fact.run
            )
            self.jobs[fact.job] = job
            self.slots_of[fact.job] = []
            self.names[f"{fact.owner}/{fact.spec.name}"] = fact.job
        else:
            job.status = next_status(lifecycle.JOB, job.status, fact, f"job {job.id}")
            _forget_restated(job, fact.spec)
            job.user, job.spec, job.run, job.registered_at = fact.user, fact.spec, fact.run, fact.at
            job.progress, job.reason, job.session, job.work = Progress(), "", None, 0.0
            job.promised, job.admission, job.planned_period_ms, job.ended_at = False, "", None, None
            job.relaunch_at, job.moved_at, job.fell_back, job.guarded = None, None, False, False
            if not fact.relaunch:
                job.losses = []
            if job.id in self.ended:
                self.ended.remove(job.id)
        job.idempotency_key = fact.idempotency_key
        self.waiting[job.id] = None

    def _set_job(self, job: Job, fact: f.Fact, to: JobStatus | None = None) -> None:
        job.status = next_status(lifecycle.JOB, job.status, fact, f"job {job.id}", to)
        if job.status is JobStatus.WAITING:
            self.waiting[job.id] = None
        else:
            self.waiting.pop(job.id, None)

    def _job_placed(self, fact: f.JobPlaced) -> None:
        job = self.jobs[fact.job]
        self._set_job(job, fact, fact.status)
        group = self._group(fact.group)
        group.jobs.append(job.id)
        group.wheel = _merged(group.wheel, fact.wheel)
        group.dispatch = fact.dispatch
        group.version += 1
        job.group, job.pins, job.placed_at, job.admission = group.id, fact.pins, fact.at, fact.admission
        job.promised, job.planned_period_ms = fact.promised, fact.period_ms
        owner = self._owner(job, fact.use)
        if job.queued is not None:  # waiting for admission is nobody's slowdown
            job.progress.iteration_excused_ms += fact.at - self.slots[job.queued].queued_at
        self._pin(job, group, fact.pins, owner)
        _settled_in(job)

    def _group(self, name: GroupId) -> Group:
        """The group; a new one where there is none."""
        group = self.groups.get(name)
        if group is None:
            self._mint("g")
            group = self.groups[name] = Group(id=name)
        return group

    def _pin(self, job: Job, group: Group, pins: dict[PoolName, tuple[NodeId, ...]], owner: Owner) -> None:
        """These nodes are the group's and the job's, with RAM for its states."""
        for pool, nodes in pins.items():
            for name in nodes:
                node = self.nodes[name]
                node.group = group.id
                if name not in group.nodes:
                    group.nodes.append(name)
                if job.id not in node.pinned:
                    node.pinned.append(job.id)
                    owner.gpus += 0 if name in owner.nodes else len(node.gpus)
                    owner.nodes[name] = owner.nodes.get(name, 0) + 1
                spec, key = _state_spec(job, pool), state_key(job.id, pool, name)
                if spec is not None and key not in self.states:
                    self.states[key] = JobState(job=job.id, pool=pool, node=name, spec=spec, run=job.run)
                    node.states.append(key)
                    job.states.append(key)
                    self.hosts[node.host].reserved_mb += spec.ram_mb
                if name in job.left and any(name in there for there in job.pins.values()):
                    self._nothing_left_on(job, name)

    def _unpin(self, job: Job, names: Iterable[NodeId], owner: Owner) -> None:
        """These nodes are not the job's any more; those that are nobody's leave their group.

        What may still be on them of the job is remembered until it was seen gone (``Job.left``).
        """
        for name in dict.fromkeys(names):
            node = self.nodes[name]
            node.pinned.remove(job.id)
            if name in owner.nodes:  # a snapshot of an older version has no owners
                owner.nodes[name] -= 1
                if not owner.nodes[name]:
                    del owner.nodes[name]
                    owner.gpus -= len(node.gpus)
            if not node.pinned and node.group is not None:
                self.groups[node.group].nodes.remove(name)
                node.group = None
            for key in [key for key in node.states if self.states[key].job == job.id]:
                if self.states[key].status is StateStatus.GONE:
                    self._drop_state(job, key)
            stained = any(gpu.stain == job.id for gpu in node.gpus.values())
            if (stained or any(self.states[key].job == job.id for key in node.states)) and name not in job.left:
                job.left.append(name)
                self.leaving[job.id] = None

    def _drop_state(self, job: Job, key: str) -> None:
        """Nothing is there of a state, and nothing is kept for it."""
        kept = self.states.pop(key)
        node = self.nodes[kept.node]
        node.states.remove(key)
        job.states.remove(key)
        self.hosts[node.host].reserved_mb -= kept.spec.ram_mb

    def _nothing_left_on(self, job: Job, name: NodeId) -> None:
        job.left.remove(name)
        if not job.left:
            del self.leaving[job.id]

    def _node_left(self, fact: f.NodeLeft) -> None:
        job = self.jobs[fact.job]
        for key in [key for key in self.nodes[fact.node].states if self.states[key].job == job.id]:
            self._drop_state(job, key)
        self._nothing_left_on(job, fact.node)

    def _move_planned(self, fact: f.MovePlanned) -> None:
        job = self.jobs[fact.job]
        job.status = next_status(lifecycle.JOB, job.status, fact, f"job {job.id}")
        group = self._group(fact.group)
        job.move = JobMove(
            group=group.id,
            pins=fact.pins,
            planned_at=fact.at,
            why=fact.why,
            admission=fact.admission,
            promised=fact.promised,
            period_ms=fact.period_ms,
        )
        if group.id == job.group:
            job.move.wheel = _merged(group.wheel, fact.wheel)
        else:
            group.coming.append(job.id)
            group.wheel = _merged(group.wheel, fact.wheel)
            group.dispatch = fact.dispatch
        group.version += 1
        self.moving[job.id] = None
        self._pin(job, group, fact.pins, self._owner(job, fact.use))

    def _move_began(self, fact: f.MoveBegan) -> None:
        job = self.jobs[fact.job]
        self._set_job(job, fact)
        if job.move is not None:
            job.move.began_at = fact.at

    def _move_ended(self, fact: f.MoveEnded) -> None:
        job = self.jobs[fact.job]
        self._set_job(job, fact)
        move, old = job.move, self.groups[job.group or ""]
        assert move is not None  # its status is MOVING
        group = self.groups[move.group]
        if move.wheel is None:
            old.wheel = [visit for visit in old.wheel if visit.job != job.id]
            old.jobs.remove(job.id)
            group.coming.remove(job.id)
            group.jobs.append(job.id)
        else:
            group.wheel = _rewound(group, move.wheel)
        old.version += 1
        group.version += 1
        there = {name for nodes in move.pins.values() for name in nodes}
        gone = [name for nodes in job.pins.values() for name in nodes if name not in there]
        job.last_pins, job.pins, job.group, job.placed_at = job.pins, move.pins, group.id, fact.at
        job.admission, job.promised, job.planned_period_ms = move.admission, move.promised, move.period_ms
        job.move, job.moved_at, job.fell_back = None, fact.at, False
        _settled_in(job)
        self._set_risk(job, risky=False)
        if fact.run:
            job.run, job.idempotency_key = fact.run, fact.idempotency_key
            for key in job.states:
                self.states[key].run = fact.run
        del self.moving[job.id]
        self._unpin(job, gone, self._owner(job, fact.use))
        self._forget_empty(old)

    def _move_abandoned(self, fact: f.MoveAbandoned) -> None:
        job = self.jobs[fact.job]
        self._set_job(job, fact)
        move = job.move
        assert move is not None
        group = self.groups[move.group]
        if move.wheel is None:
            group.coming.remove(job.id)
            group.wheel = [visit for visit in group.wheel if visit.job != job.id]
        group.version += 1
        here = {name for nodes in job.pins.values() for name in nodes}
        job.move, job.moved_at = None, fact.at
        del self.moving[job.id]
        gone = (name for nodes in move.pins.values() for name in nodes if name not in here)
        self._unpin(job, gone, self._owner(job, fact.use))
        self._forget_empty(group)

    def _forget_empty(self, group: Group) -> None:
        if not group.jobs and not group.coming:
            del self.groups[group.id]

    def _owner(self, job: Job, use: int) -> Owner:
        """The job's owner, whose use is known as of now."""
        owner = self.owners.get(job.owner)
        if owner is None:
            owner = self.owners[job.owner] = Owner()
        owner.use, owner.at = use, self.at
        return owner

    def _placement_ended(self, fact: f.PlacementEnded) -> None:
        job = self.jobs[fact.job]
        owner = self._owner(job, fact.use)
        self._leave_wheel(job)
        self._unpin(job, (name for nodes in job.pins.values() for name in nodes), owner)
        group = self.groups[job.group] if job.group else None
        if group is not None:
            group.jobs.remove(job.id)
            group.version += 1
            self._forget_empty(group)
        if not job.fell_back:  # where it could not load is not where it is tried first
            job.last_pins = job.pins
        job.pins, job.group, job.placed_at = {}, None, None

    def _leave_wheel(self, job: Job) -> None:
        self._set_risk(job, risky=False)
        group = self.groups.get(job.group) if job.group else None
        if group is not None and any(visit.job == job.id for visit in group.wheel):
            group.wheel = [visit for visit in group.wheel if visit.job != job.id]
            group.version += 1

    def _job_unplaced(self, fact: f.JobUnplaced) -> None:
        job = self.jobs[fact.job]
        if job.status is JobStatus.PAUSED:
            job.resume_to = JobStatus.WAITING
        else:
            self._set_job(job, fact)
        job.reason, job.promised = fact.reason, False
        job.fell_back = job.fell_back or fact.keeps
        self._leave_wheel(job)

    def _job_promised(self, fact: f.JobPromised) -> None:
        job = self.jobs[fact.job]
        self._set_job(job, fact)
        job.promised, job.planned_period_ms = fact.promised, fact.period_ms
        for phase, took in fact.times.items():
            _reckon(job, phase, took, job.times[phase].count)
        if job.group is not None:  # what was derived from the group without this job's times is out of date
            self.groups[job.group].version += 1

    def _times_drifted(self, fact: f.TimesDrifted) -> None:
        job = self.jobs[fact.job]
        for phase, took in fact.times.items():
            _reckon(job, phase, took, fact.seen.get(phase, 0))
        job.drifted_at = fact.at
        if job.group is not None:
            self.groups[job.group].version += 1

    def _group_replanned(self, fact: f.GroupReplanned) -> None:
        group = self.groups[fact.group]
        if fact.wheel:
            group.wheel = _rewound(group, [Visit(job=it.job, phase=it.phase, once=it.once) for it in fact.wheel])
        group.version += 1
        for name in group.jobs:
            job = self.jobs[name]
            job.planned_period_ms = fact.period_ms
            self._set_risk(job, risky=name in fact.at_risk)

    def _set_risk(self, job: Job, *, risky: bool) -> None:
        job.at_risk = risky
        if risky:
            self.at_risk[job.id] = None
        else:
            self.at_risk.pop(job.id, None)

    def _guard_changed(self, fact: f.JobGuarded | f.GuardEnded) -> None:
        job = self.jobs[fact.job]
        job.guarded = isinstance(fact, f.JobGuarded)
        if job.group is not None:  # nobody joins a guarded job, so what was derived from the group is out of date
            self.groups[job.group].version += 1

    def _job_paused(self, fact: f.JobPaused) -> None:
        job = self.jobs[fact.job]
        before = job.status
        self._set_job(job, fact)
        job.resume_to = before
        job.reason = f"paused by {fact.by}"
        job.paused_at = fact.at if job.slot is None else None

    def _job_resumed(self, fact: f.JobResumed) -> None:
        job = self.jobs[fact.job]
        self._set_job(job, fact, job.resume_to)
        job.reason = ""
        if job.paused_at is not None:
            job.progress.iteration_excused_ms += fact.at - job.paused_at
            if job.progress.idle_from is not None:
                job.progress.idle_from = fact.at
        job.paused_at = None

    def _job_quarantined(self, fact: f.JobQuarantined) -> None:
        job = self.jobs[fact.job]
        self._set_job(job, fact)
        job.reason = fact.reason
        self._leave_wheel(job)

    def _job_reinstated(self, fact: f.JobReinstated) -> None:
        job = self.jobs[fact.job]
        self._set_job(job, fact)
        job.reason, job.losses = "", []

    def _job_lost(self, fact: f.JobLost) -> None:
        job = self.jobs[fact.job]
        self._set_job(job, fact)
        job.reason = fact.reason
        self._leave_wheel(job)

    def _relaunch_planned(self, fact: f.RelaunchPlanned) -> None:
        job = self.jobs[fact.job]
        job.relaunch_at = fact.due_at
        job.losses = [*job.losses, fact.at][-fact.attempt :]

    def _process_launched(self, fact: f.ProcessLaunched) -> None:
        self._mint("l")
        self.jobs[fact.job].launch = Launch(id=fact.launch, host=fact.host, at=fact.at)

    def _process_started(self, fact: f.ProcessStarted) -> None:
        launch = self.jobs[fact.job].launch
        if launch is not None and launch.id == fact.launch:
            launch.pid, launch.started = fact.pid, fact.started

    def _process_over(self, fact: f.ProcessOver) -> None:
        launch = self.jobs[fact.job].launch
        if launch is not None and launch.id == fact.launch:
            launch.over = True

    def _job_ended(self, fact: f.JobEnded) -> None:
        job = self.jobs[fact.job]
        self._set_job(job, fact)
        job.relaunch_at = None
        job.reason, job.ended_at = fact.reason, fact.at
        self._leave_wheel(job)
        self.ended.append(job.id)
        self._forget_old_jobs()

    def _forget_old_jobs(self) -> None:
        """Ended jobs beyond the limit go, unless something of them is still on a node."""
        for name in self.ended[: max(0, len(self.ended) - JOBS_REMEMBERED)]:
            job = self.jobs[name]
            if job.pins or job.closing or job.left:
                continue
            self.ended.remove(name)
            for slot in self.slots_of.pop(name):
                del self.slots[slot]
            for session in [s.id for s in self.sessions.values() if s.job == name]:
                del self.sessions[session]
            del self.names[f"{job.owner}/{job.spec.name}"]
            del self.jobs[name]

    def _session_opened(self, fact: f.SessionOpened) -> None:
        self._mint("e")
        self.sessions[fact.session] = Session(
            id=fact.session,
            job=fact.job,
            run=fact.run,
            opened_at=fact.at,
            pid=fact.pid,
            host=fact.host,
            started=fact.started,
        )
        job = self.jobs[fact.job]
        before = job.session
        job.session = fact.session
        # an older session is remembered for as long as it is the one before: its calls get a good refusal
        for old in [s.id for s in self.sessions.values() if s.job == job.id and s.id not in (before, fact.session)]:
            del self.sessions[old]

    def _session_over(self, fact: Any) -> None:
        ends: dict[type[Any], SessionStatus] = {
            f.SessionFenced: SessionStatus.FENCED,
            f.SessionLost: SessionStatus.LOST,
            f.SessionClosed: SessionStatus.CLOSED,
        }
        self.sessions[fact.session].status = ends[type(fact)]

    def _slot_queued(self, fact: f.SlotQueued) -> None:
        self._mint("s")
        job = self.jobs[fact.job]
        self.slots[fact.slot] = Slot(
            id=fact.slot,
            job=fact.job,
            run=fact.run,
            session=fact.session,
            phase=fact.phase,
            request_id=fact.request_id,
            queued_at=fact.at,
            side=fact.side,
        )
        self.slots_of[job.id].append(fact.slot)
        job.queued = fact.slot
        _count_request(job, fact)

    def _slot_withdrawn(self, fact: f.SlotWithdrawn) -> None:
        slot = self.slots[fact.slot]
        slot.status = next_status(lifecycle.SLOT, slot.status, fact, f"slot {slot.id}")
        slot.reason, slot.ended_at, slot.ended = fact.reason, fact.at, slot.status
        job = self.jobs[slot.job]
        job.queued = None
        if slot.side:
            self._drop_once(job, slot.phase)
        self._forget_old_slots(job.id)

    def _drop_once(self, job: Job, phase: str) -> None:
        group = self.groups.get(job.group) if job.group else None
        if group is None:
            return
        group.wheel = [v for v in group.wheel if not (v.once and v.job == job.id and v.phase == phase)]
        group.version += 1

    def _forget_old_slots(self, job: JobId) -> None:
        mine = self.slots_of[job]
        if len(mine) <= SLOTS_REMEMBERED:
            return
        over = [s for s in mine if self.slots[s].status in (SlotStatus.OVER, SlotStatus.WITHDRAWN)]
        for slot in over[: len(mine) - SLOTS_REMEMBERED]:
            mine.remove(slot)
            del self.slots[slot]

    def _visit_added(self, fact: f.VisitAdded) -> None:
        group = self.groups[fact.group]
        turn, index = min((visit.turn, at) for at, visit in enumerate(group.wheel) if visit.job == fact.job)
        group.wheel.insert(index, Visit(job=fact.job, phase=fact.phase, turn=turn, once=True))
        group.version += 1

    def _visit_skipped(self, fact: f.VisitSkipped) -> None:
        self.groups[fact.group].wheel[fact.visit].turn += 1

    def _slot_claimed(self, fact: f.SlotClaimed) -> None:
        slot = self.slots[fact.slot]
        slot.status = next_status(lifecycle.SLOT, slot.status, fact, f"slot {slot.id}")
        slot.gpus, slot.claimed_at = fact.gpus, fact.at
        job = self.jobs[slot.job]
        job.queued, job.slot = None, slot.id
        group = self.groups[job.group or ""]
        for name in group.nodes:
            gpus = self.nodes[name].gpus
            for gpu in fact.gpus:
                mine = gpus.get(gpu)
                if mine is not None:
                    if mine.holder is not None:
                        raise BrokenInvariant(f"{gpu} is held by slot {mine.holder}, and slot {slot.id} claims it")
                    mine.holder, mine.stain, mine.touched_at = slot.id, job.id, fact.at
            _no_more_unclear(self.nodes[name], fact.gpus)  # whose bytes they are holds them again
        visit = group.wheel[fact.visit]
        if visit.once:
            del group.wheel[fact.visit]
            group.version += 1
        else:
            visit.turn += 1

    def _slot_granted(self, fact: f.SlotGranted) -> None:
        slot = self.slots[fact.slot]
        slot.status = next_status(lifecycle.SLOT, slot.status, fact, f"slot {slot.id}")
        slot.fence, slot.granted_at = fact.fence, fact.at
        self.fence_number = fact.fence.number

    def _slot_taken_over(self, fact: f.SlotTakenOver) -> None:
        slot = self.slots[fact.slot]
        slot.status = next_status(lifecycle.SLOT, slot.status, fact, f"slot {slot.id}")
        old, new = self.sessions.get(slot.session), self.sessions.get(fact.session)
        # What is still being loaded is loaded for the new one.
        if slot.granted_at is not None and (old is None or new is None or (old.pid, old.host) != (new.pid, new.host)):
            slot.replaced = True
        slot.session = fact.session
        if fact.fence is not None:
            slot.fence, self.fence_number = fact.fence, fact.fence.number

    def _slot_requeued(self, fact: f.SlotRequeued) -> None:
        slot = self.slots[fact.slot]
        slot.status = next_status(lifecycle.SLOT, slot.status, fact, f"slot {slot.id}")
        self._unhold(slot)
        slot.gpus, slot.claimed_at = (), None
        job = self.jobs[slot.job]
        job.slot, job.queued = None, slot.id

    def _slot_shrunk(self, fact: f.SlotShrunk) -> None:
        slot = self.slots[fact.slot]
        slot.status = next_status(lifecycle.SLOT, slot.status, fact, f"slot {slot.id}")
        self._unhold(slot, keep=fact.kept)
        slot.gpus = fact.kept

    def _slot_grown(self, fact: f.SlotGrown) -> None:
        slot = self.slots[fact.slot]
        slot.status = next_status(lifecycle.SLOT, slot.status, fact, f"slot {slot.id}")
        slot.gpus = fact.gpus
        for pins in self.jobs[slot.job].pins.values():
            for name in pins:
                for gpu, it in self.nodes[name].gpus.items():
                    if gpu in fact.gpus and it.holder != slot.id:
                        if it.holder is not None:
                            raise BrokenInvariant(f"{gpu} is held by slot {it.holder}, and slot {slot.id} grows to it")
                        it.holder, it.stain, it.touched_at = slot.id, slot.job, fact.at

    def _unhold(self, slot: Slot, keep: tuple[str, ...] = ()) -> None:
        for pins in self.jobs[slot.job].pins.values():
            for name in pins:
                for gpu, it in self.nodes[name].gpus.items():
                    if it.holder == slot.id and gpu not in keep:
                        it.holder, it.touched_at = None, self.at

    def _slot_released(self, fact: f.SlotReleased) -> None:
        slot = self.slots[fact.slot]
        slot.status = next_status(lifecycle.SLOT, slot.status, fact, f"slot {slot.id}")
        slot.ended_at, slot.ended, slot.released = fact.at, slot.status, True
        job = self.jobs[slot.job]
        job.slot = None
        job.closing.append(slot.id)
        _count_release(job, slot, fact.at, fact.measured.get(WORK, 0.0))

    def _next_answered(self, fact: f.NextAnswered) -> None:
        slot = self.slots[fact.slot]
        slot.next_slot, slot.next_refused = fact.next_slot, fact.refused

    def _slot_taken_away(self, fact: Any) -> None:
        """FAULTED, LOST or REVOKED."""
        slot = self.slots[fact.slot]
        slot.status = next_status(lifecycle.SLOT, slot.status, fact, f"slot {slot.id}")
        slot.reason, slot.ended_at, slot.ended = fact.reason, fact.at, slot.status
        job = self.jobs[slot.job]
        job.slot = None
        job.closing.append(slot.id)
        job.progress.idle_from = fact.at

    def _slot_overstays(self, fact: f.SlotOverstays) -> None:
        slot = self.slots[fact.slot]
        slot.status = next_status(lifecycle.SLOT, slot.status, fact, f"slot {slot.id}")
        slot.overstays_at = fact.at

    def _slot_reclaiming(self, fact: f.SlotReclaiming) -> None:
        slot = self.slots[fact.slot]
        slot.status = next_status(lifecycle.SLOT, slot.status, fact, f"slot {slot.id}")

    def _slot_over(self, fact: f.SlotOver) -> None:
        slot = self.slots[fact.slot]
        slot.status = next_status(lifecycle.SLOT, slot.status, fact, f"slot {slot.id}")
        self._unhold(slot)
        job = self.jobs[slot.job]
        job.closing.remove(slot.id)
        self._forget_old_slots(job.id)

    def _order_issued(self, fact: f.OrderIssued) -> None:
        self._mint("o")
        key = state_key(fact.job, fact.pool, fact.node)
        kept = self.states[key]
        kept.status = next_state_status(kept.status, fact, fact.kind, f"state {key}")
        kept.order = fact.order
        self.orders[fact.order] = Order(
            id=fact.order,
            kind=fact.kind,
            job=fact.job,
            run=fact.run,
            pool=fact.pool,
            node=fact.node,
            driver=fact.driver,
            issued_at=fact.at,
            slot=fact.slot,
            source=fact.source,
            incarnation=self.incarnation,
        )

    def _order_ended(self, fact: f.OrderEnded) -> None:
        order = self.orders.pop(fact.order)
        next_status(lifecycle.ORDER, order.status, fact, f"order {order.id}")
        kept = self._ordered(order)
        if kept is None:
            return
        kept.order = None
        if kept.status is StateStatus.UNKNOWN:  # a late word about a lost order: StateSeen says what it means
            return
        kept.status = next_state_status(kept.status, fact, order.kind, f"state {order.pool} of {order.job}")
        for gpu in self.nodes[order.node].gpus.values():
            if gpu.stain == order.job:
                gpu.touched_at = fact.at
        progress = self.jobs[order.job].progress
        if order.kind is OrderKind.LOAD:
            if kept.warm or order.source is not None:
                progress.loads_warm += 1
            else:
                progress.loads_cold += 1
            kept.warm = True
            kept.loaded_at, kept.load_ms = fact.at, fact.at - order.issued_at
        elif order.kind is OrderKind.PARK:
            progress.parks += 1
            kept.park_ms = fact.at - order.issued_at
        else:
            kept.warm = False

    def _order_faulted(self, fact: f.OrderFaulted) -> None:
        order = self.orders.pop(fact.order)
        next_status(lifecycle.ORDER, order.status, fact, f"order {order.id}")
        kept = self._ordered(order)
        if kept is not None:
            kept.order = None
            kept.status = next_state_status(kept.status, fact, None, f"state {order.pool} of {order.job}")

    def _order_contact_lost(self, fact: f.OrderContactLost) -> None:
        order = self.orders[fact.order]
        order.status = next_status(lifecycle.ORDER, order.status, fact, f"order {order.id}")
        order.error = fact.error
        kept = self._ordered(order)
        if kept is not None:
            kept.status = next_state_status(kept.status, fact, None, f"state {order.pool} of {order.job}")

    def _ordered(self, order: Order) -> JobState | None:
        """The state that an order moves; None when it has left the books meanwhile."""
        kept = self.states.get(state_key(order.job, order.pool, order.node))
        return kept if kept is not None and kept.order == order.id else None

    def _state_unknown(self, fact: f.StateUnknown) -> None:
        key = state_key(fact.job, fact.pool, fact.node)
        kept = self.states[key]
        kept.status = next_state_status(kept.status, fact, None, f"state {key}")

    def _state_seen(self, fact: f.StateSeen) -> None:
        key = state_key(fact.job, fact.pool, fact.node)
        kept = self.states[key]
        kept.status = next_state_status(kept.status, fact, None, f"state {key}", fact.status)
        if kept.order is not None:  # nothing is left to be learnt of its order
            self.orders.pop(kept.order, None)
            kept.order = None
        if fact.status is StateStatus.GONE:
            kept.warm = False
        elif fact.status is StateStatus.LOADED:
            kept.loaded_at = fact.at

    def _left_over_seen(self, fact: f.LeftOverSeen) -> None:
        self.states[state_key(fact.job, fact.pool, fact.node)].left_mb = fact.mb


def leaves_mb(kept: JobState) -> int:
    """What a state may leave on each GPU: as agreed, or as it was seen to leave and was let to."""
    return max(kept.spec.leftover_mb, kept.left_mb or 0)


def _no_more_unclear(node: Node, gpus: tuple[str, ...]) -> None:
    if node.unclear_since is not None:
        node.unclear = [gpu for gpu in node.unclear if gpu not in gpus]
        if not node.unclear:
            node.unclear_since = None


def _merged(old: list[Visit], planned: tuple[f.PlannedVisit, ...]) -> list[Visit]:
    """The planned wheel, in which visits that were there before keep their turn and new ones join this turn."""
    turns: dict[tuple[JobId, str], list[int]] = {}
    for visit in old:
        turns.setdefault((visit.job, visit.phase), []).append(visit.turn)
    joins = min((visit.turn for visit in old), default=0)
    wheel = []
    for plan in planned:
        known = turns.get((plan.job, plan.phase))
        wheel.append(Visit(job=plan.job, phase=plan.phase, turn=known.pop(0) if known else joins, once=plan.once))
    return wheel


def _rewound(group: Group, planned: list[Visit]) -> list[Visit]:
    """A group's wheel as it was planned a while ago, without who has left, and with the side phases that wait."""
    visits = tuple(PlannedVisit(it.job, it.phase) for it in planned if it.job in group.jobs and not it.once)
    wheel = _merged(group.wheel, visits)
    for once in [it for it in group.wheel if it.once]:
        turn, index = min((it.turn, at) for at, it in enumerate(wheel) if it.job == once.job)
        wheel.insert(index, Visit(job=once.job, phase=once.phase, turn=turn, once=True))
    return wheel


def _count_request(job: Job, fact: f.SlotQueued) -> None:
    """Book the job's own gap, and the iteration that this request may end.

    Slowdown (DESIGN section 6): solo is the running times plus own gaps; elapsed leaves out pauses, side phases, and
    what of the own gaps goes beyond the plan. A gap beyond the plan is left out of both sides.
    """
    progress = job.progress
    if progress.idle_from is not None and not fact.side:
        gap = fact.at - progress.idle_from
        planned = next((phase.gap_ms for phase in job.spec.phases if phase.name == fact.phase), 0)
        progress.iteration_solo_ms += min(gap, planned)
        progress.iteration_excused_ms += max(0, gap - planned)
    progress.idle_from = None
    if not fact.iteration or (progress.iteration_from is not None and not progress.iteration_solo_ms):
        return  # asked anew, and nothing has run meanwhile: still the same iteration
    if progress.iteration_from is not None:
        progress.finished += 1
        progress.solo_ms += progress.iteration_solo_ms
        progress.elapsed_ms += fact.at - progress.iteration_from - progress.iteration_excused_ms
    progress.iteration_from = fact.at
    progress.iteration_solo_ms = progress.iteration_excused_ms = 0


def _count_release(job: Job, slot: Slot, at: Millis, work: float) -> None:
    """Book the time that a phase ran in its slot: its solo time, shared or not."""
    ran = at - (slot.granted_at if slot.granted_at is not None else at)
    progress = job.progress
    progress.idle_from = at
    if job.status is JobStatus.PAUSED:
        job.paused_at = at
    if slot.side:
        progress.iteration_excused_ms += at - slot.queued_at
        return
    progress.iteration_solo_ms += ran
    times = job.times.get(slot.phase)
    if times is None:
        times = job.times[slot.phase] = PhaseTimes()
    times.count += 1
    times.fresh += 1
    times.total_ms += ran
    times.recent_ms.append(ran)
    times.works += [0.0] * (len(times.recent_ms) - 1 - len(times.works))  # a snapshot of an older version has none
    times.works.append(job.work)
    if len(times.recent_ms) > TIMES_KEPT:
        del times.recent_ms[0], times.works[0]
    job.work = max(0.0, float(work))


def _reckon(job: Job, phase: str, took: Millis, seen: int) -> None:
    """Plans reckon with this from now on."""
    times = job.times[phase]
    times.planned_ms, times.planned_from, times.fresh = took, seen, 0


def _settled_in(job: Job) -> None:
    """On other nodes than before a phase may take another time: what is seen from now on counts."""
    for times in job.times.values():
        times.fresh = 0


def _forget_restated(job: Job, spec: JobSpec) -> None:
    """Of a phase for which a new run states another time, nobody reckons with what was measured."""
    stated = {phase.name: phase.planned_ms for phase in job.spec.phases}
    for phase in spec.phases:
        times = job.times.get(phase.name)
        if times is not None and phase.planned_ms != stated.get(phase.name):
            times.planned_ms, times.planned_from = None, 0


def _state_spec(job: Job, pool: PoolName) -> StateSpec | None:
    for spec in job.spec.states:
        if spec.pool == pool:
            return spec
    return None


_APPLY: dict[type[f.Fact], Callable[[State, Any], None]] = {
    f.DaemonStarted: State._daemon_started,
    f.LoopStalled: State._nothing,
    f.HostAdded: State._host_added,
    f.HostRemoved: State._host_removed,
    f.HostBooted: State._host_booted,
    f.NodeAdded: State._node_added,
    f.NodeRemoved: State._node_removed,
    f.NodeUp: State._node_moved,
    f.NodeOccupied: State._node_moved,
    f.NodeUnseen: State._node_moved,
    f.NodeLost: State._node_moved,
    f.NodeQuarantined: State._node_moved,
    f.NodeDraining: State._node_moved,
    f.NodeDrained: State._node_moved,
    f.NodeUndrained: State._node_moved,
    f.GpusCleared: State._gpus_cleared,
    f.GpusUnclear: State._gpus_unclear,
    f.JobRegistered: State._job_registered,
    f.JobPlaced: State._job_placed,
    f.JobPromised: State._job_promised,
    f.TimesDrifted: State._times_drifted,
    f.GroupReplanned: State._group_replanned,
    f.PlacementEnded: State._placement_ended,
    f.JobUnplaced: State._job_unplaced,
    f.MovePlanned: State._move_planned,
    f.MoveBegan: State._move_began,
    f.MoveEnded: State._move_ended,
    f.MoveAbandoned: State._move_abandoned,
    f.NodeLeft: State._node_left,
    f.JobGuarded: State._guard_changed,
    f.GuardEnded: State._guard_changed,
    f.JobPaused: State._job_paused,
    f.JobResumed: State._job_resumed,
    f.JobQuarantined: State._job_quarantined,
    f.JobReinstated: State._job_reinstated,
    f.JobLost: State._job_lost,
    f.RelaunchPlanned: State._relaunch_planned,
    f.ProcessLaunched: State._process_launched,
    f.ProcessStarted: State._process_started,
    f.ProcessOver: State._process_over,
    f.JobEnded: State._job_ended,
    f.SessionOpened: State._session_opened,
    f.SessionFenced: State._session_over,
    f.SessionLost: State._session_over,
    f.SessionClosed: State._session_over,
    f.SlotQueued: State._slot_queued,
    f.SlotWithdrawn: State._slot_withdrawn,
    f.VisitAdded: State._visit_added,
    f.VisitSkipped: State._visit_skipped,
    f.SlotClaimed: State._slot_claimed,
    f.SlotGranted: State._slot_granted,
    f.SlotTakenOver: State._slot_taken_over,
    f.SlotShrunk: State._slot_shrunk,
    f.SlotGrown: State._slot_grown,
    f.SlotRequeued: State._slot_requeued,
    f.SlotReleased: State._slot_released,
    f.NextAnswered: State._next_answered,
    f.SlotFaulted: State._slot_taken_away,
    f.SlotLost: State._slot_taken_away,
    f.SlotRevoked: State._slot_taken_away,
    f.SlotOverstays: State._slot_overstays,
    f.SlotReclaiming: State._slot_reclaiming,
    f.SlotOver: State._slot_over,
    f.OrderIssued: State._order_issued,
    f.OrderEnded: State._order_ended,
    f.OrderFaulted: State._order_faulted,
    f.OrderContactLost: State._order_contact_lost,
    f.StateUnknown: State._state_unknown,
    f.StateSeen: State._state_seen,
    f.LeftOverSeen: State._left_over_seen,
    f.Audited: State._nothing,
}
