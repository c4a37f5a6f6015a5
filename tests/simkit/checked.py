"""Runs of the simulator under all checkers, with and without faults."""

from functools import partial
from typing import Any, TypeVar

from rollmuxd.core.decision import Decision
from rollmuxd.core.ids import Millis
from rollmuxd.core.inputs import Input
from rollmuxd.core.state import State
from rollmuxd.sim import compare
from rollmuxd.sim.compare import Task
from rollmuxd.sim.outcome import Outcome
from rollmuxd.sim.policies import PolicyUnderTest
from rollmuxd.sim.workload import Workload
from rollmuxd.sim.world import Listener, World
from simkit import invariants
from simkit.checkers import Checker
from simkit.checkers.rest import Rest
from simkit.faults import Faults
from simkit.faulty_world import FaultyWorld

W = TypeVar("W", bound=World)

#: nothing goes wrong
NONE = Faults()
#: inputs between two checks of the whole state
CHECK_EVERY = 2_000


class Invariants(Listener):
    """Checks the whole state now and then, and at the end."""

    def __init__(self) -> None:
        self.heard = 0
        self.state = State()

    def hear(self, now: Millis, given: Input, decision: Decision, state: State) -> None:
        """Check it, where it is time."""
        self.heard, self.state = self.heard + 1, state
        if self.heard % CHECK_EVERY == 0:
            invariants.check(state)

    def end(self, now: Millis) -> None:
        """Check it once more."""
        invariants.check(self.state)


def check(made: W, *, rest_every: int = CHECK_EVERY) -> W:
    """The world, which has not begun, with all checkers as its first listeners."""
    cap = getattr(made.core.policy, "max_group", None)
    excused_ms = made.faults.longest_ms if isinstance(made, FaultyWorld) else 0
    made.listeners[:0] = [Checker(made.config, cap=cap, excused_ms=excused_ms), Rest(rest_every), Invariants()]
    return made


def make(faults: Faults, *given: Any, **named: Any) -> World:
    """A checked world; with faults where there are any."""
    return check(FaultyWorld(faults, *given, **named) if faults.any else World(*given, **named))


def run(workload: Workload, under_test: PolicyUnderTest, *, faults: Faults = NONE, **named: Any) -> Outcome:
    """As :meth:`rollmuxd.sim.world.World.run` does.

    Raises:
        BrokenInvariant: a promise was broken.
    """
    return make(faults, workload, under_test, **named).run()


def perform(task: Task, drawn: Workload | None = None, *, faults: Faults = NONE, **named: Any) -> Outcome:
    """As :func:`rollmuxd.sim.compare.perform` does."""
    return compare.perform(task, drawn, make=partial(make, faults), **named)
