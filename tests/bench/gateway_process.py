"""A gateway for its benchmark: ``gateway_process.py aiohttp|httpx CHUNK URL...`` prints its port.

With httpx only the reading of streams differs: httpx.AsyncClient in the place of aiohttp, and all else is the gateway.
"""

import asyncio
import sys

import httpx
import uvicorn

from rollmuxd_gateway.app import App
from rollmuxd_gateway.core import inputs as i
from rollmuxd_gateway.engines import Seen
from rollmuxd_gateway.net.asgi import Asgi
from rollmuxd_gateway.net.upstream import Upstream
from rollmuxd_gateway.settings import read


class ByHttpx(Upstream):
    """Segments are read with httpx."""

    async def start(self):
        await super().start()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._httpx = httpx.AsyncClient(timeout=None, limits=limits)

    async def close(self):
        await super().close()
        await self._httpx.aclose()

    async def _segment(self, it, request, replica):
        dialect, seen = self.dialect(replica), Seen()
        call = dialect.generate(it, request, self._interval)
        headers = call.headers or {}
        async with self._httpx.stream(call.method, replica.url + call.path, json=call.body, headers=headers) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data:") and line[5:].strip() != "[DONE]":
                    tokens = dialect.read(line[5:].encode(), request, it.k, seen)
                    if tokens is not None:
                        self._tell(tokens)
                        if tokens.finish:
                            return
        self._tell(i.Fault(it.request, it.k, "eof"))


async def main():
    client, chunk, *urls = sys.argv[1:]
    settings = {"stream_interval": int(chunk), "replica": [{"url": url, "max_num_seqs": 4096} for url in urls]}
    app = App(read(settings))
    if client == "httpx":
        app.upstream = ByHttpx(app.tell, app._raw, int(chunk))
    server = uvicorn.Server(uvicorn.Config(Asgi(app), port=0, log_level="error", access_log=False, lifespan="on"))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)
    await task


if __name__ == "__main__":
    asyncio.run(main())
