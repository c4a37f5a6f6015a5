"""Our residency drivers, and the fakes around them, keep the contract that a stranger's must keep."""

from collections.abc import Mapping
from typing import Any

import pytest
from bad_plugins import SlowResidency, WrappedBackend, WrappedResidency
from faulty_mock import FaultyMock as MockBackend
from faulty_mock import FaultyResidency as MockResidency

from rollmuxd.spi import ChannelCommand, HostConfig, Residency, StateOrder, StateSpec
from rollmuxd.spi.contract import ResidencyContract, Rig
from rollmuxd.spi.fakes import FakeChannel
from rollmuxd_channel import ChannelResidency

GPUS = ("host1/gpu0", "host1/gpu1")
HOST = HostConfig(id="host1", gpus=GPUS)

#: 8000 MB at 2000 GB/s: a copy of both GPUs takes 8 ms.
STATE = StateSpec(pool="rollout", gpu_mb=8_000, residual_mb=1_000, ram_mb=16_000, driver="mock")
OPTIONS = {"copy_gbps": 2_000.0, "cold_s": 0.004}


class TestMockResidency(ResidencyContract):
    tolerance_mb = 0

    async def make(self) -> Rig:
        backend = await MockBackend.open([HOST], OPTIONS)
        residency = await MockResidency.open(FakeChannel(), {})
        return Rig(residency=residency, backend=backend, host="host1", gpus=GPUS, state=STATE)

    async def take_away(self, rig: Rig) -> None:
        mock_of(rig.backend).faults.add("lose")

    async def open_with(self, options: Mapping[str, Any]) -> Residency:
        return await MockResidency.open(FakeChannel(), options)


class TestMockResidencyThroughAWrappedBackend(TestMockResidency):
    async def make(self) -> Rig:
        rig = await super().make()
        rig.backend = WrappedBackend(rig.backend)
        return rig


class TestASlowResidencyIsSlowAndNothingElse(TestMockResidency):
    async def make(self) -> Rig:
        rig = await super().make()
        rig.residency = SlowResidency(rig.residency, 0.001)
        return rig


class TestAWrappedResidencyIsLikeItsInner(TestMockResidency):
    async def make(self) -> Rig:
        rig = await super().make()
        rig.residency = WrappedResidency(rig.residency)
        return rig


class TestChannelResidency(ResidencyContract):
    """Two ranks; the first of them has the mock's GPUs."""

    tolerance_mb = 0
    patience_s = 300.0

    async def make(self) -> Rig:
        backend = await MockBackend.open([HOST], OPTIONS)
        self.channel = FakeChannel()
        for job in ("a", "b"):
            self.channel.dial(f"j-{job}", 0, Rank(job, backend))
            self.channel.dial(f"j-{job}", 1)
        residency = await ChannelResidency.open(self.channel, {"discard_wait_s": 0.01})
        return Rig(residency=residency, backend=backend, host="host1", gpus=GPUS, state=STATE, ranks=2)

    async def take_away(self, rig: Rig) -> None:
        self.channel.hang_up("j-a", 1)
        type(self).patience_s = 0.05  # a park waits for its ranks for as long as it is let

    @pytest.fixture(autouse=True)
    def patience(self):
        yield
        type(self).patience_s = 300.0

    async def open_with(self, options: Mapping[str, Any]) -> Residency:
        return await ChannelResidency.open(FakeChannel(), options)


class Rank:
    """A rank that moves its bytes on the mock's GPUs."""

    def __init__(self, job: str, backend: MockBackend) -> None:
        self.job, self.backend = job, backend
        self.moves = MockResidency()

    async def __call__(self, command: ChannelCommand) -> None:
        order = StateOrder(
            order=command.order,
            kind=command.kind,
            job=f"j-{self.job}",
            run=1,
            owner="contract",
            name=self.job,
            pool=command.pool,
            node=command.node,
            host="host1",
            gpus=command.gpus,
            state=STATE,
            ranks=1,
            warm=command.warm,
            pid=0,
            started="",
            backend=self.backend,
        )
        await getattr(self.moves, command.kind.value)(order)


def mock_of(backend: Any) -> MockBackend:
    while not isinstance(backend, MockBackend):
        backend = backend.inner
    return backend
