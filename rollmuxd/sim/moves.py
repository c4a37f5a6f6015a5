"""What the witness has to say of moves: where a job is, where it is to go, and what it has left behind.

Parts of :class:`~rollmuxd.sim.checkers.Witness`, which holds the books; promises are named by their sentences.
"""

from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from rollmuxd.core import facts as f
from rollmuxd.core.config import Moves
from rollmuxd.core.model import GroupId, HostId, JobId, Millis, Movable, NodeId, PoolName
from rollmuxd.core.state import state_key

if TYPE_CHECKING:
    from rollmuxd.sim.checkers import Member, Stay, Turn, Witness


class Going(Struct):
    """Where a job is to go."""

    group: GroupId
    nodes: tuple[NodeId, ...]
    stays: dict[str, Any]
    planned_at: Millis
    #: of its own group, once it has moved; None: its visits are in the other group's wheel already
    wheel: tuple[f.PlannedVisit, ...] | None = None


class Kept(Struct):
    """RAM, and left-overs on GPUs, that are a job's: by the keys of its states."""

    ram: dict[str, tuple[HostId, int]] = field(default_factory=dict)
    #: nodes that it moved away from
    left: dict[NodeId, None] = field(default_factory=dict)
    going: Going | None = None
    moved_at: Millis | None = None
    #: it waits for another place with what it has parked
    falls_back: bool = False


def reserve(w: "Witness", job: JobId, member: "Member", pins: dict[PoolName, tuple[NodeId, ...]]) -> None:
    """RAM, and room for left-overs, are the job's on these nodes."""
    specs = {spec.pool: spec for spec in reversed(member.spec.states)}
    for pool, nodes in pins.items():
        spec = specs.get(pool)
        for node in nodes if spec is not None else ():
            assert spec is not None
            key, place = state_key(job, pool, node), w.places[node]
            if key in member.kept.ram:
                continue
            member.kept.ram[key] = (place.host, spec.ram_mb)
            w.ram[place.host][0] += spec.ram_mb
            if spec.leftover_mb:
                place.left[key] = spec.leftover_mb
            w.parked_states_fit_their_hosts(job, place.host)


def keys_on(member: "Member", node: NodeId) -> list[str]:
    """The states for which the job has RAM there."""
    return [key for key in member.kept.ram if key.endswith(f"|{node}")]


def give_back(w: "Witness", member: "Member", key: str) -> None:
    """The RAM of a state is nobody's any more."""
    host, mb = member.kept.ram.pop(key)
    w.ram[host][0] -= mb
    w.places[key.rpartition("|")[2]].left.pop(key, None)


def leave(w: "Witness", job: JobId, member: "Member", nodes: tuple[NodeId, ...]) -> None:
    """The job is not placed on these nodes any more; what it has parked there stays its own."""
    for node in nodes:
        place = w.places[node]
        place.users -= 1
        if not place.users:
            place.group = None
        for key in keys_on(member, node):
            if w.kept.get(key, "gone") == "gone":
                give_back(w, member, key)
        if keys_on(member, node) or any(w.stain.get(gpu) == job for gpu in place.gpus):
            member.kept.left[node] = None


def planned(w: "Witness", fact: f.MovePlanned) -> None:
    """The job counts in both places."""
    member = w.who_has_ended_gets_nothing_more(fact.job, "is to move")
    moves_keep_to_their_limits(w, fact, member)
    party = w.party(fact.group)
    nodes = tuple(dict.fromkeys(node for names in fact.pins.values() for node in names))
    for node in nodes:
        w.a_node_is_in_one_group(fact.group, node)
        place = w.places[node]
        place.group = fact.group
        place.users += node not in member.nodes
    reserve(w, fact.job, member, fact.pins)
    going = Going(fact.group, nodes, w.stays(fact.job, member, fact.pins), fact.at)
    member.kept.going = going
    if fact.group == member.group:
        going.wheel = fact.wheel
    else:
        party.coming[fact.job] = None
        w.a_group_has_no_more_members_than_the_cap(fact.group, party)
        party.wheel = w.merged(party.wheel, fact.wheel)
        party.on, party.dispatch = None, fact.dispatch


def moves_keep_to_their_limits(w: "Witness", fact: f.MovePlanned, member: "Member") -> None:
    """Only who allows it is moved, not again too soon, and in each group one at a time."""
    config, kept = w.config, member.kept
    why = ""
    if member.spec.movable is Movable.NO or config.moves is Moves.OFF:
        why = "it is not to be moved"
    elif member.status != "placed" or kept.going is not None:
        why = f"it is {member.status}, and goes to {kept.going}"
    elif kept.moved_at is not None and fact.at < kept.moved_at + config.move_every_ms:
        why = f"it was moved at {kept.moved_at}"
    under_way = {name: other for name, other in w.members.items() if other.kept.going is not None}
    for name, other in under_way.items():
        assert other.kept.going is not None
        if {other.group, other.kept.going.group} & {member.group, fact.group}:
            why = why or f"{name} is moving there"
    if len(under_way) >= config.moves_at_a_time:
        why = why or f"{len(under_way)} jobs are moving"
    if why:
        w.broken("moves_keep_to_their_limits", f"{fact.job} is to move, and {why}")


def began(w: "Witness", fact: f.MoveBegan) -> None:
    """It is between two iterations."""
    member = w.members[fact.job]
    a_job_moves_between_two_iterations(w, fact.job, member)
    w.set_status(member, "moving")


def a_job_moves_between_two_iterations(w: "Witness", job: JobId, member: "Member") -> None:
    """It holds no slot, nor GPUs of one that has ended, and asks for nothing but its first phase."""
    if member.kept.going is None:
        w.broken("a_job_moves_between_two_iterations", f"{job} begins to move, and nothing was planned")
    holds = [name for name, asked in w.slots.items() if asked.job == job and asked.status != "queued"]
    asked = w.slots.get(member.queued or "")
    asks = asked is not None and asked.phase != member.spec.phases[0].name
    if holds or asks:
        w.broken("a_job_moves_between_two_iterations", f"{job} begins to move, has {holds} and asks for {asked}")


def ended(w: "Witness", fact: f.MoveEnded) -> None:
    """It sits in its new place, and nowhere else."""
    member = w.members[fact.job]
    going = member.kept.going
    if member.status != "moving" or going is None:
        w.broken("a_job_moves_between_two_iterations", f"{fact.job} has moved, and was {member.status}")
    gone = tuple(node for node in member.nodes if node not in going.nodes)
    nothing_is_in_use_where_a_job_moves_away(w, fact.job, member, gone)
    assert member.group is not None
    old, new = w.groups[member.group], w.groups[going.group]
    if going.wheel is None:
        old.wheel = [visit for visit in old.wheel if visit.job != fact.job]
        old.jobs.remove(fact.job)
        del new.coming[fact.job]
        new.jobs.append(fact.job)
    else:
        new.wheel = _rewound(w, new.jobs, new.wheel, going.wheel)
    old.on = new.on = None
    old.disturbed_at = new.disturbed_at = fact.at
    for node in [node for node in member.kept.left if node in going.nodes]:
        del member.kept.left[node]
    leave(w, fact.job, member, gone)
    if not old.jobs and not old.coming:
        del w.groups[member.group]
    longest: dict[str, Stay] = member.stays
    for name, stay in going.stays.items():
        stay.longest_ms = max(stay.longest_ms, longest[name].longest_ms)
    member.group, member.nodes, member.stays = going.group, going.nodes, going.stays
    member.kept.going, member.kept.moved_at, member.kept.falls_back = None, fact.at, False
    if fact.run:
        member.run = w.runs[fact.job] = fact.run
    w.set_status(member, "placed")
    if member.queued is not None:
        w.slots[member.queued].since = w.now


def _rewound(w: "Witness", jobs: list[JobId], wheel: "list[Turn]", plan: tuple[f.PlannedVisit, ...]) -> "list[Turn]":
    made = w.merged(wheel, tuple(visit for visit in plan if visit.job in jobs and not visit.once))
    for once in [visit for visit in wheel if visit.once]:
        turn, index = min((visit.turn, at) for at, visit in enumerate(made) if visit.job == once.job)
        once.turn = turn
        made.insert(index, once)
    return made


def nothing_is_in_use_where_a_job_moves_away(
    w: "Witness", job: JobId, member: "Member", nodes: tuple[NodeId, ...]
) -> None:
    """What it had loaded there is parked or gone; of a process that was ended nothing is left at all."""
    again = member.spec.movable is Movable.RELAUNCH
    for node in member.nodes if again else nodes:
        states = {key: w.kept.get(key, "gone") for key in keys_on(member, node)}
        held = [gpu for gpu in w.places[node].gpus if w.held.get(gpu) is not None and w.slots[w.held[gpu]].job == job]
        stained = [gpu for gpu in w.places[node].gpus if again and w.stain.get(gpu) == job]
        if held or stained or any(where != "gone" and (again or where != "parked") for where in states.values()):
            w.broken("nothing_is_in_use_where_a_job_moves_away", f"{job} leaves {node}: {states}, {held}, {stained}")


def abandoned(w: "Witness", fact: f.MoveAbandoned) -> None:
    """It stays where it is."""
    member = w.members[fact.job]
    going = member.kept.going
    if going is None:
        w.broken("a_job_moves_between_two_iterations", f"{fact.job} abandons a move that was not planned")
    party = w.groups[going.group]
    member.kept.going, member.kept.moved_at = None, fact.at
    leave(w, fact.job, member, tuple(node for node in going.nodes if node not in member.nodes))
    if going.wheel is None:
        del party.coming[fact.job]
        party.wheel = [visit for visit in party.wheel if visit.job != fact.job]
        party.on = None
        if not party.jobs and not party.coming:
            del w.groups[going.group]
    w.set_status(member, "placed")
    if member.queued is not None:
        w.slots[member.queued].since = w.now


def node_left(w: "Witness", fact: f.NodeLeft) -> None:
    """Nothing of the job is left on a node that it moved away from."""
    member = w.members[fact.job]
    states = {key: w.kept.get(key, "gone") for key in keys_on(member, fact.node)}
    stained = [gpu for gpu in w.places[fact.node].gpus if w.stain.get(gpu) == fact.job]
    if stained or any(where != "gone" for where in states.values()) or fact.node not in member.kept.left:
        w.broken("a_placement_ends_when_nothing_is_left", f"{fact.job} has left {fact.node}: {states}, {stained}")
    for key in states:
        give_back(w, member, key)
    del member.kept.left[fact.node]
    w.forget_if_over(fact.job, member)


def requeued(w: "Witness", fact: f.SlotRequeued) -> None:
    """Its state could not be loaded: it waits on, and holds nothing."""
    asked = w.slots[fact.slot]
    member = w.members[asked.job]
    if asked.status != "loading" or member.holding != fact.slot:
        w.broken("who_may_not_be_granted_is_not", f"slot {fact.slot} is {asked.status}, and is to wait on")
    for gpu in asked.gpus:
        del w.held[gpu]
    asked.status, asked.gpus, asked.since = "queued", (), fact.at
    member.holding, member.queued = None, fact.slot


def a_state_is_fetched_from_where_it_is_parked(w: "Witness", fact: f.OrderIssued) -> None:
    """A load that says from where finds it there."""
    where = w.kept.get(state_key(fact.job, fact.pool, fact.source or ""), "gone")
    if where != "parked":
        w.broken(
            "a_state_is_fetched_from_where_it_is_parked",
            f"{fact.order} is to fetch the {fact.pool} state of {fact.job} from {fact.source}, and there it is {where}",
        )
