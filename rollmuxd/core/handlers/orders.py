"""What became of orders: a load, park or discard that was done, was not, or of which there is no word."""

from collections.abc import Sequence
from typing import Final

from rollmuxd.core import effects as e
from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.causes import Cause
from rollmuxd.core.context import NOTHING, Context
from rollmuxd.core.decision import Answer
from rollmuxd.core.model import Job, Order, OrderKind, OrderStatus, SlotStatus, StateStatus
from rollmuxd.core.steps.dispatch import issue
from rollmuxd.core.steps.launch import kill
from rollmuxd.core.steps.observe import expect_clean, gpus_observed
from rollmuxd.core.steps.reclaim import park_own, quarantine, take_away
from rollmuxd.core.steps.residual_memory import record_residual

#: an order that was open at this many crashes of the daemon is not sent again: the daemon may crash because of it
CRASHES_TO_SUSPECT: Final = 3


def order_reported(c: Context, told: i.OrderDone | i.OrderFailed | i.OrderNotBegun | i.OrderLostContact) -> Answer:
    """What became of an order. It has one result: a late or doubled report of one that had it changes nothing."""
    order = c.state.orders.get(told.order)
    if order is None:
        return NOTHING
    match told:
        case i.OrderDone():
            done(c, order, told.seen)
        case i.OrderFailed():
            failed(c, order, told.error)
        case i.OrderLostContact():
            lost_contact(c, order, told.error)
        case _ if order.status is OrderStatus.ISSUED:  # not begun: a restart left it open
            c.do(e.Perform(order.id, again=True))
        case _:  # not begun, and given up
            failed(c, order, Cause("not_begun"))
    return NOTHING


def done(c: Context, order: Order, seen: Sequence[i.GpuObservation]) -> None:
    kept = c.state.state_of(order)
    late = kept.status is StateStatus.UNKNOWN
    job = c.state.jobs[order.job]
    c.fact(f.OrderEnded(c.now, order.id))
    if late:
        loads = {OrderKind.LOAD: StateStatus.LOADED, OrderKind.PARK: StateStatus.PARKED}
        status = loads.get(order.kind, StateStatus.GONE)
        c.fact(f.StateObserved(c.now, job.id, order.pool, order.node, status))
    if order.kind is not OrderKind.LOAD:
        gpus_observed(c, (order.node,), seen)
        expect_clean(c, c.state.nodes[order.node], job, Cause("after_order", {"job": job.id, "kind": str(order.kind)}))
        record_residual(c, kept, [it for it in seen if it.used_mb])
    slot = c.state.slot_of(order)
    if slot is not None and slot.status is SlotStatus.RELEASED and order.kind is OrderKind.LOAD:
        park_own(c, job, slot)  # it ended while it was being loaded


def failed(c: Context, order: Order, error: Cause) -> None:
    """The driver did not do it: the job is quarantined, and what is loaded of its state is to be discarded."""
    c.fact(f.OrderFaulted(c.now, order.id, error))
    kept = c.state.state_of(order)
    old = sent_to_another(c, c.state.jobs[order.job], order) and not order.gpus
    if order.kind is not OrderKind.DISCARD and not old:
        c.fact(f.StateObserved(c.now, order.job, order.pool, order.node, StateStatus.LOADED))
        if order.kind is OrderKind.LOAD and order.slot is None:  # back after a loan, before its job's turn
            issue(c, OrderKind.PARK, kept, None)
            return
    fault(c, order, Cause("order_failed", about(order), error))


def lost_contact(c: Context, order: Order, error: Cause) -> None:
    """Its outcome is unknown: neither done nor failed. Where the driver can be asked, it is."""
    if order.status is OrderStatus.LOST_CONTACT:  # a probe that learnt nothing; the next look asks again
        c.dirty.watched[order.node] = None
        return
    c.fact(f.OrderContactLost(c.now, order.id, error))
    if c.traits(order.driver).probes:
        c.do(e.Probe(order.id))
    fault(c, order, Cause("order_no_word", about(order), error))


def about(order: Order) -> dict[str, str]:
    """The parts of a cause that is about an order."""
    return {"kind": str(order.kind), "pool": order.pool, "node": order.node}


def may_be_asked_for(order: Order) -> bool:
    """False where the daemon crashed again after it had asked for an order under suspicion."""
    return order.crashes <= CRASHES_TO_SUSPECT


def sent_to_another(c: Context, job: Job, order: Order) -> bool:
    """Whether the order is from before the process that the run has now: what it says of the state is no longer so."""
    session = c.state.sessions.get(job.session or "")
    return session is not None and session.opened_at > order.issued_at


def fault(c: Context, order: Order, reason: Cause) -> None:
    """One job's trouble: it is quarantined, and its GPUs stay as they are until verified clean. No other job is
    affected.
    """
    job = c.state.jobs[order.job]
    slot = c.state.slot_of(order)
    if slot is not None and slot.status is SlotStatus.LOADING:
        take_away(c, slot, reason, how=SlotStatus.FAULTED)
    moved_away = order.kind is OrderKind.DISCARD and order.node in job.left  # it is sent again, and harms no job
    # a failure of the process before does not count against the new one
    if order.run == job.run and not moved_away and not sent_to_another(c, job, order):
        quarantine(c, job, reason)
        if job.spec.filler is not None:  # what it keeps must not hold up others
            c.do(kill(job))
    expect_clean(c, c.state.nodes[order.node], job, Cause("after_fault", cause=reason))
