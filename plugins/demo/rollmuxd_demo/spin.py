"""Counts on one core in agreed windows of time, and prints its rate in each: ``python spin.py CORE SECONDS 101``.

Run by the demo, by its path, as a process of its own. It says ``ready``, and reads when to begin: a monotonic time,
which all processes of a machine share. The windows of ``SECONDS`` follow one another from then on; it counts in those
with a 1, sleeps in the others. The rate of a window that was over before it came to it is 0.
"""

import os
import sys
import time


def main(core: int, seconds: float, windows: str) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    print("ready", flush=True)
    at = float(sys.stdin.readline())
    for number, active in enumerate(windows):
        begins = at + number * seconds
        time.sleep(max(0.0, begins - time.monotonic()))
        if active == "1":
            print(_rate(begins + seconds))


def _rate(until: float) -> float:
    began, rounds = time.monotonic(), 0
    while time.monotonic() < until:
        sum(range(1000))
        rounds += 1
    return rounds / (time.monotonic() - began)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
