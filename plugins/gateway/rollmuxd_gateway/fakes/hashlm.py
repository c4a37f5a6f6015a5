"""``hashlm``: an engine whose next token is a pure function of the whole prefix, so that one lost or doubled id changes
all that follows.

:class:`Model` is the function. :class:`Engine` batches: a queue, a KV cache of bounded size, preemption, one token per
live request and step. :mod:`rollmuxd_gateway.fakes.server` puts HTTP before it. What an engine does and a hash would
not is here on purpose. A seed starts again with each request (vLLM's V1 runner) or follows the position (V2). Penalties
are over the output only, and stop strings are searched in the output of one request.
"""

import hashlib
import math
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import Any, Final

from msgspec import Struct, field

from rollmuxd_gateway.core.arrays import Floats, Ids, no_floats, no_ids

VOCABULARY: Final = 256
EOS: Final = 0
#: candidates for each next token
_CANDIDATES: Final = 8
_TOPIC: Final = 8
_NORMAL: Final = NormalDist()
#: parameters by which candidates are more or less likely than the model has them
_ADJUSTS: Final = frozenset({"presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"})


def text_of(ids: Sequence[int]) -> str:
    """Text of ids: ASCII, and halves of two-byte characters, so that a cut can lie within a character."""
    return _bytes_of(ids).decode("utf-8", "replace")


#: the byte of each token
_BYTES: Final = bytes(token if token < 128 else 0xC3 if token < 192 else 0x80 + token % 64 for token in range(2**16))


def _bytes_of(ids: Sequence[int]) -> bytes:
    return bytes(map(_BYTES.__getitem__, filter(None, ids)))  # all but the end


def _complete(raw: bytes) -> bytes:
    """Up to the last character that is whole."""
    end = len(raw)
    while end and raw[end - 1] >= 0x80 and (raw[end - 1] == 0xC3 or raw[end - 2 : end - 1] != b"\xc3"):
        end -= 1
    return raw[:end]


def ids_of(text: str) -> Ids:
    """Ids of a text; what is beyond ASCII becomes two tokens a character, or question marks."""
    found = array("i")
    for char in text:
        code = char.encode()
        if len(code) == 1:
            found.append(code[0] or 32)
        elif len(code) == 2 and code[0] == 0xC3:
            found.extend((128, 192 + code[1] % 64))
        else:
            found.append(63)
    return found


class Model(Struct, frozen=True, kw_only=True):
    """The weights. Another ``version`` is another function."""

    version: str = "0"
    #: tokens of a prompt and its response together: median over prompts, and spread of its logarithm
    median: float = 200.0
    sigma: float = 0.6

    def start(self) -> "State":
        """Before the first token."""
        state = State(hashlib.blake2b(self.version.encode(), digest_size=48).digest())
        state.mean = self.median
        return state

    def roll(self, state: "State", token: int) -> None:
        """Take one token in."""
        state.digest = hashlib.blake2b(state.digest[:8] + token.to_bytes(2, "big"), digest_size=48).digest()
        state.length += 1
        if state.length == _TOPIC:
            share = (int.from_bytes(state.digest[40:44], "big") + 0.5) / 2**32
            state.mean = self.median * math.exp(self.sigma * _NORMAL.inv_cdf(share))

    @staticmethod
    def logits(state: "State") -> tuple[list[int], list[float], list[float]]:
        """Candidates, each once, their logits and log probabilities. Where the response is over, the end alone."""
        hazard = 2 * state.length / state.mean**2
        if int.from_bytes(state.digest[44:48], "big") < hazard * 2**32:
            return [EOS], [0.0], [0.0]
        return _candidates(state.digest)


@lru_cache(2**14)  # a response is often generated again, to compare
def _candidates(digest: bytes) -> tuple[list[int], list[float], list[float]]:
    tokens: list[int] = []
    values: list[float] = []
    for at in range(8, 8 + 2 * _CANDIDATES, 2):
        token = digest[at] or 1
        if token not in tokens:
            tokens.append(token)
            values.append(digest[at + 1] / 64)
    high = max(values)
    total = math.log(sum(math.exp(value - high) for value in values)) + high
    return tokens, values, [value - total for value in values]


class State(Struct):
    """A prefix, as the model sees it."""

    digest: bytes
    length: int = 0
    mean: float = 0.0


class Job(Struct):
    """A request within the engine."""

    id: str
    prompt: Ids
    params: dict[str, Any]
    state: State
    out: Ids = field(default_factory=no_ids)
    logprobs: Floats = field(default_factory=no_floats)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    counts: dict[int, int] = field(default_factory=dict)
    rng: random.Random | None = None
    finish: str = ""
    stop_reason: Any = None
    #: told so far
    sent: int = 0
    text_sent: int = 0
    told: Callable[["Job"], None] | None = None
    interval: int = 1
    fault: str = ""

    @property
    def limit(self) -> int:
        """Tokens at most."""
        return int(self.params.get("max_tokens") or 16)

    def text(self, *, flushed: bool = False) -> str:
        """Text of the output, cut at the stop string.

        vLLM never shows the end of an output that lies within a character; SGLang does so when the response is over
        (``flushed``).
        """
        ended_by_token = isinstance(self.stop_reason, int) and not self.params.get("include_stop_str_in_output")
        raw = _bytes_of(self.out[:-1] if ended_by_token else self.out)
        text = (raw if flushed and self.finish else _complete(raw)).decode("utf-8", "replace")
        stop = self.params.get("stop") or ()
        if stop and not self.finish:  # what a stop string may begin with is held back
            return text[: max(0, len(text) + 1 - max(map(len, (stop,) if isinstance(stop, str) else stop)))]
        if isinstance(self.stop_reason, str) and not self.params.get("include_stop_str_in_output"):
            text = text[: text.find(self.stop_reason)]
        return text


class Engine:
    """One engine, step by step. Its owner calls :meth:`step` and waits :attr:`step_s` between."""

    def __init__(
        self,
        model: Model | None = None,
        *,
        seed: int = 0,
        max_num_seqs: int = 256,
        kv_tokens: int = 1_000_000,
        positional_seed: bool = False,
        output_penalties: bool = False,
        poison: Sequence[int] = (),
    ) -> None:
        self.model = model or Model()
        self.max_num_seqs, self.kv_tokens = max_num_seqs, kv_tokens
        self.positional_seed = positional_seed
        #: SGLang counts repetitions in the output only
        self.output_penalties = output_penalties
        #: a prompt or an output that has these ids in a row kills the engine
        self.poison = array("i", poison)
        self.waiting: dict[str, Job] = {}
        self.running: dict[str, Job] = {}
        self.paused = False
        self.preempted = 0
        self.tokens = 0
        self._rng = random.Random(seed)

    def submit(
        self,
        name: str,
        prompt: Ids,
        params: dict[str, Any],
        told: Callable[[Job], None] | None = None,
    ) -> Job:
        """Take a request in. ``told`` is called when there is news of it."""
        job = Job(name, prompt, params, self.model.start(), told=told)
        job.interval = max(1, int(params.get("stream_interval") or 1))
        seed = params.get("seed")
        if seed is not None and not self.positional_seed:
            job.rng = random.Random(seed)
        self.waiting[name] = job
        return job

    def abort(self, name: str | None = None) -> list[Job]:
        """End one request, or all, with what there is."""
        found = [job for job in [*self.running.values(), *self.waiting.values()] if name is None or job.id == name]
        for job in found:
            self._end(job, "abort")
        return found

    def step(self) -> bool:
        """Generate one token of each live request; returns whether there was anything to do."""
        if self.paused:
            return False
        self._admit()
        if not self.running:
            return False
        for job in list(self.running.values()):
            self._generate(job)
        self._preempt()
        return True

    @property
    def kv_used(self) -> int:
        """Tokens in the KV cache."""
        return sum(job.state.length for job in self.running.values())

    def dies_of(self, prompt: Ids) -> bool:
        """Whether this prompt is the end of the engine."""
        size = len(self.poison)
        return bool(size) and any(prompt[at : at + size] == self.poison for at in range(len(prompt) - size + 1))

    def _admit(self) -> None:
        used = self.kv_used
        for job in list(self.waiting.values()):
            need = len(job.prompt) + len(job.out) + 1
            if len(self.running) >= self.max_num_seqs or (self.running and used + need > self.kv_tokens):
                return
            if self.dies_of(job.prompt):
                raise EngineDied(job.id)
            del self.waiting[job.id]
            self.running[job.id] = job
            used += need
            for token in job.prompt:
                self.model.roll(job.state, token)
            for token in job.out:  # it was preempted
                self.model.roll(job.state, token)

    def _preempt(self) -> None:
        while len(self.running) > 1 and self.kv_used > self.kv_tokens:
            job = self.running.pop(next(reversed(self.running)))
            job.state = self.model.start()
            self.waiting = {job.id: job, **self.waiting}
            self.preempted += 1

    def _generate(self, job: Job) -> None:
        token, logprob, top = self._sample(job)
        job.out.append(token)
        job.logprobs.append(logprob)
        if job.params.get("logprobs"):
            job.top.append(top)
        job.counts[token] = job.counts.get(token, 0) + 1
        self.model.roll(job.state, token)
        self.tokens += 1
        size = len(self.poison)
        if size and (job.prompt[-size:] + job.out[-size:])[-size:] == self.poison:
            raise EngineDied(job.id)
        self._look_for_the_end(job, token)
        new = len(job.out) - job.sent
        if not job.finish and job.told is not None and (job.sent == 0 or new >= job.interval):
            job.told(job)

    def _look_for_the_end(self, job: Job, token: int) -> None:
        params = job.params
        enough = len(job.out) >= int(params.get("min_tokens") or 0)
        stop = params.get("stop") or ()
        if enough and token in (params.get("stop_token_ids") or ()):
            job.stop_reason = token
            self._end(job, "stop")
        elif enough and token == EOS and not params.get("ignore_eos"):
            self._end(job, "stop")
        elif stop and enough:
            text = self._searched(job)
            for string in (stop,) if isinstance(stop, str) else stop:
                if string in text:
                    job.stop_reason = string
                    self._end(job, "stop")
                    return
        if not job.finish and len(job.out) >= job.limit:
            self._end(job, "length")

    @staticmethod
    def _searched(job: Job) -> str:
        """Where a stop string is looked for. vLLM takes the whole prompt for new text if it ends within a character."""
        raw = _bytes_of(job.prompt)
        within = len(_complete(raw)) < len(raw)
        raw = (raw if within else b"") + _bytes_of(job.out)
        return _complete(raw).decode("utf-8", "replace")

    def _end(self, job: Job, finish: str) -> None:
        job.finish = finish
        self.running.pop(job.id, None)
        self.waiting.pop(job.id, None)
        if job.told is not None:
            job.told(job)

    def _sample(self, job: Job) -> tuple[int, float, list[tuple[int, float]]]:
        tokens, values, logprobs = self.model.logits(job.state)
        params = job.params
        if tokens == [EOS] and (params.get("ignore_eos") or len(job.out) < int(params.get("min_tokens") or 0)):
            tokens = [1 + job.state.digest[8] % 127]
        adjusted = values if params.keys().isdisjoint(_ADJUSTS) else list(self._adjusted(job, tokens, values))
        temperature = params.get("temperature")
        temperature = 1.0 if temperature is None else float(temperature)
        if temperature == 0:
            at = adjusted.index(max(adjusted))
        else:
            at = self._draw(job, [value / temperature for value in adjusted], params)
        told = int(params.get("logprobs") or 0)
        top = sorted(zip(tokens, logprobs, strict=True), key=lambda pair: -pair[1])[:told] if told else []
        return tokens[at], logprobs[at], top

    def _adjusted(self, job: Job, tokens: list[int], values: list[float]) -> Iterator[float]:
        params = job.params
        presence = float(params.get("presence_penalty") or 0)
        frequency = float(params.get("frequency_penalty") or 0)
        repetition = float(params.get("repetition_penalty") or 1)
        bias = params.get("logit_bias") or {}
        for token, value in zip(tokens, values, strict=True):
            count = job.counts.get(token, 0)
            if repetition != 1 and (count or (not self.output_penalties and token in job.prompt)):
                value /= repetition
            yield value - presence * (count > 0) - frequency * count + float(bias.get(str(token), 0))

    def _draw(self, job: Job, values: list[float], params: dict[str, Any]) -> int:
        order = sorted(range(len(values)), key=lambda at: -values[at])
        top_k = int(params.get("top_k") or 0)
        if top_k > 0:
            order = order[:top_k]
        weights = [math.exp(values[at] - values[order[0]]) for at in order]
        nucleus = float(params.get("top_p") or 1) * sum(weights)
        share = self._uniform(job) * nucleus
        for at, weight in zip(order, weights, strict=True):
            share -= weight
            if share < 0:
                return at
        return order[0]

    def _uniform(self, job: Job) -> float:
        if job.rng is not None:
            return job.rng.random()
        seed = job.params.get("seed")
        if seed is None:
            return self._rng.random()
        digest = hashlib.blake2b(f"{seed}:{job.state.length}".encode(), digest_size=4).digest()
        return int.from_bytes(digest, "big") / 2**32


class EngineDied(Exception):
    """A poison request has ended the engine."""
