"""How clients are answered: a dialect each, from a body to requests, and from requests to an answer."""

from array import array
from typing import Any, Final, Protocol

from msgspec import Struct

from rollmuxd_gateway.core.arrays import Ids
from rollmuxd_gateway.core.model import Request

#: samples of one call at most
SAMPLES: Final = 4096


class BadCall(Exception):
    """A body that cannot be meant; the message says what is wrong with it."""


class Plan(Struct):
    """What a body asks for: requests without ids, and what the answer needs to know."""

    requests: list[Request]
    streamed: bool = False
    shape: dict[str, Any] = {}
    #: samples of each prompt
    n: int = 1
    #: the client's own name for the call (``X-Request-Id``, or ``request_id`` in the body); else one of ours
    name: str = ""


class Answer(Struct):
    """A response that is over, with its text."""

    request: Request
    text: str


class Front(Protocol):
    """One dialect."""

    name: str

    def plan(self, path: str, body: dict[str, Any]) -> Plan:
        """Read a body. Raises BadCall."""

    def compose(self, plan: Plan, answers: list[Answer], created: int) -> dict[str, Any]:
        """The answer of a call that does not stream."""

    def chunk(self, plan: Plan, answer: Answer, start: int, end: int, created: int) -> dict[str, Any] | None:
        """One event of a stream: tokens ``start`` to ``end``, with ``answer.text`` as their text. None: say nothing."""

    def last(self, plan: Plan, created: int) -> dict[str, Any] | None:
        """The event after all others of a stream; None: there is none."""

    def client_ids(self, plan: Plan, prompt: int) -> tuple[str, ...]:
        """By which names the samples of a prompt may be aborted: those of the answer, and those of an engine."""

    def error(self, status: int, why: str) -> dict[str, Any]:
        """The body of a failure."""


def ids_in(value: Any) -> Ids:
    """Ids, as an array. Raises BadCall."""
    try:
        found = array("i", value)
    except (TypeError, ValueError, OverflowError):
        raise BadCall("a prompt has something else than ids of tokens") from None
    if not found or min(found) < 0:
        raise BadCall("a prompt needs ids of tokens, none of them below 0, and one at least")
    return found


def number(body: dict[str, Any], name: str, default: int, low: int, high: int) -> int:
    """A whole number within bounds. Raises BadCall."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise BadCall(f"{name} has to be a whole number from {low} to {high}")
    return value


def checked(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters that this program computes with, checked. Raises BadCall."""
    number(params, "seed", 0, -(2**63), 2**63 - 1)
    number(params, "min_tokens", 0, 0, 2**31)
    stop = params.get("stop")
    strings = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(strings, list) or len(strings) > 64 or not all(isinstance(s, str) and s for s in strings):
        raise BadCall("stop has to be a string, or at most 64 of them, none of them empty")
    return {name: value for name, value in params.items() if value is not None}


def samples(prompt: Ids | None, text: str | None, params: dict[str, Any], n: int, **more: Any) -> list[Request]:
    """``n`` requests for one prompt; a seed is counted up, as engines do."""
    found = []
    for index in range(n):
        own = dict(params)
        if n > 1 and own.get("seed") is not None:
            own["seed"] = int(own["seed"]) + index
        found.append(Request("", "", index, "", prompt, text, own, **more))
    return found


def segments(answers: list[Answer]) -> dict[str, Any]:
    """Where each response was generated: ``[replica, from, to, why, weights]`` of each segment."""
    found = [
        [[one.replica, one.start, one.end, one.why, one.weights] for one in answer.request.segments]
        for answer in answers
    ]
    versions = {answer.request.weights for answer in answers}
    return {
        "segments": found[0] if len(found) == 1 else found,
        "weights": versions.pop() if len(versions) == 1 else [answer.request.weights for answer in answers],
    }


def usage(plan: Plan) -> dict[str, int]:
    """Tokens of the whole call: each prompt once, and all samples."""
    asked = sum(request.prompt_tokens for request in plan.requests[:: plan.n])
    generated = sum(len(request.ids) for request in plan.requests)
    return {"prompt_tokens": asked, "completion_tokens": generated, "total_tokens": asked + generated}


def include_usage(body: dict[str, Any]) -> bool:
    """Whether a stream ends with its usage."""
    options = body.get("stream_options")
    return isinstance(options, dict) and bool(options.get("include_usage"))


def finish(request: Request) -> str:
    """Why it ended, in the words of all engines."""
    return request.finish or "abort"
