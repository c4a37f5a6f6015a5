"""One client cannot bring the service down for the others: everything that it can have much of has a limit."""

import asyncio
import errno
import http.client
import os
import re
import resource
import shutil
import socket
import ssl
import time
from contextlib import asynccontextmanager, closing, suppress
from functools import partial

import anyio
import anyio.to_thread
import httpx
import msgspec
import pytest
import structlog
import uvicorn
from msgspec.structs import replace
from patience import PATIENCE_S
from uvicorn.server import ServerState

from rollmuxd.daemon.access.gate import Peer
from rollmuxd.daemon.app import Server, connection_limits
from rollmuxd.daemon.http.limits import Account
from rollmuxd.daemon.http.listener import Listener, Places
from rollmuxd.daemon.http.peer import ConnectionLimits, PeerHttpToolsProtocol
from rollmuxd.daemon.settings import Settings
from rollmuxd.daemon.tls import make_own, read_tls

pytestmark = pytest.mark.asyncio


@asynccontextmanager
async def served(world, path=None, tls=None, **limits):
    """The world's app on a real port (or Unix socket); gives where to connect to."""
    with socket.socket(socket.AF_INET if path is None else socket.AF_UNIX) as listening:
        listening.bind(("127.0.0.1", 0) if path is None else str(path))
        server = Server(world.app, [listening], 1, ConnectionLimits(**limits), tls)
        async with anyio.create_task_group() as tasks:
            await tasks.start(server.until_stopped)
            yield listening.getsockname()
            await server.stop()


async def told(reader):
    """All that comes until the other side hangs up, with bytes unread or not."""
    said = b""
    with anyio.fail_after(PATIENCE_S), suppress(ConnectionResetError, BrokenPipeError):
        while part := await reader.read(65_536):
            said += part
    return said.decode()


# ---- calls a second --------------------------------------------------------------------------------------------------


async def test_what_is_used_beyond_a_burst_takes_pauses_and_they_end(monkeypatch):
    at = 100.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: at)
    account = Account(0.1, 9)

    def used(who):
        """Whether it may be used, and it is."""
        if pauses := account.pause_s(who):
            return pauses
        account.charge(who, 1)
        return 0

    assert [used("a") for _ in range(10)] == [0] * 10
    wait = used("a")
    assert 0 < wait <= 0.1001
    assert used("b") == 0, "the haste of one is not the other's"
    at += wait + 1e-9
    assert used("a") == 0
    assert used("a") > 0
    at += 1000
    assert [used("a") > 0 for _ in range(11)] == [False] * 10 + [True]


async def test_of_addresses_that_call_once_nothing_is_remembered_for_long(monkeypatch):
    at = 0.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: at)
    account = Account(0.1, 9)
    for number in range(3 * Account.KEPT):
        at += 0.001
        account.charge(str(number), 1)
    assert len(account._paid_at) <= Account.KEPT


async def test_who_calls_too_often_is_429_with_the_time_to_wait_and_others_are_not(running, body_of_job):
    slowly = {"calls_per_s": 1, "calls_burst_s": 5}
    async with running(limits=slowly) as world, world.client("alice") as alice, world.client("bob") as bob:
        root = world.on_socket(0)
        async with root:
            answers = [(await alice.get("/v1/jobs")).status_code for _ in range(6)]
            assert answers == [200] * 5 + [429]
            seq = world.writer.durable_seq
            refused = await alice.post("/v1/jobs", json=body_of_job("math"))
            assert refused.status_code == 429
            assert refused.json()["type"] == "urn:rollmux:problem:too_fast"
            assert 1 <= int(refused.headers["retry-after"]) <= 2
            assert world.writer.durable_seq == seq
            assert (await bob.get("/v1/jobs")).status_code == 200
            assert (await root.get("/v1/jobs")).status_code == 200


async def test_who_has_no_key_or_a_wrong_one_is_counted_by_address(running):
    async with running(limits={"calls_per_s": 1, "calls_burst_s": 5}) as world, world.client(None) as client:
        wrong = {"Authorization": "Bearer rmx_00000000_x"}
        answers = [(await client.get("/v1/jobs", headers=wrong)).status_code for _ in range(6)]
        assert answers == [401] * 5 + [429]
        assert (await client.get("/healthz")).status_code == 429


async def test_counting_can_be_turned_off(running):
    async with running(limits={"calls_per_s": 0}) as world, world.client("alice") as alice:
        assert {(await alice.get("/v1/jobs")).status_code for _ in range(50)} == {200}


async def test_counting_a_call_costs_less_than_five_microseconds():
    account = Account(1 / 2000, 10_000)

    def count(who):
        account.pause_s(who)
        account.charge(who, 1)

    for number in range(1000):
        count(f"k{number}")
    best = float("inf")
    for _ in range(5):
        begun = time.thread_time()  # in which other programs have no part
        for number in range(1000):
            count(f"k{number}")
        best = min(best, time.thread_time() - begun)
    assert best / 1000 < 5e-6


# ---- what an owner may have ----------------------------------------------------------------------------------------


async def test_an_owner_that_has_all_its_jobs_is_429_and_nothing_is_half_done(running, body_of_job):
    async with running(owners={"team": {"max_jobs": 2, "max_priority": 5}}) as world, world.client("alice") as alice:
        for name in ("one", "two"):
            await world.job(alice, name)
        seq = world.writer.durable_seq
        full = await alice.post("/v1/jobs", json=body_of_job("three"))
        assert full.status_code == 429
        assert int(full.headers["retry-after"]) >= 1
        assert "owners.team.max_jobs" in full.json()["detail"]
        urgent = await alice.post("/v1/jobs", json=body_of_job("one", replace=True, priority=6))
        assert urgent.status_code == 422
        assert "owners.team.max_priority" in urgent.json()["detail"]
        assert world.writer.durable_seq == seq
        assert (await alice.post("/v1/jobs", json=body_of_job("one", replace=True))).status_code == 201
        async with world.client("stranger") as stranger:
            assert (await stranger.post("/v1/jobs", json=body_of_job("three"))).status_code == 201


async def test_an_owner_whose_requests_all_wait_is_429_and_its_first_is_still_in_the_queue(running):
    async with running(owners={"team": {"max_waiting": 1}}) as world, world.client("alice") as alice:
        jobs = [await world.job(alice, name) for name in ("one", "two", "three")]
        assert (await jobs[0].ask("rollout")).json()["status"] == "running"
        queued = (await jobs[1].ask("rollout", wait_s=0)).json()
        full = await jobs[2].ask("rollout", wait_s=0)
        assert full.status_code == 429
        assert "owners.team.max_waiting" in full.json()["detail"]
        assert (await alice.get(f"/v1/slots/{queued['slot']}")).json()["status"] == "queued"
        assert (await jobs[1].ask("rollout", wait_s=0, request_id=queued["request_id"])).status_code == 200


async def test_an_owner_of_whom_nothing_is_said_has_what_the_defaults_say(running, body_of_job):
    tables = {
        "defaults": {"owner": {"max_jobs": 2, "max_priority": 5, "max_waiting": 1}},
        "owners": {"team": {"max_jobs": 3}},
    }
    async with running(**tables) as world, world.client("stranger") as eve, world.client("alice") as alice:
        jobs = [await world.job(eve, name) for name in ("one", "two")]
        full = await eve.post("/v1/jobs", json=body_of_job("three"))
        assert (full.status_code, "owners.others.max_jobs" in full.json()["detail"]) == (429, True)
        urgent = await eve.post("/v1/jobs", json=body_of_job("one", replace=True, priority=6))
        assert (urgent.status_code, "owners.others.max_priority" in urgent.json()["detail"]) == (422, True)
        for name in ("one", "two", "three"):
            jobs.append(await world.job(alice, name))
        assert (await alice.post("/v1/jobs", json=body_of_job("four"))).status_code == 429
        # What its table leaves out is as the defaults say it.
        assert (await alice.post("/v1/jobs", json=body_of_job("one", replace=True, priority=6))).status_code == 422
        assert (await jobs[2].ask("rollout", wait_s=0)).json()["status"] == "running"
        assert (await jobs[0].ask("rollout", wait_s=0)).json()["status"] == "queued"
        full = await jobs[1].ask("rollout", wait_s=0)
        assert (full.status_code, "owners.others.max_waiting" in full.json()["detail"]) == (429, True)


def of(pool):
    return {"phases": [{"name": pool, "pools": [pool], "seconds": 10}], "wants": {pool: {}}}


async def test_an_owner_of_whom_nothing_is_said_is_planned_for_as_one_with_a_table_is(running, body_of_job):
    """Its limit of nodes is known to the policy too: which else offers it nodes that it may not have, and no others."""
    told = []
    for tables in ({"owners": {"others": {"max_nodes": 1}}}, {"defaults": {"owner": {"max_nodes": 1}}}):
        async with running(**tables) as world, world.client("stranger") as eve:
            two = await eve.post("/v1/jobs", json=body_of_job("two"))
            assert (two.status_code, "owners.others.max_nodes" in two.json()["detail"]) == (422, True)
            await world.job(eve, "one", **of("rollout"))
            job = await world.job(eve, "more", **of("train"))
            said = (await eve.get(f"/v1/jobs/{job.id}")).json()
            assert said["status"] == "waiting"
            plan = (await eve.post("/v1/plan", json={"jobs": [body_of_job("next", **of("train"))]})).json()
            told.append((said["waiting"], plan, (await eve.get(f"/v1/jobs/{job.id}/explain")).json()["reasons"]))
            assert "owner others holds 1 of its 1 nodes" in str(told[-1][-1])
            # On the node that it has, there is room.
            beside = await world.job(eve, "beside", **of("rollout"))
            assert (await eve.get(f"/v1/jobs/{beside.id}")).json()["status"] != "waiting"
            assert world.writer.scheduler.policy.max_nodes["others"] == 1
    assert told[0] == told[1]
    no_limit = {"defaults": {"owner": {"max_nodes": 1}}, "owners": {"others": {"max_nodes": 0}}}
    async with running(**no_limit) as world, world.client("stranger") as eve:
        job = await world.job(eve, "one")
        assert (await eve.get(f"/v1/jobs/{job.id}")).json()["status"] != "waiting"


async def test_without_any_setting_an_owner_has_a_thousand_live_jobs_and_more_are_429(running, body_of_job):
    async with running() as world, world.client("stranger") as eve, world.client("alice") as alice:
        assert (await eve.post("/v1/jobs", json=body_of_job("x0"))).status_code == 201
        (first,) = world.state.jobs.values()
        world.state.jobs.update({f"copy{number}": replace(first, id=f"copy{number}") for number in range(1, 1_000)})
        full = await eve.post("/v1/jobs", json=body_of_job("x1"))
        assert full.status_code == 429
        assert "its limit is 1000 (owners.others.max_jobs)" in full.json()["detail"]
        assert int(full.headers["retry-after"]) >= 1
        assert (await alice.post("/v1/jobs", json=body_of_job("mine"))).status_code == 201
        assert (await eve.post("/v1/jobs", json=body_of_job("x0", replace=True))).status_code == 201, "it has that one"


# ---- connections -----------------------------------------------------------------------------------------------------


async def test_a_head_that_is_too_large_is_431_whether_or_not_it_ever_ends(running):
    async with running() as world, served(world, max_head=8_000) as (host, port):
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}") as client:
            assert (await client.get("/healthz", headers={"x-much": "y" * 7_000})).status_code == 200
            assert (await client.get("/healthz", headers={"x-much": "y" * 9_000})).status_code == 431
            assert (await client.get("/healthz?" + "y" * 9_000)).status_code == 431
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\nx-much: ")
        for _ in range(20):
            writer.write(b"y" * 1_000)
        said = await told(reader)
        assert said.startswith("HTTP/1.1 431 ")
        assert "urn:rollmux:problem:head_too_large" in said
        writer.close()


async def test_a_head_that_is_too_large_calls_no_handler_and_neither_does_what_follows_it(running):
    async with running() as world, served(world, max_head=2_000) as (host, port):
        reader, writer = await asyncio.open_connection(host, port)
        key = f"authorization: Bearer {world.secrets['root']}\r\n".encode()
        drain = b"POST /v1/nodes/h1/gpu0-1/drain HTTP/1.1\r\nhost: x\r\n" + key
        seq = world.writer.durable_seq
        writer.write(drain + b"x-much: " + b"y" * 3_000 + b"\r\n\r\n" + drain + b"\r\n")
        assert (await told(reader)).count("HTTP/1.1") == 1
        assert world.writer.durable_seq == seq
        writer.close()


async def test_a_head_is_measured_also_where_it_comes_behind_the_rest_of_a_body_that_was_refused(running):
    async with running() as world, served(world, max_head=8_000) as (host, port):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"POST /v1/jobs HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n")
        with anyio.fail_after(PATIENCE_S):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 401 ")
        writer.write(b"x" * 10 + b"GET /healthz HTTP/1.1\r\nconnection: close\r\nx-much: %s\r\n\r\n" % (b"y" * 9_000))
        assert "HTTP/1.1 431 " in await told(reader)
        writer.close()


CHUNKED = b"POST /v1/jobs HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n%s\r\n"
ENDLESS = {
    "trailers": (CHUNKED + b"0\r\n", b"a:b\r\n"),
    "one trailer": (CHUNKED + b"0\r\na:", b"y"),
    "the name of a trailer": (CHUNKED + b"0\r\n", b"y"),
    "the extension of a chunk": (CHUNKED + b"5;a=", b"y"),
    "extensions of a chunk": (CHUNKED + b"5", b";a=b"),
    "the size of a chunk": (CHUNKED, b"0"),
    "chunks of one byte": (CHUNKED, b"1\r\nx\r\n"),
    "empty lines": (b"", b"\r\n"),
    "headers": (b"GET /healthz HTTP/1.1\r\n", b"a:b\r\n"),
    "an address": (b"GET /", b"y"),
    "a method": (b"", b"Y"),
}


@pytest.mark.parametrize("key", ["a key", "no key"])
@pytest.mark.parametrize("what", ENDLESS)
async def test_what_is_not_the_body_of_a_call_ends_before_it_costs_much(running, what, key):
    async with running() as world, served(world) as (host, port):
        begin, more = ENDLESS[what]
        secret = f"authorization: Bearer {world.secrets['root']}\r\n".encode() if key == "a key" else b""
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(begin.replace(b"%s", secret))
        await anyio.sleep(0.1)  # it has its answer, where it gets one for its head
        writer.write(more * (200_000 // len(more)))
        said = await told(reader)
        assert re.findall(r"HTTP/1.1 (\d+)", said) in (["401"], ["431"], ["400"]), said
        assert len(world.state.jobs) == 0
        writer.close()


async def test_a_body_in_chunks_with_trailers_is_taken(running, body_of_job):
    async with running() as world, served(world) as (host, port):
        reader, writer = await asyncio.open_connection(host, port)
        key = f"authorization: Bearer {world.secrets['alice']}\r\nconnection: close\r\n".encode()
        body = msgspec.json.encode(body_of_job("math")) + b" " * 20_000
        chunks = [body[at : at + 10] for at in range(0, len(body), 10)]
        writer.write(CHUNKED.replace(b"%s", key))
        writer.write(b"".join(b"%x;a=b\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks))
        writer.write(b"0\r\nchecksum: 5\r\n\r\n")
        assert (await told(reader)).startswith("HTTP/1.1 201 ")
        writer.close()


@pytest.mark.parametrize("connection_is", ["keep-alive", "close"])
async def test_who_sends_much_before_reading_still_reads_why_it_was_refused(running, connection_is):
    async with running() as world, served(world) as (host, port):

        def send() -> int:
            connection = http.client.HTTPConnection(host, port, timeout=PATIENCE_S)
            headers = {"Authorization": f"Bearer {world.secrets['alice']}", "Connection": connection_is}
            connection.request("POST", "/v1/jobs", body=b"x" * 20_000_000, headers=headers)
            with closing(connection):
                return connection.getresponse().status

        assert await anyio.to_thread.run_sync(send) == 413


# ---- calls ahead of answers ------------------------------------------------------------------------------------------


async def test_a_call_ahead_of_an_answer_is_not_heard_and_that_answer_is_the_last(running):
    async with running(limits={"calls_per_s": 0}) as world, served(world) as (host, port):
        for call in (b"GET / HTTP/1.1\r\n\r\n", b"POST /v1/jobs HTTP/1.1\r\n\r\n"):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(call * 1_000)
            assert (await told(reader)).count("HTTP/1.1 ") == 1
            writer.close()


async def test_rubbish_behind_a_call_is_not_answered_in_its_place(running):
    async with running() as world, served(world) as (host, port), world.client("root") as root:
        last = (await root.get("/v1/facts")).json()["last"]
        head = f"host: x\r\nauthorization: Bearer {world.secrets['root']}\r\n\r\n"
        poll = f"GET /v1/facts?after={last}&wait_ms=300 HTTP/1.1\r\n{head}".encode()
        for rubbish in (b"rubbish\r\n\r\n", b"GET /" + b"y" * 40_000 + b" HTTP/1.1\r\n\r\n"):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(poll)
            await anyio.sleep(0.1)
            writer.write(rubbish)
            said = await told(reader)
            assert re.findall(r"HTTP/1.1 (\d+)", said) == ["200"], said
            assert "connection: close" in said
            writer.close()


async def test_rubbish_is_400_in_the_shape_of_all_problems(running):
    async with running() as world, served(world) as (host, port):
        for rubbish in (b"rubbish\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(rubbish)
            said = await told(reader)
            assert said.startswith("HTTP/1.1 400 ")
            assert "urn:rollmux:problem:bad_request" in said
            writer.close()


# ---- who is slow -----------------------------------------------------------------------------------------------------


SLOW = {
    "says nothing": b"",
    "sends half a head": b"GET /healthz HTTP/1.1\r\nhost:",
    "sends empty lines": b"\r\n",
    "sends empty lines after a call": b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n",
    "sends half a body": b"POST /v1/jobs HTTP/1.1\r\nhost: x\r\n%scontent-length: 100\r\n\r\n{",
}


@pytest.mark.parametrize("how", SLOW)
async def test_who_is_slow_to_send_is_hung_up_on_however_it_drips(running, how):
    async with running() as world, served(world, read_s=0.2) as (host, port):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(SLOW[how].replace(b"%s", f"authorization: Bearer {world.secrets['alice']}\r\n".encode()))

        async def drip():
            while True:
                await anyio.sleep(0.05)
                writer.write(b"" if how == "says nothing" else b"\r\n" if "empty lines" in how else b"x")

        begun = time.monotonic()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(drip)
            try:
                said = await told(reader)
            except ConnectionResetError:
                said = ""
            tasks.cancel_scope.cancel()
        assert time.monotonic() - begun < 60, "it was hung up on as an idle connection"  # which takes 75 s
        said = said.partition('{"status":"ok"')[2].partition("}")[2] if "after a call" in how else said
        assert said == "" or said.startswith("HTTP/1.1 408 ")
        assert len(world.state.jobs) == 0
        writer.close()


async def test_a_call_whose_body_the_daemon_does_not_read_yet_is_not_slow(running, monkeypatch):
    def take(paces, owner, *, charged=False):
        return asyncio.ensure_future(anyio.sleep(0.8)) if charged else None

    monkeypatch.setattr("rollmuxd.daemon.http.limits.Paces.take", take)
    async with running() as world, served(world, read_s=0.2) as (host, port):
        headers = {"Authorization": f"Bearer {world.secrets['alice']}"}
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}", headers=headers, timeout=PATIENCE_S) as client:
            body = b'{"name": "%s"}' % (b"x" * 600_000)
            content = {"content": body, "headers": {"content-type": "application/json"}}
            assert (await client.post("/v1/plan", **content)).status_code == 422


async def test_who_waits_for_an_answer_is_not_slow_and_neither_is_a_kept_connection(running):
    async with running() as world, served(world, read_s=0.2) as (host, port):
        headers = {"Authorization": f"Bearer {world.secrets['root']}"}
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}", headers=headers) as client:
            last = (await client.get("/v1/facts")).json()["last"]
            answer = await client.get("/v1/facts", params={"after": last, "wait_ms": 500})
            assert answer.status_code == 200
            await anyio.sleep(0.5)
            assert (await client.get("/v1/jobs")).status_code == 200


async def test_who_does_not_take_an_answer_is_hung_up_on(running, monkeypatch):
    size = 30_000_000  # more than the kernel takes
    monkeypatch.setattr("rollmuxd.daemon.http.app._description", lambda: b" " * size)
    async with running() as world, served(world, read_s=0.2) as (host, port):
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((host, port))
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(client, b"GET /v1/openapi.json HTTP/1.1\r\nhost: x\r\n\r\n")
            await anyio.sleep(1)
            taken = 0
            with anyio.fail_after(PATIENCE_S):
                try:
                    while part := await loop.sock_recv(client, 1_000_000):
                        taken += len(part)
                except ConnectionResetError:
                    pass
            assert taken < size, "it was kept for who did not want it"


async def test_one_address_cannot_have_all_connections_and_gives_back_those_that_it_closes(running):
    async with running() as world, served(world, max_connections=4) as (host, port):
        held = [await asyncio.open_connection(host, port) for _ in range(2)]
        await world.settle()
        for _ in range(3):
            reader, writer = await asyncio.open_connection(host, port)
            assert "connections from 127.0.0.1 are open" in await told(reader)
            writer.close()
        reader, writer = await asyncio.open_connection(host, port, local_addr=("127.0.0.2", 0))
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert (await told(reader)).startswith("HTTP/1.1 200 ")
        for _, other in [*held, (reader, writer)]:
            other.close()
        await anyio.sleep(0.1)
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}") as client:
            assert (await client.get("/healthz")).status_code == 200


async def test_when_all_connections_are_taken_new_ones_are_503_and_the_unix_socket_is_still_open(running, tmp_path):
    async with running() as world:
        async with served(world, max_connections=3) as (host, port):
            held = [await asyncio.open_connection(host, port, local_addr=(f"127.0.0.{end}", 0)) for end in range(2, 5)]
            await world.settle()
            reader, writer = await asyncio.open_connection(host, port)
            said = await told(reader)
            assert said.startswith("HTTP/1.1 503 ")
            assert "retry-after: 5" in said
            for _, other in [*held, (reader, writer)]:
                other.close()
            await anyio.sleep(0.1)
            async with httpx.AsyncClient(base_url=f"http://{host}:{port}") as client:
                assert (await client.get("/healthz")).status_code == 200
        async with served(world, path=tmp_path / "s", max_connections=1) as path:
            held = [await asyncio.open_unix_connection(path) for _ in range(3)]
            transport = httpx.AsyncHTTPTransport(uds=str(path))
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                assert (await client.get("/healthz")).status_code == 200
            for _, other in held:
                other.close()


@pytest.mark.parametrize(("most", "holders"), [(4, (1000, 1000)), (2, (1000, 1002))], ids=["one_user", "all_users"])
async def test_one_local_user_cannot_have_all_files_and_operators_come_in_whatever_users_hold(
    running, tmp_path, monkeypatch, most, holders
):
    uid = 1000
    monkeypatch.setattr("rollmuxd.daemon.http.listener.peer_of", lambda _: Peer(1, uid, uid))

    async def answer(call=b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(call)
        said = await told(reader)
        writer.close()
        return said

    async with running() as world, served(world, path=tmp_path / "s", max_local=most) as path:
        held = []
        for uid in holders:  # noqa: B007  (read by peer_of, above)
            held.append(await asyncio.open_unix_connection(path))
            await world.settle()
        refused = await answer(b"")
        assert refused.startswith("HTTP/1.1 503 ")
        assert "2 connections" in refused
        uid = 1001
        if most == 2:
            assert (await answer(b"")).startswith("HTTP/1.1 503 ")
        else:
            assert (await answer()).startswith("HTTP/1.1 200 ")
        for uid in (0, os.getuid()):  # noqa: B007  (read by peer_of, above)
            for _ in range(3):
                held.append(await asyncio.open_unix_connection(path))
            assert (await answer()).startswith("HTTP/1.1 200 ")
        for _, writer in held:
            writer.close()
        await anyio.sleep(0.1)
        uid = 1000
        for _ in range(3):
            assert (await answer()).startswith("HTTP/1.1 200 ")


@pytest.mark.parametrize("files", [64, 160, 1024, 65_536, resource.RLIM_INFINITY])
async def test_whatever_is_connected_some_files_are_left_to_the_journal_and_backends(monkeypatch, files):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    limits = connection_limits(Settings())
    if files == resource.RLIM_INFINITY:
        assert (limits.max_connections, limits.max_local) == (20_000, 20_000)
    else:
        assert files - limits.max_connections - limits.max_local >= min(128, files // 4)


@pytest.fixture
def tls(tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("the certificate is made by openssl")
    make_own(tmp_path / "certificate.pem", tmp_path / "key.pem", ["127.0.0.1"])
    return read_tls(tmp_path / "certificate.pem", tmp_path / "key.pem")


async def well(where, tls, whence=None):
    transport = httpx.AsyncHTTPTransport(
        verify=ssl.create_default_context(cafile=tls.certificate), local_address=whence
    )
    async with httpx.AsyncClient(transport=transport) as client:
        return (await client.get(f"https://{where[0]}:{where[1]}/healthz")).status_code == 200


@pytest.mark.parametrize(("most", "ends"), [(3, (2, 3, 4)), (6, (1, 1, 1))], ids=["all", "one_address"])
async def test_who_has_shaken_no_hands_yet_is_counted_and_more_are_hung_up_on_at_once(running, tls, most, ends):
    async with running() as world, served(world, tls=tls, max_connections=most) as where:
        silent = [await asyncio.open_connection(*where, local_addr=(f"127.0.0.{end}", 0)) for end in ends]
        reader, writer = await asyncio.open_connection(*where)
        assert await told(reader) == ""
        with pytest.raises(httpx.HTTPError):
            await well(where, tls)
        if most == 6:
            assert await well(where, tls, "127.0.0.2")
        for _, other in [*silent, (reader, writer)]:
            other.close()
        await anyio.sleep(0.1)
        assert await well(where, tls)


async def test_a_handshake_has_to_come_in_time_and_leaves_its_place_to_others(running, tls):
    async with running() as world, served(world, tls=tls, max_connections=1, read_s=0.3) as (host, port):
        for begun in (b"", b"\x16\x03\x01"):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(begun)
            await told(reader)
            writer.close()
            await anyio.sleep(0.1)
            assert await well((host, port), tls)


async def test_rubbish_in_place_of_a_handshake_leaves_its_place_to_others(running, tls):
    async with running() as world, served(world, tls=tls, max_connections=1) as (host, port):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await told(reader)
        writer.close()
        await anyio.sleep(0.1)
        assert await well((host, port), tls)


@pytest.mark.parametrize("secured", [True, False])
async def test_however_many_come_at_once_no_more_files_are_open_than_there_are_places(running, tls, secured):
    async with running() as world, served(world, tls=tls if secured else None, max_connections=5) as where:
        callers = [socket.socket() for _ in range(300)]
        before = most = open_files()
        for caller in callers:
            caller.setblocking(False)
            caller.connect_ex(where)
        for _ in range(100):
            await anyio.sleep(0)
            most = max(most, open_files())
        assert most - before < 10
        for caller in callers:
            caller.close()


def open_files():
    return len(os.listdir("/proc/self/fd"))


async def test_without_descriptors_connections_wait_and_the_log_says_so_once(monkeypatch):
    monkeypatch.setattr("rollmuxd.daemon.http.listener.REST_S", 0.05)
    loop = asyncio.get_running_loop()
    tried = 0

    class Full(socket.socket):
        def accept(self):
            nonlocal tried
            tried += 1
            if tried < 4:
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    with Full() as bound, socket.socket() as caller, structlog.testing.capture_logs() as lines:
        bound.bind(("127.0.0.1", 0))
        taken = asyncio.Event()

        class Greeted(asyncio.Protocol):
            transport = on_gone = None

            def connection_made(self, transport):
                self.transport = transport
                taken.set()

        door = Listener(bound, Greeted, Places(20))
        door.open(10)
        begun = loop.time()
        caller.connect(bound.getsockname())
        with anyio.fail_after(PATIENCE_S):
            await taken.wait()
        assert loop.time() - begun > 0.14
        door.close()
        await door.wait_closed()
    assert tried == 4
    assert [(line["event"], "Too many open files" in line["reason"]) for line in lines] == [
        ("connections_not_taken", True)
    ]


@pytest.mark.parametrize("turns", range(1, 6))
@pytest.mark.parametrize("runs", ["asyncio", "uvloop"])
async def test_a_connection_that_begins_while_the_server_stops_does_not_hold_it_up(runs, turns):
    """uvicorn waits for each connection that has begun: one that it does not end delays a stop by half a minute."""
    run = pytest.importorskip(runs).run

    async def serves():
        loop = asyncio.get_running_loop()

        class Door(Listener):
            def _let_in(self, connection, whom):
                stops(turns)
                super()._let_in(connection, whom)

        def stops(left):
            if left:
                loop.call_soon(stops, left - 1)
            else:
                door.close()
                for protocol in list(server_state.connections):
                    protocol.shutdown()

        config = uvicorn.Config(None, lifespan="off", log_config=None)
        config.load()
        server_state = ServerState()
        make = partial(PeerHttpToolsProtocol, config=config, server_state=server_state, app_state={})
        with socket.socket() as bound, socket.socket() as caller:
            bound.bind(("127.0.0.1", 0))
            door = Door(bound, make, Places(20))
            door.open(10)
            caller.setblocking(False)
            caller.connect_ex(bound.getsockname())
            async with asyncio.timeout(PATIENCE_S):
                await loop.sock_recv(caller, 1)  # its end
                await door.wait_closed()
                while server_state.connections:
                    await asyncio.sleep(0)

    await asyncio.to_thread(run, serves())


async def test_a_stop_that_is_cut_short_comes_to_its_end():
    """A part of the daemon fails while its server waits for the last calls: the server ends what it was kept from."""

    async def never(scope, receive, send):
        await anyio.sleep_forever()

    with socket.socket() as bound, socket.socket() as caller:
        bound.bind(("127.0.0.1", 0))
        server = Server(never, [bound], 30, ConnectionLimits())
        with anyio.fail_after(PATIENCE_S), pytest.raises(ExceptionGroup) as failed:
            async with anyio.create_task_group() as tasks:
                await tasks.start(server.until_stopped)
                caller.connect(bound.getsockname())
                caller.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
                while not server.server_state.tasks:
                    await anyio.sleep(0.01)
                tasks.start_soon(server.stop)
                while bound.fileno() != -1:
                    await anyio.sleep(0.01)
                raise OSError(28, "No space left on device")
        assert [str(error) for error in failed.value.exceptions] == ["[Errno 28] No space left on device"]
        with anyio.fail_after(PATIENCE_S):
            await server.stop()
