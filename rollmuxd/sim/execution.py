"""What a phase does between its grant and its end: the question that :mod:`~rollmuxd.sim.world` asks a fidelity.

The world knows slots, orders and money. How long a phase takes, when its tail begins, and what moving that tail costs
are said here. Fidelity ``phase`` reads them from the workload: a phase takes what its job's series says, and a tail
begins after the share given there. :mod:`.executions.engines` plays rollouts request by request, and
:mod:`.executions.network` lets phases share links.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

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
#: moving the unfinished responses of a tail onto the GPUs that it keeps (research 2.5: at most 3 s)
TAIL_MOVED_MS: Final[Millis] = 3_000
#: a side phase without a stated length takes this
ASIDE_MS: Final[Millis] = 5_000


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


@dataclass
class Execution:
    """One phase under way. The world reads its times again after each call, and whenever a model reports a change."""

    #: what the phase takes alone on the GPUs that its job wants; 0 for a side phase
    solo_ms: Millis
    #: when it ends, as far as is known; :data:`NEVER` while it is not known
    ends_ms: Millis
    #: when its tail may be consolidated; None: it gives no GPU back
    tail_ms: Millis | None = None
    #: until then its work is spread over the GPUs; how many these are, and the fewest for the tail
    spread_until_ms: Millis = 0
    gpus: int = 0
    min_gpus: int = 0

    def move_ms(self, keep: tuple[GpuId, ...], now: Millis) -> Millis:
        """What it takes to move the unfinished responses onto ``keep``: the other GPUs are free after that."""
        return TAIL_MOVED_MS

    def shrink(self, keep: tuple[GpuId, ...], now: Millis) -> None:
        """It runs on these GPUs alone from now on: a tail waits for its longest responses, whatever the GPUs."""

    def grow(self, gpus: tuple[GpuId, ...], now: Millis) -> None:
        """It has these GPUs from now on. What is left of the work that is spread takes less; a tail waits as before."""
        if now < self.spread_until_ms:
            left = (self.spread_until_ms - now) * self.gpus // len(gpus)
            self.ends_ms += now + left - self.spread_until_ms
            self.spread_until_ms = now + left
            self.tail_ms = self.spread_until_ms if 0 < self.min_gpus < len(gpus) else None
        self.gpus = len(gpus)


class Durations:
    """Phases by their durations. One object for each run of the simulator; other fidelities are made from it."""

    def attach(self, kernel: Kernel, inventory: Inventory, jobs: Sequence[SimJob]) -> None:
        """Called once, before anything happens: the clock that phases begin by, on which events may be planned."""
        self._kernel = kernel

    def begin(self, begun: Begun, changed: Callable[[], None]) -> Execution:
        """A phase begins now. ``changed`` is called when its times change and the world did not ask for it."""
        now, job = self._kernel.now, begun.job
        if begun.at < 0:
            planned = begun.phase.planned_ms
            took = ASIDE_MS if planned is None and begun.phase.name != INIT else planned or 0
            return Execution(0, now + took)
        solo = job.series[begun.step % len(job.series)][begun.at]
        took = _spread(begun, solo)
        if begun.at > 0 or not job.tail_from or not begun.gpus:
            return Execution(solo, now + took)
        return _on_a_part(begun, solo, took, now)


def _spread(begun: Begun, took: Millis) -> Millis:
    """What the phase takes where its job sits on a wider pool than it wants: less by as much (data parallel)."""
    pools = begun.phase.pools
    wanted = sum(want.nodes for want in begun.job.spec.wants if want.pool in pools)
    return took * wanted // begun.nodes if len(pools) == 1 and begun.nodes > wanted else took


def _on_a_part(begun: Begun, solo: Millis, took: Millis, now: Millis) -> Execution:
    """The phase on its GPUs. Its tail begins on all of them, unless the job says that it grows.

    Until 80 % of the responses are done the work is spread over the GPUs, so on fewer it takes longer by as much. The
    rest waits for the longest responses, whatever the GPUs.
    """
    job, has = begun.job, len(begun.gpus)
    body = round(took * job.tail_from[begun.step % len(job.tail_from)])
    slower = body * begun.whole // has
    has_all = has == begun.whole or job.grows  # what is scored begins its tails on all
    tail = now + slower if has_all and 0 < begun.phase.min_gpus < has else None
    return Execution(solo, now + slower + took - body, tail, now + slower, has, begun.phase.min_gpus)
