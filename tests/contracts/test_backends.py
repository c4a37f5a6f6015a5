"""Our backends, and the fakes around them, keep the contract that a stranger's must keep."""

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from bad_plugins import SlowBackend, WrappedBackend
from faulty_mock import FaultyMock as MockBackend

from rollmuxd.cli.processes import started as start_time
from rollmuxd.spi import Backend, GpuId, HostConfig
from rollmuxd.spi.contract import BackendContract
from rollmuxd_backend_mock.processes import alive

HOST = HostConfig(id="host1", gpus=("host1/gpu0", "host1/gpu1"))
OPTIONS = {"owns_sessions": True, "starts_processes": True}


def mock_of(backend: Any) -> MockBackend:
    while not isinstance(backend, MockBackend):
        backend = backend.inner
    return backend


class TestMockBackend(BackendContract):
    async def make(self) -> Backend:
        return await MockBackend.open(
            [HOST], {**OPTIONS, "memory": str(self.folder / "memory.json"), "logs": str(self.folder)}
        )

    async def make_again(self) -> Backend:
        return await self.make()

    async def make_unreachable(self) -> Backend:
        backend = await self.make()
        await self.take_away(backend)
        return backend

    async def take_away(self, backend: Backend) -> None:
        mock_of(backend).faults.add("lose", host=self.host)

    async def bring_back(self, backend: Backend) -> None:
        mock_of(backend).faults.clear()

    async def occupy(self, backend: Backend) -> tuple[GpuId, int]:
        mock_of(backend).faults.occupy("host1/gpu1", 5_000)
        return "host1/gpu1", 5_000

    async def open_with(self, options: Mapping[str, Any]) -> Backend:
        return await MockBackend.open([HostConfig(id=HOST.id, gpus=HOST.gpus, options=options)], {})

    @pytest.fixture(autouse=True)
    def processes(self, tmp_path):
        self.started, self.folder = [], tmp_path
        yield
        for process in self.started:
            process.kill()
            process.wait()

    async def start_process(self, backend: Backend) -> tuple[int, str]:
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        self.started.append(process)
        started = start_time(process.pid)
        if started is None:
            pytest.skip("this system does not show start times of processes")
        return process.pid, started

    async def is_running(self, backend: Backend, pid: int) -> bool:
        return alive(pid, "")


class TestASlowBackendIsSlowAndNothingElse(TestMockBackend):
    async def make(self) -> Backend:
        return SlowBackend(await super().make(), 0.002)


class TestAWrappedBackendIsLikeItsInner(TestMockBackend):
    async def make(self) -> Backend:
        return WrappedBackend(await super().make())
