"""One owner of role user that does what it can to slow a daemon down: ``hostile.py PORT KEY NODE SECONDS``.

It needs no secret but its own key. Each way is a task of its own, and all of them run at once. A task calls again a
second after its answer: what a flood of small calls costs is a matter of ``limits.calls_per_s``, and not of this. At
the end it prints how often each answer came.
"""

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

from figures import Json, many_files
from live import Line, Reply, call

EXPLAINERS: Final = 60
READERS: Final = 30
HALVES: Final = 1_000
#: long answers that it asks for and does not take
UNREAD: Final = 20
#: bytes of a half-sent body, of about a megabyte
HALF: Final = 760_000
#: bytes of rubbish that its engine gives for figures
GARBAGE: Final = 256_000
#: calls that wait longer are given up
PATIENCE_S: Final = 120.0


class Hostile:
    """The owner."""

    def __init__(self, port: int, key: str, node: str, seconds: float) -> None:
        self._port, self._key, self._node = port, key, node
        self._until = time.monotonic() + seconds
        #: answers by what was asked and status
        self.answers: Counter[str] = Counter()
        self._registered = 0

    async def run(self) -> Json:
        """All of it at once, until the time is over."""
        engine = await asyncio.start_server(self._engine, "127.0.0.1", 0)
        ways = [self._fill, self._large_numbers, self._plan_and_leave, self._plan, self._come_and_go]
        ways += [self._explain] * EXPLAINERS + [self._read] * READERS
        port = engine.sockets[0].getsockname()[1]
        await self._one_with_an_engine(port)
        tasks = [asyncio.create_task(self._again(way)) for way in ways]
        tasks += [asyncio.create_task(self._again(self._half, 30)) for _ in range(HALVES)]
        tasks += [asyncio.create_task(self._again(self._unread, 10)) for _ in range(UNREAD)]
        await asyncio.sleep(max(0.0, self._until - time.monotonic()))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        engine.close()
        return {"answers": dict(sorted(self.answers.items()))}

    async def _again(self, way: Callable[[], Awaitable[None]], pause_s: float = 1.0) -> None:
        while time.monotonic() < self._until:
            with suppress(OSError, TimeoutError, RuntimeError):  # it was hung up on, and calls again
                await way()
            await asyncio.sleep(pause_s)

    async def _ask(self, line: Line, what: str, request: bytes) -> Reply:
        reply = await asyncio.wait_for(line.send(request), PATIENCE_S)
        self.answers[f"{what} {reply.status}"] += 1
        return reply

    async def _once(self, what: str, request: bytes) -> Reply:
        line = await Line.tcp(self._port)
        try:
            return await self._ask(line, what, request)
        finally:
            line.close()

    def _job(self, name: str, **state: object) -> Json:
        kept = {"gpu_gb": 1, "ram_gb": 1, "driver": "mock", **state}
        return {
            "name": name,
            "phases": [{"name": "rollout", "pools": ["theirs"], "seconds": 60}],
            "wants": {"theirs": {}},
            "states": {"theirs": kept},
            "slo": 1.0,
        }

    # ---- the ways ----------------------------------------------------------------------------------------------------

    async def _one_with_an_engine(self, port: int) -> None:
        """A job whose engine, by its word, listens where we do; the daemon asks it when the job gets its turn."""
        options = {"url": f"http://127.0.0.1:{port}"}
        body = {**self._job("engine", driver="vllm", options=options), "wants": {"theirs": {"named": [self._node]}}}
        job = await self._once("engine", call("POST", "/v1/jobs", body, key=self._key))
        if job.status >= 300:
            print(job.body.decode(), file=sys.stderr)
            return
        name = job.json()["job"]
        session = (await self._once("engine", call("POST", f"/v1/jobs/{name}/sessions", {}, key=self._key))).json()
        slot = {"phase": "rollout", "request_id": "1", "session": session["session"]}
        await self._once("engine", call("POST", f"/v1/jobs/{name}/slots", slot, key=self._key))

    async def _engine(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split(b" ", 2)[1].decode()
            self.answers[f"engine {path}"] += 1
            body = b'{"is_sleeping": true}'
            if path == "/metrics":
                body = b"vllm:engine_sleep_state" + b'{a="' * (GARBAGE // 4)
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()
            writer.close()

    async def _fill(self) -> None:
        """As large jobs as are taken, until one is refused."""
        line = await Line.tcp(self._port)
        try:
            while time.monotonic() < self._until:
                options = {"url": "http://127.0.0.1:9", "tags": ["weights", "kv_cache", "cuda_graph"] * 80}
                body = self._job(f"large-{self._registered}", driver="sglang", options=options)
                body["phases"] = [
                    {"name": f"{number:x<100}", "pools": ["theirs"], "seconds": 60} for number in range(16)
                ]
                reply = await self._ask(line, "register", call("POST", "/v1/jobs", body, key=self._key))
                if reply.status == 429:
                    await asyncio.sleep(0.5)
                    return
                reply.json()
                self._registered += 1
        finally:
            line.close()

    async def _large_numbers(self) -> None:
        for number in ("18446744073709551616", "1" + "0" * 400):
            text = json.dumps(self._job("number", options={"end_wait_s": "HERE"})).replace('"HERE"', number)
            for path, body in (("/v1/jobs", text), ("/v1/plan", f'{{"jobs": [{text}]}}')):
                head = call("POST", path, key=self._key).replace(
                    b"content-length: 0\r\n", b"content-length: %d\r\ncontent-type: application/json\r\n" % len(body)
                )
                await self._once("number", head + body.encode())

    def _large_plan(self, nodes: int) -> bytes:
        pools = {f"p{number}": {"nodes": nodes, "gpus": 1_000} for number in range(15)}
        body = {"jobs": [self._job("planned")], "pools": {"theirs": {"nodes": nodes, "gpus": 1_000}, **pools}}
        return call("POST", "/v1/plan", body, key=self._key)

    async def _plan_and_leave(self) -> None:
        for nodes in (5_000, 62):
            line = await Line.tcp(self._port)
            answer = line.send(self._large_plan(nodes))
            await asyncio.sleep(0.3)
            line.close()
            answer.cancel()

    async def _plan(self) -> None:
        await self._once("plan", self._large_plan(62))

    async def _explain(self) -> None:
        name = f"large-{max(0, self._registered - 1)}"
        await self._once("explain", call("GET", f"/v1/jobs/{name}/explain", key=self._key))

    async def _read(self) -> None:
        await self._once("facts", call("GET", "/v1/facts?limit=10000", key=self._key))

    async def _half(self) -> None:
        """The first part of a body; the rest never comes."""
        await asyncio.sleep(random.uniform(0, self._until - time.monotonic()))
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            head = call("POST", "/v1/plan", key=self._key).replace(
                b"content-length: 0", b"content-length: 999999\r\ncontent-type: application/json"
            )
            writer.write(head + b" " * HALF)
            said = await reader.read(12)
            self.answers[f"half {said[9:12].decode()}"] += 1
        finally:
            writer.close()

    async def _unread(self) -> None:
        """A long answer that is asked for and not taken."""
        await asyncio.sleep(random.uniform(0, self._until - time.monotonic()))
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1)
        try:
            writer.write(call("GET", "/v1/facts?limit=10000", key=self._key))
            said = await reader.readexactly(12)
            self.answers[f"unread {said[9:12].decode()}"] += 1
            await asyncio.sleep(10)
        finally:
            writer.close()

    async def _come_and_go(self) -> None:
        """End a job and register it again, while all others wait."""
        name = f"large-{self._registered // 2}"
        await self._once("end", call("DELETE", f"/v1/jobs/{name}", {}, key=self._key))
        await self._once("register", call("POST", "/v1/jobs", self._job(name), key=self._key))


if __name__ == "__main__":
    many_files()
    port, key, node, seconds = sys.argv[1:]
    print(json.dumps(asyncio.run(Hostile(int(port), key, node, float(seconds)).run())))
