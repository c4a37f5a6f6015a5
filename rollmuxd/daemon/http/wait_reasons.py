"""The first reason why a job waits, for a place or its turn: what ``explain`` says at length is too much for a list."""

from typing import Final

from rollmuxd.core.context import PLACED
from rollmuxd.core.ids import Millis
from rollmuxd.core.model import Job, JobStatus
from rollmuxd.daemon.access.visibility import Visibility

#: kinds of jobs that a page has thought about; at a millisecond each, what the loop can be held up by. Who waits for
#: its turn is a kind by itself
THOUGHTS: Final = 50


class WaitReasons:
    """Remembers, for as long as nothing happens, why jobs of one shape wait: most of a queue is alike."""

    def __init__(self) -> None:
        self._as_of: tuple[int, Millis] = (-1, -1)
        self._known: dict[object, str] = {}

    def first(self, told: Visibility, jobs: list[Job], seq: int, now: Millis, *, turns: bool) -> dict[str, str]:
        """The first reason of each of these jobs that waits, by job; none of those for which there was no time.

        ``seq`` is the number of the last fact: while it stays, so do the reasons. ``turns``: also of those that have
        their place, and wait for their turn.
        """
        if self._as_of != (seq, told.core.state.at):
            self._as_of = (seq, told.core.state.at)
            self._known.clear()
        found: dict[str, str] = {}
        thoughts = THOUGHTS
        for job in jobs:
            turn = job.queued if turns and job.status in PLACED else None
            if turn is None and job.status is not JobStatus.WAITING:
                continue
            kind = (told.hides and job.owner, turn or _shape_of(job))  # others may not read the names in it
            if kind not in self._known:
                if not thoughts:
                    continue
                thoughts -= 1
                reasons = told.why_job_waits(job.id, now).reasons if turn is None else told.why_slot_waits(turn, now)
                self._known[kind] = reasons[0].text if reasons else ""
            if text := self._known[kind]:
                found[job.id] = text
        return found


def _shape_of(job: Job) -> object:
    """All of a job that its reasons depend on: its name and its place in the queue are not among it."""
    spec = job.spec
    times = tuple((name, kept.count, kept.total_ms) for name, kept in job.times.items())
    old = (*job.pins.items(), *job.last_pins.items())
    return (spec.phases, spec.wants, spec.states, spec.slo, spec.colocate, spec.park, times, len(job.pins), old)
