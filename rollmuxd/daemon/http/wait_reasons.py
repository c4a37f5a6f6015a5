"""The first reason why a job waits, for a place or its turn: what ``explain`` says at length is too much for a list."""

from typing import Final

from rollmuxd.core.context import PLACED
from rollmuxd.core.ids import Millis
from rollmuxd.core.model import Job, JobStatus
from rollmuxd.daemon.access.visibility import Visibility

#: kinds of jobs that a page has thought about, at a millisecond each. A job that waits for its turn is a kind by itself
THOUGHTS: Final = 50


class WaitReasons:
    """Remembers, for as long as nothing happens, why jobs of one shape wait: most of a queue is alike."""

    def __init__(self) -> None:
        self._as_of: tuple[int, Millis] = (-1, -1)
        self._known: dict[object, str] = {}

    def first(
        self, visibility: Visibility, job: Job, seq: int, now: Millis, *, turns: bool, may_think: bool = True
    ) -> tuple[str, bool]:
        """The first reason of a job that waits, else nothing; and whether it took some thought, if it may.

        ``seq`` is the number of the last fact: while it stays, so do the reasons. ``turns``: also of a job that has
        its place, and waits for its turn.
        """
        turn = job.queued if turns and job.status in PLACED else None
        if turn is None and job.status is not JobStatus.WAITING:
            return "", False
        if self._as_of != (seq, visibility.core.state.at):
            self._as_of = (seq, visibility.core.state.at)
            self._known.clear()
        kind = (visibility.caller.admin or job.owner, turn or _shape_of(job))  # others may not read the names in it
        if kind in self._known or not may_think:
            return self._known.get(kind, ""), False
        explain = visibility.explainer
        reasons = explain.why_job_waits(job.id, now).reasons if turn is None else explain.why_slot_waits(turn, now)
        self._known[kind] = reasons[0].text if reasons else ""
        return self._known[kind], True


def _shape_of(job: Job) -> object:
    """All of a job that its reasons depend on: its name and its place in the queue are not among it."""
    spec = job.spec
    times = tuple((name, kept.count, kept.total_ms) for name, kept in job.times.items())
    old = (*job.pins.items(), *job.last_pins.items())
    return (spec.timed, spec.wants, spec.states, spec.slo, spec.colocate, spec.park, times, len(job.pins), old)
