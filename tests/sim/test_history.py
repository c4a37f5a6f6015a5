"""What is told of a history is what happened: no more, no less, and all of it at the right time.

- Node-time in running phases is what the simulator's own meter counted.
- Parts of a slot's life follow each other without a gap; on one GPU nobody overlaps anybody.
- A slot that is lost, revoked or taken over, a restart, a second run: each shows.
- A part of a story (what one owner may see, what is left after a compaction) is told as far as it goes.
"""

from itertools import pairwise

import pytest
from simkit import checked

from rollmuxd.core import facts as f
from rollmuxd.core.causes import said
from rollmuxd.core.ids import Fence
from rollmuxd.core.inputs import NodeSpec
from rollmuxd.core.model import JobStatus, OrderKind, SlotStatus, StateStatus
from rollmuxd.core.spec import JobSpec, PhaseSpec, StateSpec, Want
from rollmuxd.sim import history
from rollmuxd.sim.history import History, JobSpan, Moment, NodeInfo, NodeSpan, OrderSpan, SlotSpan
from rollmuxd.sim.policies import policy_under_test
from rollmuxd.sim.workload import Pool, SimJob, Starts, Workload

POOLS = ("rollout", "train")


def sim_job(name, rollout_s, train_s, iterations=6, tail=(0.6,)):
    phases = tuple(
        PhaseSpec(pool, (pool,), took * 1000, min_gpus=2 if pool == "rollout" else 0)
        for pool, took in zip(POOLS, (rollout_s, train_s), strict=True)
    )
    spec = JobSpec(
        name=name,
        phases=phases,
        side=(PhaseSpec("init", POOLS, 50_000),),
        wants=tuple(Want(pool) for pool in POOLS),
        states=tuple(StateSpec(pool, gpu_mb=60_000, ram_mb=200_000, load_ms=5_000, park_ms=3_000) for pool in POOLS),
    )
    return SimJob(
        name=name,
        kind="made",
        arrives_ms=0,
        lasts_ms=iterations * (rollout_s + train_s) * 1000,
        spec=spec,
        series=((rollout_s * 1000, train_s * 1000),),
        footprint=dict.fromkeys(POOLS, 1),
        starts=dict.fromkeys(POOLS, Starts(cold_ms=50_000, warm_ms=5_000)),
        tail_from=tail,
        iterations=iterations,
    )


@pytest.fixture(scope="module")
def simulated():
    """Three jobs on one node per pool, so that they take turns and shed tails."""
    return simulate(sim_job("a", 100, 40), sim_job("b", 80, 60), sim_job("c", 90, 30, iterations=3))


def simulate(*jobs):
    pools = (Pool("rollout", "H20", 1.76, nodes=1), Pool("train", "H800", 5.28, nodes=1))
    facts = []
    outcome = checked.run(
        Workload("made", jobs, pools), policy_under_test("rollmux"), seed=0, accounting="work", hear=facts.append
    )
    return facts, outcome


def spans(facts, kind, **like):
    found = [item for item in history.items(facts) if isinstance(item, kind)]
    return [item for item in found if all(getattr(item, name) == value for name, value in like.items())]


# ---- of a simulation -------------------------------------------------------------------------------------------------


def test_node_time_in_running_phases_is_what_the_meter_counted():
    busy_time_is_metered(*simulate(sim_job("a", 100, 40, tail=()), sim_job("b", 80, 60, tail=())))


def test_so_is_that_of_tails(simulated):
    busy_time_is_metered(*simulated)


def busy_time_is_metered(facts, outcome):
    pool_of = {item.id: item.pool for item in spans(facts, NodeInfo)}
    for pool in outcome.pools:
        busy = sum(
            (span.end - span.start) * gpus / pool.gpus_per_node
            for span in spans(facts, SlotSpan)
            if span.kind in ("running", "tail")
            for node, gpus in span.nodes.items()
            if pool_of[node] == pool.name
        )
        assert busy == pytest.approx(pool.busy_node_ms)
        assert busy > 0


def test_parts_of_a_slots_life_follow_each_other(simulated):
    facts, _ = simulated
    lives = {}
    for span in spans(facts, SlotSpan):
        lives.setdefault(span.slot, []).append(span)
    assert {span.kind for life in lives.values() for span in life} >= {"queued", "loading", "running", "tail"}
    for life in lives.values():
        assert all(span.end == after.start for span, after in pairwise(life))
        # once, and again with more GPUs where it began on a part
        gpus = [sum(span.nodes.values()) for span in life if span.kind == "running"]
        assert gpus
        assert gpus == sorted(set(gpus))


def test_nobody_overlaps_anybody_on_a_gpu(simulated):
    facts, _ = simulated
    edges = [
        (at, change * gpus, node)
        for span in spans(facts, SlotSpan)
        for node, gpus in span.nodes.items()
        for at, change in ((span.start, 1), (span.end, -1))
    ]
    held = {}
    for _, change, node in sorted(edges):  # who leaves does so before who comes at the same time
        held[node] = held.get(node, 0) + change
        assert 0 <= held[node] <= 8
    assert set(held.values()) == {0}


def test_every_move_of_a_state_is_told_with_its_slot(simulated):
    facts, _ = simulated
    orders = spans(facts, OrderSpan)
    issued = {fact.order: fact.at for fact in facts if isinstance(fact, f.OrderIssued)}
    took = {fact.order for fact in facts if isinstance(fact, f.OrderEnded) and fact.at > issued[fact.order]}
    assert {order.order for order in orders} == took
    assert {order.kind for order in orders} >= {"load", "park"}
    assert all(order.outcome == "done" and order.end > order.start for order in orders)


def test_spans_come_by_their_end(simulated):
    facts, _ = simulated
    ends = [item.end for item in history.items(facts) if isinstance(item, history.Span)]
    assert ends == sorted(ends)


def test_only_what_is_open_is_kept(simulated):
    facts, _ = simulated
    folding = History()
    for fact in facts:
        folding.see(fact)
    # a simulation may stop when the last job has ended, before its nodes have left its group
    assert len(folding._jobs) <= 1
    assert list(folding.close()) == []


def test_a_window_shows_what_the_whole_does_cut_to_it(simulated):
    facts, _ = simulated
    since, until = 200_000, 500_000
    window = [item for item in history.items(facts, since, until) if isinstance(item, SlotSpan)]
    whole = [
        (span.slot, span.kind, max(span.start, since), min(span.end, until))
        for span in spans(facts, SlotSpan)
        if span.start < until and span.end > since
    ]
    assert sorted((span.slot, span.kind, span.start, span.end) for span in window) == sorted(whole)
    assert any(span.open for span in window)


def test_a_window_that_ends_after_all_is_not_filled_with_what_nobody_saw():
    facts = story(f.SlotGranted(30, "s1", Fence(1, 1)), f.SlotReleased(50, "s1"), f.NodeLost(60, NODE, said("gone")))
    ends = [item.end for item in history.items(facts, None, 1_000) if isinstance(item, history.Span)]
    assert max(ends) == 60


# ---- of odd lives ----------------------------------------------------------------------------------------------------

NODE = "box/gpu0-3"
GPUS = tuple(f"box/gpu{n}" for n in range(4))
SPEC = JobSpec("math-7b", (PhaseSpec("rollout", ("rollout",)),), (Want("rollout"),))


def story(*more):
    """A job on its node, its slot s1 claimed; and what then comes."""
    return [
        f.DaemonStarted(0, 1),
        f.NodeAdded(0, NodeSpec(NODE, "box", GPUS, ("rollout",), "H100", 80_000, 2.5)),
        f.JobRegistered(10, "j1", "team", "ann", 1, SPEC),
        f.SlotQueued(12, "s1", "j1", 1, "x1", "rollout", "r1"),
        f.JobPlaced(15, "j1", "g1", {"rollout": (NODE,)}, (), JobStatus.ADMITTED, "isolated"),
        f.SlotClaimed(20, "s1", GPUS, 0),
        *more,
    ]


def told(facts):
    """Slot parts as ``running 30-50 lost: ...``."""
    return [f"{span.kind} {span.start}-{span.end} {span.ended_by}".rstrip() for span in spans(facts, SlotSpan)]


def test_a_lost_slot_ends_when_it_was_lost_and_is_reclaimed_until_its_gpus_are_clean():
    assert told(
        story(
            f.SlotGranted(30, "s1", Fence(1, 1)),
            f.SlotTakenAway(50, "s1", SlotStatus.LOST, said("no heartbeat")),
            f.SlotOver(70, "s1"),
        )
    ) == [
        "queued 12-20 claimed",
        "loading 20-30 granted",
        "running 30-50 lost: no heartbeat",
        "reclaiming 50-70 over",
    ]


def test_a_slot_revoked_while_it_loads_never_ran():
    facts = story(f.SlotTakenAway(25, "s1", SlotStatus.REVOKED, said("too slow"), "ann"), f.SlotOver(40, "s1"))
    assert told(facts) == [
        "queued 12-20 claimed",
        "loading 20-25 revoked by ann: too slow",
        "reclaiming 25-40 over",
    ]


def test_a_slot_whose_state_could_not_be_loaded_says_so():
    facts = story(
        f.OrderIssued(20, "o1", OrderKind.LOAD, "j1", 1, "rollout", NODE, "channel", "s1"),
        f.OrderFaulted(28, "o1", said("out of memory")),
        f.SlotTakenAway(28, "s1", SlotStatus.FAULTED, said("out of memory")),
        f.SlotOver(29, "s1"),
    )
    assert told(facts)[1] == "loading 20-28 faulted: out of memory"
    (order,) = spans(facts, OrderSpan)
    assert (order.kind, order.start, order.end, order.outcome) == ("load", 20, 28, "failed: out of memory")
    assert (order.slot, order.node, order.who.name) == ("s1", NODE, "math-7b")


def test_an_order_nobody_knows_of_ends_when_contact_was_lost_or_its_state_was_seen():
    issued = f.OrderIssued(20, "o1", OrderKind.PARK, "j1", 1, "rollout", NODE, "channel")
    (order,) = spans(story(issued, f.OrderContactLost(25, "o1", said("timeout")), f.OrderEnded(90, "o1")), OrderSpan)
    assert (order.end, order.outcome) == (25, "contact lost: timeout")
    (order,) = spans(story(issued, f.StateObserved(33, "j1", "rollout", NODE, StateStatus.PARKED)), OrderSpan)
    assert (order.end, order.outcome) == (33, "seen parked")


def test_a_tail_holds_the_gpus_that_it_kept_and_may_grow_again():
    facts = story(
        f.SlotGranted(30, "s1", Fence(1, 7)),
        f.SlotResized(40, "s1", GPUS[:2], tail=True),
        f.SlotResized(45, "s1", GPUS[:1], tail=True),
        f.SlotResized(50, "s1", GPUS),
        f.SlotReleased(60, "s1"),
        f.SlotOver(60, "s1"),
    )
    running = [span for span in spans(facts, SlotSpan) if span.kind in ("running", "tail")]
    assert [(span.kind, span.start, span.end, span.nodes[NODE]) for span in running] == [
        ("running", 30, 40, 4),
        ("tail", 40, 45, 2),
        ("tail", 45, 50, 1),
        ("running", 50, 60, 4),
    ]
    assert {span.fence for span in running} == {Fence(1, 7)}


def test_a_slot_goes_on_over_a_restart_of_the_daemon():
    facts = story(
        f.SlotGranted(30, "s1", Fence(1, 1)),
        f.DaemonStarted(40, 1),
        f.SlotReleased(60, "s1"),
    )
    assert told(facts)[-1] == "running 30-60 released"
    assert spans(facts, SlotSpan)[-1].fence == Fence(1, 1)
    assert [(moment.at, moment.what) for moment in spans(facts, Moment)] == [
        (0, "daemon started (incarnation 1)"),
        (40, "daemon started (incarnation 1)"),
    ]


def test_a_withdrawn_request_waited_and_came_to_nothing():
    facts = [
        *story(),
        f.SlotQueued(50, "s2", "j1", 1, "x1", "rollout", "r2"),
        f.SlotWithdrawn(70, "s2", said("gave up")),
    ]
    assert "queued 50-70 withdrawn: gave up" in told(facts)


def test_what_has_not_ended_is_open_and_reaches_to_the_last_fact():
    facts = story(f.SlotGranted(30, "s1", Fence(1, 1)), f.LoopStalled(80, 100))
    ongoing = [item for item in history.items(facts) if isinstance(item, history.Span) and item.open]
    assert [(type(item).__name__, item.start, item.end) for item in ongoing] == [
        ("SlotSpan", 30, 80),
        ("JobSpan", 15, 80),
    ]


def test_a_job_is_told_by_its_status_and_its_group_over_two_runs():
    facts = [
        *story(f.SlotTakenAway(25, "s1", SlotStatus.REVOKED, said(""), "ann"), f.SlotOver(25, "s1")),
        f.JobPaused(30, "j1", "ann"),
        f.JobResumed(40, "j1", "ann"),
        f.JobQuarantined(50, "j1", said("park failed")),
        f.JobResumed(55, "j1", "ann"),
        f.PlacementEnded(60, "j1", said("")),
        f.JobPlaced(70, "j1", "g2", {"rollout": (NODE,)}, (), JobStatus.PROBING, "packing"),
        f.JobPromised(80, "j1", promised=True),
        f.JobLost(90, "j1", said("session lost")),
        f.JobEnded(95, "j1", said("nothing is left of it")),
        f.PlacementEnded(96, "j1", said("")),
        f.JobRegistered(110, "j1", "team", "ann", 2, SPEC),
        f.JobEnded(120, "j1", said("done"), "ann"),
    ]
    assert [(span.kind, span.start, span.end, span.group, span.run) for span in spans(facts, JobSpan)] == [
        ("waiting", 10, 15, None, 1),
        ("admitted", 15, 30, "g1", 1),
        ("paused", 30, 40, "g1", 1),
        ("admitted", 40, 50, "g1", 1),
        ("quarantined", 50, 55, "g1", 1),
        ("waiting", 55, 70, None, 1),
        ("probing", 70, 80, "g2", 1),
        ("admitted", 80, 90, "g2", 1),
        ("lost", 90, 95, "g2", 1),
        ("waiting", 110, 120, None, 2),
    ]
    assert [(moment.at, moment.what) for moment in spans(facts, Moment) if moment.who] == [
        (95, "ended: nothing is left of it"),
        (120, "ended: done"),
    ]


def test_a_node_shows_when_it_was_not_simply_up():
    facts = [
        *story(),
        f.NodeUp(21, NODE),
        f.NodeOccupied(30, NODE, said("pid 7 of bob")),
        f.NodeUp(40, NODE),
        f.NodeDraining(50, NODE, "ann"),
        f.NodeDrained(60, NODE),
        f.NodeUndrained(70, NODE, "ann"),
        f.NodeLost(80, NODE, said("ssh timed out")),
        f.NodeUnknown(90, NODE),
    ]
    assert [(span.kind, span.start, span.end, span.reason) for span in spans(facts, NodeSpan)] == [
        ("occupied", 30, 40, "pid 7 of bob"),
        ("draining", 50, 60, "by ann"),
        ("drained", 60, 70, ""),
        ("lost", 80, 90, "ssh timed out"),
    ]


def test_a_host_is_said_to_have_booted_only_when_it_was_seen_before():
    facts = [f.HostBooted(1, "box", "b1"), f.HostBooted(9, "box", "b2")]
    assert [(moment.at, moment.what) for moment in spans(facts, Moment)] == [(9, "host box booted")]


def test_a_story_without_its_beginning_is_told_as_far_as_it_goes():
    part = story(
        f.SlotGranted(30, "s1", Fence(1, 1)),
        f.OrderEnded(31, "o9"),
        f.SlotReleased(50, "s1"),
        f.SlotOver(52, "s1"),
        f.PlacementEnded(60, "j1", said("")),
        f.SlotOver(61, "s9"),
    )[6:]
    assert told(part) == ["running 30-50 released", "released 50-52 over"]
    assert spans(part, JobSpan) == []
    (span, _) = spans(part, SlotSpan)
    assert (span.who.name, span.phase, span.nodes) == ("?", "?", {})


def test_a_node_that_nobody_introduced_goes_by_its_host():
    facts = story(f.SlotGranted(30, "s1", Fence(1, 1)), f.SlotReleased(50, "s1"))
    del facts[1]
    introduced, running = {}, None
    for item in history.items(facts):
        if isinstance(item, NodeInfo):
            introduced[item.id] = item.pool
        if isinstance(item, SlotSpan) and item.kind == "running":
            running = item
            assert set(item.nodes) <= set(introduced)
    assert introduced == {NODE: "?", "box": "?"}
    assert running.nodes == {"box": 4}


def test_facts_are_read_as_the_api_has_them():
    shown = {"seq": 17, "at": 30, "fact": "slot_granted", "slot": "s1", "fence": [1, 2]}
    assert history.fact_of(shown) == f.SlotGranted(30, "s1", Fence(1, 2))
    with pytest.raises(ValueError, match="slot_bought"):
        history.fact_of({"fact": "slot_bought", "at": 1})
