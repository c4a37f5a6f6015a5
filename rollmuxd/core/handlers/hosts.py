"""Hosts and nodes: the configuration, what backends see there, draining."""

import msgspec

from rollmuxd.core import effects as e
from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.causes import Cause, said
from rollmuxd.core.context import HOLDS, NOTHING, Context
from rollmuxd.core.decision import Answer
from rollmuxd.core.errors import Conflict
from rollmuxd.core.handlers.jobs import job_lost, lose
from rollmuxd.core.handlers.orders import CRASHES_TO_SUSPECT, lost_contact, may_be_asked_for
from rollmuxd.core.ids import HostId, Millis, NodeId
from rollmuxd.core.model import (
    Host,
    HostSpec,
    Job,
    JobState,
    JobStatus,
    Node,
    NodeSpec,
    NodeStatus,
    OrderKind,
    OrderStatus,
    SlotStatus,
    StateStatus,
)
from rollmuxd.core.steps.launch import is_ended_for_it, kill
from rollmuxd.core.steps.observe import (
    clean_limit_mb,
    discard_again,
    gpus_observed,
    must_be_cleaned,
    observe_host,
    record_due,
    record_unknown,
    resolve_unknown,
)
from rollmuxd.core.steps.reclaim import drop_request, end_now, take_away
from rollmuxd.core.steps.residual_memory import judge

#: what drains a node that was taken out of the configuration, and takes it back when it is in it again
CONFIGURATION = "the configuration"
#: ids of each kind to skip where the journal has lost facts, times the incarnation, which is a time in seconds. More
#: ids than any daemon gave since the backup, and others after each restore of it.
IDS_SKIPPED = 10_000


def host_ends(c: Context, given: i.HostEnds) -> Answer:
    """No job is placed there that could not finish an iteration before."""
    host = c.state.hosts.get(given.host)
    if host is not None and host.ends_at != given.ends_at:
        c.fact(f.HostAdded(c.now, HostSpec(host.id, host.backend, host.ram_mb, given.ends_at)))
    return NOTHING


def drain(c: Context, ask: i.DrainNode) -> Answer:
    node = c.state.node(ask.node)
    if node.status not in (NodeStatus.DRAINING, NodeStatus.DRAINED):
        if node.status in (NodeStatus.QUARANTINED, NodeStatus.LOST):
            raise Conflict(f"node {node.id} is {node.status}: nothing is started on it anyway", node.reason)
        c.fact(f.NodeDraining(c.now, node.id, ask.by))
    if ask.evict:
        for name in list(node.pinned):
            job = c.state.jobs[name]
            if job.live:
                end_now(c, job, reason=Cause("evicted", {"node": node.id}), by=ask.by)
    return NOTHING


def undrain(c: Context, ask: i.UndrainNode) -> Answer:
    """The node may be used again once it was observed: anything may have been done there meanwhile."""
    node = c.state.node(ask.node)
    if node.status is NodeStatus.QUARANTINED and node.drain:
        raise Conflict(f"node {node.id} is quarantined; undrain it once it is clean, or was declared so", node.reason)
    if node.drain:
        c.fact(f.NodeUndrained(c.now, node.id, ask.by))
        c.do(e.Observe(node.host))
    return NOTHING


def declare_clean(c: Context, ask: i.DeclareClean) -> Answer:
    node = c.state.node(ask.node)
    for name in node.holders:
        slot = c.state.slots[name]
        if slot.status in HOLDS:
            raise Conflict(f"slot {name} of job {slot.job} is {slot.status} on {node.id}; revoke it first")
    why = said(ask.reason) if ask.reason else Cause("declared_clean")
    c.fact(f.GpusVerifiedClean(c.now, node.id, tuple(node.gpus), ask.by, why))
    for kept in c.state.states_on(node):
        if kept.status not in (StateStatus.GONE, StateStatus.PARKED):  # on the operator's word
            record_unknown(c, kept)
            c.fact(f.StateObserved(c.now, kept.job, kept.pool, kept.node, StateStatus.GONE))
    if node.status is NodeStatus.QUARANTINED:
        c.fact(f.NodeUnknown(c.now, node.id))
        c.do(e.Observe(node.host))
    return NOTHING


def start(c: Context, given: i.Start) -> Answer:
    """The daemon is there (again): every lease is renewed in full, every node has to be seen.

    An open order is sent again only if its driver is idempotent. Else its driver is asked, which may say that it was
    not begun; else its outcome is unknown. Where the journal has lost facts, every job's is (:func:`disown`). An order
    that was open at several crashes is not sent again, so that no order makes the daemon crash for ever.
    """
    # A client may still ask by an id that was given in a fact which is lost.
    skipped = IDS_SKIPPED * given.incarnation if given.lost else 0
    c.fact(f.DaemonStarted(c.now, given.incarnation, skipped, given.crashed, given.lost, given.away_ms))
    configure(c, given)
    c.timers.restart(c.state, c.now, c.config)
    before = list(c.state.orders)
    unsure = {job.id for job in c.state.jobs.values() if may_run_still(job)}
    if given.lost:
        disown(c, Cause("journal_lost", cause=given.lost))
    for order in filter(None, map(c.state.orders.get, before)):  # what is recorded of one may settle the next
        traits = c.traits(order.driver)
        issued = order.status is OrderStatus.ISSUED
        if issued and order.crashes >= CRASHES_TO_SUSPECT:
            # the process that received it may still be at it
            lost_contact(c, order, Cause("suspected", {"order": order.id, "crashes": order.crashes}))
        elif issued and traits.idempotent and not given.lost:  # else it may undo what was ordered since
            c.do(e.Perform(order.id, again=True))
        elif traits.probes and not (issued and given.lost):
            if may_be_asked_for(order):
                c.do(e.Probe(order.id))
        elif issued:
            lost_contact(c, order, Cause("daemon_restarted"))
    for host in c.state.hosts.values():
        c.do(e.Observe(host.id))
    for node in c.state.nodes.values():
        if node.not_clean_since is not None or not node.empty:
            c.dirty.watched[node.id] = None
    for job in list(c.state.jobs.values()):
        started = job.launch
        if job.id in unsure:
            c.do(kill(job))
        elif started is not None and job.live and not started.over and not started.pid:
            c.do(e.Launch(job.id, started.id))
    c.dirty.everything(c.state)
    return NOTHING


def may_run_still(job: Job) -> bool:
    """Whether a process that was to be ended may be there: the daemon may have stopped before that was done."""
    if job.status is JobStatus.LOST:
        return is_ended_for_it(job)
    if job.status is JobStatus.QUARANTINED and job.spec.filler is not None:
        return bool(job.pins)  # what it keeps must not hold up others
    return job.launch is not None and job.launch.over and (job.live or bool(job.pins))


def disown(c: Context, why: Cause) -> None:
    """The journal does not say what jobs did last, and which GPUs they are on by now: their runs are lost.

    So no job is granted a GPU that another was granted since, and a process that still runs hears that it is to end. A
    job that is only watched has nothing of ours: it loses its request or slot, and asks again.
    """
    for job in sorted(c.state.jobs.values(), key=lambda job: job.has_place):  # else others get what is left
        session = c.state.session_of(job)
        if job.group and not any(job.pins.values()):
            drop_request(c, job, why)
            take_away(c, c.state.slot_of(job), why, "the daemon")
        elif job.live and session is not None:
            lose(c, session, why)
        elif job.live:
            job_lost(c, job, why)


def configure(c: Context, given: i.Start) -> None:
    """Bring the inventory in line with the configuration.

    A node in use that the configuration does not have drains. One that it has again is undrained, unless an operator
    had drained it.
    """
    for host in given.hosts:
        known = c.state.hosts.get(host.id)
        if known is not None:  # one that could not be asked has what it had
            ends_at = known.ends_at if known.backend == host.backend else None
            host = HostSpec(host.id, host.backend, host.ram_mb or known.ram_mb, ends_at)
        if known is None or host != HostSpec(known.id, known.backend, known.ram_mb, known.ends_at):
            c.fact(f.HostAdded(c.now, host))
    wanted = {node.id: with_known(node, c.state.nodes.get(node.id)) for node in given.nodes}
    for name, node in list(c.state.nodes.items()):
        used = bool(node.pinned or node.states or node.fillers or not node.empty)
        spec = wanted.get(name)
        if spec is None and not used:
            c.fact(f.NodeRemoved(c.now, name))
        elif spec is None:
            if node.status in (NodeStatus.LOST, NodeStatus.QUARANTINED) and not node.drain:
                c.fact(f.NodeUnknown(c.now, name))
            if not node.drain:
                c.fact(f.NodeDraining(c.now, name, CONFIGURATION, unconfigured=True))
        elif not used and spec != spec_of(node):
            c.fact(f.NodeAdded(c.now, spec))
        elif node.unconfigured:
            c.fact(f.NodeUndrained(c.now, name, CONFIGURATION))
    for name, spec in wanted.items():
        if name not in c.state.nodes:
            c.fact(f.NodeAdded(c.now, spec))
    configured = {host.id for host in given.hosts}
    for name in [host.id for host in c.state.hosts.values() if not host.nodes and host.id not in configured]:
        c.fact(f.HostRemoved(c.now, name))


def with_known(spec: NodeSpec, node: Node | None) -> NodeSpec:
    """The node as it is configured. What neither says nor its host, which may be away, it has as before."""
    if node is None:
        return spec
    return msgspec.structs.replace(spec, gpu_type=spec.gpu_type or node.gpu_type, gpu_mb=spec.gpu_mb or node.gpu_mb)


def spec_of(node: Node) -> NodeSpec:
    """The node as it was configured."""
    gpus, price = tuple(node.gpus), node.price_per_gpu_hour
    return NodeSpec(node.id, node.host, gpus, node.pools, node.gpu_type, node.gpu_mb, price)


def host_observed(c: Context, told: i.HostObserved) -> Answer:
    """What is on a host's GPUs, if it could be reached. What should be clean and is, is given on."""
    host = c.state.hosts.get(told.host)
    if host is None:
        return NOTHING
    c.dirty.watched.update(dict.fromkeys(host.nodes))
    if told.unreachable is not None:
        for name in host.nodes:
            lose_node(c, c.state.nodes[name], told.unreachable)
        return NOTHING
    sights = {sight.gpu: sight for sight in told.gpus}
    since = c.now + 1 if told.since is None else told.since
    before = host.boot_id
    if told.boot_id and told.boot_id != before:
        c.fact(f.HostBooted(c.now, host.id, told.boot_id))
        if before:
            forget_contents(c, host, sights, since)
    c.timers.looked_at[host.id] = since
    for name in list(host.nodes):
        node = c.state.nodes[name]
        if any(gpu.touched_at >= since for gpu in node.gpus.values()):
            observe_host(c, host.id)
        elif all(gpu in sights for gpu in node.gpus):  # a GPU that was not reported was not seen
            node_observed(c, node, sights)
        elif gpu := next((it for it in node.gpus if it in told.unread), None):
            lose_node(c, node, Cause("unread", {"gpu": gpu, "text": told.unread[gpu]}))
    return NOTHING


def lose_node(c: Context, node: Node, reason: Cause) -> None:
    """A node is lost, or it is lost for another reason than before: the one that is mended must not be shown on."""
    if node.status is not NodeStatus.LOST or node.reason != reason:
        c.fact(f.NodeLost(c.now, node.id, reason))


def forget_contents(c: Context, host: Host, sights: dict[str, i.GpuObservation], since: Millis) -> None:
    """Another boot id: what was in the host's memories is gone, and no job of before runs there.

    But for what has come there since, or is on its way, where the restart is noticed late.
    """
    for name in host.nodes:
        node = c.state.nodes[name]
        for slot in [c.state.slots[holder] for holder in node.holders]:
            if slot.status in HOLDS:
                take_away(c, slot, Cause("host_restarted", {"host": node.host}), how=SlotStatus.LOST)
        for kept in c.state.states_on(node):
            record_unknown(c, kept)
            if kept.status is StateStatus.UNKNOWN and not has_come_since(c, node, kept, sights, since):
                c.fact(f.StateObserved(c.now, kept.job, kept.pool, kept.node, StateStatus.GONE))


def has_come_since(c: Context, node: Node, kept: JobState, sights: dict[str, i.GpuObservation], since: Millis) -> bool:
    """Whether a state may be, or come, on a node although its host was restarted: its process lives, and

    - its bytes were seen there,
    - or the look began before they came, and says nothing of them,
    - or it is to load the state, and may have come after the restart: it has not begun to.
    """
    process = c.state.process_of(kept)
    if process is None:
        return False
    limit = clean_limit_mb(c, node)
    theirs = [(name, gpu) for name, gpu in node.gpus.items() if gpu.dirty_by == kept.job]
    if any(gpu.touched_at >= since or (name in sights and sights[name].used_mb > limit) for name, gpu in theirs):
        return True
    order = c.state.order_of(kept)
    loads = order is not None and order.kind is OrderKind.LOAD
    return loads and process.opened_at >= c.timers.looked_at.get(node.host, 0)


def node_observed(c: Context, node: Node, sights: dict[str, i.GpuObservation]) -> None:
    if node.status is NodeStatus.LOST:
        c.fact(f.NodeUnknown(c.now, node.id))
    gpus_observed(c, (node.id,), sights.values())
    judge(c, node, sights)
    record_due(c, node)
    resolve_unknown(c, node)
    limit = clean_limit_mb(c, node)
    strangers = [sights[name] for name, gpu in node.gpus.items() if gpu.free and sights[name].used_mb > limit]
    if node.status is NodeStatus.QUARANTINED and not strangers and not node.not_clean:
        c.fact(f.NodeUnknown(c.now, node.id))
    if strangers and node.status in (NodeStatus.UNKNOWN, NodeStatus.UP):
        seen = strangers[0]
        process = seen.processes[0] if seen.processes else ""
        used = {"gpu": seen.gpu, "process": process, "used_mb": seen.used_mb}
        c.fact(f.NodeOccupied(c.now, node.id, Cause("occupied", used)))
    elif not strangers and node.status in (NodeStatus.UNKNOWN, NodeStatus.OCCUPIED):
        by = CONFIGURATION if node.unconfigured else "an operator"
        draining = f.NodeDraining(c.now, node.id, by, unconfigured=node.unconfigured)
        c.fact(draining if node.drain else f.NodeUp(c.now, node.id))


def look_again(c: Context, host: HostId) -> None:
    if not any(must_be_cleaned(c, c.state.nodes[name]) for name in c.state.hosts[host].nodes):
        return  # it was seen meanwhile
    c.do(e.Observe(host))
    discard_again(c, host)
    for order in c.state.orders.values():
        lost = order.status is OrderStatus.LOST_CONTACT and c.traits(order.driver).probes
        if lost and may_be_asked_for(order) and c.state.nodes[order.node].host == host:
            c.do(e.Probe(order.id))


def clean_limit_passed(c: Context, name: NodeId) -> None:
    """GPUs did not become clean in time: their node is quarantined, all other nodes stay in use."""
    node = c.state.nodes.get(name)
    if node is None or node.not_clean_since is None or node.status in (NodeStatus.QUARANTINED, NodeStatus.LOST):
        return
    if c.is_past(node.not_clean_since + c.config.clean_timeout_ms, "clean", name):
        why = Cause("not_clean_in_time", {"limit_s": c.config.clean_timeout_ms // 1000}, node.not_clean_reason)
        used = {gpu: c.timers.used_mb[gpu] / 1000 for gpu in node.not_clean if gpu in c.timers.used_mb}
        if used:
            why = Cause("still_used", {"used_gb": used, "clean_gb": clean_limit_mb(c, node) / 1000}, why)
        c.fact(f.NodeQuarantined(c.now, name, why))
        c.timers.observe_later(node.host, c.now, c.config)


def audit(c: Context, given: i.Audit) -> Answer:
    c.fact(msgspec.structs.replace(given.fact, at=c.now))
    return NOTHING


def stalled(c: Context, given: i.Stalled) -> Answer:
    c.fact(f.LoopStalled(c.now, given.late_ms))
    c.timers.renewed_at = c.now
    c.timers.seen = dict.fromkeys(c.timers.seen, c.now)
    return NOTHING
