"""Over the wire: TCP and Unix socket; every error of httpx is one of ours, every refusal has its class."""

import asyncio
import errno
import gc
import json
import pickle
import socket
import threading
from contextlib import aclosing

import httpx
import msgspec
import pytest
from msgspec import structs
from patience import PATIENCE_S

import rollmuxd
from rollmuxd.client import calls, discovery, errors
from rollmuxd.client.aio import AsyncDaemon
from rollmuxd.client.discovery import SYSTEM_SOCKET, Address
from rollmuxd.client.session import this_process
from rollmuxd.client.sync import Daemon
from rollmuxd.client.transport import Reply, problem, translated
from rollmuxd.testing import FakeDaemon, fake_daemon


@pytest.mark.parametrize("unix", [False, True], ids=["tcp", "unix"])
def test_a_daemon_is_reached_over_tcp_and_over_its_socket(listening, unix):
    server = listening(unix=unix)

    with Daemon(server.url) as daemon:
        job = daemon.post("/v1/jobs", {"name": "a", "phases": [], "wants": {}} | REGISTER)
        again = daemon.get(f"/v1/jobs/{job['job']}")

    assert again["name"] == "a"


REGISTER = {"phases": [{"name": "train", "pools": ["train"]}], "wants": {"train": {}}}


@pytest.mark.asyncio
async def test_and_by_the_async_twin(listening):
    server = listening(unix=True)

    async with aclosing(AsyncDaemon(discovery.need(server.url))) as daemon:
        with pytest.raises(errors.NotFound, match="no session"):
            await daemon.call(calls.orders("j1", params={"rank": 0, "session": "none", "wait_s": 0.0}))


class Hanging(FakeDaemon):
    """Does not answer one kind of call."""

    def __init__(self, method, end):
        super().__init__()
        self.hangs, self.is_asked, self.goes_on = (method, end), threading.Event(), threading.Event()

    def handle(self, method, path, params, content):
        if self.hangs[0] == method and path.endswith(self.hangs[1]):
            self.is_asked.set()
            self.goes_on.wait()
            raise errors.Unreachable("it hangs")
        return super().handle(method, path, params, content)


def test_the_key_goes_along_as_a_bearer(listening):
    server = listening()

    with Daemon(server.url, "rk-123") as daemon, pytest.raises(errors.NotFound):
        daemon.get("/v1/jobs/none")

    assert server.headers_seen[0]["authorization"] == "Bearer rk-123"


def test_ids_with_slashes_stay_one_segment():
    assert calls.job("a/b").path == "/v1/jobs/a%2Fb"


def test_a_proxy_for_the_internet_is_not_asked_for_the_daemon(listening, monkeypatch):
    server = listening()
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")

    with Daemon(server.url) as daemon, pytest.raises(errors.NotFound):
        daemon.get("/v1/jobs/none")


# httpcore does not close the socket of a Unix connection that fails; it goes when it is collected.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_nobody_there_is_unreachable_and_says_where(tmp_path):
    with Daemon(f"unix://{tmp_path}/none.sock") as daemon:
        with pytest.raises(errors.Unreachable, match=r"none\.sock") as raised:
            daemon.get("/v1/jobs")
        del raised
        gc.collect()


def test_where_no_daemon_listens_on_a_port_it_is_said_what_to_look_at():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # and does not listen
        with pytest.raises(errors.Unreachable, match=r"refused; see whether .* its address \(ROLLMUX_URL\)"):
            ask(f"http://127.0.0.1:{free.getsockname()[1]}", "sync")


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("twin", ["sync", "async"])
def test_at_the_socket_of_a_stopped_daemon_it_is_said_how_to_go_on(tmp_path, twin):
    path = tmp_path / "d.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))

    with pytest.raises(errors.Unreachable, match=r"rollmuxd daemon start.*ROLLMUX_URL=off") as raised:
        ask(f"unix://{path}", twin)

    del raised
    gc.collect()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_who_may_not_connect_is_told_who_can_let_it_in(monkeypatch, tmp_path):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    with pytest.raises(errors.Unreachable, match=r"Permission denied; .*daemon\.socket_mode"):
        ask(f"unix://{tmp_path}/d.sock", "sync")


def ask(url, twin):
    """One call, by either sender."""
    if twin == "sync":
        with Daemon(url) as daemon:
            daemon.call(calls.job("j1"))
        return

    async def asks():
        async with aclosing(AsyncDaemon(discovery.need(url))) as daemon:
            await daemon.call(calls.job("j1"))

    asyncio.run(asks())


@pytest.mark.parametrize("twin", ["sync", "async"])
def test_https_where_http_is_spoken_says_which_it_is(listening, twin):
    server = listening()
    with pytest.raises(errors.Unreachable, match=rf"speaks http, not https: write http://127\.0\.0\.1:{server.port}$"):
        ask(f"https://127.0.0.1:{server.port}", twin)


def test_a_daemon_that_did_not_answer_in_time_is_unreachable(listening):
    fake = Hanging("GET", "/j1")
    with Daemon(listening(fake).url) as daemon, pytest.raises(errors.Unreachable):
        try:
            daemon.call(structs.replace(calls.job("j1"), timeout_s=0.2))
        finally:
            fake.goes_on.set()
    assert fake.is_asked.wait(PATIENCE_S)


def _all(kind):
    return {kind} | {deeper for sub in kind.__subclasses__() for deeper in _all(sub)}


@pytest.mark.parametrize(
    "error", sorted(_all(httpx.HTTPError) | {httpx.InvalidURL, httpx.StreamError}, key=lambda kind: kind.__name__)
)
def test_every_error_of_httpx_is_one_of_ours(error, monkeypatch):
    def fail(*_, **__):
        raise error.__new__(error, "trouble")

    daemon = Daemon(address=Address("http://box"))
    monkeypatch.setattr(httpx.Client, "request", fail)

    with daemon, pytest.raises(rollmuxd.RollmuxError):
        daemon.get("/v1/jobs")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, errors.Refused),
        (401, errors.Unauthorised),
        (403, errors.Unauthorised),
        (404, errors.NotFound),
        (408, errors.Unavailable),
        (409, errors.Conflict),
        (413, errors.Refused),
        (422, errors.Unprocessable),
        (429, errors.TooManyRequests),
        (500, errors.Refused),
        (410, errors.NotFound),
        (502, errors.Unavailable),
        (503, errors.Unavailable),
        (504, errors.Unavailable),
    ],
)
def test_each_status_has_its_error(status, kind):
    content = b'{"title": "no", "status": 1, "detail": "because", "request_id": "r7", "data": {"slot": "s1"}}'

    error = problem(Reply(status, headers={"retry-after": "2.5"}, content=content))

    assert type(error) is kind
    assert (error.status, error.detail, error.request_id, error.data) == (status, "because", "r7", {"slot": "s1"})
    assert error.retry_after_s == 2.5


def test_a_job_that_is_alive_elsewhere_has_an_error_of_its_own():
    error = problem(
        Reply(409, content=b'{"title": "no", "status": 409, "detail": "", "data": {"pid": 7, "host": "h"}}')
    )

    assert type(error) is rollmuxd.JobAlive


def test_a_cell_of_a_notebook_that_ran_twice_is_told_so_and_not_a_container_that_was_restarted():
    own = msgspec.to_builtins(this_process(""))
    for alive, said in (own, "this very process runs the job already"), ({**own, "started": "1"}, "lost in 9 s"):
        body = {"title": "no", "status": 409, "detail": "it is lost in 9 s", "data": alive}
        error = problem(Reply(409, content=json.dumps(body).encode()))

        assert type(error) is rollmuxd.JobAlive
        assert said in str(error)


def test_an_error_page_of_a_proxy_is_an_error_too():
    error = problem(Reply(502, headers={"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, content=b"<html>Bad gateway"))

    assert isinstance(error, errors.Unavailable)
    assert "<html>Bad gateway" in str(error)


def test_an_answer_of_some_other_program_is_a_bad_answer(monkeypatch):
    monkeypatch.setattr(httpx.Client, "request", lambda *_, **__: httpx.Response(200, text="hello"))

    with Daemon(address=Address("http://box")) as daemon, pytest.raises(errors.BadAnswer, match="GET /v1/jobs/a"):
        daemon.call(calls.job("a"))


def test_fields_of_a_newer_daemon_are_ignored(monkeypatch):
    answer = {"session": "s1", "job": "j1", "run": 1, "lease_s": 60, "heartbeat_s": 15, "moon": "full"}
    monkeypatch.setattr(httpx.Client, "request", lambda *_, **__: httpx.Response(200, json=answer))

    with Daemon(address=Address("http://box")) as daemon:
        assert daemon.call(calls.open_session("j1", None)).session == "s1"


def test_a_daemon_that_restarts_between_two_calls_is_found_again(listening):
    server = listening()
    with Daemon(server.url) as daemon:
        with pytest.raises(errors.NotFound):
            daemon.get("/v1/jobs/none")
        server.stop()
        with pytest.raises(errors.Unreachable):
            daemon.get("/v1/jobs/none")
        server.start()
        with pytest.raises(errors.NotFound):
            daemon.get("/v1/jobs/none")


@pytest.mark.parametrize("name", [name for name in rollmuxd.__all__ if isinstance(getattr(rollmuxd, name), type)])
def test_errors_survive_the_way_between_processes(name):
    kind = getattr(rollmuxd, name)
    if not issubclass(kind, Exception):
        return
    error = kind("what happened")
    error.slot = "s1"

    copy = pickle.loads(pickle.dumps(error))

    assert type(copy) is kind
    assert str(copy) == "what happened"
    assert copy.slot == "s1"


def test_a_command_line_can_be_tested_with_the_fake_too():
    with fake_daemon() as fake, Daemon() as daemon:
        daemon.post("/v1/jobs", {"name": "a", **REGISTER})

    assert fake.registered[0].name == "a"


def test_the_fake_is_a_transport_for_anybodys_httpx_client():
    fake = FakeDaemon()

    with httpx.Client(transport=fake.transport, base_url="http://fake") as client:
        assert client.post("/v1/jobs", json={"name": "a", **REGISTER}).json()["job"] == "j1"


@pytest.mark.parametrize("path", [SYSTEM_SOCKET, "/home/ada/.local/state/rollmux/rollmux.sock"])
def test_a_user_is_not_asked_to_start_a_second_daemon_where_the_machines_own_is_down(path):
    error = httpx.ConnectError("refused")
    error.__cause__ = ConnectionRefusedError(errno.ECONNREFUSED, "refused")
    told = str(translated(error, Address("http://rollmuxd", socket=path)))
    assert ("its operator starts it" in told) == (path == SYSTEM_SOCKET)
    assert "ROLLMUX_URL=off" in told
