"""Followers of the facts get each with what it is about, and remember only what is open: a daemon runs for months.

Histories of the simulator, in which daemons die, hosts vanish and reports are lost.
"""

import pytest
from simkit import swarm

from rollmuxd.core import facts as f
from rollmuxd.core.model import SlotStatus
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.daemon.entries import entries, orders_before
from rollmuxd.daemon.metrics import Metrics


@pytest.fixture(scope="module")
def played():
    """Histories: the state at their end, and the entries of each decision, as the driver makes them."""
    handle, ended = Scheduler.handle, []

    def heard(core, given, now):
        before = orders_before(core.state, given)
        decision = handle(core, given, now)
        states[:] = [core.state]
        made.extend(entries(core.state, enumerate(decision.facts, len(made) + 1), before))
        return decision

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "handle", heard)
        for seed in (*range(13), 23):  # in the last one a start ends several orders
            states, made = [], []
            swarm.run(swarm.draw(seed))
            ended.append((states[0], made))
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
