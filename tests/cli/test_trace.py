"""``rollmuxd trace export`` writes the trace of the daemon's facts, and says plainly why it cannot."""

import json
import time

import pytest

from rollmuxd.cli import feed as pages
from rollmuxd.core import facts as f
from rollmuxd.core.ids import Fence
from rollmuxd.core.inputs import NodeSpec
from rollmuxd.core.model import JobStatus
from rollmuxd.core.spec import JobSpec, PhaseSpec, Want

NODE = "box/gpu0"
SPEC = JobSpec("math-7b", (PhaseSpec("rollout", ("rollout",)),), (Want("rollout"),))
START = 1_795_262_400_000  # 2026-11-21T12:00Z
FACTS = [
    f.NodeAdded(START, NodeSpec(NODE, "box", ("box/gpu0",), ("rollout",), "H100", 80_000, 2.5)),
    f.JobRegistered(START, "j1", "team", "ann", 1, SPEC),
    f.SlotQueued(START, "s1", "j1", 1, "x1", "rollout", "r1"),
    f.JobPlaced(START, "j1", "g1", {"rollout": (NODE,)}, (), JobStatus.ADMITTED, "isolated"),
    f.SlotClaimed(START, "s1", ("box/gpu0",), 0),
    f.SlotGranted(START, "s1", Fence(1, 1)),
    f.SlotReleased(START + 7_200_000, "s1"),
]


@pytest.fixture
def shown(tmp_path):
    """The slices of a trace: (name, second it began, seconds it took)."""

    def read(name="out.json"):
        events = json.loads((tmp_path / name).read_text())["traceEvents"]
        return sorted(
            (event["name"], event["ts"] / 1e6 - START / 1e3, event["dur"] / 1e6)
            for event in events
            if event["ph"] == "X"
        )

    return read


@pytest.fixture
def somewhere_else(monkeypatch):
    """A time zone that is not UTC."""
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "Etc/GMT-5")
        time.tzset()
        yield
    time.tzset()


WHOLE = [("admitted in g1", 0, 7200), ("math-7b rollout", 0, 7200), ("rollout", 0, 7200)]


def feed(facts=FACTS):
    """``/v1/facts``, page by page."""
    shown = [{"seq": seq, **json.loads(f.encode(fact))} for seq, fact in enumerate(facts, 1)]

    def answer(sent):
        page = [fact for fact in shown if fact["seq"] > sent["after"]][: sent["limit"]]
        return {"facts": page, "last": page[-1]["seq"] if page else sent["after"]}

    return answer


@pytest.fixture
def told(daemon):
    """The daemon has the facts of above."""
    daemon["GET /v1/facts"] = feed()


def test_facts_become_a_trace(rollmuxd, told, tmp_path, shown):
    ran = rollmuxd(f"trace export {tmp_path}/out.json")
    assert ran.code == 0
    assert ran.out == (f"{tmp_path}/out.json: 3 slices of 2.00 h, 0.0 MB; open it on https://ui.perfetto.dev\n")
    assert shown() == WHOLE
    assert '"pool rollout (H100)"' in (tmp_path / "out.json").read_text()


def test_the_daemon_is_asked_page_by_page(rollmuxd, daemon, monkeypatch, tmp_path, shown):
    monkeypatch.setattr(pages, "PAGE", 3)
    daemon["GET /v1/facts"] = feed()
    rollmuxd(f"trace export {tmp_path}/out.json")
    assert [sent["after"] for _, _, sent in daemon.asked] == [0, 3, 6, 7]
    assert shown() == WHOLE


def test_a_window_is_given_by_the_calendar(rollmuxd, told, tmp_path, shown, somewhere_else):
    rollmuxd(f"trace export --from 2026-11-21T12:30 --to 2026-11-21T14:30+01:00 {tmp_path}/out.json")
    assert shown() == [(name, 1800, 3600) for name, _, _ in WHOLE]


def test_programs_are_told_what_was_written(rollmuxd, told, tmp_path):
    ran = rollmuxd(f"trace export --json {tmp_path}/out.json.gz")
    size = (tmp_path / "out.json.gz").stat().st_size
    assert ran.json == {
        "path": f"{tmp_path}/out.json.gz",
        "bytes": size,
        "slices": 3,
        "start_ms": START,
        "end_ms": START + 7_200_000,
    }


def test_a_window_in_which_nothing_was_is_said_to_be_empty(rollmuxd, told, tmp_path):
    ran = rollmuxd(f"trace export --from 2026-11-21T17:00 {tmp_path}/out.json")
    assert "nothing took any time in that window" in ran.err


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        ("--from noon", 1, "noon is no time: 7d (ago), 2025-06-01"),
        ("--from 2025-06-02 --to 2025-06-01", 2, "--from 2025-06-02 is not before --to 2025-06-01"),
    ],
)
def test_a_window_that_is_none_is_refused(options, code, says, rollmuxd, told, tmp_path):
    ran = rollmuxd(f"trace export {options} {tmp_path}/out.json")
    assert ran.code == code
    assert says in ran.err
    assert not (tmp_path / "out.json").exists()


def test_what_is_no_fact_is_named(rollmuxd, daemon, tmp_path):
    daemon["GET /v1/facts"] = {"facts": [{"seq": 1, "fact": "slot_bought", "at": 1}], "last": 1}
    ran = rollmuxd(f"trace export {tmp_path}/out.json")
    assert ran.code == 1
    assert "fact 1 is none that this rollmuxd knows" in ran.err
    assert "slot_bought" in ran.err
    assert not (tmp_path / "out.json").exists()


def test_facts_that_the_daemon_cannot_read_are_named(rollmuxd, daemon, tmp_path):
    def answer(sent):
        page = feed()(sent)
        return {**page, "unreadable": [] if sent["after"] else [{"seq": 99, "reason": "it is damaged"}]}

    daemon["GET /v1/facts"] = answer
    ran = rollmuxd(f"trace export {tmp_path}/out.json")
    assert ran.code == 0
    assert "rollmuxd: fact 99 cannot be read: it is damaged; the rest is here" in ran.err
    assert (tmp_path / "out.json").exists()


def test_no_facts_are_nothing_to_show(rollmuxd, daemon, tmp_path):
    daemon["GET /v1/facts"] = feed([])
    ran = rollmuxd(f"trace export {tmp_path}/out.json")
    assert ran.code == 1
    assert ran.err == "rollmuxd: there are no facts, and so nothing to show\n"


def test_a_place_that_cannot_be_written_is_named(rollmuxd, told, tmp_path):
    ran = rollmuxd(f"trace export {tmp_path}/missing/out.json")
    assert ran.code == 1
    assert "missing/out.json: No such file or directory" in ran.err
