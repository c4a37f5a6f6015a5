"""Whose turn it is: the order of a group's schedule, or of its line."""

from rollmuxd.core import facts as f
from rollmuxd.core.ids import NodeId, SlotId
from simkit.checkers.records import Asked, Party, Records, Stay, Turn


class Turns(Records):
    """Promises of order."""

    def turns_come_in_the_order_of_the_schedule(self, name: SlotId, party: Party, turn: int, stay: Stay) -> None:
        """On each node, of the turns that claim it none comes before one that is still to come this rotation."""
        schedule = party.schedule
        rotation = schedule[turn].rotation
        on = party.on
        if on is None:
            on = party.on = self._project(party)
        for node in stay.nodes:
            for other in on[node]:
                at = schedule[other].rotation
                if at < rotation or (at == rotation and other < turn):
                    before = schedule[other]
                    self._broken(
                        "turns_come_in_the_order_of_the_schedule",
                        f"slot {name} goes ahead on {node} before {before.job}'s {before.phase}, which is next",
                    )

    def _project(self, party: Party) -> dict[NodeId, list[int]]:
        on: dict[NodeId, list[int]] = {}
        for index, turn in enumerate(party.schedule):
            member = self.members[turn.job]
            going = member.kept.going
            stays = going.stays if going is not None and turn.job in party.coming else member.stays
            for node in stays[turn.phase].nodes:
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
                self._broken("first_come_first_served", f"slot {name} overtakes slot {other}, which came before")

    def nobody_is_passed_over_who_could_go(self, fact: f.TurnSkipped, turn: Turn) -> None:
        """A turn is skipped whose job is away: not while it is busy with an earlier phase, or asks for this one."""
        member = self.members[turn.job]
        if member.status != "placed" or member.group != fact.group:  # it is still to come
            return
        if member.holding is not None and member.queued is None:
            self._broken(
                "nobody_is_passed_over_who_could_go", f"{turn.job} is in slot {member.holding}, and is skipped"
            )
        if member.queued is None or member.queued in self.detached or self.slots[member.queued].phase != turn.phase:
            return
        if not any(node in self.out for node in member.stays[turn.phase].nodes):
            self._broken("nobody_is_passed_over_who_could_go", f"{turn.job} asks for {turn.phase}, and is skipped")
