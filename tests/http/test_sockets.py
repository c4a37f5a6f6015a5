"""Bad input of any kind gets a clear error and changes nothing that it should not: every route, over a real socket."""

import asyncio
import socket
import threading
from contextlib import contextmanager

import pytest
import schemathesis
import uvicorn
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks

from rollmuxd.daemon.http.app import ENDPOINTS
from rollmuxd.daemon.http.peer import PeerHttpToolsProtocol

load_all_checks()

#: what the description cannot say: that a name is taken, that a phase is not in the cycle, that a time has no such day
LEFT_OUT = ("positive_data_acceptance", "max_response_time")


def sparing(test):
    """Few examples, the same ones each time: a smoke test, kept short."""
    return settings(
        max_examples=5,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )(test)


@contextmanager
def serving(running):
    """The daemon on a port, in a thread; gives its address and an admin's key."""
    found = {}
    ready, stop = threading.Event(), threading.Event()

    async def serve():
        with socket.create_server(("127.0.0.1", 0)) as listening:
            async with running(limits={"max_body_mb": 0.2}) as world:
                config = uvicorn.Config(
                    world.app, http=PeerHttpToolsProtocol, lifespan="off", log_config=None, access_log=False, ws="none"
                )
                server = uvicorn.Server(config)
                found.update(url=f"http://127.0.0.1:{listening.getsockname()[1]}", secret=world.secrets["root"])
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
    assert ready.wait(10)
    try:
        yield found["url"], found["secret"]
    finally:
        stop.set()
        thread.join(10)


def test_a_fuzzer_finds_no_crash_and_no_contradiction_to_the_description(running):
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
                    case.call_and_validate(checks=checks, headers={"Authorization": f"Bearer {secret}"}, timeout=10)

                fuzz()


@pytest.mark.parametrize("method", ["TRACE", "PATCH"])
def test_a_method_that_no_route_has_is_405_over_the_wire(running, method):
    import httpx

    with serving(running) as (url, secret):
        answer = httpx.request(method, f"{url}/v1/jobs", headers={"Authorization": f"Bearer {secret}"})
        assert answer.status_code == 405
