"""The gateway before two real vLLM servers on the CPU: ``make -s real-gateway`` prints one JSON object.

Every one of the responses has to have the tokens and the log-probabilities that one engine gives without a gateway: as
it is, after a tail was gathered, and after an engine was killed. Each negative control switches one rule off, and has
to show what the rule is for. float32 on a CPU computes the same in every batch here; on GPUs only a batch-invariant
engine does.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import httpx

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[2] / "tests" / "shared"))

from gateway_live import served  # noqa: E402

from rollmuxd_gateway.app import App  # noqa: E402
from rollmuxd_gateway.core import inputs as i  # noqa: E402
from rollmuxd_gateway.core import splice  # noqa: E402
from rollmuxd_gateway.net.asgi import Asgi  # noqa: E402
from rollmuxd_gateway.net.upstream import Upstream  # noqa: E402
from rollmuxd_gateway.settings import read  # noqa: E402

START_S = 600
LIMIT_S = 300
#: tokens after which a control is cut
CUT = 12
#: how every prompt ends
TAIL = "so:"


def say(text):
    print(text, file=sys.stderr, flush=True)


class Engines:
    """Two servers of one tiny model, each on a core."""

    def __init__(self, python, folder):
        self.processes, self.urls = [], []
        # It prints its progress, and stdout is for one JSON object.
        making = [python, HERE / "tiny_bytes_model.py", folder / "tiny"]
        subprocess.run(making, check=True, timeout=LIMIT_S, stdout=sys.stderr)
        cores = sorted(os.sched_getaffinity(0))
        for number in range(2):
            with socket.create_server(("127.0.0.1", 0)) as found:
                port = found.getsockname()[1]
            environment = {
                **os.environ,
                "VLLM_SERVER_DEV_MODE": "1",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": str(cores[number % len(cores)]),
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
            }
            command = [
                *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", "tiny", "--dtype", "float32"),
                *("--host", "127.0.0.1", "--port", str(port), "--seed", str(number), "--max-model-len", "2048"),
                *("--max-num-seqs", "64", "--max-num-batched-tokens", "4096", "--enforce-eager"),
                *("--enable-prefix-caching",),
            ]
            with (folder / f"vllm{number}.log").open("wb") as log:
                self.processes.append(
                    subprocess.Popen(
                        command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
                    )
                )
            self.urls.append(f"http://127.0.0.1:{port}")
        self.folder = folder

    def wait(self):
        give_up = time.monotonic() + START_S
        for number, url in enumerate(self.urls):
            while True:
                log = self.folder / f"vllm{number}.log"
                assert self.processes[number].poll() is None, f"vLLM ended:\n{log.read_text()[-3000:]}"
                assert time.monotonic() < give_up, f"vLLM is not there after {START_S} s:\n{log.read_text()[-3000:]}"
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(f"{url}/health", timeout=10).status_code == 200:
                        break
                time.sleep(0.5)

    def kill(self, number):
        """SIGKILL of the server; its engine core may live on, as after a real accident."""
        os.kill(self.processes[number].pid, signal.SIGKILL)
        self.processes[number].wait()

    def end(self):
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def body(prompt, **more):
    """Special tokens are kept out, so that lengths are as planned; a text leaves them out, a detokenizer does not."""
    return {
        "model": "tiny",
        "prompt": prompt,
        "temperature": 0,
        "logprobs": 0,
        "return_token_ids": True,
        "logit_bias": {"0": -100, "1": -100},
        **more,
    }


async def ask(client, bodies):
    answers = await asyncio.gather(*(client.post("/v1/completions", json=one) for one in bodies))
    for answer in answers:
        assert answer.status_code == 200, answer.text[:500]
    return [answer.json() for answer in answers]


def of(told):
    choice = told["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["text"]


def compare(wanted, told):
    """How many have identical tokens, how many texts differ, and the largest difference of a log-probability."""
    same, texts, worst = 0, 0, 0.0
    for one, other in zip(wanted, told, strict=True):
        (ids, logprobs, text), (own_ids, own_logprobs, own_text) = of(one), of(other)
        same += ids == own_ids
        texts += text != own_text
        if ids == own_ids:
            worst = max([worst, *(abs(a - b) for a, b in zip(logprobs, own_logprobs, strict=True))])
    moved = sum(len(one["rollmux"]["segments"]) > 1 for one in told)
    return {"requests": len(told), "identical": same, "text_differs": texts, "logprob_max_diff": worst, "moved": moved}


@contextlib.asynccontextmanager
async def gateway(urls, interval=16):
    replicas = [{"url": url, "gpus": [f"host1/gpu{n}"]} for n, url in enumerate(urls)]
    app = App(read({"replica": replicas, "stream_interval": interval}))
    async with (
        served(Asgi(app)) as server,
        httpx.AsyncClient(base_url=server.url, timeout=LIMIT_S, limits=httpx.Limits()) as client,
    ):
        yield app, client


async def until(done):
    async with asyncio.timeout(LIMIT_S):
        while not done():
            await asyncio.sleep(0.005)


async def cut_at(app, client, bodies, at):
    """The responses, each moved once, when it has so many tokens."""
    tell, moved = app.tell, set()

    def told(it):
        tell(it)
        if isinstance(it, i.Tokens) and not it.finish and it.request not in moved:
            if len(app.core.requests[it.request].ids) >= at:
                moved.add(it.request)
                tell(i.Move(it.request))

    app.upstream._tell = told
    try:
        return await ask(client, bodies)
    finally:
        app.upstream._tell = tell


async def controls(urls, prompts, wanted):
    """Rules off, and on."""
    found = {}
    async with gateway(urls, interval=1) as (app, client):
        seeded = [body(prompt, temperature=1, seed=number, max_tokens=40) for number, prompt in enumerate(prompts)]

        def repeats(told):
            """Tokens after the cut that are those at the same distance from the start."""
            shares = []
            for one in told:
                ids = one["choices"][0]["token_ids"]
                at = one["rollmux"]["segments"][0][2]
                pairs = list(zip(ids, ids[at:], strict=False))[:at]
                shares += [a == b for a, b in pairs]
            return round(sum(shares) / len(shares), 3)

        found["seed_repeat"] = repeats(await cut_at(app, client, seeded, CUT))
        # The first tokens hang on the prompt too: one prompt alone shows the stream best.
        with mock.patch.object(splice, "reseeded", lambda seed, offset: seed):
            found["seed_naive_repeat"] = repeats(await cut_at(app, client, seeded, CUT))

        texts = []
        for one in wanted:
            answer = await client.post("/detokenize", json={"model": "tiny", "tokens": of(one)[0][CUT - 2 : CUT + 2]})
            texts.append(answer.json()["prompt"])
        stops = [(p, text) for p, text in zip(prompts, texts, strict=True) if text.strip() and "\ufffd" not in text]
        stopped = [body(prompt, stop=[text], max_tokens=40) for prompt, text in stops]
        async with httpx.AsyncClient(base_url=urls[0], timeout=LIMIT_S) as direct:
            right = await ask(direct, stopped)

        def missed(told):
            return sum(of(one)[0] != of(other)[0] for one, other in zip(right, told, strict=True))

        moved = await cut_at(app, client, stopped, CUT)
        found["stop_requests"], found["stop_missed"] = len(stopped), missed(moved)
        found["stop_text_wrong"] = sum(of(a)[2] != of(b)[2] for a, b in zip(right, moved, strict=True))
        with mock.patch.object(splice, "rewind", return_value=0):
            found["stop_naive_missed"] = missed(await cut_at(app, client, stopped, CUT))

        # A stop string of the prompt, and cuts of which some are within a character.
        inside = [body(prompt, stop=[TAIL], max_tokens=40) for prompt in prompts]
        async with httpx.AsyncClient(base_url=urls[0], timeout=LIMIT_S) as direct:
            right = await ask(direct, inside)
        found["prompt_stop_wrong"] = missed(await cut_at(app, client, inside, CUT))
        found["false_stops"] = app.core.count.segments.get("false_stop", 0)
        with mock.patch.object(Upstream, "_found_in_prompt", mock.AsyncMock(return_value=False)):
            found["prompt_stop_naive_wrong"] = missed(await cut_at(app, client, inside, CUT))

        penalties = [body(p, frequency_penalty=1.5, presence_penalty=1.0, max_tokens=40) for p in prompts[:32]]
        async with httpx.AsyncClient(base_url=urls[0], timeout=LIMIT_S) as direct:
            right = await ask(direct, penalties)
        found["penalty_wrong"] = missed(await cut_at(app, client, penalties, CUT))
        with mock.patch.object(splice, "pin", return_value=""):
            found["penalty_naive_wrong"] = missed(await cut_at(app, client, penalties, CUT))
    return found


async def measure(engines, count):
    rng = random.Random(7)
    # At the end whole characters: vLLM repeats a prompt that ends within one in the text of its response.
    async with httpx.AsyncClient(base_url=engines.urls[0], timeout=LIMIT_S) as direct:
        end = (await direct.post("/tokenize", json={"model": "tiny", "prompt": TAIL})).json()["tokens"]
    prompts = [[rng.randrange(2, 512) for _ in range(rng.randrange(8, 60))] + end for _ in range(count)]
    # Few are long, as in a rollout: the last fifth makes the tail.
    lengths = [rng.randrange(40, 120) for _ in range(count - count // 4)]
    lengths += [rng.randrange(600, 900) for _ in range(count // 4)]
    bodies = [body(prompt, max_tokens=most) for prompt, most in zip(prompts, lengths, strict=True)]
    for number in range(0, count, 4):  # and some may end by themselves
        bodies[number]["logit_bias"] = {"0": -100, "1": 2}
    result = {}
    async with httpx.AsyncClient(base_url=engines.urls[0], timeout=LIMIT_S) as direct:
        wanted = await ask(direct, bodies)
    say("without a move ...")
    async with gateway(engines.urls) as (app, client):
        result["no_move"] = compare(wanted, await ask(client, bodies))
        say("the tail gathered at 80 % ...")
        await client.post("/rollmux/rollouts", json={"total": count})
        work = asyncio.create_task(ask(client, bodies))
        await until(lambda: app.core.rollout.done >= 0.75 * count)
        verdict = (await client.post("/rollmux/shrink", json={"keep": ["host1/gpu0"]})).json()
        result["shrink"] = compare(wanted, await work)
        await until(lambda: app.core.rollout.status == "drained")
        result["shrink"]["accepted"] = verdict["accepted"]
        result["shrink"]["drain_ms"] = app.core.rollout.drains_ms[0]
        await client.post("/rollmux/grow", json={"gpus": ["host1/gpu0", "host1/gpu1"]})
        await until(lambda: all(replica.status == "open" for replica in app.core.replicas.values()))
    say("controls ...")
    result["controls"] = await controls(engines.urls, prompts, wanted)
    say("an engine killed in mid-stream ...")
    async with gateway(engines.urls) as (app, client):
        work = asyncio.create_task(ask(client, bodies))
        victim = app.core.replicas["r1"]
        await until(lambda: app.core.rollout.tokens > 2 * count and len(victim.live) > 8)
        engines.kill(1)
        result["kill"] = compare(wanted, await work)
    return result


def problems(result):
    found = []
    for name in ("no_move", "shrink", "kill"):
        one = result[name]
        if one["identical"] != one["requests"]:
            found.append(f"{name}: {one['identical']} of {one['requests']} are identical")
        if one["text_differs"]:
            found.append(f"{name}: {one['text_differs']} texts differ")
        if one["logprob_max_diff"] != 0.0:
            found.append(f"{name}: log-probabilities differ by {one['logprob_max_diff']}")
        if name != "no_move" and not one["moved"]:
            found.append(f"{name}: nothing moved")
    controls = result["controls"]
    if controls["seed_naive_repeat"] <= 0.3 or controls["seed_repeat"] > 0.1:
        found.append(
            f"seeds: {controls['seed_naive_repeat']} repeat without the rule, {controls['seed_repeat']} with it"
        )
    if controls["stop_naive_missed"] == 0 or controls["stop_missed"] or controls["stop_text_wrong"]:
        found.append(f"stop strings: {controls}")
    if controls["prompt_stop_naive_wrong"] == 0 or controls["prompt_stop_wrong"]:
        found.append(f"stop strings of the prompt: {controls}")
    if controls["penalty_naive_wrong"] == 0 or controls["penalty_wrong"]:
        found.append(f"penalties: {controls}")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=os.environ.get("ROLLMUX_VLLM_PYTHON"), help="the Python that has vLLM")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--keep", type=Path, help="leave the logs of the engines here")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rollmuxd-real-") as name:
        folder = asked.keep or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        engines = Engines(asked.python, folder)
        try:
            say("two vLLM servers start, which takes about a minute ...")
            engines.wait()
            result = asyncio.run(measure(engines, asked.requests))
        finally:
            engines.end()
    wrong = problems(result)
    print(json.dumps({**result, "ok": not wrong, "problems": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
