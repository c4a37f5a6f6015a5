"""The daemon as a whole, in this process, on real sockets: it starts, is found, stops, or says why it cannot."""

import errno
import gc
import json
import os
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from pathlib import Path

import anyio
import httpx
import pytest
import structlog
from patience import PATIENCE_S

import rollmuxd
from rollmuxd.cli.processes import started
from rollmuxd.core import facts as f
from rollmuxd.core.errors import BrokenInvariant
from rollmuxd.core.inputs import HostSpec, RegisterJob
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.daemon import app, writer
from rollmuxd.daemon.app import CannotStart, make_policy, serve
from rollmuxd.daemon.journal import backup as journal_tools
from rollmuxd.daemon.journal.store import Journal
from rollmuxd.daemon.settings import BadSettings, JournalTable, Settings, load_settings
from rollmuxd.daemon.usage import daily
from rollmuxd.spi.fake_fabric import MockFabric

pytestmark = [pytest.mark.asyncio, pytest.mark.e2e]


@pytest.fixture
def settings(tmp_path):
    def make(**daemon) -> Settings:
        return Settings(daemon={"state_dir": tmp_path / "state", "listen": "127.0.0.1:0", "shutdown_s": 2, **daemon})

    return make


@asynccontextmanager
async def running(settings: Settings, **options):
    """A daemon, until the block is left; then it is told to stop, as by an operator."""
    found: list[app.Ready] = []
    ready = anyio.Event()

    def on_ready(where: app.Ready) -> None:
        found.append(where)
        ready.set()

    async with anyio.create_task_group() as tasks:

        async def run() -> None:
            await serve(settings, on_ready=on_ready, **options)
            ready.set()

        tasks.start_soon(run)
        with anyio.fail_after(PATIENCE_S):
            await ready.wait()
        yield found[0]
        os.kill(os.getpid(), signal.SIGTERM)


def client(where: app.Ready, **options) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.AsyncHTTPTransport(uds=where.socket), base_url="http://rollmuxd", timeout=PATIENCE_S, **options
    )


async def test_it_serves_on_both_sockets_and_says_where(settings, tmp_path):
    async with running(settings()) as where:
        said = json.loads((tmp_path / "state" / "daemon.json").read_bytes())
        assert said == {
            "pid": os.getpid(),
            "started": started(os.getpid()),
            "url": where.url,
            "socket": str(tmp_path / "state" / "rollmux.sock"),
        }
        assert stat.S_IMODE(os.stat(where.socket).st_mode) == 0o600
        umask = os.umask(0)
        os.umask(umask)
        assert umask & 0o100 == 0  # that of the socket holds for the socket only
        async with client(where) as unix, httpx.AsyncClient(base_url=where.url) as tcp:
            assert (await unix.get("/readyz")).status_code == 200
            assert (await tcp.get("/readyz")).status_code == 200
            assert (await unix.get("/v1/jobs")).status_code == 200
            assert (await tcp.get("/v1/jobs")).status_code == 401


async def test_after_a_stop_in_good_order_nothing_is_left_but_the_journal_and_where_clients_wait(settings, tmp_path):
    async with running(settings()):
        pass
    left = sorted(path.name for path in (tmp_path / "state").iterdir())
    assert left == ["journal.sqlite3", "lock", "mark", "reserve", "rollmux.sock"]
    journal = Journal.open(tmp_path / "state")
    past = journal.load()
    await journal.close()

    assert past.snapshot is not None
    assert list(past.facts) == []


async def test_the_state_directory_is_for_the_daemons_user_alone_whatever_the_umask(tmp_path):
    """Who could write daemon.json would send the jobs' clients to another daemon."""
    (state := tmp_path / "state").mkdir(mode=0o755)
    (tmp_path / "gpus.json").write_text('{"gpus": [{"uuid": "GPU-1", "name": "NVIDIA H20", "total_mb": 97871}]}')
    options = {"made_up_gpus": str(tmp_path / "gpus.json")}
    host = {"id": "here", "backend": "local", "options": options, "nodes": [{"gpus": "0", "pools": ["p"]}]}
    before = os.umask(0)
    try:
        async with running(Settings(daemon={"state_dir": state, "listen": "127.0.0.1:0"}, hosts=[host])):
            found = {str(one.relative_to(state)): stat.S_IMODE(one.stat().st_mode) for one in state.rglob("*")}
    finally:
        os.umask(before)
    assert {name for name, mode in found.items() if mode & 0o077} == set()
    assert found.keys() >= {"backends/local/owner", "daemon.json", "journal.sqlite3-wal", "mark"}


async def test_a_parked_long_poll_holds_no_stop_up_and_is_answered(settings):
    answers = []
    began = 0.0

    async def poll(where: app.Ready, parked: anyio.Event) -> None:
        async with client(where) as unix:
            last = (await unix.get("/v1/facts")).json()["last"]
            parked.set()
            answers.append((await unix.get("/v1/facts", params={"after": last, "wait_ms": 60_000})).status_code)

    async with anyio.create_task_group() as tasks:
        async with running(settings(shutdown_s=50)) as where:
            parked = anyio.Event()
            tasks.start_soon(poll, where, parked)
            await parked.wait()
            await anyio.sleep(0.2)
            began = anyio.current_time()
        took = anyio.current_time() - began

    assert took < 40
    assert answers[0] in (200, 503)


async def test_a_restart_goes_on_where_the_last_one_ended(settings):
    async def last(where: app.Ready) -> tuple[int, list[str]]:
        async with client(where) as unix:
            page = (await unix.get("/v1/facts")).json()
            return page["last"], [fact["fact"] for fact in page["facts"]]

    async with running(settings()) as where:
        seq, _ = await last(where)
    async with running(settings()) as where:
        again, names = await last(where)

    assert again == seq + 1
    assert names.count("daemon_started") == 2


# httpcore does not close the socket of a Unix connection that fails; it goes when it is collected.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_a_job_that_is_started_while_the_daemon_is_stopped_does_not_run_alone(settings, tmp_path, monkeypatch):
    """The jobs of before hold their GPUs: it waits at the socket's file, and is told what to do."""
    for name in ("ROLLMUX_URL", "XDG_RUNTIME_DIR", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ROLLMUX_SOCKET", str(tmp_path / "state" / "rollmux.sock"))
    monkeypatch.setenv("ROLLMUX_GIVE_UP_S", "0.2")
    async with running(settings()):
        pass

    with pytest.raises(rollmuxd.GaveUp, match=r"rollmuxd daemon start.*ROLLMUX_URL=off") as raised:
        rollmuxd.job("second").start()
    del raised
    gc.collect()


async def test_a_directory_that_cannot_be_written_to_is_told_with_the_command_that_helps(settings, monkeypatch):
    def closed(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", closed)
    said = rf"/run/nobodys/a.sock: Permission denied; .*install -d -o {os.geteuid()} -m 0755 /run/nobodys$"
    with pytest.raises(CannotStart, match=said), app.listening(settings(socket="/run/nobodys/a.sock")):
        pass


@pytest.mark.parametrize("why", ["it only watched", "it was never ready"])
async def test_where_nothing_can_be_held_no_socket_is_left_to_wait_at(settings, tmp_path, why):
    path = tmp_path / "state" / "rollmux.sock"
    path.parent.mkdir(parents=True)
    with app.listening(settings(mode="observe" if why == "it only watched" else "share")):
        assert path.exists()
        if why == "it only watched":
            (path.parent / "daemon.json").write_text("{}")

    assert not path.exists()


async def test_a_daemon_whose_socket_has_moved_leaves_none_where_it_was_to_be_waited_at(settings, tmp_path):
    async with running(settings()):
        pass
    async with running(settings(socket=tmp_path / "elsewhere.sock")):
        assert not (tmp_path / "state" / "rollmux.sock").exists()
    assert (tmp_path / "elsewhere.sock").exists()
    (tmp_path / "link").symlink_to(tmp_path / "state")
    async with running(settings(socket=tmp_path / "link" / "rollmux.sock")):
        assert (tmp_path / "state" / "rollmux.sock").exists()


async def test_a_daemon_that_cannot_start_leaves_the_socket_of_the_one_before_it(settings, tmp_path):
    path = tmp_path / "state" / "rollmux.sock"
    path.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with app.listening(settings()):
        pass

    assert path.exists()


async def test_a_program_that_is_suspended_with_a_full_queue_still_has_its_socket(settings, tmp_path):
    path = tmp_path / "suspended.sock"
    with socket.socket(socket.AF_UNIX) as suspended, ExitStack() as callers:
        suspended.bind(str(path))
        suspended.listen(0)
        with pytest.raises(BlockingIOError):
            while True:  # until its queue is full
                caller = callers.enter_context(socket.socket(socket.AF_UNIX))
                caller.setblocking(False)
                caller.connect(str(path))
        was = path.stat().st_ino
        with (
            pytest.raises(CannotStart, match="another program answers there"),
            app.listening(settings(socket=path)),
        ):
            pass
        assert path.stat().st_ino == was


async def test_a_daemon_whose_directory_was_moved_takes_nothing_from_the_one_that_is_in_its_place(settings, tmp_path):
    here = tmp_path / "state"
    observing = settings(mode="observe")
    with app.listening(observing) as sockets:
        app.announce(observing, sockets)
        here.rename(tmp_path / "moved")
        here.mkdir()
        with socket.socket(socket.AF_UNIX) as others:
            others.bind(str(here / "rollmux.sock"))
            (here / "daemon.json").write_text('{"pid": 1, "started": "5", "url": null, "socket": ""}')
    assert sorted(path.name for path in here.iterdir()) == ["daemon.json", "rollmux.sock"]


async def test_a_socket_that_a_killed_daemon_left_is_no_hindrance(settings, tmp_path):
    (tmp_path / "state").mkdir()
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(tmp_path / "state" / "rollmux.sock"))
    left.close()
    async with running(settings()) as where, client(where) as unix:
        assert (await unix.get("/readyz")).status_code == 200


@pytest.mark.parametrize("broken", ["bind", "chmod", "replace", None])
async def test_a_socket_that_is_waited_at_is_there_at_any_moment_of_a_start(settings, tmp_path, monkeypatch, broken):
    """A job that finds no file runs alone, on GPUs that others hold."""
    path = tmp_path / "state" / "rollmux.sock"
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    before, seen = path.stat().st_ino, []

    def looking(name, real):
        def look(*args):
            seen.append(name)
            assert path.stat().st_ino == before
            if name == broken:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*args)

        return look

    for of, name in ((socket.socket, "bind"), (Path, "chmod"), (Path, "replace")):
        monkeypatch.setattr(of, name, looking(name, getattr(of, name)))
    if broken is not None:
        with pytest.raises(CannotStart, match=r"cannot listen on .*No space"), app.listening(settings(listen="")):
            pass
    else:
        with app.listening(settings(listen="", socket_mode="0660")):
            assert stat.S_IMODE(path.stat().st_mode) == 0o660
    assert seen == ["bind", "chmod", "replace"][: 1 + ["bind", "chmod", "replace", None].index(broken)]
    assert (path.stat().st_ino == before) == (broken is not None)
    assert sorted(file.name for file in path.parent.iterdir()) == ["rollmux.sock"]


async def test_a_start_that_is_killed_while_it_makes_its_socket_is_no_hindrance_and_leaves_nothing(settings, tmp_path):
    path = tmp_path / "state" / "rollmux.sock"
    path.parent.mkdir()
    program = (
        "import os, pathlib, sys; from rollmuxd.daemon import app;"
        "pathlib.Path.replace = lambda *_: os._exit(9); app._bound(pathlib.Path(sys.argv[1]), 0o600)"
    )
    killed = subprocess.run([sys.executable, "-c", program, path], check=False)
    assert (killed.returncode, path.exists(), len(list(path.parent.iterdir()))) == (9, False, 1)
    with app.listening(settings(listen="")):
        assert [file.name for file in path.parent.iterdir()] == ["rollmux.sock"]


@pytest.mark.parametrize("name", [1, 70], ids=["a long folder", "a long name"])
async def test_the_longest_path_that_a_socket_may_have_is_long_enough(settings, name):
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        path = Path(short) / ("f" * (101 - len(short) - name)) / ("s" * name)
        assert len(str(path)) == 103
        async with running(settings(socket=path)) as where, client(where) as unix:
            assert (await unix.get("/readyz")).status_code == 200


async def test_where_something_else_is_no_socket_is_put_in_its_place(settings, tmp_path):
    file, used = tmp_path / "notes", tmp_path / "used.sock"
    file.write_text("mine")
    with socket.socket(socket.AF_UNIX) as there:
        there.bind(str(used))
        there.listen()
        for path, why in ((file, "is no socket"), (used, "another program answers there")):
            before = path.stat().st_ino
            with pytest.raises(CannotStart, match=why), app.listening(settings(socket=path)):
                pass
            assert path.stat().st_ino == before
    assert file.read_text() == "mine"


async def test_a_port_in_use_is_a_sentence_and_the_state_directory_is_let_go(settings, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CannotStart, match=rf"cannot listen on 127.0.0.1:{port}: another program"):
            await serve(settings(listen=f"127.0.0.1:{port}"))
    async with running(settings()):
        pass


@pytest.mark.parametrize(("days", "refused"), [(29, False), (31, True), (1461, True)])
async def test_a_clock_that_is_far_behind_the_last_fact_is_refused_unless_it_is_accepted(settings, days, refused):
    journal = Journal.open(settings().daemon.state_dir)
    at = round((time.time() + days * 86_400) * 1000)
    await journal.append([(1, f.HostAdded(at, HostSpec("h1", "fake", 0)))])
    await journal.close()
    if refused:
        with pytest.raises(
            CannotStart, match=f"clock is {days} days behind the last fact.*set the clock.*--accept-clock"
        ):
            await serve(settings())
    async with running(settings(), accept_clock=refused):
        pass


async def test_a_second_daemon_on_the_same_state_is_told_of_the_first(settings):
    async with running(settings()):
        with pytest.raises(CannotStart, match=f"pid {os.getpid()}.*daemon.state_dir"):
            await serve(settings(socket="/tmp/another.sock"))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"daemon": {"policy": "lomo"}}, r'daemon\.policy: policy "lomo" is not installed'),
        ({"policy": {"nope": {}}, "daemon": {"policy": "nope"}}, r"nope"),
        ({"residency": {"chanel": {}}}, r'residency driver "chanel" is not installed'),
        (
            {"hosts": [{"id": "h", "backend": "mok", "nodes": [{"gpus": [0], "pools": ["p"]}]}]},
            r'"mok" is not installed',
        ),
    ],
)
async def test_what_is_not_installed_is_said_with_what_is(tmp_path, changes, why):
    daemon = {"state_dir": tmp_path / "state", "listen": "127.0.0.1:0", **changes.pop("daemon", {})}
    with pytest.raises(CannotStart, match=why):
        await serve(Settings(daemon=daemon, **changes))


async def test_an_unknown_policy_is_not_told_to_be_installed_by_a_name_that_anybody_may_own(tmp_path):
    with pytest.raises(CannotStart) as caught:
        await serve(Settings(daemon={"state_dir": tmp_path, "listen": "", "policy": "rolmux"}))
    assert str(caught.value) == (
        'settings: daemon.policy: policy "rolmux" is not installed (installed: rollmux, thrift); '
        'did you mean "rollmux"?'
    )


async def test_thrift_is_run_where_the_settings_say_so_with_its_options():
    policy = make_policy(
        Settings(daemon={"policy": "thrift"}, policy={"thrift": {"objective": "work", "steady": True}})
    )
    assert (policy.name, policy.objective, policy.steady) == ("thrift", "work", True)


@pytest.mark.parametrize(
    ("given", "policy"),
    [
        ({}, ("thrift", "credit")),
        ({"policy": {"thrift": {"promise": "certified"}}}, ("thrift", "schedule")),
        ({"daemon": {"policy": "rollmux"}}, ("rollmux", "schedule")),
    ],
)
async def test_a_daemon_that_is_told_nothing_keeps_promises_by_credit_and_rollmux_is_the_paper(given, policy):
    made = make_policy(Settings(**given))
    assert (made.name, made.dispatch) == policy


@pytest.mark.parametrize(
    ("options", "rounds"),
    [({}, 1), ({"promise": "certified"}, 4)],
)
async def test_where_promises_are_measured_each_job_goes_round_once_a_rotation(options, rounds):
    assert make_policy(Settings(policy={"thrift": options})).rounds == rounds


async def test_an_objective_that_there_is_not_is_refused_with_the_three_that_there_are(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('[daemon]\npolicy = "thrift"\n[policy.thrift]\nobjective = "fame"\n')
    with pytest.raises(
        BadSettings, match=r"policy\.thrift\.objective: .*'throughput', 'cost' or 'work' \(it is 'fame'\)"
    ):
        load_settings(file)


async def test_an_option_that_a_backend_does_not_know_is_said_with_the_file(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        f'[daemon]\nlisten = ""\nstate_dir = "{tmp_path}/state"\n[backends.mock]\nmemry = 1\n'
        '[[hosts]]\nid = "h"\nbackend = "mock"\nnodes = [{gpus = "0", pools = ["p"]}]\n'
    )
    with pytest.raises(CannotStart, match=r"mine\.toml: \[backends\.mock\].* options\.memry .*did you mean memory"):
        await serve(load_settings(file))


async def test_a_daemon_without_hosts_says_so_and_where_it_looked(settings):
    with structlog.testing.capture_logs() as lines:
        async with running(settings()):
            pass
    said = next(line for line in lines if line["event"] == "no_hosts")
    assert said["log_level"] == "warning"
    assert said["reason"].startswith("no rollmux.toml found (looked at rollmux.toml, ")
    assert "every job will be refused" in said["remedy"]


def with_a_switch(tmp_path, cables=(1,), **options):
    host = {"id": "box", "backend": "mock", "options": {"memory": ""}, "nodes": [{"gpus": "0", "pools": ["rollout"]}]}
    switch = {"name": "ocs", "driver": "mock", "options": options, "ports": {"box/gpu0": cables}}
    daemon = {"state_dir": tmp_path / "state", "listen": "", "shutdown_s": 2}
    return Settings(daemon=daemon, hosts=[host], fabric=[switch])


async def fabric(unix, *what, **body):
    if what:
        answer = await unix.post(f"/v1/fabrics/ocs/{what[0]}", json=body)
        assert answer.status_code == 200, answer.text
    (view,) = (await unix.get("/v1/fabrics")).json()["items"]
    return view["degraded"], view["reason"]


async def test_a_switch_that_an_operator_leaves_alone_is_left_alone_after_a_restart_too(tmp_path):
    settings = with_a_switch(tmp_path)
    async with running(settings) as where, client(where) as unix:
        assert await fabric(unix, "degrade", reason="mirrors are cleaned") == (True, "mirrors are cleaned")
    async with running(settings) as where, client(where) as unix:
        assert await fabric(unix) == (True, "mirrors are cleaned")
        assert (await fabric(unix, "restore"))[0] is False
    async with running(settings) as where, client(where) as unix:
        assert (await fabric(unix))[0] is False


@pytest.mark.parametrize(
    ("cables", "why"), [((1, 40), "port 40 is not one of 1 to 16"), ((1, 9), "port 9 is protected")]
)
async def test_a_cable_at_a_port_that_the_switch_cannot_use_is_refused_by_its_key(tmp_path, cables, why):
    with pytest.raises(CannotStart, match=rf"settings: fabric\[0\]\.ports\.box/gpu0: {why}"):
        await serve(with_a_switch(tmp_path, cables, ports=16, protected=[9]))


async def test_a_switch_that_is_away_at_the_start_keeps_no_daemon_from_starting(tmp_path, monkeypatch):
    async def away(self):
        await anyio.sleep_forever()

    monkeypatch.setattr(app, "PORTS_S", 0.05)
    monkeypatch.setattr(MockFabric, "ports", away)
    async with running(with_a_switch(tmp_path)) as where, client(where) as unix:
        assert (await unix.get("/readyz")).status_code == 200


async def test_a_node_that_is_put_back_into_the_configuration_is_usable_again(tmp_path):
    def settings(*nodes):
        host = {
            "id": "box",
            "backend": "mock",
            "options": {"memory": ""},
            "nodes": [{"gpus": gpus, "pools": ["rollout"]} for gpus in nodes],
        }
        return Settings(daemon={"state_dir": tmp_path / "state", "listen": "", "shutdown_s": 2}, hosts=[host])

    async def until(unix, node, status):
        with anyio.fail_after(120):
            while {it["node"]: it["status"] for it in (await unix.get("/v1/nodes")).json()["items"]}[node] != status:
                await anyio.sleep(0.05)

    want = {"rollout": {"named": ["box/gpu0"]}}
    body = {"name": "alice", "phases": [{"name": "rollout", "pools": ["rollout"]}], "wants": want}
    async with running(settings("0", "1", "2")) as where, client(where) as unix:
        await until(unix, "box/gpu0", "up")
        job = (await unix.post("/v1/jobs", json=body)).json()["job"]
        session = (await unix.post(f"/v1/jobs/{job}/sessions", json={"pid": 1, "host": "h"})).json()["session"]
        await unix.post("/v1/nodes/box/gpu2/drain", json={})
    async with running(settings("2")) as where, client(where) as unix:
        nodes = {it["node"]: it["status"] for it in (await unix.get("/v1/nodes")).json()["items"]}
        assert nodes["box/gpu0"] in {"draining", "drained"}, "a job has its place there"
        assert "box/gpu1" not in nodes
    async with running(settings("0", "1", "2")) as where, client(where) as unix:
        for node in ("box/gpu0", "box/gpu1"):
            await until(unix, node, "up")
        await until(unix, "box/gpu2", "drained")  # by an operator
        asked = {"phase": "rollout", "request_id": "r1", "session": session, "wait_s": 60}
        assert (await unix.post(f"/v1/jobs/{job}/slots", json=asked)).json()["gpus"] == ["box/gpu0"]


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE facts SET body = substr(body, 1, 20)",
        "UPDATE facts SET body = replace(body, 'alice', 'malice')",
        "UPDATE facts SET sum = sum + 1",
        "DELETE FROM facts",
    ],
)
async def test_facts_of_before_that_are_damaged_or_missing_are_named_and_the_rest_is_delivered(tmp_path, damage):
    host = {"id": "box", "backend": "mock", "options": {"memory": ""}, "nodes": [{"gpus": "0", "pools": ["rollout"]}]}
    settings = Settings(daemon={"state_dir": tmp_path / "state", "listen": "", "shutdown_s": 2}, hosts=[host])
    body = {"name": "alice", "phases": [{"name": "rollout", "pools": ["rollout"]}], "wants": {"rollout": {}}}
    async with running(settings) as where, client(where) as unix:
        job = (await unix.post("/v1/jobs", json=body)).json()["job"]
        with anyio.fail_after(120):
            while not (await unix.get(f"/v1/jobs/{job}")).json()["pins"]:
                await anyio.sleep(0.05)
        await unix.post("/v1/jobs", json={**body, "name": "bob"})
        before = (await unix.get("/v1/facts")).json()
        assert before["unreadable"] == []
        assert (await unix.get("/v1/report")).json()["unreadable"] == []
    ((registered, last),) = [
        (fact["seq"], before["last"])
        for fact in before["facts"]
        if fact["fact"] == "job_registered" and fact["job"] == job
    ]
    with closing(sqlite3.connect(tmp_path / "state" / "journal.sqlite3")) as connection, connection:
        connection.execute(f"{damage} WHERE seq = ?", (registered,))
    async with running(settings) as where, client(where) as unix:
        page = (await unix.get("/v1/facts", params={"until": last})).json()
        assert [it["seq"] for it in page["unreadable"]] == [registered]
        assert all(it["reason"] for it in page["unreadable"])
        assert page["last"] == last
        assert page["facts"] == [fact for fact in before["facts"] if fact["seq"] != registered]
        report = (await unix.get("/v1/report")).json()
        assert report["unreadable"] == [registered]
        assert [row["pool"] for row in report["pools"]] == ["rollout"]
        assert (await unix.post(f"/v1/jobs/{job}/sessions", json={"pid": 1, "host": "h"})).status_code == 201
        assert (await unix.get("/v1/report")).status_code == 200, "what follows hangs on a damaged fact"


async def test_only_a_backend_that_asks_for_it_is_given_a_folder(monkeypatch, tmp_path):
    given = []

    class Plain:
        @classmethod
        async def open(cls, hosts, options):
            given.append(dict(options))
            raise ValueError("enough")

    class Keeping(Plain):
        keeps_files = True

    hosts = [{"id": "h", "backend": "mine", "nodes": [{"gpus": [0], "pools": ["p"]}]}]
    daemon = {"state_dir": tmp_path / "state", "listen": ""}
    find = app.discovery.find
    for kind in (Plain, Keeping):
        mine = {("backend", "mine"): kind}
        monkeypatch.setattr(app.discovery, "find", lambda *what, mine=mine: mine.get(what) or find(*what))
        with pytest.raises(CannotStart, match="enough"):
            await serve(Settings(daemon=daemon, hosts=hosts, backends={"mine": {"x": 1}}))
    folder = tmp_path / "state" / "backends" / "mine"
    assert given == [{"x": 1}, {"x": 1, "state_dir": str(folder)}]
    assert folder.is_dir()


async def test_a_broken_invariant_stops_the_daemon_and_is_what_it_dies_of(settings, monkeypatch):
    real = Scheduler.handle

    def handle(self, given, now):
        if isinstance(given, RegisterJob):
            raise BrokenInvariant("two slots hold box/gpu0")
        return real(self, given, now)

    monkeypatch.setattr(Scheduler, "handle", handle)

    async def poke(where: app.Ready) -> None:
        body = {"name": "a", "phases": [{"name": "train", "pools": ["train"]}], "wants": {"train": {}}}
        async with client(where) as unix:
            with suppress(httpx.HTTPError):
                await unix.post("/v1/jobs", json=body)

    async with anyio.create_task_group() as tasks:
        with anyio.fail_after(PATIENCE_S), pytest.raises(BrokenInvariant, match="two slots hold"):
            await serve(settings(), on_ready=lambda where: tasks.start_soon(poke, where))


async def test_systemd_is_told_when_it_is_ready_and_when_it_stops(settings, monkeypatch, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        async with running(settings()):
            assert systemd.recv(100) == b"READY=1"
        assert systemd.recv(100) == b"STOPPING=1"


async def test_a_daemon_waits_nowhere_for_a_systemd_that_has_no_room_and_tells_it_later(
    settings, monkeypatch, tmp_path
):
    monkeypatch.setattr(app, "TOLD_AGAIN_S", 0.001)
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.setblocking(False)
        while app.notify("STATUS=of another service"):
            pass
        with anyio.fail_after(PATIENCE_S):
            async with running(settings()):
                heard = b"STATUS"
                while heard.startswith(b"STATUS"):
                    with suppress(BlockingIOError):
                        heard = systemd.recv(100)
                    await anyio.sleep(0.001)
                assert heard == b"READY=1"
        assert systemd.recv(100) == b"STOPPING=1"
    assert app.notify("STATUS=nobody is there any more")


async def test_a_daemon_without_a_file_to_tell_systemd_by_goes_on_and_tells_it_later(monkeypatch, tmp_path):
    def none_left(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setattr(socket, "socket", none_left)
    assert not app.notify("WATCHDOG=1")


async def test_systemd_is_told_again_in_a_moment_what_it_had_no_room_for(monkeypatch):
    has_room, told, slept = iter([False, True, False, False]), [], []

    async def sleep(for_s):
        slept.append(for_s)
        if len(slept) == 3:
            raise TimeoutError

    monkeypatch.setattr(app, "notify", lambda what: (told.append(what), next(has_room))[1])
    monkeypatch.setattr(anyio, "sleep", sleep)
    monkeypatch.setenv("WATCHDOG_USEC", "60000000")
    with pytest.raises(TimeoutError):
        await app.tell_systemd(task_status=anyio.TASK_STATUS_IGNORED)
    assert told == ["READY=1", "READY=1", "WATCHDOG=1", "WATCHDOG=1"]
    assert slept == [1.0, 20.0, 20.0], "the one after a message that was lost comes in time"


async def many_facts(state_dir):
    state_dir.mkdir()
    journal = Journal.open(state_dir)
    await journal.append([(seq, f.LoopStalled(seq, 7)) for seq in range(1, 1_001)])
    await journal.close()


async def test_systemd_is_told_of_a_long_replay_and_gives_it_time(settings, monkeypatch, tmp_path):
    await many_facts(tmp_path / "state")
    monkeypatch.setattr(writer, "REPLAYED_AT_ONCE", 400)
    monkeypatch.setattr(writer, "TOLD_EVERY_S", 0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        async with running(settings()):
            for done in ("400", "800", "1,000", "1,000"):
                said = f"EXTEND_TIMEOUT_USEC=60000000\nSTATUS={done} of 1,000 facts are replayed"
                assert systemd.recv(100).decode() == said
            assert systemd.recv(100) == b"READY=1"


async def test_a_signal_in_a_long_replay_ends_it_and_nothing_is_written(settings, monkeypatch, tmp_path):
    await many_facts(tmp_path / "state")
    monkeypatch.setattr(writer, "REPLAYED_AT_ONCE", 10)
    facts_after, read = Journal._facts_after, []

    def replayed(self, tip):
        for told in facts_after(self, tip):
            if told[0] == 100:
                os.kill(os.getpid(), signal.SIGTERM)
            read.append(told[0])
            yield told

    monkeypatch.setattr(Journal, "_facts_after", replayed)
    with anyio.fail_after(PATIENCE_S):
        await serve(settings(), on_ready=read.append)
    assert 100 <= read[-1] < 500
    left = sorted(path.name for path in (tmp_path / "state").iterdir())
    assert left == ["journal.sqlite3", "lock", "mark", "reserve"]
    monkeypatch.undo()
    journal = Journal.open(tmp_path / "state")
    assert journal.last_seq == 1_000
    await journal.close()


async def test_the_daemon_takes_as_many_open_files_as_it_may_have():
    """In a process of its own: what was raised stays raised."""
    program = (
        "import resource; hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1];"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard));"
        "from rollmuxd.daemon.app import raise_open_files; raise_open_files();"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    soft, hard = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout.split()

    assert soft == hard


async def test_a_running_daemon_is_backed_up_compacted_and_restarted_on_what_is_left(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(daily, "EVERY_S", 0.2)
    # Facts of two days ago, as if it had run since.
    ago = int(time.time() * 1000) - 2 * 86_400_000
    journal = Journal.open(tmp_path / "state")
    await journal.append([(n, f.HostAdded(at=ago + n, host=HostSpec(f"h{n}", "gone", 0))) for n in range(1, 101)])
    await journal.close()
    kept = settings().model_copy(update={"journal": JournalTable(keep_days=1)})
    async with running(kept) as where, client(where) as unix:
        backup = await anyio.to_thread.run_sync(
            journal_tools.backup, tmp_path / "state" / "journal.sqlite3", tmp_path / "kept"
        )
        assert backup.last > 100
        before = (await unix.get("/v1/report")).json()
        with anyio.fail_after(PATIENCE_S):
            while (await unix.get("/v1/facts")).json()["first"] != 101:
                await anyio.sleep(0.1)
        assert (await unix.get("/v1/facts?after=7")).status_code == 410
        after = (await unix.get("/v1/report")).json()
        assert (after["work"], after["since"]) == (before["work"], before["since"])
    async with running(kept) as where, client(where) as unix:
        assert (await unix.get("/readyz")).status_code == 200
