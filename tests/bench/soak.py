"""A large daemon under load for a long time: does anything grow that should not, and does anything get slower?

10,000 registered jobs in groups of five, of which 5,000 wait in long polls (asking again every 30 s, as the client
library does); every one is heard of once a minute; and a hundred times a second one holder gives its node back and the
next one has it. Each window has the latency of these hand-overs (from just before the release is sent until the
next holder's answer is there), the daemon's memory, descriptors, threads and share of a core, and its files' sizes.

The last third of the time is compared with the third before it; the first is for warming up.

Then, in a small daemon beside it: one job, node and host with a fault, and by how much that delays their neighbours.
"""

import asyncio
import itertools
import json
import os
import sqlite3
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Final

from figures import Json, at_least, at_most, many_files, median, no_collector, quantile, say, short
from live import HERE, NO_LIMIT, Daemon, Line, Member, call, daemon, new_key, processor_s, rss_kb

MEMBERS: Final = 5
WAIT_S: Final = 30.0
BEAT_S: Final = 60.0
#: registrations at a time
AT_ONCE: Final = 32
#: of a faulted order, in the small daemon
LIMIT_S: Final = 2.0


class Size:
    """How large it is."""

    def __init__(self, budget_s: float, *, small: bool) -> None:
        self.groups = 12 if small else 2_000
        self.waiting_groups = 6 if small else 1_250
        self.per_second = 20.0 if small else 100.0
        # The default budget is for quick benchmarks; ten minutes are what this one is about.
        self.seconds = 6.0 if small else max(60.0, budget_s)
        self.window_s = self.seconds / 12


def run(budget_s: float, *, small: bool = False) -> Json:
    """The soak, then the faults."""
    many_files()
    with tempfile.TemporaryDirectory(prefix="rollmuxd-bench-") as folder, no_collector():
        size = Size(budget_s, small=small)
        found = asyncio.run(_soak(Path(folder) / "soak", size))
        found["faults"] = faults = asyncio.run(_faults(Path(folder) / "faults", small=small))
    found["targets"] |= {
        "faults.load_hangs.same_group_s": at_most(faults["load_hangs"]["same_group_s"], LIMIT_S + 1.0),
        **{
            f"faults.{name}.others_p50_times": at_most(faults[name]["others_p50_times"], 2.0)
            for name in ("load_hangs", "node_occupied", "host_silent")
        },
    }
    return found


# ---- the load --------------------------------------------------------------------------------------------------------


class Client(Member):
    """A member that asks again when its call comes back without a turn."""

    async def turn(self) -> None:
        """Wait for the turn, for as long as it takes; then hold it."""
        request = self.next_call(WAIT_S)
        while True:
            reply = await self.line.send(request)
            if reply.json()["status"] == "running":
                self.granted(reply)
                self.since = reply.at
                return
            request = self.this_call(WAIT_S)

    def beat(self) -> bytes:
        """The call by which it is heard of."""
        return call("POST", f"/v1/sessions/{self._session}/heartbeat", {}, key=self._key)


class Group:
    """The jobs of a node: one holds it, and the others wait."""

    def __init__(self, members: Sequence[Client]) -> None:
        self.members = members
        self.holder = members[0]
        self.waiting = {asyncio.create_task(member.turn()): member for member in members[1:]}

    async def hand_over(self) -> float:
        """Give it to whom the daemon chooses; how long that took."""
        await self.holder.line.reopen()  # before it is measured
        before, began = self.holder, time.perf_counter()
        released = before.release()
        done, _ = await asyncio.wait(self.waiting, return_when=asyncio.FIRST_COMPLETED)
        (turn,) = done
        turn.result()
        self.holder = self.waiting.pop(turn)
        (await released).json()
        self.waiting[asyncio.create_task(before.turn())] = before
        return self.holder.since - began

    async def close(self) -> None:
        for turn in self.waiting:
            turn.cancel()
        await asyncio.gather(*self.waiting, return_exceptions=True)


async def _soak(folder: Path, size: Size) -> Json:
    hosts = [(f"h{number}", "rollout", 1.85) for number in range(size.groups)]
    with daemon(folder, hosts, more=NO_LIMIT) as made:
        began = time.monotonic()
        key = await new_key(made)
        lines = [await Line.tcp(made.port) for _ in range(AT_ONCE)]
        jobs = await _join(key, lines, [host for host, *_ in hosts])
        registered_s = time.monotonic() - began
        say(f"soak: {len(jobs)} jobs are registered ({registered_s:.0f} s)")
        groups = await _wait(made, jobs, size)
        waiting = sum(len(group.waiting) for group in groups)
        say(f"soak: {waiting} clients wait")
        beats = [asyncio.create_task(_beat(line, jobs[number::AT_ONCE])) for number, line in enumerate(lines)]
        try:
            windows, late = await _rage(made, groups, size)
            for beat in beats:
                assert not beat.done(), beat.exception()
        finally:
            for beat in beats:
                beat.cancel()
            await asyncio.gather(*beats, return_exceptions=True)
            for group in groups:
                await group.close()
        count = len(jobs)
    third = len(windows) // 3
    warm, last = windows[third : 2 * third], windows[2 * third :]

    def of(which: Sequence[Json], name: str) -> float:
        return median([float(window[name]) for window in which])

    rates = [window["per_s"] for window in windows]
    found: Json = {
        "jobs": count,
        "waiting": waiting,
        "registered_s": short(registered_s),
        "seconds": short(size.seconds),
        "per_s": short(median(rates)),
        "late_hand_overs": late,
        "p50_ms": of(last, "p50_ms"),
        "p99_ms": of(last, "p99_ms"),
        "p50_drift": short(of(last, "p50_ms") / of(warm, "p50_ms")),
        "memory_growth": short(of(last, "rss_mb") / of(warm, "rss_mb") - 1),
        "descriptors_growth": of(last, "descriptors") - of(warm, "descriptors"),
        "threads_growth": of(last, "threads") - of(warm, "threads"),
        "bytes_each_drift": short(_bytes_each(last) / _bytes_each(warm)),
        "wal_growth": short(of(last, "wal_mb") / of(warm, "wal_mb") - 1),
        "kb_each": short(_bytes_each(windows) / 1000),
        "core_share": of(last, "core_share"),
        "windows": windows,
    }
    found["targets"] = {
        "per_s": at_least(found["per_s"], 0.95 * size.per_second),
        "p50_drift": at_most(found["p50_drift"], 1.5),
        "memory_growth": at_most(found["memory_growth"], 0.05),
        "descriptors_growth": at_most(found["descriptors_growth"], 4),
        "threads_growth": at_most(found["threads_growth"], 1),
        "bytes_each_drift": at_most(found["bytes_each_drift"], 1.2),
        "wal_growth": at_most(found["wal_growth"], 0.2),
    }
    return found


def _bytes_each(windows: Sequence[Json]) -> float:
    """What the journal has grown by, for each hand-over."""
    grown = sum(window["journal_mb_grown"] for window in windows) * 1e6
    return float(max(1.0, grown) / max(1, sum(window["hand_overs"] for window in windows)))


async def _join(key: str, lines: Sequence[Line], hosts: Sequence[str]) -> list[Client]:
    """All jobs, some at a time, in the order of their groups."""
    joined: dict[tuple[int, int], Client] = {}

    async def some(number: int) -> None:
        for index in range(number, len(hosts), AT_ONCE):
            for place in range(MEMBERS):
                line = lines[number]
                member = await Client.join(line, key, f"{hosts[index]}-{place}", f"{hosts[index]}/gpu0-7", states=False)
                assert isinstance(member, Client)
                joined[index, place] = member

    await asyncio.gather(*(some(number) for number in range(AT_ONCE)))
    return [joined[place] for place in sorted(joined)]


async def _wait(made: Daemon, jobs: Sequence[Client], size: Size) -> list[Group]:
    """Let the first of each group have its node, and the others wait for it."""
    groups = []
    for number in range(size.waiting_groups):
        members = jobs[number * MEMBERS : (number + 1) * MEMBERS]
        for member in members:  # only now: a server closes connections that are idle for long
            member.line = await Line.tcp(made.port)
        await members[0].turn()
        groups.append(Group(members))
    while made.count("slot_queued") < size.waiting_groups * MEMBERS:
        for turn in (turn for group in groups for turn in group.waiting if turn.done()):
            turn.result()  # raises: nobody gets a turn before anybody has given it back
        await asyncio.sleep(0.2)
    return groups


async def _beat(line: Line, members: Sequence[Client]) -> None:
    """Let each be heard of once a minute."""
    await line.reopen()
    for member in itertools.cycle(members):
        (await line.send(member.beat())).json()
        await asyncio.sleep(BEAT_S / len(members))


async def _rage(made: Daemon, groups: Sequence[Group], size: Size) -> tuple[list[Json], int]:
    """Hand over, so many times a second; a picture after each window. And how many were begun late."""
    windows: list[Json] = []
    took: list[float] = []
    under_way: set[asyncio.Task[float]] = set()
    busy: dict[Group, None] = {}
    turn, late = itertools.cycle(groups), 0
    began = next_at = time.perf_counter()
    seen, used = began, processor_s(made.pid)
    files = _journal_mb(made)

    def over(task: "asyncio.Task[float]", group: Group) -> None:
        under_way.discard(task)
        del busy[group]
        took.append(task.result())

    while (now := time.perf_counter()) < began + size.seconds or under_way:
        if now >= next_at and now < began + size.seconds:
            group = next(turn)
            if group in busy:
                late += 1
            else:
                busy[group] = None
                task = asyncio.create_task(group.hand_over())
                task.add_done_callback(lambda done, group=group: over(done, group))
                under_way.add(task)
            next_at += 1 / size.per_second
        if now - seen >= size.window_s and took:
            files_now, used_now = _journal_mb(made), processor_s(made.pid)
            windows.append(
                {
                    "at_s": short(now - began),
                    "hand_overs": len(took),
                    "per_s": short(len(took) / (now - seen)),
                    "p50_ms": short(1000 * quantile(took, 0.5)),
                    "p99_ms": short(1000 * quantile(took, 0.99)),
                    "worst_ms": short(1000 * max(took)),
                    "rss_mb": short(rss_kb(made.pid) * 1024 / 1e6),
                    "descriptors": len(os.listdir(f"/proc/{made.pid}/fd")),
                    "threads": len(os.listdir(f"/proc/{made.pid}/task")),
                    "core_share": short((used_now - used) / (now - seen)),
                    "journal_mb": short(files_now),
                    "journal_mb_grown": short(files_now - files),
                    "wal_mb": short(_wal_mb(made)),
                }
            )
            say(f"soak: {windows[-1]}")
            seen, used, files = now, used_now, files_now
            took.clear()
        await asyncio.sleep(max(0.0, min(next_at - time.perf_counter(), 0.01)))
    return windows, late


def _journal_mb(made: Daemon) -> float:
    """What is in its journal, whichever of its files that lies in at the moment."""
    path = made.state / "journal.sqlite3"
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
        pages, free, size = (
            connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
        )
    return (pages - free) * size / 1e6


def _wal_mb(made: Daemon) -> float:
    """The size of its log: what is written waits there until it is folded into the database."""
    return (made.state / "journal.sqlite3-wal").stat().st_size / 1e6


# ---- faults ----------------------------------------------------------------------------------------------------------


async def _faults(folder: Path, *, small: bool) -> Json:
    """One job, node or host with a fault: how long its neighbours wait, in its group and elsewhere."""
    rounds = 10 if small else 60
    found: Json = {"limit_s": LIMIT_S}
    async with _with_states(folder) as (script, groups):
        mine, *others = groups

        async def elsewhere(what: Json, meanwhile: Callable[[], Awaitable[float]] | None = None) -> tuple[Json, float]:
            """What other groups feel of it: beside a calm time just before, since other people use the machine too."""
            script({})
            calm = await _p50(others, rounds)
            script(what)
            own = asyncio.gather(meanwhile()) if meanwhile is not None else None
            p50 = await _p50(others, rounds)
            felt = {"others_p50_ms": short(1000 * p50), "others_p50_times": short(p50 / calm)}
            return felt, (await own)[0] if own is not None else 0.0

        # A job whose load never comes back: the one after it has the node after the order's limit.
        hangs = {"faults": [{"do": "hang", "method": "load", "job": "h0-1"}]}
        felt, took_s = await elsewhere(hangs, lambda: _past_the_faulted(mine))
        found["load_hangs"] = {**felt, "same_group_s": short(took_s)}
        # A stranger on a node, then a host that does not answer.
        found["node_occupied"], _ = await elsewhere({"strangers": [{"gpu": "h0/gpu0", "mb": 30_000}]})
        found["host_silent"], _ = await elsewhere({"faults": [{"do": "hang", "method": "observe", "host": "h0"}]})
        script({})
    return found


@asynccontextmanager
async def _with_states(folder: Path) -> AsyncIterator[tuple[Callable[[Json], None], list[Group]]]:
    """A small daemon whose hosts can be spoilt, and groups of two jobs with states; the first has three."""
    hosts = [(f"h{number}", "rollout", 1.85) for number in range(4)]
    made = Daemon(folder, hosts)
    made.program = [str(HERE.parent / "shared" / "faulty_mock.py")]
    file = folder / "faults.json"

    def script(what: Json) -> None:
        file.with_suffix(".new").write_text(json.dumps(what))
        file.with_suffix(".new").replace(file)

    script({})
    text = made.config.read_text().replace('memory = ""', f'memory = "", faults = {json.dumps(str(file))}')
    made.config.write_text(f"{text}\n[limits]\norder_s = {LIMIT_S}\nobserve_s = 0.5\n")
    try:
        made.start()
        key = await new_key(made)
        groups = []
        for host, *_ in hosts:
            members = []
            for place in range(2 if groups else 3):
                line = await Line.tcp(made.port)
                member = await Client.join(line, key, f"{host}-{place}", f"{host}/gpu0-7", states=True)
                assert isinstance(member, Client)
                members.append(member)
            await members[0].turn()
            groups.append(Group(members))
            await asyncio.sleep(0.1)  # for them to be queued, in this order
        yield script, groups
        for group in groups:
            await group.close()
    finally:
        made.end()


async def _p50(groups: Sequence[Group], rounds: int) -> float:
    """Of hand-overs in these groups, in turn."""
    took = []
    for _ in range(rounds):
        for group in groups:
            took.append(await group.hand_over())
    return median(took)


async def _past_the_faulted(group: Group) -> float:
    """The first job gives its node back, the load of the second hangs: how long until the third has it."""
    faulted, third = group.waiting
    began = time.perf_counter()
    released = group.holder.release()
    await asyncio.wait([third])
    await asyncio.gather(released, faulted, return_exceptions=True)
    return group.members[2].since - began
