"""SGLang: ``/generate`` with ids in and ids out, streamed. Its streams are cumulative."""

import sys
from array import array
from typing import Any, Final

import msgspec
from msgspec import Struct

from rollmuxd_gateway.core import effects as e
from rollmuxd_gateway.core import inputs as i
from rollmuxd_gateway.core.model import Replica, Request
from rollmuxd_gateway.engines import Call, Facts, InBand, Seen, gauge
from rollmuxd_gateway.engines.vllm import _get, _kind

#: parameters that have other names there
NAMES: Final = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
#: what is no sampling parameter, but a field of the request
_BESIDE: Final = ("lora_path", "image_data", "priority", "custom_logit_processor", "return_hidden_states")


class _Finish(Struct):
    type: str
    matched: int | str | None = None


class _Meta(Struct):
    finish_reason: _Finish | None = None
    output_token_logprobs: list[Any] | None = None
    output_top_logprobs: list[Any] | None = None
    weight_version: str | None = None
    prompt_tokens: int | None = None


class _Chunk(Struct):
    text: str = ""
    output_ids: list[int] | None = None
    meta_info: _Meta | None = None
    error: Any = None


_decode: Final = msgspec.json.Decoder(_Chunk).decode


class Sglang:
    """SGLang 0.5. Its calls for memory need --enable-memory-saver."""

    name = "sglang"
    streams_text = False

    def generate(self, it: e.Open, request: Request, interval: int) -> Call:
        """A streamed generation, or the client's own call as it came."""
        if request.opaque is not None:
            return Call("POST", request.path, request.opaque)
        params = dict(it.params)
        top = int(params.pop("logprobs", None) or 0)
        named = params.pop("return_tokens_as_token_ids", None) is False
        beside: dict[str, Any] = {name: params.pop(name) for name in _BESIDE if name in params}
        body: dict[str, Any] = {
            "sampling_params": {NAMES.get(name, name): value for name, value in params.items()},
            # of fixed length: an abort there matches prefixes
            "rid": rid(request.id, it.k),
            "stream": True,
            "return_logprob": True,
            "return_text_in_logprobs": named,
            "stream_interval": interval,
            **beside,
        }
        if top:
            body["top_logprobs_num"] = top
        if it.prompt is None:
            body["text"] = it.text
        else:
            body["input_ids"] = it.prompt.tolist()
        return Call("POST", "/generate", body)

    def read(self, data: bytes, request: Request, k: int, seen: Seen) -> i.Tokens | None:
        """One chunk has all tokens of the segment so far, or the new ones (--incremental-streaming-output)."""
        chunk = _decode(data)
        if chunk.error is not None:
            raise InBand(f"the engine reports an error: {_kind(chunk.error)}")
        meta = chunk.meta_info
        if meta is None:
            return None
        pairs = meta.output_token_logprobs or []
        top = meta.output_top_logprobs
        text = chunk.text
        if len(pairs) >= seen.tokens and seen.tokens:
            pairs, top, text = pairs[seen.tokens :], top[seen.tokens :] if top is not None else None, text[seen.text :]
        seen.tokens, seen.text = seen.tokens + len(pairs), seen.text + len(text)
        finish = meta.finish_reason
        named = request.params.get("return_tokens_as_token_ids") is False
        return i.Tokens(
            request.id,
            k,
            array("i", [pair[1] for pair in pairs]),
            array("d", [pair[0] or 0.0 for pair in pairs]),
            text,
            "" if finish is None else finish.type,
            None if finish is None else finish.matched,
            None,
            [_alternatives(each) for each in top or ()] if request.params.get("logprobs") else None,
            [sys.intern(pair[2] or "") for pair in pairs] if named else None,
            meta.weight_version or "",
            prompt_tokens=meta.prompt_tokens,
        )

    def abort(self, it: e.Abort) -> Call | None:
        """It sees a closed socket late."""
        return Call("POST", "/abort_request", {"rid": rid(it.request, it.k)})

    def busy(self) -> Call:
        """Its gauges."""
        return Call("GET", "/metrics")

    def read_busy(self, body: bytes) -> tuple[int, int]:
        """Running and queued."""
        running, waiting = gauge(body, b"sglang:num_running_reqs"), gauge(body, b"sglang:num_queue_reqs")
        if running is None or waiting is None:
            raise ValueError("it has no sglang:num_running_reqs: start it with --enable-metrics")
        return int(running), int(waiting)

    def is_paused(self) -> Call | None:
        """It does not say."""
        return None

    def read_preemptions(self, body: bytes) -> int | None:
        """It calls them retractions. The gauge of a similar name is that of the last batch."""
        counted = gauge(body, b"sglang:num_retracted_requests_total")
        return None if counted is None else int(counted)

    def park(self, replica: Replica) -> Call:
        """Weights and KV cache leave the GPU."""
        return Call("POST", "/release_memory_occupation", {})

    def is_asleep(self) -> Call | None:
        """It does not say."""
        return None

    def wake(self) -> Call:
        """They come back."""
        return Call("POST", "/resume_memory_occupation", {})

    def facts(self) -> tuple[Call, ...]:
        """Model and arguments."""
        return (Call("GET", "/get_model_info"), Call("GET", "/get_server_info"))

    def read_facts(self, answers: list[bytes]) -> Facts:
        """What is not said stays unknown."""
        model, server = answers
        facts = Facts(positional_seed=bool(_get(server, "enable_deterministic_inference")))
        facts.keeps_weights = bool(_get(server, "enable_weights_cpu_backup"))
        path = _get(model, "model_path")
        facts.models = (str(path),) if path else ()
        version = _get(model, "weight_version")
        facts.weights = "" if version is None else str(version)
        facts.max_num_seqs = int(_get(server, "max_running_requests") or 0)
        facts.kv_tokens = int(_get(server, "max_total_num_tokens") or 0)
        return facts

    def detokenize(self, ids: list[int], model: str) -> Call:
        """Text of ids."""
        return Call("POST", "/detokenize", {"tokens": ids})


def _alternatives(told: list[Any] | None) -> dict[str, float] | None:
    """``[logprob, id, text or None]`` of each, as the other engine says it."""
    if told is None:
        return None
    return {f"token_id:{token}" if text is None else text: logprob for logprob, token, text in told}


def rid(request: str, k: int) -> str:
    """An id of fixed length for a segment."""
    return f"{request}-{k:04d}"
