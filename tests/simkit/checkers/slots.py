"""Who asks, who is granted, who gives back."""

from typing import Any, ClassVar, Final

from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.ids import Fence, GpuId, SlotId
from rollmuxd.core.model import Dispatch
from simkit.checkers.credit import Credit
from simkit.checkers.placements import Placements
from simkit.checkers.records import Asked, Heeded, Member, Stay, Turn
from simkit.checkers.turns import Turns

#: the slots that will never be granted any more, of which this many are remembered with the reason
NEVER_KEPT: Final = 2_000


class Slots(Placements, Turns, Credit):
    """Promises of grants, and what is heard of slots."""

    def who_may_not_be_granted_is_not(self, name: SlotId) -> Asked:
        """A withdrawn request, one of a lost session or of a job that has ended, is never granted."""
        asked = self.slots.get(name)
        if asked is None:
            why = self.never.get(name, "was never asked for")
            self._broken("who_may_not_be_granted_is_not", f"slot {name} {why}, and goes ahead")
        if asked.session not in self.heard:
            self._broken("who_may_not_be_granted_is_not", f"slot {name} goes ahead, and {asked.session} is no more")
        return asked

    def nobody_is_granted_who_is_not_there(self, name: SlotId, asked: Asked) -> None:
        """Nobody is granted anything who was silent for a whole lease."""
        silent = self.now - self.heard[asked.session]
        if silent > self.config.lease_ms:
            self._broken(
                "nobody_is_granted_who_is_not_there",
                f"slot {name} is granted to {asked.session}, silent for {silent} ms",
            )

    def a_request_that_nobody_attends_does_not_go_ahead(self, name: SlotId) -> None:
        """A detached request keeps its place, and is not granted meanwhile, nor ever after the re-attach time."""
        if name in self.detached:
            gone = self.now - self.detached[name]
            self._broken(
                "a_request_that_nobody_attends_does_not_go_ahead", f"slot {name}, detached {gone} ms ago, goes ahead"
            )

    def only_a_placed_job_goes_ahead(self, name: SlotId, member: Member) -> None:
        """Who waits for a placement, is paused, quarantined, lost or ended gets no GPU."""
        if member.status != "placed":
            self._broken("only_a_placed_job_goes_ahead", f"slot {name} goes ahead, and its job is {member.status}")

    def who_is_granted_finds_its_state_loaded(self, name: SlotId, asked: Asked, stay: Stay) -> None:
        """Every state of the phase was loaded, on all the GPUs that the slot holds, and not moved since."""
        for key, node in stay.keys:
            where = self.kept.get(key, "gone")
            if where == "loaded" and self.loaded_on[key] == asked.gpus:
                continue
            held = [gpu for gpu in self.places[node].gpus if gpu in asked.gpus]
            if held and where != "loaded":
                self._broken("who_is_granted_finds_its_state_loaded", f"slot {name} is granted, and {key} is {where}")
            if any(gpu not in self.loaded_on[key] for gpu in held):
                on = self.loaded_on[key]
                self._broken("who_is_granted_finds_its_state_loaded", f"slot {name} is granted, {key} is on {on}")

    def who_grows_finds_its_state_loaded(self, name: SlotId, more: tuple[GpuId, ...], stay: Stay) -> None:
        """Where its state was parked for others meanwhile, there is nothing to run on."""
        for key, node in stay.keys:
            where = self.kept.get(key, "gone")
            if where != "loaded" and not set(self.places[node].gpus).isdisjoint(more):
                self._broken("who_grows_finds_its_state_loaded", f"slot {name} grows to {more}, and {key} is {where}")

    def a_tail_takes_back_what_it_gave(self, name: SlotId, asked: Asked, gpus: tuple[GpuId, ...]) -> None:
        """All that its slot claimed, and nothing that it never had."""
        if asked.status == "tail" and set(gpus) != set(asked.claimed):
            self._broken("a_tail_takes_back_what_it_gave", f"slot {name} claimed {asked.claimed}, and grows to {gpus}")

    def who_runs_on_a_part_grows_within_its_phase(self, name: SlotId, asked: Asked, gpus: tuple[GpuId, ...]) -> None:
        """It keeps what it has, and gets no GPU of a node that its phase is not on."""
        stay = self.members[asked.job].stays[asked.phase]
        if not set(asked.gpus) < set(gpus) or not set(gpus) <= set(stay.gpus):
            self._broken(
                "who_runs_on_a_part_grows_within_its_phase",
                f"slot {name} of {asked.gpus} grows to {gpus}, and its phase is on {stay.gpus}",
            )

    def fences_only_grow(self, name: SlotId, fence: Fence) -> None:
        """One for each grant, each greater than every one before."""
        if fence <= self.fence:
            self._broken("fences_only_grow", f"slot {name} gets {fence} after {self.fence}")
        self.fence = fence

    def only_its_holder_releases_a_slot(self, name: SlotId, asked: Asked) -> None:
        """Under its present fence, by its own word."""
        given: Any = self.given
        kind = type(given)
        if (kind is not i.ReleaseSlot and kind is not i.ShrinkSlot) or (given.slot, given.fence) != (name, asked.fence):
            self._broken("only_its_holder_releases_a_slot", f"slot {name} under {asked.fence} is given back by {given}")

    # ---- what jobs say -----------------------------------------------------------------------------------------------

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

    # ---- what facts tell ---------------------------------------------------------------------------------------------

    def _queued(self, fact: f.SlotQueued) -> None:
        member = self.who_has_ended_gets_nothing_more(fact.job, "asks", also=("quarantined",))
        self.a_job_holds_one_slot_and_waits_with_one(fact.job, member.queued)
        if fact.session not in self.heard or fact.session != member.session:
            self._broken("who_may_not_be_granted_is_not", f"{fact.session} asks for {fact.slot}, and is no more")
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
            party.schedule = [it for it in party.schedule if not (it.once and (it.job, it.phase) == mine)]
            party.on = None

    def _turn_added(self, fact: f.TurnAdded) -> None:
        party = self.groups[fact.group]
        rotation, index = min((it.rotation, at) for at, it in enumerate(party.schedule) if it.job == fact.job)
        party.schedule.insert(index, Turn(fact.job, fact.phase, rotation, once=True))
        party.on = None

    def _skipped(self, fact: f.TurnSkipped) -> None:
        turn = self.groups[fact.group].schedule[fact.turn]
        self.nobody_is_passed_over_who_could_go(fact, turn)
        turn.rotation += 1

    def _may_claim(self, name: SlotId, gpus: tuple[GpuId, ...]) -> Asked:
        """What holds of every slot that claims GPUs."""
        asked = self.who_may_not_be_granted_is_not(name)
        member = self.members[asked.job]
        if asked.status != "queued":
            self._broken("who_may_not_be_granted_is_not", f"slot {name} is {asked.status}, and claims GPUs")
        if self.detached:
            self.a_request_that_nobody_attends_does_not_go_ahead(name)
        self.only_a_placed_job_goes_ahead(name, member)
        self.a_job_holds_one_slot_and_waits_with_one(asked.job, member.holding)
        self.a_slot_holds_what_its_phase_claims(name, member.stays[asked.phase], gpus)
        self.a_gpu_is_held_by_one_slot(name, gpus)
        self.a_gpu_is_given_on_only_when_verified_clean(name, asked.job, gpus)
        return asked

    def _asked_back(self, fact: f.YieldAsked) -> None:
        self.slots[fact.slot].yield_by = fact.due

    def a_loan_ends_when_nothing_is_left(self, fact: f.LoanEnded) -> None:
        """No byte of the filler is on the node, and its slot is over."""
        for gpu in self.places[fact.node].gpus:
            if fact.slot in self.slots or self.dirty_by.get(gpu) == fact.job:
                self._broken("a_loan_ends_when_nothing_is_left", f"loan {fact.slot} is over, and {gpu} is not clean")

    def _claimed(self, fact: f.SlotClaimed) -> None:
        name, gpus = fact.slot, fact.gpus
        asked = self._may_claim(name, gpus)
        if fact.turn is None:  # a filler claims its node
            self._hold(name, asked, gpus)
            return
        job = asked.job
        member = self.members[job]
        stay = member.stays[asked.phase]
        assert member.group is not None
        party = self.groups[member.group]
        turn = party.schedule[fact.turn]
        if (turn.job, turn.phase) != (job, asked.phase):
            self._broken("turns_come_in_the_order_of_the_schedule", f"slot {name} takes {turn.job}'s {turn.phase}")
        if party.dispatch is Dispatch.SCHEDULE:
            self.turns_come_in_the_order_of_the_schedule(name, party, fact.turn, stay)
        elif party.dispatch is Dispatch.READY:
            self.first_come_first_served(name, asked, party, stay)
        else:
            self.who_is_least_ahead_goes_first(name, asked, party, stay)
        if turn.once:
            del party.schedule[fact.turn]
            party.on = None
        else:
            turn.rotation += 1
        self._hold(name, asked, gpus)

    def _hold(self, name: SlotId, asked: Asked, gpus: tuple[GpuId, ...]) -> None:
        member = self.members[asked.job]
        asked.status, asked.gpus, asked.claimed = "loading", gpus, gpus
        member.queued, member.holding = None, name
        self.held.update(dict.fromkeys(gpus, name))
        self.dirty_by.update(dict.fromkeys(gpus, asked.job))
        self._touch(member.stays[asked.phase], gpus)

    def _granted(self, fact: f.SlotGranted) -> None:
        name = fact.slot
        asked = self.who_may_not_be_granted_is_not(name)
        member = self.members[asked.job]
        if asked.status != "loading":
            self._broken("who_may_not_be_granted_is_not", f"slot {name} is {asked.status}, and is granted")
        if member.status in ("lost", "ended"):  # what is being loaded for others is theirs till the next boundary
            self.only_a_placed_job_goes_ahead(name, member)
        self.nobody_is_granted_who_is_not_there(name, asked)
        self.a_request_that_nobody_attends_does_not_go_ahead(name)
        self.fences_only_grow(name, fact.fence)
        self.who_is_granted_finds_its_state_loaded(name, asked, member.stays[asked.phase])
        asked.status, asked.fence, asked.granted_at = "running", fact.fence, fact.at

    def _resized(self, fact: f.SlotResized) -> None:
        if fact.tail:
            self._shrunk(fact)
        else:
            self._grown(fact)

    def _shrunk(self, fact: f.SlotResized) -> None:
        asked = self.slots[fact.slot]
        self.only_its_holder_releases_a_slot(fact.slot, asked)
        if not fact.gpus or any(gpu not in asked.gpus for gpu in fact.gpus):
            self._broken("a_gpu_is_held_by_one_slot", f"slot {fact.slot} of {asked.gpus} is to keep {fact.gpus}")
        freed = tuple(gpu for gpu in asked.gpus if gpu not in fact.gpus)
        for gpu in freed:
            del self.held[gpu]
        asked.status, asked.gpus = "tail", fact.gpus
        self._touch(self.members[asked.job].stays.get(asked.phase), freed)

    def _grown(self, fact: f.SlotResized) -> None:
        asked = self.slots[fact.slot]
        more = tuple(gpu for gpu in fact.gpus if gpu not in asked.gpus)
        self.a_tail_takes_back_what_it_gave(fact.slot, asked, fact.gpus)
        self.a_gpu_is_held_by_one_slot(fact.slot, more)
        self.a_gpu_is_given_on_only_when_verified_clean(fact.slot, asked.job, more)
        stay = self.members[asked.job].stays[asked.phase]
        if asked.status == "running":
            self.who_runs_on_a_part_grows_within_its_phase(fact.slot, asked, fact.gpus)
            self._touch(stay, more)
        else:
            self.who_grows_finds_its_state_loaded(fact.slot, more, stay)
        self.held.update(dict.fromkeys(more, fact.slot))
        self.dirty_by.update(dict.fromkeys(more, asked.job))
        asked.status, asked.gpus, asked.claimed = "running", fact.gpus, fact.gpus

    def _released(self, fact: f.SlotReleased) -> None:
        asked = self.slots[fact.slot]
        self.only_its_holder_releases_a_slot(fact.slot, asked)
        member = self.members[asked.job]
        member.holding = None
        stay = member.stays.get(asked.phase)
        if stay is not None:
            stay.longest_ms = max(stay.longest_ms, fact.at - asked.granted_at)
            for pool in stay.pools:
                for key in (key for key, _ in stay.keys if key.split("|")[1] == pool):
                    if self.kept.get(key) == "loaded":  # a part of a phase may have had a part of them
                        member.kept.used[key] = fact.at
        asked.status, asked.since = "released", fact.at

    def _taken(self, fact: f.SlotTakenAway) -> None:
        asked = self.slots[fact.slot]
        member = self.members[asked.job]
        if member.holding != fact.slot:
            self._broken("a_gpu_is_held_by_one_slot", f"{f.name(fact)} of {fact.slot}, which is {asked.status}")
        member.holding = None
        asked.status, asked.since = "taken", fact.at
        party = self.groups.get(member.group or "")
        if party is not None:
            party.disturbed_at = fact.at

    def _over(self, fact: f.SlotOver) -> None:
        asked = self.slots.pop(fact.slot)
        if asked.status == "taken":
            self.what_was_taken_away_is_held_until_verified_clean(fact.slot, asked)
        elif asked.status != "released":
            self._broken("only_its_holder_releases_a_slot", f"slot {fact.slot} is {asked.status}, and is over")
        held = self.held
        for gpu in asked.gpus:
            del held[gpu]
        member = self.members.get(asked.job)
        if member is not None:
            self._touch(member.stays.get(asked.phase), asked.gpus)

    # ---- what it listens for -----------------------------------------------------------------------------------------

    _inputs: ClassVar[Heeded] = {
        i.RequestSlot: _asks,
        i.DetachSlot: _detaches,
    }
    _facts: ClassVar[Heeded] = {
        f.SlotQueued: _queued,
        f.SlotWithdrawn: _withdrawn,
        f.TurnAdded: _turn_added,
        f.TurnSkipped: _skipped,
        f.SlotClaimed: _claimed,
        f.YieldAsked: _asked_back,
        f.LoanEnded: a_loan_ends_when_nothing_is_left,
        f.SlotGranted: _granted,
        f.SlotResized: _resized,
        f.SlotReleased: _released,
        f.SlotTakenAway: _taken,
        f.SlotOver: _over,
    }
