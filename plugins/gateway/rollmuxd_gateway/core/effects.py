"""What the core asks for. The app carries effects out in order; results come back as inputs."""

from typing import Any, TypeAlias

from msgspec import Struct

from rollmuxd_gateway.core.arrays import Ids


class Open(Struct):
    """Send segment ``k`` of a request to a replica: the prompt and what was generated, with these parameters."""

    request: str
    k: int
    replica: str
    #: ids of the prompt and of all that was generated; None: send ``text``
    prompt: Ids | None
    text: str | None
    params: dict[str, Any]


class Abort(Struct):
    """End a segment at the engine; what it still sends is not wanted."""

    request: str
    k: int
    replica: str


class Deliver(Struct):
    """Tokens ``start`` to ``end`` of a streamed request may go to the client."""

    request: str
    start: int
    end: int


class End(Struct):
    """A request is over, well or not: compose its answer."""

    request: str


class Probe(Struct):
    """Ask a replica whether it is well, and what runs there."""

    replica: str


class Park(Struct):
    """Put an idle replica to sleep."""

    replica: str


class Wake(Struct):
    """Wake a replica, unless it is awake."""

    replica: str


class Write(Struct):
    """Send a replica the weights of this step again: it slept when they came."""

    replica: str


class Died(Struct):
    """A replica is dead: its owner wants to know."""

    replica: str


class Revive(Struct):
    """A dead replica answers: see what it is, and register it again."""

    replica: str


Effect: TypeAlias = Open | Abort | Deliver | End | Probe | Park | Wake | Write | Died | Revive
