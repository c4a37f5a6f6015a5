"""What reaching nodes of an allocation costs: python backends/slurm/tests/measure.py. Prints one JSON object.

``new_srun_ms`` is what a call would cost without the kept step, before it does anything. Medians, of calls in turn.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "shared"))

from slurm_cluster import Cluster, short_folder

from rollmuxd.spi import HostConfig
from rollmuxd_backend_slurm import SlurmBackend, controller

ROUNDS = 30
GPUS = [{"uuid": f"GPU-{number}", "name": "NVIDIA H20", "total_mb": 80_000} for number in range(8)]


async def main():
    with short_folder() as folder, tempfile.TemporaryDirectory() as state, Cluster(folder, ("rx1",)) as cluster:
        gpus = Path(state) / "gpus.json"
        gpus.write_text(json.dumps({"gpus": GPUS}))
        allocation = cluster.allocate("--exclusive", "--gres=gpu:2")
        options = {"allocation": allocation, "conf": str(cluster.config), "made_up_gpus": str(gpus), "connect_s": 60}
        took = {"open": [], "run_true": [], "look": [], "new_srun": []}

        async def timed(name, call):
            began = time.perf_counter()
            await call
            took[name].append((time.perf_counter() - began) * 1000)

        for _ in range(ROUNDS // 5):
            backend = await SlurmBackend.open([HostConfig(id="rx1")], {**options, "python": sys.executable})
            await timed("open", backend.run("rx1", ("true",)))
            for _ in range(5):
                await timed("run_true", backend.run("rx1", ("true",)))
                await timed("look", backend.observe("rx1"))
                srun = (*controller.step(backend.options["rx1"], backend._node("rx1")), "true")
                await timed("new_srun", asyncio.to_thread(subprocess.run, srun, env=cluster.env, check=True))
            await backend.close()
    print(json.dumps({f"{name}_ms": round(statistics.median(values), 1) for name, values in took.items()}, indent=2))


asyncio.run(main())
