"""The calls of a job's process, as data: what to send, what comes back, how long it may take. Sends nothing.

``repeat`` says whether sending it twice does it once. Nearly everything may: registrations carry an idempotency key,
slot requests a request id, releases a fence.
"""

from typing import Any, Generic, TypeVar
from urllib.parse import quote

from msgspec import Struct

from rollmuxd.wire.answers import ChannelView, JobView, RegisteredView, ReleaseView, SessionView, SlotView
from rollmuxd.wire.requests import EndBody, RegisterBody

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


class Kind(Struct, Generic[T], frozen=True):
    """A kind of call about one thing, whose id takes the place of ``{}`` in the path; called, it makes the call."""

    method: str
    path: str
    answer: type[T] | None
    timeout_s: float = PROMPT_S

    def __call__(self, id: str, body: Any = None, *, params: dict[str, Any] | None = None) -> Call[T]:
        """Return the call about this thing. What its body or its parameters let it block for is added to its time."""
        # Node ids hold slashes (host1/gpu0-3) and stay one segment.
        path, params = self.path.format(quote(id, safe="")), params or {}
        wait_s = params.get("wait_s", getattr(body, "wait_s", 0.0))
        return Call(self.method, path, self.answer, body, params, self.timeout_s + wait_s)


def register(body: RegisterBody) -> Call[RegisteredView]:
    """Register a job, or a new run of it."""
    # Without a key a repeated registration would be another run.
    return Call("POST", "/v1/jobs", RegisteredView, body, repeat=bool(body.idempotency_key))


def end_job(job: str, reason: str = "", session: str = "", run: int = 0, *, finished: bool = False) -> Call[None]:
    """End a job and free all it held; as a process's own, as its session; only while it is in that run."""
    return _END(job, EndBody(reason=reason[:1000], session=session or None, run=run or None, finished=finished))


#: one job
job = Kind("GET", "/v1/jobs/{}", JobView)
_END = Kind[None]("DELETE", "/v1/jobs/{}", None)
#: this process is there (``SessionBody``); fences an older session of the same run
open_session = Kind("POST", "/v1/jobs/{}/sessions", SessionView)
#: release what the session holds, and withdraw what it waits for
give_back = Kind("POST", "/v1/sessions/{}/give-back", SessionView)
#: leave in good order; the job stays
close_session = Kind[None]("DELETE", "/v1/sessions/{}", None)
#: ask for a slot (``SlotBody``), blocking
request_slot = Kind("POST", "/v1/jobs/{}/slots", SlotView, GRACE_S)
#: end a slot (``ReleaseBody``), and perhaps ask for the next one
release = Kind("POST", "/v1/slots/{}/release", ReleaseView, RELEASE_S)
#: GPUs of a running slot were given back (``ShrinkBody``)
shrink = Kind("POST", "/v1/slots/{}/shrink", SlotView)
#: take the GPUs that were offered (``GrowBody``); answered when the job's state is loaded onto them
grow = Kind("POST", "/v1/slots/{}/grow", SlotView, RELEASE_S)
#: wait for the next order of a rank (``rank``, ``session``), which dials in by that
orders = Kind("GET", "/v1/channel/{}/orders", ChannelView, GRACE_S)
#: what became of an order (``ResultBody``)
result = Kind[None]("POST", "/v1/channel/{}/results", None)
