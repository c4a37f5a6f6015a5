"""The local backend keeps the contract, on GPUs that are made up in a file, with real processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rollmuxd.spi import HostConfig
from rollmuxd.spi.contract import BackendContract
from rollmuxd_backend_local import LocalBackend

HOST = HostConfig(id="box", gpus=("box/gpu0", "box/gpu1"))


class TestLocalBackend(BackendContract):
    host = "box"

    @pytest.fixture(autouse=True)
    def place(self, tmp_path):
        self.state = tmp_path / "state"
        self.state.mkdir()
        self.file = tmp_path / "gpus.json"
        self.box = {"gpus": [{"uuid": f"GPU-{number}", "total_mb": 80_000} for number in range(2)]}
        self.write()
        self.ours = []
        yield
        for process in self.ours:
            process.kill()
            process.wait()

    def write(self):
        beside = self.file.with_suffix(".new")
        beside.write_text(json.dumps(self.box))
        beside.replace(self.file)

    def options(self):
        return {
            "state_dir": str(self.state),
            "made_up_gpus": str(self.file),
            "owns_sessions": True,
            "starts_processes": True,
        }

    async def make(self):
        return await LocalBackend.open([HOST], self.options())

    async def make_again(self):
        return await self.make()

    async def occupy(self, backend):
        self.box["gpus"][1]["processes"] = [{"pid": 1, "mb": 5_000}]
        self.write()
        return "box/gpu1", 5_000

    async def open_with(self, options):
        return await LocalBackend.open([HostConfig(id="box", gpus=HOST.gpus, options=options)], self.options())

    async def start_process(self, backend):
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        self.ours.append(process)
        stat = Path(f"/proc/{process.pid}/stat").read_text()
        return process.pid, stat.rpartition(")")[2].split()[19]

    async def is_running(self, backend, pid):
        return next(one for one in self.ours if one.pid == pid).poll() is None

    async def take_away(self, backend):
        """As near as a machine can come to being away from itself: its driver is."""
        self.box["errors"] = {"start": 9, "count": 9}
        self.write()

    async def bring_back(self, backend):
        del self.box["errors"]
        self.write()

    async def make_unreachable(self):
        backend = await self.make()
        await self.take_away(backend)
        return backend

    @pytest.mark.asyncio
    async def test_commands_and_exchanges_on_a_host_that_is_away_are_contact_lost(self):
        pytest.skip("this machine is never away from itself")
