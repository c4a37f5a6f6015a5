"""One fabric that many phases send over at the same time: which phase gets what of its links, and whose circuits are
lit.

*Input*: an :class:`Exchange` for each phase, with its traffic (bytes between hosts) and a program that says when to
send what. *Output*: when each program is over, and how many phases sent (and from rack to rack). Also how often
circuits were changed, or were wanted and not changed. Time is float seconds; nothing here knows of jobs.

The flows of an exchange make progress together, since the hosts of a collective wait for each other. Each sends in
proportion to its share, and the slowest link decides. Exchanges share links by max-min fairness
(:func:`rollmuxd.fabric.flows.together`).

Circuits are set for a phase when it begins, out of its hosts' ports that no running phase has, and stay until it ends.
After that they are there for all until another phase takes their ports. A change is made where it gains more than the
phase waits for light (:class:`~rollmuxd.fabric.circuits.Gate`); until there is light, the phase uses other paths.
"""

import math
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from heapq import heappop, heappush
from typing import TypeAlias

import numpy as np

from rollmuxd.fabric.circuits import Gate
from rollmuxd.fabric.flows import together
from rollmuxd.fabric.topology import Circuits, Demand, Fabric, by_rack
from rollmuxd.fabric.traffic import GRADIENT, WEIGHT, Training

#: seconds of computation; or None: until all is sent
Program: TypeAlias = Generator[float | None, None, None]
#: two racks, how many circuits between them, and from when to when
Lit: TypeAlias = tuple[tuple[int, int], int, float, float]


class Exchange:
    """One phase: how much of its traffic is still to be sent, in units of its demand."""

    def __init__(self, demand: Demand, over: Callable[[], None]) -> None:
        self.demand, self.over = demand, over
        self.left = 0.0
        self.circuits: Circuits = {}
        self.lit = False
        self.lit_at = 0.0
        #: bytes on each link per unit; and the units that a mean flow's byte is
        self.uses: np.ndarray = np.zeros(0)
        self.fair = 0.0
        self.waits = False
        self.program: Program = iter(())  # type: ignore[assignment]  # it begins with its own


class Network:
    """The fabric, and all exchanges that are under way."""

    def __init__(self, fabric: Fabric, gate: Gate) -> None:
        self.fabric, self.gate = fabric, gate
        self.now = 0.0
        #: circuits were changed so often; and so often not, as the change would have gained less than it takes
        self.changed = self.kept = 0
        #: phases that sent, and those of them that sent from rack to rack
        self.phases = self.between_racks = 0
        #: circuits of phases that are over
        self.history: list[Lit] = []
        self._open: list[Exchange] = []
        #: circuits that no running phase has
        self._idle: dict[tuple[int, int], int] = {}
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        #: units per second by sender; void when paths change
        self._speeds: dict[tuple[int, ...], list[float]] = {}

    def begin(
        self,
        demand: Demand,
        units: float,
        window_s: float,
        program: Callable[[Exchange], Program],
        over: Callable[[], None],
    ) -> None:
        """A phase begins now that sends ``units`` of this demand in all, and nothing for ``window_s``.

        ``over`` is called when its program has ended.
        """
        self.phases += 1
        self.between_racks += bool(by_rack(demand))
        exchange = Exchange(demand, over)
        exchange.program = program(exchange)
        self._choose(exchange, units, window_s)
        self._open.append(exchange)
        self._light()
        self._resume(exchange)

    def next_s(self) -> float:
        """When something happens next; infinite where nothing is under way."""
        return min(self._heap[0][0] if self._heap else math.inf, self._drains())

    def advance(self, until: float) -> None:
        """Everything up to this time happens; infinite: until all is over."""
        while (when := self.next_s()) <= until and when < math.inf:
            self._to(when)
            for exchange in [it for it in self._open if it.waits and not it.left]:
                exchange.waits = False
                self._resume(exchange)
            while self._heap and self._heap[0][0] <= self.now:
                heappop(self._heap)[2]()
        if until < math.inf:
            self._to(until)

    # ---- sending -----------------------------------------------------------------------------------------------------

    def _sending(self) -> tuple[list[Exchange], list[float]]:
        some = [it for it in self._open if it.left]
        key = tuple(map(id, some))
        speeds = self._speeds.get(key)
        if speeds is None:
            uses = np.array([it.uses for it in some])
            speeds = together(self.fabric.capacity, uses, [it.fair for it in some]).tolist()
            self._speeds[key] = speeds
        return some, speeds

    def _drains(self) -> float:
        some, speeds = self._sending()
        return self.now + min((it.left / speed for it, speed in zip(some, speeds, strict=True)), default=math.inf)

    def _to(self, when: float) -> None:
        some, speeds = self._sending()
        for exchange, speed in zip(some, speeds, strict=True):
            sent = speed * (when - self.now)
            # what is left of rounding is nothing
            exchange.left = exchange.left - sent if exchange.left > sent * (1 + 1e-9) + speed * 1e-9 else 0.0
        self.now = when

    def _resume(self, exchange: Exchange) -> None:
        for wait in exchange.program:
            if wait is not None:
                self._at(self.now + wait, lambda: self._resume(exchange))
                return
            if exchange.left:
                exchange.waits = True
                return
        self._open.remove(exchange)
        self._speeds.clear()  # by the identity of objects, which another one may get
        if exchange.lit:
            self._idle |= {pair: count + self._idle.get(pair, 0) for pair, count in exchange.circuits.items()}
            self.history += [(pair, n, exchange.lit_at, self.now) for pair, n in exchange.circuits.items()]
        exchange.over()

    def _at(self, when: float, what: Callable[[], None]) -> None:
        self._count += 1
        heappush(self._heap, (when, self._count, what))

    # ---- circuits ----------------------------------------------------------------------------------------------------

    def _choose(self, exchange: Exchange, units: float, window_s: float) -> None:
        """Which circuits the phase gets, and when."""
        claimed: Counter[tuple[int, int]] = Counter()
        for it in self._open:
            claimed.update(it.circuits)
        wanted = self.fabric.circuits_for(exchange.demand, claimed)
        if not wanted:
            return
        if all(self._idle.get(pair, 0) >= count for pair, count in wanted.items()):
            for pair, count in wanted.items():
                self._idle[pair] -= count
            self._idle = {pair: count for pair, count in self._idle.items() if count}
            exchange.circuits, exchange.lit, exchange.lit_at = wanted, True, self.now
            return
        racks = {rack for pair in wanted for rack in pair}
        others = {pair: count for pair, count in self._idle.items() if not racks & {*pair}}
        gain = units * (self._takes(exchange, self._idle) - self._takes(exchange, Counter(others) + Counter(wanted)))
        if not self.gate.opens(window_s, gain):
            self.kept += 1
            return
        self.changed += 1
        exchange.circuits, self._idle = wanted, others
        self._at(self.now + self.gate.t_ocs_s, lambda: self._lit(exchange))

    def _takes(self, exchange: Exchange, beside: Circuits) -> float:
        """Seconds for a unit, alone, with these circuits beside those of running phases."""
        self.fabric.light(self._circuits() + Counter(beside))
        self._route(exchange)
        return float((exchange.uses / np.asarray(self.fabric.capacity)[: len(exchange.uses)]).max())

    def _lit(self, exchange: Exchange) -> None:
        if exchange in self._open:
            exchange.lit, exchange.lit_at = True, self.now
            self._light()

    def _circuits(self) -> Counter[tuple[int, int]]:
        lit: Counter[tuple[int, int]] = Counter()
        for it in self._open:
            lit.update(it.circuits if it.lit else {})
        return lit

    def _light(self) -> None:
        """What is lit now: paths follow."""
        self._speeds.clear()
        some = self._open
        if self.fabric.switched:
            self.fabric.light(self._circuits() + Counter(self._idle))
        else:
            some = some[-1:]  # the paths of the others are as they were
        for exchange in some:
            self._route(exchange)
        links = len(self.fabric.capacity)
        for exchange in self._open:
            exchange.uses = np.pad(exchange.uses, (0, links - len(exchange.uses)))

    def _route(self, exchange: Exchange) -> None:
        flows = self.fabric.flows(exchange.demand)
        exchange.uses = np.zeros(len(self.fabric.capacity))
        for flow in flows:
            for link in flow.links:
                exchange.uses[link] += flow.size * flow.count
        exchange.fair = sum(flow.count for flow in flows) / sum(flow.size * flow.count for flow in flows)


def training(of: Training) -> Callable[[Exchange], Program]:
    """An exchange of :func:`~rollmuxd.fabric.traffic.rings` of one byte: gradients layer by layer, then new weights."""

    def program(exchange: Exchange) -> Program:
        bucket = GRADIENT * of.per_gpu / of.buckets
        for _ in range(of.optimizer_steps):
            yield of.compute_s / of.optimizer_steps - of.backward_s
            for _ in range(of.buckets):
                yield of.backward_s / of.buckets
                exchange.left += bucket
            yield None
            exchange.left += WEIGHT * of.per_gpu
            yield None

    return program


def sent_of(training: Training) -> float:
    """Bytes per GPU that :func:`training` sends in all."""
    return training.optimizer_steps * (GRADIENT + WEIGHT) * training.per_gpu


def generation(slices: Sequence[tuple[float, float]]) -> Callable[[Exchange], Program]:
    """Decoding steps, some thousand of them in so many slices: seconds of computation, then units that it waits for."""

    def program(exchange: Exchange) -> Program:
        for computes, sends in slices:
            yield computes
            exchange.left += sends
            yield None

    return program


def at_once(exchange: Exchange) -> Program:
    """One unit."""
    exchange.left += 1.0
    yield None
