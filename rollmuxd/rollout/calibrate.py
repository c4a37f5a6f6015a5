"""Three constants of an engine, from a log of it: the share of the bandwidth, of the arithmetic, and what a step costs.

A log has one JSON object a line, as LLMServingSim's ``bench run`` writes vLLM's request metrics. It has ``input_toks``,
``output_toks``, and in seconds of one clock ``queued_ts`` and ``last_token_ts``.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from rollmuxd.rollout.engine import Engine, Replica, Request, Tuning

#: what is fitted, with its bounds and the first step of the search
FITTED: Final = {"weights": (0.3, 1.0, 0.08), "prefill": (0.1, 1.0, 0.12), "step_s": (0.0, 0.03, 2e-3)}
#: the search ends when its steps are this share of the first
_FINE: Final = 0.02
_KEYS: Final = ("input_toks", "output_toks", "queued_ts", "last_token_ts")
#: lines that are read at most; tokens of them all, and of one request (no model has a longer context)
MOST_LINES: Final = 100_000
#: requests that are needed at least: three constants are fitted to them
LEAST: Final = 20
MOST_TOKENS: Final = 200_000_000
LONGEST: Final = 1_000_000


class Served(Struct, frozen=True):
    """One request as it was served: tokens, and seconds from the first request's arrival."""

    prompt: int
    length: int
    arrives: float
    ends: float


class BadLog(ValueError):
    """A log that cannot be read: names file, line and key."""


class Case(Struct, frozen=True):
    """A log, and the engine that wrote it (with any tuning)."""

    engine: Engine
    served: Sequence[Served]


class Fit(Struct, frozen=True):
    """How a model of an engine compares with its log. Shares: 0.02 is 2 %, positive where the model is slower."""

    makespan: float
    #: mean time per generated token after the first was asked for, and its 99th percentile over requests
    per_token: float
    p99: float
    #: mean over requests of the absolute error of the latency
    latency: float
    preemptions: int


def parse(lines: Iterable[str | bytes], file: str) -> list[Served]:
    """The requests of a log, in order of arrival.

    Raises:
        BadLog: a line is no such object, a key is missing or not what it should be, or there are too few lines.
    """
    rows: list[tuple[int, int, float, float]] = []
    tokens = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if number > MOST_LINES:
            raise BadLog(f"{file}, line {number}: at most {MOST_LINES} requests are read; pass a part of the log")
        try:
            told = msgspec.json.decode(line)
        except msgspec.DecodeError as error:
            raise BadLog(f"{file}, line {number}: no JSON object ({error})") from None
        if not isinstance(told, dict):
            raise BadLog(f"{file}, line {number}: expected a JSON object with {', '.join(_KEYS)}")
        prompt, length = (_number(told, key, file, number, least=1) for key in _KEYS[:2])
        arrives, ends = (_number(told, key, file, number) for key in _KEYS[2:])
        if ends <= arrives:
            raise BadLog(f"{file}, line {number}, key 'last_token_ts': it is before queued_ts")
        if max(prompt, length) > LONGEST:
            key = _KEYS[0] if prompt > LONGEST else _KEYS[1]
            raise BadLog(f"{file}, line {number}, key {key!r}: at most {LONGEST:,} tokens of a request are read")
        rows.append((int(prompt), int(length), arrives, ends))
        if (tokens := tokens + int(prompt) + int(length)) > MOST_TOKENS:
            raise BadLog(f"{file}, line {number}: at most {MOST_TOKENS:,} tokens are read; pass a part of the log")
    if not rows:
        raise BadLog(f"{file}: it has no request; expected one JSON object a line with {', '.join(_KEYS)}")
    if len(rows) < LEAST:
        raise BadLog(f"{file}: it has {len(rows)} requests; at least {LEAST} are needed to fit three constants")
    first = min(arrives for _, _, arrives, _ in rows)
    served = [Served(prompt, length, arrives - first, ends - first) for prompt, length, arrives, ends in rows]
    return sorted(served, key=lambda it: it.arrives)


def _number(told: dict[str, Any], key: str, file: str, line: int, least: float = -math.inf) -> float:
    value = told.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < least:
        wanted = f"a whole number of at least {least:g}" if least > -math.inf else "a finite number of seconds"
        there = "it is missing" if key not in told else f"{str(value)[:60]} is there"
        raise BadLog(f"{file}, line {line}, key {key!r}: {there}, expected {wanted}")
    return float(value)


def retuned(engine: Engine, tuning: Tuning) -> Engine:
    """The same engine with other constants."""
    return Engine(
        engine.gpu,
        engine.model,
        engine.tp,
        tuning,
        max_seqs=engine.max_seqs,
        budget=engine.budget,
        kv_tokens=engine.kv_tokens,
        slower=engine.slower,
    )


def compare(case: Case, tuning: Tuning | None = None) -> Fit:
    """The model against the log; with its own constants, or with these."""
    replica = Replica(case.engine if tuning is None else retuned(case.engine, tuning))
    replica.submit(Request(i, it.prompt, it.length, it.arrives) for i, it in enumerate(case.served))
    ends = {name: when for when, name in replica.advance()}
    mine = [ends[i] - it.arrives for i, it in enumerate(case.served)]
    real = [it.ends - it.arrives for it in case.served]
    tokens = [it.length for it in case.served]
    return Fit(
        max(ends.values()) / max(it.ends for it in case.served) - 1,
        sum(map(_over, mine, tokens)) / sum(map(_over, real, tokens)) - 1,
        sorted(mine)[int(0.99 * (len(mine) - 1))] / sorted(real)[int(0.99 * (len(real) - 1))] - 1,
        sum(abs(a / b - 1) for a, b in zip(mine, real, strict=True)) / len(real),
        replica.preemptions,
    )


def _over(took: float, tokens: int) -> float:
    return took / tokens


def fit(cases: Sequence[Case], start: Tuning | None = None) -> Tuning:
    """The constants of :data:`FITTED` that make the mean error of latencies over these logs smallest.

    A pattern search from ``start``: each constant is tried up and down, with smaller steps when nothing helps.
    """
    best = start or Tuning()
    least = _error(cases, best)
    known = {best: least}  # a third of what is tried was tried before
    scale = 1.0
    while scale > _FINE:
        tried = [
            replace(best, **{name: round(min(high, max(low, getattr(best, name) + sign * step * scale)), 9)})
            for name, (low, high, step) in FITTED.items()
            for sign in (1, -1)
        ]
        known |= {it: _error(cases, it) for it in tried if it not in known}
        nearest = min(tried, key=known.__getitem__)
        if known[nearest] < least:
            best, least = nearest, known[nearest]
        else:
            scale /= 2
    return best


def at_bounds(tuning: Tuning) -> dict[str, float]:
    """Fitted constants that ended at a bound of the search: it would have gone further. A step may cost nothing."""
    return {
        name: value
        for name, (low, high, _) in FITTED.items()
        if (value := getattr(tuning, name)) >= high or 0 < low >= value
    }


def _error(cases: Sequence[Case], tuning: Tuning) -> float:
    return sum(compare(case, tuning).latency for case in cases) / len(cases)
