"""vLLM: ``/v1/completions`` with ids in and ids out, streamed."""

import re
import sys
from array import array
from typing import Any, Final

import msgspec
from msgspec import Struct

from rollmuxd_gateway.core import effects as e
from rollmuxd_gateway.core import inputs as i
from rollmuxd_gateway.core.model import Replica, Request
from rollmuxd_gateway.engines import Call, Facts, InBand, Seen, gauge

_BLOCKS: Final = re.compile(rb'vllm:cache_config_info\{[^}]*?block_size="(\d+)"[^}]*?num_gpu_blocks="(\d+)"')


class _Logprobs(Struct):
    #: read only where texts are asked for: they cost more than the rest
    tokens: msgspec.Raw = msgspec.Raw(b"[]")
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []


class _Choice(Struct):
    text: str = ""
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _Chunk(Struct):
    choices: list[_Choice] = []
    error: Any = None


_decode: Final = msgspec.json.Decoder(_Chunk).decode
_texts: Final = msgspec.json.Decoder(list[str]).decode


class Vllm:
    """vLLM 0.32 and newer. Its calls for sleep need VLLM_SERVER_DEV_MODE=1."""

    name = "vllm"
    streams_text = True

    def generate(self, it: e.Open, request: Request, interval: int) -> Call:
        """A streamed completion, or the client's own call as it came."""
        headers = {"X-Request-Id": f"{request.id}-{it.k}"}
        if request.opaque is not None:
            return Call("POST", request.path, request.opaque, headers)
        body: dict[str, Any] = {
            **it.params,
            "prompt": it.text if it.prompt is None else it.prompt.tolist(),
            "stream": True,
            "return_token_ids": True,
            "stream_interval": interval,
        }
        if request.model:
            body["model"] = request.model
        if "logprobs" in body:
            body.setdefault("return_tokens_as_token_ids", True)
        return Call("POST", "/v1/completions", body, headers)

    def read(self, data: bytes, request: Request, k: int, seen: Seen) -> i.Tokens | None:
        """One chunk."""
        chunk = _decode(data)
        if chunk.error is not None:
            raise InBand(f"the engine reports an error: {_kind(chunk.error)}")
        if not chunk.choices:
            return None
        choice = chunk.choices[0]
        ids = array("i", choice.token_ids or ())
        told = choice.logprobs
        named = request.params.get("return_tokens_as_token_ids") is False
        logprobs = array("d", [value or 0.0 for value in told.token_logprobs] if told is not None else ())
        return i.Tokens(
            request.id,
            k,
            ids,
            logprobs,
            choice.text,
            choice.finish_reason or "",
            choice.stop_reason,
            array("i", choice.prompt_token_ids) if choice.prompt_token_ids is not None else None,
            told.top_logprobs if told is not None and request.params.get("logprobs") else None,
            # One copy of each text, however often it comes.
            [sys.intern(text) for text in _texts(told.tokens)] if told is not None and named else None,
        )

    def abort(self, it: e.Abort) -> Call | None:
        """Its socket is closed, which it sees at once."""
        return None

    def busy(self) -> Call:
        """Its gauges."""
        return Call("GET", "/metrics")

    def read_busy(self, body: bytes) -> tuple[int, int]:
        """Of several engines behind one server, all together."""
        running = gauge(body, b"vllm:num_requests_running")
        waiting = gauge(body, b"vllm:num_requests_waiting")
        if running is None or waiting is None:
            raise ValueError("it has no vllm:num_requests_running: was it started with --disable-log-stats?")
        return int(running), int(waiting)

    def is_paused(self) -> Call | None:
        """Needs dev mode."""
        return Call("GET", "/is_paused")

    def read_preemptions(self, body: bytes) -> int | None:
        """A counter beside the gauges."""
        counted = gauge(body, b"vllm:num_preemptions_total")
        return None if counted is None else int(counted)

    def park(self, replica: Replica) -> Call:
        """Sleep."""
        return Call("POST", f"/sleep?level={replica.park_level}&mode=abort")

    def is_asleep(self) -> Call | None:
        """Needs dev mode."""
        return Call("GET", "/is_sleeping")

    def wake(self) -> Call:
        """Weights and KV cache."""
        return Call("POST", "/wake_up")

    def facts(self) -> tuple[Call, ...]:
        """Models, blocks of its KV cache, version of its weights, and how it was started."""
        return (
            Call("GET", "/v1/models"),
            Call("GET", "/metrics"),
            Call("GET", "/weight_info"),
            Call("GET", "/server_info?config_format=json"),
            Call("GET", "/is_sleeping"),
        )

    def read_facts(self, answers: list[bytes]) -> Facts:
        """What is not said stays unknown."""
        models, metrics, weights, server, sleeping = answers
        facts = Facts(asleep=_get(sleeping, "is_sleeping") is True)
        facts.models = tuple(str(one.get("id", "")) for one in _get(models, "data") or () if isinstance(one, dict))
        found = _BLOCKS.search(metrics)
        if found is not None:
            facts.kv_tokens = int(found[1]) * int(found[2])
        version = _get(weights, "weight_version")
        facts.weights = "" if version is None else str(version)
        config = _get(server, "vllm_config")
        if isinstance(config, dict):
            model, batch = config.get("model_config") or {}, config.get("scheduler_config") or {}
            facts.logprobs_mode = str(model.get("logprobs_mode") or "")
            facts.max_num_seqs = int(batch.get("max_num_seqs") or 0)
        environment = _get(server, "vllm_env")
        if isinstance(environment, dict):
            facts.positional_seed = str(environment.get("VLLM_USE_V2_MODEL_RUNNER")) in ("1", "True")
        return facts

    def detokenize(self, ids: list[int], model: str) -> Call:
        """Text of ids."""
        return Call("POST", "/detokenize", {"tokens": ids, **({"model": model} if model else {})})


def _get(body: bytes, key: str) -> Any:
    try:
        told = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return None
    return told.get(key) if isinstance(told, dict) else None


def _kind(error: Any) -> str:
    """What sort of error it is. Its message may quote a prompt, so it is not kept."""
    if isinstance(error, dict):
        return f"{error.get('type') or 'error'} {error.get('code') or ''}".strip()[:80]
    return "error"
