"""``make -s swarm``: random histories for a given time, on all cores; one JSON object, and 1 if a promise was broken.

With ``ARGS="--histories 100000"`` it ends when so many are done, if that comes first.

A history that fails is made smaller, and written to a file that ``tests/swarm/found`` may keep as a regression.
"""

import argparse
import gc
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, Final

from rollmuxd.cli.sim.processes import end_with_parent

sys.path.insert(0, str(Path(__file__).parents[1]))
from simkit import swarm

CORES: Final = len(os.sched_getaffinity(0))
#: histories that a process is given at a time
CHUNK: Final = 5


def begin() -> None:
    """A process begins: what is imported stays, and hardly anything of a history is garbage before its end.

    A world is one cycle, which nothing but the collector frees: a chunk of them at a time.
    """
    end_with_parent()
    gc.freeze()
    gc.disable()


def chunk(first: int) -> tuple[int, int, dict[str, int], list[tuple[int, str]]]:
    """Some histories: how many, their events, what went wrong in them on purpose, and what broke."""
    events, faults, failed = 0, dict.fromkeys(("deaths", "outages", "daemon deaths"), 0), []
    gc.collect()
    for seed in range(first, first + CHUNK):
        history = swarm.draw(seed)
        try:
            world = swarm.run(history)
        except Exception as no:
            failed.append((seed, f"{type(no).__name__}: {str(no).partition(chr(10))[0]}"[:400]))
            continue
        events += world.outcome.events
        for name in faults:
            faults[name] += world.counted.get(name, 0)
    return CHUNK, events, faults, failed


def swarm_for(
    budget_s: float, first: int, histories: float
) -> Iterator[tuple[int, int, dict[str, int], list[tuple[int, str]]]]:
    """Chunks, until the time is over or there are so many histories."""
    until, last = time.monotonic() + budget_s, first + histories
    # spawned, not forked: a child gets nothing of its parent but the seeds
    with ProcessPoolExecutor(CORES, multiprocessing.get_context("spawn"), begin) as pool:
        running: set[Future[Any]] = set()
        while (time.monotonic() < until and first < last) or running:
            while time.monotonic() < until and first < last and len(running) < 2 * CORES:
                running.add(pool.submit(chunk, first))
                first += CHUNK
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()


def main() -> int:
    """Run, and print."""
    parser = argparse.ArgumentParser(description="Random histories with faults; one JSON object on stdout.")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds (default: %(default)g)")
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first seed (default: %(default)d)")
    parser.add_argument(
        "--histories", type=int, default=math.inf, help=f"so many at most, by {CHUNK} (default: any number)"
    )
    parser.add_argument("--keep", type=Path, default=Path("swarm-found"), help="where failing histories are written")
    asked = parser.parse_args()
    began = time.monotonic()
    histories, events, faults, failed = 0, 0, {"deaths": 0, "outages": 0, "daemon deaths": 0}, []
    for count, handled, went_wrong, broke in swarm_for(asked.budget, asked.first, asked.histories):
        histories, events, failed = histories + count, events + handled, failed + broke
        for name, times in went_wrong.items():
            faults[name] += times
        for seed, what in broke:
            print(f"swarm: seed {seed}: {what}", file=sys.stderr, flush=True)
        if histories % (200 * CHUNK) == 0:
            took = time.monotonic() - began
            print(f"swarm: {histories} histories in {took:.0f} s, {len(failed)} failed", file=sys.stderr, flush=True)
    took = time.monotonic() - began
    found = []
    for seed, what in failed[:3]:
        smaller = swarm.shrink(swarm.draw(seed))
        asked.keep.mkdir(parents=True, exist_ok=True)
        path = asked.keep / f"{seed}.json"
        path.write_bytes(swarm.encode(smaller))
        found.append({"seed": seed, "what": what, "shortest": str(path), "jobs": len(smaller.workload.jobs)})
    answer = {
        "histories": histories,
        "first_seed": asked.first,
        "violations": len(failed),
        "lost": sum("replay_gives" in what for _, what in failed),
        "histories_per_minute": round(60 * histories / took),
        "inputs": events,
        "faults": faults,
        "failing_seeds": [seed for seed, _ in failed][:100],
        "shortest": found,
        "took_s": round(took, 1),
    }
    print(json.dumps(answer, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
