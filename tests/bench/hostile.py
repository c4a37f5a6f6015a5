"""One owner of role user that does what it can to slow a daemon down: ``hostile.py PORT KEY NODE SECONDS HALVES``.

It needs no secret but its own key. Each way is a task of its own, and all of them run at once. A task calls again as
soon as it has its answer, and a tenth of a second after it was refused: what a flood of refused calls costs is a matter
of ``limits.calls_per_s``, and not of this. At the end it prints how often each answer came, and its processor time.
"""

import asyncio
import json
import random
import string
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Final

from figures import Json, many_files
from live import Line, Reply, call

EXPLAINERS: Final = 60
READERS: Final = 30
#: long answers that it asks for and does not take, and for how long
UNREAD: Final = 20
UNREAD_S: Final = 10.0
#: bytes of a half-sent body, of about a megabyte
HALF: Final = 760_000
#: bytes of rubbish that its engine gives for figures
GARBAGE: Final = 256_000
#: calls that wait longer are given up
PATIENCE_S: Final = 300.0
#: bytes of a registration's body, at most
LARGEST: Final = 32_000
REFUSED_S: Final = 0.1
#: what its readers ask for
PAGES: Final = ("facts?limit=10000", "jobs?limit=1000", "slots?limit=1000", "facts?limit=10000&job=large-0")


#: answers that the hostile owner must have had, so that each of its ways was tried
TRIED: Final = (
    *("end 200", "engine 201", "engine /metrics", "explain 200", "facts 200", "half 429", "jobs 200", "number 422"),
    *("plan 200", "register 201", "slots 200", "unread 200"),
)


class Hostile:
    """The owner."""

    def __init__(self, port: int, key: str, node: str, seconds: float, halves: int) -> None:
        self._port, self._key, self._node, self._halves = port, key, node, halves
        self._until = time.monotonic() + seconds
        #: answers by what was asked and status
        self.answers: Counter[str] = Counter()
        #: names of its jobs
        self._large = ["large-0"]

    async def run(self) -> Json:
        """All of it at once, until the time is over."""
        engine = await asyncio.start_server(self._engine, "127.0.0.1", 0)
        ways = [self._fill, self._large_numbers, self._plan_and_leave, self._plan, self._come_and_go]
        ways += [self._explain] * EXPLAINERS
        ways += [partial(self._read, PAGES[number % len(PAGES)]) for number in range(READERS)]
        ways += [partial(self._unread, PAGES[number % len(PAGES)]) for number in range(UNREAD)]
        port = engine.sockets[0].getsockname()[1]
        await self._one_with_an_engine(port)
        tasks = [asyncio.create_task(self._again(way)) for way in ways]
        tasks += [asyncio.create_task(self._again(self._half, 10)) for _ in range(self._halves)]
        await asyncio.sleep(max(0.0, self._until - time.monotonic()))
        # On a busy machine not every way has had its answer by then.
        while not all(self.answers[name] for name in TRIED) and time.monotonic() < self._until + PATIENCE_S:
            await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        engine.close()
        return {"answers": dict(sorted(self.answers.items())), "processor_s": time.process_time()}

    async def _again(self, way: Callable[[], Awaitable[object]], pause_s: float = 0.0) -> None:
        while True:
            try:
                reply = await way()
            except (OSError, TimeoutError, RuntimeError, asyncio.IncompleteReadError):
                reply = None  # it was hung up on, and calls again
            refused = not isinstance(reply, Reply) or reply.status >= 300
            await asyncio.sleep(max(pause_s, REFUSED_S if refused else 0.0))

    async def _ask(self, line: Line, what: str, request: bytes) -> Reply:
        async with asyncio.timeout(PATIENCE_S):
            reply = await line.send(request)
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

    def _large_job(self, number: int) -> Json:
        """A job of 16 to 32 kB, like no other: times, phases, nodes, promise and engines are drawn.

        Half of them want nodes of the other owners, with a promise that leaves no room for anybody beside them.
        """
        draw = random.Random(number)

        def word(length: int) -> str:
            return "".join(draw.choices(string.ascii_lowercase, k=length))

        phases = [
            {
                "name": word(draw.randint(10, 100)),
                "pools": ["theirs"],
                "seconds": draw.randint(1, 10_000) / 7,
                "gap_s": draw.randint(0, 100),
            }
            for _ in range(draw.randint(1, 16))
        ]
        body: Json = {**self._job(f"large-{number}"), "phases": phases, "slo": draw.choice([1.0, 1.5, 2.0, 8.0])}
        body["priority"] = draw.randint(-1000, 1000)
        if draw.random() < 0.5:
            body["wants"]["rollout"] = {"nodes": draw.randint(1, 6)}
            body["slo"] = 1.0
            phases[-1]["pools"] = ["rollout"]
            phases[:] = [*phases[-15:], {"name": "train", "pools": ["theirs"], "seconds": 60}]
        for pool in body["wants"]:
            address = ":".join(["0000"] * 7 + ["0001"])
            urls = [f"http://[{address}]:{draw.randint(1, 65_535)}" for _ in range(256)]
            state = {"driver": "vllm", "gpu_gb": 1, "ram_gb": draw.randint(1, 100), "options": {"url": urls}}
            body["states"][pool] = state
        while len(json.dumps(body)) > LARGEST:
            urls.pop()
        return body

    async def _fill(self) -> None:
        """As large jobs as are taken, as many as are taken."""
        line = await Line.tcp(self._port)
        try:
            while True:
                job = self._large_job(len(self._large))
                reply = await self._ask(line, "register", call("POST", "/v1/jobs", job, key=self._key))
                if reply.status == 429:
                    await asyncio.sleep(REFUSED_S)
                    continue
                self.answers[f"job {reply.json()['status']}"] += 1
                self._large.append(job["name"])
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

    def _large_plan(self, nodes: int, jobs: int = 1) -> bytes:
        pools = {f"p{number}": {"nodes": nodes, "gpus": 1_000} for number in range(15)}
        planned = [self._job("planned")] + [self._large_job(-number) for number in range(1, jobs)]
        body = {"jobs": planned, "pools": {"theirs": {"nodes": nodes, "gpus": 1_000}, **pools}}
        return call("POST", "/v1/plan", body, key=self._key)

    async def _plan_and_leave(self) -> None:
        for nodes in (5_000, 62):
            line = await Line.tcp(self._port)
            answer = line.send(self._large_plan(nodes))
            await asyncio.sleep(0.3)
            line.close()
            answer.cancel()

    async def _plan(self) -> Reply:
        await self._once("plan", self._large_plan(62))
        return await self._once("plan", self._large_plan(3, jobs=20))

    async def _explain(self) -> Reply:
        name = random.choice(self._large)
        return await self._once("explain", call("GET", f"/v1/jobs/{name}/explain", key=self._key))

    async def _read(self, page: str) -> Reply:
        return await self._once(page.partition("?")[0], call("GET", f"/v1/{page}", key=self._key))

    async def _half(self) -> None:
        """The first part of a body; the rest never comes."""
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

    async def _unread(self, page: str) -> None:
        """A long answer that is asked for and not taken."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1)
        try:
            writer.write(call("GET", f"/v1/{page}", key=self._key))
            async with asyncio.timeout(PATIENCE_S):
                said = await reader.readexactly(12)
            self.answers[f"unread {said[9:12].decode()}"] += 1
            await asyncio.sleep(UNREAD_S)
        finally:
            writer.close()

    async def _come_and_go(self) -> Reply:
        """End a job and register it again, while all others wait."""
        name = random.choice(self._large)
        await self._once("end", call("DELETE", f"/v1/jobs/{name}", {}, key=self._key))
        job = self._large_job(int(name.partition("-")[2]))
        return await self._once("register", call("POST", "/v1/jobs", job, key=self._key))


if __name__ == "__main__":
    many_files()
    port, key, node, seconds, halves = sys.argv[1:]
    print(json.dumps(asyncio.run(Hostile(int(port), key, node, float(seconds), int(halves)).run())))
