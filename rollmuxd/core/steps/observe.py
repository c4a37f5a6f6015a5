"""What observations tell: which GPUs have come clean, where states are, and when to look again.

Nothing is given on here: a GPU that was verified clean may be claimed, and what is still on it is looked at again.
"""

from collections.abc import Collection, Iterable

from rollmuxd.core import effects as e
from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.causes import Cause
from rollmuxd.core.clean import is_dirty_by, is_discarding, is_due, is_given_back, is_seen_clean
from rollmuxd.core.context import Context
from rollmuxd.core.ids import HostId, NodeId
from rollmuxd.core.model import Job, JobState, JobStatus, Node, NodeStatus, OrderKind, StateStatus
from rollmuxd.core.state import state_key
from rollmuxd.core.steps.dispatch import issue


def gpus_observed(c: Context, nodes: Iterable[NodeId], seen: Collection[i.GpuObservation]) -> None:
    """GPUs of these nodes that are due and were observed clean may be claimed again."""
    for node in map(c.state.nodes.__getitem__, nodes):
        clean = []
        for observation in seen:
            name, used_mb = observation.gpu, observation.used_mb
            if name not in node.gpus:
                continue
            if used_mb and used_mb > clean_limit_mb(c, node):
                c.timers.used_mb[name] = used_mb
            elif is_seen_clean(c.state, node, node.gpus[name], used_mb):
                clean.append(name)
        if clean:
            c.fact(f.GpusVerifiedClean(c.now, node.id, tuple(clean)))


def clean_limit_mb(c: Context, node: Node) -> int:
    return c.state.residual_mb_on(node) + c.config.clean_tolerance_mb


def expect_clean(c: Context, node: Node, job: Job, reason: Cause) -> None:
    """The job's bytes should be off the node's GPUs now, and something was observed or reported there."""
    record_dirty(c, node, job, reason)
    resolve_unknown(c, node)


def record_dirty(c: Context, node: Node, job: Job, reason: Cause) -> None:
    """The job's bytes should be off the node's GPUs now: look again, for a limited time, where they are not."""
    not_clean = tuple(name for name, gpu in node.gpus.items() if gpu.dirty_by == job.id and is_given_back(c.state, gpu))
    if not_clean:
        if any(name not in node.not_clean for name in not_clean):
            c.fact(f.GpusNotClean(c.now, node.id, Cause("not_clean", {"gpus": not_clean}, reason), not_clean))
        c.dirty.watched[node.id] = None


def record_due(c: Context, node: Node) -> None:
    """Say what was observed dirty although it is due (:mod:`~rollmuxd.core.clean`), and another job may want it.

    So a limit begins where another job has the node, or its own leaves it. A discard under way has a limit of its own.
    """
    gpus = node.gpus.values()
    for name in dict.fromkeys(gpu.dirty_by for gpu in gpus if is_due(c.state, node, gpu)):
        job = c.state.jobs[name or ""]
        shared = any(other != job.id for other in node.pinned)
        if (shared or not job.has_place) and not is_discarding(c.state, node, job.id):
            record_dirty(c, node, job, Cause("shared") if shared else Cause("after_release", {"job": job.id}))


def record_unknown(c: Context, kept: JobState) -> None:
    """Where a state is has to be seen, unless it is gone."""
    if kept.status not in (StateStatus.GONE, StateStatus.UNKNOWN):
        c.fact(f.StateUnknown(c.now, kept.job, kept.pool, kept.node))


def resolve_unknown(c: Context, node: Node) -> None:
    """A state whose place was unknown is not on GPUs that were verified clean of its job: it has to be loaded again.

    Unless its process is there, and may have parked it: what that leaves on the GPUs counts until it is discarded.
    """
    for kept in c.state.states_on(node):
        if kept.status is StateStatus.UNKNOWN and not is_dirty_by(node, kept.job) and not may_be_parked(c, kept):
            c.fact(f.StateObserved(c.now, kept.job, kept.pool, kept.node, StateStatus.GONE))


def may_be_parked(c: Context, kept: JobState) -> bool:
    """Whether the process that had the state loaded last is there, and its job has to have it discarded."""
    job = c.state.jobs[kept.job]
    return (not job.has_place or kept.node in job.left) and c.state.has_had(kept)


def discard_again(c: Context, host: HostId) -> None:
    """Discard unknown states once more; the look that waits for their bytes to go does it."""
    for name in c.state.hosts[host].nodes:
        node = c.state.nodes[name]
        for kept in c.state.states_on(node):
            if kept.status is not StateStatus.UNKNOWN or not has_to_go(c, node, kept):
                continue
            if c.timers.may_discard_again(state_key(kept.job, kept.pool, kept.node), c.now, c.config):
                status = StateStatus.LOADED if is_dirty_by(node, kept.job) else StateStatus.PARKED
                c.fact(f.StateObserved(c.now, kept.job, kept.pool, kept.node, status))
                issue(c, OrderKind.DISCARD, kept, None)


def has_to_go(c: Context, node: Node, kept: JobState) -> bool:
    """Whether an unknown state is to be discarded: its job leaves, or its process has come back to it."""
    job = c.state.jobs[kept.job]
    order = c.state.order_of(kept)
    if not is_dirty_by(node, kept.job):
        needed = kept.node in job.left and is_of_use(job, kept)  # it may be all that there is
        return not needed and may_be_parked(c, kept) and (order is None or not c.traits(order.driver).probes)
    if order is not None:
        return False  # no word of it: it may yet be done
    if job.has_place:
        theirs = [gpu for gpu in node.gpus.values() if gpu.dirty_by == job.id]
        return c.state.process_of(kept) is not None and all(is_given_back(c.state, gpu) for gpu in theirs)
    return job.status is not JobStatus.LOST


def is_of_use(job: Job, old: JobState) -> bool:
    """Whether what is parked of a state on an old node is still to be loaded elsewhere."""
    return old.run == job.run and job.has_place and old.node in job.newest.get(old.pool, ())


def observe(c: Context) -> None:
    """Look at hosts on which something is to come clean: now, and later at what may still be there.

    What is looked at later comes last. Planned first, it would take the place of the look at once.
    """
    hosts, c.dirty.hosts = c.dirty.hosts, {}
    for host in hosts:
        known = c.state.hosts.get(host)
        if known is not None and any(must_be_cleaned(c, c.state.nodes[name]) for name in known.nodes):
            observe_host(c, host)
    watched, c.dirty.watched = c.dirty.watched, {}
    for name in watched:
        if name in c.state.nodes:
            observe_until_clean(c, c.state.nodes[name])


def observe_host(c: Context, host: HostId) -> None:
    c.do(e.Observe(host))
    c.timers.observe_soon(host, c.now, c.config)


def must_be_cleaned(c: Context, node: Node) -> bool:
    """Whether something is on the node, or may be, that should become clean: a job's, or a stranger's."""
    if node.status in (NodeStatus.UNKNOWN, NodeStatus.OCCUPIED, NodeStatus.QUARANTINED):
        return True
    if any(kept.status is StateStatus.UNKNOWN for kept in c.state.states_on(node)):
        return True
    return any(is_due(c.state, node, gpu) for gpu in node.gpus.values())


def observe_until_clean(c: Context, node: Node) -> None:
    """While something on the node should become clean, see to it that it is looked at again."""
    if must_be_cleaned(c, node):
        c.timers.observe_later(node.host, c.now, c.config)
        if node.not_clean_since is not None and node.status is not NodeStatus.QUARANTINED:
            c.timers.at(node.not_clean_since + c.config.clean_timeout_ms, "clean", node.id)
