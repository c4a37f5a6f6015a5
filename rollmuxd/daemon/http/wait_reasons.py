"""The first reason why a job waits, for a place or its turn: what ``explain`` says at length is too much for a list."""

from typing import Final

from msgspec.structs import replace

from rollmuxd.core.context import PLACED
from rollmuxd.core.ids import Millis
from rollmuxd.core.model import Job, JobStatus
from rollmuxd.daemon.access.visibility import Visibility

#: kinds of jobs that a page has thought about, at a millisecond each. A job that waits for its turn is a kind by itself
THOUGHTS: Final = 50


class WaitReasons:
    """Why the jobs of one page wait: most of a queue is alike, and each kind of job is thought about once.

    ``turns``: also of a job that has its place, and waits for its turn.
    """

    def __init__(self, *, turns: bool) -> None:
        self._turns = turns
        self._known: dict[object, str] = {}

    def first(self, visibility: Visibility, job: Job, now: Millis) -> str:
        """The first reason of a job that waits; nothing of others, and of one kind too many."""
        turn = job.queued if self._turns and job.status in PLACED else None
        if turn is None and job.status is not JobStatus.WAITING:
            return ""
        kind = turn or _shape_of(job)
        if kind not in self._known and len(self._known) < THOUGHTS:
            explain = visibility.explainer
            reasons = explain.why_job_waits(job.id, now).reasons if turn is None else explain.why_slot_waits(turn, now)
            self._known[kind] = reasons[0].text if reasons else ""
        return self._known.get(kind, "")


def _shape_of(job: Job) -> object:
    """All of a job that its reasons depend on: its name and its place in the queue are not among it."""
    spec = replace(job.spec, name="", priority=0, launch=None)
    times = tuple((name, kept.count, kept.total_ms) for name, kept in job.times.items())
    return (job.owner, spec, times, *job.pins.items(), None, *job.last_pins.items())
