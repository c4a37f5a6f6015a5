"""``make -s machine BUDGET_S=N``: the state machine of ``test_machine.py``, seed after seed, for a given time.

On all cores; one JSON object on stdout, and 1 if a sentence was not true. A sequence that breaks one is made shorter by
leaving steps out in a bounded time, and printed as it can be typed in a test.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from random import Random
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
import test_machine
from simkit.drawn import Failed

CORES: Final = len(os.sched_getaffinity(0))
#: sequences for each seed, and steps in each
EXAMPLES: Final = 50
STEPS: Final = 120
#: seconds that are spent on making one shorter
SHORTEN_S: Final = 60.0


def play(steps: list[str]) -> str:
    """What a sequence comes to: "", or the first words of what is wrong."""
    machine = test_machine.ClientsOperatorsAndBackends()
    try:
        for step in steps:
            machine.take(step, vars(test_machine))
        machine.end()
    except Exception as no:
        return f"{type(no).__name__}: {no}"
    return ""


def shorter(steps: list[str], wrong: str, until: float) -> list[str]:
    """Fewer steps (the first one stays) with which the same thing is wrong: its first word is."""
    size = len(steps) // 2
    while size and time.monotonic() < until:
        at, smaller = 1, False
        while at < len(steps) and time.monotonic() < until:
            fewer = steps[:at] + steps[at + size :]
            if play(fewer).split()[:3] == wrong.split()[:3]:
                steps, smaller = fewer, True
            else:
                at += size
        if not smaller or size > 1:
            size //= 2
    return steps


def hunt(number: int) -> dict[str, Any]:
    """The sequences of one seed; what is wrong with one, and its steps."""
    for sequence in range(EXAMPLES):
        try:
            test_machine.ClientsOperatorsAndBackends.plays(Random(f"{number} {sequence}"), STEPS)
        except Failed as no:
            steps = shorter(no.steps, no.wrong, time.monotonic() + SHORTEN_S)
            return {"seed": number, "what": no.wrong[:400], "steps": steps}
    return {}


def hunt_for(budget_s: float, first: int) -> Iterator[dict[str, Any]]:
    """Seeds, until the time is over."""
    until = time.monotonic() + budget_s
    with ProcessPoolExecutor(CORES, mp_context=multiprocessing.get_context("spawn")) as pool:
        running: set[Future[dict[str, Any]]] = set()
        while time.monotonic() < until or running:
            while time.monotonic() < until and len(running) < CORES:
                running.add(pool.submit(hunt, first))
                first += 1
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()


def main() -> int:
    """Run, and print."""
    parser = argparse.ArgumentParser(description="The state machine with many seeds; one JSON object on stdout.")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds (default: %(default)g)")
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first seed (default: %(default)d)")
    asked = parser.parse_args()
    seeds, failed = 0, []
    for found in hunt_for(asked.budget, asked.first):
        seeds += 1
        if found:
            failed.append(found)
            print(f"machine: seed {found['seed']}: {found['what']}", *found["steps"], sep="\n  ", file=sys.stderr)
        print(f"machine: {seeds} seeds, {len(failed)} failed", file=sys.stderr, flush=True)
    answer = {"seeds": seeds, "first_seed": asked.first, "sequences": seeds * EXAMPLES, "violations": failed}
    print(json.dumps(answer, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
