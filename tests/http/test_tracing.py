"""Spans say when who waited, loaded and ran, as the facts have it; and they come to a collector that is there."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry comes with the extra otel")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rollmuxd.core import facts as f
from rollmuxd.core.causes import said
from rollmuxd.core.ids import Fence
from rollmuxd.core.model import Job, Slot, SlotStatus
from rollmuxd.core.spec import JobSpec, PhaseSpec, Want
from rollmuxd.core.state import State
from rollmuxd.daemon.entries import entries
from rollmuxd.daemon.tracing import Spans, from_environment

SPEC = JobSpec(
    name="math",
    phases=(PhaseSpec("rollout", ("rollout",)), PhaseSpec("train", ("train",))),
    wants=(Want("rollout"), Want("train")),
)


def queued(at, slot, phase, *, iteration=False):
    return f.SlotQueued(at, slot, "j1", 1, "e1", phase, slot, iteration=iteration)


ITERATION = [
    f.JobRegistered(1_000, "j1", "vision", "ada", 1, SPEC),
    queued(2_000, "s1", "rollout", iteration=True),
    f.SlotClaimed(5_000, "s1", ("h/gpu0", "h/gpu1"), 0),
    f.SlotGranted(6_000, "s1", Fence(1, 1)),
    f.SlotReleased(16_000, "s1"),
    queued(16_000, "s2", "train"),
    f.SlotClaimed(18_000, "s2", ("h/gpu2",), 1),
    f.SlotGranted(18_000, "s2", Fence(1, 2)),
    f.SlotTakenAway(20_000, "s2", SlotStatus.LOST, said("no heartbeat")),
    queued(21_000, "s3", "rollout", iteration=True),
    f.JobEnded(22_000, "j1", said("enough")),
]


def entries_of(facts, state):
    """The facts, with the jobs and slots that they are about."""
    made = []
    for number, fact in enumerate(facts, 1):
        slot = state.slots.get(getattr(fact, "slot", ""))
        match fact:
            case f.JobRegistered():
                state.jobs[fact.job] = Job(
                    id=fact.job, owner=fact.owner, user=fact.user, spec=fact.spec, registered_at=0
                )
            case f.SlotQueued():
                state.slots[fact.slot] = Slot(fact.slot, fact.job, 1, "e1", fact.phase, fact.slot, fact.at)
            case f.SlotClaimed():
                slot.claimed_at, slot.gpus = fact.at, fact.gpus
            case f.SlotGranted():
                slot.granted_at = fact.at
            case f.SlotTakenAway():
                slot.ended, slot.reason = fact.how, fact.reason
            case f.SlotReleased() | f.SlotWithdrawn() if slot:
                slot.ended = SlotStatus(f.name(fact).removeprefix("slot_"))
        made += entries(state, [(number, fact)], {})
    return made


@pytest.fixture
def made():
    """The spans of these facts, by their names; several of one name in the order in which they ended."""

    def make(facts, state=None):
        kept = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(kept))
        spans = Spans(provider)
        spans.sink(entries_of(facts, state or State()))
        found = {}
        for span in kept.get_finished_spans():
            found.setdefault(span.name, []).append(span)
        provider.shutdown()
        return found

    return make


def seconds(span):
    return span.start_time / 1e9, span.end_time / 1e9


def test_an_iteration_is_a_trace_and_its_phases_have_parts_that_follow_each_other(made):
    spans = made(ITERATION)
    (iteration, *_), (rollout, *_) = spans["iteration"], spans["rollout"]
    assert seconds(iteration) == (2, 21)
    assert iteration.parent is None
    assert dict(iteration.attributes) == {"rollmux.job": "math", "rollmux.owner": "vision", "rollmux.run": 1}
    assert seconds(rollout) == (2, 16)
    assert rollout.parent.span_id == iteration.context.span_id
    assert rollout.attributes["rollmux.gpus"] == ("h/gpu0", "h/gpu1")
    parts = [spans[name][0] for name in ("wait", "load", "run")]
    assert [seconds(part) for part in parts] == [(2, 5), (5, 6), (6, 16)]
    assert {part.parent.span_id for part in parts} == {rollout.context.span_id}
    assert {span.context.trace_id for span in (iteration, rollout, *parts)} == {iteration.context.trace_id}


def test_a_slot_that_was_lost_is_an_error_that_says_why(made):
    (train,) = made(ITERATION)["train"]
    assert train.attributes["rollmux.ended"] == "lost"
    assert not train.status.is_ok
    assert train.status.description == "lost: no heartbeat"


def test_the_next_iteration_is_another_trace_and_ends_with_its_job(made):
    first, second = made(ITERATION)["iteration"]
    assert first.context.trace_id != second.context.trace_id
    assert seconds(second) == (21, 22)


def test_what_was_open_when_the_daemon_started_is_left_out_and_what_follows_is_not(made):
    state = State()
    state.jobs["j1"] = Job(id="j1", owner="vision", user="ada", spec=SPEC, registered_at=0)
    spans = made(
        [f.SlotReleased(3_000, "s0"), queued(4_000, "s1", "train"), f.SlotWithdrawn(5_000, "s1", said("gone"))], state
    )
    assert sorted(spans) == ["train", "wait"]  # the iteration goes on
    assert spans["train"][0].attributes["rollmux.ended"] == "withdrawn"


# ---- the way to a collector ------------------------------------------------------------------------------------------


class Collector(BaseHTTPRequestHandler):
    """Keeps what is sent to it."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.kept.append((self.path, self.headers["content-type"], body))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def collector():
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        server.kept = []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_spans_come_to_the_collector_that_the_environment_names(collector, monkeypatch):
    where = f"http://127.0.0.1:{collector.server_port}"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", where)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    spans = from_environment()
    assert spans is not None
    spans.sink(entries_of(ITERATION, State()))
    spans.close()

    ((path, kind, body),) = collector.kept
    assert (path, kind) == ("/v1/traces", "application/x-protobuf")
    for word in (b"rollmuxd", b"iteration", b"rollout", b"math", b"vision"):
        assert word in body


def test_without_an_endpoint_there_are_no_spans_and_no_import():
    assert from_environment({}) is None
    assert from_environment({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "true"}) is None


def test_where_the_extra_is_not_installed_a_line_says_how_to_get_it(monkeypatch):
    import sys

    said = []

    class Log:
        def warning(self, event, *, reason):
            said.append((event, reason))

    monkeypatch.setattr("rollmuxd.daemon.tracing.log", Log())
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    assert from_environment({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}) is None
    [(event, reason)] = said
    assert event == "no_spans"
    assert reason.endswith("it comes with: pip install 'rollmuxd[otel]'")
