"""How fast the simulator is: the paper's production trace, every phase of it, with the checkers on.

The floor of an event is the least that a discrete-event simulation does: take the next off a heap, put one back.
"""

import os
import sys
import time
from collections.abc import Callable
from heapq import heappop, heappush
from pathlib import Path
from typing import Final

from figures import Json, Rounds, at_most, median, say, short

from rollmuxd.sim.compare import Task, perform
from rollmuxd.sim.workload import Options
from rollmuxd.sim.workloads import read

sys.path.insert(0, str(Path(__file__).parents[1]))
from simkit import checked

SLO: Final = (1.1, 2.0)
#: events of the floor, and how many are on the heap at once: as many as a production run has
FLOOR_EVENTS, FLOOR_WIDTH = 200_000, 40


def run(budget_s: float, *, small: bool = False) -> Json:
    """Cost and phase fidelity on the production trace."""
    options = Options(slo=SLO, jobs=6 if small else 0)
    cost = Task("weave-production", options, "rollmux", "cost", "paper", 0)
    perform(cost)  # imports and caches
    took = []
    for _ in Rounds(budget_s / 10, least=3, most=20):
        took.append(perform(cost).wall_s)
    found: Json = {"cost_s": short(median(took)), "cost_runs": len(took)}
    say(f"sim: cost only {found['cost_s']} s")
    found |= _phase(Task("weave-production", options, "rollmux", "phase", "work", 0))
    found["targets"] = {
        "cost_s": at_most(found["cost_s"], 1),
        "phase_s": at_most(found["phase_s"], 30),
        "memory_grown_mb": at_most(found["memory_grown_mb"], 20),
    }
    return found


def _phase(task: Task) -> Json:
    floor = [_floor(FLOOR_EVENTS)]
    jobs = len(read(task.workload, task.options).draw(task.seed).jobs)
    rss: dict[int, float] = {}

    def watch(done: int) -> None:
        rss[done] = _rss_mb()
        if done % 20 == 0:
            say(f"sim: {done} of {jobs} jobs have ended")

    began = time.process_time()
    outcome = checked.perform(task, progress=watch)
    took = time.process_time() - began
    floor.append(_floor(FLOOR_EVENTS))
    rate = outcome.events / took
    return {
        "phase_s": short(outcome.wall_s),
        "phase_processor_s": short(took),
        "events": outcome.events,
        "facts": outcome.facts,
        "events_per_s": short(rate),
        "floor_events_per_s": short(median(floor)),
        "times_the_floor": short(median(floor) / rate),
        "simulated_hours": short(outcome.span_ms / 3_600_000),
        # a quarter of the jobs are through, and everything that is made once is made
        "memory_mb": short(rss[jobs]),
        "memory_grown_mb": short(rss[jobs] - rss[max(1, jobs // 4)]),
    }


def _floor(events: int) -> float:
    """Events in a second of processor time of a bare heap loop."""
    heap: list[tuple[int, int, Callable[[], None]]] = []
    for number in range(FLOOR_WIDTH):
        heappush(heap, (number, number, _nothing))
    began = time.process_time()
    for number in range(FLOOR_WIDTH, events):
        now, _, what = heappop(heap)
        what()
        heappush(heap, (now + FLOOR_WIDTH, number, what))
    return events / (time.process_time() - began)


def _nothing() -> None:
    pass


def _rss_mb() -> float:
    with open("/proc/self/statm", encoding="utf-8") as numbers:
        return int(numbers.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
