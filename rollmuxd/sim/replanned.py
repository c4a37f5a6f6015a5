"""Contenders whose plans follow what phases are seen to take: what drift detection is worth, held against the same
policy that goes on as it was told (:mod:`~rollmuxd.core.drift`).
"""

from typing import Any

from rollmuxd.core.config import Config
from rollmuxd.core.model import GroupId, JobId, Millis
from rollmuxd.core.policy import Policy
from rollmuxd.core.state import State
from rollmuxd.sim.contender import Contender
from rollmuxd.sim.workload import SimJob


class Replanned:
    """Another contender, under a scheduler that plans anew when phases take another time than was planned.

    Args:
        of: the other.
        estimates: numbers of the core's, where they are not a daemon's.
    """

    def __init__(self, of: Contender, **estimates: Any) -> None:
        self._of = of
        self.name, self.summary = f"{of.name}-replanned", f"{of.name}, whose plans follow what phases are seen to take"
        self.estimates = {"drift": Config().drift, **estimates}
        self.move_every_ms: Millis = getattr(of, "move_every_ms", 0)

    def policy(self, seed: int) -> Policy:
        """The other's."""
        return self._of.policy(seed)

    def adapt(self, job: SimJob) -> SimJob:
        """As the other has it."""
        return self._of.adapt(job)

    def paces(self, policy: Policy, state: State, group: GroupId) -> dict[JobId, Millis]:
        """As the other has it."""
        return self._of.paces(policy, state, group)

    def move_ms(self) -> Millis:
        """As the other has it."""
        return self._of.move_ms()
