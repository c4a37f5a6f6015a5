"""``rollmuxd top``: the whole cluster in one picture, live on a terminal, and once for a script."""

import io
import json
import os
import pty
import select
import socketserver
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qsl

import pytest
from patience import PATIENCE_S
from rich.cells import cell_len
from rich.console import Console

from rollmuxd.cli.top import command as top_command
from rollmuxd.cli.top import view
from rollmuxd.cli.top.screen import Screen

GPUS = [
    {"gpu": f"box/gpu{n}", "holder": "s4" if n < 2 else None, "dirty_by": "j1" if n < 2 else None} for n in range(4)
]
NODES = [
    {
        "node": "box/gpu0-3",
        "host": "box",
        "status": "up",
        "pools": ["rollout"],
        "gpu_type": "H20",
        "price_per_hour": 8.0,
        "gpus": GPUS,
        "reason": "",
        "group": "g1",
        "states": {"j1 rollout": "loaded", "j2 rollout": "parking", "j3 rollout": "parked", "j4 rollout": "gone"},
    },
    {
        "node": "box/gpu4-7",
        "host": "box",
        "status": "quarantined",
        "pools": ["train"],
        "gpu_type": "H800",
        "price_per_hour": 20.0,
        "gpus": [{"gpu": f"box/gpu{n}", "holder": None, "dirty_by": "j1"} for n in range(4, 8)],
        "reason": "gpu5 does not become clean",
        "group": "g1",
        "states": {},
    },
]
POOLS = [
    {"pool": "rollout", "nodes": ["box/gpu0-3"], "nodes_free": 0, "gpus": 4, "gpus_held": 2},
    {"pool": "train", "nodes": ["box/gpu4-7"], "nodes_free": 0, "gpus": 4, "gpus_held": 0},
]
SLOT = {
    "slot": "s4",
    "job": "j1",
    "phase": "rollout",
    "status": "tail",
    "request_id": "r",
}

PICTURE = """\
rollmuxd top   12:00:34 UTC   2 nodes, 1 group, 3 jobs, 1 waiting
POOL     GPUS  HELD                       NODES  FREE
rollout     4  ██████████░░░░░░░░░░  50%      1     0
train       4  ░░░░░░░░░░░░░░░░░░░░   0%      1     0

NODE        POOLS    STATUS       GROUP  GPUS  HELD BY                      STATES
box/gpu0-3  rollout  up           g1        4  math-7b rollout (tail) on 2  parking code-7b, 1 loaded, 1 parked
box/gpu4-7  train    quarantined  g1        4  gpu5 does not become clean   -

JOB      OWNER   STATUS    GROUP  NOW                        FOR  ITER  SLOWDOWN  OF ITS BOUND  CREDIT
code-7b  vision  admitted  g1     waits its turn for train  29 s     3         -  best effort        -
math-7b  vision  admitted  g1     rollout (tail)            34 s    12      1.50  ████░░░░ 2     -30 s

WAITING FOR A PLACE  OWNER   SLO  WHY
big                  vision    -  box has 30 GB of RAM left, it needs 80
"""


@pytest.fixture
def table(a_job):
    """What the daemon's lists have."""
    jobs = [
        a_job(group="g1", slot="s4", phase="rollout", iterations=12, slowdown=1.5, slo=2.0, promised=True)
        | {"credit_s": -30.0, "phase_since": "2025-06-01T12:00:00.000Z"},
        a_job(job="j2", name="code-7b", group="g1", slot="s9", phase="train", iterations=3)
        | {"phase_since": "2025-06-01T12:00:05.000Z"},
        a_job(job="j3", name="big", status="waiting", reason="box has 30 GB of RAM left, it needs 80"),
        a_job(job="j4", name="old", status="ended"),
    ]
    lists = {"pools": POOLS, "nodes": NODES, "jobs": jobs, "groups": [{"group": "g1"}], "hosts": [], "slots": [SLOT]}
    return {f"/v1/{name}": items for name, items in lists.items()}


@pytest.fixture
def there(daemon, table, monkeypatch):
    """A daemon that has these lists, at a fixed time."""

    class Clock(top_command.datetime):
        @classmethod
        def now(cls, zone=None):
            return cls(2025, 6, 1, 12, 0, 34, tzinfo=zone)

    monkeypatch.setattr(top_command, "datetime", Clock)
    daemon["GET /v1/overview"] = lambda asked: overview(table, asked)
    return daemon


def overview(table, asked):
    """What a daemon answers that has these lists: nothing new to who knows its tag."""
    assert asked["over"] == "false"
    if asked.get("since") == "t1":
        return {"tag": "t1", "lists": None}
    lists = {path.removeprefix("/v1/"): {"items": items, "next": None} for path, items in table.items()}
    lists["jobs"] = {"items": [job for job in table["/v1/jobs"] if job["status"] != "ended"], "next": None}
    return {"tag": "t1", "lists": lists}


def test_one_look_shows_pools_nodes_jobs_against_their_bounds_and_what_waits(rollmuxd, there):
    assert rollmuxd("top --once").out == PICTURE


def test_gpus_of_a_job_that_the_caller_may_not_see_are_held_by_its_id(rollmuxd, there, table):
    table["/v1/nodes"] = [{**NODES[0], "gpus": [{"gpu": "box/gpu0", "holder": "s8", "dirty_by": "j9"}]}]

    assert "g1        1  j9       parking" in rollmuxd("top --once").out


def test_a_job_without_the_promise_that_it_asked_for_is_told_of_with_what_would_help(rollmuxd, there, table):
    table["/v1/jobs"][0] |= {"promised": False, "unmet": "it asked for slo=2. What would help: slo=3"}

    said = rollmuxd("top --once").out

    assert "2 (not promised)" in said
    assert "NO PROMISE  OWNER   SLO  WHY\nmath-7b     vision    2  it asked for slo=2. What would help: slo=3\n" in said


def test_on_a_screen_the_last_line_names_the_keys(table):
    seen = {"at": "2025-06-01T12:00:34.000Z", **{path.removeprefix("/v1/"): items for path, items in table.items()}}
    drawn = Console(width=120, file=io.StringIO())
    drawn.print(view.picture(seen, width=120, rows=40))

    assert drawn.file.getvalue().splitlines()[-1].startswith("q: quit  /: filter  ↑↓: choose  e: explain")


def test_where_there_is_no_terminal_it_prints_once_without_colours(rollmuxd, there):
    assert rollmuxd("top").out == PICTURE


def test_jobs_of_which_no_heartbeat_comes_are_shown_as_silent(rollmuxd, there, table):
    table["/v1/jobs"][0]["silent_s"] = 34.2
    table["/v1/jobs"][2]["silent_s"] = 40.0

    lines = rollmuxd("top --once").lines

    assert any(line.startswith("math-7b ") and " silent for 34 s " in line for line in lines)
    assert any(line.startswith("big ") and line.endswith(" silent for 40 s") for line in lines)


def test_as_json_it_is_the_daemons_own_lists(rollmuxd, there, table):
    said = rollmuxd("top --json").json

    assert said["at"] == "2025-06-01T12:00:34.000Z"
    assert said["nodes"] == NODES
    assert [job["job"] for job in said["jobs"]] == ["j1", "j2", "j3"]
    assert said["slots"] == [SLOT]


def test_one_call_is_all_that_a_look_takes_and_queued_slots_are_not_thought_about(rollmuxd, there):
    rollmuxd("top --once --owner vision")

    ((_, path, sent),) = there.asked
    assert path == "/v1/overview"
    assert (sent["slots"], sent["owner"]) == ("holding", "vision")


def test_who_looks_again_is_told_only_what_is_new(table):
    answers = []

    class Call:
        def get(self, path, **asked):
            answers.append(overview(table, asked))
            return answers[-1]

    watch = top_command.Watch(Call(), None)
    first, again = watch.look(), watch.look()
    assert [answer["lists"] is None for answer in answers] == [False, True]
    assert {**first, "at": ""} == {**again, "at": ""}


def test_a_list_of_more_than_a_page_is_read_to_its_end_with_the_same_filters(table):
    asked_of = []

    class Call:
        def get(self, path, **asked):
            answer = overview(table, asked)
            answer["lists"]["jobs"]["next"] = "j3"
            return answer

        def items(self, path, **asked):
            asked_of.append((path, asked))
            return iter([{"job": "j5"}])

    seen = top_command.Watch(Call(), "vision").look()
    assert [job["job"] for job in seen["jobs"]] == ["j1", "j2", "j3", "j5"]
    assert asked_of == [("/v1/jobs", {"after": "j3", "limit": 1000, "over": "false", "owner": "vision"})]


def test_a_name_moves_no_cursor(rollmuxd, there, table):
    table["/v1/jobs"][1]["name"] = "a\x1b[2Jb"

    assert "\x1b" not in rollmuxd("top --once").out


def looked_at(a_job, *, jobs, waiting, nodes):
    held = [a_job(job=f"j{n}", name=f"a-job-with-a-long-name-{n}", group=f"g{n // 3}", slo=2.0) for n in range(jobs)]
    queue = [
        a_job(job=f"w{n}", name=f"w{n}", status="waiting", reason="because of this, " * 20) for n in range(waiting)
    ]
    return {
        "at": "2025-06-01T12:00:34.000Z",
        "pools": POOLS,
        "nodes": (NODES * nodes)[:nodes],
        "hosts": [],
        "groups": [],
        "jobs": held + queue,
        "slots": [SLOT],
    }


@pytest.mark.parametrize(("width", "rows"), [(80, 24), (100, 30), (120, 40), (200, 60)])
@pytest.mark.parametrize(("jobs", "waiting", "nodes"), [(0, 0, 0), (2, 1, 2), (40, 0, 12), (40, 30, 300), (3, 9, 40)])
def test_a_screen_is_enough_however_much_there_is(a_job, width, rows, jobs, waiting, nodes):
    seen = looked_at(a_job, jobs=jobs, waiting=waiting, nodes=nodes)
    out = Console(width=width, height=rows, file=io.StringIO(), highlight=False)
    out.print(view.picture(seen, width=width, rows=rows))
    lines = out.file.getvalue().splitlines()
    assert len(lines) < rows  # or it would scroll
    assert max(cell_len(line.rstrip()) for line in lines) <= width
    told = "\n".join(lines)
    assert ("more jobs" in told) == (jobs > sum(line.startswith("a-job") for line in lines))
    if jobs:
        assert "OF ITS BOUND" in told  # what matters is not cut


# ---- keys ------------------------------------------------------------------------------------------------------------

DOWN, UP = "\x1b[B", "\x1b[A"


def drawn(seen, screen, *, width=120, rows=40):
    out = Console(width=width, height=rows, file=io.StringIO(), highlight=False)
    out.print(view.picture(seen, width=width, rows=rows, screen=screen))
    return out.file.getvalue()


def test_a_filter_shows_only_the_jobs_that_have_its_text(a_job):
    seen = looked_at(a_job, jobs=12, waiting=2, nodes=2)
    screen = Screen()

    assert screen.press("/NAME-1", seen["jobs"]) == []
    assert drawn(seen, screen).splitlines()[-1] == "filter: NAME-1_  enter: keep it  esc: all jobs"
    screen.press("\r", seen["jobs"])
    lines = drawn(seen, screen).splitlines()

    assert [line.split()[0] for line in lines if line.startswith("a-job")] == [
        f"a-job-with-a-long-name-{n}" for n in (1, 10, 11)
    ]
    assert not any(line.startswith("WAITING FOR A PLACE") for line in lines)
    assert "/: filter (NAME-1)" in lines[-1]
    screen.press("/zz\x7fq\r", seen["jobs"])
    assert "no job that has a placement matches NAME-1zq" in drawn(seen, screen)
    screen.press("\x1b", seen["jobs"])
    assert len(screen.listed(seen["jobs"])) == 14


def test_the_arrow_keys_choose_a_job_and_the_screen_follows(a_job):
    seen = looked_at(a_job, jobs=40, waiting=5, nodes=2)
    screen = Screen()

    screen.press(DOWN * 30, seen["jobs"])
    assert screen.chosen == "j29"
    assert "a-job-with-a-long-name-29" in drawn(seen, screen, rows=30)
    screen.press(DOWN * 40, seen["jobs"])
    assert screen.chosen == "w4"
    assert "w4" in drawn(seen, screen, rows=30)
    screen.press(UP * 80, seen["jobs"])
    assert screen.chosen == "j0"
    screen.press("\x1b[6~\x1b[H\x1b[15;2~\x1bOP", seen["jobs"])  # page down, home, F5 with shift, F1
    assert (screen.chosen, screen.asked, screen.typing) == ("j0", None, False)


def test_a_paused_job_does_not_say_that_it_waits_its_turn(a_job):
    seen = looked_at(a_job, jobs=1, waiting=0, nodes=2)
    seen["jobs"][0] |= {"slot": "s9", "phase": "train"}
    assert "waits its turn for train" in drawn(seen, Screen(), width=200)
    seen["jobs"][0]["status"] = "paused"
    assert "waits its turn" not in drawn(seen, Screen(), width=200)


def test_an_action_goes_to_the_chosen_job_and_is_asked_about_first(a_job):
    seen = looked_at(a_job, jobs=2, waiting=0, nodes=2)
    screen = Screen()

    assert screen.press("x", seen["jobs"]) == []
    assert "choose a job with the arrow keys first" in drawn(seen, screen)
    assert screen.press(DOWN + "x", seen["jobs"]) == []
    assert "end a-job-with-a-long-name-0?" in drawn(seen, screen)
    assert screen.press("n", seen["jobs"]) == []
    assert screen.press("xy", seen["jobs"]) == [("end", "j0", "a-job-with-a-long-name-0")]
    assert screen.press(DOWN + "e", seen["jobs"]) == [("explain", "j1", "a-job-with-a-long-name-1")]
    seen["jobs"][1]["status"] = "paused"
    assert screen.press("py", seen["jobs"]) == [("resume", "j1", "a-job-with-a-long-name-1")]
    seen["jobs"] = []
    assert screen.press("x", seen["jobs"]) == []
    assert screen.said.startswith("choose a job")


# ---- live, on a terminal ---------------------------------------------------------------------------------------------


class Daemon(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """A real socket with a table behind it; ``gone``: it answers nobody properly any more."""

    daemon_threads = True
    gone = False


def handler(table):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            path, _, query = self.path.partition("?")
            said = {"sentences": ["It sits with code-7b."]}
            if not path.endswith("/explain"):
                assert path == "/v1/overview"
                said = overview(table, dict(parse_qsl(query)))
            self.answer(503 if self.server.gone else 200, said)

        def do_POST(self):
            self.rfile.read(int(self.headers.get("content-length", 0)))
            name = self.path.removeprefix("/v1/jobs/")
            known = name == "j1/pause"
            problem = {"type": "conflict", "title": "Conflict", "status": 409, "detail": "it is being ended"}
            self.answer(200 if known else 409, {"status": "pausing"} if known else problem)

        def answer(self, status, said):
            body = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def address_string(self):
            return "test"

        def log_message(self, *_):
            pass

    return Handler


class Terminal:
    """A program on a terminal of its own: what it shows, and keys for it."""

    def __init__(self, *words, env):
        self.child, self._ours = pty.fork()
        if self.child == 0:
            os.execve(sys.executable, [sys.executable, "-m", "rollmuxd", *words], env)
        self.shown = ""

    def sees(self, text, within=PATIENCE_S):
        """Read until the text is on the screen."""
        give_up = time.monotonic() + within
        while text not in self.shown:
            left = give_up - time.monotonic()
            if left <= 0 or not select.select([self._ours], [], [], left)[0]:
                pytest.fail(f"not on the screen: {text!r}; what was shown: {self.shown[-3000:]!r}")
            try:
                self.shown += os.read(self._ours, 65536).decode(errors="replace")
            except OSError:
                pytest.fail(f"it ended without {text!r}: {self.shown[-3000:]!r}")

    def press(self, keys):
        self.shown = ""
        os.write(self._ours, keys.encode())

    def ends(self):
        """Its exit status, and the rest of what it shows."""
        try:
            while chunk := os.read(self._ours, 65536):
                self.shown += chunk.decode(errors="replace")
        except OSError:
            pass
        os.close(self._ours)
        return os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1])


def test_on_a_terminal_it_explains_pauses_outlives_a_restart_of_the_daemon_and_ends_at_q(table, tmp_path):
    socket = tmp_path / "rollmux.sock"
    with Daemon(str(socket), handler(table)) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "140", "LINES": "40", "HOME": str(tmp_path)}
        screen = Terminal("top", "--interval", "0.2", "--url", f"unix://{socket}", env=env)
        screen.sees("\x1b[?1049h")  # on a screen of its own: what was there comes back
        screen.sees("math-7b")
        screen.press(DOWN * 2 + "e")
        screen.sees("It sits with code-7b.")
        screen.press(" ")
        screen.sees("WAITING FOR A PLACE")
        screen.press("p")
        screen.sees("pause math-7b?")
        screen.press("y")
        screen.sees("math-7b: pause; it is pausing")
        screen.press(UP + "py")
        screen.sees("it is being ended")
        server.gone = True
        screen.press(" ")
        screen.sees("trying again")
        server.gone = False
        screen.press(" ")
        screen.sees("rollmuxd top")
        screen.press("q")
        assert screen.ends() == 0
        assert "\x1b[?1049l" in screen.shown
        server.shutdown()


# ---- the Tab key -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_a_script_from_click(shell):
    env = {**os.environ, "_ROLLMUXD_COMPLETE": f"{shell}_source"}
    script = subprocess.run([sys.executable, "-m", "rollmuxd"], env=env, text=True, capture_output=True).stdout

    assert "_ROLLMUXD_COMPLETE" in script
    assert f"{shell}_complete" in script
