"""The bill adds up, whatever happens: in random histories in which processes die, hosts vanish and orders fail.

What is charged to somebody, and what is charged to nobody, is the inventory: each node's GPUs, for as long as it was
there, reckoned here from the two facts by which nodes come and go, and from nothing else.
"""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from simkit import swarm

from rollmuxd.core import facts as f
from rollmuxd.core.apply import apply
from rollmuxd.core.inputs import HostSpec, NodeSpec
from rollmuxd.core.model import JobStatus, PlannedTurn
from rollmuxd.core.spec import JobSpec, PhaseSpec, Want
from rollmuxd.core.state import State
from rollmuxd.daemon.usage.ledger import DailyUsage, UsageLedger

SEEDS = 6


@cache
def history(seed):
    """All facts of one random history."""
    heard = []
    swarm.run(swarm.draw(seed), heard.append)
    return tuple(heard)


def reported(seed, since, until, *, by="job", owner=None):
    return booked(seed, since, until).view(since, until, by=by, owner=owner)


def booked(seed, since, until) -> DailyUsage:
    ledger = UsageLedger(since=since, until=until)
    for fact in history(seed):
        if not ledger.see(fact):
            break
    return ledger.close()[0]


def inventory(seed, since, until):
    """GPU-hours and money that there were, from when each node came to when it went."""
    there, hours, cost = {}, 0.0, 0.0
    for fact in (*history(seed), None):
        at = until if fact is None else min(fact.at, until)
        gone = list(there) if fact is None else [fact.node] if isinstance(fact, f.NodeRemoved) else []
        if isinstance(fact, f.NodeAdded) and fact.node.id in there:  # it has changed
            gone = [fact.node.id]
        for name in gone:
            node, came = there.pop(name)
            gpu_hours = len(node.gpus) * max(0, at - max(came, since)) / 3_600_000
            hours, cost = hours + gpu_hours, cost + gpu_hours * node.price_per_gpu_hour
        if isinstance(fact, f.NodeAdded):
            there[fact.node.id] = fact.node, at
    return hours, cost


@st.composite
def spans(draw):
    seed = draw(st.integers(0, SEEDS - 1))
    last = history(seed)[-1].at
    since, until = sorted(draw(st.tuples(st.integers(0, last), st.integers(0, last + 1000))))
    return seed, since, until


@settings(max_examples=60, deadline=None)
@given(spans(), st.sampled_from(["job", "owner"]))
def test_the_rows_and_what_nobody_is_charged_with_are_the_inventory(span, by):
    report = reported(*span, by=by)
    bill = report.bill
    hours, cost = inventory(*span)
    assert bill.gpu_hours_capacity == pytest.approx(hours, abs=1e-5)
    assert bill.cost_capacity == pytest.approx(cost, abs=1e-4)
    rows = sum(row.gpu_hours_charged for row in report.work)
    assert rows + bill.gpu_hours_unallocated == pytest.approx(hours, abs=1e-4)
    assert sum(row.cost_charged for row in report.work) + bill.cost_unallocated == pytest.approx(cost, abs=1e-3)
    assert bill.gpu_hours_others == bill.cost_others == 0


@settings(max_examples=60, deadline=None)
@given(spans())
def test_nobody_is_charged_with_less_than_he_held_and_nothing_is_negative(span):
    report = reported(*span)
    for row in report.work:
        assert row.gpu_hours_charged >= row.gpu_hours_held - 1e-5
        assert row.gpu_hours_used <= row.gpu_hours_held + 1e-5
        assert row.slo_kept <= row.slo_judged <= 1
    assert report.bill.gpu_hours_unallocated >= -1e-5


@settings(max_examples=60, deadline=None)
@given(spans(), st.floats(0, 1))
def test_books_of_two_spans_that_follow_each_other_make_the_bill_of_the_whole(span, where):
    seed, since, until = span
    middle = since + round((until - since) * where)
    parts = booked(seed, since, middle)
    parts.add(booked(seed, middle, until))
    whole = reported(seed, since, until)
    made = parts.view(since, until)
    for figure in ("gpu_hours_charged", "gpu_hours_unallocated", "gpu_hours_capacity", "cost_charged"):
        assert getattr(made.bill, figure) == pytest.approx(getattr(whole.bill, figure), abs=1e-4)
    charged = {row.job: row.gpu_hours_charged for row in made.work}
    for row in whole.work:
        assert charged[row.job] == pytest.approx(row.gpu_hours_charged, abs=1e-4)


def test_an_owner_sees_the_own_rows_and_the_rest_as_one_sum():
    for seed in range(SEEDS):
        until = history(seed)[-1].at
        owners = {row.owner for row in reported(seed, 0, until, by="owner").work}
        for owner in owners:
            report = reported(seed, 0, until, owner=owner)
            bill = report.bill
            assert {row.owner for row in report.work} <= {owner}
            total = bill.gpu_hours_charged + bill.gpu_hours_others + bill.gpu_hours_unallocated
            assert total == pytest.approx(bill.gpu_hours_capacity, abs=1e-4)
            assert sum(row.gpu_hours_charged for row in report.work) == pytest.approx(bill.gpu_hours_charged, abs=1e-4)
            assert report.saving.gpu_hours_charged == bill.gpu_hours_charged


def test_the_histories_are_worth_it():
    held = [any(row.gpu_hours_held for row in reported(seed, 0, history(seed)[-1].at).work) for seed in range(SEEDS)]
    shared = [fact for seed in range(SEEDS) for fact in history(seed) if isinstance(fact, f.JobPlaced)]
    assert sum(held) > SEEDS / 2
    assert any(fact.admission == "packing" for fact in shared)


def test_what_is_held_is_what_the_state_says_is_held():
    """Second by second, as it were: the usage against a look at every GPU's holder between any two facts."""
    for seed in range(SEEDS):
        facts = history(seed)
        state, held, before = State(), {}, facts[0].at
        for fact in facts:
            for node in state.nodes.values():
                for gpu in node.gpus.values():
                    if gpu.holder is not None:
                        job = state.slots[gpu.holder].job
                        held[job] = held.get(job, 0) + fact.at - before
            before = fact.at
            apply(state, fact)
        rows = {row.job: row.gpu_hours_held for row in reported(seed, 0, facts[-1].at + 1).work}
        for job, ms in held.items():
            if state.jobs[job].spec.filler is not None:
                continue  # what it held is harvested
            assert rows[job] == pytest.approx(ms / 3_600_000, abs=1e-5), (seed, job)


def test_a_group_of_which_nobody_held_anything_is_charged_to_those_who_sat_there():
    spec = JobSpec("a", (PhaseSpec("rollout", ("rollout",)),), (Want("rollout"),))
    ledger = UsageLedger()
    schedule = tuple(PlannedTurn(job, "rollout") for job in ("j1", "j2"))
    for fact in (
        f.HostAdded(0, HostSpec("h", "mock", 1000)),
        f.NodeAdded(0, NodeSpec("h/n", "h", ("h/gpu0",), ("rollout",), price_per_gpu_hour=3.0)),
        f.NodeUp(0, "h/n"),
        f.JobRegistered(0, "j1", "team", "ann", 1, spec),
        f.JobRegistered(0, "j2", "team", "ann", 1, replace(spec, name="b")),
        f.JobPlaced(0, "j1", "g1", {"rollout": ("h/n",)}, schedule[:1], JobStatus.ADMITTED, "isolated"),
        f.JobPlaced(3_600_000, "j2", "g1", {"rollout": ("h/n",)}, schedule, JobStatus.ADMITTED, "packing"),
    ):
        ledger.see(fact)
    usage, end = ledger.close(2 * 3_600_000)
    report = usage.view(ledger.since, end)
    assert [row.gpu_hours_charged for row in report.work] == [1.5, 0.5]
    assert report.bill.gpu_hours_unallocated == 0
