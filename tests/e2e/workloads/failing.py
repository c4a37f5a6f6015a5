"""A whole program that fails in a phase, once a file called ``fail`` is in its home; its name is its argument."""

import sys
import time
from pathlib import Path

import rollmuxd

state = {"gpu_gb": 2, "ram_gb": 2, "driver": "mock"}
with rollmuxd.job(sys.argv[1], rollout=state, train=state) as job, job.phase("rollout"):
    while not (Path.home() / "fail").exists():
        time.sleep(0.01)
    1 / 0  # noqa: B018
