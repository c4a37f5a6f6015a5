"""Whether a job fits on nodes, by RAM and end of their hosts and by GPU memory: one rule decides and explains."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from rollmuxd.core.decision import Reason
from rollmuxd.core.estimates import solo_ms
from rollmuxd.core.ids import HostId, NodeId, PoolName
from rollmuxd.core.model import Job, JobState, Node, nodes_in
from rollmuxd.core.spec import StateSpec
from rollmuxd.core.state import State, allowed_residual_mb, state_key

#: milliseconds that a first load and turn are given at most, before a host goes away
LOAD_AND_TURN: Final = 600_000


def check(state: State, job: Job, pins: Mapping[PoolName, Sequence[NodeId]]) -> Reason | None:
    """What the nodes have too little of for the job; None: it fits."""
    return short_of_ram(state, job, pins) or short_of_memory(state, job, pins) or short_of_time(state, job, pins)


def short_of_ram(state: State, job: Job, pins: Mapping[PoolName, Sequence[NodeId]]) -> Reason | None:
    """Which host has too little RAM for the parked states of all its jobs (paper, constraint 1)."""
    need: dict[HostId, int] = {}
    for pool, nodes in pins.items():
        for name in nodes:
            host = state.nodes[name].host
            need[host] = need.get(host, 0) + ram_mb_on(state, job, pool, state.nodes[name])
    for host, more in need.items():
        known = state.hosts[host]
        if known.reserved_mb + more > known.ram_mb:
            free = known.ram_mb - known.reserved_mb
            text = f"host {host} has {_gb(free)} GB of its {_gb(known.ram_mb)} GB for parked states left"
            data = {"host": host, "free_gb": free / 1000, "need_gb": more / 1000}
            return Reason("ram", f"{text}, and it needs {_gb(more)} GB", data)
    return None


def ram_mb_on(state: State, job: Job, pool: PoolName, node: Node) -> int:
    """The RAM that a place on a node would take for the job's states. What the job has there already is reserved."""
    if job.states and state_key(job.id, pool, node.id) in state.states:
        return 0
    return job.spec.ram_mb_of(pool)


def short_of_memory(state: State, job: Job, pins: Mapping[PoolName, Sequence[NodeId]]) -> Reason | None:
    """Which GPU has too little memory for the job on further nodes: its largest state beside what is left by others."""
    for pool, nodes in pins.items():
        mine = [spec for spec in job.spec.states if spec.pool == pool]
        for name in nodes:
            node = state.nodes[name]
            if not node.gpu_mb or not mine:
                continue
            need = needed_mb(mine, state.states_that_stay(node))
            if need > node.gpu_mb:
                text = f"a GPU of {name} has {_gb(node.gpu_mb)} GB, and {_gb(need)} GB would be needed there"
                return Reason("gpu_memory", text, {"node": name, "need_gb": need / 1000})
    return None


def needed_mb(further: Iterable[StateSpec], there: Iterable[JobState]) -> int:
    """Memory on each GPU for further states beside those that are there: one at a time is loaded, the others parked."""
    states = [(spec.gpu_mb, spec.residual_mb) for spec in further]
    states += [(kept.spec.gpu_mb, allowed_residual_mb(kept)) for kept in there]
    return sum(leaves for _, leaves in states) + max((max(0, loaded - leaves) for loaded, leaves in states), default=0)


def short_of_time(state: State, job: Job, pins: Mapping[PoolName, Sequence[NodeId]]) -> Reason | None:
    """Which host goes away too soon for an iteration; its load and turn get as much again, at most ten minutes."""
    hosts = dict.fromkeys(state.nodes[name].host for name in nodes_in(pins))
    for host in hosts:
        ends_at = state.hosts[host].ends_at
        if ends_at is None or (took := solo_ms(job)) is None:
            continue
        need = took + min(took, LOAD_AND_TURN)
        if state.at + need > ends_at:
            text = f"host {host} goes away too soon: an iteration, its load and its turn need {need / 1000:.0f} s"
            return Reason("host_ends", text, {"host": host, "need_s": need / 1000})
    return None


def _gb(mb: int) -> str:
    return f"{mb / 1000:.1f}"
