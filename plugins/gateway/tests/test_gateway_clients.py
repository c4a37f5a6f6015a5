"""The bodies that frameworks send, as their sources make them: each may move, and the answer has what they read of it.

slime: slime/rollout/sglang_rollout.py. AReaL: areal/engine/sglang_remote.py. SkyRL: remote_inference_client.py.
prime-rl: renderers/client.py. TRL: async_rollout_worker.py.
"""

import json

import pytest
from gateway_live import alone, live

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]
STOPS = {"stop": None, "stop_token_ids": None}
SLIME = {
    "sampling_params": {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 40,
        **STOPS,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    },
    "return_logprob": True,
    "input_ids": PROMPT,
}
AREAL = {
    "input_ids": PROMPT,
    "image_data": [],
    "sampling_params": {
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 40,
        "temperature": 0.0,
        "stop_token_ids": [],
        "frequency_penalty": 0.0,
    },
    "return_logprob": True,
    "stream": False,
}
SKYRL = {
    "sampling_params": {"temperature": 0.0, "max_tokens": 40, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": 1},
    "model": "hashlm",
    "token_ids": PROMPT,
}
PRIME = {
    "model": "hashlm",
    "token_ids": PROMPT,
    "sampling_params": {
        "temperature": 0.0,
        "max_tokens": 40,
        "top_k": -1,
        "min_p": 0.0,
        "min_tokens": 0,
        "stop_token_ids": [255],
        "repetition_penalty": 1.0,
        "logprobs": 1,
        "skip_special_tokens": False,
    },
    "cache_salt": "step-7",
    "priority": 0,
}
TRL = {"model": "hashlm", "prompt": PROMPT, "max_tokens": 40, "temperature": 0.0, "n": 1}
TRL |= {"return_token_ids": True, "logprobs": 0}


def of_sglang(told):
    meta = told["meta_info"]
    assert isinstance(told["text"], str)
    pairs = meta["output_token_logprobs"]
    return [pair[1] for pair in pairs], [pair[0] for pair in pairs], meta["finish_reason"]["type"]


def of_tokens(told):
    (choice,) = told["choices"]
    return choice["token_ids"], [one["logprob"] for one in choice["logprobs"]["content"]], choice["finish_reason"]


def of_openai(told):
    (choice,) = told["choices"]
    assert choice["prompt_token_ids"] == PROMPT
    return choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("kind", "path", "body", "read"),
    [
        pytest.param("sglang", "/generate", SLIME, of_sglang, id="slime"),
        pytest.param("sglang", "/generate", AREAL, of_sglang, id="areal"),
        pytest.param("vllm", "/inference/v1/generate", SKYRL, of_tokens, id="skyrl"),
        pytest.param("vllm", "/inference/v1/generate", PRIME, of_tokens, id="prime-rl"),
        pytest.param("vllm", "/v1/completions", TRL, of_openai, id="trl"),
    ],
)
async def test_what_a_framework_sends_may_move_and_it_finds_what_it_reads(kind, path, body, read):
    once = alone(PROMPT, max_tokens=40, temperature=0)
    async with live(2, kind=kind, stream_interval=1) as it:
        it.app.upstream._tell = moves_once(it)
        answer = await it.client.post(path, json=body, headers={"X-Session-ID": "s1", "X-SMG-Routing-Key": "s1"})
        assert answer.status_code == 200, answer.text
        assert read(answer.json()) == (once.out.tolist(), once.logprobs.tolist(), once.finish)
        assert len(answer.json()["rollmux"]["segments"]) == 2, json.dumps(answer.json()["rollmux"])


def moves_once(it):
    """Ask for a move after a few tokens."""
    from rollmuxd_gateway.core import inputs as i

    tell, moved = it.app.tell, set()

    def told(fact):
        tell(fact)
        if isinstance(fact, i.Tokens) and fact.request not in moved and len(it.app.core.requests[fact.request].ids) > 9:
            moved.add(fact.request)
            tell(i.Move(fact.request))

    return told
