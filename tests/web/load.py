"""Jobs that go round their cycle: ``load.py SOCKET JOBS [SCALE]``. They end with whoever started them.

Each has a rollout and a train phase, of times of its own, and state that the mock's driver moves. ``SCALE`` times the
phases' lengths, which are around a second.
"""

import asyncio
import os
import random
import signal
import sys
from ctypes import CDLL
from typing import Any

import httpx

NAMES = ("math-7b", "code-14b", "agent-8b", "judge-3b", "proofs-32b", "tools-9b")
#: as the mock's copies are: 40 GB a second
STATE = {"gpu_gb": 2, "residual_gb": 0.5, "ram_gb": 8, "driver": "mock", "load_s": 0.12, "park_s": 0.12}


async def job(line: httpx.AsyncClient, name: str, scale: float) -> None:
    dice = random.Random(name)
    times = {"rollout": scale * dice.uniform(0.5, 1.6), "train": scale * dice.uniform(0.3, 1.0)}
    body = {
        "name": name,
        "phases": [{"name": phase, "pools": [phase], "seconds": round(took, 3)} for phase, took in times.items()],
        "wants": {"rollout": {}, "train": {}},
        "states": dict.fromkeys(times, STATE),
        "idempotency_key": name,
    }
    if dice.random() < 0.6:
        body["slo"] = round(dice.uniform(2.2, 4.0), 1)
    mine = await call(line, "POST", "/v1/jobs", body)
    opening = {"idempotency_key": name, "pid": os.getpid(), "host": "h1"}
    session = (await call(line, "POST", f"/v1/jobs/{mine['job']}/sessions", opening))["session"]
    number = 0
    while True:
        for phase, took in times.items():
            number += 1
            request = {"phase": phase, "request_id": f"r{number}", "session": session, "wait_s": 60}
            slot = await call(line, "POST", f"/v1/jobs/{mine['job']}/slots", request)
            while slot["status"] != "running":
                slot = await call(line, "POST", f"/v1/jobs/{mine['job']}/slots", request)
            await asyncio.sleep(took * dice.lognormvariate(0, 0.25))
            await call(line, "POST", f"/v1/slots/{slot['slot']}/release", {"fence": slot["fence"]})


async def call(line: httpx.AsyncClient, method: str, path: str, body: Any) -> Any:
    while True:
        try:
            answer = await line.request(method, path, json=body)
        except httpx.TransportError:
            await asyncio.sleep(0.2)
            continue
        if answer.status_code in (503, 429):
            await asyncio.sleep(0.2)
            continue
        if answer.status_code == 409 and path.endswith("/release"):
            return {}  # it was taken away
        if answer.status_code >= 300:
            raise SystemExit(f"{method} {path}: {answer.text}")
        return answer.json()


async def alone(line: httpx.AsyncClient, name: str, scale: float) -> None:
    """What one of them runs into is not the others' affair."""
    try:
        await job(line, name, scale)
    except SystemExit as error:
        print(name, error, file=sys.stderr)


async def main(socket: str, jobs: int, scale: float = 1.0) -> None:
    transport = httpx.AsyncHTTPTransport(uds=socket, limits=httpx.Limits(max_connections=None))
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=120) as line,
        asyncio.TaskGroup() as tasks,
    ):
        for number in range(jobs):
            tasks.create_task(alone(line, f"{NAMES[number % len(NAMES)]}-{number // len(NAMES) + 1}", scale))
            await asyncio.sleep(0.01)


if __name__ == "__main__":
    CDLL(None).prctl(1, signal.SIGKILL)
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), *map(float, sys.argv[3:])))
