"""A policy learns to multiply, with tail batching: rollouts come from any OpenAI-compatible URL that takes new weights.

    python examples/tail_batching.py http://127.0.0.1:8400

The policy is a table of logits, one row for each prompt, one column for each answer. The engine samples from it
(`POST /v1/completions`) and takes a new table after each step (`PUT /weights`): REINFORCE with the mean of the group as
baseline. Some answers take long; they do not hold up the short rounds.
"""

import argparse
import asyncio
from typing import Any

import httpx
import numpy as np

from rollmuxd_rounds import Group, OpenAI, Response, Rounds

FACTOR = 3


async def score(prompt: str, response: Response) -> float:
    """1 for the right answer. A real grader would run the answer, in a process of its own."""
    return float(response.text == str(int(prompt) * FACTOR % 10))


def step(logits: Any, groups: list[Group], rate: float) -> float:
    """One step of policy gradient; the mean reward."""
    rewards = []
    for group in groups:
        if group.failed:
            continue
        row = logits[int(group.prompt)]
        chances = np.exp(row - row.max())
        chances /= chances.sum()
        got = np.array([sample.reward for sample in group.samples], dtype=float)
        rewards.append(got.mean())
        for sample, advantage in zip(group.samples, got - got.mean(), strict=True):
            row += rate * advantage * (np.eye(10)[int(sample.response.text)] - chances)
    return float(np.mean(rewards))


async def train(url: str, epochs: int) -> list[float]:
    """The mean reward of each epoch."""
    logits = np.zeros((10, 10))
    prompts = [str(number % 10) for number in range(40)]
    history = []
    async with httpx.AsyncClient(base_url=url) as engine, OpenAI(url, model="table", max_tokens=64) as generate:
        rounds = Rounds(prompts, generate, n=8, want=8, reward=score)
        for epoch in range(epochs):
            means, kinds = [], []
            while not means or not rounds.epoch_done:
                (await engine.put("/weights", json=logits.tolist())).raise_for_status()
                async with rounds.next() as rnd:
                    groups = [group async for group in rnd]
                means.append(step(logits, groups, rate=0.45))
                kinds.append(rnd.kind)
                rounds.commit(rnd)
            history.append(sum(means) / len(means))
            print(f"epoch {epoch}: mean reward {history[-1]:.2f} in rounds {' '.join(kinds)}")
    return history


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    if not args.url.startswith(("http://", "https://")):
        parser.error(f"{args.url!r} is no address of a server; write http://HOST:PORT")
    try:
        asyncio.run(train(args.url, args.epochs))
    except httpx.HTTPError as error:
        raise SystemExit(f"{args.url} is no engine that takes new weights (PUT /weights): {error}") from None


if __name__ == "__main__":
    main()
