"""A trace is what Perfetto opens: a strict reader finds nothing wrong with it, and finds in it what happened.

The reader below knows of Chrome's trace events what their specification and Perfetto's importer say, and nothing of
how ours are written. What it finds is the history: no more, no less, and all of it at the right time.

- Node-time in running phases is what the simulator's own meter counted.
- Parts of a slot's life follow each other without a gap; on one GPU no slot overlaps another.
- A slot that is lost, revoked or taken over, a restart, a second run: each shows.
- A part of a story (what one owner may see, what is left after a compaction) is told as far as it goes.
"""

import gzip
import json
import os
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from patience import PATIENCE_S
from simkit import checked

from rollmuxd.core import facts as f
from rollmuxd.core.causes import said
from rollmuxd.core.ids import Fence
from rollmuxd.core.inputs import NodeSpec
from rollmuxd.core.model import JobStatus, OrderKind, SlotStatus, StateStatus
from rollmuxd.core.spec import JobSpec, PhaseSpec, StateSpec, Want
from rollmuxd.sim import perfetto
from rollmuxd.sim.policies import policy_under_test
from rollmuxd.sim.workload import Pool, SimJob, Workload

METADATA = {
    "process_name": "name",
    "thread_name": "name",
    "process_sort_index": "sort_index",
    "thread_sort_index": "sort_index",
}


class Read:
    """A trace, read strictly: whatever is not in the format is an error."""

    def __init__(self, body):
        trace = json.loads(body)
        assert set(trace) == {"displayTimeUnit", "traceEvents"}
        assert trace["displayTimeUnit"] == "ms"
        self.processes, self.threads, self.order = {}, {}, {}
        self.slices, self.instants = [], []
        for event in trace["traceEvents"]:
            assert isinstance(event["pid"], int)
            assert isinstance(event["name"], str)
            assert event["name"]
            getattr(self, f"_{event['ph']}")(event)
        self._named()
        self._flat()

    def _M(self, event):
        (value,) = event["args"].items()
        assert value[0] == METADATA[event["name"]]
        if value[0] == "sort_index":
            assert isinstance(value[1], int)
            self.order[event["pid"], event.get("tid")] = value[1]
            return
        names = self.threads if event["name"] == "thread_name" else self.processes
        number = event["tid"] if event["name"] == "thread_name" else event["pid"]
        assert number not in names, "named twice"
        names[number] = value[1]

    def _X(self, event):
        assert isinstance(event["tid"], int)
        assert isinstance(event["ts"], int)
        assert isinstance(event["dur"], int)
        assert event["dur"] >= 0
        assert all(isinstance(value, str | int | float) for value in event["args"].values())
        self.slices.append(event)

    def _i(self, event):
        assert isinstance(event["tid"], int)
        assert isinstance(event["ts"], int)
        assert event["s"] in ("g", "p", "t")
        self.instants.append(event)

    def _named(self):
        process_of = {}
        for event in [*self.slices, *self.instants]:
            assert event["tid"] in self.threads, "a thread without a name"
            # Perfetto knows a thread by its id alone, and takes one with its process's id for the main one
            assert process_of.setdefault(event["tid"], event["pid"]) == event["pid"], "a thread in two processes"
            assert event["tid"] not in self.processes
        assert {event["pid"] for event in [*self.slices, *self.instants]} <= set(self.processes)

    def _flat(self):
        """No slice reaches into another: which of them would be the outer one is not said."""
        ended = {}
        for event in sorted(self.slices, key=lambda event: event["ts"]):
            assert event["ts"] >= ended.get(event["tid"], 0), f"{event} overlaps"
            ended[event["tid"]] = event["ts"] + event["dur"]

    def track(self, event):
        return self.processes[event["pid"]], self.threads[event["tid"]]

    def on(self, process, thread):
        found = [event for event in self.slices if self.track(event) == (process, thread)]
        return [(event["name"], event["ts"] // 1000, event["dur"] // 1000) for event in found]

    def parts(self, *kinds):
        """The parts of slots' lives by their end; of these kinds, if any are named."""
        found = [event for event in self.slices if self.track(event)[0] == "jobs" and "phase" in event["args"]]
        return [event for event in found if not kinds or event["cat"] in kinds]

    def told(self):
        """The same as ``running 30-50 lost: ...``."""
        return [f"{it['cat']} {span(it)} {it['args']['ended by']}" for it in self.parts()]

    def on_nodes(self, what):
        """What is on the tracks of nodes: ``moves``, ``state``; empty: slots."""
        found = [it for it in self.slices if self.track(it)[0].startswith("pool ")]
        return [it for it in found if (self.track(it)[1].partition(" +")[0].partition(" ")[2]) == what]

    def statuses(self):
        found = [it for it in self.slices if self.track(it)[0] == "jobs" and "phase" not in it["args"]]
        return [f"{it['name']} {span(it)} run {it['args']['run']}" for it in found]

    def moments(self, process):
        return [(it["ts"] // 1000, it["name"]) for it in self.instants if self.track(it)[0] == process]


def span(event):
    return f"{event['ts'] // 1000}-{(event['ts'] + event['dur']) // 1000}"


def written(path, facts, *window):
    perfetto.write(path, facts, *window)
    return Read(path.read_bytes())


@pytest.fixture
def traced(tmp_path):
    """The trace of some facts."""
    return lambda facts, *window: written(tmp_path / "traced.json", facts, *window)


NODE = "box/gpu0-3"
GPUS = tuple(f"box/gpu{n}" for n in range(4))
SPEC = JobSpec("math-7b", (PhaseSpec("rollout", ("rollout",)),), (Want("rollout"),))
STORY = [
    f.DaemonStarted(0, 1),
    f.NodeAdded(0, NodeSpec(NODE, "box", GPUS, ("rollout",), "H100", 80_000, 2.5)),
    f.JobRegistered(10, "j1", "team", "ann", 1, SPEC),
    f.SlotQueued(12, "s1", "j1", 1, "x1", "rollout", "r1"),
    f.JobPlaced(15, "j1", "g1", {"rollout": (NODE,)}, (), JobStatus.ADMITTED, "isolated"),
    f.SlotClaimed(20, "s1", GPUS, 0),
    f.OrderIssued(20, "o1", OrderKind.LOAD, "j1", 1, "rollout", NODE, "channel", "s1"),
    f.OrderEnded(30, "o1"),
    f.SlotGranted(30, "s1", Fence(1, 7)),
    f.SlotResized(40, "s1", GPUS[:2], tail=True),
    f.SlotReleased(50, "s1"),
    f.SlotOver(55, "s1"),
    f.NodeLost(60, NODE, said("ssh timed out")),
    f.JobEnded(70, "j1", said("done")),
    f.PlacementEnded(80, "j1", said("")),
]


def test_a_story_is_on_the_tracks_of_its_node_and_its_job(tmp_path):
    trace = written(tmp_path / "t.json", STORY)
    assert trace.on("pool rollout (H100)", NODE) == [
        ("math-7b loading", 20, 10),
        ("math-7b rollout", 30, 10),
        ("math-7b rollout, tail", 40, 10),
        ("math-7b released", 50, 5),
    ]
    assert trace.on("pool rollout (H100)", f"{NODE} moves") == [("load math-7b", 20, 10)]
    assert trace.on("pool rollout (H100)", f"{NODE} state") == [("lost", 60, 20)]
    assert trace.on("jobs", "math-7b (j1)") == [
        ("waits for rollout", 12, 8),
        ("loading", 20, 10),
        ("rollout", 30, 10),
        ("rollout, tail", 40, 10),
        ("released", 50, 5),
    ]
    assert trace.on("jobs", "math-7b (j1) status") == [("waiting", 10, 5), ("admitted in g1", 15, 55)]
    assert [(trace.track(event), event["name"]) for event in trace.instants] == [
        (("daemon", "events"), "daemon started (incarnation 1)"),
        (("jobs", "math-7b (j1) status"), "ended: done"),
    ]


def test_a_slice_tells_its_slot_fence_and_order(tmp_path):
    trace = written(tmp_path / "t.json", STORY)
    args = {event["name"]: event["args"] for event in trace.slices}
    assert args["math-7b rollout, tail"] == {
        "job": "j1",
        "owner": "team",
        "run": 1,
        "phase": "rollout",
        "slot": "s1",
        "fence": "1.7",
        "ended by": "released",
        "GPUs": 2,
        "nodes": NODE,
        "GPUs here": 2,
    }
    assert args["load math-7b"]["order"] == "o1"
    assert args["load math-7b"]["slot"] == "s1"
    assert args["load math-7b"]["outcome"] == "done"


def test_what_had_not_ended_says_so(tmp_path):
    trace = written(tmp_path / "t.json", STORY[:9])
    assert {event["name"] for event in trace.slices if "open" in event["args"]} == {
        *("math-7b rollout", "rollout", "admitted in g1"),
    }


def test_what_overlaps_on_a_node_goes_on_a_further_track(tmp_path):
    """A tail holds two GPUs while the next job runs on the other two."""
    facts = [
        *STORY[:10],
        f.JobRegistered(40, "j2", "team", "ann", 1, JobSpec("code-7b", SPEC.phases, SPEC.wants)),
        f.JobPlaced(40, "j2", "g1", {"rollout": (NODE,)}, (), JobStatus.ADMITTED, "packing"),
        f.SlotQueued(40, "s2", "j2", 1, "x2", "rollout", "r1"),
        f.SlotClaimed(41, "s2", GPUS[2:], 0),
        f.SlotGranted(44, "s2", Fence(1, 8)),
        f.SlotReleased(46, "s2"),
        f.SlotOver(46, "s2"),
        f.SlotReleased(50, "s1"),
        f.SlotOver(50, "s1"),
    ]
    trace = written(tmp_path / "t.json", facts)
    assert trace.on("pool rollout (H100)", f"{NODE} +1") == [("math-7b rollout, tail", 40, 10)]


# ---- of a simulation -------------------------------------------------------------------------------------------------

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
        cold_ms=dict.fromkeys(POOLS, 50_000),
        tail_from=tail,
        iterations=iterations,
    )


@pytest.fixture(scope="module")
def ran():
    """Three jobs on one node per pool, so that they take turns and shed tails: facts and outcome."""
    return simulate(sim_job("a", 100, 40), sim_job("b", 80, 60), sim_job("c", 90, 30, iterations=3))


@pytest.fixture(scope="module")
def simulated(ran):
    return ran[0]


def simulate(*jobs):
    pools = (Pool("rollout", "H20", 1.76, nodes=1), Pool("train", "H800", 5.28, nodes=1))
    facts = []
    outcome = checked.run(
        Workload("made", jobs, pools), policy_under_test("rollmux"), seed=0, accounting="work", hear=facts.append
    )
    return facts, outcome


def test_node_time_in_running_phases_is_what_the_meter_counted(traced):
    busy_time_is_metered(traced, *simulate(sim_job("a", 100, 40, tail=()), sim_job("b", 80, 60, tail=())))


def test_so_is_that_of_tails(traced, ran):
    busy_time_is_metered(traced, *ran)


def busy_time_is_metered(traced, facts, outcome):
    trace = traced(facts)
    for pool in outcome.pools:
        busy = sum(
            event["dur"] / 1000 * event["args"]["GPUs here"] / pool.gpus_per_node
            for event in trace.on_nodes("")
            if event["cat"] in ("running", "tail") and trace.track(event)[0] == f"pool {pool.name} ({pool.gpu_type})"
        )
        assert busy == pytest.approx(pool.busy_node_ms)
        assert busy > 0


def test_parts_of_a_slots_life_follow_each_other(traced, simulated):
    trace, lives = traced(simulated), {}
    assert set(trace.processes.values()) == {"daemon", "jobs", "pool rollout (H20)", "pool train (H800)"}
    for event in trace.parts():
        lives.setdefault(event["args"]["slot"], []).append(event)
    assert {event["cat"] for life in lives.values() for event in life} >= {"queued", "loading", "running", "tail"}
    for life in lives.values():
        assert all(event["ts"] + event["dur"] == after["ts"] for event, after in pairwise(life))
        # once, and again with more GPUs where it began on a part
        gpus = [event["args"]["GPUs"] for event in life if event["cat"] == "running"]
        assert gpus
        assert gpus == sorted(set(gpus))


def test_no_slot_overlaps_another_on_a_gpu(traced, simulated):
    trace = traced(simulated)
    edges = [
        (at, change * event["args"]["GPUs here"], trace.track(event)[1].partition(" +")[0])
        for event in trace.on_nodes("")
        for at, change in ((event["ts"], 1), (event["ts"] + event["dur"], -1))
    ]
    held = {}
    for _, change, node in sorted(edges):  # a slot that ends does so before one that begins at the same time
        held[node] = held.get(node, 0) + change
        assert 0 <= held[node] <= 8
    assert set(held.values()) == {0}


def test_every_move_of_a_state_is_told_with_its_slot(traced, simulated):
    moves = traced(simulated).on_nodes("moves")
    issued = {fact.order: fact.at for fact in simulated if isinstance(fact, f.OrderIssued)}
    took = {fact.order for fact in simulated if isinstance(fact, f.OrderEnded) and fact.at > issued[fact.order]}
    assert {event["args"]["order"] for event in moves} == took
    assert {event["cat"] for event in moves} >= {"load", "park"}
    assert all(event["args"]["outcome"] == "done" and event["dur"] > 0 for event in moves)
    assert all("slot" in event["args"] for event in moves if event["cat"] == "load")


def test_a_window_shows_what_the_whole_does_cut_to_it(traced, simulated):
    since, until = 200_000_000, 500_000_000
    whole = [
        (event["args"]["slot"], event["cat"], max(event["ts"], since), min(event["ts"] + event["dur"], until))
        for event in traced(simulated).parts()
        if event["ts"] < until and event["ts"] + event["dur"] > since
    ]
    window = traced(simulated, since // 1000, until // 1000).parts()
    cut = [(event["args"]["slot"], event["cat"], event["ts"], event["ts"] + event["dur"]) for event in window]
    assert sorted(cut) == sorted(whole)
    assert any("open" in event["args"] for event in window)


def test_tracks_are_sorted_nodes_as_they_came_and_a_nodes_own_together(tmp_path, simulated):
    trace = written(tmp_path / "t.json", simulated)
    pool = next(pid for pid, name in trace.processes.items() if name.startswith("pool rollout"))
    places = sorted((place, trace.threads[tid]) for (pid, tid), place in trace.order.items() if pid == pool and tid)
    assert len({place for place, _ in places}) == len(places)
    nodes = [name.split()[0] for _, name in places]
    assert nodes == sorted(nodes)
    assert places[0][1] == "rollout1/gpu0-7"


def test_a_window_reads_strictly_too_and_nothing_is_outside_of_it(tmp_path, simulated):
    trace = written(tmp_path / "t.json", simulated, 300_000, 700_000)
    events = [*trace.slices, *trace.instants]
    assert min(event["ts"] for event in events) == 300_000_000
    assert max(event["ts"] + event.get("dur", 0) for event in events) == 700_000_000


def test_a_name_ending_in_gz_is_packed_and_equal_histories_give_equal_bytes(tmp_path, simulated):
    perfetto.write(tmp_path / "plain.json", simulated)
    perfetto.write(tmp_path / "one.json.gz", simulated)
    perfetto.write(tmp_path / "two.json.gz", simulated)
    packed = (tmp_path / "one.json.gz").read_bytes()
    assert packed == (tmp_path / "two.json.gz").read_bytes()
    assert packed[4:8] == bytes(4), "a time in the header"
    assert gzip.decompress(packed) == (tmp_path / "plain.json").read_bytes()


def test_memory_does_not_grow_with_the_history(tmp_path):
    def endless(turns):
        yield from STORY[:5]
        for turn in range(turns):
            at, slot = 100 + 10 * turn, f"s{turn + 2}"
            yield f.SlotQueued(at, slot, "j1", 1, "x1", "rollout", slot)
            yield f.SlotClaimed(at + 1, slot, GPUS, 0)
            yield f.SlotGranted(at + 2, slot, Fence(1, turn + 2))
            yield f.SlotReleased(at + 8, slot)
            yield f.SlotOver(at + 9, slot)

    peaks = []
    for turns in (100, 1_500):
        tracemalloc.start()
        perfetto.write(tmp_path / "t.json", endless(turns))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] * 1.5


def test_a_pipe_is_written_to_and_a_link_is_followed(tmp_path):
    """A trace that is written to a device must not take its place: for root /dev/null would be a file then."""
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(pipe.read_bytes)
        perfetto.write(pipe, STORY)
        assert Read(read.result(timeout=PATIENCE_S)).slices
    assert pipe.is_fifo()
    link.symlink_to(tmp_path / "there.json")
    perfetto.write(link, STORY)
    assert link.is_symlink()
    assert Read((tmp_path / "there.json").read_bytes()).slices


def test_it_says_how_much_was_written_and_of_what_time(tmp_path):
    assert perfetto.write(tmp_path / "t.json", STORY) == (13, 0, 80)
    assert perfetto.write(tmp_path / "t.json", []) == (0, 0, 0)


# ---- of odd lives ----------------------------------------------------------------------------------------------------


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


def test_a_lost_slot_ends_when_it_was_lost_and_is_reclaimed_until_its_gpus_are_clean(traced):
    facts = story(
        f.SlotGranted(30, "s1", Fence(1, 1)),
        f.SlotTakenAway(50, "s1", SlotStatus.LOST, said("no heartbeat")),
        f.SlotOver(70, "s1"),
    )
    assert traced(facts).told() == [
        "queued 12-20 claimed",
        "loading 20-30 granted",
        "running 30-50 lost: no heartbeat",
        "reclaiming 50-70 over",
    ]


def test_a_slot_revoked_while_it_loads_never_ran(traced):
    facts = story(f.SlotTakenAway(25, "s1", SlotStatus.REVOKED, said("too slow"), "ann"), f.SlotOver(40, "s1"))
    assert traced(facts).told() == [
        "queued 12-20 claimed",
        "loading 20-25 revoked by ann: too slow",
        "reclaiming 25-40 over",
    ]


def test_a_slot_whose_state_could_not_be_loaded_says_so(traced):
    facts = story(
        f.OrderIssued(20, "o1", OrderKind.LOAD, "j1", 1, "rollout", NODE, "channel", "s1"),
        f.OrderFaulted(28, "o1", said("out of memory")),
        f.SlotTakenAway(28, "s1", SlotStatus.FAULTED, said("out of memory")),
        f.SlotOver(29, "s1"),
    )
    trace = traced(facts)
    assert trace.told()[1] == "loading 20-28 faulted: out of memory"
    (order,) = trace.on_nodes("moves")
    assert (order["name"], span(order), order["args"]["outcome"]) == ("load math-7b", "20-28", "failed: out of memory")
    assert (order["args"]["slot"], trace.track(order)[1]) == ("s1", f"{NODE} moves")


def test_an_order_without_an_end_ends_when_contact_was_lost_or_its_state_was_seen(traced):
    issued = f.OrderIssued(20, "o1", OrderKind.PARK, "j1", 1, "rollout", NODE, "channel")
    lost = story(issued, f.OrderContactLost(25, "o1", said("timeout")), f.OrderEnded(90, "o1"))
    (order,) = traced(lost).on_nodes("moves")
    assert (span(order), order["args"]["outcome"]) == ("20-25", "contact lost: timeout")
    (order,) = traced(story(issued, f.StateObserved(33, "j1", "rollout", NODE, StateStatus.PARKED))).on_nodes("moves")
    assert (span(order), order["args"]["outcome"]) == ("20-33", "seen parked")


def test_a_tail_holds_the_gpus_that_it_kept_and_may_grow_again(traced):
    facts = story(
        f.SlotGranted(30, "s1", Fence(1, 7)),
        f.SlotResized(40, "s1", GPUS[:2], tail=True),
        f.SlotResized(45, "s1", GPUS[:1], tail=True),
        f.SlotResized(50, "s1", GPUS),
        f.SlotReleased(60, "s1"),
        f.SlotOver(60, "s1"),
    )
    running = [it for it in traced(facts).on_nodes("") if it["cat"] in ("running", "tail")]
    assert [(it["cat"], span(it), it["args"]["GPUs here"]) for it in running] == [
        ("running", "30-40", 4),
        ("tail", "40-45", 2),
        ("tail", "45-50", 1),
        ("running", "50-60", 4),
    ]
    assert {it["args"]["fence"] for it in running} == {"1.7"}


def test_a_slot_continues_over_a_restart_of_the_daemon(traced):
    trace = traced(story(f.SlotGranted(30, "s1", Fence(1, 1)), f.DaemonStarted(40, 1), f.SlotReleased(60, "s1")))
    assert trace.told()[-1] == "running 30-60 released"
    assert trace.parts()[-1]["args"]["fence"] == "1.1"
    assert trace.moments("daemon") == [
        (0, "daemon started (incarnation 1)"),
        (40, "daemon started (incarnation 1)"),
    ]


def test_a_withdrawn_request_waited_and_came_to_nothing(traced):
    facts = [
        *story(),
        f.SlotQueued(50, "s2", "j1", 1, "x1", "rollout", "r2"),
        f.SlotWithdrawn(70, "s2", said("gave up")),
    ]
    assert "queued 50-70 withdrawn: gave up" in traced(facts).told()


def test_what_has_not_ended_is_open_and_reaches_to_the_last_fact(traced):
    trace = traced(story(f.SlotGranted(30, "s1", Fence(1, 1)), f.LoopStalled(80, 100)))
    assert {(it["name"], span(it)) for it in trace.slices if "open" in it["args"]} == {
        ("rollout", "30-80"),
        ("math-7b rollout", "30-80"),
        ("admitted in g1", "15-80"),
    }


def test_a_window_that_ends_after_all_is_not_filled_with_what_no_fact_told(traced):
    facts = story(f.SlotGranted(30, "s1", Fence(1, 1)), f.SlotReleased(50, "s1"), f.NodeLost(60, NODE, said("gone")))
    assert max(it["ts"] + it["dur"] for it in traced(facts, None, 1_000).slices) == 60_000


def test_a_job_is_told_by_its_status_and_its_group_over_two_runs(traced):
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
    trace = traced(facts)
    assert trace.statuses() == [
        "waiting 10-15 run 1",
        "admitted in g1 15-30 run 1",
        "paused in g1 30-40 run 1",
        "admitted in g1 40-50 run 1",
        "quarantined in g1 50-55 run 1",
        "waiting 55-70 run 1",
        "probing in g2 70-80 run 1",
        "admitted in g2 80-90 run 1",
        "lost in g2 90-95 run 1",
        "waiting 110-120 run 2",
    ]
    assert trace.moments("jobs") == [(95, "ended: nothing is left of it"), (120, "ended: done")]


def test_a_node_shows_when_it_was_not_simply_up(traced):
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
    assert [f"{it['name']} {span(it)} {it['args'].get('reason')}" for it in traced(facts).on_nodes("state")] == [
        "occupied 30-40 pid 7 of bob",
        "draining 50-60 by ann",
        "drained 60-70 None",
        "lost 80-90 ssh timed out",
    ]


def test_a_host_is_said_to_have_booted_only_when_it_was_seen_before(traced):
    trace = traced([f.HostBooted(1, "box", "b1"), f.HostBooted(9, "box", "b2")])
    assert trace.moments("daemon") == [(9, "host box booted")]


def test_a_story_without_its_beginning_is_told_as_far_as_it_goes(traced):
    part = story(
        f.SlotGranted(30, "s1", Fence(1, 1)),
        f.OrderEnded(31, "o9"),
        f.SlotReleased(50, "s1"),
        f.SlotOver(52, "s1"),
        f.PlacementEnded(60, "j1", said("")),
        f.SlotOver(61, "s9"),
    )[6:]
    trace = traced(part)
    assert trace.told() == ["running 30-50 released", "released 50-52 over"]
    assert trace.statuses() == []
    assert {event["args"]["phase"] for event in trace.slices} == {"?"}


def test_a_node_that_no_fact_introduced_goes_by_its_host(traced):
    facts = story(f.SlotGranted(30, "s1", Fence(1, 1)), f.SlotReleased(50, "s1"))
    del facts[1]
    trace = traced(facts)
    (running,) = [it for it in trace.on_nodes("") if it["cat"] == "running"]
    assert (trace.track(running), running["args"]["GPUs here"]) == (("pool ?", "box"), 4)


def test_a_job_has_its_name_from_the_first_fact_that_tells_it(traced):
    trace = traced([f.JobResumed(5, "j1", "ann"), *story()])
    assert {trace.track(it)[1] for it in trace.slices} == {"math-7b (j1)", "math-7b (j1) status"}
