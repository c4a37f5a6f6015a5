"""``MockResidency``: moves states on mock hosts, in the time that their bytes take."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Self

import anyio

from rollmuxd.spi import Backend, Channel, DriverTraits, NotDone, Probed, StateOrder
from rollmuxd.spi.options import Options
from rollmuxd_backend_mock.backend import MockBackend, MockHost
from rollmuxd_backend_mock.machine import StateBytes

#: no clock of a loop tells less
_NO_TIME_S: Final = 1e-6


class MockResidency:
    """Loads, parks and discards on hosts of backend ``mock``; no workload has to do anything.

    A copy takes (MB on each GPU x GPUs) / bandwidth, and copies on one host take turns. A cold start (nothing is
    parked on the host) takes ``cold_s`` and no turn. A call that is cancelled leaves the bytes on the GPUs, and can be
    repeated. Loading what is loaded, parking what is parked and discarding what is not there are done at once.
    """

    traits = DriverTraits(idempotent=True, probes=True, copies=True)

    @classmethod
    async def open(cls, channel: Channel, options: Mapping[str, Any]) -> Self:
        """It needs no channel. Raises ValueError for an option that it does not know."""
        Options("residency driver mock", options, ())
        return cls()

    async def load(self, order: StateOrder) -> None:
        """Bytes from host RAM, or a cold start. Raises NotDone (DoubleHold)."""
        await self._perform("load", order, self._load)

    async def park(self, order: StateOrder) -> None:
        """Bytes to host RAM. Raises NotDone (RamOverfull)."""
        await self._perform("park", order, self._park)

    async def discard(self, order: StateOrder) -> None:
        """Takes no time."""
        await self._perform("discard", order, self._discard)

    async def probe(self, order: StateOrder) -> Probed:
        """The mock always knows, but for an order that is being carried out at the moment."""
        _, mock = _reach(order)
        if order.order in mock.busy:
            return Probed(known=False)
        mock.machine.bury()
        if mock.machine.is_done(order):
            return Probed(known=True, done=True)
        state = mock.machine.of(order)
        begun = state is not None and state.order == order.order
        return Probed(known=True, error="it was begun and not finished" if begun else "it was not begun", begun=begun)

    async def close(self) -> None:
        """Nothing is kept open."""

    async def _perform(
        self, method: str, order: StateOrder, do: Callable[[StateOrder, MockBackend, MockHost], Awaitable[None]]
    ) -> None:
        backend, mock = _reach(order)
        mock.busy.add(order.order)
        try:
            await do(order, backend, mock)
        finally:
            mock.busy.discard(order.order)

    async def _load(self, order: StateOrder, backend: MockBackend, mock: MockHost) -> None:
        mock.machine.bury()
        before = mock.machine.of(order)
        # A park that was cut short has freed nothing yet.
        there = before is not None and before.place in ("loaded", "parking") and set(order.gpus) <= set(before.gpus)
        state = mock.machine.begin_load(order, backend.strangers(mock))
        if not there and (state.copied or order.source is not None):
            await _copy(mock, order.state.gpu_mb * len(order.gpus))
        elif not there:
            await _take(mock.machine.options.cold_s)
        mock.machine.end_load(order, state)

    async def _park(self, order: StateOrder, backend: MockBackend, mock: MockHost) -> None:
        mock.machine.bury()
        state = mock.machine.of(order)
        if state is None or state.place != "parked":
            state = mock.machine.begin_park(order)
            await _copy(mock, _leaving_mb(mock, state))
        mock.machine.end_park(order, state)

    async def _discard(self, order: StateOrder, backend: MockBackend, mock: MockHost) -> None:
        mock.machine.discard(order)


async def _copy(mock: MockHost, mb: int) -> None:
    async with mock.link:
        await _take(mb / 1000 / mock.machine.options.copy_gbps)


async def _take(seconds: float) -> None:
    """Take so long. What takes no time is done at once, and not a turn of the loop later."""
    if seconds > _NO_TIME_S:
        await anyio.sleep(seconds)


def _leaving_mb(mock: MockHost, state: StateBytes) -> int:
    stays = mock.machine.options.stays_mb(state.agreed_mb)
    return sum(max(0, mb - stays) for mb in state.gpus.values())


def mock_of(order: StateOrder) -> MockBackend | None:
    """The mock behind the order's backend, which a test may have wrapped (``inner``); None: it is another backend."""
    backend: Backend | None = order.backend
    while backend is not None and not isinstance(backend, MockBackend):
        backend = getattr(backend, "inner", None)
    return backend


def _reach(order: StateOrder) -> tuple[MockBackend, MockHost]:
    backend = mock_of(order)
    if backend is None:
        raise NotDone(
            f"residency driver mock moves states on hosts of backend mock only, and {order.host} is reached by "
            f"{type(order.backend).__name__}; give the state of job {order.name!r} another driver"
        )
    return backend, backend.host(order.host)
