"""Which nodes are whose: pins, the RAM that is kept for states, and what jobs have left behind."""

from collections.abc import Iterable

from msgspec.structs import replace

from rollmuxd.core import facts as f
from rollmuxd.core.clean import is_dirty_by
from rollmuxd.core.ids import NodeId, PoolName
from rollmuxd.core.lifecycle import meet
from rollmuxd.core.model import Group, Job, JobState, Node, Owner, StateStatus, nodes_in
from rollmuxd.core.shares import use_of
from rollmuxd.core.spec import StateSpec
from rollmuxd.core.state import State, state_key


def owner_of(state: State, job: Job) -> Owner:
    """The job's owner, whose use is counted up to now."""
    owner = state.owners.setdefault(job.owner, Owner())
    owner.use, owner.at = use_of(owner, state.at), state.at
    return owner


def pin(state: State, job: Job, group: Group, pins: dict[PoolName, tuple[NodeId, ...]], owner: Owner) -> None:
    """These nodes are the group's and the job's, with RAM for its states."""
    for pool, nodes in pins.items():
        for name in nodes:
            node = state.nodes[name]
            node.group = group.id
            if name not in group.nodes:
                group.nodes.append(name)
            if job.id not in node.pinned:
                node.pinned.append(job.id)
                owner.gpus += 0 if name in owner.nodes else len(node.gpus)
                owner.nodes[name] = owner.nodes.get(name, 0) + 1
            for spec in job.spec.states:
                if spec.pool == pool:
                    _add_state(state, job, node, spec)


def filler_placed(state: State, fact: f.FillerPlaced) -> None:
    """It has no group, and no node is pinned to it: jobs are placed as if it were not there."""
    job, node = state.jobs[fact.job], state.nodes[fact.node]
    meet(job, fact)
    job.reason, job.placed_at = None, fact.at
    job.pins = {fact.pool: (node.id,)}
    job.newest = dict(job.pins)
    node.fillers.append(job.id)
    for spec in job.spec.states:  # no RAM is reserved for it: it goes where a placement needs the RAM
        _add_state(state, job, node, replace(spec, ram_mb=0))


def leave_node(state: State, job: Job) -> None:
    """Nothing of the filler is left on its node."""
    for kept in state.states_of(job):
        _drop_state(state, job, kept)
    for name in nodes_in(job.pins):
        state.nodes[name].fillers.remove(job.id)


def _add_state(state: State, job: Job, node: Node, spec: StateSpec) -> None:
    """Of a state something may be on the node from now on."""
    key = state_key(job.id, spec.pool, node.id)
    if key not in state.states:
        state.states[key] = JobState(job.id, spec.pool, node.id, spec, job.run)
        node.states.append(key)
        job.states.append(key)
        state.hosts[node.host].reserved_mb += spec.ram_mb


def follow(was: tuple[NodeId, ...], newest: tuple[NodeId, ...], names: tuple[NodeId, ...]) -> tuple[NodeId, ...]:
    """The node with the newest state, for each of a job's new nodes: a node that stays keeps its own."""
    of = dict(zip(was, newest, strict=True))
    moved = [of[name] for name in was if name not in names]
    comes = [name for name in names if name not in of]
    source = {name: moved[at % len(moved)] for at, name in enumerate(comes)} if moved else {}
    return tuple(of.get(name) or source.get(name, name) for name in names)


def newest_on(job: Job, pool: PoolName, name: NodeId) -> None:
    """From now on the job's state is newer on this node of its than anywhere else."""
    pins = job.pins.get(pool, ())
    if name in pins:
        job.newest[pool] = tuple(name if at == name else it for at, it in zip(pins, job.newest[pool], strict=True))


def unpin(state: State, job: Job, names: Iterable[NodeId], owner: Owner) -> None:
    """These nodes are no longer the job's; those that no other job has leave their group.

    What may still be on them of the job is remembered until it was seen gone (``Job.left``).
    """
    for name in dict.fromkeys(names):
        node = state.nodes[name]
        node.pinned.remove(job.id)
        owner.nodes[name] -= 1
        if not owner.nodes[name]:
            del owner.nodes[name]
            owner.gpus -= len(node.gpus)
        if not node.pinned:
            state.its_group(node).nodes.remove(name)
            node.group = None
        for kept in state.states_at(job, node):
            if kept.status is StateStatus.GONE:
                _drop_state(state, job, kept)
        dirty = is_dirty_by(node, job.id)
        if dirty or state.states_at(job, node):
            job.left.append(name)
            state.leaving[job.id] = None


def _drop_state(state: State, job: Job, kept: JobState) -> None:
    """Nothing is there of a state, and nothing is kept for it."""
    key = state_key(kept.job, kept.pool, kept.node)
    del state.states[key]
    node = state.nodes[kept.node]
    node.states.remove(key)
    job.states.remove(key)
    state.hosts[node.host].reserved_mb -= kept.spec.ram_mb


def node_left(state: State, fact: f.NodeLeft) -> None:
    job = state.jobs[fact.job]
    for kept in state.states_at(job, state.nodes[fact.node]):
        _drop_state(state, job, kept)
    job.left.remove(fact.node)
    if not job.left:
        del state.leaving[job.id]
