"""``/v1/completions`` as vLLM has it; ``/v1/chat/completions`` is passed on to one replica as it came."""

from itertools import accumulate
from typing import Any, Final

from rollmuxd_gateway.core.model import Request
from rollmuxd_gateway.fronts import (
    SAMPLES,
    Answer,
    BadCall,
    Plan,
    checked,
    finish,
    ids_in,
    include_usage,
    number,
    samples,
    segments,
    usage,
)

#: fields of a call that are no sampling parameters
_OWN: Final = frozenset(
    (
        "model",
        "prompt",
        "n",
        "stream",
        "stream_options",
        "max_tokens",
        "return_token_ids",
        "stream_interval",
        "request_id",
        "session_id",
        "return_token_offsets",
    )
)
#: their answers have parts that are made of the prompt, or of things that this gateway does not know
_PASSED: Final = ("echo", "prompt_logprobs", "suffix", "use_beam_search", "prompt_embeds")


class OpenAi:
    """The dialect of OpenAI, with vLLM's additions."""

    name = "openai"

    def plan(self, path: str, body: dict[str, Any]) -> Plan:
        """A completion, or what is passed on."""
        streamed = bool(body.get("stream"))
        if path != "/v1/completions" or any(body.get(name) for name in _PASSED):
            return Plan([passed(path, body, streamed)], streamed, {"passed": True})
        n = number(body, "n", 1, 1, SAMPLES)
        best_of = number(body, "best_of", n, 1, SAMPLES)
        if best_of != n:
            return Plan([passed(path, body, streamed)], streamed, {"passed": True})
        most = number(body, "max_tokens", 16, 1, 2**31 - 1)
        params = checked({name: value for name, value in body.items() if name not in _OWN and name != "best_of"})
        number(params, "logprobs", 0, 0, 100)
        as_ids = bool(params.pop("return_tokens_as_token_ids", False))
        if "logprobs" in params:
            params["return_tokens_as_token_ids"] = as_ids
        prompts = _prompts(body.get("prompt"))
        if len(prompts) * n > SAMPLES:
            raise BadCall(f"{len(prompts)} prompts with n = {n} are more than {SAMPLES} responses")
        requests: list[Request] = []
        for ids, text in prompts:
            more = {"model": str(body.get("model") or ""), "max_tokens": most, "streamed": streamed, "want_text": True}
            requests += samples(ids, text, params, n, **more)
        shape = {
            "ids": bool(body.get("return_token_ids")),
            "logprobs": body.get("logprobs") is not None,
            "usage": include_usage(body),
        }
        return Plan(requests, streamed, shape, n)

    def compose(self, plan: Plan, answers: list[Answer], created: int) -> dict[str, Any]:
        """All choices."""
        choices = []
        for index, answer in enumerate(answers):
            request = answer.request
            choice = _choice(plan, answer, 0, len(request.ids), index)
            choice["finish_reason"], choice["stop_reason"] = finish(request), request.stop_reason
            if plan.shape["ids"]:
                choice["prompt_token_ids"] = None if request.prompt is None else request.prompt.tolist()
            choices.append(choice)
        return {
            **_head(plan, created),
            "choices": choices,
            "usage": usage(plan),
            "rollmux": segments(answers),
        }

    def chunk(self, plan: Plan, answer: Answer, start: int, end: int, created: int) -> dict[str, Any] | None:
        """New tokens of one choice."""
        request = answer.request
        choice = _choice(plan, answer, start, end, request.index)
        choice["finish_reason"] = finish(request) if request.over else None
        choice["stop_reason"] = request.stop_reason if request.over else None
        if plan.shape["ids"] and start == 0:
            choice["prompt_token_ids"] = None if request.prompt is None else request.prompt.tolist()
        found = {**_head(plan, created), "choices": [choice]}
        if request.over:
            found["rollmux"] = segments([answer])
        return found

    def last(self, plan: Plan, created: int) -> dict[str, Any] | None:
        """The usage, where it is asked for."""
        return {**_head(plan, created), "choices": [], "usage": usage(plan)} if plan.shape["usage"] else None

    def client_ids(self, plan: Plan, prompt: int) -> tuple[str, ...]:
        """The name of the call, the answer's, and the prompt's as vLLM makes it."""
        kind = "chatcmpl" if plan.requests[0].path == "/v1/chat/completions" else "cmpl"
        return (plan.name, f"{kind}-{plan.name}", f"cmpl-{plan.name}-{prompt}")

    def error(self, status: int, why: str) -> dict[str, Any]:
        """As OpenAI."""
        kind = "invalid_request_error" if status < 500 else "server_error"
        return {"error": {"message": why, "type": kind, "param": None, "code": status}}


def passed(path: str, body: dict[str, Any], streamed: bool) -> Request:
    """A call that goes to one replica as it came."""
    return Request("", "", 0, "", None, "", {}, opaque=body, path=path, streamed=streamed)


def _prompts(prompt: Any) -> list[Any]:
    if isinstance(prompt, str):
        return [(None, prompt)]
    if not isinstance(prompt, list) or not prompt:
        raise BadCall("prompt has to be text, ids of tokens, or a list of these")
    if isinstance(prompt[0], str):
        if not all(isinstance(text, str) for text in prompt):
            raise BadCall("prompt mixes text and ids")
        return [(None, text) for text in prompt]
    if isinstance(prompt[0], list):
        return [(ids_in(ids), None) for ids in prompt]
    return [(ids_in(prompt), None)]


def _head(plan: Plan, created: int) -> dict[str, Any]:
    model = plan.requests[0].model
    return {"id": f"cmpl-{plan.name}", "object": "text_completion", "created": created, "model": model}


def _choice(plan: Plan, answer: Answer, start: int, end: int, index: int) -> dict[str, Any]:
    request = answer.request
    choice: dict[str, Any] = {"index": index, "text": answer.text, "logprobs": None}
    ids = request.ids[start:end].tolist()
    if plan.shape["ids"]:
        choice["token_ids"] = ids
    if plan.shape["logprobs"]:
        names = request.names[start:end] or [f"token_id:{token}" for token in ids]
        logprobs = request.logprobs[start:end].tolist()
        top = request.top[start:end] or [{name: value} for name, value in zip(names, logprobs, strict=False)]
        # As vLLM counts: the lengths of the names, one after the other.
        before = request.extra.get("offset", 0) if start else 0
        *offsets, request.extra["offset"] = accumulate(map(len, names), initial=before)
        choice["logprobs"] = {"tokens": names, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}
    return choice
