"""A gateway that dies during a rollout, as a process: what its clients, its engines and the next one see."""

import asyncio
import json

import httpx
import pytest
from gateway_live import alone
from gateway_processes import processes
from patience import PATIENCE_S

GPUS = ["host1/gpu0", "host1/gpu1"]
PROMPTS = [[1 + number, 2, 3, 4, 5, 6, 7, 8, 9] for number in range(12)]
BODY = {"max_tokens": 200, "temperature": 0, "logprobs": 0, "return_token_ids": True}


async def settled(done):
    async with asyncio.timeout(PATIENCE_S):
        while not await done():
            await asyncio.sleep(0.02)


@pytest.mark.asyncio
async def test_clients_see_a_reset_engines_stop_and_the_next_gateway_wakes_what_was_parked(tmp_path):
    with processes(tmp_path) as them:
        engines = [them.engine([gpu], "--median", "120", "--sigma", "0.3", "--step-ms", "20") for gpu in GPUS]
        text = "".join(
            f'[[replica]]\nurl = "{url}"\ngpus = ["{gpu}"]\n' for url, gpu in zip(engines, GPUS, strict=True)
        )
        child, url = them.gateway(text)
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:

            async def view():
                return (await client.get("/rollmux/rollout")).json()

            async def running(engine):
                told = (await client.get(f"{engine}/metrics")).text
                return float(next(line for line in told.splitlines() if "num_requests_running" in line).split()[-1])

            async def asleep(engine):
                return (await client.get(f"{engine}/is_sleeping")).json()["is_sleeping"]

            def ask():
                return [client.post("/v1/completions", json={"prompt": prompt, **BODY}) for prompt in PROMPTS]

            async def is_parked():
                return any(replica["status"] == "parked" for replica in (await view())["replicas"])

            await client.post("/rollmux/rollouts", json={"total": len(PROMPTS), "gpus": GPUS})
            calls = asyncio.gather(*ask(), return_exceptions=True)

            async def are_running():
                return (await view())["tokens"] > 100

            await settled(are_running)
            assert (await client.post("/rollmux/shrink", json={"keep": GPUS[:1]})).json()["accepted"]
            await settled(is_parked)
            child.kill()
            child.wait()
            seen = [it for it in await calls if not isinstance(it, httpx.Response)]
            assert seen
            assert all(isinstance(it, httpx.TransportError) for it in seen)

            async def are_idle():
                return not any([await running(engine) for engine in engines])

            await settled(are_idle)
            assert sum([await asleep(engine) for engine in engines]) == 1

            them.gateway(text, port=int(url.rpartition(":")[2]))
            assert await is_parked(), "it sleeps, and nothing said that it may use its GPU"
            told = (await client.post("/rollmux/rollouts", json={"total": len(PROMPTS), "gpus": GPUS})).json()
            assert told["number"] == 1
            for prompt, answer in zip(PROMPTS, await asyncio.gather(*ask()), strict=True):
                assert answer.json()["choices"][0]["token_ids"] == alone(prompt, **BODY).out.tolist()
            assert not any([await asleep(engine) for engine in engines])
        assert not [note for note in them.notes() if note["event"] == "violation"]


@pytest.mark.asyncio
async def test_the_next_gateway_uses_the_engines_that_are_awake_and_not_those_that_its_file_names_first(tmp_path):
    with processes(tmp_path) as them:
        like = ("--median", "120", "--sigma", "0.3", "--step-ms", "20")
        urls = {them.engine(GPUS, "--asleep", *like): GPUS} | {them.engine([gpu], *like): [gpu] for gpu in GPUS}
        text = '[estimate]\ngpu = "h800"\nmodel = "qwen2.5-14b"\n[rungs]\n'
        for url, gpus in urls.items():
            text += f'[[replica]]\nurl = "{url}"\ngpus = {json.dumps(gpus)}\n'
        child, url = them.gateway(text)
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:

            async def view():
                return (await client.get("/rollmux/rollout")).json()

            async def are_running():
                return (await view())["tokens"] > 20

            await client.post("/rollmux/rollouts", json={"total": len(PROMPTS), "gpus": GPUS})
            calls = [client.post("/v1/completions", json={"prompt": prompt, **BODY}) for prompt in PROMPTS]
            lost = asyncio.gather(*calls, return_exceptions=True)
            await settled(are_running)
            child.kill()
            child.wait()
            await lost
            them.gateway(text, port=int(url.rpartition(":")[2]))
            calls = [client.post("/v1/completions", json={"prompt": prompt, **BODY}) for prompt in PROMPTS]
            for prompt, answer in zip(PROMPTS, await asyncio.gather(*calls), strict=True):
                assert answer.json()["choices"][0]["token_ids"] == alone(prompt, **BODY).out.tolist()
            assert [replica["status"] for replica in (await view())["replicas"]] == ["parked", "open", "open"]
        assert [(note["event"], note["gpu"]) for note in them.notes()] == [("awake", gpu) for gpu in GPUS]
