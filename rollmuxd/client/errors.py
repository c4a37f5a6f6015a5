"""What can go wrong, as the client tells it.

    RollmuxError
      NoDaemon               a daemon is required and none was found; says where we looked and what to do
        Unreachable          one is configured and does not answer (while a job runs this is retried, not raised)
      GaveUp                 retrying took longer than ROLLMUX_GIVE_UP_S, or than a start may take
      BadAnswer              something answered, and it was no rollmuxd
      Refused                the daemon said no: status, detail, data, request_id
        Unauthorised         401, 403: no API key, or not one that may do this
        NotFound             404, 410: it is not there, or the daemon has another journal by now
        Conflict             409
          JobAlive           another process runs this job: name, pid and host are in ``data``
        Unprocessable        422: can never be met, or is no valid request; names what is short
        TooManyRequests      429: a limit is reached (retried while a job runs)
        Unavailable          408, 502, 503, 504: not now (retried while a job runs)
      JobEnded               the job was ended or lost; this process should save and stop
      SlotFaulted            the job's state could not be loaded; the phase has not begun
      SlotLost               the slot was lost or revoked while the phase ran; raised when it is left

Every error pickles (trainers send them between processes), which is why each takes one message and the rest as
keywords.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class RollmuxError(Exception):
    """Base of all errors of the client."""


class NoDaemon(RollmuxError):
    """There is no daemon to talk to."""


class Unreachable(NoDaemon):
    """The daemon does not answer. Whether it got the call is not known, unless nothing listens there."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(f"{message}; {remedy}" if remedy else message)
        #: what to do about it, where that is known; it ends the message
        self.remedy = remedy


class GaveUp(RollmuxError):
    """The daemon did not answer for longer than we were told to wait. What is held there stays held."""


class BadAnswer(RollmuxError):
    """The answer could not be understood: a proxy, another program on that port, or a much newer daemon."""


class Refused(RollmuxError):
    """The daemon understood and said no. Nothing has changed there."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 0,
        detail: str = "",
        data: Mapping[str, Any] | None = None,
        request_id: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.detail = detail or message
        #: parts of the refusal for programs
        self.data: dict[str, Any] = dict(data or {})
        #: stands in the daemon's log beside what happened
        self.request_id = request_id
        #: how long the daemon asks us to wait before the next try
        self.retry_after_s = retry_after_s


class Unauthorised(Refused):
    """No API key, a wrong one, or one that may not do this."""


class NotFound(Refused):
    """There is no such thing (any more)."""


class Conflict(Refused):
    """The thing is not in a status that allows it."""


class JobAlive(Conflict):
    """Another process runs this job. End it, or register with ``replace=True`` to take its place."""


class Unprocessable(Refused):
    """It can never be met, and why; or it is no valid request."""


class TooManyRequests(Refused):
    """A limit is reached."""


class Unavailable(Refused):
    """The daemon, or a proxy before it, cannot answer just now, or our call has not reached it in time."""


class JobEnded(RollmuxError):
    """The job is over for the daemon (ended by a call, or lost); it gets no further slots."""


class _SlotError(RollmuxError):
    def __init__(self, message: str, *, slot: str = "", phase: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.slot = slot
        self.phase = phase
        self.reason = reason


class SlotFaulted(_SlotError):
    """The job's state could not be loaded, so the phase has not begun. The GPUs are not ours."""


class SlotLost(_SlotError):
    """The GPUs may have been given to another job while the phase ran: treat its results with care."""


_BY_STATUS: dict[int, type[Refused]] = {
    401: Unauthorised,
    403: Unauthorised,
    404: NotFound,
    408: Unavailable,  # it has not arrived, for the network or for us: we may have been stopped in its midst
    409: Conflict,
    410: NotFound,
    422: Unprocessable,
    429: TooManyRequests,
    502: Unavailable,
    503: Unavailable,
    504: Unavailable,
}


def refused(status: int, detail: str, **parts: Any) -> Refused:
    """Return the error for an answer of that status; ``parts`` are those of :class:`Refused`."""
    kind = _BY_STATUS.get(status, Refused)
    # Only this refusal names a process; the route alone does not tell, as `next` and sessions conflict as well.
    if kind is Conflict and "pid" in (parts.get("data") or {}):
        kind = JobAlive
    message = detail or f"the daemon answered {status}"
    if kind is JobAlive and _is_this_process(parts["data"]):
        message = (
            "this very process runs the job already, by another rollmuxd.job object (a cell run twice?): end() it, "
            "or say replace=True to take its place. To run both, give this one another name"
        )
    if kind is Unauthorised:
        message += " (the API key comes from ROLLMUX_API_KEY, ROLLMUX_API_KEY_FILE or ~/.config/rollmux/key)"
    return kind(message, status=status, detail=detail, **parts)


def _is_this_process(told: Mapping[str, Any]) -> bool:
    """Also a container's first process has the pid and the host of the one before the container's restart."""
    from rollmuxd.client.session import this_process

    own = this_process("")
    return (told.get("pid"), told.get("host"), told.get("started")) == (own.pid, own.host, own.started)


def in_words(error: BaseException) -> str:
    """Return an error as text that can be sent: file names may hold bytes that are no text, and some errors fail at it.

    (What ends a job, or fails a hook, must reach the daemon whatever it is.)
    """
    name = type(error).__name__
    try:
        return f"{name}: {error}".encode(errors="backslashreplace").decode()
    except Exception:
        return name


def is_interruption(error: BaseException | None) -> bool:
    """Whether the user wants the prompt back (Ctrl-C, a cancelled task), rather than that something failed."""
    # By name: asyncio takes 40 ms to import, and a program that cancels has imported it.
    # (That of concurrent.futures says that other work was cancelled: an error like any other.)
    cancelled = type(error).__name__ == "CancelledError" and not isinstance(error, Exception)
    return cancelled or isinstance(error, KeyboardInterrupt)


def ends_well(error: BaseException | None) -> bool:
    """Whether a loop that this has left is through: nothing has, or ``sys.exit`` with the status 0."""
    if isinstance(error, SystemExit):
        return error.code is None or (isinstance(error.code, int) and error.code == 0)
    return error is None


def why_it_ends(error: BaseException | None) -> str:
    """The reason with which a job ends whose loop this has left."""
    if error is None or ends_well(error):
        return "finished"
    return "interrupted" if is_interruption(error) else f"failed: {in_words(error)}"


@contextmanager
def beside(error: BaseException | None, when: str) -> Iterator[None]:
    """Clean up after an error, which is the one to be seen: what fails here is a note of it. None: it is raised."""
    try:
        yield
    except Exception as trouble:
        if error is None:
            raise
        error.add_note(f"rollmuxd, when {when}: {in_words(trouble)}")
