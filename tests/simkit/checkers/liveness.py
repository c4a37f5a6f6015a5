"""What happens in the end: looked after now and then, and when the run is over."""

from typing import ClassVar, Final, NoReturn

from rollmuxd.core import inputs as i
from rollmuxd.core.ids import Millis, OrderId, SlotId
from simkit.checkers.records import Asked, Heeded, Member, Party, Records, Told

#: what any wait may take beside the work that it waits for: a look, a grace, a re-attachment, a node in quarantine
SLACK_MS: Final = 900_000
#: iterations of its own for which a job leaves its nodes to a promised one that is short of credit, at most
YIELDS: Final = 9


class Liveness(Records):
    """Promises that something happens in a bounded time, and who was heard of last when."""

    def sweep(self) -> None:
        """Look at who waits: called now and then, and at the end."""
        self.the_death_of_a_job_is_recorded_within_its_lease()
        for name, asked in self.slots.items():
            if asked.status == "queued":
                self.who_waits_has_his_turn(name, asked)
            elif asked.status in ("released", "taken"):
                self.what_is_given_back_becomes_clean(name, asked)
            elif asked.yield_by is not None:
                self.a_filler_gives_way_in_time(name, asked.yield_by)
        for name, told in self.orders.items():
            self.every_order_comes_to_an_end(name, told)

    def a_filler_gives_way_in_time(self, name: SlotId, due: Millis) -> None:
        """A filler that was asked back runs no longer than it said, but while the daemon is not there."""
        if self.now > max(due, self.started_at) + self.excused_ms:
            self._broken("a_filler_gives_way_in_time", f"slot {name} runs, and was due at {due}")

    def the_death_of_a_job_is_recorded_within_its_lease(self) -> None:
        """A session that was silent for more than its lease is not taken to live."""
        limit = self.now - self.config.lease_ms
        for session, at in self.heard.items():
            if at < limit:
                self._broken(
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
            self._broken(
                "who_waits_has_his_turn",
                f"slot {name} ({asked.job}, {asked.phase}) waits since {asked.queued_at}, with nothing in its way "
                f"since {since}; its group is {party.jobs}, and should take it within {self._bound_ms(party)} ms",
            )

    def _excused(self, name: SlotId, asked: Asked, member: Member) -> bool:
        stay = member.stays.get(asked.phase)
        if name in self.detached or member.status != "placed" or stay is None:
            return True
        for node in stay.nodes:
            if node in self.out or self.places[node].not_clean:
                return True
            for gpu in self.places[node].gpus:
                holder = self.held.get(gpu)
                if holder is not None and self.slots[holder].status == "taken":
                    return True
                whose = self.members.get(self.dirty_by.get(gpu, asked.job))
                if whose is None or whose.status not in ("placed", "paused"):
                    return True
        return False

    def _bound_ms(self, party: Party) -> Millis:
        """Every member once for each member, by the longest that each phase and each move was seen to take."""
        total = yields = 0
        for job in party.jobs:
            member = self.members[job]
            longest = {name: stay.longest_ms for name, stay in member.stays.items()}
            asked = self.slots.get(member.holding or "")
            if asked is not None and asked.granted_at:
                longest[asked.phase] = max(longest.get(asked.phase, 0), self.now - asked.granted_at)
            moves = max((spec.load_ms + spec.park_ms for spec in member.spec.states), default=0)
            gaps = sum(phase.gap_ms for phase in member.spec.phases)
            takes = sum(longest.values()) + gaps + len(longest) * (moves + member.order_ms)
            total, yields = total + takes, max(yields, YIELDS * takes)
        if party.dispatch != "credit":
            yields = 0
        return (len(party.jobs) + 1) * total + yields + SLACK_MS + self.excused_ms

    def what_is_given_back_becomes_clean(self, name: SlotId, asked: Asked) -> None:
        """A slot that has ended holds its GPUs no longer than their hosts are silent, or are seen with its bytes."""
        hosts = dict.fromkeys(self.places[node].host for node in self.members[asked.job].nodes)
        since = max([asked.since, self.started_at, *(self.trouble_at.get(host, 0) for host in hosts)])
        if self.now - since > SLACK_MS + self.excused_ms + self.members[asked.job].order_ms:
            self._broken(
                "what_is_given_back_becomes_clean", f"slot {name} of {asked.job} is {asked.status} since {since}"
            )

    def every_order_comes_to_an_end(self, name: OrderId, told: Told) -> None:
        """While its host is within reach an order is done, fails, or is looked after, in a bounded time."""
        member = self.members.get(told.job)
        longest = 0 if member is None else 3 * member.order_ms
        since = max(told.issued_at, self.started_at, self.trouble_at.get(self.places[told.node].host, 0))
        limit = SLACK_MS + self.excused_ms + longest + self._planned_move_ms(member)
        if self.now - since > limit:
            self._broken("every_order_comes_to_an_end", f"{name} ({told.kind} {told.key}) is open since {since}")

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
        for gpu, job in self.dirty_by.items():
            self._left("every_gpu_comes_back", f"{gpu} was not verified clean since {job} was there")
        for node, place in self.places.items():
            if place.group is not None:
                self._left("every_node_leaves_its_group", f"{node} is in group {place.group}")
        for host, (reserved, _) in self.ram.items():
            if reserved:
                self._left("every_node_leaves_its_group", f"{host} has {reserved} MB reserved")

    def _left(self, promise: str, what: str) -> NoReturn:
        self._broken(promise, f"{what}, {self.now} ms after the beginning and with nothing left to come")

    # ---- what is heard of sessions and of the daemon -----------------------------------------------------------------

    def _beat(self, given: i.Heartbeat) -> None:
        if given.session in self.heard:
            self.heard[given.session] = self.now

    def _opens(self, given: i.OpenSession) -> None:
        member = self.members.get(given.job)
        if member is not None and member.session in self.heard:  # it may be the same process again
            self.heard[member.session] = self.now

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

    # ---- what it listens for -----------------------------------------------------------------------------------------

    _inputs: ClassVar[Heeded] = {
        i.Heartbeat: _beat,
        i.OpenSession: _opens,
        i.Start: _starts,
        i.Stalled: _stalls,
    }
