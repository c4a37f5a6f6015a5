"""The calls of a job's process, as data: what to send, what comes back, how long it may take. Sends nothing.

``repeat`` says whether sending it twice does it once. Nearly everything may: registrations carry an idempotency key,
slot requests a request id, releases a fence.
"""

from typing import Any, Generic, TypeVar
from urllib.parse import quote

from msgspec import Struct

from rollmuxd.wire.answers import (
    ChannelView,
    JobView,
    RegisteredView,
    ReleaseView,
    SessionView,
    SlotView,
)
from rollmuxd.wire.requests import (
    EndBody,
    GrowBody,
    RegisterBody,
    ReleaseBody,
    ResultBody,
    SessionBody,
    ShrinkBody,
    SlotBody,
)

T = TypeVar("T")

#: seconds for a call that blocks on nothing but the daemon's disk
PROMPT_S = 10.0
#: for a question or a report that is answered after others, each of which may take 20 s of processor time
QUESTION_S = 120.0
#: what a blocking call may take beyond what it asked for, before we think that no daemon is there
GRACE_S = 15.0
#: a release may park the state inside the call (``park=at_release``): minutes, on a large model
RELEASE_S = 600.0


class Call(Struct, Generic[T], frozen=True):
    """One request."""

    method: str
    #: already quoted
    path: str
    #: decodes the answer; None: the answer does not matter
    answer: Any
    body: Any = None
    params: dict[str, Any] = {}
    timeout_s: float = PROMPT_S
    repeat: bool = True
    #: the journal in which the ids were given; a daemon that has another one refuses the call. "": whichever it has
    journal: str = ""

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


def _id(name: str) -> str:
    # Node ids hold slashes (host1/gpu0-3) and stay one segment.
    return quote(name, safe="")


# ---- jobs ------------------------------------------------------------------------------------------------------------


def register(body: RegisterBody) -> Call[RegisteredView]:
    """Register a job, or a new run of it."""
    # Without a key a repeated registration would be another run.
    return Call("POST", "/v1/jobs", RegisteredView, body, repeat=bool(body.idempotency_key))


def job(job: str) -> Call[JobView]:
    """Return one job."""
    return Call("GET", f"/v1/jobs/{_id(job)}", JobView)


def end_job(job: str, reason: str = "", session: str = "", run: int = 0, *, finished: bool = False) -> Call[JobView]:
    """End a job and free all it held; as a process's own, as its session; only while it is in that run."""
    body = EndBody(reason=reason[:1000], session=session or None, run=run or None, finished=finished)
    return Call("DELETE", f"/v1/jobs/{_id(job)}", None, body)


# ---- sessions --------------------------------------------------------------------------------------------------------


def open_session(job: str, body: SessionBody) -> Call[SessionView]:
    """Say that this process is there; fences an older session of the same run."""
    return Call("POST", f"/v1/jobs/{_id(job)}/sessions", SessionView, body)


def give_back(session: str) -> Call[SessionView]:
    """Release what the session holds, and withdraw what it waits for."""
    return Call("POST", f"/v1/sessions/{_id(session)}/give-back", SessionView)


def close_session(session: str) -> Call[None]:
    """Leave in good order; the job stays."""
    return Call("DELETE", f"/v1/sessions/{_id(session)}", None)


# ---- slots -----------------------------------------------------------------------------------------------------------


def request_slot(job: str, body: SlotBody) -> Call[SlotView]:
    """Ask for a slot, blocking up to ``body.wait_s``."""
    return Call("POST", f"/v1/jobs/{_id(job)}/slots", SlotView, body, timeout_s=body.wait_s + GRACE_S)


def release(slot: str, body: ReleaseBody) -> Call[ReleaseView]:
    """End a slot, and perhaps ask for the next one."""
    return Call("POST", f"/v1/slots/{_id(slot)}/release", ReleaseView, body, timeout_s=RELEASE_S)


def shrink(slot: str, body: ShrinkBody) -> Call[SlotView]:
    """Say that GPUs of a running slot were given back."""
    return Call("POST", f"/v1/slots/{_id(slot)}/shrink", SlotView, body)


def grow(slot: str, body: GrowBody) -> Call[SlotView]:
    """Take the GPUs that were offered; answered when the job's state is loaded onto them."""
    return Call("POST", f"/v1/slots/{_id(slot)}/grow", SlotView, body, timeout_s=RELEASE_S)


# ---- channel ---------------------------------------------------------------------------------------------------------


def orders(job: str, rank: int, session: str, wait_s: float) -> Call[ChannelView]:
    """Wait for the next order of a rank, which dials in by that."""
    params = {"rank": rank, "session": session, "wait_s": wait_s}
    path = f"/v1/channel/{_id(job)}/orders"
    return Call("GET", path, ChannelView, params=params, timeout_s=wait_s + GRACE_S)


def result(job: str, body: ResultBody) -> Call[None]:
    """Say what became of an order."""
    return Call("POST", f"/v1/channel/{_id(job)}/results", None, body)
