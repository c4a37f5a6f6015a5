"""What followers of the facts get: each fact, with what it is about, as the state had it when the fact was decided.

A fact may name a slot, a session or an order only. The state forgets an order with the fact that ends it, and a slot
soon after its end.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from rollmuxd.core.facts import Fact
from rollmuxd.core.ids import JobId, OrderId
from rollmuxd.core.inputs import Input, Start
from rollmuxd.core.model import Job, Order, Slot
from rollmuxd.core.state import State


class Entry(NamedTuple):
    """A fact of the journal. Slot and job are the state's own: they change with later facts."""

    seq: int
    fact: Fact
    job: Job | None
    slot: Slot | None
    #: as it was before the decision, if it was there then
    order: Order | None


def job_of(fact: Fact, state: State) -> JobId:
    """The job that a fact is about, by what the state knows of what it names; empty: of none that it knows."""
    if job := getattr(fact, "job", None):
        return str(job)
    for name, things in (("slot", state.slots), ("session", state.sessions), ("order", state.orders)):
        if (found := things.get(getattr(fact, name, None) or "")) is not None:
            return found.job
    return ""


def orders_before(state: State, given: Input) -> dict[OrderId, Order]:
    """The orders that an input may end, as they are before it: the one that it names; of a start, all."""
    names = tuple(state.orders) if isinstance(given, Start) else (getattr(given, "order", ""),)
    return {name: replace(state.orders[name]) for name in names if name in state.orders}


def entries(state: State, facts: Iterable[tuple[int, Fact]], before: Mapping[OrderId, Order]) -> list[Entry]:
    """Facts of one decision, which this state has seen; ``before``: of :func:`orders_before`."""
    return [_entry(state, seq, fact, before) for seq, fact in facts]


def _entry(state: State, seq: int, fact: Fact, before: Mapping[OrderId, Order]) -> Entry:
    name = getattr(fact, "order", None)
    order = None if name is None else before.get(name) or state.orders.get(name)
    slot = state.slots.get(getattr(fact, "slot", None) or (order.slot if order is not None else None) or "")
    job = order.job if order is not None else job_of(fact, state)
    return Entry(seq, fact, state.jobs.get(job), slot, order)
