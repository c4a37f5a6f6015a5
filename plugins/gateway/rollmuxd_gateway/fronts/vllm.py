"""vLLM's own ``/inference/v1/generate``: ids in, ids out."""

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

_MOST: Final = 16
#: fields beside the sampling parameters that change nothing in what is generated
_OURS: Final = frozenset(
    (
        "token_ids",
        "sampling_params",
        "stream",
        "model",
        "request_id",
        "stream_options",
        "output_mode",
        "token_offsets",
        "return_token_ids",
    )
)
_BESIDE: Final = ("priority", "cache_salt")


class Vllm:
    """The dialect of ``/inference/v1/generate``."""

    name = "vllm"

    def plan(self, path: str, body: dict[str, Any]) -> Plan:
        """One prompt, ``n`` samples."""
        streamed = bool(body.get("stream"))
        unknown = [name for name in body if name not in _OURS and name not in _BESIDE and body[name]]
        told = body.get("sampling_params") or {}
        if not isinstance(told, dict):
            raise BadCall("sampling_params has to be an object")
        if unknown or body.get("output_mode") not in (None, "tokens") or told.get("prompt_logprobs") is not None:
            only = Request("", "", 0, "", None, "", {}, opaque=body, path=path, streamed=streamed)
            return Plan([only], streamed, {"passed": True})
        n = number(told, "n", 1, 1, SAMPLES)
        most = number(told, "max_tokens", _MOST, 1, 2**31 - 1)
        # What text would look like is not asked for; `detokenize` and `output_kind` are about text and streams only.
        drop = ("n", "max_tokens", "detokenize", "output_kind", "skip_clone", "stream_interval")
        params = {name: value for name, value in told.items() if name not in drop}
        params |= {name: body[name] for name in _BESIDE if body.get(name) is not None}
        params = checked(params)
        ids = ids_in(body.get("token_ids") or ())
        model = str(body.get("model") or "")
        requests = samples(ids, None, params, n, model=model, max_tokens=most, streamed=streamed)
        shape = {"logprobs": told.get("logprobs"), "usage": include_usage(body)}
        return Plan(requests, streamed, shape, n)

    def compose(self, plan: Plan, answers: list[Answer], created: int) -> dict[str, Any]:
        """All choices."""
        choices = [_choice(plan, answer, 0, len(answer.request.ids), index) for index, answer in enumerate(answers)]
        return {**_head(plan, created), "choices": choices, "usage": usage(plan), "rollmux": segments(answers)}

    def chunk(self, plan: Plan, answer: Answer, start: int, end: int, created: int) -> dict[str, Any] | None:
        """New tokens of one choice."""
        choice = _choice(plan, answer, start, end, answer.request.index)
        if not answer.request.over:
            choice["finish_reason"] = None
        return {**_head(plan, created), "choices": [choice]}

    def last(self, plan: Plan, created: int) -> dict[str, Any] | None:
        """The usage, where it is asked for."""
        return {**_head(plan, created), "choices": [], "usage": usage(plan)} if plan.shape["usage"] else None

    def client_ids(self, plan: Plan, prompt: int) -> tuple[str, ...]:
        """The answer's, and as vLLM makes it."""
        return (plan.name, f"generate-tokens-{plan.name}")

    def error(self, status: int, why: str) -> dict[str, Any]:
        """As vLLM."""
        kind = "BadRequestError" if status < 500 else "InternalServerError"
        return {"error": {"message": why, "type": kind, "param": None, "code": status}}


def _head(plan: Plan, created: int) -> dict[str, Any]:
    return {
        "output_mode": "tokens",
        "request_id": plan.name,
        "model": plan.requests[0].model or None,
        "created": created,
    }


def _choice(plan: Plan, answer: Answer, start: int, end: int, index: int) -> dict[str, Any]:
    request = answer.request
    ids = request.ids[start:end].tolist()
    choice: dict[str, Any] = {
        "index": index,
        "token_ids": ids,
        "logprobs": None,
        "finish_reason": finish(request),
        "stop_reason": request.stop_reason,
    }
    if plan.shape["logprobs"] is not None:
        pairs = zip(ids, request.logprobs[start:end].tolist(), strict=False)
        content = [{**_entry(token, value), "top_logprobs": []} for token, value in pairs]
        for entry, top in zip(content, request.top[start:end], strict=False):
            entry["top_logprobs"] = [_entry(int(name.rpartition(":")[2]), value) for name, value in (top or {}).items()]
        choice["logprobs"] = {"content": content}
    return choice


def _entry(token: int, logprob: float) -> dict[str, Any]:
    """``token`` is what clients of older servers read."""
    return {"token_id": token, "token": f"token_id:{token}", "logprob": logprob, "rank": None}
