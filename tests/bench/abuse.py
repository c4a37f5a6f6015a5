"""What one hostile owner costs the others: a daemon with default limits, and jobs that hand their slots over.

    others_p99_ratio    p99 of the other owners' hand-overs (release to grant) beside the hostile owner, divided by
                        their p99 without it, which is measured before it comes and after it is gone
    rss_growth_mb       memory of the daemon and its child processes at most, beyond that before the hostile owner came
    server_errors       answers with a status of 500 or more, to anybody
    loop_stall_max_ms   the longest that a call of /healthz took, of one each few milliseconds

The hostile owner (``hostile.py``) is a process of its own, with a key of role user, and gives way to the others on a
busy processor: it would be on another machine. What its processor time alone costs on this machine is measured, too:
``beside_burner`` is the same, where a process that does not talk to the daemon burns as much, and gives way likewise.

Meanwhile an owner registers jobs and ends them (``newcomers``). None of its calls may be refused.
"""

import asyncio
import json
import os
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, Final

from figures import Json, at_most, many_files, no_collector, quantile, say, short, spread_ms
from handover import Group
from hostile import TRIED
from live import HERE, Daemon, Line, Member, Reply, call, daemon, end, rss_kb, start

#: groups of well-behaved jobs, each on a node of its own, and the owners that have them
GROUPS: Final = 6
OWNERS: Final = 2
MEMBERS: Final = 3
#: seconds for which a slot is held
HELD_S: Final = 0.05
THEIRS: Final = "theirs/gpu0-7"
#: how often the owner that registers does so
COMES_S: Final = 0.1
#: how much less than the others hostile processes get of a busy processor (see ``man nice``)
NICE: Final = 19
#: works for a share of the time
BURNER: Final = """
import sys, time
share, until = float(sys.argv[1]), time.monotonic() + float(sys.argv[2])
while time.monotonic() < until:
    began = time.process_time()
    while time.process_time() - began < 0.005 * share:
        pass
    time.sleep(0.005 * (1 - share))
"""
PROBE_S: Final = 0.005
#: connections that send half a body each
HALVES: Final = 1_000


def run(budget_s: float, *, small: bool = False) -> Json:
    """Without the hostile owner, with it, and without it again."""
    many_files()
    with tempfile.TemporaryDirectory(prefix="rollmuxd-bench-") as folder, no_collector():
        return asyncio.run(_run(Path(folder), budget_s / 6 if not small else 0.5, small=small))


async def _run(folder: Path, calm_s: float, *, small: bool) -> Json:
    # What gives way to a busy machine gets no answer for minutes; and where nothing is judged, few calls are a probe.
    way = {} if small else {"preexec_fn": _give_way}
    nodes = [f"ours{number}" for number in range(GROUPS)]
    hosts = [(name, "rollout", 1.85) for name in nodes]
    hosts += [(name, name, 1.85) for name in ("theirs", "newcomers")]
    with daemon(folder, hosts) as made:
        async with _groups(made, nodes) as groups, Newcomers.coming(made) as newcomers:
            watch = Watch(made, 10 * PROBE_S if small else PROBE_S)
            await _measure(groups, min(2.0, calm_s))
            newcomers.begin()
            calm = await _measure(groups, calm_s)
            came = newcomers.begin()
            before = watch.memory_mb()
            async with watch.watching():
                options = [str(HERE / "hostile.py"), str(made.port), await _key(made, "theirs"), THEIRS]
                with _beside(
                    folder, [*options, str(2 * calm_s), str(HALVES // 10 if small else HALVES)], **way
                ) as process:
                    hostile = await _measure(groups, 2 * calm_s)
                    theirs = json.loads((await asyncio.to_thread(process.communicate))[0])
            came_beside = newcomers.begin()
            say("abuse: the hostile owner is gone")
            await _end_all(made)
            share = min(1.0, theirs["processor_s"] / (2 * calm_s))
            with _beside(folder, ["-c", BURNER, str(share), str(2 * calm_s)], **way):
                burnt = await _measure(groups, 2 * calm_s)
            newcomers.begin()
            after = await _measure(groups, calm_s)
            came += newcomers.begin()
    answers = Counter(theirs["answers"])
    errors = sum(number for name, number in answers.items() if name[-3:].isdigit() and name[-3:] >= "500")
    if missing := [name for name in TRIED if not answers[name]]:
        raise RuntimeError(f"the hostile owner had no answer {', '.join(missing)}: {dict(answers)}")
    without = calm + after
    found: Json = {
        "others_p99_ratio": short(quantile(hostile, 0.99) / quantile(without, 0.99)),
        "others_p99_ratio_beside_burner": short(quantile(burnt, 0.99) / quantile(without, 0.99)),
        "rss_growth_mb": short(watch.most_mb - before),
        "server_errors": errors + watch.errors,
        "loop_stall_max_ms": short(1000 * watch.longest_s),
        "newcomers_refused": newcomers.refused,
        "others": {"without": spread_ms(without), "with": spread_ms(hostile), "beside_burner": spread_ms(burnt)},
        "newcomers": {"without": spread_ms(came), "with": spread_ms(came_beside)},
        "probes": spread_ms(watch.took),
        "memory_mb": {"before": short(before), "most": short(watch.most_mb), "of_it_the_daemon": short(watch.own_mb)},
        "processor_share_of_hostile": short(share),
        "answers": dict(answers),
    }
    found["targets"] = {
        "others_p99_ratio": at_most(found["others_p99_ratio"], 2.0),
        "rss_growth_mb": at_most(found["rss_growth_mb"], 300.0),
        "server_errors": at_most(found["server_errors"], 0.0),
        "loop_stall_max_ms": at_most(found["loop_stall_max_ms"], 500.0),
        "newcomers_refused": at_most(found["newcomers_refused"], 0.0),
    }
    return found


# ---- the others ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _groups(made: Daemon, nodes: list[str]) -> AsyncIterator[list[Group]]:
    """Jobs that share one node each group, and all wait for their turns."""
    keys = [await _key(made, f"ours-{number}") for number in range(OWNERS)]
    async with AsyncExitStack() as stack:
        groups = []
        for index, name in enumerate(nodes):
            members = []
            for number in range(MEMBERS):
                line = await Line.tcp(made.port)
                stack.callback(line.close)
                key = keys[index % OWNERS]
                members.append(await Member.join(line, key, f"{name}-{number}", f"{name}/gpu0-7", states=False))
            members[0].granted(await members[0].ask())
            for member in members[1:]:
                member.ask()
            groups.append(Group(members))
        yield groups
        for group in groups:
            for member in group.members:
                if member.asked is not None:
                    member.asked.cancel()


async def _measure(groups: list[Group], seconds: float) -> list[float]:
    """Seconds of each hand-over, of all groups."""
    until = time.monotonic() + seconds
    took: list[float] = []

    async def of_one(group: Group) -> None:
        while time.monotonic() < until:
            await asyncio.sleep(HELD_S)
            before = group.holder
            took.append(await group.hand_over())
            before.ask()

    await asyncio.gather(*map(of_one, groups))
    say(f"abuse: {len(took)} hand-overs, p99 {1000 * quantile(took, 0.99):.1f} ms")
    return took


async def _key(made: Daemon, owner: str) -> str:
    body = {"owner": owner, "user": owner, "role": "user"}
    return str((await _as_operator(made, call("POST", "/v1/keys", body))).json()["secret"])


async def _as_operator(made: Daemon, request: bytes) -> Reply:
    line = await Line.unix(made.socket)
    try:
        return await line.send(request)
    finally:
        line.close()


async def _end_all(made: Daemon) -> None:
    """End the hostile owner's jobs, so that what follows is as it was before."""
    line = await Line.unix(made.socket)
    try:
        while jobs := (await line.send(call("GET", "/v1/jobs?owner=theirs&over=false&limit=1000"))).json()["items"]:
            for job in jobs:
                await line.send(call("DELETE", f"/v1/jobs/{job['job']}", {}))
    finally:
        line.close()


class Newcomers:
    """An owner that registers jobs and ends them, one after the other."""

    def __init__(self, line: Line, key: str) -> None:
        self._line, self._key = line, key
        #: seconds that each registration took since :meth:`begin`
        self._took: list[float] = []
        self.refused = 0

    @classmethod
    @asynccontextmanager
    async def coming(cls, made: Daemon) -> "AsyncIterator[Newcomers]":
        """It registers until this is left."""
        line = await Line.tcp(made.port)
        newcomers = cls(line, await _key(made, "newcomers"))
        task = asyncio.create_task(newcomers._come())
        try:
            yield newcomers
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            line.close()

    def begin(self) -> list[float]:
        """Measure anew; returns what was measured."""
        took, self._took = self._took, []
        return took

    async def _come(self) -> None:
        for number in count():
            body = {
                "name": f"newcomer-{number}",
                "phases": [{"name": "rollout", "pools": ["newcomers"], "seconds": 60}],
                "wants": {"newcomers": {}},
            }
            began = time.perf_counter()
            registered = await self._line.send(call("POST", "/v1/jobs", body, key=self._key))
            self._took.append(registered.at - began)
            ended = await self._line.send(call("DELETE", f"/v1/jobs/newcomer-{number}", {}, key=self._key))
            self.refused += (registered.status >= 300) + (ended.status >= 300)
            await asyncio.sleep(COMES_S)


# ---- the hostile owner, and what it does to the daemon ---------------------------------------------------------------


@contextmanager
def _beside(folder: Path, command: list[str], **way: Any) -> "Iterator[subprocess.Popen[bytes]]":
    """A process beside the others."""
    process = start(command, folder, stdout=subprocess.PIPE, **way)
    try:
        yield process
    finally:
        if process.poll() is None:
            end(process)


def _give_way() -> None:
    """Give way to the daemon, and to what the kernel does for its disk.

    Linux shares a processor between sessions first (see autogroup in ``man 7 sched``), and ``nice`` counts within one.
    """
    os.setsid()
    os.nice(NICE)
    with suppress(OSError):  # this kernel does not share it so
        Path("/proc/self/autogroup").write_text(str(NICE))


class Watch:
    """Looks at the daemon all the time: whether it answers, and how much memory it has."""

    def __init__(self, made: Daemon, each_s: float) -> None:
        self._made, self._each_s = made, each_s
        self.took: list[float] = []
        self.longest_s, self.most_mb, self.own_mb = 0.0, 0.0, 0.0
        self.errors = 0

    def memory_mb(self) -> float:
        """Of the daemon and its child processes."""
        self.own_mb = max(self.own_mb, rss_kb(self._made.pid) / 1000)
        pids = [self._made.pid]
        for tasks in Path(f"/proc/{self._made.pid}/task").iterdir():
            with suppress(OSError):
                pids += map(int, (tasks / "children").read_text().split())
        total = 0.0
        for pid in pids:
            with suppress(OSError):
                total += rss_kb(pid)
        return total / 1000

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._probe()), asyncio.create_task(self._weigh())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _probe(self) -> None:
        line = await Line.unix(self._made.socket)
        request = call("GET", "/healthz")
        while True:
            began = time.perf_counter()
            reply = await line.send(request)
            self.took.append(reply.at - began)
            self.longest_s = max(self.longest_s, reply.at - began)
            self.errors += reply.status >= 500
            await asyncio.sleep(self._each_s)

    async def _weigh(self) -> None:
        while True:
            self.most_mb = max(self.most_mb, self.memory_mb())
            await asyncio.sleep(0.1)
