"""Hosts, nodes, their GPUs, and the daemon itself."""

from typing import Any

from rollmuxd.core import facts as f
from rollmuxd.core.apply.measures import excuse_away
from rollmuxd.core.causes import Cause
from rollmuxd.core.lifecycle import meet
from rollmuxd.core.model import Gpu, Host, Node, NodeStatus
from rollmuxd.core.state import State

#: of the ids that are minted: jobs, groups, sessions, slots, orders, launches
PREFIXES = ("j", "g", "e", "s", "o", "l")


def daemon_started(state: State, fact: f.DaemonStarted) -> None:
    state.incarnation = max(state.incarnation, fact.incarnation)
    if fact.ids_skipped:
        state.minted |= {prefix: state.minted.get(prefix, 0) + fact.ids_skipped for prefix in PREFIXES}
    if fact.crashed:
        for order in state.orders.values():
            order.crashes += 1
    for node in state.nodes.values():
        if node.status is NodeStatus.UP or node.status is NodeStatus.OCCUPIED:
            node.status = NodeStatus.UNKNOWN
    for job in state.jobs.values():
        for name in (job.queued, job.slot):
            if name is not None and state.slots[name].granted_at is None:
                excuse_away(job, state.slots[name], fact)


def host_added(state: State, fact: f.HostAdded) -> None:
    spec = fact.host
    host = state.hosts.setdefault(spec.id, Host(spec.id, spec.backend, spec.ram_mb))
    host.backend, host.ram_mb, host.ends_at = spec.backend, spec.ram_mb, spec.ends_at


def host_removed(state: State, fact: f.HostRemoved) -> None:
    del state.hosts[fact.host]


def host_booted(state: State, fact: f.HostBooted) -> None:
    state.hosts[fact.host].boot_id = fact.boot_id


def node_added(state: State, fact: f.NodeAdded) -> None:
    spec = fact.node
    host, known = state.hosts[spec.host], state.nodes.get(spec.id)
    if known is not None and known.host != spec.host:
        state.hosts[known.host].nodes.remove(spec.id)
    if spec.id not in host.nodes:
        host.nodes.append(spec.id)
    gpus, drain = {gpu: Gpu() for gpu in spec.gpus}, known is not None and known.drain and not known.unconfigured
    price = spec.price_per_gpu_hour
    state.nodes[spec.id] = Node(spec.id, spec.host, gpus, spec.pools, spec.gpu_type, spec.gpu_mb, price, drain=drain)


def node_removed(state: State, fact: f.NodeRemoved) -> None:
    node = state.nodes.pop(fact.node)
    state.hosts[node.host].nodes.remove(node.id)


def node_moved(state: State, fact: Any) -> None:
    """A node's status, for the facts that say nothing else."""
    node = state.nodes[fact.node]
    was_lost = node.status is NodeStatus.LOST
    meet(node, fact)
    if not isinstance(fact, f.NodeDrained):  # it keeps the reason for which it was drained
        node.reason = getattr(fact, "reason", None)
    if isinstance(fact, f.NodeDraining):
        node.drain = True
        node.reason = Cause("drained_unconfigured") if fact.unconfigured else Cause("drained", {"by": fact.by})
        node.unconfigured = fact.unconfigured
    elif isinstance(fact, f.NodeUndrained):
        node.drain = node.unconfigured = False
    elif isinstance(fact, f.NodeLost) and not was_lost:
        node.lost_at = fact.at


def gpus_verified_clean(state: State, fact: f.GpusVerifiedClean) -> None:
    node = state.nodes[fact.node]
    for gpu in fact.gpus:
        node.gpus[gpu].dirty_by = None
    all_gpus_clean(node, fact.gpus)


def gpus_not_clean(state: State, fact: f.GpusNotClean) -> None:
    node = state.nodes[fact.node]
    node.not_clean_reason = fact.reason
    node.not_clean += [gpu for gpu in fact.gpus if gpu not in node.not_clean]
    if node.not_clean_since is None:
        node.not_clean_since = fact.at


def all_gpus_clean(node: Node, gpus: tuple[str, ...]) -> None:
    if node.not_clean_since is not None:
        node.not_clean = [gpu for gpu in node.not_clean if gpu not in gpus]
        if not node.not_clean:
            node.not_clean_since = None
