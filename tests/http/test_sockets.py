"""Over real sockets: bad input of any kind gets a clear error, and the kernel says who is at the other end."""

import asyncio
import http.client
import json
import os
import pwd
import socket
import threading
from contextlib import contextmanager

import httpx
import pytest
import uvicorn
from hypothesis import HealthCheck, Phase, given, settings
from patience import PATIENCE_S

from rollmuxd.daemon.http.app import ENDPOINTS
from rollmuxd.daemon.http.peer import PeerHttpToolsProtocol

#: what the description cannot say: that a name is taken, that a phase is not in the cycle, that a time has no such day
LEFT_OUT = ("positive_data_acceptance", "max_response_time")


def sparing(test):
    """Few examples, the same ones each time: a smoke test, kept short."""
    return settings(
        max_examples=3,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )(test)


@contextmanager
def serving(running, path=None):
    """The daemon on a port, or on a Unix socket, in a thread; gives its address and an admin's key."""
    found = {}
    ready, stop = threading.Event(), threading.Event()

    async def serve():
        family, address = (socket.AF_INET, ("127.0.0.1", 0)) if path is None else (socket.AF_UNIX, str(path))
        with socket.socket(family) as listening:
            listening.bind(address)
            async with running(limits={"max_body_mb": 0.2}) as world:
                config = uvicorn.Config(
                    world.app, http=PeerHttpToolsProtocol, lifespan="off", log_config=None, access_log=False, ws="none"
                )
                server = uvicorn.Server(config)
                port = f":{listening.getsockname()[1]}" if path is None else ""
                found.update(url=f"http://127.0.0.1{port}", secret=world.secrets["root"])
                async with world.client("root") as client:
                    await (await world.job(client)).ask("rollout")

                async def until_stopped():
                    ready.set()
                    while not stop.is_set():
                        await asyncio.sleep(0.02)
                    server.should_exit = True

                await asyncio.gather(server.serve(sockets=[listening]), until_stopped())

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(PATIENCE_S)
    try:
        yield found["url"], found["secret"]
    finally:
        stop.set()
        thread.join(PATIENCE_S)


def test_a_fuzzer_finds_no_crash_and_no_contradiction_to_the_description(running):
    import schemathesis  # a second, which every worker of pytest would pay
    from schemathesis import GenerationMode
    from schemathesis.checks import CHECKS, load_all_checks

    load_all_checks()
    checks = [check for check in CHECKS.get_all() if check.__name__ not in LEFT_OUT]
    with serving(running) as (url, secret):
        schema = schemathesis.openapi.from_url(f"{url}/v1/openapi.json")
        for endpoint in ENDPOINTS:
            operation = schema[endpoint.format_path][endpoint.method]
            # Where all that is sent is a name in the path, nothing that is sent can be wrong.
            wrong = [GenerationMode.NEGATIVE] if endpoint.body or endpoint.query else []
            for mode in (GenerationMode.POSITIVE, *wrong):

                @sparing
                @given(case=operation.as_strategy(generation_mode=mode))
                def fuzz(case):
                    if case.query.get("wait_ms"):
                        case.query["wait_ms"] = 0
                    case.call_and_validate(
                        checks=checks, headers={"Authorization": f"Bearer {secret}"}, timeout=PATIENCE_S
                    )

                fuzz()


@pytest.mark.parametrize("method", ["TRACE", "PATCH"])
def test_a_method_that_no_route_has_is_405_over_the_wire(running, method):
    with serving(running) as (url, secret):
        answer = httpx.request(method, f"{url}/v1/jobs", headers={"Authorization": f"Bearer {secret}"})
        assert answer.status_code == 405


ADDRESSES = ["CONNECT x:1", "CONNECT x", "GET http://[::1", "GET http://x", "GET http://x?a=b", "GET http://:99999/"]


@pytest.mark.parametrize("before", [0, 1], ids=["on_a_new_connection", "after_another_call"])
@pytest.mark.parametrize("target", ADDRESSES)
def test_an_address_without_a_path_or_that_cannot_be_read_is_400(running, caplog, target, before):
    with serving(running) as (url, _):
        there = http.client.HTTPConnection("127.0.0.1", httpx.URL(url).port)
        there.connect()
        for _ in range(before):
            there.request("GET", "/v1/openapi.json")
            assert there.getresponse().read()
        there.sock.sendall(f"{target} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        with there.sock.makefile("rb") as answer:
            head, _, body = answer.read().partition(b"\r\n\r\n")
        there.close()

    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"content-type: application/problem+json" in head
    assert target.partition(" ")[2] in json.loads(body)["detail"]
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize("target", ["//[", "*", "http://x/nowhere"])
def test_an_address_with_a_path_that_no_route_has_is_404(running, target):
    with serving(running) as (url, _), socket.create_connection(("127.0.0.1", httpx.URL(url).port)) as there:
        there.sendall(f"GET {target} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        assert there.makefile("rb").readline() == b"HTTP/1.1 404 Not Found\r\n"


def test_at_a_real_unix_socket_the_kernel_says_who_calls_and_no_key_is_needed(running, tmp_path, body_of_job):
    path = tmp_path / "s"
    with serving(running, path) as (url, _), httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
        for number in range(2):  # a kept connection too
            view = client.post(f"{url}/v1/jobs", json=body_of_job(f"job{number}")).json()
            name = pwd.getpwuid(os.getuid()).pw_name
            assert (view["owner"], view["user"]) == (name, name)
        assert client.get(f"{url}/v1/keys").status_code == 200


def test_at_a_tcp_port_nobody_is_known_without_a_key(running):
    with serving(running) as (url, _):
        assert httpx.get(f"{url}/v1/jobs").status_code == 401
