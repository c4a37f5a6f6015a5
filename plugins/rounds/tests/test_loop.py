"""The example learns, from a real HTTP server that samples from the weights that it was given."""

import asyncio
import gc
import importlib.util
import json
import random
import re
from contextlib import asynccontextmanager
from math import exp
from pathlib import Path

import pytest
from patience import PATIENCE_S
from serving import serving

from rollmuxd_rounds import OpenAI, Refused, Rounds, Unavailable

EXAMPLE = Path(__file__).parents[3] / "examples" / "tail_batching.py"

pytestmark = pytest.mark.asyncio


class TableEngine:
    """Answers ``/v1/completions`` by a table of logits. One answer in thirty takes long."""

    def __init__(self):
        self.table, self.version = None, 0
        self.rng = random.Random(7)
        self.calls, self.hung_up, self.breaks = 0, 0, 0
        #: calls that have come, and answers that have gone
        self.seen = 0

    async def serve(self, reader, writer):
        try:
            while line := await reader.readline():
                headers = {}
                while header := (await reader.readline()).decode().strip():
                    name, _, value = header.partition(":")
                    headers[name.lower()] = value.strip()
                body = json.loads(await reader.readexactly(int(headers.get("content-length", 0))) or b"null")
                self.seen += 1
                status, answer = await self._answer(reader, line.decode().split()[1], body)
                content = json.dumps(answer).encode()
                writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content)
                await writer.drain()
                self.seen += 1
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(self, reader, path, body):
        if path == "/weights":
            self.table, self.version = body, self.version + 1
            return 200, {}
        assert path == "/v1/completions"
        self.calls += 1
        if self.breaks and self.calls % self.breaks == 0:
            return 500, {"error": "out of memory"}
        version, row = self.version, self.table[int(body["prompt"])]
        await self._compute(reader, long=self.rng.random() < 1 / 30)
        (answer,) = self.rng.choices(range(10), weights=[exp(logit) for logit in row])
        return 200, {
            "choices": [{"text": str(answer), "finish_reason": "stop"}],
            "usage": {"completion_tokens": 1},
            "rollmux": {"weights": str(version)},
        }

    async def _compute(self, reader, *, long):
        """As an engine does: no longer than the caller stays. A long answer takes until nothing else is being made.

        Callers and engine share a loop, so turns of it in which nothing comes and goes say that, on any machine.
        """
        gone = asyncio.create_task(reader.read(1))
        quiet = 0
        while quiet < (300 if long else 1) and not gone.done():
            before = self.seen
            await asyncio.sleep(0)
            quiet = quiet + 1 if self.seen == before else 0
        if gone.done():
            self.hung_up += 1
            raise ConnectionResetError
        gone.cancel()
        await asyncio.wait([gone])


@asynccontextmanager
async def listening(serve):
    async with serving(serve) as (host, port):
        yield f"http://{host}:{port}"


def the_example():
    spec = importlib.util.spec_from_file_location("tail_batching", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# A call that is cancelled just as its connection is made may leave that open, for the collector to close (anyio 4.16).
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_the_example_learns_and_its_long_answers_are_aborted(capsys):
    engine = TableEngine()
    async with asyncio.timeout(PATIENCE_S), listening(engine.serve) as url:
        history = await the_example().train(url, epochs=2)

    assert history[0] < 0.4
    assert history[-1] > history[0] + 0.2
    assert engine.hung_up > 0
    assert engine.version == sum(
        line.count("short") + line.count("long") + line.count("flush") for line in _rounds(capsys)
    )
    gc.collect()


def _rounds(capsys):
    return [line.partition("rounds ")[2] for line in capsys.readouterr().out.splitlines()]


async def test_calls_that_fail_are_made_again():
    engine = TableEngine()
    engine.table, engine.breaks = [[0.0] * 10 for _ in range(10)], 5
    async with asyncio.timeout(PATIENCE_S), listening(engine.serve) as url, OpenAI(url) as generate:
        rounds = Rounds(["1", "2", "3"], generate, n=4, want=3, max_failures=20)
        async with rounds.next() as rnd:
            groups = [group async for group in rnd]

    assert [len(group.samples) for group in groups] == [4, 4, 4]


async def test_the_client_says_when_a_server_is_to_be_asked_again():
    async def busy(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 X\r\nretry-after: 7\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")

    async with listening(busy) as url, OpenAI(url) as generate:
        with pytest.raises(Unavailable) as told:
            await generate("1", 0)
    assert told.value.after_s == 7
    async with OpenAI(url) as generate:
        with pytest.raises(Unavailable, match="does not answer"):
            await generate("1", 0)


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 X\r\ncontent-length: 100\r\n\r\n{"])
async def test_a_connection_that_breaks_in_mid_sample_is_no_fault_of_the_prompt(sent):
    async def breaks(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(sent)

    async with asyncio.timeout(PATIENCE_S), listening(breaks) as url, OpenAI(url) as generate:
        with pytest.raises(Unavailable, match="broke off"):
            await generate("1", 0)


@pytest.mark.parametrize("status", [401, 403, 404, 405])
async def test_a_server_that_makes_no_sample_of_any_prompt_ends_the_round_with_what_it_said(status):
    async def refuses(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        said = b"The model `n` does not exist."
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (status, len(said), said))

    async with asyncio.timeout(PATIENCE_S), listening(refuses) as url, OpenAI(url, model="n") as generate:
        rounds = Rounds(["1", "2"], generate, n=2, want=2)
        with pytest.raises(
            Refused, match=rf"answered {status}: The model `n` does not exist\..*URL, api_key and model"
        ):
            async with rounds.next() as rnd:
                [group async for group in rnd]


@pytest.mark.parametrize("url", ["127.0.0.1:8400", "localhost", "unix:///run/x", "http://"])
async def test_what_is_no_address_of_a_server_is_refused_at_the_start(url):
    with pytest.raises(ValueError, match=re.escape(f"{url!r} is no address of a server; write http://HOST:PORT")):
        OpenAI(url)


async def test_what_is_no_engine_is_a_failed_group_with_the_reason():
    async def nothing(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 X\r\ncontent-length: 2\r\nconnection: close\r\n\r\n[]")

    async with asyncio.timeout(PATIENCE_S), listening(nothing) as url, OpenAI(url) as generate:
        rounds = Rounds(["1"], generate, n=1, want=1)
        async with rounds.next() as rnd:
            (group,) = [group async for group in rnd]

    assert "did not answer as /v1/completions does" in group.failed
