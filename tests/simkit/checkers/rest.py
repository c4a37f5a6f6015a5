"""The rest check: after every input the state is at rest.

Between two inputs each step of the core is asked, on the state as it is and at the time of the next input: *would you
record a fact now?* Where one would, a mark is missing, or nothing plans a deadline for that moment. Asking
changes nothing: the cycle that asks raises instead of applying the fact.

Unlike the checker of promises this reads the state. It knows no promise, only that nothing is left to be done.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, NamedTuple, TypeAlias

from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.context import Context
from rollmuxd.core.decision import Decision
from rollmuxd.core.effects import Effect
from rollmuxd.core.errors import BrokenInvariant
from rollmuxd.core.ids import HostId, Millis
from rollmuxd.core.model import SlotStatus, StateStatus
from rollmuxd.core.order import Rotation
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.core.state import State
from rollmuxd.core.steps import move
from rollmuxd.core.steps.admit import admit
from rollmuxd.core.steps.dispatch import grant_if_loaded, take_turns
from rollmuxd.core.steps.reclaim import drained_if_empty, end_if_done, end_placement_if_empty
from rollmuxd.core.timers import AdmissionPass, Timers
from rollmuxd.sim.world import Listener


class WouldRecord(Exception):
    """A step would record a fact."""

    def __init__(self, fact: f.Fact) -> None:
        super().__init__(f.name(fact))
        self.fact = fact


class Quiet(Timers):
    """The scheduler's soft state, in which nothing is planned."""

    def __init__(self, live: Timers) -> None:
        vars(self).update(vars(live))

    def at(self, due: Millis, kind: str, key: str) -> None:
        """Plan nothing."""

    def observe_now(self, host: HostId, now: Millis, config: object) -> bool:
        """Have nothing looked at."""
        return False


class Asking(Context):
    """A decision that is not made."""

    def fact(self, fact: f.Fact) -> None:
        """Raise: this would have happened."""
        raise WouldRecord(fact)

    def do(self, effect: Effect) -> None:
        """Do nothing."""


# ---- the steps -------------------------------------------------------------------------------------------------------

#: what a step is asked about, and the step
Question: TypeAlias = tuple[str, Callable[[], None]]


def _grants(c: Context) -> Iterator[Question]:
    for job in c.state.jobs.values():
        slot = c.state.slots.get(job.slot or "")
        if slot is not None and slot.status is SlotStatus.LOADING:
            yield slot.id, partial(grant_if_loaded, c, job, slot)


def _releases(c: Context) -> Iterator[Question]:
    for job in c.state.jobs.values():
        for name in job.closing:
            yield name, partial(end_if_done, c, job, c.state.slots[name])


def _settles(c: Context) -> Iterator[Question]:
    for job in c.state.jobs.values():
        if not job.has_place:
            yield job.id, partial(end_placement_if_empty, c, job)


def _drains(c: Context) -> Iterator[Question]:
    for node in c.state.nodes.values():
        loaded = [kept for key in node.states if (kept := c.state.states[key]).status is StateStatus.LOADED]
        if all(c.state.jobs[kept.job].has_place for kept in loaded):  # what a job that leaves has is discarded first
            yield node.id, partial(drained_if_empty, c, node)


def _moves(c: Context) -> Iterator[Question]:
    for name in c.state.moving:
        yield name, partial(move.advance, c, c.state.jobs[name])
    for name in c.state.leaving:
        yield name, partial(move.tidy, c, c.state.jobs[name])


def _dispatches(c: Context) -> Iterator[Question]:
    for group in c.state.groups.values():
        yield group.id, partial(take_turns, c, group)


def _admits(c: Context) -> Iterator[Question]:
    if c.state.waiting:
        c.timers.round, c.dirty.room = AdmissionPass(), True
        yield "", partial(admit, c)


STEPS: Final[dict[str, Callable[[Context], Iterator[Question]]]] = {
    "grant": _grants,
    "release": _releases,
    "settle": _settles,
    "drain": _drains,
    "move": _moves,
    "dispatch": _dispatches,
    "admit": _admits,
}

# ---- what is known to be not at rest ---------------------------------------------------------------------------------


class Known(NamedTuple):
    """A defect that is known: the step that would record that fact, after one of these facts (none: any)."""

    what: str
    step: str
    fact: type[f.Fact]
    after: frozenset[type[f.Fact]] = frozenset()


KNOWN: Final = (
    Known(
        "room that comes with measured times and earned credit is not looked for",
        "admit",
        f.JobPlaced,
        frozenset({f.SlotReleased, f.SlotQueued}),
    ),
    Known(
        "room that comes with another schedule, of a job that joins a group or is to move there, is not looked for",
        "admit",
        f.JobPlaced,
        frozenset({f.JobPlaced, f.MovePlanned}),
    ),
)


class Rest(Listener):
    """See the module's head. It looks before each input, or before one of so many (``every``)."""

    def __init__(self, every: int = 1) -> None:
        self._every, self._left = every, every
        self._rotation = Rotation()
        #: what was recorded since the state was looked at last
        self._since: set[type[f.Fact]] = set()
        #: what is not at rest, and known to be so
        self.excused: dict[tuple[str, str], Known] = {}

    def hear(self, now: Millis, given: i.Input, decision: Decision, state: State) -> None:
        """This was decided."""
        self._since.update(map(type, decision.facts))

    def before(self, core: Scheduler, now: Millis, given: i.Input) -> None:
        """Before an input: whether the state is at rest. Raises BrokenInvariant where it is not."""
        due = core.deadline()
        if type(given) is i.Start or (due is not None and due <= now):  # the core asks to be called first
            return
        self._left -= 1
        if self._left:
            return
        self._left = self._every
        cycle = Asking(core.config, core.policy, core.state)
        cycle.rotation, cycle.timers, cycle.now = self._rotation, Quiet(core.context.timers), now
        excused = {}
        for step, questions in STEPS.items():
            for about, question in questions(cycle):
                try:
                    question()
                except WouldRecord as would:
                    excused[step, about] = self._excuse(step, about, would.fact, now)
        self.excused = excused
        self._since.clear()

    def _excuse(self, step: str, about: str, fact: f.Fact, now: Millis) -> Known:
        before = self.excused.get((step, about))
        if before is not None and before.fact is type(fact):
            return before
        for known in KNOWN:
            if (known.step, known.fact) == (step, type(fact)) and not known.after.isdisjoint(self._since):
                return known
        since = ", ".join(sorted(kind.__name__ for kind in self._since)) or "nothing"
        raise BrokenInvariant(
            f"the_state_is_at_rest: at {now} ms the step {step} {about} would record {f.encode(fact).decode()}; "
            f"recorded since the last look: {since}"
        )
