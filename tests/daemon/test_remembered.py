"""Followers of the facts get each with what it is about, and remember only what is open: a daemon runs for months.

Histories of the simulator, in which daemons die, hosts vanish and reports are lost.
"""

import pytest
from msgspec.structs import replace
from simkit import swarm

from rollmuxd.core import facts as f
from rollmuxd.core.apply import apply
from rollmuxd.core.model import SlotStatus
from rollmuxd.core.state import State
from rollmuxd.daemon.entries import entries
from rollmuxd.daemon.metrics import Metrics


@pytest.fixture(scope="module")
def played():
    """Histories: the state at their end, and their entries."""
    ended = []
    for seed in range(13):
        facts, state, made = [], State(), []
        swarm.run(swarm.draw(seed), facts.append)
        for number, fact in enumerate(facts, 1):
            order = state.orders.get(getattr(fact, "order", ""))
            before = order and replace(order)
            apply(state, fact)
            made += entries(state, [(number, fact)], before)
        ended.append((state, made))
    return ended


def test_each_fact_of_a_slot_or_an_order_comes_with_it_and_with_the_job(played):
    orders = 0
    for _, made in played:
        for _, fact, job, slot, order in made:
            if isinstance(fact, f.SlotFact):
                assert (slot.id, job.id) == (fact.slot, slot.job)
            if isinstance(fact, f.OrderIssued | f.OrderEnded | f.OrderFaulted | f.OrderContactLost):
                assert (order.id, job.id) == (fact.order, order.job)
                orders += 1
            if isinstance(fact, f.SessionOpened | f.SessionLost):
                assert job is not None
    assert orders > 1000


def test_metrics_remember_what_runs(played):
    for state, made in played:
        metrics = Metrics()
        metrics.sink(made)
        runs = {slot.id for slot in state.slots.values() if slot.status in (SlotStatus.RUNNING, SlotStatus.TAIL)}
        assert set(metrics._running) == runs
