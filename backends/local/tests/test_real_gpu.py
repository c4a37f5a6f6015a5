"""On a machine with a GPU: what is seen of it is what is there. Skipped without one."""

import os

import pytest

from rollmuxd.spi import HostConfig
from rollmuxd_backend_local import LocalBackend
from rollmuxd_backend_local.onhost import gpus, machine

pytestmark = pytest.mark.gpu


@pytest.fixture
def there():
    """What is seen of the machine's GPUs."""
    try:
        return gpus.look(gpus.nvml())["gpus"]
    except machine.Unknown as why:
        pytest.skip(f"no GPU here: {why}")


@pytest.mark.asyncio
async def test_memory_that_is_taken_is_seen_with_its_process_and_seen_gone(there):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    backend = await LocalBackend.open([HostConfig(id="box", gpus=("box/gpu0",))], {})
    torch.zeros(1, device="cuda:0")  # the context
    before = (await backend.observe("box")).gpus[0].used_mb
    taken = torch.zeros(2 * 10**9, dtype=torch.uint8, device="cuda:0")
    seen = (await backend.observe("box")).gpus[0]
    assert 2_000 <= seen.used_mb - before < 2_200
    if not machine.in_a_pid_namespace():
        assert any(f"pid {os.getpid()} " in process for process in seen.processes)
    del taken
    torch.cuda.empty_cache()
    assert (await backend.observe("box")).gpus[0].used_mb - before < 100
