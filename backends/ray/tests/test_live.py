"""The ray backend, over a real cluster: a head and two nodes that may be killed; GPUs are made up in a file.

All live tests are in this file, so that they share one cluster.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from rollmuxd.spi import HostConfig, contract
from rollmuxd.spi.contract import BackendContract
from rollmuxd_backend_ray import RayBackend
from rollmuxd_backend_ray.line import Line

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

GPUS = ("box/gpu0", "box/gpu1")
BOX = HostConfig(id="box", gpus=GPUS)


class Sharing(RayBackend):
    """One that finds an envoy there: to start one for each test would take most of the time."""

    serving = ""

    def _new_line(self, options):
        return Line(options.address, options.connect_s, serving=self.serving)


class TestRayBackend(BackendContract):
    host = "box"

    @pytest.fixture(autouse=True)
    def place(self, live, tmp_path, made_up, monkeypatch):
        monkeypatch.setattr(contract, "_TURNS", range(0, 12, 4))  # each call is a program that is started
        monkeypatch.setattr(contract, "_SECONDS", (0.002, 0.02, 0.05))
        self.live, self.state, self.made_up = live, tmp_path, made_up
        self.ours = []
        yield
        for process in self.ours:
            process.kill()
            process.wait()

    def options(self):
        return {
            "address": self.live.address,
            "state_dir": str(self.state),
            "made_up_gpus": self.made_up(),
            "owns_sessions": True,
            "starts_processes": True,
            "logs": str(self.state / "logs"),
        }

    async def make(self):
        self.live.start("box")
        Sharing.serving = self.live.envoy()
        return await Sharing.open([BOX], self.options())

    async def make_again(self):
        return await self.make()

    async def make_unreachable(self):
        """A node that no cluster has yet."""
        Sharing.serving = self.live.envoy()
        return await Sharing.open([BOX], {**self.options(), "node": "nobody"})

    async def open_with(self, options):
        return await RayBackend.open([HostConfig(id="box", gpus=GPUS, options=options)], self.options())

    async def take_away(self, backend):
        self.live.kill("box")

    async def bring_back(self, backend):
        self.live.start("box")

    async def occupy(self, backend):
        self.made_up([{"uuid": "GPU-0", "total_mb": 80_000}, {"uuid": "GPU-1", "total_mb": 80_000, "more_mb": 5_000}])
        return "box/gpu1", 5_000

    async def start_process(self, backend):
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        self.ours.append(process)
        stat = Path(f"/proc/{process.pid}/stat").read_text()
        return process.pid, stat.rpartition(")")[2].split()[19]

    async def is_running(self, backend, pid):
        return next(one for one in self.ours if one.pid == pid).poll() is None
