"""A whole program on the async client; its name is its argument."""

import asyncio
import json
import sys
import time

import rollmuxd


async def main(name):
    async with rollmuxd.ajob(name, rollout={"nodes": 1}, train={"nodes": 1}) as job:
        async with job.phase("init"):
            await asyncio.sleep(0.01)
        for step in range(3):
            async with job.phase("rollout", then="train") as slot:
                await asyncio.sleep(0.02)
                slot.measure(tokens=100.0 + step)
            async with job.phase("train"):
                await asyncio.sleep(0.02)
                print(json.dumps({"at": time.monotonic(), "event": "trained", "value": 10 * step}), flush=True)


asyncio.run(main(sys.argv[1]))
