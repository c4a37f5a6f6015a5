"""Whoever follows the facts remembers of jobs and orders what is open, and no more: a daemon runs for months.

Histories of the simulator, in which daemons die, hosts vanish and reports are lost.
"""

import pytest
from simkit import swarm

from rollmuxd.core import facts as f
from rollmuxd.core.model import JobStatus
from rollmuxd.daemon import logs
from rollmuxd.daemon.metrics import Metrics
from rollmuxd.daemon.open_orders import OpenOrders


@pytest.fixture(scope="module")
def played():
    """Histories at their end: the state, and the facts that led to it."""
    ended = []
    for seed in range(13):
        facts = []
        ended.append((swarm.run(swarm.draw(seed), facts.append).core.state, facts))
    return ended


def test_some_orders_are_over_by_the_sight_of_their_state_alone(played):
    by_sight = 0
    for _, facts in played:
        orders = OpenOrders()
        for fact in facts:
            if isinstance(fact, f.OrderIssued):
                orders.add(fact, fact.order)
            elif isinstance(fact, f.OrderEnded | f.OrderFaulted):
                assert orders.over(fact.order) in (fact.order, None)
            elif isinstance(fact, f.StateObserved):
                by_sight += orders.seen(fact) is not None
    assert by_sight > 10


def test_metrics_remember_orders_and_owners_of_what_is_open(played):
    for state, facts in played:
        metrics = Metrics()
        metrics.sink(list(enumerate(facts, 1)))
        assert set(metrics._orders._kept) <= set(state.orders)
        assert set(metrics._owners) == {job.id for job in state.jobs.values() if job.status is not JobStatus.ENDED}
        assert not metrics._slots


def test_the_log_remembers_orders_that_are_open(played, monkeypatch):
    made = []
    monkeypatch.setattr(logs, "OpenOrders", lambda: made.append(OpenOrders()) or made[-1])
    monkeypatch.setattr(logs.log, "bind", lambda: logs.structlog.get_logger("nowhere"))
    for state, facts in played[:10]:
        with logs.structlog.testing.capture_logs():
            logs.fact_logger(lambda state=state: state)(list(enumerate(facts, 1)))
        assert set(made[-1]._kept) <= set(state.orders)
    assert len(made) == 10
