"""What a parked request costs: memory, and processor time, of a daemon in which a thousand clients wait.

Each client has a job and a connection (TCP) of its own, and asks with ``wait_s`` 30 again and again, as the client
library does. Memory is the daemon's growth from when all jobs are there, and some have waited, to when all wait: the
connection, the call, the request. Asking again must write no fact.

The floor, at the same time: as many connections to a bare ASGI app in the same server that answers after 30 seconds.
"""

import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from figures import Json, at_most, many_files, median, no_collector, say, short
from live import NO_LIMIT, Daemon, Line, Member, bare_server, call, daemon, new_key, processor_s, rss_kb

WAIT_S: Final = 30.0
STEADY_S: Final = 36.0
MEMBERS: Final = 5


def run(budget_s: float, *, small: bool = False) -> Json:
    """Memory, then processor time."""
    many_files()
    with tempfile.TemporaryDirectory(prefix="rollmuxd-bench-") as folder, no_collector():
        return asyncio.run(_run(Path(folder), 80 if small else 1_000, WAIT_S / 10 if small else WAIT_S))


async def _run(folder: Path, clients: int, wait_s: float) -> Json:
    steady_s = STEADY_S * wait_s / WAIT_S
    hosts = [(f"h{number}", "rollout", 1.85) for number in range(clients // (MEMBERS - 1))]
    with daemon(folder / "daemon", hosts, more=NO_LIMIT) as made, bare_server(folder) as (bare, port):
        waiters = await _jobs(made, await new_key(made), [host for host, *_ in hosts])
        count = len(waiters)
        say(f"waiting: {count} jobs are there, and {len(hosts)} that hold what they wait for")
        few = waiters[:50]
        await asyncio.gather(*(_wait_once(made.port, member) for member in few), *(_park_once(port) for _ in few))
        pids = made.pid, bare
        idle, _ = await _shares(pids, 5)
        before = await _memory(pids)
        tasks = [asyncio.create_task(_ask_again(made.port, member, wait_s)) for member in waiters]
        tasks += [asyncio.create_task(_park_again(port, wait_s)) for _ in waiters]
        try:
            while made.count("slot_queued") < count + len(few) + len(hosts):
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.5)
            grown = [(after - was) / count for after, was in zip(await _memory(pids), before, strict=True)]
            say(f"waiting: {count} clients wait, at {grown[0]:.1f} KB each (floor {grown[1]:.1f} KB)")
            await asyncio.sleep(wait_s / 10)
            seq = made.last_seq()
            shares, took_s = await _shares(pids, steady_s)
            facts = made.last_seq() - seq
            for task in tasks:
                assert not task.done(), task.exception()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return {
        "clients": count,
        "wait_s": wait_s,
        "steady_s": short(took_s),
        "kb_each": short(grown[0]),
        "floor_kb_each": short(grown[1]),
        "core_share": short(shares[0]),
        "floor_core_share": short(shares[1]),
        "idle_core_share": short(idle[0]),
        "facts_written": facts,
        "targets": {
            "kb_each": at_most(grown[0], 40),
            "core_share": at_most(shares[0], 0.05),
            "facts_written": at_most(facts, 0),
        },
    }


async def _jobs(made: Daemon, key: str, hosts: Sequence[str]) -> list[Member]:
    """A group of jobs on each host: the first holds it, and the others, which are returned, may wait."""
    waiters: list[Member] = []
    for host in hosts:
        line = await Line.tcp(made.port)
        joined = [
            await Member.join(line, key, f"{host}-{number}", f"{host}/gpu0-7", states=False)
            for number in range(MEMBERS)
        ]
        joined[0].granted(await joined[0].ask())
        waiters += joined[1:]
        line.close()
    return waiters


async def _shares(pids: Sequence[int], seconds: float) -> tuple[list[float], float]:
    """Of a core, for each process, over so long."""
    began, used = time.monotonic(), [processor_s(pid) for pid in pids]
    await asyncio.sleep(seconds)
    took = time.monotonic() - began
    return [(processor_s(pid) - was) / took for pid, was in zip(pids, used, strict=True)], took


async def _memory(pids: Sequence[int]) -> list[float]:
    """Of each process, in KB: the median of a few looks."""
    looks = []
    for _ in range(5):
        looks.append([rss_kb(pid) for pid in pids])
        await asyncio.sleep(0.1)
    return [median(values) for values in zip(*looks, strict=True)]


async def _wait_once(port: int, member: Member) -> None:
    """Wait for a moment, then take the request back."""
    line = await Line.tcp(port)
    view = (await line.send(member.next_call(0.5))).json()
    assert view["status"] == "queued", view
    (await line.send(member.withdraw(view["slot"]))).json()
    line.close()


async def _ask_again(port: int, member: Member, wait_s: float) -> None:
    """Ask again and again, for ever; not all at the same time."""
    line = await Line.tcp(port)
    request = member.next_call(random.uniform(wait_s / 5, wait_s))
    while True:
        view = (await line.send(request)).json()
        assert view["status"] == "queued", view
        request = member.this_call(wait_s)


async def _park_once(port: int) -> None:
    line = await Line.tcp(port)
    (await line.send(call("POST", "/park/0.5", {}))).json()
    line.close()


async def _park_again(port: int, wait_s: float) -> None:
    line = await Line.tcp(port)
    seconds = random.uniform(wait_s / 5, wait_s)
    while True:
        (await line.send(call("POST", f"/park/{seconds:.3f}", {}))).json()
        seconds = wait_s
