"""``hashlm`` behind HTTP: ``python -m rollmuxd_gateway.fakes.server --port P`` is an engine as vLLM and SGLang are.

It streams, batches, sleeps and wakes, and takes one token's time per step. Awake it holds its GPUs by a lock on a file
each. A second engine that wakes on the same GPU is written down as a violation. ``POST /fault`` makes it fail.
"""

import argparse
import asyncio
import contextlib
import fcntl
import itertools
import json
import os
import sys
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import IO, Any, Final
from urllib.parse import parse_qs

import msgspec
import uvicorn

from rollmuxd_gateway.fakes.hashlm import EOS, Engine, EngineDied, Job, Model, ids_of, text_of

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]
_encode: Final = msgspec.json.encode
#: faults of a stream, and of the whole process
STREAM_FAULTS: Final = ("reset", "truncate", "in_band", "stall", "late")
PROCESS_FAULTS: Final = ("die", "orphan", "server_error")


class Server:
    """One engine process."""

    def __init__(
        self,
        engine: Engine,
        *,
        step_s: float,
        per_request_s: float,
        name: str,
        gpus: Path | None,
        pace: Callable[[int, int], float] | None = None,
    ) -> None:
        """``name``: its GPU, or several with commas. ``pace``: seconds of a step by sequences and tokens of context."""
        self.engine, self.step_s, self.per_request_s, self.name = engine, step_s, per_request_s, name
        self.gpus, self.pace = gpus, pace
        self.sleeping = 0
        self.refusing = 0
        #: status that every generation is refused with, and how many were; the headers of each
        self.refuses = self.refused = 0
        self.headers: list[Any] = []
        #: streams that meet a fault next
        self.faults: list[str] = []
        self._work = asyncio.Event()
        self._numbers = itertools.count()
        self._locks: list[IO[str]] = []
        self._loop: asyncio.Task[None] | None = None
        self.take_gpu()

    # ---- its GPU -----------------------------------------------------------------------------------------------------

    def take_gpu(self) -> None:
        """Be on the GPU: alone, or that is written down."""
        if self.gpus is None or self._locks:
            return
        for name in self.name.split(","):
            lock = (self.gpus / name.replace("/", "_")).open("a")
            self._locks.append(lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                self._note("violation", f"{name} is held by another engine")
        self._note("awake", "")

    def leave_gpu(self) -> None:
        """Be off the GPU."""
        if self._locks:
            self._note("asleep", "")
            while self._locks:
                self._locks.pop().close()

    def _note(self, event: str, why: str) -> None:
        assert self.gpus is not None
        line = {"event": event, "gpu": self.name, "pid": os.getpid(), "why": why, "at": time.time()}
        with (self.gpus / "engines.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    # ---- the loop ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Step for as long as there is work."""
        due = time.monotonic()
        while True:
            if not (self.engine.running or self.engine.waiting) or self.engine.paused or self.sleeping:
                self._work.clear()
                await self._work.wait()
                due = time.monotonic()
            try:
                self.engine.step()
            except EngineDied:
                os._exit(1)
            due += self._took_s()
            wait_s = due - time.monotonic()
            if wait_s < -1:
                due = time.monotonic()  # this machine is slower than the engine is meant to be
            await asyncio.sleep(max(0.0, wait_s))

    def _took_s(self) -> float:
        running = len(self.engine.running)
        if self.pace is not None:
            return self.pace(running, self.engine.kv_used)
        return self.step_s + self.per_request_s * running

    # ---- HTTP --------------------------------------------------------------------------------------------------------

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """One call."""
        if scope["type"] == "lifespan":
            await receive()
            self._loop = asyncio.create_task(self.run())
            await send({"type": "lifespan.startup.complete"})
            await receive()
            self._loop.cancel()
            await send({"type": "lifespan.shutdown.complete"})
            return
        body = bytearray()
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        told = msgspec.json.decode(bytes(body)) if body else {}
        call, query = f"{scope['method']} {scope['path']}", parse_qs(scope["query_string"].decode())
        if "generate" in call or "completions" in call:
            self.headers = [*self.headers[-99:], scope["headers"]]
        if self.refuses and ("generate" in call or "completions" in call):
            self.refused += 1
            await answer(send, self.refuses, {"error": {"message": "refused"}})
        elif self.refusing and ("generate" in call or "completions" in call):
            self.refusing -= 1
            await answer(send, 503, {"error": {"message": "not now"}})
        elif call in (
            "POST /v1/completions",
            "POST /generate",
            "POST /inference/v1/generate",
            "POST /v1/chat/completions",
        ):
            await self._generate(call, told, scope, receive, send)
        else:
            status, found = self._other(call, query, told)
            await answer(send, status, found)

    def _other(self, call: str, query: dict[str, list[str]], told: Any) -> tuple[int, Any]:
        engine = self.engine
        match call:
            case "GET /health" | "GET /health_generate":
                return 200, b""
            case "GET /v1/models":
                return 200, {"object": "list", "data": [{"id": "hashlm", "object": "model"}]}
            case "GET /metrics":
                return 200, self._metrics()
            case "GET /weight_info":
                return 200, {"weight_version": engine.model.version}
            case "GET /get_model_info":
                return 200, {"model_path": "hashlm", "weight_version": engine.model.version}
            case "GET /server_info":
                model = {"logprobs_mode": "raw_logprobs", "enable_sleep_mode": True}
                batch = {"max_num_seqs": engine.max_num_seqs}
                runner = {"VLLM_USE_V2_MODEL_RUNNER": "1" if engine.positional_seed else "0"}
                return 200, {"vllm_config": {"model_config": model, "scheduler_config": batch}, "vllm_env": runner}
            case "GET /get_server_info":
                return 200, {
                    "max_running_requests": engine.max_num_seqs,
                    "max_total_num_tokens": engine.kv_tokens,
                    "enable_deterministic_inference": engine.positional_seed,
                    "enable_weights_cpu_backup": True,
                }
            case "POST /tokenize":
                return 200, {"tokens": ids_of(told["prompt"]).tolist()}
            case "POST /detokenize":
                # With the special token, as vLLM does it, which leaves it out of the text of a response.
                return 200, {"prompt": "<eos>".join(map(text_of, _split(told["tokens"])))}
            case "GET /is_sleeping":
                return 200, {"is_sleeping": self.sleeping > 0}
            case "GET /is_paused":
                return 200, {"is_paused": engine.paused}
            case "POST /sleep" | "POST /release_memory_occupation":
                engine.abort()
                self.sleeping = max(1, int(query.get("level", ["1"])[0]))
                self.leave_gpu()
                return 200, b""
            case "POST /wake_up" | "POST /resume_memory_occupation":
                self.take_gpu()
                self.sleeping = 0
                self._work.set()
                return 200, b""
            case "POST /pause" | "POST /pause_generation":
                mode = query.get("mode", [str(told.get("mode", "abort"))])[0]
                if mode == "abort":
                    engine.abort()
                engine.paused = True
                return 200, {"status": "paused"}
            case "POST /resume" | "POST /continue_generation":
                engine.paused = False
                self._work.set()
                return 200, {"status": "resumed"}
            case "POST /abort_requests" | "POST /abort_request":
                rid = None if told.get("abort_all") else told.get("rid")
                names = told.get("request_ids") or ([rid] if rid else None)
                for job in list(engine.running.values()) + list(engine.waiting.values()):
                    if names is None or any(job.id.startswith(name) for name in names):
                        engine.abort(job.id)
                return 200, {"status": "ok"}
            case (
                "POST /update_weights"
                | "POST /update_weights_from_disk"
                | "POST /finish_weight_update"
                | "POST /collective_rpc"
            ):
                told = told.get("kwargs") or told
                version = str(told.get("weight_version") or int(engine.model.version) + 1)
                engine.model = msgspec.structs.replace(engine.model, version=version)
                return 200, {"success": True}
            case "POST /reset_prefix_cache" | "POST /flush_cache":
                return 200, b""
            case "POST /fault":
                return self._fault(str(told["kind"]), int(told.get("count", 1)))
        return 404, {"error": {"message": f"no {call}"}}

    def _fault(self, kind: str, count: int) -> tuple[int, Any]:
        if kind in STREAM_FAULTS:
            live = list(self.engine.running.values())[:count]
            for job in live:
                job.fault = kind
            self.faults += [kind] * (count - len(live))
        elif kind == "server_error":
            self.refusing += count
        elif kind == "die":
            os._exit(1)
        elif kind == "orphan":
            # The worker outlives its server, and keeps the GPU.
            held = sorted(lock.fileno() for lock in self._locks)
            if os.fork() == 0:
                with contextlib.suppress(OSError):
                    for low, high in itertools.pairwise([2, *held, 4096]):
                        os.closerange(low + 1, high)
                time.sleep(30)
                os._exit(0)
            os._exit(1)
        else:
            return 404, {"error": {"message": f"no fault {kind}"}}
        return 200, {"status": "ok"}

    def _metrics(self) -> bytes:
        engine = self.engine
        lines = [
            f'vllm:num_requests_running{{model_name="hashlm"}} {len(engine.running)}.0',
            f'vllm:num_requests_waiting{{model_name="hashlm"}} {len(engine.waiting)}.0',
            f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{engine.kv_tokens // 16}"}} 1.0',
            f'sglang:num_running_reqs{{model_name="hashlm"}} {len(engine.running)}.0',
            f'sglang:num_queue_reqs{{model_name="hashlm"}} {len(engine.waiting)}.0',
            f'vllm:num_preemptions_total{{model_name="hashlm"}} {engine.preempted}.0',
            f'sglang:num_retracted_requests_total{{model_name="hashlm"}} {engine.preempted}.0',
            f"hashlm:tokens {engine.tokens}",
        ]
        return "\n".join(lines).encode() + b"\n"

    # ---- generation --------------------------------------------------------------------------------------------------

    async def _generate(
        self, call: str, told: dict[str, Any], scope: Mapping[str, Any], receive: Receive, send: Send
    ) -> None:
        say, prompt, params, name = _read(call, told, next(self._numbers))
        headers = dict(scope["headers"])
        name = headers.get(b"x-request-id", b"").decode() or name
        news: asyncio.Queue[None] = asyncio.Queue()
        params["stream_interval"] = int(told.get("stream_interval") or 1) if told.get("stream") else 10**9
        job = self.engine.submit(name, prompt, params, lambda _: news.put_nowait(None))
        if self.faults:
            job.fault = self.faults.pop(0)
        self._work.set()
        gone = asyncio.create_task(_gone(receive))
        try:
            if not told.get("stream"):
                while not job.finish:
                    if not await _either(news, gone):
                        return
                job.sent = job.text_sent = 0
                await answer(send, 200, say(job, prompt, 0, 0, whole=True))
                return
            await send(
                {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
            )
            async for data in self._events(job, prompt, say, news, gone):
                await send({"type": "http.response.body", "body": data, "more_body": True})
            if job.fault != "truncate":
                await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            gone.cancel()
            self.engine.abort(job.id)

    async def _events(
        self, job: Job, prompt: "array[int]", say: Any, news: "asyncio.Queue[None]", gone: "asyncio.Task[None]"
    ) -> AsyncIterator[bytes]:
        while True:
            if not await _either(news, gone):
                job.fault = "truncate"
                return
            if len(job.out) == job.sent and not job.finish:
                continue
            match job.fault:
                case "reset":
                    raise ConnectionResetError("a fault")  # uvicorn closes the socket
                case "truncate":
                    return
                case "in_band":
                    yield b'data: {"error": {"message": "engine died", "type": "InternalServerError", "code": 500}}\n\n'
                    return
                case "stall":
                    await gone
                    return
                case "late":
                    await asyncio.sleep(0.3)
            sent, text_sent = job.sent, job.text_sent
            job.sent, job.text_sent = len(job.out), len(job.text())
            yield b"data: " + _encode(say(job, prompt, sent, text_sent, whole=False)) + b"\n\n"
            if job.finish:
                return


async def _either(news: "asyncio.Queue[None]", gone: "asyncio.Task[None]") -> bool:
    """Wait for news; False: the client is gone."""
    if not news.empty():
        news.get_nowait()
        return True
    waiting = asyncio.ensure_future(news.get())
    await asyncio.wait((waiting, gone), return_when=asyncio.FIRST_COMPLETED)
    if waiting.done():
        return True
    waiting.cancel()
    return False


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def answer(send: Send, status: int, told: Any) -> None:
    """One whole answer."""
    body = told if isinstance(told, bytes) else _encode(told)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _split(ids: list[int]) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for token in ids:
        if token == EOS:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _read(call: str, told: dict[str, Any], number: int) -> tuple[Any, "array[int]", dict[str, Any], str]:
    if call == "POST /generate":
        params = dict(told.get("sampling_params") or {})
        for theirs, ours in (
            ("max_new_tokens", "max_tokens"),
            ("min_new_tokens", "min_tokens"),
            ("sampling_seed", "seed"),
        ):
            if theirs in params:
                params[ours] = params.pop(theirs)
        params.setdefault("max_tokens", 128)
        params["logprobs"] = told.get("top_logprobs_num")
        params["return_text_in_logprobs"] = told.get("return_text_in_logprobs")
        prompt = told.get("input_ids")
        ids = array("i", prompt) if prompt is not None else ids_of(str(told["text"]))
        return _sglang, ids, params, str(told.get("rid") or f"s{number}")
    if call == "POST /inference/v1/generate":
        return _tokens, array("i", told["token_ids"]), dict(told.get("sampling_params") or {}), f"g{number}"
    if call == "POST /v1/chat/completions":
        text = "".join(str(message.get("content")) for message in told["messages"])
        return _chat, ids_of(text), dict(told), f"c{number}"
    prompt = told["prompt"]
    return _openai, ids_of(prompt) if isinstance(prompt, str) else array("i", prompt), dict(told), f"o{number}"


def _openai(job: Job, prompt: "array[int]", start: int, text_at: int, *, whole: bool) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": 0,
        "text": job.text()[text_at:],
        "finish_reason": job.finish or None,
        "stop_reason": job.stop_reason,
        "token_ids": job.out[start:].tolist(),
        "logprobs": None,
    }
    if start == 0:
        choice["prompt_token_ids"] = prompt.tolist()
    if job.params.get("logprobs") is not None:
        named = _as_id if job.params.get("return_tokens_as_token_ids") else _as_text
        top = [{named(token): value for token, value in pairs} for pairs in job.top[start:]]
        names = list(map(named, job.out[start:]))
        choice["logprobs"] = {"token_logprobs": job.logprobs[start:].tolist(), "top_logprobs": top, "tokens": names}
    return {"id": job.id, "object": "text_completion", "model": "hashlm", "choices": [choice]}


def _as_id(token: int) -> str:
    return f"token_id:{token}"


def _as_text(token: int) -> str:
    return text_of([token])


def _chat(job: Job, prompt: "array[int]", start: int, text_at: int, *, whole: bool) -> dict[str, Any]:
    message = {"role": "assistant", "content": job.text()[text_at:]}
    place = "message" if whole else "delta"
    choices = [{"index": 0, place: message, "finish_reason": job.finish or None}]
    return {"id": job.id, "object": "chat.completion", "model": "hashlm", "choices": choices}


def _tokens(job: Job, prompt: "array[int]", start: int, text_at: int, *, whole: bool) -> dict[str, Any]:
    choice = {"index": 0, "token_ids": job.out[start:].tolist(), "finish_reason": job.finish or None, "logprobs": None}
    return {"request_id": job.id, "choices": [choice]}


def _sglang(job: Job, prompt: "array[int]", start: int, text_at: int, *, whole: bool) -> dict[str, Any]:
    finish: dict[str, Any] | None = None
    if job.finish:
        finish = {"type": job.finish, "matched": job.stop_reason}
    named = _as_text if job.params.get("return_text_in_logprobs") else lambda token: None
    pairs = [[logprob, token, named(token)] for logprob, token in zip(job.logprobs, job.out, strict=True)]
    meta: dict[str, Any] = {"id": job.id, "finish_reason": finish, "output_token_logprobs": pairs}
    meta["prompt_tokens"], meta["completion_tokens"] = len(prompt), len(job.out)
    if job.top:
        meta["output_top_logprobs"] = [[[value, token, named(token)] for token, value in each] for each in job.top]
    return {"text": job.text(flushed=True), "output_ids": job.out.tolist(), "meta_info": meta}


def _pace(like: str, tp: int) -> Callable[[int, int], float]:
    """A step's time by the engine model."""
    from rollmuxd.rollout import hardware, models
    from rollmuxd.rollout.engine import Engine as Estimated

    gpu, model, times = like.split(",")
    estimated = Estimated(hardware.gpu(gpu), models.model(model), tp)
    return lambda running, context: float(estimated.step_s(running, context)) / float(times)


def main() -> None:
    """Serve one engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--step-ms", type=float, default=10.0, help="time of one token (default: %(default)g)")
    parser.add_argument("--per-request-us", type=float, default=0.0, help="and more for each live request")
    parser.add_argument("--median", type=float, default=200.0, help="tokens of prompt and response together")
    parser.add_argument("--sigma", type=float, default=0.6, help="spread of its logarithm over prompts")
    parser.add_argument("--weights", default="0")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--kv-tokens", type=int, default=1_000_000)
    parser.add_argument("--positional-seed", action="store_true")
    parser.add_argument("--poison", default="", help="ids in a row that end the engine, with commas")
    parser.add_argument("--gpu", default="gpu0", help="several with commas: tensor parallelism over these")
    parser.add_argument(
        "--like", metavar="GPU,MODEL,TIMES", help="take a step's time from the engine model, so many times as fast"
    )
    parser.add_argument("--gpus", type=Path, help="folder with a lock for each GPU")
    parser.add_argument("--asleep", action="store_true")
    asked = parser.parse_args()
    engine = Engine(
        Model(version=asked.weights, median=asked.median, sigma=asked.sigma),
        seed=asked.seed,
        max_num_seqs=asked.max_num_seqs,
        kv_tokens=asked.kv_tokens,
        positional_seed=asked.positional_seed,
        poison=[int(token) for token in asked.poison.split(",") if token],
    )
    gpus = None if asked.asleep else asked.gpus
    server = Server(
        engine,
        step_s=asked.step_ms / 1000,
        per_request_s=asked.per_request_us / 1e6,
        name=asked.gpu,
        gpus=gpus,
        pace=None if asked.like is None else _pace(asked.like, asked.gpu.count(",") + 1),
    )
    if asked.asleep:
        server.gpus, server.sleeping = asked.gpus, 1
    config = uvicorn.Config(
        server, host=asked.host, port=asked.port, log_level="error", access_log=False, lifespan="on"
    )
    real = uvicorn.Server(config)

    async def serve() -> None:
        task = asyncio.create_task(real.serve())
        while not real.started:
            if task.done():
                break
            await asyncio.sleep(0.01)
        if real.started:
            port = real.servers[0].sockets[0].getsockname()[1]
            sys.stdout.write(f"{port}\n")
            sys.stdout.flush()
        await task

    asyncio.run(serve())


if __name__ == "__main__":
    main()
