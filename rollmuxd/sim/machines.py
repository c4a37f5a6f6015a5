"""What is really there: bytes on GPUs, boots of hosts, moves under way. Whatever anybody believes.

Backends see it, drivers change it, faults destroy it; the scheduler hears of it only through them.
"""

from collections.abc import Iterable, Sequence
from enum import Enum

from msgspec import Struct

from rollmuxd.core.errors import BrokenInvariant
from rollmuxd.core.inputs import GpuObservation
from rollmuxd.core.model import GpuId, HostId, JobId, Millis, OrderId, OrderKind, PoolName
from rollmuxd.sim.inventory import BOOT, Inventory

#: what is agreed to stay on a GPU when a state is parked
_LEFT = "|left"


class Fate(Enum):
    """What becomes of a move."""

    DONE = 1
    #: not done, and its driver says so
    FAILS = 2
    #: done, and no word comes of it
    UNHEARD = 3
    #: not done, and no word comes of it
    LOST = 4


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
    left_mb: int
    #: the daemon's life in which it was told last: another one hears nothing of it
    told: int
    boot: str
    fate: Fate = Fate.DONE
    done: bool = False
    #: it will never be done any more
    void: bool = False


def key_of(job: JobId, run: int, pool: PoolName, node: str) -> str:
    """The key of what a run keeps on a node for a pool."""
    return f"{job}|{run}|{pool}|{node}"


class Machines:
    """Every GPU with what is on it, MB by key; every host with its boot."""

    def __init__(self, inventory: Inventory) -> None:
        self.gpus_of = inventory.gpus_of
        self.on_gpu: dict[GpuId, dict[str, int]] = {gpu: {} for gpus in self.gpus_of.values() for gpu in gpus}
        self.boot: dict[HostId, str] = dict.fromkeys(self.gpus_of, BOOT)
        #: hosts that cannot be reached, and until when
        self.out: dict[HostId, Millis] = {}

    def load(self, move: Move) -> None:
        """The state is on these GPUs, from the moment that its load begins."""
        for gpu in move.gpus:
            self.on_gpu[gpu][move.key] = move.gpu_mb
            self.on_gpu[gpu].pop(move.key + _LEFT, None)

    def take(self, move: Move, *, left_mb: int = 0, lingering: str = "") -> None:
        """The state leaves wherever it is on its host, but for what stays of it (for long, or for a while)."""
        for gpu in self.gpus_of[move.host]:
            there = self.on_gpu[gpu]
            used = there.pop(move.key, None)
            if used is None:
                if not left_mb:
                    there.pop(move.key + _LEFT, None)
            elif left_mb:
                there[move.key + _LEFT] = left_mb
            if used is not None and lingering:
                there[move.key + lingering] = used

    def give_back(self, job: JobId, run: int, gpus: Iterable[GpuId], left_mb: dict[PoolName, int]) -> None:
        """The process has nothing on these GPUs any more but what its engines leave there."""
        mine = f"{job}|{run}|"
        for gpu in gpus:
            there = self.on_gpu[gpu]
            for key in [key for key in there if key.startswith(mine) and not key.endswith(_LEFT)]:
                del there[key]
                lingers = key.count("|") > 3  # of a park before: it leaves nothing by itself
                left = left_mb.get(key.split("|")[2], 0)
                if left and not lingers:
                    there[key + _LEFT] = left

    def take_back(self, key: str, gpus: Iterable[GpuId], gpu_mb: int) -> None:
        """The process spreads what it moves by that key over these GPUs again."""
        for gpu in gpus:
            self.on_gpu[gpu].pop(key + _LEFT, None)
            self.on_gpu[gpu][key] = gpu_mb

    def wipe(self, job: JobId, run: int, *, lingering: str = "") -> None:
        """The process is no more, and what it had on any GPU neither; or it stays for a while."""
        mine = f"{job}|{run}|"
        for gpu, there in self.on_gpu.items():
            if there:
                used = sum(mb for key, mb in there.items() if key.startswith(mine) and not key.endswith(_LEFT))
                self._drop(gpu, mine)
                if used and lingering:
                    there[mine + lingering] = used

    def _drop(self, gpu: GpuId, mine: str) -> None:
        there = self.on_gpu[gpu]
        for key in [key for key in there if key.startswith(mine)]:
            del there[key]

    def has(self, job: JobId, run: int, gpus: Iterable[GpuId]) -> bool:
        """Whether the process has anything on these GPUs."""
        mine = f"{job}|{run}|"
        return any(key.startswith(mine) for gpu in gpus for key in self.on_gpu[gpu])

    def no_longer(self, lingering: str) -> None:
        """What stayed for a while is gone."""
        for there in self.on_gpu.values():
            for key in [key for key in there if key.endswith(lingering)]:
                del there[key]

    def reboot(self, host: HostId, boot: str) -> None:
        """Nothing is left in its memories."""
        self.boot[host] = boot
        for gpu in self.gpus_of[host]:
            self.on_gpu[gpu].clear()

    def sights(self, gpus: Sequence[GpuId]) -> tuple[GpuObservation, ...]:
        """What a backend sees on GPUs."""
        on_gpu = self.on_gpu
        return tuple([GpuObservation(gpu, sum(on_gpu[gpu].values())) for gpu in gpus])

    def nobody_else_is_on(self, gpus: Iterable[GpuId], job: JobId, run: int) -> None:
        """Raise BrokenInvariant where bytes of another run are, beyond what is agreed to stay of parked states."""
        mine, on_gpu = f"{job}|{run}|", self.on_gpu
        for gpu in gpus:
            for key in on_gpu[gpu]:
                if not key.startswith(mine) and not key.endswith(_LEFT):
                    found = f"{gpu} is given to run {run} of {job}, and has {key} on it"
                    raise BrokenInvariant(f"a_gpu_is_given_on_only_when_seen_clear: {found}")
