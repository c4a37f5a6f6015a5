"""A daemon that is a table of answers, and the command line run against it."""

import pytest
from command_line import typed

from rollmuxd.cli import common
from rollmuxd.client.errors import refused
from rollmuxd.client.sync import Daemon


class FakeDaemon:
    """Answers from a table of (method, path); a path that is not in it is 404, as the real one's would be."""

    def __init__(self):
        self.answers = {}
        self.asked = []
        self.down = None

    def __setitem__(self, call, answer):
        self.answers[tuple(call.split(" "))] = answer

    def get(self, path, **params):
        return self._answer("GET", path, params)

    def post(self, path, body=None):
        return self._answer("POST", path, body)

    def delete(self, path, body=None):
        return self._answer("DELETE", path, body)

    run = Daemon.run

    def call(self, call):
        return self._answer(call.method, call.path, call.params)

    def close(self):
        self.closed = True

    def _answer(self, method, path, sent):
        self.asked.append((method, path, sent))
        if self.down is not None:
            raise self.down
        if (method, path) not in self.answers:
            raise refused(
                404, f"there is no {path.rpartition('/')[2]!r}", data={"kind": path.split("/")[2].removesuffix("s")}
            )
        answer = self.answers[method, path]
        if callable(answer):
            answer = answer(sent)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def daemon(monkeypatch):
    fake = FakeDaemon()
    fake.connected = []
    fake["GET /v1/me"] = {"owner": "root", "user": "root", "role": "admin"}

    def connect(url, api_key):
        fake.connected.append((url, api_key))
        return fake

    monkeypatch.setattr(common, "connect", connect)
    return fake


@pytest.fixture
def rollmuxd(monkeypatch):
    """The command line as typed: ``rollmuxd("job list --json")``."""
    for name in ("ROLLMUX_URL", "ROLLMUX_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return typed


def job_view(**more):
    return {
        "job": "j1",
        "owner": "vision",
        "user": "ada",
        "name": "math-7b",
        "run": 2,
        "status": "admitted",
        "registered_at": "2025-06-01T12:00:00Z",
        **more,
    }


@pytest.fixture
def a_job():
    return job_view
