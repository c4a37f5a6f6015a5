"""What the scheduler says to an input: facts to make durable, then an answer to give, then effects to perform."""

from typing import Any

from msgspec import Struct

from rollmuxd.core.effects import Effect
from rollmuxd.core.facts import Fact
from rollmuxd.core.ids import GpuId, JobId, SessionId, SlotId


class Directive(Struct, frozen=True):
    """What a running slot's holder is asked to do: ``shrink`` to ``keep``, or ``stop``; or offered: ``grow``, to
    ``gpus``; or told: ``move``, its next iterations will be on ``gpus``.
    """

    kind: str
    slot: SlotId | None = None
    keep: tuple[GpuId, ...] = ()
    reason: str = ""
    gpus: tuple[GpuId, ...] = ()


class Answer(Struct, frozen=True):
    """What the caller is told: ids of what his input made or found; the state has the rest."""

    job: JobId | None = None
    session: SessionId | None = None
    slot: SlotId | None = None
    next_slot: SlotId | None = None
    next_refused: str = ""
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
