"""A trainer that the daemon starts, and starts again: it goes round until it is ended. ``crash``: it fails once.

``exit``: it has enough after a few rounds, and says so as programs do.
"""

import sys
import time
from pathlib import Path

import rollmuxd

with rollmuxd.job("again") as job:
    for step in range(100_000):
        for phase in ("rollout", "train"):
            with job.phase(phase):
                time.sleep(0.05)
        if "crash" in sys.argv and step == 3 and not Path("crashed").exists():
            Path("crashed").touch()
            raise RuntimeError("out of luck")
        if "exit" in sys.argv and step == 3:
            sys.exit()
