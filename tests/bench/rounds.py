"""Tail batching on published lengths: how much sooner rollouts end. The planner is the real one; engines are ideal.

A round takes as long as the longest response that it waits for (latency-bound). Rollout time of an epoch with tail
batching, against as many rounds of as many groups that wait for all. Lengths are drawn with replacement:

    servegen    DeepSeek-R1 traffic: the distribution of all; within a prompt ln length deviates by 0.34
    skythought  QwQ-like answers to MATH-500: three samples of each problem
    aime        R1-distilled 1.5B on AIME: the samples of each problem

``engine`` plays the same with the engine model of the simulator (:mod:`rollmuxd.rollout.engine`), which charges what is
generated for nothing: eight H800, each with a replica of a 14B model, prompts of 512 tokens. That workload was fixed
before its figures were seen.

A miss where the files are not there: RESPONSE_LENGTHS names their folder.
"""

import csv
import math
import os
import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Final

from figures import Json, at_least, between, say, short

from rollmuxd.rollout.engine import Engine, Replica, Request
from rollmuxd.rollout.hardware import gpu
from rollmuxd.rollout.models import model
from rollmuxd_rounds import Ledger, Plan

WANT: Final = 32
N: Final = 8
#: of ln length, within a prompt (servegen)
WITHIN: Final = 0.34
#: what is promised, by file
BARS: Final = {"servegen": 1.9, "skythought": 3.3, "aime": 1.2}
#: and with the engine model, where something is promised
ENGINE_BARS: Final = {"servegen": 1.3}
REPLICAS: Final = 8
PROMPT: Final = 512
#: seconds between two looks at what is to be aborted
LOOK_S: Final = 0.5
FILES: Final = {
    "servegen": "servegen_deepseek_r1_pmf.csv",
    "skythought": "skythought_qwen25_32b_math500.csv",
    "aime": "aime_r1distill_1p5b_a.csv",
}
_FOLDER: Final = Path(os.environ.get("RESPONSE_LENGTHS") or Path(__file__).parents[3] / "shared/data/response_lengths")

#: draws the lengths of so many samples of a prompt, which is as long each time that it comes
Draw = Callable[[random.Random, int, int], list[int]]


def run(budget_s: float, *, small: bool = False) -> Json:
    """The gain of each file, and what it costs in tokens."""
    del budget_s
    draws = lengths_of()
    if isinstance(draws, str):
        return {"skipped": draws, "targets": {}}
    found: Json = {"gain": {}, "tokens": {}, "short_to_long": {}, "gain_eta_n_1": {}, "committed": {}, "targets": {}}
    found["engine"] = {}
    rounds, timed = (60, 5) if small else (400, 60)
    for name, draw in draws.items():
        played = _epoch(draw, rounds, eta_n=1.25)
        found["gain"][name] = short(played["gain"])
        found["tokens"][name] = short(played["tokens"])
        found["short_to_long"][name] = short(played["short_to_long"])
        found["committed"][name] = short(played["committed"])
        found["gain_eta_n_1"][name] = short(_epoch(draw, rounds, eta_n=1.0)["gain"])
        found["targets"][f"gain.{name}"] = at_least(found["gain"][name], BARS[name])
        found["targets"][f"short_to_long.{name}"] = between(found["short_to_long"][name], 3.6, 4.4)
        found["targets"][f"committed.{name}"] = between(found["committed"][name], 1, 1)
        found["engine"][name] = short(_timed(draw, timed, 1.0) / _timed(draw, timed, 1.25))
        if name in ENGINE_BARS:
            found["targets"][f"engine.{name}"] = at_least(found["engine"][name], ENGINE_BARS[name])
        say(f"rounds: {name} {found['gain'][name]}, with the engine model {found['engine'][name]}")
    return found


def lengths_of() -> dict[str, Draw] | str:
    """What draws the lengths of each file; or why there are none."""
    missing = [name for name in FILES.values() if not (_FOLDER / name).exists()]
    if missing:
        return f"{_FOLDER} has no {', '.join(missing)}; say RESPONSE_LENGTHS=FOLDER"
    return {"servegen": _servegen(), "skythought": _by_prompt("skythought"), "aime": _by_prompt("aime")}


def _epoch(draw: Draw, rounds: int, *, eta_n: float) -> dict[str, float]:
    rng = random.Random(f"rounds {eta_n}")
    count = rounds * WANT
    ledger = Ledger(count, n=N, want=WANT, eta_n=eta_n)
    took = tokens = plain = plain_tokens = 0.0
    kinds: dict[str, int] = defaultdict(int)
    committed = 0
    while not ledger.epoch_done:
        plan = ledger.next()
        groups = {prompt: sorted(draw(rng, prompt, plan.launch)) for prompt in plan.prompts}
        ready = sorted(plan.prompts, key=lambda prompt: groups[prompt][plan.n - 1])
        done = ready[: plan.want]
        longest = groups[done[-1]][plan.n - 1]
        took += longest
        # A sample is aborted when its group, or its round, has enough.
        for lengths in groups.values():
            until = min(longest, lengths[plan.n - 1])
            tokens += sum(min(length, until) for length in lengths)
        kinds[plan.kind] += 1
        committed += plan.want
        ledger.commit(plan, done)
    order = Ledger(count, n=N, want=WANT, eta=1.0, eta_n=1.0)
    while not order.epoch_done:
        plan = order.next()
        waited = [draw(rng, prompt, N) for prompt in plan.prompts]
        plain += max(map(max, waited))
        plain_tokens += sum(map(sum, waited))
        order.commit(plan, plan.prompts)
    return {
        "gain": plain / took,
        "tokens": tokens / plain_tokens,
        "short_to_long": kinds["short"] / max(1, kinds["long"]),
        "committed": committed / count,
    }


def _timed(draw: Draw, rounds: int, eta: float) -> float:
    """Seconds of an epoch's rollouts on engines that other samples slow down."""
    rng = random.Random("rounds, timed")
    ledger = Ledger(rounds * WANT, n=N, want=WANT, eta=eta, eta_n=eta)
    took = 0.0
    while not ledger.epoch_done:
        plan = ledger.next()
        seconds, done = _round(plan, {prompt: draw(rng, prompt, plan.launch) for prompt in plan.prompts})
        took += seconds
        ledger.commit(plan, done)
    return took


def _round(plan: Plan, lengths: dict[int, list[int]]) -> tuple[float, list[int]]:
    """Seconds until the round has its groups, and their prompts."""
    replicas = [Replica(Engine(gpu("h800"), model("qwen2.5-14b"))) for _ in range(REPLICAS)]
    prompts = [prompt for prompt in plan.prompts for _ in range(plan.launch)]
    samples = [length for prompt in plan.prompts for length in lengths[prompt]]
    for name, length in enumerate(samples):  # samples of a prompt are spread
        replicas[name % REPLICAS].submit([Request(name, PROMPT, length)])
    left, done, now = dict.fromkeys(plan.prompts, plan.n), [], 0.0
    while True:
        now += LOOK_S
        for when, name in sorted(end for replica in replicas for end in replica.advance(now)):
            left[prompts[name]] -= 1
            if left[prompts[name]]:
                continue
            done.append(prompts[name])
            if len(done) == plan.want:
                return when, done
            for replica in replicas:
                replica.take(other for other, prompt in enumerate(prompts) if prompt == prompts[name])


def _by_prompt(name: str) -> Draw:
    samples: dict[str, list[int]] = defaultdict(list)
    with (_FOLDER / FILES[name]).open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            samples[row["prompt_id"]].append(int(row["output_tokens"]))
    prompts = list(samples.values())

    def draw(rng: random.Random, prompt: int, count: int) -> list[int]:
        return rng.choices(random.Random(prompt).choice(prompts), k=count)

    return draw


def _servegen() -> Draw:
    lengths, shares = [], []
    with (_FOLDER / FILES["servegen"]).open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            lengths.append(int(row["output_tokens"]))
            shares.append(float(row["probability"]))
    total = sum(shares)
    mean = sum(p * math.log(x) for x, p in zip(lengths, shares, strict=True)) / total
    whole = math.sqrt(sum(p * (math.log(x) - mean) ** 2 for x, p in zip(lengths, shares, strict=True)) / total)
    between = math.sqrt(max(0.0, whole**2 - WITHIN**2))
    reached, table = 0.0, []
    for length, share in zip(lengths, shares, strict=True):
        reached += share / total
        table.append((reached, length))

    def at(quantile: float) -> int:
        low, high = 0, len(table) - 1
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if table[middle][0] < quantile else (low, middle)
        return table[low][1]

    def draw(rng: random.Random, prompt: int, count: int) -> list[int]:
        # By quantiles, so that all responses together have the distribution of the file.
        mine = random.Random(prompt).gauss(0, between)
        z = ((mine + rng.gauss(0, WITHIN)) / whole for _ in range(count))
        return [at(0.5 * math.erfc(-one / math.sqrt(2))) for one in z]

    return draw
