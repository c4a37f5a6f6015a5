"""Where a job is, where it is to go, and what it has left behind."""

from typing import ClassVar

from rollmuxd.core import facts as f
from rollmuxd.core.config import Moves
from rollmuxd.core.ids import JobId, NodeId
from rollmuxd.core.model import PlannedTurn
from rollmuxd.core.spec import Movable
from simkit.checkers.placements import Placements, merged
from simkit.checkers.records import Going, Heeded, Member, Party, Stay, Turn


class Moving(Placements):
    """Promises of moves, and what is heard of them."""

    def moves_keep_to_their_limits(self, fact: f.MovePlanned, member: Member) -> None:
        """Only who allows it is moved, not again too soon unless for its promise, and in each group one at a time."""
        config, kept = self.config, member.kept
        why = ""
        if member.spec.movable is Movable.NO or config.moves is Moves.OFF:
            why = "it is not to be moved"
        elif member.status != "placed" or kept.going is not None:
            why = f"it is {member.status}, and goes to {kept.going}"
        elif (
            fact.why.code != "earns_alone"
            and kept.moved_at is not None
            and fact.at < kept.moved_at + config.move_interval_ms
        ):
            why = f"it was moved at {kept.moved_at}"
        under_way = {name: other for name, other in self.members.items() if other.kept.going is not None}
        for name, other in under_way.items():
            assert other.kept.going is not None
            if {other.group, other.kept.going.group} & {member.group, fact.group}:
                why = why or f"{name} is moving there"
        if len(under_way) >= config.max_concurrent_moves:
            why = why or f"{len(under_way)} jobs are moving"
        if why:
            self._broken("moves_keep_to_their_limits", f"{fact.job} is to move, and {why}")

    def a_job_moves_between_two_iterations(self, job: JobId, member: Member) -> None:
        """It holds no slot, nor GPUs of one that has ended, and asks for nothing but its first phase.

        Or for what it does not get where it is, as a node of it is drained: then it goes from the midst of one.
        """
        if member.kept.going is None:
            self._broken("a_job_moves_between_two_iterations", f"{job} begins to move, and nothing was planned")
        holds = [name for name, asked in self.slots.items() if asked.job == job and asked.status != "queued"]
        asked = self.slots.get(member.queued or "")
        asks = asked is not None and asked.phase != member.spec.phases[0].name
        if asked is not None and asks:
            asks = not any("drain" in self.out.get(node, "") for node in member.stays[asked.phase].nodes)
        if holds or asks:
            self._broken(
                "a_job_moves_between_two_iterations", f"{job} begins to move, has {holds} and asks for {asked}"
            )

    def a_move_that_is_planned_can_be_made(self, fact: f.MoveAbandoned, member: Member, going: Going) -> None:
        """One that is void from the beginning is planned again, and again. (Once, its job may be lost just then.)"""
        member.kept.void = member.kept.void + 1 if going.upon is self.given else 0
        if member.kept.void > 1:
            self._broken("a_move_that_is_planned_can_be_made", f"{fact.job} abandons one at once again: {fact.reason}")

    def nothing_is_in_use_where_a_job_moves_away(self, job: JobId, member: Member, nodes: tuple[NodeId, ...]) -> None:
        """What it had loaded there is parked or gone; of a process that was ended nothing is left at all."""
        again = member.spec.movable is Movable.RELAUNCH
        for node in member.nodes if again else nodes:
            states = {key: self.kept.get(key, "gone") for key in self._keys_on(member, node)}
            held = [
                gpu
                for gpu in self.places[node].gpus
                if self.held.get(gpu) is not None and self.slots[self.held[gpu]].job == job
            ]
            dirty = [gpu for gpu in self.places[node].gpus if again and self.dirty_by.get(gpu) == job]
            if held or dirty or any(where != "gone" and (again or where != "parked") for where in states.values()):
                self._broken(
                    "nothing_is_in_use_where_a_job_moves_away", f"{job} leaves {node}: {states}, {held}, {dirty}"
                )

    def plans_are_made_anew_only_so_often(self, fact: f.TimesDrifted, member: Member) -> None:
        """For a placed job, whose phases take another time than was planned, and not again too soon."""
        config, kept = self.config, member.kept
        why = ""
        if member.status != "placed" or (fact.was and not config.drift):
            why = f"it is {member.status}"
        elif not fact.was:
            stated = {phase.name for phase in member.spec.timed if phase.planned_ms is not None}
            known = kept.moves_seen.intersection(fact.moves) or stated.intersection(fact.times)
            if known or not (fact.times or fact.moves):
                why = f"of its phases, and of its loads and parks {fact.moves}, those of {known} were in plans already"
        elif kept.drifted_at is not None and fact.at < kept.drifted_at + config.replan_every_ms:
            why = f"they were at {kept.drifted_at}"
        elif (
            not fact.moves
            and not fact.means
            and all(abs(took - fact.was[name]) <= config.drift * fact.was[name] for name, took in fact.times.items())
        ):
            why = f"none is off by more than {config.drift:g}"
        elif any(count < config.min_samples for count in fact.samples.values()):
            why = f"they are means of {fact.samples}"
        if why:
            self._broken("plans_are_made_anew_only_so_often", f"{fact.job} has times of {fact.times}, and {why}")

    def a_group_planned_anew_has_the_same_members(self, fact: f.GroupReplanned, party: Party) -> None:
        """A schedule in another order, or with more or fewer rounds; and only members' promises are at risk."""
        had = {(turn.job, turn.phase) for turn in party.schedule if not turn.once}
        has = {(turn.job, turn.phase) for turn in fact.schedule}
        if (fact.schedule and (had != has or party.coming)) or not set(fact.at_risk) <= set(party.jobs):
            self._broken(
                "a_group_planned_anew_has_the_same_members", f"{fact} is of {party.jobs}, and {party.coming} come"
            )

    # ---- what facts tell ---------------------------------------------------------------------------------------------

    def _planned(self, fact: f.MovePlanned) -> None:
        """The job counts in both places."""
        member = self.who_has_ended_gets_nothing_more(fact.job, "is to move")
        self.moves_keep_to_their_limits(fact, member)
        party = self._party(fact.group)
        nodes = tuple(dict.fromkeys(node for names in fact.pins.values() for node in names))
        for node in nodes:
            self.a_node_is_in_one_group(fact.group, node)
            place = self.places[node]
            place.group = fact.group
            place.users += node not in member.nodes
        self._reserve(fact.job, member, fact.pins)
        going = Going(fact.group, nodes, self._stays(fact.job, member, fact.pins), fact.at, self.given)
        going.counts = not fact.off
        member.kept.going = going
        if fact.group == member.group:
            going.schedule = fact.schedule
        else:
            party.coming[fact.job] = None
            self.a_group_has_no_more_members_than_the_cap(fact.group, party)
            party.schedule = merged(party.schedule, fact.schedule)
            party.on, party.dispatch = None, fact.dispatch

    def _began(self, fact: f.MoveBegan) -> None:
        """It is between two iterations."""
        member = self.members[fact.job]
        self.a_job_moves_between_two_iterations(fact.job, member)
        assert member.kept.going is not None
        member.kept.going.counts = True
        self._set(member, "moving")

    def _move_ended(self, fact: f.MoveEnded) -> None:
        """It sits in its new place, and nowhere else."""
        member = self.members[fact.job]
        going = member.kept.going
        if member.status != "moving" or going is None:
            self._broken("a_job_moves_between_two_iterations", f"{fact.job} has moved, and was {member.status}")
        gone = tuple(node for node in member.nodes if node not in going.nodes)
        self.nothing_is_in_use_where_a_job_moves_away(fact.job, member, gone)
        assert member.group is not None
        old, new = self.groups[member.group], self.groups[going.group]
        if going.schedule is None:
            old.schedule = [turn for turn in old.schedule if turn.job != fact.job]
            old.jobs.remove(fact.job)
            del new.coming[fact.job]
            new.jobs.append(fact.job)
        else:
            new.schedule = self._rewound(new.jobs, new.schedule, going.schedule)
        old.on = new.on = None
        old.disturbed_at = new.disturbed_at = fact.at
        self._leave(fact.job, member, gone)
        if not old.jobs and not old.coming:
            del self.groups[member.group]
        longest: dict[str, Stay] = member.stays
        for name, stay in going.stays.items():
            stay.longest_ms = max(stay.longest_ms, longest[name].longest_ms)
        for node in [node for node in member.kept.left if node in going.nodes]:
            del member.kept.left[node]
        member.group, member.nodes, member.stays = going.group, going.nodes, going.stays
        member.kept.going, member.kept.moved_at = None, fact.at
        if fact.run:
            member.run = self.runs[fact.job] = fact.run
        self._set(member, "placed")
        if member.queued is not None:
            self.slots[member.queued].since = self.now

    def _rewound(self, jobs: list[JobId], schedule: list[Turn], plan: tuple[PlannedTurn, ...]) -> list[Turn]:
        made = merged(schedule, tuple(turn for turn in plan if turn.job in jobs and not turn.once))
        for once in [turn for turn in schedule if turn.once]:
            rotation, index = min((turn.rotation, at) for at, turn in enumerate(made) if turn.job == once.job)
            once.rotation = rotation
            made.insert(index, once)
        return made

    def _abandoned(self, fact: f.MoveAbandoned) -> None:
        """It stays where it is."""
        member = self.members[fact.job]
        going = member.kept.going
        if going is None:
            self._broken("a_job_moves_between_two_iterations", f"{fact.job} abandons a move that was not planned")
        self.a_move_that_is_planned_can_be_made(fact, member, going)
        party = self.groups[going.group]
        if going.counts:
            member.kept.moved_at = fact.at
        member.kept.going = None
        self._leave(fact.job, member, tuple(node for node in going.nodes if node not in member.nodes))
        if going.schedule is None:
            del party.coming[fact.job]
            party.schedule = [turn for turn in party.schedule if turn.job != fact.job]
            party.on = None
            if not party.jobs and not party.coming:
                del self.groups[going.group]
        self._set(member, "placed")
        if member.queued is not None:
            self.slots[member.queued].since = self.now

    def _node_left(self, fact: f.NodeLeft) -> None:
        """Nothing of the job is left on a node that it moved away from."""
        member = self.members[fact.job]
        states = {key: self.kept.get(key, "gone") for key in self._keys_on(member, fact.node)}
        dirty = [gpu for gpu in self.places[fact.node].gpus if self.dirty_by.get(gpu) == fact.job]
        if dirty or any(where != "gone" for where in states.values()) or fact.node not in member.kept.left:
            self._broken("a_placement_ends_when_nothing_is_left", f"{fact.job} has left {fact.node}: {states}, {dirty}")
        for key in states:
            self._give_back(member, key)
        del member.kept.left[fact.node]
        self._forget_if_over(fact.job, member)

    def _drifted(self, fact: f.TimesDrifted) -> None:
        member = self.who_has_ended_gets_nothing_more(fact.job, "has other times")
        self.plans_are_made_anew_only_so_often(fact, member)
        member.kept.moves_seen.update(fact.moves)
        if fact.was:
            member.kept.drifted_at = fact.at

    def _replanned(self, fact: f.GroupReplanned) -> None:
        """Everybody stays on his nodes, in another order perhaps."""
        party = self.groups[fact.group]
        self.a_group_planned_anew_has_the_same_members(fact, party)
        if fact.schedule:
            party.schedule = self._rewound(party.jobs, party.schedule, fact.schedule)
            party.on, party.disturbed_at = None, fact.at

    # ---- what it listens for -----------------------------------------------------------------------------------------

    _facts: ClassVar[Heeded] = {
        f.MovePlanned: _planned,
        f.MoveBegan: _began,
        f.MoveEnded: _move_ended,
        f.MoveAbandoned: _abandoned,
        f.NodeLeft: _node_left,
        f.TimesDrifted: _drifted,
        f.GroupReplanned: _replanned,
    }
