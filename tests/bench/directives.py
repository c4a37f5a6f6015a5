"""How soon the holder of a slot knows what the daemon asks of it, through a real daemon and a real heartbeat process.

One job holds a node in the tail of its rollout, another one asks for it and takes its request back, again and again.

    changed   from just before that call of the other job is sent until the holder's ``slot.directive`` has changed
    crossed   from the holder's ``slot.progress(80, 100)``, while the other job waits, until it is asked to shrink

Both have the commit of the daemon, an HTTP call and the wake-ups of two processes in them. The floor, in the same run:
one heartbeat that is answered at once, on a new connection, as the heartbeat process sends it.
"""

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Final

from figures import Json, Rounds, at_most, no_collector, quantile, short, spread_ms
from live import Line, call, daemon, new_key

import rollmuxd

#: seconds between two looks of the holder at its directive
LOOK_S: Final = 0.0005
PHASE: Final = {"name": "rollout", "pools": ["rollout"], "seconds": 60, "min_gpus": 1}


def run(budget_s: float, *, small: bool = False) -> Json:
    """Directives that come and go, and tails that begin."""
    with (
        tempfile.TemporaryDirectory(prefix="rollmuxd-bench-") as folder,
        no_collector(),
        daemon(Path(folder), [("one", "rollout", 1.85)]) as made,
    ):
        key = asyncio.run(new_key(made))
        url = f"http://127.0.0.1:{made.port}"
        with rollmuxd.job("holder", rollout={"nodes": 1, "min_gpus": 1}, url=url, api_key=key) as job:
            changed, crossed, floor = asyncio.run(_measure(job, Other(made.port, key), budget_s, small=small))
    found: Json = {
        "changed": {**spread_ms(changed), "ratio_p50": short(quantile(changed, 0.5) / quantile(floor, 0.5))},
        "crossed": spread_ms(crossed),
        "floor": spread_ms(floor),
    }
    found["targets"] = {
        "changed.p99_ms": at_most(found["changed"]["p99_ms"], 50.0),
        "crossed.p99_ms": at_most(found["crossed"]["p99_ms"], 2_500.0),
    }
    return found


class Other:
    """The job that asks for the node."""

    def __init__(self, port: int, key: str) -> None:
        self._port, self._key, self._count = port, key, 0

    async def join(self) -> None:
        self._line, self._control = await Line.tcp(self._port), await Line.tcp(self._port)
        body = {"name": "other", "phases": [PHASE], "wants": {"rollout": {}}, "idempotency_key": "other"}
        self._job = (await self._send("POST", "/v1/jobs", body))["job"]
        opening = {"idempotency_key": "other", "pid": 1, "started": "1"}
        self.session = (await self._send("POST", f"/v1/jobs/{self._job}/sessions", opening))["session"]

    def ask(self) -> None:
        self._count += 1
        body = {"phase": "rollout", "request_id": f"r{self._count}", "session": self.session, "wait_s": 60}
        self._asked = self._line.send(call("POST", f"/v1/jobs/{self._job}/slots", body, key=self._key))

    async def withdraw(self) -> None:
        slot = (await self._send("GET", f"/v1/jobs/{self._job}"))["slot"]
        await self._send("DELETE", f"/v1/slots/{slot}")
        await self._asked

    async def beat(self) -> float:
        """Seconds of a heartbeat that is answered at once."""
        began = time.perf_counter()
        line = await Line.tcp(self._port)
        reply = await line.send(call("POST", f"/v1/sessions/{self.session}/heartbeat", {"done": 0}, key=self._key))
        reply.json()
        line.close()
        return reply.at - began

    async def _send(self, method: str, path: str, body: Json | None = None) -> Json:
        return (await self._control.send(call(method, path, body, key=self._key))).json()


async def _until_directive(slot: "rollmuxd.Slot", *, there: bool) -> float:
    """The moment at which the slot's directive has come, or gone."""
    async with asyncio.timeout(60):
        while (slot.directive is not None) != there:
            await asyncio.sleep(LOOK_S)
    return time.perf_counter()


async def _measure(
    job: "rollmuxd.Job", other: Other, budget_s: float, *, small: bool
) -> tuple[list[float], list[float], list[float]]:
    await other.join()
    changed: list[float] = []
    crossed: list[float] = []
    floor: list[float] = []
    for _ in range(2 if small else 20):
        phase = job.phase("rollout")
        slot = await asyncio.to_thread(phase.__enter__)
        other.ask()
        slot.progress(79, 100)
        await asyncio.sleep(0.02)
        assert slot.directive is None
        began = time.perf_counter()
        slot.progress(80, 100)
        crossed.append(await _until_directive(slot, there=True) - began)
        await other.withdraw()
        await _until_directive(slot, there=False)
        for _ in Rounds(budget_s / 20, least=3, most=20):
            began = time.perf_counter()
            other.ask()
            changed.append(await _until_directive(slot, there=True) - began)
            floor.append(await other.beat())
            began = time.perf_counter()
            await other.withdraw()
            changed.append(await _until_directive(slot, there=False) - began)
        await asyncio.to_thread(phase.__exit__, None, None, None)
    return changed, crossed, floor
