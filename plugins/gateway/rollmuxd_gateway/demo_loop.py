"""A loop of the demo: rollouts through a gateway, then a training step, a few times. It prints JSON, an object a line.

Prompts are made up, engines are ``hashlm``, so each response can be checked: it has to be what the model says, token by
token. The training step is paced, as the engines' steps are: there is no GPU to train on.
"""

import argparse
import asyncio
import json
import random
import time
from array import array
from contextlib import nullcontext
from typing import Any

import httpx

import rollmuxd
from rollmuxd_gateway import attach, hooks
from rollmuxd_gateway.fakes.hashlm import Engine, Model


def prompts(seed: int, step: int, count: int) -> list[list[int]]:
    """So many prompts, other ones in each step."""
    rng = random.Random(f"{seed}:{step}")
    return [[rng.randrange(1, 120) for _ in range(12)] for _ in range(count)]


async def generate(url: str, asked: list[list[int]], most: int) -> list[dict[str, Any]]:
    """All responses, asked for at once."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        async def one(prompt: list[int]) -> dict[str, Any]:
            body = {"prompt": prompt, "max_tokens": most, "temperature": 0, "logprobs": 0, "return_token_ids": True}
            answer = await client.post("/v1/completions", json=body)
            answer.raise_for_status()
            told: dict[str, Any] = answer.json()
            return told

        return await asyncio.gather(*map(one, asked))


def right(model: Model, prompt: list[int], told: dict[str, Any], most: int) -> bool:
    """Whether a response is what the model says."""
    engine = Engine(model)
    job = engine.submit("x", array("i", prompt), {"max_tokens": most, "temperature": 0})
    while not job.finish:
        engine.step()
    choice = told["choices"][0]
    return (choice["token_ids"], choice["logprobs"]["token_logprobs"]) == (job.out.tolist(), job.logprobs.tolist())


def main() -> None:
    """Run the loop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default="loop")
    parser.add_argument("--gateway", required=True)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=1_000)
    parser.add_argument("--median", type=float, default=200.0)
    parser.add_argument("--sigma", type=float, default=0.6)
    parser.add_argument("--train-s", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--alone", action="store_true", help="know nothing of rollmuxd: one URL, and no phases")
    args = parser.parse_args()
    model = Model(median=args.median, sigma=args.sigma)
    job = None
    if not args.alone:
        state = {"gpu_gb": 40, "ram_gb": 10, "driver": "channel"}
        job = rollmuxd.job(args.name, rollout={"nodes": 1, "min_gpus": 1, **state}, train={"nodes": 1}, init=False)
        hooks(job, args.gateway)
        job.start()
    checks = []
    for step in range(args.iterations):
        asked = prompts(args.seed, step, args.requests)
        told: dict[str, Any] = {}
        with job.phase("rollout") if job is not None else nullcontext() as slot:
            began = time.time()
            with attach(slot, args.gateway, total=len(asked)) if slot is not None else nullcontext() as attached:
                answers = asyncio.run(generate(args.gateway, asked, args.max_tokens))
                ended = time.time()
        if attached is not None:
            told = {**attached.told, "drains_ms": attached.view["drains_ms"], "moved": attached.view["moved"]}
        with job.phase("train") if job is not None else nullcontext():
            time.sleep(args.train_s)
        checks += [(prompt, answer) for prompt, answer in zip(asked, answers, strict=True)]
        line = {"step": step, "began": began, "ended": ended, "trained": time.time(), **told}
        print(json.dumps(line), flush=True)
    if job is not None:
        job.end()
    print(json.dumps({"all_done": time.time()}), flush=True)
    wrong = sum(not right(model, prompt, answer, args.max_tokens) for prompt, answer in checks)
    print(json.dumps({"responses": len(checks), "wrong": wrong}), flush=True)


if __name__ == "__main__":
    main()
