"""What a phase does between its grant and its end: the question that :mod:`~rollmuxd.sim.world` asks a fidelity.

The world knows slots, orders and money. How long a phase takes, when its tail begins, and what moving that tail costs
come from an :class:`Executions`. :mod:`.executions.durations` reads them from the workload, :mod:`.executions.engines`
plays rollouts request by request, and :mod:`.executions.network` lets phases share links.
"""

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from msgspec import Struct

from rollmuxd.core.ids import GpuId, Millis
from rollmuxd.core.spec import PhaseSpec
from rollmuxd.sim.inventory import Inventory
from rollmuxd.sim.kernel import Kernel
from rollmuxd.sim.workload import SimJob

#: an end that is not known yet
NEVER: Final[Millis] = 1 << 60
#: the side phase that comes first, and once
INIT: Final = "init"


class Begun(Struct, frozen=True):
    """A phase that has just been granted its GPUs."""

    job: SimJob
    phase: PhaseSpec
    #: index into the cycle; -1: a side phase
    at: int
    #: iterations that the job has finished
    step: int
    gpus: tuple[GpuId, ...]
    #: GPUs of all nodes that the phase claims: more than it has where it began on a part
    whole: int
    #: nodes that the job has in the phase's first pool: more than it wants where it is placed on more
    nodes: int


class Execution(Protocol):
    """One phase under way. The world reads its times again after each call, and whenever the model reports a change."""

    @property
    def solo_ms(self) -> Millis:
        """What the phase takes alone on the GPUs that its job wants; 0 for a side phase."""
        ...

    @property
    def ends_ms(self) -> Millis:
        """When it ends, as far as is known; :data:`NEVER` while it is not known."""
        ...

    @property
    def tail_ms(self) -> Millis | None:
        """When its tail may be consolidated; None: it gives no GPU back."""
        ...

    def move_ms(self, keep: tuple[GpuId, ...], now: Millis) -> Millis:
        """What it takes to move the unfinished responses onto ``keep``: the other GPUs are free after that."""
        ...

    def shrink(self, keep: tuple[GpuId, ...], now: Millis) -> None:
        """It runs on these GPUs alone from now on."""
        ...

    def grow(self, gpus: tuple[GpuId, ...], now: Millis) -> None:
        """It runs on these GPUs from now on, which it had given back."""
        ...


class Executions(Protocol):
    """A fidelity: how phases run. One object for each run of the simulator."""

    def attach(self, kernel: Kernel, inventory: Inventory, jobs: Sequence[SimJob]) -> None:
        """Called once, before anything happens. The model may plan events of its own on the kernel."""
        ...

    def begin(self, begun: Begun, changed: Callable[[], None]) -> Execution:
        """A phase begins now. ``changed`` is called when its times change and the world did not ask for it."""
        ...
