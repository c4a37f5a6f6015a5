"""Whose a fact is: so that the feed shows each caller its own facts, and wakes no caller for others."""

from typing import Final, TypeAlias

from rollmuxd.core import facts as f
from rollmuxd.core.facts import Fact
from rollmuxd.core.ids import JobId
from rollmuxd.core.state import State
from rollmuxd.daemon.access.gate import Caller
from rollmuxd.daemon.entries import job_of

#: slots, sessions and orders of which it is remembered whose they are; about 30 MB
REMEMBERED: Final = 200_000
_OF_A_JOB: Final = ("job", "slot", "session", "order")

#: what a fact is about, and what a caller reads about: a fact is shown to callers that want one of its topics
Topic: TypeAlias = tuple[str, str]
EVERYTHING: Final[Topic] = ("everything", "")
#: and the daemon itself: shown to every caller
INVENTORY: Final[Topic] = ("inventory", "")
AUDIT: Final[Topic] = ("audit", "")


def wanted(caller: Caller, *, job: JobId | None = None, audit: bool = False) -> frozenset[Topic]:
    """What a caller reads of: of one job that it may read, of what is audited (admins), or of all that it is shown.

    Admins see everything; others what is about the inventory, and about their owner's jobs.
    """
    if audit:
        return frozenset({AUDIT})
    if job is not None:
        return frozenset({("job", job)})
    return frozenset({EVERYTHING} if caller.admin else {INVENTORY, ("owner", caller.owner)})


class Audience:
    """Whose a fact is. Follows the facts it is shown, since the state forgets slots that are over."""

    def __init__(self) -> None:
        self._jobs: dict[str, JobId] = {}
        self._owners: dict[JobId, str] = {}

    def topics(self, fact: Fact, state: State) -> tuple[Topic, ...]:
        """What a fact is about. Facts are shown in their order, as it is learnt from them what belongs to which job.

        What is about a slot of long ago, of which nothing is known any more, is shown to admins only.
        """
        self._learn(fact)
        if isinstance(fact, f.Audited):
            return (EVERYTHING, AUDIT)  # it says where operators are
        things = [thing for name in _OF_A_JOB if (thing := getattr(fact, name, None)) is not None]
        job = job_of(fact, state) or next((self._jobs[thing] for thing in things if thing in self._jobs), None)
        if job is None:
            return (EVERYTHING,) if things else (EVERYTHING, INVENTORY)
        known = state.jobs.get(job)
        owner = self._owners.get(job) if known is None else known.owner
        return (EVERYTHING, ("job", job)) if owner is None else (EVERYTHING, ("job", job), ("owner", owner))

    def _learn(self, fact: Fact) -> None:
        if isinstance(fact, f.JobRegistered):
            self._remember(self._owners, fact.job, fact.owner)
        elif (job := getattr(fact, "job", None)) is not None:
            for thing in filter(None, (getattr(fact, name, None) for name in _OF_A_JOB[1:])):
                self._remember(self._jobs, thing, job)

    @staticmethod
    def _remember(memory: dict[str, str], thing: str, what: str) -> None:
        memory[thing] = what
        if len(memory) > REMEMBERED:
            del memory[next(iter(memory))]
