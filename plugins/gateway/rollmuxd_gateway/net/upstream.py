"""Towards the engines: a task for each open segment, and short calls for all else. No redirect is followed."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

import aiohttp
import msgspec

from rollmuxd_gateway import engines
from rollmuxd_gateway.core import effects as e
from rollmuxd_gateway.core import inputs as i
from rollmuxd_gateway.core.model import Replica, ReplicaStatus, Request
from rollmuxd_gateway.engines import Call, Seen

log = logging.getLogger(__name__)

#: seconds for a question to an engine; for one that moves weights; for a call of the framework
ASK_S: Final = 10.0
MOVE_S: Final = 600.0
CONTROL_S: Final = 600.0
CONNECT_S: Final = 10.0
#: engines close a connection that was idle for 5 s; one that is reused at that moment would look like a fault
KEEP_S: Final = 2.0
#: of an engine's answer to a short call, and of its refusal
_ANSWER_MAX: Final = 64 * 2**20


class Unreachable(Exception):
    """An engine did not answer, or not with 200."""

    def __init__(self, why: str, status: int = 0, body: bytes = b"") -> None:
        super().__init__(why)
        self.status, self.body = status, body


class Upstream:
    """Carries out what the core asks of engines, and tells it what they say."""

    def __init__(self, tell: Callable[[i.Input], None], raw: Callable[[str, int, bytes], None], interval: int) -> None:
        self._tell, self._raw, self._interval = tell, raw, interval
        self._segments: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._calls: set[asyncio.Task[None]] = set()
        #: of each replica: it is woken or put to sleep by one call at a time, in their order
        self._moving: dict[str, asyncio.Lock] = {}
        self._session: aiohttp.ClientSession | None = None
        self._dialects = {name: engines.of(name) for name in engines.KINDS}

    async def start(self) -> None:
        """Open nothing yet; connections are made when they are needed."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
            trust_env=False,
        )

    async def close(self) -> None:
        """End every segment: engines abort when their sockets close."""
        tasks = [*self._segments.values(), *self._calls]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def dialect(self, replica: Replica) -> engines.Dialect:
        """How a replica is talked to."""
        return self._dialects[replica.engine]

    # ---- segments ----------------------------------------------------------------------------------------------------

    def open(self, it: e.Open, request: Request, replica: Replica) -> None:
        """Begin a segment."""
        task = asyncio.create_task(self._segment(it, request, replica))
        key = (it.request, it.k)
        self._segments[key] = task
        task.add_done_callback(lambda _: self._segments.pop(key, None))

    def abort(self, it: e.Abort, replica: Replica | None) -> None:
        """End a segment: close its socket, and say so where that is not enough."""
        task = self._segments.pop((it.request, it.k), None)
        if task is not None:
            task.cancel()
        call = self.dialect(replica).abort(it) if replica is not None else None
        if replica is not None and call is not None:
            self.later(self._quietly(replica, call))

    async def _segment(self, it: e.Open, request: Request, replica: Replica) -> None:
        def fault(kind: str, detail: str) -> None:
            self._tell(i.Fault(it.request, it.k, kind, detail))

        dialect = self.dialect(replica)
        call = dialect.generate(it, request, self._interval if not request.streamed else 1)
        try:
            async with self._send(replica, call) as answer:
                if answer.status != 200:
                    body = await _limited(answer)
                    if 400 <= answer.status < 500:
                        self._tell(i.Refused(it.request, it.k, answer.status, body))
                    else:
                        fault("server_error", f"status {answer.status}")
                elif request.opaque is not None:
                    await self._passed_on(it, request, answer)
                elif not await self._read(it, request, replica, answer):
                    fault("eof", "the stream ended without a finish")
        except engines.InBand as error:
            fault("in_band", str(error))
        except msgspec.DecodeError:
            fault("in_band", "an event of the stream is not what this engine sends")
        except aiohttp.ClientConnectorError as error:
            fault("connect", type(error).__name__)
        except Unreachable as error:
            fault("reset", str(error))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            fault("reset", type(error).__name__)
        except Exception as error:
            # Its message may quote the response, so it is not kept.
            log.warning("replica %s sent what cannot be read: %s", replica.id, type(error).__name__)
            fault("in_band", type(error).__name__)

    async def _read(self, it: e.Open, request: Request, replica: Replica, answer: aiohttp.ClientResponse) -> bool:
        """Tell the core of each event; returns whether the segment was finished."""
        dialect, seen, rest = self.dialect(replica), Seen(), b""
        async for data in answer.content.iter_any():
            lines = (rest + data).split(b"\n")
            rest = lines.pop()
            if len(rest) > _ANSWER_MAX:
                raise engines.InBand("an event of the stream has no end")
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                payload = line[5:].strip()
                if payload == b"[DONE]":
                    return False
                tokens = dialect.read(payload, request, it.k, seen)
                if tokens is None:
                    continue
                if await self._found_in_prompt(it, request, replica, tokens):
                    self._tell(i.FalseStop(it.request, it.k))
                    return True
                self._tell(tokens)
                if tokens.finish:
                    return True
        return False

    async def _found_in_prompt(self, it: e.Open, request: Request, replica: Replica, tokens: i.Tokens) -> bool:
        """Whether the stop string that ended this segment is in its prompt only. Raises Unreachable."""
        stop, ids = tokens.stop_reason, request.ids + tokens.ids
        continued = request.k == it.k and request.segments[it.k].start > 0
        if not (continued and tokens.finish == "stop" and isinstance(stop, str) and self.dialect(replica).streams_text):
            return False
        return stop not in await self.text(replica, ids.tolist(), request.model)

    async def _passed_on(self, it: e.Open, request: Request, answer: aiohttp.ClientResponse) -> None:
        """An answer that the core does not look into."""
        none, logprobs = request.ids[:0], request.logprobs[:0]
        if not request.streamed:
            body = await _limited(answer)
            self._tell(i.Tokens(it.request, it.k, none, logprobs, finish="passed", extra={"body": body}))
            return
        async for data in answer.content.iter_any():
            self._raw(it.request, it.k, data)
        self._tell(i.Tokens(it.request, it.k, none, logprobs, finish="passed"))

    # ---- short calls -------------------------------------------------------------------------------------------------

    async def call(self, replica: Replica, call: Call, limit_s: float = ASK_S) -> bytes:
        """Send one call and take its answer in. Raises Unreachable."""
        try:
            async with asyncio.timeout(limit_s), self._send(replica, call) as answer:
                body = await _limited(answer)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Unreachable(f"{call.method} {call.path} of {replica.id}: {type(error).__name__}") from error
        if answer.status != 200:
            text = f"{call.method} {call.path} of {replica.id} was answered {answer.status}"
            raise Unreachable(text, answer.status, body)
        return body

    def _send(self, replica: Replica, call: Call) -> Any:
        assert self._session is not None
        data = None if call.body is None else msgspec.json.encode(call.body)
        headers = {**(call.headers or {}), **({} if data is None else {"Content-Type": "application/json"})}
        return self._session.request(
            call.method, replica.url + call.path, data=data, headers=headers, allow_redirects=False
        )

    def later(self, work: Any) -> None:
        """Run a coroutine beside, until :meth:`close`."""
        task = asyncio.create_task(work)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _quietly(self, replica: Replica, call: Call) -> None:
        try:
            await self.call(replica, call)
        except Unreachable as error:
            log.info("%s", error)

    async def probe(self, replica: Replica) -> None:
        """Is it well, and what runs there?"""
        dialect = self.dialect(replica)
        try:
            await self.call(replica, Call("GET", "/health"))
        except Unreachable:
            self._tell(i.Probed(replica.id, ok=False))
            return
        try:
            running, waiting = dialect.read_busy(await self.call(replica, dialect.busy()))
        except (Unreachable, ValueError) as error:
            # What is not known to be idle is not: such a replica is never parked.
            log.warning("replica %s cannot be seen to be idle: %s", replica.id, error)
            running, waiting = 1, 0
        draining = replica.status is ReplicaStatus.DRAINING and not replica.live
        paused = None if draining else await self._is_paused(replica)
        self._tell(i.Probed(replica.id, True, running, waiting, paused))

    async def _is_paused(self, replica: Replica) -> bool | None:
        question = self.dialect(replica).is_paused()
        try:
            told = None if question is None else msgspec.json.decode(await self.call(replica, question))
        except (Unreachable, msgspec.DecodeError):
            return None
        return bool(told["is_paused"]) if isinstance(told, dict) and "is_paused" in told else None

    async def preemptions(self, replica: Replica) -> int | None:
        """How many requests it has preempted since it began; None: it does not say."""
        dialect = self.dialect(replica)
        try:
            return dialect.read_preemptions(await self.call(replica, dialect.busy()))
        except Unreachable:
            return None

    async def park(self, replica: Replica) -> str:
        """Put it to sleep, unless it sleeps; returns why it was not."""
        async with self._moving.setdefault(replica.id, asyncio.Lock()):
            # A second /sleep can crash an engine (slime#1895).
            return "" if replica.status.value == "parked" else await self._park(replica)

    async def _park(self, replica: Replica) -> str:
        try:
            if replica.park_level:
                await self.call(replica, self.dialect(replica).park(replica), MOVE_S)
        except Unreachable as error:
            log.warning("replica %s was not parked: %s", replica.id, error)
            self._tell(i.Parked(replica.id, ok=False, why=str(error)))
            return str(error)
        self._tell(i.Parked(replica.id, ok=True))
        return ""

    async def wake(self, replica: Replica) -> str:
        """Wake it, where it sleeps; returns why it was not."""
        async with self._moving.setdefault(replica.id, asyncio.Lock()):
            return await self._wake(replica)

    async def _wake(self, replica: Replica) -> str:
        dialect = self.dialect(replica)
        try:
            question = dialect.is_asleep()
            asleep = replica.park_level > 0
            if question is not None and asleep:
                try:
                    told = msgspec.json.decode(await self.call(replica, question))
                    asleep = bool(told.get("is_sleeping", True))
                except Unreachable as error:
                    if error.status != 404:
                        raise
                    asleep = False  # it has no sleep mode
            elif question is None:
                asleep = replica.status.value == "parked" and asleep
            if asleep:
                await self.call(replica, dialect.wake(), MOVE_S)
            else:
                await self.call(replica, Call("GET", "/health"))
        except (Unreachable, msgspec.DecodeError) as error:
            log.warning("replica %s was not woken: %s", replica.id, error)
            self._tell(i.Woken(replica.id, ok=False, why=str(error)))
            return str(error)
        self._tell(i.Woken(replica.id, ok=True))
        return ""

    async def write(self, replica: Replica, weights: Call, version: str) -> None:
        """Send it the weights of this step again, once it is awake, unless it has newer ones by then."""
        async with self._moving.setdefault(replica.id, asyncio.Lock()):
            if replica.status is not ReplicaStatus.OPEN or not replica.stale:
                return
            try:
                await self.call(replica, weights, CONTROL_S)
            except Unreachable as error:
                log.warning("replica %s did not take the weights of this step again: %s", replica.id, error)
                self._tell(i.Woken(replica.id, ok=False, why="it did not take the weights of this step again"))
            else:
                self._tell(i.Weights((replica.id,), version))

    async def facts(self, replica: Replica) -> engines.Facts:
        """What it says of itself. A call that fails says nothing."""
        dialect = self.dialect(replica)

        async def ask(call: Call) -> bytes:
            try:
                return await self.call(replica, call, 30.0)
            except Unreachable:
                return b""

        return dialect.read_facts(list(await asyncio.gather(*map(ask, dialect.facts()))))

    async def text(self, replica: Replica, ids: list[int], model: str) -> str:
        """The text that this engine shows of a response with these ids. Raises Unreachable."""
        dialect = self.dialect(replica)
        while True:
            told = msgspec.json.decode(await self.call(replica, dialect.detokenize(ids, model)))
            text = str(told.get("prompt", told.get("text", "")))
            if not (ids and dialect.streams_text and text.endswith("\ufffd")):
                return text
            ids = ids[:-1]


async def _limited(answer: aiohttp.ClientResponse) -> bytes:
    body = await answer.content.read(_ANSWER_MAX + 1)
    while len(body) <= _ANSWER_MAX:
        more = await answer.content.read(_ANSWER_MAX + 1 - len(body))
        if not more:
            return body
        body += more
    raise aiohttp.ClientPayloadError(f"the answer has more than {_ANSWER_MAX // 2**20} MB")
