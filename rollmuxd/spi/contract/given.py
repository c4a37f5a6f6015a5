"""What the author of a backend gives to its contract, and how its sentences look at a host."""

import os
import pwd
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar, TypeVar

import anyio
import pytest

from rollmuxd.core.ids import GpuId, HostId
from rollmuxd.spi.backend import Backend, Observation
from rollmuxd.spi.contract.moments import Cancelling
from rollmuxd.spi.errors import ContactLost

T = TypeVar("T")


class GivenBackend(Cancelling):
    """What an author gives, and what the sentences have in common."""

    #: a host that the backend is made for, and that is there
    host: ClassVar[HostId] = "host1"
    #: a job's owner whose processes of :meth:`start_process` are: most backends know one by the name of a login
    owner: ClassVar[str] = pwd.getpwuid(os.getuid()).pw_name
    #: seconds after which a call on a healthy host, or a cancelled one, counts as hung
    patience_s: ClassVar[float] = 300.0

    # ---- what you give ------------------------------------------------------------------------------------------

    async def make(self) -> Backend:
        """An opened backend for at least ``host``."""
        raise NotImplementedError("say how the backend is made: async def make(self)")

    async def make_unreachable(self) -> Backend:
        """A backend opened for ``host`` that was away before, and still is."""
        pytest.skip("make_unreachable is not given")

    async def take_away(self, backend: Backend) -> None:
        """Make ``host`` unreachable."""
        pytest.skip("take_away is not given")

    async def bring_back(self, backend: Backend) -> None:
        """Make ``host`` reachable again."""
        pytest.skip("bring_back is not given")

    async def occupy(self, backend: Backend) -> tuple[GpuId, int]:
        """Put some memory to use on a GPU of ``host``; which GPU, and how many MB at least."""
        pytest.skip("occupy is not given")

    async def start_process(self, backend: Backend) -> tuple[int, str]:
        """Start a process on ``host`` that is the backend's to end for ``owner``; its pid and start time."""
        pytest.skip("start_process is not given")

    async def is_running(self, backend: Backend, pid: int) -> bool:
        """Whether that process still runs."""
        pytest.skip("is_running is not given")

    async def make_again(self) -> Backend:
        """The backend as a daemon finds it that was restarted after :meth:`make`."""
        pytest.skip("make_again is not given")

    async def open_with(self, options: Mapping[str, Any]) -> Backend:
        """A backend for ``host`` with these in ``[hosts.options]``, besides what it needs."""
        pytest.skip("open_with is not given")

    # ---- how it is checked --------------------------------------------------------------------------------------

    async def _see(self, backend: Backend) -> Observation:
        """An observation that holds to the contract."""
        with anyio.fail_after(self.patience_s):
            inventory = await backend.inventory(self.host)
            observation = await backend.observe(self.host)
        seen = sorted(gpu.gpu for gpu in observation.gpus)
        there = sorted(info.gpu for info in inventory.gpus)
        assert there, f"host {self.host} has no GPUs; the contract needs one that has"
        assert len(set(there)) == len(there), f"the inventory has a GPU twice: {there}"
        assert seen == there, f"observed were {seen}, and the host has {there}"
        assert all(gpu.startswith(f"{self.host}/") for gpu in there), f"a GPU is named host/gpuN, and these are {there}"
        assert observation.boot_id, "an observation needs a boot id"
        return observation

    async def _is_lost(self, backend: Backend, host: HostId) -> None:
        for call in (backend.observe, backend.inventory):
            with anyio.fail_after(self.patience_s), pytest.raises(ContactLost):
                await call(host)

    async def _end(self, backend: Backend) -> None:
        await backend.close()

    async def _until(self, ask: Callable[[], Awaitable[T]], enough: Callable[[T], object]) -> T:
        """Ask again and again until the answer will do."""
        with anyio.fail_after(self.patience_s):
            while not enough(ran := await ask()):  # noqa: ASYNC110  # what a host does has no event here
                await anyio.sleep(0.02)
        return ran
