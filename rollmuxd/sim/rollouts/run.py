"""One step of one job: its requests on its replicas, under one policy.

Time is float seconds from the beginning of the step. A policy that moves requests looks once a second, one that changes
the degree within the step every ten seconds. What is cut continues elsewhere after its context is computed there again.
No policy but ``clairvoyant`` knows lengths or speeds. How much slower a node is it sees: by tokens per second, against
what the model of its engine says of the same load.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace
from numpy.typing import NDArray

from rollmuxd.rollout.engine import Engine, Replica, Request, Tuning, degrees
from rollmuxd.rollout.hardware import Gpu, gpu
from rollmuxd.rollout.lengths import Prior, Progress, sample
from rollmuxd.rollout.models import Model, model
from rollmuxd.rollout.plan import (
    Gate,
    Layout,
    Plan,
    assign,
    contiguous,
    finishes,
    improve,
    replicas,
    spread,
    start,
    uniform,
)
from rollmuxd.rollout.rebalance import Bucket, Limits, Load, Open, pick

Floats = NDArray[np.float64]
#: seconds between two looks for a move, and for a change of the layout
TICK_S: Final = 1.0
PERIOD_S: Final = 10.0
#: what was seen of a node's speed one look before the last counts so much less
FADES: Final = 0.8
#: scenarios of lengths
SCENARIOS: Final = 16


class Setting(Struct, frozen=True):
    """One job's rollout: what generates, on how many nodes, and how many requests."""

    model: str = "qwen2.5-14b"
    gpu: str = "h800"
    nodes: int = 5
    gpus_per_node: int = 8
    prompts: int = 64
    samples: int = 16
    prompt_tokens: int = 200
    tuning: Tuning = Tuning()
    max_seqs: int = 256
    #: step times of each node's engines over those of the model; empty: all are alike
    slower: tuple[float, ...] = ()
    gate: Gate = Gate()
    limits: Limits = Limits()

    def engines(self, longest: int) -> dict[int, Engine]:
        """One replica's arithmetic for each degree at which responses of so many tokens fit.

        Raises:
            ValueError: there is none, or a name is not known.
        """
        what, on = model(self.model), gpu(self.gpu)
        fit = degrees(on, what, longest + self.prompt_tokens, self.gpus_per_node, self.tuning)
        if not fit:
            raise ValueError(
                f"{what.name} with responses of {longest} tokens fits on no number of {on.name} in a node of "
                f"{self.gpus_per_node}; take another GPU or model"
            )
        return {degree: self.engine(on, what, degree) for degree in fit}

    def engine(self, on: Gpu, what: Model, degree: int, slower: float = 1.0) -> Engine:
        """One replica's arithmetic."""
        return Engine(on, what, degree, self.tuning, max_seqs=self.max_seqs, slower=slower)


class Policy(Struct, frozen=True):
    """How a step is begun, and what may change within it."""

    name: str
    summary: str
    #: its degree; 0: the best by the lengths of the steps before
    degree: int = 0
    #: the samples of a prompt on one replica
    contiguous: bool = False
    #: requests are moved; the layout may change
    moves: bool = False
    changes: bool = False
    #: it knows the lengths and how slow each node is
    clairvoyant: bool = False


class Span(Struct, frozen=True):
    """One request on one replica, for the trace: seconds and tokens."""

    replica: int
    request: int
    begins: float
    ends: float
    tokens: int


class Switch(Struct, frozen=True):
    """One change of the layout within a step: when, to what, and the seconds it was to win and to cost."""

    at: float
    layout: Layout
    gain_s: float
    cost_s: float


class Result(Struct):
    """What came of one step."""

    seconds: float
    layout: Layout
    #: when each response was finished, in the order of the requests
    ends: list[float] = field(default_factory=list)
    moves: int = 0
    switches: list[Switch] = field(default_factory=list)
    preemptions: int = 0
    tokens: int = 0
    #: of each replica that ever ran: its degree, its node and when it began
    replicas: list[tuple[int, int, float]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    #: seconds of the same step without changes of the layout, where it was played, too; else 0
    unchanged_s: float = 0.0


def play(
    setting: Setting, policy: Policy, lengths: Sequence[Sequence[int]], prior: Prior, seed: int = 0
) -> Result:  # fmt: skip
    """Return what came of one step under a policy.

    ``clairvoyant`` plays several, and has the fastest. It tries each degree with samples spread and with requests
    placed by their lengths. From the best of these it tries a policy's moves, and its moves and changes.
    """
    if not policy.clairvoyant:
        return Step(setting, policy, lengths, prior, seed).run()

    def tried(plan: Plan, **may: bool) -> Result:
        return Step(setting, replace(policy, **may), lengths, prior, seed, plan).run()

    known = Step(setting, policy, lengths, prior, seed)
    starts = [(tried(plan, moves=False, changes=False), plan) for plan in known.starts()]
    still, best = min(starts, key=lambda it: it[0].seconds)
    return min((still, tried(best, changes=False), tried(best)), key=lambda it: it.seconds)


class Step:
    """One step under way. ``lengths``: by prompt; ``seed``: of the scenarios; ``plan``: its start, if it is given."""

    def __init__(
        self, setting: Setting, policy: Policy, lengths: Sequence[Sequence[int]], prior: Prior, seed: int = 0,
        plan: Plan | None = None,
    ) -> None:  # fmt: skip
        self.setting, self.policy, self.prior = setting, policy, prior
        self.rng = np.random.default_rng(seed)
        self.lengths = np.array([length for group in lengths for length in group], dtype=np.int64)
        self.groups = np.repeat(np.arange(len(lengths)), [len(group) for group in lengths])
        self.engines = setting.engines(prior.limit)
        self.requests = [Request(i, setting.prompt_tokens, int(n)) for i, n in enumerate(self.lengths)]
        self.done = np.zeros(len(self.requests), dtype=bool)
        self.moved = [0] * len(self.requests)
        #: since when each request is on its replica
        self.since = [0.0] * len(self.requests)
        self.result = Result(0.0, (), [0.0] * len(self.requests))
        self.changed_at = -math.inf
        self.plan = plan or self._begin()
        self._slower = setting.slower if policy.clairvoyant else ()
        self._watched = _Watched(setting.nodes)
        self.result.layout = self.plan.layout
        self._first = 0
        self.running = self._start(self.plan.layout, 0.0)
        self.at = self.plan.at
        self._submit(range(len(self.requests)), 0.0)

    # ---- the beginning -----------------------------------------------------------------------------------------------

    def starts(self) -> Iterator[Plan]:
        """Each degree, with the samples spread and with requests placed by their lengths and the nodes' speeds."""
        setting, remaining = self.setting, self.lengths[None].astype(float)
        context = np.full(len(self.lengths), float(setting.prompt_tokens))
        for layout in uniform(setting.nodes, self.engines):
            yield Plan(layout, spread(self.groups, len(replicas(layout, setting.gpus_per_node))), 0.0)
            yield assign(layout, remaining, context, self.engines, setting.gpus_per_node, setting.slower)

    def _begin(self) -> Plan:
        setting, policy = self.setting, self.policy
        sizes = setting.nodes, self.engines
        if policy.degree:
            if policy.degree not in self.engines:
                fit = ", ".join(map(str, self.engines))
                raise ValueError(f"{policy.name}: {setting.model} fits on {fit} GPUs of type {setting.gpu}")
            layout = (policy.degree,) * setting.nodes
        else:
            samples = max(1, len(self.lengths) // max(1, int(self.groups[-1]) + 1))
            layout = start(
                self.prior, int(self.groups[-1]) + 1, samples, setting.prompt_tokens, *sizes, self.rng,
                setting.gpus_per_node, SCENARIOS,
            ).layout  # fmt: skip
        deal = contiguous if policy.contiguous else spread
        return Plan(layout, deal(self.groups, len(replicas(layout, setting.gpus_per_node))), 0.0)

    def _start(self, layout: Layout, now: float) -> list[Replica]:
        setting, made = self.setting, []
        on, what = gpu(setting.gpu), model(setting.model)
        self._first = len(self.result.replicas)
        for node, degree in enumerate(layout):
            slower = setting.slower[node] if setting.slower else 1.0
            for _ in range(setting.gpus_per_node // degree):
                engine = self.engines[degree] if slower == 1.0 else setting.engine(on, what, degree, slower)
                made.append(Replica(engine, now))
                self.result.replicas.append((degree, node, now))
        return made

    def _submit(self, places: Sequence[int] | range, now: float) -> None:
        for place in places:
            request = self.requests[place]
            request.arrives = self.since[place] = now
            self.running[int(self.at[place])].submit([request])

    # ---- the course --------------------------------------------------------------------------------------------------

    def run(self) -> Result:
        """To the end of the last response."""
        if not (self.policy.moves or self.policy.changes):
            self._advance(math.inf)
        else:
            bucket = Bucket(self.setting.limits)
            now, ticks = 0.0, 0
            while not self.done.all():
                now, ticks = now + TICK_S, ticks + 1
                self._advance(now)
                if self.done.all():
                    break
                if not self.policy.clairvoyant:
                    self._slower = self._watched.slower(self.running, self._nodes(), self.engines)
                if self.policy.changes and ticks % round(PERIOD_S / TICK_S) == 0:
                    self._change(now)
                if self.policy.moves:
                    self._move(now, bucket)
                self._watched.look(self.running)
        result = self.result
        result.seconds = max(result.ends)
        result.preemptions += sum(replica.preemptions for replica in self.running)
        result.tokens = int(self.lengths.sum())
        return result

    def _advance(self, until: float) -> None:
        for place, replica in enumerate(self.running):
            for when, name in replica.advance(until):
                self.done[name] = True
                self.result.ends[name] = when
                self._span(place, name, when)

    def _nodes(self) -> list[int]:
        """The node of each running replica."""
        return [node for _, node, _ in self.result.replicas[self._first :]]

    def _span(self, place: int, name: int, until: float) -> None:
        began = self.since[name]
        made = self.requests[name].made
        self.result.spans.append(Span(self._first + place, name, began, until, made))

    def _left(self) -> tuple[NDArray[np.int64], Floats, Floats]:
        """The unfinished requests; their remaining tokens in each scenario, and their contexts."""
        for replica in self.running:
            replica.requests()  # brings their counts up to date
        made = np.array([request.made for request in self.requests], dtype=np.int64)
        seen = Progress(self.groups, made, self.done)
        rest = seen.unfinished
        if self.policy.clairvoyant:
            total = self.lengths[rest][None].astype(float)
        else:
            total = sample(self.prior, seen, SCENARIOS, self.rng)
        return rest, total - made[rest], (made[rest] + self.setting.prompt_tokens).astype(float)

    # ---- changes within the step -------------------------------------------------------------------------------------

    def _change(self, now: float) -> None:
        rest, remaining, context = self._left()
        setting = self.setting
        current = Plan(self.plan.layout, self.at[rest], 0.0)
        better = improve(
            current, remaining, context, self.engines, setting.gate, setting.gpus_per_node, self._slower,
            since_s=now - self.changed_at, changes=len(self.result.switches),
        )  # fmt: skip
        if better is None:
            return
        for place, replica in enumerate(self.running):
            for request in replica.take(it.id for it in replica.requests()):
                self._span(place, request.id, now)
            self.result.preemptions += replica.preemptions
        self.plan, self.changed_at = better, now
        self.running = self._start(better.layout, now)
        self.at = np.zeros(len(self.requests), dtype=np.int64)
        self.at[rest] = better.at
        self._submit([int(place) for place in rest], now + setting.gate.switch_s)
        self.result.switches.append(Switch(now, better.layout, better.gain_s, better.change_s))

    def _move(self, now: float, bucket: Bucket) -> None:
        rest, remaining, context = self._left()
        setting = self.setting
        for _ in range(round(setting.limits.burst)):
            ends = finishes(
                self.plan.layout, self.at[rest], remaining, context, self.engines, setting.gpus_per_node, self._slower
            ).mean(axis=0)  # fmt: skip
            if ends.max() - ends.min() <= setting.limits.gap * ends.max():
                return
            # of all replicas the first and the last decide; the others are only dear to look at
            pair = [int(ends.argmax()), int(ends.argmin())]
            nodes = self._nodes()
            loads = [
                Load(
                    self.engines[self.running[place].engine.tp],
                    [
                        Open(int(name), int(context[i]), remaining[:, i], self.moved[int(name)])
                        for i, name in enumerate(rest)
                        if self.at[name] == place
                    ],
                    self._slower[nodes[place]] if self._slower else 1.0,
                )
                for place in pair
            ]
            move = pick(loads, setting.limits, bucket.held(now))
            if move is None:
                return
            names = [int(name) for name in move.requests]
            bucket.take(len(names))
            source, target = pair[move.source], pair[move.target]
            self.running[source].take(names)
            for name in names:
                self._span(source, name, now)
                self.at[name] = target
                self.moved[name] += 1
                self.result.moves += 1
            self._submit(names, now)


class _Seen(NamedTuple):
    """A replica's counters at one look: seconds, steps' tokens, prefilled tokens; sequences and their context."""

    now: float
    generated: int
    prefilled: int
    batch: int
    context: int


class _Watched:
    """How much slower each node is than the model of its engines says, by what it generates between two looks.

    All of it is what an engine reports: tokens generated and prefilled, sequences that run, tokens in the KV cache.
    """

    def __init__(self, nodes: int) -> None:
        self._took, self._model = np.zeros(nodes), np.zeros(nodes)
        self._before: list[_Seen] = []

    def look(self, running: Sequence[Replica]) -> None:
        """What the replicas report after moves and changes: the next look is compared with it."""
        self._before = [_Seen(it.now, it.generated, it.prefilled, *it.load) for it in running]

    def slower(
        self, running: Sequence[Replica], nodes: Sequence[int], engines: Mapping[int, Engine]
    ) -> tuple[float, ...]:
        """A factor for each node; 1 where nothing was seen of it."""
        self._took *= FADES
        self._model *= FADES
        for replica, node, before in zip(running, nodes, self._before, strict=False):
            batch, context = ((a + b) / 2 for a, b in zip(before[3:], replica.load, strict=True))
            if not (before.batch and replica.load[0]):
                continue  # it had nothing to do for a part of the time
            plain = engines[replica.engine.tp]
            steps = (replica.generated - before.generated) / batch
            self._took[node] += replica.now - before.now
            self._model[node] += steps * float(plain.step_s(batch, context))
            self._model[node] += plain.prefill_s(replica.prefilled - before.prefilled)
        seen = self._model > 0
        return tuple(np.where(seen, self._took / np.where(seen, self._model, 1.0), 1.0).tolist())
