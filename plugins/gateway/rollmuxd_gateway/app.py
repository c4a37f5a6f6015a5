"""The gateway put together: calls of clients in, the core in the middle, engines behind. Read this first.

A call is read by a front (a dialect), becomes requests, and waits. The core says what to do with each request; effects
are carried out here, in order. What engines answer goes to the core as inputs, and when all requests of a call are
over, the front composes its answer. Only this module and ``net`` know a clock.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Collection
from typing import Any, Final, Protocol

import msgspec
from msgspec import Struct, field

from rollmuxd_gateway.core import effects as e
from rollmuxd_gateway.core import inputs as i
from rollmuxd_gateway.core.gateway import Gateway
from rollmuxd_gateway.core.model import Replica, ReplicaStatus, Request
from rollmuxd_gateway.engines import Call as EngineCall
from rollmuxd_gateway.fronts import Answer, Front, Plan
from rollmuxd_gateway.net.upstream import Unreachable, Upstream
from rollmuxd_gateway.settings import ReplicaSettings, Settings, Wrong, replica_of

log = logging.getLogger(__name__)

#: rounds over all replicas until one makes a text, and the pause after each
_TRIES: Final = 10
_AGAIN_S: Final = 0.5
#: seconds between two looks at how late the event loop is, and for how long these are remembered
_LOOK_S: Final = 0.25
_LAGS_S: Final = 10.0
#: stretches that are remembered
_BARS: Final = 20_000


class Call(Struct, dict=True):
    """An HTTP call that waits for its responses."""

    id: str
    front: Front
    plan: Plan
    created: int
    key: str = ""
    #: path and body of a call with a key
    asked: bytes = b""
    waiting: int = 0
    #: connections that wait for it: a retry with the same key joins
    joined: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)
    #: of a call that streams: (request, start, end), or bytes that are passed on
    news: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)


class Failure(Exception):
    """A call that is answered with an error."""

    def __init__(self, status: int, body: Any, retry_after_s: int = 0) -> None:
        super().__init__(status)
        self.status, self.body, self.retry_after_s = status, body, retry_after_s


def _shown(request: Request) -> list[int]:
    """The ids that have text: engines leave out the token that ended a response, and detokenize it when asked to."""
    ids = request.ids.tolist()
    if request.finish != "stop" or isinstance(request.stop_reason, str):
        return ids
    included = bool(request.params.get("include_stop_str_in_output"))
    if request.stop_reason is None:  # the end of the sequence, a special token
        included = included and request.params.get("skip_special_tokens") is False
    return ids if included else ids[:-1]


def _core(settings: Settings) -> Gateway:
    """Plans need numpy, which comes with the extra ``rollout``. Raises Wrong."""
    balancer = rungs = None
    figures = msgspec.structs.asdict(settings.estimate)
    try:
        if settings.rebalance is not None:
            from rollmuxd_gateway.core import balancing

            balancer = balancing.Balancer(balancing.Rules(**figures, **msgspec.structs.asdict(settings.rebalance)))
        if settings.rungs is not None:
            from rollmuxd_gateway.core.rungs import Rules, Rungs

            rungs = Rungs(Rules(**figures, planner=settings.rungs.planner))
    except ValueError as error:
        raise Wrong(f"[estimate]: {error}") from error
    core = Gateway(settings.rules(), balancer, rungs)
    if settings.replica:  # a job begins with the rung that its file names first
        core.rung = settings.replica[0].tp or max(1, len(settings.replica[0].gpus))
    return core


class Link(Protocol):
    """What a link of our own does with calls."""

    def start(self) -> None:
        """Be the job."""

    async def close(self) -> None:
        """End the job."""

    async def arrival(self) -> None:
        """Wait until a call may begin."""

    async def departure(self) -> None:
        """Wait until an answer may leave."""


class App:
    """One gateway."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.core = _core(settings)
        self.upstream = Upstream(self.tell, self._raw, settings.stream_interval)
        self.calls: dict[str, Call] = {}
        self.by_key: dict[str, Call] = {}
        self.models: dict[str, tuple[str, ...]] = {}
        #: the call that brought the present weights, where it can be sent again; and their version
        self.written: EngineCall | None = None
        self.version = ""
        #: how each replica was registered
        self._known: dict[str, ReplicaSettings] = {}
        self.began = time.monotonic()
        #: where the gateway is the job
        self.own: Link | None = None
        #: stretches of responses that are over, the newest last, for a picture
        self.bars: deque[dict[str, Any]] = deque(maxlen=_BARS)
        self._next = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at: int | None = None
        self._followers: list[asyncio.Future[None]] = []
        #: how late the loop was, look by look
        self._lags: deque[float] = deque([0.0], maxlen=round(_LAGS_S / _LOOK_S))
        self._looking: asyncio.TimerHandle | None = None

    # ---- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Look at the configured replicas. One that does not answer is registered all the same, and found out."""
        await self.upstream.start()
        configured = self.settings.replica
        found = await asyncio.gather(*(self._found(self._name(one.url), one) for one in configured))
        # In the order of the file, but first those that answer: which rung is awake, they know.
        for it, (replica, answered) in sorted(zip(configured, found, strict=True), key=lambda each: not each[1][1]):
            self._take_in(it, replica, answered)
        if self.own is not None:
            self.own.start()
        answer = sum(answered for _, answered in found)
        log.info("ready at http://%s; %d of %d engines answer", self.settings.listen, answer, len(found))
        self._look(asyncio.get_running_loop().time())

    async def close(self) -> None:
        """End all that is under way."""
        if self.own is not None:
            await self.own.close()
        for timer in (self._timer, self._looking):
            if timer is not None:
                timer.cancel()
        await self.upstream.close()

    @property
    def lag_s(self) -> float:
        """By how much a chunk was late here lately, at most: the time that the loop was busy with others."""
        return max(self._lags)

    def _look(self, due: float) -> None:
        loop = asyncio.get_running_loop()
        self._lags.append(max(0.0, loop.time() - due))
        due = loop.time() + _LOOK_S
        self._looking = loop.call_at(due, self._look, due)

    def now(self) -> int:
        """Milliseconds since the gateway began."""
        return round((time.monotonic() - self.began) * 1000)

    # ---- the core ----------------------------------------------------------------------------------------------------

    def tell(self, it: i.Input) -> None:
        """Give the core an input, and carry out what it asks."""
        core = self.core
        effects = core.handle(it, self.now())
        if not effects and isinstance(it, i.Tokens):
            return  # nothing but one response has changed, and this is what comes most often
        for effect in effects:
            match effect:
                case e.Deliver(request, start, end):
                    call = self.calls.get(core.requests[request].call)
                    if call is not None:
                        call.news.put_nowait((core.requests[request], start, end))
                case e.Open():
                    self.upstream.open(effect, core.requests[effect.request], core.replicas[effect.replica])
                case e.End(request):
                    self._ended(core.requests[request])
                case e.Abort():
                    self.upstream.abort(effect, core.replicas.get(effect.replica))
                case e.Probe(replica):
                    self.upstream.later(self.upstream.probe(core.replicas[replica]))
                case e.Park(replica):
                    self.upstream.later(self.upstream.park(core.replicas[replica]))
                case e.Wake(replica):
                    self.upstream.later(self.upstream.wake(core.replicas[replica]))
                case e.Write(replica):
                    assert self.written is not None
                    self.upstream.later(self.upstream.write(core.replicas[replica], self.written, self.version))
                case e.Died(replica):
                    log.warning("replica %s (%s) is dead; it is asked again", replica, core.replicas[replica].url)
                case e.Revive(replica):
                    self.upstream.later(self._revive(core.replicas[replica]))
        self._arm()
        if self._followers and not isinstance(it, i.Tokens):
            self._wake_followers()

    def _arm(self) -> None:
        due = self.core.deadline()
        if due is None or (self._timer_at is not None and self._timer_at <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = due
        wait_s = max(0.001, (due - self.now()) / 1000)
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._tick)

    def _tick(self) -> None:
        self._timer = self._timer_at = None
        self.tell(i.Tick())

    def _raw(self, name: str, k: int, data: bytes) -> None:
        request = self.core.requests.get(name)
        if request is not None and request.k == k and request.call in self.calls:
            request.delivered += 1  # so it cannot begin again
            request.last_token = self.now()
            self.calls[request.call].news.put_nowait(data)

    def _ended(self, request: Request) -> None:
        self._draw(request)
        call = self.calls.get(request.call)
        if call is None:
            self.core.forget(request.id)
            return
        call.waiting -= 1
        call.news.put_nowait((request, request.delivered, len(request.ids)))
        if call.waiting == 0:
            call.done.set()
        self._wake_followers()

    def _draw(self, request: Request) -> None:
        epoch = time.time() - self.now() / 1000
        for segment in request.segments:
            replica = self.core.replicas.get(segment.replica)
            bar = {"request": request.id, "replica": segment.replica, "why": segment.why}
            times = {"from": epoch + segment.began / 1000, "to": epoch + segment.ended / 1000}
            self.bars.append({**bar, **times, "gpus": list(replica.gpus) if replica is not None else []})

    # ---- calls -------------------------------------------------------------------------------------------------------

    def begin(self, front: Front, plan: Plan, key: str = "", asked: bytes = b"") -> Call:
        """Take a call in, or join the one with its key, unless that failed. Raises Failure for another call."""
        known = self.by_key.get(key) if key else None
        if known is not None and all(request.error is None for request in known.plan.requests):
            if known.asked != asked:
                raise Failure(
                    422, front.error(422, "this Idempotency-Key was used for another call: give it a new one")
                )
            known.joined += 1
            return known
        self._next += 1
        call = Call(f"{self._next:08d}", front, plan, int(time.time()), key, asked, len(plan.requests), 1)
        plan.name = plan.name or call.id
        prompts: dict[Any, str] = {}
        for number, request in enumerate(plan.requests):
            request.id, request.call, request.index = f"q{self._next:08d}-{number:04d}", call.id, number
            # Samples of one prompt are often calls of their own: what they share is the prompt.
            content: Any = request.prompt.tobytes() if request.prompt is not None else request.text
            request.group = prompts.setdefault(content, str(hash(content)))
            request.client_ids = front.client_ids(plan, number // plan.n)
        self.calls[call.id] = call
        if key:
            self.by_key[key] = call
        self.tell(i.Arrive(plan.requests))
        return call

    def abort(self, names: Collection[str]) -> int:
        """Abort requests by names that their clients know; returns how many. Others are over."""
        live = (request for request in self.core.requests.values() if not request.over)
        found = [request.id for request in live if not set(names).isdisjoint(request.client_ids)]
        self.tell(i.Cancel(tuple(found)))
        return len(found)

    def left(self, call: Call) -> None:
        """A connection has its answer, or went away. A call with a key is kept for a retry for a while."""
        call.joined -= 1
        if call.joined > 0:
            return
        if call.key:
            asyncio.get_running_loop().call_later(self.settings.linger_s, self._forget, call)
        else:
            self._forget(call)

    def _forget(self, call: Call) -> None:
        if call.joined > 0 or self.calls.pop(call.id, None) is None:
            return
        if self.by_key.get(call.key) is call:
            del self.by_key[call.key]
        if not call.done.is_set():
            self.tell(i.Gone(call.id))
        for request in call.plan.requests:
            if request.id in self.core.requests:
                self.core.forget(request.id)

    async def answer(self, call: Call) -> Any:
        """The body of a call that does not stream. Raises Failure."""
        await call.done.wait()
        requests = call.plan.requests
        for request in requests:
            if request.error is not None:
                raise self.failure(call.front, request)
        if call.plan.shape.get("passed"):
            return requests[0].extra.get("body", b"{}")
        answers = [Answer(request, await self.text(request)) for request in requests]
        return call.front.compose(call.plan, answers, call.created)

    def failure(self, front: Front, request: Request) -> Failure:
        """What a failed request is answered with."""
        assert request.error is not None
        status, why = request.error
        if isinstance(why, bytes):
            return Failure(status, why)
        return Failure(status, front.error(status, str(why)), retry_after_s=5 if status == 503 else 0)

    async def text(self, request: Request) -> str:
        """The text of a response that is over. After a move it is made of all ids at once: never of pieces.

        Raises Failure where no replica makes it.
        """
        if not request.want_text or not request.ids:
            return ""
        if len(request.segments) == 1 and request.k == 0:
            return "".join(text for _, text in request.texts)
        text = await self._detokenized(request)
        if isinstance(request.stop_reason, str) and request.stop_reason:
            at = text.rfind(request.stop_reason)
            if at >= 0:
                kept = len(request.stop_reason) if request.params.get("include_stop_str_in_output") else 0
                text = text[: at + kept]
        return text

    async def _detokenized(self, request: Request) -> str:
        why = "no replica is open"
        for _ in range(_TRIES):
            for replica in list(self.core.replicas.values()):
                if replica.engine == request.engine and replica.status not in (
                    ReplicaStatus.DEAD,
                    ReplicaStatus.PARKED,
                ):
                    try:
                        return await self.upstream.text(replica, _shown(request), request.model)
                    except Unreachable as error:
                        why = str(error)
            await asyncio.sleep(_AGAIN_S)
        raise Failure(502, {"error": {"message": f"the response was moved, and its text cannot be made: {why}"}})

    async def stream(self, call: Call) -> AsyncIterator[Any]:
        """Events of a call that streams: objects, or bytes that are passed on. Raises Failure before the first."""
        texts: dict[str, str] = {}
        left = len(call.plan.requests)
        while left:
            news = await call.news.get()
            if isinstance(news, bytes):
                yield news
                continue
            request, _, end = news
            if request.over:
                if request.error is not None:
                    raise self.failure(call.front, request)
                if end < len(request.ids) or "closed" in request.extra:
                    continue  # an older piece of news: the last one has the rest
                request.extra["closed"] = True
                left -= 1
                if call.plan.shape.get("passed"):
                    continue
                whole, before = await self.text(request), texts.get(request.id, "")
                shown = whole if call.front.name == "sglang" else whole[len(before) :]
            elif len(request.segments) > 1:
                shown = texts.get(request.id, "") if call.front.name == "sglang" else ""
            else:
                so_far = "".join(text for upto, text in request.texts if upto <= end)
                before, texts[request.id] = texts.get(request.id, ""), so_far
                shown = so_far if call.front.name == "sglang" else so_far[len(before) :]
            start = request.extra.get("shown", 0)
            request.extra["shown"] = end
            event = call.front.chunk(call.plan, Answer(request, shown), start, end, call.created)
            if event is not None:
                yield event
        if not call.plan.shape.get("passed"):
            event = call.front.last(call.plan, call.created)
            if event is not None:
                yield event

    # ---- replicas ----------------------------------------------------------------------------------------------------

    async def register(self, it: ReplicaSettings, name: str = "") -> Replica:
        """Add a replica, or add it again, with what it says of itself. Raises Wrong for an address that may not be."""
        replica, answered = await self._found(name or self._name(it.url), it)
        self._take_in(it, replica, answered)
        return replica

    def _take_in(self, it: ReplicaSettings, replica: Replica, answered: bool) -> None:
        self._known[replica.id] = it
        self.tell(i.Register(replica))
        self.tell(i.Tick())
        if not answered:  # let it be found out
            self.upstream.later(self.upstream.wake(replica))

    def configured(self, url: str) -> ReplicaSettings | None:
        """What ``gateway.toml`` says of this engine."""
        return next((one for one in self.settings.replica if one.url.rstrip("/") == url.rstrip("/")), None)

    async def _found(self, name: str, it: ReplicaSettings) -> tuple[Replica, bool]:
        """A replica by its settings and what it says of itself, and whether it said anything."""
        replica = replica_of(name, it, self.settings.allow_hosts)
        facts = await self.upstream.facts(replica)
        self.models[replica.id] = facts.models
        replica.weights = facts.weights or "0"
        replica.positional_seed, replica.logprobs_mode = facts.positional_seed, facts.logprobs_mode
        replica.adapters = facts.models
        replica.keeps_weights = facts.keeps_weights and it.park.level < 2
        # Where engines take turns and this one does not say whether it sleeps, the file is believed.
        says = self.core.rungs is None or self.upstream.dialect(replica).is_asleep() is not None
        if facts.asleep or not (says or self.core.on_rung(replica)):
            replica.status = ReplicaStatus.PARKED  # a rollout, a hook, or the framework wakes it
        if not it.max_num_seqs and facts.max_num_seqs:
            replica.max_num_seqs = facts.max_num_seqs
        if not it.kv_tokens:
            replica.kv_tokens = facts.kv_tokens
        return replica, bool(facts.models)

    async def _revive(self, dead: Replica) -> None:
        """Take a dead replica that answers again, unless its weights are old: a new process has those of its files."""
        replica, answered = await self._found(dead.id, self._known[dead.id])
        if self.core.replicas.get(dead.id) is not dead or dead.status is not ReplicaStatus.DEAD or not answered:
            return
        used = (one for one in self.core.replicas.values() if one.status is not ReplicaStatus.DEAD and not one.stale)
        current = {one.weights for one in used} or {dead.weights}
        if replica.weights in current:
            log.warning("replica %s is back", replica.id)
            self.tell(i.Register(replica))
        elif dead.weights != replica.weights:
            dead.weights = replica.weights
            log.warning(
                "replica %s is back with weights %r, and those of the others are %s: give it these, and register it",
                replica.id,
                replica.weights,
                sorted(current),
            )

    def _name(self, url: str) -> str:
        for replica in self.core.replicas.values():
            if replica.url == url.rstrip("/"):
                return replica.id
        taken = {replica.id for replica in self.core.replicas.values()} | set(self.models)
        number = len(taken)
        while f"r{number}" in taken:
            number += 1
        self.models[f"r{number}"] = ()
        return f"r{number}"

    async def boundary(self, gpus: tuple[str, ...] | None = None) -> None:
        """Choose the rung of the next rollout, before its engines are woken. What is not on it is put to sleep."""
        core, counted = self.core, None
        if core.rungs is None:
            return
        if core.rungs.planner == "preemptions":
            mine = [replica for replica in core.replicas.values() if core.on_rung(replica)]
            asked = await asyncio.gather(*map(self.upstream.preemptions, mine))
            counted = None if None in asked else sum(count or 0 for count in asked)
        before = core.rung
        self.tell(i.Boundary(gpus, counted))
        if core.rung != before:
            log.info("the next rollout has replicas of %d GPUs, and the last one had %d", core.rung, before)
        others = [replica for replica in core.replicas.values() if not core.on_rung(replica)]
        await asyncio.gather(*map(self.upstream.park, others))

    # ---- the rollout -------------------------------------------------------------------------------------------------

    def rollout(self) -> dict[str, Any]:
        """How far the rollout is, and what each replica does."""
        core, rollout = self.core, self.core.rollout
        done, total = core.progress()
        return {
            "seq": core.seq,
            "status": rollout.status.value,
            "number": rollout.number,
            "done": done,
            "total": total,
            "finished": rollout.done,
            "failed": rollout.failed,
            "live": sum(len(replica.live) for replica in core.replicas.values()),
            "queued": len(core.queue) + len(core.again),
            "tokens": rollout.tokens,
            "moved": rollout.moved,
            "recomputed": rollout.recomputed,
            "tp": core.rung,
            "in_step": core.in_step,
            "switches": rollout.switches,
            "switch_ms": core.switch_ms,
            "keep": list(rollout.keep),
            "drains_ms": list(rollout.drains_ms),
            "stopped": core.stopped,
            "replicas": [
                {
                    "id": replica.id,
                    "url": replica.url,
                    "engine": replica.engine,
                    "gpus": list(replica.gpus),
                    "tp": replica.tp,
                    "status": replica.status.value,
                    "live": len(replica.live),
                    "weights": replica.weights,
                    "stale": replica.stale,
                }
                for replica in core.replicas.values()
            ],
        }

    async def follow(self, after: int, wait_s: float) -> dict[str, Any]:
        """The rollout, once it has changed after ``after``, or the time is over."""
        if self.core.seq <= after and wait_s > 0:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._followers.append(future)
            try:
                async with asyncio.timeout(wait_s):
                    await future
            except TimeoutError:
                pass
        return self.rollout()

    def _wake_followers(self) -> None:
        followers, self._followers = self._followers, []
        for future in followers:
            if not future.done():
                future.set_result(None)
