"""What keeps promises when nobody knows how long phases take: least credit first, and the guard.

Plans are made on means, and a plan's period is no promise then: what counts is each job's credit, as it is measured.
"""

from typing import Final

from msgspec.structs import replace

from rollmuxd.core.loom import Loom, Objective
from rollmuxd.core.model import Millis, Movable
from rollmuxd.core.placement import RollMux
from rollmuxd.core.policy import Policy
from rollmuxd.sim.contender import InWheelOrder
from rollmuxd.sim.workload import SimJob


class Guarded(InWheelOrder):
    """Groups of RollMux's or loom's, dispatched by credit, with the guard."""

    def __init__(self, name: str, move_ms: Millis, groups: str, objective: Objective | None = None) -> None:
        self.name, self._move_ms, self._objective = name, move_ms, objective
        self.summary = f"{groups}, planned on means, least credit first; the guard moves, in {move_ms // 1000} s"

    def policy(self, seed: int) -> Policy:
        """A new one: it draws nothing."""
        if self._objective is not None:
            return Loom(objective=self._objective, warm_s=self._move_ms / 1000, rounds=1, uncertain=True)
        return RollMux(uncertain=True)

    def adapt(self, job: SimJob) -> SimJob:
        """One that may be moved."""
        return replace(job, spec=replace(job.spec, movable=Movable.WARM))

    def move_ms(self) -> Millis:
        """What the guard has to reckon with."""
        return self._move_ms


_LOOMS: Final = "loom's regrouping, round robin"

GUARDED = (
    Guarded("guarded", 300_000, "unpruned groups"),
    Guarded("guarded-warm", 30_000, "unpruned groups"),
    Guarded("loom-guarded", 300_000, _LOOMS, "cost"),
    Guarded("loom-guarded-warm", 30_000, _LOOMS, "cost"),
    Guarded("loom-guarded-owned", 30_000, f"{_LOOMS}, for nodes that one owns", "throughput"),
)
