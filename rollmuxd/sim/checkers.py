"""The witness: hears every input and every decision, believes nobody, and says which promise is broken.

The promises are those of DESIGN section 12. Each is a method here that is named by its sentence; who breaks it gets
that sentence, and what happened, as a :class:`~rollmuxd.core.errors.BrokenInvariant`. The witness keeps books of its
own from what clients and backends *said* (inputs) and from what the scheduler *told* (facts and effects). It never
reads the scheduler's state, so a fact that the state's own code misunderstands is seen all the same.

What it costs grows with what changes, not with what there is. Promises that something happens *in the end* are looked
after every :data:`SWEEP_EVERY` inputs, and by :meth:`Witness.end`.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, NoReturn

from msgspec import Struct, field

from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.config import Config
from rollmuxd.core.decision import Decision
from rollmuxd.core.effects import Effect, Kill, Perform, Probe
from rollmuxd.core.errors import BrokenInvariant
from rollmuxd.core.model import (
    Dispatch,
    Fence,
    GpuId,
    GroupId,
    HostId,
    JobId,
    JobSpec,
    Millis,
    NodeId,
    OrderId,
    OrderKind,
    PhaseSpec,
    PoolName,
    SessionId,
    SlotId,
    StateStatus,
)
from rollmuxd.core.state import State, state_key
from rollmuxd.sim.moves import (
    Kept,
    a_state_is_fetched_from_where_it_is_parked,
    abandoned,
    began,
    ended,
    leave,
    node_left,
    planned,
    requeued,
    reserve,
)

#: inputs between two looks at who waits for too long
SWEEP_EVERY: Final = 1_000
#: what any wait may take beside the work that it waits for: a look, a grace, a re-attachment, a node in quarantine
SLACK_MS: Final = 900_000
#: the slots that will never be granted any more, of which this many are remembered with the reason
NEVER_KEPT: Final = 2_000

#: facts that no promise of the witness' depends on
OF_NO_CONSEQUENCE: Final = frozenset(
    {
        "Audited",
        "HostRemoved",
        "JobPromised",
        "LoopStalled",
        "NextAnswered",
        "ProcessLaunched",
        "ProcessOver",
        "ProcessStarted",
        "RelaunchPlanned",
        "SlotOverstays",
        "SlotReclaiming",
    }
)

#: of a job of which the process may be ended
_PROCESS_GOES: Final = ("lost", "ended", "moving")

_SEEN_IN: Final = (i.OrderDone, i.ReleaseSlot, i.ShrinkSlot)


class Turn(Struct, gc=False):
    """A place in a wheel, as the witness counts it."""

    job: JobId
    phase: str
    #: how often it was passed
    turn: int
    once: bool = False


class Party(Struct):
    """A group."""

    jobs: list[JobId] = field(default_factory=list)
    #: who is to move here
    coming: dict[JobId, None] = field(default_factory=dict)
    nodes: dict[NodeId, int] = field(default_factory=dict)
    wheel: list[Turn] = field(default_factory=list)
    dispatch: Dispatch = Dispatch.WHEEL
    #: per node, the wheel indices of the visits that claim it; None: to be derived anew
    on: dict[NodeId, list[int]] | None = None
    #: when its members, or what is known of its nodes, changed last: waits are counted from here
    disturbed_at: Millis = 0


class Stay(Struct):
    """What one phase of a placed job claims."""

    nodes: tuple[NodeId, ...]
    gpus: tuple[GpuId, ...]
    #: of its states: the key, and the node
    keys: tuple[tuple[str, NodeId], ...]
    pools: tuple[PoolName, ...]
    min_gpus: int
    #: the longest that it is planned to run, or ran
    longest_ms: Millis


class Member(Struct):
    """A run of a job."""

    spec: JobSpec
    run: int
    #: waiting, placed, moving, paused, quarantined, lost, ended
    status: str = "waiting"
    #: where a pause returns to
    resume_to: str = "waiting"
    session: SessionId | None = None
    group: GroupId | None = None
    nodes: tuple[NodeId, ...] = ()
    kept: Kept = field(default_factory=Kept)
    stays: dict[str, Stay] = field(default_factory=dict)
    queued: SlotId | None = None
    holding: SlotId | None = None
    #: the longest that one of its orders took
    order_ms: Millis = 0
    status_since: Millis = 0


class Asked(Struct):
    """A slot, from the request to its end."""

    job: JobId
    session: SessionId
    phase: str
    request_id: str
    side: bool
    #: queued, loading, running, tail, released, taken
    status: str
    #: since when it waits without anything to excuse it
    since: Millis
    queued_at: Millis
    gpus: tuple[GpuId, ...] = ()
    fence: Fence | None = None
    granted_at: Millis = 0


class Place(Struct):
    """A node."""

    host: HostId
    gpus: tuple[GpuId, ...]
    group: GroupId | None = None
    #: jobs that are placed on it
    users: int = 0
    #: MB that each parked state of it may leave on each GPU, by the state's key
    left: dict[str, int] = field(default_factory=dict)
    #: when what is on it was last to change
    touched_at: Millis = -1
    #: GPUs of it are known not to be clear
    unclear: bool = False


class Told(Struct, gc=False):
    """An order without a final result."""

    kind: OrderKind
    key: str
    job: JobId
    run: int
    node: NodeId
    issued_at: Millis
    slot: SlotId | None
    lost: bool = False


class Witness:
    """See the module's head. ``cap``: how many members a group has at most, by the policy; None: not limited.

    ``config`` has the numbers that are promised: leases, re-attachment, tolerance. ``excused_ms`` is how long hosts,
    memories and drivers may be out of order, beside what they say of themselves, before something is late.
    """

    def __init__(self, config: Config, *, cap: int | None = None, excused_ms: Millis = 0) -> None:
        self.config, self.cap, self.excused_ms = config, cap, excused_ms
        self.now: Millis = 0
        self.given: i.Input = i.Tick()
        self.members: dict[JobId, Member] = {}
        self.runs: dict[JobId, int] = {}
        self.groups: dict[GroupId, Party] = {}
        self.places: dict[NodeId, Place] = {}
        self.host_nodes: dict[HostId, list[NodeId]] = {}
        self.ram: dict[HostId, list[int]] = {}  # reserved, budget
        self.slots: dict[SlotId, Asked] = {}
        self.never: dict[SlotId, str] = {}
        self.detached: dict[SlotId, Millis] = {}
        #: living sessions, and when each was heard of
        self.heard: dict[SessionId, Millis] = {}
        #: who holds each GPU, and whose bytes may be on it
        self.held: dict[GpuId, SlotId] = {}
        self.stain: dict[GpuId, JobId] = {}
        #: nodes on which nothing may be started
        self.out: dict[NodeId, str] = {}
        self.boots: dict[HostId, str] = {}
        #: nodes of which the present look began before they were last touched
        self.stale: tuple[NodeId, ...] = ()
        self.orders: dict[OrderId, Told] = {}
        #: issued in this decision; closed in it by what was seen
        self.untold: dict[OrderId, None] = {}
        self.closed: dict[OrderId, None] = {}
        #: where each state is, and for what is loaded on which GPUs
        self.kept: dict[str, str] = {}
        self.loaded_on: dict[str, tuple[GpuId, ...]] = {}
        self.order_of: dict[str, OrderId] = {}
        self.fence = Fence(0, 0)
        #: when each host was last out of reach, or seen with bytes that should be gone
        self.trouble: dict[HostId, Millis] = {}
        self.started_at: Millis = 0
        self._until_sweep = SWEEP_EVERY

    # ---- hearing -----------------------------------------------------------------------------------------------------

    def hear(self, now: Millis, given: i.Input, decision: Decision, state: State | None = None) -> None:
        """One input and what came of it. Raises BrokenInvariant for the first promise that is broken."""
        if now < self.now:
            self.broken("no_fact_goes_back_in_time", f"an input of {now} ms comes after one of {self.now} ms")
        self.now, self.given = now, given
        note = self._noted.get(type(given))
        if note is not None:
            note(self, given)
        heard = self._facts
        for fact in decision.facts:
            kind = type(fact)
            if fact.at != now and kind is not f.Audited:  # that one is of wall time
                self.no_fact_goes_back_in_time(fact)
            if kind in heard:
                heard[kind](self, fact)
        if decision.effects or self.untold:
            self.every_order_is_told_once(decision.effects)
        if self.closed:
            self.closed.clear()
        if type(given) is i.OrderDone and given.order in self.orders:
            self.broken("every_order_ends_once", f"order {given.order} is reported done, and is still open")
        self._until_sweep -= 1
        if not self._until_sweep:
            self._until_sweep = SWEEP_EVERY
            self.sweep()

    def broken(self, promise: str, what: str) -> NoReturn:
        """A promise is broken, and by what."""
        raise BrokenInvariant(f"{promise}: {what}")

    # ---- promises of time and of who may be granted ------------------------------------------------------------------

    def no_fact_goes_back_in_time(self, fact: f.Fact) -> None:
        """Every fact bears the time of its decision."""
        if fact.at != self.now:
            self.broken("no_fact_goes_back_in_time", f"{f.name(fact)} at {fact.at} ms was decided at {self.now} ms")

    def who_may_not_be_granted_is_not(self, name: SlotId) -> Asked:
        """A withdrawn request, one of a lost session or of a job that has ended, is never granted."""
        asked = self.slots.get(name)
        if asked is None:
            why = self.never.get(name, "was never asked for")
            self.broken("who_may_not_be_granted_is_not", f"slot {name} {why}, and goes ahead")
        if asked.session not in self.heard:
            self.broken("who_may_not_be_granted_is_not", f"slot {name} goes ahead, and {asked.session} is no more")
        return asked

    def nobody_is_granted_who_is_not_there(self, name: SlotId, asked: Asked) -> None:
        """Nobody is granted anything who was silent for a whole lease."""
        silent = self.now - self.heard[asked.session]
        if silent > self.config.lease_ms:
            self.broken(
                "nobody_is_granted_who_is_not_there",
                f"slot {name} is granted to {asked.session}, silent for {silent} ms",
            )

    def a_request_that_nobody_attends_does_not_go_ahead(self, name: SlotId) -> None:
        """A detached request keeps its place, and is not granted meanwhile, nor ever after the re-attach time."""
        if name in self.detached:
            gone = self.now - self.detached[name]
            self.broken(
                "a_request_that_nobody_attends_does_not_go_ahead", f"slot {name}, detached {gone} ms ago, goes ahead"
            )

    def only_a_placed_job_goes_ahead(self, name: SlotId, member: Member) -> None:
        """Who waits for a placement, is paused, quarantined, lost or ended gets no GPU."""
        if member.status != "placed":
            self.broken("only_a_placed_job_goes_ahead", f"slot {name} goes ahead, and its job is {member.status}")

    def a_job_holds_one_slot_and_waits_with_one(self, job: JobId, *others: SlotId | None) -> None:
        """At most one slot between LOADING and TAIL, and at most one QUEUED."""
        for other in others:
            if other is not None:
                self.broken("a_job_holds_one_slot_and_waits_with_one", f"job {job} has slot {other} already")

    # ---- promises of GPUs --------------------------------------------------------------------------------------------

    def a_gpu_is_held_by_one_slot(self, name: SlotId, gpus: tuple[GpuId, ...]) -> None:
        """Nobody claims what somebody holds; a shrunk tail holds its own subset."""
        held = self.held
        if held.keys().isdisjoint(gpus):
            return
        for gpu in gpus:
            if gpu in held:
                self.broken("a_gpu_is_held_by_one_slot", f"{gpu} is held by slot {held[gpu]}, and {name} claims it")

    def a_gpu_is_given_on_only_when_seen_clear(self, name: SlotId, job: JobId, gpus: tuple[GpuId, ...]) -> None:
        """Nobody claims a GPU that another job's bytes may be on."""
        stain = self.stain
        if stain.keys().isdisjoint(gpus):
            return
        for gpu in gpus:
            whose = stain.get(gpu)
            if whose is not None and whose != job:
                self.broken(
                    "a_gpu_is_given_on_only_when_seen_clear",
                    f"slot {name} of {job} claims {gpu}, not seen clear since {whose} was there",
                )

    def a_slot_holds_what_its_phase_claims(self, name: SlotId, stay: Stay, gpus: tuple[GpuId, ...]) -> None:
        """All GPUs of its job's nodes, or a part of them where its phase starts on a part; on nodes in service."""
        if gpus != stay.gpus:
            strange = [gpu for gpu in gpus if gpu not in stay.gpus]
            if strange or not stay.min_gpus or len(gpus) < stay.min_gpus:
                self.broken(
                    "a_slot_holds_what_its_phase_claims", f"slot {name} claims {gpus}, and its phase is on {stay.gpus}"
                )
        if self.out:
            for node in stay.nodes:
                if node in self.out:
                    self.broken("a_slot_holds_what_its_phase_claims", f"slot {name} claims {node}: {self.out[node]}")

    def clear_is_what_was_seen_clear(self, fact: f.GpusCleared) -> None:
        """GPUs are clear because an input said so, of a time at which nothing was on its way there."""
        place, given = self.places[fact.node], self.given
        if not self.held.keys().isdisjoint(fact.gpus):
            for gpu in fact.gpus:
                holder = self.held.get(gpu)
                if holder is not None and self.slots[holder].status not in ("taken", "released"):
                    self.broken("clear_is_what_was_seen_clear", f"{gpu} is called clear, and slot {holder} holds it")
        if fact.by:
            if not isinstance(given, i.DeclareClear) or given.node != fact.node:
                self.broken("clear_is_what_was_seen_clear", f"nobody declared {fact.node} clear")
            return
        seen = self._sights(fact.node)
        limit = self.config.clear_tolerance_mb
        for gpu in fact.gpus:
            used = seen.get(gpu)
            if used is not None and used > limit:
                limit = self.config.clear_tolerance_mb + sum(
                    mb for key, mb in place.left.items() if self.kept.get(key, "gone") != "gone"
                )
            if used is None or used > limit:
                self.broken("clear_is_what_was_seen_clear", f"{gpu} is called clear, and was seen with {used} MB")
        for job in dict.fromkeys(map(self.stain.get, fact.gpus)):
            if job is not None:
                self._nothing_is_on_its_way(fact.node, job)

    def _sights(self, node: NodeId) -> dict[GpuId, int]:
        given = self.given
        sights: Sequence[i.GpuSight] = ()
        if isinstance(given, _SEEN_IN):
            sights = given.seen
        elif isinstance(given, i.HostSeen):
            if node in self.stale:
                self.broken("clear_is_what_was_seen_clear", f"{node} was looked at before it was last touched")
            sights = given.gpus
        return {sight.gpu: sight.used_mb for sight in sights}

    def _nothing_is_on_its_way(self, node: NodeId, job: JobId) -> None:
        member = self.members.get(job)
        if member is None:
            return
        slot = self.slots.get(member.holding or "")
        if slot is not None and slot.status == "tail":
            return  # it gave these GPUs back; what it keeps is held
        for pool in dict.fromkeys(spec.pool for spec in member.spec.states):
            key = state_key(job, pool, node)
            where = self.kept.get(key, "gone")
            told = self.orders.get(self.order_of.get(key, ""))
            coming = told is not None and told.kind is OrderKind.LOAD and told.run == member.run
            if where in ("loading", "loaded", "parking") or (coming and member.session in self.heard):
                self.broken("clear_is_what_was_seen_clear", f"{node} is called clear of {job}, whose state is {where}")

    def what_was_taken_away_is_held_until_seen_clear(self, name: SlotId, asked: Asked) -> None:
        """The GPUs of a slot that ended without its holder's word stay held until they were seen clear."""
        if asked.status == "taken" and not self.stain.keys().isdisjoint(asked.gpus):
            for gpu in asked.gpus:
                if self.stain.get(gpu) == asked.job and self.held.get(gpu) == name:
                    self.broken(
                        "what_was_taken_away_is_held_until_seen_clear", f"slot {name} is over, and {gpu} is not clear"
                    )

    def a_placement_ends_when_nothing_is_left(self, job: JobId, member: Member) -> None:
        """No slot, no state and no byte of the job is on nodes that it leaves."""
        for node in member.nodes:
            for gpu in self.places[node].gpus:
                holder = self.slots.get(self.held.get(gpu, ""))
                if self.stain.get(gpu) == job or (holder is not None and holder.job == job):
                    self.broken("a_placement_ends_when_nothing_is_left", f"{job} leaves {node}, and {gpu} is not clear")
            for pool in dict.fromkeys(spec.pool for spec in member.spec.states):
                where = self.kept.get(state_key(job, pool, node), "gone")
                if where != "gone" and not (member.kept.falls_back and where == "parked"):
                    self.broken("a_placement_ends_when_nothing_is_left", f"{job} leaves {node}: a state is {where}")

    # ---- promises of grants ------------------------------------------------------------------------------------------

    def who_is_granted_finds_its_state_loaded(self, name: SlotId, asked: Asked, stay: Stay) -> None:
        """Every state of the phase was loaded, on all the GPUs that the slot holds, and not moved since."""
        for key, node in stay.keys:
            where = self.kept.get(key, "gone")
            if where == "loaded" and self.loaded_on[key] == asked.gpus:
                continue
            held = [gpu for gpu in self.places[node].gpus if gpu in asked.gpus]
            if held and where != "loaded":
                self.broken("who_is_granted_finds_its_state_loaded", f"slot {name} is granted, and {key} is {where}")
            if any(gpu not in self.loaded_on[key] for gpu in held):
                on = self.loaded_on[key]
                self.broken("who_is_granted_finds_its_state_loaded", f"slot {name} is granted, {key} is on {on}")

    def fences_only_grow(self, name: SlotId, fence: Fence) -> None:
        """One for each grant, each greater than every one before."""
        if fence <= self.fence:
            self.broken("fences_only_grow", f"slot {name} gets {fence} after {self.fence}")
        self.fence = fence

    def only_its_holder_releases_a_slot(self, name: SlotId, asked: Asked) -> None:
        """Under its present fence, by its own word."""
        given: Any = self.given
        kind = type(given)
        if (kind is not i.ReleaseSlot and kind is not i.ShrinkSlot) or (given.slot, given.fence) != (name, asked.fence):
            self.broken("only_its_holder_releases_a_slot", f"slot {name} under {asked.fence} is given back by {given}")

    # ---- promises of order -------------------------------------------------------------------------------------------

    def visits_come_in_the_order_of_the_wheel(self, name: SlotId, party: Party, visit: int, stay: Stay) -> None:
        """On each node, of the visits that claim it none comes before one that is still to come this turn."""
        wheel = party.wheel
        turn = wheel[visit].turn
        on = party.on
        if on is None:
            on = party.on = self._project(party)
        for node in stay.nodes:
            for other in on[node]:
                at = wheel[other].turn
                if at < turn or (at == turn and other < visit):
                    before = wheel[other]
                    self.broken(
                        "visits_come_in_the_order_of_the_wheel",
                        f"slot {name} goes ahead on {node} before {before.job}'s {before.phase}, which is next",
                    )

    def _project(self, party: Party) -> dict[NodeId, list[int]]:
        on: dict[NodeId, list[int]] = {}
        for index, visit in enumerate(party.wheel):
            member = self.members[visit.job]
            going = member.kept.going
            stays = going.stays if going is not None and visit.job in party.coming else member.stays
            for node in stays[visit.phase].nodes:
                on.setdefault(node, []).append(index)
        return on

    def first_come_first_served(self, name: SlotId, asked: Asked, party: Party, stay: Stay) -> None:
        """In a line, nobody overtakes who came earlier, is there, could go, and wants one of his nodes.

        But one whose state is loaded where the other's is not: it may stay there for a while, and is used meanwhile.
        """
        mine = (asked.queued_at, len(name), name)
        for job in party.jobs:
            member = self.members[job]
            other = member.queued
            if other is None or other == name or member.holding is not None or member.status != "placed":
                continue
            waits = self.slots[other]
            claims = member.stays[waits.phase].nodes
            if (waits.queued_at, len(other), other) > mine or other in self.detached:
                continue
            if any(node in self.out for node in claims):
                continue
            contested = [node for node in stay.nodes if node in claims]
            at_home = [self.kept.get(key) == "loaded" for key, node in stay.keys if node in contested]
            if contested and not (at_home and all(at_home)):
                self.broken("first_come_first_served", f"slot {name} overtakes slot {other}, which came before")

    def nobody_is_passed_over_who_could_go(self, fact: f.VisitSkipped, visit: Turn) -> None:
        """A visit is skipped whose job is away: not while it is busy with an earlier phase, or asks for this one."""
        member = self.members[visit.job]
        if member.status != "placed" or member.group != fact.group:  # it is still to come
            return
        if member.holding is not None and member.queued is None:
            self.broken(
                "nobody_is_passed_over_who_could_go", f"{visit.job} is in slot {member.holding}, and is skipped"
            )
        if member.queued is None or member.queued in self.detached or self.slots[member.queued].phase != visit.phase:
            return
        if not any(node in self.out for node in member.stays[visit.phase].nodes):
            self.broken("nobody_is_passed_over_who_could_go", f"{visit.job} asks for {visit.phase}, and is skipped")

    # ---- promises of placements --------------------------------------------------------------------------------------

    def a_node_is_in_one_group(self, group: GroupId, node: NodeId) -> None:
        """And its jobs are that group's."""
        place = self.places[node]
        if place.group is not None and place.group != group:
            self.broken("a_node_is_in_one_group", f"{node} of group {place.group} is given to group {group}")

    def parked_states_fit_their_hosts(self, job: JobId, host: HostId) -> None:
        """What is reserved for the states of placed jobs is within the budget of every host."""
        reserved, budget = self.ram[host]
        if reserved > budget:
            self.broken("parked_states_fit_their_hosts", f"with {job}, {host} reserves {reserved} of {budget} MB")

    def a_group_has_no_more_members_than_the_cap(self, group: GroupId, party: Party) -> None:
        """The policy's residency cap."""
        if self.cap is not None and len(party.jobs) + len(party.coming) > self.cap:
            members = [*party.jobs, *party.coming]
            self.broken("a_group_has_no_more_members_than_the_cap", f"group {group} has {members}")

    def who_has_ended_gets_nothing_more(self, job: JobId, what: str, *, also: tuple[str, ...] = ()) -> Member:
        """A job that is lost or ended neither asks, nor is placed, nor gets an order but to be cleared away."""
        member = self.members.get(job)
        if member is None or member.status in ("lost", "ended", *also):
            status = "unknown" if member is None else member.status
            self.broken("who_has_ended_gets_nothing_more", f"job {job} is {status}, and {what}")
        return member

    # ---- promises of orders ------------------------------------------------------------------------------------------

    def every_order_is_told_once(self, effects: tuple[Effect, ...]) -> None:
        """In the decision that issues it; again only after a restart. Only open orders are told or asked about."""
        told_again = type(self.given) in (i.Start, i.OrderNotBegun)
        for effect in effects:
            if type(effect) is Perform:
                order = effect.order
                if order not in self.orders:
                    self.broken("every_order_is_told_once", f"order {order} is told, and is not open")
                if effect.again != (order not in self.untold) or (effect.again and not told_again):
                    self.broken("every_order_is_told_once", f"order {order} is told twice")
                self.untold.pop(order, None)
            elif isinstance(effect, Probe):
                if effect.order not in self.orders and effect.order not in self.closed:
                    self.broken("every_order_is_told_once", f"{effect.order} is asked about, and is not open")
            elif isinstance(effect, Kill):
                member = self.members.get(effect.job)
                if member is not None and member.run == effect.run and member.status not in _PROCESS_GOES:
                    self.broken("every_order_is_told_once", f"{effect.job} is to be killed, and was not lost")
        if self.untold:
            self.broken("every_order_is_told_once", f"{next(iter(self.untold))} is issued, and nobody is told")

    def every_order_ends_once(self, fact: f.OrderEnded | f.OrderFaulted | f.OrderContactLost) -> Told:
        """By its own report; one of which nobody knows is still open, and ends by a late word or by what is seen."""
        told = self.orders.get(fact.order)
        given: Any = self.given
        if told is None:
            self.broken("every_order_ends_once", f"order {fact.order} is not open, and there is {f.name(fact)}")
        reports = _REPORTS[type(fact)]
        if type(given) not in reports or (type(given) is not i.Start and given.order != fact.order):
            self.broken("every_order_ends_once", f"{f.name(fact)} of {fact.order} came of {given}")
        return told

    def nobody_moves_a_state_in_use(self, fact: f.OrderIssued, key: str, member: Member) -> None:
        """One order at a time for each state; a load only for the slot at hand; a park never under a running slot."""
        if key in self.order_of:
            self.broken("nobody_moves_a_state_in_use", f"{key} is to {fact.kind}, and {self.order_of[key]} is open")
        slot = self.slots.get(member.holding or "")
        if fact.kind is OrderKind.LOAD:
            if slot is None or slot.status != "loading" or member.holding != fact.slot:
                self.broken("nobody_moves_a_state_in_use", f"{key} is to load, and no slot of {fact.job} is loading")
        elif slot is not None and fact.pool in member.stays[slot.phase].pools:
            if any(self.held.get(gpu) == member.holding for gpu in self.places[fact.node].gpus):
                self.broken("nobody_moves_a_state_in_use", f"{key} is to {fact.kind} under slot {member.holding}")

    # ---- promises that something happens in the end ------------------------------------------------------------------

    def sweep(self) -> None:
        """Look at who waits: called now and then, and at the end."""
        self.the_death_of_a_job_is_recorded_within_its_lease()
        for name, asked in self.slots.items():
            if asked.status == "queued":
                self.who_waits_has_his_turn(name, asked)
            elif asked.status in ("released", "taken"):
                self.what_is_given_back_comes_clear(name, asked)
        for name, told in self.orders.items():
            self.every_order_comes_to_an_end(name, told)

    def the_death_of_a_job_is_recorded_within_its_lease(self) -> None:
        """A session that was silent for more than its lease is not taken to live."""
        limit = self.now - self.config.lease_ms
        for session, at in self.heard.items():
            if at < limit:
                self.broken(
                    "the_death_of_a_job_is_recorded_within_its_lease",
                    f"{session}, silent since {at}, passes for living",
                )

    def who_waits_has_his_turn(self, name: SlotId, asked: Asked) -> None:
        """An attended request of a placed job on nodes in service is granted in a bounded time."""
        member = self.members[asked.job]
        party = self.groups.get(member.group or "")
        if party is None or self._excused(name, asked, member):
            asked.since = self.now
            return
        since = max(asked.since, party.disturbed_at, self.started_at)
        if self.now - since > self._bound_ms(party):
            self.broken(
                "who_waits_has_his_turn",
                f"slot {name} ({asked.job}, {asked.phase}) waits since {asked.queued_at}, with nothing in its way "
                f"since {since}; its group is {party.jobs}, and should take it within {self._bound_ms(party)} ms",
            )

    def _excused(self, name: SlotId, asked: Asked, member: Member) -> bool:
        stay = member.stays.get(asked.phase)
        if name in self.detached or member.status != "placed" or stay is None:
            return True
        for node in stay.nodes:
            if node in self.out or self.places[node].unclear:
                return True
            for gpu in self.places[node].gpus:
                holder = self.held.get(gpu)
                if holder is not None and self.slots[holder].status == "taken":
                    return True
                whose = self.members.get(self.stain.get(gpu, asked.job))
                if whose is None or whose.status not in ("placed", "paused"):
                    return True
        return False

    def _bound_ms(self, party: Party) -> Millis:
        """Every member once for each member, by the longest that each phase and each move was seen to take."""
        total = 0
        for job in party.jobs:
            member = self.members[job]
            longest = {name: stay.longest_ms for name, stay in member.stays.items()}
            asked = self.slots.get(member.holding or "")
            if asked is not None and asked.granted_at:
                longest[asked.phase] = max(longest.get(asked.phase, 0), self.now - asked.granted_at)
            moves = max((spec.load_ms + spec.park_ms for spec in member.spec.states), default=0)
            gaps = sum(phase.gap_ms for phase in member.spec.phases)
            total += sum(longest.values()) + gaps + len(longest) * (moves + member.order_ms)
        return (len(party.jobs) + 1) * total + SLACK_MS + self.excused_ms

    def what_is_given_back_comes_clear(self, name: SlotId, asked: Asked) -> None:
        """A slot that has ended holds its GPUs no longer than their hosts are silent, or are seen with its bytes."""
        hosts = dict.fromkeys(self.places[node].host for node in self.members[asked.job].nodes)
        since = max([asked.since, self.started_at, *(self.trouble.get(host, 0) for host in hosts)])
        if self.now - since > SLACK_MS + self.excused_ms + self.members[asked.job].order_ms:
            self.broken("what_is_given_back_comes_clear", f"slot {name} of {asked.job} is {asked.status} since {since}")

    def every_order_comes_to_an_end(self, name: OrderId, told: Told) -> None:
        """While its host is within reach an order is done, fails, or is looked after, in a bounded time."""
        member = self.members.get(told.job)
        longest = 0 if member is None else 3 * member.order_ms
        since = max(told.issued_at, self.started_at, self.trouble.get(self.places[told.node].host, 0))
        limit = SLACK_MS + self.excused_ms + longest + self._planned_move_ms(member)
        if self.now - since > limit:
            self.broken("every_order_comes_to_an_end", f"{name} ({told.kind} {told.key}) is open since {since}")

    def _planned_move_ms(self, member: Member | None) -> Millis:
        states = () if member is None else member.spec.states
        return 3 * max((spec.load_ms + spec.park_ms for spec in states), default=0)

    def end(self, now: Millis) -> None:
        """The run is over, and there was time for everything to be cleared away."""
        self.now = now
        self.sweep()
        for job, member in self.members.items():
            self._left("every_job_ends", f"job {job} is {member.status} since {member.status_since}")
        for name, asked in self.slots.items():
            self._left("every_slot_ends", f"slot {name} of {asked.job} is {asked.status}")
        for order, told in self.orders.items():
            self._left("every_order_comes_to_an_end", f"order {order} ({told.kind} {told.key}) is open")
        for gpu, slot in self.held.items():
            self._left("every_gpu_comes_back", f"{gpu} is held by slot {slot}")
        for gpu, job in self.stain.items():
            self._left("every_gpu_comes_back", f"{gpu} was not seen clear since {job} was there")
        for node, place in self.places.items():
            if place.group is not None:
                self._left("every_node_leaves_its_group", f"{node} is in group {place.group}")
        for host, (reserved, _) in self.ram.items():
            if reserved:
                self._left("every_node_leaves_its_group", f"{host} has {reserved} MB reserved")

    def _left(self, promise: str, what: str) -> NoReturn:
        self.broken(promise, f"{what}, {self.now} ms after the beginning and with nothing left to come")

    # ---- what inputs say ---------------------------------------------------------------------------------------------

    def _beat(self, given: i.Heartbeat) -> None:
        if given.session in self.heard:
            self.heard[given.session] = self.now

    def _opens(self, given: i.OpenSession) -> None:
        member = self.members.get(given.job)
        if member is not None and member.session in self.heard:  # it may be the same process again
            self.heard[member.session] = self.now

    def _asks(self, given: i.RequestSlot) -> None:
        member = self.members.get(given.job)
        for name in (member.queued, member.holding) if member is not None else ():
            asked = self.slots.get(name or "")
            if name is not None and asked is not None and asked.request_id == given.request_id:
                if self.detached.pop(name, None) is not None and asked.status == "queued":
                    asked.since = self.now

    def _detaches(self, given: i.DetachSlot) -> None:
        asked = self.slots.get(given.slot)
        if asked is not None and asked.status in ("queued", "loading"):
            self.detached[given.slot] = self.now

    def _starts(self, given: i.Start) -> None:
        self.started_at = self.now
        for session in self.heard:
            self.heard[session] = self.now
        for name, asked in self.slots.items():
            if asked.status in ("queued", "loading"):
                self.detached[name] = self.now

    def _stalls(self, given: i.Stalled) -> None:
        for session in self.heard:
            self.heard[session] = self.now

    def _sees(self, given: i.HostSeen) -> None:
        since = self.now + 1 if given.since is None else given.since
        nodes = self.host_nodes.get(given.host, ())
        self.stale = tuple(node for node in nodes if self.places[node].touched_at >= since)
        if any(sight.used_mb > self.config.clear_tolerance_mb for sight in given.gpus):
            self.trouble[given.host] = self.now

    def _misses(self, given: i.HostUnreachable) -> None:
        self.trouble[given.host] = self.now

    # ---- what facts tell: the daemon and what it reaches -------------------------------------------------------------

    def _started(self, fact: f.DaemonStarted) -> None:
        for node in self.places:
            self.out.setdefault(node, "not seen since the daemon started")

    def _host_added(self, fact: f.HostAdded) -> None:
        self.ram.setdefault(fact.host.id, [0, 0])[1] = fact.host.ram_mb
        self.host_nodes.setdefault(fact.host.id, [])

    def _host_booted(self, fact: f.HostBooted) -> None:
        given = self.given
        if not isinstance(given, i.HostSeen) or given.boot_id != fact.boot_id:
            self.broken("clear_is_what_was_seen_clear", f"{fact.host} booted, by nobody's word")
        self.boots[fact.host] = fact.boot_id

    def _node_added(self, fact: f.NodeAdded) -> None:
        spec = fact.node
        known = self.places.get(spec.id)
        if known is not None and known.users:
            self.broken("a_node_is_in_one_group", f"{spec.id} changes, and jobs are placed on it")
        self.places[spec.id] = Place(spec.host, spec.gpus)
        if spec.id not in self.host_nodes[spec.host]:
            self.host_nodes[spec.host].append(spec.id)
        self.out[spec.id] = "not seen yet"

    def _node_removed(self, fact: f.NodeRemoved) -> None:
        place = self.places.pop(fact.node)
        self.host_nodes[place.host].remove(fact.node)
        self.out.pop(fact.node, None)
        if place.users:
            self.broken("a_node_is_in_one_group", f"{fact.node} is removed, and jobs are placed on it")

    def _node_up(self, fact: f.NodeUp) -> None:
        given = self.given
        if not isinstance(given, i.HostSeen) or given.host != self.places[fact.node].host:
            self.broken("a_slot_holds_what_its_phase_claims", f"{fact.node} is up, and nobody saw it ({given})")
        self.out.pop(fact.node, None)
        self._disturbed(fact.node)

    def _node_out(self, fact: Any) -> None:
        self.out[fact.node] = f"it is {f.name(fact)}"
        self._disturbed(fact.node)

    def _disturbed(self, node: NodeId) -> None:
        party = self.groups.get(self.places[node].group or "")
        if party is not None:
            party.disturbed_at = self.now

    def _cleared(self, fact: f.GpusCleared) -> None:
        self.clear_is_what_was_seen_clear(fact)
        stain = self.stain
        for gpu in fact.gpus:
            if gpu in stain:
                del stain[gpu]
        place = self.places[fact.node]
        if place.unclear:
            place.unclear = not stain.keys().isdisjoint(place.gpus)
            self._disturbed(fact.node)

    def _unclear(self, fact: f.GpusUnclear) -> None:
        self.places[fact.node].unclear = True
        self._disturbed(fact.node)

    # ---- what facts tell: jobs and sessions --------------------------------------------------------------------------

    def _registered(self, fact: f.JobRegistered) -> None:
        known = self.members.get(fact.job)
        if fact.run <= self.runs.get(fact.job, 0):
            self.broken("who_has_ended_gets_nothing_more", f"run {fact.run} of {fact.job} comes again")
        self.runs[fact.job] = fact.run
        if known is None:
            self.members[fact.job] = Member(fact.spec, fact.run, status_since=fact.at)
            return
        if known.status not in ("lost", "ended"):
            self.broken("who_has_ended_gets_nothing_more", f"{fact.job} is {known.status}, and registered anew")
        known.spec, known.run, known.session = fact.spec, fact.run, None
        known.kept.falls_back, known.kept.moved_at = False, None
        self.set_status(known, "waiting")

    def set_status(self, member: Member, status: str) -> None:
        """From now on the job is that; its group's waits are counted anew."""
        member.status, member.status_since = status, self.now
        party = self.groups.get(member.group or "")
        if party is not None:
            party.disturbed_at = self.now

    def _placed(self, fact: f.JobPlaced) -> None:
        member = self.who_has_ended_gets_nothing_more(fact.job, "is placed")
        if member.status != "waiting" or member.group is not None:
            self.broken("a_node_is_in_one_group", f"{fact.job} is {member.status} in {member.group}, and is placed")
        party = self.party(fact.group)
        party.jobs.append(fact.job)
        self.a_group_has_no_more_members_than_the_cap(fact.group, party)
        member.group = fact.group
        member.nodes = tuple(dict.fromkeys(node for nodes in fact.pins.values() for node in nodes))
        for node in member.nodes:
            self.a_node_is_in_one_group(fact.group, node)
            place = self.places[node]
            place.group = fact.group
            place.users += 1
        for node in [node for node in member.kept.left if node in member.nodes]:
            del member.kept.left[node]
        reserve(self, fact.job, member, fact.pins)
        member.stays = self.stays(fact.job, member, fact.pins)
        party.wheel = _merged(party.wheel, fact.wheel)
        party.on, party.dispatch = None, fact.dispatch
        self.set_status(member, "placed")
        if member.queued is not None:
            self.slots[member.queued].since = self.now

    def party(self, group: GroupId) -> Party:
        """The group; a new one where there is none."""
        return self.groups.setdefault(group, Party())

    def merged(self, old: list[Turn], planned: tuple[f.PlannedVisit, ...]) -> list[Turn]:
        """A wheel into which a job has come: who was there stays in his turn, who is new joins the present one."""
        return _merged(old, planned)

    def stays(self, job: JobId, member: Member, pins: dict[PoolName, tuple[NodeId, ...]]) -> dict[str, Stay]:
        """What each phase claims on these nodes."""
        return {phase.name: self._stay(job, member, pins, phase) for phase in _phases(member.spec)}

    def _stay(self, job: JobId, member: Member, pins: dict[PoolName, tuple[NodeId, ...]], phase: PhaseSpec) -> Stay:
        nodes = tuple(dict.fromkeys(node for pool in phase.pools for node in pins.get(pool, ())))
        kept = [spec.pool for spec in member.spec.states if spec.pool in phase.pools]
        return Stay(
            nodes=nodes,
            gpus=tuple(gpu for node in nodes for gpu in self.places[node].gpus),
            keys=tuple((state_key(job, pool, node), node) for pool in kept for node in pins.get(pool, ())),
            pools=phase.pools,
            min_gpus=phase.min_gpus,
            longest_ms=phase.planned_ms or 0,
        )

    def _placement_ended(self, fact: f.PlacementEnded) -> None:
        member = self.members[fact.job]
        self.a_placement_ends_when_nothing_is_left(fact.job, member)
        self._leave_wheel(fact.job, member)
        assert member.group is not None
        party = self.groups[member.group]
        party.jobs.remove(fact.job)
        party.disturbed_at = self.now
        leave(self, fact.job, member, member.nodes)
        if not party.jobs and not party.coming:
            del self.groups[member.group]
        member.group, member.nodes, member.stays = None, (), {}
        self.forget_if_over(fact.job, member)

    def forget_if_over(self, job: JobId, member: Member) -> None:
        """Of a job that has ended and has nothing left anywhere nothing more is to be said."""
        if member.status == "ended" and member.group is None and not member.holding and not member.kept.left:
            del self.members[job]

    def _leave_wheel(self, job: JobId, member: Member) -> None:
        party = self.groups.get(member.group or "")
        if party is not None:
            party.wheel = [visit for visit in party.wheel if visit.job != job]
            party.on, party.disturbed_at = None, self.now

    def _unplaced(self, fact: f.JobUnplaced) -> None:
        member = self.who_has_ended_gets_nothing_more(fact.job, "is unplaced")
        member.kept.falls_back = member.kept.falls_back or fact.keeps
        if member.status == "paused":
            member.resume_to = "waiting"
        else:
            self.set_status(member, "waiting")
        self._leave_wheel(fact.job, member)

    def _paused(self, fact: f.JobPaused) -> None:
        member = self.who_has_ended_gets_nothing_more(fact.job, "is paused")
        member.resume_to = member.status
        self.set_status(member, "paused")

    def _resumed(self, fact: f.JobResumed) -> None:
        member = self.who_has_ended_gets_nothing_more(fact.job, "is resumed")
        self.set_status(member, member.resume_to)
        if member.queued is not None:
            self.slots[member.queued].since = self.now

    def _quarantined(self, fact: f.JobQuarantined) -> None:
        member = self.who_has_ended_gets_nothing_more(fact.job, "is quarantined")
        self._leave_wheel(fact.job, member)
        self.set_status(member, "quarantined")

    def _reinstated(self, fact: f.JobReinstated) -> None:
        self.set_status(self.who_has_ended_gets_nothing_more(fact.job, "is reinstated"), "waiting")

    def _lost(self, fact: f.JobLost) -> None:
        member = self.who_has_ended_gets_nothing_more(fact.job, "is lost")
        self.a_job_holds_one_slot_and_waits_with_one(fact.job, member.queued, member.holding)
        self._leave_wheel(fact.job, member)
        self.set_status(member, "lost")

    def _ended(self, fact: f.JobEnded) -> None:
        member = self.who_has_ended_gets_nothing_more_but_its_end(fact.job)
        self.a_job_holds_one_slot_and_waits_with_one(fact.job, member.queued, member.holding)
        self._leave_wheel(fact.job, member)
        self.set_status(member, "ended")
        self.forget_if_over(fact.job, member)

    def who_has_ended_gets_nothing_more_but_its_end(self, job: JobId) -> Member:
        """A lost job ends; an ended one does not end again."""
        member = self.members.get(job)
        if member is None or member.status == "ended":
            self.broken("who_has_ended_gets_nothing_more", f"job {job} has ended, and ends again")
        return member

    def _session_opened(self, fact: f.SessionOpened) -> None:
        member = self.who_has_ended_gets_nothing_more(fact.job, f"session {fact.session} is opened")
        if member.session in self.heard:
            self.broken("who_may_not_be_granted_is_not", f"{fact.job} has {member.session}, and gets {fact.session}")
        member.session = fact.session
        self.heard[fact.session] = fact.at

    def _session_over(self, fact: f.SessionFenced | f.SessionClosed) -> None:
        self.heard.pop(fact.session, None)

    def _session_lost(self, fact: f.SessionLost) -> None:
        silent = fact.at - self.heard.pop(fact.session)
        if silent < self.config.lease_ms:
            self.broken(
                "the_death_of_a_job_is_recorded_within_its_lease",
                f"{fact.session} is lost after {silent} ms of silence",
            )

    # ---- what facts tell: slots --------------------------------------------------------------------------------------

    def _queued(self, fact: f.SlotQueued) -> None:
        member = self.who_has_ended_gets_nothing_more(fact.job, "asks", also=("quarantined",))
        self.a_job_holds_one_slot_and_waits_with_one(fact.job, member.queued)
        if fact.session not in self.heard or fact.session != member.session:
            self.broken("who_may_not_be_granted_is_not", f"{fact.session} asks for {fact.slot}, and is no more")
        member.queued = fact.slot
        at = fact.at
        self.slots[fact.slot] = Asked(fact.job, fact.session, fact.phase, fact.request_id, fact.side, "queued", at, at)

    def _withdrawn(self, fact: f.SlotWithdrawn) -> None:
        asked = self.slots.pop(fact.slot)
        member = self.members[asked.job]
        member.queued = None
        self.detached.pop(fact.slot, None)
        self.never[fact.slot] = f"was withdrawn ({fact.reason})"
        if len(self.never) > NEVER_KEPT:
            del self.never[next(iter(self.never))]
        party = self.groups.get(member.group or "")
        if asked.side and party is not None:
            mine = (asked.job, asked.phase)
            party.wheel = [it for it in party.wheel if not (it.once and (it.job, it.phase) == mine)]
            party.on = None

    def _visit_added(self, fact: f.VisitAdded) -> None:
        party = self.groups[fact.group]
        turn, index = min((it.turn, at) for at, it in enumerate(party.wheel) if it.job == fact.job)
        party.wheel.insert(index, Turn(fact.job, fact.phase, turn, once=True))
        party.on = None

    def _skipped(self, fact: f.VisitSkipped) -> None:
        visit = self.groups[fact.group].wheel[fact.visit]
        self.nobody_is_passed_over_who_could_go(fact, visit)
        visit.turn += 1

    def _claimed(self, fact: f.SlotClaimed) -> None:
        name, gpus = fact.slot, fact.gpus
        asked = self.who_may_not_be_granted_is_not(name)
        job = asked.job
        member = self.members[job]
        if asked.status != "queued":
            self.broken("who_may_not_be_granted_is_not", f"slot {name} is {asked.status}, and claims GPUs")
        if self.detached:
            self.a_request_that_nobody_attends_does_not_go_ahead(name)
        self.only_a_placed_job_goes_ahead(name, member)
        self.a_job_holds_one_slot_and_waits_with_one(job, member.holding)
        stay = member.stays[asked.phase]
        self.a_slot_holds_what_its_phase_claims(name, stay, gpus)
        self.a_gpu_is_held_by_one_slot(name, gpus)
        self.a_gpu_is_given_on_only_when_seen_clear(name, job, gpus)
        assert member.group is not None
        party = self.groups[member.group]
        visit = party.wheel[fact.visit]
        if (visit.job, visit.phase) != (job, asked.phase):
            self.broken("visits_come_in_the_order_of_the_wheel", f"slot {name} takes {visit.job}'s {visit.phase}")
        if party.dispatch is Dispatch.WHEEL:
            self.visits_come_in_the_order_of_the_wheel(name, party, fact.visit, stay)
        else:
            self.first_come_first_served(name, asked, party, stay)
        if visit.once:
            del party.wheel[fact.visit]
            party.on = None
        else:
            visit.turn += 1
        asked.status, asked.gpus = "loading", gpus
        member.queued, member.holding = None, name
        self.held.update(dict.fromkeys(gpus, name))
        self.stain.update(dict.fromkeys(gpus, job))
        self._touch(stay, gpus)

    def _touch(self, stay: Stay | None, gpus: tuple[GpuId, ...]) -> None:
        """What is on these GPUs is to change."""
        if stay is not None:
            whole = gpus == stay.gpus
            for node in stay.nodes:
                place = self.places[node]
                if whole or any(gpu in gpus for gpu in place.gpus):
                    place.touched_at = self.now

    def _granted(self, fact: f.SlotGranted) -> None:
        name = fact.slot
        asked = self.who_may_not_be_granted_is_not(name)
        member = self.members[asked.job]
        if asked.status != "loading":
            self.broken("who_may_not_be_granted_is_not", f"slot {name} is {asked.status}, and is granted")
        if member.status in ("lost", "ended"):  # what is being loaded for others is theirs till the next boundary
            self.only_a_placed_job_goes_ahead(name, member)
        self.nobody_is_granted_who_is_not_there(name, asked)
        self.a_request_that_nobody_attends_does_not_go_ahead(name)
        self.fences_only_grow(name, fact.fence)
        self.who_is_granted_finds_its_state_loaded(name, asked, member.stays[asked.phase])
        asked.status, asked.fence, asked.granted_at = "running", fact.fence, fact.at

    def _taken_over(self, fact: f.SlotTakenOver) -> None:
        asked = self.slots[fact.slot]
        if (fact.fence is not None) != (asked.fence is not None):
            self.broken("fences_only_grow", f"slot {fact.slot} is taken over under {fact.fence}, was {asked.fence}")
        if fact.fence is not None:
            self.fences_only_grow(fact.slot, fact.fence)
            asked.fence = fact.fence
        asked.session = fact.session

    def _shrunk(self, fact: f.SlotShrunk) -> None:
        asked = self.slots[fact.slot]
        self.only_its_holder_releases_a_slot(fact.slot, asked)
        if not fact.kept or any(gpu not in asked.gpus for gpu in fact.kept):
            self.broken("a_gpu_is_held_by_one_slot", f"slot {fact.slot} of {asked.gpus} is to keep {fact.kept}")
        freed = tuple(gpu for gpu in asked.gpus if gpu not in fact.kept)
        for gpu in freed:
            del self.held[gpu]
        asked.status, asked.gpus = "tail", fact.kept
        self._touch(self.members[asked.job].stays.get(asked.phase), freed)

    def _grown(self, fact: f.SlotGrown) -> None:
        asked = self.slots[fact.slot]
        more = tuple(gpu for gpu in fact.gpus if gpu not in asked.gpus)
        self.a_gpu_is_held_by_one_slot(fact.slot, more)
        self.a_gpu_is_given_on_only_when_seen_clear(fact.slot, asked.job, more)
        self.held.update(dict.fromkeys(more, fact.slot))
        self.stain.update(dict.fromkeys(more, asked.job))
        asked.status, asked.gpus = "running", fact.gpus

    def _released(self, fact: f.SlotReleased) -> None:
        asked = self.slots[fact.slot]
        self.only_its_holder_releases_a_slot(fact.slot, asked)
        member = self.members[asked.job]
        member.holding = None
        stay = member.stays.get(asked.phase)
        if stay is not None:
            stay.longest_ms = max(stay.longest_ms, fact.at - asked.granted_at)
        asked.status, asked.since = "released", fact.at

    def _taken(self, fact: f.SlotFaulted | f.SlotLost | f.SlotRevoked) -> None:
        asked = self.slots[fact.slot]
        member = self.members[asked.job]
        if member.holding != fact.slot:
            self.broken("a_gpu_is_held_by_one_slot", f"{f.name(fact)} of {fact.slot}, which is {asked.status}")
        member.holding = None
        asked.status, asked.since = "taken", fact.at
        party = self.groups.get(member.group or "")
        if party is not None:
            party.disturbed_at = fact.at

    def _over(self, fact: f.SlotOver) -> None:
        asked = self.slots.pop(fact.slot)
        if asked.status == "taken":
            self.what_was_taken_away_is_held_until_seen_clear(fact.slot, asked)
        elif asked.status != "released":
            self.broken("only_its_holder_releases_a_slot", f"slot {fact.slot} is {asked.status}, and is over")
        held = self.held
        for gpu in asked.gpus:
            del held[gpu]
        member = self.members.get(asked.job)
        if member is not None:
            self._touch(member.stays.get(asked.phase), asked.gpus)

    # ---- what facts tell: states and orders --------------------------------------------------------------------------

    def _issued(self, fact: f.OrderIssued) -> None:
        job, node, kind = fact.job, fact.node, fact.kind
        key = f"{job}|{fact.pool}|{node}"
        member = self.members[job]
        if kind is not OrderKind.DISCARD and member.status in ("lost", "ended") and kind is OrderKind.LOAD:
            self.who_has_ended_gets_nothing_more(job, f"its {fact.pool} state is to {kind}")
        self.nobody_moves_a_state_in_use(fact, key, member)
        if fact.source is not None:
            a_state_is_fetched_from_where_it_is_parked(self, fact)
        self.orders[fact.order] = Told(kind, key, job, fact.run, node, fact.at, fact.slot)
        self.order_of[key] = fact.order
        self.untold[fact.order] = None
        if kind is OrderKind.LOAD:
            self.kept[key] = "loading"
            self.loaded_on[key] = self.slots[fact.slot or ""].gpus
        else:
            self.kept[key] = "parking" if kind is OrderKind.PARK else "discarding"

    def _order_ended(self, fact: f.OrderEnded) -> None:
        told = self.every_order_ends_once(fact)
        del self.orders[fact.order]
        key = told.key
        if self.order_of.get(key) == fact.order:
            del self.order_of[key]
        member = self.members.get(told.job)
        if member is not None and fact.at - told.issued_at > member.order_ms:
            member.order_ms = fact.at - told.issued_at
        if self.kept.get(key) == "unknown":
            return  # a late word: StateSeen says what it means
        if told.kind is OrderKind.LOAD:
            self.kept[key] = "loaded"
        elif told.kind is OrderKind.PARK:
            self.kept[key] = "parked"
        else:
            self.kept.pop(key, None)
            self.loaded_on.pop(key, None)
        place = self.places[told.node]
        if told.job in map(self.stain.get, place.gpus):
            place.touched_at = fact.at

    def _order_faulted(self, fact: f.OrderFaulted) -> None:
        told = self.every_order_ends_once(fact)
        del self.orders[fact.order]
        if self.order_of.get(told.key) == fact.order:
            del self.order_of[told.key]
            self.kept[told.key] = "unknown"

    def _contact_lost(self, fact: f.OrderContactLost) -> None:
        told = self.every_order_ends_once(fact)
        if told.lost:
            self.broken("every_order_ends_once", f"contact with order {fact.order} is lost twice")
        told.lost = True
        if self.order_of.get(told.key) == fact.order:
            self.kept[told.key] = "unknown"

    def _state_unknown(self, fact: f.StateUnknown) -> None:
        self.kept[state_key(fact.job, fact.pool, fact.node)] = "unknown"

    def _state_seen(self, fact: f.StateSeen) -> None:
        key = state_key(fact.job, fact.pool, fact.node)
        order = self.order_of.pop(key, None)
        if order is not None:
            del self.orders[order]
            self.closed[order] = None
        if fact.status is StateStatus.GONE:
            self.kept.pop(key, None)
            self.loaded_on.pop(key, None)
        else:
            # what is only thought to be loaded may be there, and passes for loaded with nobody
            self.kept[key] = "parked" if fact.status is StateStatus.PARKED else "loaded, perhaps"

    # ---- who listens for what ----------------------------------------------------------------------------------------

    _noted: ClassVar[dict[type, Callable[["Witness", Any], None]]] = {
        i.Heartbeat: _beat,
        i.OpenSession: _opens,
        i.RequestSlot: _asks,
        i.DetachSlot: _detaches,
        i.Start: _starts,
        i.Stalled: _stalls,
        i.HostSeen: _sees,
        i.HostUnreachable: _misses,
    }
    _facts: ClassVar[dict[type, Callable[["Witness", Any], None]]] = {
        f.DaemonStarted: _started,
        f.HostAdded: _host_added,
        f.HostBooted: _host_booted,
        f.NodeAdded: _node_added,
        f.NodeRemoved: _node_removed,
        f.NodeUp: _node_up,
        f.NodeOccupied: _node_out,
        f.NodeUnseen: _node_out,
        f.NodeLost: _node_out,
        f.NodeQuarantined: _node_out,
        f.NodeDraining: _node_out,
        f.NodeDrained: _node_out,
        f.NodeUndrained: _node_out,
        f.GpusCleared: _cleared,
        f.GpusUnclear: _unclear,
        f.JobRegistered: _registered,
        f.JobPlaced: _placed,
        f.PlacementEnded: _placement_ended,
        f.JobUnplaced: _unplaced,
        f.MovePlanned: planned,
        f.MoveBegan: began,
        f.MoveEnded: ended,
        f.MoveAbandoned: abandoned,
        f.NodeLeft: node_left,
        f.SlotRequeued: requeued,
        f.JobPaused: _paused,
        f.JobResumed: _resumed,
        f.JobQuarantined: _quarantined,
        f.JobReinstated: _reinstated,
        f.JobLost: _lost,
        f.JobEnded: _ended,
        f.SessionOpened: _session_opened,
        f.SessionFenced: _session_over,
        f.SessionLost: _session_lost,
        f.SessionClosed: _session_over,
        f.SlotQueued: _queued,
        f.SlotWithdrawn: _withdrawn,
        f.VisitAdded: _visit_added,
        f.VisitSkipped: _skipped,
        f.SlotClaimed: _claimed,
        f.SlotGranted: _granted,
        f.SlotTakenOver: _taken_over,
        f.SlotShrunk: _shrunk,
        f.SlotGrown: _grown,
        f.SlotReleased: _released,
        f.SlotFaulted: _taken,
        f.SlotLost: _taken,
        f.SlotRevoked: _taken,
        f.SlotOver: _over,
        f.OrderIssued: _issued,
        f.OrderEnded: _order_ended,
        f.OrderFaulted: _order_faulted,
        f.OrderContactLost: _contact_lost,
        f.StateUnknown: _state_unknown,
        f.StateSeen: _state_seen,
    }


def _phases(spec: JobSpec) -> tuple[PhaseSpec, ...]:
    return (*spec.side, *spec.phases)


def _merged(old: list[Turn], planned: tuple[f.PlannedVisit, ...]) -> list[Turn]:
    """A wheel into which a job has come: who was there stays in his turn, who is new joins the present one."""
    known: dict[tuple[JobId, str], list[int]] = {}
    for visit in old:
        known.setdefault((visit.job, visit.phase), []).append(visit.turn)
    joins = min((visit.turn for visit in old), default=0)
    made = []
    for plan in planned:
        turns = known.get((plan.job, plan.phase))
        made.append(Turn(plan.job, plan.phase, turns.pop(0) if turns else joins, plan.once))
    return made


#: the input of which each end of an order may come
_REPORTS: Final[dict[type, tuple[type, ...]]] = {
    f.OrderEnded: (i.OrderDone,),
    f.OrderFaulted: (i.OrderFailed, i.OrderNotBegun),
    f.OrderContactLost: (i.OrderLostContact, i.Start),
}
