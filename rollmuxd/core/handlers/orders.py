"""What became of orders: a load, park or discard that was done, was not, or of which there is no word."""

from typing import Final

from rollmuxd.core import effects as e
from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.context import NOTHING, Context
from rollmuxd.core.decision import Answer
from rollmuxd.core.model import Job, JobState, Node, Order, OrderKind, OrderStatus, SlotStatus, StateStatus
from rollmuxd.core.state import state_key
from rollmuxd.core.steps.dispatch import dispatch, grant_if_loaded
from rollmuxd.core.steps.move import fall_back
from rollmuxd.core.steps.reclaim import (
    after_departure,
    drained_if_empty,
    end_placement_if_empty,
    expect_clean,
    finish_release,
    gpus_observed,
    observe_job,
    observe_until_clean,
    park_own,
    quarantine,
    take_away,
)
from rollmuxd.core.steps.residual_memory import record_residual

#: an order that was open at this many crashes of the daemon is not sent again: the daemon may crash because of it
CRASHES_TO_SUSPECT: Final = 3


def order_done(c: Context, told: i.OrderDone) -> Answer:
    """The driver did it, and this is what the backend saw afterwards."""
    order = open_order(c, told.order)
    if order is None:
        return NOTHING
    kept = c.state.states.get(state_key(order.job, order.pool, order.node))
    late = kept is not None and kept.order == order.id and kept.status is StateStatus.UNKNOWN
    job = c.state.jobs[order.job]
    c.fact(f.OrderEnded(c.now, order.id))
    if late:
        done = {OrderKind.LOAD: StateStatus.LOADED, OrderKind.PARK: StateStatus.PARKED}
        status = done.get(order.kind, StateStatus.GONE)
        c.fact(f.StateSeen(c.now, job.id, order.pool, order.node, status))
    if order.kind is not OrderKind.LOAD:
        gpus_observed(c, told.seen)
        expect_clean(c, c.state.nodes[order.node], job, f"after {job.spec.name} was to {order.kind}")
        if kept is not None:
            record_residual(c, kept, told.seen)
    after_order(c, job, order)
    return NOTHING


def after_order(c: Context, job: Job, order: Order) -> None:
    slot = c.state.slots.get(order.slot or "")
    if slot is not None:
        if slot.status is SlotStatus.LOADING:
            grant_if_loaded(c, job, slot)
        finish_release(c, slot)
        if slot.status is SlotStatus.RECLAIMING and order.kind is OrderKind.LOAD:
            park_own(c, job, slot)  # it was taken away while it was being loaded
    group = job.group
    node = c.state.nodes[order.node]
    drained_if_empty(c, node)
    end_placements_on(c, node, job)
    dispatch(c, group)
    after_departure(c, job)


def end_placements_on(c: Context, node: Node, job: Job) -> None:
    """Settle the jobs on a node, this one last: what was seen may be the last that another waited for."""
    for name in list(node.pinned):
        if name != job.id:
            end_placement_if_empty(c, c.state.jobs[name])
            after_departure(c, c.state.jobs[name])
    end_placement_if_empty(c, job)


def open_order(c: Context, name: str) -> Order | None:
    """The order, or None when it had its final result before (a late or doubled report changes nothing)."""
    return c.state.orders.get(name)


def order_failed(c: Context, told: i.OrderFailed) -> Answer:
    """The driver did not do it: the job is quarantined, and what is loaded of its state is to be discarded."""
    order = open_order(c, told.order)
    if order is None:
        return NOTHING
    c.fact(f.OrderFaulted(c.now, order.id, told.error))
    if sent_to_another(c, c.state.jobs[order.job], order):
        observe_job(c, c.state.jobs[order.job])
    elif order.kind is not OrderKind.DISCARD and state_of(c, order).status is StateStatus.UNKNOWN:
        c.fact(f.StateSeen(c.now, order.job, order.pool, order.node, StateStatus.LOADED))
    fault(c, order, f"could not {order.kind} its {order.pool} state on {order.node}: {told.error}")
    return NOTHING


def order_not_begun(c: Context, told: i.OrderNotBegun) -> Answer:
    """It was not begun: told again where a restart left it open; who had given it up has it as failed."""
    order = open_order(c, told.order)
    if order is None:
        return NOTHING
    if order.status is not OrderStatus.ISSUED:
        return order_failed(c, i.OrderFailed(order.id, "it was not begun"))
    c.do(e.Perform(order.id, again=True))
    return NOTHING


def order_lost_contact(c: Context, told: i.OrderLostContact) -> Answer:
    """Nobody knows: treated as neither done nor failed. Where the driver can be asked, it is."""
    order = open_order(c, told.order)
    if order is None:
        return NOTHING
    if order.status is OrderStatus.LOST_CONTACT:  # a probe that learnt nothing; the next look asks again
        observe_until_clean(c, c.state.nodes[order.node])
        return NOTHING
    c.fact(f.OrderContactLost(c.now, order.id, told.error))
    if c.traits(order.driver).probes:
        c.do(e.Probe(order.id))
    fault(c, order, f"no word of the {order.kind} of its {order.pool} state on {order.node}: {told.error}")
    return NOTHING


def suspect(c: Context, order: Order) -> None:
    """The daemon may crash because of this order. So the order is not sent again, and its driver is asked instead.

    Whether it was done is not known: the process that received it may still be at it.
    """
    error = f"order {order.id} is not sent again, because the daemon crashed {order.crashes} times while it was open"
    order_lost_contact(c, i.OrderLostContact(order.id, error))


def may_be_asked_for(order: Order) -> bool:
    """False where the daemon crashed again after it had asked for an order under suspicion."""
    return order.crashes <= CRASHES_TO_SUSPECT


def sent_to_another(c: Context, job: Job, order: Order) -> bool:
    """Whether the order is from before the process that the run has now: what it says of the state is no longer so."""
    session = c.state.sessions.get(job.session or "")
    return session is not None and session.opened_at > order.issued_at


def state_of(c: Context, order: Order) -> JobState:
    return c.state.states[state_key(order.job, order.pool, order.node)]


def fault(c: Context, order: Order, reason: str) -> None:
    """One job's trouble: it is quarantined, its GPUs stay as they are until seen clear, everybody else goes on."""
    job = c.state.jobs[order.job]
    group = job.group
    slot = c.state.slots.get(order.slot or "")
    if not fall_back(c, job, order, reason):
        if slot is not None and slot.status is SlotStatus.LOADING:
            take_away(c, slot, f.SlotFaulted(c.now, slot.id, reason))
        moved_away = order.kind is OrderKind.DISCARD and order.node in job.left  # it is told again, and harms nobody
        # a new process is not to blame for its forerunner
        if order.run == job.run and not moved_away and not sent_to_another(c, job, order):
            quarantine(c, job, reason)
        if slot is not None:
            finish_release(c, slot)
    node = c.state.nodes[order.node]
    expect_clean(c, node, job, f"({reason})")
    # nobody else looks where all GPUs are clear: at an order without a word, or at what is left of who sits nowhere
    if order.status is OrderStatus.LOST_CONTACT or not job.pins:
        observe_until_clean(c, node)
    end_placements_on(c, node, job)
    dispatch(c, group)
    after_departure(c, job)
