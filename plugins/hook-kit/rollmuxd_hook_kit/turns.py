"""One phase after the other, for a loop that is not ours: the one that is held is left where the next one begins."""

import contextlib
from collections.abc import Callable, Iterator

from rollmuxd.client.job import Job, Slot


class Turns:
    """The phases of a job, entered by name. ``settle`` is called before a release, and returns when the GPUs rest.

    Without a daemon, and after the job's end, everything here does nothing (``on`` is false).
    """

    def __init__(self, job: Job, settle: Callable[[], None]) -> None:
        self._job = job
        self._settle = settle
        self.on = False
        self.current: str | None = None
        self.slot: Slot | None = None

    def start(self) -> None:
        """Register the job. Raises what :meth:`rollmuxd.client.job.Job.start` raises."""
        self._job.start()
        self.on = not self._job.alone

    def go(self, phase: str) -> None:
        """Wait for a phase, having left the one before; of the one that is held, nothing. Raises ``SlotLost``."""
        if not self.on or self.current == phase:
            return
        self.leave(then=phase)
        self.slot = self._job.phase(phase).__enter__()
        self.current = phase

    def leave(self, *, then: str | None = None, error: BaseException | None = None) -> None:
        """Release what is held, if anything; ``then`` is asked for in the same call. Raises ``SlotLost``."""
        phase, self.current, self.slot = self.current, None, None
        if phase is None:
            return
        if error is None:
            self._settle()
        self._job.phase(phase, then=then).__exit__(
            type(error) if error is not None else None, error, error.__traceback__ if error is not None else None
        )

    @contextlib.contextmanager
    def within(self, phase: str, *, or_in: tuple[str, ...] = ("init",)) -> Iterator[None]:
        """Have the phase for as long as this lasts; where it, or one of ``or_in``, is held already, that will do."""
        if not self.on or self.current == phase or self.current in or_in:
            yield
            return
        self.go(phase)
        try:
            yield
        except BaseException as error:
            self.leave(error=error)
            raise
        self.leave()

    def end(self, error: BaseException | None = None) -> None:
        """Release what is held, and end the job."""
        self.on = False
        try:
            self.leave(error=error)
        finally:
            self._job.__exit__(
                type(error) if error is not None else None, error, error.__traceback__ if error is not None else None
            )
