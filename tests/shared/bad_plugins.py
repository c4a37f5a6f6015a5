"""Bad backends and drivers, to be put around good ones: what everything that uses a plugin must survive.

    backend   SlowBackend     answers late
              SilentBackend   never answers
              LyingBackend    shows every GPU clean, whatever is on it
              CrashingBackend raises what no contract allows
    driver    SlowResidency, SilentResidency, CrashingResidency likewise
              LyingResidency  says that it parked or discarded, and frees nothing

They wrap an opened plugin (``SlowBackend(inner)``) and pass on what they do not spoil; ``inner`` is there to be looked
at. ``only`` names the methods that are spoilt, by default all but ``close``.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

import anyio

from rollmuxd.core.config import DriverTraits
from rollmuxd.core.ids import HostId, JobId, LaunchId
from rollmuxd.core.inputs import GpuObservation
from rollmuxd.spi.backend import (
    Backend,
    HostConfig,
    Inventory,
    Observation,
    Output,
    Process,
    ProcessOrder,
    Ran,
    StartsProcesses,
    exchanges_bytes,
    runs_commands,
)
from rollmuxd.spi.errors import NotDone
from rollmuxd.spi.residency import Channel, Probed, Residency, StateOrder

BACKEND_METHODS: Final = ("inventory", "observe", "kill", "start", "stop", "alive", "output", "run", "exchange")
RESIDENCY_METHODS: Final = ("load", "park", "discard", "probe")


class WrappedBackend:
    """A backend that passes everything on; ``_before`` is where a fake comes in between."""

    def __init__(self, inner: Backend, *, only: Sequence[str] = BACKEND_METHODS) -> None:
        _check(only, BACKEND_METHODS)
        self.inner = inner
        self.only = tuple(only)
        #: how often each method was called
        self.calls: dict[str, int] = dict.fromkeys(BACKEND_METHODS, 0)

    @classmethod
    async def open(cls, hosts: Sequence[HostConfig], options: Mapping[str, Any]) -> Self:
        """A fake has nothing of its own to open. Raises TypeError."""
        raise TypeError(f"open the backend to be wrapped, then make {cls.__name__}(inner)")

    async def inventory(self, host: HostId) -> Inventory:
        """As inner."""
        await self._meet("inventory")
        return await self.inner.inventory(host)

    async def observe(self, host: HostId) -> Observation:
        """As inner."""
        await self._meet("observe")
        return await self.inner.observe(host)

    async def kill(self, host: HostId, pid: int, started: str, job: JobId, owner: str) -> bool:
        """As inner."""
        await self._meet("kill")
        return await self.inner.kill(host, pid, started, job, owner)

    def starts_on(self, host: HostId) -> bool:
        """As inner, if it starts processes at all."""
        return isinstance(self.inner, StartsProcesses) and self.inner.starts_on(host)

    async def start(self, host: HostId, order: ProcessOrder) -> Process:
        """As inner."""
        await self._meet("start")
        return await _starter(self.inner).start(host, order)

    async def stop(self, host: HostId, launch: LaunchId) -> bool:
        """As inner."""
        await self._meet("stop")
        return await _starter(self.inner).stop(host, launch)

    async def alive(self, host: HostId, launch: LaunchId) -> bool:
        """As inner."""
        await self._meet("alive")
        return await _starter(self.inner).alive(host, launch)

    async def output(self, host: HostId, launch: LaunchId, after: int, limit: int) -> Output:
        """As inner."""
        await self._meet("output")
        return await _starter(self.inner).output(host, launch, after, limit)

    async def run(
        self,
        host: HostId,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float = 60.0,
    ) -> Ran:
        """As inner."""
        await self._meet("run")
        return await runs_commands(self.inner).run(host, argv, env=env, stdin=stdin, timeout_s=timeout_s)

    async def exchange(
        self, host: HostId, address: str, port: int, data: bytes, *, most: int, trust: str = ""
    ) -> bytes:
        """As inner."""
        await self._meet("exchange")
        return await exchanges_bytes(self.inner).exchange(host, address, port, data, most=most, trust=trust)

    async def close(self) -> None:
        """As inner."""
        await self.inner.close()

    async def _meet(self, method: str) -> None:
        self.calls[method] += 1
        if method in self.only:
            await self._before(method)

    async def _before(self, method: str) -> None:
        pass


def _starter(inner: Backend) -> StartsProcesses:
    if not isinstance(inner, StartsProcesses):
        raise NotDone(f"{type(inner).__name__} starts no processes")
    return inner


class SlowBackend(WrappedBackend):
    """Answers ``delay_s`` seconds late."""

    def __init__(self, inner: Backend, delay_s: float, *, only: Sequence[str] = BACKEND_METHODS) -> None:
        super().__init__(inner, only=only)
        self.delay_s = delay_s

    async def _before(self, method: str) -> None:
        await anyio.sleep(self.delay_s)


class SilentBackend(WrappedBackend):
    """Never answers; can be cancelled."""

    async def _before(self, method: str) -> None:
        await anyio.sleep_forever()


class CrashingBackend(WrappedBackend):
    """Raises ``error``, which is nothing that the contract knows: a bug in somebody's backend."""

    def __init__(
        self, inner: Backend, error: Exception | None = None, *, only: Sequence[str] = BACKEND_METHODS
    ) -> None:
        super().__init__(inner, only=only)
        self.error = error if error is not None else RuntimeError("this backend has a bug")

    async def _before(self, method: str) -> None:
        raise self.error


class LyingBackend(WrappedBackend):
    """Shows every GPU clean. Nothing can protect from it but a witness, which is what it is good for."""

    async def observe(self, host: HostId) -> Observation:
        """Every GPU, with nothing on it."""
        observation = await super().observe(host)
        return Observation(
            gpus=tuple(GpuObservation(gpu=seen.gpu, used_mb=0) for seen in observation.gpus),
            boot_id=observation.boot_id,
        )


class WrappedResidency:
    """A driver that passes everything on; ``_before`` is where a fake comes in between."""

    def __init__(self, inner: Residency, *, only: Sequence[str] = RESIDENCY_METHODS) -> None:
        _check(only, RESIDENCY_METHODS)
        self.inner = inner
        self.only = tuple(only)
        self.traits: DriverTraits = inner.traits
        #: the orders that came in, each with its method
        self.told: list[tuple[str, StateOrder]] = []

    @classmethod
    async def open(cls, channel: Channel, options: Mapping[str, Any]) -> Self:
        """A fake has nothing of its own to open. Raises TypeError."""
        raise TypeError(f"open the driver to be wrapped, then make {cls.__name__}(inner)")

    async def load(self, order: StateOrder) -> None:
        """As inner."""
        if await self._meet("load", order):
            await self.inner.load(order)

    async def park(self, order: StateOrder) -> None:
        """As inner."""
        if await self._meet("park", order):
            await self.inner.park(order)

    async def discard(self, order: StateOrder) -> None:
        """As inner."""
        if await self._meet("discard", order):
            await self.inner.discard(order)

    async def probe(self, order: StateOrder) -> Probed:
        """As inner."""
        await self._meet("probe", order)
        return await self.inner.probe(order)

    async def close(self) -> None:
        """As inner."""
        await self.inner.close()

    async def _meet(self, method: str, order: StateOrder) -> bool:
        self.told.append((method, order))
        return await self._before(method) if method in self.only else True

    async def _before(self, method: str) -> bool:
        """Whether the call is to be passed on."""
        return True


class SlowResidency(WrappedResidency):
    """Does it ``delay_s`` seconds late."""

    def __init__(self, inner: Residency, delay_s: float, *, only: Sequence[str] = RESIDENCY_METHODS) -> None:
        super().__init__(inner, only=only)
        self.delay_s = delay_s

    async def _before(self, method: str) -> bool:
        await anyio.sleep(self.delay_s)
        return True


class SilentResidency(WrappedResidency):
    """Never comes back; can be cancelled."""

    async def _before(self, method: str) -> bool:
        await anyio.sleep_forever()
        raise AssertionError("forever is over")


class CrashingResidency(WrappedResidency):
    """Raises ``error``, which is nothing that the contract knows: a bug in somebody's driver."""

    def __init__(
        self, inner: Residency, error: Exception | None = None, *, only: Sequence[str] = RESIDENCY_METHODS
    ) -> None:
        super().__init__(inner, only=only)
        self.error = error if error is not None else RuntimeError("this driver has a bug")

    async def _before(self, method: str) -> bool:
        raise self.error


class LyingResidency(WrappedResidency):
    """Says that it parked or discarded, and frees nothing: an offload call that answers 200."""

    def __init__(self, inner: Residency, *, only: Sequence[str] = ("park", "discard")) -> None:
        super().__init__(inner, only=only)

    async def _before(self, method: str) -> bool:
        return False


def _check(only: Sequence[str], known: Sequence[str]) -> None:
    if unknown := [method for method in only if method not in known]:
        raise ValueError(f"{', '.join(unknown)} cannot be spoilt; it is one of {', '.join(known)}")
