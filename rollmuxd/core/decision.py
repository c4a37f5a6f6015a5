"""What the scheduler says to an input: facts to make durable, then an answer to give, then effects to perform."""

from typing import Any

from msgspec import Struct

from rollmuxd.core.causes import Cause
from rollmuxd.core.effects import Effect
from rollmuxd.core.facts import Fact
from rollmuxd.core.ids import GpuId, JobId, Millis, SessionId, SlotId


class Directive(Struct, frozen=True):
    """What a running slot's holder is asked to do: ``shrink`` to ``keep``, or ``stop``. It may also be offered to
    ``grow``, to ``gpus``. ``move`` says that its next iterations will be on ``gpus``. ``yield`` asks a filler to
    give its slot back ``within_ms``.
    """

    kind: str
    slot: SlotId | None = None
    keep: tuple[GpuId, ...] = ()
    reason: Cause | None = None
    gpus: tuple[GpuId, ...] = ()
    #: counted from when it was asked: the answer that has it is sent at once
    within_ms: Millis = 0


class Answer(Struct, frozen=True):
    """The answer to the caller: ids of what the input made or found; the state has the rest."""

    job: JobId | None = None
    session: SessionId | None = None
    slot: SlotId | None = None
    next_slot: SlotId | None = None
    next_refused: Cause | None = None
    directives: tuple[Directive, ...] = ()
    #: the same input was answered before, nothing has changed
    repeated: bool = False


class Decision(Struct, frozen=True):
    """One input's outcome. Make ``facts`` durable, then give ``answer``, then perform ``effects`` in order."""

    facts: tuple[Fact, ...]
    effects: tuple[Effect, ...]
    answer: Answer


class Reason(Struct, frozen=True):
    """Why something waits: a code for programs, numbers, a sentence for people."""

    code: str
    text: str
    data: dict[str, Any] = {}
