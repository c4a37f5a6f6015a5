"""How the core says no.

Rejected                 the input is refused, nothing has changed
  UnknownThing           404  no such job, slot, session, node
  Conflict               409  the thing is not in a status that allows it
    StaleFence           409  another job holds the slot by now
    RunAlive             409  another process runs this job
    TakesNoRequests      409  the job is over, or quarantined
  Impossible             422  it can never be met, and why
  TooMany                429  a limit is reached
BrokenInvariant          our bug: the process stops; the journal has not seen it
"""

from rollmuxd.core.causes import Cause
from rollmuxd.core.ids import Millis


class Rejected(Exception):
    """The input is refused; nothing has changed. ``because`` is the cause behind it, if there is one."""

    def __init__(self, text: str, because: Cause | None = None) -> None:
        super().__init__(text)
        self.because = because


class UnknownThing(Rejected):
    """There is no such thing (any more)."""

    def __init__(self, kind: str, name: str) -> None:
        super().__init__(f"there is no {kind} {name!r}")
        self.kind, self.name = kind, name


class Conflict(Rejected):
    """A thing was asked to do what its status does not allow."""


class StaleFence(Conflict):
    """The fence is not the slot's: its holder is another by now, or the slot has ended."""

    def __init__(self, slot: str, status: str, because: Cause | None = None) -> None:
        super().__init__(f"slot {slot} is not yours any more: it is {status}", because)
        self.slot, self.status = slot, status


class RunAlive(Conflict):
    """A process of the job's present run is alive; ``lease``: since when it is silent, and when it is lost for that.

    A supervisor starts a process again at once that was killed, and would not know what to wait for.
    """

    def __init__(
        self, name: str, run: int, pid: int, host: str, lease: tuple[Millis, Millis] | None = None, started: str = ""
    ) -> None:
        process = f"pid {pid} on {host or 'an unnamed host'}" if pid else "its process has yet to open a session"
        text = f"run {run} of job {name!r} is alive: {process}; end it, or register with replace to take its place"
        if pid and lease is not None:
            silent_s, lost_in_s = lease[0] // 1000, -(-lease[1] // 1000)
            text = (
                f"run {run} of job {name!r} counts as alive: {process}, last heard of {silent_s} s ago; it is lost in "
                f"{lost_in_s} s unless it is heard of again. If it is gone: `rollmuxd job end {name}`, or register "
                "with replace=True to take its place. To run both, give this one another name"
            )
        super().__init__(text)
        self.name, self.run, self.pid, self.host, self.started = name, run, pid, host, started


class TakesNoRequests(Conflict):
    """The job is over, or quarantined: its status says which."""

    def __init__(self, name: str, status: str, because: Cause | None) -> None:
        super().__init__(f"job {name} is {status}", because)
        self.name, self.status = name, status


class Impossible(Rejected):
    """What is asked can never be met, and what is short."""


class TooMany(Rejected):
    """A limit is reached."""


class BrokenInvariant(Exception):
    """A promise of the core does not hold: a bug of ours, never the caller's."""
