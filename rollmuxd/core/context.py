"""One decision in the making: what the rooms of the core share while an input is handled."""

from collections.abc import Iterator
from typing import Final

from rollmuxd.core.apply import apply
from rollmuxd.core.config import Config, DriverTraits
from rollmuxd.core.decision import Answer
from rollmuxd.core.effects import Effect
from rollmuxd.core.facts import Fact
from rollmuxd.core.ids import GroupId, Millis
from rollmuxd.core.marks import MARKS, Dirty, mark_loans
from rollmuxd.core.model import JobStatus, SlotStatus
from rollmuxd.core.order import Rotation
from rollmuxd.core.policy import Move, Policy
from rollmuxd.core.state import State
from rollmuxd.core.timers import Timers

#: the answer that tells nothing
NOTHING: Final = Answer()
#: slots that hold GPUs by their holder's right
HOLDS: Final = (SlotStatus.LOADING, SlotStatus.RUNNING, SlotStatus.TAIL)
#: jobs that have a placement
PLACED: Final = (JobStatus.PROBING, JobStatus.ADMITTED, JobStatus.MOVING)
#: and may be granted slots there
SERVED: Final = (JobStatus.PROBING, JobStatus.ADMITTED)


class Context:
    """The state, what is derived from it, and the facts and effects of the decision at hand.

    A fact is applied as it happens, so what follows in the same decision sees it.
    """

    def __init__(self, config: Config, policy: Policy, state: State) -> None:
        self.config, self.policy, self.state = config, policy, state
        self.rotation = Rotation()
        self.timers = Timers()
        self.now: Millis = state.at
        self.facts: list[Fact] = []
        #: what has to be looked at before the state is at rest
        self.dirty = Dirty()
        self.effects: list[Effect] = []
        #: what the input at hand has spent on looking for places for jobs
        self.spent = 0
        #: groups whose promises were looked at when they were of that version
        self.settled: dict[GroupId, int] = {}
        #: the search for jobs that are better placed elsewhere, while it is under way
        self.regrouping: Iterator[Move | None] | None = None

    def fact(self, fact: Fact) -> None:
        """This has happened."""
        for mark in MARKS[type(fact)]:
            mark(self.dirty, self.state, fact)
        if self.state.fillers:
            mark_loans(self.dirty, self.state, fact)
        apply(self.state, fact)
        self.facts.append(fact)

    def do(self, effect: Effect) -> None:
        """This must be done, once the facts are durable."""
        self.effects.append(effect)

    def is_past(self, due: Millis, kind: str, key: str) -> bool:
        """Whether that time has come. Else it is planned to look again then: a deadline of that kind."""
        if self.now < due:
            self.timers.at(due, kind, key)
        return self.now >= due

    def traits(self, driver: str) -> DriverTraits:
        """What a residency driver says of itself; of one that says nothing, nothing is presumed."""
        return self.config.drivers.get(driver, DriverTraits())
