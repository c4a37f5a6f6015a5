"""What comes into the core: requests of clients, reports of engines, and what operators and the daemon ask."""

from typing import Any, TypeAlias

from msgspec import Struct

from rollmuxd_gateway.core.arrays import Floats, Ids
from rollmuxd_gateway.core.model import Replica, Request


class Arrive(Struct):
    """A call came, with these responses to generate."""

    requests: list[Request]


class Tokens(Struct):
    """A replica generated tokens. ``finish`` is empty while it continues."""

    request: str
    k: int
    ids: Ids
    logprobs: Floats
    text: str = ""
    finish: str = ""
    stop_reason: Any = None
    prompt: Ids | None = None
    #: of each token the alternatives, and its text; None: not asked for
    top: list[dict[str, float] | None] | None = None
    names: list[str] | None = None
    weights: str = ""
    extra: dict[str, Any] | None = None
    #: length of the prompt, of an engine that does not say its ids
    prompt_tokens: int | None = None


class Fault(Struct):
    """A segment broke off. ``kind``: reset, eof, in_band, server_error, connect."""

    request: str
    k: int
    kind: str
    detail: str = ""


class Refused(Struct):
    """The engine answered 4xx: the client's own error."""

    request: str
    k: int
    status: int
    body: Any


class FalseStop(Struct):
    """A continuation ended with a stop string that is in its prompt, and not in the response.

    vLLM takes a prompt that ends within a character for new text.
    """

    request: str
    k: int


class Gone(Struct):
    """The client of a call went away."""

    call: str


class Cancel(Struct):
    """The framework aborts these requests: what they have so far is their answer."""

    requests: tuple[str, ...]


class Probed(Struct):
    """A replica was asked how it is. ``ok`` False: it did not answer, or not as a healthy engine does.

    ``paused`` None: it does not say, or was not asked.
    """

    replica: str
    ok: bool
    running: int = 0
    waiting: int = 0
    paused: bool | None = None


class Parked(Struct):
    """A replica was put to sleep, or was not."""

    replica: str
    ok: bool
    why: str = ""


class Woken(Struct):
    """A replica was woken, or was not. ``whole`` False: it has room for weights, and no KV cache yet."""

    replica: str
    ok: bool
    why: str = ""
    whole: bool = True


class Register(Struct):
    """A replica is there, new or again."""

    replica: Replica


class Remove(Struct):
    """A replica leaves; what is live there is continued elsewhere."""

    replica: str


class Weights(Struct):
    """The framework wrote weights to these replicas. ``once``: how, where that cannot be done again."""

    replicas: tuple[str, ...]
    version: str
    once: str = ""


class Paused(Struct):
    """The framework paused these replicas, or resumed them."""

    replicas: tuple[str, ...]
    paused: bool


class BeginRollout(Struct):
    """A rollout begins on these GPUs. ``gpus`` None: on all replicas; ``total`` 0: not known."""

    total: int = 0
    gpus: tuple[str, ...] | None = None


class CloseRollout(Struct):
    """The rollout is over."""


class Boundary(Struct):
    """Engines are about to be woken for the next rollout: which rung is it?"""

    #: GPUs of the slot; None: all
    gpus: tuple[str, ...] | None = None
    #: preemptions that the engines of the present rung have counted since they began; None: not known
    preemptions: int | None = None


class Shrink(Struct):
    """The daemon asks to keep these GPUs only; see :meth:`~rollmuxd_gateway.core.gateway.Gateway.plan_shrink`."""

    keep: tuple[str, ...]


class Grow(Struct):
    """The slot has these GPUs now."""

    gpus: tuple[str, ...]


class Stop(Struct):
    """The slot is lost: nothing may run on its GPUs any more."""

    reason: str


class Move(Struct):
    """Continue a request on another replica; ``target`` empty: on the best."""

    request: str
    target: str = ""
    why: str = "moved"


class Tick(Struct):
    """Nothing but time has passed."""


Input: TypeAlias = (
    Arrive
    | Tokens
    | Fault
    | Refused
    | FalseStop
    | Gone
    | Cancel
    | Probed
    | Parked
    | Woken
    | Register
    | Remove
    | Weights
    | Paused
    | BeginRollout
    | CloseRollout
    | Boundary
    | Shrink
    | Grow
    | Stop
    | Move
    | Tick
)
