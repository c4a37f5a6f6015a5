"""A line for each fact, with the job and slot that it is about, and no secret."""

import io
import json
import logging

import pytest
import structlog

from rollmuxd.core import facts as f
from rollmuxd.core import model as m
from rollmuxd.core.ids import Fence
from rollmuxd.core.spec import JobSpec
from rollmuxd.core.state import State
from rollmuxd.daemon import logs
from rollmuxd.daemon.entries import entries


@pytest.fixture
def written():
    stream = io.StringIO()
    root = logging.getLogger()
    before = root.handlers[:], root.level
    logs.set_up("info", "json", stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    root.handlers[:], level = before
    root.setLevel(level)
    structlog.reset_defaults()


def test_every_line_names_the_job_and_the_slot_that_it_is_about(written):
    state = State()
    slot = m.Slot("s1", "j1", 1, "n1", "rollout", "r1", 0)
    state.slots["s1"] = slot
    state.sessions["n2"] = m.Session("n2", "j2", 1, 0)
    for job in ("j1", "j2"):
        state.jobs[job] = m.Job(id=job, owner="o", user="u", spec=JobSpec("math", (), ()), registered_at=0)
    order = m.Order("o1", m.OrderKind.LOAD, "j1", 1, "rollout", "h/gpu0", "d", 0, slot="s1")
    facts = (f.SlotGranted(at=5, slot="s1", fence=Fence(1, 7)), f.SessionLost(at=5, session="n2"))
    logs.write_facts(entries(state, enumerate(facts, 1), {}))
    logs.write_facts(entries(state, [(3, f.OrderEnded(at=5, order="o1"))], {order.id: order}))
    granted, lost, ended = written()

    assert (granted["event"], granted["job"], granted["slot"], granted["seq"]) == ("slot_granted", "j1", "s1", 1)
    assert (lost["job"], lost["level"]) == ("j2", "warning")
    assert (ended["event"], ended["job"], ended["slot"]) == ("order_ended", "j1", "s1")


def test_no_secret_is_logged(written):
    spec = JobSpec("math", (), ())
    fact = f.JobRegistered(at=0, job="j1", owner="o", user="u", run=1, spec=spec, idempotency_key="hush")
    logs.write_facts(entries(State(), [(1, fact)], {}))

    assert "hush" not in json.dumps(written())
    assert written()[0]["name"] == "math"


class FullDisk(io.StringIO):
    full = False

    def write(self, text):
        if self.full:
            raise OSError(28, "No space left on device")
        return super().write(text)


def test_a_log_that_cannot_be_written_fails_nobody(written):
    stream = FullDisk()
    logs.set_up("info", "json", stream)
    stream.full = True

    structlog.get_logger("x").error("commit_failed")
    logging.getLogger("somebodys.plugin").warning("it is late")

    stream.full = False
    structlog.get_logger("x").info("next")
    said = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["event"] for line in said] == ["next"]
    stream.close()
    structlog.get_logger("x").info("to nobody")


def test_lines_of_the_standard_library_come_out_the_same_way(written):
    logging.getLogger("somebodys.plugin").warning("it is %s", "late")
    logging.getLogger("uvicorn.access").info("GET /")
    logging.getLogger("asyncssh").info("[conn=1] Connected to SSH server")
    (line,) = written()

    assert (line["event"], line["level"], line["logger"]) == ("it is late", "warning", "somebodys.plugin")


@pytest.mark.parametrize("format", ["console", "json"])
def test_a_traceback_says_where_it_broke_and_not_what_was_in_variables(written, format):
    """A call that breaks has its API key in one."""
    stream = io.StringIO()
    logs.set_up("info", format, stream)

    secret = "rmx_12345678_hush"

    def breaks(authorization):
        raise RuntimeError(f"{len(authorization)} it broke")

    for log in (structlog.get_logger("x"), logging.getLogger("somebodys.plugin")):
        try:
            breaks(secret)
        except RuntimeError:
            log.exception("http_failed")

    said = stream.getvalue()
    assert said.count("17 it broke") == 2
    assert said.count("in breaks") == 2
    assert "hush" not in said


@pytest.mark.parametrize("name", ["asyncio", "uvicorn.error"])
def test_what_breaks_again_and_again_fills_no_disk(written, name):
    for _ in range(1000):
        logging.getLogger(name).error("it broke", exc_info=ValueError("x" * 1000))

    assert len(written()) == 20


def test_lines_that_were_left_out_are_counted():
    at = 0.0
    seldom = logs.Seldom(lambda: at)
    said = []

    def log():
        record = logging.makeLogRecord({"msg": "%s broke", "args": ("it",)})
        if seldom.filter(record):
            said.append(record.getMessage())

    for _ in range(50):
        log()
    at = 60.0
    for _ in range(2):
        log()

    assert said == ["it broke"] * 20 + ["it broke (30 lines before it were left out)", "it broke"]


def test_the_level_holds_for_both(written):
    structlog.get_logger().debug("no")
    logging.getLogger("x").debug("no")

    assert written() == []


def test_a_line_for_people_quotes_what_a_terminal_would_obey(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    logs.set_up("info", "console", stream)
    structlog.get_logger("x").warning("slot_granted", slot="s1", name="a\x1b[2Jb", why="two words", at=5, many=["a"])

    line = stream.getvalue()
    assert line.partition(" ")[2] == (
        "[warning  ] slot_granted         at=5 many=['a'] name='a\\x1b[2Jb' slot=s1 why='two words'\n"
    )


def test_nor_does_a_terminal_obey_what_a_plugin_has_logged_or_an_exception_says(written):
    stream = io.StringIO()
    logs.set_up("info", "console", stream)
    logging.getLogger("plugin").warning("host said \x1b[2J and\n2026-01-01 [error    ] node_lost")
    try:
        raise ValueError("client said \x1b[2J")
    except ValueError:
        structlog.get_logger("x").exception("input_crashed")

    lines = stream.getvalue().splitlines()
    assert lines[0].endswith(r"host said \x1b[2J and\n2026-01-01 [error    ] node_lost logger=plugin")
    assert lines[-1] == r"ValueError: client said \x1b[2J"
