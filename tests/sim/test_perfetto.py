"""A trace is what Perfetto opens: a strict reader finds nothing wrong with it, and finds the history in it.

The reader below knows of Chrome's trace events what their specification and Perfetto's importer say, and nothing of
how ours are written.
"""

import gzip
import json
import os
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from patience import PATIENCE_S
from simkit import checked

from rollmuxd.core import facts as f
from rollmuxd.core.causes import said
from rollmuxd.core.ids import Fence
from rollmuxd.core.inputs import NodeSpec
from rollmuxd.core.model import JobStatus, OrderKind
from rollmuxd.core.spec import JobSpec, PhaseSpec, StateSpec, Want
from rollmuxd.sim import history, perfetto
from rollmuxd.sim.policies import policy_under_test
from rollmuxd.sim.workload import Pool, SimJob, Starts, Workload

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


def written(path, facts, *window):
    perfetto.write(path, history.items(facts, *window))
    return Read(path.read_bytes())


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


@pytest.fixture(scope="module")
def simulated():
    def job(name, *took, iterations=8):
        pools = ("rollout", "train")
        spec = JobSpec(
            name=name,
            phases=tuple(PhaseSpec(pool, (pool,), ms, min_gpus=2) for pool, ms in zip(pools, took, strict=True)),
            wants=tuple(Want(pool) for pool in pools),
            states=tuple(StateSpec(pool, gpu_mb=60_000, ram_mb=200_000, load_ms=500, park_ms=300) for pool in pools),
        )
        starts = dict.fromkeys(pools, Starts(0, 500))
        footprint = dict.fromkeys(pools, 1)
        return SimJob(
            name, "made", 0, 1, spec, (took,), footprint, starts=starts, tail_from=(0.6,), iterations=iterations
        )

    pools = (Pool("rollout", "H20", 1.76, nodes=2), Pool("train", "H800", 5.28, nodes=1))
    jobs = (job("a", 100_000, 40_000), job("b", 80_000, 60_000), job("c", 90_000, 30_000), job("d", 70_000, 50_000))
    facts = []
    checked.run(
        Workload("made", jobs, pools), policy_under_test("rollmux"), seed=0, accounting="work", hear=facts.append
    )
    return facts


def test_a_simulation_of_four_jobs_reads_strictly_and_nothing_of_it_is_missing(tmp_path, simulated):
    trace = written(tmp_path / "t.json", simulated)
    spans = [item for item in history.items(simulated) if isinstance(item, history.SlotSpan)]
    shown = Counter(trace.processes[event["pid"]] for event in trace.slices if event["cat"] in ("running", "tail"))
    running = [span for span in spans if span.kind in ("running", "tail")]
    assert any(span.kind == "tail" for span in running)
    assert shown["jobs"] == len(running)
    assert shown["pool rollout (H20)"] + shown["pool train (H800)"] == sum(len(span.nodes) for span in running)
    assert set(trace.processes.values()) == {"daemon", "jobs", "pool rollout (H20)", "pool train (H800)"}


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
    perfetto.write(tmp_path / "plain.json", history.items(simulated))
    perfetto.write(tmp_path / "one.json.gz", history.items(simulated))
    perfetto.write(tmp_path / "two.json.gz", history.items(simulated))
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
        perfetto.write(tmp_path / "t.json", history.items(endless(turns)))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] * 1.5


def test_a_pipe_is_written_to_and_a_link_is_followed(tmp_path):
    """A trace that is written to a device must not take its place: for root /dev/null would be a file then."""
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(pipe.read_bytes)
        perfetto.write(pipe, history.items(STORY))
        assert Read(read.result(timeout=PATIENCE_S)).slices
    assert pipe.is_fifo()
    link.symlink_to(tmp_path / "there.json")
    perfetto.write(link, history.items(STORY))
    assert link.is_symlink()
    assert Read((tmp_path / "there.json").read_bytes()).slices


def test_a_writing_that_fails_leaves_what_was_there(tmp_path):
    def broken():
        yield from history.items(STORY)
        raise RuntimeError("the disk of facts broke")

    path = tmp_path / "t.json"
    path.write_text("as it was")
    with pytest.raises(RuntimeError, match="broke"):
        perfetto.write(path, broken())
    assert path.read_text() == "as it was"
    assert list(tmp_path.iterdir()) == [path]


def test_it_says_how_much_was_written_and_of_what_time(tmp_path):
    assert perfetto.write(tmp_path / "t.json", history.items(STORY)) == (13, 0, 80)
    assert perfetto.write(tmp_path / "t.json", []) == (0, 0, 0)
