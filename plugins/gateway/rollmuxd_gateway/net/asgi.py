"""Towards clients: a bare ASGI app. Routes, bounds, keys; what a call means is for the fronts and for ``control``."""

import asyncio
import contextlib
import hmac
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qs

import msgspec
from prometheus_client import CollectorRegistry, generate_latest

from rollmuxd_gateway.app import App, Failure
from rollmuxd_gateway.fronts import BadCall, Front, openai, sglang, vllm
from rollmuxd_gateway.fronts.control import Control
from rollmuxd_gateway.net.metrics import Collector
from rollmuxd_gateway.settings import Wrong

log = logging.getLogger(__name__)

Scope: TypeAlias = Mapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[dict[str, Any]]]
Send: TypeAlias = Callable[[dict[str, Any]], Awaitable[None]]

#: seconds in which a body must have arrived
_READ_S: Final = 60.0
_JSON: Final = [(b"content-type", b"application/json")]
_DATA: Final = {
    "openai": ("/v1/completions", "/v1/chat/completions"),
    "vllm": ("/inference/v1/generate",),
    "sglang": ("/generate",),
}


class Asgi:
    """The app that uvicorn runs."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.control = Control(app)
        self.registry = CollectorRegistry()
        self.registry.register(Collector(app))
        fronts: dict[str, Front] = {"openai": openai.OpenAi(), "vllm": vllm.Vllm(), "sglang": sglang.Sglang()}
        self.data = {path: fronts[name] for name in app.settings.dialects for path in _DATA[name]}
        self.keys = {power: _keys(path) for power, path in msgspec.structs.asdict(app.settings.keys).items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One call, or the life of the server."""
        if scope["type"] == "lifespan":
            await self._life(receive, send)
        elif scope["type"] == "http":
            try:
                await self._http(scope, receive, send)
            except Exception as error:
                # Its message may have a prompt in it: the log gets where it was raised, and not what it says.
                log.error("a call of %s failed: %s at %s", path_of(scope), type(error).__name__, _where(error))
                with contextlib.suppress(Exception):
                    await _answer(send, 500, {"error": {"message": "the gateway failed at this call"}})

    async def _life(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await self.app.start()
                await send({"type": "lifespan.startup.complete"})
            else:
                await self.app.close()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, hint = _virtual(scope["path"])
        headers = {name.lower(): value for name, value in scope["headers"]}
        front = self.data.get(path) if scope["method"] == "POST" else None
        power = "data" if front is not None else self.control.power(path)
        if not self._may(headers, power):
            await _answer(
                send, 401, {"error": {"message": f"this call needs a key for {power}: Authorization: Bearer"}}
            )
            return
        if power in ("control", "registration") and not _is_own(headers.get(b"origin", b""), scope["server"]):
            await _answer(
                send, 403, {"error": {"message": "this call comes from a page of another site: use no browser"}}
            )
            return
        try:
            body = await self._body(headers, receive)
        except BadCall as error:
            await _answer(send, 413, {"error": {"message": str(error)}})
            return
        except TimeoutError:
            await _answer(send, 408, {"error": {"message": f"the body did not arrive within {_READ_S:g} s"}})
            return
        if front is not None:
            await self._data(front, path, hint, headers, body, receive, send)
        elif path == "/metrics":
            await _answer(send, 200, generate_latest(self.registry), [(b"content-type", b"text/plain; version=0.0.4")])
        else:
            query = parse_qs(scope["query_string"].decode("latin-1"))
            try:
                status, told = await self.control.handle(
                    scope["method"], path, scope["query_string"].decode("latin-1"), query, body, hint
                )
            except (BadCall, Wrong) as error:
                status, told = 400, {"error": {"message": str(error)}}
            await _answer(send, status, told)

    def _may(self, headers: Mapping[bytes, bytes], power: str) -> bool:
        keys = self.keys.get(power) or ()
        if not keys:
            return True
        given = headers.get(b"authorization", b"").removeprefix(b"Bearer ").strip()
        return any(hmac.compare_digest(given, key) for key in keys)

    async def _body(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        limit = self.app.settings.max_body_mb * 2**20
        if headers.get(b"content-length", b"0").isdigit() and int(headers.get(b"content-length", b"0")) > limit:
            raise BadCall(f"the body has more than {limit // 2**20} MB")
        body = bytearray()
        async with asyncio.timeout(_READ_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise BadCall("the client went away")
                body += message.get("body", b"")
                if len(body) > limit:
                    raise BadCall(f"the body has more than {limit // 2**20} MB")
                if not message.get("more_body"):
                    return bytes(body)

    async def _data(
        self,
        front: Front,
        path: str,
        hint: str,
        headers: Mapping[bytes, bytes],
        body: bytes,
        receive: Receive,
        send: Send,
    ) -> None:
        try:
            told = msgspec.json.decode(body)
            if not isinstance(told, dict):
                raise BadCall("the body has to be a JSON object")
            plan = front.plan(path, told)
        except (BadCall, msgspec.DecodeError, RecursionError) as error:
            why = str(error) if isinstance(error, BadCall) else "the body is no JSON"
            await _answer(send, 400, front.error(400, why))
            return
        named = headers.get(b"x-request-id", b"").decode("latin-1") or str(told.get("request_id") or "")
        plan.name = named[:200]
        for request in plan.requests:
            request.target = hint if hint in self.app.core.replicas else ""
        if self.app.own is not None:
            await self.app.own.arrival()
        key = headers.get(b"idempotency-key", b"").decode("latin-1")[:200]
        try:
            call = self.app.begin(front, plan, "" if plan.streamed else key, path.encode() + body if key else b"")
        except Failure as failure:
            await _fail(send, failure)
            return
        gone = asyncio.create_task(_disconnected(receive))
        try:
            if plan.streamed:
                await self._streamed(call, front, send, gone)
            else:
                await self._whole(call, front, send, gone)
        finally:
            gone.cancel()
            self.app.left(call)

    async def _whole(self, call: Any, front: Front, send: Send, gone: asyncio.Task[None]) -> None:
        work = asyncio.create_task(self.app.answer(call))
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            return
        try:
            told = await work
        except Failure as failure:
            await _fail(send, failure)
            return
        if self.app.own is not None:
            await self.app.own.departure()
        await _answer(send, 200, told)

    async def _streamed(self, call: Any, front: Front, send: Send, gone: asyncio.Task[None]) -> None:
        begun = False

        async def run() -> None:
            nonlocal begun
            async for event in self.app.stream(call):
                if not begun:
                    begun = True
                    start = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
                    await send({"type": "http.response.start", "status": 200, "headers": start})
                data = event if isinstance(event, bytes) else b"data: " + msgspec.json.encode(event) + b"\n\n"
                await send({"type": "http.response.body", "body": data, "more_body": True})

        work = asyncio.create_task(run())
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            return
        try:
            await work
        except Failure as failure:
            if not begun:
                await _fail(send, failure)
                return
            data = b"data: " + (failure.body if isinstance(failure.body, bytes) else msgspec.json.encode(failure.body))
            await send({"type": "http.response.body", "body": data + b"\n\n", "more_body": True})
        if self.app.own is not None:
            await self.app.own.departure()
        end = b"" if call.plan.shape.get("passed") else b"data: [DONE]\n\n"
        if not begun:
            await _answer(send, 200, end, [(b"content-type", b"text/event-stream")])
            return
        await send({"type": "http.response.body", "body": end})


def _is_own(origin: bytes, server: Any) -> bool:
    """Whether a call comes from no web page, or from one of this server: a page may post to any port of its host."""
    host, port = server
    return not origin or origin.decode("latin-1") in (f"http://{host}:{port}", f"http://localhost:{port}")


def path_of(scope: Scope) -> str:
    """A path for the log."""
    return repr(str(scope["path"])[:100])


def _where(error: BaseException) -> str:
    """File and line."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"


def _virtual(path: str) -> tuple[str, str]:
    """``/r/NAME/...`` is the gateway under one address per replica; the replica is a hint."""
    if path.startswith("/r/"):
        name, _, rest = path[3:].partition("/")
        return f"/{rest}", name
    return path, ""


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _fail(send: Send, failure: Failure) -> None:
    more = [(b"retry-after", str(failure.retry_after_s).encode())] if failure.retry_after_s else []
    await _answer(send, failure.status, failure.body, [*_JSON, *more])


async def _answer(send: Send, status: int, told: Any, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    body = told if isinstance(told, bytes) else b"" if told is None else msgspec.json.encode(told)
    sized = [*(headers or _JSON), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": sized})
    await send({"type": "http.response.body", "body": body})


def _keys(path: str) -> tuple[bytes, ...]:
    """The keys of a file, one a line. Raises Wrong."""
    if not path:
        return ()
    try:
        lines = Path(path).expanduser().read_text().split()
    except OSError as error:
        raise Wrong(f"the file of keys {path} cannot be read: {error}") from error
    if not lines:
        raise Wrong(f"the file of keys {path} has none")
    return tuple(line.encode() for line in lines)
