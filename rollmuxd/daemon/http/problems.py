"""How no is said over HTTP: ``application/problem+json`` (RFC 9457), one shape for every error.

``type`` is a word for programs (``urn:rollmux:problem:stale_fence``), ``detail`` a sentence for people, ``data`` the
parts of the sentence. The core's errors carry their parts as attributes; those become ``data`` as they are.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from rollmuxd.core import errors
from rollmuxd.daemon.access.gate import Forbidden, NotKnown
from rollmuxd.daemon.journal.file import JournalError
from rollmuxd.daemon.writer import Unavailable
from rollmuxd.explain.causes import refusal, sentence
from rollmuxd.wire.answers import Problem

MEDIA_TYPE: Final = "application/problem+json"


class Kind(NamedTuple):
    """What an exception is over HTTP."""

    code: str
    status: int
    title: str
    #: seconds after which it is worth another try
    retry_after: int | None = None


class Refusal(Exception):
    """A refusal that the HTTP layer itself makes. What the core refuses is a ``Rejected``."""

    def __init__(
        self,
        kind: Kind,
        detail: str,
        *,
        data: Mapping[str, Any] | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(detail)
        self.kind, self.detail, self.data, self.headers = kind, detail, dict(data or {}), headers


BAD_REQUEST = Kind("bad_request", 400, "The request cannot be read")
INVALID = Kind("invalid", 422, "The request is not valid")
UNKNOWN = Kind("unknown", 404, "There is no such thing")
NOT_KNOWN = Kind("unauthorized", 401, "The caller is not known")
FORBIDDEN = Kind("forbidden", 403, "Not allowed")
CONFLICT = Kind("conflict", 409, "Its status does not allow it")
BAD_METHOD = Kind("method_not_allowed", 405, "This path does not have that method")
TOO_MUCH = Kind("too_much", 422, "The answer would take too much")
TOO_LARGE = Kind("too_large", 413, "The body is too large")
HEAD_TOO_LARGE = Kind("head_too_large", 431, "The headers are too large")
SLOW = Kind("too_slow", 408, "The call took too long to arrive")
FULL = Kind("full", 503, "Too many connections", retry_after=5)
TOO_FAST = Kind("too_fast", 429, "Too many calls")
BAD_TYPE = Kind("unsupported_media_type", 415, "The body is of a kind that is not read here")
AWAY = Kind("host_away", 503, "The host cannot be asked now", retry_after=5)
GONE = Kind("gone", 410, "It is not kept any more")
ANOTHER_JOURNAL = Kind("another_journal", 410, "The daemon has another journal")
SLOT_ENDED = Kind("slot_ended", 409, "The slot has ended")
DRAINING = Kind("draining", 503, "The daemon is being stopped", retry_after=2)
INTERNAL = Kind("internal", 500, "A bug of ours")

#: The core's errors, and the writer's. The most special class counts; a test proves that none is left out.
KINDS: Final[Mapping[type[Exception], Kind]] = {
    errors.UnknownThing: UNKNOWN,
    errors.StaleFence: Kind("stale_fence", 409, "The fence is not the slot's"),
    errors.RunAlive: Kind("run_alive", 409, "Another process runs this job"),
    errors.TakesNoRequests: CONFLICT,
    errors.Conflict: CONFLICT,
    errors.Impossible: Kind("impossible", 422, "It can never be met"),
    errors.TooMany: Kind("too_many", 429, "A limit is reached", retry_after=10),
    errors.Rejected: Kind("rejected", 409, "Refused"),
    errors.BrokenInvariant: INTERNAL,
    Unavailable: Kind("unavailable", 503, "The journal cannot be written", retry_after=1),
    JournalError: Kind("unavailable", 503, "The journal cannot be read", retry_after=5),
    NotKnown: NOT_KNOWN,
    Forbidden: FORBIDDEN,
}

# What a caller may know of a bug: that it is one. The traceback is in the log, under the request id.
_INTERNAL_DETAIL = "an unexpected error; the daemon's log has it under this request id"


def problem_of(error: Exception, request_id: str) -> tuple[Problem, tuple[tuple[str, str], ...]]:
    """The problem body and extra headers that an exception comes to."""
    headers: tuple[tuple[str, str], ...] = ()
    if isinstance(error, Refusal):
        kind, detail, data, headers = error.kind, error.detail, error.data, error.headers
    else:
        kind = next((KINDS[cls] for cls in type(error).__mro__ if cls in KINDS), INTERNAL)
        detail = _INTERNAL_DETAIL if kind is INTERNAL else refusal(error)
        data = {} if kind in (INTERNAL, NOT_KNOWN) else _parts(error)
    if kind.status == 401:
        headers += (("www-authenticate", 'Bearer realm="rollmux"'),)
    retry_after = getattr(error, "retry_after_s", kind.retry_after)
    if retry_after is not None:
        headers += (("retry-after", str(retry_after)),)
    problem = Problem(
        title=kind.title,
        status=kind.status,
        detail=detail,
        type=f"urn:rollmux:problem:{kind.code}",
        request_id=request_id,
        data=data,
    )
    return problem, headers


def _parts(error: Exception) -> dict[str, Any]:
    plain = (str, int, float, bool, list, tuple, dict)
    parts = {name: it for name, it in vars(error).items() if not name.startswith("_") and isinstance(it, plain)}
    because = sentence(getattr(error, "because", None))
    return {**parts, "reason": because} if because else parts
