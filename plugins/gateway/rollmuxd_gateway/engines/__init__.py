"""How engines are talked to: a dialect each, as pure functions from what the core asks to HTTP, and back."""

from collections.abc import Mapping
from typing import Any, Final, Protocol

from msgspec import Struct

from rollmuxd_gateway.core import effects as e
from rollmuxd_gateway.core import inputs as i
from rollmuxd_gateway.core.model import Replica, Request


class Call(Struct, frozen=True):
    """One HTTP call to an engine."""

    method: str
    path: str
    body: Any = None
    headers: Mapping[str, str] | None = None


class Facts(Struct):
    """What an engine says of itself when it is registered; what it does not say stays as it is configured."""

    models: tuple[str, ...] = ()
    weights: str = ""
    positional_seed: bool = False
    logprobs_mode: str = ""
    max_num_seqs: int = 0
    kv_tokens: int = 0
    asleep: bool = False
    #: whether it still has its weights after a sleep of the lightest kind
    keeps_weights: bool = True


class Seen(Struct):
    """What a segment's stream has brought so far."""

    tokens: int = 0
    text: int = 0


class InBand(Exception):
    """An error within an answer of status 200."""


class Dialect(Protocol):
    """One kind of engine."""

    name: str
    #: it decodes with an incremental stream (tokenizers' DecodeStream), with two consequences. Text that ends within a
    #: character is never shown. A prompt that ends within one is taken for new text, in which stop strings are found
    streams_text: bool

    def generate(self, it: e.Open, request: Request, interval: int) -> Call:
        """The call that begins a segment."""

    def read(self, data: bytes, request: Request, k: int, seen: Seen) -> i.Tokens | None:
        """One event of the stream; its news goes into ``seen``. Raises InBand."""

    def abort(self, it: e.Abort) -> Call | None:
        """The call that ends a segment; None: closing its socket is enough."""

    def busy(self) -> Call:
        """Ask how many requests run and wait."""

    def read_busy(self, body: bytes) -> tuple[int, int]:
        """Running and waiting. Raises ValueError for what is no such answer."""

    def is_paused(self) -> Call | None:
        """Ask whether the framework has paused it (``{"is_paused": ...}``); None: it cannot be asked."""

    def read_preemptions(self, body: bytes) -> int | None:
        """What the answer to :meth:`busy` says of requests that lost their KV cache since it began; None: nothing."""

    def park(self, replica: Replica) -> Call:
        """Put it to sleep."""

    def is_asleep(self) -> Call | None:
        """Ask whether it sleeps (``{"is_sleeping": ...}``); None: it cannot be asked."""

    def wake(self) -> Call:
        """Wake it."""

    def facts(self) -> tuple[Call, ...]:
        """Ask what it is."""

    def read_facts(self, answers: list[bytes]) -> Facts:
        """What its answers say; an empty one is a call that failed."""

    def detokenize(self, ids: list[int], model: str) -> Call:
        """Ask for the text of ids; the answer is ``{"prompt": ...}`` or ``{"text": ...}``."""


def of(name: str) -> Dialect:
    """The dialect of a kind of engine."""
    from rollmuxd_gateway.engines import sglang, vllm

    return sglang.Sglang() if name == "sglang" else vllm.Vllm()


KINDS: Final = ("vllm", "sglang")


def gauge(body: bytes, name: bytes) -> float | None:
    """The sum of a gauge or counter over its labels, in Prometheus' text; None: it is not there."""
    total, found = 0.0, False
    for line in body.split(b"\n"):
        if line.startswith(name) and line[len(name) : len(name) + 1] in (b"{", b" "):
            total, found = total + float(line.rpartition(b" ")[2]), True
    return total if found else None
