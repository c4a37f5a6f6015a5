"""Which degree of tensor parallelism on each node, and which request on which replica (OrchestrRL, arXiv 2601.01209).

The objective is the time of the slowest replica, with what the change costs. Lengths are scenarios
(:func:`rollmuxd.rollout.lengths.sample`), and a plan's value is the mean over them of the slowest replica.

Measurements (``docs/results.md``) show two things. Spread the samples of a prompt over the replicas, and choose one
degree for a step by the lengths of the steps before (:func:`start`). These two give nearly all of the gain. A change
within a step (:func:`improve`) adds little, and hurts where the KV cache is short: it is accepted behind a gate.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from rollmuxd.rollout.engine import Engine, estimate
from rollmuxd.rollout.lengths import Prior, fresh, sample

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
#: the degree on each node
Layout: TypeAlias = tuple[int, ...]
#: one replica's arithmetic, by degree
Engines: TypeAlias = Mapping[int, Engine]

#: shares of the longest requests that are tried on the replicas of the higher degree
SHARES: Final = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5)
#: the higher degree of a mixed layout is at least this
WIDE: Final = 4


class Gate(Struct, frozen=True):
    """When a change within a step is accepted."""

    #: seconds of a change: sleep, wake and weights (Frontier's figure)
    switch_s: float = 4.52
    #: the gain is at least this share, and more than so many times what the change costs
    least_share: float = 0.08
    hysteresis: float = 1.0
    #: seconds between two changes, and how many in a step
    dwell_s: float = 15.0
    most: int = 2
    #: share of the KV cache that is free, in the layout as it is
    free_kv: float = 0.2
    #: no change when the rest of the step is shorter than so many changes
    least_left: float = 3.0


class Plan(NamedTuple):
    """A layout, which replica gets which request, and the expected seconds until the last is finished."""

    layout: Layout
    #: of each request, its place in :func:`replicas`
    at: Ints
    value_s: float
    #: seconds that the change to it takes (a switch, and the prefill of contexts that move), and what it wins beside
    change_s: float = 0.0
    gain_s: float = 0.0


def replicas(layout: Layout, gpus: int = 8) -> list[int]:
    """The degree of each replica, node by node."""
    return [degree for degree in layout for _ in range(gpus // degree)]


def uniform(nodes: int, engines: Engines) -> list[Layout]:
    """One degree on all nodes."""
    return [(degree,) * nodes for degree in engines]


def candidates(nodes: int, engines: Engines) -> list[Layout]:
    """The uniform layouts, and those with a higher degree on one node or on half of them: 16 at most."""
    found = uniform(nodes, engines)
    for low in engines:
        for high in engines:
            if high > low and high >= WIDE:
                found += [(high,) * few + (low,) * (nodes - few) for few in {1, nodes // 2} if 0 < few < nodes]
    return list(dict.fromkeys(found))


def dealt(count: int, to: int) -> Ints:
    """To which of ``to`` replicas each of ``count`` sorted requests goes: there and back, so that sums are alike."""
    turn = np.arange(count) % (2 * to)
    found: Ints = np.where(turn < to, turn, 2 * to - 1 - turn)
    return found


def spread(groups: Ints, to: int) -> Ints:
    """To which replica each request goes before anything is known of its length: round robin."""
    found: Ints = np.arange(len(groups)) % to
    return found


def contiguous(groups: Ints, to: int) -> Ints:
    """The same, with the samples of one prompt on one replica: equal shares of the batch in its order."""
    found: Ints = np.arange(len(groups)) * to // max(1, len(groups))
    return found


def finishes(
    layout: Layout,
    at: Ints,
    remaining: Floats,
    context: Floats,
    engines: Engines,
    gpus: int = 8,
    slower: Sequence[float] = (),
) -> Floats:
    """Seconds until each replica has finished its last response: ``[scenarios, replicas]``.

    ``remaining``: ``[scenarios, requests]``; ``context``: ``[requests]``; ``slower``: a factor for each node, and where
    it is empty all nodes are alike.
    """
    degrees = np.asarray(replicas(layout, gpus))
    factor = np.repeat(np.asarray(slower), [gpus // degree for degree in layout]) if slower else np.ones(len(degrees))
    found: Floats = np.zeros((len(remaining), len(degrees)))
    order = np.argsort(at, kind="stable")
    counts = np.bincount(at, minlength=len(degrees))
    starts = np.concatenate(([0], np.cumsum(counts)))
    for degree, engine in engines.items():
        mine = np.flatnonzero((degrees == degree) & (counts > 0))
        if not len(mine):
            continue
        # padded to one rectangle, [replicas, requests]: a request with nothing left changes no estimate
        most = int(counts[mine].max())
        places = np.full((len(mine), most), -1)
        for row, place in enumerate(mine):
            places[row, : counts[place]] = order[starts[place] : starts[place + 1]]
        real = places >= 0
        left = np.where(real[None], remaining[:, places], 0.0)
        held = np.where(real, context[places], 0.0)
        found[:, mine] = estimate(engine, left, held[None]) * factor[mine]
    return found


def value(
    layout: Layout,
    at: Ints,
    remaining: Floats,
    context: Floats,
    engines: Engines,
    gpus: int = 8,
    slower: Sequence[float] = (),
) -> Floats:
    """Seconds of the slowest replica in each scenario; the arguments are those of :func:`finishes`."""
    found: Floats = finishes(layout, at, remaining, context, engines, gpus, slower).max(axis=1)
    return found


def assign(
    layout: Layout, remaining: Floats, context: Floats, engines: Engines, gpus: int = 8, slower: Sequence[float] = ()
) -> Plan:
    """The best of a few ways to deal the requests to a layout's replicas."""
    mean = remaining.mean(axis=0)
    longest_first = np.argsort(-mean, kind="stable")
    degrees = np.asarray(replicas(layout, gpus))
    wide, narrow = np.flatnonzero(degrees == degrees.max()), np.flatnonzero(degrees < degrees.max())
    count = len(mean)
    best: Plan | None = None
    for share in SHARES if len(narrow) else (1.0,):
        first = round(share * count)
        at = np.empty(count, np.int64)
        at[longest_first[:first]] = wide[dealt(first, len(wide))]
        if len(narrow):
            at[longest_first[first:]] = narrow[dealt(count - first, len(narrow))]
        took = float(value(layout, at, remaining, context, engines, gpus, slower).mean())
        if best is None or took < best.value_s:
            best = Plan(layout, at, took)
    assert best is not None
    return best


def start(
    prior: Prior,
    prompts: int,
    samples: int,
    prompt_tokens: int,
    nodes: int,
    engines: Engines,
    rng: np.random.Generator,
    gpus: int = 8,
    scenarios: int = 16,
) -> Plan:
    """The degree for a step that has not begun, from the lengths of the steps before, with the samples spread.

    A change here costs nothing beyond a wake-up, since new weights are pushed to the engines anyway.
    """
    begun = fresh(prior, prompts, samples)
    lengths = sample(prior, begun, scenarios, rng)
    context = np.full(lengths.shape[1], float(prompt_tokens))
    best: Plan | None = None
    for layout in uniform(nodes, engines):
        at = spread(begun.group, len(replicas(layout, gpus)))
        took = float(value(layout, at, lengths, context, engines, gpus).mean())
        # the prefill of all prompts is no small part of a step of short responses
        took += float(prompt_tokens * len(at) / len(replicas(layout, gpus))) * engines[layout[0]].prefill_s(1)
        if best is None or took < best.value_s:
            best = Plan(layout, at, took)
    assert best is not None, "no degree fits"
    return best


def improve(
    current: Plan,
    remaining: Floats,
    context: Floats,
    engines: Engines,
    gate: Gate | None = None,
    gpus: int = 8,
    slower: Sequence[float] = (),
    *,
    since_s: float = float("inf"),
    changes: int = 0,
) -> Plan | None:
    """A better layout within a step, or None: the gate keeps the current one.

    ``remaining``: tokens still to come, ``[scenarios, requests]``. ``since_s``: seconds since the last change.
    """
    gate = gate or Gate()
    if since_s < gate.dwell_s or changes >= gate.most or not remaining.shape[1]:
        return None
    if free_kv(current, context, engines, gpus) < gate.free_kv:
        return None
    now = float(value(current.layout, current.at, remaining, context, engines, gpus, slower).mean())
    if now < gate.least_left * gate.switch_s:
        return None
    best: Plan | None = None
    for layout in candidates(len(current.layout), engines):
        if layout == current.layout:
            continue  # requests alone are moved one by one, by `rebalance`
        made = assign(layout, remaining, context, engines, gpus, slower)
        cost = gate.switch_s + _prefill_s(made, context, engines, gpus)
        if best is None or made.value_s + cost < best.value_s + best.change_s:
            best = made._replace(change_s=cost, gain_s=now - made.value_s)
    if best is None or best.value_s + gate.hysteresis * best.change_s >= now:
        return None
    return best if best.value_s + best.change_s < (1 - gate.least_share) * now else None


def free_kv(plan: Plan, context: Floats, engines: Engines, gpus: int = 8) -> float:
    """The share of the KV cache that is free on the fullest replica."""
    degrees = replicas(plan.layout, gpus)
    held = np.bincount(plan.at, weights=context, minlength=len(degrees))
    room = np.array([engines[degree].kv_tokens for degree in degrees], dtype=np.float64)
    return float(1 - (held / room).max())


def _prefill_s(plan: Plan, context: Floats, engines: Engines, gpus: int) -> float:
    degrees = replicas(plan.layout, gpus)
    held = np.bincount(plan.at, weights=context, minlength=len(degrees))
    return max(engines[degree].prefill_s(float(tokens)) for degree, tokens in zip(degrees, held, strict=True))
