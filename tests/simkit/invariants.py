"""Sentences that are true of every state of the core, checked on every tested run.

Each is written down from the promise it defends (DESIGN section 12), not from the code that keeps it.
"""

from collections.abc import Callable, Iterator

from rollmuxd.core.errors import BrokenInvariant
from rollmuxd.core.ids import GroupId, NodeId
from rollmuxd.core.model import Job, JobStatus, SlotStatus, StateStatus, nodes_in
from rollmuxd.core.state import State, state_key

_HOLDING = ("loading", "running", "tail", "released", "faulted", "lost", "revoked")


def a_gpu_is_held_by_one_slot_and_both_say_so(state: State) -> Iterator[str]:
    """The slot lists the GPU, and the GPU names the slot."""
    holders: dict[str, str] = {}
    for slot in state.slots.values():
        if slot.status in _HOLDING:
            for name in slot.gpus:
                if name in holders:
                    yield f"{name} is held by {holders[name]} and {slot.id}"
                holders[name] = slot.id
    for node in state.nodes.values():
        for name, gpu in node.gpus.items():
            if gpu.holder != holders.get(name):
                yield f"{name} names {gpu.holder} as its holder, and {holders.get(name)} lists it"


def a_held_gpu_has_only_bytes_of_its_holders_job(state: State) -> Iterator[str]:
    """No job was put on a GPU that another job's bytes may be on."""
    for node in state.nodes.values():
        for name, gpu in node.gpus.items():
            if gpu.holder is not None and gpu.dirty_by not in (None, state.slots[gpu.holder].job):
                yield f"{name} is held by {gpu.holder} and may have bytes of {gpu.dirty_by}"


def a_running_slot_has_its_states_loaded(state: State) -> Iterator[str]:
    """A grant is answered when the state is there, on every node of which the slot holds a GPU.

    Where the slot has grown since, more of it may still be being loaded.
    """
    for slot in state.slots.values():
        if slot.status != SlotStatus.RUNNING:
            continue
        job = state.jobs[slot.job]
        phase = next((p for p in (*job.spec.phases, *job.spec.side) if p.name == slot.phase), None)
        for key in job.states if phase is not None else ():
            kept = state.states[key]
            seat = kept.node in job.pins.get(kept.pool, ())  # and not where it is only to move to
            order = state.order_of(kept)
            grows = order is not None and order.slot == slot.id and bool(order.gpus)
            there = seat and not grows and not state.nodes[kept.node].gpus.keys().isdisjoint(slot.gpus)
            if there and phase is not None and kept.pool in phase.pools and kept.status != StateStatus.LOADED:
                yield f"slot {slot.id} runs, and {key} is {kept.status}"


def a_job_has_at_most_one_slot_that_holds_and_one_that_waits(state: State) -> Iterator[str]:
    """LOADING to TAIL: one; QUEUED: one."""
    holds: dict[str, int] = {}
    waits: dict[str, int] = {}
    for slot in state.slots.values():
        if slot.status in ("loading", "running", "tail"):
            holds[slot.job] = holds.get(slot.job, 0) + 1
        if slot.status == "queued":
            waits[slot.job] = waits.get(slot.job, 0) + 1
    for job in state.jobs:
        if holds.get(job, 0) > 1 or waits.get(job, 0) > 1:
            yield f"job {job} has {holds.get(job, 0)} slots that hold and {waits.get(job, 0)} that wait"


def parked_ram_fits_every_host(state: State) -> Iterator[str]:
    """What is reserved is what the placements need, and at most the budget."""
    needed = dict.fromkeys(state.hosts, 0)
    for kept in state.states.values():
        needed[state.nodes[kept.node].host] += kept.spec.ram_mb
    for host in state.hosts.values():
        if host.reserved_mb != needed[host.id]:
            yield f"host {host.id} has {host.reserved_mb} MB reserved, and its states need {needed[host.id]} MB"
        if host.reserved_mb > host.ram_mb and host.nodes:
            yield f"host {host.id} has {host.reserved_mb} MB of {host.ram_mb} MB reserved"


def a_node_is_in_the_group_of_the_jobs_pinned_to_it(state: State) -> Iterator[str]:
    """And in no other."""
    for node in state.nodes.values():
        groups = {_group_there(state.jobs[job], node.id) for job in node.pinned}
        if groups != ({node.group} if node.group is not None else set()):
            yield f"node {node.id} is in {node.group}, and its jobs are in {sorted(map(str, groups))}"


def _group_there(job: Job, node: NodeId) -> GroupId | None:
    """The group in which the job has a node: where it sits, or where it is to move to."""
    if any(node in names for names in job.pins.values()):
        return job.group
    there = job.move is not None and any(node in names for names in job.move.pins.values())
    return job.move.group if there and job.move is not None else None


def a_job_sits_in_one_group_and_comes_to_at_most_one(state: State) -> Iterator[str]:
    """Its turns are in the schedules of both, and nowhere else; it holds nothing where it is still to come."""
    sits = {name: group.id for group in state.groups.values() for name in group.jobs}
    comes = {name: group.id for group in state.groups.values() for name in group.coming}
    for job in state.jobs.values():
        there = job.move.group if job.move is not None and job.move.group != job.group else None
        if (sits.get(job.id), comes.get(job.id)) != (job.group, there):
            listed = f"{sits.get(job.id)} and {comes.get(job.id)}"
            yield f"job {job.id} sits in {job.group} and comes to {there}, and is listed in {listed}"
        if (job.move is not None) != (job.id in state.moving) or bool(job.left) != (job.id in state.leaving):
            yield f"job {job.id} moves: {job.move is not None}, has left: {job.left}, and is not listed so"
        slot = state.slot_of(job)
        placed = {gpu for name in nodes_in(job.pins) for gpu in state.nodes[name].gpus}
        if slot is not None and not placed.issuperset(slot.gpus):
            yield f"slot {slot.id} holds {slot.gpus}, and its job {job.id} sits on {job.pins}"
        if job.status == JobStatus.MOVING and (job.slot is not None or job.move is None):
            yield f"job {job.id} is moving, and has slot {job.slot} and move {job.move}"
    for group in state.groups.values():
        for turn in group.schedule:
            if turn.job not in group.jobs and turn.job not in group.coming:
                yield f"group {group.id} has a turn of {turn.job}, which is not of it"


def a_state_is_on_a_node_of_its_jobs(state: State) -> Iterator[str]:
    """Where the job sits with that pool, is to go, or was and has not left altogether."""
    for key, kept in state.states.items():
        job, node = state.jobs[kept.job], state.nodes[kept.node]
        comes = job.move is not None and kept.node in job.move.pins.get(kept.pool, ())
        if not comes and kept.node not in job.pins.get(kept.pool, ()) and kept.node not in job.left:
            yield f"{key} is {kept.status}, and job {job.id} is not on {kept.node} with it"
        if key not in job.states or key not in node.states:
            yield f"{key} is not listed by its job and its node"


def a_job_has_a_state_on_each_of_its_nodes(state: State) -> Iterator[str]:
    """What it declares for a pool is known on all its nodes of the pool, loaded there or not.

    One without a place may still have the nodes of the run before, which declared other states.
    """
    for job in state.jobs.values():
        if not job.has_place:
            continue
        pools = {spec.pool for spec in job.spec.states}
        for pool, names in job.pins.items():
            for name in names:
                if pool in pools and state_key(job.id, pool, name) not in job.states:
                    yield f"{job.id} sits on {name}, and its {pool} state there is unheard of"


def an_owner_holds_the_nodes_of_its_placements(state: State) -> Iterator[str]:
    """Each as often as it has placements there, and their GPUs once."""
    placements: dict[str, dict[str, int]] = {}
    for node in state.nodes.values():
        for name in node.pinned:
            held = placements.setdefault(state.jobs[name].owner, {})
            held[node.id] = held.get(node.id, 0) + 1
    for owner, known in state.owners.items():
        held = placements.pop(owner, {})
        gpus = sum(len(state.nodes[name].gpus) for name in held)
        if (known.nodes, known.gpus) != (held, gpus):
            yield f"owner {owner} holds {known.nodes} with {known.gpus} GPUs, and its placements {held} with {gpus}"
    for owner, held in placements.items():
        yield f"owner {owner} holds nothing, and its placements {held}"


def a_loan_is_a_fillers_and_no_placement_is(state: State) -> Iterator[str]:
    """A filler is in no group. A lent node's GPUs are held by the loan, or by no slot."""
    for node in state.nodes.values():
        for name in node.fillers:
            if state.jobs[name].group is not None or name in node.pinned:
                yield f"filler {name} of node {node.id} has a place in a group"
        holders = {gpu.holder for gpu in node.gpus.values()} - {None, node.loan}
        if node.loan is not None and holders:
            yield f"node {node.id} is lent to {node.loan}, and held by {sorted(map(str, holders))}"


def a_lost_or_ended_job_waits_for_nothing_and_runs_nothing(state: State) -> Iterator[str]:
    """Its requests went with it."""
    for job in state.jobs.values():
        if job.status in (JobStatus.LOST, JobStatus.ENDED) and (job.queued is not None or job.slot is not None):
            yield f"job {job.id} is {job.status} and has {job.queued or job.slot}"


def who_is_at_risk_is_placed_and_listed(state: State) -> Iterator[str]:
    """A promise is at risk by the plan of a group: a job that leaves the group leaves that behind."""
    for job in state.jobs.values():
        if job.id in state.at_risk and (job.group is None or not job.promised):
            yield f"job {job.id} is {job.status} in {job.group}, and at risk; promised: {job.promised}"


def a_granted_slot_has_a_fence_of_its_own(state: State) -> Iterator[str]:
    """No fence is given twice."""
    seen: dict[tuple[int, int], str] = {}
    for slot in state.slots.values():
        if slot.fence is not None:
            if slot.fence in seen:
                yield f"slots {seen[slot.fence]} and {slot.id} have the fence {slot.fence}"
            seen[slot.fence] = slot.id


ALL: tuple[Callable[[State], Iterator[str]], ...] = (
    a_gpu_is_held_by_one_slot_and_both_say_so,
    a_held_gpu_has_only_bytes_of_its_holders_job,
    a_running_slot_has_its_states_loaded,
    a_job_has_at_most_one_slot_that_holds_and_one_that_waits,
    parked_ram_fits_every_host,
    a_node_is_in_the_group_of_the_jobs_pinned_to_it,
    a_job_sits_in_one_group_and_comes_to_at_most_one,
    a_state_is_on_a_node_of_its_jobs,
    a_job_has_a_state_on_each_of_its_nodes,
    an_owner_holds_the_nodes_of_its_placements,
    a_loan_is_a_fillers_and_no_placement_is,
    a_lost_or_ended_job_waits_for_nothing_and_runs_nothing,
    who_is_at_risk_is_placed_and_listed,
    a_granted_slot_has_a_fence_of_its_own,
)


def check(state: State) -> None:
    """Raise BrokenInvariant with the name of the first sentence that is not true."""
    for sentence in ALL:
        for breach in sentence(state):
            raise BrokenInvariant(f"{sentence.__name__}: {breach}")
