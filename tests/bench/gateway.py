"""What a token costs the gateway: 1,024 streams of 8 tokens a chunk, with aiohttp towards engines, and with httpx.

Processor time of the gateway's process, by the kernel's books, over all tokens that it aggregated. Engines (``hashlm``)
and the client are processes of their own. The same load goes to the engines directly, for comparison.
"""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import aiohttp
from figures import Json, at_least, at_most, quantile, say, short

STREAMS: Final = 1024
CHUNK: Final = 8
TOKENS: Final = 160
ENGINES: Final = 2
STEP_MS: Final = 50
LIMIT_S: Final = 280
_TICKS: Final = os.sysconf("SC_CLK_TCK")
_MAIN: Final = Path(__file__).with_name("gateway_process.py")


def run(budget_s: float, *, small: bool = False) -> Json:
    """Both clients in the same run, ours first and last."""
    del budget_s
    streams, tokens = (64, 48) if small else (STREAMS, TOKENS)
    engines = [_engine(number) for number in range(ENGINES)]
    try:
        urls = [url for _, url in engines]
        say(f"gateway: {streams} streams to the engines directly")
        direct = asyncio.run(_load(urls, streams, tokens))
        say("gateway: the same through the gateway")
        ours = _through("aiohttp", urls, streams, tokens)
        say("gateway: the same with httpx towards the engines")
        other = _through("httpx", urls, streams, tokens)
    finally:
        for process, _ in engines:
            process.kill()
            process.wait()
    ratio = other["us_cpu_per_token"] / ours["us_cpu_per_token"]
    return {
        "streams": streams,
        "tokens_per_chunk": CHUNK,
        "direct": direct,
        "ours": ours,
        "httpx": other,
        "us_cpu_per_token": ours["us_cpu_per_token"],
        "ratio_to_httpx": short(ratio),
        "lost_streams": ours["lost"],
        "targets": {
            "us_cpu_per_token": at_most(ours["us_cpu_per_token"], 20),
            "ratio_to_httpx": at_least(ratio, 2),
            "lost_streams": at_most(ours["lost"], 0),
        },
    }


def _engine(number: int) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "rollmuxd_gateway.fakes.server", "--step-ms", str(STEP_MS), "--seed", str(number)]
    command += ["--max-num-seqs", str(STREAMS)]
    return _started(command)


def _started(command: list[str]) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as said:
        port = int(said.readline())
    return process, f"http://127.0.0.1:{port}"


def _through(client: str, urls: list[str], streams: int, tokens: int) -> Json:
    process, url = _started([sys.executable, str(_MAIN), client, str(CHUNK), *urls])
    try:
        asyncio.run(_load([url], 16, 16))  # everything is imported, and connections are open
        before = _cpu_s(process.pid)
        found = asyncio.run(_load([url], streams, tokens))
        used = _cpu_s(process.pid) - before
        rss = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    finally:
        process.kill()
        process.wait()
    return {**found, "us_cpu_per_token": short(1e6 * used / (streams * tokens)), "rss_mb": short(rss)}


def _cpu_s(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / _TICKS


async def _load(urls: list[str], streams: int, tokens: int) -> Json:
    """All at once, as a rollout is: what each took, and how many are not whole."""
    took: list[float] = []
    lost = 0

    async def one(number: int, session: aiohttp.ClientSession) -> None:
        nonlocal lost
        prompt = [1 + number % 120, 1 + number // 120, 3, 4, 5, 6, 7, 8, 9]
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "logprobs": 0}
        began = time.monotonic()
        try:
            url = urls[number % len(urls)] + "/v1/completions"
            async with session.post(url, json={**body, "return_token_ids": True}) as answer:
                told = await answer.json()
                whole = len(told["choices"][0]["token_ids"]) == tokens
        except (aiohttp.ClientError, OSError, KeyError, TimeoutError):
            whole = False
        lost += not whole
        took.append(time.monotonic() - began)

    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        await asyncio.gather(*(one(number, session) for number in range(streams)))
    return {"p50_s": short(quantile(took, 0.5)), "p99_s": short(quantile(took, 0.99)), "lost": lost}
