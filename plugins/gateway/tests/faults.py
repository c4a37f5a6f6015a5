"""Engines fail in every way there is, under load: ``make -s gateway-faults BUDGET_S=60`` prints one JSON object.

Engines are processes (``hashlm``), so each response can be held against what the model says, token by token. A fault is
one of: a reset, a stream that ends early, an error within a stream, a stall, a refusal, a process that dies, one that
dies and leaves a worker behind, and a request that kills what it runs on, at its start or while it decodes. Dead
engines are started again.
"""

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "shared"))

from gateway_live import alone, served

from rollmuxd_gateway.app import App
from rollmuxd_gateway.fakes.hashlm import Model
from rollmuxd_gateway.net.asgi import Asgi
from rollmuxd_gateway.settings import ReplicaSettings, read

ENGINES = 5
CLIENTS = 48
MODEL = Model(median=150, sigma=0.5)
#: a prompt whose response kills its engine after forty tokens, by the ids that any prompt with them kills one with
DECODING = [5, 4, 3, 2, 1, 2, 3, 4, 5]
POISON = tuple(alone(DECODING, MODEL, max_tokens=44, temperature=0, ignore_eos=True).out[40:])
MOST = 300
#: a request that is not over so long after the last fault is lost
LOST_S = 120
#: each kind, and how often it is drawn
KINDS = {"reset": 5, "truncate": 5, "in_band": 5, "stall": 3, "server_error": 3, "die": 3, "orphan": 1, "poison": 1}
WANTED_FAULTS = 200


class Engines:
    def __init__(self, log):
        self.processes, self.urls, self.log = {}, {}, log

    def start(self, number):
        command = [sys.executable, "-m", "rollmuxd_gateway.fakes.server", "--median", "150", "--sigma", "0.5"]
        command += ["--step-ms", "15", "--seed", str(number), "--poison", ",".join(map(str, POISON))]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, text=True)
        self.urls[number] = f"http://127.0.0.1:{process.stdout.readline().strip()}"
        process.stdout.close()
        self.processes[number] = process

    def end(self):
        for process in self.processes.values():
            process.kill()
            process.wait()


class Storm:
    def __init__(self, app, client, engines, rng):
        self.app, self.client, self.engines, self.rng = app, client, engines, rng
        self.faults = dict.fromkeys(KINDS, 0)
        self.answers = self.wrong = self.lost = self.doubled = self.poisoned = self.survived_poison = 0
        self.first_wrong = ""
        self.over = False
        self.numbers = iter(range(10**9))

    # ---- load ----

    async def user(self):
        """Asks, and checks what comes."""
        while not self.over:
            number = next(self.numbers)
            prompt = [1 + number % 120, 1 + number // 120 % 120, *(self.rng.randrange(10, 120) for _ in range(8))]
            params = {"max_tokens": MOST, "temperature": 0}
            if number % 4 == 0:
                params["stop"] = ["qz"]
            once = alone(prompt, MODEL, **params)
            body = {"prompt": prompt, "logprobs": 0, "return_token_ids": True, **params}
            try:
                async with asyncio.timeout(LOST_S + 60):
                    ids, text = await (self.streamed(body) if number % 3 == 0 else self.whole(body))
            except Exception as error:
                self.lost += 1
                self.first_wrong = self.first_wrong or f"{type(error).__name__}: {error}"[:500]
                continue
            self.answers += 1
            if ids != once.out.tolist() or text != once.text():
                self.wrong += 1
                self.doubled += len(ids) > len(once.out)
                self.first_wrong = self.first_wrong or f"{prompt}: {ids} for {once.out.tolist()}"[:500]

    async def whole(self, body):
        async with self.client.post("/v1/completions", json=body) as answer:
            assert answer.status == 200, (await answer.text())[:300]
            choice = (await answer.json())["choices"][0]
        return choice["token_ids"], choice["text"]

    async def streamed(self, body):
        ids, text = [], ""
        async with self.client.post("/v1/completions", json={**body, "stream": True}) as answer:
            assert answer.status == 200, (await answer.text())[:300]
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    told = json.loads(line[6:])
                    assert "choices" in told, told
                    ids += told["choices"][0]["token_ids"]
                    text += told["choices"][0]["text"]
        return ids, text

    async def poison(self):
        """A request that ends its engine: it has to fail, and to end three engines at most."""
        prompt = self.rng.choice([DECODING, [self.rng.randrange(10, 120), *POISON, self.rng.randrange(10, 120)]])
        body = {"prompt": prompt, "max_tokens": 50, "temperature": 0, "ignore_eos": True}
        async with self.client.post("/v1/completions", json=body) as answer:
            self.poisoned += answer.status == 502
            self.survived_poison += answer.status != 502

    # ---- faults ----

    def alive(self):
        core = self.app.core
        found = []
        for number, process in self.engines.processes.items():
            replica = core.replicas.get(f"e{number}")
            if process.poll() is None and replica is not None and replica.status == "open" and replica.live:
                found.append(number)
        return found

    async def fault(self):
        kind = self.rng.choices(list(KINDS), list(KINDS.values()))[0]
        alive = self.alive()
        if not alive or (kind in ("die", "orphan", "poison") and len(alive) < ENGINES - 1):
            return
        suspects = any(request.deaths > 1 for request in self.app.core.requests.values())
        poison = any(not task.done() for task in self.tasks)
        if kind in ("die", "orphan", "poison") and (suspects or poison):
            return  # what has met two deaths would rightly be blamed for a third, and a poison request brings several
        if kind == "poison":
            self.faults[kind] += 1
            self.tasks.append(asyncio.create_task(self.poison()))
            return
        number = self.rng.choice(alive)
        count = 1 if kind in ("die", "orphan") else min(2, len(self.app.core.replicas[f"e{number}"].live))
        self.faults[kind] += count
        with contextlib.suppress(aiohttp.ClientError, OSError):
            async with self.client.post(
                f"{self.engines.urls[number]}/fault", json={"kind": kind, "count": count}
            ) as answer:
                await answer.read()

    async def restart(self):
        """What died comes back, and is registered again."""
        while not self.over:
            for number, process in list(self.engines.processes.items()):
                replica = self.app.core.replicas.get(f"e{number}")
                if process.poll() is not None and (replica is None or replica.status == "dead"):
                    await asyncio.to_thread(self.engines.start, number)
                    await self.app.register(ReplicaSettings(self.engines.urls[number]), f"e{number}")
            await asyncio.sleep(0.2)

    def is_short(self, budget_s):
        return budget_s >= 60 and sum(self.faults.values()) < WANTED_FAULTS

    async def run(self, budget_s):
        self.tasks = []
        for number in range(ENGINES):
            await self.app.register(ReplicaSettings(self.engines.urls[number]), f"e{number}")
        users = [asyncio.create_task(self.user()) for _ in range(CLIENTS)]
        restarts = asyncio.create_task(self.restart())
        began = time.monotonic()
        # A busy machine takes longer for as many faults: that is no miss.
        while (took := time.monotonic() - began) < budget_s or (self.is_short(budget_s) and took < 5 * budget_s):
            await self.fault()
            await asyncio.sleep(budget_s / (WANTED_FAULTS * 1.6))
        self.over = True
        await asyncio.gather(*users, *self.tasks)
        await restarts


async def storm(budget_s, seed, log):
    engines = Engines(log)
    try:
        for number in range(ENGINES):
            engines.start(number)
        app = App(read({"stall_s": 2, "attempts": 30, "no_replica_s": LOST_S, "stream_interval": 4}))
        async with (
            served(Asgi(app)) as server,
            aiohttp.ClientSession(
                server.url, connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout()
            ) as client,
        ):
            it = Storm(app, client, engines, random.Random(seed))
            await it.run(budget_s)
            left = len(app.core.requests)
    finally:
        engines.end()
    count = app.core.count
    return {
        "faults": sum(it.faults.values()),
        "by_kind": it.faults,
        "seen_by_gateway": count.faults,
        "answers": it.answers,
        "continued": count.segments.get("fault", 0) + count.segments.get("stall", 0),
        "lost": it.lost,
        "wrong": it.wrong,
        "doubled": it.doubled,
        "left_behind": left,
        "poison_refused": it.poisoned,
        "poison_survived": it.survived_poison,
        "first_wrong": it.first_wrong,
        "seed": seed,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of faults (default: %(default)g)")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    result = asyncio.run(storm(asked.budget, asked.seed, subprocess.DEVNULL))
    wrong = [name for name in ("lost", "wrong", "doubled", "left_behind", "poison_survived") if result[name]]
    if result["faults"] < WANTED_FAULTS and asked.budget >= 60:
        wrong.append("faults")
    print(json.dumps({**result, "ok": not wrong, "problems": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
