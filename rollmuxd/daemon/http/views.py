"""The core's state as the wire shows it. Pure: each view is made between two inputs, from one consistent state."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from rollmuxd.core import decision as core_decision
from rollmuxd.core.estimates import credit_ms, phase_ms, quantile_ms, solo_ms
from rollmuxd.core.ids import Fence, GpuId, JobId, Millis, SessionId
from rollmuxd.core.model import Gpu, Group, Host, Job, JobStatus, Node, NodeStatus, PhaseTimes, Slot, SlotStatus
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.core.spec import PhaseSpec
from rollmuxd.core.state import State
from rollmuxd.daemon.access.gate import Caller
from rollmuxd.daemon.access.visibility import Visibility
from rollmuxd.daemon.clock import iso
from rollmuxd.daemon.hosts.actuator import Seen
from rollmuxd.daemon.question import Copy
from rollmuxd.explain.forecast import estimate_samples, iteration_ms, position, slowdown
from rollmuxd.wire import answers as wire

#: slots that hold GPUs for work
ON = (SlotStatus.RUNNING, SlotStatus.TAIL)
#: slots that may still be granted
COMING = (SlotStatus.QUEUED, SlotStatus.LOADING)


def maybe_iso(at: Millis | None) -> str | None:
    """The time as text, if it has come."""
    return None if at is None else iso(at)


def seconds(span: Millis | None) -> float | None:
    """A span of time, perhaps not known."""
    return None if span is None else span / 1000


def lease_left_ms(core: Scheduler, session: SessionId, now: Millis) -> Millis:
    """How long a session's lease lasts without another heartbeat."""
    seen = core.context.timers.seen.get(session)
    return 0 if seen is None else max(0, seen + core.config.lease_ms - now)


def silent_ms(core: Scheduler, session: SessionId, now: Millis) -> Millis | None:
    """For how long no heartbeat has come, if that is longer than expected; None: it is not.

    A lease has room for two heartbeats at least, so one is late after half of it.
    """
    seen = core.context.timers.seen.get(session)
    return None if seen is None or 2 * (now - seen) <= core.config.lease_ms else now - seen


def fence_of(text: str) -> Fence:
    """The fence that a request carries, ``1.17``; its form was checked on decoding."""
    incarnation, _, number = text.partition(".")
    return Fence(int(incarnation), int(number))


def directive(given: core_decision.Directive, visibility: Visibility) -> wire.Directive:
    """What a running slot's holder is asked to do."""
    keep, gpus = list(given.keep), list(given.gpus)
    within_s = given.within_ms / 1000 or None
    reason = visibility.sentence(given.reason)
    return wire.Directive(given.kind, slot=given.slot, keep=keep, reason=reason, gpus=gpus, within_s=within_s)


# ---- jobs ------------------------------------------------------------------------------------------------------------


def job_view(
    visibility: Visibility, job: Job, now: Millis, *, waiting: bool, reason: str | None = None
) -> wire.JobView:
    """One job. ``waiting``: also why it waits, which takes some thought; lists have a ``reason`` instead."""
    core = visibility.core
    on = core.state.slots.get(job.slot or job.queued or "")
    slower = slowdown(job)
    return wire.JobView(
        job=job.id,
        owner=job.owner,
        user=job.user,
        name=job.spec.name,
        run=job.run,
        status=str(job.status),
        registered_at=iso(job.registered_at),
        reason=reason or visibility.sentence(job.reason),
        finished=job.reason is not None and job.reason.code == "finished",
        group=job.group,
        pins={pool: list(nodes) for pool, nodes in job.pins.items()},
        cycle={phase.name: list(phase.pools) for phase in job.spec.phases},
        admission=job.admission,
        slo=job.spec.slo,
        promised=job.promised,
        at_risk=job.id in core.state.at_risk,
        unmet=visibility.figures.unmet(job.id),
        priority=job.spec.priority,
        iterations=job.progress.finished,
        slowdown=None if slower is None else round(slower, 4),
        credit_s=seconds(credit_ms(job)),
        planned_slowdown=_planned_slowdown(visibility, job),
        estimates={phase.name: _estimate(job, phase) for phase in (*job.spec.timed, *job.spec.side)},
        session=job.session,
        silent_s=seconds(silent_ms(core, job.session or "", now)),
        slot=None if on is None else on.id,
        phase=None if on is None else on.phase,
        phase_since=None if on is None else iso(on.queued_at if on.granted_at is None else on.granted_at),
        waiting=waiting_view(visibility, job, now) if waiting and job.status is JobStatus.WAITING else None,
        loads_warm=job.progress.loads_warm,
        loads_cold=job.progress.loads_cold,
        parks=job.progress.parks,
        filler=job.spec.filler is not None,
        lent=_lent(core.state, job),
        harvested_s=job.harvested_ms / 1000,
        held_up_s=job.progress.lent_ms / 1000,
    )


def _lent(state: State, job: Job) -> str | None:
    """The node that is lent to a filler now."""
    if job.spec.filler is None or job.slot is None:
        return None
    return next((name for names in job.pins.values() for name in names if state.nodes[name].loan == job.slot), None)


def waiting_view(visibility: Visibility, job: Job, now: Millis) -> wire.Waiting:
    """Why a job waits for a placement, its position, and what would let it in."""
    why = visibility.explainer.why_job_waits(job.id, now)
    return wire.Waiting(
        reasons=visibility.reasons(why.reasons),
        position=position(visibility.core.context, job.id, now),
        would_start_with=list(why.would_start_with),
    )


def silence(core: Scheduler, job: Job, now: Millis) -> list[str]:
    """The sentence that no heartbeat comes from a job's process, where that is so."""
    session = job.session or ""
    for_ms = silent_ms(core, session, now)
    if for_ms is None:
        return []
    left_s = -(-lease_left_ms(core, session, now) // 1000)
    return [f"It has been silent for {for_ms // 1000} s: without a heartbeat it is lost in {left_s} s."]


def explanation(visibility: Visibility, job: Job, now: Millis, silent: list[str]) -> wire.Explanation:
    """Why a job waits, or where it sits and why; and what :func:`silence` says."""
    why, (first, *others), what_ifs = visibility.explainer.explain(job.id, now)
    sentences = [first, *silent, *others]
    return wire.Explanation(
        job=job.id,
        status=str(job.status),
        reasons=visibility.reasons(why),
        sentences=sentences,
        would_start_with=[what_if.text for what_if in what_ifs if what_if.code != "departure"],
        wishes=visibility.reasons(what_ifs),
    )


@dataclass(frozen=True)
class ExplainQuestion:
    """Why a job waits, and what would let it in, which takes a hundred tries at placing it."""

    copy: Copy
    job: JobId
    now: Millis
    caller: Caller
    #: a copy of the state has no heartbeats
    silent: list[str]

    def answer(self) -> wire.Explanation:
        """The explanation."""
        core = self.copy.scheduler()
        visibility = Visibility(core, self.caller)
        return explanation(visibility, core.state.job(self.job), self.now, self.silent)


def _planned_slowdown(visibility: Visibility, job: Job) -> float | None:
    """What its group's plan gives an iteration over its solo iteration, where every phase's time is known."""
    group, solo = visibility.core.state.group_of(job), solo_ms(job)
    if group is None or not solo:
        return None
    period = visibility.period_ms(group.id)
    return None if period is None else round(iteration_ms(period, group, job) / solo, 4)


def _estimate(job: Job, phase: PhaseSpec) -> wire.Estimate:
    times = job.times.get(phase.name, PhaseTimes())
    return wire.Estimate(
        planned_s=seconds(phase.planned_ms),
        count=times.count,
        mean_s=round(times.total_ms / times.count / 1000, 3) if times.count else None,
        p50_s=seconds(quantile_ms(times.recent_ms, 0.5)) if times.count else None,
        p95_s=seconds(quantile_ms(times.recent_ms, 0.95)) if times.count else None,
        estimate_s=seconds(phase_ms(job, phase)),
        estimate_samples=estimate_samples(job, phase),
    )


# ---- slots -----------------------------------------------------------------------------------------------------------


def slot_view(visibility: Visibility, slot: Slot, job: Job, now: Millis, *, why: bool = True) -> wire.SlotView:
    """One slot, as this caller may see it: its fence is for callers that may act on the job.

    ``why``: of one that is queued also its position, why it waits, and for how long, which takes some thought.
    """
    core = visibility.core
    queued = why and slot.status is SlotStatus.QUEUED
    on = slot.status in ON
    return wire.SlotView(
        slot=slot.id,
        job=slot.job,
        job_name=job.spec.name,
        phase=slot.phase,
        status=str(slot.status),
        request_id=slot.request_id,
        fence=f"{slot.fence.incarnation}.{slot.fence.number}"
        if on and slot.fence is not None and visibility.caller.may_act(job)
        else None,
        gpus=list(slot.gpus),
        lease_s=seconds(lease_left_ms(core, slot.session, now)) if on else None,
        position=visibility.figures.slot_position(slot.id, now) if queued else None,
        expected_wait_s=seconds(visibility.figures.expected_wait_ms(slot.id, now)) if queued else None,
        reason=visibility.sentence(slot.reason),
        reasons=visibility.reasons(visibility.explainer.why_slot_waits(slot.id, now))
        if queued or slot.overrun_at is not None
        else [],
        queued_at=iso(slot.queued_at),
        claimed_at=maybe_iso(slot.claimed_at),
        granted_at=maybe_iso(slot.granted_at),
        ended_at=maybe_iso(slot.ended_at),
    )


# ---- inventory -------------------------------------------------------------------------------------------------------


def node_view(visibility: Visibility, node: Node, seen: Mapping[GpuId, Seen]) -> wire.NodeView:
    """One node, with what was last seen on its GPUs. Jobs of other owners are named by their ids only.

    The processes seen are for callers that may know of every job that can have some there. A pid and a user tell whose
    they are.
    """
    core = visibility.core
    holders = (core.state.slots[holder].job for holder in node.holders)
    dirty = (gpu.dirty_by for gpu in node.gpus.values() if gpu.dirty_by is not None)
    names_owners = all(visibility.caller.may_read(core.state.jobs[job]) for job in {*node.pinned, *holders, *dirty})
    return wire.NodeView(
        node=node.id,
        host=node.host,
        status=str(node.status),
        pools=list(node.pools),
        gpu_type=node.gpu_type,
        price_per_hour=round(node.price_per_gpu_hour * len(node.gpus), 6),
        gpu_gb=node.gpu_mb / 1000,
        residual_gb=core.state.residual_mb_on(node) / 1000,
        gpus=[_gpu_view(name, gpu, seen.get(name), processes=names_owners) for name, gpu in node.gpus.items()],
        reason=visibility.of_node(node),
        group=node.group,
        states={
            f"{state.job} {state.pool}": str(state.status)
            for state in (core.state.states[key] for key in node.states if key in core.state.states)
        },
        jobs=_pinned(visibility, [node]),
    )


def _gpu_view(name: GpuId, gpu: Gpu, seen: Seen | None, *, processes: bool) -> wire.GpuView:
    view = wire.GpuView(gpu=name, holder=gpu.holder, dirty_by=gpu.dirty_by)
    if seen is None:
        return view
    shown = list(seen.processes) if processes else []
    return replace(view, used_gb=seen.used_mb / 1000, processes=shown, observed_at=iso(seen.at))


def _pinned(visibility: Visibility, nodes: Iterable[Node]) -> list[wire.PinnedJob]:
    """The jobs that are placed on these nodes, each once."""
    ids = dict.fromkeys(job for node in nodes for job in node.pinned)
    return [wire.PinnedJob(job=job, name=visibility.name_of(job)) for job in ids]


def host_view(visibility: Visibility, host: Host) -> wire.HostView:
    """One host."""
    core = visibility.core
    nodes = [core.state.nodes[name] for name in host.nodes if name in core.state.nodes]
    return wire.HostView(
        host=host.id,
        backend=host.backend,
        ram_gb=host.ram_mb / 1000,
        ram_reserved_gb=host.reserved_mb / 1000,
        nodes=[node.id for node in nodes],
        reachable=any(node.status not in (NodeStatus.LOST, NodeStatus.UNKNOWN) for node in nodes),
        jobs=_pinned(visibility, nodes),
        ends_at=maybe_iso(host.ends_at),
    )


def ends_at(state: State, job: JobId) -> str | None:
    """When the first of a job's nodes goes away; None: not at a known time."""
    known = state.jobs.get(job)
    pins = {} if known is None else known.pins
    hosts = [state.hosts[state.nodes[name].host] for nodes in pins.values() for name in nodes]
    return maybe_iso(min((host.ends_at for host in hosts if host.ends_at is not None), default=None))


def group_view(visibility: Visibility, group: Group) -> wire.GroupView:
    """One group. Jobs of other owners are named by their ids only."""
    core = visibility.core
    state = core.state
    nodes = [state.nodes[name] for name in group.nodes]
    period = visibility.period_ms(group.id)
    return wire.GroupView(
        group=group.id,
        jobs=list(group.jobs),
        nodes=list(group.nodes),
        schedule=[
            wire.TurnView(job=turn.job, name=visibility.name_of(turn.job), phase=turn.phase, rotation=turn.rotation)
            for turn in group.schedule
        ],
        period_s=seconds(period),
        cost_per_hour=round(sum(len(node.gpus) * node.price_per_gpu_hour for node in nodes), 6),
        reason=_held_up(visibility, nodes) or ("a member's times are still being measured" if period is None else ""),
    )


def _held_up(visibility: Visibility, nodes: Sequence[Node]) -> str:
    """What keeps a group from turning: the first of its nodes that cannot be used."""
    away = next((node for node in nodes if node.status is not NodeStatus.UP), None)
    if away is None:
        return ""
    return f"node {away.id} is {away.status}{f' ({visibility.sentence(away.reason)})' if away.reason else ''}"


def pool_views(state: State) -> dict[str, wire.PoolView]:
    """All pools, by name."""
    pools: dict[str, list[Node]] = {}
    for node in state.nodes.values():
        for pool in node.pools:
            pools.setdefault(pool, []).append(node)
    return {
        name: wire.PoolView(
            pool=name,
            nodes=[node.id for node in nodes],
            nodes_free=sum(node.group is None and node.status is NodeStatus.UP for node in nodes),
            gpus=sum(len(node.gpus) for node in nodes),
            gpus_held=sum(gpu.holder is not None for node in nodes for gpu in node.gpus.values()),
        )
        for name, nodes in pools.items()
    }
