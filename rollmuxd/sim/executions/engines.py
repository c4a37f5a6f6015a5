"""Fidelity ``engine``: rollouts are requests in replicas, played by :mod:`rollmuxd.rollout.engine`.

A rollout that nothing disturbs is a function of its lengths and of its GPUs. So is one that gives some of them back
after a certain time. Each is computed once and kept. Jobs without an inside, and all other phases, go by durations.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from rollmuxd.core.ids import GpuId, Millis
from rollmuxd.rollout.engine import Engine, Replica, Request, Tuning
from rollmuxd.rollout.hardware import gpu
from rollmuxd.rollout.models import model
from rollmuxd.sim.execution import Begun, Durations, Execution
from rollmuxd.sim.inside import Inside
from rollmuxd.sim.inventory import Inventory
from rollmuxd.sim.kernel import Kernel
from rollmuxd.sim.workload import SimJob

#: share of the responses that are finished when a tail begins (RollMux)
DONE: Final = 0.8
#: milliseconds to take one request off its replica: vLLM was idle 44 ms after five long ones were aborted (measured)
DRAIN_MS: Final = 9

#: GPUs that it runs on, as places in the order of those that the phase began on, from a time on (ms since it began)
Shape = tuple[tuple[Millis, tuple[int, ...]], ...]


class Course(NamedTuple):
    """How a rollout goes: milliseconds since it began."""

    ends: Millis
    #: when four of five responses are finished
    tail: Millis
    #: requests that its last change moved
    moved: int


@lru_cache(maxsize=65_536)
def course(inside: Inside, batch: int, shape: Shape) -> Course:
    """A rollout on these GPUs. Requests are dealt in turn; those of a replica that goes move to the emptiest ones."""
    engine = _engine(inside.model, inside.gpu, inside.tp, inside.step_ms)
    first = shape[0][1]
    replicas = {places: Replica(engine) for places in _replicas(first, inside.tp)}
    requests = [Request(i, inside.prompt_tokens, n) for i, n in enumerate(inside.batches[batch])]
    _deal(requests, list(replicas.values()), 0.0)
    ends: list[float] = []
    moved = 0
    for at, places in shape[1:]:
        now = max(0.0, (at - inside.fixed_ms) / 1000)
        ends += [when for replica in replicas.values() for when, _ in replica.advance(now)]
        kept = {its: replica for its, replica in replicas.items() if set(its) <= set(places)}
        gone = [replica for its, replica in replicas.items() if its not in kept]
        kept |= {its: Replica(engine, now) for its in _replicas(places, inside.tp) if its not in kept}
        left = [it for replica in gone for it in replica.take(it.id for it in replica.requests())]
        moved = len(left)
        if len(kept) > len(replicas):  # it has more GPUs: their replicas take a fair share, of the shortest contexts
            for replica in list(replicas.values()):
                held = sorted(replica.requests(), key=lambda it: it.made)
                left += replica.take(it.id for it in held[: len(held) - len(held) * len(replicas) // len(kept)])
        replicas = kept
        _deal(sorted(left, key=lambda it: -it.made), list(replicas.values()), now)
    ends += [when for replica in replicas.values() for when, _ in replica.advance()]
    ends.sort()
    tail = ends[math.ceil(DONE * len(ends)) - 1]
    return Course(inside.fixed_ms + math.ceil(ends[-1] * 1000), inside.fixed_ms + math.ceil(tail * 1000), moved)


@lru_cache(maxsize=4096)
def decoding(inside: Inside, batch: int, gpus: int, slices: int) -> tuple[tuple[float, int], ...]:
    """An undisturbed rollout in so many slices of equal time: seconds of each, and the tokens that it decodes."""
    places = tuple(range(gpus))
    whole = (course(inside, batch, ((0, places),)).ends - inside.fixed_ms) / 1000
    engine = _engine(inside.model, inside.gpu, inside.tp, inside.step_ms)
    replicas = [Replica(engine) for _ in _replicas(places, inside.tp)]
    _deal([Request(i, inside.prompt_tokens, n) for i, n in enumerate(inside.batches[batch])], replicas, 0.0)
    found, before = [], 0
    for number in range(1, slices + 1):
        for replica in replicas:
            replica.advance(whole * number / slices if number < slices else math.inf)
        generated = sum(replica.generated for replica in replicas)
        found.append((whole / slices, generated - before))
        before = generated
    return tuple(found)


@lru_cache(maxsize=64)
def _engine(name: str, on: str, tp: int, step_ms: float) -> Engine:
    return Engine(gpu(on), model(name), tp, Tuning(step_s=step_ms / 1000))


def _replicas(places: Sequence[int], tp: int) -> list[tuple[int, ...]]:
    """The GPUs of each replica; GPUs that make no whole replica idle, unless there is no other."""
    found = [tuple(places[i : i + tp]) for i in range(0, len(places) - tp + 1, tp)]
    return found or [tuple(places)]


def _deal(requests: Sequence[Request], replicas: Sequence[Replica], now: float) -> None:
    """Each to the replica with the fewest."""
    held = [len(replica.requests()) for replica in replicas]
    for request in requests:
        place = held.index(min(held))
        held[place] += 1
        request.arrives = now
        replicas[place].submit([request])


class Rollout(Execution):
    """One rollout under way."""

    def __init__(self, begun: Begun, inside: Inside, now: Millis) -> None:
        self._inside, self._began = inside, now
        self._batch = begun.step % len(inside.batches)
        self._order = {name: place for place, name in enumerate(begun.gpus)}
        self._shape: Shape = ((0, tuple(range(len(begun.gpus)))),)
        self._may_shrink = 0 < begun.phase.min_gpus < len(begun.gpus)
        self.solo_ms = course(inside, self._batch, ((0, tuple(range(_wanted(begun)))),)).ends
        self._goes(self._shape, course(inside, self._batch, self._shape))

    def _goes(self, shape: Shape, found: Course) -> None:
        """It ends with its last response; its tail begins when four of five are finished."""
        self._shape, self.ends_ms = shape, self._began + found.ends
        self.tail_ms = self._began + found.tail if self._may_shrink else None

    def move_ms(self, keep: tuple[GpuId, ...], now: Millis) -> Millis:
        """What it takes to empty the replicas outside ``keep``."""
        return DRAIN_MS * max(1, self._then(keep, now)[1].moved)

    def shrink(self, keep: tuple[GpuId, ...], now: Millis) -> None:
        """Its unfinished responses continue on these GPUs, after their contexts are computed there."""
        self._goes(*self._then(keep, now))

    def grow(self, gpus: tuple[GpuId, ...], now: Millis) -> None:
        """Replicas on the GPUs that it has back take a part of the unfinished responses."""
        self._goes(*self._then(gpus, now))

    def _then(self, gpus: tuple[GpuId, ...], now: Millis) -> tuple[Shape, Course]:
        for name in gpus:
            self._order.setdefault(name, len(self._order))
        shape = (*self._shape, (now - self._began, tuple(sorted(self._order[name] for name in gpus))))
        return shape, course(self._inside, self._batch, shape)


def _wanted(begun: Begun) -> int:
    """The GPUs that its job wants, also where it is placed on more nodes."""
    wanted = sum(want.nodes for want in begun.job.spec.wants if want.pool in begun.phase.pools)
    return begun.whole * min(wanted, begun.nodes) // begun.nodes


class Engines(Durations):
    """Rollouts by their inside, all else by durations."""

    def attach(self, kernel: Kernel, inventory: Inventory, jobs: Sequence[SimJob]) -> None:
        """The clock that phases begin by, and the pool of each GPU."""
        super().attach(kernel, inventory, jobs)
        self._clock = kernel
        self._pool = {gpu: pool for gpu, (pool, _) in inventory.share_of.items()}

    def begin(self, begun: Begun, changed: Callable[[], None]) -> Execution:
        """The first phase of a cycle is the rollout."""
        inside = begun.job.inside
        if inside is None or begun.at != 0 or not begun.gpus:
            return super().begin(begun, changed)
        return Rollout(begun, inside, self._clock.now)
