"""``rollmuxd run`` between its place and its start, where a daemon that is away is waited for; and at its end."""

import pytest

from rollmuxd.cli import job_file
from rollmuxd.cli import run as run_command
from rollmuxd.client.errors import Conflict, NotFound, Unavailable, Unreachable
from rollmuxd.wire.answers import JobView

VIEW = {"name": "math", "pins": {"rollout": ["box/gpu0-1"], "train": ["box/gpu2"]}}
NODES = {
    "/v1/nodes/box/gpu0-1": {"host": "box", "gpus": [{"gpu": "box/gpu0"}, {"gpu": "box/gpu1"}]},
    "/v1/nodes/box/gpu2": {"host": "box", "gpus": [{"gpu": "box/gpu2"}]},
}


class Daemon:
    """Answers what is next: an error, or, when there is none left, what it is asked for."""

    def __init__(self, *errors):
        self.errors = list(errors)
        self.asked = []

    def get(self, path):
        self.asked.append(path)
        if self.errors:
            raise self.errors.pop(0)
        return NODES[path]


@pytest.fixture
def starting(tmp_path, monkeypatch):
    """A run that has its place, before a daemon that goes wrong like this; and how often it slept."""
    path = tmp_path / "job.toml"
    path.write_text('name = "math"\nrollout = {nodes = 1}\ntrain = {nodes = 1}\n')
    slept = []
    monkeypatch.setattr(run_command.time, "sleep", slept.append)

    def make(*errors):
        class Call:
            url, api_key = "unix:///nowhere", None

        made = run_command._Run(Call(), job_file.read(path, ("true",)), "key", replace=False)
        made._daemon = Daemon(*errors)
        return made, slept

    return make


def test_a_daemon_that_goes_away_when_the_nodes_are_asked_for_is_waited_for(starting):
    run, slept = starting(Unreachable("nobody listens"), Unavailable("it starts"), Unreachable("nobody listens"))
    assert run._gpus(VIEW, None) == {"rollout": ["box/gpu0", "box/gpu1"], "train": ["box/gpu2"]}
    assert run._daemon.asked == ["/v1/nodes/box/gpu0-1"] * 4 + ["/v1/nodes/box/gpu2"]
    assert slept == [run_command.ASK_S] * 3


def test_what_it_refuses_is_not_asked_again(starting):
    run, slept = starting(NotFound("there is no node box/gpu0-1"))
    with pytest.raises(NotFound):
        run._gpus(VIEW, None)
    assert slept == []


class Ending:
    """A daemon that has such runs of a job, and ends the present one as it is told."""

    def __init__(self, run, *, key_of=1):
        self.run, self.key_of, self.ended = run, key_of, []

    def call(self, call):
        assert (call.method, call.path, call.body.replace) == ("POST", "/v1/jobs", False)
        return JobView("j1", "me", "me", "math", self.key_of, "admitted", "2026-01-01T00:00:00Z")

    def delete(self, path, body):
        assert path == "/v1/jobs/j1"
        if body["run"] != self.run:
            raise Conflict("it is another run")
        self.ended.append((body["run"], body["reason"]))


def test_what_is_ended_is_the_run_that_was_registered_and_no_newer_one(starting, capsys):
    run, _ = starting()
    run._talk.job, run._talk.run, run._daemon = "j1", 1, Ending(run=2)
    run._end("main ended with exit status 0")
    assert run._daemon.ended == []
    assert capsys.readouterr().err == ""  # nor is there anything to be said

    run._daemon = Ending(run=1)
    run._end("main ended with exit status 0")
    assert run._daemon.ended == [(1, "main ended with exit status 0")]


def test_a_run_of_which_the_registration_was_not_answered_is_looked_for_by_its_key_and_ended(starting):
    run, _ = starting()
    run._daemon = Ending(run=7, key_of=7)
    run._end("rollmuxd run was interrupted")
    assert run._daemon.ended == [(7, "rollmuxd run was interrupted")]
