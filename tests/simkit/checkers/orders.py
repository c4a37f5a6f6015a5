"""What drivers are told, and where each state is."""

from typing import Any, ClassVar, Final

from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.config import Config
from rollmuxd.core.effects import Effect, Kill, Perform, Probe
from rollmuxd.core.ids import LaunchId, Millis, OrderId
from rollmuxd.core.model import OrderKind, StateStatus
from rollmuxd.core.state import state_key
from simkit.checkers.placements import Placements
from simkit.checkers.records import Heeded, Member, Told

#: of a job of which the process may be ended
_PROCESS_GOES: Final = ("lost", "ended", "moving", "quarantined")
#: the input of which each end of an order may come
_REPORTS: Final[dict[type, tuple[type, ...]]] = {
    f.OrderEnded: (i.OrderDone,),
    f.OrderFaulted: (i.OrderFailed, i.OrderNotBegun),
    f.OrderContactLost: (i.OrderLostContact, i.Start),
}


class Orders(Placements):
    """Promises of orders, and what is heard of them and of states."""

    def __init__(self, config: Config, *, cap: int | None = None, excused_ms: Millis = 0) -> None:
        super().__init__(config, cap=cap, excused_ms=excused_ms)
        #: processes that make way for others of their jobs
        self.over: dict[LaunchId, None] = {}

    def every_order_is_told_once(self, effects: tuple[Effect, ...]) -> None:
        """In the decision that issues it; again only after a restart. Only open orders are told or asked about."""
        told_again = type(self.given) in (i.Start, i.OrderNotBegun)
        for effect in effects:
            if type(effect) is Perform:
                order = effect.order
                if order not in self.orders:
                    self._broken("every_order_is_told_once", f"order {order} is told, and is not open")
                if effect.again != (order not in self.untold) or (effect.again and not told_again):
                    self._broken("every_order_is_told_once", f"order {order} is told twice")
                self.untold.pop(order, None)
            elif isinstance(effect, Probe):
                if effect.order not in self.orders and effect.order not in self.closed:
                    self._broken("every_order_is_told_once", f"{effect.order} is asked about, and is not open")
            elif isinstance(effect, Kill):
                member = self.members.get(effect.job)
                lives = member is not None and member.run == effect.run and member.status not in _PROCESS_GOES
                if lives and effect.launch not in self.over:
                    self._broken("every_order_is_told_once", f"{effect.job} is to be killed, and was not lost")
        if self.untold:
            self._broken("every_order_is_told_once", f"{next(iter(self.untold))} is issued, and nobody is told")

    def every_order_ends_once(self, fact: f.OrderEnded | f.OrderFaulted | f.OrderContactLost) -> Told:
        """By its own report; one of which nobody knows is still open, and ends by a late word or by what is seen."""
        told = self.orders.get(fact.order)
        given: Any = self.given
        if told is None:
            self._broken("every_order_ends_once", f"order {fact.order} is not open, and there is {f.name(fact)}")
        reports = _REPORTS[type(fact)]
        if type(given) not in reports or (type(given) is not i.Start and given.order != fact.order):
            self._broken("every_order_ends_once", f"{f.name(fact)} of {fact.order} came of {given}")
        return told

    def nobody_moves_a_state_in_use(self, fact: f.OrderIssued, key: str, member: Member) -> None:
        """One order at a time for each state; a load only for the slot at hand, and onto GPUs that it holds, or ahead
        of it onto GPUs that no slot holds and nothing else is on; a park never under a running slot.
        """
        if key in self.order_of:
            self._broken("nobody_moves_a_state_in_use", f"{key} is to {fact.kind}, and {self.order_of[key]} is open")
        slot = self.slots.get(member.holding or "")
        if fact.kind is OrderKind.LOAD and fact.slot is None:
            gpus = self.places[fact.node].gpus
            if not self.held.keys().isdisjoint(gpus) or {self.dirty_by.get(gpu, fact.job) for gpu in gpus} != {
                fact.job
            }:
                self._broken("nobody_moves_a_state_in_use", f"{key} is to load ahead, and {fact.node} is not free")
        elif fact.kind is OrderKind.LOAD:
            if slot is None or member.holding != fact.slot or slot.status != ("running" if fact.gpus else "loading"):
                self._broken("nobody_moves_a_state_in_use", f"{key} is to load, and no slot of {fact.job} is loading")
            strange = [gpu for gpu in fact.gpus if self.held.get(gpu) != fact.slot]
            if strange:
                self._broken("nobody_moves_a_state_in_use", f"{key} is to load onto {strange}, which no slot of it has")
        elif slot is not None and fact.pool in member.stays[slot.phase].pools:
            if any(self.held.get(gpu) == member.holding for gpu in self.places[fact.node].gpus):
                self._broken("nobody_moves_a_state_in_use", f"{key} is to {fact.kind} under slot {member.holding}")

    def what_a_job_still_needs_is_not_dropped(self, key: str, member: Member) -> None:
        """While a job has its place, what its last slot left of a state is somewhere: it may be moved, not dropped."""
        used = member.kept.used
        if member.status not in ("placed", "moving") or key not in used or key in member.kept.gone_on:
            return
        others = {member.kept.seat[it] for it in self._there(member, key) if it != key}
        if len(others) < len(self._here(member, key)):  # else it has fewer nodes now than parts
            self._broken("what_a_job_still_needs_is_not_dropped", f"{key} is to be dropped, and is nowhere else")

    def what_is_loaded_is_what_was_left(self, order: OrderId, key: str, source: str | None, member: Member) -> None:
        """As the last slot left it, wherever that was; and not what a node has, or nothing, while a part is left."""
        used, seat = member.kept.used, member.kept.seat
        there, here = self._there(member, key), self._here(member, key)
        if source is not None:
            newer = [it for it in self._copies(member, source) if it in used and used[it] > used.get(source, -1)]
            if newer:
                self._broken("what_is_loaded_is_what_was_left", f"{order} loads {source}, and {newer} is newer")
        seated = {seat[it] for it in there if it in here and it != key}
        if source is not None and seat.get(source, source) not in seated:
            return
        left = {seat[it] for it in there if it in used} - seated
        if len(left) > len(here.difference(there, (key,))):
            self._broken("what_is_loaded_is_what_was_left", f"{order} loads {source} on {key}, and {left} is left over")

    def _here(self, member: Member, key: str) -> set[str]:
        """The states of the same pool on the nodes where the job sits."""
        pool = key.split("|")[1]
        return {it for stay in member.stays.values() for it, _ in stay.keys if it.split("|")[1] == pool}

    def _there(self, member: Member, key: str) -> list[str]:
        """What there is of the states of the same pool, anywhere."""
        pool = key.split("|")[1]
        out = ("gone", "discarding", "unknown")
        return [it for it in member.kept.seat if it.split("|")[1] == pool and self.kept.get(it, "gone") not in out]

    def _copies(self, member: Member, key: str) -> list[str]:
        """Those that are the same part of what the job has, beside this one."""
        seat = member.kept.seat
        part = seat.get(key, key)
        return [other for other in self._there(member, key) if other != key and seat[other] == part]

    def a_state_is_fetched_from_where_it_is_parked(self, fact: f.OrderIssued) -> None:
        """A load that says from where finds it there, and its driver can have it from there."""
        source = fact.source or ""
        where = self.kept.get(state_key(fact.job, fact.pool, source), "gone")
        if where == "parked" and self.places[source].host != self.places[fact.node].host:
            where = "parked" if self.config.drivers[fact.driver].copies else "out of its driver's reach"
        if where != "parked":
            self._broken(
                "a_state_is_fetched_from_where_it_is_parked",
                f"{fact.order} fetches the {fact.pool} state of {fact.job} from {fact.source}, where it is {where}",
            )

    # ---- what facts tell ---------------------------------------------------------------------------------------------

    def _issued(self, fact: f.OrderIssued) -> None:
        job, node, kind = fact.job, fact.node, fact.kind
        key = f"{job}|{fact.pool}|{node}"
        member = self.members[job]
        if kind is not OrderKind.DISCARD and member.status in ("lost", "ended") and kind is OrderKind.LOAD:
            self.who_has_ended_gets_nothing_more(job, f"its {fact.pool} state is to {kind}")
        self.nobody_moves_a_state_in_use(fact, key, member)
        if fact.source is not None:
            self.a_state_is_fetched_from_where_it_is_parked(fact)
            self.fetched[fact.order] = state_key(job, fact.pool, fact.source)
        if kind is OrderKind.LOAD:
            source = self.fetched.get(fact.order, key if key in self.kept else None)
            self.what_is_loaded_is_what_was_left(fact.order, key, source, member)
            if source is None:
                member.kept.used.pop(key, None)
            member.kept.gone_on.pop(key, None)
            member.kept.seat[key] = f"{key} by {fact.order}" if source is None else member.kept.seat.get(source, source)
        if kind is OrderKind.DISCARD:
            self.what_a_job_still_needs_is_not_dropped(key, member)
        self.orders[fact.order] = Told(kind, key, job, fact.run, node, fact.at, fact.slot)
        self.order_of[key] = fact.order
        self.untold[fact.order] = None
        if kind is OrderKind.LOAD:
            self.kept[key] = "loading"
            place = self.places[node]
            self.loaded_on[key] = place.gpus if fact.slot is None else self.slots[fact.slot].gpus
            if fact.slot is None:
                self.dirty_by.update(dict.fromkeys(place.gpus, job))
                place.touched_at = self.now
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
        source = self.fetched.pop(fact.order, None)
        if source is not None and member is not None and source in member.kept.used:
            member.kept.used[key] = member.kept.used[source]
            member.kept.gone_on[source] = None  # a process may have it in one place only
        if self.kept.get(key) == "unknown":
            return  # a late word: StateObserved says what it means
        if told.kind is OrderKind.LOAD:
            self.kept[key] = "loaded"
        elif told.kind is OrderKind.PARK:
            self.kept[key] = "parked"
        else:
            self.kept.pop(key, None)
            self.loaded_on.pop(key, None)
        place = self.places[told.node]
        if told.job in map(self.dirty_by.get, place.gpus):
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
            self._broken("every_order_ends_once", f"contact with order {fact.order} is lost twice")
        told.lost = True
        if self.order_of.get(told.key) == fact.order:
            self.kept[told.key] = "unknown"

    def _state_unknown(self, fact: f.StateUnknown) -> None:
        self.kept[state_key(fact.job, fact.pool, fact.node)] = "unknown"

    def _state_observed(self, fact: f.StateObserved) -> None:
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

    def _process_over(self, fact: f.ProcessOver) -> None:
        self.over[fact.launch] = None

    # ---- what it listens for -----------------------------------------------------------------------------------------

    _facts: ClassVar[Heeded] = {
        f.ProcessOver: _process_over,
        f.OrderIssued: _issued,
        f.OrderEnded: _order_ended,
        f.OrderFaulted: _order_faulted,
        f.OrderContactLost: _contact_lost,
        f.StateUnknown: _state_unknown,
        f.StateObserved: _state_observed,
    }
