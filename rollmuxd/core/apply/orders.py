"""Orders to residency drivers, and the states that they move."""

from rollmuxd.core import facts as f
from rollmuxd.core.apply.hosts import all_gpus_clean
from rollmuxd.core.apply.pins import newest_on
from rollmuxd.core.lifecycle import meet
from rollmuxd.core.model import Order, OrderKind, StateStatus
from rollmuxd.core.state import State, state_key


def order_issued(state: State, fact: f.OrderIssued) -> None:
    state.mint("o")
    kept = state.states[state_key(fact.job, fact.pool, fact.node)]
    meet(kept, fact, by=fact.kind)
    kept.order = fact.order
    if fact.kind is OrderKind.LOAD and fact.slot is None:  # ahead of the job's turn: no slot holds the GPUs yet
        node = state.nodes[fact.node]
        for gpu in node.gpus.values():
            gpu.dirty_by, gpu.touched_at = fact.job, fact.at
        all_gpus_clean(node, tuple(node.gpus))  # what it left there is to be there again
    about = (fact.order, fact.kind, fact.job, fact.run, fact.pool, fact.node, fact.driver)
    state.orders[fact.order] = Order(*about, fact.at, fact.slot, fact.source, fact.gpus, incarnation=state.incarnation)


def order_ended(state: State, fact: f.OrderEnded) -> None:
    order = state.orders.pop(fact.order)
    meet(order, fact)
    kept = state.state_of(order)
    kept.order = None
    warm = kept.warm
    if order.kind is OrderKind.LOAD:
        kept.warm = True
        newest_on(state.jobs[order.job], order.pool, order.node)
    if kept.status is StateStatus.UNKNOWN:  # a late word about a lost order: StateObserved says what it means
        return
    meet(kept, fact, by=order.kind)
    for gpu in state.nodes[order.node].gpus.values():
        if gpu.dirty_by == order.job:
            gpu.touched_at = fact.at
    progress = state.jobs[order.job].progress
    if order.kind is OrderKind.LOAD:
        if warm or order.source is not None:
            progress.loads_warm += 1
        else:
            progress.loads_cold += 1
        kept.loaded_at = fact.at
        if warm or state.jobs[order.job].spec.filler is None:
            kept.load_ms = fact.at - order.issued_at
        else:  # it starts its engine, which says nothing of later loads
            progress.start_ms = fact.at - order.issued_at
    elif order.kind is OrderKind.PARK:
        progress.parks += 1
        kept.park_ms = fact.at - order.issued_at
    else:
        kept.warm = False


def order_faulted(state: State, fact: f.OrderFaulted) -> None:
    order = state.orders.pop(fact.order)
    meet(order, fact)
    kept = state.state_of(order)
    kept.order = None
    meet(kept, fact)
    if order.kind is OrderKind.LOAD and order.slot is None:  # not tried again before the job's turn
        state.nodes[order.node].loan_ended_at = None


def order_contact_lost(state: State, fact: f.OrderContactLost) -> None:
    order = state.orders[fact.order]
    meet(order, fact)
    meet(state.state_of(order), fact)


def state_unknown(state: State, fact: f.StateUnknown) -> None:
    meet(state.states[state_key(fact.job, fact.pool, fact.node)], fact)


def state_observed(state: State, fact: f.StateObserved) -> None:
    kept = state.states[state_key(fact.job, fact.pool, fact.node)]
    meet(kept, fact, fact.status)
    if kept.order is not None:  # nothing is left to be learnt of its order
        state.orders.pop(kept.order, None)
        kept.order = None
    if fact.status is StateStatus.GONE:
        kept.warm = False
    elif fact.status is StateStatus.LOADED:
        kept.loaded_at = fact.at


def residual_memory_observed(state: State, fact: f.ResidualMemoryObserved) -> None:
    state.states[state_key(fact.job, fact.pool, fact.node)].residual_mb = fact.mb
