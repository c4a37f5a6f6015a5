"""Every call of the HTTP interface, as data: what to send, what comes back, how long it may take. Sends nothing.

``repeat`` says whether sending it twice does it once. Nearly everything may: registrations carry an idempotency key,
slot requests a request id, releases a fence.
"""

from typing import Any, Generic, TypeVar
from urllib.parse import quote

from msgspec import Struct

from rollmuxd.wire.answers import (
    ChannelView,
    Explanation,
    FactsPage,
    HeartbeatView,
    JobView,
    KeyView,
    Page,
    RegisteredView,
    ReleaseView,
    SessionView,
    SlotView,
)
from rollmuxd.wire.requests import (
    DrainBody,
    EndBody,
    GrowBody,
    HeartbeatBody,
    KeyBody,
    RankBody,
    ReasonBody,
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
#: what a blocking call may take beyond what it asked for, before we think that nobody is there
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


def jobs(**params: Any) -> Call[Page]:
    """List jobs: ``owner``, ``state``, ``pool``, ``after``."""
    return Call("GET", "/v1/jobs", Page, params=params)


def end_job(job: str, reason: str = "", session: str = "", run: int = 0) -> Call[JobView]:
    """End a job and free all it held; as a process's own, as its session; only while it is in that run."""
    body = EndBody(reason=reason[:1000], session=session or None, run=run or None)
    return Call("DELETE", f"/v1/jobs/{_id(job)}", None, body)


def pause(job: str) -> Call[JobView]:
    """Keep a job from its next phase."""
    return Call("POST", f"/v1/jobs/{_id(job)}/pause", JobView)


def resume(job: str) -> Call[JobView]:
    """Let a paused job go on."""
    return Call("POST", f"/v1/jobs/{_id(job)}/resume", JobView)


def reinstate(job: str) -> Call[JobView]:
    """Take a quarantined job back among the waiting ones."""
    return Call("POST", f"/v1/jobs/{_id(job)}/reinstate", JobView)


def explain(job: str) -> Call[Explanation]:
    """Why it waits, or where it sits and why."""
    return Call("GET", f"/v1/jobs/{_id(job)}/explain", Explanation)


# ---- sessions --------------------------------------------------------------------------------------------------------


def open_session(job: str, body: SessionBody) -> Call[SessionView]:
    """Say that this process is there; fences an older session of the same run."""
    return Call("POST", f"/v1/jobs/{_id(job)}/sessions", SessionView, body)


def heartbeat(session: str, body: HeartbeatBody) -> Call[HeartbeatView]:
    """Renew the lease; may bring directives."""
    return Call("POST", f"/v1/sessions/{_id(session)}/heartbeat", HeartbeatView, body)


def close_session(session: str) -> Call[None]:
    """Leave in good order; the job stays."""
    return Call("DELETE", f"/v1/sessions/{_id(session)}", None)


# ---- slots -----------------------------------------------------------------------------------------------------------


def request_slot(job: str, body: SlotBody) -> Call[SlotView]:
    """Ask for a slot, blocking up to ``body.wait_s``."""
    return Call("POST", f"/v1/jobs/{_id(job)}/slots", SlotView, body, timeout_s=body.wait_s + GRACE_S)


def slot(slot: str) -> Call[SlotView]:
    """Return one slot; its fence is told to its holder only."""
    return Call("GET", f"/v1/slots/{_id(slot)}", SlotView)


def slots(**params: Any) -> Call[Page]:
    """List slots."""
    return Call("GET", "/v1/slots", Page, params=params)


def withdraw(slot: str, session: str = "") -> Call[SlotView]:
    """Take a queued request back; as a process's own, as its session."""
    return Call("DELETE", f"/v1/slots/{_id(slot)}", None, params={"session": session} if session else {})


def release(slot: str, body: ReleaseBody) -> Call[ReleaseView]:
    """End a slot, and perhaps ask for the next one."""
    return Call("POST", f"/v1/slots/{_id(slot)}/release", ReleaseView, body, timeout_s=RELEASE_S)


def shrink(slot: str, body: ShrinkBody) -> Call[SlotView]:
    """Say that GPUs of a running slot were given back."""
    return Call("POST", f"/v1/slots/{_id(slot)}/shrink", SlotView, body)


def grow(slot: str, body: GrowBody) -> Call[SlotView]:
    """Take back the GPUs that were offered."""
    return Call("POST", f"/v1/slots/{_id(slot)}/grow", SlotView, body)


def revoke(slot: str, reason: str = "") -> Call[SlotView]:
    """End somebody's slot now (admin)."""
    return Call("POST", f"/v1/slots/{_id(slot)}/revoke", SlotView, ReasonBody(reason=reason))


# ---- operators -------------------------------------------------------------------------------------------------------


def listing(kind: str, **params: Any) -> Call[Page]:
    """List ``groups``, ``nodes``, ``hosts``, ``pools``, ``slots`` or ``keys``."""
    return Call("GET", f"/v1/{kind}", Page, params=params)


def one(kind: str, id: str) -> Call[dict[str, Any]]:
    """Return one of :func:`listing`."""
    return Call("GET", f"/v1/{kind}/{_id(id)}", dict[str, Any])


def drain(kind: str, id: str, *, evict: bool = False) -> Call[Any]:
    """Put nothing new on a node or host (``kind``: ``nodes`` or ``hosts``)."""
    return Call("POST", f"/v1/{kind}/{_id(id)}/drain", Any, DrainBody(evict=evict))


def undrain(kind: str, id: str) -> Call[Any]:
    """Use a node or host again."""
    return Call("POST", f"/v1/{kind}/{_id(id)}/undrain", Any)


def plan(bodies: list[RegisterBody]) -> Call[Any]:
    """What would happen if these jobs came; changes nothing."""
    return Call("POST", "/v1/plan", Any, {"jobs": bodies}, timeout_s=60.0)


def report(**params: Any) -> Call[Any]:
    """GPU-hours held and used."""
    return Call("GET", "/v1/report", Any, params=params)


def facts(after: int = 0, wait_ms: int = 0, **params: Any) -> Call[FactsPage]:
    """The journal after a sequence number."""
    asked = {"after": after, "wait_ms": wait_ms, **params}
    return Call("GET", "/v1/facts", FactsPage, params=asked, timeout_s=wait_ms / 1000 + GRACE_S)


def add_key(body: KeyBody) -> Call[KeyView]:
    """Make an API key; its secret is in the answer, once."""
    return Call("POST", "/v1/keys", KeyView, body, repeat=False)


def revoke_key(key: str) -> Call[Any]:
    """Revoke an API key."""
    return Call("DELETE", f"/v1/keys/{_id(key)}", None)


# ---- channel ---------------------------------------------------------------------------------------------------------


def dial(job: str, rank: int, body: RankBody) -> Call[None]:
    """Say that a rank of the workload can be told to load and park."""
    return Call("POST", f"/v1/channel/{_id(job)}/ranks/{rank}", None, body)


def orders(job: str, rank: int, session: str, wait_s: float) -> Call[ChannelView]:
    """Wait for the rank's next order."""
    params = {"rank": rank, "session": session, "wait_s": wait_s}
    path = f"/v1/channel/{_id(job)}/orders"
    return Call("GET", path, ChannelView, params=params, timeout_s=wait_s + GRACE_S)


def result(job: str, body: ResultBody) -> Call[None]:
    """Say what became of an order."""
    return Call("POST", f"/v1/channel/{_id(job)}/results", None, body)
