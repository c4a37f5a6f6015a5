"""How long it takes to hand GPUs over: from a job's release to the next job's grant, through a real daemon.

Measured at the clients, on one clock: from just before the release is sent on one connection until the answer to the
next holder's waiting call has come in on another. Nothing is subtracted, so each figure has an HTTP call there, one
back, and both of the client's own wake-ups in it.

    bare     jobs without states: the daemon looks at the GPUs, then one durable commit lies between
    driver   jobs with states, which the mock driver moves in no time: three durable commits, one after the other
             (release and order to park; parked, claim and order to load; loaded and grant)

The floor, in the same round: as many commits of the same rows to a bare SQLite file (WAL, synchronous=FULL) on the
same disk, and one call of a bare ASGI app in the same server.
"""

import asyncio
import sqlite3
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from itertools import cycle
from pathlib import Path
from typing import Final, TypeAlias

from figures import Json, Rounds, at_most, many_files, no_collector, quantile, say, short, spread_ms
from live import NO_LIMIT, Daemon, Line, Member, Reply, bare_server, call, daemon, new_key

Row: TypeAlias = tuple[int, int, str, str]
#: commits that come one after the other
COMMITS: Final = {"bare": 1, "driver": 3}
WAITERS: Final = 4
#: connections that set up at once
AT_ONCE: Final = 32


def run(budget_s: float, *, small: bool = False) -> Json:
    """The two kinds of hand-over, with one and with a thousand waiting clients."""
    many_files()
    with tempfile.TemporaryDirectory(prefix="rollmuxd-bench-") as folder, no_collector():
        return asyncio.run(_run(Path(folder), budget_s, waiting=40 if small else 1_000))


async def _run(folder: Path, budget_s: float, *, waiting: int) -> Json:
    async with AsyncExitStack() as stack:
        _, port = stack.enter_context(bare_server(folder))
        many = await stack.enter_async_context(_many(folder / "many", waiting))  # this takes longest
        one = await stack.enter_async_context(_few(folder / "one"))
        http = await Line.tcp(port)
        floor = stack.enter_context(closing(Floor(folder, http)))
        began = time.monotonic()
        for kind in COMMITS:
            floor.rows[kind] = await _rows_of(one, kind)
        worlds = {"one": one, "thousand": many}
        took: dict[tuple[str, str], list[float]] = {(name, kind): [] for name in worlds for kind in COMMITS}
        floors: dict[str, list[float]] = {kind: [] for kind in COMMITS}
        for number in Rounds(0.6 * budget_s, least=20, most=1_000):
            for kind in COMMITS:
                for name, world in worlds.items():
                    took[name, kind].append(await world.hand_over(kind))
                floors[kind].append(await floor.sample(kind))
            if number % 50 == 49:
                say(f"handover: {number + 1} rounds, {time.monotonic() - began:.0f} s")
    found: Json = {"waiting": {"one": 1, "thousand": many.waiting}}
    for name in worlds:
        found[name] = _figures({kind: took[name, kind] for kind in COMMITS}, floors)
    found["targets"] = {f"{name}.ratio_p50": at_most(found[name]["ratio_p50"], 3.0) for name in worlds}
    return found


def _figures(took: dict[str, list[float]], floors: dict[str, list[float]]) -> Json:
    kinds: Json = {
        kind: {
            "ratio_p50": short(quantile(took[kind], 0.5) / quantile(floors[kind], 0.5)),
            **spread_ms(took[kind]),
            "floor": {"commits": COMMITS[kind], **spread_ms(floors[kind])},
        }
        for kind in COMMITS
    }
    return {"ratio_p50": max(kind["ratio_p50"] for kind in kinds.values()), **kinds}


async def _rows_of(world: "World", kind: str) -> Sequence[Row]:
    """The facts that one hand-over writes, once all is warm."""
    for _ in range(20):
        await world.hand_over(kind)
    before = world.daemon.last_seq()
    await world.hand_over(kind)
    rows = world.daemon.rows(before)
    first = next(number for number, row in enumerate(rows) if row[2] == "slot_released")
    last = max(number for number, row in enumerate(rows) if row[2] == "slot_granted")
    return rows[first : last + 1]


# ---- the floor -------------------------------------------------------------------------------------------------------


class Floor:
    """Bare commits, and a bare call."""

    def __init__(self, folder: Path, http: Line) -> None:
        self._connection = sqlite3.connect(folder / "floor.sqlite3", isolation_level=None)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")
        self._connection.execute("CREATE TABLE facts (seq INTEGER PRIMARY KEY, at INTEGER, kind TEXT, body TEXT)")
        self._http = http
        self._call = call("POST", "/", {"fence": "1.17"}, key="x" * 40)
        self._seq = 0
        #: what one hand-over of a kind writes
        self.rows: dict[str, Sequence[Row]] = {}

    async def sample(self, kind: str) -> float:
        """Seconds of one call, and of as many commits as a hand-over needs."""
        rows, commits = self.rows[kind], COMMITS[kind]
        began = time.perf_counter()
        took = (await self._http.send(self._call)).at - began
        for number in range(commits):
            part = rows[len(rows) * number // commits : len(rows) * (number + 1) // commits]
            took += self._commit(part)
        return took

    def _commit(self, rows: Sequence[Row]) -> float:
        numbered = [(self._seq + number, *row[1:]) for number, row in enumerate(rows, 1)]
        self._seq += len(rows)
        began = time.perf_counter()
        self._connection.execute("BEGIN IMMEDIATE")
        insert = "INSERT INTO facts VALUES " + ",".join(["(?,?,?,?)"] * len(numbered))
        self._connection.execute(insert, [value for row in numbered for value in row])
        self._connection.execute("COMMIT")
        return time.perf_counter() - began

    def close(self) -> None:
        self._connection.close()
        self._http.close()


# ---- the daemons -----------------------------------------------------------------------------------------------------


class Group:
    """Jobs that share one node: one holds it, the others may wait for it."""

    def __init__(self, members: list[Member]) -> None:
        self.members = members
        self.holder = members[0]

    def others(self) -> list[Member]:
        return [member for member in self.members if member is not self.holder]

    async def hand_over(self) -> float:
        """Have the holder release; seconds until the next one has its grant."""
        for member in self.members:  # before it is measured
            await member.line.reopen()
        for member in self.others():
            member.ask_on()
        before, began = self.holder, time.perf_counter()
        released = before.release()
        self.holder, reply = await self._next()
        self.holder.granted(reply)
        (await released).json()
        return reply.at - began

    async def _next(self) -> tuple[Member, Reply]:
        """The member that gets the slot, and the answer to its call."""
        while True:
            waiting = {member.asked: member for member in self.others() if member.asked is not None}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            done = [
                (waiting[asked], asked.result()) for asked in waiting if asked.done() and not waiting[asked].ask_on()
            ]
            assert len(done) <= 1, f"{len(done)} grants followed one release"
            if done:
                return done[0]


class World:
    """A daemon, and groups of jobs of both kinds in it."""

    def __init__(
        self, daemon: Daemon, control: Line, key: str, groups: dict[str, list[Group]], *, parked: bool
    ) -> None:
        self.daemon = daemon
        self._control, self._key = control, key
        self._turn = {kind: cycle(of_kind) for kind, of_kind in groups.items()}
        #: everybody waits all the time; else one waits while a hand-over is measured, and nobody in between
        self._parked = parked
        self.waiting = sum(len(group.members) - 1 for of_kind in groups.values() for group in of_kind) if parked else 1

    async def hand_over(self, kind: str) -> float:
        group = next(self._turn[kind])
        if not self._parked:
            await self.park(group.others()[0])
        before = group.holder
        took = await group.hand_over()
        if self._parked:
            await self.park(before)
        return took

    async def park(self, member: Member) -> None:
        """Let it ask, and see to it that the daemon has its call waiting, and has nothing else to do."""
        await member.line.reopen()
        asked = member.ask()
        await self.until_queued(member)
        await asyncio.sleep(0.003)
        assert not asked.done(), asked.result()

    async def until_queued(self, member: Member) -> None:
        while not (await self._control.send(call("GET", f"/v1/jobs/{member.job}", key=self._key))).json()["slot"]:
            await asyncio.sleep(0)


@asynccontextmanager
async def _few(folder: Path) -> AsyncIterator[World]:
    """Two jobs of each kind; a hand-over is measured while one client waits."""
    async with _groups(folder, {"bare": 1, "driver": 1}, members=2) as (made, control, key, groups):
        yield World(made, control, key, groups, parked=False)


@asynccontextmanager
async def _many(folder: Path, waiting: int) -> AsyncIterator[World]:
    """Groups of five, of which four wait, all the time."""
    each = waiting // WAITERS // 2
    async with _groups(folder, {"bare": each, "driver": each}, members=WAITERS + 1) as (made, control, key, groups):
        began = time.monotonic()
        world = World(made, control, key, groups, parked=True)
        everybody = [member for of_kind in groups.values() for group in of_kind for member in group.others()]
        for member in everybody:
            member.ask()
        for member in everybody:
            await world.until_queued(member)
        await asyncio.sleep(0.5)
        assert len(everybody) == world.waiting
        assert not any(member.asked.done() for member in everybody if member.asked is not None)
        say(f"handover: {world.waiting} clients wait ({time.monotonic() - began:.1f} s)")
        yield world


@asynccontextmanager
async def _groups(
    folder: Path, counts: dict[str, int], *, members: int
) -> AsyncIterator[tuple[Daemon, Line, str, dict[str, list[Group]]]]:
    """A daemon with so many groups of each kind, in which the first job holds the node."""
    names = [(kind, f"{kind}{number}") for kind, count in counts.items() for number in range(count)]
    with daemon(folder, [(name, "rollout", 1.85) for _, name in names], more=NO_LIMIT) as made:
        began = time.monotonic()
        key, control = await new_key(made), await Line.tcp(made.port)
        groups: dict[str, list[Group]] = {kind: [] for kind in counts}

        async def gather(kind: str, name: str) -> None:
            joined = []
            for number in range(members):
                line = await Line.tcp(made.port)
                joined.append(
                    await Member.join(line, key, f"{name}-{number}", f"{name}/gpu0-7", states=kind == "driver")
                )
            joined[0].granted(await joined[0].ask())
            groups[kind].append(Group(joined))

        await _in_turns([gather(kind, name) for kind, name in names])
        say(f"handover: {len(names) * members} jobs are there ({time.monotonic() - began:.1f} s)")
        try:
            yield made, control, key, groups
        finally:
            control.close()
            for of_kind in groups.values():
                for group in of_kind:
                    for member in group.members:
                        if member.asked is not None:
                            member.asked.cancel()
                        member.line.close()


async def _in_turns(work: Sequence[Coroutine[object, object, None]]) -> None:
    """All of it, a few at a time."""
    room = asyncio.Semaphore(AT_ONCE)

    async def one(part: Coroutine[object, object, None]) -> None:
        async with room:
            await part

    await asyncio.gather(*(one(part) for part in work))
