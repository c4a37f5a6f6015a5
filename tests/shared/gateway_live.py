"""A gateway before engines, over real sockets, in the test's own loop."""

import asyncio
import contextlib
from array import array

import httpx
import uvicorn
from patience import PATIENCE_S

from rollmuxd_gateway.app import App
from rollmuxd_gateway.fakes.hashlm import Engine, Model
from rollmuxd_gateway.fakes.server import Server
from rollmuxd_gateway.net.asgi import Asgi
from rollmuxd_gateway.settings import read

MODEL = Model(median=120, sigma=0.3)


class Served(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):
        yield


@contextlib.asynccontextmanager
async def served(app, **more):
    """The address of an ASGI app."""
    # A client may reuse a connection at the moment at which an idle one is closed: not within a test.
    limits = {"timeout_graceful_shutdown": 1, "timeout_keep_alive": 600}
    config = uvicorn.Config(app, port=0, log_level="critical", lifespan="on", **limits, **more)
    server = Served(config)
    task = asyncio.create_task(server.serve())
    async with asyncio.timeout(PATIENCE_S):
        while not server.started:
            await asyncio.sleep(0.005)
    server.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        server.should_exit = True
        await task


class Live:
    def __init__(self):
        self.engines, self.servers, self.stack = [], [], contextlib.AsyncExitStack()

    async def engine(self, *, step_s=0.002, model=MODEL, **more):
        engine = Engine(model, seed=len(self.engines), **more)
        fake = Server(engine, step_s=step_s, per_request_s=0, name=f"gpu{len(self.engines)}", gpus=None)
        fake.served = await self.stack.enter_async_context(served(fake))
        self.engines.append(fake)
        return fake

    async def kill(self, number):
        """Its sockets break and its port is closed."""
        server = self.engines[number].served
        server.servers[0].close()
        for connection in list(server.server_state.connections):
            connection.transport.abort()

    async def settled(self, done):
        async with asyncio.timeout(PATIENCE_S):
            while not done():
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def live(replicas=2, *, engine=None, kind="vllm", **settings):
    it = Live()
    async with it.stack:
        for _ in range(replicas):
            await it.engine(**(engine or {}))
        listed = [
            {"url": fake.served.url, "engine": kind, "gpus": [f"host1/gpu{number}"]}
            for number, fake in enumerate(it.engines)
        ]
        it.app = App(read({"replica": listed, **settings}))
        it.server = await it.stack.enter_async_context(served(Asgi(it.app)))
        it.url = it.server.url
        it.client = await it.stack.enter_async_context(httpx.AsyncClient(base_url=it.url, timeout=PATIENCE_S))
        yield it


def alone(prompt, model=MODEL, **params):
    """What one engine makes of a prompt."""
    engine = Engine(model)
    job = engine.submit("x", array("i", prompt), params)
    while not job.finish:
        engine.step()
    return job
