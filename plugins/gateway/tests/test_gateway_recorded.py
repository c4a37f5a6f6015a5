"""Answers of a real vLLM, as they were recorded, through its dialect: what the gateway rests on is in them.

``recorded/vllm-0.32.0.json``: a server of ``make real-gateway`` (a tiny model, float32, dev mode) answered these calls.
"""

import json
from array import array
from pathlib import Path

import msgspec
import pytest

from rollmuxd_gateway.core import effects as e
from rollmuxd_gateway.core.model import Request
from rollmuxd_gateway.engines import Seen
from rollmuxd_gateway.engines.vllm import Vllm

RECORDED = json.loads((Path(__file__).parent / "recorded" / "vllm-0.32.0.json").read_text())
DIALECT = Vllm()


def read(name):
    call = RECORDED["calls"][name]
    params = {key: call["body"][key] for key in ("logprobs", "stop") if key in call["body"]}
    request = Request("q1", "c1", 0, "", None, None, params)
    found = [DIALECT.read(line[5:].strip().encode(), request, 0, Seen()) for line in call["lines"][:-1]]
    assert call["lines"][-1] == "data: [DONE]"
    return call["body"], found


@pytest.mark.parametrize("name", ["plain", "logprobs"])
def test_every_token_comes_once_with_its_log_probability_and_its_text(name):
    body, found = read(name)
    ids = [token for tokens in found for token in tokens.ids]
    assert len(ids) == body["max_tokens"]
    assert [tokens.finish for tokens in found] == ["", "", "", "length"]
    assert found[0].prompt.tolist() == body["prompt"]
    assert all(tokens.prompt is None for tokens in found[1:])
    assert "".join(tokens.text for tokens in found) == RECORDED["text"]
    assert len(found[0].ids) == 1, "the first token comes at once"
    assert max(len(tokens.ids) for tokens in found) == body["stream_interval"]
    if name == "logprobs":
        logprobs = [value for tokens in found for value in tokens.logprobs]
        top = [one for tokens in found for one in tokens.top]
        assert len(logprobs) == len(top) == len(ids)
        assert all(one[f"token_id:{token}"] == value for token, value, one in zip(ids, logprobs, top, strict=True))


def test_a_stop_string_ends_a_response_and_is_left_out_of_its_text():
    body, found = read("stop")
    (stop,) = body["stop"]
    assert (found[-1].finish, found[-1].stop_reason) == ("stop", stop)
    text = "".join(tokens.text for tokens in found)
    assert RECORDED["text"].startswith(text + stop)


def test_an_engine_says_what_it_is():
    answers = [RECORDED["models"], RECORDED["metrics"], RECORDED["weight_info"], RECORDED["server_info"]]
    asked = [call.path.partition("?")[0] for call in DIALECT.facts()]
    assert asked == ["/v1/models", "/metrics", "/weight_info", "/server_info", "/is_sleeping"]
    bodies = [one.encode() if isinstance(one, str) else msgspec.json.encode(one) for one in answers]
    bodies[2] = RECORDED["weight_info"]["body"].encode() if RECORDED["weight_info"]["status"] == 200 else b""
    facts = DIALECT.read_facts([*bodies, RECORDED["is_sleeping"]["body"].encode()])
    assert facts.models == ("tiny",)
    assert facts.max_num_seqs == 64
    assert facts.kv_tokens > 100_000
    assert facts.logprobs_mode == "raw_logprobs"
    assert not facts.asleep
    metrics = RECORDED["metrics"].encode()
    running, waiting = DIALECT.read_busy(metrics)
    assert running >= 0 <= waiting
    assert DIALECT.read_preemptions(metrics) == 0
    assert json.loads(RECORDED["is_paused"]["body"]) == {"is_paused": False}


def test_the_recorded_calls_are_those_that_the_gateway_makes():
    body = RECORDED["calls"]["logprobs"]["body"]
    request = Request("q1", "c1", 0, "", None, None, {}, model="tiny")
    params = {"max_tokens": 12, "temperature": 0, "logprobs": 2}
    made = DIALECT.generate(e.Open("q1", 0, "r0", array("i", body["prompt"]), None, params), request, 4)
    assert (made.method, made.path, made.body) == ("POST", "/v1/completions", body)


def test_a_refusal_says_why_with_status_400():
    assert RECORDED["refused"]["status"] == 400
    assert "message" in RECORDED["refused"]["body"]["error"]
