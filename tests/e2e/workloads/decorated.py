"""A whole program whose phases are decorated functions, one of them a coroutine; its name is its argument."""

import asyncio
import json
import sys
import time

import rollmuxd

job = rollmuxd.job(sys.argv[1], rollout={"nodes": 1}, train={"nodes": 1})


@job.phase("init")
def build():
    return 10


@job.phase("rollout")
async def rollout(step, factor):
    await asyncio.sleep(0.02)
    job.slot.measure(tokens=float(step))
    return step * factor


@job.phase("train")
def train(value):
    time.sleep(0.02)
    print(json.dumps({"at": time.monotonic(), "event": "trained", "value": value}), flush=True)


with job:
    factor = build()
    for step in range(3):
        train(asyncio.run(rollout(step, factor)))
