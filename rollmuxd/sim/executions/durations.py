"""Fidelity ``phase``: a phase takes what its job's series says, and a tail begins after the share given there."""

from collections.abc import Callable, Sequence
from typing import Final

from msgspec import Struct

from rollmuxd.core.ids import GpuId, Millis
from rollmuxd.sim.execution import INIT, Begun, Execution
from rollmuxd.sim.inventory import Inventory
from rollmuxd.sim.kernel import Kernel
from rollmuxd.sim.workload import SimJob

#: moving the unfinished responses of a tail onto the GPUs that it keeps (research 2.5: at most 3 s)
TAIL_MOVED_MS: Final[Millis] = 3_000
#: a side phase without a stated length takes this
ASIDE_MS: Final[Millis] = 5_000


class Fixed(Struct):
    """A phase whose times are known when it begins."""

    solo_ms: Millis
    ends_ms: Millis
    tail_ms: Millis | None = None
    #: until then its work is spread over the GPUs; how many these are, and the fewest for the tail
    spread_until_ms: Millis = 0
    gpus: int = 0
    min_gpus: int = 0

    def move_ms(self, keep: tuple[GpuId, ...], now: Millis) -> Millis:
        """The same for each tail."""
        return TAIL_MOVED_MS

    def shrink(self, keep: tuple[GpuId, ...], now: Millis) -> None:
        """The tail waits for its longest responses, whatever the GPUs."""

    def grow(self, gpus: tuple[GpuId, ...], now: Millis) -> None:
        """What is left of the work that is spread takes less; a tail waits for its longest responses as before."""
        if now < self.spread_until_ms:
            left = (self.spread_until_ms - now) * self.gpus // len(gpus)
            self.ends_ms += now + left - self.spread_until_ms
            self.spread_until_ms = now + left
            self.tail_ms = self.spread_until_ms if 0 < self.min_gpus < len(gpus) else None
        self.gpus = len(gpus)


class Durations:
    """Phases by their durations."""

    def attach(self, kernel: Kernel, inventory: Inventory, jobs: Sequence[SimJob]) -> None:
        """The clock that phases begin by."""
        self._kernel = kernel

    def begin(self, begun: Begun, changed: Callable[[], None]) -> Execution:
        """The phase, whose times never change."""
        now, job = self._kernel.now, begun.job
        if begun.at < 0:
            planned = begun.phase.planned_ms
            took = ASIDE_MS if planned is None and begun.phase.name != INIT else planned or 0
            return Fixed(0, now + took)
        solo = job.series[begun.step % len(job.series)][begun.at]
        took = _spread(begun, solo)
        if begun.at > 0 or not job.tail_from or not begun.gpus:
            return Fixed(solo, now + took)
        return _on_a_part(begun, solo, took, now)


def _spread(begun: Begun, took: Millis) -> Millis:
    """What the phase takes where its job sits on a wider pool than it wants: less by as much (data parallel)."""
    pools = begun.phase.pools
    wanted = sum(want.nodes for want in begun.job.spec.wants if want.pool in pools)
    return took * wanted // begun.nodes if len(pools) == 1 and begun.nodes > wanted else took


def _on_a_part(begun: Begun, solo: Millis, took: Millis, now: Millis) -> Fixed:
    """The phase on its GPUs. Its tail begins on all of them, unless the job says that it grows.

    Until 80 % of the responses are done the work is spread over the GPUs, so on fewer it takes longer by as much. The
    rest waits for the longest responses, whatever the GPUs.
    """
    job, has = begun.job, len(begun.gpus)
    body = round(took * job.tail_from[begun.step % len(job.tail_from)])
    slower = body * begun.whole // has
    has_all = has == begun.whole or job.grows  # what is scored begins its tails on all
    tail = now + slower if has_all and 0 < begun.phase.min_gpus < has else None
    return Fixed(solo, now + slower + took - body, tail, now + slower, has, begun.phase.min_gpus)
