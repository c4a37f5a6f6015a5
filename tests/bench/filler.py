"""What fillers have of idle nodes, what that costs jobs, and how soon a filler knows that it is to give way.

In the simulator, with and without one filler a node, every move of a state 5 s:

    harvested_share       time that fillers ran within groups, of the time in which no slot held these nodes and no
                          state was moved there without fillers
    promised_delay_share  by how much the mean slowdown of the jobs grew, as a share

Live, through a real daemon and real heartbeat processes, one filler a node, a thousand times:

    yield_p99_s           from just before a job is registered that has the filler's node, until ``slot.should_yield``
"""

import asyncio
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from figures import Json, at_least, at_most, no_collector, quantile, say, short, spread_ms
from live import Line, call, daemon, new_key

import rollmuxd
from rollmuxd.core.facts import Fact, OrderEnded, OrderIssued
from rollmuxd.core.ids import Millis, NodeId
from rollmuxd.sim import compare
from rollmuxd.sim.outcome import PAPER, Outcome
from rollmuxd.sim.workload import Options

HOUR: Final = 3_600_000
#: fillers at a time: each has to hold its slot for a second before it polls
NODES: Final = 12
POLLS_AFTER_S: Final = 1.2
LOOK_S: Final = 0.0005
PATIENCE_S: Final = 120.0


def run(budget_s: float, *, small: bool = False) -> Json:
    """Both parts."""
    del budget_s
    found = simulated(small=small)
    took = live(24 if small else 1_000)
    found["yield_p99_s"] = short(quantile(took, 0.99))
    found["yield"] = spread_ms(took)
    found["targets"] = {
        "harvested_share": at_least(found["harvested_share"], 0.80),
        "promised_delay_share": at_most(found["promised_delay_share"], 0.01),
        "slo_kept": at_least(found["slo_kept"], 1.0),
        "yield_p99_s": at_most(found["yield_p99_s"], 0.05),
    }
    return found


# ---- in the simulator -----------------------------------------------------------------------------------------------


def simulated(*, small: bool) -> Json:
    """The same draw with and without fillers."""
    nodes, jobs = ({"rollout": 4, "train": 3}, 12) if small else ({"rollout": 20, "train": 16}, 120)
    moves = Moves()
    without = play(nodes, jobs, 0, moves)
    say(f"without fillers: {without.wall_s:.0f} s")
    with_ = play(nodes, jobs, sum(nodes.values()), Moves())
    say(f"with fillers: {with_.wall_s:.0f} s")
    idle = sum(pool.bought_node_ms - pool.busy_node_ms for pool in without.pools) - sum(moves.took_ms.values())
    harvest = with_.harvest
    assert harvest is not None
    had, free = sum(harvest.in_groups_ms.values()), sum(harvest.free_ms.values())
    solo = sum(job.solo_ms for job in with_.jobs)
    return {
        "harvested_share": short(had / idle),
        "promised_delay_share": short(max(0.0, slowdown(with_) / slowdown(without) - 1)),
        "held_up_share": short(sum(harvest.held_up_ms) / solo),
        "slo_kept": with_.attainment,
        "idle_in_groups_node_h": short(idle / HOUR),
        "harvested_in_groups_node_h": short(had / HOUR),
        "harvested_free_node_h": short(free / HOUR),
        "loans": harvest.loans,
        "yields": harvest.yields,
    }


class Moves:
    """How long states of jobs were moved, by pool: what is neither busy nor idle."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[Millis, NodeId]] = {}
        self.took_ms: dict[NodeId, Millis] = {}

    def hear(self, fact: Fact) -> None:
        """One fact of the run."""
        if isinstance(fact, OrderIssued):
            self._since[fact.order] = fact.at, fact.node
        elif isinstance(fact, OrderEnded) and fact.order in self._since:
            since, node = self._since.pop(fact.order)
            self.took_ms[node] = self.took_ms.get(node, 0) + fact.at - since


def play(nodes: dict[str, int], jobs: int, fillers: int, moves: Moves) -> Outcome:
    """One run of the default policy."""
    options = Options(nodes=nodes, jobs=jobs, switch=5_000, fillers=fillers)
    tasks = compare.tasks("weave-production", options, ["rollmux"], "phase", [0])
    (task,) = (one for one in tasks if one.accounting == PAPER)
    return compare.perform(task, hear=moves.hear)


def slowdown(outcome: Outcome) -> float:
    """The mean over jobs."""
    each = [job.slowdown for job in outcome.jobs if job.slowdown is not None]
    return sum(each) / len(each)


# ---- live -----------------------------------------------------------------------------------------------------------


class Filler:
    """A filler on its own node, in a thread: it works until it is to give way, again and again."""

    def __init__(self, number: int, url: str, key: str) -> None:
        self.name, self.slot, self.over = f"filler-{number}", None, False
        self.since = 0.0
        self._job = rollmuxd.job(
            self.name, filler={"yield_s": 60}, pools={f"p{number}": {"driver": "mock"}}, url=url, api_key=key
        )
        self._thread = threading.Thread(target=self._work, name=self.name)
        self._thread.start()

    def _work(self) -> None:
        with self._job as job:
            while not self.over:
                with job.filler() as slot:
                    self.since, self.slot = time.monotonic(), slot
                    while not slot.should_yield and not self.over:
                        time.sleep(LOOK_S)
                    self.yielded = time.perf_counter()
                    self.slot = None

    def join(self) -> None:
        self._thread.join()


@contextmanager
def fillers(url: str, key: str, count: int) -> Iterator[list[Filler]]:
    made = [Filler(number, url, key) for number in range(count)]
    try:
        yield made
    finally:
        for one in made:
            one.over = True
        for one in made:
            one.join()


def live(times: int) -> list[float]:
    """Seconds from the call that has a node wanted until its filler knows."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rollmuxd-bench-"))
        hosts = [(f"h{number}", f"p{number}", 1.0) for number in range(NODES)]
        stack.enter_context(no_collector())
        made = stack.enter_context(daemon(Path(folder), hosts))
        key = asyncio.run(new_key(made))
        with fillers(f"http://127.0.0.1:{made.port}", key, NODES) as working:
            return asyncio.run(_measure(made.port, key, working, times))


async def _measure(port: int, key: str, working: list[Filler], times: int) -> list[float]:
    line = await Line.tcp(port)

    async def send(method: str, path: str, body: Json | None = None) -> Json:
        reply: Json = (await line.send(call(method, path, body, key=key))).json()
        return reply

    async def due(number: int, filler: Filler, count: int) -> float:
        pool = f"p{number}"
        phases = [{"name": "train", "pools": [pool], "seconds": 60}]
        began = time.perf_counter()
        job = (await send("POST", "/v1/jobs", {"name": f"due-{count}", "phases": phases, "wants": {pool: {}}}))["job"]
        async with asyncio.timeout(PATIENCE_S):
            while filler.slot is not None:
                await asyncio.sleep(LOOK_S)
        took = filler.yielded - began
        await send("DELETE", f"/v1/jobs/{job}")
        return took

    took: list[float] = []
    while len(took) < times:
        for number, filler in enumerate(working):
            async with asyncio.timeout(PATIENCE_S):
                while filler.slot is None or time.monotonic() < filler.since + POLLS_AFTER_S:
                    await asyncio.sleep(0.005)
            took.append(await due(number, filler, len(took)))
    return took
