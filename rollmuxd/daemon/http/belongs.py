"""Whose a fact is, so that the feed shows to each what is theirs."""

from typing import Final

from rollmuxd.core import facts as f
from rollmuxd.core.facts import Fact
from rollmuxd.core.model import JobId
from rollmuxd.core.state import State
from rollmuxd.daemon.access import Caller

#: slots, sessions and orders of which it is remembered whose they are; about 30 MB
REMEMBERED: Final = 200_000
_OF_A_JOB: Final = ("job", "slot", "session", "order")


class Belongs:
    """Whose a fact is. Follows the facts it is shown, since the state forgets slots that are over."""

    def __init__(self) -> None:
        self._jobs: dict[str, JobId] = {}
        self._owners: dict[JobId, str] = {}

    def visible(self, fact: Fact, caller: Caller, state: State) -> bool:
        """Admins see everything; others what is about the inventory, and about their owner's jobs.

        What is about a slot of long ago, of which nothing is known any more, is shown to admins only.
        """
        self._learn(fact)
        if caller.admin:
            return True
        if isinstance(fact, f.Audited):
            return False  # it says where operators are
        about = self.about(fact, state)
        if about is None:
            return all(getattr(fact, name, None) is None for name in _OF_A_JOB)  # the inventory, and the daemon itself
        known = state.jobs.get(about)
        return (self._owners.get(about) if known is None else known.owner) == caller.owner

    def about(self, fact: Fact, state: State) -> JobId | None:
        """The job that a fact is about, if it is about one that is remembered; of a fact that was shown before."""
        job, *things = (getattr(fact, name, None) for name in _OF_A_JOB)
        return job or next((found for thing in things if (found := self._job(thing, state))), None)

    def _learn(self, fact: Fact) -> None:
        match fact:
            case f.JobRegistered():
                self._remember(self._owners, fact.job, fact.owner)
            case f.SlotQueued():
                self._remember(self._jobs, fact.slot, fact.job)
            case f.SessionOpened():
                self._remember(self._jobs, fact.session, fact.job)
            case f.OrderIssued():
                self._remember(self._jobs, fact.order, fact.job)
            case _:
                pass

    @staticmethod
    def _remember(memory: dict[str, str], thing: str, what: str) -> None:
        memory[thing] = what
        if len(memory) > REMEMBERED:
            del memory[next(iter(memory))]

    def _job(self, thing: str | None, state: State) -> JobId | None:
        if thing is None:
            return None
        found = state.slots.get(thing) or state.sessions.get(thing) or state.orders.get(thing)
        return self._jobs.get(thing) if found is None else found.job
