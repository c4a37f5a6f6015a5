"""One replica: how long a step takes, what fits in its KV cache, and when each response is finished.

The step time is a roofline with constants (:class:`Tuning`). Weights are read or multiplied, whichever takes longer,
and contexts are read. Each layer, each step and each sequence has a cost. With tensor parallelism each layer has two
all-reduces. Scheduling is vLLM's: first come first served, with a budget of tokens per step of which prefills get what
decoding leaves. When the KV cache is full, the request that was admitted last is preempted. What it generated is kept.
Its context is computed again, except the part that the prefix cache still has.

Three ways, from exact to fast: :func:`step_by_step` is the reference, and :class:`Replica` jumps over steps that are
alike. :func:`estimate` knows neither prefill nor queue, and takes many scenarios of lengths at once.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from functools import cached_property
from heapq import heappop, heappush
from typing import Any, Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from rollmuxd.rollout.hardware import Gpu
from rollmuxd.rollout.models import Model

Floats = NDArray[np.float64]
#: degrees of tensor parallelism that are considered
DEGREES: Final = (1, 2, 4, 8)


class Tuning(Struct, frozen=True):
    """What an engine gets of the hardware's peaks, and what it costs beside. The defaults are no calibration.

    Shares are fitted to public kernel tables (Vidur, Frontier; H100, H800, A800). ``step_s`` is 2 ms with captured
    graphs; hosts that prepare each step cost 8 ms.
    """

    #: share of the memory bandwidth when weights are read, and when contexts are
    weights: float = 0.87
    contexts: float = 0.88
    #: share of the arithmetic peak while decoding, and in a prefill
    decode: float = 0.70
    prefill: float = 0.55
    #: seconds per layer, per step, and per sequence in a step
    layer_s: float = 35e-6
    step_s: float = 2e-3
    sequence_s: float = 15e-6
    #: share of a GPU's memory that the engine takes, and GB of it that are activations and graphs
    memory: float = 0.9
    activations_gb: float = 4.0


class Engine:
    """One replica's arithmetic: a model on ``tp`` GPUs of one type."""

    def __init__(
        self,
        gpu: Gpu,
        model: Model,
        tp: int = 1,
        tuning: Tuning | None = None,
        *,
        max_seqs: int = 256,
        budget: int = 2048,
        kv_tokens: int = 0,
        slower: float = 1.0,
    ) -> None:
        """``kv_tokens``: the capacity that the engine itself reported; 0: computed. ``slower``: times, of every step.

        Raises:
            ValueError: the model does not fit.
        """
        self.gpu, self.model, self.tp, self.tuning = gpu, model, tp, tuning or Tuning()
        self.max_seqs, self.budget, self.slower = max_seqs, budget, slower
        self.kv_tokens = kv_tokens or kv_capacity(gpu, model, tp, self.tuning)
        if self.kv_tokens <= 0:
            raise ValueError(
                f"{model.name} does not fit on {tp} {gpu.name}: its weights are {model.weights / 1e9:g} GB"
            )

    @cached_property
    def _parts(self) -> tuple[float, ...]:
        """Seconds: of reading weights, per token decoded, per token prefilled, per context token, fixed, per token."""
        gpu, model, tp, tuning = self.gpu, self.model, self.tp, self.tuning
        latency, rate = gpu.all_reduce(tp)
        reduces = 2 * model.layers if tp > 1 else 0
        bandwidth, flops = gpu.memory_gb_s * 1e9 * tp, gpu.tflops * 1e12 * tp
        return (
            1 / (bandwidth * tuning.weights),
            2 * model.active / (flops * tuning.decode),
            2 * model.active / (flops * tuning.prefill),
            model.kv / (bandwidth * tuning.contexts),
            model.layers * tuning.layer_s + tuning.step_s + reduces * latency,
            reduces * 2 * model.hidden / rate,
        )

    def step_s(self, batch: Any, context: Any) -> Any:
        """Seconds of one step that decodes ``batch`` sequences of ``context`` tokens together. Arrays, too."""
        read, decode, _, kv, fixed, reduced = self._parts
        weights = self.model.touched(batch) * read
        each = self.tuning.sequence_s + reduced
        return self.slower * (np.maximum(weights, decode * batch) + context * kv + fixed + batch * each)

    def mixed_s(self, batch: int, context: float, prefill: int) -> float:
        """As :meth:`step_s`, with so many tokens of prefills in the same step."""
        read, decode, pre, kv, fixed, reduced = self._parts
        weights = self.model.touched(batch + prefill) * read
        compute = decode * batch + pre * prefill
        worked = max(compute, weights)
        each = batch * self.tuning.sequence_s + (batch + prefill) * reduced
        return float(self.slower) * float(worked + context * kv + fixed + each)

    def prefill_s(self, tokens: float) -> float:
        """Seconds to compute so many tokens of context, with nothing else to do."""
        return self.slower * tokens * (self._parts[2] + self._parts[5])

    @cached_property
    def per_context_s(self) -> float:
        """Seconds that each further token of context adds to a step."""
        return self.slower * self._parts[3]


def kv_capacity(gpu: Gpu, model: Model, tp: int, tuning: Tuning | None = None) -> int:
    """Tokens of context that fit beside the weights; not positive: the model does not fit."""
    tuning = tuning or Tuning()
    left = tp * (tuning.memory * gpu.memory_gb - tuning.activations_gb) * 1e9 - model.weights
    return int(left // model.kv)


def degrees(gpu: Gpu, model: Model, longest: int, gpus: int = 8, tuning: Tuning | None = None) -> tuple[int, ...]:
    """The degrees at which a context of ``longest`` tokens fits well (1.2 times), on a node of so many GPUs."""
    return tuple(tp for tp in DEGREES if gpus % tp == 0 and kv_capacity(gpu, model, tp, tuning) > 1.2 * longest)


class Request(Struct):
    """One response to be generated."""

    id: int
    #: tokens
    prompt: int
    #: tokens of the whole response
    length: int
    #: seconds
    arrives: float = 0.0
    #: tokens generated so far
    made: int = 0
    #: tokens of its context that are still in the prefix cache
    cached: int = 0
    preempted: int = 0

    @property
    def context(self) -> int:
        """Tokens."""
        return self.prompt + self.made

    @property
    def remaining(self) -> int:
        """Tokens."""
        return self.length - self.made


class _Decoding(Struct):
    request: Request
    #: of the replica's count of steps: when this one was at ``made`` tokens, and when it is finished
    since: int
    until: int


class Replica:
    """One replica under way, in jumps: steps that decode the same sequences are one event.

    ``now`` is always the end of a step: what is asked for within one happens at its end.
    """

    def __init__(self, engine: Engine, now: float = 0.0) -> None:
        self.engine, self.now = engine, now
        self.queue: deque[Request] = deque()
        #: in order of admission, with tokens that are still to be computed
        self._prefilling: dict[int, tuple[Request, int]] = {}
        #: in order of admission
        self._decoding: dict[int, _Decoding] = {}
        self._ends: list[tuple[int, int]] = []
        self._coming: list[tuple[float, int, Request]] = []
        #: steps that decoded so far; tokens of context in the KV cache
        self._steps, self._context = 0, 0
        #: tokens that the KV cache took in so far, and the free ones at each preemption, for the prefix cache
        self._taken = 0
        self._evicted_from: dict[int, int] = {}
        self.preemptions = 0
        #: tokens of responses, and of contexts that were computed
        self.generated = self.prefilled = 0

    # ---- from outside ------------------------------------------------------------------------------------------------

    def submit(self, requests: Iterable[Request]) -> None:
        """More to do, from their arrival on."""
        for request in requests:
            heappush(self._coming, (request.arrives, request.id, request))

    @property
    def idle(self) -> bool:
        """Whether nothing is to be done."""
        return not (self._decoding or self._prefilling or self.queue or self._coming)

    @property
    def load(self) -> tuple[int, int]:
        """Sequences that decode, and tokens in the KV cache."""
        return len(self._decoding), self._context

    def requests(self) -> list[Request]:
        """All that is not finished, with what each has generated."""
        for it in self._decoding.values():
            it.request.made += self._steps - it.since
            it.since = self._steps
        found = [it.request for it in self._decoding.values()]
        found += [request for request, _ in self._prefilling.values()]
        return found + list(self.queue) + [request for _, _, request in self._coming]

    def take(self, ids: Iterable[int]) -> list[Request]:
        """Cut these: they leave with what they generated, and no context."""
        wanted, taken = set(ids), []
        for request in self.requests():
            if request.id in wanted:
                taken.append(request)
                self._forget(request.id)
                request.cached = 0
        self.queue = deque(request for request in self.queue if request.id not in wanted)
        self._coming = sorted(it for it in self._coming if it[1] not in wanted)
        return taken

    def advance(self, until: float = math.inf) -> list[tuple[float, int]]:
        """Run until then, or until all is done: ``(when, id)`` of each response that was finished."""
        found: list[tuple[float, int]] = []
        while self.now < until:
            while self._coming and self._coming[0][0] <= self.now:
                self.queue.append(heappop(self._coming)[2])
            if not (self._decoding or self._prefilling or self.queue):
                if not self._coming or self._coming[0][0] >= until:
                    break
                self.now = self._coming[0][0]
                continue
            self._make_room()
            self._admit()
            if self._prefilling:
                self._mixed_step(found)
            else:
                self._jump(until, found)
        return found

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _forget(self, name: int) -> None:
        """It is no longer in the batch: its context is free."""
        if name in self._decoding:
            self._context -= self._decoding.pop(name).request.context
        elif name in self._prefilling:
            request, left = self._prefilling.pop(name)
            self._context -= request.context - left

    def _make_room(self) -> None:
        """Preempt what was admitted last, until the next token of each sequence fits."""
        capacity = self.engine.kv_tokens
        while self._context + len(self._decoding) > capacity and len(self._decoding) > 1:
            it = self._decoding[next(reversed(self._decoding))]
            it.request.made += self._steps - it.since
            self._evicted_from[it.request.id] = self._taken + max(0, capacity - self._context)
            self._context -= it.request.context
            del self._decoding[it.request.id]
            it.request.preempted += 1
            self.preemptions += 1
            self.queue.appendleft(it.request)

    def _admit(self) -> None:
        engine, queue = self.engine, self.queue
        while queue and len(self._decoding) + len(self._prefilling) < engine.max_seqs:
            request = queue[0]
            owed = sum(left for _, left in self._prefilling.values())
            if owed >= engine.budget:
                return  # its turn comes when there is budget for it
            room = engine.kv_tokens - self._context - len(self._decoding) - owed
            if request.context + 1 > room and (self._decoding or self._prefilling):
                return
            queue.popleft()
            if request.id in self._evicted_from:
                evicted = max(0, self._taken - self._evicted_from.pop(request.id))
                request.cached = max(0, request.context - evicted)
            cached = min(request.cached, request.context - 1)
            request.cached = 0
            self._context += cached
            self._prefilling[request.id] = (request, request.context - cached)

    def _mixed_step(self, found: list[tuple[float, int]]) -> None:
        """One step in which prefills get what decoding leaves of the budget."""
        decoded, budget, ready = len(self._decoding), 0, []
        left_over = max(1, self.engine.budget - decoded)
        for name, (request, left) in self._prefilling.items():
            part = min(left, left_over - budget)
            if part <= 0:
                break
            budget += part
            self._prefilling[name] = (request, left - part)
            if part == left:
                ready.append(request)
        self.now += self.engine.mixed_s(decoded, float(self._context), budget)
        self._count(1, decoded)
        self._context += budget
        self._taken += budget
        self.prefilled += budget
        self._finish(found)
        for request in ready:  # a prefill that is complete gives its first token
            del self._prefilling[request.id]
            request.made += 1
            self._context += 1
            self.generated += 1
            if request.remaining <= 0:
                self._context -= request.context
                found.append((self.now, request.id))
                continue
            self._decoding[request.id] = _Decoding(request, self._steps, self._steps + request.remaining)
            heappush(self._ends, (self._steps + request.remaining, request.id))

    def _jump(self, until: float, found: list[tuple[float, int]]) -> None:
        """So many steps at once as decode the same sequences, and no further than just past ``until``."""
        batch = len(self._decoding)
        while self._ends and self._stale(self._ends[0]):
            heappop(self._ends)
        steps = self._ends[0][0] - self._steps
        steps = min(steps, max(1, (self.engine.kv_tokens - self._context) // batch))
        first = self.engine.mixed_s(batch, float(self._context), 0)
        more = self.engine.per_context_s * batch
        stop = min(until, self._coming[0][0] if self._coming else math.inf)
        took = steps * first + more * steps * (steps - 1) / 2
        if self.now + took > stop:
            steps = min(steps, max(1, _steps_within(stop - self.now, first, more)))
            took = steps * first + more * steps * (steps - 1) / 2
        self.now += took
        self._count(steps, batch)
        self._finish(found)

    def _stale(self, end: tuple[int, int]) -> bool:
        it = self._decoding.get(end[1])
        return it is None or it.until != end[0]

    def _count(self, steps: int, batch: int) -> None:
        if batch:
            self._steps += steps
            self._context += steps * batch
            self._taken += steps * batch
            self.generated += steps * batch

    def _finish(self, found: list[tuple[float, int]]) -> None:
        while self._ends and (self._ends[0][0] <= self._steps or self._stale(self._ends[0])):
            end = heappop(self._ends)
            if self._stale(end):
                continue
            request = self._decoding.pop(end[1]).request
            request.made = request.length
            self._context -= request.context
            found.append((self.now, request.id))


def _steps_within(seconds: float, first: float, more: float) -> int:
    """The fewest steps that take so long, where each takes ``more`` longer than the one before."""
    if more <= 0:
        return math.ceil(seconds / first)
    half = first / more - 0.5
    return math.ceil(math.sqrt(half * half + 2 * seconds / more) - half)


def step_by_step(engine: Engine, requests: Sequence[Request]) -> dict[int, float]:
    """When each response is finished, by one iteration for each step of the engine. The reference for :class:`Replica`.

    It shares the formulas with it, and nothing of how sequences are kept.
    """
    coming = sorted(requests, key=lambda it: (it.arrives, it.id))
    waiting: list[Request] = []
    batch: list[Request] = []  # in order of admission
    stored = {it.id: 0 for it in coming}  # tokens of context in the KV cache
    computed = dict(stored)  # of those that are prefilled, how many are done
    evicted_from: dict[int, int] = {}
    ends: dict[int, float] = {}
    now, taken = 0.0, 0
    while coming or waiting or batch:
        if not (waiting or batch):
            now = max(now, coming[0].arrives)
        while coming and coming[0].arrives <= now:
            waiting.append(coming.pop(0))
        decoding = [it for it in batch if computed[it.id] >= it.context]
        while sum(stored.values()) + len(decoding) > engine.kv_tokens and len(decoding) > 1:
            last = decoding.pop()
            evicted_from[last.id] = taken + max(0, engine.kv_tokens - sum(stored.values()))
            batch.remove(last)
            stored[last.id] = computed[last.id] = 0
            waiting.insert(0, last)
        at_work = {it.id for it in decoding}
        while waiting and len(batch) < engine.max_seqs:
            it = waiting[0]
            owed = sum(one.context - computed[one.id] for one in batch if one.id not in at_work)
            free = engine.kv_tokens - sum(stored.values()) - len(decoding) - owed
            if (it.context + 1 > free and batch) or owed >= engine.budget:
                break
            batch.append(waiting.pop(0))
            if it.id in evicted_from:
                kept = max(0, it.context - max(0, taken - evicted_from.pop(it.id)))
                stored[it.id] = computed[it.id] = min(kept, it.context - 1)
        budget, prefilled = max(1, engine.budget - len(decoding)), 0
        context = sum(stored.values())
        full = []
        for it in batch:
            if it.id in at_work:
                continue
            part = min(it.context - computed[it.id], budget - prefilled)
            prefilled += part
            computed[it.id] += part
            stored[it.id] += part
            if computed[it.id] >= it.context:
                full.append(it)
        now += engine.mixed_s(len(decoding), float(context), prefilled)
        taken += len(decoding) + prefilled
        for it in decoding + full:
            it.made += 1
            stored[it.id] += 1
            computed[it.id] += 1
            if it.made >= it.length:
                ends[it.id] = now
                stored[it.id] = 0
                batch.remove(it)
    return ends


def estimate(engine: Engine, remaining: Floats, context: Floats) -> Floats:
    """Seconds until the last of these responses is finished, without prefill and arrivals.

    ``remaining``: tokens still to come, ``[..., responses]``; ``context``: tokens now, of a shape that broadcasts to
    it. A response with nothing left and no context changes nothing. Where the KV cache is too small for all of them,
    they take waves. Result: ``[...]``.
    """
    count = remaining.shape[-1]
    if not count:
        return np.zeros(remaining.shape[:-1])
    order = np.argsort(remaining, axis=-1)
    ends = np.take_along_axis(remaining, order, axis=-1)
    held = np.take_along_axis(np.broadcast_to(context, remaining.shape), order, axis=-1)
    gaps = np.diff(ends, axis=-1, prepend=0.0)
    left = np.arange(count, 0, -1, dtype=np.float64)
    tokens = np.cumsum(held[..., ::-1], axis=-1)[..., ::-1] + left * (ends - gaps / 2)
    waves = np.maximum(1.0, np.maximum(tokens / engine.kv_tokens, left / engine.max_seqs))
    took: Floats = np.sum(gaps * waves * engine.step_s(left / waves, tokens / waves), axis=-1)
    return took
