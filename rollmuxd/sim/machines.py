"""What is really there: bytes on GPUs, boots of hosts, moves under way. Whatever the scheduler believes.

Backends see it and drivers change it; the scheduler hears of it only through them.
"""

from collections.abc import Iterable, Sequence

from msgspec import Struct

from rollmuxd.core.errors import BrokenInvariant
from rollmuxd.core.ids import GpuId, HostId, JobId, OrderId, PoolName
from rollmuxd.core.inputs import GpuObservation
from rollmuxd.core.model import OrderKind
from rollmuxd.sim.inventory import BOOT, Inventory

#: what is agreed to stay on a GPU when a state is parked
LEFT = "|left"


class Move(Struct, gc=False):
    """An order, as its driver has it."""

    order: OrderId
    kind: OrderKind
    job: JobId
    run: int
    #: what it moves: ``job|run|pool|node``
    key: str
    host: HostId
    gpus: tuple[GpuId, ...]
    gpu_mb: int
    residual_mb: int


def key_of(job: JobId, run: int, pool: PoolName, node: str) -> str:
    """The key of what a run keeps on a node for a pool."""
    return f"{job}|{run}|{pool}|{node}"


class Machines:
    """Every GPU with what is on it, MB by key; every host with its boot."""

    def __init__(self, inventory: Inventory) -> None:
        self.gpus_of = inventory.gpus_of
        self.on_gpu: dict[GpuId, dict[str, int]] = {gpu: {} for gpus in self.gpus_of.values() for gpu in gpus}
        self.boot: dict[HostId, str] = dict.fromkeys(self.gpus_of, BOOT)

    def load(self, move: Move) -> None:
        """The state is on these GPUs, from the moment that its load begins."""
        for gpu in move.gpus:
            self.on_gpu[gpu][move.key] = move.gpu_mb
            self.on_gpu[gpu].pop(move.key + LEFT, None)

    def take(self, move: Move, *, residual_mb: int = 0) -> None:
        """The state leaves wherever it is on its host, but for what is agreed to stay of it."""
        for gpu in self.gpus_of[move.host]:
            there = self.on_gpu[gpu]
            used = there.pop(move.key, None)
            if used is None:
                if not residual_mb:
                    there.pop(move.key + LEFT, None)
            elif residual_mb:
                there[move.key + LEFT] = residual_mb

    def give_back(self, job: JobId, run: int, gpus: Iterable[GpuId], residual_mb: dict[PoolName, int]) -> None:
        """The process has nothing on these GPUs any more but what its engines leave there."""
        mine = f"{job}|{run}|"
        for gpu in gpus:
            there = self.on_gpu[gpu]
            for key in [key for key in there if key.startswith(mine) and not key.endswith(LEFT)]:
                del there[key]
                left = residual_mb.get(key.split("|")[2], 0)
                if left:
                    there[key + LEFT] = left

    def observe(self, gpus: Sequence[GpuId]) -> tuple[GpuObservation, ...]:
        """What a backend sees on GPUs."""
        on_gpu = self.on_gpu
        return tuple([GpuObservation(gpu, sum(on_gpu[gpu].values())) for gpu in gpus])

    def nobody_else_is_on(self, gpus: Iterable[GpuId], job: JobId, run: int) -> None:
        """Raise BrokenInvariant where bytes of another run are, beyond what is agreed to stay of parked states."""
        mine, on_gpu = f"{job}|{run}|", self.on_gpu
        for gpu in gpus:
            for key in on_gpu[gpu]:
                if not key.startswith(mine) and not key.endswith(LEFT):
                    found = f"{gpu} is given to run {run} of {job}, and has {key} on it"
                    raise BrokenInvariant(f"a_gpu_is_given_on_only_when_verified_clean: {found}")
