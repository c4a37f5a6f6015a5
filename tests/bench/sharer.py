"""A job of ``sharing.py``: a real client process whose phases wait by the clock.

Its one argument is a JSON object: ``job``, the keywords of ``rollmuxd.job``, and ``phases``, (name, seconds) in order.
It registers, prints ``ready``, and begins when it reads a line. It then prints the clock, at its beginning and after
each iteration, and ends with its input.

An asynchronous job has a thread that makes a batch every ``pace_s``, also while the job waits for its turn. At most two
batches are made or in the making that no step has trained on.
"""

import json
import select
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import rollmuxd

#: batches beyond those that were trained on
AHEAD: Final = 2


def main() -> None:
    """Iterate until the input ends."""
    asked: dict[str, Any] = json.loads(sys.argv[1])
    with rollmuxd.job(**asked["job"]) as job:
        print("ready", flush=True)
        sys.stdin.readline()
        print(time.monotonic(), flush=True)
        asynchronous = asked["job"].get("asynchronous")
        next_batch, trained = _rollouts(asynchronous["pace_s"]) if asynchronous else (_nothing, _nothing)
        while not select.select([sys.stdin], [], [], 0)[0]:
            next_batch()
            for phase, seconds in asked["phases"]:
                with job.phase(phase):
                    time.sleep(seconds)
            trained()
            print(time.monotonic(), flush=True)


def _rollouts(pace_s: float) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Start rollouts; returns what waits for a batch, and what says that a batch was trained on."""
    batches, room = threading.Semaphore(0), threading.Semaphore(AHEAD)

    def generate() -> None:
        due = time.monotonic()
        while True:
            if not room.acquire(blocking=False):
                room.acquire()
                due = time.monotonic()
            due += pace_s
            time.sleep(max(0.0, due - time.monotonic()))
            batches.release()

    threading.Thread(target=generate, daemon=True).start()
    return batches.acquire, room.release


def _nothing() -> None:
    """Wait for nothing: the rollouts are a phase."""


if __name__ == "__main__":
    main()
