"""What followers of the facts get: each fact, with what it is about, as the state had it when the fact was decided.

A fact may name a slot, a session or an order only. The state forgets an order with the fact that ends it, and a slot
soon after its end.
"""

from collections.abc import Iterable
from typing import NamedTuple

from rollmuxd.core.facts import Fact
from rollmuxd.core.model import Job, Order, Slot
from rollmuxd.core.state import State


class Entry(NamedTuple):
    """A fact of the journal. Slot and job are the state's own: they change with later facts."""

    seq: int
    fact: Fact
    job: Job | None
    slot: Slot | None
    #: of the fact that ends an order: as the order was before
    order: Order | None


def entries(state: State, facts: Iterable[tuple[int, Fact]], ended: Order | None = None) -> list[Entry]:
    """Facts of one decision, which this state has seen; ``ended``: the order that they may end, as it was before."""
    return [_entry(state, seq, fact, ended) for seq, fact in facts]


def _entry(state: State, seq: int, fact: Fact, ended: Order | None) -> Entry:
    name = getattr(fact, "order", None)
    order = None if name is None else ended if ended is not None and ended.id == name else state.orders.get(name)
    slot = state.slots.get(getattr(fact, "slot", None) or (order.slot if order is not None else None) or "")
    of = slot or order or state.sessions.get(getattr(fact, "session", None) or "")
    job = state.jobs.get(getattr(fact, "job", None) or (of.job if of is not None else ""))
    return Entry(seq, fact, job, slot, order)
