"""A daemon for these tests that listens: :class:`rollmuxd.testing.FakeDaemon` behind the standard library's server."""

import socketserver
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

import patience
import pytest

from rollmuxd.client.errors import Unreachable
from rollmuxd.testing import FakeDaemon


class _Handler(BaseHTTPRequestHandler):
    def _answer(self):
        url = urlsplit(self.path)
        content = self.rfile.read(int(self.headers.get("content-length") or 0))
        self.server.headers_seen.append({**self.headers, ":call": f"{self.command} {url.path}"})
        try:
            reply = self.server.fake.handle(self.command, url.path, dict(parse_qsl(url.query)), content)
        except Unreachable:
            self.close_connection = True
            return
        self.send_response(reply.status_code)
        for name, value in {**reply.headers, "content-length": str(len(reply.content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(reply.content)

    do_GET = do_POST = do_DELETE = _answer  # noqa: N815  (the names that the base class looks for)

    def log_message(self, *_):
        pass

    def address_string(self):
        return "a socket"


class _UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


class _TcpServer(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True


class Listening:
    """A fake daemon at an address, that can be stopped and started."""

    def __init__(self, fake, path=None):
        self.fake, self.path, self.port, self.headers_seen = fake, path, 0, []
        self.start()

    @property
    def url(self):
        return f"unix://{self.path}" if self.path else f"http://127.0.0.1:{self.port}"

    def start(self):
        if self.path:
            self.server = _UnixServer(str(self.path), _Handler)
        else:
            self.server = _TcpServer(("127.0.0.1", self.port), _Handler)
            self.port = self.server.server_address[1]
        self.server.fake, self.server.headers_seen = self.fake, self.headers_seen
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def stop(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
        if self.path:
            self.path.unlink()


@pytest.fixture
def listening(tmp_path):
    """Make listening daemons: ``listening(fake)`` over TCP, ``listening(fake, unix=True)``."""
    made = []

    def listen(fake=None, *, unix=False):
        made.append(Listening(fake or FakeDaemon(), tmp_path / "d.sock" if unix else None))
        return made[-1]

    yield listen
    for server in made:
        if server.thread.is_alive():
            server.stop()


@pytest.fixture(autouse=True)
def nothing_of_this_machine(monkeypatch, tmp_path):
    """No daemon, key or setting of whoever runs the tests."""
    for name in ("URL", "SOCKET", "API_KEY", "API_KEY_FILE", "CA_FILE", "REQUIRED", "GIVE_UP_S"):
        monkeypatch.delenv(f"ROLLMUX_{name}", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr("rollmuxd.client.runtime._said_alone", False)


@pytest.fixture
def until():
    """Wait for something to become true."""
    return partial(patience.until, "it has happened", every=0.01)


@pytest.fixture
def play():
    """Run a flow against a list of answers: values, or exceptions to raise. Returns (result, steps taken)."""

    def run(flow, answers):
        answers, steps = list(answers), []
        step = next(flow)
        while True:
            steps.append(step)
            if type(step).__name__ == "Pause":
                answer = None
            else:
                assert answers, f"nothing left to answer {step} with"
                answer = answers.pop(0)
            try:
                step = flow.throw(answer) if isinstance(answer, BaseException) else flow.send(answer)
            except StopIteration as end:
                return end.value, steps

    return run
