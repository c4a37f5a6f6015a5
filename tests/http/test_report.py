"""Every figure of the report against one computed by hand, from facts written by hand.

Two jobs share one rollout node (2 GPUs, 3.00 per GPU-hour) and one train node (4 GPUs, 5.00). Times are in minutes::

    0      nodes come                       a: rollout 10 -> 40, train 40 -> 60, next iteration asked at 60
    10     a placed, b placed               b: asks rollout at 10, waits until 40, has it 42 -> 62 (2 minutes to load)
    120    the end
"""

import pytest

from rollmuxd.core import facts as f
from rollmuxd.core.ids import Fence
from rollmuxd.core.inputs import HostSpec, NodeSpec
from rollmuxd.core.model import JobStatus, OrderKind, PlannedTurn
from rollmuxd.core.spec import JobSpec, PhaseSpec, StateSpec, Want
from rollmuxd.daemon.usage.ledger import UsageLedger

MINUTE = 60_000
R, T = ("h/gpu0", "h/gpu1"), ("h/gpu2", "h/gpu3", "h/gpu4", "h/gpu5")
SPEC = JobSpec(
    name="a",
    phases=(PhaseSpec("rollout", ("rollout",)), PhaseSpec("train", ("train",))),
    wants=(Want("rollout"), Want("train")),
    states=(StateSpec("rollout", gpu_mb=10),),
)
PINS = {"rollout": ("h/gpu0-1",), "train": ("h/gpu2-5",)}


def schedule(*jobs):
    return tuple(PlannedTurn(job, phase) for job in jobs for phase in ("rollout", "train"))


def queued(at, slot, job, phase, *, iteration=False):
    return f.SlotQueued(at * MINUTE, slot, job, 1, f"e{job[1]}", phase, slot, iteration=iteration)


def claimed(at, slot, gpus, turn):
    return f.SlotClaimed(at * MINUTE, slot, gpus, turn)


def granted(at, slot, number):
    return f.SlotGranted(at * MINUTE, slot, Fence(1, number))


def ended(at, slot):
    return [f.SlotReleased(at * MINUTE, slot), f.SlotOver(at * MINUTE, slot)]


def moved(begin, end, order, kind, job, slot=None):
    return (
        f.OrderIssued(begin * MINUTE, order, kind, job, 1, "rollout", "h/gpu0-1", "channel", slot),
        f.OrderEnded(end * MINUTE, order),
    )


def the_facts():
    node = NodeSpec("h/gpu0-1", "h", R, ("rollout",), price_per_gpu_hour=3.0)
    other = NodeSpec("h/gpu2-5", "h", T, ("train",), price_per_gpu_hour=5.0)
    load_a = moved(10, 10, "o1", OrderKind.LOAD, "j1", "s1")
    park_a = moved(40, 41, "o2", OrderKind.PARK, "j1")
    load_b = moved(41, 42, "o3", OrderKind.LOAD, "j2", "s3")
    b = JobSpec(**{name: getattr(SPEC, name) for name in SPEC.__struct_fields__} | {"name": "b"})
    facts = [
        f.HostAdded(0, HostSpec("h", "mock", 1000)),
        f.NodeAdded(0, node),
        f.NodeAdded(0, other),
        f.NodeUp(0, "h/gpu0-1"),
        f.NodeUp(0, "h/gpu2-5"),
        f.JobRegistered(4 * MINUTE, "j1", "team", "alice", 1, SPEC),
        f.JobRegistered(10 * MINUTE, "j2", "others", "bob", 1, b),
        f.JobPlaced(10 * MINUTE, "j1", "g1", PINS, schedule("j1"), JobStatus.ADMITTED, "isolated"),
        f.JobPlaced(10 * MINUTE, "j2", "g1", PINS, schedule("j1", "j2"), JobStatus.ADMITTED, "packing"),
        queued(10, "s1", "j1", "rollout", iteration=True),
        claimed(10, "s1", R, 0),
        *load_a,
        granted(10, "s1", 1),
        queued(10, "s2", "j2", "rollout", iteration=True),
        *ended(40, "s1"),
        queued(40, "s3", "j1", "train"),
        claimed(40, "s3", T, 1),
        granted(40, "s3", 2),
        park_a[0],
        park_a[1],
        claimed(41, "s2", R, 2),
        load_b[0],
        load_b[1],
        granted(42, "s2", 3),
        *ended(60, "s3"),
        queued(60, "s4", "j1", "rollout", iteration=True),
        *ended(62, "s2"),
    ]
    return sorted(facts, key=lambda fact: fact.at)


def report(*, by="job", owner=None, since=0, until=120):
    ledger = UsageLedger(since=since * MINUTE, until=until * MINUTE)
    for fact in the_facts():
        if not ledger.see(fact):
            break
    usage, end = ledger.close()
    return usage.view(ledger.since, end, by=by, owner=owner)


def test_held_used_iterations_and_slowdown_of_each_job():
    a, b = report().work
    assert (a.name, a.owner, a.job) == ("a", "team", "j1")
    # a ran 30 minutes on 2 GPUs and 20 on 4; b was loaded for 1 minute and ran 20 on 2.
    assert a.gpu_hours_used == a.gpu_hours_held == pytest.approx((30 * 2 + 20 * 4) / 60, abs=1e-6)
    assert b.gpu_hours_used == pytest.approx(20 * 2 / 60, abs=1e-6)
    assert b.gpu_hours_held == pytest.approx(21 * 2 / 60, abs=1e-6)
    # a's iteration took 50 minutes, all of them its own: 30 + 20.
    assert (a.iterations, a.slowdown) == (1, 1.0)
    assert (b.iterations, b.slowdown) == (0, None)


def test_alone_a_job_would_have_had_its_nodes_to_itself():
    a, b = report().work
    # One iteration of 50 minutes on 6 GPUs.
    assert a.gpu_hours_alone == pytest.approx(50 * 6 / 60, abs=1e-6)
    assert a.cost_alone == pytest.approx(50 / 60 * (2 * 3 + 4 * 5), abs=1e-5)
    assert b.gpu_hours_alone == 0


def test_waits_and_switches():
    a, b = report().work
    assert a.wait_placement_hours == pytest.approx(6 / 60, abs=1e-6)
    assert b.wait_placement_hours == 0
    # b waited for its turn from 10 to 41; a's last request waits from 60 to the end.
    assert b.wait_turn_hours == pytest.approx(31 / 60, abs=1e-6)
    assert a.wait_turn_hours == pytest.approx(60 / 60, abs=1e-6)
    assert (a.loads_cold, a.loads_warm, a.parks) == (1, 0, 1)
    assert (b.loads_cold, b.loads_warm, b.parks) == (1, 0, 0)
    assert a.gpu_hours_switching == b.gpu_hours_switching == pytest.approx(2 / 60, abs=1e-6)
    assert a.cost_switching == b.cost_switching == pytest.approx(2 * 3 / 60, abs=1e-6)


def test_the_hours_of_the_pools_add_up_to_the_inventory():
    pools = {row.pool: row for row in report(by="pool").pools}
    rollout, train = pools["rollout"], pools["train"]
    assert rollout.gpu_hours_capacity == pytest.approx(2 * 2)
    assert rollout.gpu_hours_unallocated == pytest.approx(10 * 2 / 60, abs=1e-6)
    assert rollout.gpu_hours_used == pytest.approx((30 + 20) * 2 / 60, abs=1e-6)
    assert rollout.gpu_hours_switching == pytest.approx(1 * 2 / 60, abs=1e-6)
    assert rollout.gpu_hours_idle == pytest.approx((120 - 10 - 51) * 2 / 60, abs=1e-6)
    assert train.gpu_hours_used == pytest.approx(20 * 4 / 60, abs=1e-6)
    for row in pools.values():
        parts = (row.gpu_hours_used, row.gpu_hours_switching, row.gpu_hours_idle, row.gpu_hours_unallocated)
        assert sum(parts) == pytest.approx(row.gpu_hours_capacity, abs=1e-5)
    assert sum(row.gpu_hours_capacity for row in pools.values()) == pytest.approx(6 * 2)


def test_a_saving_names_its_baseline_and_may_be_negative():
    saving = report().saving
    assert "alone" in saving.baseline
    assert saving.gpu_hours_saved == pytest.approx((50 * 6 - 110 * 6) / 60, abs=1e-5)


def test_only_what_lies_in_the_span_is_counted():
    a, b = report(since=30, until=50).work
    assert a.gpu_hours_used == pytest.approx((10 * 2 + 10 * 4) / 60, abs=1e-6)
    assert b.gpu_hours_used == pytest.approx(8 * 2 / 60, abs=1e-6)
    assert b.wait_turn_hours == pytest.approx(11 / 60, abs=1e-6)
    assert a.iterations == 0
    assert a.loads_cold == 0
    assert sum(row.gpu_hours_capacity for row in report(since=30, until=50).pools) == pytest.approx(2, abs=1e-5)


def test_spans_that_follow_each_other_add_up():
    whole = report().work
    parts = [report(since=since, until=since + 20).work for since in range(0, 120, 20)]
    for number, name in enumerate(("a", "b")):
        rows = [row for part in parts for row in part if row.name == name]
        for figure in ("gpu_hours_used", "gpu_hours_held", "wait_turn_hours", "gpu_hours_switching"):
            assert sum(getattr(row, figure) for row in rows) == pytest.approx(getattr(whole[number], figure), abs=1e-5)
        assert sum(row.iterations for row in rows) == whole[number].iterations


def test_by_owner_the_rows_of_their_jobs_are_summed_and_others_rows_can_be_left_out():
    assert [row.name for row in report(by="owner").work] == ["others", "team"]
    assert [row.name for row in report(owner="team").work] == ["a"]


def test_a_node_in_two_pools_is_counted_once():
    ledger = UsageLedger()
    node = NodeSpec("h/gpu0-1", "h", R, ("rollout", "train"))
    for fact in (f.HostAdded(0, HostSpec("h", "mock", 0)), f.NodeAdded(0, node), f.NodeUp(60 * MINUTE, "h/gpu0-1")):
        ledger.see(fact)
    usage, end = ledger.close()
    assert [(row.pool, row.gpu_hours_capacity) for row in usage.view(0, end).pools] == [("rollout+train", 2.0)]


@pytest.mark.asyncio
async def test_the_report_has_the_rows_that_the_caller_may_see(running):
    async with running() as world, world.client() as client, world.client("stranger") as stranger:
        job = await world.job(client)
        await job.give_back((await job.ask("rollout")).json())
        answer = await client.get("/v1/report")
        assert [row["name"] for row in answer.json()["work"]] == ["math"]
        assert (await stranger.get("/v1/report")).json()["work"] == []
        for query in ("since=yesterday", "since=2030-01-02&until=2030-01-01", "by=colour"):
            assert (await client.get(f"/v1/report?{query}")).status_code == 422
        early = await client.get("/v1/report?until=2001-01-01")
        assert early.json()["work"] == []


@pytest.mark.asyncio
@pytest.mark.parametrize("field", ["since", "until"])
@pytest.mark.parametrize("time", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "9999-12-31T23:59:59.9999"])
async def test_a_time_that_no_calendar_has_in_utc_is_refused_by_the_name_of_its_field(running, field, time):
    async with running() as world, world.client() as client:
        answer = await client.get("/v1/report", params={field: time})
        assert answer.status_code == 422, answer.text
        assert answer.json()["data"] == {"in": "query", "field": field}
        assert f"{time!r} is no time" in answer.json()["detail"]


@pytest.mark.asyncio
async def test_the_first_and_the_last_time_of_the_calendar_are_times(running):
    async with running() as world, world.client() as client:
        first, last = "0001-01-01", "9999-12-31T23:59:59.999"
        for query in (f"since={first}", f"until={first}", f"since={last}", f"until={last}"):
            assert (await client.get(f"/v1/report?{query}")).status_code == 200, query


@pytest.mark.asyncio
async def test_a_report_of_a_day_that_is_known_reads_the_facts_since_the_last_one_only(running, monkeypatch):
    """So that it costs the daemon the same after a million facts as after ten."""
    async with running() as world, world.client() as client:
        job = await world.job(client)
        await job.give_back((await job.ask("rollout")).json())
        await client.get("/v1/report")
        known, read = world.writer.durable_seq, world.journal.read

        async def later(after, limit):
            assert after >= known or limit == 1, f"facts after {after} are read"
            return await read(after, limit)

        monkeypatch.setattr(world.journal, "read", later)
        await job.give_back((await job.ask("train")).json())
        assert (await client.get("/v1/report")).json()["work"][0]["iterations"] == 0
        await job.ask("rollout", wait_s=25)
        assert (await client.get("/v1/report")).json()["work"][0]["iterations"] == 1
