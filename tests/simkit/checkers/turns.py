"""Whose turn it is: the order of a group's wheel, or of its line."""

from rollmuxd.core import facts as f
from rollmuxd.core.ids import NodeId, SlotId
from simkit.checkers.books import Asked, Books, Party, Stay, Turn


class Turns(Books):
    """Promises of order."""

    def visits_come_in_the_order_of_the_wheel(self, name: SlotId, party: Party, visit: int, stay: Stay) -> None:
        """On each node, of the visits that claim it none comes before one that is still to come this turn."""
        wheel = party.schedule
        turn = wheel[visit].turn
        on = party.on
        if on is None:
            on = party.on = self._project(party)
        for node in stay.nodes:
            for other in on[node]:
                at = wheel[other].turn
                if at < turn or (at == turn and other < visit):
                    before = wheel[other]
                    self._broken(
                        "visits_come_in_the_order_of_the_wheel",
                        f"slot {name} goes ahead on {node} before {before.job}'s {before.phase}, which is next",
                    )

    def _project(self, party: Party) -> dict[NodeId, list[int]]:
        on: dict[NodeId, list[int]] = {}
        for index, visit in enumerate(party.schedule):
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
                self._broken("first_come_first_served", f"slot {name} overtakes slot {other}, which came before")

    def nobody_is_passed_over_who_could_go(self, fact: f.TurnSkipped, visit: Turn) -> None:
        """A visit is skipped whose job is away: not while it is busy with an earlier phase, or asks for this one."""
        member = self.members[visit.job]
        if member.status != "placed" or member.group != fact.group:  # it is still to come
            return
        if member.holding is not None and member.queued is None:
            self._broken(
                "nobody_is_passed_over_who_could_go", f"{visit.job} is in slot {member.holding}, and is skipped"
            )
        if member.queued is None or member.queued in self.detached or self.slots[member.queued].phase != visit.phase:
            return
        if not any(node in self.out for node in member.stays[visit.phase].nodes):
            self._broken("nobody_is_passed_over_who_could_go", f"{visit.job} asks for {visit.phase}, and is skipped")
