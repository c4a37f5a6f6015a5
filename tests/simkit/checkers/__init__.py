"""The checker: it hears every input and every decision, trusts neither, and says which promise is broken.

The promises are those of DESIGN section 12. Each is a method here that is named by its sentence. A broken promise
raises that sentence, and what happened, as a :class:`~rollmuxd.core.errors.BrokenInvariant`. The checker keeps books of
its own from inputs (what clients and backends report) and from facts and effects (what the scheduler decides). It never
reads the scheduler's state, so it also finds a fact that the state's own code misunderstands.

What it costs grows with what changes, not with what there is. Promises that something happens *in the end* are checked
every :data:`SWEEP_EVERY` inputs, and by :meth:`Checker.end`.

There is a module for each kind of promise, and :mod:`~simkit.checkers.records` has what they all write down.
"""

from typing import Final

from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.decision import Decision
from rollmuxd.core.ids import Millis
from rollmuxd.core.state import State
from rollmuxd.sim.world import Listener
from simkit.checkers.liveness import Liveness
from simkit.checkers.moves import Moving
from simkit.checkers.orders import Orders
from simkit.checkers.records import SWEEP_EVERY, Asked
from simkit.checkers.slots import Slots

__all__ = ["OF_NO_CONSEQUENCE", "SWEEP_EVERY", "Asked", "Checker"]

#: facts that no promise depends on
OF_NO_CONSEQUENCE: Final = frozenset(
    {
        "Audited",
        "HostRemoved",
        "LoopStalled",
        "ProcessLaunched",
        "ProcessStarted",
        "SlotOverran",
    }
)


class Checker(Slots, Moving, Orders, Liveness, Listener):
    """See the module's head. ``cap``: how many members a group has at most, by the policy; None: not limited.

    ``config`` has the numbers that are promised: leases, re-attachment, tolerance. ``excused_ms`` is how long hosts,
    memories and drivers may be out of order, beside what they say of themselves, before something is late.
    """

    def hear(self, now: Millis, given: i.Input, decision: Decision, state: State | None = None) -> None:
        """One input and what came of it. Raises BrokenInvariant for the first promise that is broken."""
        if now < self.now:
            self._broken("no_fact_goes_back_in_time", f"an input of {now} ms comes after one of {self.now} ms")
        self.now, self.given = now, given
        note = self._inputs.get(type(given))
        if note is not None:
            note(self, given)
        heard, booked = self._facts, self._booked
        for fact in decision.facts:
            kind = type(fact)
            if fact.at != now and kind is not f.Audited:  # that one is of wall time
                self.no_fact_goes_back_in_time(fact)
            if kind in heard:
                heard[kind](self, fact)
            if kind in booked:
                booked[kind](self, fact)
        if decision.effects or self.untold:
            self.every_order_is_told_once(decision.effects)
        if self.closed:
            self.closed.clear()
        if type(given) is i.OrderDone and given.order in self.orders:
            self._broken("every_order_ends_once", f"order {given.order} is reported done, and is still open")
        self._until_sweep -= 1
        if not self._until_sweep:
            self._until_sweep = SWEEP_EVERY
            self.sweep()

    def no_fact_goes_back_in_time(self, fact: f.Fact) -> None:
        """Every fact bears the time of its decision."""
        if fact.at != self.now:
            self._broken("no_fact_goes_back_in_time", f"{f.name(fact)} at {fact.at} ms was decided at {self.now} ms")
