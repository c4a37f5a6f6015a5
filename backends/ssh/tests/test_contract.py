"""The ssh backend keeps the contract, over OpenSSH's server and over asyncssh's, with real processes behind both."""

import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S

from rollmuxd.spi import HostConfig
from rollmuxd.spi.contract import BackendContract
from rollmuxd_backend_ssh import SshBackend

GPUS = ("box/gpu0", "box/gpu1")


class SshContract(BackendContract):
    host = "box"
    cancelled_after_turns = range(0, 12, 4)  # each call is a program that is started
    cancelled_after_s = (0.002, 0.02, 0.05)
    starts_processes = True

    @pytest.fixture(autouse=True)
    def place(self, tmp_path, made_up, keys):
        self.state, self.made_up, self.keys = tmp_path, made_up, keys
        self.ours = []
        yield
        for process in self.ours:
            process.kill()
            process.wait()

    def options(self):
        return {
            "state_dir": str(self.state),
            "made_up_gpus": self.made_up(),
            "owns_sessions": True,
            "starts_processes": self.starts_processes,
            "logs": str(self.state / "logs"),
            "config": str(self.keys.config),
            "python": sys.executable,
            "connect_s": PATIENCE_S,
        }

    async def make(self):
        await self.serve()
        return await SshBackend.open([HostConfig(id="box", gpus=GPUS)], self.options())

    async def make_again(self):
        return await self.make()

    async def make_unreachable(self):
        backend = await self.make()
        await self.take_away(backend)
        return backend

    async def open_with(self, options):
        return await SshBackend.open([HostConfig(id="box", gpus=GPUS, options=options)], self.options())

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


class TestOverOpenSsh(SshContract):
    @pytest.fixture(autouse=True)
    def server(self, place, sshd, keys):
        self.sshd = sshd()
        keys.add("box", "127.0.0.1", self.sshd.port)

    async def serve(self):
        if self.sshd.process is None:
            self.sshd.start()

    async def take_away(self, backend):
        self.sshd.stop()

    async def bring_back(self, backend):
        self.sshd.start()


class TestOverAsyncssh(SshContract):
    starts_processes = False  # what does it is on the host, whoever serves it

    @pytest.fixture(autouse=True)
    def server(self, place, own_server, keys):
        self.own = own_server
        keys.add("box", "127.0.0.1", own_server.port)
        self.running = False

    async def serve(self):
        if not self.running:
            await self.own.start()
            self.running = True

    async def take_away(self, backend):
        await self.own.stop()

    async def bring_back(self, backend):
        await self.own.start()
