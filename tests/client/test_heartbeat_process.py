"""The heartbeat process: real processes, against a fake daemon that listens."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import warnings
from pathlib import Path

import forked
import msgspec
import pytest
from patience import PATIENCE_S

import rollmuxd
from rollmuxd.client import heartbeat_process
from rollmuxd.client.discovery import find
from rollmuxd.client.errors import RollmuxError, Unreachable
from rollmuxd.client.heartbeat import HeartbeatProcess
from rollmuxd.client.heartbeat_process import Beater
from rollmuxd.client.transport import Reply
from rollmuxd.testing import FakeDaemon
from rollmuxd.wire.answers import Directive, HeartbeatView, SessionView

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at /proc")


class Heard:
    def __init__(self):
        self.directives, self.refused, self.troubles = [], [], []

    def directed(self, directives):
        self.directives.append(directives)

    def session_refused(self, status, detail):
        self.refused.append(status)

    def troubled(self, text):
        self.troubles.append(text)


class HastyDaemon(FakeDaemon):
    """Wants a heartbeat every 50 ms, so that a test need not wait for one."""

    def _open(self, job, body):
        view = super()._open(job, body)
        return SessionView(view.session, job, view.run, lease_s=60.0, heartbeat_s=0.05)

    @property
    def beats(self):
        bodies = [call.body for call in list(self.calls) if call.path.endswith("/heartbeat")]
        return [{name: part for name, part in body.items() if name not in {"wait_s", "tag"}} for body in bodies]

    @property
    def polls(self):
        return [call.body for call in list(self.calls) if call.path.endswith("/heartbeat") and call.body.get("wait_s")]


class PatientDaemon(HastyDaemon):
    """Holds polls back until it has other directives than those of the tag, as the real one does; or cuts them."""

    def __init__(self):
        super().__init__()
        self.news, self.tag, self.cuts = threading.Condition(), "", False

    def direct(self, tag, *directives):
        with self.news:
            self.tag, self._directives = tag, list(directives)
            self.news.notify_all()

    def handle(self, method, path, params, content):
        reply, asked = super().handle(method, path, params, content), msgspec.json.decode(content)
        if reply.status_code != 200 or not asked.get("wait_s"):
            return reply
        if self.cuts:
            raise Unreachable("cut")
        with self.news:
            self.news.wait_for(lambda: self.tag != asked["tag"], PATIENCE_S)
            view = HeartbeatView(60.0, list(self._directives), self.tag)
        return Reply(200, headers={"content-type": "application/json"}, content=msgspec.json.encode(view))


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def beating(listening):
    """A heartbeat for session s1, and its daemon."""
    made = []

    def start(*, unix=False, key=None):
        fake = HastyDaemon()
        fake.sessions["s1"] = "j1"
        server, heard = listening(fake, unix=unix), Heard()
        heartbeat = HeartbeatProcess(find(server.url, key).address, heard)
        heartbeat.session(SessionView("s1", "j1", 1, 60.0, 0.05))
        made.append(heartbeat)
        return heartbeat, fake, server, heard

    yield start
    for heartbeat in made:
        heartbeat.stop()
        assert heartbeat.pid is None or not alive(heartbeat.pid)


class InAThread(HeartbeatProcess):
    """Its beats come from a thread of this process, whose times a test may set."""

    class Thread(threading.Thread):
        pid = None

        def terminate(self):
            """The end of its pipe is its end."""

        def wait(self, timeout_s=None):
            self.join(timeout_s)

    def _start(self):
        (told, tell), (heard, hear) = os.pipe(), os.pipe()
        self._stdin, self._stdout = os.fdopen(tell, "wb", buffering=0), os.fdopen(heard, "rb", buffering=0)
        beater = Beater(told, hear, os.getppid())

        def beat():
            try:
                beater.run()
            finally:
                os.close(told)
                os.close(hear)

        self._process = self.Thread(target=beat, daemon=True)
        self._process.start()
        self._write(self._now)


@pytest.fixture
def polling(listening, monkeypatch):
    """A heartbeat for session s1 with a slot, in a thread of this process, and a daemon that wants a beat each hour."""
    monkeypatch.setattr("rollmuxd.client.heartbeat_process.POLL_AFTER_S", 0.0)
    made = []

    def start(**how):
        fake = PatientDaemon()
        vars(fake).update(how)
        fake.sessions["s1"] = "j1"
        heard = Heard()
        heartbeat = InAThread(find(listening(fake).url).address, heard)
        made.append(heartbeat)
        heartbeat.session(SessionView("s1", "j1", 1, 60.0, heartbeat_s=3600.0))
        return heartbeat, fake, heard

    yield start
    for heartbeat in made:
        heartbeat.stop()


def shrink(*keep):
    return Directive("shrink", "t1", list(keep))


def test_a_directive_comes_by_the_poll_and_not_with_the_next_heartbeat(polling, until):
    heartbeat, fake, heard = polling()
    heartbeat.slot("t1")
    until(lambda: fake.polls)

    fake.direct("a", shrink("fake/gpu0"))
    until(lambda: heard.directives)
    until(lambda: [poll["tag"] for poll in fake.polls] == ["", "a"])  # so it may hear of the next one
    fake.direct("")
    until(lambda: len(heard.directives) == 2)

    assert heard.directives == [[shrink("fake/gpu0")], []]


def test_progress_that_reaches_the_tail_goes_out_at_once_though_a_poll_is_open(polling, until):
    heartbeat, fake, _ = polling()
    heartbeat.slot("t1")
    until(lambda: fake.polls)

    heartbeat.progress(79, 100)
    heartbeat.progress(80, 100)
    until(lambda: len(fake.polls) > 1)
    heartbeat.progress(81, 100)
    fake.direct("a")
    until(lambda: len(fake.polls) > 2)

    assert [poll["done"] for poll in fake.polls] == [0, 80, 81], "81 is no crossing, and goes with the next one"


def test_no_poll_is_left_when_the_slot_is_given_back(polling, until):
    heartbeat, fake, heard = polling()
    heartbeat.slot("t1")
    until(lambda: fake.polls)

    heartbeat.slot(None)
    heartbeat.slot("t2")
    until(lambda: len(fake.polls) == 2)
    fake.direct("a", shrink("fake/gpu0"))
    until(lambda: heard.directives)

    assert [poll["slot"] for poll in fake.polls[:2]] == ["t1", "t2"]
    assert len(heard.directives) == 1


def test_where_polls_are_cut_they_are_tried_again(polling, until):
    heartbeat, fake, heard = polling(cuts=True)
    heartbeat.slot("t1")
    until(lambda: len(fake.polls) > 1)

    fake.cuts = False
    fake.direct("a", shrink("fake/gpu0"))

    until(lambda: heard.directives)


@pytest.fixture
def answered():
    """A heartbeat in a thread of this process, each of whose beats is answered by the next function, then the last."""
    made, listener = [], socket.create_server(("127.0.0.1", 0))

    def start(*answers):
        heard, beats = Heard(), []

        def answer(line, how):
            with line, contextlib.suppress(OSError):
                line.recv(65536)
                how(line)

        def serve():
            while True:
                try:
                    line = listener.accept()[0]
                except OSError:
                    return
                how = answers[min(len(beats), len(answers) - 1)]
                beats.append(how)
                threading.Thread(target=answer, args=(line, how), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        heartbeat = InAThread(find(f"http://127.0.0.1:{listener.getsockname()[1]}").address, heard)
        made.append(heartbeat)
        heartbeat.session(SessionView("s1", "j1", 1, 60.0, heartbeat_s=0.05))
        return beats, heard

    yield start
    for heartbeat in made:
        heartbeat.stop()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def test_an_answer_that_comes_in_drops_without_end_is_not_waited_for(answered, until, monkeypatch):
    """Each drop would renew the time limit, and the lease would end: a proxy may keep a connection warm so."""
    monkeypatch.setattr(heartbeat_process, "BEAT_TIMEOUT_S", 1.0)
    monkeypatch.setattr(heartbeat_process, "LOOK_S", 0.05)

    def drip(line):
        while True:
            line.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            threading.Event().wait(0.01)

    beats, _ = answered(drip)

    until(lambda: len(beats) > 2)


@pytest.mark.parametrize("cut", [b'{"lease_s":60,"dir', b"<html>Welcome to the network</html>"])
def test_an_answer_that_is_cut_short_or_of_something_else_takes_no_directive_back(answered, until, cut):
    whole = msgspec.json.encode(HeartbeatView(60.0, [shrink("fake/gpu0")], ""))
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(whole)
    beats, heard = answered(lambda line: line.sendall(head + whole), lambda line: line.sendall(head + cut))

    until(lambda: len(beats) > 3)

    assert heard.directives == [[shrink("fake/gpu0")]]
    until(lambda: any("cut short, or is not the daemon's" in text for text in heard.troubles))


@pytest.mark.parametrize("unix", [False, True], ids=["tcp", "unix"])
def test_it_beats_with_slot_and_progress(beating, until, unix):
    heartbeat, fake, server, _ = beating(unix=unix, key="rk-1")

    heartbeat.slot("t1")
    heartbeat.progress(3, 8)

    until(lambda: {"slot": "t1", "done": 3, "total": 8} in fake.beats)
    assert server.headers_seen[0]["authorization"] == "Bearer rk-1"


def test_neither_the_command_line_nor_the_environment_shows_the_key(beating, until):
    heartbeat, fake, _, _ = beating(key="rk-secret")
    until(lambda: fake.beats)

    shown = Path(f"/proc/{heartbeat.pid}/cmdline").read_bytes() + Path(f"/proc/{heartbeat.pid}/environ").read_bytes()

    assert b"rk-secret" not in shown


def test_directives_come_back_once_and_so_does_their_end(beating, until):
    _, fake, _, heard = beating()

    fake.shrink(["fake/gpu0"])
    until(lambda: heard.directives)
    more = len(fake.beats)
    until(lambda: len(fake.beats) > more + 3)
    fake._directives = []
    until(lambda: len(heard.directives) == 2)

    assert heard.directives[0][0].keep == ["fake/gpu0"]
    assert heard.directives[1] == []


def test_it_outlives_a_restart_of_the_daemon_and_says_so(beating, until):
    _, fake, server, heard = beating()
    until(lambda: fake.beats)

    server.stop()
    until(lambda: heard.troubles)
    server.start()
    beats = len(fake.beats)
    until(lambda: len(fake.beats) > beats)
    until(lambda: len(heard.troubles) == 2)

    assert "what is held stays held" in heard.troubles[0]
    assert "answered again" in heard.troubles[1]


def test_an_overloaded_daemon_is_tried_again_like_one_that_is_away(beating, until):
    _, fake, _, heard = beating()

    fake.trouble(503, times=3)
    until(lambda: heard.troubles)
    beats = len(fake.beats)
    until(lambda: len(fake.beats) > beats)

    assert heard.refused == []


def test_a_refused_heartbeat_is_told_and_followed_by_others(beating, until):
    """It may have been of a proxy."""
    _, fake, _, heard = beating()
    until(lambda: fake.beats)
    sessions = dict(fake.sessions)

    fake.sessions.clear()
    until(lambda: heard.refused)
    beats = len(fake.beats)
    fake.sessions.update(sessions)
    until(lambda: len(fake.beats) > beats)

    assert set(heard.refused) == {404}


def test_if_it_dies_it_is_started_again_and_knows_everything(beating, until):
    heartbeat, fake, _, heard = beating()
    heartbeat.slot("t1")
    heartbeat.progress(1, 2)
    until(lambda: {"slot": "t1", "done": 1, "total": 2} in fake.beats)
    first = heartbeat.pid

    os.kill(first, signal.SIGKILL)
    until(lambda: heartbeat.pid != first)
    beats = len(fake.beats)
    until(lambda: len(fake.beats) > beats)

    assert fake.beats[-1] == {"slot": "t1", "done": 1, "total": 2}
    assert "starting it again" in heard.troubles[0]


@pytest.fixture
def full(monkeypatch):
    """A heartbeat that has found its pipe full, and told a new slot and session since; and who is to read them."""
    read, write = os.pipe()
    monkeypatch.setattr(HeartbeatProcess, "_start", lambda heartbeat: None)
    monkeypatch.setattr(HeartbeatProcess, "_watch", lambda heartbeat: None)

    def fill():
        heartbeat = HeartbeatProcess(find("http://nowhere").address, Heard())
        made.append(heartbeat)
        heartbeat._stdin = os.fdopen(write, "wb", buffering=0)
        os.set_blocking(write, False)
        for number in range(10_000):
            heartbeat.progress(number, 10_000)
        heartbeat.slot("t2")
        heartbeat.session(SessionView("s2", "j1", 1, 60.0, 15.0))
        os.set_blocking(read, False)
        return heartbeat, Beater(read, -1, os.getppid())

    made = []
    yield fill
    made[0].stop()
    os.close(read)


def read_all(beater):
    try:
        while beater._told():
            pass
    except BlockingIOError:
        pass


def told(beater):
    return {name: beater._now.get(name) for name in ("session", "slot", "done", "total", "heartbeat_s")}


def test_what_finds_the_pipe_full_is_told_with_the_next_change(full, monkeypatch):
    """It waits for a daemon that hangs, and the loop tells of each sample: a new session is not lost among them."""
    heartbeat, beater = full()

    read_all(beater)
    assert "slot" not in beater._now
    heartbeat.progress(1, 10)
    beater._told()

    assert told(beater) == {"session": "s2", "slot": "t2", "done": 1, "total": 10, "heartbeat_s": 15.0}


def test_a_forked_child_tells_nothing_and_hangs_on_nothing_though_its_parent_was_telling(full, monkeypatch):
    heartbeat, _ = full()
    held, let_go = threading.Event(), threading.Event()

    def tell():
        with heartbeat._lock:
            held.set()
            let_go.wait(PATIENCE_S)

    teller = threading.Thread(target=tell)
    teller.start()
    assert held.wait(PATIENCE_S)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads, which is the point
        child = os.fork()
    if child == 0:
        signal.alarm(300)
        heartbeat.progress(5, 10)
        os._exit(0)
    let_go.set()
    teller.join()

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_where_no_process_can_be_started_the_job_does_not_start(monkeypatch):
    """Nothing would keep its session alive."""
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    heartbeat = HeartbeatProcess(find("http://127.0.0.1:9").address, Heard())

    with pytest.raises(RollmuxError, match=r"sys\.executable must name a Python"):
        heartbeat.session(SessionView("s1", "j1", 1, 60.0, 0.05))
    heartbeat.stop()


def test_what_cannot_be_started_again_is_tried_until_it_can(beating, until, monkeypatch):
    monkeypatch.setattr("rollmuxd.client.heartbeat.RESTART_S", (0.01, 0.01))
    heartbeat, fake, _, heard = beating()
    until(lambda: fake.beats)
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", "/no/such/python")
        os.kill(heartbeat.pid, signal.SIGKILL)
        until(lambda: sum("cannot be started" in said for said in heard.troubles) > 1)
    beats = len(fake.beats)

    until(lambda: len(fake.beats) > beats)


def test_its_end_does_not_wait_for_a_beat_that_is_not_answered(until):
    with socket.create_server(("127.0.0.1", 0)) as hangs:
        heartbeat = HeartbeatProcess(find(f"http://127.0.0.1:{hangs.getsockname()[1]}").address, Heard())
        heartbeat.session(SessionView("s1", "j1", 1, 60.0, 0.05))
        connection, _ = hangs.accept()
        with connection:
            heartbeat.stop()
            assert heartbeat._process.returncode == -signal.SIGTERM  # and not by SIGKILL, after seconds


def test_its_end_while_it_is_started_again_ends_the_new_process_as_well(monkeypatch):
    """``stop()`` knew the one before it; and the new one is in a beat that is not answered."""
    start, connections = HeartbeatProcess._start, []

    def started(heartbeat):
        again = heartbeat._process is not None
        start(heartbeat)
        if again:
            heartbeat._stopping.set()
        connections.append(hangs.accept()[0])

    monkeypatch.setattr(HeartbeatProcess, "_start", started)
    monkeypatch.setattr("rollmuxd.client.heartbeat.RESTART_S", (0.01, 0.01))
    with socket.create_server(("127.0.0.1", 0)) as hangs:
        heartbeat = HeartbeatProcess(find(f"http://127.0.0.1:{hangs.getsockname()[1]}").address, Heard())
        heartbeat.session(SessionView("s1", "j1", 1, 60.0, 0.05))
        os.kill(heartbeat.pid, signal.SIGKILL)
        heartbeat._thread.join(PATIENCE_S)
        for connection in connections:
            connection.close()

    assert len(connections) == 2
    assert heartbeat._process.returncode == -signal.SIGTERM
    heartbeat.stop()


def test_the_end_of_its_stdin_is_its_end():
    read, write = os.pipe()
    os.close(write)

    Beater(read, 1, os.getppid()).run()

    os.close(read)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_lets_go_of_the_pipes(beating, until):
    heartbeat, fake, _, _ = beating()
    until(lambda: fake.beats)
    pipes = [heartbeat._stdin.fileno(), heartbeat._stdout.fileno()]

    child = os.fork()
    if child == 0:
        still_open = sum(Path(f"/proc/self/fd/{fd}").exists() for fd in pipes)
        os._exit(still_open)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    beats = len(fake.beats)
    until(lambda: len(fake.beats) > beats)


TRAINER = """
    import os, signal, sys, time, rollmuxd
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests in the background ignores it
    with rollmuxd.job("a") as job, job.phase("rollout"):
        print(job._runtime._heartbeat.pid, flush=True)
        {body}
"""


def trainer(server, body):
    """Start a program that holds a slot; returns it and the pid of its heartbeat."""
    code = textwrap.dedent(TRAINER).format(body=body)
    environ = {**os.environ, "ROLLMUX_URL": server.url}
    command, pipe = [sys.executable, "-c", code], subprocess.PIPE
    program = forked.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environ, cwd=ROOT, start_new_session=True)
    return program, int(program.stdout.readline())


def test_it_ends_when_its_parent_is_killed(listening, until):
    program, heart = trainer(listening(HastyDaemon()), "time.sleep(600)")
    assert alive(heart)

    program.kill()
    program.communicate()

    until(lambda: not alive(heart))


def test_it_ends_with_its_parent_though_a_forked_worker_lives_on(listening, until):
    body = "child = os.fork()\n    if child == 0: time.sleep(600)\n    print(child, flush=True)\n    time.sleep(60)"
    program, heart = trainer(listening(HastyDaemon()), body)
    worker = int(program.stdout.readline())
    try:
        program.kill()
        program.wait()
        until(lambda: not alive(heart))
        assert alive(worker)
    finally:
        os.kill(worker, signal.SIGKILL)
        program.stdout.close()
        program.stderr.close()


def gone(fake):
    """The last beats that have come."""
    return [beat["gone"] for beat in fake.beats if beat.get("gone")]


@pytest.mark.parametrize("worker", [False, True], ids=["alone", "with_a_forked_worker"])
def test_killed_its_parent_is_said_to_be_gone_in_a_last_beat(listening, until, worker):
    fake = HastyDaemon()
    body = "child = os.fork()\n    if child == 0: time.sleep(600)\n    print(child, flush=True)\n    time.sleep(600)"
    program, heart = trainer(listening(fake), body if worker else "time.sleep(600)")
    child = int(program.stdout.readline()) if worker else None
    opened = next(call.body for call in fake.calls if call.path.endswith("/sessions"))
    until(lambda: fake.beats)
    assert gone(fake) == []

    program.kill()
    until(lambda: not alive(heart))

    assert gone(fake) == [{"pid": program.pid, "started": opened["started"]}]
    assert fake.beats[-1]["gone"], "it is the last"
    if child is not None:
        os.kill(child, signal.SIGKILL)
    program.communicate()


def test_killed_before_its_heartbeat_has_begun_it_is_said_to_be_gone_too(listening):
    fake = HastyDaemon()
    parent = subprocess.Popen(["true"])
    started = heartbeat_process.start_of(parent.pid)
    parent.wait()
    told = {"session": "e1", "base_url": listening(fake).url, "last_beat": True, "heartbeat_s": 600.0}

    command = [sys.executable, "-I", "-S", heartbeat_process.__file__, str(parent.pid), started]
    subprocess.run(command, input=json.dumps(told).encode() + b"\n", timeout=PATIENCE_S, check=True)

    assert gone(fake) == [{"pid": parent.pid, "started": started}]


def test_the_last_beat_is_sent_again_until_a_daemon_hears_it(listening, until):
    fake = HastyDaemon()
    server = listening(fake)
    program, heart = trainer(server, "time.sleep(600)")
    until(lambda: fake.beats)
    server.stop()
    program.kill()
    program.communicate()
    server.start()
    until(lambda: not alive(heart))

    assert len(gone(fake)) == 1


@pytest.mark.parametrize(
    "ends", ["job.end()", "job.leave()", "sys.exit(3)", "1 / 0", "os.execv('/bin/true', ['true'])"]
)
def test_a_process_that_ends_its_part_itself_or_lives_on_sends_no_last_beat(listening, until, ends):
    fake = HastyDaemon()
    wait = "signal.signal(signal.SIGUSR1, lambda *_: None); print(flush=True); signal.pause()"
    program, heart = trainer(listening(fake), f"{wait}; {ends}")
    until(lambda: fake.beats)
    program.stdout.readline()  # the signal would end it before
    until(lambda: program.poll() is not None or program.send_signal(signal.SIGUSR1))
    program.communicate()
    until(lambda: not alive(heart))

    # (What is executed in the process's place is that process until it ends.)
    assert len(gone(fake)) == (1 if "exec" in ends else 0)


def test_while_its_parent_lives_it_sends_no_last_beat_though_the_pipe_is_closed(listening, until):
    fake = HastyDaemon()
    program, heart = trainer(listening(fake), "os.close(job._runtime._heartbeat._stdin.fileno()); time.sleep(600)")
    until(lambda: not alive(heart))  # after ENDS_S

    assert program.poll() is None
    assert gone(fake) == []
    program.kill()
    program.communicate()


def test_a_run_that_another_process_may_join_by_its_key_is_kept_for_its_lease(listening, until):
    fake = HastyDaemon()
    code = textwrap.dedent(TRAINER).format(body="time.sleep(600)").replace('"a")', '"a", idempotency_key="k")', 1)
    environ = {**os.environ, "ROLLMUX_URL": listening(fake).url}
    program = forked.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environ, cwd=ROOT)
    heart = int(program.stdout.readline())
    until(lambda: fake.beats)
    program.kill()
    program.communicate()
    until(lambda: not alive(heart))

    assert gone(fake) == []


def test_it_beats_while_its_parent_holds_the_interpreter_lock(listening, until):
    # A regular expression that takes for ever never lets go of the GIL.
    fake = HastyDaemon()
    program, _ = trainer(listening(fake), "import re; re.match('(a+)+$', 'a' * 60 + 'b')")
    try:
        beats = len(fake.beats)
        until(lambda: len(fake.beats) > beats + 10)
    finally:
        program.kill()
        program.communicate()


def test_it_beats_while_its_parent_is_stopped_in_a_debugger(listening, until):
    fake = HastyDaemon()
    program, _ = trainer(listening(fake), "time.sleep(600)")
    try:
        os.kill(program.pid, signal.SIGSTOP)
        beats = len(fake.beats)
        until(lambda: len(fake.beats) > beats + 10)
    finally:
        program.kill()
        program.communicate()


@pytest.mark.parametrize("handled", [True, False])
def test_of_sigterm_the_program_says_what_it_is_told_to_say(listening, until, handled):
    """The line of docs/how-to/use-the-client.md makes it a Ctrl-C. Without it nothing is said, and the run is lost."""
    fake = HastyDaemon()
    line = "import signal; signal.signal(signal.SIGTERM, signal.default_int_handler)"
    assert line.partition("; ")[2] in (ROOT / "docs" / "how-to" / "use-the-client.md").read_text()
    told = f"{line}\n    " if handled else ""
    program, heart = trainer(listening(fake), f"{told}print('goes', flush=True)\n    time.sleep(600)")
    assert program.stdout.readline() == "goes\n"
    until(lambda: fake.beats)

    os.killpg(program.pid, signal.SIGTERM)  # as Slurm, a container or a service manager does it
    program.communicate()

    until(lambda: not alive(heart))
    assert len(fake.asked("POST", "/release")) == handled
    assert fake.ended == ({"a": "interrupted"} if handled else {})


def test_ctrl_c_ends_the_trainer_in_good_order_and_the_heartbeat_last(listening, until):
    fake = HastyDaemon()
    program, heart = trainer(listening(fake), "time.sleep(600)")
    until(lambda: fake.beats)

    os.killpg(program.pid, signal.SIGINT)  # as a terminal does it
    _, said = program.communicate()

    until(lambda: not alive(heart))
    assert "heartbeat" not in said
    assert len(fake.asked("POST", "/release")) == 1
    assert fake.ended == {"a": "interrupted"}


def test_a_program_that_simply_ends_ends_its_job(listening):
    fake = HastyDaemon()
    environ = {**os.environ, "ROLLMUX_URL": listening(fake, unix=True).url}
    code = "import rollmuxd; job = rollmuxd.job('a')\nwith job.phase('train'): pass"

    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=environ, cwd=ROOT, capture_output=True, text=True
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert fake.ended == {"a": "its process ended"}


@pytest.mark.parametrize(
    ("dies", "why"),
    [
        ("raise ValueError('no such file')", "failed: ValueError: no such file"),
        ("raise KeyboardInterrupt", "interrupted"),
        ("raise SystemExit(1)", "its process ended"),  # that cannot be seen any more: the help of `job wait` says so
    ],
)
def test_a_program_that_dies_of_an_error_says_so_also_where_no_with_was_left(listening, dies, why):
    fake = HastyDaemon()
    environ = {**os.environ, "ROLLMUX_URL": listening(fake, unix=True).url}
    code = f"import rollmuxd; job = rollmuxd.job('a')\nwith job.phase('train'): pass\n{dies}"

    done = forked.run([sys.executable, "-c", code], env=environ, cwd=ROOT, capture_output=True, text=True)

    assert done.returncode != 0
    assert fake.ended == {"a": why}


def test_a_job_that_was_ended_by_somebody_marks_its_slot_and_the_phase_runs_on(listening, until, monkeypatch, capfd):
    fake = HastyDaemon()
    monkeypatch.setenv("ROLLMUX_URL", listening(fake).url)

    with rollmuxd.job("a") as job:
        with pytest.raises(rollmuxd.SlotLost), job.phase("rollout") as slot:
            until(lambda: fake.beats)
            fake.end_job("a", "by root")
            fake.lose("rollout")
            fake.sessions.clear()
            until(lambda: slot.lost)
        with pytest.raises(rollmuxd.JobEnded, match="by root"), job.phase("train"):
            pass

    assert "by root" in capfd.readouterr().err
