"""A job of ``sharing.py``: a real client process whose phases wait by the clock.

Its one argument is a JSON object: ``job``, the keywords of ``rollmuxd.job``, and ``phases``, (name, seconds) in order.
It registers, prints ``ready``, and begins when it reads a line. It then prints the clock, at its beginning and after
each iteration, and ends with its input.
"""

import json
import select
import sys
import time
from typing import Any

import rollmuxd


def main() -> None:
    """Iterate until the input ends."""
    asked: dict[str, Any] = json.loads(sys.argv[1])
    with rollmuxd.job(**asked["job"]) as job:
        print("ready", flush=True)
        sys.stdin.readline()
        print(time.monotonic(), flush=True)
        while not select.select([sys.stdin], [], [], 0)[0]:
            for phase, seconds in asked["phases"]:
                with job.phase(phase):
                    time.sleep(seconds)
            print(time.monotonic(), flush=True)


if __name__ == "__main__":
    main()
