"""``rollmuxd run`` between its place and its start, where a daemon that is away is waited for; and at its end."""

import contextlib
import math
import re

import pytest

from rollmuxd.cli.common import Failed
from rollmuxd.cli.run import command as run_command
from rollmuxd.cli.run import job_file
from rollmuxd.client import sync
from rollmuxd.client.errors import Conflict, NotFound, Unavailable, Unreachable, refused
from rollmuxd.wire.answers import RegisteredView

VIEW = {"name": "math", "pins": {"rollout": ["box/gpu0-1"], "train": ["box/gpu2"]}}
NODES = {
    "/v1/nodes/box%2Fgpu0-1": {"host": "box", "gpus": [{"gpu": "box/gpu0"}, {"gpu": "box/gpu1"}]},
    "/v1/nodes/box%2Fgpu2": {"host": "box", "gpus": [{"gpu": "box/gpu2"}]},
}


class Daemon:
    """Answers what is next: an error, or, when there is none left, what it is asked for."""

    def __init__(self, *errors):
        self.errors = list(errors)
        self.asked = []

    run = sync.Daemon.run

    def call(self, call):
        self.asked.append(call.path)
        if self.errors:
            raise self.errors.pop(0)
        return NODES[call.path]


@pytest.fixture
def starting(tmp_path, monkeypatch):
    """A run that has its place, before a daemon that goes wrong like this; and how often it slept."""
    path = tmp_path / "job.toml"
    path.write_text('name = "math"\nrollout = {nodes = 1}\ntrain = {nodes = 1}\n')
    slept = []
    monkeypatch.setattr(run_command.time, "sleep", slept.append)

    def make(*errors):
        class Call:
            daemon, api_key = Daemon(*errors), None

        made = run_command._Run(Call(), job_file.read(path, ("true",)), "key", replace=False)
        return made, slept

    return make


@pytest.fixture
def clock(monkeypatch):
    """A time that sleeping lets pass, at once."""

    class Clock:
        now = 1000.0

        def monotonic(self):
            return self.now

        def sleep(self, seconds):
            self.now += seconds

    made = Clock()
    monkeypatch.setattr(run_command, "time", made)
    monkeypatch.setattr(sync, "time", made)
    return made


def test_a_daemon_that_goes_away_when_the_nodes_are_asked_for_is_waited_for(starting):
    run, slept = starting(Unreachable("nobody listens"), Unavailable("it starts"), Unreachable("nobody listens"))
    assert run._gpus(VIEW, None) == {"rollout": ["box/gpu0", "box/gpu1"], "train": ["box/gpu2"]}
    assert run._daemon.asked == ["/v1/nodes/box%2Fgpu0-1"] * 4 + ["/v1/nodes/box%2Fgpu2"]
    assert len(slept) == 3


def test_what_it_refuses_is_not_asked_again(starting):
    run, slept = starting(NotFound("there is no node box/gpu0-1"))
    with pytest.raises(NotFound):
        run._gpus(VIEW, None)
    assert slept == []


class Ending:
    """A daemon that has such runs of a job, and ends the present one as it is told."""

    def __init__(self, run, *, key_of=1):
        self.present, self.key_of, self.ended = run, key_of, []

    run = sync.Daemon.run

    def call(self, call):
        if call.method == "POST":
            assert (call.path, call.body.replace) == ("/v1/jobs", False)
            return RegisteredView("j1", "me", "me", "math", self.key_of, "admitted", "2026-01-01T00:00:00Z")
        assert (call.method, call.path) == ("DELETE", "/v1/jobs/j1")
        if call.body.run != self.present:
            raise Conflict("it is another run")
        self.ended.append((call.body.run, call.body.reason))
        return None


def test_what_is_ended_is_the_run_that_was_registered_and_no_newer_one(starting, capsys):
    run, _ = starting()
    run._talk.job, run._talk.run, run._daemon = "j1", 1, Ending(run=2)
    run._end("main ended with exit status 0", finished=True)
    assert run._daemon.ended == []
    assert capsys.readouterr().err == ""  # nor is there anything to be said

    run._daemon = Ending(run=1)
    run._end("main ended with exit status 0", finished=True)
    assert run._daemon.ended == [(1, "main ended with exit status 0")]


def test_a_run_of_which_the_registration_was_not_answered_is_looked_for_by_its_key_and_ended(starting):
    run, _ = starting()
    run._daemon = Ending(run=7, key_of=7)
    run._end("rollmuxd run was interrupted", finished=True)
    assert run._daemon.ended == [(7, "rollmuxd run was interrupted")]


class Hanging(sync.Daemon):
    """A daemon that answers no call within its time limit, until a moment of the clock; or only no end of a job."""

    def __init__(self, clock, *, back_after=math.inf, for_all=True):
        self.clock, self.back_after, self.for_all, self.tries, self.ended = clock, back_after, for_all, [], False

    def call(self, call):
        if self.clock.now >= self.back_after and (self.for_all or call.method != "DELETE"):
            self.ended |= call.method == "DELETE"
            return RegisteredView("j1", "me", "me", "math", 1, "admitted", "2026-01-01T00:00:00Z")
        self.tries.append((call.method, call.timeout_s))
        self.clock.now += call.timeout_s
        raise Unreachable("timed out")


@pytest.mark.parametrize("registered", [True, False])
def test_the_end_of_a_run_takes_seconds_of_somebody_who_waits_for_the_prompt_though_the_daemon_hangs(
    starting, clock, capsys, registered
):
    run, _ = starting()
    run._talk.job, run._talk.run = ("j1", 1) if registered else ("", 0)
    run._daemon = Hanging(clock)
    run._end("rollmuxd run was interrupted", finished=True)

    assert clock.now <= 1010
    assert len(run._daemon.tries) > 1  # a connection that hangs is worth a second one
    assert {method for method, _ in run._daemon.tries} == {"DELETE" if registered else "POST"}
    assert "could not tell the daemon that math is over" in capsys.readouterr().err


def test_the_end_of_a_run_that_was_to_be_looked_for_first_takes_no_longer(starting, clock):
    run, _ = starting()
    run._daemon = Hanging(clock, back_after=1004, for_all=False)
    run._end("rollmuxd run was interrupted", finished=True)

    assert run._daemon.tries[-1][0] == "DELETE"
    assert clock.now <= 1010


@pytest.mark.parametrize("registered", [True, False])
def test_the_end_of_a_run_outlives_a_daemon_that_is_away_for_seconds(starting, clock, registered):
    run, _ = starting()
    run._talk.job, run._talk.run = ("j1", 1) if registered else ("", 0)
    run._daemon = Hanging(clock, back_after=1004)
    run._end("main ended with exit status 0", finished=True)

    assert run._daemon.ended


class Commands:
    """Commands that end when the clock has gone on: Ctrl-C has been passed on to them."""

    def __init__(self, clock, *_):
        self.clock, self.began = clock, clock.now

    def wait(self, seconds):
        if self.clock.now > self.began:
            return "main", 130
        self.clock.sleep(seconds)
        return None


def test_a_daemon_that_hangs_keeps_nobody_waiting_for_the_prompt_before_the_end_is_told(starting, clock):
    """What is asked beside the commands is not interrupted: Ctrl-C is theirs."""
    run, _ = starting()
    run._talk.job, run._session, run._beat_every_s = "j1", "s1", 1.0
    run._daemon = Hanging(clock)

    assert run._until_one_ends(Commands(clock), 10.0) == ("main", 130)
    assert {method for method, _ in run._daemon.tries} == {"POST", "GET"}
    assert clock.now - 1000 <= 1 + 2 + 2


@pytest.mark.parametrize(
    ("refusal", "goes_on"),
    [(refused(status, "no"), status not in (404, 409)) for status in (404, 408, 409, 429, 502, 503)],
    ids=str,
)
def test_only_a_session_that_is_another_processs_is_kept_no_more(starting, clock, refusal, goes_on):
    """A limit that is reached is none: without heartbeats the run would be lost while its commands start."""
    run, _ = starting()
    run._session, run._beat_every_s = "s1", 1.0
    run._daemon = Refusing(refusal)
    for _ in range(3):
        run._beat()
        clock.sleep(1.0)

    assert len(run._daemon.beats) == (3 if goes_on else 1)


class Refusing(sync.Daemon):
    """A daemon that answers with this."""

    def __init__(self, refusal):
        self.refusal, self.beats = refusal, []

    def call(self, call):
        self.beats.append(call.path)
        raise self.refusal


class Interrupted(sync.Daemon):
    """A daemon in whose calls Ctrl-C comes, so many times; then it hangs."""

    def __init__(self, clock, times):
        self.clock, self.times, self.tries = clock, times, []

    def call(self, call):
        self.tries.append((call.method, call.timeout_s))
        self.times -= 1
        if self.times >= 0:
            raise KeyboardInterrupt
        self.clock.now += call.timeout_s
        raise Unreachable("timed out")


def test_a_second_ctrl_c_leaves_the_end_of_a_run_a_second(starting, clock, capsys):
    run, _ = starting()
    run._talk.job, run._talk.run = "j1", 1
    run._daemon = Interrupted(clock, 1)
    run._end("main ended with exit status 130", finished=True)

    assert [method for method, _ in run._daemon.tries[:2]] == ["DELETE", "DELETE"]
    assert clock.now - 1000 <= 1
    assert "could not tell the daemon that math is over" in capsys.readouterr().err


@pytest.mark.parametrize("times", [1, 2, 3, 4])
def test_a_run_that_is_interrupted_says_so_by_its_exit_status_however_often_it_is(starting, clock, monkeypatch, times):
    run, _ = starting()
    run._daemon = Interrupted(clock, times)
    monkeypatch.setattr(run_command, "ProcessGroup", lambda grace_s: contextlib.nullcontext())

    assert run.to_its_end(None, 10.0, None) == 130
    assert clock.now - 1000 <= 10


@pytest.mark.parametrize(
    ("role", "said"),
    [
        ('command = " "', "command is empty; say what the role runs"),
        ("command = []", "command is empty; say what the role runs"),
        ('command = "python x.py"\npool = "nope"', "pool is 'nope', and the job has rollout, train"),
    ],
)
def test_a_role_that_cannot_be_started_is_named_with_what_it_needs(tmp_path, role, said):
    path = tmp_path / "job.toml"
    path.write_text(f'name = "math"\n[roles.trainer]\n{role}\n')

    with pytest.raises(Failed, match=re.escape(f"role trainer: {said}")):
        job_file.read(path, ())
