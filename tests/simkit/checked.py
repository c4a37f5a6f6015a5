"""Runs of the simulator under all checkers, with and without faults."""

from functools import partial
from typing import Any, TypeVar

from rollmuxd.sim import compare, world
from rollmuxd.sim.compare import Task
from rollmuxd.sim.outcome import Outcome
from rollmuxd.sim.policies import PolicyUnderTest
from rollmuxd.sim.workload import Workload
from rollmuxd.sim.world import CHECK_EVERY, World
from simkit.checkers import Checker
from simkit.checkers.rest import Rest
from simkit.faults import Faults
from simkit.faulty_world import FaultyWorld

W = TypeVar("W", bound=World)

#: nothing goes wrong
NONE = Faults()


def check(made: W, *, rest_every: int = CHECK_EVERY) -> W:
    """The world, which has not begun, with all checkers as its first listeners."""
    cap = getattr(made.core.policy, "max_group", None)
    excused_ms = made.faults.longest_ms if isinstance(made, FaultyWorld) else 0
    made.listeners[:0] = [Checker(made.config, cap=cap, excused_ms=excused_ms), Rest(rest_every)]
    return made


def make(faults: Faults, *given: Any, **named: Any) -> World:
    """A checked world; with faults where there are any."""
    return check(FaultyWorld(faults, *given, **named) if faults.any else World(*given, **named))


def run(workload: Workload, under_test: PolicyUnderTest, *, faults: Faults = NONE, **named: Any) -> Outcome:
    """As :func:`rollmuxd.sim.world.run` does.

    Raises:
        BrokenInvariant: a promise was broken.
    """
    return world.run(workload, under_test, make=partial(make, faults), **named)


def perform(task: Task, drawn: Workload | None = None, *, faults: Faults = NONE, **named: Any) -> Outcome:
    """As :func:`rollmuxd.sim.compare.perform` does."""
    return compare.perform(task, drawn, play=partial(run, faults=faults), **named)
