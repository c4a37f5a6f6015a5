"""The gateway over real sockets: each dialect as its clients speak it, and what happens when engines fail."""

import asyncio
import json
import logging
import time

import msgspec
import pytest
from gateway_live import MODEL, alone, live
from patience import PATIENCE_S

from rollmuxd_gateway.core import inputs as i
from rollmuxd_gateway.fakes.hashlm import text_of
from rollmuxd_gateway.link.own import OwnLink

PROMPTS = [[1 + number, 2, 3, 4, 5, 6, 7, 8, 9] for number in range(24)]
GREEDY = {"max_tokens": 200, "temperature": 0}
MODEL_1 = msgspec.structs.replace(MODEL, version="1")


async def complete(it, prompt, **more):
    body = {"prompt": prompt, "return_token_ids": True, "logprobs": 0, **GREEDY, **more}
    answer = await it.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def die(it, *names):
    for name in names:
        while it.app.core.replicas[name].status != "dead":
            it.app.tell(i.Probed(name, ok=False))


def check(told, prompt, model=MODEL, **params):
    once = alone(prompt, model, **{**GREEDY, **params})
    (choice,) = told["choices"]
    assert choice["token_ids"] == once.out.tolist()
    assert choice["logprobs"]["token_logprobs"] == once.logprobs.tolist()
    assert choice["text"] == once.text()
    assert (choice["finish_reason"], choice["stop_reason"]) == (once.finish, once.stop_reason)
    assert told["usage"]["completion_tokens"] == len(once.out)


@pytest.mark.asyncio
async def test_a_completion_is_what_the_engine_makes_of_it():
    async with live() as it:
        check(await complete(it, PROMPTS[0]), PROMPTS[0])
        check(await complete(it, PROMPTS[1], stop=["o"]), PROMPTS[1], stop=["o"])


@pytest.mark.asyncio
async def test_a_stop_string_that_comes_in_two_chunks_is_left_out_whole():
    text = alone(PROMPTS[1], **GREEDY).text()
    stop = next(text[at : at + 2] for at in range(20, len(text)) if text[at : at + 2].isalnum())
    async with live(stream_interval=1) as it:
        check(await complete(it, PROMPTS[1], stop=[stop]), PROMPTS[1], stop=[stop])


@pytest.mark.asyncio
async def test_text_prompts_lists_and_samples_come_back_in_order():
    async with live() as it:
        told = await complete(it, ["hello", "world"], n=2, temperature=1.0, seed=3)
        assert [choice["index"] for choice in told["choices"]] == [0, 1, 2, 3]
        assert told["choices"][0]["prompt_token_ids"] == [ord(letter) for letter in "hello"]
        firsts = [alone([ord(c) for c in "hello"], max_tokens=200, temperature=1.0, seed=seed) for seed in (3, 4)]
        assert [choice["token_ids"] for choice in told["choices"][:2]] == [job.out.tolist() for job in firsts]


async def tail(it, count=24, **more):
    """So many completions, of which the tail is gathered on one replica."""
    await it.client.post("/rollmux/rollouts", json={"total": count})
    tasks = [asyncio.create_task(complete(it, prompt, **more)) for prompt in PROMPTS[:count]]
    await it.settled(lambda: it.app.core.rollout.done >= count * 0.7)
    verdict = (await it.client.post("/rollmux/shrink", json={"keep": ["host1/gpu0"]})).json()
    return verdict, await asyncio.gather(*tasks)


@pytest.mark.asyncio
async def test_a_tail_moves_and_every_response_is_whole():
    async with live(4) as it:
        verdict, told = await tail(it)
        assert verdict["accepted"], verdict
        assert verdict["moves"] > 0
        for prompt, answer in zip(PROMPTS, told, strict=True):
            check(answer, prompt)
        moved = [answer["rollmux"]["segments"] for answer in told if len(answer["rollmux"]["segments"]) > 1]
        assert len(moved) >= verdict["moves"] > 0
        assert all(segments[-1][3:] == ["shrink", "0"] for segments in moved)
        await it.settled(lambda: it.app.core.rollout.status == "drained")
        asleep = {f"r{number}" for number, fake in enumerate(it.engines) if fake.sleeping}
        assert asleep == set(verdict["release"])
        assert (await it.client.post("/rollmux/grow", json={"gpus": [f"host1/gpu{n}" for n in range(4)]})).is_success
        await it.settled(lambda: not any(fake.sleeping for fake in it.engines))


@pytest.mark.asyncio
@pytest.mark.parametrize("fault", ["reset", "truncate", "in_band", "server_error"])
async def test_a_fault_of_a_stream_costs_no_token(fault):
    async with live(3, engine={"step_s": 0.005}) as it:
        tasks = [asyncio.create_task(complete(it, prompt)) for prompt in PROMPTS]
        await it.settled(lambda: it.app.core.rollout.tokens > 300)
        await it.client.post(f"{it.engines[0].served.url}/fault", json={"kind": fault, "count": 5})
        tasks += [asyncio.create_task(complete(it, prompt)) for prompt in PROMPTS]
        for prompt, answer in zip(PROMPTS * 2, await asyncio.gather(*tasks), strict=True):
            check(answer, prompt)
        assert sum(it.app.core.count.faults.values()) >= 1


@pytest.mark.asyncio
async def test_an_engine_that_is_gone_costs_no_token():
    async with live(3, engine={"step_s": 0.005}) as it:
        tasks = [asyncio.create_task(complete(it, prompt, stop=["zz"])) for prompt in PROMPTS]
        await it.settled(lambda: it.app.core.rollout.tokens > 300)
        await it.kill(0)
        for prompt, answer in zip(PROMPTS, await asyncio.gather(*tasks), strict=True):
            check(answer, prompt, stop=["zz"])
        await it.settled(lambda: it.app.core.replicas["r0"].status == "dead")


@pytest.mark.asyncio
async def test_a_stalled_stream_goes_on_elsewhere():
    async with live(2, stall_s=0.5) as it:
        tasks = [asyncio.create_task(complete(it, prompt)) for prompt in PROMPTS[:4]]
        await it.settled(lambda: it.app.core.rollout.tokens > 20)
        await it.client.post(f"{it.engines[0].served.url}/fault", json={"kind": "stall", "count": 2})
        for prompt, answer in zip(PROMPTS, await asyncio.gather(*tasks), strict=False):
            check(answer, prompt)


async def events(it, path, body):
    found = []
    async with it.client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data:"):
                found.append(line[5:].strip())
    assert found.pop() == "[DONE]"
    return [json.loads(one) for one in found]


def ids_of(told):
    return [token for event in told for token in event["choices"][0]["token_ids"]]


@pytest.mark.asyncio
async def test_a_stream_is_whole_also_when_it_moves():
    async with live(2, engine={"step_s": 0.005}) as it:
        body = {"prompt": PROMPTS[0], "stream": True, "return_token_ids": True, "logprobs": 0, **GREEDY}
        body["stop"] = ["never there"]
        task = asyncio.create_task(events(it, "/v1/completions", body))
        await it.settled(lambda: it.app.core.rollout.tokens > 30)
        (name,) = [name for name, request in it.app.core.requests.items() if not request.over]
        assert (await it.client.post("/rollmux/moves", json={"request": name})).is_success
        told = await task
        once = alone(PROMPTS[0], **GREEDY)
        assert ids_of(told) == once.out.tolist()
        assert "".join(event["choices"][0]["text"] for event in told) == once.text()
        assert told[-1]["choices"][0]["finish_reason"] == once.finish
        assert len(told[-1]["rollmux"]["segments"]) == 2
        assert len(told) > 10


def move_once(it, when):
    """Move the response as soon as its ids are so."""
    tell, moved = it.app.tell, set()

    def told(fact):
        tell(fact)
        if isinstance(fact, i.Tokens) and not fact.finish and fact.request not in moved:
            if when(it.app.core.requests[fact.request].ids):
                moved.add(fact.request)
                tell(i.Move(fact.request))

    it.app.upstream._tell = told
    return moved


def ends_within_a_character(ids):
    return text_of(ids).endswith("\ufffd")


@pytest.mark.asyncio
@pytest.mark.parametrize("within", [True, False])
async def test_the_text_of_a_moved_response_ends_where_the_engine_would_end_it(within):
    """vLLM leaves out the end of a response that lies within a character."""
    ids = alone(PROMPTS[0], **GREEDY).out
    most = next(size for size in range(20, 60) if ends_within_a_character(ids[:size]) is within)
    async with live(2, stream_interval=1) as it:
        moved = move_once(it, lambda ids: len(ids) < most)
        check(await complete(it, PROMPTS[0], max_tokens=most), PROMPTS[0], max_tokens=most)
        assert moved


@pytest.mark.asyncio
@pytest.mark.parametrize("streamed", [True, False])
async def test_a_stop_string_of_the_prompt_ends_no_response_that_was_cut_within_a_character(streamed):
    """vLLM looks for it in the whole prompt then, of which the tokens so far are a part."""
    stop = "the"
    prompt = [*map(ord, "name the thing"), 7]
    body = {"prompt": prompt, "return_token_ids": True, "logprobs": 0, **GREEDY, "stop": [stop]}
    async with live(2, stream_interval=1) as it:
        moved = move_once(it, lambda ids: ends_within_a_character(ids[: -len(stop)]))
        if streamed:
            told = await events(it, "/v1/completions", {**body, "stream": True})
            assert ids_of(told) == alone(prompt, **GREEDY, stop=[stop]).out.tolist()
        else:
            check(await complete(it, prompt, stop=[stop]), prompt, stop=[stop])
        assert moved
        assert it.app.core.count.segments["false_stop"] > 0


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ["/v1/completions", "/inference/v1/generate"])
async def test_a_streamed_call_with_samples_ends_once_for_each_and_says_one_usage_of_all(path):
    async with live(2) as it:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"prompt": [PROMPTS[0]] * 2, "n": 3, "return_token_ids": True, **GREEDY, **options}
        prompts = 2
        if path != "/v1/completions":
            body, prompts = {"token_ids": PROMPTS[0], "sampling_params": {**GREEDY, "n": 3}, **options}, 1
        *told, last = await events(it, path, body)
        ends = [event["choices"][0]["index"] for event in told if event["choices"][0]["finish_reason"]]
        assert sorted(ends) == list(range(3 * prompts))
        assert not any("usage" in event for event in told)
        asked, made = prompts * len(PROMPTS[0]), 3 * prompts * len(alone(PROMPTS[0], **GREEDY).out)
        assert last["choices"] == []
        assert last["usage"] == {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made}


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_the_usage_of_a_prompt_that_is_text_is_what_the_engine_counts(kind):
    async with live(2, kind=kind) as it:
        told = await posted(it, "/v1/completions", {"prompt": ["abcdefg", "hi"], "n": 2, **GREEDY})
        assert told["usage"]["prompt_tokens"] == len("abcdefg") + len("hi")
        told = await posted(it, "/generate", {"text": "abcdefg", "sampling_params": {"max_new_tokens": 5}})
        assert told["meta_info"]["prompt_tokens"] == len("abcdefg")


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_tokens_are_named_by_their_texts_unless_ids_are_asked_for(kind):
    once = alone(PROMPTS[0], **GREEDY, logprobs=2)
    texts = [text_of([token]) for token in once.out]
    async with live(2, kind=kind, stream_interval=1) as it:
        moved = move_once(it, lambda ids: len(ids) > 20)
        told = (await complete(it, PROMPTS[0], logprobs=2))["choices"][0]["logprobs"]
        assert moved
        assert told["tokens"] == texts
        assert told["text_offset"] == [sum(map(len, texts[:at])) for at in range(len(texts))]
        assert told["top_logprobs"] == [{text_of([token]): value for token, value in each} for each in once.top]
        streamed = await events(it, "/v1/completions", {"prompt": PROMPTS[0], "logprobs": 0, "stream": True, **GREEDY})
        parts = [event["choices"][0]["logprobs"] for event in streamed]
        assert [text for part in parts for text in part["tokens"]] == texts
        assert [at for part in parts for at in part["text_offset"]] == told["text_offset"]
        ids = await complete(it, PROMPTS[0], logprobs=2, return_tokens_as_token_ids=True)
        assert ids["choices"][0]["logprobs"]["tokens"] == [f"token_id:{token}" for token in once.out]
        body = {"input_ids": PROMPTS[0], "sampling_params": {"max_new_tokens": 200, "temperature": 0}}
        told = await posted(it, "/generate", {**body, "return_logprob": True, "top_logprobs_num": 2})
        triples = [[[value, token, None] for token, value in each] for each in once.top]
        assert told["meta_info"]["output_top_logprobs"] == triples


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_the_dialect_of_sglang_before_either_engine(kind):
    async with live(3, kind=kind, engine={"positional_seed": True}) as it:
        sampling = {"max_new_tokens": 200, "temperature": 0, "stop": ["never there"]}
        body = {"sampling_params": sampling, "return_logprob": True}
        await it.client.post("/rollmux/rollouts", json={"total": 12})
        tasks = [
            asyncio.create_task(it.client.post("/generate", json={**body, "input_ids": prompt}))
            for prompt in PROMPTS[:12]
        ]
        await it.settled(lambda: it.app.core.rollout.done >= 8)
        assert (await it.client.post("/rollmux/shrink", json={"keep": ["host1/gpu1"]})).json()["accepted"]
        for prompt, answer in zip(PROMPTS, await asyncio.gather(*tasks), strict=False):
            once, told = alone(prompt, **GREEDY), answer.json()
            pairs = told["meta_info"]["output_token_logprobs"]
            assert [pair[1] for pair in pairs] == once.out.tolist() == told["output_ids"]
            assert [pair[0] for pair in pairs] == once.logprobs.tolist()
            assert told["text"] == once.text(flushed=kind == "sglang")
            assert told["meta_info"]["finish_reason"]["type"] == once.finish
        assert it.app.core.rollout.moved > 0
        lists = await it.client.post("/generate", json={**body, "input_ids": PROMPTS[:2]})
        assert [one["output_ids"] for one in lists.json()] == [alone(p, **GREEDY).out.tolist() for p in PROMPTS[:2]]
        streamed = await events(it, "/generate", {**body, "input_ids": PROMPTS[0], "stream": True})
        assert streamed[-1]["output_ids"] == alone(PROMPTS[0], **GREEDY).out.tolist()


@pytest.mark.asyncio
async def test_the_dialect_of_vllms_token_api():
    async with live(2) as it:
        body = {"token_ids": PROMPTS[0], "sampling_params": {**GREEDY, "logprobs": 2, "n": 2}, "request_id": "mine"}
        told = (await it.client.post("/inference/v1/generate", json=body)).json()
        once = alone(PROMPTS[0], **GREEDY)
        assert told["request_id"] == "mine"
        assert [choice["token_ids"] for choice in told["choices"]] == [once.out.tolist()] * 2
        content = told["choices"][0]["logprobs"]["content"]
        assert [entry["token_id"] for entry in content] == once.out.tolist()
        assert [entry["logprob"] for entry in content] == once.logprobs.tolist()
        assert 1 <= len(content[0]["top_logprobs"]) <= 2
        streamed = await events(it, "/inference/v1/generate", {**body, "stream": True, "sampling_params": GREEDY})
        assert ids_of(streamed) == once.out.tolist()


@pytest.mark.asyncio
async def test_chat_is_passed_on_whole():
    async with live(2) as it:
        body = {"messages": [{"role": "user", "content": "hello"}], **GREEDY}
        told = (await it.client.post("/v1/chat/completions", json=body)).json()
        assert told["choices"][0]["message"]["content"] == alone([ord(c) for c in "hello"], **GREEDY).text()


@pytest.mark.asyncio
async def test_replicas_register_over_the_workers_api_and_leave():
    async with live(1) as it:
        more = await it.engine()
        answer = await it.client.post("/workers", json={"url": more.served.url, "worker_type": "regular"})
        assert answer.status_code == 202
        name = answer.json()["worker_id"]
        found = (await it.client.get("/workers")).json()["workers"]
        assert [one["url"] for one in found] == [it.engines[0].served.url, more.served.url]
        assert (await it.client.delete(f"/workers/{name}")).status_code == 202
        assert (await it.client.get("/list_workers")).json()["urls"] == [it.engines[0].served.url]
        assert (await it.client.post(f"/add_worker?url={more.served.url}")).is_success
        assert len((await it.client.get("/list_workers")).json()["urls"]) == 2


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "url",
    ["http://10.9.8.7:80", "http://example.com", "file:///etc/passwd", "http://127.0.0.1:1/x", "http://a@127.0.0.1"],
)
async def test_a_replica_is_registered_on_hosts_of_the_list_only(url):
    async with live(1) as it:
        answer = await it.client.post("/workers", json={"url": url})
        assert answer.status_code == 400
        assert len(it.app.core.replicas) == 1


@pytest.mark.asyncio
async def test_a_redirect_of_an_engine_is_not_followed():
    from gateway_live import served

    async def redirects(scope, receive, send):
        if scope["type"] == "lifespan":
            while True:
                message = await receive()
                await send({"type": message["type"] + ".complete"})
                if message["type"] == "lifespan.shutdown":
                    return
        where = (b"location", f"{elsewhere.url}/v1/completions".encode())
        await send({"type": "http.response.start", "status": 307, "headers": [where]})
        await send({"type": "http.response.body", "body": b""})

    async with live(1, attempts=2, no_replica_s=2) as it, served(redirects) as bad:
        elsewhere = it.engines[0].served
        await it.client.delete("/workers/r0")
        await it.client.post("/workers", json={"url": bad.url, "engine": "vllm"})
        before = it.engines[0].engine.tokens
        answer = await it.client.post("/v1/completions", json={"prompt": PROMPTS[0], **GREEDY})
        assert answer.status_code in (502, 503)
        assert it.engines[0].engine.tokens == before


@pytest.mark.asyncio
async def test_keys_divide_data_registration_and_control(tmp_path):
    keys = {}
    for power in ("data", "registration", "control"):
        (tmp_path / power).write_text(f"key-of-{power}\n")
        keys[power] = str(tmp_path / power)
    calls = {
        "data": ("POST", "/v1/completions", {"prompt": PROMPTS[0], "max_tokens": 2}),
        "registration": ("GET", "/workers", None),
        "control": ("GET", "/rollmux/rollout", None),
    }
    async with live(1, keys=keys) as it:
        for power, (method, path, body) in calls.items():
            for given in (None, "data", "registration", "control"):
                headers = {"Authorization": f"Bearer key-of-{given}"} if given else {}
                answer = await it.client.request(method, path, json=body, headers=headers)
                assert answer.status_code == (200 if given == power else 401), (power, given)
        seen = it.engines[0].headers
        assert not any(b"authorization" in dict(headers) for headers in seen)


@pytest.mark.asyncio
async def test_a_control_call_goes_to_all_and_is_done_only_if_all_did_it():
    async with live(2) as it:
        assert (await it.client.post("/pause?mode=keep")).status_code == 200
        assert all(fake.engine.paused for fake in it.engines)
        task = asyncio.create_task(complete(it, PROMPTS[0]))
        await it.settled(lambda: it.app.core.queue)
        assert (await it.client.post("/resume")).status_code == 200
        check(await task, PROMPTS[0])
        assert (await it.client.post("/update_weights", json={"weight_version": "7"})).status_code == 200
        assert {replica.weights for replica in it.app.core.replicas.values()} == {"7"}
        await it.kill(1)
        answer = await it.client.post("/reset_prefix_cache")
        assert answer.status_code == 502
        assert "r1: 502" in answer.text


@pytest.mark.asyncio
@pytest.mark.parametrize("by", ["gateway", "engine"])
async def test_a_pause_of_the_framework_is_no_stall(by):
    async with live(2, stall_s=0.5) as it:
        at = [it.url] * 2 if by == "gateway" else [fake.served.url for fake in it.engines]
        tasks = [asyncio.create_task(complete(it, prompt)) for prompt in PROMPTS[:8]]
        await it.settled(lambda: it.app.core.rollout.tokens > 20)
        for url in at:
            assert (await it.client.post(f"{url}/pause?mode=keep")).is_success
        await it.settled(lambda: all(replica.paused for replica in it.app.core.replicas.values()))
        began = it.app.now()
        await it.settled(lambda: it.app.now() - began > 2_500)
        assert all(replica.paused for replica in it.app.core.replicas.values())
        for url in at:
            assert (await it.client.post(f"{url}/resume")).is_success
        for prompt, answer in zip(PROMPTS, await asyncio.gather(*tasks), strict=False):
            check(answer, prompt)
            assert len(answer["rollmux"]["segments"]) == 1
        assert not it.app.core.count.faults


LONG = {"max_tokens": 5_000, "temperature": 0, "ignore_eos": True}
#: responses of each call below
LIVE = {"/v1/completions": 4, "/inference/v1/generate": 1, "/generate": 2}
SAMPLES = {"prompt": PROMPTS[:2], "n": 2, "return_token_ids": True, **LONG}


async def posted(it, path, body, name=""):
    return (await it.client.post(path, json=body, headers={"X-Request-Id": name} if name else {})).json()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("path", "body", "aborts", "asked"),
    [
        ("/v1/completions", SAMPLES, "/abort_requests", {"request_ids": ["cmpl-mine-1"]}),
        ("/v1/completions", SAMPLES, "/abort_requests", {"request_ids": ["cmpl-mine"]}),
        (
            "/inference/v1/generate",
            {"token_ids": PROMPTS[0], "sampling_params": LONG},
            "/inference/v1/abort_requests",
            {"request_ids": ["generate-tokens-mine"]},
        ),
        (
            "/generate",
            {"input_ids": PROMPTS[:2], "rid": ["mine", "mine-1"], "sampling_params": LONG},
            "/abort_request",
            {"rid": "mine"},
        ),
    ],
)
async def test_an_abort_by_the_clients_own_id_ends_its_requests_with_what_they_have(path, body, aborts, asked):
    async with live(2) as it:
        task = asyncio.create_task(posted(it, path, body, "mine"))
        other = asyncio.create_task(posted(it, path, body | ({"rid": ["a", "b"]} if "rid" in body else {}), "yours"))
        await it.settled(lambda: it.app.core.rollout.tokens > 200)
        wanted = {"cmpl-mine-1": 2, "cmpl-mine": 4}.get(asked.get("request_ids", [""])[0], 1)
        told = (await it.client.post(aborts, json=asked)).json()
        assert told["aborted"] == wanted
        assert sum(replica["live"] for replica in it.app.rollout()["replicas"]) == LIVE[path] * 2 - wanted
        assert (await it.client.post(aborts, json=asked)).json()["aborted"] == 0, "they are over"
        await it.client.post("/abort_requests", json={})
        found = await task
        await other
        choices = found if isinstance(found, list) else found["choices"]
        for number, choice in enumerate(choices):
            ids = choice["output_ids"] if path == "/generate" else choice["token_ids"]
            prompt = PROMPTS[number * 2 // len(choices)] if len(choices) > 1 else PROMPTS[0]
            assert 0 < len(ids) < 5_000
            assert ids == alone(prompt, **{**LONG, "max_tokens": len(ids)}).out.tolist()
        if path == "/v1/completions":
            assert found["id"] == "cmpl-mine"
            assert {choice["finish_reason"] for choice in choices} == {"abort"}


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ["/v1/completions", "/inference/v1/generate", "/generate"])
async def test_a_request_is_aborted_by_the_id_that_its_answer_has(path):
    bodies = {
        "/v1/completions": {"prompt": PROMPTS[0], **LONG},
        "/inference/v1/generate": {"token_ids": PROMPTS[0], "sampling_params": LONG},
        "/generate": {"input_ids": PROMPTS[0], "sampling_params": {"max_new_tokens": 5_000, "ignore_eos": True}},
    }
    async with live(1) as it:
        other = asyncio.create_task(posted(it, path, bodies[path]))
        async with it.client.stream("POST", path, json={**bodies[path], "stream": True}) as answer:
            lines = answer.aiter_lines()
            first = json.loads((await anext(lines)).removeprefix("data: "))
            name = first.get("id") or first.get("request_id") or first["meta_info"]["id"]
            how = {"rid": name} if path == "/generate" else {"request_ids": [name]}
            told = await posted(it, "/abort_request" if path == "/generate" else "/abort_requests", how)
            assert told["aborted"] == 1
            assert "[DONE]" in [line async for line in lines][-2]
        assert not other.done()
        await it.client.post("/abort_requests", json={})
        await other


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("path", "asked", "status"),
    [
        ("/abort_request", {}, 200),
        ("/abort_request", {"rid": ""}, 200),
        ("/abort_request", {"rid": "cmpl-0000000"}, 200),
        ("/abort_requests", {"request_ids": []}, 200),
        ("/abort_requests", {"request_ids": "all"}, 400),
        ("/inference/v1/abort_requests", {}, 400),
    ],
)
async def test_an_abort_that_names_no_request_aborts_none(path, asked, status):
    async with live(1, engine={"max_num_seqs": 2}) as it:
        tasks = [asyncio.create_task(posted(it, "/v1/completions", {"prompt": one, **LONG})) for one in PROMPTS[:4]]
        await it.settled(lambda: len(it.app.core.queue) == 2 and it.app.core.rollout.tokens > 20)
        assert (await it.client.post(path, json=asked)).status_code == status
        assert len(it.app.core.queue) == 2
        assert len(it.engines[0].engine.running) == 2
        assert (await it.client.post("/abort_request", json={"rid": "none", "abort_all": True})).status_code == 200
        await asyncio.gather(*tasks)


@pytest.mark.asyncio
async def test_an_abort_of_all_reaches_what_waits_in_the_gateway_too():
    async with live(1, engine={"max_num_seqs": 2}) as it:
        tasks = [asyncio.create_task(posted(it, "/v1/completions", {"prompt": one, **LONG})) for one in PROMPTS[:6]]
        await it.settled(lambda: len(it.app.core.queue) == 4 and it.app.core.rollout.tokens > 20)
        assert (await it.client.post("/abort_request", json={"abort_all": True})).status_code == 200
        told = await asyncio.gather(*tasks)
        assert [one["choices"][0]["finish_reason"] for one in told] == ["abort"] * 6
        assert it.engines[0].engine.tokens < 6 * 5_000
        assert sorted(bool(one["usage"]["completion_tokens"]) for one in told) == [False] * 4 + [True] * 2


@pytest.mark.asyncio
async def test_weights_that_are_written_to_one_replica_after_the_other_are_of_one_version():
    async with live(3) as it:
        for step in (1, 2):
            for number in range(3):
                for _ in range(2):  # in two buckets
                    assert (await it.client.post(f"/r/r{number}/update_weights", json={})).is_success
                assert (await it.client.post(f"/r/r{number}/finish_weight_update", json={})).is_success
            versions = {replica.weights for replica in it.app.core.replicas.values()}
            assert len(versions) == 1, (step, versions)


@pytest.mark.asyncio
async def test_weights_without_a_version_that_one_replica_slept_through_are_another_version():
    async with live(2) as it:
        replicas = it.app.core.replicas
        for asleep in ("r1", "r0"):
            await it.client.post(f"/r/{asleep}/sleep")
            assert (await it.client.post("/update_weights", json={})).status_code == 200
            assert replicas[asleep].stale
            assert replicas["r0"].weights != replicas["r1"].weights
            await it.client.post(f"/r/{asleep}/wake_up")
        assert (await it.client.post("/update_weights", json={})).status_code == 200
        assert replicas["r0"].weights == replicas["r1"].weights
        assert not any(replica.stale for replica in replicas.values())


@pytest.mark.asyncio
async def test_calls_for_one_replica_by_its_own_address():
    async with live(2) as it:
        told = (await it.client.post("/r/r1/v1/completions", json={"prompt": PROMPTS[0], **GREEDY})).json()
        assert told["rollmux"]["segments"][0][0] == "r1"
        assert (await it.client.post("/r/r1/sleep?level=1")).status_code == 200
        assert [fake.sleeping for fake in it.engines] == [0, 1]
        assert (await it.client.get("/r/r1/health")).status_code == 200
        assert (await it.client.get("/r/r9/health")).status_code == 404


@pytest.mark.asyncio
async def test_a_parked_replica_answers_for_sleep_itself_and_refuses_weights():
    async with live(2) as it:
        await it.client.post("/rollmux/park", json={})
        assert all(fake.sleeping for fake in it.engines)
        assert (await it.client.post("/r/r0/sleep?level=2")).status_code == 200
        assert it.engines[0].sleeping == 1
        assert (await it.client.post("/r/r0/update_weights", json={})).status_code == 409
        assert (await it.client.post("/rollmux/wake", json={"gpus": ["host1/gpu0"]})).json() == {"replicas": ["r0"]}
        assert [fake.sleeping for fake in it.engines] == [0, 1]
        check(await complete(it, PROMPTS[0]), PROMPTS[0])


@pytest.mark.asyncio
async def test_engines_that_the_framework_puts_to_sleep_get_no_request_until_it_wakes_them():
    async with live(2) as it:
        assert (await it.client.post("/sleep?level=1")).status_code == 200
        assert {replica.status for replica in it.app.core.replicas.values()} == {"parked"}
        task = asyncio.create_task(complete(it, PROMPTS[0]))
        await it.settled(lambda: it.app.core.queue)
        await it.client.post("/wake_up?tags=weights")
        assert it.app.core.queue
        assert (await it.client.post("/collective_rpc", json={"method": "reload_weights"})).status_code == 200
        await it.client.post("/wake_up?tags=kv_cache")
        check(await task, PROMPTS[0], MODEL_1)


@pytest.mark.asyncio
async def test_an_engine_that_sglang_wakes_for_weights_only_gets_no_request():
    async with live(1, kind="sglang") as it:
        assert (await it.client.post("/release_memory_occupation", json={})).is_success
        assert (await it.client.post("/resume_memory_occupation", json={"tags": ["weights"]})).is_success
        task = asyncio.create_task(complete(it, PROMPTS[0]))
        await it.settled(lambda: it.app.core.queue)
        assert (await it.client.post("/update_weights_from_tensor", json={})).status_code == 404, "the engine is asked"
        assert it.app.core.queue
        assert (await it.client.post("/resume_memory_occupation", json={"tags": ["kv_cache"]})).is_success
        check(await task, PROMPTS[0])
        await it.client.post("/rollmux/park", json={})
        assert (await it.client.post("/update_weights_from_tensor", json={})).status_code == 409


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ["/update_weights_from_disk", "/update_weights"])
async def test_engines_that_join_within_a_rollout_get_the_weights_of_the_step_or_no_request(path):
    async with live(2) as it:
        await it.client.post("/rollmux/rollouts", json={"total": 8, "gpus": ["host1/gpu0"]})
        assert (await it.client.post(path, json={"weight_version": "1"})).status_code == 200
        await it.client.post("/rollmux/grow", json={"gpus": ["host1/gpu0", "host1/gpu1"]})
        joined = it.app.core.replicas["r1"]
        can = path == "/update_weights_from_disk"
        await it.settled(lambda: joined.status == "open" and joined.stale != can)
        for prompt, told in zip(
            PROMPTS, await asyncio.gather(*(complete(it, one) for one in PROMPTS[:8])), strict=False
        ):
            check(told, prompt, MODEL_1)
        assert bool(it.engines[1].engine.tokens) == can
        assert [one["stale"] for one in it.app.rollout()["replicas"]] == [False, not can]
        assert (await it.client.post(path, json={"weight_version": "2"})).status_code == 200
        assert not joined.stale


@pytest.mark.asyncio
async def test_a_dead_replica_is_logged_and_comes_back_once_it_answers(caplog):
    async with live(2) as it:
        dead = it.app.core.replicas["r0"]
        die(it, "r0")
        assert dead.status == "dead"
        assert "r0" in caplog.text
        assert "is dead" in caplog.text
        it.app.tell(i.Probed("r0", ok=True))
        await it.settled(lambda: it.app.core.replicas["r0"].status == "open")
        assert it.app.core.replicas["r0"].gpus == ("host1/gpu0",)


@pytest.mark.asyncio
async def test_a_dead_replica_with_old_weights_stays_out(caplog):
    async with live(2) as it:
        die(it, "r0")
        it.app.tell(i.Weights(("r1",), "7"))
        it.app.core.replicas["r0"].weights = "7"
        it.app.tell(i.Probed("r0", ok=True))
        await it.settled(lambda: "give it these" in caplog.text)
        assert it.app.core.replicas["r0"].status == "dead"


@pytest.mark.asyncio
async def test_park_reaches_a_replica_that_was_thought_dead_and_says_so_where_it_cannot():
    async with live(2) as it:
        die(it, "r0", "r1")
        await it.kill(1)
        answer = await it.client.post("/rollmux/park", json={})
        assert answer.status_code == 502
        assert "r1" in answer.text
        assert it.engines[0].sleeping == 1
        assert it.app.core.replicas["r0"].status == "parked"


@pytest.mark.asyncio
async def test_a_park_waits_for_the_wake_that_is_under_way():
    async with live(1) as it:
        await it.client.post("/rollmux/park", json={})
        it.app.tell(i.Grow(("host1/gpu0",)))
        assert (await it.client.post("/rollmux/park", json={})).status_code == 200
        assert it.engines[0].sleeping == 1
        assert it.app.core.replicas["r0"].status == "parked"
        assert not it.app.upstream._calls


@pytest.mark.asyncio
async def test_an_engine_that_sleeps_when_it_registers_is_used_once_it_is_woken():
    async with live(1) as it:
        more = await it.engine()
        more.sleeping = 1
        answer = await it.client.post("/workers", json={"url": more.served.url, "engine": "vllm"})
        assert answer.json()["status"] == "parked"
        await it.client.post("/rollmux/rollouts", json={"total": 1})
        await it.settled(lambda: not more.sleeping)


@pytest.mark.asyncio
async def test_a_retry_with_the_same_key_joins_and_equal_prompts_without_one_do_not():
    async with live(2, engine={"step_s": 0.005}) as it:
        body = {"prompt": PROMPTS[0], **GREEDY}
        key = {"Idempotency-Key": "one"}
        first = asyncio.create_task(it.client.post("/v1/completions", json=body, headers=key))
        await it.settled(lambda: it.app.core.rollout.arrived == 1)
        first.cancel()
        second = await it.client.post("/v1/completions", json=body, headers=key)
        assert second.status_code == 200, second.text
        assert second.json()["choices"][0]["text"] == alone(PROMPTS[0], **GREEDY).text()
        assert it.app.core.rollout.arrived == 1
        await asyncio.gather(*(it.client.post("/v1/completions", json=body) for _ in range(3)))
        assert it.app.core.rollout.arrived == 4


@pytest.mark.asyncio
async def test_a_key_of_a_call_that_failed_is_tried_again_and_one_of_another_body_is_refused():
    async with live(1) as it:
        key = {"Idempotency-Key": "one"}
        body = {"prompt": PROMPTS[0], **GREEDY}
        it.engines[0].refuses = 422
        assert (await it.client.post("/v1/completions", json=body, headers=key)).json()["error"]["message"] == "refused"
        it.engines[0].refuses = 0
        assert (await it.client.post("/v1/completions", json=body, headers=key)).status_code == 200
        answer = await it.client.post("/v1/completions", json={**body, "prompt": PROMPTS[1]}, headers=key)
        assert answer.status_code == 422
        assert "Idempotency-Key" in answer.text


@pytest.mark.asyncio
async def test_a_configured_replica_that_registers_keeps_its_gpus_and_engine():
    async with live(1) as it:
        url = it.engines[0].served.url
        assert (await it.client.post("/workers", json={"url": url})).status_code == 202
        assert (it.app.core.replicas["r0"].engine, it.app.core.replicas["r0"].gpus) == ("vllm", ("host1/gpu0",))


@pytest.mark.asyncio
async def test_a_rollout_on_gpus_without_a_replica_is_refused_with_both_lists():
    async with live(1) as it:
        answer = await it.client.post("/rollmux/rollouts", json={"gpus": ["elsewhere/gpu0"]})
        assert answer.status_code == 409
        assert "elsewhere/gpu0" in answer.text
        assert "host1/gpu0" in answer.text
        assert it.app.core.replicas["r0"].status == "open"


@pytest.mark.asyncio
async def test_an_event_that_cannot_be_read_is_a_fault_of_the_engine(monkeypatch):
    async with live(2) as it:
        dialect = it.app.upstream._dialects["vllm"]
        read, odd = dialect.read, [TypeError("odd")]

        def once(*given):
            if odd:
                raise odd.pop()
            return read(*given)

        monkeypatch.setattr(dialect, "read", once, raising=False)
        check(await asyncio.wait_for(complete(it, PROMPTS[0]), 10), PROMPTS[0])
        assert it.app.core.count.faults == {"in_band": 1}


@pytest.mark.asyncio
async def test_a_page_of_another_site_registers_nothing():
    async with live(1) as it:
        for path in ("/workers", "/rollmux/stop"):
            answer = await it.client.post(path, json={}, headers={"Origin": "http://evil.example"})
            assert answer.status_code == 403
        answer = await it.client.post("/rollmux/rollouts", json={}, headers={"Origin": it.url})
        assert answer.status_code == 200


@pytest.mark.asyncio
async def test_a_gateway_that_cannot_be_a_job_answers_503(caplog, monkeypatch):
    monkeypatch.setenv("ROLLMUX_URL", "off")
    monkeypatch.setenv("ROLLMUX_REQUIRED", "1")
    async with live(1) as it:
        it.app.settings = msgspec.structs.replace(it.app.settings, job={"name": "math"})
        it.app.own = OwnLink(it.app, it.url)
        it.app.own.start()
        answer = await asyncio.wait_for(it.client.post("/v1/completions", json={"prompt": PROMPTS[0], **GREEDY}), 10)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "5"
        assert "answers requests with 503: no rollmuxd daemon" in caplog.text
        assert "Traceback" not in caplog.text


@pytest.mark.asyncio
async def test_a_client_that_hangs_up_frees_the_engine():
    async with live(1, engine={"step_s": 0.01}) as it:
        body = {"prompt": PROMPTS[0], **GREEDY, "ignore_eos": True}
        task = asyncio.create_task(it.client.post("/v1/completions", json=body))
        await it.settled(lambda: it.engines[0].engine.running)
        task.cancel()
        await it.settled(lambda: not it.engines[0].engine.running)
        await it.settled(lambda: not it.app.core.requests)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "body",
    [
        b"no json",
        b"[1]",
        b'{"prompt": []}',
        b'{"prompt": [1, -2]}',
        b'{"prompt": [1, "a"]}',
        b'{"prompt": [1.5]}',
        b'{"prompt": [99999999999999]}',
        b'{"prompt": [1], "n": 0}',
        b'{"prompt": [1], "n": 99999}',
        b'{"prompt": [1], "max_tokens": "many"}',
        b'{"prompt": [1], "seed": "x"}',
        b'{"prompt": [1], "stop": [""]}',
        b"[" * 100_000,
    ],
)
async def test_a_body_that_cannot_be_meant_is_refused_and_changes_nothing(body):
    async with live(1) as it:
        answer = await it.client.post("/v1/completions", content=body)
        assert answer.status_code == 400, answer.text
        assert not it.app.core.requests
        assert it.app.core.rollout.arrived == 0


@pytest.mark.asyncio
async def test_a_body_beyond_the_limit_is_refused():
    async with live(1, max_body_mb=1) as it:
        answer = await it.client.post("/v1/completions", content=b"x" * (2**20 + 1))
        assert answer.status_code == 413


@pytest.mark.asyncio
async def test_a_refusal_of_the_engine_goes_to_the_client_as_it_is():
    async with live(2) as it:
        for fake in it.engines:
            fake.refuses = 422
        answer = await it.client.post("/v1/completions", json={"prompt": PROMPTS[0], **GREEDY})
        assert answer.status_code == 422
        assert answer.json() == {"error": {"message": "refused"}}
        assert sum(fake.refused for fake in it.engines) == 1


@pytest.mark.asyncio
async def test_no_prompt_and_no_answer_is_in_any_log(caplog, capfd):
    caplog.set_level(logging.DEBUG)
    marker = "xyzzySECRETxyzzy"
    async with live(2, engine={"step_s": 0.005}) as it:
        task = asyncio.create_task(it.client.post("/v1/completions", json={"prompt": marker, **GREEDY}))
        await it.settled(lambda: it.app.core.rollout.tokens > 2)
        await it.client.post(f"{it.engines[0].served.url}/fault", json={"kind": "in_band", "count": 1})
        answer = (await task).json()["choices"][0]["text"]
        await it.client.post("/v1/completions", content=marker.encode())
        await it.client.post("/generate", json={"text": marker, "sampling_params": []})
    told = caplog.text + "".join(capfd.readouterr())
    assert marker not in told
    assert answer[:20] not in told


@pytest.mark.asyncio
async def test_a_follower_hears_of_progress():
    async with live(1) as it:
        first = (await it.client.get("/rollmux/rollout")).json()
        waiting = asyncio.create_task(it.client.get(f"/rollmux/rollout?after={first['seq']}&wait_ms=60000"))
        await asyncio.wait_for(complete(it, PROMPTS[0]), PATIENCE_S)
        assert (await waiting).json()["seq"] > first["seq"]


@pytest.mark.asyncio
@pytest.mark.parametrize("query", ["after=--5", "wait_ms=1.5", "after=%C2%B2"])
async def test_a_follower_that_names_no_number_is_told_so(query):
    async with live(1) as it:
        answer = await it.client.get(f"/rollmux/rollout?{query}")
        assert answer.status_code == 400
        assert "has to be a whole number" in answer.text


@pytest.mark.asyncio
async def test_metrics_are_of_what_happened():
    async with live(2) as it:
        await complete(it, PROMPTS[0])
        told = (await it.client.get("/metrics")).text
        assert "\nrollmux_gateway_shrink_seconds " not in told, "there was none"
        assert 'rollmux_gateway_requests_total{finish="' in told
        assert 'rollmux_gateway_segments_total{why="first"} 1.0' in told
        assert 'rollmux_gateway_replica_state{replica="r0",state="open"} 1.0' in told
        asyncio.get_running_loop().call_soon(time.sleep, 0.5)  # something holds up the loop
        await it.settled(lambda: it.app.lag_s > 0.2)
        verdict, _ = await tail(it)
        assert verdict["accepted"]
        await it.settled(lambda: it.app.core.rollout.shrinks_ms)
        told = (await it.client.get("/metrics")).text
        values = dict(line.split() for line in told.splitlines() if line[0] != "#" and "{" not in line)
        assert float(values["rollmux_gateway_shrink_seconds"]) >= float(values["rollmux_gateway_drain_seconds"]) > 0
        assert float(values["rollmux_gateway_chunk_lag_seconds"]) > 0.2
