"""Who sits where, and who is still there: jobs, sessions, groups, RAM."""

from typing import ClassVar

from rollmuxd.core import facts as f
from rollmuxd.core.ids import GroupId, HostId, JobId, NodeId, PoolName, SlotId
from rollmuxd.core.model import PlannedTurn
from rollmuxd.core.spec import JobSpec, PhaseSpec
from rollmuxd.core.state import state_key
from simkit.checkers.gpus import Gpus
from simkit.checkers.records import Heeded, Member, Party, Stay, Turn


class Placements(Gpus):
    """Promises of placements, and what is heard of jobs and their sessions."""

    def a_node_is_in_one_group(self, group: GroupId, node: NodeId) -> None:
        """And its jobs are that group's."""
        place = self.places[node]
        if place.group is not None and place.group != group:
            self._broken("a_node_is_in_one_group", f"{node} of group {place.group} is given to group {group}")

    def a_job_has_nodes_of_the_pools_that_it_wants(self, job: JobId, pool: PoolName, nodes: tuple[NodeId, ...]) -> None:
        """Whatever else these are used for."""
        wrong = [node for node in nodes if pool not in self.places[node].pools]
        if wrong:
            self._broken("a_job_has_nodes_of_the_pools_that_it_wants", f"{job} has {wrong} for pool {pool}")

    def parked_states_fit_their_hosts(self, job: JobId, host: HostId) -> None:
        """What is reserved for the states of placed jobs is within the budget of every host."""
        reserved, budget = self.ram[host]
        if reserved > budget:
            self._broken("parked_states_fit_their_hosts", f"with {job}, {host} reserves {reserved} of {budget} MB")

    def a_group_has_no_more_members_than_the_cap(self, group: GroupId, party: Party) -> None:
        """The policy's residency cap."""
        if self.cap is not None and len(party.jobs) + len(party.coming) > self.cap:
            members = [*party.jobs, *party.coming]
            self._broken("a_group_has_no_more_members_than_the_cap", f"group {group} has {members}")

    def who_has_ended_gets_nothing_more(self, job: JobId, what: str, *, also: tuple[str, ...] = ()) -> Member:
        """A job that is lost or ended neither asks, nor is placed, nor gets an order but to be cleared away."""
        member = self.members.get(job)
        if member is None or member.status in ("lost", "ended", *also):
            status = "unknown" if member is None else member.status
            self._broken("who_has_ended_gets_nothing_more", f"job {job} is {status}, and {what}")
        return member

    def who_has_ended_gets_nothing_more_but_its_end(self, job: JobId) -> Member:
        """A lost job ends; an ended one does not end again."""
        member = self.members.get(job)
        if member is None or member.status == "ended":
            self._broken("who_has_ended_gets_nothing_more", f"job {job} has ended, and ends again")
        return member

    def a_job_holds_one_slot_and_waits_with_one(self, job: JobId, *others: SlotId | None) -> None:
        """At most one slot between LOADING and TAIL, and at most one QUEUED."""
        for other in others:
            if other is not None:
                self._broken("a_job_holds_one_slot_and_waits_with_one", f"job {job} has slot {other} already")

    # ---- what facts tell of placements -------------------------------------------------------------------------------

    def _placed(self, fact: f.JobPlaced) -> None:
        member = self.who_has_ended_gets_nothing_more(fact.job, "is placed")
        if member.status != "waiting" or member.group is not None:
            self._broken("a_node_is_in_one_group", f"{fact.job} is {member.status} in {member.group}, and is placed")
        party = self._party(fact.group)
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
        self._reserve(fact.job, member, fact.pins)
        member.stays = self._stays(fact.job, member, fact.pins)
        party.schedule = merged(party.schedule, fact.schedule)
        party.on, party.dispatch = None, fact.dispatch
        self._set(member, "placed")
        if member.queued is not None:
            self.slots[member.queued].since = self.now

    def _filler_placed(self, fact: f.FillerPlaced) -> None:
        """It has a node of its pool, of which no RAM and no turn is its own."""
        member = self.who_has_ended_gets_nothing_more(fact.job, "is placed")
        if member.status != "waiting" or member.nodes or member.spec.filler is None:
            self._broken("a_node_is_in_one_group", f"{fact.job} is {member.status} on {member.nodes}, and is placed")
        self.a_job_has_nodes_of_the_pools_that_it_wants(fact.job, fact.pool, (fact.node,))
        member.nodes = (fact.node,)
        member.stays = self._stays(fact.job, member, {fact.pool: member.nodes})
        self._set(member, "placed")

    def _party(self, group: GroupId) -> Party:
        """The group; a new one where there is none."""
        return self.groups.setdefault(group, Party())

    def _stays(self, job: JobId, member: Member, pins: dict[PoolName, tuple[NodeId, ...]]) -> dict[str, Stay]:
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

    def _reserve(self, job: JobId, member: Member, pins: dict[PoolName, tuple[NodeId, ...]]) -> None:
        """RAM, and room for residual memory, are the job's on these nodes."""
        specs = {spec.pool: spec for spec in reversed(member.spec.states)}
        for pool, nodes in pins.items():
            spec = specs.get(pool)
            self.a_job_has_nodes_of_the_pools_that_it_wants(job, pool, nodes)
            for node in nodes if spec is not None else ():
                assert spec is not None
                key, place = state_key(job, pool, node), self.places[node]
                if key in member.kept.ram:
                    continue
                member.kept.ram[key] = (place.host, spec.ram_mb)
                self.ram[place.host][0] += spec.ram_mb
                if spec.residual_mb:
                    place.left[key] = spec.residual_mb
                self.parked_states_fit_their_hosts(job, place.host)

    @staticmethod
    def _keys_on(member: Member, node: NodeId) -> list[str]:
        """The states for which the job has RAM there."""
        return [key for key in member.kept.ram if key.endswith(f"|{node}")]

    def _give_back(self, member: Member, key: str) -> None:
        """The RAM of a state is nobody's any more."""
        host, mb = member.kept.ram.pop(key)
        self.ram[host][0] -= mb
        self.places[key.rpartition("|")[2]].left.pop(key, None)

    def _leave(self, job: JobId, member: Member, nodes: tuple[NodeId, ...]) -> None:
        """The job is not placed on these nodes any more; what it has parked there stays its own."""
        for node in nodes:
            place = self.places[node]
            place.users -= 1
            if not place.users:
                place.group = None
            for key in self._keys_on(member, node):
                if self.kept.get(key, "gone") == "gone":
                    self._give_back(member, key)
            if self._keys_on(member, node) or any(self.dirty_by.get(gpu) == job for gpu in place.gpus):
                member.kept.left[node] = None

    def _placement_ended(self, fact: f.PlacementEnded) -> None:
        member = self.members[fact.job]
        self.a_placement_ends_when_nothing_is_left(fact.job, member)
        self._leave_schedule(fact.job, member)
        if member.group is not None:  # a filler is in none
            party = self.groups[member.group]
            party.jobs.remove(fact.job)
            party.disturbed_at = self.now
            self._leave(fact.job, member, member.nodes)
            if not party.jobs and not party.coming:
                del self.groups[member.group]
        member.group, member.nodes, member.stays = None, (), {}
        self._forget_if_over(fact.job, member)

    def _forget_if_over(self, job: JobId, member: Member) -> None:
        """Of a job that has ended and has nothing left anywhere nothing more is to be said."""
        if (
            member.status == "ended"
            and member.group is None
            and not member.nodes
            and not member.holding
            and not member.kept.left
        ):
            del self.members[job]

    def _leave_schedule(self, job: JobId, member: Member) -> None:
        party = self.groups.get(member.group or "")
        if party is not None:
            party.schedule = [turn for turn in party.schedule if turn.job != job]
            party.on, party.disturbed_at = None, self.now

    # ---- what facts tell of jobs -------------------------------------------------------------------------------------

    def _registered(self, fact: f.JobRegistered) -> None:
        known = self.members.get(fact.job)
        if fact.run <= self.runs.get(fact.job, 0):
            self._broken("who_has_ended_gets_nothing_more", f"run {fact.run} of {fact.job} comes again")
        self.runs[fact.job] = fact.run
        if known is None:
            self.members[fact.job] = Member(fact.spec, fact.run, status_since=fact.at)
            return
        if known.status not in ("lost", "ended"):
            self._broken("who_has_ended_gets_nothing_more", f"{fact.job} is {known.status}, and registered again")
        known.spec, known.run, known.session = fact.spec, fact.run, None
        known.kept.moved_at, known.kept.seat, known.kept.used = None, {}, {}
        self._set(known, "waiting")

    def _set(self, member: Member, status: str) -> None:
        """From now on the job is that; its group's waits are counted anew."""
        member.status, member.status_since = status, self.now
        party = self.groups.get(member.group or "")
        if party is not None:
            party.disturbed_at = self.now

    def _unplaced(self, fact: f.JobUnplaced) -> None:
        member = self.who_has_ended_gets_nothing_more(fact.job, "is unplaced")
        if member.status == "paused":
            member.resume_to = "waiting"
        else:
            self._set(member, "waiting")
        self._leave_schedule(fact.job, member)

    def _paused(self, fact: f.JobPaused) -> None:
        member = self.who_has_ended_gets_nothing_more(fact.job, "is paused")
        member.resume_to = member.status
        self._set(member, "paused")

    def _resumed(self, fact: f.JobResumed) -> None:
        member = self.who_has_ended_gets_nothing_more(fact.job, "is resumed")
        self._set(member, member.resume_to)
        if member.queued is not None:
            self.slots[member.queued].since = self.now

    def _quarantined(self, fact: f.JobQuarantined) -> None:
        member = self.who_has_ended_gets_nothing_more(fact.job, "is quarantined")
        self._leave_schedule(fact.job, member)
        member.kept.used = {}
        member.resume_to = "waiting"
        self._set(member, "quarantined")

    def _lost(self, fact: f.JobLost) -> None:
        member = self.who_has_ended_gets_nothing_more(fact.job, "is lost")
        self.a_job_holds_one_slot_and_waits_with_one(fact.job, member.queued, member.holding)
        self._leave_schedule(fact.job, member)
        self._set(member, "lost")

    def _ended(self, fact: f.JobEnded) -> None:
        member = self.who_has_ended_gets_nothing_more_but_its_end(fact.job)
        self.a_job_holds_one_slot_and_waits_with_one(fact.job, member.queued, member.holding)
        self._leave_schedule(fact.job, member)
        self._set(member, "ended")
        self._forget_if_over(fact.job, member)

    # ---- what facts tell of sessions ---------------------------------------------------------------------------------

    def _session_opened(self, fact: f.SessionOpened) -> None:
        member = self.who_has_ended_gets_nothing_more(fact.job, f"session {fact.session} is opened")
        self.heard.pop(member.session or "", None)
        member.session = fact.session
        self.heard[fact.session] = fact.at

    def _session_over(self, fact: f.SessionClosed) -> None:
        self.heard.pop(fact.session, None)

    def _session_lost(self, fact: f.SessionLost) -> None:
        silent = fact.at - self.heard.pop(fact.session)
        if silent < self.config.lease_ms:
            self._broken(
                "the_death_of_a_job_is_recorded_within_its_lease",
                f"{fact.session} is lost after {silent} ms of silence",
            )

    # ---- what it listens for -----------------------------------------------------------------------------------------

    _facts: ClassVar[Heeded] = {
        f.JobRegistered: _registered,
        f.JobPlaced: _placed,
        f.FillerPlaced: _filler_placed,
        f.PlacementEnded: _placement_ended,
        f.JobUnplaced: _unplaced,
        f.JobPaused: _paused,
        f.JobResumed: _resumed,
        f.JobQuarantined: _quarantined,
        f.JobLost: _lost,
        f.JobEnded: _ended,
        f.SessionOpened: _session_opened,
        f.SessionLost: _session_lost,
        f.SessionClosed: _session_over,
    }


def _phases(spec: JobSpec) -> tuple[PhaseSpec, ...]:
    return (*spec.side, *spec.phases)


def merged(old: list[Turn], planned: tuple[PlannedTurn, ...]) -> list[Turn]:
    """A schedule into which a job has come: who was there stays in its rotation, a new job joins the present one."""
    known: dict[tuple[JobId, str], list[int]] = {}
    for turn in old:
        known.setdefault((turn.job, turn.phase), []).append(turn.rotation)
    joins = min((turn.rotation for turn in old), default=0)
    made = []
    for plan in planned:
        rotations = known.get((plan.job, plan.phase))
        made.append(Turn(plan.job, plan.phase, rotations.pop(0) if rotations else joins, plan.once))
    return made
