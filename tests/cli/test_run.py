"""``rollmuxd run`` between its place and its start: a daemon that is away just then is waited for."""

import pytest

from rollmuxd.cli import job_file
from rollmuxd.cli import run as run_command
from rollmuxd.client.errors import NotFound, Unavailable, Unreachable

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
