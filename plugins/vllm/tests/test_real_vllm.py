"""The driver before a real vLLM server, on the CPU: ``make real-vllm`` makes an environment for it, which is too large
for CI.

On the CPU vLLM has every call of its sleep mode, answers 200, and frees nothing: it is the engine without
--enable-sleep-mode that the driver has to refuse. So this shows which calls there are, that the fake server answers as
the real one does, and that the driver leaves such an engine alone. That memory is freed takes a GPU (``make gpu``).
"""

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from fake_engines import EngineHost
from fake_vllm import FakeVllm
from patience import PATIENCE_S

from rollmuxd.spi import NotDone, OrderKind, StateSpec
from rollmuxd.spi.contract import ResidencyContract, Rig
from rollmuxd_vllm import VllmResidency

#: the Python that has vLLM, if it is not this one
PYTHON = os.environ.get("ROLLMUX_VLLM_PYTHON") or (sys.executable if importlib.util.find_spec("vllm") else "")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="vllm is not installed; `make real-vllm` makes an environment that has it"),
]
START_S = 600
GPU = "host1/gpu0"
EXAMPLE = Path(__file__).parents[3] / "examples" / "vllm_filler.py"
WORDS = {"prompt": "w1 w2 w3", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """The address of a server with a tiny model, in dev mode."""
    folder = tmp_path_factory.mktemp("vllm")
    subprocess.run([PYTHON, Path(__file__).with_name("tiny_model.py"), folder / "tiny"], check=True, timeout=PATIENCE_S)
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    env = {
        **os.environ,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    limits = ("--enforce-eager", "--max-model-len", "128", "--max-num-seqs", "2", "--dtype", "float32")
    serve = (PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", "tiny")
    command = (*serve, "--host", "127.0.0.1", "--port", str(port), *limits)
    log = folder / "vllm.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=out, stderr=out, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        _until_healthy(url, process, log)
        yield url
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE_S)
        process.kill()
        process.wait()


@pytest.fixture
def server(started):
    """The same, awake after each test, whatever that has come to."""
    yield started
    httpx.post(f"{started}/wake_up", timeout=PATIENCE_S)


def _until_healthy(url, process, log):
    give_up = time.monotonic() + START_S
    while True:
        assert process.poll() is None, f"it ended: {log.read_text()[-3000:]}"
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=PATIENCE_S).status_code == 200:
                return
        assert time.monotonic() < give_up, f"not there after {START_S} s: {log.read_text()[-3000:]}"
        time.sleep(0.5)


class Bench:
    """The driver, and orders about a state that this server has."""

    def __init__(self, url):
        self.url = url
        self.driver = VllmResidency()
        self.host = EngineHost("host1", {GPU: ()})

    def order(self, kind):
        state = StateSpec(pool="rollout", gpu_mb=8_000, driver="vllm", options=(("url", self.url),))
        return ResidencyContract().order(Rig(self.driver, self.host, "host1", (GPU,), state), kind)

    def says(self):
        """What it generates: the same for as long as its weights are."""
        answer = httpx.post(f"{self.url}/v1/completions", json={"model": "tiny", **WORDS}, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    def sleeps(self):
        return httpx.get(f"{self.url}/is_sleeping", timeout=PATIENCE_S).json()["is_sleeping"]


CALLS = (
    "GET /health",
    "GET /is_sleeping",
    "POST /sleep?level=1&mode=abort",
    "GET /is_sleeping",
    "POST /sleep?level=1&mode=abort",
    "POST /wake_up?tags=weights",
    "GET /is_sleeping",
    "POST /wake_up?tags=kv_cache",
    "GET /is_sleeping",
    "POST /sleep?level=2&mode=wait",
    "POST /wake_up",
    "GET /is_sleeping",
    "POST /sleep?level=3",
    "POST /sleep?level=1&mode=softly",
    "GET /nothing_of_the_kind",
)


async def answers(url):
    """Status and words of each call in turn; of a refusal its status, for its words are for people."""
    found = []
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        for call in CALLS:
            method, _, path = call.partition(" ")
            answer = await client.request(method, path)
            told = answer.json() if answer.is_success and answer.content else None
            found.append((call, answer.status_code, told))
    return found


@pytest.mark.asyncio
async def test_the_fake_server_answers_as_the_real_one_without_sleep_mode_does(server):
    fake = FakeVllm(sleep_mode=False)
    await fake.start()
    try:
        assert await answers(server) == await answers(fake.url)
    finally:
        await fake.stop()


def test_its_gauge_is_the_one_that_the_driver_reads(server):
    lines = [
        line for line in httpx.get(f"{server}/metrics", timeout=PATIENCE_S).text.splitlines() if "sleep_state{" in line
    ]
    states = {"awake": "1.0", "weights_offloaded": "0.0", "discard_all": "0.0"}
    for state, value in states.items():
        assert any(f'sleep_state="{state}"' in line and line.endswith(f" {value}") for line in lines), state


@pytest.mark.asyncio
async def test_a_park_that_would_free_nothing_is_refused_and_the_engine_goes_on(server):
    bench = Bench(server)
    before = bench.says()
    with pytest.raises(NotDone, match="without --enable-sleep-mode"):
        await bench.driver.park(bench.order(OrderKind.PARK))
    assert not bench.sleeps()
    assert bench.says() == before


@pytest.mark.asyncio
async def test_an_engine_that_is_awake_is_loaded_as_it_is(server):
    bench = Bench(server)
    before = bench.says()
    order = bench.order(OrderKind.LOAD)
    await bench.driver.load(order)
    assert (await bench.driver.probe(order)).done
    assert bench.says() == before


def test_the_filler_of_the_examples_answers_requests_in_the_batch_format(server, tmp_path):
    body = {"model": "tiny", **WORDS}
    lines = [{"custom_id": f"r{n}", "method": "POST", "url": "/v1/completions", "body": body} for n in range(5)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ROLLMUX_", "XDG_"))}
    command = [sys.executable, EXAMPLE, "in.jsonl", "out.jsonl", "--url", server]
    subprocess.run(command, cwd=tmp_path, env={**kept, "HOME": str(tmp_path)}, check=True, timeout=PATIENCE_S)
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert sorted(one["custom_id"] for one in found) == [line["custom_id"] for line in lines]
    said = {one["response"]["body"]["choices"][0]["text"] for one in found}
    assert said == {Bench(server).says()}
