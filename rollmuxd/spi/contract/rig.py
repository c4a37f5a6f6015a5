"""What the author of a residency driver gives to its contract: a rig to move states on, and how it is looked at."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import anyio
import pytest
from msgspec import Struct

from rollmuxd.core.ids import Fence, GpuId, HostId
from rollmuxd.core.model import OrderKind
from rollmuxd.core.spec import StateSpec
from rollmuxd.spi.backend import Backend
from rollmuxd.spi.contract.moments import Cancelling
from rollmuxd.spi.residency import Residency, StateOrder


class Rig(Struct):
    """A residency driver with a host to move states on."""

    residency: Residency
    #: reaches the host, and sees what the driver does
    backend: Backend
    host: HostId
    #: GPUs of the host that nothing else uses; with two or more, two jobs are moved at a time
    gpus: tuple[GpuId, ...]
    #: what is moved: it must fit onto each of the GPUs, and (twice) into host RAM
    state: StateSpec
    ranks: int = 1
    #: the workload's process, where the driver needs it
    pid: int = 0
    started: str = ""


class GivenDriver(Cancelling):
    """What an author gives, and what the sentences have in common."""

    #: seconds after which an order counts as hung
    patience_s: ClassVar[float] = 300.0
    #: used memory above what was agreed that still counts as clean
    tolerance_mb: ClassVar[int] = 300
    #: whether the rig's backend sees what the driver moves (turn off only where nothing real is moved)
    sees_memory: ClassVar[bool] = True

    # ---- what you give ------------------------------------------------------------------------------------------

    async def make(self) -> Rig:
        """A rig with nothing loaded, its workload running."""
        raise NotImplementedError("say how the driver is made: async def make(self)")

    async def take_away(self, rig: Rig) -> None:
        """Make the host, or the workload, unreachable."""
        pytest.skip("take_away is not given")

    async def open_with(self, options: Mapping[str, Any]) -> Residency:
        """The driver, opened with these options."""
        pytest.skip("open_with is not given")

    # ---- how it is checked --------------------------------------------------------------------------------------

    _ids: ClassVar[Iterator[int]] = itertools.count(1)

    def order(
        self,
        rig: Rig,
        kind: OrderKind,
        *,
        job: str = "a",
        gpus: tuple[GpuId, ...] | None = None,
        warm: bool = False,
    ) -> StateOrder:
        """A new order, as the daemon would make it."""
        on = rig.gpus if gpus is None else gpus
        number = next(self._ids)
        return StateOrder(
            order=f"o{number}",
            stamp=Fence(1, number),
            kind=kind,
            job=f"j-{job}",
            run=1,
            owner="contract",
            name=job,
            pool=rig.state.pool,
            node="+".join(on),
            host=rig.host,
            gpus=on,
            state=rig.state,
            ranks=rig.ranks,
            warm=warm,
            pid=rig.pid,
            started=rig.started,
            backend=rig.backend,
        )

    async def _tell(self, rig: Rig, order: StateOrder) -> None:
        with anyio.fail_after(self.patience_s):
            await getattr(rig.residency, order.kind.value)(order)

    async def _used(self, rig: Rig) -> dict[GpuId, int]:
        observation = await rig.backend.observe(rig.host)
        return {seen.gpu: seen.used_mb for seen in observation.gpus if seen.gpu in rig.gpus}

    async def _is_loaded(self, rig: Rig) -> None:
        if self.sees_memory:
            for gpu, mb in (await self._used(rig)).items():
                assert mb >= rig.state.gpu_mb - self.tolerance_mb, (
                    f"{gpu} should have {rig.state.gpu_mb} MB, and has {mb}"
                )

    async def _is_clean(self, rig: Rig, residual_mb: int | None = None) -> None:
        agreed = rig.state.residual_mb if residual_mb is None else residual_mb
        for gpu, mb in (await self._used(rig)).items():
            assert mb <= agreed + self.tolerance_mb, f"{gpu} should be clean but for {agreed} MB, and has {mb}"

    async def _end(self, rig: Rig) -> None:
        await rig.residency.close()
        await rig.backend.close()
