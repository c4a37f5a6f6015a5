"""SGLang's ``/generate``: ids or text in, ids and log-probabilities in ``meta_info``. Its streams are cumulative."""

from collections.abc import Mapping
from typing import Any, Final

from rollmuxd_gateway.core.model import Request
from rollmuxd_gateway.fronts import SAMPLES, Answer, BadCall, Plan, checked, finish, ids_in, number, samples
from rollmuxd_gateway.fronts import segments as where

#: SGLang's names of parameters that have another one here
NAMES: Final[dict[str, str]] = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
_MOST: Final = 128
#: fields beside the sampling parameters that an engine has to be told of, and that the table of rules knows
_BESIDE: Final = ("lora_path", "priority", "custom_logit_processor", "return_hidden_states")
#: fields that change nothing in what is generated
_OURS: Final = frozenset(
    (
        *("text", "input_ids", "sampling_params", "stream", "rid", "return_logprob", "logprob_start_len"),
        *("top_logprobs_num", "return_text_in_logprobs", "log_metrics", "stream_interval", "session_id"),
    )
)


class Sglang:
    """The dialect of SGLang."""

    name = "sglang"

    def plan(self, path: str, body: dict[str, Any]) -> Plan:
        """One prompt, or a list of them."""
        streamed = bool(body.get("stream"))
        told = body.get("sampling_params") or {}
        # AReaL sends an empty list of images with each prompt.
        unknown = [name for name in body if name not in _OURS and name not in _BESIDE and body[name]]
        start = body.get("logprob_start_len")
        if unknown or isinstance(told, list) or (isinstance(start, int) and start >= 0 and body.get("return_logprob")):
            only = Request("", "", 0, "", None, "", {}, opaque=body, path=path, streamed=streamed)
            return Plan([only], streamed, {"passed": True, "rid": body.get("rid")})
        if not isinstance(told, dict):
            raise BadCall("sampling_params has to be an object")
        params: dict[str, Any] = {NAMES.get(str(name), str(name)): value for name, value in told.items()}
        n = number(params, "n", 1, 1, SAMPLES)
        most = number(params, "max_tokens", _MOST, 0, 2**31 - 1)
        params = {name: value for name, value in params.items() if name not in ("n", "max_tokens")}
        params |= {name: body[name] for name in _BESIDE if body.get(name) is not None}
        top = number(body, "top_logprobs_num", 0, 0, 100)
        # Of every token the log-probability is kept anyway; the table knows this as `logprobs`.
        params["logprobs"] = top
        params = checked(params)
        ids, text = body.get("input_ids"), body.get("text")
        many = (isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)) or isinstance(text, list)
        prompts = _prompts(ids, text)
        if len(prompts) * n > SAMPLES:
            raise BadCall(f"{len(prompts)} prompts with n = {n} are more than {SAMPLES} responses")
        requests: list[Request] = []
        for own, words in prompts:
            requests += samples(own, words, params, n, max_tokens=max(1, most), streamed=streamed, want_text=True)
        logprobs = bool(body.get("return_logprob"))
        shape = {"many": many or n > 1, "logprobs": logprobs, "top": top, "rid": body.get("rid")}
        return Plan(requests, streamed, shape, n)

    def compose(self, plan: Plan, answers: list[Answer], created: int) -> dict[str, Any] | Any:
        """One object, or one for each response."""
        found = [_object(plan, answer, len(answer.request.ids)) for answer in answers]
        return found if plan.shape["many"] else found[0]

    def chunk(self, plan: Plan, answer: Answer, start: int, end: int, created: int) -> dict[str, Any] | None:
        """All that there is so far."""
        found = _object(plan, answer, end)
        return {**found, "index": answer.request.index} if plan.shape["many"] else found

    def last(self, plan: Plan, created: int) -> dict[str, Any] | None:
        """Nothing."""
        return None

    def client_ids(self, plan: Plan, prompt: int) -> tuple[str, ...]:
        """Its ``rid``, and that of the call."""
        rid = plan.shape["rid"] or plan.name
        if isinstance(rid, list):
            return (str(rid[prompt]) if prompt < len(rid) else f"{plan.name}_{prompt}",)
        return (f"{rid}_{prompt}", str(rid)) if len(plan.requests) > plan.n else (str(rid),)

    def error(self, status: int, why: str) -> dict[str, Any]:
        """As SGLang."""
        return {"error": {"message": why}}


def _prompts(ids: Any, text: Any) -> list[Any]:
    if ids is not None:
        if not isinstance(ids, list) or not ids:
            raise BadCall("input_ids has to be ids of tokens, or a list of such lists")
        return [(ids_in(one), None) for one in ids] if isinstance(ids[0], list) else [(ids_in(ids), None)]
    texts = [text] if isinstance(text, str) else text
    if not isinstance(texts, list) or not texts or not all(isinstance(one, str) for one in texts):
        raise BadCall("the call needs input_ids or text")
    return [(None, one) for one in texts]


def _triples(told: Mapping[str, float] | None) -> list[list[Any]] | None:
    """``[logprob, id, text]`` of each alternative; without texts the names are ids."""
    return None if told is None else [[value, int(name.rpartition(":")[2]), None] for name, value in told.items()]


def _object(plan: Plan, answer: Answer, end: int) -> dict[str, Any]:
    request = answer.request
    ids = request.ids[:end].tolist()
    reason: dict[str, Any] | None = None
    if request.over:
        reason = {"type": finish(request)}
        if reason["type"] == "length":
            reason["length"] = len(ids)
        elif reason["type"] == "stop":
            reason["matched"] = request.stop_reason
    meta: dict[str, Any] = {
        "id": request.client_ids[0],
        "finish_reason": reason,
        "prompt_tokens": request.prompt_tokens,
        "completion_tokens": len(ids),
        "cached_tokens": 0,
        "weight_version": request.weights,
    }
    if plan.shape["logprobs"]:
        pairs = zip(request.logprobs[:end].tolist(), ids, strict=False)
        meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
        if plan.shape["top"]:
            meta["output_top_logprobs"] = [_triples(each) for each in request.top[:end]]
    return {"text": answer.text, "output_ids": ids, "meta_info": meta, "rollmux": where([answer])}
